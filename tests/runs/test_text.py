"""Tables, bytes and durations as text."""

from __future__ import annotations

import pytest

from fedmpi.runs.text import align, amount, duration


def test_columns_are_aligned_and_lines_have_no_blanks_at_their_end() -> None:
    rows = [("name", "runs", "about"), ("a", "10", "first"), ("longer", "9", "")]
    assert align(rows, "lrl") == ["name    runs  about", "a         10  first", "longer     9"]
    assert align(rows[1:], "lr") == ["a       10  first", "longer   9"]


def test_a_rule_below_the_head_is_as_long_as_the_longest_line() -> None:
    assert align([("a", "b"), ("1", "long")], rule=True) == ["a  b", "-------", "1  long"]


def test_lines_that_are_printed_one_by_one_have_given_widths() -> None:
    assert align([("a", "1")], "lr", (3, 4)) == ["a       1"]
    assert align([("longer", "1")], "lr", (3, 4)) == ["longer     1"], "a cell is never cut"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (802_386, "802 kB"), (999_600, "1 MB"), (2.5e9, "2.5 GB"), (4e15, "4e+03 TB")],
)
def test_bytes(count: float, text: str) -> None:
    assert amount(count) == text


@pytest.mark.parametrize(("minutes", "text"), [(0.5, "30 s"), (7.2, "7 min"), (119, "119 min"), (150, "2.5 h")])
def test_durations(minutes: float, text: str) -> None:
    assert duration(minutes) == text
