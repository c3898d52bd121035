"""The ``SparseConv`` and ``SparseConvAdd`` operators: names, attributes, and their Python form.

The op's specification for users is ``docs/op-spec.md``. The schema is frozen: since version 1 of the domain every
attribute below is written on every node (with one exception, ``pads``, which ONNX forbids beside a SAME ``auto_pad``).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onnx_sparseconv.errors import FormatError
from onnx_sparseconv.kernels.unified_csr import Array, UnifiedCSR

DOMAIN = "ai.sparseconv"
OPSET_VERSION = 1
SPARSE_CONV = "SparseConv"
SPARSE_CONV_ADD = "SparseConvAdd"
OP_TYPES = (SPARSE_CONV, SPARSE_CONV_ADD)
MAX_SPATIAL_RANK = 3

# onnx.TensorProto.DataType of the types that X, B, Z and Y may have.
ELEMENT_TYPES: dict[np.dtype[Any], int] = {np.dtype(np.float32): 1, np.dtype(np.float16): 10}


class Activation(enum.IntEnum):
    """Code of the activation that is applied last. ``alpha`` and ``beta`` are its parameters."""

    NONE = 0
    RELU = 1
    CLIP = 2  # min = alpha, max = beta
    LEAKY_RELU = 3  # slope = alpha
    HARD_SWISH = 4
    HARD_SIGMOID = 5  # max(0, min(1, alpha * x + beta))
    SIGMOID = 6
    SILU = 7  # x * sigmoid(x)


@dataclass(frozen=True)
class ConvGeometry:
    """Where the taps of a convolution fall, in ONNX Conv's terms. All tuples have one entry (``pads`` two) a spatial
    axis.

    ``auto_pad`` is NOTSET except for SAME_UPPER and SAME_LOWER with a stride and sizes that are only known at run
    time; then ``pads`` is empty.
    """

    kernel_shape: tuple[int, ...]
    strides: tuple[int, ...]
    pads: tuple[int, ...]
    dilations: tuple[int, ...]
    group: int = 1
    auto_pad: str = "NOTSET"


@dataclass(frozen=True)
class SparseConvAttributes:
    """Everything a SparseConv or SparseConvAdd node carries.

    Attributes:
        geometry: kernel, strides, pads, dilations, group.
        weight: the weight in unified CSR; its values are float32 or float16, whatever the element type.
        element_type: dtype of X, B, Z and Y, float32 or float16.
        activation: applied to conv + bias (+ residual).
        alpha, beta: parameters of the activation.
        cuda_images: container of GPU kernel images, uint8 ``[n]``; empty when there are none.
    """

    geometry: ConvGeometry
    weight: UnifiedCSR
    element_type: np.dtype[Any] = field(default_factory=lambda: np.dtype(np.float32))
    activation: Activation = Activation.NONE
    alpha: float = 0.0
    beta: float = 0.0
    cuda_images: Array = field(default_factory=lambda: np.empty(0, np.uint8))

    def to_node_attributes(self) -> dict[str, Any]:
        """ONNX attributes in the order they are written; numpy arrays become TENSOR attributes."""
        geometry, weight = self.geometry, self.weight
        attributes: dict[str, Any] = {
            "auto_pad": geometry.auto_pad,
            "dilations": list(geometry.dilations),
            "group": geometry.group,
            "kernel_shape": list(geometry.kernel_shape),
            "pads": list(geometry.pads),
            "strides": list(geometry.strides),
            "out_channels": weight.weight_shape[0],
            "element_type": ELEMENT_TYPES[self.element_type],
            "weight_shape": np.asarray(weight.weight_shape, np.int64),
            "weight_values": weight.values,
            "weight_columns": weight.columns,
            "weight_nnz_per_row": weight.nnz_per_row,
            "weight_row_order": weight.row_order,
            "weight_slice_height": np.asarray(weight.slice_height, np.int64),
            "weight_negative_zeros": weight.negative_zeros,
            "activation": np.asarray(int(self.activation), np.int64),
            "alpha": float(self.alpha),
            "beta": float(self.beta),
            "cuda_images": self.cuda_images,
        }
        if geometry.auto_pad != "NOTSET":
            del attributes["pads"]
        return attributes

    @staticmethod
    def from_node_attributes(attributes: Mapping[str, Any]) -> SparseConvAttributes:
        """The inverse of `to_node_attributes`.

        Raises:
            FormatError: an attribute is missing or has a value that the schema does not know.
        """
        element_types: dict[int, np.dtype[Any]] = {code: dtype for dtype, code in ELEMENT_TYPES.items()}
        try:
            weight = UnifiedCSR(
                values=_array(attributes, "weight_values"),
                columns=_array(attributes, "weight_columns"),
                nnz_per_row=_array(attributes, "weight_nnz_per_row"),
                row_order=_array(attributes, "weight_row_order"),
                slice_height=int(attributes["weight_slice_height"]),
                weight_shape=tuple(int(d) for d in attributes["weight_shape"]),
                negative_zeros=_array(attributes, "weight_negative_zeros"),
            )
            auto_pad = attributes["auto_pad"]
            geometry = ConvGeometry(
                kernel_shape=tuple(attributes["kernel_shape"]),
                strides=tuple(attributes["strides"]),
                pads=tuple(attributes["pads"]) if auto_pad == "NOTSET" else (),
                dilations=tuple(attributes["dilations"]),
                group=int(attributes["group"]),
                auto_pad=auto_pad,
            )
            return SparseConvAttributes(
                geometry=geometry,
                weight=weight,
                element_type=element_types[attributes["element_type"]],
                activation=Activation(int(attributes["activation"])),
                alpha=float(attributes["alpha"]),
                beta=float(attributes["beta"]),
                cuda_images=_array(attributes, "cuda_images"),
            )
        except KeyError as error:
            raise FormatError(f"a SparseConv node lacks or misuses {error}") from error
        except (TypeError, ValueError) as error:
            raise FormatError(f"a SparseConv node has a bad attribute: {error}") from error


def _array(attributes: Mapping[str, Any], name: str) -> Array:
    value = attributes[name]
    if not isinstance(value, np.ndarray) or value.ndim != 1:
        raise ValueError(f"{name} must be a one-dimensional tensor")
    return value
