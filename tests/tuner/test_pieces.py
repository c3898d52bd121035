"""A layer cut out of a model computes, with its neighbours, what it computes in the model."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from onnx_sparseconv.converter import ConvertOptions, convert
from onnx_sparseconv.converter.analyse import make_plan
from onnx_sparseconv.converter.decide import DecisionOptions
from onnx_sparseconv.converter.model_io import load
from onnx_sparseconv.errors import ModelError, UsageError
from onnx_sparseconv.runtime.session import make_session
from onnx_sparseconv.tuner.options import Case, make_cases
from onnx_sparseconv.tuner.pieces import bytes_read, cut, run_for_shapes
from onnx_sparseconv.tuner.regions import RegionFinder
from tests.support import architectures
from tests.support.odd_models import FEEDS, conv, model, pruned, tensor, value


class Cutter:
    """All regions of a model, and pieces of them."""

    def __init__(self, proto, case=Case(), *, pools=False):  # noqa: B008
        self.plan = make_plan(load(proto), DecisionOptions())
        self.finder = RegionFinder(self.plan.view, pools=pools)
        self.regions = list(self.finder.find(self.plan.sites).values())
        names = list(dict.fromkeys(t.name for region in self.regions for t in region.inputs))
        self.inputs, self.shapes = run_for_shapes(self.plan.view.proto, names, case)

    def piece(self, region):
        return cut(self.plan.view, self.finder, region, self.shapes)

    def ops(self):
        return {region.site.name: [node.op for node in region.nodes] for region in self.regions}


def run_with_outputs(proto, names, feed):
    """A model's tensors of these names."""
    shown = onnx.ModelProto()
    shown.CopyFrom(proto)
    have = {o.name for o in shown.graph.output}
    shown.graph.output.extend(onnx.ValueInfoProto(name=n) for n in dict.fromkeys(names) if n not in have)
    return dict(zip(names, make_session(shown, use_library=False).run(names, feed), strict=True))


def assert_pieces_compute_what_the_model_does(proto, case=Case()):  # noqa: B008
    cutter = Cutter(proto, case)
    rng = np.random.default_rng(3)
    feed = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in cutter.inputs.items()}
    computed = [t.name for r in cutter.regions for t in (*r.inputs, r.output) if t.name not in feed]
    values = feed | run_with_outputs(cutter.plan.view.proto, list(dict.fromkeys(computed)), feed)
    for region in cutter.regions:
        piece = cutter.piece(region).model
        onnx.checker.check_model(piece)
        inputs = {f"x{i}": values[t.name] for i, t in enumerate(region.inputs)}
        wanted = values[region.output.name]
        sparse, report = convert(piece, options=ConvertOptions(force=True))
        assert report.model.num_rewritten == 1
        for made in (piece, sparse):
            (got,) = make_session(made).run(None, inputs)
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * max(1.0, np.abs(wanted).max()))
    return cutter


@pytest.mark.parametrize("make", [architectures.vgg, architectures.resnet, architectures.densenet])
def test_pieces_of_networks(make):
    cutter = assert_pieces_compute_what_the_model_does(make(), Case(batch=2))
    assert all(shape[0] == 2 for shape in cutter.shapes.values())
    nodes = [id(node) for region in cutter.regions for node in region.nodes]
    assert len(nodes) == len(set(nodes))


def test_mobilenet_with_its_depthwise_layers():
    cutter = assert_pieces_compute_what_the_model_does(architectures.mobilenet_v2())
    assert {tuple(ops) for ops in cutter.ops().values()} >= {("Conv", "BatchNormalization", "Clip")}


def test_a_residual_goes_to_the_later_convolution():
    ops = Cutter(architectures.resnet()).ops()
    assert sum("Add" in found for found in ops.values()) == 4
    assert all(found[-1] == "Relu" for found in ops.values() if "Add" in found)


def nodes(*rows):
    return [helper.make_node(op, i.split(), o.split(), name=o.split()[0], **a) for op, i, o, a in rows]


WEIGHTS = [
    tensor(pruned(), "W"),
    tensor(pruned((8, 8, 3, 3)), "V"),
    tensor(np.float32(3), "three"),
    tensor(np.float32(6), "six"),
    tensor(np.float32(0), "zero"),
    tensor(np.array([0, 0, 1, 1, 0, 0, 1, 1]), "pads", np.int64),
]
BEHIND = {
    "silu": ([("Sigmoid", "c", "s", {}), ("Mul", "c s", "Y", {})], ["Conv", "Sigmoid", "Mul"]),
    "hard-swish": (
        [
            ("Add", "c three", "a", {}),
            ("Clip", "a zero six", "b", {}),
            ("Mul", "c b", "m", {}),
            ("Div", "m six", "Y", {}),
        ],
        ["Conv", "Add", "Clip", "Mul", "Div"],
    ),
    "read-by-others": ([("Relu", "c", "r", {}), ("Tanh", "c", "t", {}), ("Add", "r t", "Y", {})], ["Conv"]),
    "tanh": ([("Tanh", "c", "Y", {})], ["Conv", "Tanh"]),
    "softmax": ([("Softmax", "c", "Y", {})], ["Conv"]),
    "after-an-activation": ([("Relu", "c", "r", {}), ("Mul", "r three", "Y", {})], ["Conv", "Relu"]),
    "runtime-scale": ([("Mul", "c E", "Y", {})], ["Conv"]),
    "runtime-sum": ([("Add", "c E", "r", {}), ("Relu", "r", "Y", {})], ["Conv", "Add", "Relu"]),
    "doubled": ([("Add", "c c", "Y", {})], ["Conv"]),
}


@pytest.mark.parametrize("name", BEHIND)
def test_what_follows_a_convolution(name):
    rows, wanted = BEHIND[name]
    proto = model([conv(out="c"), *nodes(*rows)], WEIGHTS, [value("X", (2, 16, 6, 6)), value("E", (2, 8, 6, 6))])
    if not any("E" in inputs.split() for _, inputs, _, _ in rows):
        del proto.graph.input[1]
    assert assert_pieces_compute_what_the_model_does(proto).ops() == {"conv": wanted}


POOL = ("MaxPool", "r", "Y", {"kernel_shape": [2, 2], "strides": [2, 2]})
BEFORE_A_POOL = {
    "relu": ([("Relu", "c", "r", {})], True),
    "nothing": ([("Identity", "c", "r", {})], True),
    "residual": ([("Add", "c E", "a", {}), ("Relu", "a", "r", {})], False),
    "an activation that stays": ([("Tanh", "c", "r", {})], False),
    "a scale that is not folded": ([("Mul", "c places", "r", {})], False),
    "read by others": ([("Relu", "c", "r", {}), ("Neg", "r", "n", {})], False),
}


@pytest.mark.parametrize("name", BEFORE_A_POOL)
def test_a_pool_belongs_to_a_region_where_it_will_be_fused(name):
    rows, fused = BEFORE_A_POOL[name]
    places = tensor(np.linspace(1, 2, 36, dtype=np.float32).reshape(1, 1, 6, 6), "places")
    inputs = [value("X", (2, 16, 6, 6)), value("E", (2, 8, 6, 6))]
    proto = model([conv(out="c"), *nodes(*rows, POOL)], [*WEIGHTS, places], inputs)
    (found,) = Cutter(proto, pools=True).ops().values()
    assert ("MaxPool" in found) == fused
    assert "MaxPool" not in Cutter(proto).ops()["conv"]
    converted, _ = convert(proto, options=ConvertOptions(force=True, fuse_pools=True))
    assert ("MaxPool" not in [n.op_type for n in converted.graph.node]) == fused


def test_an_output_of_the_graph_is_not_swallowed():
    proto = model(
        [conv(out="c"), *nodes(("Relu", "c", "Y", {}))],
        WEIGHTS,
        outputs=[value("Y", list("abcd")), value("c", list("efgh"))],
    )
    assert Cutter(proto).ops() == {"conv": ["Conv"]}


def test_padding_and_scales_before_a_convolution_belong_to_it():
    rows = nodes(("Mul", "X three", "m", {}), ("Pad", "m pads", "p", {}))
    proto = model([*rows, conv(source="p", pads=[0] * 4)], WEIGHTS)
    assert assert_pieces_compute_what_the_model_does(proto).ops() == {"conv": ["Mul", "Pad", "Conv"]}


def test_a_scale_between_two_convolutions_belongs_to_the_first():
    proto = model(
        [conv(out="c", name="first"), *nodes(("Mul", "c three", "m", {})), conv("V", source="m", name="second")],
        WEIGHTS,
    )
    assert Cutter(proto).ops() == {"first": ["Conv", "Mul"], "second": ["Conv"]}


def test_only_the_main_graph_has_regions():
    for feed in ("outer-if-twice", "function-inside"):
        cutter = Cutter(FEEDS[feed].build())
        assert all(region.site.scope.path == "" for region in cutter.regions)


def test_the_hash_is_of_the_content_and_the_likeness_of_the_form():
    def piece(proto):
        cutter = Cutter(proto)
        return cutter.piece(cutter.regions[0])

    def one(weight, name="conv", size=6):
        renamed = conv("W_" + name, name=name)
        return model([renamed], [tensor(weight, "W_" + name)], [value("X", (2, 16, size, size))])

    base = piece(one(pruned()))
    assert piece(one(pruned(), name="other")).layer == base.layer
    shuffled = piece(one(np.ascontiguousarray(pruned()[:, ::-1])))
    assert (shuffled.layer == base.layer, shuffled.likeness == base.likeness) == (False, True)
    for other in (one(pruned(sparsity=0.8)), one(pruned(), size=7), one(pruned((4, 16, 3, 3)))):
        assert piece(other).likeness != base.likeness
    crowded = np.zeros_like(pruned())
    crowded[0].reshape(-1)[: np.count_nonzero(pruned())] = 1
    assert piece(one(crowded)).likeness != base.likeness


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(UsageError, match="fixes the batch size"):
        Cutter(model([conv()], WEIGHTS[:1]), Case(batch=3))
    with pytest.raises(UsageError, match="has no input Z"):
        Cutter(model([conv()], WEIGHTS[:1]), Case(shapes={"Z": (1,)}))
    empty = model([conv()], WEIGHTS[:1])
    empty.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "H"
    *others, width = (dim.dim_value for dim in empty.graph.input[0].type.tensor_type.shape.dim)
    shape = (*others[:2], 0, width)
    with pytest.raises(UsageError, match=r"input X is empty \(\d+x\d+x0x\d+\)"):
        Cutter(empty, Case(shapes={"X": shape}))


def test_a_shape_that_is_not_known_is_said():
    cutter = Cutter(model([conv()], WEIGHTS[:1]))
    with pytest.raises(ModelError, match="shape of 'X' is not known"):
        cut(cutter.plan.view, cutter.finder, cutter.regions[0], {})


def test_cases_from_options():
    assert make_cases() == (Case(),)
    assert make_cases([1, 16]) == (Case(1), Case(16))
    assert make_cases([], ["a:1x2", "b:3"]) == (Case(None, {"a": (1, 2), "b": (3,)}),)
    assert make_cases([], ["a:1", "a:2"]) == (Case(None, {"a": (1,)}), Case(None, {"a": (2,)}))
    with pytest.raises(UsageError, match="needs all of a, b"):
        make_cases([], ["a:1", "b:1", "a:2"])


def test_what_a_model_reads_is_its_constants_and_its_layers_inputs():
    weight, other = tensor(pruned(), "W"), tensor(np.zeros((7, 3), np.float16), "k")
    proto = model([conv(name="a"), conv(out="Z", name="b")], [weight, other])
    cutter = Cutter(proto)
    constants = numpy_helper.to_array(weight).nbytes + 42
    assert bytes_read(proto, cutter.regions, {"X": (2, 16, 6, 6)}) == constants + 4 * 2 * 16 * 6 * 6
    assert bytes_read(proto, cutter.regions, {}) == constants
