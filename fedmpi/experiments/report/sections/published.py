"""What a paper says beside what was measured, where the sweep names published numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....errors import UserError
from ...tables import Difference, Number, Table, show
from ..departures import SIGNS, departures_of
from ..figures import rows
from ..figures.rows import Mark, Row
from ..figures.style import COLOURS, MARKERS, Look, Picture
from ..page import Absent, Named, Part, Section
from ..results import published_table
from .material import Material

KEY, TITLE = "published", "Published and measured"
CAPTION = "Hollow: published; filled: measured here, with one standard deviation over the seeds to either side."


def section(material: Material) -> Section:
    """The tables that the sweep names, each with its picture."""
    said = material.sweep.get("published")
    if not said:
        return Section(KEY, TITLE, [Absent("The runs are of no sweep that names published numbers.")])
    names = [KEY, *(f"{KEY}-{number}" for number in range(2, len(said) + 1))]
    tables = (shown(name, one, material) for name, one in zip(names, said, strict=True))
    return Section(KEY, TITLE, [part for parts in tables for part in parts])


def shown(name: str, said: Mapping[str, Any], material: Material) -> list[Part]:
    """A published table beside what was measured, or why there is none."""
    departures = departures_of(material.sweep)
    try:
        table = published_table(material.groups, said, material.sweep["axes"], departures)
    except UserError as error:
        text = f"What the sweep says of published numbers cannot be read ({error}); see 'published' in its file."
        return [Absent(text)]
    if table is None:
        source = said.get("source") or "What was published"
        return [Absent(f"{source} has no numbers of a kind that can be put beside what was measured.")]
    return [*warning(table), Named(name, table), *picture(name, table)]


def warning(table: Table) -> list[str]:
    """What is said in front of a table with comparisons that are none of like with like."""
    gaps = [cell for row in table.rows for cell in row if isinstance(cell, Difference)]
    marked = sum(gap.mark is not None for gap in gaps)
    if not marked:
        return []
    are = "1 comparison is" if len(gaps) == 1 else f"{marked} of {len(gaps)} comparisons are"
    return [f"{are} with runs that differ from the recipe: they are marked, and the notes of the table say in what."]


def differing(table: Table) -> list[str]:
    """The notes of a table that say in what marked cells differ from the recipe."""
    return [note for note in table.notes if note.startswith(tuple(SIGNS))]


def picture(name: str, table: Table) -> list[Picture]:
    """The numbers of the table as dots; none where no cell has both."""
    axes = table.sides.count("l")
    labels = [name.removesuffix(" published") for name in table.columns[axes::3]]
    drawn = []
    for row in table.rows:
        marks: list[Mark] = []
        for number, label in enumerate(labels):
            said, found = row[axes + 3 * number], row[axes + 3 * number + 1]
            if isinstance(said, Number) and isinstance(found, Number):
                marks += both(label, number, said, found)
        if marks:
            signs = dict.fromkeys(one.mark.sign for one in row if isinstance(one, Number) and one.mark is not None)
            drawn.append(Row(" ".join([", ".join(show(cell) for cell in row[:axes]), *signs]), marks))
    if not drawn:
        return []
    what = table.title.partition(": ")[2]
    made = Picture(
        name,
        f"Dot plot of {what}, published and measured, in {len(drawn)} rows; the table has the numbers.",
        " ".join([CAPTION, *differing(table)]),
        lambda width: rows.draw(drawn, what, width),
    )
    return [made]


def both(label: str, number: int, said: Number, found: Number) -> list[Mark]:
    """A published value and the measured one."""
    factor = 100 if found.percent else 1
    colour, shape = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
    reach = None if found.sd is None else factor * found.sd
    value = factor * found.value
    low, high = (None, None) if reach is None else (value - reach, value + reach)
    return [
        Mark(f"{label}, published", Look(colour, "solid", shape, filled=False), factor * said.value),
        Mark(f"{label}, measured", Look(colour, "solid", shape, filled=True), value, low, high),
    ]
