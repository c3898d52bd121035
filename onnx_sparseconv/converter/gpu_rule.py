"""Which layers pay on a GPU that is not at hand.

Of every layer that its sparsity speaks for, the times of the generated kernel, of the library's kernels and of ONNX
Runtime's dense Conv are foretold (`gpu_predictions`), at each batch size that matters. Layers are then decided together
(`gpu_network`): those become sparse with which the network gains most. Where that is not enough at all batch sizes, and
on all architectures asked for, each layer has to gain by itself. How often that is right: docs/gpu-rule.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from onnx_sparseconv.converter.conv_sites import ConvSite
from onnx_sparseconv.converter.gpu_network import Together, changes_us, choose_together
from onnx_sparseconv.converter.gpu_predictions import (
    DEFAULT_BATCHES,
    FEW_IMAGES,
    NO_IMAGE,
    GpuRule,
    Prediction,
    predict,
)
from onnx_sparseconv.converter.report import Reason, Verdict
from onnx_sparseconv.kernels.gpu_time_constants import MEASURED_ARCHITECTURE, MEASURED_ON
from onnx_sparseconv.kernels.layer import Refusal

# Microseconds that a layer has to save by itself.
MIN_SAVED_US = 10.0
# Layers that are not sparse enough by themselves, or too small, may become sparse with others: sparse kernels do bias
# and activation in passing, and around a layer that stays dense layouts are changed. Not those with more weights, which
# take up to three times the bytes without zeros.
MOST_WEIGHTS_TAKEN_ALONG = 1 << 20
_TAKEN_ALONG = (Reason.DEPTHWISE, Reason.TOO_SMALL, Reason.TOO_DENSE)


@dataclass(frozen=True)
class GpuVerdicts:
    """What the rule decided.

    Attributes:
        verdicts: of each convolution.
        notes: what has to be known of them; none where it decided nothing.
    """

    verdicts: list[Verdict]
    notes: tuple[str, ...]


def decide_for_gpu(sites: Sequence[ConvSite], verdicts: Sequence[Verdict], rule: GpuRule) -> GpuVerdicts:
    """Reconsider what sparsity decided.

    Args:
        sites: the convolutions of a model.
        verdicts: what was decided of each; layers that stay dense do.
        rule: what to decide for.
    """
    layers = list(zip(sites, verdicts, strict=True))
    found = _foretell(layers, rule)
    decided = [
        _by_itself(site, verdict, found.sparse[index], rule) if index in found.sparse else verdict
        for index, (site, verdict) in enumerate(layers)
    ]
    notes = _notes(rule, [sites[index] for index in found.sparse])
    if found.together.is_enough(rule):
        notes += (str(found.together),)
        for index in found.together.sparse:
            if not decided[index].rewrite:
                worst = min(found.known[index], key=lambda one: one.gain)
                how = "predicted" if index in found.sparse else "taken along: predicted"
                text = f"{verdicts[index].text}; {how} {worst}, and to gain with the others"
                decided[index] = Verdict(True, Reason.REWRITE, text)
    else:
        notes += _what_one_batch_gives(layers, rule, found)
    return GpuVerdicts(decided, notes)


@dataclass(frozen=True)
class _Foretold:
    """What is foretold of a network's layers, by their number.

    Attributes:
        sparse: of those that are sparse enough, or why there is no kernel.
        known: of those that may be sparse together, such as are taken along among them.
        together: those that had best be.
    """

    sparse: Mapping[int, list[Prediction] | Refusal]
    known: Mapping[int, list[Prediction]]
    together: Together


def _foretell(layers: Sequence[tuple[ConvSite, Verdict]], rule: GpuRule) -> _Foretold:
    sites = [site for site, _ in layers]
    sparse = {
        index: predict(site, rule)
        for index, (site, verdict) in enumerate(layers)
        if verdict.rewrite and site.weight is not None
    }
    known = {index: ones for index, ones in sparse.items() if not isinstance(ones, Refusal)}
    along = _taken_along(layers, rule) if known else {}
    together = choose_together(sites, known | along, rule)
    if along and not together.sparse & known.keys():
        return _Foretold(sparse, known, choose_together(sites, known, rule))
    return _Foretold(sparse, known | along, together)


def _taken_along(layers: Sequence[tuple[ConvSite, Verdict]], rule: GpuRule) -> dict[int, list[Prediction]]:
    """What is foretold of layers that are not sparse enough by themselves, by their number.

    With many images, only of such of which it is known what they take in a network.
    """
    found = {}
    for index, (site, verdict) in enumerate(layers):
        if _may_be_taken_along(site, verdict):
            ones = predict(site, rule)
            if not isinstance(ones, Refusal) and all(one.batch < FEW_IMAGES or one.is_in_network for one in ones):
                found[index] = ones
    return found


def _may_be_taken_along(site: ConvSite, verdict: Verdict) -> bool:
    weight = site.weight
    return weight is not None and weight.values.size <= MOST_WEIGHTS_TAKEN_ALONG and verdict.reason in _TAKEN_ALONG


def _what_one_batch_gives(
    layers: Sequence[tuple[ConvSite, Verdict]], rule: GpuRule, found: _Foretold
) -> tuple[str, ...]:
    """Which batch sizes had better be named alone, where the network does not gain at all that are asked for."""
    shapes = [layers[index][0].input_shape for index in found.sparse]
    if rule.batches or not all(shape is None or shape[0] is None for shape in shapes):
        return ()
    enough = []
    for batch in DEFAULT_BATCHES:
        alone = replace(rule, batches=(batch,))
        together = _foretell(layers, alone).together
        if together.is_enough(alone):
            enough.append(f"with --batch {batch} alone, {together}")
    short = f"the network does not gain enough at every batch size: {found.together}"
    return ("; ".join((short, *enough)),) if enough else ()


def _notes(rule: GpuRule, sites: Sequence[ConvSite]) -> tuple[str, ...]:
    """What the layers were decided by; nothing where there are none."""
    if not sites:
        return ()
    is_open = any(site.input_shape is None or site.input_shape[0] is None for site in sites)
    batches = rule.batches or DEFAULT_BATCHES
    at = f" at batch {' and '.join(map(str, batches))}" if is_open else ""
    how = "; --batch names other sizes" if is_open and not rule.batches else ""
    notes = [
        f"layers were decided by predicted times{at}, not measured{how}; 'tune --provider cuda' measures, "
        "--min-sparsity and --force overrule"
    ]
    others = [f"sm_{a}" for a in rule.architectures if a != MEASURED_ARCHITECTURE]
    if others:
        notes.append(
            f"no layer was measured on {', '.join(others)}: times are predicted as for an {MEASURED_ON} "
            f"(sm_{MEASURED_ARCHITECTURE}) that runs these architectures' plans"
        )
    return tuple(notes)


def _by_itself(site: ConvSite, verdict: Verdict, found: list[Prediction] | Refusal, rule: GpuRule) -> Verdict:
    if isinstance(found, Refusal):
        why = f"no GPU kernel can be made for {found.reason}" if rule.with_images else NO_IMAGE.reason
        text = f"{why}; the CSR kernel is seldom faster than dense"
        return Verdict(False, Reason.NO_PREDICTED_GAIN, text)
    wanted = {one: _least_saved_us(site, one, rule) for one in found}
    worst = min(found, key=lambda one: one.gain)
    least = min(found, key=lambda one: one.saved_us - wanted[one])
    if worst.gain >= rule.min_gain and least.saved_us >= wanted[least]:
        return replace(verdict, text=f"{verdict.text}; predicted {worst}")
    is_slow = worst.gain < rule.min_gain
    short = f"less than the {rule.min_gain:.2f}x asked for" if is_slow else f"less than {wanted[least]:.0f} us saved"
    shown = worst if is_slow else least
    others = [one for one in found if one.gain >= rule.min_gain and one.saved_us >= wanted[one]]
    best = max(others, key=lambda one: one.gain, default=None)
    contrast = f"; {best.gain:.2f}x at {_difference(shown, best)}" if best is not None else ""
    return Verdict(False, Reason.NO_PREDICTED_GAIN, f"predicted {shown}, {short}{contrast}")


def _least_saved_us(site: ConvSite, one: Prediction, rule: GpuRule) -> float:
    """What a layer has to save: at least what changes of layout around it take, which a dense network does not make, as
    if nothing were pooled.

    A dense layer that was timed by itself was charged with these. So they count twice with few images, and with many,
    where they are little against the layer, not at all.
    """
    times = 1 if one.is_in_network else 2 if one.batch < FEW_IMAGES else 0
    return max(MIN_SAVED_US, times * changes_us(site, one.batch, one.size, to_half=rule.to_half))


def _difference(worst: Prediction, best: Prediction) -> str:
    """What is another with the better of two predictions."""
    parts = {
        f"batch {best.batch}": best.batch != worst.batch,
        "x".join(map(str, best.size)): best.size != worst.size,
        f"sm_{best.architecture}": best.architecture != worst.architecture,
    }
    return ", ".join(itertools.compress(parts, parts.values()))
