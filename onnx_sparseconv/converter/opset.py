"""Making a model new enough to carry the ops: opset and IR version."""

from __future__ import annotations

import onnx
from onnx import ModelProto, version_converter

from onnx_sparseconv.converter.model_io import one_line
from onnx_sparseconv.custom_ops.function_body import MIN_IR_VERSION, MIN_OPSET
from onnx_sparseconv.errors import ModelError


def raise_opset(proto: ModelProto) -> ModelProto:
    """The model at the oldest opset that the portable bodies can express.

    What ``onnx.version_converter`` drops on the way (documentation, metadata) is put back.

    Raises:
        ModelError: the converter cannot do it; the message says why.
    """
    try:
        raised = version_converter.convert_version(proto, MIN_OPSET)
        onnx.checker.check_model(raised)
    except Exception as error:  # C++ errors arrive as RuntimeError and others
        raise ModelError(f"onnx.version_converter: {one_line(error)}") from error
    for field in ("producer_name", "producer_version", "domain", "doc_string"):
        setattr(raised, field, getattr(proto, field))
    raised.model_version = proto.model_version
    del raised.metadata_props[:]
    raised.metadata_props.extend(proto.metadata_props)
    raised.graph.doc_string = proto.graph.doc_string
    return raised


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
