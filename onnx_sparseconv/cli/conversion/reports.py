"""The files that ``--report`` names: JSON for programs, a page for people."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onnx_sparseconv.cli.json_output import emit
from onnx_sparseconv.errors import UsageError
from onnx_sparseconv.files import write_text

PAGE_SUFFIXES = (".html", ".htm")
DATA_SUFFIX = ".json"


def check_report_name(path: Path) -> None:
    """Refuse a name that does not tell what to write.

    Raises:
        UsageError: it ends otherwise.
    """
    if path.suffix.lower() not in (*PAGE_SUFFIXES, DATA_SUFFIX):
        raise UsageError(f"--report {path}: its name must end in .html, for a page, or in .json")


def write_reports(paths: Sequence[Path], documents: Sequence[dict[str, Any]], title: str) -> None:
    """Write the documents of all models to every file, in the form that its name asks for.

    Raises:
        OutputError: a file cannot be written.
    """
    for path in paths:
        if path.suffix.lower() == DATA_SUFFIX:
            emit(documents[0] if len(documents) == 1 else list(documents), to_stdout=False, file=path)
        else:
            write_text(path, page_of(documents, title))


def page_of(documents: Sequence[dict[str, Any]], title: str) -> str:
    """The page of one model, or of several below a table of them.

    Raises:
        ReportError: a document is no report.
    """
    from onnx_sparseconv.report import folder_page, read_folder, read_report, report_page  # noqa: PLC0415

    if len(documents) == 1:
        return report_page(read_report(documents[0], where=title))
    pages = [f"#model-{number}" for number in range(1, len(documents) + 1)]
    return folder_page(read_folder(documents, title=title, pages=pages, where=title), whole=True)
