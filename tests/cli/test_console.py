from __future__ import annotations

import pytest

from onnx_sparseconv.cli import console
from onnx_sparseconv.cli.console import (
    Column,
    Table,
    format_bytes,
    format_change,
    format_percent,
    format_shape,
    format_time,
    plain_table,
    shorten,
)
from onnx_sparseconv.text import count

LONG = "model/" + "block/" * 40 + "conv"


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (12_345, "12.3 kB"), (999_900, "1.00 MB"), (5_003_175, "5.00 MB")],
)
def test_bytes(size, text):
    assert format_bytes(size) == text


def test_large_and_unknown_bytes():
    assert format_bytes(2_700_000_000) == "2.70 GB"
    assert format_bytes(5_000_000_000_000) == "5000 GB"
    assert format_bytes(None) == "?"


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0.0%"), (1.0, "100.0%"), (0.9123, "91.2%"), (0.99999, ">99.9%"), (0.00001, "<0.1%"), (None, "?")],
)
def test_a_share_is_not_rounded_to_all_or_nothing(share, text):
    assert format_percent(share) == text


def test_other_formats():
    assert [format_time(t) for t in (12.34, 1234, 2_500_000, None)] == ["12.3 us", "1.23 ms", "2.50 s", "?"]
    assert [format_shape(s) for s in ((1, 3, 8), (), None)] == ["1x3x8", "scalar", "?"]
    assert format_change(1000, 250) == "1.00 kB -> 250 B (25.0%)"
    assert format_change(1000, None) == "1.00 kB -> ?"
    assert [count(n, "layer") for n in (0, 1, 2)] == ["0 layers", "1 layer", "2 layers"]


def test_a_plain_table_is_aligned_and_cuts_nothing():
    text = plain_table(Table((Column("name", fold=True), Column("n", right=True)), (("a", "1"), (LONG, "100"))))
    lines = text.splitlines()
    assert lines[2] == f"{LONG}  100"
    assert {len(line) for line in lines} == {len(lines[2])}


def test_a_long_name_is_shortened_in_the_middle():
    assert shorten("conv1") == "conv1"
    assert len(shorten(LONG)) <= 48
    assert shorten(LONG).startswith("model/block")
    assert shorten(LONG).endswith("block/conv")


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_a_terminal_wraps_with_a_hanging_indent(monkeypatch, capsys, columns):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    console.say_field("label", " ".join(["word"] * 60))
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= columns for line in lines)
    assert lines[0].startswith("label      word")
    assert all(line.startswith(" " * 11 + "word") for line in lines[1:])


def test_a_pipe_gets_lines_as_they_are(capsys):
    console.say_field("label", " ".join(["word"] * 60))
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_no_progress_bar_without_a_terminal(capsys):
    with console.progress_bar("working") as advance:
        advance(1, 2, "x")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_the_progress_bar_is_on_stderr(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with console.progress_bar("working") as advance:
        advance(1, 2, "x")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "working" in captured.err
