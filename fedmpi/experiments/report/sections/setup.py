"""What was run: the choice of a sweep, the configuration, the raw data, and the commands that repeat it."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ....runs.folder import CONFIG
from ....runs.text import plural
from ...runs import DEFAULTS, Group, Run, differences, word
from ...tables import Cell, Missing, Number, Table, show
from ..page import Absent, Code, Fold, Named, Part, Section
from .material import Material

MOST_NAMED = 5  # unfinished runs


def choice(cells: Sequence[dict[str, Any]], runs: Sequence[Run]) -> Section:
    """Return what a sweep tried, with the best highlighted; the rest of the report shows the best only."""
    rows: list[list[Cell]] = []
    marked = set()
    for cell in cells:
        masks = dict.fromkeys(run.mask for run in runs if cell["cell"].items() <= run.labels.items())
        others = [str(label) for axis, label in cell["cell"].items() if axis != "mask"]
        for tried in cell["tried"]:
            if tried["labels"] == cell["best"]:
                marked.add((len(rows), 1))
            group = f"{', '.join(others) or 'all'} + {' and '.join(masks)}"
            labels = ", ".join(f"{axis} {label}" for axis, label in tried["labels"].items())
            value = tried.get("value")
            rows.append([group, labels, Missing("not all done") if value is None else Number(float(value))])
    table = Table("Tried and chosen values", ["for", "tried", "value"], rows, align="llr")
    text = "The sweep searched for the best of some values. All other sections show the chosen runs only."
    return Section("choice", "Choice of the sweep", [text, Named("chosen", table, frozenset(marked))])


def configuration(material: Material) -> list[Part]:
    """Return the knobs that differ, unusual ones highlighted, and the shared ones, folded away."""
    differing, shared = config_tables(material.groups)
    parts: list[Part] = []
    if len(differing.columns) > 1:
        parts.append("Highlighted: values other than the most frequent one.")
        parts.append(Named("configuration", differing, unusual(differing)))
    else:
        parts.append("The runs differ in the seed only." if len(material.runs) > 1 else "There is one run.")
    changed = frozenset((at, 1) for at, row in enumerate(shared.rows) if row[1] != row[2])
    folded = Named("configuration-shared", shared, changed)
    parts.append(Fold(f"{len(shared.rows)} knobs that all runs share (highlighted: not the default)", [folded]))
    return parts


def config_tables(groups: Sequence[Group]) -> tuple[Table, Table]:
    """Return the knobs in which groups differ, one column each, and the knobs that all runs share."""
    different = [name for name in differences([group.first for group in groups]) if name != "seed"]
    rows = [[group.label, *(word(group.config.get(name)) for name in different)] for group in groups]
    differing = Table("Knobs that differ", ["runs", *different], rows, align="l" * (len(different) + 1))
    configs = [run.config for group in groups for run in group.runs]
    shared = {k: v for k, v in (configs[0] if configs else {}).items() if all(c.get(k) == v for c in configs)}
    common = [[name, word(value), word(DEFAULTS.get(name))] for name, value in shared.items()]
    return differing, Table("Knobs that all runs share", ["knob", "value", "default"], common, align="lll")


def unusual(table: Table) -> frozenset[tuple[int, int]]:
    """Return the cells that differ from the most frequent value of their column, the first one of equals."""
    marked = set()
    for column in range(1, len(table.columns)):
        values = [show(row[column]) for row in table.rows]
        usual = Counter(values).most_common(1)[0][0]
        marked |= {(at, column) for at, value in enumerate(values) if value != usual}
    return frozenset(marked)


def source(material: Material, command: str, files: Sequence[str]) -> Section:
    """Return where the numbers come from and how to repeat them."""
    folders = [str(run.folder) for run in material.runs]
    unfinished = [str(run.folder) for run in material.runs if not run.done]
    repeat = shlex.join(["fedmpi", "train", "--config", str(material.runs[0].folder / CONFIG), "--out", "NEW"])
    parts: list[Part] = [
        "The command of this report:",
        Code(command),
        "The command that repeats a run; equal versions and threads give an equal model:",
        Code(repeat),
    ]
    if unfinished:
        names = ", ".join(unfinished[:MOST_NAMED]) + (" and more" if len(unfinished) > MOST_NAMED else "")
        count = f"{len(unfinished)} of {plural(len(folders), 'run')}"
        parts.append(Absent(f"Not done: {count} ({names}), left out unless no run of the group is done."))
    parts += [
        "Run folders have the rounds in metrics.jsonl, the knobs in config.yaml, versions and machine in "
        "environment.json, and the samples per client in partition.json.",
        Fold("Run folders", [folders]),
        Fold(f"{len(files)} files of figures and tables next to this page", [list(files)]),
    ]
    return Section("source", "Raw data and commands", parts)
