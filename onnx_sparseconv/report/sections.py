"""The sections of a model's page: charts, layers, errors, notes, and where it was measured."""

from __future__ import annotations

from onnx_sparseconv.report import tables
from onnx_sparseconv.report.charts import Chart, gain_chart, layer_times_chart, roofline_chart, speedup_chart
from onnx_sparseconv.report.data import Case, Outcome, Report
from onnx_sparseconv.report.html import items, text

NO_TIMES = (
    "There are no times, so the charts are left out: 'sparseconv convert --tune' measures every layer on this machine, "
    "and decides by that."
)
# With so few bars, the chart of bars is about as high as the others.
_FEW = 9
_SAMPLES = {
    "bar-dense": '<rect x="0" y="1" width="14" height="12" class="bar-dense"/>',
    "bar-sparse": '<rect x="0" y="1" width="14" height="12" class="bar-sparse"/>',
    "left": '<rect x="1" y="2" width="12" height="10" class="bar-sparse left"/>',
    "mark-dense": '<rect x="2" y="2" width="10" height="10" class="mark-dense"/>',
    "mark-sparse": '<circle cx="7" cy="7" r="6" class="mark-sparse"/>',
}


def model_sections(report: Report, prefix: str) -> str:
    """All sections.

    Args:
        report: of the model.
        prefix: begins every identifier; unique on the page.
    """
    if report.outcome is Outcome.ERROR:
        return ""
    return "".join((_charts(report, prefix), _layers(report), _errors(report), _notes(report), _measured_on(report)))


def _charts(report: Report, prefix: str) -> str:
    if not report.layers:
        return ""
    if not report.has_layer_times:
        return f'<section><h2>Times</h2><p class="hint">{text(NO_TIMES)}</p></section>'
    return "".join(_case(report, case, number, prefix) for number, case in enumerate(report.cases))


def _case(report: Report, case: Case, number: int, prefix: str) -> str:
    layers, name = report.layers, f"{prefix}-{number}"
    bars = layer_times_chart(layers, number, f"{name}-times", alone=report.timed_alone)
    others = (
        speedup_chart(layers, number, f"{name}-speedup"),
        roofline_chart(layers, number, case, report.peaks, f"{name}-roofline"),
        gain_chart(layers, number, case, f"{name}-gain", alone=report.timed_alone),
    )
    at = f" at {case.label}" if case.label else ""
    stack = "".join(map(_figure, others))
    if bars.num_rows <= _FEW:
        return f'<section><h2>Times{text(at)}</h2><div class="charts few">{_figure(bars)}{stack}</div></section>'
    return (
        f'<section class="on-a-page"><h2>Times{text(at)}</h2><div class="charts">'
        f'<div class="long">{_figure(bars)}</div><div class="stack">{stack}</div></div></section>'
    )


def _figure(chart: Chart) -> str:
    if chart.missing:
        return f"<figure><figcaption><h3>{text(chart.title)}</h3><p>{text(chart.missing)}</p></figcaption></figure>"
    legend = "".join(f"<li>{_sample(kind)}{text(meaning)}</li>" for kind, meaning in chart.legend)
    legend = f'<ul class="legend">{legend}</ul>' if legend else ""
    return (
        f"<figure><figcaption><h3>{text(chart.title)}</h3><p>{text(chart.caption)}</p>{legend}</figcaption>"
        f"{chart.svg}</figure>"
    )


def _sample(kind: str) -> str:
    return f'<svg viewBox="0 0 14 14" aria-hidden="true">{_SAMPLES[kind.rpartition(" ")[2]]}</svg>'


def _layers(report: Report) -> str:
    return f"<section><h2>Layers</h2>{tables.layers_table(report)}</section>" if report.layers else ""


def _errors(report: Report) -> str:
    return f"<section><h2>Errors</h2>{tables.errors_table(report.errors)}</section>" if report.errors else ""


def _notes(report: Report) -> str:
    notes = list(report.notes)
    if report.precision:
        notes.insert(0, report.precision)
    if report.num_by_hand:
        notes.insert(
            0, f"{report.num_by_hand} choices were changed by hand; the times of the whole model are from before"
        )
    if report.whole_text and report.gain:
        notes.insert(0, report.whole_text)
    found = items(text(note) for note in notes)
    return f"<section><h2>Notes</h2>{found}</section>" if found else ""


def _measured_on(report: Report) -> str:
    found = tables.facts(report.setting)
    return f"<section><h2>Measured on</h2>{found}</section>" if found else ""
