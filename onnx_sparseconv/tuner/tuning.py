"""Tuning: which layers of a model had best run sparse on this machine, by measurement."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from pathlib import Path

from onnx import ModelProto

from onnx_sparseconv.converter import convert
from onnx_sparseconv.converter.analyse import Plan, make_plan
from onnx_sparseconv.converter.conv_sites import ConvSite
from onnx_sparseconv.converter.decide import DecisionOptions, share_of_zeros
from onnx_sparseconv.converter.decisions import Cause, Choice, Decisions, LayerDecision, fingerprint
from onnx_sparseconv.converter.gpu_images import node_keys
from onnx_sparseconv.converter.gpu_predictions import GpuRule
from onnx_sparseconv.converter.model_io import load
from onnx_sparseconv.converter.report import NOT_FORCIBLE, Reason, Verdict
from onnx_sparseconv.errors import ModelError, ProviderError, SparseConvError
from onnx_sparseconv.kernels.compile import CompileOptions
from onnx_sparseconv.kernels.kernel_choice import KernelChoice
from onnx_sparseconv.kernels.targets import NATIVE, Target
from onnx_sparseconv.runtime.layer_times import layer_name
from onnx_sparseconv.runtime.plain import to_plain
from onnx_sparseconv.runtime.timing import Clock
from onnx_sparseconv.tuner.candidates import Candidate, FixedSearch, Search, candidates_for
from onnx_sparseconv.tuner.cost_model import why_hopeless
from onnx_sparseconv.tuner.database import Database, LayerTimes, default_database
from onnx_sparseconv.tuner.foretold import ForetoldLayer, foretell_layer
from onnx_sparseconv.tuner.gpu_candidates import (
    GpuSearch,
    architecture_here,
    batch_of,
    find_target,
    with_fewer_images,
)
from onnx_sparseconv.tuner.in_place import LayerNames, refine, worth_trying
from onnx_sparseconv.tuner.layers import Found, Layer
from onnx_sparseconv.tuner.layouts import Layout, layouts_of
from onnx_sparseconv.tuner.measure import CACHE_BYTES, Bench, OrtBench, WholeModel
from onnx_sparseconv.tuner.network import CostModel, LayerCost, Layouts, best_sparse, find_links, layer_cost
from onnx_sparseconv.tuner.options import TuneOptions
from onnx_sparseconv.tuner.pieces import Piece, Shape, bytes_read, cut
from onnx_sparseconv.tuner.regions import Region, RegionFinder
from onnx_sparseconv.tuner.setting import Setting, read_setting
from onnx_sparseconv.tuner.source import Source, open_source
from onnx_sparseconv.tuner.whole import Convert, WholeCheck, WholeResult
from onnx_sparseconv.tuner.wording import against_rule, candidate_times, measured_text, notes_of, tools_missing

Progress = Callable[[int, int, str], None]
# Verdicts that are not about speed, so that no measurement goes before them: it cannot be, or it changes what the
# model computes with.
_NOT_ABOUT_SPEED = NOT_FORCIBLE | {Reason.OVERRIDABLE_WEIGHT, Reason.QUANTISED, Reason.NOT_FINITE}


class _UnconvertibleError(ModelError):
    """Layers gain, but the model as a whole cannot carry sparse ones."""


@dataclass(frozen=True)
class TuneReport:
    """What tuning found.

    Attributes:
        decisions: for every convolution; what `convert` takes, and what goes into the file.
        whole: the check of the whole model; None where no layer won.
        num_measured: layers that were timed now.
        num_found: layers that had been timed before, here.
        num_alike: layers for which one that is alike was timed.
    """

    decisions: Decisions
    whole: WholeResult | None
    num_measured: int
    num_found: int
    num_alike: int

    @property
    def gain(self) -> bool:
        """Whether the converted model is faster, as a whole, at all the shapes asked for."""
        return self.whole is not None and self.whole.gain


def tune(
    model: str | Path | ModelProto,
    options: TuneOptions | None = None,
    *,
    progress: Progress | None = None,
    bench: Bench | None = None,
    setting: Setting | None = None,
    clock: Clock = time.perf_counter_ns,
) -> TuneReport:
    """Time every layer dense and sparse, choose, and check the choice on the whole model.

    ::

        report = tune("model.onnx", TuneOptions(threads=4, cases=(Case(batch=8),)))
        convert("model.onnx", "fast.onnx", ConvertOptions(decisions=report.decisions))

    Each measurement goes into a database at once, so that an interrupted tune resumes where it was.

    Args:
        model: a file or a model in memory (which is not changed).
        options: what to tune for; None takes the defaults.
        progress: called with (layers done, layers to do, name).
        bench: the stopwatch; None: ONNX Runtime on this machine.
        setting: where it measures; None: what this machine is.
        clock: nanoseconds.

    Raises:
        UsageError: the shapes do not fit the model.
        ProviderError: the provider would not be used.
        SparseConvError: the model cannot be read or run.
    """
    options = options or TuneOptions()
    # Before any work: a target that cannot be timed here, or no compiler.
    target = find_target(options.targets, options.nvrtc) if options.targets else None
    setting = setting or read_setting(options.provider, options.threads)
    if target is not None:
        setting = {**setting, "compiler": target.tools}
    if options.precision != "keep":
        setting = {**setting, "precision": options.precision}
    bench = bench or OrtBench(options.provider, options.threads, options.plan, clock, cuda_graph=options.cuda_graph)
    with tempfile.TemporaryDirectory() as directory:
        source = open_source(model, options.conversion(), Path(directory))
        rule = _rule(options, target)
        job = _Job(source, options, setting, bench, clock, progress or (lambda *_: None), target, rule)
        return _Tuner(job).run(make_plan(load(source.dense), DecisionOptions(), job.rule))


def _rule(options: TuneOptions, target: Target | None) -> GpuRule | None:
    """What decides where nothing is measured; None: sparsity alone."""
    batches = tuple(sorted({case.batch or 1 for case in options.cases}))
    if target is not None:
        return GpuRule((target.architecture,), batches)
    here = architecture_here() if options.provider == "cuda" else None
    return GpuRule((here,), batches, with_images=False) if here is not None else None


@dataclass(frozen=True, eq=False)
class _Work:
    """A layer to be timed; ``index`` is its place among all."""

    index: int
    pieces: tuple[Piece, ...]
    candidates: tuple[Candidate, ...]
    known: tuple[LayerTimes | None, ...]


@dataclass(frozen=True, eq=False)
class _Job:
    """What `tune` was asked for.

    Attributes:
        target: what images are timed for; None where none are.
        rule: what decides of layers that are not timed; None: sparsity alone.
    """

    source: Source
    options: TuneOptions
    setting: Setting
    bench: Bench
    clock: Clock
    progress: Progress
    target: Target | None
    rule: GpuRule | None

    @property
    def rule_name(self) -> str:
        """By what layers that are not timed are decided."""
        return "sparsity" if self.rule is None else "predicted times"


class _Tuner:
    """One run of `tune`."""

    def __init__(self, job: _Job) -> None:
        options = job.options
        self._job = job
        self._search = _search(options, job.target)
        self._database = Database(options.database or default_database(), job.setting, options.preset)
        self._started = job.clock()
        self._num_measured = 0
        self._is_cold: Sequence[bool] = ()

    def run(self, plan: Plan) -> TuneReport:
        job, options = self._job, self._job.options
        finder = RegionFinder(plan.view, pools=options.provider == "cuda")
        regions = finder.find(plan.sites)
        layers = self._layers(plan, regions)
        read = (tensor for region in regions.values() for tensor in (*region.inputs, region.site.node.inputs[0]))
        names = list(dict.fromkeys(tensor.name for tensor in read))
        shapes = [job.bench.shapes(plan.view.proto, names, case, job.source.name) for case in options.cases]
        # Layers that are sparse already stay so.
        dense = WholeModel(job.source.dense, any(site.is_sparse for site in plan.sites))
        dense_us = self._dense_us(dense) if len(options.cases) > 1 else {}
        weights = _weights(dense_us)
        at_cases = [tensors for _, tensors in shapes]
        # Between two runs of a layer of a large model, all others pass through the GPU's cache.
        self._is_cold = [
            options.provider == "cuda" and bytes_read(plan.view.proto, regions.values(), tensors) > CACHE_BYTES
            for tensors in at_cases
        ]
        found = self._measure_all(plan, finder, layers, at_cases, weights)
        untimed = [la for la in layers if la.region is not None and id(la.site.node) not in found]
        foretold = {id(layer.site.node): self._foretell(layer, at_cases) for layer in untimed}
        alone = {
            layout.name: CostModel(
                _costs(list(regions), found, foretold, layout),
                find_links(regions, channels_last=layout.mode.prefer_nhwc),
                weights,
            )
            for layout in layouts_of(options.provider)
        }
        kernels = {node: one.kernels for node, one in found.items()}
        # Layers that nobody timed keep what the rule says.
        by_rule = frozenset(id(la.site.node) for la in layers if la.verdict.rewrite and id(la.site.node) not in found)
        if len(alone) > 1 and not dense_us:
            # Where nothing may become sparse, nothing is asked of the model as a whole.
            dense_us = self._dense_us(dense) if found or by_rule else {name: [0.0] for name in alone}

        def write(sparse: AbstractSet[int], path: Path) -> None:
            self._convert(layers, kernels, sparse, path)

        models, notes = self._in_place(alone, layers, by_rule, dense, write)
        model = Layouts(models, dense_us)
        choices = _worth_checking(model, by_rule)
        chosen: frozenset[int] = frozenset()
        whole = None
        if choices:
            check = WholeCheck(dense, write, job.bench, options.cases, model)
            try:
                chosen, whole = check.run(choices, options.plan.max_steps)
            except _UnconvertibleError as error:
                notes = (str(error),)
        wanted = choices[0] if choices else frozenset[int]()
        # In the layout that was measured; of layers that the model would not have, in the one that wanted them.
        wanting = models[model.fastest(wanted)].costs
        costs = dict(models[whole.cases[0].layout].costs if whole is not None and whole.gain else wanting)
        costs |= {key: wanting[key] for key in (wanted - chosen) & costs.keys()}
        decisions = Decisions(
            model=job.source.name,
            setting={**job.setting, "preset": options.preset},
            input_shapes=tuple(inputs for inputs, _ in shapes),
            layers=tuple(self._decision(layer, found, costs, wanted, chosen) for layer in layers),
            whole_model=to_plain(whole) if whole is not None else {},
            notes=(
                *notes,
                *self._database.notes,
                *against_rule(layers, found, chosen, job.rule_name),
                *notes_of(found, options, is_cold=any(self._is_cold)),
                *tools_missing(found, job.target),
            ),
            targets=self._targets(),
        )
        alike = sum(bool(one.measured_as) for one in found.values())
        return TuneReport(decisions, whole, self._num_measured, self._database.num_found, alike)

    def _dense_us(self, dense: WholeModel) -> dict[str, list[float]]:
        """What the dense model takes in each layout, at each case; infinity where it does not run so.

        Raises:
            SparseConvError: it does not run.
        """
        job = self._job
        try:
            found = [job.bench.whole([dense], case)[0] for case in job.options.cases]
        except SparseConvError as error:
            raise type(error)(str(error).replace(str(dense.path), job.source.name)) from error
        return {
            layout.name: [
                at_case[layout.name].stats().median_us if layout.name in at_case else math.inf for at_case in found
            ]
            for layout in layouts_of(job.options.provider)
        }

    def _foretell(self, layer: Layer, shapes: Sequence[Mapping[str, Shape]]) -> list[ForetoldLayer | None]:
        """Times of a layer that was not timed, at each case."""
        name, rewrite = layer.site.node.inputs[0].name, layer.verdict.rewrite
        return [foretell_layer(layer.site, at_case.get(name), self._job.rule, rewrite=rewrite) for at_case in shapes]

    def _in_place(
        self,
        models: Mapping[str, CostModel],
        layers: Sequence[Layer],
        by_rule: AbstractSet[int],
        dense: WholeModel,
        write: Convert,
    ) -> tuple[Mapping[str, CostModel], tuple[str, ...]]:
        """The cost model by the layers' times where they stand; where they cannot be had, the one given, and why."""
        bench, cases = self._job.bench, self._job.options.cases
        ((layout, alone), *others) = models.items()
        if others or not bench.sees_places:
            return models, ()
        tried = worth_trying(alone)
        if not tried:
            return models, ()
        names = {id(la.site.node): LayerNames(layer_name(la.site.proto), la.site.name) for la in layers}
        try:
            with tempfile.TemporaryDirectory() as directory:
                path = Path(directory) / "sparse.onnx"
                write(tried | by_rule, path)
                profiles = [bench.in_place(dense, WholeModel(path, True), case) for case in cases]
        except ProviderError:
            raise
        except SparseConvError as error:
            return models, (f"layers were timed alone, not in their places: {error}",)
        model = refine(alone, names, tried, by_rule, profiles)
        if model is None:
            return models, ("layers were timed alone, not in their places: ONNX Runtime's profile does not show them",)
        return {layout: model}, ()

    def _layers(self, plan: Plan, regions: Mapping[int, Region]) -> list[Layer]:
        rows = zip(node_keys(plan.sites), plan.sites, plan.report.layers, strict=True)
        return [
            Layer(
                key,
                site,
                report.verdict,
                report.sparsity,
                self._why_left(site, report.verdict, regions.get(id(site.node))),
                regions.get(id(site.node)),
            )
            for key, site, report in rows
        ]

    def _why_left(self, site: ConvSite, verdict: Verdict, region: Region | None) -> tuple[Cause, str] | None:
        """Why a layer is not timed; None where it is."""
        if verdict.reason in _NOT_ABOUT_SPEED:
            return Cause.REFUSED, verdict.text
        if region is None:
            how = f"by its {self._job.rule_name}: {verdict.text}"
            return Cause.NOT_MEASURED, f"only layers of the main graph are timed; {how}"
        assert site.weight is not None
        sparsity = share_of_zeros(site.weight.values)
        hopeless = why_hopeless(site, sparsity) if self._job.options.plan.skip_hopeless else ""
        return (Cause.HOPELESS, hopeless) if hopeless else None

    def _targets(self) -> tuple[str, ...]:
        """What images are for: the one that was timed, and the others that were asked for."""
        target = self._job.target
        if target is None:
            return ()
        others = [name for name in self._job.options.targets if name != NATIVE]
        return tuple(dict.fromkeys((target.name, *others)))

    def _measure_all(
        self,
        plan: Plan,
        finder: RegionFinder,
        layers: list[Layer],
        shapes: Sequence[Mapping[str, Shape]],
        weights: Sequence[float],
    ) -> dict[int, Found]:
        """Times by the id of a layer's node; what could not be timed is written down in ``layers``."""
        work, alike = self._prepare(plan, finder, layers, shapes)
        found: dict[int, Found] = {}
        self._started = self._job.clock()  # compiling does not count
        for done, one in enumerate(work):
            layer = layers[one.index]
            self._job.progress(done, len(work), layer.site.name)
            try:
                times = self._times(one)
            except ProviderError:
                raise
            except SparseConvError as error:
                layers[one.index] = replace(layer, left=(Cause.NOT_MEASURED, f"it cannot be timed: {error}"))
                continue
            if times is None:
                layers[one.index] = replace(layer, left=(Cause.BUDGET, "not timed: the budget was spent"))
                continue
            if problem := _why_no_dense(times, one.candidates):
                layers[one.index] = replace(layer, left=(Cause.NOT_MEASURED, f"it cannot be timed: {problem}"))
                continue
            batches = [batch_of(piece.model) for piece in one.pieces]
            times, candidates = with_fewer_images(times, one.candidates, batches)
            sparse = best_sparse(times, candidates, weights)
            found[id(layer.site.node)] = Found(times, candidates, sparse)
        for index, first in alike.items():
            node, like = id(layers[index].site.node), layers[first]
            if id(like.site.node) in found:
                found[node] = replace(found[id(like.site.node)], measured_as=like.site.name)
            else:
                layers[index] = replace(layers[index], left=like.left)
        self._job.progress(len(work), len(work), "the whole model")
        return found

    def _prepare(
        self, plan: Plan, finder: RegionFinder, layers: list[Layer], shapes: Sequence[Mapping[str, Shape]]
    ) -> tuple[list[_Work], dict[int, int]]:
        """The layers to time, the largest first, with their candidates compiled; and those that are alike, as which."""
        work: list[_Work] = []
        first_of: dict[tuple[str, ...], int] = {}
        alike: dict[int, int] = {}
        # Where the budget ends, what is left matters least.
        order = sorted(
            (index for index, layer in enumerate(layers) if layer.left is None),
            key=lambda index: -(plan.report.layers[index].flops or 0),
        )
        for index in order:
            layer = layers[index]
            assert layer.region is not None
            try:
                pieces = tuple(cut(plan.view, finder, layer.region, at_case) for at_case in shapes)
                likeness = tuple(piece.likeness for piece in pieces)
                first = first_of.setdefault(likeness, index)
                if first != index:
                    alike[index] = first
                    continue
                models = [piece.model for piece in pieces]
                if hopeless := self._search.why_hopeless(models):
                    layers[index] = replace(layer, left=(Cause.HOPELESS, hopeless))
                    continue
                candidates = self._search.candidates(models)
            except SparseConvError as error:
                layers[index] = replace(layer, left=(Cause.NOT_MEASURED, f"it cannot be timed: {error}"))
                continue
            names = tuple(candidate.name for candidate in candidates)
            keys = map(_record_key, pieces, self._is_cold)
            known = tuple(self._database.find(key, names) for key in keys)
            work.append(_Work(index, pieces, candidates, known))
        return self._compile(work, layers), alike

    def _compile(self, work: Sequence[_Work], layers: Sequence[Layer]) -> list[_Work]:
        """The same work with the candidates of what has to be timed ready to be prepared."""
        pending = [one for one in work if None in one.known]
        named = [(layers[one.index].site.name, one.candidates) for one in pending]
        made = self._search.compile(
            named, lambda done, total, what: self._job.progress(done, total, f"compiled {what}".rstrip())
        )
        compiled = {one.index: candidates for one, candidates in zip(pending, made, strict=True)}
        return [replace(one, candidates=compiled.get(one.index, one.candidates)) for one in work]

    def _times(self, work: _Work) -> tuple[LayerTimes, ...] | None:
        """Times of a layer, out of the database or measured; None where they would have to be and the time is up."""
        times = []
        for piece, is_cold, known in zip(work.pieces, self._is_cold, work.known, strict=True):
            if known is not None:
                times.append(known)
                continue
            if self._is_spent():
                return None
            found = self._job.bench.layer(piece.model, work.candidates, is_cold=is_cold)
            self._database.add(_record_key(piece, is_cold), found)
            times.append(found)
        self._num_measured += None in work.known
        return tuple(times)

    def _is_spent(self) -> bool:
        budget = self._job.options.budget_s
        return budget is not None and self._job.clock() - self._started >= budget * 1e9

    def _convert(
        self,
        layers: Sequence[Layer],
        kernels: Mapping[int, Mapping[str, KernelChoice]],
        sparse: AbstractSet[int],
        path: Path,
    ) -> None:
        """Write the model in which certain layers are sparse."""
        job, targets = self._job, self._targets()
        chosen = tuple(_as_decision(layer, sparse, kernels.get(id(layer.site.node), {})) for layer in layers)
        options = job.options.conversion(Decisions("", {}, (), chosen), targets)
        made, report = convert(job.source.original, path, options)
        if made is None or not report.converted:
            refused = next(layer for layer in layers if id(layer.site.node) in sparse)
            verdicts = dict(zip((layer.key for layer in layers), report.model.layers, strict=True))
            raise _UnconvertibleError(f"all layers stay dense: {verdicts[refused.key].verdict.text}")

    def _decision(
        self,
        layer: Layer,
        found: Mapping[int, Found],
        costs: Mapping[int, Sequence[LayerCost]],
        wanted: AbstractSet[int],
        chosen: AbstractSet[int],
    ) -> LayerDecision:
        node = id(layer.site.node)
        choice = Choice.SPARSE if node in chosen else Choice.DENSE
        cause, text = layer.left or (Cause.MEASURED, "")
        times = found.get(node)
        if times is not None:
            text = measured_text(times, costs[node], choice)
        elif cause is Cause.BUDGET:
            text = f"{text}; by its {self._job.rule_name}: {layer.verdict.text}"
        if node in wanted and node not in chosen:
            cause, text = Cause.WHOLE_MODEL, f"left dense for the model as a whole, though {text}"
        return replace(
            _as_decision(layer, chosen, times.kernels if times is not None else {}),
            cause=cause,
            text=text,
            sparsity=layer.sparsity,
            layer=self._job.source.fingerprints.get(layer.key, fingerprint(layer.site)),
            measured_as=times.measured_as if times is not None else "",
            candidates=candidate_times(times) if times is not None else (),
        )


def _costs(
    keys: Sequence[int],
    found: Mapping[int, Found],
    foretold: Mapping[int, Sequence[ForetoldLayer | None]],
    layout: Layout,
) -> dict[int, list[LayerCost]]:
    """Costs of layers at each case, in their order. One of which nothing is known changes no comparison."""
    timed = {
        key: [layer_cost(times, one.candidates, one.sparse, layout) for times in one.times]
        for key, one in found.items()
    }
    untimed = {
        key: [LayerCost(0.0, 0.0) if one is None else one.cost(layout) for one in at_cases]
        for key, at_cases in foretold.items()
    }
    return {key: timed[key] if key in timed else untimed[key] for key in keys}


def _worth_checking(model: Layouts, by_rule: AbstractSet[int]) -> list[frozenset[int]]:
    """Choices of sparse layers that may be faster than none, the best first."""
    choices = [sparse for sparse in model.choose(by_rule) if sparse]
    if any(costs.is_unknown(key) for costs in model.models.values() for key in by_rule):
        return choices  # what those gain is not known
    all_dense = model.total(frozenset())
    return [sparse for sparse in choices if model.total(sparse) <= all_dense]


def _record_key(piece: Piece, is_cold: bool) -> str:
    """Under what the times of a layer are kept."""
    return f"{piece.layer} cold" if is_cold else piece.layer


def _weights(dense_us: Mapping[str, Sequence[float]]) -> list[float]:
    """What a microsecond counts at each case: each counts by its share of its model's own time."""
    return [1 / min(at_case) for at_case in zip(*dense_us.values(), strict=True)] or [1.0]


def _search(options: TuneOptions, target: Target | None) -> Search:
    """What finds the candidates of single layers."""
    preset = options.plan
    if target is None:
        return FixedSearch(candidates_for(options.provider, sub_batches=preset.sub_batches))
    compile_options = CompileOptions(options.jobs, options.cache_dir)
    return GpuSearch(target, compile_options, preset.max_plans, preset.skip_hopeless, preset.sub_batches)


def _why_no_dense(times: Sequence[LayerTimes], candidates: Sequence[Candidate]) -> str:
    """Why there is nothing to compare with; empty where dense runs, as it should."""
    names = [candidate.name for candidate in candidates if candidate.choice is Choice.DENSE]
    for at_case in times:
        if all(math.isinf(at_case.times_us[name]) for name in names):
            return at_case.problems.get(names[0], "the dense layer does not run")
    return ""


def _as_decision(layer: Layer, sparse: AbstractSet[int], kernels: Mapping[str, KernelChoice]) -> LayerDecision:
    graph, node, number = layer.key
    choice = Choice.SPARSE if id(layer.site.node) in sparse or layer.site.is_sparse else Choice.DENSE
    return LayerDecision(node, graph, number, choice, choice, Cause.MEASURED, "tuned", kernels=kernels)
