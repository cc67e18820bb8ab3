"""A small table of run folders, read from what the runs wrote.

Clients' bytes are what the algorithm and the mask have clients upload and download: per client and round, and of all
clients in all rounds. They do not depend on the number of ranks; `MB moved` is what the ranks sent to each other.
"""

from __future__ import annotations

import statistics
from pathlib import Path

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
    "s a round",
)


def table(folders: list[Path]) -> str:
    """The runs, one a row, in aligned columns."""
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
        found |= {name: value for name, value in scalars(measured) if name.count("/") <= 1}
    return found


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
        *(counted(bytes_per_client(run, way)) for way in ("up", "down")),
        *(counted(client_bytes(run, way)) for way in ("up", "down")),
        number(statistics.median(seconds) if seconds else None, ".2f"),
    )


def counted(count: float | None) -> str:
    """Bytes for people; a dash where a run's version did not count them."""
    return "-" if count is None else amount(count)


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def main(arguments: list[str]) -> int:
    """`fedmpi compare RUN [RUN ...]`: print a table of runs; return the exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: fedmpi compare RUN [RUN ...]\n\nA table of run folders: what they ran and how well they did.")
        return 0 if arguments else 2
    print(table([Path(folder) for folder in arguments]))
    return 0
