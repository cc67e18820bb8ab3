"""The rooms of fedmpi import downwards only, a round is short enough to be read, and docs/design.md shows both."""

from __future__ import annotations

import re

import pytest
from arrows import ALLOWED, DESIGN, MOST_LINES, PACKAGE, READING, imports, lines_to_read, rooms, with_chart

from fedmpi.runs.measures import MEASURES


def test_every_room_has_its_place() -> None:
    assert rooms() == set(ALLOWED)
    assert len(list(PACKAGE.glob("*.py"))) <= 15


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_downwards_only(room: str) -> None:
    order = list(ALLOWED)
    assert all(order.index(lower) < order.index(room) for lower in ALLOWED[room]), "no cycle is allowed"
    wrong = {name: sorted(files) for name, files in imports(room).items() if name not in ALLOWED[room]}
    assert not wrong


def test_only_the_table_of_measurements_names_a_room_above_its_own_by_import_path() -> None:
    for file in PACKAGE.rglob("*.py"):
        room = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for path, name in re.findall(r'"(fedmpi\.(\w+)[\w.]*:\w+)"', file.read_text(encoding="utf-8")):
            assert name == room or name in ALLOWED[room] or path in MEASURES.values(), (file, path)


def test_the_chart_in_the_design_is_that_of_the_code() -> None:
    page = DESIGN.read_text(encoding="utf-8")
    assert with_chart(page) == page, "write it with: python -m tests.arrows"


def test_a_round_can_be_read_in_so_many_lines() -> None:
    assert sum(map(lines_to_read, READING)) <= MOST_LINES


def test_the_table_in_the_design_is_that_of_the_code() -> None:
    """Up to a few lines: not every edit has to rewrite it."""
    rows = re.findall(r"^\| `([\w/]+\.py)` \| .* \| (\d+) \|$", DESIGN.read_text(encoding="utf-8"), re.MULTILINE)
    assert [file for file, _ in rows] == list(READING), "write it with: python -m tests.arrows"
    off = {file: int(lines) - lines_to_read(file) for file, lines in rows}
    assert all(abs(lines) <= 20 for lines in off.values()), f"write it with: python -m tests.arrows; off by {off}"
