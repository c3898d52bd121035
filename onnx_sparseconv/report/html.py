"""Text of HTML elements. All texts are escaped: names of nodes and files come from strangers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from onnx_sparseconv.text import shown


def text(words: str) -> str:
    """A text as markup."""
    return escape(shown(words))


def name(words: str) -> str:
    """A name from outside as markup: whatever its script, it does not turn round what stands beside it."""
    return f"<bdi>{text(words)}</bdi>"


def breakable(words: str) -> str:
    """A path or a long name as markup that may be broken after ``/``, ``.`` and ``_``."""
    broken = text(words)
    for mark in "/._":
        broken = broken.replace(mark, f"{mark}<wbr>")
    return f"<bdi>{broken}</bdi>"


def items(markup: Iterable[str]) -> str:
    """A list, empty for none."""
    rows = "".join(f"<li>{one}</li>" for one in markup)
    return f"<ul>{rows}</ul>" if rows else ""


@dataclass(frozen=True)
class Column:
    """A column of a table: its title, whether it holds figures, and what there is to say of it."""

    title: str
    is_figure: bool = False
    hint: str = ""


@dataclass(frozen=True)
class Cell:
    """A cell: its markup, and what it is sorted by where that is not its text (None: sorted last)."""

    markup: str
    key: float | str | None = None


def table(
    columns: Sequence[Column], rows: Iterable[Sequence[Cell]], *, caption: str, heads: int, wide: bool = False
) -> str:
    """A table whose rows a reader can sort.

    Args:
        columns: of the table.
        rows: a cell for each column.
        caption: what it shows.
        heads: number of the column that names the row.
        wide: whether it has so many columns that a narrow window scrolls it.
    """
    head = "".join(
        f'<th scope="col"{_class(column)}{_hint(column)} aria-sort="none">{text(column.title)}</th>'
        for column in columns
    )
    body = "".join(f"<tr>{_row(columns, row, heads)}</tr>" for row in rows)
    return (
        f'<div class="scroll{" wide" if wide else ""}" role="region" tabindex="0" aria-label="{text(caption)}">'
        f'<table class="sortable"><caption>{text(caption)}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _row(columns: Sequence[Column], row: Sequence[Cell], heads: int) -> str:
    cells = []
    for index, (column, cell) in enumerate(zip(columns, row, strict=True)):
        key = "" if cell.key is None else f' data-key="{text(str(cell.key))}"'
        if index == heads:
            cells.append(f'<th scope="row"{key}>{cell.markup}</th>')
        else:
            cells.append(f"<td{_class(column)}{key}>{cell.markup}</td>")
    return "".join(cells)


def _class(column: Column) -> str:
    return ' class="figure"' if column.is_figure else ""


def _hint(column: Column) -> str:
    return f' title="{text(column.hint)}"' if column.hint else ""
