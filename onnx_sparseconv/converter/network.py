"""What the rest of the network says of layers that would pay by themselves, on a CPU.

ONNX Runtime's CPU provider computes dense convolutions, and what is between them, in a blocked layout of its own, and
reorders the data at the borders of what it computes so. Layers that gain little by themselves can cost more there than
all their zeros save (docs/cpu-kernel.md, "When it pays").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet

import onnx_graphsurgeon as gs

from onnx_sparseconv.converter.conv_sites import ConvSite, output_positions
from onnx_sparseconv.converter.decide import is_depthwise
from onnx_sparseconv.converter.report import Reason, Verdict

# Ops that work element by element, or nearly so: data pass through them in whatever layout they come.
_PASSING = frozenset(
    {
        *("Add", "BatchNormalization", "Clip", "Div", "Dropout", "Elu", "HardSigmoid", "HardSwish", "Identity"),
        *("LeakyRelu", "Mul", "PRelu", "Pad", "Relu", "Sigmoid", "Softplus", "Sub", "Sum", "Swish", "Tanh"),
    }
)
_BESIDE = Verdict(
    False,
    Reason.BESIDE_DEPTHWISE,
    "a depthwise convolution beside it stays dense, and reordering the data between them costs a CPU more than zeros "
    "save (--tune measures it, --min-sparsity and --force overrule)",
)
# Layers that do less of the network's work cannot gain what the borders around them may cost.
MIN_SHARE_OF_WORK = 0.1


def decide_in_network(sites: Sequence[ConvSite], verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Reconsider what was decided layer by layer.

    Args:
        sites: the convolutions of a model.
        verdicts: what was decided of each by itself.
    """
    return _leave_little_work(sites, _leave_beside_depthwise(sites, verdicts))


def multiply_adds(site: ConvSite) -> int | None:
    """Dense multiply-adds for one image; None where sizes are unknown, 0 for what is no float convolution."""
    if site.weight is None or site.geometry is None:
        return 0
    positions = output_positions(site.geometry, site.input_shape)
    return None if positions is None else positions * site.weight.values.size


def _leave_little_work(sites: Sequence[ConvSite], verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Leave all layers dense where, together, they do too little of the work. Where sizes are unknown, that stands."""
    work = [multiply_adds(site) for site in sites]
    if any(count is None for count in work):
        return list(verdicts)
    share = sum(count or 0 for count, v in zip(work, verdicts, strict=True) if v.rewrite)
    total = sum(count or 0 for count in work)
    if not total or share >= MIN_SHARE_OF_WORK * total:
        return list(verdicts)
    little = Verdict(
        False,
        Reason.LITTLE_WORK,
        f"the layers that would be rewritten do {share / total:.1%} of the network's work, and the borders between "
        "sparse and dense layers may cost a CPU more (--tune measures it, --min-sparsity and --force overrule)",
    )
    return [little if v.rewrite else v for v in verdicts]


def _leave_beside_depthwise(sites: Sequence[ConvSite], verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Leave layers dense whose input comes from, or whose output goes to, a depthwise convolution that stays dense."""
    decided = list(zip(sites, verdicts, strict=True))
    depthwise = {id(site.node) for site, verdict in decided if not verdict.rewrite and is_depthwise(site)}
    return [_BESIDE if verdict.rewrite and _is_beside(site.node, depthwise) else verdict for site, verdict in decided]


def _is_beside(node: gs.Node, wanted: AbstractSet[int]) -> bool:
    """Whether there is a wanted node right before or behind ``node``."""
    return _leads_to(node.inputs[:1], lambda t: t.inputs, lambda n: n.inputs, wanted) or _leads_to(
        node.outputs[:1], lambda t: t.outputs, lambda n: n.outputs, wanted
    )


def _leads_to(
    start: Iterable[gs.Tensor],
    nodes_at: Callable[[gs.Tensor], Iterable[gs.Node]],
    tensors_of: Callable[[gs.Node], Iterable[gs.Tensor]],
    wanted: AbstractSet[int],
) -> bool:
    seen: set[int] = set()
    tensors = list(start)
    while tensors:
        for node in nodes_at(tensors.pop()):
            if id(node) in seen:
                continue
            seen.add(id(node))
            if id(node) in wanted:
                return True
            if node.op in _PASSING:
                tensors.extend(tensors_of(node))
    return False
