"""Random nodes and inputs of every form, for property tests of the kernels."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
from hypothesis import strategies as st

from onnx_sparseconv.custom_ops.schema import MAX_CONCAT_INPUTS, Activation, ConvGeometry, PoolGeometry
from tests.support.sparse_models import SparseConvCase, random_weight, resolve

ACTIVATION_PARAMETERS = {
    Activation.CLIP: (-0.5, 1.25),
    Activation.LEAKY_RELU: (0.1, 0.0),
    Activation.HARD_SIGMOID: (0.2, 0.5),
}


@st.composite
def cases(draw, ranks=(1, 2, 3), longest=None, pooled=True):
    """A case and a shape of X that fits it.

    Args:
        ranks: numbers of spatial axes to draw from.
        longest: by how much an axis of X may exceed what the kernel needs, by the number of spatial axes.
        pooled: whether some of them pool.
    """
    rank = draw(st.sampled_from(ranks))
    group = draw(st.sampled_from([1, 1, 2, 3]))
    group_channels, group_rows = draw(st.sampled_from([(1, 1), (1, 2), (3, 2), (5, 7), (4, 36)]))
    per_axis = st.lists(st.integers(1, 3), min_size=rank, max_size=rank)
    kernel = tuple(draw(st.lists(st.integers(1, 4 if rank < 3 else 3), min_size=rank, max_size=rank)))
    strides, dilations = tuple(draw(per_axis)), tuple(draw(per_axis))
    auto_pad = draw(st.sampled_from(["NOTSET", "NOTSET", "SAME_UPPER", "SAME_LOWER"]))
    pads = tuple(draw(st.lists(st.integers(0, 3), min_size=2 * rank, max_size=2 * rank)))
    if auto_pad == "NOTSET":
        geometry = ConvGeometry(kernel, strides, pads, dilations, group)
    else:
        geometry = ConvGeometry(kernel, strides, (), (1,) * rank, group, auto_pad)
    dtype = np.dtype(draw(st.sampled_from([np.float32, np.float16])))
    activation = draw(st.sampled_from(list(Activation)))
    alpha, beta = ACTIVATION_PARAMETERS.get(activation, (0.0, 0.0))
    out_channels = group * group_rows
    weight = random_weight(
        (out_channels, group_channels, *kernel),
        draw(st.sampled_from([0.0, 0.1, 0.4, 1.0])),
        draw(st.integers(0, 1000)),
        draw(st.sampled_from([np.float32, np.float16])),
    )
    if draw(st.booleans()):
        weight[:: draw(st.integers(2, 4))] = 0  # some rows are empty
    case = SparseConvCase(
        weight,
        geometry,
        activation,
        alpha,
        beta,
        dtype,
        has_bias=draw(st.booleans()),
        has_residual=draw(st.booleans()),
        slice_height=draw(st.sampled_from([None, 1, 2, 8, out_channels])),
    )
    longest_axis = (longest or {1: 400, 2: 30, 3: 9})[rank]
    sizes = []
    for i in range(rank):
        extent = (kernel[i] - 1) * geometry.dilations[i] + 1
        padding = 0 if geometry.auto_pad != "NOTSET" else pads[i] + pads[rank + i]
        # A SAME padding makes up for a small input; other paddings only in part.
        smallest = 1 if geometry.auto_pad != "NOTSET" else max(1, extent - padding)
        sizes.append(draw(st.integers(smallest, smallest + longest_axis)))
    if pooled and not case.has_residual and draw(st.booleans()):
        case = dataclasses.replace(case, pool=draw(pools([out for _, _, out in resolve(geometry, sizes)])))
    return case, (draw(st.integers(1, 3)), case.in_channels, *sizes)


@st.composite
def depthwise_cases(draw, pooled=True):
    """A case whose maps the CPU kernel computes one by one, or nearly such a one, and a shape of X that fits it."""
    kernel, dilation = draw(st.sampled_from([1, 3, 5, 7])), draw(st.integers(1, 3))
    stride = draw(st.sampled_from([1, 1, 2, 2, 3]))
    pads = tuple(draw(st.lists(st.integers(0, 4), min_size=4, max_size=4))) if kernel > 1 else (0,) * 4
    group, multiplier = draw(st.integers(2, 9)), draw(st.integers(1, 2))
    geometry = ConvGeometry((kernel,) * 2, (stride,) * 2, pads, (draw(st.sampled_from([1, dilation])), dilation), group)
    activation = draw(st.sampled_from(list(Activation)))
    alpha, beta = ACTIVATION_PARAMETERS.get(activation, (0.0, 0.0))
    case = SparseConvCase(
        random_weight(
            (group * multiplier, 1, kernel, kernel), draw(st.sampled_from([0.4, 1.0])), draw(st.integers(0, 99))
        ),
        geometry,
        activation,
        alpha,
        beta,
        has_bias=draw(st.booleans()),
        has_residual=draw(st.booleans()),
    )
    extents = [(kernel - 1) * d + 1 for d in geometry.dilations]
    smallest = [max(1, extents[i] - pads[i] - pads[2 + i]) for i in range(2)]
    sizes = [draw(st.integers(least, least + longest)) for least, longest in zip(smallest, (13, 70), strict=True)]
    if pooled and not case.has_residual and draw(st.booleans()):
        case = dataclasses.replace(case, pool=draw(pools([out for _, _, out in resolve(geometry, sizes)])))
    return case, (draw(st.integers(1, 3)), case.in_channels, *sizes)


@st.composite
def concat_cases(draw, **limits):
    """The same of nodes that concatenate their inputs to X; ``limits`` are those of `cases`."""

    def is_possible(drawn):
        case, _ = drawn
        is_depthwise = case.geometry.group == case.in_channels == case.weight.shape[0]
        return case.in_channels > 1 and (case.geometry.group == 1 or is_depthwise)

    case, x_shape = draw(st.one_of(cases(pooled=False, **limits), depthwise_cases(pooled=False)).filter(is_possible))
    most = min(case.in_channels, MAX_CONCAT_INPUTS)
    count = draw(st.integers(2, most))
    ends = sorted(draw(st.sets(st.integers(1, case.in_channels - 1), min_size=count - 1, max_size=count - 1)))
    bounds = [0, *ends, case.in_channels]
    parts = tuple(end - begin for begin, end in itertools.pairwise(bounds))
    return dataclasses.replace(case, has_residual=False, input_channels=parts), x_shape


@st.composite
def pools(draw, sizes):
    """A pool that maps of these sizes have room for; every other one of 2x2 side by side where they do for that."""
    n = len(sizes)
    if min(sizes) >= 2 and draw(st.booleans()):
        return PoolGeometry((2,) * n, (2,) * n, (0,) * (2 * n))
    kernel = [draw(st.integers(1, min(4, size))) for size in sizes]
    pads = [draw(st.integers(0, k - 1)) for k in (*kernel, *kernel)]
    return PoolGeometry(tuple(kernel), tuple(draw(st.integers(1, 3)) for _ in range(n)), tuple(pads))
