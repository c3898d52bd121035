"""What is printed and written of all models of a folder together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx_sparseconv.cli.batch import Outcome, print_outcome_error
from onnx_sparseconv.cli.console import Column, Table, format_bytes, say, say_table, shown_name
from onnx_sparseconv.cli.conversion.folder_plan import SUMMARY_DATA, SUMMARY_PAGE, FolderOptions, Task
from onnx_sparseconv.cli.conversion.work import COMMAND, error_document, made_by
from onnx_sparseconv.cli.exit_codes import ExitCode, worst
from onnx_sparseconv.cli.json_output import document, emit
from onnx_sparseconv.files import write_text
from onnx_sparseconv.text import count

if TYPE_CHECKING:
    from onnx_sparseconv.report import Report


@dataclass(frozen=True)
class Done:
    """What became of a model.

    Attributes:
        document: its report.
        up_to_date: an earlier run had done it.
        remark: what else there is to say.
    """

    document: dict[str, Any]
    up_to_date: bool = False
    remark: str = ""


FolderOutcome = Outcome[Task, Done]


def document_of(outcome: FolderOutcome) -> dict[str, Any]:
    """The report of one model."""
    if outcome.result is not None:
        return outcome.result.document
    return error_document(str(outcome.item.model), outcome.error, outcome.code)


def report_of(outcome: FolderOutcome) -> Report:
    """The same as values."""
    from onnx_sparseconv.report import read_report  # noqa: PLC0415

    return read_report(document_of(outcome), where=str(outcome.item.model))


def exit_code(outcomes: Sequence[FolderOutcome]) -> ExitCode:
    """The worst of all, where a model that nothing qualifies of counts only if it is so with all of them.

    Nobody named them one by one: that some of a folder's models have nothing to gain is no failure.
    """
    codes = [ExitCode(document_of(outcome)["exit_code"]) for outcome in outcomes]
    return worst([code for code in codes if code is not ExitCode.NOTHING_QUALIFIED] or codes)


def print_line(outcome: FolderOutcome, number: int, total: int) -> None:
    """Say what became of a model as soon as it is done."""
    if outcome.result is None:
        print_outcome_error(outcome)
        return
    report = report_of(outcome)
    parts = ["up to date" if outcome.result.up_to_date else str(report.outcome)]
    if report.num_sparse:
        parts.append(f"{report.num_sparse} of {count(len(report.layers), 'layer')} sparse")
    if report.gain and report.speedup is not None:
        parts.append(f"{report.speedup:.2f}x faster")
    elif report.gain is False:
        parts.append("not faster as a whole")
    remark = f" ({outcome.result.remark})" if outcome.result.remark else ""
    say(f"[{number}/{total}] {outcome.item.name}: {', '.join(parts)}{remark}", hang=2)


def print_table(outcomes: Sequence[FolderOutcome]) -> None:
    """Print all models in a table, and the sums below it."""
    columns = (
        Column("model", fold=True),
        Column("result"),
        Column("sparse", right=True),
        Column("speed-up", right=True),
        Column("file", right=True),
    )
    say()
    say_table(Table(columns, tuple(map(_row, outcomes))))
    say()


def _row(outcome: FolderOutcome) -> tuple[str, ...]:
    report, name = report_of(outcome), shown_name(outcome.item.name)
    if outcome.result is None:
        return name, "error", "", "", ""
    sizes = f"{format_bytes(report.bytes_before)} -> {format_bytes(report.bytes_after)}" if report.output else ""
    up_to_date = ", up to date" if outcome.result.up_to_date else ""
    return (
        name,
        f"{report.outcome}{up_to_date}",
        f"{report.num_sparse} of {len(report.layers)}",
        f"{report.speedup:.2f}x" if report.gain and report.speedup is not None else "",
        sizes,
    )


def write_summary(outcomes: Sequence[FolderOutcome], options: FolderOptions, title: str, *, interrupted: bool) -> None:
    """Write what became of all models, as a page and as data, into the folder of what was converted."""
    out_dir = options.out_dir
    if out_dir is None or not any(outcome.item.record for outcome in outcomes):
        return  # a dry run, or nothing was done
    from onnx_sparseconv.report import folder_page, read_folder  # noqa: PLC0415

    documents = [document_of(outcome) for outcome in outcomes]
    pages = [
        "" if outcome.result is None or outcome.item.page is None else outcome.item.page.relative_to(out_dir).as_posix()
        for outcome in outcomes
    ]
    names = [outcome.item.name for outcome in outcomes]
    folder = read_folder(documents, title=title, pages=pages, names=names, interrupted=interrupted)
    write_text(out_dir / SUMMARY_PAGE, folder_page(folder))
    entries = [_entry(outcome, out_dir) for outcome in outcomes]
    content = {"models": entries, "interrupted": interrupted, **made_by(), "exit_code": int(exit_code(outcomes))}
    emit(document(COMMAND, content), to_stdout=False, file=out_dir / SUMMARY_DATA)
    say(f"Wrote {out_dir / SUMMARY_PAGE} and {out_dir / SUMMARY_DATA}")


def _entry(outcome: FolderOutcome, out_dir: Path) -> dict[str, Any]:
    """One model in the summary's data."""
    found, report = document_of(outcome), report_of(outcome)
    record = outcome.item.record if outcome.result is not None else None
    return {
        "name": outcome.item.name,
        "source": found["source"],
        "output": found.get("output"),
        "result": str(report.outcome),
        "up_to_date": outcome.result is not None and outcome.result.up_to_date,
        "error": outcome.error or None,
        "exit_code": found["exit_code"],
        "speedup": report.speedup,
        "bytes_before": found.get("bytes_before"),
        "bytes_after": found.get("bytes_after") if found.get("output") else None,
        "report": None if record is None else record.relative_to(out_dir).as_posix(),
    }
