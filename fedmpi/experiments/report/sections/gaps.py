"""Two curves of one run and their difference: participating and other clients, training and test data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ...measures import mean_of_last
from ...runs import Group, Run, counted
from ...tables import Cell, Table
from ..figures import rows
from ..figures.curves import Line
from ..figures.rows import Row
from ..figures.style import Picture, numbered_style
from ..layout import MOST_PANELS, Placed, by_metric
from ..page import Absent, Named, Part, Section
from ..results import mean_cell
from .material import Curve, Material, Plot, line, mark, plot, slug, smoothed, unit

STYLES = (numbered_style(0), numbered_style(1, 1, filled=False))
LAST = 10  # rounds whose mean is in the table

Sides = dict[str, Callable[[Run], Curve]]


def clients(material: Material) -> Section:
    """Return the metric on clients that took part in a round and on the others."""
    sides: Sides = {
        "participating": lambda run: run.series(run.sides, "participating"),
        "others": lambda run: run.series(run.sides, "others"),
    }
    parts = gap_parts(material, "clients", "Participating and other clients", sides)
    absent = Absent("Not measured; train with --evaluate clients.")
    return Section("clients", "Participating and other clients", parts or [absent])


def gap(material: Material) -> Section:
    """Return the metric on training data and on test data, which out of distribution may be far apart."""
    sides: Sides = {
        "training data": lambda run: run.series(f"train_{run.metric}"),
        "test data": lambda run: run.series(run.score),
    }
    parts = gap_parts(material, "gap", "Training and test data", sides)
    return Section("gap", "Training and test data", parts or [Absent("Not measured; train with --evaluate gap.")])


def gap_parts(material: Material, key: str, title: str, sides: Sides) -> list[Part]:
    """Return, per metric, a table of the last rounds and a panel per group with both curves."""
    first = next(iter(sides.values()))
    measured = by_metric([one for one in material.placed if any(first(run) for run in counted(one.group))])
    parts: list[Part] = []
    for metric, placed in measured.items():
        name, factor = unit(metric)
        file = f"{key}-{slug(metric)}" if key == "gap" or len(measured) > 1 else key
        what = Plot(file, f"{metric} on {' and on '.join(sides)}", "round", name, factor)
        parts.append(Named(file, gap_table([one.group for one in placed], sides, title, percent=factor == 100)))
        parts += gap_pictures(what, placed, sides, material.smooth)
    return parts


def gap_pictures(what: Plot, placed: Sequence[Placed], sides: Sides, smooth: int) -> list[Picture]:
    """Return a panel with both curves per group; for many groups, a row with both means of the last rounds."""
    styled = list(zip(sides.items(), STYLES, strict=True))

    def lines(one: Placed) -> list[Line | None]:
        return [
            line(replace(one, label=name, style=style), [smoothed(read(run), smooth) for run in counted(one.group)])
            for (name, read), style in styled
        ]

    if len(placed) <= MOST_PANELS:
        return plot(what, [replace(one, panel=one.group.label) for one in placed], lines, smooth)
    drawn = [
        Row(one.group.label, [mark(name, style, last(one.group, read), what.factor) for (name, read), style in styled])
        for one in placed
    ]
    alt = f"Dot plot of {what.about}, in {len(drawn)} rows; the table has the numbers."
    caption = f"{what.about[:1].upper()}{what.about[1:]}: means over the last {LAST} rounds, with a tick per seed."
    return [Picture(what.name, alt, caption, lambda: rows.draw(drawn, what.down))]


def last(group: Group, read: Callable[[Run], Curve]) -> list[float | None]:
    """Return the mean over the last rounds, per seed."""
    return [mean_of_last(run, read(run), LAST) for run in counted(group)]


def gap_table(groups: Sequence[Group], sides: Sides, title: str, percent: bool) -> Table:
    """Return the means of both curves over their last rounds, and their difference."""
    lines: list[list[Cell]] = []
    for group in groups:
        first, second = (last(group, read) for read in sides.values())
        gaps = [a - b for a, b in zip(first, second, strict=True) if a is not None and b is not None]
        cells = [mean_cell(found, 2 if percent else 4, percent) for found in (first, second, gaps)]
        lines.append([group.label, *cells])
    notes = [f"Means over the scored ones of the last {LAST} rounds; mean and sample standard deviation over seeds."]
    return Table(title, ["runs", *sides, "difference"], lines, [*notes, "In percent."] if percent else notes)
