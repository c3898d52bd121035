"""The tables of a page: layers, models, errors of the outputs, facts."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

from onnx_sparseconv.report import words
from onnx_sparseconv.report.data import Case, FolderEntry, FolderReport, Layer, Outcome, OutputError, Report
from onnx_sparseconv.report.html import Cell, Column, breakable, name, table, text
from onnx_sparseconv.text import count


def layers_table(report: Report) -> str:
    """One row a layer, in the order of the model; times at each case where there are any."""
    cases = report.cases if report.has_layer_times else ()
    timed = [column for case in cases for column in _time_columns(case, len(cases) > 1)]
    columns = [
        Column("#", True, "place in the model"),
        Column("Layer", hint="its name, and its weight: output channels, input channels of a group, kernel"),
        Column("Zeros", True, "share of zero weights"),
        Column("MFLOP", True, "dense work for one image, 2 operations a multiply-add"),
        *timed,
        Column("Runs", hint="as it was chosen, with the kernel or plan where it is known"),
        Column("Why"),
    ]
    rows = [_layer_row(number, layer, len(cases)) for number, layer in enumerate(report.layers, start=1)]
    return table(columns, rows, caption=f"Convolutions of {report.name}", heads=1, wide=True)


def _time_columns(case: Case, is_one_of_many: bool) -> list[Column]:
    at = f", {case.label}" if is_one_of_many else ""
    return [
        Column(f"Dense, alone{at}", True, "time of the layer alone, as ONNX Runtime runs it"),
        Column(f"Sparse, alone{at}", True, "time of the layer alone, as a sparse convolution"),
        Column(
            f"Speed-up{at}",
            True,
            "dense over sparse time, of the layer alone; the choice goes by times within the model",
        ),
    ]


def _layer_row(number: int, layer: Layer, num_cases: int) -> list[Cell]:
    times: list[Cell] = []
    for case in range(num_cases):
        time = layer.time(case)
        times += [
            Cell(words.time(time.dense_us), time.dense_us),
            Cell(words.time(time.sparse_us), time.sparse_us),
            Cell(words.times(time.speedup), time.speedup),
        ]
    plan = f'<span class="more">{text(layer.plan)}</span>' if layer.plan not in ("", "dense", "sparse") else ""
    kind = "sparse" if layer.is_sparse else "dense"
    mflop = None if layer.flops is None else layer.flops / 1e6
    graph = f' <span class="more">in {breakable(layer.graph)}</span>' if layer.graph else ""
    weight = f' <span class="more">{words.shape(layer.weight_shape)}</span>' if layer.weight_shape else ""
    return [
        Cell(str(number), number),
        Cell(breakable(layer.name) + graph + weight, layer.label),
        Cell(words.percent(layer.sparsity), layer.sparsity),
        Cell(words.UNKNOWN if mflop is None else f"{mflop:.2f}" if mflop < 10 else f"{mflop:.0f}", mflop),
        *times,
        Cell(f'<span class="tag {kind}">{kind}</span>{plan}', kind + layer.plan),
        Cell(_why(layer), layer.reason),
    ]


def _why(layer: Layer) -> str:
    alike = (
        f" (timed on {layer.measured_as}, which is alike)" if layer.measured_as and "alike" not in layer.text else ""
    )
    reason = f'<span class="reason">{text(layer.reason.replace("-", " "))}</span> ' if layer.reason else ""
    return reason + text(layer.text + alike)


def errors_table(errors: Sequence[OutputError]) -> str:
    """One row an output."""
    columns = [
        Column("Output"),
        Column("Largest error", True, "absolute"),
        Column("of the range", True, "largest error over the range of the original's output"),
        Column("Root mean square", True),
        Column("Signal to noise", True),
        Column("Same winner", True, "share of rows whose largest element is the same, for class scores"),
        Column("Verdict"),
    ]
    rows = [
        [
            Cell(breakable(error.name), error.name),
            Cell(words.scientific(error.max_abs), error.max_abs),
            Cell(words.scientific(error.max_of_range), error.max_of_range),
            Cell(words.scientific(error.rms), error.rms),
            Cell(words.UNKNOWN if error.snr_db is None else f"{error.snr_db:.0f} dB", error.snr_db),
            Cell(words.percent(error.argmax_agreement), error.argmax_agreement),
            Cell("identical" if error.identical else "within the tolerance" if error.passed else "DIFFERENT"),
        ]
        for error in errors
    ]
    return table(columns, rows, caption="Outputs compared with the original's", heads=0)


def models_table(folder: FolderReport) -> str:
    """One row a model, with a link to its own page where it has one."""
    columns = [
        Column("Model"),
        Column("Result"),
        Column("Sparse layers", True, "of all convolutions"),
        Column("Speed-up", True, "of the whole model, measured"),
        Column("Before", True, "bytes of the file"),
        Column("After", True, "bytes of the file"),
        Column("Remark"),
    ]
    rows = [_model_row(entry) for entry in folder.entries]
    return table(columns, rows, caption="Models", heads=0, wide=True)


def _model_row(entry: FolderEntry) -> list[Cell]:
    report = entry.report
    shown = breakable(report.source)
    link = f'<a href="{_address(entry.page)}">{shown}</a>' if entry.page else shown
    num_sparse, total = report.num_sparse, len(report.layers)
    after = report.bytes_after if report.output else None
    word = str(report.outcome)
    is_bad = report.outcome is Outcome.ERROR
    tag = "bad" if is_bad else "sparse" if report.output else "dense"
    is_known = not is_bad and total > 0
    return [
        Cell(link, report.source),
        Cell(f'<span class="tag {tag}">{text(word)}</span>', word),
        Cell(f"{num_sparse} of {total}" if is_known else words.UNKNOWN, num_sparse if is_known else None),
        Cell(words.times(report.speedup), report.speedup),
        Cell(words.size(report.bytes_before), report.bytes_before),
        Cell(words.size(after), after),
        Cell(_remark(entry)),
    ]


def _address(page: str) -> str:
    """A relative path, or a place on this page, as an address: a name such as ``a:b?c#d`` is no scheme and no query."""
    return page if page.startswith("#") else quote(page, safe="/", errors="surrogateescape")


def _remark(entry: FolderEntry) -> str:
    report = entry.report
    if report.error:
        return text(report.error)
    parts = [] if entry.fresh else ["from an earlier run, nothing has changed since"]
    if report.gain is False:
        parts.append("not faster as a whole, so left as it was" if not report.output else "not faster as a whole")
    elif report.outcome is Outcome.NOTHING:
        parts.append(most_frequent_reason(report))
    return text("; ".join(filter(None, parts)))


def most_frequent_reason(report: Report) -> str:
    """Why most layers stay dense; empty without layers."""
    reasons = [layer.reason for layer in report.layers if not layer.is_sparse and layer.reason]
    if not reasons:
        return "" if report.layers else "it has no convolution"
    most = max(dict.fromkeys(reasons), key=reasons.count)
    return f"{most.replace('-', ' ')}: {count(reasons.count(most), 'layer')} of {len(report.layers)}"


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Names and values, empty for none."""
    rows = "".join(f"<div><dt>{text(key)}</dt><dd>{name(value)}</dd></div>" for key, value in pairs if value)
    return f'<dl class="facts">{rows}</dl>' if rows else ""
