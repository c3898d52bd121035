"""Text and tables on stdout: for a terminal with rich, for a file or a pipe plain and never cut."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from onnx_sparseconv.text import percent, shown, without_controls

# Below this width a terminal shows short forms.
WIDE = 120
_MAX_NAME_LENGTH = 48
_LABEL_WIDTH = 11
Advance = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Column:
    """A column of a table; ``fold`` lets a narrow terminal break its text over several lines."""

    title: str
    right: bool = False
    fold: bool = False


@dataclass(frozen=True)
class Table:
    """Columns and rows of text."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]


def is_terminal() -> bool:
    """Whether stdout is a terminal."""
    from rich.console import Console  # noqa: PLC0415

    return Console(file=sys.stdout).is_terminal


def terminal_width() -> int:
    """Columns of the terminal."""
    from rich.console import Console  # noqa: PLC0415

    return Console(file=sys.stdout).width


def is_wide() -> bool:
    """Whether stdout takes long lines: a file, a pipe, or a wide terminal."""
    return not is_terminal() or terminal_width() >= WIDE


def shown_name(name: str) -> str:
    """A name as a table shows it: whole in a file or a pipe, without the middle of a very long one on a terminal."""
    name = shown(name)
    return shorten(name) if is_terminal() else name


def shorten(name: str) -> str:
    """A long name without its middle; some exporters give names of hundreds of characters."""
    keep = _MAX_NAME_LENGTH // 2 - 2
    return name if len(name) <= _MAX_NAME_LENGTH else f"{name[:keep]}...{name[-keep:]}"


def say(text: str = "", hang: int = 0) -> None:
    """Print a line of text as it is; a terminal wraps it between words.

    Args:
        text: the line.
        hang: columns by which wrapped lines are indented, beyond the line's own indentation.
    """
    text = without_controls(text)
    if text and is_terminal():
        indent = len(text) - len(text.lstrip()) + hang
        text = textwrap.fill(
            text,
            max(terminal_width(), 20),
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
    sys.stdout.write(f"{text}\n")


def say_field(label: str, value: str) -> None:
    """Print ``label  value`` with values of successive lines in one column."""
    say(f"{label:<{_LABEL_WIDTH}}{value}", hang=_LABEL_WIDTH)


def say_command(text: str) -> None:
    """Print a command line, never wrapped, so that it can be copied."""
    sys.stdout.write(f"  {without_controls(text)}\n")


def say_table(table: Table) -> None:
    """Print a table."""
    table = Table(table.columns, tuple(tuple(map(shown, row)) for row in table.rows))
    if is_terminal():
        _say_rich(table)
    else:
        sys.stdout.write(plain_table(table))


def plain_table(table: Table) -> str:
    """A table as aligned text, every cell whole."""
    lines = [tuple(column.title for column in table.columns), *table.rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(table.columns))]
    text = []
    for line in lines:
        cells = [
            cell.rjust(width) if column.right else cell.ljust(width)
            for cell, width, column in zip(line, widths, table.columns, strict=True)
        ]
        text.append("  ".join(cells).rstrip() + "\n")
    return "".join(text)


def _say_rich(table: Table) -> None:
    from rich import box  # noqa: PLC0415
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table as RichTable  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    rich_table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for column in table.columns:
        rich_table.add_column(
            column.title,
            justify="right" if column.right else "left",
            no_wrap=not column.fold,
            overflow="fold",
            min_width=10 if column.fold else None,
        )
    for row in table.rows:
        rich_table.add_row(*(Text(cell) for cell in row))
    Console(file=sys.stdout, highlight=False).print(rich_table)


@contextmanager
def progress_bar(title: str = "") -> Iterator[Advance]:
    """Give a function ``(done, total, what)`` that draws a progress bar on stderr, where that is a terminal."""
    from rich.console import Console  # noqa: PLC0415

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _done, _total, _what: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Redirecting would put what a command prints on stderr while the bar is shown.
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as progress:
        task = progress.add_task(title, total=None)

        def advance(done: int, total: int, what: str) -> None:
            progress.update(task, completed=done, total=total, description=f"{title} {what}".strip()[:50])

        yield advance


def format_bytes(size_bytes: int | None) -> str:
    """Decimal units, three digits: ``4.95 MB``."""
    if size_bytes is None:
        return "?"
    size = float(size_bytes)
    if size < 1000:
        return f"{size_bytes} B"
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 999.5 or unit == "GB":
            return f"{size:.{max(0, 3 - len(str(int(size))))}f} {unit}"
    raise AssertionError


def format_percent(share: float | None) -> str:
    """``0.912`` as ``91.2%``; never rounded to 100% or 0% when it is not."""
    return "?" if share is None else percent(share)


def format_time(time_us: float | None) -> str:
    """Microseconds in the unit that reads best."""
    if time_us is None:
        return "?"
    if time_us < 1000:
        return f"{time_us:.1f} us"
    return f"{time_us / 1000:.2f} ms" if time_us < 1e6 else f"{time_us / 1e6:.2f} s"


def format_shape(shape: Sequence[int] | None) -> str:
    """``64x32x3x3``."""
    return "?" if shape is None else "x".join(map(str, shape)) or "scalar"


def format_change(before: int, after: int | None) -> str:
    """Two sizes and what is left: ``4.95 MB -> 1.20 MB (24.2%)``."""
    left = f" ({format_percent(after / before)})" if after is not None and before else ""
    return f"{format_bytes(before)} -> {format_bytes(after)}{left}"
