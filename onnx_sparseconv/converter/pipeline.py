"""The passes around the nodes that are rewritten: folding before, fusing after, and a record of both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

import numpy as np
import onnx_graphsurgeon as gs

from onnx_sparseconv.converter.analyse import default_opset
from onnx_sparseconv.converter.constants import ConstantResolver
from onnx_sparseconv.converter.conv_sites import ConvSite
from onnx_sparseconv.converter.model_view import ModelView, Scope
from onnx_sparseconv.converter.report import NodeNote, PassReport
from onnx_sparseconv.converter.shapes import Shape, ShapeMap
from onnx_sparseconv.kernels.unified_csr import Array
from onnx_sparseconv.passes.base import ConstantLookup, Edit, Pass, Refusal, RefusedError, is_sparse
from onnx_sparseconv.passes.conv_layer import ConvLayer
from onnx_sparseconv.passes.fold_pad import FoldPad
from onnx_sparseconv.passes.fold_scale_after import FoldScaleAfter
from onnx_sparseconv.passes.fold_scale_before import FoldScaleBefore
from onnx_sparseconv.passes.fuse_activation import FuseActivation
from onnx_sparseconv.passes.fuse_concat import FuseConcat
from onnx_sparseconv.passes.fuse_pool import FusePool
from onnx_sparseconv.passes.fuse_residual import FuseResidual
from onnx_sparseconv.passes.fuse_scale import FuseScale
from onnx_sparseconv.passes.fuse_scale_concat import FuseScaleConcat
from onnx_sparseconv.passes.skip_identity import SkipIdentity

_ORDER: tuple[type[Pass], ...] = (
    SkipIdentity,
    FoldPad,
    FoldScaleAfter,
    FoldScaleBefore,
    FuseResidual,
    FuseActivation,
    FusePool,
    FuseScale,
    FuseScaleConcat,
    FuseConcat,
)
# Kinds of numpy types that passes compute with: floating, integers, booleans.
_NUMBERS = "fiub"
# Names in a note; the report has them all.
_MAX_NAMES = 3


class Pipeline:
    """Runs the passes on the scopes that hold nodes to rewrite, and remembers what they did.

    Sparsity is measured, and the choice made, before anything is folded. Folding leaves a Conv a Conv; `layers` then
    has what its weight, bias and padding became.

    Args:
        view: the model.
        shapes: shapes of its tensors.
        chosen: the convolutions that will be rewritten.
        to_half: float ones will become float16, so what is folded has to fit into that.
        keep: names of nodes, or of operators, that stay nodes by themselves; of convolutions it says nothing.
    """

    def __init__(
        self,
        view: ModelView,
        shapes: ShapeMap,
        chosen: Sequence[ConvSite],
        *,
        to_half: bool = False,
        keep: Collection[str] = (),
    ) -> None:
        self._view = view
        self._shapes = shapes
        self._to_half = to_half
        self._resolver = ConstantResolver(view)
        convolutions = {id(site.node) for site in chosen}
        nodes = [node for scope in view.scopes for node in scope.graph.nodes if id(node) not in convolutions]
        kept = [node for node in nodes if node.name in keep or node.op in keep]
        self._pinned = view.pinned_names() | {t.name for n in kept for t in (*n.inputs, *n.outputs) if t.name}
        self._edits: dict[str, list[tuple[Scope, Edit]]] = {kind.__name__: [] for kind in _ORDER}
        self._refusals: dict[str, list[tuple[Scope, Refusal]]] = {kind.__name__: [] for kind in _ORDER}
        self._names = {id(site.node): site.name for site in chosen}
        self.scopes = list({id(site.scope): site.scope for site in chosen}.values())
        self.layers = {id(site.node): self._layer(site) for site in chosen}

    def fold(self) -> None:
        """Fold what stands around the chosen convolutions into them, until there is nothing left to fold."""
        for scope in self.scopes:
            constant = self._constants(scope)
            passes: list[Pass] = [
                SkipIdentity(lambda node: id(node) in self.layers, self._pinned, constant),
                FoldPad(self.layers, self._pinned, constant),
                FoldScaleAfter(self.layers, self._pinned, constant),
                FoldScaleBefore(self.layers, self._pinned, constant, self._shape_lookup(scope)),
            ]
            while sum(self._run(each, scope) for each in passes):
                pass

    def fuse(self, *, pools: bool, scales: int | None, concats: bool) -> None:
        """Take what stands around the sparse convolutions into them.

        Args:
            pools: whether those behind are taken.
            scales: positions of a map from which on what scales channels is fused; None: it is not.
            concats: whether 1x1 convolutions, and what scales channels, read the inputs of the Concat before them.
        """
        for scope in self.scopes:
            constant, shape_of = self._constants(scope), self._shape_lookup(scope)
            self._run(FuseResidual(self._pinned, self._comparison(scope)), scope)
            self._run(SkipIdentity(is_sparse, self._pinned, constant), scope)
            self._run(FuseActivation(self._pinned, constant), scope)
            if pools:
                self._run(FusePool(self._pinned, shape_of, self._view.unique_name), scope)
            if scales is not None:
                fuse_scale = FuseScale(
                    self._pinned,
                    constant,
                    shape_of,
                    self._view.unique_name,
                    fewest_positions=scales,
                    to_half=self._to_half,
                )
                self._run(fuse_scale, scope)
                if concats:
                    self._run(FuseScaleConcat(self._pinned, shape_of), scope)
            if concats:
                opset = default_opset(scope.function or self._view.proto)
                self._run(FuseConcat(self._pinned, constant, shape_of, self._view.unique_name, opset), scope)

    def reports(self) -> tuple[PassReport, ...]:
        """What each pass did and refused; what a later pass took after all is not listed as refused."""
        left = {id(node) for scope in self._view.scopes for node in scope.graph.nodes}
        reports = []
        for kind in _ORDER:
            edits = self._edits[kind.__name__]
            refusals = [(s, r) for s, r in self._refusals[kind.__name__] if id(r.node) in left]
            done = [NodeNote(self._names.get(id(e.node)) or e.node.name, s.path, _took(e)) for s, e in edits]
            refused = [NodeNote(_label(r.node), s.path, f"{r.node.op}: {r.text}") for s, r in refusals]
            reports.append(PassReport(kind.__name__, len(edits), tuple(done), tuple(dict.fromkeys(refused))))
        return tuple(reports)

    def notes(self) -> tuple[str, ...]:
        """The same for people: a line for each pass that did something, and one for each reason to refuse."""
        notes = []
        for kind, report in zip(_ORDER, self.reports(), strict=True):
            counts = Counter(edit.what for _, edit in self._edits[report.name])
            if counts:
                notes.append(f"{', '.join(f'{n} {what}' for what, n in counts.items())} {kind.title}")
            reasons: dict[str, list[str]] = {}
            for refused in report.refused:
                reasons.setdefault(refused.text, []).append(refused.node)
            verb = kind.title.split()[0]
            for text, nodes in reasons.items():
                op, why = text.split(": ", 1)
                notes.append(f"not {verb}: {len(nodes)} {op} ({_some(nodes)}): {why}")
        return tuple(notes)

    def _run(self, each: Pass, scope: Scope) -> int:
        name = type(each).__name__
        result = each.apply(scope.graph)
        self._edits[name] += [(scope, edit) for edit in result.edits]
        # Of several rounds the last counts.
        others = [(s, r) for s, r in self._refusals[name] if s is not scope]
        self._refusals[name] = [*others, *((scope, refusal) for refusal in result.refusals)]
        return result.changed

    def _layer(self, site: ConvSite) -> ConvLayer:
        weight, geometry = site.weight, site.geometry
        assert weight is not None
        assert geometry is not None
        tensor = site.node.inputs[2] if len(site.node.inputs) > 2 and not site.node.inputs[2].is_empty() else None
        try:
            bias = self._constants(site.scope)(tensor) if tensor is not None else None
        except RefusedError:
            bias = None
        is_unknown = tensor is not None and bias is None
        dtype = weight.values.dtype
        if self._to_half and dtype == np.float32:
            dtype = np.dtype(np.float16)
        return ConvLayer(geometry, weight.values, dtype, None if is_unknown else bias, is_unknown)

    def _constants(self, scope: Scope) -> ConstantLookup:
        def constant(tensor: gs.Tensor) -> Array | None:
            found = self._resolver.resolve(tensor, scope)
            if found is not None and found.overridable:
                raise RefusedError(f"{tensor.name!r} is also an input, which callers may set")
            return found.values if found is not None and found.values.dtype.kind in _NUMBERS else None

        return constant

    def _shape_lookup(self, scope: Scope) -> Callable[[str], Shape | None]:
        return lambda name: self._shapes.certain.get(name, scope)

    def _comparison(self, scope: Scope) -> Callable[[str, str], bool]:
        return lambda first, second: self._shapes.certain.are_same(first, second, scope)


def _took(edit: Edit) -> str:
    return f"{edit.what} {edit.name!r}" if edit.name else edit.what


def _label(node: gs.Node) -> str:
    return str(node.name or next((output.name for output in node.outputs if output.name), node.op))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more
