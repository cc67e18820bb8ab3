"""Published and measured numbers, if the sweep names published ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....errors import UserError
from ...tables import Difference, Number, Table, show
from ..departures import SIGNS, departures_of
from ..figures import rows
from ..figures.rows import Mark, Row
from ..figures.style import Picture, numbered_style
from ..page import Absent, Named, Part, Section
from ..results import published_table
from .material import Material

KEY = "published"
CAPTION = "Hollow: published; filled: measured here, with a bar of ± 1 sd over seeds."


def section(material: Material) -> Section:
    """Return the tables that the sweep names, each with its figure."""
    parts: list[Part] = []
    for number, published in enumerate(material.sweep.get("published") or [], 1):
        parts += table_parts(KEY if number == 1 else f"{KEY}-{number}", published, material)
    absent = Absent("The runs are of no sweep that names published numbers.")
    return Section(KEY, "Published and measured", parts or [absent])


def table_parts(name: str, published: Mapping[str, Any], material: Material) -> list[Part]:
    """Return a published table with what was measured, or why there is none."""
    try:
        table = published_table(material.groups, published, material.sweep["axes"], departures_of(material.sweep))
    except UserError as error:
        return [Absent(f"The published numbers cannot be read ({error}); see 'published' in the sweep's file.")]
    if table is None:
        return [Absent(f"{published.get('source') or 'The publication'} has no numbers to compare with.")]
    gaps = [cell for row in table.rows for cell in row if isinstance(cell, Difference)]
    marked = sum(gap.mark is not None for gap in gaps)
    warning = f"{marked} of {len(gaps)} comparisons are with runs that differ from the recipe; the notes say how."
    return [*([warning] if marked else []), Named(name, table), *pictures(name, table)]


def departure_notes(table: Table) -> list[str]:
    """Return the notes of a table that explain its marks."""
    return [note for note in table.notes if note.startswith(tuple(SIGNS))]


def pictures(name: str, table: Table) -> list[Picture]:
    """Return the numbers of the table as dots; nothing if no cell has both."""
    axes = table.sides.count("l")
    labels = [column.removesuffix(" published") for column in table.columns[axes::3]]
    drawn = []
    for row in table.rows:
        marks: list[Mark] = []
        for number, label in enumerate(labels):
            published, found = row[axes + 3 * number], row[axes + 3 * number + 1]
            if isinstance(published, Number) and isinstance(found, Number):
                marks += both_marks(label, number, published, found)
        if marks:
            signs = dict.fromkeys(one.mark.sign for one in row if isinstance(one, Number) and one.mark is not None)
            drawn.append(Row(" ".join([", ".join(show(cell) for cell in row[:axes]), *signs]), marks))
    what = table.title.partition(": ")[2]
    alt = f"Dot plot of {what}, published and measured, in {len(drawn)} rows; the table has the numbers."
    caption = " ".join([CAPTION, *departure_notes(table)])
    return [Picture(name, alt, caption, lambda: rows.draw(drawn, what))] if drawn else []


def both_marks(label: str, number: int, published: Number, found: Number) -> list[Mark]:
    """Return a published value and the measured one."""
    factor = 100 if found.percent else 1
    low, high = (None if found.sd is None else factor * (found.value + sign * found.sd) for sign in (-1, 1))
    return [
        Mark(f"{label}, published", numbered_style(number, filled=False), factor * published.value),
        Mark(f"{label}, measured", numbered_style(number), factor * found.value, low, high),
    ]
