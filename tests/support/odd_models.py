"""A zoo of small models: every way to feed a Conv its weight, and models with all that ONNX allows beside it.

All are made in memory and run in a plain ONNX Runtime from 1.20 on. Weights are seeded, so that a model is the same
at every call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    ValueInfoProto,
    helper,
    numpy_helper,
)

from onnx_sparseconv.converter.report import Reason

IR_VERSION = 8
OPSET = 17
SHAPE = (8, 16, 3, 3)
INPUT_SHAPE = (2, 16, 6, 6)
ANY_SHAPE = ("a", "b", "c", "d")
LOCAL = "local.functions"


def pruned(
    shape: Sequence[int] = SHAPE, sparsity: float = 0.9, dtype: Any = np.float32, seed: int = 0
) -> np.ndarray[Any, Any]:
    """A weight with exactly ``round(sparsity * size)`` zeros at random places."""
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal(shape).astype(dtype)
    weight[weight == 0] = 1
    flat = weight.reshape(-1)
    flat[rng.permutation(flat.size)[: round(sparsity * flat.size)]] = 0
    return weight


def tensor(values: Any, name: str, dtype: Any = None) -> TensorProto:
    return numpy_helper.from_array(np.asarray(values, dtype, order="C"), name)


def value(name: str, shape: Sequence[int | str | None] | None, element_type: int = TensorProto.FLOAT) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, element_type, shape)


def conv(weight: str = "W", out: str = "Y", source: str = "X", name: str = "conv", **attributes: Any) -> NodeProto:
    attributes.setdefault("pads", [1, 1, 1, 1])
    return helper.make_node("Conv", [source, weight], [out], name=name, **attributes)


def constant(name: str, values: Any, dtype: Any = None) -> NodeProto:
    return helper.make_node("Constant", [], [name], value=tensor(values, name, dtype))


def graph(
    nodes: Sequence[NodeProto],
    initializers: Sequence[TensorProto] = (),
    inputs: Sequence[ValueInfoProto] | None = None,
    outputs: Sequence[ValueInfoProto] | None = None,
) -> GraphProto:
    return helper.make_graph(
        list(nodes),
        "g",
        [value("X", INPUT_SHAPE)] if inputs is None else list(inputs),
        [value("Y", ANY_SHAPE)] if outputs is None else list(outputs),
        list(initializers),
    )


def model(
    nodes: Sequence[NodeProto],
    initializers: Sequence[TensorProto] = (),
    inputs: Sequence[ValueInfoProto] | None = None,
    outputs: Sequence[ValueInfoProto] | None = None,
    *,
    opset: int = OPSET,
    ir_version: int = IR_VERSION,
    functions: Sequence[FunctionProto] = (),
) -> ModelProto:
    """A model; input ``X`` of `INPUT_SHAPE` and output ``Y`` unless others are given."""
    imports = [helper.make_opsetid("", opset)]
    if functions:
        imports.append(helper.make_opsetid(LOCAL, 1))
    return helper.make_model(
        graph(nodes, initializers, inputs, outputs),
        opset_imports=imports,
        ir_version=ir_version,
        functions=list(functions),
    )


def function(
    name: str,
    inputs: Sequence[str],
    nodes: Sequence[NodeProto],
    *,
    attributes: Sequence[str] = (),
    opset: int = OPSET,
) -> FunctionProto:
    """A model-local function with output ``y``."""
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(LOCAL, 1)]
    return helper.make_function(LOCAL, name, list(inputs), ["y"], list(nodes), imports, list(attributes))


def call(name: str, inputs: Sequence[str], output: str = "Y", label: str = "", **attributes: Any) -> NodeProto:
    return helper.make_node(name, list(inputs), [output], name=label or f"call_{output}", domain=LOCAL, **attributes)


def sparse(weight: np.ndarray[Any, Any], name: str, *, flat: bool = True) -> onnx.SparseTensorProto:
    indices = np.flatnonzero(weight) if flat else np.argwhere(weight)
    return helper.make_sparse_tensor(
        tensor(weight[weight != 0], name), tensor(indices, f"{name}_indices", np.int64), list(weight.shape)
    )


def branch(nodes: Sequence[NodeProto], output: str, initializers: Sequence[TensorProto] = ()) -> GraphProto:
    return helper.make_graph(list(nodes), f"branch_{output}", [], [value(output, None)], list(initializers))


def if_node(then: GraphProto, otherwise: GraphProto, out: str = "Y", name: str = "if", cond: str = "C") -> NodeProto:
    return helper.make_node("If", [cond], [out], name=name, then_branch=then, else_branch=otherwise)


def x_and_condition() -> list[ValueInfoProto]:
    return [value("X", INPUT_SHAPE), value("C", [], TensorProto.BOOL)]


def dense_branch(output: str = "else_out") -> GraphProto:
    """The other branch of an If: something of the Conv's output shape."""
    nodes = [constant("axis_ends", [8], np.int64), constant("zero", [0], np.int64), constant("one", [1], np.int64)]
    nodes.append(helper.make_node("Slice", ["X", "zero", "axis_ends", "one"], [output]))
    return branch(nodes, output)


# --- every way to feed a weight ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Feed:
    """A model whose Conv gets its weight in some way.

    Attributes:
        build: makes the model.
        reason: the verdict's reason without force, for every Conv of the model.
        forced: how many Conv are rewritten with force.
        source: how the report says that the weight is fed; None where there is nothing to say.
        kept: names of tensors and node outputs that stay although the weight was rewritten.
    """

    build: Callable[[], ModelProto]
    reason: Reason = Reason.REWRITE
    forced: int = 1
    source: str | None = "initializer"
    kept: tuple[str, ...] = ()


def _initializer() -> ModelProto:
    return model([conv()], [tensor(pruned(), "W")])


def _typed_fields() -> ModelProto:
    weight = pruned()
    data = helper.make_tensor("W", TensorProto.FLOAT, weight.shape, weight.ravel().tolist())
    return model([conv()], [data])


def _half() -> ModelProto:
    io = [value("X", INPUT_SHAPE, TensorProto.FLOAT16)], [value("Y", ANY_SHAPE, TensorProto.FLOAT16)]
    return model([conv()], [tensor(pruned(dtype=np.float16), "W")], *io)


def _half_typed_fields() -> ModelProto:
    weight = pruned(dtype=np.float16)
    data = helper.make_tensor("W", TensorProto.FLOAT16, weight.shape, weight.ravel().tolist())
    assert data.int32_data
    io = [value("X", INPUT_SHAPE, TensorProto.FLOAT16)], [value("Y", ANY_SHAPE, TensorProto.FLOAT16)]
    return model([conv()], [data], *io)


def _constant() -> ModelProto:
    return model([constant("W", pruned()), conv()])


def _constant_sparse(flat: bool = True) -> ModelProto:
    node = helper.make_node("Constant", [], ["W"], sparse_value=sparse(pruned(), "W", flat=flat))
    return model([node, conv()])


def _constant_floats() -> ModelProto:
    floats = helper.make_node("Constant", [], ["flat"], value_floats=pruned().ravel().tolist())
    shape = helper.make_node("Constant", [], ["shape"], value_ints=list(SHAPE))
    return model([floats, shape, helper.make_node("Reshape", ["flat", "shape"], ["W"]), conv()])


def _constant_float_expanded() -> ModelProto:
    number = helper.make_node("Constant", [], ["number"], value_float=0.25)
    nodes = [number, constant("shape", SHAPE, np.int64), helper.make_node("Expand", ["number", "shape"], ["W"])]
    return model([*nodes, conv()])


def _constant_ints() -> ModelProto:
    weight = np.rint(pruned() * 4).astype(np.int64)
    ints = helper.make_node("Constant", [], ["ints"], value_ints=weight.ravel().tolist())
    cast = helper.make_node("Cast", ["ints"], ["floats"], to=TensorProto.FLOAT)
    reshape = helper.make_node("Reshape", ["floats", "shape"], ["W"])
    return model([ints, cast, constant("shape", SHAPE, np.int64), reshape, conv()])


def _constant_int_expanded() -> ModelProto:
    number = helper.make_node("Constant", [], ["number"], value_int=3)
    cast = helper.make_node("Cast", ["number"], ["float"], to=TensorProto.FLOAT)
    nodes = [number, cast, constant("shape", SHAPE, np.int64), helper.make_node("Expand", ["float", "shape"], ["W"])]
    return model([*nodes, conv()])


def _through(op: str, stored: np.ndarray[Any, Any], *inputs: TensorProto, opset: int = OPSET, **attributes: Any) -> Any:
    """The weight is ``op(stored, *inputs)``."""

    def build() -> ModelProto:
        names = ["stored", *(t.name for t in inputs)]
        node = helper.make_node(op, names, ["W"], name=f"make_{op}", **attributes)
        return model([node, conv()], [tensor(stored, "stored"), *inputs], opset=opset)

    return build


def _chain() -> ModelProto:
    """Constant, Identity, Cast, Transpose, Unsqueeze, Squeeze."""
    stored = pruned(dtype=np.float16).transpose(3, 2, 1, 0)
    nodes = [
        constant("a", stored),
        helper.make_node("Identity", ["a"], ["b"]),
        helper.make_node("Cast", ["b"], ["c"], to=TensorProto.FLOAT),
        helper.make_node("Transpose", ["c"], ["d"]),
        helper.make_node("Unsqueeze", ["d", "axes"], ["e"]),
        helper.make_node("Squeeze", ["e", "axes"], ["W"]),
    ]
    return model([*nodes, conv()], [tensor([0], "axes", np.int64)])


def _masked() -> ModelProto:
    weight = pruned()
    mask = (weight != 0).astype(np.float32)
    rng = np.random.default_rng(1)
    return model(
        [helper.make_node("Mul", ["dense", "mask"], ["W"]), conv()],
        [tensor(rng.uniform(0.5, 1, SHAPE).astype(np.float32), "dense"), tensor(mask, "mask")],
    )


def _quantised(per_channel: bool = False) -> ModelProto:
    rng = np.random.default_rng(0)
    stored = rng.integers(-128, 127, SHAPE).astype(np.int8)
    stored[pruned() == 0] = 0
    count = (8,) if per_channel else ()
    inputs = [tensor(np.full(count, 0.01, np.float32), "scale"), tensor(np.zeros(count, np.int8), "zero_point")]
    node = helper.make_node("DequantizeLinear", ["stored", "scale", "zero_point"], ["W"], axis=0)
    return model([node, conv()], [tensor(stored, "stored"), *inputs])


def _listed_as_input(ir_version: int, opset: int) -> ModelProto:
    inputs = [value("X", INPUT_SHAPE), value("W", SHAPE)]
    return model([conv()], [tensor(pruned(), "W")], inputs, opset=opset, ir_version=ir_version)


def _outer_if() -> ModelProto:
    then = branch([conv(out="then_out", name="conv_in_if")], "then_out")
    return model([if_node(then, dense_branch())], [tensor(pruned(), "W")], x_and_condition())


def _outer_if_twice() -> ModelProto:
    inner = if_node(
        branch([conv(out="inner_out", name="conv_deep")], "inner_out"), dense_branch("e2"), "then_out", "if2"
    )
    return model([if_node(branch([inner], "then_out"), dense_branch())], [tensor(pruned(), "W")], x_and_condition())


def _inner_if() -> ModelProto:
    """Each branch has a weight of its own, under the same name."""
    then = branch([conv("W_in", "then_out", name="c1")], "then_out", [tensor(pruned(seed=1), "W_in")])
    otherwise = branch([conv("W_in", "else_out", name="c2")], "else_out", [tensor(pruned(seed=2), "W_in")])
    return model([if_node(then, otherwise)], (), x_and_condition())


def _outer_loop() -> ModelProto:
    weight = pruned((16, 16, 3, 3)) * np.float32(0.1)
    body = helper.make_graph(
        [
            conv(source="state", out="next_state", name="conv_in_loop"),
            helper.make_node("Identity", ["cond_in"], ["cond_out"]),
        ],
        "body",
        [value("i", [], TensorProto.INT64), value("cond_in", [], TensorProto.BOOL), value("state", INPUT_SHAPE)],
        [value("cond_out", [], TensorProto.BOOL), value("next_state", None)],
    )
    node = helper.make_node("Loop", ["trips", "", "X"], ["Y"], name="loop", body=body)
    return model([node], [tensor(weight, "W"), tensor(3, "trips", np.int64)])


def _outer_scan() -> ModelProto:
    body = helper.make_graph(
        [conv(source="frame", out="convolved", name="conv_in_scan")],
        "body",
        [value("frame", INPUT_SHAPE)],
        [value("convolved", None)],
    )
    node = helper.make_node("Scan", ["frames"], ["Y"], name="scan", body=body, num_scan_inputs=1)
    frames = helper.make_node("Unsqueeze", ["X", "axes"], ["frames"])
    outputs = [value("Y", ["t", *ANY_SHAPE])]
    return model([frames, node], [tensor(pruned(), "W"), tensor([0], "axes", np.int64)], outputs=outputs)


def _shared_by_convs() -> ModelProto:
    nodes = [
        conv(out="a", name="c1"),
        conv(out="b", name="c2", strides=[1, 1]),
        helper.make_node("Add", ["a", "b"], ["Y"]),
    ]
    return model(nodes, [tensor(pruned(), "W")])


def _shared_with_other_op() -> ModelProto:
    nodes = [
        conv(out="a"),
        helper.make_node("ReduceSum", ["W"], ["s"], keepdims=0),
        helper.make_node("Add", ["a", "s"], ["Y"]),
    ]
    return model(nodes, [tensor(pruned(), "W")])


def _weight_is_output() -> ModelProto:
    return model([conv()], [tensor(pruned(), "W")], outputs=[value("Y", ANY_SHAPE), value("W", SHAPE)])


def _sparse_initializer(flat: bool = True) -> ModelProto:
    proto = model([conv()])
    proto.graph.sparse_initializer.append(sparse(pruned(), "W", flat=flat))
    return proto


def _other_type(dtype: int) -> ModelProto:
    weight = helper.make_tensor("W", dtype, SHAPE, pruned().ravel().tolist())
    return model(
        [conv()], [weight], [value("X", INPUT_SHAPE, dtype)], [value("Y", ANY_SHAPE, dtype)], opset=22, ir_version=10
    )


def _integers() -> ModelProto:
    io = [value("X", INPUT_SHAPE, TensorProto.INT32)], [value("Y", ANY_SHAPE, TensorProto.INT32)]
    return model([conv()], [tensor(np.zeros(SHAPE, np.int32), "W")], *io)


def _runtime_input() -> ModelProto:
    return model([conv()], (), [value("X", INPUT_SHAPE), value("W", SHAPE)])


def _runtime_computed() -> ModelProto:
    """Of constants, but by an operator that two machines may compute differently."""
    return model([helper.make_node("Softmax", ["stored"], ["W"]), conv()], [tensor(pruned(), "stored")])


def _rounded(by: int) -> ModelProto:
    """Through a type that versions of onnx round to differently."""
    nodes = [helper.make_node("Cast", ["stored"], ["q"], to=by), helper.make_node("Cast", ["q"], ["W"], to=1)]
    return model([*nodes, conv()], [tensor(pruned(), "stored")], opset=19, ir_version=9)


def _stored_in(element_type: int) -> ModelProto:
    stored = helper.make_tensor("stored", element_type, SHAPE, pruned().ravel().tolist())
    return model([helper.make_node("Cast", ["stored"], ["W"], to=1), conv()], [stored], opset=19, ir_version=9)


def _loop_state() -> ModelProto:
    """The weight is a constant in the first iteration only."""
    body = helper.make_graph(
        [
            conv("w_state", "result", name="conv_in_loop"),
            helper.make_node("Identity", ["go_on"], ["still"]),
            helper.make_node("Neg", ["w_state"], ["w_next"]),
        ],
        "body",
        [value("i", [], TensorProto.INT64), value("go_on", [], TensorProto.BOOL), value("w_state", SHAPE)],
        [value("still", [], TensorProto.BOOL), value("w_next", SHAPE), value("result", list("abcd"))],
    )
    node = helper.make_node("Loop", ["trips", "", "W"], ["W_last", "Y"], name="loop", body=body)
    initializers = [tensor(pruned(), "W"), tensor(2, "trips", np.int64)]
    return model([node], initializers, outputs=[value("Y", list("abcde"))])


def _outer_constant() -> ModelProto:
    then = branch([conv(out="then_out", name="conv_in_if")], "then_out")
    return model([constant("W", pruned()), if_node(then, dense_branch())], (), x_and_condition())


# model-local functions


def _function_inside() -> ModelProto:
    body = function("f", ["x"], [constant("w", pruned()), conv("w", "y", "x", "conv_in_f")])
    return model([call("f", ["X"])], functions=[body])


def _function_argument() -> ModelProto:
    body = function("f", ["x", "w"], [conv("w", "y", "x", "conv_in_f")])
    return model([call("f", ["X", "W"])], [tensor(pruned(), "W")], functions=[body])


def _function_attributes() -> ModelProto:
    node = helper.make_node("Conv", ["x", "w"], ["y"], name="conv_in_f")
    node.attribute.add(name="pads", type=AttributeProto.INTS, ref_attr_name="border")
    body = function("f", ["x"], [constant("w", pruned()), node], attributes=["border"])
    return model([call("f", ["X"], border=[1, 1, 1, 1])], functions=[body])


def _function_default_attribute() -> ModelProto:
    """The call leaves the attribute out."""
    proto = _function_attributes()
    del proto.graph.node[0].attribute[:]
    del proto.functions[0].attribute[:]
    proto.functions[0].attribute_proto.append(helper.make_attribute("border", [2, 0, 2, 0]))
    return proto


def _function_weight_attribute() -> ModelProto:
    node = helper.make_node("Constant", [], ["w"])
    node.attribute.add(name="value", type=AttributeProto.TENSOR, ref_attr_name="weight")
    body = function("f", ["x"], [node, conv("w", "y", "x", "conv_in_f")], attributes=["weight"])
    return model([call("f", ["X"], weight=tensor(pruned(), "w"))], functions=[body])


def _function_nested() -> ModelProto:
    inner = function("inner", ["x", "w"], [conv("w", "y", "x", "conv_in_f")])
    outer = function("outer", ["x"], [constant("w", pruned()), call("inner", ["x", "w"], "y")])
    return model([call("outer", ["X"])], functions=[inner, outer])


def _function_twice() -> ModelProto:
    body = function("f", ["x", "w"], [conv("w", "y", "x", "conv_in_f")])
    nodes = [call("f", ["X", "W1"], "a"), call("f", ["X", "W2"], "b"), helper.make_node("Add", ["a", "b"], ["Y"])]
    return model(nodes, [tensor(pruned(seed=1), "W1"), tensor(pruned(seed=2), "W2")], functions=[body])


def _function_with_if() -> ModelProto:
    then = branch([conv("w", "t", "x", "conv_in_f")], "t")
    otherwise = branch([helper.make_node("Neg", ["t0"], ["e"])], "e")
    nodes = [constant("w", pruned()), conv("w", "t0", "x", "conv_before"), if_node(then, otherwise, "y", cond="c")]
    return model([call("f", ["X", "C"])], (), x_and_condition(), functions=[function("f", ["x", "c"], nodes)])


def _function_other_opset() -> ModelProto:
    body = function("f", ["x"], [constant("w", pruned()), conv("w", "y", "x", "conv_in_f")], opset=OPSET - 1)
    return model([call("f", ["X"])], functions=[body])


def _function_from_if() -> ModelProto:
    """A function with its weight inside, called in a branch."""
    body = function("f", ["x"], [constant("w", pruned()), conv("w", "y", "x", "conv_in_f")])
    then = branch([call("f", ["X"], "then_out")], "then_out")
    return model([if_node(then, dense_branch())], (), x_and_condition(), functions=[body])


FEEDS: dict[str, Feed] = {
    "initializer": Feed(_initializer),
    "initializer-typed-fields": Feed(_typed_fields),
    "float16": Feed(_half),
    "float16-typed-fields": Feed(_half_typed_fields),
    "constant": Feed(_constant, source="Constant"),
    "constant-sparse-flat": Feed(_constant_sparse, source="Constant"),
    "constant-sparse-coordinates": Feed(lambda: _constant_sparse(False), source="Constant"),
    "constant-floats": Feed(_constant_floats, source="Reshape(Constant)"),
    "constant-float": Feed(_constant_float_expanded, Reason.TOO_DENSE, source="Expand(Constant)"),
    "constant-ints": Feed(_constant_ints, source="Reshape(Cast(Constant))"),
    "constant-int": Feed(_constant_int_expanded, Reason.TOO_DENSE, source="Expand(Cast(Constant))"),
    "identity": Feed(_through("Identity", pruned()), source="Identity(initializer)"),
    "cast-half": Feed(_through("Cast", pruned(dtype=np.float16), to=1), source="Cast(initializer)"),
    "cast-double": Feed(_through("Cast", pruned(dtype=np.float64), to=1), source="Cast(initializer)"),
    "cast-int": Feed(_through("Cast", np.rint(pruned() * 4).astype(np.int8), to=1), source="Cast(initializer)"),
    "reshape": Feed(_through("Reshape", pruned((8, 144)), tensor(SHAPE, "s", np.int64)), source="Reshape(initializer)"),
    "transpose": Feed(_through("Transpose", pruned((3, 3, 16, 8)), perm=[3, 2, 0, 1]), source="Transpose(initializer)"),
    "squeeze": Feed(
        _through("Squeeze", pruned((1, *SHAPE)), tensor([0], "a", np.int64)), source="Squeeze(initializer)"
    ),
    "squeeze-old": Feed(_through("Squeeze", pruned((1, *SHAPE)), opset=11, axes=[0]), source="Squeeze(initializer)"),
    "unsqueeze": Feed(
        _through("Unsqueeze", pruned((128, 3, 3)).reshape(8, 48, 3), tensor([3], "a", np.int64)),
        Reason.INVALID,
        forced=0,
        source="Unsqueeze(initializer)",
    ),
    "slice": Feed(
        _through("Slice", pruned((16, 16, 3, 3)), tensor([4], "b", np.int64), tensor([12], "e", np.int64)),
        source="Slice(initializer)",
    ),
    "chain": Feed(_chain, source="Squeeze(Unsqueeze(Transpose(Cast(Identity(Constant)))))"),
    "masked": Feed(_masked, source="Mul(initializer)"),
    "dequantised": Feed(_quantised, Reason.QUANTISED, source="DequantizeLinear(initializer)"),
    "dequantised-per-channel": Feed(lambda: _quantised(True), Reason.QUANTISED, source="DequantizeLinear(initializer)"),
    "input-ir3": Feed(lambda: _listed_as_input(3, 9)),
    "input-ir3-opset7": Feed(lambda: _listed_as_input(3, 7)),
    "input-ir8": Feed(lambda: _listed_as_input(8, OPSET), Reason.OVERRIDABLE_WEIGHT),
    "outer-if": Feed(_outer_if),
    "outer-if-twice": Feed(_outer_if_twice),
    "inner-if": Feed(_inner_if, forced=2),
    "outer-loop": Feed(_outer_loop),
    "outer-scan": Feed(_outer_scan),
    "shared-convs": Feed(_shared_by_convs, forced=2),
    "shared-other-op": Feed(_shared_with_other_op, kept=("W",)),
    "weight-is-output": Feed(_weight_is_output, kept=("W",)),
    "sparse-initializer": Feed(_sparse_initializer, source="sparse_initializer"),
    "sparse-initializer-coordinates": Feed(lambda: _sparse_initializer(False), source="sparse_initializer"),
    "bfloat16": Feed(lambda: _other_type(TensorProto.BFLOAT16), Reason.UNSUPPORTED_TYPE, forced=0),
    "double": Feed(lambda: _other_type(TensorProto.DOUBLE), Reason.UNSUPPORTED_TYPE, forced=0),
    "int32": Feed(_integers, Reason.UNSUPPORTED_TYPE, forced=0),
    "runtime-input": Feed(_runtime_input, Reason.RUNTIME_WEIGHT, forced=0, source=""),
    "runtime-computed": Feed(_runtime_computed, Reason.RUNTIME_WEIGHT, forced=0, source=""),
    "rounded-to-bfloat16": Feed(lambda: _rounded(TensorProto.BFLOAT16), Reason.RUNTIME_WEIGHT, forced=0, source=""),
    "rounded-to-float8": Feed(lambda: _rounded(TensorProto.FLOAT8E4M3FN), Reason.RUNTIME_WEIGHT, forced=0, source=""),
    "stored-as-bfloat16": Feed(lambda: _stored_in(TensorProto.BFLOAT16), source="Cast(initializer)"),
    "stored-as-float8": Feed(lambda: _stored_in(TensorProto.FLOAT8E5M2), source="Cast(initializer)"),
    "loop-state": Feed(_loop_state, Reason.RUNTIME_WEIGHT, forced=0, source=""),
    "outer-constant": Feed(_outer_constant, source="Constant"),
    "gather": Feed(
        _through("Gather", pruned((20, 16, 3, 3)), tensor([0, 3, 3, 19, -1, 1, 2, 5], "i", np.int64)),
        source="Gather(initializer)",
    ),
    "concat": Feed(
        _through("Concat", pruned((3, 16, 3, 3)), tensor(pruned((5, 16, 3, 3)), "more"), axis=0),
        source="Concat(initializer)",
    ),
    "function-inside": Feed(_function_inside, source="Constant"),
    "function-argument": Feed(_function_argument),
    "function-attributes": Feed(_function_attributes, source="Constant"),
    "function-default-attribute": Feed(_function_default_attribute, source="Constant"),
    "function-weight-attribute": Feed(_function_weight_attribute, source="Constant"),
    "function-nested": Feed(_function_nested, source="Constant"),
    "function-twice": Feed(_function_twice, forced=2),
    "function-with-if": Feed(_function_with_if, forced=2, source="Constant"),
    "function-other-opset": Feed(_function_other_opset, Reason.UNSUPPORTED_OPSET, forced=0, source="Constant"),
    "function-in-if": Feed(_function_from_if, source="Constant"),
}


# --- models with everything else that ONNX allows ---------------------------------------------------------------------


def ornate() -> ModelProto:
    """A model that uses what is rarely used: documentation, metadata, annotations, odd types and attributes.

    One Conv, ``conv``, can be rewritten. It is for reading and comparing; no runtime has its custom operators.
    """
    odd = helper.make_node("Odd", ["X", ""], ["odd_out", "", "odd_seq"], name="odd", domain="custom.domain")
    odd.attribute.add(name="binary", type=AttributeProto.STRING, s=b"\xff\x00\xfe")
    odd.attribute.add(name="binaries", type=AttributeProto.STRINGS, strings=[b"\x80", b"ok"])
    for name, kind in (("no_ints", AttributeProto.INTS), ("no_floats", AttributeProto.FLOATS)):
        odd.attribute.add(name=name, type=kind)
    odd.attribute.append(helper.make_attribute("tensors", [tensor([1.0], "t1", np.float32), tensor([2], "t2")]))
    odd.attribute.append(helper.make_attribute("type", helper.make_tensor_type_proto(TensorProto.FLOAT, ["n"])))
    odd.attribute.append(helper.make_attribute("sparse", sparse(np.eye(3, dtype=np.float32), "s")))
    inner = branch([helper.make_node("Neg", ["X"], ["neg"], name="in_graphs", doc_string="deep")], "neg")
    odd.attribute.append(helper.make_attribute("graphs", [inner, inner]))
    odd.attribute[0].doc_string = "an attribute's documentation"

    dynamic = [value("X", ["batch", 16, "h", None])]
    sequence = helper.make_value_info("odd_seq", helper.make_sequence_type_proto(dynamic[0].type))
    optional = helper.make_value_info("maybe", helper.make_optional_type_proto(dynamic[0].type))
    mapping = helper.make_value_info("map", helper.make_map_type_proto(TensorProto.INT64, dynamic[0].type))
    proto = model(
        [odd, conv(), helper.make_node("Sink", ["maybe", "map"], ["unread"], domain="custom.domain")],
        [tensor(pruned(), "W"), tensor([1.0], "unused", np.float32), tensor([3.0], "preset", np.float32)],
        [*dynamic, value("preset", [1]), optional, mapping],
        [value("Y", ["batch", 8, "h", None]), sequence],
        functions=[function("f", ["x"], [helper.make_node("Relu", ["x"], ["y"], name="relu", doc_string="r")])],
    )
    proto.opset_import.append(helper.make_opsetid("custom.domain", 3))
    proto.doc_string, proto.producer_name, proto.producer_version = "model", "producer", "1.2"
    proto.domain, proto.model_version = "com.example", 7
    proto.metadata_props.add(key="author", value="somebody")
    proto.graph.doc_string = "graph"
    proto.graph.node[1].doc_string = "the Conv"
    proto.graph.initializer[0].doc_string = "the weight"
    proto.graph.value_info.append(value("odd_out", ["batch", "k"]))
    proto.graph.value_info[0].doc_string = "a value"
    proto.graph.sparse_initializer.append(sparse(np.eye(4, dtype=np.float32), "unread_sparse"))
    annotation = proto.graph.quantization_annotation.add(tensor_name="Y")
    annotation.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="preset")
    proto.functions[0].doc_string = "function"
    for owner in (proto.graph, *proto.graph.node, *proto.graph.initializer, proto.functions[0], proto.graph.input[0]):
        if hasattr(owner, "metadata_props"):
            owner.metadata_props.add(key="of", value=type(owner).__name__)
    return proto


def with_overloads() -> ModelProto:
    """Two functions of one name (IR version 10) beside a Conv that can be rewritten."""
    nodes = [conv(out="c"), call("f", ["c"], "d"), call("f", ["d"], "Y")]
    functions = [function("f", ["x"], [helper.make_node(op, ["x"], ["y"])]) for op in ("Relu", "Neg")]
    for item, overload in zip((*nodes[1:], *functions), ("a", "b") * 2, strict=True):
        item.overload = overload
    return model(nodes, [tensor(pruned(), "W")], functions=functions, ir_version=10)


def with_training() -> ModelProto:
    """A model with training_info that refers to the weight."""
    proto = model([conv()], [tensor(pruned(), "W")])
    training = proto.training_info.add()
    training.algorithm.CopyFrom(
        helper.make_graph([helper.make_node("Identity", ["W"], ["W_new"])], "step", [], [value("W_new", SHAPE)])
    )
    training.update_binding.add(key="W", value="W_new")
    return proto


def control_flow() -> list[str]:
    """Names of the feeds that have subgraphs."""
    return [name for name in FEEDS if "if" in name or "loop" in name or "scan" in name]
