"""Rounds to reach values of the test metric."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...measures import best, measure
from ...runs import Group, Run, counted
from ..figures import rows
from ..figures.rows import Row
from ..figures.style import Picture, numbered_style
from ..page import Absent, Named, Part, Section
from ..results import reach_table
from .material import Material, by_suffix, mark, unit

LEAST, MOST = 1e-4, 1e6  # values that can be written without an exponent
SHARES = (0.0, 0.5, 0.9)  # of the runs that miss an automatic value: none, half, most
LETTERS = 34  # of a row's note


def section(material: Material) -> Section:
    """Return the rounds per group to reach values of the test metric."""
    parts: list[Part] = []
    for suffix, placed in by_suffix(material.placed).items():
        groups = [one.group for one in placed]
        targets = list(material.reach) or automatic([run for group in groups for run in counted(group)])
        most = 1.0 if groups[0].metric == "accuracy" else MOST  # larger ones are for another metric
        targets = [value for value in targets if LEAST <= value < MOST and value <= most]
        if targets:
            chosen = "given" if material.reach else "chosen so that all, half and few of the runs reach them"
            parts.append(f"The values were {chosen}. Only scored rounds count.")
            parts += [Named(f"reach{suffix}", reach_table(groups, targets)), *pictures(groups, targets, suffix)]
    return Section("reach", "Rounds to reach a value", parts or [Absent("No run has scored a round yet.")])


def automatic(runs: Sequence[Run]) -> list[float]:
    """Return round numbers that all, half and few of the runs reach."""
    found = sorted(value for run in runs if (value := best(run)) is not None and value > 0)
    if not found:
        return []
    rises = runs[0].rises
    step = 10.0 ** math.ceil(math.log10(max(found))) / 20  # 0.05 for an accuracy
    ordered = found if rises else found[::-1]
    edges = [ordered[int(share * (len(ordered) - 1))] / step for share in SHARES]
    steps = [math.floor(edge + 1e-9) if rises else math.ceil(edge - 1e-9) for edge in edges]  # 0.3 / 0.1 is below 3
    return [round(number * step, 9) for number in dict.fromkeys(steps) if number > 0]


def pictures(groups: Sequence[Group], targets: Sequence[float], suffix: str) -> list[Picture]:
    """Return the rounds as dots, one row per group; nothing if no value was reached."""
    percent = unit(groups[0].metric)[1] == 100
    drawn = []
    for group in groups:
        marks, missed = [], []
        done = all(run.done for run in counted(group))
        for number, value in enumerate(targets):
            name = f"{100 * value:g}%" if percent else f"{value:g}"
            rounds = [measure(f"rounds:{value:g}").of(run) for run in counted(group)]
            marks.append(mark(f"to {name}", numbered_style(number, filled=number % 2 == 0), rounds, 1.0))
            absent = rounds.count(None)
            if absent == len(rounds):
                missed.append(f"{name}: {'never' if done else 'not yet'}")
            elif absent:
                missed.append(f"{name}: {absent} of {len(rounds)} did not{'' if done else ' yet'}")
        note = "; ".join(missed)
        short = f"{len(missed)} of {len(targets)} values not reached by all"
        drawn.append(Row(group.label, marks, note if len(note) <= LETTERS else short))
    alt = f"Dot plot of the rounds that {len(groups)} groups took to {', '.join(f'{value:g}' for value in targets)}; "
    made = Picture(
        f"reach{suffix}",
        f"{alt}the table has the numbers.",
        "Rounds to reach a value: mean of the runs that reached it, with a tick for each. The table has their number.",
        lambda: rows.draw(drawn, "round", whole=True),
    )
    return [made] if any(one.value is not None for row in drawn for one in row.marks) else []
