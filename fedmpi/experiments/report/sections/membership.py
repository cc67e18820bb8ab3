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
from ..figures.rows import Row
from ..figures.style import numbered_style
from ..page import Named, Part
from .material import Material, dots, mark
from .results import mean_cell

ATTACKERS = {
    ("logistic",): "logistic regression on the answers",
    ("loss",): "threshold on the loss",
    ("control", "logistic"): "logistic regression, model before training",
    ("control", "loss"): "threshold, model before training",
}
"""by the keys of their results in attack.json"""
DRAWN = {("logistic",): numbered_style(0), ("loss",): numbered_style(1, filled=False)}
SHARED = (
    "The 95% interval (Wilson) is the attack's own uncertainty, by the samples that judge one run; the deviation over "
    "seeds does not include it. Runs that share data and the attack's seed are attacked with the same samples, so "
    "their errors are not independent: more seeds do not narrow the interval."
)
Attacks = dict[Path, dict[str, Any]]
"""attack.json by run folder"""


def membership(material: Material) -> list[Part]:
    """Return the results of the attackers per group, and their accuracies with chance as a line."""
    found: Attacks = {run.folder: dict(read(run.folder / ATTACK, Attack) or {}) for run in material.runs}
    shown, drawn = [], []
    for group in material.groups:
        accuracies = {where: values(group, found, where, "accuracy") for where in DRAWN}
        if any(value is not None for each in accuracies.values() for value in each):
            shown.append(group)
            marks = [mark(ATTACKERS[where], DRAWN[where], each, 100.0) for where, each in accuracies.items()]
            drawn.append(Row(group.label, marks))
    if not shown:
        return []
    about = "the attackers' accuracies by group, with a line at 50 percent"
    caption = "Accuracy of the attackers: means over seeds, with a tick per seed. The dotted line is chance."
    picture = dots("membership", about, caption, drawn, "attacker's accuracy, %", line=50.0)
    return [Named("membership", table(shown, found)), picture]


def values(group: Group, found: Attacks, where: Sequence[str], key: str) -> list[float | None]:
    """Return a result of an attacker per run."""
    results = [look_up(found.get(run.folder, {}), (*where, key)) for run in group.runs]
    return [finite(float(value)) if isinstance(value, int | float) else None for value in results]


def table(groups: Sequence[Group], found: Attacks) -> Table:
    """Return one row per group and attacker."""
    lines: list[list[Cell]] = []
    for group in groups:
        for where, name in ATTACKERS.items():
            accuracy = mean_cell(values(group, found, where, "accuracy"), 2, percent=True)
            others = [mean_cell(values(group, found, where, key), 4) for key in ("auc", "advantage")]
            if any(isinstance(cell, Number) for cell in (accuracy, *others)):
                lines.append([group.label, name, accuracy, interval(group, found, where), *others])
    notes = ["Accuracy in percent; 50% and an AUC of 0.5 are chance. Mean and sample standard deviation over seeds."]
    if any(isinstance(line[3], Interval) for line in lines):
        notes.append(SHARED)
    if any("before training" in str(line[1]) for line in lines):
        notes.append("Above chance for the model before training: members differ from others without any training.")
    columns = ["runs", "attacker", "accuracy", "95% interval", "AUC", "advantage"]
    return Table("Membership attacks", columns, lines, notes, align="llrrrr")


def interval(group: Group, found: Attacks, where: Sequence[str]) -> Cell:
    """Return Wilson's interval of the mean accuracy, with the samples of one run."""
    summary = summarise(values(group, found, where, "accuracy"))
    sizes = [look_up(found.get(run.folder, {}), ("judged",)) for run in group.runs]
    judged = [size for size in sizes if isinstance(size, int) and size > 0]
    if summary is None or not judged or not 0 <= summary.mean <= 1:
        return Missing()
    return Interval(*wilson(summary.mean, min(judged)), digits=2, percent=True)
