"""The conversion: load, analyse, decide, rewrite, check, save."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import onnx_graphsurgeon as gs
from onnx import GraphProto, ModelProto, TensorShapeProto, helper

from onnx_sparseconv import version
from onnx_sparseconv.converter import metadata
from onnx_sparseconv.converter.analyse import Plan, default_opset, make_plan
from onnx_sparseconv.converter.conv_sites import ConvSite, find_conv_sites
from onnx_sparseconv.converter.decide import DecisionOptions
from onnx_sparseconv.converter.dense_folding import fold_dense
from onnx_sparseconv.converter.gpu_images import add_images, drop_stale, makers, node_keys, with_images
from onnx_sparseconv.converter.gpu_predictions import GpuRule
from onnx_sparseconv.converter.model_io import load, save, tensor_bytes
from onnx_sparseconv.converter.model_view import ModelView, Scope
from onnx_sparseconv.converter.opset import raise_ir_version, raise_opset
from onnx_sparseconv.converter.pipeline import Pipeline
from onnx_sparseconv.converter.precision import (
    PrecisionOptions,
    check_names,
    convert_to_half,
    fix_initializers,
    inline_functions,
)
from onnx_sparseconv.converter.precision.weights import Lost, through_half
from onnx_sparseconv.converter.report import ConversionReport, LayerReport, ModelReport, PassReport
from onnx_sparseconv.converter.shapes import ShapeMap
from onnx_sparseconv.custom_ops.function_body import MIN_OPSET, is_portable_body, make_functions
from onnx_sparseconv.custom_ops.node import attributes_from_proto
from onnx_sparseconv.custom_ops.schema import DOMAIN, OP_TYPES, OPSET_VERSION, SparseConvAttributes
from onnx_sparseconv.errors import ModelError, UsageError
from onnx_sparseconv.kernels.compile import CompileOptions
from onnx_sparseconv.kernels.targets import NvrtcChoice, parse_architectures, resolve_targets
from onnx_sparseconv.kernels.unified_csr import encode
from onnx_sparseconv.nodes import iterate_nodes
from onnx_sparseconv.passes.base import is_sparse
from onnx_sparseconv.passes.conv_layer import ConvLayer
from onnx_sparseconv.passes.sparsify_conv import SparsifyConv

Progress = Callable[[int, int, str], None]
# Positions of a map from which on a depthwise convolution is faster on a CPU than operators that scale channels. Of 49
# it mostly was; of 9 and fewer it was slower, down to half the speed (on a Xeon, by runs of which no file is kept).
_FEWEST_SCALED_ON_CPU = 49
Precision = Literal["keep", "fp16"]


@dataclass(frozen=True)
class ConvertOptions(DecisionOptions):
    """What `convert` does.

    Attributes:
        min_sparsity: share of zeros, 0 to 1, from which a layer is rewritten; None takes the documented default.
        force: rewrite every layer that can be rewritten at all.
        decisions: what measurement decided; it goes before the other two.
        dry_run: decide and report, write nothing.
        targets: GPU architectures to compile kernel images for, ``sm_90`` and its like; ``native`` asks this machine's
            GPUs. Without decisions, threshold or force, layers have to gain on them by `GpuRule`. None: those that the
            decisions have kernels for.
        batches: batch sizes at which they have to gain, where the model leaves its own open; empty: `DEFAULT_BATCHES`.
        nvrtc: major version of the compiler; ``auto`` takes the oldest that knows the architecture.
        jobs: compilers at a time; None: as many as there are cores to use.
        cache_dir: folder for compiled images; None takes ``$ONNX_SPARSECONV_CACHE`` or the user's cache folder.
        precision: ``fp16`` turns the whole model into float16, as far as it can be; ``keep`` leaves types alone.
        fp16_io: turn its float inputs and outputs into float16, too; otherwise they are cast.
        keep_float: names of nodes, or of operators, that stay float.
        fuse_pools: whether a MaxPool becomes part of the convolution before it, which pays on GPUs; None: where the
            model is made for one, by a target, in float16, or by decisions that were measured on one.
        fuse_concats: whether a 1x1 convolution, and what scales channels, reads the inputs of the Concat before it.
        fuse_scales: whether what scales and shifts channels before an activation and a convolution becomes a depthwise
            convolution.
    """

    dry_run: bool = False
    targets: tuple[str, ...] = ()
    batches: tuple[int, ...] = ()
    nvrtc: NvrtcChoice = "auto"
    jobs: int | None = None
    cache_dir: Path | None = None
    precision: Precision = "keep"
    fp16_io: bool = False
    keep_float: tuple[str, ...] = ()
    fuse_pools: bool | None = None
    fuse_concats: bool = True
    fuse_scales: bool = True

    @property
    def takes_pools(self) -> bool:
        """Whether pools are fused."""
        return self._is_for_gpu if self.fuse_pools is None else self.fuse_pools

    @property
    def fewest_scaled_positions(self) -> int | None:
        """Of maps whose scales are fused; None where none are."""
        if not self.fuse_scales:
            return None
        return 0 if self._is_for_gpu else _FEWEST_SCALED_ON_CPU

    @property
    def gpu_rule(self) -> GpuRule | None:
        """The GPUs that layers have to be faster on: the targets."""
        return _gpu_rule(self, parse_architectures(self.targets))

    @property
    def _is_for_gpu(self) -> bool:
        is_measured_on_gpu = self.decisions is not None and bool(self.decisions.setting.get("gpu"))
        return bool(self.targets) or self.precision == "fp16" or is_measured_on_gpu

    @property
    def asks_cpu(self) -> bool:
        """Not where the model is made for GPUs."""
        return super().asks_cpu and not self.targets and self.precision == "keep"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.precision not in ("keep", "fp16"):
            raise UsageError(f"precision must be keep or fp16, got {self.precision!r}")
        if self.precision == "keep" and (self.fp16_io or self.keep_float):
            raise UsageError("fp16 inputs and outputs, and nodes to keep float, need the precision fp16")
        if self.batches and not self.targets:
            raise UsageError("batch sizes to decide for need a target")


def convert(
    model: str | Path | ModelProto,
    output: str | Path | None = None,
    options: ConvertOptions | None = None,
    *,
    progress: Progress | None = None,
    compile_progress: Progress | None = None,
) -> tuple[ModelProto | None, ConversionReport]:
    """Rewrite the Conv nodes whose sparsity pays into SparseConv, and compile GPU images for them if asked to.

    Args:
        model: a file or a model in memory (which is not changed).
        output: file to write; None writes nothing. It appears whole or not at all.
        options: what decides; None takes the defaults.
        progress: called with (layers done, layers to do, name) while weights are encoded.
        compile_progress: called with (images done, images to do, name of a layer) while GPU images are compiled.

    Returns:
        The converted model and the report. The model is None when nothing qualified (then nothing is written) and on
        a dry run. A model that is converted already qualifies when GPU images were asked for, and every model of which
        something becomes float16 does when that was.

    Raises:
        ModelError: the model cannot be read, is not valid ONNX, or the result cannot be written.
        UsageError: a target is no architecture that a compiler knows.
        CompileError: there is no compiler, it failed, or there is no GPU for ``native``.
    """
    options = options or ConvertOptions()
    compile_options = CompileOptions(options.jobs, options.cache_dir)
    decisions = options.decisions
    targets = resolve_targets(options.targets or (decisions.targets if decisions else ()), options.nvrtc)
    loaded = load(model)
    images_before = makers(loaded.proto)
    nodes_before = _count_nodes(loaded.proto)
    to_half = options.precision == "fp16"
    notes: tuple[str, ...] = ()
    lost: tuple[Lost, ...] = ()
    if to_half:
        inlined, notes = inline_functions(loaded.proto)
        loaded = replace(loaded, proto=inlined)
        check_names(inlined, options.keep_float)
        notes = (*notes, *(fix_initializers(inlined) if options.force else ()))
    rule = _gpu_rule(options, [target.architecture for target in targets])
    plan = make_plan(loaded, options, rule)
    report = ConversionReport(
        source=loaded.path,
        output=None,
        model=plan.report,
        converted=plan.report.num_rewritten > 0,
        already_converted=any(layer.op_type in OP_TYPES for layer in plan.report.layers),
        bytes_before=loaded.size_bytes,
        bytes_after=None,
        conv_bytes_before=sum(layer.dense_bytes for layer in _rewritten(plan.report)),
        conv_bytes_after=sum(layer.sparse_bytes or 0 for layer in _rewritten(plan.report)),
        nodes_before=nodes_before,
        nodes_after=nodes_before,
        notes=(*notes, *plan.report.notes, *_notes_on_precision(options)),
        targets=tuple(target.name for target in targets),
        decisions=options.decisions,
    )
    if not report.converted and not to_half and not (targets and report.already_converted):
        return None, report
    notes = ()
    if report.converted:
        layers, passes, notes, lost = _rewrite(plan, options, progress)
        report = replace(
            report,
            model=replace(plan.report, layers=layers),
            conv_bytes_after=sum(layer.sparse_bytes or 0 for layer in layers if layer.verdict.rewrite),
            passes=passes,
        )
    proto = plan.view.proto
    if to_half:
        proto = _with_half_opset(proto)
        folded, lost_more = fold_dense(proto, options.keep_float)
        notes = (*notes, *folded)
        report = _to_half(proto, plan, options, report, (*lost, *lost_more))
    notes = (*notes, *drop_stale(proto, images_before))
    if targets and options.dry_run:
        notes = (*notes, "a dry run compiles no GPU images")
    elif targets:
        # Last of all: images are made of the nodes as they are now.
        choices = decisions.kernels if decisions is not None else {}
        added = add_images(proto, targets, compile_options, compile_progress, choices, rule=rule)
        report = with_images(report, node_keys(plan.sites), added)
    if not report.changed:
        return None, replace(report, notes=(*report.notes, *notes))
    size = tensor_bytes(proto)
    if output is not None and not options.dry_run:
        size = save(proto, output, external=loaded.external)
    written = output is not None and not options.dry_run
    report = replace(
        report,
        output=Path(output) if output is not None and written else None,
        bytes_after=size,
        nodes_after=_count_nodes(proto),
        notes=(*report.notes, *notes),
    )
    return (None if options.dry_run else proto), report


def _gpu_rule(options: ConvertOptions, architectures: Sequence[int]) -> GpuRule | None:
    """The GPUs that layers have to be faster on; None where the model is not made for any."""
    if not architectures:
        return None
    to_half = options.precision == "fp16"
    return GpuRule(tuple(architectures), options.batches, to_half, takes_concats=options.fuse_concats)


def _notes_on_precision(options: ConvertOptions) -> tuple[str, ...]:
    """What speaks against decisions that were measured in another precision."""
    decisions = options.decisions
    if decisions is None or not decisions.setting:
        return ()
    measured = decisions.setting.get("precision", "keep")
    if measured == options.precision:
        return ()
    return (f"{decisions.name} was measured with precision {measured}, and is used with {options.precision}",)


def _with_half_opset(proto: ModelProto) -> ModelProto:
    """The model at an opset that float16 needs."""
    opset = default_opset(proto)
    try:
        return proto if opset >= MIN_OPSET else raise_opset(proto)
    except ModelError as error:
        raise ModelError(
            f"float16 needs opset {MIN_OPSET}, the model has {opset}, which cannot be raised: {error}"
        ) from error


def _to_half(
    proto: ModelProto, plan: Plan, options: ConvertOptions, report: ConversionReport, lost: tuple[Lost, ...]
) -> ConversionReport:
    """Turn a model into float16; give the report with what that did, and with the weights' sizes as they are then."""
    # What was a Conv when its name was given.
    decided = zip(plan.sites, plan.report.layers, strict=True)
    kept = [s.name for s, layer in decided if layer.verdict.rewrite and s.node.op in options.keep_float]
    wanted = PrecisionOptions(options.fp16_io, (*options.keep_float, *kept))
    precision = convert_to_half(proto, default_opset(proto), wanted, lost)
    report = replace(report, precision=precision)
    if not precision.changed or not report.converted:
        return report
    sites = find_conv_sites(ModelView(proto), ShapeMap(proto))
    now = {key: site for key, site in zip(node_keys(sites), sites, strict=True) if site.is_sparse}
    layers = []
    for key, layer in zip(node_keys(plan.sites), report.model.layers, strict=True):
        if layer.verdict.rewrite and key in now:
            weight = attributes_from_proto(now[key].proto).weight
            padding = weight.nnz_stored / max(1, int(np.count_nonzero(weight.values)))
            layer = replace(layer, sparse_bytes=weight.size_bytes, padding=padding)  # noqa: PLW2901
        layers.append(layer)
    size = sum(layer.sparse_bytes or 0 for layer in layers if layer.verdict.rewrite)
    return replace(report, model=replace(report.model, layers=tuple(layers)), conv_bytes_after=size)


def _rewrite(
    plan: Plan, options: ConvertOptions, progress: Progress | None
) -> tuple[tuple[LayerReport, ...], tuple[PassReport, ...], tuple[str, ...], tuple[Lost, ...]]:
    """Fold, replace the nodes, fuse, then make the model able to carry them.

    Returns:
        The layers' reports with what folding changed in them, what the passes did, notes, and what rounding folded
        weights to float16 took from them.

    Raises:
        ModelError: a function of the model's own has the name of one of the ops.
    """
    view, proto = plan.view, plan.view.proto
    _require_free_names(proto, str(plan.report.path or "the model"))
    to_half = options.precision == "fp16"
    opset = default_opset(proto)
    chosen = [s for s, layer in zip(plan.sites, plan.report.layers, strict=True) if layer.verdict.rewrite]
    pipeline = Pipeline(view, plan.shapes, chosen, to_half=to_half, keep=options.keep_float)
    pipeline.fold()
    attributes, biases = {}, {}
    lost: list[Lost] = []
    for index, site in enumerate(chosen):
        if progress:
            progress(index, len(chosen), site.name)
        layer = pipeline.layers[id(site.node)]
        if site.is_named_in(options.keep_float):
            assert site.weight is not None
            layer = replace(layer, dtype=site.weight.values.dtype)
        elif to_half and site.weight is not None:
            layer, loss = through_half(layer, site.weight.values.dtype, site.name)
            lost += [loss] if loss is not None else []
        layer = layer.rounded()
        attributes[id(site.node)] = _encode(layer)
        if layer.new_bias:
            biases[id(site.node)] = gs.Constant(view.unique_name(f"{site.name}_bias"), layer.bias)
    if progress:
        progress(len(chosen), len(chosen), "")
    layers = _with_folded(plan, pipeline, attributes)
    sparsify = SparsifyConv(attributes, {id(s.node): s.name for s in chosen}, biases)
    for scope in pipeline.scopes:
        sparsify.apply(scope.graph)
    pipeline.fuse(
        pools=options.takes_pools,
        scales=options.fewest_scaled_positions,
        concats=options.fuse_concats,
    )
    _state_ranks(pipeline.scopes)
    removed = view.write_back()
    for owner in {id(o): o for o in (proto, *(s.function for s in pipeline.scopes)) if o is not None}.values():
        _import_domain(owner)
    raise_ir_version(proto)
    _add_functions(proto, opset)
    metadata.record(proto, version.__version__, layers)
    notes = (*pipeline.notes(), *_notes_on_weights(chosen, removed))
    return layers, pipeline.reports(), notes, tuple(lost)


def _encode(layer: ConvLayer) -> SparseConvAttributes:
    return SparseConvAttributes(layer.geometry, encode(layer.weight, layer.geometry.group), layer.dtype)


def _with_folded(
    plan: Plan, pipeline: Pipeline, attributes: Mapping[int, SparseConvAttributes]
) -> tuple[LayerReport, ...]:
    """The layers' reports with the stored size of weights that folding has changed; it makes zeros, and +0 of -0."""
    layers = []
    for site, layer in zip(plan.sites, plan.report.layers, strict=True):
        folded = pipeline.layers.get(id(site.node))
        if folded is None or site.weight is None or folded.weight is site.weight.values:
            layers.append(layer)
            continue
        weight = attributes[id(site.node)].weight
        nonzeros = max(1, int(np.count_nonzero(weight.values)))
        layers.append(replace(layer, sparse_bytes=weight.size_bytes, padding=weight.nnz_stored / nonzeros))
    return tuple(layers)


def _state_ranks(scopes: Sequence[Scope]) -> None:
    """Give outputs of subgraphs that come out of a sparse node their rank, where they state no shape.

    ONNX Runtime 1.20 does not infer the shape of a custom op in the body of a Scan, and Scan needs it.
    """
    for scope in scopes:
        graph = scope.proto
        if not isinstance(graph, GraphProto) or scope.parent is None:
            continue
        sparse = [n for n in scope.graph.nodes if is_sparse(n) and "kernel_shape" in n.attrs]
        ranks = {n.outputs[0].name: len(n.attrs["kernel_shape"]) + 2 for n in sparse}
        for output in graph.output:
            tensor = output.type.tensor_type
            if output.name in ranks and tensor.elem_type and not tensor.HasField("shape"):
                tensor.shape.dim.extend(TensorShapeProto.Dimension() for _ in range(ranks[output.name]))


def _import_domain(owner: ModelProto) -> None:
    if all(o.domain != DOMAIN for o in owner.opset_import):
        owner.opset_import.append(helper.make_opsetid(DOMAIN, OPSET_VERSION))


def _require_free_names(proto: ModelProto, name: str) -> None:
    """Check that the portable bodies can be added: a function of another kind in their place would be called."""
    for function in proto.functions:
        if function.domain == DOMAIN and function.name in OP_TYPES and not is_portable_body(function):
            raise ModelError(
                f"{name}: its own function {DOMAIN}::{function.name} has the name of an operator: rename it"
            )


def _add_functions(proto: ModelProto, opset: int) -> None:
    """Add the portable bodies of the ops that the model uses and does not carry yet."""
    present = {f.name for f in proto.functions if f.domain == DOMAIN}
    nodes = [*iterate_nodes(proto.graph.node), *(n for f in proto.functions for n in iterate_nodes(f.node))]
    used = {n.op_type for n in nodes if n.domain == DOMAIN}
    proto.functions.extend(make_functions(sorted(used - present), opset))


def _notes_on_weights(chosen: Sequence[ConvSite], removed: set[str]) -> tuple[str, ...]:
    """Say where a dense weight stays in the file, and where a shared one is now stored several times."""
    consumers: dict[str, list[str]] = {}
    for site in chosen:
        consumers.setdefault(site.weight_name, []).append(site.name)
    notes = [f"weight {w!r} stays in the file: other nodes use it" for w in consumers if w not in removed]
    notes += [f"weight {w!r} is shared: it is now stored in {len(n)} nodes" for w, n in consumers.items() if len(n) > 1]
    overridable = [s.weight_name for s in chosen if s.weight is not None and s.weight.overridable]
    notes += [f"weight {w!r} is no longer an input of the model" for w in dict.fromkeys(overridable)]
    return tuple(notes)


def _rewritten(report: ModelReport) -> list[LayerReport]:
    return [layer for layer in report.layers if layer.verdict.rewrite]


def _count_nodes(proto: ModelProto) -> int:
    """Nodes in the graph and its subgraphs."""
    return sum(1 for _ in iterate_nodes(proto.graph.node))
