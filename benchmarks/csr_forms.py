"""A converted layer in the paper's form of unified CSR, to find out what unification costs the CSR kernel.

The native library leaves marked zeros out when it reads a weight, so its CSR kernel always runs ragged rows: each of
its own length, the form of Escoin. To let it run what Pietron & Zurek store, rows of one length, the zeros that fill
them up get a minus sign: the library takes only +0 for a marked zero, and -0 is multiplied like any other value and
changes no sum. The kernel is the same in both forms, and the difference in time is that of the entries.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onnx_sparseconv.custom_ops.node import attributes_from_proto
from onnx_sparseconv.custom_ops.schema import DOMAIN, OP_TYPES
from onnx_sparseconv.kernels.unified_csr import decode, encode


@dataclass(frozen=True)
class UnifiedModel:
    """A model whose sparse convolution has rows of one length.

    Attributes:
        model: serialised; without GPU images.
        nonzeros: of its weight.
        stored: entries that are multiplied, zeros among them.
    """

    model: bytes
    nonzeros: int
    stored: int


def with_unified_rows(model: bytes) -> UnifiedModel:
    """The model with all rows of its one sparse convolution as long as the longest.

    Args:
        model: serialised, with exactly one SparseConv node in its main graph.

    Raises:
        ValueError: there is not exactly one.
    """
    proto = onnx.load_model_from_string(model)
    nodes = [node for node in proto.graph.node if node.domain == DOMAIN and node.op_type in OP_TYPES]
    if len(nodes) != 1:
        raise ValueError(f"the model has {len(nodes)} sparse convolutions, not one")
    attributes = attributes_from_proto(nodes[0])
    weight = decode(attributes.weight)
    csr = encode(weight, attributes.geometry.group, slice_height=weight.shape[0])
    values = np.where(csr.values == 0, csr.values.dtype.type(-0.0), csr.values)
    unified = dataclasses.replace(
        attributes, weight=dataclasses.replace(csr, values=values), cuda_images=np.empty(0, np.uint8)
    )
    del nodes[0].attribute[:]
    for name, value in unified.to_node_attributes().items():
        content = numpy_helper.from_array(value) if isinstance(value, np.ndarray) else value
        nodes[0].attribute.append(helper.make_attribute(name, content))
    return UnifiedModel(proto.SerializeToString(), int(np.count_nonzero(weight)), csr.nnz_stored)
