"""Decisions, as tuning writes them, for the page: times and choices by layer, and the check of the whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onnx_sparseconv.report.data import Case, Layer, LayerTime, Peaks
from onnx_sparseconv.report.fields import Fields

Key = tuple[str, str, int]
_SPARSE = "sparse"


@dataclass(frozen=True)
class DecidedLayer:
    """One decision; ``by_hand`` where a person changed what tuning had chosen."""

    layer: Layer
    by_hand: bool


@dataclass(frozen=True)
class ReadDecisions:
    """All that a page needs of decisions.

    Attributes:
        model: the model's file.
        layers: by graph, name, and how many of that name came before it there.
        cases: the tuned shapes, with the times of the whole model where it was checked.
        gain: whether the model was faster as a whole; None without the check.
        whole_text: the check in words.
        peaks: of the machine, where they were recorded.
        setting: where and how it was measured.
        notes: what else is worth knowing.
        in_half: whether the layers were timed in float16, though the model that was read is not.
    """

    model: str
    layers: Mapping[Key, DecidedLayer]
    cases: tuple[Case, ...]
    gain: bool | None
    whole_text: str
    peaks: Peaks | None
    setting: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    in_half: bool


def read_decisions(fields: Fields) -> ReadDecisions:
    """Read decisions out of a decisions file, or out of a report that holds them.

    Raises:
        ReportError: a value has the wrong type.
    """
    setting = fields.child("setting")
    whole = fields.child("whole_model") if fields.has("whole_model") else None
    cases = _cases(fields.children("input_shapes"), whole.children("cases") if whole is not None else ())
    layers: dict[Key, DecidedLayer] = {}
    for item in fields.children("layers"):
        key = item.text("graph"), item.text("node"), item.integer("number") or 0
        layers[key] = _layer(item, len(cases))
    has_check = whole is not None and whole.has("gain")
    return ReadDecisions(
        model=fields.text("model"),
        layers=layers,
        cases=cases,
        gain=whole.flag("gain") if whole is not None and has_check else None,
        whole_text=whole.text("text") if whole is not None else "",
        peaks=_peaks(setting),
        setting=tuple(setting.pairs()),
        notes=fields.texts("notes"),
        in_half=setting.text("precision", "keep") != "keep",
    )


def _cases(shapes: Sequence[Fields], measured: Sequence[Fields]) -> tuple[Case, ...]:
    cases = []
    for index, inputs in enumerate(shapes):
        found = {name: inputs.shape(name) or () for name in inputs.names()}
        label = ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in found.items())
        firsts = {shape[0] for shape in found.values() if shape}
        batch = firsts.pop() if len(firsts) == 1 else None
        if index >= len(measured):
            cases.append(Case(label, batch))
            continue
        whole = measured[index]
        ratio = whole.child("speedup") if whole.has("speedup") else None
        cases.append(
            Case(
                label,
                batch,
                dense_us=whole.positive("dense_us"),
                converted_us=whole.positive("measured_us"),
                predicted_us=whole.positive("predicted_us"),
                low=ratio.number("low") if ratio is not None else None,
                high=ratio.number("high") if ratio is not None else None,
            )
        )
    return tuple(cases)


def _layer(item: Fields, num_cases: int) -> DecidedLayer:
    choice = item.text("choice")
    # Some are timed to be looked at only, and cannot be chosen.
    candidates = [
        (one.text("name"), one.text("choice"), one.numbers("times_us"))
        for one in item.children("candidates")
        if not one.has("counts") or one.flag("counts")
    ]
    dense, sparse = (_best([c for c in candidates if c[1] == word], num_cases) for word in ("dense", _SPARSE))
    taken = sparse if choice == _SPARSE else dense
    layer = Layer(
        name=item.text("node"),
        graph=item.text("graph"),
        is_sparse=choice == _SPARSE,
        reason=item.text("cause"),
        text=item.text("text"),
        plan=taken[0],
        sparsity=item.share("sparsity"),
        measured_as=item.text("measured_as"),
        times=tuple(LayerTime(*pair) for pair in zip(dense[1], sparse[1], strict=True)) if candidates else (),
    )
    return DecidedLayer(layer, choice != item.text("advice", choice))


def _best(
    candidates: Sequence[tuple[str, str, tuple[float | None, ...]]], num_cases: int
) -> tuple[str, tuple[float | None, ...]]:
    """The name of the candidate that is fastest over all cases, and the shortest time at each of them."""
    times = []
    for case in range(num_cases):
        known = [found[case] for _, _, found in candidates if case < len(found)]
        times.append(min((time for time in known if time is not None), default=None))
    running = [(sum(time for time in found if time is not None), name) for name, _, found in candidates if all(found)]
    return min(running)[1] if running else "", tuple(times)


def _peaks(setting: Fields) -> Peaks | None:
    if not setting.has("peaks"):
        return None
    peaks = setting.child("peaks")
    flops, memory = peaks.positive("flops_per_s"), peaks.positive("bytes_per_s")
    return Peaks(flops, memory, peaks.text("text")) if flops is not None and memory is not None else None
