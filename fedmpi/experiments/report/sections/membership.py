"""Membership inference, from the attack.json of the runs (`fedmpi attack`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....runs.folder import ATTACK
from ....runs.metrics import finite
from ....runs.schema import Attack, read
from ...runs import look_up
from ...stats import wilson
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
Attacks = Sequence[dict[str, Any]]
"""attack.json of each run of a group"""


def membership(material: Material) -> list[Part]:
    """Return the results of the attackers per group, and their accuracies with chance as a line."""
    lines: list[list[Cell]] = []
    drawn = []
    for group in material.groups:
        attacks: Attacks = [dict(read(run.folder / ATTACK, Attack) or {}) for run in group.runs]
        marks = [mark(ATTACKERS[at], style, results(attacks, at, "accuracy"), 100.0) for at, style in DRAWN.items()]
        if any(one.value is not None for one in marks):
            drawn.append(Row(group.label, marks))
            lines += [[group.label, *cells] for at in ATTACKERS if (cells := attacker_cells(attacks, at))]
    if not drawn:
        return []
    notes = ["Accuracy in percent; 50% and an AUC of 0.5 are chance. Mean and sample standard deviation over seeds."]
    if any(isinstance(line[3], Interval) for line in lines):
        notes.append(SHARED)
    if any("before training" in str(line[1]) for line in lines):
        notes.append("Above chance for the model before training: members differ from others without any training.")
    columns = ["runs", "attacker", "accuracy", "95% interval", "AUC", "advantage"]
    about = "the attackers' accuracies by group, with a line at 50 percent"
    caption = "Accuracy of the attackers: means over seeds, with a tick per seed. The dotted line is chance."
    return [
        Named("membership", Table("Membership attacks", columns, lines, notes, align="llrrrr")),
        dots("membership", about, caption, drawn, "attacker's accuracy, %", line=50.0),
    ]


def results(attacks: Attacks, attacker: Sequence[str], key: str) -> list[float | None]:
    """Return a result of an attacker per run."""
    found = [look_up(attack, (*attacker, key)) for attack in attacks]
    return [finite(float(value)) if isinstance(value, int | float) else None for value in found]


def attacker_cells(attacks: Attacks, attacker: tuple[str, ...]) -> list[Cell]:
    """Return the name of an attacker and its means, with Wilson's interval by the samples of one run; [] for none."""
    accuracy, *others = (results(attacks, attacker, key) for key in ("accuracy", "auc", "advantage"))
    means = [mean_cell(accuracy, 2, percent=True), *(mean_cell(found, 4) for found in others)]
    if not any(isinstance(cell, Number) for cell in means):
        return []
    judged = [size for attack in attacks if isinstance(size := attack.get("judged"), int) and size > 0]
    mean = means[0]
    if not isinstance(mean, Number) or not judged or not 0 <= mean.value <= 1:
        return [ATTACKERS[attacker], mean, Missing(), *means[1:]]
    return [ATTACKERS[attacker], mean, Interval(*wilson(mean.value, min(judged)), digits=2, percent=True), *means[1:]]
