"""What tuning found, as its decisions tell it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from onnx_sparseconv.converter.decisions import CandidateTime, Choice
from onnx_sparseconv.converter.gpu_images import missing_tools
from onnx_sparseconv.kernels.targets import Target
from onnx_sparseconv.tuner.gpu_candidates import GeneratedCandidate
from onnx_sparseconv.tuner.layers import Found, Layer
from onnx_sparseconv.tuner.network import LayerCost
from onnx_sparseconv.tuner.options import TuneOptions


def measured_text(found: Found, costs: Sequence[LayerCost], choice: Choice) -> str:
    """The times of a layer in words: by how much sparse won or lost."""
    problems = [p for times in found.times for p in times.problems.values()]
    parts = []
    for cost in costs:
        if math.isinf(cost.sparse_us):
            parts.append(f"sparse cannot run ({problems[0] if problems else 'no reason given'})")
            continue
        dense, sparse = cost.alone_us, cost.sparse_us
        verb = f"{dense / sparse:.2f}x faster" if sparse <= dense else f"{sparse / dense:.2f}x slower"
        parts.append(f"sparse is {verb} ({_us(dense)} dense, {_us(sparse)} sparse)")
    text = "; ".join(parts)
    if found.measured_as:
        text += f", timed alone on {found.measured_as!r}, which is alike"
    reorders = max((cost.reorder_in_us + cost.reorder_out_us for cost in costs), default=0.0)
    is_faster = all(cost.sparse_us < cost.alone_us for cost in costs)
    if choice is Choice.DENSE and is_faster and reorders:
        text += f"; up to {_us(reorders)} of dense are changes of layout, which it has not between dense neighbours"
    return text


def _us(time_us: float) -> str:
    return f"{time_us:.1f} us" if time_us < 1000 else f"{time_us / 1000:.2f} ms"


def candidate_times(found: Found) -> tuple[CandidateTime, ...]:
    """What was timed of a layer, as its decision lists it."""
    return tuple(
        CandidateTime(
            candidate.name,
            candidate.choice,
            tuple(times.times_us.get(candidate.name, math.inf) for times in found.times),
            next((t.problems[candidate.name] for t in found.times if candidate.name in t.problems), ""),
            candidate.counts,
        )
        for candidate in found.candidates
    )


def against_rule(
    layers: Sequence[Layer], found: Mapping[int, Found], chosen: AbstractSet[int], rule: str
) -> tuple[str, ...]:
    """How often the rule for machines that are not at hand is wrong here."""
    timed = [layer for layer in layers if id(layer.site.node) in found]
    wrong = sum(layer.verdict.rewrite != (id(layer.site.node) in chosen) for layer in timed)
    if not wrong:
        return ()
    return (f"by their {rule} alone, {wrong} of the {len(timed)} timed layers would have been decided otherwise",)


def tools_missing(found: Mapping[int, Found], target: Target | None) -> list[str]:
    """What would have made the kernels that were compiled for timing better."""
    candidates = [candidate for one in found.values() for candidate in one.candidates]
    made = [one.outcome for one in candidates if isinstance(one, GeneratedCandidate) and one.outcome is not None]
    return missing_tools([target], made) if target is not None else []


def notes_of(found: Mapping[int, Found], options: TuneOptions, *, is_cold: bool) -> tuple[str, ...]:
    """What has to be known to read the decisions."""
    notes = []
    if any(one.measured_as for one in found.values()):
        notes.append(
            "layers that are alike were timed once: same form, shapes and neighbours, and as many non-zero weights, "
            "spread alike over the output channels, within a few percent; 'measured_as' names the one that was timed"
        )
    if options.provider == "cuda" and found:
        graph = "as CUDA graphs" if options.cuda_graph else "without CUDA graphs"
        notes.append(
            f"single layers were timed as CUDA graphs, whole models {graph}; both with every layout of ONNX Runtime, "
            "of which the fastest for the model as a whole counts"
        )
        if is_cold:
            notes.append(
                "where the model is too large for the GPU's cache, single layers were timed with the cache emptied "
                "before each run"
            )
        if not options.targets:
            notes.append("only the library's kernels were tried: with a target, native say, generated ones are, too")
    return tuple(notes)
