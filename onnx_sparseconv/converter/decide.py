"""Which Conv become SparseConv: pure functions from what is known of a layer to a verdict with its reason."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from onnx import TensorProto, helper

from onnx_sparseconv.converter.conv_sites import QUANTISED_CONVS, ConvSite, output_positions
from onnx_sparseconv.converter.report import NOT_FORCIBLE, Reason, Verdict
from onnx_sparseconv.custom_ops.function_body import MIN_OPSET
from onnx_sparseconv.custom_ops.schema import MAX_GEOMETRY_VALUE, MAX_SPATIAL_RANK, MAX_TAPS
from onnx_sparseconv.errors import UsageError
from onnx_sparseconv.kernels.unified_csr import Array, nonzero_mask
from onnx_sparseconv.passes.base import scales_channels

if TYPE_CHECKING:
    from onnx_sparseconv.converter.decisions import Decisions
    from onnx_sparseconv.converter.gpu_predictions import GpuRule

# Without a measurement on the device: from this share of zeros on sparse beats ONNX Runtime's dense Conv on a CPU. The
# classes and their break-even points are measured, with a margin (docs/cpu-kernel.md, "When it pays").
MIN_SPARSITY = 0.65
MIN_SPARSITY_SMALL_MAP = 0.75
# For GPUs, where predicted times decide (gpu_rule.py): with fewer zeros a layer is no reason to change a model.
MIN_SPARSITY_GPU = 0.5
# A map of at most so many positions (7x7, 8x8) is small. So is one whose size is only known at run time: it may be.
SMALL_MAP_POSITIONS = 64
# A layer with fewer weights is over before a custom op has been called.
MIN_WEIGHTS = 512
# With fewer weights for each output channel, most of the work is to store the output, which no zero saves.
MIN_WEIGHTS_A_CHANNEL = 16

SUPPORTED_TYPES = (TensorProto.FLOAT, TensorProto.FLOAT16)


@dataclass(frozen=True)
class DecisionOptions:
    """What decides, where no measurement does.

    Attributes:
        min_sparsity: share of zeros, 0 to 1, from which a layer is rewritten; None takes the measured one of the
            layer's class (see `default_min_sparsity`).
        force: rewrite every layer that can be rewritten at all.
        decisions: what measurement decided (`onnx_sparseconv.tune`, `read_decisions`); it goes before the other two.
    """

    min_sparsity: float | None = None
    force: bool = False
    decisions: Decisions | None = None

    @property
    def leaves_it_to_rules(self) -> bool:
        """Whether nobody said how sparse a layer has to be."""
        return self.min_sparsity is None and not self.force

    @property
    def gpu_rule(self) -> GpuRule | None:
        """The GPUs that layers have to be faster on; None where the model is not made for any."""
        return None

    @property
    def asks_cpu(self) -> bool:
        """Whether what slows ONNX Runtime's CPU provider down counts against a layer."""
        return self.leaves_it_to_rules

    def __post_init__(self) -> None:
        if self.min_sparsity is not None and not 0 <= self.min_sparsity <= 1:
            raise UsageError(f"min_sparsity must lie between 0 and 1, got {self.min_sparsity}")


def decide(site: ConvSite, options: DecisionOptions, *, for_gpu: bool = False) -> Verdict:
    """The verdict on one convolution; for a GPU, that of its form and zeros, before times are predicted."""
    threshold = (MIN_SPARSITY_GPU, "layers on GPUs") if for_gpu else None
    if options.min_sparsity is not None:
        threshold = options.min_sparsity, ""
    reason, text = _obstacle(site, threshold)
    if reason is Reason.REWRITE:
        return Verdict(True, reason, text)
    if options.force and reason not in NOT_FORCIBLE:
        return Verdict(True, Reason.FORCED, f"forced, though {text}")
    return Verdict(False, reason, text)


def default_min_sparsity(site: ConvSite) -> tuple[float, str]:
    """The share of zeros from which a layer pays on a CPU, and the class of layers that it is measured for."""
    assert site.geometry is not None
    positions = output_positions(site.geometry, site.input_shape)
    if positions is None:
        return MIN_SPARSITY_SMALL_MAP, "layers whose output size is not known"
    if positions <= SMALL_MAP_POSITIONS:
        return MIN_SPARSITY_SMALL_MAP, "layers with small output maps"
    return MIN_SPARSITY, "such layers"


def unsupported_opset(why: str) -> Verdict:
    """The verdict on a layer of a model whose opset is too old and could not be raised."""
    text = f"the model's opset is below {MIN_OPSET} and cannot be raised: {why}"
    return Verdict(False, Reason.UNSUPPORTED_OPSET, text)


def is_depthwise(site: ConvSite) -> bool:
    """Whether every output channel reads one input channel only."""
    return (
        site.geometry is not None
        and site.geometry.group > 1
        and site.weight is not None
        and site.weight.values.shape[1] == 1
    )


def share_of_zeros(weight: Array) -> float:
    """Of a weight that is not empty, 0 to 1."""
    # Not 1 - density: that rounds a layer of exactly 20% zeros to below a threshold of 20%.
    return (weight.size - np.count_nonzero(nonzero_mask(weight))) / weight.size


def _obstacle(site: ConvSite, threshold: tuple[float, str] | None) -> tuple[Reason, str]:
    """The first thing that speaks against rewriting, the unforcible before the rest; REWRITE when there is none.

    ``threshold`` is as of `default_min_sparsity`, which None asks.
    """
    if site.is_sparse:
        what = ": a depthwise one of 1x1, which scales channels" if scales_channels(site.node) else ""
        return Reason.ALREADY_SPARSE, f"already a sparse convolution{what}"
    if site.node.op in QUANTISED_CONVS:
        return Reason.UNSUPPORTED_FORM, f"{site.node.op} computes with integers; only Conv is rewritten"
    if not site.is_conv:
        return Reason.UNSUPPORTED_FORM, (
            f"{site.node.domain}::{site.node.op} is ONNX Runtime's own fused form; convert the unoptimised model"
        )
    if site.fixed_branch:
        return Reason.UNSUPPORTED_FORM, (
            f"it stands in a branch of the If {site.fixed_branch!r}, which is chosen before the model runs, and there "
            "ONNX Runtime may fail to open it without our library: simplify the model first (onnxsim)"
        )
    if site.weight is None:
        return Reason.RUNTIME_WEIGHT, f"its weight {site.weight_name!r} is only known at run time"
    return _obstacle_in_form(site) or _obstacle_in_gain(site, threshold)


def _obstacle_in_form(site: ConvSite) -> tuple[Reason, str] | None:
    """What the op cannot express."""
    weight, geometry = site.weight, site.geometry
    assert weight is not None
    if geometry is None:
        return Reason.INVALID, site.problem
    if weight.element_type not in SUPPORTED_TYPES:
        return Reason.UNSUPPORTED_TYPE, f"its weight is {type_name(weight.element_type)}, not float32 or float16"
    rank = len(geometry.kernel_shape)
    if rank > MAX_SPATIAL_RANK:
        return Reason.UNSUPPORTED_FORM, f"it has {rank} spatial axes; up to {MAX_SPATIAL_RANK} are supported"
    largest = max(*geometry.strides, *geometry.dilations, *geometry.pads)
    if largest > MAX_GEOMETRY_VALUE:
        text = f"one of its strides, dilations and pads is {largest}, more than {MAX_GEOMETRY_VALUE}"
        return Reason.UNSUPPORTED_FORM, text
    if (taps := math.prod(geometry.kernel_shape)) > MAX_TAPS:
        return Reason.UNSUPPORTED_FORM, f"its kernel has {taps} positions; up to {MAX_TAPS} are supported"
    if any(p < 0 for p in geometry.pads):
        return Reason.UNSUPPORTED_FORM, f"it has negative pads {list(geometry.pads)}"
    if geometry.auto_pad != "NOTSET" and any(d != 1 for d in geometry.dilations):
        return Reason.UNSUPPORTED_FORM, "it is dilated, and its SAME padding depends on sizes only known at run time"
    return None


def _obstacle_in_gain(site: ConvSite, threshold: tuple[float, str] | None) -> tuple[Reason, str]:
    """What makes rewriting useless or unwanted; `force` overrules it."""
    weight = site.weight
    assert weight is not None
    if weight.overridable:
        return (
            Reason.OVERRIDABLE_WEIGHT,
            f"its weight {weight.name!r} is also an input, which callers may set (--force fixes its value)",
        )
    if weight.quantised:
        return Reason.QUANTISED, "its weight is quantised (DequantizeLinear); ONNX Runtime has integer kernels for it"
    if not np.isfinite(weight.values).all():
        return Reason.NOT_FINITE, "some of its weights are infinite or NaN, so its outputs may well be"
    if is_depthwise(site):
        return Reason.DEPTHWISE, "it is depthwise: each output channel has too few weights to gain"
    if weight.values.size < MIN_WEIGHTS:
        return Reason.TOO_SMALL, f"it has only {weight.values.size} weights, fewer than {MIN_WEIGHTS}"
    if weight.values[0].size < MIN_WEIGHTS_A_CHANNEL:
        return Reason.TOO_SMALL, f"it has only {weight.values[0].size} weights for each output channel"
    sparsity = share_of_zeros(weight.values)
    least, kind = threshold or default_min_sparsity(site)
    if sparsity < least:
        bar = f"{least:.1%} from which {kind} pay" if kind else f"threshold of {least:.1%}"
        return Reason.TOO_DENSE, f"{sparsity:.1%} of its weights are zero, below the {bar}"
    return Reason.REWRITE, f"{sparsity:.1%} of its weights are zero"


def type_name(element_type: int) -> str:
    """Name of a TensorProto.DataType as numpy spells it, where it does."""
    names: dict[int, str] = {TensorProto.FLOAT: "float32", TensorProto.DOUBLE: "float64"}
    return names.get(element_type) or helper.tensor_dtype_to_string(element_type).removeprefix("TensorProto.").lower()
