"""Unified CSR: bit-exact both ways, small, and never fooled by broken arrays."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx_sparseconv.errors import FormatError
from onnx_sparseconv.kernels.unified_csr import (
    MAX_PADDING,
    SLICE_HEIGHTS,
    UnifiedCSR,
    choose_slice_height,
    decode,
    encode,
    index_dtype,
    nonzero_mask,
    order_rows,
    row_lengths,
    stored_entries,
    validate,
)
from tests.support.odd_models import pruned

# Bits worth keeping: +0, -0, 1, the smallest denormal, a negative denormal, inf, -inf, and NaN with payloads.
SPECIAL_BITS = {
    np.dtype(np.float32): (0, 0x80000000, 0x3F800000, 1, 0x80000001, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFF812345),
    np.dtype(np.float16): (0, 0x8000, 0x3C00, 1, 0x8001, 0x7C00, 0xFC00, 0x7E01, 0xFD23),
}
NEGATIVE_ZERO = {np.dtype(np.float32): 0x80000000, np.dtype(np.float16): 0x8000}
DTYPES = tuple(SPECIAL_BITS)


def bits(array):
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def rows_of(csr):
    """(output channel, columns, values) of every stored row."""
    start, result = 0, []
    for position, channel in enumerate(csr.row_order.tolist()):
        count = int(csr.nnz_per_row[position // csr.slice_height])
        result.append((channel, csr.columns[start : start + count], csr.values[start : start + count]))
        start += count
    assert start == csr.nnz_stored
    return result


@st.composite
def weights(draw):
    """Small weights of any bits, with rows from empty to full, of 1 to 3 spatial axes."""
    dtype = draw(st.sampled_from(DTYPES))
    group = draw(st.integers(1, 3))
    shape = (group * draw(st.integers(1, 12)), draw(st.integers(1, 4)))
    shape += tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    raw = rng.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8).view(f"u{dtype.itemsize}")[..., 0]
    special = np.asarray(SPECIAL_BITS[dtype], raw.dtype)
    raw = np.where(rng.random(shape) < 0.3, rng.choice(special, shape), raw)
    density = rng.choice([0.0, 0.05, 0.3, 1.0], shape[0]).reshape(-1, *[1] * (len(shape) - 1))
    raw[rng.random(shape) >= density] = 0
    return raw.view(dtype), group


@settings(deadline=None, max_examples=300)
@given(weights(), st.data())
def test_decode_gives_back_every_bit(weight_and_group, data):
    weight, group = weight_and_group
    height = data.draw(st.one_of(st.none(), st.integers(1, weight.shape[0] + 3)))
    csr = encode(weight, group, height)
    validate(csr)
    dense = decode(csr)
    assert dense.dtype == weight.dtype
    assert dense.shape == weight.shape
    np.testing.assert_array_equal(bits(dense), bits(weight))


@settings(deadline=None, max_examples=200)
@given(weights(), st.data())
def test_the_layout_is_that_of_the_specification(weight_and_group, data):
    weight, group = weight_and_group
    out_channels = weight.shape[0]
    height = data.draw(st.integers(1, out_channels))
    csr = encode(weight, group, height)
    lengths = row_lengths(weight)
    assert csr.slice_height == height
    assert sorted(csr.row_order.tolist()) == list(range(out_channels))
    flat = bits(weight).reshape(out_channels, -1)
    nonzero = nonzero_mask(weight).reshape(out_channels, -1)
    for position, (channel, columns, values) in enumerate(rows_of(csr)):
        in_slice = csr.row_order[position // height * height :][:height]
        assert len(columns) == max(1, lengths[in_slice].max())
        assert (np.diff(columns.astype(np.int64)) > 0).all()
        dense = flat[channel, columns]
        np.testing.assert_array_equal(bits(values), np.where(dense == NEGATIVE_ZERO[weight.dtype], 0, dense))
        assert set(np.flatnonzero(nonzero[channel])) <= set(columns.tolist())
    if height == out_channels:
        np.testing.assert_array_equal(csr.row_order, np.arange(out_channels))


@settings(deadline=None, max_examples=200)
@given(weights(), st.data())
def test_rows_are_ordered_by_length_within_their_group(weight_and_group, data):
    weight, group = weight_and_group
    per_group = weight.shape[0] // group
    height = data.draw(st.integers(1, max(1, weight.shape[0] - 1)))
    order = order_rows(row_lengths(weight), group)
    lengths = row_lengths(weight)[order]
    for index in range(group):
        part = slice(index * per_group, (index + 1) * per_group)
        assert set(order[part] // per_group) == {index}
        assert (np.diff(lengths[part]) <= 0).all()
        ties = np.diff(lengths[part]) == 0
        assert (np.diff(order[part])[ties] > 0).all()
    if height < weight.shape[0]:
        np.testing.assert_array_equal(encode(weight, group, height).row_order, order)


@settings(deadline=None, max_examples=200)
@given(weights())
def test_marked_zeros_lie_as_near_to_non_zeros_as_can_be(weight_and_group):
    weight, _ = weight_and_group
    csr = encode(weight, slice_height=weight.shape[0])
    mask = nonzero_mask(weight).reshape(weight.shape[0], -1)
    for channel, columns, _ in rows_of(csr):
        stored = np.flatnonzero(mask[channel])
        if not stored.size:
            continue
        distance = np.abs(np.arange(mask.shape[1])[:, None] - stored).min(axis=1)
        taken = np.zeros(mask.shape[1], bool)
        taken[columns] = True
        if not taken.all():
            assert distance[taken].max() <= distance[~taken].min()


@pytest.mark.parametrize("height", [None, 30, 64, 65, 100, 130, 200])
def test_layers_larger_than_what_is_encoded_in_one_go(height):
    weight = pruned((200, 5, 3, 3), 0.8)
    csr = encode(weight, slice_height=height)
    np.testing.assert_array_equal(bits(decode(csr)), bits(weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("height", [None, 1, 2, 7, 8, 16, 40, 1000])
def test_all_zero_and_fully_dense_weights(dtype, height):
    zero = np.zeros((40, 3, 3, 3), dtype)
    csr = encode(zero, slice_height=height)
    assert csr.nnz_stored == 40
    assert not bits(csr.values).any()
    np.testing.assert_array_equal(bits(decode(csr)), 0)
    full = np.ones_like(zero)
    csr = encode(full, slice_height=height)
    assert csr.nnz_stored == full.size
    np.testing.assert_array_equal(decode(csr), full)


def test_what_a_mask_leaves_counts_as_zero_and_keeps_its_sign():
    weight = np.full((4, 2, 3), -1, np.float32) * np.eye(24, dtype=np.float32)[3].reshape(4, 2, 3)
    assert np.signbit(weight).all()
    csr = encode(weight)
    assert row_lengths(weight).tolist() == [1, 0, 0, 0]
    assert csr.nnz_stored == 4
    assert not np.signbit(csr.values[1:]).any()
    assert csr.negative_zeros.size == 3
    np.testing.assert_array_equal(bits(decode(csr)), bits(weight))
    assert encode(np.abs(weight)).negative_zeros.size == 0


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((2, 1, 65536), np.uint16), ((2, 1, 65537), np.uint32), ((2, 7300, 3, 3), np.uint32)],
)
def test_columns_take_16_bits_where_they_fit(shape, dtype):
    weight = pruned(shape, 0.99)
    weight[..., -1] = 7
    csr = encode(weight)
    assert csr.columns.dtype == dtype == index_dtype(int(np.prod(shape[1:])))
    assert csr.columns.max() == np.prod(shape[1:]) - 1
    np.testing.assert_array_equal(decode(csr), weight)


def test_weights_of_any_memory_order_are_read_rightly():
    weight = pruned((6, 5, 3, 2))
    for other in (np.asfortranarray(weight), weight[::-1], weight.transpose(0, 2, 1, 3)):
        np.testing.assert_array_equal(decode(encode(other)), other)


def test_size_bytes_counts_the_arrays():
    csr = encode(pruned((64, 16, 3, 3)))
    assert csr.size_bytes == csr.nnz_stored * (4 + 2) + 4 * csr.nnz_per_row.size + 4 * 64 + 8 * 4
    half = encode(pruned((64, 16, 3, 3), dtype=np.float16))
    assert half.size_bytes == half.nnz_stored * (2 + 2) + 4 * half.nnz_per_row.size + 4 * 64 + 8 * 4


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 500), min_size=1, max_size=200))
def test_the_chosen_height_keeps_the_bound_or_is_the_best(lengths):
    lengths = np.asarray(lengths, np.int64)
    height = choose_slice_height(lengths)
    order = order_rows(lengths)
    whole = int(lengths.max()) * lengths.size
    bound = MAX_PADDING * lengths.sum()
    if whole <= bound:
        assert height == lengths.size
        return
    sizes = {h: stored_entries(lengths, order, h) for h in SLICE_HEIGHTS if h < lengths.size}
    if not sizes:
        assert height == lengths.size
    elif min(sizes.values()) <= bound:
        assert height == max(h for h, size in sizes.items() if size <= bound)
    else:
        assert sizes[height] == min(sizes.values())


def test_uneven_rows_are_sliced_and_stay_below_the_padding_bound():
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((256, 64, 3, 3)).astype(np.float32)
    weight[rng.random(weight.shape) >= rng.uniform(0.01, 0.3, (256, 1, 1, 1))] = 0
    csr = encode(weight)
    nonzeros = np.count_nonzero(weight)
    assert csr.slice_height in SLICE_HEIGHTS
    assert csr.nnz_stored <= MAX_PADDING * nonzeros
    assert encode(weight, slice_height=256).nnz_stored > 1.5 * nonzeros


def test_even_rows_are_stored_in_one_slice_without_filling():
    weight = np.zeros((32, 16, 3, 3), np.float32)
    weight[:, :2] = 1
    csr = encode(weight)
    assert csr.slice_height == 32
    assert csr.nnz_stored == 32 * 18


@pytest.mark.parametrize(
    ("weight", "group", "height", "says"),
    [
        (np.zeros((4, 2, 3), np.float64), 1, None, "float64"),
        (np.zeros((4, 2, 3), np.int32), 1, None, "int32"),
        (np.zeros((4, 2, 3), ">f4"), 1, None, ">f4"),
        (np.zeros((4, 2), np.float32), 1, None, "shape"),
        (np.zeros((), np.float32), 1, None, "shape"),
        (np.zeros((0, 2, 3), np.float32), 1, None, "empty"),
        (np.zeros((4, 2, 0), np.float32), 1, None, "empty"),
        (np.zeros((4, 2, 3), np.float32), 3, None, "3 groups"),
        (np.zeros((4, 2, 3), np.float32), 0, None, "0 groups"),
        (np.zeros((4, 2, 3), np.float32), -1, None, "-1 groups"),
        (np.zeros((4, 2, 3), np.float32), 1, 0, "slice_height"),
        (np.zeros((4, 2, 3), np.float32), 1, -5, "slice_height"),
    ],
)
def test_encode_refuses_what_the_format_cannot_hold(weight, group, height, says):
    with pytest.raises(FormatError, match=says):
        encode(weight, group, height)


# --- broken arrays ---------------------------------------------------------------------------------------------------


def good():
    """4 rows of 18 columns in slices of 3 rows with 2 and 1 entries."""
    weight = np.zeros((4, 2, 3, 3), np.float32)
    weight[0, 0, 0, :2] = 1
    weight[1, 1, 2, 2] = 2
    weight[2, 0, 1, 1] = 3
    return encode(weight, slice_height=3)


def i32(*values):
    return np.asarray(values, np.int32)


BROKEN = {
    "values too few": {"values": np.ones(6, np.float32)},
    "values too many": {"values": np.ones(8, np.float32)},
    "values two-dimensional": {"values": np.ones((7, 1), np.float32)},
    "values double": {"values": np.ones(7)},
    "values integers": {"values": np.ones(7, np.int32)},
    "values empty": {"values": np.ones(0, np.float32)},
    "columns too few": {"columns": np.arange(6, dtype=np.uint16)},
    "columns floats": {"columns": np.arange(7, dtype=np.float32)},
    "columns bool": {"columns": np.ones(7, bool)},
    "columns beyond the last": {"columns": np.asarray([0, 18, 0, 1, 0, 1, 0], np.uint16)},
    "columns twice": {"columns": np.asarray([0, 0, 0, 1, 0, 1, 0], np.uint16)},
    "columns falling": {"columns": np.asarray([1, 0, 0, 1, 0, 1, 0], np.uint16)},
    "columns negative": {"columns": np.asarray([-1, 0, 0, 1, 0, 1, 0], np.int64)},
    "columns signed": {"columns": np.asarray([0, 1, 0, 1, 0, 1, 0], np.int32)},
    "columns of 64 bits that wrap": {"columns": np.asarray([2**64 - 2, 0, 0, 1, 0, 1, 0], np.uint64)},
    "nnz_per_row zero": {"nnz_per_row": i32(2, 0)},
    "nnz_per_row negative": {"nnz_per_row": i32(2, -1)},
    "nnz_per_row huge": {"nnz_per_row": i32(2, 2**31 - 1)},
    "nnz_per_row more than columns": {"nnz_per_row": i32(2, 19)},
    "nnz_per_row too long": {"nnz_per_row": i32(2, 1, 1)},
    "nnz_per_row empty": {"nnz_per_row": i32()},
    "nnz_per_row floats": {"nnz_per_row": np.asarray([2.0, np.nan])},
    "nnz_per_row two-dimensional": {"nnz_per_row": i32(2, 1).reshape(2, 1)},
    "row_order twice": {"row_order": i32(0, 1, 1, 3)},
    "row_order beyond": {"row_order": i32(0, 1, 2, 4)},
    "row_order negative": {"row_order": i32(0, 1, 2, -1)},
    "row_order short": {"row_order": i32(0, 1, 2)},
    "row_order floats": {"row_order": np.arange(4.0)},
    "negative_zeros short": {"negative_zeros": np.zeros(8, np.uint8)},
    "negative_zeros long": {"negative_zeros": np.zeros(10, np.uint8)},
    "negative_zeros of another type": {"negative_zeros": np.zeros(9, np.int32)},
    "slice_height zero": {"slice_height": 0},
    "slice_height negative": {"slice_height": -3},
    "slice_height beyond": {"slice_height": 5},
    "slice_height huge": {"slice_height": 2**63 - 1},
    "shape of rank 2": {"weight_shape": (4, 18)},
    "shape empty": {"weight_shape": ()},
    "shape zero": {"weight_shape": (4, 0, 3, 3)},
    "shape negative": {"weight_shape": (4, -2, -3, 3)},
    "shape overflows": {"weight_shape": (2**32, 2**32, 1)},
    "shape of 2^31 elements": {"weight_shape": (4, 2**29, 1, 1)},
    "shape with more channels": {"weight_shape": (5, 2, 3, 3)},
    "shape with fewer columns": {"weight_shape": (4, 1, 1, 1)},
}


def test_the_form_that_is_broken_below_is_good():
    csr = good()
    validate(csr)
    np.testing.assert_array_equal(csr.nnz_per_row, [2, 1])
    assert csr.nnz_stored == 7


@pytest.mark.parametrize("changes", BROKEN.values(), ids=BROKEN.keys())
def test_broken_arrays_are_refused(changes):
    broken = dataclasses.replace(good(), **changes)
    for check in (validate, decode):
        with pytest.raises(FormatError):
            check(broken)


def test_counts_that_ask_for_gigabytes_are_refused_before_anything_is_allocated(monkeypatch):
    """A few bytes can ask for 2^31 entries; the arrays that are there must be counted first."""
    monkeypatch.setattr(np, "repeat", lambda *_: pytest.fail("expanded before the sizes were compared"))
    huge = UnifiedCSR(np.ones(1, np.float32), np.zeros(1, np.uint32), i32(2**31 - 1), i32(0), 1, (1, 1, 2**31 - 1))
    with pytest.raises(FormatError, match="entries"):
        validate(huge)


ARRAYS = st.builds(
    lambda values, dtype, ndim: np.asarray(values).astype(dtype).reshape((-1,) + (1,) * ndim),
    st.lists(st.integers(-3, 40), max_size=12),
    st.sampled_from(["f4", "f2", "f8", "u1", "u2", "u4", "u8", "i1", "i4", "i8", "?", ">f4", ">i4", "c8"]),
    st.sampled_from([0, 0, 0, 1]),
)
SIZES = st.one_of(st.integers(-2, 6), st.sampled_from([2**16, 2**31, 2**32, 2**63 - 1, -(2**63)]))


@settings(deadline=None, max_examples=500)
@given(st.data())
def test_validate_raises_format_error_and_nothing_else(data):
    csr = good()
    fields = data.draw(st.sets(st.sampled_from([f.name for f in dataclasses.fields(csr)]), min_size=1, max_size=3))
    changes = {}
    for name in sorted(fields):
        if name == "slice_height":
            changes[name] = data.draw(SIZES)
        elif name == "weight_shape":
            changes[name] = tuple(data.draw(st.lists(SIZES, max_size=5)))
        else:
            changes[name] = data.draw(ARRAYS)
    broken = dataclasses.replace(csr, **changes)
    try:
        dense = decode(broken)
    except FormatError:
        return
    # What is accepted can be encoded again, to the same weight.
    np.testing.assert_array_equal(bits(decode(encode(dense))), bits(dense))
