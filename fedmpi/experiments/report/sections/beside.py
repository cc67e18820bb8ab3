"""Two curves of one run beside each other: clients that took part and those that did not, training and test data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ...measures import mean_of_last
from ...runs import Group, Run, counted
from ...stats import summarise
from ...tables import Cell, Missing, Number, Table
from ..arrange import MOST_PANELS, Placed, by_metric
from ..figures import rows
from ..figures.curves import Line
from ..figures.rows import Row
from ..figures.style import COLOURS, Look, Picture
from ..page import Absent, Named, Part, Section
from .material import Curve, Material, Plot, line, mark, plot, slug, smoothed, unit

FIRST = Look(COLOURS[0], "solid", "o", filled=True)
SECOND = Look(COLOURS[1], (0, (5, 2)), "s", filled=False)
LAST = 10  # rounds, of which what was scored is in a table as its mean

Reading = Callable[[Run], Curve]


def clients(material: Material) -> Section:
    """The metric on clients that took part in a round and on the others."""
    sides: tuple[tuple[str, Reading], ...] = (
        ("took part", lambda run: run.series(run.sides, "participating")),
        ("others", lambda run: run.series(run.sides, "others")),
    )
    measured = by_metric([one for one in material.placed if any(sides[0][1](run) for run in counted(one.group))])
    parts: list[Part] = []
    for metric, shown in measured.items():
        name, factor = unit(metric)
        about = f"{metric} on clients of the round and on the others"
        what = Plot(f"clients-{slug(metric)}" if len(measured) > 1 else "clients", about, "round", name, factor)
        parts += both(what, shown, sides, material.smooth, "Clients that took part")
    absent = "No run measured clients that took part apart from the others; train with --evaluate clients."
    return Section("clients", "Clients that took part and those that did not", parts or [Absent(absent)])


def gap(material: Material) -> Section:
    """The metric on training data and on test data, which out of distribution may be far apart."""
    sides: tuple[tuple[str, Reading], ...] = (
        ("training data", lambda run: run.series(f"train_{run.metric}")),
        ("test data", lambda run: run.series(run.score)),
    )
    measured = by_metric([one for one in material.placed if any(sides[0][1](run) for run in counted(one.group))])
    parts: list[Part] = []
    for metric, shown in measured.items():
        name, factor = unit(metric)
        about = f"{metric} on a sample of the training data and on the test data"
        what = Plot(f"gap-{slug(metric)}", about, "round", name, factor)
        parts += both(what, shown, sides, material.smooth, "Training and test data")
    absent = "No run measured the model on training data; train with --evaluate gap."
    return Section("gap", "Training and test data: the gap", parts or [Absent(absent)])


def both(
    what: Plot, shown: Sequence[Placed], sides: Sequence[tuple[str, Reading]], smooth: int, title: str
) -> list[Part]:
    """A panel for each group with both curves, and a table of their last rounds."""
    looking = (FIRST, SECOND)
    alone = [replace(one, panel=one.group.label) for one in shown]

    def lines(one: Placed) -> list[Line | None]:
        return [
            line(replace(one, label=name, look=look), [smoothed(read(run), smooth) for run in counted(one.group)])
            for (name, read), look in zip(sides, looking, strict=True)
        ]

    groups = [one.group for one in shown]
    table = Named(what.name, table_of(groups, sides, title, percent=what.factor == 100))
    if len(shown) > MOST_PANELS:
        return [table, dots(what, groups, sides)]
    return [table, *plot(what, alone, lines, smooth)]


def dots(what: Plot, groups: Sequence[Group], sides: Sequence[tuple[str, Reading]]) -> Picture:
    """Both means of the last rounds in a row for each group: more panels would say less."""
    drawn = [
        Row(
            group.label,
            [
                mark(name, look, [mean_of_last(run, read(run), LAST) for run in counted(group)], what.factor)
                for (name, read), look in zip(sides, (FIRST, SECOND), strict=True)
            ],
        )
        for group in groups
    ]
    return Picture(
        what.name,
        f"Dot plot of {what.about}, in {len(groups)} rows; the table has the numbers.",
        f"{what.about[:1].upper()}{what.about[1:]}: means of what was scored in the last {LAST} rounds, a stroke for "
        "each seed.",
        lambda width: rows.draw(drawn, what.down, width),
    )


def table_of(groups: Sequence[Group], sides: Sequence[tuple[str, Reading]], title: str, percent: bool) -> Table:
    """The means of both curves over their last rounds, and their difference."""
    lines: list[list[Cell]] = []
    for group in groups:
        first, second = ([mean_of_last(run, read(run), LAST) for run in counted(group)] for _, read in sides)
        gaps = [a - b for a, b in zip(first, second, strict=True) if a is not None and b is not None]
        lines.append([group.label, *(number(found, percent) for found in (first, second, gaps))])
    notes = [f"Means of what was scored in the last {LAST} rounds; mean and sample standard deviation over seeds."]
    notes += ["In percent."] if percent else []
    return Table(title, ["runs", *(name for name, _ in sides), "difference"], lines, notes)


def number(found: Sequence[float | None], percent: bool) -> Cell:
    """The mean over seeds as a cell."""
    told = summarise(found)
    return Missing() if told is None else Number(told.mean, told.sd, 2 if percent else 4, percent)
