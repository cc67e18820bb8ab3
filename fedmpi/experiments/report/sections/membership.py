"""Membership inference, from the attack.json of the runs (`fedmpi attack`)."""

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
from ..figures.style import Picture, numbered_style
from ..page import Absent, Named, Part, Section
from ..results import mean_cell
from .material import Material, mark

ATTACKERS = {
    ("logistic",): "logistic regression on the answers",
    ("loss",): "threshold on the loss",
    ("control", "logistic"): "logistic regression, model before training",
    ("control", "loss"): "threshold, model before training",
}
"""by the keys of their results in attack.json"""
DRAWN = {("logistic",): numbered_style(0), ("loss",): numbered_style(1, filled=False)}
COLUMNS = {"accuracy": "accuracy", "auc": "AUC", "advantage": "advantage"}
SHARED = (
    "The 95% interval (Wilson) is the attack's own uncertainty, by the samples that judge one run; the deviation over "
    "seeds does not include it. Runs that share data and the attack's seed are attacked with the same samples, so "
    "their errors are not independent: more seeds do not narrow the interval."
)
Attacks = dict[Path, dict[str, Any]]
"""attack.json by run folder"""


def section(material: Material) -> Section:
    """Return the results of the attackers per group."""
    found: Attacks = {run.folder: dict(read(run.folder / ATTACK, Attack) or {}) for run in material.runs}
    shown = [
        group
        for group in material.groups
        if any(value is not None for where in DRAWN for value in values(group, found, where, "accuracy"))
    ]
    absent = Absent("No run was attacked; run 'fedmpi attack RUN', or train with --evaluate membership.")
    parts: list[Part] = [Named("membership", table(shown, found)), picture(shown, found)] if shown else [absent]
    return Section("membership", "Membership inference", parts)


def values(group: Group, found: Attacks, where: Sequence[str], key: str) -> list[float | None]:
    """Return a result of an attacker per run."""
    results = [look_up(found.get(run.folder, {}), (*where, key)) for run in group.runs]
    return [finite(float(value)) if isinstance(value, int | float) else None for value in results]


def table(groups: Sequence[Group], found: Attacks) -> Table:
    """Return one row per group and attacker."""
    lines: list[list[Cell]] = []
    for group in groups:
        for where, name in ATTACKERS.items():
            first, *others = (
                mean_cell(values(group, found, where, key), 2 if key == "accuracy" else 4, percent=key == "accuracy")
                for key in COLUMNS
            )
            if any(isinstance(cell, Number) for cell in (first, *others)):
                lines.append([group.label, name, first, interval(group, found, where), *others])
    notes = ["Accuracy in percent; 50% and an AUC of 0.5 are chance. Mean and sample standard deviation over seeds."]
    if any(isinstance(line[3], Interval) for line in lines):
        notes.append(SHARED)
    if any("before training" in str(line[1]) for line in lines):
        notes.append("Above chance for the model before training: members differ from others without any training.")
    title, *others_titles = COLUMNS.values()
    columns = ["runs", "attacker", title, "95% interval", *others_titles]
    return Table("Membership attacks", columns, lines, notes, align="llrrrr")


def interval(group: Group, found: Attacks, where: Sequence[str]) -> Cell:
    """Return Wilson's interval of the mean accuracy, with the samples of one run."""
    summary = summarise(values(group, found, where, "accuracy"))
    sizes = [look_up(found.get(run.folder, {}), ("judged",)) for run in group.runs]
    judged = [size for size in sizes if isinstance(size, int) and size > 0]
    if summary is None or not judged or not 0 <= summary.mean <= 1:
        return Missing()
    return Interval(*wilson(summary.mean, min(judged)), digits=2, percent=True)


def picture(groups: Sequence[Group], found: Attacks) -> Picture:
    """Return the accuracies of the attackers, and chance as a line."""

    def row(group: Group) -> Row:
        accuracies = {where: values(group, found, where, "accuracy") for where in DRAWN}
        return Row(group.label, [mark(ATTACKERS[w], DRAWN[w], each, 100.0) for w, each in accuracies.items()])

    drawn = [row(group) for group in groups]
    return Picture(
        "membership",
        "Dot plot of the attackers' accuracies by group, with a line at 50 percent; the table has the numbers.",
        "Accuracy of the attackers: means over seeds, with a tick per seed. The dotted line is chance.",
        lambda: rows.draw(drawn, "attacker's accuracy, %", line=50.0),
    )
