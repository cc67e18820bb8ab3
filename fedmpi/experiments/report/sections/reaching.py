"""How many rounds the runs took to values of the test metric."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...measures import best, measure
from ...runs import Group, Run, counted
from ..figures import rows
from ..figures.rows import Row
from ..figures.style import COLOURS, MARKERS, Look, Picture
from ..page import Absent, Named, Part, Section
from ..results import reach_table
from .material import Material, apart, mark, unit

LEAST, MOST = 1e-4, 1e6  # values that can be named without an exponent
SHARES = (0.0, 0.5, 0.9)  # of the runs that fall short of an automatic value: none, half, most
LETTERS = 34  # of what a row says of values that were missed: on a phone there is room for its name beside it


def section(material: Material) -> Section:
    """How many rounds the groups took to values of the test metric."""
    parts: list[Part] = []
    for ending, groups in apart(material):
        chosen = list(material.reach) or automatic([run for group in groups for run in counted(group)])
        most = 1.0 if groups[0].metric == "accuracy" else MOST  # more may be meant for another metric
        chosen = [value for value in chosen if LEAST <= value < MOST and value <= most]
        if chosen:
            named = "asked for" if material.reach else "chosen so that all, half and few of the runs reach them"
            parts.append(f"The values were {named}. Only rounds in which the test set was looked at count.")
            parts += [Named(f"reach{ending}", reach_table(groups, chosen)), *picture(groups, chosen, ending)]
    if not parts:
        parts.append(Absent("No run has scored a round yet, so none has reached anything."))
    return Section("reach", "Rounds to reach a value", parts)


def automatic(runs: Sequence[Run]) -> list[float]:
    """Round numbers that all, half and few of the runs reach."""
    found = sorted(value for run in runs if (value := best(run)) is not None and value > 0)
    if not found:
        return []
    rises = runs[0].rises
    step = 10.0 ** math.ceil(math.log10(max(found))) / 20  # 0.05 for an accuracy
    ordered = found if rises else found[::-1]
    edges = [ordered[int(share * (len(ordered) - 1))] / step for share in SHARES]
    steps = [math.floor(edge + 1e-9) if rises else math.ceil(edge - 1e-9) for edge in edges]  # 0.3 / 0.1 is below 3
    return [round(number * step, 9) for number in dict.fromkeys(steps) if number > 0]


def picture(groups: Sequence[Group], chosen: Sequence[float], ending: str) -> list[Picture]:
    """The rounds as dots, a row for each group; none where nothing was reached."""
    _, factor = unit(groups[0].metric)
    drawn = []
    for group in groups:
        marks, missed = [], []
        for number, value in enumerate(chosen):
            name = f"{value * factor:g}%" if factor == 100 else f"{value:g}"
            look = Look(COLOURS[number % len(COLOURS)], "solid", MARKERS[number % len(MARKERS)], number % 2 == 0)
            rounds_of = measure(f"rounds:{value:g}").of
            took = [rounds_of(run) for run in counted(group)]
            marks.append(mark(f"to {name}", look, took, 1.0))
            if None in took:
                yet = " yet" * (not all(run.done for run in counted(group)))
                some = f"{took.count(None)} of {len(took)} did not{yet}"
                none = "not yet" if yet else "never"
                missed.append(f"{name}: {none if took.count(None) == len(took) else some}")
        drawn.append(Row(group.label, marks, note(missed, len(chosen))))
    if all(one.value is None for row in drawn for one in row.marks):
        return []
    made = Picture(
        f"reach{ending}",
        f"Dot plot of the rounds that {len(groups)} groups took to {', '.join(f'{value:g}' for value in chosen)}; the "
        "table has the numbers.",
        "Rounds to reach a value: means of the runs that reached it, and a stroke for each of them. The table says how "
        "many these are.",
        lambda width: rows.draw(drawn, "round", width, whole=True),
    )
    return [made]


def note(missed: Sequence[str], values: int) -> str:
    """What is said of the values that a group missed; where they are many, only how many of all."""
    said = "; ".join(missed)
    return said if len(said) <= LETTERS else f"{len(missed)} of {values} values not reached by all"
