"""Models of one SparseConv node, and what they should compute: an oracle in float64 with a bound for every element."""

from __future__ import annotations

import functools
import itertools
import math
import os
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper

from onnx_sparseconv.custom_ops import library
from onnx_sparseconv.custom_ops.function_body import make_function
from onnx_sparseconv.custom_ops.schema import (
    DOMAIN,
    SPARSE_CONV,
    SPARSE_CONV_ADD,
    SPARSE_CONV_MAX_POOL,
    Activation,
    ConvGeometry,
    PoolGeometry,
    SparseConvAttributes,
    concat_op,
)
from onnx_sparseconv.errors import NativeLibraryError
from onnx_sparseconv.kernels.unified_csr import encode

OPSET = 17
NODE_NAME = "conv1"
ISAS = ("portable", "avx2", "avx512")


@dataclass(frozen=True)
class SparseConvCase:
    """A node and how it is fed. ``weight`` is dense, ``(K, C / group, D1..Dn)``, and contains zeros."""

    weight: np.ndarray
    geometry: ConvGeometry
    activation: Activation = Activation.NONE
    alpha: float = 0.0
    beta: float = 0.0
    dtype: np.dtype = field(default_factory=lambda: np.dtype(np.float32))
    has_bias: bool = True
    has_residual: bool = False
    slice_height: int | None = None
    pool: PoolGeometry | None = None  # not beside a residual
    input_channels: tuple[int, ...] = ()  # of X, X2, ... where X comes in parts; beside neither of the two

    @property
    def op_type(self):
        if self.input_channels:
            return concat_op(len(self.input_channels))
        if self.pool is not None:
            return SPARSE_CONV_MAX_POOL
        return SPARSE_CONV_ADD if self.has_residual else SPARSE_CONV

    @property
    def out_channels(self):
        return self.weight.shape[0]

    @property
    def in_channels(self):
        return self.weight.shape[1] * self.geometry.group

    @property
    def x_names(self):
        """Names of the model's inputs that are X or the parts of it."""
        return ("X", *(f"X{i}" for i in range(2, len(self.input_channels) + 1)))

    def attributes(self):
        return SparseConvAttributes(
            geometry=self.geometry,
            weight=encode(self.weight, self.geometry.group, self.slice_height),
            element_type=self.dtype,
            activation=self.activation,
            alpha=self.alpha,
            beta=self.beta,
            pool=self.pool,
            input_channels=self.input_channels,
        ).to_node_attributes()


def geometry_2d(kernel=3, stride=1, pad=1, dilation=1, group=1):
    return ConvGeometry((kernel,) * 2, (stride,) * 2, (pad,) * 4, (dilation,) * 2, group)


def random_weight(shape, density, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    weight = rng.uniform(-1, 1, shape) * (rng.random(shape) < density)
    return weight.astype(dtype)


def make_model(case, attributes=None, x_shape=None, with_function=False):
    """A model ``Y = SparseConv(X, B?, Z?)``; sizes of X are symbolic unless ``x_shape`` is given.

    ``x_shape`` is that of the whole X, also where it comes in parts X, X2, ...
    ``attributes`` replaces the node's attributes; ``with_function`` adds the portable form.
    """
    attributes = case.attributes() if attributes is None else attributes
    element_type = helper.np_dtype_to_tensor_dtype(case.dtype)
    after_bias = [*(["Z"] if case.has_residual else []), *case.x_names[1:]]
    names = ["X"] + (["B"] if case.has_bias or after_bias else []) + after_bias
    node = helper.make_node(case.op_type, names, ["Y"], name=NODE_NAME, domain=DOMAIN)
    if not case.has_bias and after_bias:
        node.input[1] = ""
    for name, value in attributes.items():
        node.attribute.append(_make_attribute(name, value))
    rank = case.weight.ndim
    x_shape = x_shape or ["N", case.in_channels, *(f"d{i}" for i in range(rank - 2))]
    part_shapes = [[x_shape[0], channels, *x_shape[2:]] for channels in case.input_channels] or [x_shape]
    inputs = [
        helper.make_tensor_value_info(name, element_type, shape)
        for name, shape in zip(case.x_names, part_shapes, strict=True)
    ]
    if case.has_bias:
        inputs.append(helper.make_tensor_value_info("B", element_type, [case.out_channels]))
    if case.has_residual:
        inputs.append(helper.make_tensor_value_info("Z", element_type, [None] * rank))
    output = helper.make_tensor_value_info("Y", element_type, None)
    return helper.make_model(
        helper.make_graph([node], "graph", inputs, [output]),
        ir_version=9,
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)],
        functions=[make_function(case.op_type, OPSET)] if with_function else [],
    )


def _make_attribute(name, value):
    if isinstance(value, onnx.AttributeProto):
        return value
    return helper.make_attribute(name, numpy_helper.from_array(value) if isinstance(value, np.ndarray) else value)


def make_session(model, *, cpu_isa="auto", threads=1, with_library=True):
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # refusals are expected here, and are raised as well as logged
    # Under AddressSanitizer every tensor and scratch buffer gets an allocation, and so a fence, of its own.
    options.enable_cpu_mem_arena = "ASAN_OPTIONS" not in os.environ
    if with_library:
        library.register(options, cpu_isa=cpu_isa)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@functools.cache
def supported_isas():
    """Instruction sets that this machine can be forced to use."""
    supported = []
    for isa in ISAS:
        try:
            library.register(ort.SessionOptions(), cpu_isa=isa)
        except NativeLibraryError as error:
            assert "this machine does not support" in str(error)  # noqa: PT017
        else:
            supported.append(isa)
    return tuple(supported)


def random_inputs(case, x_shape, seed=0):
    rng = np.random.default_rng(seed)
    inputs = parts_of(case, rng.uniform(-2, 2, x_shape).astype(case.dtype))
    if case.has_bias:
        inputs["B"] = rng.uniform(-1, 1, case.out_channels).astype(case.dtype)
    if case.has_residual:
        inputs["Z"] = rng.uniform(-2, 2, output_shape(case, x_shape)).astype(case.dtype)
    return inputs


def parts_of(case, x):
    """The whole X as the model's inputs."""
    parts = np.split(x, np.cumsum(case.input_channels)[:-1], axis=1) if case.input_channels else [x]
    return {name: np.ascontiguousarray(part) for name, part in zip(case.x_names, parts, strict=True)}


def whole_x(case, inputs):
    """The inverse of `parts_of`."""
    return np.concatenate([inputs[name] for name in case.x_names], axis=1)


def resolve(geometry, in_sizes):
    """Paddings and output sizes, as ONNX Conv defines them: ``[(begin, end, out_size)]``."""
    rank = len(in_sizes)
    resolved = []
    for i, size in enumerate(in_sizes):
        stride = geometry.strides[i]
        extent = (geometry.kernel_shape[i] - 1) * geometry.dilations[i] + 1
        if geometry.auto_pad == "NOTSET":
            begin, end = geometry.pads[i], geometry.pads[rank + i]
        else:
            pads = max(0, (-(-size // stride) - 1) * stride + extent - size)
            begin = (pads + 1) // 2 if geometry.auto_pad == "SAME_LOWER" else pads // 2
            end = pads - begin
        resolved.append((begin, end, (size + begin + end - extent) // stride + 1))
    return resolved


def output_shape(case, x_shape):
    shape = (x_shape[0], case.out_channels, *(out for _, _, out in resolve(case.geometry, x_shape[2:])))
    return shape if case.pool is None else (*shape[:2], *pooled_sizes(case.pool, shape[2:]))


def convolve(case, weight, x):
    """Direct convolution in float64, tap by tap."""
    geometry, group = case.geometry, case.geometry.group
    axes = resolve(geometry, x.shape[2:])
    padded = np.pad(x.astype(np.float64), [(0, 0), (0, 0), *((begin, end) for begin, end, _ in axes)])
    padded = padded.reshape(x.shape[0], group, -1, *padded.shape[2:])
    grouped = weight.astype(np.float64).reshape(group, case.out_channels // group, *weight.shape[1:])
    out_sizes = [out for _, _, out in axes]
    y = np.zeros((x.shape[0], group, case.out_channels // group, math.prod(out_sizes)))
    for tap in itertools.product(*(range(k) for k in geometry.kernel_shape)):
        window = tuple(
            slice(r * dilation, r * dilation + (out - 1) * stride + 1, stride)
            for r, dilation, stride, out in zip(tap, geometry.dilations, geometry.strides, out_sizes, strict=True)
        )
        read = padded[(slice(None),) * 3 + window]
        y += grouped[(..., *tap)] @ read.reshape(*read.shape[:3], y.shape[3])
    return y.reshape(x.shape[0], case.out_channels, *out_sizes)


def pooled_sizes(pool, sizes):
    """Sizes of what a pool makes of maps of these sizes."""
    n = len(sizes)
    return tuple(
        (size + pool.pads[i] + pool.pads[n + i] - pool.kernel_shape[i]) // pool.strides[i] + 1
        for i, size in enumerate(sizes)
    )


def max_pool(pool, x):
    """The maximum of each window."""
    n = x.ndim - 2
    pads = [(0, 0), (0, 0), *((pool.pads[i], pool.pads[n + i]) for i in range(n))]
    padded = np.pad(x, pads, constant_values=-np.inf)
    sizes = pooled_sizes(pool, x.shape[2:])
    taps = []
    for tap in itertools.product(*(range(k) for k in pool.kernel_shape)):
        window = tuple(slice(t, t + (o - 1) * s + 1, s) for t, o, s in zip(tap, sizes, pool.strides, strict=True))
        taps.append(padded[(slice(None),) * 2 + window])
    return np.max(taps, axis=0)


def activate(case, x):
    """The activation in float64, and its Lipschitz constant."""
    alpha, beta = float(np.float32(case.alpha)), float(np.float32(case.beta))
    match case.activation:
        case Activation.NONE:
            return x, 1.0
        case Activation.RELU:
            return np.maximum(x, 0), 1.0
        case Activation.CLIP:
            return np.minimum(np.maximum(x, alpha), beta), 1.0
        case Activation.LEAKY_RELU:
            return np.where(x < 0, alpha * x, x), max(1.0, abs(alpha))
        case Activation.HARD_SWISH:
            return x * np.clip(x / 6 + 0.5, 0, 1), 1.5
        case Activation.HARD_SIGMOID:
            return np.clip(alpha * x + beta, 0, 1), abs(alpha)
        case Activation.SIGMOID:
            return 1 / (1 + np.exp(-x)), 0.25
        case Activation.SILU:
            return x / (1 + np.exp(-x)), 1.1


def oracle(case, inputs, stored_sums=0, *, has_rounded_factors=False):
    """The exact output, and a bound on the error of each element.

    Args:
        case: the layer.
        inputs: of the model.
        stored_sums: how often float16 sums are rounded, and stored, before they are whole.
        has_rounded_factors: whether floats are rounded to halves before they are multiplied.

    A sum of n products in float has an error of at most about n eps sum |w| |x| (Higham, 3.1); bias and residual are
    two more terms. The activation passes that on times its Lipschitz constant and adds a few roundings of its own;
    float16 rounds once more.
    """
    rows = (1, -1) + (1,) * (case.weight.ndim - 2)
    bias = inputs["B"].astype(np.float64).reshape(rows) if case.has_bias else np.float64(0)
    residual = inputs["Z"].astype(np.float64) if case.has_residual else np.float64(0)
    x = whole_x(case, inputs)
    exact = convolve(case, case.weight, x) + bias + residual
    magnitude = convolve(case, np.abs(case.weight), np.abs(x)) + np.abs(bias) + np.abs(residual)
    terms = np.count_nonzero(case.weight.reshape(case.out_channels, -1), axis=1).reshape(rows) + 3
    eps = np.finfo(np.float32).eps
    y, lipschitz = activate(case, exact)
    bound = lipschitz * terms * eps * magnitude
    if case.dtype == np.float16:
        bound = bound + 1.01 * lipschitz * stored_sums * (2.0**-11 * magnitude + 2.0**-25)
    if has_rounded_factors:
        least = convolve(case, np.abs(case.weight), np.full_like(x, 2.0**-24))
        bound = bound + 2.01 * lipschitz * (2.0**-11 * magnitude + least)
    if case.activation >= Activation.LEAKY_RELU:
        bound = bound + 8 * eps * (np.abs(y) + lipschitz * np.abs(exact) + abs(case.beta) + 1)
    if case.dtype == np.float16:
        bound = bound + 2.0**-11 * (np.abs(y) + bound) + 2.0**-25
    # The maximum of values is off by no more than the value that is off the most.
    return (y, bound) if case.pool is None else (max_pool(case.pool, y), max_pool(case.pool, bound))


def assert_within(actual, exact, bound):
    """Every element of ``actual`` is within its own bound of ``exact``."""
    assert actual.shape == exact.shape
    error = np.abs(actual.astype(np.float64) - exact)
    if not (error <= bound).all():
        worst = np.unravel_index(np.argmax(np.where(error <= bound, 0, error - bound)), error.shape)
        count = int((~(error <= bound)).sum())
        raise AssertionError(f"{count} of {error.size} off; at {worst}: {actual[worst]} for {exact[worst]}")


def run_and_check(session, case, x_shape, seed=0):
    """Run a case on random inputs and compare it with the oracle; returns what came out."""
    inputs = random_inputs(case, x_shape, seed)
    (actual,) = session.run(None, inputs)
    assert actual.dtype == case.dtype
    assert_within(actual, *oracle(case, inputs))
    return actual
