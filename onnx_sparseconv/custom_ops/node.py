"""SparseConv attributes in a NodeProto."""

from __future__ import annotations

from typing import Any

from onnx import NodeProto, TensorProto, helper, numpy_helper

from onnx_sparseconv.custom_ops.schema import SparseConvAttributes
from onnx_sparseconv.errors import FormatError


def attributes_from_proto(node: NodeProto) -> SparseConvAttributes:
    """Read the attributes of a node of one of our ops.

    Raises:
        FormatError: an attribute is missing, has the wrong type or a value that the schema does not know.
    """
    values: dict[str, Any] = {}
    for attribute in node.attribute:
        if attribute.ref_attr_name:
            raise FormatError(f"attribute {attribute.name} is an argument of a function")
        try:
            value = helper.get_attribute_value(attribute)
            if isinstance(value, TensorProto):
                value = numpy_helper.to_array(value)
        except Exception as error:  # onnx raises whatever its decoding of a broken tensor runs into
            raise FormatError(f"attribute {attribute.name} cannot be read: {error}") from error
        values[attribute.name] = value.decode(errors="replace") if isinstance(value, bytes) else value
    return SparseConvAttributes.from_node_attributes(node.op_type, values)
