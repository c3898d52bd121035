from __future__ import annotations

import pytest

from onnx_sparseconv.report import words
from onnx_sparseconv.text import shown


@pytest.mark.parametrize(
    ("time_us", "text"),
    [
        (None, "\u2013"),
        (0.5, "0.50 \u00b5s"),
        (150.7, "151 \u00b5s"),
        (999.4, "999 \u00b5s"),
        (999.9, "1.00 ms"),
        (2e6, "2.00 s"),
    ],
)
def test_times(time_us, text):
    assert words.time(time_us).replace("\u00a0", " ") == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (999_600, "1.00 MB"), (5e12, "5.00 TB"), (5e15, "5000 TB")],
)
def test_sizes(size, text):
    assert words.size(size).replace("\u00a0", " ") == text


@pytest.mark.parametrize(
    ("share", "text"), [(0, "0.0%"), (1e-6, "<0.1%"), (0.9999, ">99.9%"), (1, "100.0%"), (None, "\u2013")]
)
def test_shares_are_never_rounded_to_all_or_nothing(share, text):
    assert words.percent(share) == text


def test_figures_of_axes_have_no_idle_zeros():
    assert [words.trimmed(words.amount(value)).replace("\u00a0", " ") for value in (5e10, 2.5e10, 100e9)] == [
        "50 G",
        "25 G",
        "100 G",
    ]


def test_long_names_lose_their_middle_by_the_room_they_take():
    assert words.shorten("short") == "short"
    assert words.shorten("a" * 100, 21) == "a" * 10 + "\u2026" + "a" * 10
    assert words.shorten("\u65e5" * 100, 21) == "\u65e5" * 5 + "\u2026" + "\u65e5" * 5


def test_what_html_cannot_hold_is_replaced():
    assert shown("a\x00\x1bb\nc\u202e\ud800") == "a\ufffd\ufffdb c\ufffd\ufffd"
