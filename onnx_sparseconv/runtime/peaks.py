"""What a machine can do at most: the two lines of a roofline.

On the CPU both are measured, with operators of ONNX Runtime that reach nearly all that the processor gives: large
matrix products, and a Relu on a tensor that no cache holds. On a GPU they follow from what its driver says of it.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnx_sparseconv.errors import ProviderError
from onnx_sparseconv.runtime.binding import BoundRuns, TensorSpec
from onnx_sparseconv.runtime.session import Provider, make_session, measuring_options
from onnx_sparseconv.runtime.timing import Clock

_OPSET, _IR_VERSION = 13, 7
# Many threads need large ones; short runs find the moments in which a busy machine does nothing else.
_MATRIX_SIZES = (384, 768, 1536)
# Beyond the caches of all but the largest servers.
_STREAM_ELEMENTS = 2**25
_WARMUP, _MIN_ROUNDS, _SECONDS = 2, 5, 0.5

# Attributes of cuDeviceGetAttribute.
_CLOCK_KHZ, _NUM_SM, _MEMORY_CLOCK_KHZ, _BUS_BITS, _MAJOR, _MINOR = 13, 16, 36, 37, 75, 76
# float32 multiply-adds that a multiprocessor begins in a cycle, by compute capability: "Arithmetic Instructions" in
# NVIDIA's CUDA C++ Programming Guide. Later ones are as the last.
_FP32_LANES = {(7, 5): 64, (8, 0): 64, (8, 6): 128, (8, 9): 128, (9, 0): 128}
# Memory moves data at both edges of its clock.
_TRANSFERS_PER_CLOCK = 2


@dataclass(frozen=True)
class Peaks:
    """Upper bounds of a machine.

    Attributes:
        flops_per_s: float32 operations a second, 2 a multiply-add.
        bytes_per_s: from and to memory.
        text: where the figures come from.
    """

    flops_per_s: float
    bytes_per_s: float
    text: str


@functools.cache
def find_peaks(provider: Provider, threads: int | None) -> Peaks:
    """The peaks of this machine; a second or two on the CPU, once a process.

    Args:
        provider: ``cpu`` or ``cuda``.
        threads: as in `make_session`; on the CPU they decide what can be reached.

    Raises:
        ProviderError: the driver of the GPU does not answer.
        SparseConvError: ONNX Runtime cannot be used.
    """
    return _ask_gpu() if provider == "cuda" else measure_cpu(threads)


def measure_cpu(
    threads: int | None,
    *,
    matrix_sizes: Sequence[int] = _MATRIX_SIZES,
    stream_elements: int = _STREAM_ELEMENTS,
    seconds: float = _SECONDS,
    clock: Clock = time.perf_counter_ns,
) -> Peaks:
    """The peaks of the processor with a number of threads, by the fastest of many runs.

    Args:
        threads: as in `make_session`.
        matrix_sizes: of the square matrices that are multiplied.
        stream_elements: of the tensor that is read and written.
        seconds: to spend on each of the two, about.
        clock: nanoseconds.
    """
    products = [_Work(_runs(_product(size), (size, size), threads), 2.0 * size**3) for size in matrix_sizes]
    stream = _Work(_runs(_stream(stream_elements), (stream_elements,), threads), 2.0 * 4 * stream_elements)
    return Peaks(
        flops_per_s=_best_rate(products, seconds, clock),
        bytes_per_s=_best_rate([stream], seconds, clock),
        text="measured with large matrix products, and by reading and writing a tensor that no cache holds",
    )


def peaks_of_gpu(attributes: Mapping[int, int]) -> Peaks:
    """The peaks that the attributes of a CUDA device imply.

    Args:
        attributes: by their number in ``CUdevice_attribute``.

    Raises:
        ProviderError: one is missing, or zero.
    """
    wanted = (_CLOCK_KHZ, _NUM_SM, _MEMORY_CLOCK_KHZ, _BUS_BITS, _MAJOR)
    if any(attributes.get(number, 0) <= 0 for number in wanted):
        raise ProviderError("the driver does not say how fast the GPU is")
    capability = attributes[_MAJOR], attributes.get(_MINOR, 0)
    known = max((one for one in _FP32_LANES if one <= capability), default=min(_FP32_LANES))
    lanes = _FP32_LANES[known] * attributes[_NUM_SM]
    return Peaks(
        flops_per_s=2.0 * lanes * attributes[_CLOCK_KHZ] * 1e3,
        bytes_per_s=attributes[_MEMORY_CLOCK_KHZ] * 1e3 * _TRANSFERS_PER_CLOCK * attributes[_BUS_BITS] / 8,
        text="computed from the clocks, the units and the memory bus that its driver states; tensor cores, which dense "
        "layers may use, are not counted",
    )


def _ask_gpu(index: int = 0) -> Peaks:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ProviderError(f"there is no NVIDIA driver: {error}") from error
    device, value = ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), index):
        raise ProviderError("the NVIDIA driver does not start")
    found = {}
    for number in (_CLOCK_KHZ, _NUM_SM, _MEMORY_CLOCK_KHZ, _BUS_BITS, _MAJOR, _MINOR):
        if not cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device):
            found[number] = value.value
    return peaks_of_gpu(found)


@dataclass(frozen=True)
class _Work:
    """Something to run, and how many operations or bytes that is."""

    run: Callable[[], object]
    amount: float


def _runs(model: ModelProto, shape: tuple[int, ...], threads: int | None) -> BoundRuns:
    """Runs of a model ``x`` -> ``y`` of one shape, in bound memory."""
    session = make_session(model, threads=threads, use_library=False, session_options=measuring_options())
    spec = TensorSpec(shape, np.dtype(np.float32))
    return BoundRuns(session, "the measurement", {"x": np.ones(shape, np.float32)}, {"y": spec}, "cpu")


def _best_rate(works: Sequence[_Work], seconds: float, clock: Clock) -> float:
    """The most that was done a second, in turn over and over."""
    for work in works:
        for _ in range(_WARMUP):
            work.run()
    best = 0.0
    started = clock()
    number = 0
    while number < _MIN_ROUNDS or clock() - started < seconds * 1e9:
        for work in works:
            before = clock()
            work.run()
            best = max(best, work.amount / max(clock() - before, 1) * 1e9)
        number += 1
    return best


def _product(size: int) -> ModelProto:
    matrix = numpy_helper.from_array(np.ones((size, size), np.float32), "w")
    return _model(helper.make_node("MatMul", ["x", "w"], ["y"]), [size, size], [matrix])


def _stream(elements: int) -> ModelProto:
    return _model(helper.make_node("Relu", ["x"], ["y"]), [elements], [])


def _model(node: NodeProto, shape: list[int], constants: list[TensorProto]) -> ModelProto:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy")
    graph = helper.make_graph([node], "peak", [x], [y], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION)
