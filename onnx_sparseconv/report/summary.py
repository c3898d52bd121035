"""The top of a page: what was done, and what it gained."""

from __future__ import annotations

from dataclasses import dataclass

from onnx_sparseconv.report import words
from onnx_sparseconv.report.data import Case, FolderReport, Outcome, Report, geometric_mean
from onnx_sparseconv.report.html import text
from onnx_sparseconv.report.tables import most_frequent_reason
from onnx_sparseconv.text import count

# A gain below this share is called none.
_WRITTEN = (Outcome.CONVERTED, Outcome.HALF, Outcome.IMAGES)


@dataclass(frozen=True)
class Card:
    """One figure: what it is, the figure, and what belongs to it."""

    title: str
    big: str
    more: str = ""


def model_lead(report: Report) -> str:
    """What was done and gained, in one or two sentences."""
    strong, rest = _lead(report)
    bad = " bad-news" if report.outcome is Outcome.ERROR or report.gain is False else ""
    return f'<p class="lead{bad}"><strong>{text(strong)}</strong> {text(rest)}</p>'


def _lead(report: Report) -> tuple[str, str]:
    if report.outcome is Outcome.ERROR:
        return "Failed.", report.error
    layers = f"{report.num_sparse} of {count(len(report.layers), 'convolution')}"
    done = {
        Outcome.CONVERTED: f"{layers} became sparse.",
        Outcome.WOULD_CONVERT: f"{layers} would become sparse; nothing was written.",
        Outcome.HALF: "The model is float16 now; no convolution became sparse.",
        Outcome.IMAGES: f"GPU images were added to a model that was converted before; {layers} are sparse.",
        Outcome.TUNED: f"{layers} are chosen to be sparse.",
        Outcome.ALREADY: f"It was converted before: {layers} are sparse.",
        Outcome.NOTHING: f"No convolution became sparse ({most_frequent_reason(report)}), so nothing was written.",
    }[report.outcome]
    if report.gain is None:
        return done, ""
    if report.speedup is None or not report.gain:
        return "No gain as a whole.", f"{done} {_sentence(report.whole_text)}"
    parts = [_measured(case) for case in report.cases]
    return f"{words.times(report.speedup)} faster.", f"{done} {_sentence('; '.join(filter(None, parts)))}"


def _measured(case: Case) -> str:
    if case.dense_us is None or case.converted_us is None:
        return ""
    at = f" at {case.label}" if case.label else ""
    return f"a run takes {words.time(case.converted_us)} instead of {words.time(case.dense_us)}{at}"


def _sentence(words_: str) -> str:
    return f"{words_[:1].upper()}{words_[1:].rstrip('.')}." if words_ else ""


def model_cards(report: Report) -> str:
    """The figures that count."""
    if report.outcome is Outcome.ERROR:
        return ""
    cards = [*(_speed_card(case, len(report.cases) > 1) for case in report.cases if case.speedup is not None)]
    cards.append(Card("Sparse convolutions", f"{report.num_sparse} of {len(report.layers)}", _zeros(report)))
    if report.bytes_before is None and report.bytes_after is not None:
        cards.append(Card("File", words.size(report.bytes_after)))
    elif report.bytes_before is not None:
        cards.append(_size_card("File", report.bytes_before, report.bytes_after if report.output else None))
    if report.weights_before and report.weights_after:
        cards.append(_size_card("Weights made sparse", report.weights_before, report.weights_after))
    if report.errors:
        cards.append(_error_card(report))
    return _cards(cards)


def _speed_card(case: Case, is_one_of_many: bool) -> Card:
    spread = (
        f"{words.times(case.low)} to {words.times(case.high)} in 8 of 10 rounds"
        if case.low is not None and case.high is not None
        else f"{words.time(case.dense_us)} dense"
    )
    title = f"Speed-up at {case.label}" if is_one_of_many and case.label else "Speed-up of the model"
    return Card(title, words.times(case.speedup), spread)


def _zeros(report: Report) -> str:
    """Share of zeros over all weights that are known."""
    known = [(la.num_weights, la.nonzeros) for la in report.layers if la.num_weights and la.nonzeros is not None]
    total = sum(number or 0 for number, _ in known)
    if not total:
        return ""
    zeros = 1 - sum(nonzeros or 0 for _, nonzeros in known) / total
    return f"{words.percent(zeros)} of all their weights are zero"


def _size_card(title: str, before: int, after: int | None) -> Card:
    if after is None:
        return Card(title, words.size(before), "as it was")
    left = f"{words.percent(after / before)} of {words.size(before)}" if before else ""
    return Card(title, words.size(after), left)


def _error_card(report: Report) -> Card:
    if not all(error.passed for error in report.errors):
        return Card("Outputs", "different", f"{sum(not error.passed for error in report.errors)} outside the tolerance")
    worst = max((error.max_of_range for error in report.errors if error.max_of_range is not None), default=None)
    if worst is None or worst == 0:
        return Card("Outputs", "identical" if all(error.identical for error in report.errors) else "agree")
    return Card("Largest error", words.scientific(worst), "of the output's range; within the tolerance")


def folder_lead(folder: FolderReport) -> str:
    """What was done, in one sentence."""
    reports = [entry.report for entry in folder.entries]
    written = sum(report.outcome in _WRITTEN for report in reports)
    failed = sum(report.outcome is Outcome.ERROR for report in reports)
    fresh = sum(entry.fresh for entry in folder.entries)
    strong = f"{written} of {count(len(reports), 'model')} converted."
    parts = []
    if fresh < len(reports):
        parts.append(f"{len(reports) - fresh} of all were done by an earlier run and have not changed since.")
    if failed:
        parts.append(f"{failed} failed.")
    if folder.interrupted:
        parts.append("The run was interrupted; the same command goes on where it was.")
    bad = " bad-news" if failed else ""
    return f'<p class="lead{bad}"><strong>{text(strong)}</strong> {text(" ".join(parts))}</p>'


def folder_cards(folder: FolderReport) -> str:
    """The figures of all models together."""
    reports = [entry.report for entry in folder.entries]
    written = [report for report in reports if report.output and report.bytes_after is not None]
    cards = [Card("Converted", f"{sum(r.outcome in _WRITTEN for r in reports)} of {len(reports)}", "models")]
    speedups = [report.speedup for report in written if report.speedup is not None]
    if speedups:
        best = f"{words.times(min(speedups))} to {words.times(max(speedups))}; {count(len(speedups), 'model')} timed"
        cards.append(Card("Speed-up, geometric mean", words.times(geometric_mean(speedups)), best))
    if written:
        before = sum(report.bytes_before or 0 for report in written)
        cards.append(_size_card("Converted files", before, sum(report.bytes_after or 0 for report in written)))
    others = len(reports) - len(written)
    if others:
        failed = sum(report.outcome is Outcome.ERROR for report in reports)
        cards.append(Card("Not written", str(others), f"{failed} failed" if failed else "nothing to gain"))
    return _cards(cards)


def _cards(cards: list[Card]) -> str:
    return (
        '<dl class="cards">'
        + "".join(
            f'<div><dt>{text(card.title)}</dt><dd class="big">{text(card.big)}</dd>'
            + (f'<dd class="more">{text(card.more)}</dd>' if card.more else "")
            + "</div>"
            for card in cards
        )
        + "</dl>"
    )
