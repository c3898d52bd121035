"""Making a model new enough to carry the ops: opset and IR version."""

from __future__ import annotations

import onnx
from google.protobuf.message import Message
from onnx import ModelProto, NodeProto, version_converter

from onnx_sparseconv.converter.model_io import one_line
from onnx_sparseconv.custom_ops.function_body import MIN_IR_VERSION, MIN_OPSET
from onnx_sparseconv.errors import ModelError


def raise_opset(proto: ModelProto) -> ModelProto:
    """The model at the oldest opset that the portable bodies can express.

    What ``onnx.version_converter`` drops on the way (documentation, metadata, annotations) is put back.

    Raises:
        ModelError: the converter cannot do it, or would drop what cannot be put back; the message says why.
    """
    for field in ("functions", "training_info"):
        if getattr(proto, field):
            raise ModelError(f"onnx.version_converter would drop the model's {field}")
    try:
        raised = version_converter.convert_version(proto, MIN_OPSET)
        _put_back(proto, raised)
        onnx.checker.check_model(raised)
    except Exception as error:  # C++ errors arrive as RuntimeError and others
        raise ModelError(f"onnx.version_converter: {one_line(error)}") from error
    return raised


def _put_back(original: ModelProto, raised: ModelProto) -> None:
    """Give ``raised`` all that ``original`` says and that does not depend on the opset."""
    for field in ("producer_name", "producer_version", "domain", "doc_string", "model_version"):
        if original.HasField(field):
            setattr(raised, field, getattr(original, field))
    _copy_list(original, raised, "metadata_props")
    before, after = original.graph, raised.graph
    if before.doc_string:
        after.doc_string = before.doc_string
    for field in ("metadata_props", "quantization_annotation", "value_info"):
        _copy_list(before, after, field)
    for field in ("input", "output", "initializer"):
        known = {item.name: item for item in getattr(before, field)}
        for item in getattr(after, field):
            if item.name in known:
                item.CopyFrom(known[item.name])
    nodes = {tuple(n.output): n for n in before.node}
    for node in after.node:
        same = nodes.get(tuple(node.output))
        if same is not None and _means_the_same(same, node):
            node.CopyFrom(same)
        elif same is not None:
            node.doc_string = same.doc_string
            _copy_list(same, node, "metadata_props")


def _copy_list(source: Message, target: Message, field: str) -> None:
    """Copy a repeated field; onnx 1.17 and 1.18 do not have all of them."""
    if field in source.DESCRIPTOR.fields_by_name:
        target.ClearField(field)
        getattr(target, field).extend(getattr(source, field))


def _means_the_same(first: NodeProto, second: NodeProto) -> bool:
    """Whether two nodes are one but for documentation and metadata."""
    forms = []
    for node in (first, second):
        attributes = [a.SerializeToString(deterministic=True) for a in node.attribute]
        forms.append((node.op_type, node.domain, list(node.input), sorted(attributes)))
    return forms[0] == forms[1]


def raise_ir_version(proto: ModelProto) -> None:
    """Raise the IR version to the first that knows functions.

    Before IR version 4 every initializer had to be listed as an input. Left there, a later version would read it as
    overridable, and ONNX Runtime would stop folding and fusing it, so they leave the inputs.
    """
    if proto.ir_version < 4:
        initializers = {t.name for t in proto.graph.initializer}
        inputs = [i for i in proto.graph.input if i.name not in initializers]
        del proto.graph.input[:]
        proto.graph.input.extend(inputs)
    proto.ir_version = max(proto.ir_version, MIN_IR_VERSION)
