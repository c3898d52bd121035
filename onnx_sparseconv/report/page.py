"""The whole page: one HTML file that fetches nothing, and that its own security policy forbids to."""

from __future__ import annotations

import base64
import functools
import hashlib
from importlib import resources

from onnx_sparseconv.report import tables, words
from onnx_sparseconv.report.data import FolderReport, Report
from onnx_sparseconv.report.html import breakable, text
from onnx_sparseconv.report.sections import model_sections
from onnx_sparseconv.report.summary import folder_cards, folder_lead, model_cards, model_lead
from onnx_sparseconv.version import __version__

_PROGRAM = "onnx-sparseconv"


def report_page(report: Report) -> str:
    """The page of one model."""
    return _page(report.name, _model(report, "m"), report.created)


def folder_page(folder: FolderReport, *, whole: bool = False) -> str:
    """The page of several models.

    Args:
        folder: what was done with them.
        whole: put all that there is to say of each model below the table, which then links to it.
    """
    body = [
        "<header>",
        f'<p class="kicker">{_PROGRAM} · summary</p><h1>{breakable(folder.title)}</h1>',
        folder_lead(folder),
        folder_cards(folder),
        "</header><main><section><h2>Models</h2>",
        tables.models_table(folder),
        "</section>",
        tables_section("Versions", folder.versions),
    ]
    if whole:
        body += [
            f'<article id="model-{number}">{_model(entry.report, f"m{number}", level=1)}</article>'
            for number, entry in enumerate(folder.entries, start=1)
        ]
    return _page(folder.title, "".join([*body, "</main>"]), folder.created)


def tables_section(title: str, pairs: tuple[tuple[str, str], ...]) -> str:
    """A section of facts, empty for none."""
    found = tables.facts(pairs)
    return f"<section><h2>{text(title)}</h2>{found}</section>" if found else ""


def _model(report: Report, prefix: str, level: int = 0) -> str:
    """All that there is to say of a model; within another page without a frame of its own."""
    output = f" → {breakable(report.output)}" if report.output and report.output != report.source else ""
    head = (
        f'<p class="kicker">{_PROGRAM}</p><h1>{breakable(report.name)}</h1>'
        f'<p class="path">{breakable(report.source)}{output}</p>{model_lead(report)}{model_cards(report)}'
    )
    sections = model_sections(report, prefix) + ("" if level else tables_section("Versions", report.versions))
    return f"{head}{sections}" if level else f"<header>{head}</header><main>{sections}</main>"


def _page(title: str, body: str, created: str) -> str:
    style, script = _part("page.css"), _part("page.js")
    policy = "; ".join(
        (
            "default-src 'none'",
            f"style-src 'sha256-{_digest(style)}'",
            f"script-src 'sha256-{_digest(script)}'",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    made = f"Made by {_PROGRAM} {__version__}" + (f" at {created}" if created else "")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>{text(words.shorten(title, 80))} · {_PROGRAM}</title>\n"
        f'<style>{style}</style>\n</head>\n<body>\n<div class="page">{body}'
        f"<footer>{text(made)}.</footer></div>\n<script>{script}</script>\n</body>\n</html>\n"
    )


@functools.cache
def _part(name: str) -> str:
    return resources.files("onnx_sparseconv.report").joinpath(name).read_text(encoding="utf-8")


def _digest(content: str) -> str:
    """As the security policy names what it allows; a browser hashes exactly what stands between the tags."""
    return base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
