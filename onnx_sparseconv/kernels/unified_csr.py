"""Unified CSR: the weight format of the ``SparseConv`` op, as pure numpy functions.

A convolution weight ``W[k, c, r, s]`` is flattened to a matrix with one row for each output channel
``k`` and one column for each ``(c, r, s)``. Pietron & Zurek store, for every row, the *same* number of
(value, column) pairs, so that no row pointer is needed and every warp has the same trip count. Rows that
have fewer non-zeros are filled up with *marked zeros*: entries whose value is +0.

Really pruned layers have uneven rows (the longest has 2 to 3 times the mean), so one length for all
rows can store several times more than there is. Rows may therefore be *sliced*: they are ordered by their number of
non-zeros and cut into slices of ``slice_height`` rows, each with a length of its own. One slice that holds all
rows is the form of the paper.

``decode(encode(w))`` has exactly the bits of ``w``: NaN and denormals are stored like any non-zero. -0.0 counts as
zero, because pruning by a mask (``weight * mask``) leaves one wherever a negative weight was removed; which zeros
are negative is kept as one bit a weight, and only if there are any.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnx_sparseconv.errors import FormatError

Array = NDArray[Any]

VALUE_DTYPES = (np.dtype(np.float32), np.dtype(np.float16))
COLUMN_DTYPES = (np.dtype(np.uint16), np.dtype(np.uint32))
# Columns are stored in 16 bits where every column index of the layer fits.
MAX_UINT16_COLUMNS = 1 << 16
# Bound on a dense weight, so that broken shapes are refused rather than allocated.
MAX_WEIGHT_ELEMENTS = (1 << 31) - 1
# Heights tried, after the whole layer, when the caller leaves the choice to `choose_slice_height`.
SLICE_HEIGHTS = (64, 32, 16, 8, 4, 2, 1)
# Rows encoded in one go; each takes some 50 bytes a column meanwhile.
ROWS_AT_A_TIME = 64
# A layer is sliced only when one length for all rows would store more than this many entries a non-zero.
MAX_PADDING = 1.1


@dataclass(frozen=True)
class UnifiedCSR:
    """A convolution weight in (sliced) unified CSR. All arrays live on the host.

    Attributes:
        values: stored entries, ``[nnz_stored]``, float32 or float16, slice by slice, row by row.
        columns: column of each entry, ``[nnz_stored]``, uint16 or uint32; strictly increasing within a row.
            ``column = c * R * S + r * S + s`` with ``c`` counted within the group.
        nnz_per_row: entries of every row of a slice, at least 1, ``[ceil(K / slice_height)]``, int32.
        row_order: output channel of each stored row, a permutation of ``0..K-1``, int32.
        slice_height: rows of a slice; the last slice may have fewer.
        weight_shape: shape of the dense weight, ``(K, C / group, D1..Dn)``.
        negative_zeros: ``numpy.packbits`` of the flat mask of weights that are -0.0, uint8; empty when there are none.
    """

    values: Array
    columns: Array
    nnz_per_row: Array
    row_order: Array
    slice_height: int
    weight_shape: tuple[int, ...]
    negative_zeros: Array = field(default_factory=lambda: np.empty(0, np.uint8))

    @property
    def nnz_stored(self) -> int:
        """Entries stored, marked zeros included."""
        return int(self.values.size)

    @property
    def size_bytes(self) -> int:
        """Bytes of the arrays."""
        arrays = (self.values, self.columns, self.nnz_per_row, self.row_order, self.negative_zeros)
        return sum(a.nbytes for a in arrays) + 8 * len(self.weight_shape)


def index_dtype(num_columns: int) -> np.dtype[Any]:
    """Type that the columns of a weight with ``num_columns`` columns are stored in."""
    return np.dtype(np.uint16 if num_columns <= MAX_UINT16_COLUMNS else np.uint32)


def nonzero_mask(weight: Array) -> NDArray[np.bool_]:
    """True where ``weight`` is neither +0 nor -0 (NaN is not zero). Same shape as ``weight``."""
    return np.asarray(weight != 0)


def negative_zero_bits(weight: Array) -> Array:
    """`UnifiedCSR.negative_zeros` of a dense weight."""
    mask = (weight == 0) & np.signbit(weight)
    return np.packbits(mask.reshape(-1)) if mask.any() else np.empty(0, np.uint8)


def row_lengths(weight: Array) -> NDArray[np.int64]:
    """Non-zeros of each output channel, ``[K]``."""
    lengths: NDArray[np.int64] = nonzero_mask(weight).reshape(weight.shape[0], -1).sum(axis=1, dtype=np.int64)
    return lengths


def order_rows(lengths: NDArray[np.int64], group: int = 1) -> NDArray[np.int32]:
    """Rows by falling number of non-zeros, stable, each within its convolution group.

    Rows stay in their group so that neighbouring rows read the same input channels.
    """
    per_group = lengths.size // group
    grouped = lengths.reshape(group, per_group)
    order = np.argsort(-grouped, axis=1, kind="stable") + per_group * np.arange(group)[:, None]
    return order.reshape(-1).astype(np.int32)


def slice_lengths(lengths: NDArray[np.int64], row_order: NDArray[np.int32], slice_height: int) -> NDArray[np.int64]:
    """Entries of every row of each slice: the longest row of the slice. ``[ceil(K / slice_height)]``."""
    starts = np.arange(0, lengths.size, slice_height)
    return np.maximum.reduceat(lengths[row_order], starts)


def stored_entries(lengths: NDArray[np.int64], row_order: NDArray[np.int32], slice_height: int) -> int:
    """Entries that the format would store, marked zeros included."""
    heights = np.minimum(slice_height, lengths.size - np.arange(0, lengths.size, slice_height))
    return int((slice_lengths(lengths, row_order, slice_height) * heights).sum())


def choose_slice_height(lengths: NDArray[np.int64], group: int = 1, max_padding: float = MAX_PADDING) -> int:
    """The largest slice height that stores at most ``max_padding`` entries a non-zero.

    Args:
        lengths: non-zeros of each output channel, ``[K]``.
        group: convolution groups; rows are only ordered within one.
        max_padding: bound on stored entries over non-zeros.

    Returns:
        ``K`` (one slice, rows in their own order) if that is within the bound, else the largest of
        `SLICE_HEIGHTS` that is, else the one that stores least.
    """
    out_channels = int(lengths.size)
    bound = max_padding * int(lengths.sum())
    if int(lengths.max()) * out_channels <= bound:
        return out_channels
    ordered = order_rows(lengths, group)
    sizes = {h: stored_entries(lengths, ordered, h) for h in SLICE_HEIGHTS if h < out_channels}
    within = [h for h, size in sizes.items() if size <= bound]
    if within:
        return max(within)
    return min(sizes, key=lambda h: sizes[h], default=out_channels)


def encode(weight: Array, group: int = 1, slice_height: int | None = None) -> UnifiedCSR:
    """Encode a dense convolution weight.

    Args:
        weight: ``[K, C / group, D1..Dn]``, float32 or float16, n >= 1.
        group: convolution groups; ``K`` is a multiple of it.
        slice_height: rows of a slice; ``None`` chooses (see `choose_slice_height`); ``K`` gives the paper's form.

    Returns:
        The arrays; ``decode`` of them has the bits of ``weight``. Every row stores at least one entry, an all-zero
        one too.

    Raises:
        FormatError: the dtype, the rank or a size is not one that the format can hold.
    """
    _check_weight(weight, group)
    out_channels = weight.shape[0]
    lengths = row_lengths(weight)
    height = choose_slice_height(lengths, group) if slice_height is None else min(slice_height, out_channels)
    if height < 1:
        raise FormatError(f"slice_height must be at least 1, got {slice_height}")
    one_slice = height == out_channels
    row_order = np.arange(out_channels, dtype=np.int32) if one_slice else order_rows(lengths, group)
    per_slice = slice_lengths(lengths, row_order, height)
    # Every row stores at least one entry, so that no consumer has to treat empty rows.
    per_slice = np.maximum(per_slice, 1)

    flat = np.ascontiguousarray(weight).reshape(out_channels, -1)
    mask = nonzero_mask(flat)
    columns, values = [], []
    for index, count in enumerate(per_slice.tolist()):
        end = min((index + 1) * height, out_channels)
        for first in range(index * height, end, ROWS_AT_A_TIME):
            rows = row_order[first : min(first + ROWS_AT_A_TIME, end)]
            chosen = _columns_to_store(mask[rows], lengths[rows], count)
            columns.append(chosen.reshape(-1))
            values.append(np.take_along_axis(flat[rows], chosen, axis=1).reshape(-1))
    stored = np.concatenate(values)
    stored[stored == 0] = 0  # a marked zero is +0, whatever the sign of the weight's
    return UnifiedCSR(
        values=stored,
        columns=np.concatenate(columns).astype(index_dtype(flat.shape[1])),
        nnz_per_row=per_slice.astype(np.int32),
        row_order=row_order,
        slice_height=height,
        weight_shape=tuple(int(d) for d in weight.shape),
        negative_zeros=negative_zero_bits(weight),
    )


def decode(csr: UnifiedCSR) -> Array:
    """Rebuild the dense weight, ``[K, C / group, D1..Dn]``, bit for bit.

    Raises:
        FormatError: the arrays contradict each other (see `validate`).
    """
    validate(csr)
    dense = np.zeros((csr.weight_shape[0], math.prod(csr.weight_shape[1:])), dtype=csr.values.dtype)
    dense[_row_of_entry(csr), csr.columns] = csr.values
    if csr.negative_zeros.size:
        negative = np.unpackbits(csr.negative_zeros, count=dense.size).reshape(dense.shape).view(bool)
        dense[negative & (dense == 0)] = -0.0
    return dense.reshape(csr.weight_shape)


def nonzero_entries(csr: UnifiedCSR) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Output channel and column of every non-zero, in the order they are stored. Needs no dense weight.

    Raises:
        FormatError: the arrays contradict each other (see `validate`).
    """
    validate(csr)
    stored = csr.values != 0
    return _row_of_entry(csr)[stored], csr.columns[stored].astype(np.int64)


def validate(csr: UnifiedCSR) -> None:
    """Check that the arrays agree with each other and with the weight's shape.

    Raises:
        FormatError: names the array, what was wanted and what was found.
    """
    shape = csr.weight_shape
    if len(shape) < 3 or any(d < 1 for d in shape):
        raise FormatError(f"weight_shape must be (K, C / group, D1..Dn) with positive sizes, got {shape}")
    if math.prod(shape) > MAX_WEIGHT_ELEMENTS:
        raise FormatError(f"weight_shape {shape} asks for more than {MAX_WEIGHT_ELEMENTS} elements")
    _check_dtypes(csr)
    out_channels, num_columns = shape[0], math.prod(shape[1:])
    if not 1 <= csr.slice_height <= out_channels:
        raise FormatError(f"slice_height must be 1 to {out_channels}, got {csr.slice_height}")
    if csr.negative_zeros.dtype != np.uint8 or csr.negative_zeros.size not in (0, -(-math.prod(shape) // 8)):
        raise FormatError(f"negative_zeros must be empty or one bit for each of {math.prod(shape)} weights")
    num_slices = -(-out_channels // csr.slice_height)
    if csr.nnz_per_row.shape != (num_slices,):
        raise FormatError(f"nnz_per_row must have {num_slices} entries, got shape {csr.nnz_per_row.shape}")
    if csr.nnz_per_row.min() < 1 or csr.nnz_per_row.max() > num_columns:
        raise FormatError(f"nnz_per_row must lie in 1..{num_columns}, got {csr.nnz_per_row.tolist()[:8]}")
    if csr.row_order.shape != (out_channels,) or (np.sort(csr.row_order) != np.arange(out_channels)).any():
        raise FormatError(f"row_order must be a permutation of 0..{out_channels - 1}")
    # Counted before anything is expanded: a few bytes can ask for gigabytes.
    heights = np.minimum(csr.slice_height, out_channels - csr.slice_height * np.arange(num_slices))
    entries = int((csr.nnz_per_row * heights).sum())
    if csr.values.shape != (entries,) or csr.columns.shape != (entries,):
        raise FormatError(
            f"nnz_per_row asks for {entries} entries, got {csr.values.size} values and {csr.columns.size} columns"
        )
    rows = _row_of_stored_entry(csr)
    columns = csr.columns.astype(np.int64)
    if columns.max() >= num_columns:
        raise FormatError(f"columns must be below {num_columns}, got {columns.max()}")
    falls = (np.diff(columns) <= 0) & (np.diff(rows) == 0)
    if falls.any():
        raise FormatError(f"columns must increase within a row; they do not at entry {int(np.argmax(falls)) + 1}")


def _check_dtypes(csr: UnifiedCSR) -> None:
    if csr.values.dtype not in VALUE_DTYPES:
        raise FormatError(f"values must be float32 or float16, got {csr.values.dtype}")
    if csr.columns.dtype not in COLUMN_DTYPES:
        raise FormatError(f"columns must be uint16 or uint32, got {csr.columns.dtype}")
    for name in ("nnz_per_row", "row_order"):
        array = getattr(csr, name)
        if array.dtype != np.int32:
            raise FormatError(f"{name} must be int32, got {array.dtype}")


def _check_weight(weight: Array, group: int) -> None:
    if weight.dtype not in VALUE_DTYPES:
        raise FormatError(f"a weight must be float32 or float16, got {weight.dtype}")
    if weight.ndim < 3 or weight.size == 0:
        raise FormatError(f"a weight must be [K, C / group, D1..Dn] without empty dimensions, got shape {weight.shape}")
    if group < 1 or weight.shape[0] % group:
        raise FormatError(f"{weight.shape[0]} output channels cannot be split into {group} groups")


def _columns_to_store(mask: NDArray[np.bool_], lengths: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """For each row, its non-zero columns and as many zeros as fill it to ``count``, ``[rows, count]``, increasing.

    The zeros taken are the ones nearest to a stored column, so that a row's reads stay contiguous.
    """
    if (lengths == count).all():
        return np.nonzero(mask)[1].reshape(mask.shape[0], count)
    distance = _distance_to_nonzero(mask)
    nearest = np.argsort(distance, axis=1, kind="stable")[:, :count]
    return np.sort(nearest, axis=1)


def _distance_to_nonzero(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Distance of every column to the nearest non-zero column of its row (0 for the non-zeros themselves)."""
    width = mask.shape[1]
    index = np.arange(width)
    before = np.maximum.accumulate(np.where(mask, index, -2 * width), axis=1)
    after = np.minimum.accumulate(np.where(mask, index, 3 * width)[:, ::-1], axis=1)[:, ::-1]
    return np.minimum(index - before, after - index)


def _row_of_stored_entry(csr: UnifiedCSR) -> NDArray[np.int64]:
    """Stored row (position in ``row_order``) of every entry."""
    per_row = np.repeat(csr.nnz_per_row, csr.slice_height)[: csr.weight_shape[0]]
    return np.repeat(np.arange(csr.weight_shape[0]), per_row)


def _row_of_entry(csr: UnifiedCSR) -> NDArray[np.int64]:
    """Output channel of every entry."""
    return csr.row_order[_row_of_stored_entry(csr)].astype(np.int64)
