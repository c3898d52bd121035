"""``convert --precision fp16``: a model whose layers compute in float16, for GPUs.

Why not one of the converters that there are (``onnxruntime.transformers.float16``, ``onnxconverter_common.float16``)?
Both were read, and neither would do, with or without lists of blocked nodes:

- They know neither our nodes, whose ``element_type`` has to change with their weights, nor model-local functions.
- They change numbers: what float16 rounds to zero becomes its smallest number, what is too large its largest (in
  onnxconverter-common 10,000). A pruned weight should rather lose an entry, and a layer that overflows stay float.
- Casts around blocked nodes rest on shape inference, which ends at the first custom operator; nodes without a name
  share the names of their casts; a model that already holds a float16 tensor is refused, or converted wrongly.
- Nothing keeps shape arithmetic, coordinates and variances in float, but lists that users would have to write.

So this is a converter of our own. It needs no more than the operators' schemas, which come with onnx: `graph`
finds the type of every tensor, `plan` decides, `rewrite` carries it out, `weights` rounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import onnx.inliner
from onnx import ModelProto, TensorProto

from onnx_sparseconv.converter.functions import write_defaults_at_calls
from onnx_sparseconv.converter.model_io import one_line
from onnx_sparseconv.converter.opset import raise_ir_version
from onnx_sparseconv.converter.precision.graph import GraphScope, Node, all_nodes, read_graph
from onnx_sparseconv.converter.precision.ops import is_heavy
from onnx_sparseconv.converter.precision.plan import plan_half
from onnx_sparseconv.converter.precision.rewrite import rewrite
from onnx_sparseconv.converter.precision.weights import Lost
from onnx_sparseconv.converter.report import NodeNote, PrecisionReport
from onnx_sparseconv.custom_ops.function_body import MIN_OPSET
from onnx_sparseconv.custom_ops.schema import DOMAIN
from onnx_sparseconv.errors import ModelError, UsageError
from onnx_sparseconv.nodes import iterate_nodes

_OTHER_TYPES = {TensorProto.DOUBLE: "float64", TensorProto.BFLOAT16: "bfloat16", TensorProto.FLOAT16: "float16"}


@dataclass(frozen=True)
class PrecisionOptions:
    """How a model is turned into float16.

    Attributes:
        half_io: its float inputs and outputs become float16, too.
        keep_float: names of nodes, or of operators, that stay float.
    """

    half_io: bool = False
    keep_float: tuple[str, ...] = ()


def inline_functions(proto: ModelProto) -> tuple[ModelProto, tuple[str, ...]]:
    """The model without functions of its own, whose nodes could not be told apart by their calls' types.

    Our portable bodies stay. A function that cannot be inlined stays as well, and its calls stay float.

    Returns:
        The model (the same object where there is nothing to inline), and notes.
    """
    names = list(dict.fromkeys((f.domain, f.name) for f in proto.functions if f.domain != DOMAIN))
    if not names:
        return proto, ()
    write_defaults_at_calls(proto, [f for f in proto.functions if f.domain != DOMAIN])
    try:
        inlined = onnx.inliner.inline_selected_functions(proto, names)
    except Exception as error:  # the inliner is C++ and raises what pybind makes of it
        return proto, (f"functions could not be inlined, their calls stay float: {one_line(error)}",)
    left = {(f.domain, f.name) for f in inlined.functions}
    gone = [f"{d}::{n}" for d, n in names if (d, n) not in left]
    return inlined, (f"inlined for float16: {', '.join(gone)}",) if gone else ()


def convert_to_half(
    proto: ModelProto, opset: int, options: PrecisionOptions, lost: Sequence[Lost] = ()
) -> PrecisionReport:
    """Turn a model into float16.

    Args:
        proto: the model, functions inlined; it is changed, unless nothing of it is to become float16.
        opset: of the default domain.
        options: what is wanted.
        lost: what weights have lost already, when they were rounded to what float16 can hold.

    Raises:
        ModelError: the opset is too old.
    """
    if opset < MIN_OPSET:
        raise ModelError(f"float16 needs opset {MIN_OPSET} or later, the model has {opset}: export it anew")
    if proto.ir_version < 4:
        raise_ir_version(proto)
    scope = read_graph(proto, opset)
    plan = plan_half(scope, opset, options.keep_float)
    kept = tuple(NodeNote(n.label, n.scope.path, f"{n.op}: {why}") for n, why in plan.kept.values())
    others = _other_types(scope)
    if not any(is_heavy(node.proto) for node in plan.half.values()):
        return PrecisionReport("fp16", options.half_io, changed=False, half_nodes=0, kept=kept, casts=0, notes=others)
    done = rewrite(proto, scope, plan, half_io=options.half_io)
    return PrecisionReport(
        precision="fp16",
        half_io=options.half_io,
        changed=True,
        half_nodes=len(plan.half),
        kept=kept,
        casts=done.casts,
        notes=(*_lost([*lost, *done.lost]), *_on_overridable(proto), *others),
    )


def fix_initializers(proto: ModelProto) -> tuple[str, ...]:
    """Make constants of the float initializers that callers may set, because they are inputs as well.

    Returns:
        Notes.
    """
    names = _overridable(proto)
    if not names:
        return ()
    inputs = [i for i in proto.graph.input if i.name not in names]
    del proto.graph.input[:]
    proto.graph.input.extend(inputs)
    return (f"{len(names)} initializers are no longer inputs of the model",)


def _overridable(proto: ModelProto) -> frozenset[str]:
    """Float initializers that are also inputs; before IR version 4 all had to be listed there."""
    if proto.ir_version < 4:
        return frozenset()
    inputs = {i.name for i in proto.graph.input}
    return frozenset(t.name for t in proto.graph.initializer if t.name in inputs and t.data_type == TensorProto.FLOAT)


def _on_overridable(proto: ModelProto) -> tuple[str, ...]:
    names = _overridable(proto)
    if not names:
        return ()
    return (
        f"{len(names)} initializers are also inputs, which callers may set: they stay float and are cast in every run; "
        "--force makes constants of them",
    )


def check_names(proto: ModelProto, names: Iterable[str]) -> None:
    """Check names of nodes, or of operators, that are to stay float, before anything is made of the nodes.

    Raises:
        UsageError: a name is not in the model.
    """
    known = {name for node in iterate_nodes(proto.graph.node) for name in (node.name, node.op_type)}
    for name in names:
        if name not in known:
            raise UsageError(f"--keep-float {name}: the model has no node or operator of that name")


def _lost(lost: Sequence[Lost]) -> tuple[str, ...]:
    """What float16 took from the weights."""
    if not lost:
        return ()
    worst = max(lost, key=lambda one: one.zeros / max(1, one.nonzeros))
    return (
        f"{sum(one.zeros for one in lost)} weights that are not zero are zero in float16; the largest share of them in "
        f"{worst.name!r}: {worst.zeros} of {worst.nonzeros}",
    )


def _other_types(scope: GraphScope) -> tuple[str, ...]:
    """A note on the nodes that compute in other floating-point types, which stay as they are."""
    counts: Counter[str] = Counter()
    for node in all_nodes(scope):
        counts.update({name for code, name in _OTHER_TYPES.items() if _reads(node, code)})
    return tuple(
        f"{number} nodes compute in float16 already"
        if name == "float16"
        else f"{number} nodes compute in {name}; they were left alone"
        for name, number in sorted(counts.items())
    )


def _reads(node: Node, element_type: int) -> bool:
    return any(t is not None and t.element_type == element_type for t in node.inputs)
