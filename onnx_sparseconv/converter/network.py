"""What the rest of the network says of layers that would pay by themselves, on a CPU.

ONNX Runtime's CPU provider computes dense convolutions, and what is between them, in a blocked layout of its own, and
reorders the data at the borders of what it computes so. Layers that gain little by themselves can cost more there than
all their zeros save; and layers without zeros may be worth to be sparse, where that takes a border away
(docs/cpu-kernel.md, "When it pays").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet

import numpy as np
import onnx_graphsurgeon as gs

from onnx_sparseconv.converter.conv_sites import ConvSite, output_positions
from onnx_sparseconv.converter.decide import MIN_SPARSITY, is_depthwise, share_of_zeros
from onnx_sparseconv.converter.report import Reason, Verdict

# Ops that work element by element, or nearly so: data pass through them in whatever layout they come.
_PASSING = frozenset(
    {
        *("Add", "BatchNormalization", "Clip", "Div", "Dropout", "Elu", "HardSigmoid", "HardSwish", "Identity"),
        *("LeakyRelu", "Mul", "PRelu", "Pad", "Relu", "Sigmoid", "Softplus", "Sub", "Sum", "Swish", "Tanh"),
    }
)
_OVERRULE = " (--tune measures it, --min-sparsity and --force overrule)"
# Of networks of depthwise layers and 1x1: with 70% zeros a real one gained nothing, with 80% a tenth.
MIN_SPARSITY_BESIDE_DEPTHWISE = 0.75
# Layers that pay with `MIN_SPARSITY`, if all goes well.
_LACK_A_MARGIN = (Reason.TOO_DENSE, Reason.BESIDE_DEPTHWISE)
# Windows for which the CPU kernel has loops of their own for depthwise convolutions, of strides of 1 and 2, the same
# along both axes (custom_ops/native/cpu/depthwise.h). They take about as long as ONNX Runtime's.
_DEPTHWISE_KERNELS = {3, 5, 7}
# Layers that do less of the network's work cannot gain what the borders around them may cost.
MIN_SHARE_OF_WORK = 0.1


def decide_in_network(sites: Sequence[ConvSite], verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Reconsider what was decided layer by layer.

    Args:
        sites: the convolutions of a model.
        verdicts: what was decided of each by itself.
    """
    decided = _leave_beside_depthwise(sites, verdicts)
    little = _little_work(sites, decided)
    if little is not None:
        return [little if verdict.rewrite else verdict for verdict in decided]
    return _take_along(sites, decided)


def multiply_adds(site: ConvSite) -> int | None:
    """Dense multiply-adds for one image; None where sizes are unknown, 0 for what is no float convolution."""
    if site.weight is None or site.geometry is None:
        return 0
    positions = output_positions(site.geometry, site.input_shape)
    return None if positions is None else positions * site.weight.values.size


def _take_along(sites: Sequence[ConvSite], verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Make layers sparse for the layout's sake, too.

    Those are depthwise ones and such as are too small, with a sparse layer before or behind; and with sparse layers on
    both sides, those that only lack the margin for small maps or beside depthwise layers. What is taken along counts as
    sparse.
    """
    decided = list(verdicts)
    sparse = {id(site.node) for site, verdict in zip(sites, verdicts, strict=True) if verdict.rewrite}
    waiting = {
        index: site
        for index, (site, verdict) in enumerate(zip(sites, verdicts, strict=True))
        if _may_be_taken_along(site, verdict)
    }
    while near := [index for index, site in waiting.items() if _is_amid(site, verdicts[index], sparse)]:
        for index in near:
            sparse.add(id(waiting.pop(index).node))
            text = f"taken along: {verdicts[index].text}, but beside sparse layers its data would be reordered for it"
            decided[index] = Verdict(True, Reason.REWRITE, text)
    return decided


def _may_be_taken_along(site: ConvSite, verdict: Verdict) -> bool:
    weight, geometry = site.weight, site.geometry
    if weight is None or geometry is None or weight.values.dtype != np.float32:
        return False
    if verdict.reason is Reason.TOO_SMALL:
        return True
    if verdict.reason in _LACK_A_MARGIN:
        return share_of_zeros(weight.values) >= MIN_SPARSITY
    if verdict.reason is not Reason.DEPTHWISE or len(geometry.kernel_shape) != 2:
        return False
    kernel, strides = set(geometry.kernel_shape), set(geometry.strides)
    if kernel == {1}:
        return strides == {1}
    has_window = len(kernel) == 1 and kernel <= _DEPTHWISE_KERNELS
    return has_window and (strides == {1} or (strides == {2} and geometry.dilations[1] == 1))


def _is_amid(site: ConvSite, verdict: Verdict, sparse: AbstractSet[int]) -> bool:
    """Whether a layer is to be taken along with those that are sparse."""
    sides = _is_behind(site.node, sparse), _is_before(site.node, sparse)
    return all(sides) if verdict.reason in _LACK_A_MARGIN else any(sides)


def _little_work(sites: Sequence[ConvSite], verdicts: Sequence[Verdict]) -> Verdict | None:
    """What is said of the sparse layers where, together, they do too little of the work; else, or where sizes are
    unknown, None.
    """
    work = [multiply_adds(site) for site in sites]
    if any(count is None for count in work):
        return None
    share = sum(count or 0 for count, v in zip(work, verdicts, strict=True) if v.rewrite)
    total = sum(count or 0 for count in work)
    if not total or share >= MIN_SHARE_OF_WORK * total:
        return None
    return Verdict(
        False,
        Reason.LITTLE_WORK,
        f"the layers that would be rewritten do {share / total:.1%} of the network's work, and the borders between "
        f"sparse and dense layers may cost a CPU more{_OVERRULE}",
    )


def _leave_beside_depthwise(sites: Sequence[ConvSite], verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Leave layers dense whose input comes from, or whose output goes to, a depthwise convolution: one that stays
    dense, or, where they have few zeros, any.
    """
    depthwise = {id(site.node): site for site in sites if is_depthwise(site)}
    verdict_of = {id(site.node): verdict for site, verdict in zip(sites, verdicts, strict=True)}
    staying = {
        node
        for node, site in depthwise.items()
        if not verdict_of[node].rewrite and not _may_be_taken_along(site, verdict_of[node])
    }
    return [_beside(site, verdict, depthwise.keys(), staying) for site, verdict in zip(sites, verdicts, strict=True)]


def _beside(site: ConvSite, verdict: Verdict, depthwise: AbstractSet[int], staying: AbstractSet[int]) -> Verdict:
    """The verdict on a layer, some depthwise ones of which stay dense."""
    if not verdict.rewrite or site.weight is None or is_depthwise(site):
        return verdict
    if _is_beside(site.node, staying):
        text = "a depthwise convolution beside it stays dense, and reordering the data between them costs a CPU more"
        return Verdict(False, Reason.BESIDE_DEPTHWISE, f"{text} than zeros save{_OVERRULE}")
    zeros = share_of_zeros(site.weight.values)
    if zeros < MIN_SPARSITY_BESIDE_DEPTHWISE and _is_beside(site.node, depthwise):
        bar = f"{MIN_SPARSITY_BESIDE_DEPTHWISE:.1%} from which layers beside depthwise ones pay"
        text = f"{zeros:.1%} of its weights are zero, below the {bar} on a CPU{_OVERRULE}"
        return Verdict(False, Reason.BESIDE_DEPTHWISE, text)
    return verdict


def _is_beside(node: gs.Node, wanted: AbstractSet[int]) -> bool:
    """Whether there is a wanted node right before or behind ``node``."""
    return _is_behind(node, wanted) or _is_before(node, wanted)


def _is_behind(node: gs.Node, wanted: AbstractSet[int]) -> bool:
    return _leads_to(node.inputs[:1], lambda t: t.inputs, lambda n: n.inputs, wanted)


def _is_before(node: gs.Node, wanted: AbstractSet[int]) -> bool:
    return _leads_to(node.outputs[:1], lambda t: t.outputs, lambda n: n.outputs, wanted)


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
