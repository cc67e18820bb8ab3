"""Results by group and by run, and the rounds to reach values of the test metric.

Numbers are means over seeds with the sample standard deviation; accuracies are in percent. Unfinished runs do not
count, unless no run of the group is finished.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ....runs.text import plural
from ...measures import Measure, best, measure
from ...runs import Group, Run, counted, pairing
from ...stats import summarise
from ...tables import Cell, Missing, Number, Table
from ..figures.rows import Row
from ..figures.style import Picture, numbered_style
from ..page import Fold, Named, Part
from .material import Material, by_suffix, dots, mark, unit

LEAST, MOST = 1e-4, 1e6  # values to reach that can be written without an exponent
SHARES = (0.0, 0.5, 0.9)  # of the runs that miss an automatic value: none, half, most
LETTERS = 34  # of a row's note


def results(material: Material) -> list[Part]:
    """Return the results of every group."""
    parts: list[Part] = []
    for suffix, placed in by_suffix(material.placed).items():
        groups = [one.group for one in placed]
        if any(run.series(run.score) for group in groups for run in group.runs):
            every = runs_table(groups)
            parts.append(Named(f"summary{suffix}", summary_table(groups)))
            parts.append(Fold(f"All {len(every.rows)} runs", [Named(f"runs{suffix}", every)]))
    return parts


def summary_table(groups: Sequence[Group], names: Sequence[str] = ("best", "last10", "test_loss")) -> Table:
    """Return the results per group: seeds, rounds and the named measures."""
    measures = [measure(name) for name in names]
    rows = []
    for group in groups:
        done, rounds = all(run.done for run in group.runs), group.config["rounds"]
        least = rounds if done else min(len(run.records) for run in group.runs)
        progress = Number(least, digits=0, note="" if done else f"of {rounds}")
        rows.append([group.label, whole(len(group.runs)), progress, *(cell(group, what) for what in measures)])
    columns = ["runs", "seeds", "rounds", *(column_title(what, groups) for what in measures)]
    return Table("Results by group", columns, rows, remarks(groups, measures))


def runs_table(groups: Sequence[Group]) -> Table:
    """Return the results per run, with the SHA-256 of its model."""
    measures = [measure(name) for name in ("best", "last10", "final", "test_loss")]
    axes = list(dict.fromkeys(axis for group in groups for axis in group.key if axis not in ("algorithm", "mask")))
    rows: list[list[Cell]] = []
    for group, run in [(one, run) for one in groups for run in one.runs]:
        values = [Missing() if (v := m.of(run)) is None else Number(v, **form(group, m)) for m in measures]
        mask = pairing(group.key, run.config, group.taus, algorithm=False)
        key = [group.key.get("algorithm", run.config["algorithm"]), mask, *(group.key.get(axis, "-") for axis in axes)]
        model = str(run.finished.get("model_sha256") or "")[:16] or Missing()
        rows.append([*key, whole(run.seed), whole(len(run.records)), *values, model])
    columns = ["algorithm", "mask", *axes, "seed", "rounds", *(column_title(m, groups) for m in measures), "model"]
    notes = ["Model: the first 16 digits of its SHA-256."]
    return Table("All runs", columns, rows, notes, "l" * (len(axes) + 2) + "r" * (len(measures) + 2) + "l")


# Rounds to reach a value


def reach(material: Material) -> list[Part]:
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
            parts += [Named(f"reach{suffix}", reach_table(groups, targets)), *reach_pictures(groups, targets, suffix)]
    return parts


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


def reach_table(groups: Sequence[Group], targets: Sequence[float]) -> Table:
    """Return the rounds per group to reach values of the test metric."""
    measures = [measure(f"rounds:{target:g}") for target in targets]
    rows = [[group.label, whole(len(group.runs)), *(cell(group, what) for what in measures)] for group in groups]
    columns = ["runs", "seeds", *(column_title(what, groups) for what in measures)]
    return Table("Rounds to reach a test metric", columns, rows, remarks(groups, measures))


def reach_pictures(groups: Sequence[Group], targets: Sequence[float], suffix: str) -> list[Picture]:
    """Return the rounds as dots, one row per group; nothing if no value was reached."""
    percent = unit(groups[0].metric)[1] == 100
    drawn = []
    for group in groups:
        marks, missed = [], []
        done = all(run.done for run in counted(group))
        for number, value in enumerate(targets):
            name = f"{100 * value:g}%" if percent else f"{value:g}"
            rounds = [measure(f"rounds:{value:g}").of(run) for run in counted(group)]
            marks.append(mark(f"to {name}", numbered_style(number, filled=number % 2 == 0), rounds))
            absent = rounds.count(None)
            if absent == len(rounds):
                missed.append(f"{name}: {'never' if done else 'not yet'}")
            elif absent:
                missed.append(f"{name}: {absent} of {len(rounds)} did not{'' if done else ' yet'}")
        note = "; ".join(missed)
        short = f"{len(missed)} of {len(targets)} values not reached by all"
        drawn.append(Row(group.label, marks, note if len(note) <= LETTERS else short))
    about = f"the rounds that {len(groups)} groups took to {', '.join(f'{value:g}' for value in targets)}"
    caption = "Rounds to reach a value: mean of the runs that reached it, with a tick for each. "
    caption += "The table has their number."
    reached = any(one.value is not None for row in drawn for one in row.marks)
    return [dots(f"reach{suffix}", about, caption, drawn, "round", whole=True)] if reached else []


# Cells, titles and notes of all tables


def values(group: Group, what: Measure) -> dict[int, float | None]:
    """Return seed -> value of a measure."""
    used = {run.seed for run in counted(group)}
    return {run.seed: what.of(run) if run.seed in used else None for run in group.runs}


def form(group: Group, what: Measure, single: bool = False) -> dict[str, Any]:
    """Return how a measure of a group is formatted."""
    if what.kind == "rounds":
        return {"digits": 0 if single else 1}
    share = what.kind == "metric" and group.metric == "accuracy"
    return {"digits": 2 if share else 4, "percent": share}


def cell(group: Group, what: Measure, better: bool = False, some: Mapping[int, float] | None = None) -> Cell:
    """Return the mean of a measure over the seeds, or over `some` (seed -> value), noting how many if not all."""
    found = summarise((values(group, what) if some is None else some).values())
    unfinished = sum(not run.done for run in group.runs)
    if found is None:
        return Missing(("not yet" if unfinished else "never") if what.kind == "rounds" else "-")
    rounds = what.kind == "rounds"  # which an unfinished run may still reach
    of = len(counted(group) if rounds else group.runs)
    notes = [f"{found.count} of {of}"] if found.count < of else []
    notes += [f"{unfinished} not done"] if unfinished and rounds else []
    return Number(found.mean, found.sd, better=better, note=", ".join(notes), **form(group, what, found.count == 1))


def whole(number: int) -> Number:
    return Number(number, digits=0)


def mean_cell(found: Sequence[float | None], digits: int, percent: bool = False) -> Cell:
    """Return the mean with its deviation as a cell."""
    summary = summarise(found)
    return Missing() if summary is None else Number(summary.mean, summary.sd, digits, percent)


def means_table(
    title: str,
    groups: Sequence[Group],
    digits: Mapping[str, int],
    read: Callable[[Run], Sequence[float | None]],
    notes: Sequence[str],
) -> Table:
    """Return means per group of what `read` returns for a run; `digits` has the columns and their decimals."""
    rows: list[list[Cell]] = []
    for group in groups:
        used, present = counted(group), len(group.runs)
        seeds = Number(len(used), digits=0, note=f"of {present}" if len(used) < present else "")
        columns = zip(*(read(run) for run in used), strict=True)
        means = [mean_cell(column, places) for column, places in zip(columns, digits.values(), strict=True)]
        rows.append([group.label, seeds, *means])
    return Table(title, ["runs", "seeds", *digits], rows, [*notes, *unfinished_note(groups)])


def column_title(what: Measure, groups: Sequence[Group]) -> str:
    """Return the name of a measure's column."""
    metrics = {group.metric for group in groups}
    metric = metrics.pop() if len(metrics) == 1 else "metric"
    head, number = what.name.rstrip("0123456789.:"), what.name.lstrip("abcdefghijklmnopqrstuvwxyz_:")
    target = f"{100 * float(number):g}%" if head == "rounds" and metric == "accuracy" else number
    texts = {
        "best": f"best {metric}",
        "final": f"final {metric}",
        "last": f"{metric}, last {number} rounds",
        "rounds": f"rounds to {target}",
        "test_loss": "final test loss",
        "train_loss": f"training loss, last {number} rounds",
        "participating": f"{metric} on participating clients",
        "others": f"{metric} on other clients",
    }
    return texts[head]


def remarks(groups: Sequence[Group], measures: Sequence[Measure]) -> list[str]:
    """Return notes on how to read the numbers."""
    notes = ["Mean and sample standard deviation over seeds."] if any(len(g.runs) > 1 for g in groups) else []
    if any(m.kind == "metric" for m in measures) and any(g.metric == "accuracy" for g in groups):
        notes.append("Accuracies in percent.")
    falling = {group.metric for group in groups if not group.first.rises}
    notes += [f"Less {metric} is better." for metric in sorted(falling)]
    if any(m.kind == "rounds" for m in measures):
        notes.append("Rounds to a value: mean of the runs that reached it; their number follows if it is not all.")
    notes += unfinished_note(groups)
    repeats = sum(len(group.repeats) for group in groups)
    return [*notes, f"Left out as repeats of a seed: {plural(repeats, 'run')}."] if repeats else notes


def unfinished_note(groups: Sequence[Group]) -> list[str]:
    number = sum(not run.done for group in groups for run in group.runs)
    text = f"Not done: {plural(number, 'run')}, left out of the means unless no run of the group is done."
    return [text] if number else []
