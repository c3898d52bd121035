"""Models with something wrong around a convolution: conversion neither breaks down nor changes what still runs."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import ModelProto, helper, numpy_helper

from onnx_sparseconv.converter import convert
from onnx_sparseconv.errors import ModelError
from tests.passes import test_activations, test_fold_pad, test_fold_scale_after, test_fold_scale_before
from tests.support import plain_ort
from tests.support.odd_models import tensor
from tests.support.pass_models import FORCE, assert_close, run
from tests.support.plain_ort import inputs_for

MAKERS = [
    *test_fold_scale_after.FOLDED.values(),
    *test_fold_scale_before.FOLDED.values(),
    *test_fold_pad.FOLDED.values(),
    *(make for make, _, _ in test_activations.KNOWN.values()),
]
SHAPES = [(), (0,), (1,), (2,), (8,), (1, 8), (8, 1, 1), (1, 8, 1, 1), (8, 8, 1, 1), (1, 1, 1, 1, 1)]
DTYPES = [np.float32, np.float16, np.float64, np.int64, np.bool_, np.str_]


def spoiled(proto: ModelProto, which: int, change: str, shape: tuple[int, ...], dtype: type) -> ModelProto:
    """The model with one constant or attribute replaced, or one input left out."""
    if change == "attribute":
        attributes = [a for n in proto.graph.node if n.op_type != "Conv" for a in n.attribute]
        if attributes:
            attribute = attributes[which % len(attributes)]
            other = {1: [1.0, 2.0], 2: "reflect", 3: 7, 7: [1], 6: 0.5}.get(attribute.type, -1)
            attribute.CopyFrom(helper.make_attribute(attribute.name, other))
    elif change == "input":
        node = [n for n in proto.graph.node if n.op_type != "Conv"][which % (len(proto.graph.node) - 1)]
        node.input[which % len(node.input)] = ""
    else:
        # ONNX Runtime 1.20 does not look at the shape of a bias.
        constants = [t for t in proto.graph.initializer if t.name not in ("W", "bias")]
        if constants:
            constant = constants[which % len(constants)]
            if change == "dtype":
                shape = tuple(constant.dims)
            if change == "shape":
                dtype = numpy_helper.to_array(constant).dtype.type
            values = np.random.default_rng(which).uniform(-2, 2, shape)
            constant.CopyFrom(
                tensor(values.astype("U3").astype(object) if dtype is np.str_ else values.astype(dtype), constant.name)
            )
    return proto


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    make=st.sampled_from(MAKERS),
    which=st.integers(0, 7),
    change=st.sampled_from(["shape", "dtype", "both", "attribute", "input"]),
    shape=st.sampled_from(SHAPES),
    dtype=st.sampled_from(DTYPES),
)
def test_something_is_wrong(make, which, change, shape, dtype) -> None:
    proto = spoiled(make(), which, change, shape, dtype)
    try:
        converted, _ = convert(proto, options=FORCE)
    except ModelError:
        return
    feed = {"shape": np.array((2, 8, 6, 6))} | inputs_for(proto)
    try:
        # Its optimiser does not mind all that its operators refuse.
        plain_ort.run(proto, feed, optimise=False)
        expected = run(proto, feed)
    except Exception:  # ONNX Runtime does not take it, so there is nothing to compare
        return
    if converted is not None and all(np.isfinite(e).all() for e in expected):
        assert_close(run(converted, feed), expected, 1e-4)
        assert_close(run(converted, feed, library=True), expected, 1e-4)
