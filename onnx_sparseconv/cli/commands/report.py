"""``sparseconv report``: a page of what a conversion did and gained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from onnx_sparseconv.cli import failures
from onnx_sparseconv.cli.console import say
from onnx_sparseconv.cli.conversion.converted import converted_document
from onnx_sparseconv.cli.conversion.reports import PAGE_SUFFIXES, page_of
from onnx_sparseconv.cli.exit_codes import ExitCode
from onnx_sparseconv.cli.paths import require_inputs_spared
from onnx_sparseconv.errors import ReportError, UsageError
from onnx_sparseconv.files import is_special, write_text
from onnx_sparseconv.runtime.plain import to_plain

NAME = "report"
# What JSON objects and lists begin with, and no ONNX model does.
_JSON_STARTS = (b"{", b"[")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@failures.command
def command(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="REPORT.json|MODEL",
            help="What 'convert --report FILE.json' or 'tune' wrote, or a converted model.",
            show_default=False,
        ),
    ],
    *,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE.html", help="The page to write.", show_default=False)
    ],
    decisions: Annotated[
        Path | None,
        typer.Option(
            "--decisions",
            metavar="FILE.json",
            help="What 'tune' wrote, for the times, where the report or the model has none.",
            show_default=False,
        ),
    ] = None,
    verify: Annotated[
        Path | None,
        typer.Option(
            "--verify",
            metavar="FILE.json",
            help="What 'verify -o FILE.json' wrote, for the errors of the outputs.",
            show_default=False,
        ),
    ] = None,
    bench: Annotated[
        Path | None,
        typer.Option(
            "--bench",
            metavar="FILE.json",
            help="What 'bench -o FILE.json' wrote, for the times of the whole model.",
            show_default=False,
        ),
    ] = None,
) -> ExitCode:
    """Make a page of what a conversion did, why, and what it gained, to look at, to print, and to send on.

    It is one file that needs no network.
    """
    inputs = [path for path in (source, decisions, verify, bench) if path is not None]
    require_inputs_spared(output, inputs)
    if output.suffix.lower() not in PAGE_SUFFIXES:
        raise UsageError(f"-o {output}: a page is HTML, so its name must end in .html")
    if not output.resolve().parent.is_dir():
        raise UsageError(f"-o {output}: there is no directory {output.resolve().parent}")
    write_text(output, make_page(source, decisions, verify, bench))
    say(f"Wrote {output}")
    return ExitCode.DONE


def make_page(
    source: Path, decisions: Path | None = None, verify: Path | None = None, bench: Path | None = None
) -> str:
    """The page of a report, decisions or a converted model, with what other commands found out of it.

    Raises:
        ReportError: a file is not what it should be, or does not belong to the others.
        ModelError: the model cannot be read.
        DecisionsError: the decisions cannot be read.
    """
    from onnx_sparseconv.report import read_report, report_page  # noqa: PLC0415

    if is_special(source):
        raise ReportError(f"{source} is no file: name the report, the decisions or the model")
    found = read_json(source) if _is_json(source) else converted_document(source)
    if isinstance(found, list):
        if not found:
            raise ReportError(f"{source}: holds no model")
        if decisions is not None or verify is not None or bench is not None:
            raise ReportError(f"{source}: holds several models; --decisions, --verify and --bench are for one")
        return page_of([_as_object(one, source) for one in found], source.stem)
    document = _as_object(found, source)
    if decisions is not None:
        document = with_decisions(document, decisions, source)
    more = {name: read_json(path) for name, path in (("verify", verify), ("bench", bench)) if path is not None}
    return report_page(read_report(document, **more, where=str(source)))


def with_decisions(document: dict[str, Any], path: Path, source: Path) -> dict[str, Any]:
    """A report with the decisions of a file.

    Raises:
        ReportError: it has some already, or they are for another model.
        DecisionsError: the file is no decisions file.
    """
    from onnx_sparseconv.converter import read_decisions  # noqa: PLC0415

    if document.get("decisions") is not None or "kind" in document:
        raise ReportError(f"{source}: has decisions already: leave --decisions out")
    decisions = read_decisions(path)
    model = document.get("model")
    layers = model.get("layers") if isinstance(model, dict) else None
    names = [one.get("name") for one in layers if isinstance(one, dict)] if isinstance(layers, list) else []
    unknown = [layer.node for layer in decisions.layers if layer.node not in names]
    if unknown:
        raise ReportError(f"{path}: is for another model: {source} has no convolution {unknown[0]!r}")
    return {**document, "decisions": to_plain(decisions)}


def read_json(path: Path) -> Any:  # noqa: ANN401
    """The content of a JSON file.

    Raises:
        ReportError: it cannot be read, or is no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ReportError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{path}: is not JSON: {error}") from error


def _is_json(path: Path) -> bool:
    """Whether a file begins like JSON; a file that cannot be read is left to who reads it."""
    try:
        with path.open("rb") as stream:
            start = stream.read(64).removeprefix(_BYTE_ORDER_MARK).lstrip()
    except OSError:
        return path.suffix.lower() == ".json"
    return start.startswith(_JSON_STARTS) or path.suffix.lower() == ".json"


def _as_object(content: Any, source: Path) -> dict[str, Any]:  # noqa: ANN401
    if not isinstance(content, dict):
        raise ReportError(f"{source}: is no report: it holds no JSON object")
    return content
