"""The operators: names, attributes, and their Python form.

The op's specification for users is ``docs/op-spec.md``. The schema is frozen: since version 1 of the domain every
attribute below is written on every node (with three exceptions: ``pads``, which ONNX forbids beside a SAME
``auto_pad``, those of the pool, which only ``SparseConvMaxPool`` has, and ``input_channels``, which only the
``SparseConvConcat`` ops have).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onnx_sparseconv.errors import FormatError
from onnx_sparseconv.kernels.unified_csr import Array, UnifiedCSR

DOMAIN = "ai.sparseconv"
OPSET_VERSION = 1
SPARSE_CONV = "SparseConv"
SPARSE_CONV_ADD = "SparseConvAdd"
SPARSE_CONV_MAX_POOL = "SparseConvMaxPool"
MAX_CONCAT_INPUTS = 8
# Ops that read the inputs of a Concat where they are, and how many each reads: ONNX functions have a fixed number.
CONCAT_OPS = {f"SparseConvConcat{n}": n for n in range(2, MAX_CONCAT_INPUTS + 1)}
OP_TYPES = (SPARSE_CONV, SPARSE_CONV_ADD, SPARSE_CONV_MAX_POOL, *CONCAT_OPS)
MAX_SPATIAL_RANK = 3
# Positions of a kernel: `kMaxTaps` of native/cpu/cpu_kernel.cc. The CUDA kernels take more.
MAX_TAPS = 1 << 16
# The native library counts strides, dilations and pads in 32 bits.
MAX_GEOMETRY_VALUE = 2**31 - 1

# onnx.TensorProto.DataType of the types that X, B, Z and Y may have.
ELEMENT_TYPES: dict[np.dtype[Any], int] = {np.dtype(np.float32): 1, np.dtype(np.float16): 10}
_ELEMENT_DTYPES: dict[int, np.dtype[Any]] = {code: dtype for dtype, code in ELEMENT_TYPES.items()}
AUTO_PADS = ("NOTSET", "SAME_UPPER", "SAME_LOWER")


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
class PoolGeometry:
    """The windows of a MaxPool, in ONNX's terms, without dilation and ``ceil_mode``. ``pads`` has two entries a spatial
    axis, each less than the window; the others have one.
    """

    kernel_shape: tuple[int, ...]
    strides: tuple[int, ...]
    pads: tuple[int, ...]


@dataclass(frozen=True)
class SparseConvAttributes:
    """Everything a node of one of the ops carries.

    Attributes:
        geometry: kernel, strides, pads, dilations, group.
        weight: the weight in unified CSR; its values are float32 or float16, whatever the element type.
        element_type: dtype of X, B, Z and Y, float32 or float16.
        activation: applied to conv + bias (+ residual).
        alpha, beta: parameters of the activation.
        cuda_images: container of GPU kernel images, uint8 ``[n]``; empty when there are none.
        pool: of SparseConvMaxPool, applied after the activation; else None.
        input_channels: of the SparseConvConcat ops, the channels of X, X2, ...; else empty.
    """

    geometry: ConvGeometry
    weight: UnifiedCSR
    element_type: np.dtype[Any] = field(default_factory=lambda: np.dtype(np.float32))
    activation: Activation = Activation.NONE
    alpha: float = 0.0
    beta: float = 0.0
    cuda_images: Array = field(default_factory=lambda: np.empty(0, np.uint8))
    pool: PoolGeometry | None = None
    input_channels: tuple[int, ...] = ()

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
        if self.input_channels:
            attributes["input_channels"] = list(self.input_channels)
        return attributes | (pool_attributes(self.pool) if self.pool is not None else {})

    @staticmethod
    def from_node_attributes(op_type: str, attributes: Mapping[str, Any]) -> SparseConvAttributes:
        """The inverse of `to_node_attributes`, for a node of one of `OP_TYPES`.

        Raises:
            FormatError: an attribute is missing, has a value that the schema does not know, or contradicts another.
                The arrays of the weight are only checked by `unified_csr.validate`.
        """
        try:
            weight = UnifiedCSR(
                values=_array(attributes, "weight_values"),
                columns=_array(attributes, "weight_columns"),
                nnz_per_row=_array(attributes, "weight_nnz_per_row"),
                row_order=_array(attributes, "weight_row_order"),
                slice_height=_scalar(attributes, "weight_slice_height"),
                weight_shape=tuple(_array(attributes, "weight_shape", np.int64).tolist()),
                negative_zeros=_array(attributes, "weight_negative_zeros"),
            )
            result = SparseConvAttributes(
                geometry=_geometry(attributes),
                weight=weight,
                element_type=_element_type(attributes),
                activation=Activation(_scalar(attributes, "activation")),
                alpha=_number(attributes, "alpha"),
                beta=_number(attributes, "beta"),
                cuda_images=_array(attributes, "cuda_images", np.uint8),
                pool=_pool(attributes) if op_type == SPARSE_CONV_MAX_POOL else None,
                input_channels=_integers(attributes, "input_channels") if op_type in CONCAT_OPS else (),
            )
        except KeyError as error:
            raise FormatError(f"a SparseConv node lacks the attribute {error}") from error
        except (TypeError, ValueError) as error:
            raise FormatError(f"a SparseConv node has a bad attribute: {error}") from error
        _check_geometry(result.geometry, weight.weight_shape)
        if result.pool is not None:
            check_pool(result.pool, len(result.geometry.kernel_shape))
        if op_type in CONCAT_OPS:
            _check_input_channels(op_type, result)
        if attributes.get("out_channels") != weight.weight_shape[0]:
            raise FormatError(f"out_channels is {attributes.get('out_channels')}, weight_shape {weight.weight_shape}")
        return result


def concat_op(num_inputs: int) -> str:
    """The op that reads so many inputs of a Concat, 2 to `MAX_CONCAT_INPUTS`."""
    return next(op_type for op_type, count in CONCAT_OPS.items() if count == num_inputs)


def x_positions(op_type: str) -> tuple[int, ...]:
    """Which inputs of a node of one of `OP_TYPES` are X, or the parts of it: 0, or 0, 2, 3, ... (1 is the bias)."""
    return (0, *range(2, CONCAT_OPS.get(op_type, 1) + 1))


def pool_attributes(pool: PoolGeometry) -> dict[str, Any]:
    """The ONNX attributes of a pool, in the order they are written."""
    return {
        "pool_kernel_shape": list(pool.kernel_shape),
        "pool_pads": list(pool.pads),
        "pool_strides": list(pool.strides),
    }


def check_pool(pool: PoolGeometry, num_axes: int) -> None:
    """Check that the op can hold a pool.

    Raises:
        FormatError: it cannot.
    """
    for name, count, least in (("kernel_shape", num_axes, 1), ("strides", num_axes, 1), ("pads", 2 * num_axes, 0)):
        values = getattr(pool, name)
        if len(values) != count or not least <= min(values) <= max(values) <= MAX_GEOMETRY_VALUE:
            raise FormatError(f"pool_{name} must be {count} numbers from {least} to {MAX_GEOMETRY_VALUE}, got {values}")
    if any(pad >= size for pad, size in zip(pool.pads, 2 * pool.kernel_shape, strict=True)):
        raise FormatError(f"pool_pads must be less than the windows {pool.kernel_shape}, got {pool.pads}")


def _check_input_channels(op_type: str, attributes: SparseConvAttributes) -> None:
    """Check that the channels of X, X2, ... are those of the weight.

    Raises:
        FormatError: they are not.
    """
    channels, group, shape = attributes.input_channels, attributes.geometry.group, attributes.weight.weight_shape
    if len(channels) != CONCAT_OPS[op_type] or min(channels) < 1:
        raise FormatError(f"input_channels must be {CONCAT_OPS[op_type]} numbers of at least 1, got {channels}")
    if group != 1 and shape[:2] != (group, 1):
        raise FormatError(f"group must be 1, or the channels of both X and Y, in {op_type}, got {group}")
    if sum(channels) != group * shape[1]:
        raise FormatError(f"input_channels {channels} are {sum(channels)} together, the weight has {group * shape[1]}")


def _pool(attributes: Mapping[str, Any]) -> PoolGeometry:
    return PoolGeometry(
        kernel_shape=_integers(attributes, "pool_kernel_shape"),
        strides=_integers(attributes, "pool_strides"),
        pads=_integers(attributes, "pool_pads"),
    )


def _geometry(attributes: Mapping[str, Any]) -> ConvGeometry:
    auto_pad = attributes["auto_pad"]
    if auto_pad not in AUTO_PADS:
        raise ValueError(f"auto_pad is {auto_pad!r}, not one of {', '.join(AUTO_PADS)}")
    return ConvGeometry(
        kernel_shape=_integers(attributes, "kernel_shape"),
        strides=_integers(attributes, "strides"),
        pads=_integers(attributes, "pads") if auto_pad == "NOTSET" else (),
        dilations=_integers(attributes, "dilations"),
        group=_integer(attributes, "group"),
        auto_pad=auto_pad,
    )


def _check_geometry(geometry: ConvGeometry, weight_shape: tuple[int, ...]) -> None:
    """Check that geometry and weight belong together.

    Raises:
        FormatError: they do not.
    """
    n = len(geometry.kernel_shape)
    if not 1 <= n <= MAX_SPATIAL_RANK or min(weight_shape, default=0) < 1:
        raise FormatError(f"kernel_shape is {geometry.kernel_shape}, weight_shape {weight_shape}")
    if weight_shape[2:] != geometry.kernel_shape:
        raise FormatError(f"weight_shape {weight_shape} does not end in kernel_shape {geometry.kernel_shape}")
    if geometry.group < 1 or weight_shape[0] % geometry.group:
        raise FormatError(f"{weight_shape[0]} output channels cannot be split into {geometry.group} groups")
    for name, count, least in (("strides", n, 1), ("dilations", n, 1), ("pads", 2 * n, 0)):
        values = getattr(geometry, name)
        if name == "pads" and geometry.auto_pad != "NOTSET":
            continue
        if len(values) != count or min(values) < least:
            raise FormatError(f"{name} must be {count} numbers of at least {least}, got {values}")


def _array(attributes: Mapping[str, Any], name: str, dtype: type[np.generic] | None = None) -> Array:
    value = attributes[name]
    if not isinstance(value, np.ndarray) or value.ndim != 1 or (dtype is not None and value.dtype != dtype):
        raise ValueError(f"{name} must be a one-dimensional tensor{f' of {dtype.__name__}' if dtype else ''}")
    return value


def _scalar(attributes: Mapping[str, Any], name: str) -> int:
    value = attributes[name]
    if not isinstance(value, np.ndarray) or value.shape != () or value.dtype != np.int64:
        raise ValueError(f"{name} must be a scalar tensor of int64")
    return int(value)


def _element_type(attributes: Mapping[str, Any]) -> np.dtype[Any]:
    code = _integer(attributes, "element_type")
    if code not in _ELEMENT_DTYPES:
        raise ValueError(f"element_type is {code}, not 1 (float) or 10 (float16)")
    return _ELEMENT_DTYPES[code]


def _number(attributes: Mapping[str, Any], name: str) -> float:
    value = attributes[name]
    if not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number")
    return float(value)


def _integer(attributes: Mapping[str, Any], name: str) -> int:
    value = attributes[name]
    if not isinstance(value, int):
        raise TypeError(f"{name} must be an integer")
    return value


def _integers(attributes: Mapping[str, Any], name: str) -> tuple[int, ...]:
    value = attributes[name]
    if not isinstance(value, Sequence) or not all(isinstance(v, int) for v in value):
        raise ValueError(f"{name} must be a list of integers")
    return tuple(value)
