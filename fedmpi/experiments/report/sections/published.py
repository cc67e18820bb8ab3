"""Published and measured numbers, if the sweep names published ones, and how the runs differ from their recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ....errors import UserError
from ....runs.text import plural
from ...measures import Measure, measure
from ...runs import Group, counted, pairing, word
from ...sweep.grid import label_of
from ...sweep.reference import Reference, bundled_reference, read_reference
from ...tables import Cell, Difference, Mark, Missing, Number, Table, show
from ..figures import rows
from ..figures.rows import Row
from ..figures.style import Picture, numbered_style
from ..page import Absent, Named, Part
from .material import Material, dots
from .results import cell, column_title, form, remarks

CAPTION = "Hollow: published; filled: measured here, with a bar of ± 1 sd over seeds."
SIGNS = "†‡§¶"
UNKNOWN = (
    "Whether the runs differ from the sweep's file is not known: sweep.json was written by an older version. Run the "
    "same 'fedmpi sweep' again to record it."
)


def published(material: Material) -> list[Part]:
    """Return the tables that the sweep names, each with its figure, or why there is none."""
    parts: list[Part] = []
    for number, paper in enumerate(material.sweep.get("published") or [], 1):
        name = "published" if number == 1 else f"published-{number}"
        try:
            table = published_table(material.groups, paper, material.sweep)
        except UserError as error:
            why = f"The published numbers cannot be read ({error}); see 'published' in the sweep's file."
            parts.append(Absent(why))
            continue
        if table is None:
            parts.append(Absent(f"{paper.get('source') or 'The publication'} has no numbers to compare with."))
            continue
        gaps = [cell for row in table.rows for cell in row if isinstance(cell, Difference)]
        marked = sum(gap.mark is not None for gap in gaps)
        if marked:
            runs = f"{marked} of {len(gaps)} comparisons are with runs that differ from the recipe"
            parts.append(f"{runs}; the notes say how.")
        parts += [Named(name, table), *pictures(name, table)]
    return parts


def departure_notes(table: Table) -> list[str]:
    """Return the notes of a table that explain its marks."""
    return [note for note in table.notes if note.startswith(tuple(SIGNS))]


def pictures(name: str, table: Table) -> list[Picture]:
    """Return the numbers of the table as dots; nothing if no cell has both."""
    axes = table.sides.count("l")
    labels = [column.removesuffix(" published") for column in table.columns[axes::3]]
    drawn = []
    for row in table.rows:
        marks: list[rows.Mark] = []
        for number, label in enumerate(labels):
            paper, found = row[axes + 3 * number : axes + 3 * number + 2]
            if isinstance(paper, Number) and isinstance(found, Number):
                factor = 100 if found.percent else 1
                low, high = (None if found.sd is None else factor * (found.value + s * found.sd) for s in (-1, 1))
                hollow, filled = numbered_style(number, filled=False), numbered_style(number)
                marks.append(rows.Mark(f"{label}, published", hollow, factor * paper.value))
                marks.append(rows.Mark(f"{label}, measured", filled, factor * found.value, low, high))
        if marks:
            signs = dict.fromkeys(one.mark.sign for one in row if isinstance(one, Number) and one.mark is not None)
            drawn.append(Row(" ".join([", ".join(show(cell) for cell in row[:axes]), *signs]), marks))
    what = table.title.partition(": ")[2]
    about = f"{what}, published and measured, in {len(drawn)} rows"
    return [dots(name, about, " ".join([CAPTION, *departure_notes(table)]), drawn, what)] if drawn else []


# The table


def published_table(groups: Sequence[Group], paper: Mapping[str, Any], sweep: Mapping[str, Any]) -> Table | None:
    """Return published and measured numbers for the rows of a paper in a sweep.json, with marks for runs that differ
    from the recipe; None if there are no rows, as for a figure."""
    lines, name = paper.get("rows") or [], paper.get("measure", "best")
    if not lines or name == "curve":
        return None
    what, axis = measure(name), paper.get("columns", "")
    keys = list(dict.fromkeys(key for row in lines for key in row))
    axes = [key for key in keys if key in sweep["axes"]]
    labels = [key for key in keys if key not in axes]
    reference = read_reference(sweep.get("recipe")) or bundled_reference(sweep)
    marks: dict[str, Mark] = {}  # by meaning, in the order of first use
    show_mask = "mask" not in (*axes, axis)
    body: list[list[Cell]] = []
    for row in lines:
        line: list[Cell] = []
        masks: dict[str, None] = {}
        for label in labels:
            wanted = {**{key: label_of(row[key]) for key in axes if key in row}, axis: label}
            alike = [g for g in groups if wanted.items() <= g.first.labels.items()]
            masks |= {pairing({}, g.config, g.taus, algorithm=False): None for g in alike}
            meaning = departure(sweep, reference, alike[0], wanted) if len(alike) == 1 and label in row else ""
            mark = marks.setdefault(meaning, Mark(sign(len(marks)), meaning)) if meaning else None
            shape = form((alike or groups)[0], what) if groups else {}
            line += cells(row.get(label), alike, what, shape, mark)
        head = [label_of(row[key]) if key in row else Missing() for key in axes]
        body.append([*head, *([", ".join(masks) or Missing()] if show_mask else []), *line])
    axes += ["mask"] if show_mask else []
    heads = [f"{label} {kind}" for label in labels for kind in ("published", "measured", "difference")]
    notes = [f"Published: {paper['source']}."] if paper.get("source") else []
    notes += ["Difference: measured - published.", *remarks(groups, [what])]
    notes += [*([] if reference else [UNKNOWN]), *(f"{mark.sign} {mark.meaning}." for mark in marks.values())]
    align = "l" * len(axes) + "r" * len(heads)
    return Table(f"Published and measured: {column_title(what, groups)}", [*axes, *heads], body, notes, align)


def cells(value: Any, alike: Sequence[Group], what: Measure, shape: Mapping[str, Any], mark: Mark | None) -> list[Cell]:
    """Return a published number (accuracies in percent), the measured one of a single matching group, and their gap."""
    measured = cell(alike[0], what) if len(alike) == 1 else Missing("several" if alike else "-")
    measured = replace(measured, mark=mark) if isinstance(measured, Number) else measured
    if not isinstance(value, int | float) or isinstance(value, bool):
        return [Missing() if value is None else word(value), measured, Missing()]
    value = round(value / 100, 12) if shape.get("percent") else float(value)
    gap = Difference(measured.value - value, **shape, mark=mark) if isinstance(measured, Number) else Missing()
    return [Number(value, **shape), measured, gap]


# Differences from the recipe


def departure(sweep: Mapping[str, Any], reference: Reference | None, group: Group, wanted: Mapping[str, str]) -> str:
    """Return how the group with the `wanted` labels differs from the recipe of its sweep.json; '' if it does not."""
    runs, found = counted(group), list[str]()
    planned = reference.of(group.first.labels) if reference is not None else None
    for name, value in (planned or {}).items():
        others = dict.fromkeys(word(run.config.get(name)) for run in runs if run.config.get(name) != value)
        found += [f"{name} {other} instead of {word(value)}" for other in others]
    home = group.first.sweep or Path()
    alike = [(name, labels) for name, labels in sweep["runs"].items() if wanted.items() <= labels.items()]
    begun = [labels for name, labels in alike if (home / name).is_dir()]
    for axis, labels in sweep["axes"].items():  # those that the published number does not name may be run in part
        some = {one.get(axis) for one in begun}
        if axis not in wanted and some < set(labels):
            shown = ", ".join(label for label in labels if label in some)
            found.append(f"{axis} {shown} instead of {', '.join(labels)}")
    if reference is not None and len(runs) < len(reference.seeds):
        found.append(f"{plural(len(runs), 'seed')} instead of {len(reference.seeds)}")
    rounds = [len(run.records) for run in runs if not run.done]
    if rounds:
        found.append(f"not done: {min(rounds)} of {group.config['rounds']} rounds")
    return f"differs from the recipe: {'; '.join(found)}" if found else ""


def sign(number: int) -> str:
    """Return the sign of a mark by its number."""
    return SIGNS[number % len(SIGNS)] * (1 + number // len(SIGNS))
