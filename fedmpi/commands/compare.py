"""`fedmpi compare`: print a table of runs.

Client bytes are what clients upload and download under the algorithm and the mask: per client and round, and over all
clients and rounds. They do not depend on the number of ranks; `MB moved` is what the ranks sent to each other.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError
from ..experiments.measures import (
    best,
    bytes_per_client,
    client_bytes,
    final,
    final_loss,
    mean_of,
    round_seconds,
    total_bytes,
)
from ..experiments.runs import Run, pairing, read_run
from ..experiments.tables import Table, lines
from ..runs.metrics import REQUIRED
from ..runs.options import positional, read_options
from ..runs.sinks.base import scalars
from ..runs.text import amount

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
    "client up",
    "client down",
    "all up",
    "all down",
    "s/round",
)
ABOUT = "Print a table of runs: algorithm, accuracy, loss, mask statistics, traffic and time."


@dataclass(frozen=True)
class CompareOptions:
    """Options of `fedmpi compare`."""

    runs: list[str] = positional("RUN", many=True)
    """Run folder."""


def table(folders: list[Path]) -> str:
    """Return the table, one row per run."""
    more = [further(read_run(folder, whole=True)) for folder in folders]
    names = list(dict.fromkeys(name for found in more for name in found))
    rows = [
        (*row(folder), *(number(found.get(name), ".4f") for name in names))
        for folder, found in zip(folders, more, strict=True)
    ]
    columns = (*COLUMNS, *names)
    return "\n".join(lines(Table("", columns, rows, align="ll" + "r" * (len(columns) - 2))))


def further(run: Run) -> dict[str, float]:
    """Return the last value of every further number that was measured (--evaluate), but for those of single layers."""
    usual = {*REQUIRED, "round", "dropped", "client_bytes_up", "client_bytes_down", "test_loss", run.score}
    found: dict[str, float] = {}
    for record in run.records:
        measured = {name: value for name, value in record.items() if name not in usual}
        found |= {name: value for name, value in scalars(measured).items() if name.count("/") <= 1}
    return found


def row(folder: Path) -> tuple[str, ...]:
    """Return the cells of a run, in the order of `COLUMNS`."""
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
        *(counted(bytes_per_client(run, way)) for way in ("up", "down")),
        *(counted(client_bytes(run, way)) for way in ("up", "down")),
        number(statistics.median(seconds) if seconds else None, ".2f"),
    )


def counted(count: float | None) -> str:
    """Return a number of bytes as text; a dash if the version that ran did not count them."""
    return "-" if count is None else amount(count)


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def main(arguments: list[str]) -> int:
    """`fedmpi compare RUN [RUN ...]`: print a table of runs; return the exit code."""
    options = read_options(CompareOptions, arguments, "compare", ABOUT, usage="RUN [RUN ...]")
    if not options.runs:
        raise UserError("compare needs a run folder: fedmpi compare RUN [RUN ...]")
    print(table([Path(folder) for folder in options.runs]))
    return 0
