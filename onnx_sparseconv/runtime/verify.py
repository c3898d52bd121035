"""Comparing a converted model with its original."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from onnx_sparseconv.errors import ModelError, UsageError, VerificationError
from onnx_sparseconv.runtime.cuda_mode import CudaMode
from onnx_sparseconv.runtime.depth import depth_of_comparison, load_structure, rounded_to_tf32
from onnx_sparseconv.runtime.inputs import (
    ModelInput,
    Shape,
    check_inputs,
    check_seed,
    in_types_of,
    load_inputs,
    make_random_inputs,
    model_inputs,
    resolve_shapes,
)
from onnx_sparseconv.runtime.kernels import (
    NO_SPARSE_NODE,
    KernelUse,
    kernels_of,
    require_sparse_kernels_on,
    sparse_nodes,
)
from onnx_sparseconv.runtime.layer_times import read_profile
from onnx_sparseconv.runtime.metrics import OutputComparison, Tolerance, compare_outputs, derive_tolerance
from onnx_sparseconv.runtime.profiling import NodePlace, nodes_elsewhere
from onnx_sparseconv.runtime.run import run_session
from onnx_sparseconv.runtime.session import Provider, check_threads, make_session, measuring_options

if TYPE_CHECKING:
    import onnxruntime as ort

Array = NDArray[Any]

# What the converted model is compared with: the original, computed where float is float.
REFERENCE_PROVIDER: Provider = "cpu"
TF32_NOTES: Mapping[bool, str] = {
    # It would round the inputs of convolutions that stayed dense to 11 bits: an error that is not the conversion's.
    False: "TF32 is switched off in the converted model (with it, float layers may run on tensor cores, "
    "which round inputs to 11 bits, as dense ones do); --tf32 verifies it as it runs by default",
    True: "TF32 is allowed in the converted model, as by default: float layers, dense and sparse ones on tensor "
    "cores, may round their inputs to 11 bits",
}


@dataclass(frozen=True)
class VerifyReport:
    """Result of comparing two models.

    Attributes:
        original, converted: the files.
        passed: every output lies within the tolerance.
        provider: ``cpu`` or ``cuda``, for the converted model.
        reference_provider: where the original ran.
        use_library: whether the converted model ran with the native library; without it, it runs as the dense model.
        tf32: whether float layers of the converted model were allowed to round their inputs to TF32.
        inputs: where the inputs came from.
        input_shapes: shape of every input.
        tolerance: the rule that was applied, and what it was derived from.
        outputs: every output.
        insensitive_outputs: names of outputs that are the same for other random inputs too, so that their agreement
            proves little; looked for where the inputs are random.
        kernels: which kernel ran each SparseConv node.
        nodes_elsewhere: nodes of the converted model that ran on the CPU although another provider was asked for.
        notes: remarks.
    """

    original: Path
    converted: Path
    passed: bool
    provider: str
    reference_provider: str
    use_library: bool
    tf32: bool
    inputs: str
    input_shapes: Mapping[str, Shape]
    tolerance: Tolerance
    outputs: tuple[OutputComparison, ...]
    insensitive_outputs: tuple[str, ...]
    kernels: tuple[KernelUse, ...]
    nodes_elsewhere: tuple[NodePlace, ...]
    notes: tuple[str, ...]


def verify(
    original: str | Path,
    converted: str | Path,
    *,
    provider: Provider = "cpu",
    config: Mapping[str, str] | None = None,
    inputs: str | Path | Mapping[str, Array] | None = None,
    shapes: Mapping[str, Shape] | None = None,
    batch: int | None = None,
    seed: int = 0,
    use_library: bool = True,
    tf32: bool = False,
    threads: int | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> VerifyReport:
    """Run both models on the same inputs and compare every output.

    The original runs in plain ONNX Runtime on the CPU, whatever the provider; the converted one with the native
    library.

    Args:
        original: the model before conversion.
        converted: the model after it.
        provider: ``cpu`` or ``cuda``, where the converted model runs.
        config: session configuration entries for the converted model, such as ``{"sparseconv.cuda_kernel": "csr"}``.
        inputs: arrays by name, or an ``.npz`` file with them; None makes random ones.
        shapes: shapes of random inputs where the model leaves them open.
        batch: batch size of random inputs where the model leaves it open; None: 1.
        seed: of the random inputs.
        use_library: False runs the converted model without the library, as any other program would see it.
        tf32: True leaves TF32 allowed in the converted model, as by the defaults of the CUDA provider, so that the
            kernels run that run in other programs; float32 then counts as rounded to 11 bits (unit roundoff 2^-11) in
            the derived tolerance. False switches TF32 off, so that only errors of the conversion show. Needs ``cuda``.
        threads: threads of a run; None leaves it to ONNX Runtime.
        rtol: replaces the relative part of the derived tolerance.
        atol: replaces its absolute part.

    Raises:
        UsageError: ``tf32`` is given for another provider, threads are too many, or a number is out of its range.
        VerificationError: the models do not have the same inputs and outputs.
        SparseConvError: a model cannot be loaded or run, or the provider is not used (see `make_session`).
    """
    if tf32 and provider != "cuda":
        raise UsageError("TF32 (--tf32) needs --provider cuda")
    check_threads(threads)
    check_seed(seed)
    first_structure, structure = load_structure(original), load_structure(converted)
    first = make_session(original, provider=REFERENCE_PROVIDER, threads=threads, use_library=False)
    wanted = model_inputs(first)
    arrays, source = _choose_inputs(wanted, inputs, shapes, batch, seed)
    with tempfile.TemporaryDirectory() as directory:
        second = make_session(
            converted,
            provider=provider,
            threads=threads,
            use_library=use_library,
            session_options=measuring_options(config),
            provider_options=CudaMode(tf32=tf32).provider_options() if provider == "cuda" else {},
            profile=None if provider == REFERENCE_PROVIDER else Path(directory) / "profile",
        )
        _require_same_interface(first, second)
        # Of models that ONNX Runtime takes: others have one line of its own.
        depth = depth_of_comparison(first_structure, structure)
        tolerance = derive_tolerance(rounded_to_tf32(depth) if tf32 else depth, rtol, atol)
        expected = run_session(first, arrays, str(original))
        actual = run_session(second, in_types_of(second, arrays), str(converted))
        elsewhere = () if provider == REFERENCE_PROVIDER else _nodes_elsewhere(second, provider)
    nodes = sparse_nodes(structure)
    kernels = kernels_of(nodes, use_library=use_library)
    if use_library:
        require_sparse_kernels_on(provider, kernels)
    widened = {name: _widened(actual[name], expected[name].dtype) for name in expected}
    outputs = tuple(compare_outputs(name, expected[name], widened[name], tolerance) for name in expected)
    insensitive = _insensitive_outputs(first, arrays, seed + 1, expected, tolerance) if inputs is None else ()
    return VerifyReport(
        original=Path(original),
        converted=Path(converted),
        passed=all(output.passed for output in outputs),
        provider=provider,
        reference_provider=REFERENCE_PROVIDER,
        use_library=use_library,
        tf32=tf32,
        inputs=source,
        input_shapes={name: tuple(array.shape) for name, array in arrays.items()},
        tolerance=tolerance,
        outputs=outputs,
        insensitive_outputs=insensitive,
        kernels=kernels,
        nodes_elsewhere=elsewhere,
        notes=_notes(outputs, insensitive, bool(nodes), provider, tf32=tf32),
    )


def _nodes_elsewhere(session: ort.InferenceSession, provider: Provider) -> tuple[NodePlace, ...]:
    """Nodes of a profiled session that ran on another provider; ends the profiling."""
    path = Path(session.end_profiling())
    return nodes_elsewhere(read_profile(path, runs=1), provider) if path.is_file() else ()


def _choose_inputs(
    wanted: tuple[ModelInput, ...],
    inputs: str | Path | Mapping[str, Array] | None,
    shapes: Mapping[str, Shape] | None,
    batch: int | None,
    seed: int,
) -> tuple[Mapping[str, Array], str]:
    """The arrays to run on, and where they came from."""
    if inputs is None:
        return make_random_inputs(wanted, resolve_shapes(wanted, shapes, batch), seed), f"random, seed {seed}"
    if isinstance(inputs, Mapping):
        check_inputs(inputs, wanted, "inputs")
        return inputs, "given"
    return load_inputs(inputs, wanted), str(inputs)


def _widened(output: Array, dtype: np.dtype[Any]) -> Array:
    """A float16 output of a model whose original gives float, as float."""
    return output.astype(dtype) if output.dtype == np.float16 and dtype == np.float32 else output


def _require_same_interface(first: ort.InferenceSession, second: ort.InferenceSession) -> None:
    """Both models must have the same inputs and outputs, in any order; float16 may stand where the first has float."""
    kinds = (
        ("inputs", model_inputs(first), model_inputs(second)),
        ("outputs", first.get_outputs(), second.get_outputs()),
    )
    for kind, left, right in kinds:
        a, b = sorted((i.name, i.type) for i in left), sorted((i.name, i.type) for i in right)
        floats = {name for name, type_ in a if type_ == "tensor(float)"}
        b = [(n, "tensor(float)" if n in floats and t == "tensor(float16)" else t) for n, t in b]
        if a != b:
            texts = [
                ", ".join(f"{name} {type_}" for name, type_ in side if (name, type_) not in other)
                for side, other in ((a, b), (b, a))
            ]
            raise VerificationError(
                f"the two models have other {kind}: only the original has {texts[0] or 'nothing'}, "
                f"only the converted one has {texts[1] or 'nothing'}. Are they the same network?"
            )


def _insensitive_outputs(
    session: ort.InferenceSession,
    inputs: Mapping[str, Array],
    seed: int,
    expected: Mapping[str, Array],
    tolerance: Tolerance,
) -> tuple[str, ...]:
    """Outputs of the original that other random inputs leave within the tolerance, as a saturated softmax does."""
    shapes = {name: tuple(array.shape) for name, array in inputs.items()}
    others = make_random_inputs(model_inputs(session), shapes, seed)
    try:
        outputs = run_session(session, others, "the original")
    except ModelError:
        # Only some inputs suit a model with, say, indices among them; the comparison stands without this check.
        return ()
    return tuple(name for name in expected if compare_outputs(name, expected[name], outputs[name], tolerance).passed)


def _notes(
    outputs: tuple[OutputComparison, ...],
    insensitive: tuple[str, ...],
    has_sparse_nodes: bool,
    provider: Provider,
    *,
    tf32: bool,
) -> tuple[str, ...]:
    notes = []
    if not has_sparse_nodes:
        notes.append(NO_SPARSE_NODE)
    if provider == "cuda":
        notes.append(f"the original ran on the CPU; {TF32_NOTES[tf32]}")
    for output in outputs:
        if output.num_elements == 0:
            notes.append(f"output {output.name} is empty for these inputs: give real ones with --inputs")
        elif output.name in insensitive:
            notes.append(
                f"output {output.name} is the same for other random inputs too (it is saturated, or constant), so that "
                "it agrees proves little: give real inputs with --inputs"
            )
    return tuple(notes)
