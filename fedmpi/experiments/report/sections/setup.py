"""What was run: the choice of a sweep, the configuration, where the raw data lie, and how to repeat it."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ....runs.folder import CONFIG
from ...runs import Run
from ...tables import Cell, Missing, Number, Table, show
from ..page import Absent, Code, Fold, Items, Named, Part, Section
from ..results import config_tables
from .material import Material

NAMED = 5  # unfinished runs that are named


def choice(cells: Sequence[dict[str, Any]], runs: Sequence[Run]) -> Section:
    """What a sweep has chosen from, with the best highlighted: the rest of the report shows that alone."""
    rows: list[list[Cell]] = []
    marked = set()
    for cell in cells:
        masks = dict.fromkeys(run.mask for run in runs if cell["cell"].items() <= run.labels.items())
        others = [str(label) for axis, label in cell["cell"].items() if axis != "mask"]
        for tried in cell["tried"]:
            value = tried.get("value")
            if tried["labels"] == cell.get("best"):
                marked.add((len(rows), 1))
            rows.append(
                [
                    f"{', '.join(others) or 'all'} + {' and '.join(masks)}",
                    ", ".join(f"{axis} {label}" for axis, label in tried["labels"].items()),
                    Missing("not all at their end") if value is None else Number(float(value)),
                ]
            )
    table = Table("What was tried, and what was chosen", ["for", "tried", "value"], rows, align="llr")
    text = "The sweep searched for the best of some values. All that follows shows the chosen ones alone."
    return Section("choice", "What was chosen", [text, Named("chosen", table, frozenset(marked))])


def configuration(material: Material) -> Section:
    """The knobs that differ, with what is unusual highlighted, and those that all share, folded away."""
    differing, shared = config_tables(material.groups)
    parts: list[Part] = []
    if len(differing.columns) > 1:
        parts.append("Highlighted: what differs from the value that most of the groups have.")
        parts.append(Named("configuration", differing, unusual(differing)))
    else:
        parts.append("The runs differ in nothing but the seed." if len(material.runs) > 1 else "There is one run.")
    changed = frozenset((at, 1) for at, row in enumerate(shared.rows) if row[1] != row[2])
    folded = Named("configuration-shared", shared, changed)
    parts.append(Fold(f"{len(shared.rows)} knobs that all runs share (highlighted: not the default)", [folded]))
    return Section("configuration", "Configuration", parts)


def unusual(table: Table) -> frozenset[tuple[int, int]]:
    """The cells that differ from the most frequent value of their column; where none is more frequent than the others,
    from the first."""
    marked = set()
    for column in range(1, len(table.columns)):
        values = [show(row[column]) for row in table.rows]
        usual = Counter(values).most_common(1)[0][0]
        marked |= {(at, column) for at, value in enumerate(values) if value != usual}
    return frozenset(marked)


def source(material: Material, command: str, files: Sequence[str]) -> Section:
    """Where the numbers come from, and how to make them again."""
    folders = [str(run.folder) for run in material.runs]
    unfinished = [str(run.folder) for run in material.runs if not run.done]
    repeat = shlex.join(["fedmpi", "train", "--config", str(material.runs[0].folder / CONFIG), "--out", "NEW"])
    parts: list[Part] = ["This report was made by"]
    parts += [
        Code(command),
        "A run is repeated from its own configuration; equal versions and threads give an equal model:",
    ]
    parts.append(Code(repeat))
    if unfinished:
        count, more = len(unfinished), " and more" * (len(unfinished) > NAMED)
        words = "run is not done and is" if count == 1 else "runs are not done and are"
        parts.append(
            Absent(
                f"{count} of {len(folders)} {words} left out of means and curves, unless no run of the group is done: "
                f"{', '.join(unfinished[:NAMED])}{more}."
            )
        )
    parts.append(
        "Each run folder has its rounds in metrics.jsonl, its knobs in config.yaml, versions and machine in "
        "environment.json, and who had what in partition.json."
    )
    parts.append(Fold(f"{len(folders)} run folder{'s' * (len(folders) > 1)}", [Items(folders)]))
    parts.append(Fold(f"{len(files)} files of pictures and tables beside this page", [Items(files)]))
    return Section("source", "Raw data, and how to repeat this", parts)
