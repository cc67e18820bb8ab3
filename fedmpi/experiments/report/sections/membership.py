"""What an attacker could tell of who was trained on, from the attack.json of the runs (`fedmpi attack`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ....runs.folder import ATTACK
from ....runs.metrics import finite
from ....runs.schema import Attack, read
from ...runs import Group, look_up
from ...stats import summarise, wilson
from ...tables import Cell, Interval, Missing, Number, Table
from ..figures import rows
from ..figures.rows import Row
from ..figures.style import COLOURS, Look, Picture
from ..page import Absent, Named, Section
from .beside import number
from .material import Material, mark

ATTACKERS = {
    ("logistic",): "logistic regression on the answers",
    ("loss",): "threshold on the loss",
    ("control", "logistic"): "logistic regression, model before training",
    ("control", "loss"): "threshold, model before training",
}
"""by where their results stand in attack.json"""
SHOWN = [("logistic",), ("loss",)]  # in the picture
LOOKS = (Look(COLOURS[0], "solid", "o", filled=True), Look(COLOURS[1], "solid", "s", filled=False))
Attacks = dict[Path, dict[str, Any]]
"""attack.json by the run folder"""
COLUMNS = {"accuracy": "accuracy", "auc": "AUC", "advantage": "advantage"}
SHARED = (
    "The 95% interval (Wilson) is the attack's own uncertainty, by the samples that judge one run; the deviation over "
    "seeds says nothing of it. Runs that share data and the attack's seed are attacked with the same samples, so their "
    "errors are not independent: more seeds do not narrow the interval."
)


def section(material: Material) -> Section:
    """How well the attackers did, for each group."""
    found: Attacks = {run.folder: dict(read(run.folder / ATTACK, Attack) or {}) for run in material.runs}
    shown = [
        group
        for group in material.groups
        if any(value is not None for where in SHOWN for value in values(group, found, where, "accuracy"))
    ]
    title = "Membership inference"
    if not shown:
        absent = "No run was attacked; run 'fedmpi attack RUN', or train with --evaluate membership."
        return Section("membership", title, [Absent(absent)])
    return Section("membership", title, [Named("membership", table(shown, found)), picture(shown, found)])


def values(group: Group, found: Attacks, where: Sequence[str], key: str) -> list[float | None]:
    """What an attacker came to against each run of a group."""
    results = [look_up(found.get(run.folder, {}), (*where, key)) for run in group.runs]
    return [finite(float(value)) if isinstance(value, int | float) else None for value in results]


def table(groups: Sequence[Group], found: Attacks) -> Table:
    """A row for each attacker and group."""
    lines: list[list[Cell]] = []
    for group in groups:
        for where, name in ATTACKERS.items():
            cells = [number(values(group, found, where, key), percent=key == "accuracy") for key in COLUMNS]
            if any(isinstance(cell, Number) for cell in cells):
                lines.append([group.label, name, cells[0], interval(group, found, where), *cells[1:]])
    notes = ["Accuracy in percent; 50% and an AUC of 0.5 are chance. Mean and sample standard deviation over seeds."]
    if any(isinstance(line[3], Interval) for line in lines):
        notes.append(SHARED)
    if any("before training" in str(line[1]) for line in lines):
        notes.append("What is above chance for the model before training tells members from others without a model.")
    first, *others = COLUMNS.values()
    columns = ["runs", "attacker", first, "95% interval", *others]
    return Table("Attacks on membership", columns, lines, notes, align="llrrrr")


def interval(group: Group, found: Attacks, where: Sequence[str]) -> Cell:
    """What holds the true accuracy: Wilson's, of the mean over the seeds, as if one run had come to it."""
    told = summarise(values(group, found, where, "accuracy"))
    sizes = [look_up(found.get(run.folder, {}), ("judged",)) for run in group.runs]
    judged = [size for size in sizes if isinstance(size, int) and size > 0]
    if told is None or not judged or not 0 <= told.mean <= 1:
        return Missing()
    return Interval(*wilson(told.mean, min(judged)), digits=2, percent=True)


def picture(groups: Sequence[Group], found: Attacks) -> Picture:
    """The attackers' accuracies, and chance as a line."""
    drawn = [
        Row(
            group.label,
            [
                mark(ATTACKERS[where], look, values(group, found, where, "accuracy"), 100.0)
                for where, look in zip(SHOWN, LOOKS, strict=True)
            ],
        )
        for group in groups
    ]
    return Picture(
        "membership",
        "Dot plot of the attackers' accuracies by group, with a line at 50 percent; the table has the numbers.",
        "How often an attacker is right about membership: means over seeds, and a stroke for each. The dotted line is "
        "chance.",
        lambda width: rows.draw(drawn, "attacker's accuracy, %", width, line=50.0),
    )
