"""From a model to its `ModelReport`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto

from onnx_sparseconv.converter import decisions, metadata
from onnx_sparseconv.converter.conv_sites import ConvSite, find_conv_sites, output_positions, output_sizes
from onnx_sparseconv.converter.decide import DecisionOptions, decide, type_name, unsupported_opset
from onnx_sparseconv.converter.functions import inline_functions_that_take_weights
from onnx_sparseconv.converter.gpu_images import images_of
from onnx_sparseconv.converter.gpu_predictions import GpuRule
from onnx_sparseconv.converter.gpu_rule import decide_for_gpu
from onnx_sparseconv.converter.model_io import LoadedModel, load
from onnx_sparseconv.converter.model_view import ModelView
from onnx_sparseconv.converter.network import decide_in_network
from onnx_sparseconv.converter.opset import raise_opset
from onnx_sparseconv.converter.report import ImageReport, LayerReport, ModelReport, Reason, RowSparsity, Verdict
from onnx_sparseconv.converter.shapes import ShapeMap
from onnx_sparseconv.custom_ops.function_body import MIN_OPSET
from onnx_sparseconv.custom_ops.node import attributes_from_proto
from onnx_sparseconv.custom_ops.schema import ConvGeometry
from onnx_sparseconv.errors import FormatError, ModelError
from onnx_sparseconv.kernels.unified_csr import (
    Array,
    UnifiedCSR,
    choose_slice_height,
    index_dtype,
    negative_zero_bits,
    nonzero_entries,
    nonzero_mask,
    order_rows,
    row_lengths,
    stored_entries,
)


def inspect(model: str | Path | ModelProto, options: DecisionOptions | None = None) -> ModelReport:
    """Find every convolution of a model, measure its sparsity and say what `convert` would do with it.

    Args:
        model: a file or a model in memory (which is not changed).
        options: what decides, `ConvertOptions` for GPUs say; None takes the defaults, which are for CPUs.

    Raises:
        ModelError: the model cannot be read or is not valid ONNX.
        UsageError: a target is no architecture that a compiler knows.
        CompileError: a target is ``native``, and there is no GPU.
    """
    options = options or DecisionOptions()
    return make_plan(load(model), options, options.gpu_rule).report


@dataclass(frozen=True)
class Plan:
    """A model that is ready to be rewritten, and what will be.

    Attributes:
        view: the model, functions inlined and opset raised where the rewriting needs it.
        sites: its convolutions.
        shapes: shapes of its tensors.
        report: what is known of the source; its layers are in the order of ``sites``.
    """

    view: ModelView
    shapes: ShapeMap
    sites: list[ConvSite]
    report: ModelReport


def make_plan(loaded: LoadedModel, options: DecisionOptions, gpu_rule: GpuRule | None = None) -> Plan:
    """Analyse and decide; bring the model to an opset that can carry the ops, if there is something to rewrite.

    Args:
        loaded: the model.
        options: what decides.
        gpu_rule: the GPUs that layers have to be faster on, where ``options`` leave that to rules.
    """
    gpu_rule = gpu_rule if options.leaves_it_to_rules else None
    opset = default_opset(loaded.proto)
    proto, notes = inline_functions_that_take_weights(loaded.proto)
    shapes, view, sites, verdicts, rule_notes = _decide_all(proto, options, gpu_rule)
    if any(v.rewrite for v in verdicts) and opset < MIN_OPSET:
        try:
            shapes, view, sites, verdicts, rule_notes = _decide_all(raise_opset(proto), options, gpu_rule)
        except ModelError as error:
            verdicts = [unsupported_opset(str(error)) if v.rewrite else v for v in verdicts]
        else:
            notes = (*notes, f"the opset is raised from {opset} to {MIN_OPSET}, which the portable form needs")
    if not shapes.complete:
        notes = (*notes, "shape inference failed, so some FLOPs are unknown")
    if options.decisions is not None:
        notes = (*notes, f"decided by measurement on {options.decisions.measured_on}")
    else:
        notes = (*notes, *rule_notes)
    return Plan(view, shapes, sites, _report_model(loaded, sites, verdicts, notes))


def _decide_all(
    proto: ModelProto, options: DecisionOptions, gpu_rule: GpuRule | None
) -> tuple[ShapeMap, ModelView, list[ConvSite], list[Verdict], tuple[str, ...]]:
    view, shapes = ModelView(proto), ShapeMap(proto)
    sites = find_conv_sites(view, shapes)
    opset = default_opset(proto)
    verdicts = [decide(site, options, for_gpu=gpu_rule is not None) for site in sites]
    notes: tuple[str, ...] = ()
    if gpu_rule is not None:
        decided = decide_for_gpu(sites, verdicts, gpu_rule)
        verdicts, notes = decided.verdicts, decided.notes
    elif options.asks_cpu:
        verdicts = decide_in_network(sites, verdicts)
    if options.decisions is not None:
        verdicts = decisions.apply(options.decisions, sites, verdicts)
    verdicts = [_same_opset(site, opset, v) for site, v in zip(sites, verdicts, strict=True)]
    return shapes, view, sites, verdicts, notes


def _same_opset(site: ConvSite, opset: int, verdict: Verdict) -> Verdict:
    """ONNX Runtime inlines a body with the opset of where it stands: a function with another opset cannot carry the
    op.
    """
    function = site.scope.function
    if not verdict.rewrite or function is None or default_opset(function) == opset:
        return verdict
    text = f"its function imports opset {default_opset(function)}, the model {opset}"
    return Verdict(False, Reason.UNSUPPORTED_OPSET, text)


def _report_model(
    loaded: LoadedModel, sites: Sequence[ConvSite], verdicts: Sequence[Verdict], notes: Sequence[str]
) -> ModelReport:
    """Put together what is known of a model."""
    proto = loaded.proto
    return ModelReport(
        path=loaded.path,
        opset=default_opset(proto),
        ir_version=proto.ir_version,
        producer=f"{proto.producer_name} {proto.producer_version}".strip(),
        size_bytes=loaded.size_bytes,
        converted_by=metadata.version_of(proto),
        layers=tuple(_report_layer(s, v) for s, v in zip(sites, verdicts, strict=True)),
        notes=tuple(notes),
    )


def default_opset(proto: ModelProto | onnx.FunctionProto) -> int:
    """Version of the default domain that a model or function imports, 0 for none."""
    return next((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), 0)


@dataclass(frozen=True)
class _Counts:
    """What is counted in a weight.

    Attributes:
        shape: of the dense weight.
        itemsize: bytes of an element.
        row_nonzeros: non-zeros of each output channel, ``[K]``.
        zero_in_channels: input channels (of a group) whose weights are all zero.
    """

    shape: tuple[int, ...]
    itemsize: int
    row_nonzeros: Array
    zero_in_channels: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nonzeros(self) -> int:
        return int(self.row_nonzeros.sum())

    @property
    def row_sparsity(self) -> RowSparsity:
        row_length = self.size // self.shape[0]
        rows = (row_length - self.row_nonzeros) / row_length
        return RowSparsity(float(rows.min()), float(rows.mean()), float(rows.max()))


def _count_dense(weight: Array) -> _Counts | None:
    """None for what cannot be the weight of a convolution."""
    if weight.ndim < 3 or not weight.size:
        return None
    mask = nonzero_mask(weight)
    in_use = mask.any(axis=(0, *range(2, mask.ndim)))
    per_row = mask.reshape(mask.shape[0], -1).sum(axis=1, dtype=np.int64)
    return _Counts(weight.shape, weight.itemsize, per_row, int(np.count_nonzero(~in_use)))


def _count_sparse(weight: UnifiedCSR) -> _Counts:
    """The same without rebuilding the dense weight, which a small file may say is huge.

    Raises:
        FormatError: the arrays contradict each other.
    """
    rows, columns = nonzero_entries(weight)
    shape = weight.weight_shape
    in_use = np.unique(columns // math.prod(shape[2:])).size
    per_row = np.bincount(rows, minlength=shape[0])
    return _Counts(shape, weight.values.itemsize, per_row, shape[1] - in_use)


@dataclass(frozen=True)
class _Measured:
    """What a report says of a weight, be it dense or already sparse."""

    shape: tuple[int, ...] | None
    counts: _Counts | None
    dtype: str | None
    geometry: ConvGeometry | None
    source: str
    verdict: Verdict
    dense_bytes: int = 0
    sparse_bytes: int | None = None
    padding: float | None = None
    images: tuple[ImageReport, ...] = ()


def _measure_dense(site: ConvSite, verdict: Verdict) -> _Measured:
    weight = site.weight
    if weight is None:
        return _Measured(None, None, None, site.geometry, "", verdict)
    values = weight.values
    size: tuple[int | None, float | None] = (None, None)
    if verdict.rewrite and site.geometry is not None:
        size = _encoded_size(values, site.geometry.group)
    dtype, counts = type_name(weight.element_type), _count_dense(values)
    return _Measured(values.shape, counts, dtype, site.geometry, weight.source, verdict, values.nbytes, *size)


def _measure_sparse(site: ConvSite, verdict: Verdict) -> _Measured:
    """The same for a node that is sparse already; a broken one is reported, not raised."""
    try:
        attributes = attributes_from_proto(site.proto)
        counts = _count_sparse(attributes.weight)
    except FormatError as error:
        return _Measured(None, None, None, None, "unified CSR", Verdict(False, Reason.INVALID, str(error)))
    weight = attributes.weight
    return _Measured(
        shape=counts.shape,
        counts=counts,
        dtype=str(weight.values.dtype),
        geometry=attributes.geometry,
        source="unified CSR",
        verdict=verdict,
        dense_bytes=counts.size * counts.itemsize,
        sparse_bytes=weight.size_bytes,
        padding=weight.nnz_stored / max(1, counts.nonzeros),
        images=images_of(attributes),
    )


def _report_layer(site: ConvSite, verdict: Verdict) -> LayerReport:
    measured = _measure_sparse(site, verdict) if site.is_sparse else _measure_dense(site, verdict)
    counts, geometry = measured.counts, measured.geometry
    return LayerReport(
        name=site.name,
        op_type=site.node.op,
        graph=site.scope.path,
        weight_name=site.weight_name,
        weight_source=measured.source,
        weight_shape=measured.shape,
        dtype=measured.dtype,
        group=geometry.group if geometry else 1,
        kernel_shape=geometry.kernel_shape if geometry else (),
        strides=geometry.strides if geometry else (),
        dilations=geometry.dilations if geometry else (),
        num_weights=math.prod(measured.shape) if measured.shape is not None else 0,
        nonzeros=counts.nonzeros if counts else None,
        sparsity=(counts.size - counts.nonzeros) / counts.size if counts else None,
        row_sparsity=counts.row_sparsity if counts else None,
        zero_out_channels=int(np.count_nonzero(counts.row_nonzeros == 0)) if counts else 0,
        zero_in_channels=counts.zero_in_channels if counts else 0,
        flops=_flops(site, counts, geometry),
        dense_bytes=measured.dense_bytes,
        sparse_bytes=measured.sparse_bytes,
        padding=measured.padding,
        verdict=measured.verdict,
        images=measured.images,
        input_shape=site.input_shape,
        output_shape=_output_shape(site, measured.shape, geometry),
    )


def _output_shape(
    site: ConvSite, weight_shape: tuple[int, ...] | None, geometry: ConvGeometry | None
) -> tuple[int | None, ...] | None:
    """``[N, K, E1..En]`` with None for unknown sizes; None where the input or the weight does not tell."""
    shape = site.input_shape
    if shape is None or weight_shape is None or geometry is None or len(shape) != len(geometry.kernel_shape) + 2:
        return None
    # A kernel that does not fit leaves nothing.
    sizes = (None if size is None else max(size, 0) for size in output_sizes(geometry, shape[2:]))
    return (shape[0], weight_shape[0], *sizes)


def _flops(site: ConvSite, counts: _Counts | None, geometry: ConvGeometry | None) -> int | None:
    """Dense floating-point operations for one image, 2 a multiply-add; None where sizes are unknown."""
    if counts is None or geometry is None:
        return None
    positions = output_positions(geometry, site.input_shape)
    return 2 * positions * counts.size if positions else None


def _encoded_size(weight: Array, group: int) -> tuple[int, float]:
    """Bytes of a weight in unified CSR, and stored entries a non-zero, without encoding it."""
    lengths = row_lengths(weight)
    out_channels = int(lengths.size)
    height = choose_slice_height(lengths, group)
    order = order_rows(lengths, group) if height < out_channels else np.arange(out_channels, dtype=np.int32)
    entries = stored_entries(np.maximum(lengths, 1), order, height)
    entry_bytes = weight.itemsize + index_dtype(weight.size // out_channels).itemsize
    small = 4 * (out_channels + -(-out_channels // height)) + 8 * weight.ndim + negative_zero_bits(weight).nbytes
    return entries * entry_bytes + small, entries / max(1, int(lengths.sum()))
