"""A small table of run folders, read from what the runs wrote."""

from __future__ import annotations

import statistics
from pathlib import Path

from .experiments.measures import best, final, final_loss, mean_of, round_seconds, total_bytes
from .experiments.runs import pairing, read_run
from .experiments.tables import Table, lines

COLUMNS = (
    "run",
    "algorithm + mask",
    "rounds",
    "best acc",
    "last acc",
    "last loss",
    "kept",
    "agreement",
    "MB moved",
    "s a round",
)


def table(folders: list[Path]) -> str:
    """The runs, one a row, in aligned columns."""
    rows = [row(folder) for folder in folders]
    return "\n".join(lines(Table("", COLUMNS, rows, align="ll" + "r" * (len(COLUMNS) - 2))))


def row(folder: Path) -> tuple[str, ...]:
    """What the run in a folder was and how well it did, in the order of `COLUMNS`."""
    run = read_run(folder, whole=True)
    cfg = run.config
    unit = "" if run.metric == "accuracy" else f" {run.metric}"
    seconds = round_seconds(run).values()
    return (
        str(folder),
        pairing({}, cfg, taus=True),
        f"{len(run.records)}/{cfg['rounds']}",
        number(best(run), ".4f") + unit,
        number(final(run), ".4f") + unit,
        number(final_loss(run), ".4f"),
        number(mean_of(run, "kept"), ".3f"),
        number(mean_of(run, "agreement"), ".3f"),
        number(total_bytes(run) / 1e6, ".1f"),
        number(statistics.median(seconds) if seconds else None, ".2f"),
    )


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
