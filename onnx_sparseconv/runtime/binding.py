"""Runs of a session whose inputs and outputs stay in the memory of the device.

A plain ``session.run`` takes its inputs from host memory and brings the outputs back there. On a GPU these copies often
take longer than the model, so what is timed are runs on bound memory, as a service has them that keeps its data there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from onnx_sparseconv.errors import ModelError, UsageError
from onnx_sparseconv.runtime.inputs import DTYPES, Array, Shape
from onnx_sparseconv.runtime.session import Provider, import_onnxruntime, translated_errors

if TYPE_CHECKING:
    import onnxruntime as ort

# ONNX Runtime's names of the memories.
DEVICE_TYPES: dict[Provider, str] = {"cpu": "cpu", "cuda": "cuda"}

# Entries of RunOptions. Every captured CUDA graph reads and writes the memory that it was captured with, so each copy
# of the inputs has a graph of its own. 0 and -1 have a meaning of their own to ONNX Runtime.
GRAPH_ID_ENTRY = "gpu_graph_id"
FIRST_GRAPH_ID = 1
NO_SYNCHRONISATION_ENTRY = "disable_synchronize_execution_providers"


@dataclass(frozen=True)
class TensorSpec:
    """Shape and type of a tensor."""

    shape: Shape
    dtype: np.dtype[np.generic]

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def specs_of(arrays: Mapping[str, Array]) -> dict[str, TensorSpec]:
    """Shapes and types of arrays, by name."""
    return {name: TensorSpec(tuple(array.shape), array.dtype) for name, array in arrays.items()}


def copies_beyond_cache(copy_bytes: int, cache_bytes: int, most: int = 16) -> int:
    """How many copies of the inputs and outputs, used in turn, keep a cache from holding what a run will read.

    Twice the cache, because a cache keeps some of what it should have dropped; at least 2, so that one copy is never
    read right after it was written; at most ``most``.
    """
    return max(2, min(most, -(-2 * cache_bytes // max(copy_bytes, 1))))


class BoundRuns:
    """Calls run the session on inputs and outputs in device memory, several copies of them in turn.

    ::

        runs = BoundRuns(session, "the model", {"x": x}, {"y": TensorSpec((1, 8), np.dtype("float32"))}, "cuda")
        runs()  # returns when the outputs are there
        runs.outputs()["y"]

    ONNX Runtime waits for the device at the end of every run, so the wall-clock time of a call is what a caller waits
    for: Python's and ONNX Runtime's share of the call, the launches, the kernels, and the waiting; no copies.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        name: str,
        inputs: Mapping[str, Array],
        outputs: Mapping[str, TensorSpec],
        provider: Provider,
        *,
        device_index: int = 0,
        copies: int = 1,
        cuda_graph: bool = False,
    ) -> None:
        """Allocate and fill the memory; nothing runs yet.

        Args:
            session: made by `make_session` on the same provider.
            name: the model's, for messages.
            inputs: arrays in host memory, the same values for every copy.
            outputs: what each output will be. Their memory is allocated here, because a CUDA graph needs it in place.
            provider: ``cpu`` or ``cuda``.
            device_index: which GPU.
            copies: copies of inputs and outputs, at least 1.
            cuda_graph: whether the session captures CUDA graphs.

        Raises:
            UsageError: ``copies`` is less than 1.
            ModelError: the memory cannot be had, or an input or output is text.
        """
        if copies < 1:
            raise UsageError(f"there must be at least one copy of the inputs, got {copies}")
        self._session = session
        self._name = name
        self._output_names = tuple(output.name for output in session.get_outputs())
        self._next = 0
        runtime = import_onnxruntime()
        device = (DEVICE_TYPES[provider], device_index)
        with translated_errors(f"{name}: its inputs and outputs cannot be placed in {device[0]} memory"):
            # The bindings refer to the values' memory; ours are the references that keep it alive.
            self._values: list[tuple[str, ort.OrtValue]] = []
            self._bindings = [self._bind(runtime.OrtValue, inputs, outputs, device) for _ in range(copies)]
        self._options = [_run_options(runtime, cuda_graph, copy, wait=True) for copy in range(copies)]
        self._options_without_waiting = [_run_options(runtime, cuda_graph, copy, wait=False) for copy in range(copies)]

    @property
    def num_copies(self) -> int:
        """Copies of inputs and outputs."""
        return len(self._bindings)

    def __call__(self) -> None:
        """Run on the next copy and wait for the device.

        Raises:
            ModelError: the run fails.
        """
        self._run(self._options)

    def burst(self, runs: int) -> None:
        """Run several times and wait for the device once, after the last run: what keeps the device busy.

        Raises:
            ModelError: a run fails.
        """
        for _ in range(runs - 1):
            self._run(self._options_without_waiting)
        self._run(self._options)

    def update(self, inputs: Mapping[str, Array]) -> None:
        """Write other values, of the same shapes and types, to the place of the old ones, in every copy.

        Raises:
            ModelError: they do not fit.
        """
        for name, value in self._values:
            if name in inputs:
                array = np.ascontiguousarray(inputs[name])
                # ONNX Runtime would copy as many bytes as it wants from an array of any size and type.
                if list(array.shape) != list(value.shape()) or array.dtype != DTYPES[value.data_type()]:
                    raise ModelError(
                        f"{self._name}: input {name} is bound as {value.data_type()} of shape {value.shape()}, got "
                        f"{array.dtype} of shape {list(array.shape)}"
                    )
                with translated_errors(f"{self._name}: its inputs cannot be updated"):
                    value.update_inplace(array)

    def outputs(self) -> dict[str, Array]:
        """The outputs of the last run, copied to host memory."""
        binding = self._bindings[(self._next - 1) % len(self._bindings)]
        with translated_errors(f"{self._name}: its outputs cannot be read"):
            return dict(zip(self._output_names, binding.copy_outputs_to_cpu(), strict=True))

    def _run(self, options: list[ort.RunOptions]) -> None:
        copy = self._next % len(self._bindings)
        self._next += 1
        with translated_errors(f"{self._name} cannot be run"):
            self._session.run_with_iobinding(self._bindings[copy], options[copy])

    def _bind(
        self,
        ort_value: type[ort.OrtValue],
        inputs: Mapping[str, Array],
        outputs: Mapping[str, TensorSpec],
        device: tuple[str, int],
    ) -> ort.IOBinding:
        binding = self._session.io_binding()
        for name, array in inputs.items():
            self._require_no_text(f"input {name}", array.dtype)
            value = ort_value.ortvalue_from_numpy(np.ascontiguousarray(array), *device)
            self._values.append((name, value))
            binding.bind_ortvalue_input(name, value)
        for name in self._output_names:
            if name not in outputs:
                raise ModelError(f"{self._name}: output {name} is none of {', '.join(outputs) or 'no outputs'}")
            spec = outputs[name]
            self._require_no_text(f"output {name}", spec.dtype)
            value = ort_value.ortvalue_from_shape_and_type(list(spec.shape), spec.dtype.type, *device)
            self._values.append((name, value))
            binding.bind_ortvalue_output(name, value)
        binding.synchronize_inputs()
        return binding

    def _require_no_text(self, what: str, dtype: np.dtype[np.generic]) -> None:
        if dtype.kind in "UO":
            raise ModelError(f"{self._name}: {what} is text, which cannot lie in the memory of a device")


def _run_options(runtime: object, cuda_graph: bool, copy: int, *, wait: bool) -> ort.RunOptions:
    options = runtime.RunOptions()  # type: ignore[attr-defined]
    if cuda_graph:
        options.add_run_config_entry(GRAPH_ID_ENTRY, str(FIRST_GRAPH_ID + copy))
    if not wait:
        options.add_run_config_entry(NO_SYNCHRONISATION_ENTRY, "1")
    return options
