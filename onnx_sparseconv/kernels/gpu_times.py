"""What a convolution takes on a GPU, dense and sparse, foretold without one.

Dense: ONNX Runtime's Conv on tensor cores, TF32 for float. Its arithmetic is as fast as the sums are long and the
outputs many; what is no matrix product (any kernel beyond 1x1) has its layout changed before and behind. Sparse: the
generated kernel, by `estimate_cycles`, or one of the library's (`pointwise_work`, `warpgroup_work`, `flat_work`,
`cluster_work`, `tensor_work`, `segment_work`, `depthwise_work`, `csr_work`).
The figures of all come from measured layers, by ``benchmarks/fit_gpu_rule.py`` (see `gpu_time_constants`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnx_sparseconv.kernels.flat_plan import flat_steps, plan_flat
from onnx_sparseconv.kernels.gemm_plan import plan_gemm
from onnx_sparseconv.kernels.layer import SparseLayer
from onnx_sparseconv.kernels.plan import GeneratedPlan, estimate_cycles
from onnx_sparseconv.kernels.segment_plan import can_run_segments, plan_segments
from onnx_sparseconv.kernels.tensor_plan import plan_tensor
from onnx_sparseconv.kernels.warpgroup_plan import (
    CHANNELS,
    EARLY_CYCLES,
    ROWS,
    WarpgroupPlan,
    WindowSteps,
    copy_cycles,
    csr_cycles,
    joining_cycles,
    out_size,
    plan_clusters,
    plan_octets,
    plan_pointwise,
    plan_ring,
    plan_warpgroups,
    rows_of_blocks,
    without_strides,
)

# A figure of one layer, or of many at once.
Figure = float | NDArray[np.float64]
# What the lesser of arithmetic and memory adds to the greater: they overlap, but for the most part only.
_OVERLAP = 0.3
# Of concatenating a layer's inputs; as short kernels take.
_JOINING_LAUNCH_US = 2.0


@dataclass(frozen=True)
class DenseWork:
    """What a dense convolution has to do, for a batch.

    Attributes:
        mflop: floating-point operations, 2 a multiply-add, in millions.
        mbytes: of input, output and weight, each once, in millions.
        depth: terms of a sum, C / group times the kernel's size.
        moutputs: elements of the output, in millions; of several groups, but for depthwise ones, those of one, for each
            is a product of its own.
        is_window: 1 where the kernel is larger than 1x1 or has a stride, else 0.
        is_half: 1 for float16, 0 for float.
        is_row: 1 for a window of one row in maps of one row, as 1-D convolutions have, else 0.
    """

    mflop: Figure
    mbytes: Figure
    depth: Figure
    moutputs: Figure
    is_window: Figure
    is_half: Figure
    is_row: Figure = 0.0


@dataclass(frozen=True)
class SparseWork:
    """What a generated kernel has to do, for a batch.

    Attributes:
        work_us: microseconds by `estimate_cycles`.
    """

    work_us: Figure


@dataclass(frozen=True)
class LibraryWork:
    """What one of the library's own kernels has to do, for a batch.

    Attributes:
        kcycles: of a multiprocessor, in thousands, by `plan_warpgroups`, `plan_tensor`, `csr_cycles` and their like.
    """

    kcycles: Figure


@dataclass(frozen=True)
class TimeModel:
    """Times of layers in a chain of many, so without what a call costs. All but the first two come from measurements.

    Attributes:
        clock_mhz, multiprocessors: of the GPU that was measured, under load.
        float_tflops, half_tflops: peak of dense convolutions, TF32 and float16.
        half_depth: terms of a sum at which half of the peak is reached.
        half_moutputs: outputs, in millions, at which that is halved once more.
        least_depth, least_moutputs: the least that was measured. Nothing is known of less, so it is taken for as much:
            dense is not foretold to be slower than it was seen to be.
        bandwidth_tb: memory and caches, terabytes a second.
        layout_us: to change the layout of what is no matrix product.
        row_us: more of windows of one row in maps of one row.
        dense_launch_us, sparse_launch_us: of a node that computes nothing.
        sparse_slowdown: of the generated kernel, against `estimate_cycles`.
        library_launch_us: of the library's own kernels, besides what their cycles take.
        library_mhz: clock at which the cycles of the library's own kernels take the time that was measured.
    """

    clock_mhz: float
    multiprocessors: float
    float_tflops: float
    half_tflops: float
    half_depth: float
    half_moutputs: float
    least_depth: float
    least_moutputs: float
    bandwidth_tb: float
    layout_us: float
    row_us: float
    dense_launch_us: float
    sparse_launch_us: float
    sparse_slowdown: float
    library_launch_us: float
    library_mhz: float

    def dense_us(self, work: DenseWork) -> NDArray[np.float64]:
        """Microseconds of ONNX Runtime's Conv with the best of its options; arrays give arrays."""
        peak = np.where(work.is_half, self.half_tflops, self.float_tflops)
        depth, outputs = np.maximum(work.depth, self.least_depth), np.maximum(work.moutputs, self.least_moutputs)
        share = depth / (depth + self.half_depth) * outputs / (outputs + self.half_moutputs)
        both = computed_and_moved_us(work, peak * share, self.bandwidth_tb)
        more = self.layout_us * work.is_window + self.row_us * work.is_row
        return np.asarray(self.dense_launch_us + both + more, np.float64)

    def sparse_us(self, work: SparseWork) -> NDArray[np.float64]:
        """Microseconds of the generated kernel; arrays give arrays."""
        return np.asarray(self.sparse_launch_us + self.sparse_slowdown * np.asarray(work.work_us), np.float64)

    def cycles_us(self, work: LibraryWork) -> NDArray[np.float64]:
        """Microseconds of one of the library's own kernels, with what is launched around it; arrays give arrays."""
        return np.asarray(self.library_launch_us + 1000 * np.asarray(work.kcycles) / self.library_mhz, np.float64)

    def transpose_us(self, shape: Sequence[int], itemsize: int) -> float:
        """Microseconds of changing a tensor's layout: it is read and written once."""
        return 2e-6 * math.prod(shape) * itemsize / self.bandwidth_tb

    def joining_us(self, layer: SparseLayer, batch: int) -> float:
        """Microseconds of concatenating a layer's inputs, where there are several and its kernel wants one.

        Raises:
            ValueError: the layer's input size is not known.
        """
        out_size(layer)  # it must be known
        shape = (batch, layer.in_channels, *(layer.in_size or ()))
        return _JOINING_LAUNCH_US + self.transpose_us(shape, layer.element_type.itemsize)

    def library_us(
        self, layer: SparseLayer, architecture: int, batch: int, *, is_joined: bool = False
    ) -> tuple[float, str] | None:
        """Microseconds of the library's own kernel, and what that runs on; None where nothing is foretold of it.

        Args:
            layer: with a known input size.
            architecture: 90 for sm_90.
            batch: images.
            is_joined: whether to count what kernels that read one input take to copy several together.

        Raises:
            ValueError: the layer's input size is not known.
        """
        joining = joining_cycles(layer, batch, self.multiprocessors) if is_joined else 0.0
        found = _fastest_work(layer, architecture, batch, self.multiprocessors, joining)
        return None if found is None else (float(self.cycles_us(found.work)), found.runs_on)

    def early_us(self, runs_on: str) -> float:
        """Microseconds that the library's own kernel takes less with few images behind another one, than by itself.

        It begins before that one is done. Matrix products were timed behind others.
        """
        return EARLY_CYCLES / self.library_mhz if runs_on == ON_WARPGROUPS else 0.0

    def layer_us(self, layer: SparseLayer, plan: GeneratedPlan, batch: int) -> tuple[float, float]:
        """Microseconds of one layer, dense and by a plan's generated kernel.

        Raises:
            ValueError: the layer's input size is not known.
        """
        sparse = sparse_work(layer, plan, batch, self.clock_mhz)
        return float(self.dense_us(dense_work(layer, batch))), float(self.sparse_us(sparse))


def computed_and_moved_us(work: DenseWork, tflops: Figure, bandwidth_tb: float) -> NDArray[np.float64]:
    """Microseconds of arithmetic at so many teraflops and of memory traffic, which overlap for the most part."""
    compute, memory = work.mflop / tflops, np.asarray(work.mbytes) / bandwidth_tb
    return np.asarray(np.maximum(compute, memory) + _OVERLAP * np.minimum(compute, memory), np.float64)


def dense_work(layer: SparseLayer, batch: int) -> DenseWork:
    """What a layer asks of a dense convolution.

    Args:
        layer: with a known input size.
        batch: images.

    Raises:
        ValueError: the input size is not known.
    """
    positions, in_positions = math.prod(out_size(layer)), math.prod(layer.in_size or ())
    depth = layer.weight[0].size
    elements = batch * (layer.in_channels * in_positions + layer.out_channels * positions) + layer.weight.size
    is_window = layer.kernel_shape != (1, 1) or layer.strides != (1, 1)
    is_row = layer.kernel_shape[0] == 1 < layer.kernel_shape[1] and (layer.in_size or (0,))[0] == 1
    products = layer.group if layer.group_in_channels > 1 else 1
    return DenseWork(
        mflop=2e-6 * batch * positions * layer.weight.size,
        mbytes=1e-6 * elements * layer.element_type.itemsize,
        depth=float(depth),
        moutputs=1e-6 * batch * positions * layer.out_channels / products,
        is_window=float(is_window),
        is_half=float(layer.element_type == np.float16),
        is_row=float(is_row),
    )


def sparse_work(layer: SparseLayer, plan: GeneratedPlan, batch: int, clock_mhz: float) -> SparseWork:
    """What a layer asks of a generated kernel.

    Args:
        layer: with a known input size; it need not be the one that the plan was made for.
        plan: of that layer.
        batch: images.
        clock_mhz: of the GPU.

    Raises:
        ValueError: the input size is not known.
    """
    out_size(layer)  # it must be known
    return SparseWork(estimate_cycles(layer, plan, batch) / clock_mhz)


_ARCHITECTURE = 90
# How many times as many steps as a dense weight an order of channels takes, by the share of zeros: random 3x3 weights
# of 64 to 512 channels, packed; and with so many taps, with 90%.
_REPEATS = ((0.5, 0.8, 0.9, 0.95), (1.9, 1.45, 1.02, 1.0))
_REPEATS_OF_TAPS = ((9, 25, 49), (1.02, 1.18, 1.26))
# The same of the kernels for few channels, of 64.
_RING_REPEATS = ((0.8, 0.84, 0.86, 0.88, 0.9), (2.0, 1.65, 1.4, 1.1, 1.0))
# Of windows that are foretold.
_STRIDES = ((1, 1), (2, 2))
# Of what the kernels run; see wgmma_weight.cc.
_MOST_TAPS, _LEAST_ROWS = 49, 8
# Of 1x1, with fewer channels nothing was measured.
_LEAST_POINTWISE_CHANNELS = 8
# More zeros were not measured on tensor cores; with still more of them the CSR kernel runs.
_MOST_ZEROS = 0.985


def warpgroup_work(layer: SparseLayer, architecture: int, batch: int, multiprocessors: float) -> LibraryWork | None:
    """What a layer asks of the library's warpgroup kernel, or of the CSR kernel where that runs by itself instead; None
    where they run no such layer, or nothing like it was measured: strides but 2, dilations, next to no weights. Of
    floats, it is the kernel that rounds them to as many bits as TF32 has.

    Args:
        layer: with a known input size.
        architecture: 90 for sm_90.
        batch: images.
        multiprocessors: of the GPU.

    Raises:
        ValueError: the input size is not known.
    """
    found = _on_windows(layer, architecture, batch, multiprocessors)
    return None if found is None else found.work


class _Choice(NamedTuple):
    """What a kernel has to do, what that runs on, and the cycles by which the library compares it with others."""

    work: LibraryWork
    runs_on: str
    counted_cycles: float


ON_WARPGROUPS, ON_TENSOR_CORES = "warpgroups", "sparse tensor cores"
AS_PRODUCTS = "warpgroups, as a matrix product"
ON_PLANES = "sparse tensor cores, as planes"
BY_CSR, BY_DEPTHWISE = "the CSR kernel", "the depthwise kernel"


def _on_windows(layer: SparseLayer, architecture: int, batch: int, multiprocessors: float) -> _Choice | None:
    if not _may_run_on_warpgroups(layer, architecture) or not 1 < math.prod(layer.kernel_shape) <= _MOST_TAPS:
        return None
    chunks = _window_chunks(layer)
    if not _are_products_worth(layer, chunks):
        return None
    plans = (plan_warpgroups(layer, batch, chunks, multiprocessors), _plan_few_channels(layer, batch, multiprocessors))
    fastest = min((plan for plan in plans if plan is not None), key=lambda plan: plan.counted_cycles, default=None)
    return None if fastest is None else _choose(fastest, layer, batch, multiprocessors)


def _window_chunks(layer: SparseLayer) -> float:
    return _num_chunks(layer) * _repeats(layer, _REPEATS) * _more_repeats(layer)


def _more_repeats(layer: SparseLayer) -> float:
    """Of more taps than nine, which come with about 90% zeros alone: with fewer the order hardly matters."""
    of_taps = np.interp(math.prod(layer.kernel_shape), *_REPEATS_OF_TAPS) / _REPEATS_OF_TAPS[1][0]
    return float(np.interp(_zeros(layer), (0.8, 0.9, 0.95), (1.0, of_taps, 1.0)))


def _plan_few_channels(layer: SparseLayer, batch: int, multiprocessors: float) -> WarpgroupPlan | None:
    steps = _window_steps(layer)
    by_octets = plan_octets(layer, batch, steps, multiprocessors)
    if by_octets is not None and layer.strides == (1, 1):
        return by_octets
    by_ring = plan_ring(layer, batch, steps, multiprocessors) if layer.element_type == np.float16 else None
    plans = (by_octets, by_ring, _plan_without_strides(layer, batch, multiprocessors))
    return min((plan for plan in plans if plan is not None), key=lambda plan: plan.cycles, default=None)


def _plan_without_strides(layer: SparseLayer, batch: int, multiprocessors: float) -> WarpgroupPlan | None:
    copied = without_strides(layer)
    if copied is None:
        return None
    plan = plan_octets(copied, batch, _window_steps(copied), multiprocessors, is_copied=True)
    if plan is None:
        return None
    return replace(plan, cycles=plan.cycles + copy_cycles(layer, copied, batch, multiprocessors))


def _window_steps(layer: SparseLayer) -> WindowSteps:
    # Where there are two places for each channel, no four neighbours have more than two.
    is_spread = 2 * layer.in_channels <= CHANNELS * _num_chunks(layer)
    repeats = 1.0 if is_spread else min(_repeats(layer, _RING_REPEATS) * _more_repeats(layer), 2.0)
    steps = _num_chunks(layer) * math.prod(layer.kernel_shape)
    # What would take a second sparse step takes two dense ones instead.
    dense = math.ceil(steps * (repeats - 1.0))
    return WindowSteps(steps - dense, 2 * dense)


def _choose(
    plan: WarpgroupPlan, layer: SparseLayer, batch: int, multiprocessors: float, joining: float = 0.0
) -> _Choice:
    """The plan, or the CSR kernel if that takes less, with so many cycles before it."""
    by_csr = csr_cycles(layer, batch, multiprocessors) + joining
    if plan.counted_cycles - EARLY_CYCLES < by_csr:
        return _Choice(LibraryWork(plan.cycles / 1000), ON_WARPGROUPS, plan.counted_cycles)
    return _chosen(LibraryWork(by_csr / 1000), BY_CSR)


def _chosen(work: LibraryWork, runs_on: str) -> _Choice:
    """Of work whose cycles are with a launch."""
    return _Choice(work, runs_on, 1000 * float(work.kcycles))


# Products of tensor cores in the time that the CSR kernel takes for an entry; see wgmma_plan.cc.
_PRODUCTS_AN_ENTRY = 100
# As `_REPEATS`, of 1x1 weights of 64 to 1024 channels.
_POINTWISE_REPEATS = ((0.5, 0.65, 0.7, 0.8, 0.9, 0.95), (1.5, 1.47, 1.38, 1.15, 1.0, 1.0))


def pointwise_work(layer: SparseLayer, architecture: int, batch: int, multiprocessors: float) -> LibraryWork | None:
    """The same of the library's warpgroup kernel for 1x1."""
    found = _on_points(layer, architecture, batch, multiprocessors)
    return None if found is None else found.work


def _on_points(
    layer: SparseLayer, architecture: int, batch: int, multiprocessors: float, joining: float = 0.0
) -> _Choice | None:
    chunks = _chunks_of_points(layer, architecture)
    if chunks is None:
        return None
    plan = plan_pointwise(layer, batch, chunks, multiprocessors)
    return _choose(plan, layer, batch, multiprocessors, joining)


def _chunks_of_points(layer: SparseLayer, architecture: int) -> int | None:
    """Of a 1x1 layer on warpgroups; None of another layer, or where that is not worth it."""
    if layer.kernel_shape != (1, 1) or not _may_run_on_warpgroups(layer, architecture):
        return None
    chunks = _pointwise_chunks(layer)
    return chunks if _are_products_worth(layer, chunks) else None


def _pointwise_chunks(layer: SparseLayer) -> int:
    return math.ceil(_num_chunks(layer) * _repeats(layer, _POINTWISE_REPEATS))


def _are_products_worth(layer: SparseLayer, chunks: float) -> bool:
    """Whether tensor cores may be faster than the CSR kernel, about: not with next to no weights."""
    row_tiles, row_blocks = rows_of_blocks(layer)
    channels = min(layer.group_in_channels, CHANNELS)
    products = row_blocks * row_tiles * ROWS * chunks * channels * math.prod(layer.kernel_shape)
    return bool(products < _PRODUCTS_AN_ENTRY * np.count_nonzero(layer.used_weights))


def flat_work(layer: SparseLayer, architecture: int, batch: int, multiprocessors: float) -> LibraryWork | None:
    """The same of the library's flat kernel, for windows of many channels with few non-zeros."""
    if not _may_run_on_warpgroups(layer, architecture) or math.prod(layer.kernel_shape) > _MOST_TAPS:
        return None
    steps = flat_steps(layer)
    if steps is None or not _are_products_worth(layer, _window_chunks(layer)):
        return None
    plan = plan_flat(layer, batch, steps, multiprocessors)
    return None if plan is None else LibraryWork(plan.cycles / 1000)


def gemm_work(layer: SparseLayer, architecture: int, batch: int, multiprocessors: float) -> LibraryWork | None:
    """The same of the library's gemm kernels, for 1x1."""
    found = _by_gemm(layer, architecture, batch, multiprocessors)
    return None if found is None else found.work


def _by_gemm(
    layer: SparseLayer, architecture: int, batch: int, multiprocessors: float, joining: float = 0.0
) -> _Choice | None:
    if _chunks_of_points(layer, architecture) is None:
        return None
    plan = plan_gemm(layer, batch, multiprocessors)
    if plan is None:
        return None
    return _Choice(LibraryWork((plan.cycles + joining) / 1000), AS_PRODUCTS, plan.counted_cycles + joining)


def cluster_work(layer: SparseLayer, architecture: int, batch: int, multiprocessors: float) -> LibraryWork | None:
    """The same of the library's cluster kernel; few images run so."""
    if not _may_run_on_warpgroups(layer, architecture) or math.prod(layer.kernel_shape) > _MOST_TAPS:
        return None
    is_pointwise = layer.kernel_shape == (1, 1)
    if is_pointwise and any(layer.pads):
        return None
    chunks: float = _pointwise_chunks(layer) if is_pointwise else _window_chunks(layer)
    if not _are_products_worth(layer, chunks):
        return None
    plan = plan_clusters(layer, batch, chunks, multiprocessors)
    return None if plan is None else LibraryWork(plan.cycles / 1000)


# The first GPUs with sparse tensor cores.
_TENSOR_ARCHITECTURE = 80


def tensor_work(layer: SparseLayer, architecture: int, batch: int, multiprocessors: float) -> LibraryWork | None:
    """The same of the library's kernel for sparse tensor cores, or the CSR kernel where that is faster, on GPUs from
    sm_80 on but those with warpgroups, whose kernels are nearly always the faster ones.
    """
    found = _on_tensor_cores(layer, architecture, batch, multiprocessors, ways=(ON_TENSOR_CORES,))
    return None if found is None else found.work


def segment_work(layer: SparseLayer, architecture: int, batch: int, multiprocessors: float) -> LibraryWork | None:
    """The same of the library's kernel for 1x1 on these GPUs."""
    found = _on_tensor_cores(layer, architecture, batch, multiprocessors, ways=(ON_PLANES,))
    return None if found is None else found.work


_TENSOR_PLANS = {ON_TENSOR_CORES: plan_tensor, ON_PLANES: plan_segments}


def _on_tensor_cores(
    layer: SparseLayer,
    architecture: int,
    batch: int,
    multiprocessors: float,
    joining: float = 0.0,
    *,
    ways: Iterable[str] = _TENSOR_PLANS,
) -> _Choice | None:
    if architecture < _TENSOR_ARCHITECTURE or architecture == _ARCHITECTURE or _zeros(layer) > _MOST_ZEROS:
        return None
    plans = ((_TENSOR_PLANS[way](layer, architecture, batch, multiprocessors), way) for way in ways)
    taken = {way: plan.cycles for plan, way in plans if plan is not None}
    taken[BY_CSR] = csr_cycles(layer, batch, multiprocessors)
    # By planes, several inputs are read where they are.
    cycles, way = min((cycles + joining * (way != ON_PLANES), way) for way, cycles in taken.items())
    return _chosen(LibraryWork(cycles / 1000), way)


def can_read_apart(layer: SparseLayer, architecture: int) -> bool:
    """Whether one of the library's kernels on tensor cores reads the inputs of a Concat where they are."""
    if architecture == _ARCHITECTURE:
        return layer.kernel_shape == (1, 1)
    return architecture >= _TENSOR_ARCHITECTURE and can_run_segments(layer)


# Of the library's kernel for depthwise convolutions: a call, bytes that a multiprocessor reads and writes in a cycle,
# and cycles of a tap for each of its outputs. Of MobileNetV2's layers in both types, in the network, on an H100.
_DEPTHWISE_CALL = 2500.0
_DEPTHWISE_BYTES_A_CYCLE = 10.8
_DEPTHWISE_TAP = 0.006
# Of one tap, instead of the latter two; of DenseNet-121's layers, by a profiler, on an H200.
_SCALE_BYTES_A_CYCLE = 16.0
# A block has no room for longer rows, of what a row of outputs reads and of these.
_DEPTHWISE_ROW_BYTES = 220 << 10


def depthwise_work(layer: SparseLayer, _architecture: int, batch: int, multiprocessors: float) -> LibraryWork | None:
    """The same of the library's kernel for depthwise convolutions, on every GPU."""
    if not layer.group == layer.in_channels == layer.out_channels:
        return None
    work = dense_work(layer, batch)
    if layer.is_pointwise:
        return LibraryWork((_DEPTHWISE_CALL + 1e6 * float(work.mbytes) / _SCALE_BYTES_A_CYCLE / multiprocessors) / 1000)
    (_, in_w), (_, out_w) = layer.in_size or (0, 0), out_size(layer)
    rows = (layer.kernel_shape[0] - 1) * layer.dilations[0] + 1
    if (rows * in_w + out_w) * layer.element_type.itemsize > _DEPTHWISE_ROW_BYTES:
        return None
    moved = 1e6 * float(work.mbytes) / _DEPTHWISE_BYTES_A_CYCLE
    computed = 1e6 * float(work.moutputs) * math.prod(layer.kernel_shape) * _DEPTHWISE_TAP
    return LibraryWork((_DEPTHWISE_CALL + (moved + computed) / multiprocessors) / 1000)


# Images up to which a layer that none but the CSR kernel runs is foretold: with more, it was seldom faster than dense.
MOST_CSR_IMAGES = 3


def csr_work(layer: SparseLayer, _architecture: int, batch: int, multiprocessors: float) -> LibraryWork | None:
    """The same of the library's CSR kernel, which runs every layer on every GPU, with up to `MOST_CSR_IMAGES`."""
    if batch > MOST_CSR_IMAGES:
        return None
    return LibraryWork(csr_cycles(layer, batch, multiprocessors) / 1000)


def library_work(layer: SparseLayer, architecture: int, batch: int, multiprocessors: float) -> LibraryWork | None:
    """The same of the kernel of the library's own that takes the layer, where it runs neither flat nor by clusters."""
    found = _library_work(layer, architecture, batch, multiprocessors)
    return None if found is None else found.work


def _library_work(
    layer: SparseLayer, architecture: int, batch: int, multiprocessors: float, joining: float = 0.0
) -> _Choice | None:
    """The first kernel that takes the layer; what reads one input takes so many cycles more."""
    call = (layer, architecture, batch, multiprocessors)
    if (by_depthwise := depthwise_work(*call)) is not None:
        return _chosen(by_depthwise, BY_DEPTHWISE)
    if (found := _on_points(*call, joining) or _on_windows(*call) or _on_tensor_cores(*call, joining)) is not None:
        return found
    by_csr = csr_work(*call)
    return None if by_csr is None else _chosen(LibraryWork(by_csr.kcycles + joining / 1000), BY_CSR)


# Of the library's kernels, those that it has not always had.
FLAT, GEMM = "flat", "gemm"


def fastest_work(
    layer: SparseLayer, architecture: int, batch: int, multiprocessors: float, *, without: Collection[str] = ()
) -> LibraryWork | None:
    """The same of the fastest one of all the library's kernels; of a library that has none of some of them, `FLAT` and
    `GEMM`.
    """
    found = _fastest_work(layer, architecture, batch, multiprocessors, without=without)
    return None if found is None else found.work


def _fastest_work(
    layer: SparseLayer,
    architecture: int,
    batch: int,
    multiprocessors: float,
    joining: float = 0.0,
    *,
    without: Collection[str] = (),
) -> _Choice | None:
    """By the gemm kernels, the flat one or clusters, where those are faster than the kernel that takes the layer else.
    What reads one input takes so many cycles more.
    """
    call = (layer, architecture, batch, multiprocessors)
    found = _library_work(*call, joining)
    if GEMM not in without:
        found = _faster(found, _by_gemm(*call, joining))
    if FLAT not in without:
        found = _faster(found, _on_warpgroups(flat_work(*call)))
    return _faster(found, _on_warpgroups(cluster_work(*call)))


def _on_warpgroups(work: LibraryWork | None) -> _Choice | None:
    return None if work is None else _chosen(work, ON_WARPGROUPS)


def _faster(found: _Choice | None, other: _Choice | None) -> _Choice | None:
    """What was found, or other work on warpgroups if that takes less."""
    if found is None or other is None:
        return found or other
    saved = EARLY_CYCLES if found.runs_on == BY_CSR else 0.0
    return other if other.counted_cycles - saved < found.counted_cycles else found


def _may_run_on_warpgroups(layer: SparseLayer, architecture: int) -> bool:
    is_known = layer.kernel_shape == (1, 1) or (layer.strides in _STRIDES and layer.dilations == (1, 1))
    return (
        architecture == _ARCHITECTURE
        and is_known
        and layer.group_out_channels >= _LEAST_ROWS
        and (layer.kernel_shape != (1, 1) or layer.group_in_channels >= _LEAST_POINTWISE_CHANNELS)
        and _zeros(layer) <= _MOST_ZEROS
    )


def _zeros(layer: SparseLayer) -> float:
    return 1 - np.count_nonzero(layer.used_weights) / layer.weight.size


def _num_chunks(layer: SparseLayer) -> int:
    return math.ceil(layer.group_in_channels / CHANNELS)


def _repeats(layer: SparseLayer, of_zeros: tuple[Sequence[float], Sequence[float]]) -> float:
    return float(np.interp(_zeros(layer), *of_zeros))


def as_arrays(works: list[Any]) -> dict[str, NDArray[np.float64]]:
    """The fields of many works of one kind, each as an array, to make one of the kind of them."""
    return {name: np.array([getattr(work, name) for work in works], np.float64) for name in vars(works[0])}
