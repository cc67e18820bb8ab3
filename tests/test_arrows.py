"""The rooms of fedmpi import downwards only, and the chart in docs/design.md shows the real imports."""

from __future__ import annotations

import pytest
from arrows import ALLOWED, DESIGN, PACKAGE, imports, rooms, with_chart

UPWARD: dict[str, set[str]] = {
    "runs": {"experiments"},
    "experiments": {"api"},
}
"""arrows that are still wrong: room -> rooms"""


def test_every_room_has_its_place() -> None:
    assert rooms() == set(ALLOWED)
    assert len(list(PACKAGE.glob("*.py"))) <= 15


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_downwards_only(room: str) -> None:
    order = list(ALLOWED)
    assert all(order.index(lower) < order.index(room) for lower in ALLOWED[room]), "no cycle is allowed"
    wrong = {name: sorted(files) for name, files in imports(room).items() if name not in ALLOWED[room]}
    assert set(wrong) == UPWARD.get(room, set()), wrong


def test_the_chart_in_the_design_is_that_of_the_code() -> None:
    page = DESIGN.read_text(encoding="utf-8")
    assert with_chart(page) == page, "write it with: python -m tests.arrows"
