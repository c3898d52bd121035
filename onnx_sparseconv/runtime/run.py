"""Running a model once on given inputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from onnx_sparseconv.errors import ModelError
from onnx_sparseconv.runtime.depth import load_structure
from onnx_sparseconv.runtime.inputs import load_inputs, model_inputs
from onnx_sparseconv.runtime.kernels import kernels_of, require_sparse_kernels_on, sparse_nodes
from onnx_sparseconv.runtime.session import Provider, make_session, translated_errors

if TYPE_CHECKING:
    import onnxruntime as ort

Array = NDArray[Any]


@dataclass(frozen=True)
class RunResult:
    """What one run gave.

    Attributes:
        outputs: array of every output, by name.
        time_us: wall-clock time of the run in microseconds, without loading; a first run, so not a benchmark.
    """

    outputs: Mapping[str, Array] = field(repr=False)
    time_us: float


def run_model(
    model: str | Path,
    inputs: str | Path | Mapping[str, Array],
    *,
    provider: Provider = "cpu",
    threads: int | None = None,
    use_library: bool = True,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> RunResult:
    """Run a model once.

    Args:
        model: the file.
        inputs: arrays by name, or an ``.npz`` file with them.
        provider: as in `make_session`.
        threads: as in `make_session`.
        use_library: as in `make_session`.
        clock: nanoseconds.

    Raises:
        ProviderError: the provider is not used, or not for the SparseConv nodes.
        SparseConvError: what `make_session` raises, or ModelError for inputs that do not fit and for a run that fails.
    """
    session = make_session(model, provider=provider, threads=threads, use_library=use_library)
    arrays = inputs if isinstance(inputs, Mapping) else load_inputs(inputs, model_inputs(session))
    started = clock()
    outputs = run_session(session, arrays, str(model))
    time_us = (clock() - started) / 1000
    if use_library and provider != "cpu":
        nodes = sparse_nodes(load_structure(model))
        require_sparse_kernels_on(provider, kernels_of(nodes, use_library=True))
    return RunResult(outputs, time_us)


def run_session(session: ort.InferenceSession, inputs: Mapping[str, Array], name: str) -> dict[str, Array]:
    """Run a session; ``name`` is the model's, for messages.

    Raises:
        ModelError: the run fails, or an output is not a tensor.
    """
    feed = {key: value.astype(object) if value.dtype.kind == "U" else value for key, value in inputs.items()}
    with translated_errors(f"{name} cannot be run"):
        values = session.run(None, feed)
    outputs = {}
    for output, value in zip(session.get_outputs(), values, strict=True):
        if not isinstance(value, (np.ndarray, np.generic)):
            raise ModelError(f"{name}: output {output.name} is a {output.type}, not a tensor")
        outputs[output.name] = np.asarray(value)
    return outputs
