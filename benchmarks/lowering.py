"""Convolution as a product with a lowered matrix (im2col): shapes, layouts and plans, as pure functions of numpy.

The lowered matrix ``L`` of an image has a row for every weight of an output channel and a column for every output
position, so that ``Y[n] = W @ L[n]`` with ``W`` of shape ``[K, C * R * S]``. A batch is lowered in chunks of images,
and a chunk in one of two layouts:

``batched``
    ``L[n]`` one after the other: a product for every image, which writes straight into ``Y[n]``.
``joined``
    one matrix whose columns are all positions of all images of the chunk: one wide product, whose result
    ``[K, chunk * positions]`` is brought into the order of ``Y`` when bias and Relu are applied, a pass over the
    result that either layout needs.

Which chunk and which layout is fastest depends on the layer: a chunk that stays in the cache between lowering and
product saves the trip to memory, a large one fills the GPU. `dense_plans` and `sparse_plans` list them, and whoever
measures takes the fastest.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from suite_rows import Layer

Array = NDArray[Any]
Layout = Literal["batched", "joined"]
Kernel = Literal["lower", "finish"]

# Rows of the lowered matrix are filled up to a multiple of this with zeros: products of halves on tensor cores want
# rows of the weight that begin at a multiple of 16 bytes.
DEPTH_MULTIPLE = 8
# A chunk of this size stays in a cache of 50 MB or more beside what the product reads and writes.
CACHED_CHUNK_BYTES = 24 << 20
# A lowered matrix in memory is not larger than this.
LARGEST_CHUNK_BYTES = 12 << 30
KERNELS = Path(__file__).with_name("lowering_kernels.cu")
MAX_THREADS = 256
# Bytes that a thread stores at once.
_VECTOR_BYTES = 4


@dataclass(frozen=True)
class Lowering:
    """How a layer is lowered. Every convolution is a 2-D one; a 1-D one has height 1.

    Attributes:
        in_channels, in_height, in_width: input of an image.
        out_channels, out_height, out_width: output of an image.
        kernel, strides, pads: height and width; the padding is the same on either side.
    """

    in_channels: int
    in_height: int
    in_width: int
    out_channels: int
    out_height: int
    out_width: int
    kernel: tuple[int, int]
    strides: tuple[int, int]
    pads: tuple[int, int]

    @staticmethod
    def of(layer: Layer) -> Lowering:
        """Of a layer of a suite.

        Raises:
            ValueError: it has groups, whose lowered matrix would be several.
        """
        if layer.group != 1:
            raise ValueError(f"{layer.name} has {layer.group} groups; only layers with one are lowered")
        flat = layer.height == 1
        return Lowering(
            in_channels=layer.in_channels,
            in_height=layer.height,
            in_width=layer.width,
            out_channels=layer.out_channels,
            out_height=1 if flat else layer.out_sizes[0],
            out_width=layer.out_sizes[-1],
            kernel=(1 if flat else layer.kernel, layer.kernel),
            strides=(1 if flat else layer.stride, layer.stride),
            pads=(0 if flat else layer.pad, layer.pad),
        )

    @property
    def taps(self) -> int:
        """Weights of an output channel for one input channel."""
        return self.kernel[0] * self.kernel[1]

    @property
    def rows(self) -> int:
        """Rows of the lowered matrix: weights of an output channel."""
        return self.in_channels * self.taps

    @property
    def depth(self) -> int:
        """``rows`` and the rows of zeros behind them."""
        return -(-self.rows // DEPTH_MULTIPLE) * DEPTH_MULTIPLE

    @property
    def positions(self) -> int:
        """Outputs of one channel of one image: columns of the lowered matrix."""
        return self.out_height * self.out_width

    @property
    def is_identity(self) -> bool:
        """Whether an image is its own lowered matrix, as for 1x1 kernels with stride 1."""
        return self.taps == 1 and self.strides == (1, 1) and self.pads == (0, 0)


@dataclass(frozen=True)
class LoweringPlan:
    """One way to compute a batch.

    Attributes:
        layout: of a chunk, see the module.
        chunk: images of a chunk; divides the batch.
        algorithm: of the library that multiplies, in its own numbers; 0 is its default.
    """

    layout: Layout
    chunk: int
    algorithm: int = 0

    @property
    def name(self) -> str:
        """Such as ``joined, 4 images, algorithm 6``."""
        return f"{self.layout}, {self.chunk} image{'s'[: self.chunk - 1]}" + (
            f", algorithm {self.algorithm}" if self.algorithm else ""
        )

    def strides(self, lowering: Lowering) -> tuple[int, int]:
        """Elements from one image, and from one row, of a lowered chunk to the next."""
        if self.layout == "batched":
            return lowering.depth * lowering.positions, lowering.positions
        return lowering.positions, self.chunk * lowering.positions

    def result_strides(self, lowering: Lowering) -> tuple[int, int]:
        """Elements from one image, and from one output channel, of a chunk's product to the next."""
        if self.layout == "batched":
            return lowering.out_channels * lowering.positions, lowering.positions
        return lowering.positions, self.chunk * lowering.positions


def chunks(lowering: Lowering, batch: int, itemsize: int) -> tuple[int, ...]:
    """Images of a chunk worth trying: as many as stay in the cache, and as many as memory should hold; divisors of
    the batch, without repetition.
    """
    image_bytes = lowering.depth * lowering.positions * itemsize
    limits = (CACHED_CHUNK_BYTES, LARGEST_CHUNK_BYTES)
    sizes = [
        max(n for n in range(1, batch + 1) if batch % n == 0 and n <= max(1, limit // image_bytes)) for limit in limits
    ]
    return tuple(dict.fromkeys(sizes))


def dense_plans(lowering: Lowering, batch: int, itemsize: int) -> tuple[LoweringPlan, ...]:
    """Plans for a dense product that can multiply several matrices at once."""
    if lowering.is_identity:
        return (LoweringPlan("batched", batch),)
    sizes = chunks(lowering, batch, itemsize)
    found = [LoweringPlan(layout, size) for size in sizes for layout in ("batched", "joined")]
    # With one image both layouts are the same, and "batched" needs no other place for the result.
    return tuple(plan for plan in found if plan.chunk > 1 or plan.layout == "batched")


def sparse_plans(
    lowering: Lowering, batch: int, itemsize: int, algorithms: tuple[int, ...]
) -> tuple[LoweringPlan, ...]:
    """Plans for a sparse product that multiplies one matrix at a time, for each of its algorithms."""
    sizes = [] if lowering.is_identity else [size for size in chunks(lowering, batch, itemsize) if size > 1]
    layouts: list[tuple[Layout, int]] = [("batched", 1), *(("joined", size) for size in sizes)]
    if lowering.is_identity and batch > 1:
        layouts.append(("joined", max(chunks(lowering, batch, itemsize))))
    return tuple(LoweringPlan(layout, size, algorithm) for layout, size in layouts for algorithm in algorithms)


def lower(x: Array, lowering: Lowering, plan: LoweringPlan) -> Array:
    """The lowered chunk in numpy: what the kernel ``lower`` makes.

    Args:
        x: input ``[chunk, C, H, W]``.
        lowering: of the layer.
        plan: its layout counts.

    Returns:
        ``[chunk, depth, positions]`` for ``batched``, ``[depth, chunk * positions]`` for ``joined``.
    """
    images = x.shape[0]
    (pad_y, pad_x), (stride_y, stride_x) = lowering.pads, lowering.strides
    padded = np.pad(x, ((0, 0), (0, 0), (pad_y, pad_y), (pad_x, pad_x)))
    result = np.zeros((images, lowering.depth, lowering.positions), x.dtype)
    for row, (channel, r, s) in enumerate(np.ndindex(lowering.in_channels, *lowering.kernel)):
        read = padded[:, channel, r::stride_y, s::stride_x][:, : lowering.out_height, : lowering.out_width]
        result[:, row] = read.reshape(images, -1)
    if plan.layout == "batched":
        return result
    return np.ascontiguousarray(result.transpose(1, 0, 2)).reshape(lowering.depth, images * lowering.positions)


def weight_matrix(weight: Array, lowering: Lowering) -> Array:
    """``[K, depth]``: a weight ``[K, C, ...]`` flattened, with columns of zeros behind."""
    flat = weight.reshape(lowering.out_channels, lowering.rows)
    return np.ascontiguousarray(np.pad(flat, ((0, 0), (0, lowering.depth - lowering.rows))))


def csr_arrays(matrix: Array) -> tuple[NDArray[np.int32], NDArray[np.int32], Array]:
    """Compressed rows of a matrix: row pointers ``[rows + 1]``, columns and values ``[nnz]``, without zeros."""
    rows, columns = np.nonzero(matrix)
    pointers = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=matrix.shape[0]))])
    return pointers.astype(np.int32), columns.astype(np.int32), matrix[rows, columns]


def vector_width(lowering: Lowering, itemsize: int) -> int:
    """Neighbouring positions that a thread stores at once: two halves where alignment allows, one float."""
    width = _VECTOR_BYTES // itemsize
    return width if lowering.positions % width == 0 else 1


def kernel_source(lowering: Lowering, dtype: np.dtype[Any]) -> str:
    """CUDA source of the kernels ``lower`` and ``finish`` for a layer; includes ``intrinsics.cuh`` of the package.

    All sizes are constants of the source, so that divisions by them cost little.
    """
    constants = {
        "ELEMENT_BYTES": dtype.itemsize,
        "VECTOR": vector_width(lowering, dtype.itemsize),
        "IN_CHANNELS": lowering.in_channels,
        "IN_HEIGHT": lowering.in_height,
        "IN_WIDTH": lowering.in_width,
        "OUT_CHANNELS": lowering.out_channels,
        "OUT_WIDTH": lowering.out_width,
        "POSITIONS": lowering.positions,
        "KERNEL_HEIGHT": lowering.kernel[0],
        "KERNEL_WIDTH": lowering.kernel[1],
        "STRIDE_HEIGHT": lowering.strides[0],
        "STRIDE_WIDTH": lowering.strides[1],
        "PAD_HEIGHT": lowering.pads[0],
        "PAD_WIDTH": lowering.pads[1],
    }
    lines = [f"#define {name} {value}" for name, value in constants.items()]
    return "\n".join([*lines, KERNELS.read_text(encoding="utf-8")])


def launch_shape(kernel: Kernel, lowering: Lowering, itemsize: int, images: int) -> tuple[tuple[int, ...], int]:
    """Grid ``(x, y, z)`` and threads of a block of a kernel for so many images."""
    vectors = lowering.positions // vector_width(lowering, itemsize)
    threads = min(MAX_THREADS, -(-vectors // 32) * 32)
    channels = lowering.in_channels if kernel == "lower" else lowering.out_channels
    return (-(-vectors // threads), channels, images), threads
