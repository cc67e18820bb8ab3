"""`fedmpi compare`: print a table of runs.

Client bytes are what clients upload and download under the algorithm and the mask: per client and round, and over all
clients and rounds. They do not depend on the number of ranks; `MB moved` is what the ranks sent to each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ..errors import UserError
from ..experiments import measures
from ..experiments.runs import Run, pairing, read_run
from ..experiments.tables import one_line
from ..runs.metrics import REQUIRED
from ..runs.options import positional, read_options
from ..runs.sinks.base import scalars
from ..runs.text import align, amount

ABOUT = "Print a table of runs: algorithm, accuracy, loss, mask statistics, traffic and time."


@dataclass(frozen=True)
class CompareOptions:
    """Options of `fedmpi compare`."""

    runs: list[str] = positional("RUN", many=True)
    """Run folder."""


def table(folders: list[Path]) -> str:
    """Return the table, one row per run."""
    runs = [read_run(folder, whole=True) for folder in folders]
    more = [further(run) for run in runs]
    names = list(dict.fromkeys(name for found in more for name in found))
    rows = [
        [*(cell(run) for cell in COLUMNS.values()), *(text(found.get(name)) for name in names)]
        for run, found in zip(runs, more, strict=True)
    ]
    cells = [[one_line(cell) for cell in row] for row in ([*COLUMNS, *names], *rows)]
    return "\n".join(align(cells, "llr", rule=True))


def further(run: Run) -> dict[str, float]:
    """Return the last value of every further number that was measured (--evaluate), but for those of single layers."""
    traffic = {"bytes_between_nodes", "client_bytes_up", "client_bytes_down"}
    usual = {*REQUIRED, *traffic, "round", "dropped", "test_loss", run.score}
    found: dict[str, float] = {}
    for record in run.records:
        measured = {name: value for name, value in record.items() if name not in usual}
        found |= {name: value for name, value in scalars(measured).items() if name.count("/") <= 1}
    return found


def text(value: float | None, form: Callable[[float], str] = "{:.4f}".format) -> str:
    return "-" if value is None else form(value)


def score(run: Run, value: float | None) -> str:
    """Return a value of the test metric, with the metric's name unless it is accuracy."""
    return text(value) + ("" if run.metric == "accuracy" else f" {run.metric}")


def typical_seconds(run: Run) -> float | None:
    """Return the median seconds per round."""
    seconds = measures.round_seconds(run).values()
    return median(seconds) if seconds else None


COLUMNS: dict[str, Callable[[Run], str]] = {
    "run": lambda run: str(run.folder),
    "algorithm + mask": lambda run: pairing({}, run.config, taus=True),
    "rounds": lambda run: f"{len(run.records)}/{run.config['rounds']}",
    "best acc": lambda run: score(run, measures.best(run)),
    "last acc": lambda run: score(run, measures.final(run)),
    "last loss": lambda run: text(measures.final_loss(run)),
    "kept": lambda run: text(measures.mean_of(run, "kept"), "{:.3f}".format),
    "agreement": lambda run: text(measures.mean_of(run, "agreement"), "{:.3f}".format),
    "MB moved": lambda run: text(measures.total_bytes(run) / 1e6, "{:.1f}".format),
    "client up": lambda run: text(measures.bytes_per_client(run, "up"), amount),
    "client down": lambda run: text(measures.bytes_per_client(run, "down"), amount),
    "all up": lambda run: text(measures.client_bytes(run, "up"), amount),
    "all down": lambda run: text(measures.client_bytes(run, "down"), amount),
    "s/round": lambda run: text(typical_seconds(run), "{:.2f}".format),
}
"""title and cell of each column, in order"""


def main(arguments: list[str]) -> int:
    """`fedmpi compare RUN [RUN ...]`: print a table of runs; return the exit code."""
    options = read_options(CompareOptions, arguments, "compare", ABOUT, usage="RUN [RUN ...]")
    if not options.runs:
        raise UserError("compare needs a run folder: fedmpi compare RUN [RUN ...]")
    print(table([Path(folder) for folder in options.runs]))
    return 0
