"""`fedmpi logs`: print a run's log, wherever it was written.

logs/RUN.log in the sweep's folder       a run of a sweep on this machine
slurm/JOB_RANK_log.out and .err          a submitted run, in its folder or that of its sweep
metrics.jsonl                            any other run: one line per round, as it was printed
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..cluster.status import SILENT, age, configured_rounds, job_of, log_folder, look
from ..errors import UserError, complain
from ..experiments.runs import SWEEP, sweep_runs
from ..experiments.sweep.overview import AT_REST
from ..experiments.sweep.plan import LOGS
from ..plugins.knobs import knob
from ..runs.folder import METRICS
from ..runs.options import flag, positional, read_options

ABOUT = "Print the log of a run. Runs that were started in a terminal have no log file: print one line per round."
LOOK = 2.0  # seconds between checks of the run's status
POLL = 0.3  # seconds between reads of its files


@dataclass(frozen=True)
class LogsOptions:
    """Options of `fedmpi logs`."""

    run: str = positional("RUN")
    """Run folder; for a sweep, the folder of one of its runs."""
    follow: bool = flag("-f")
    """Print new lines until the run ends."""
    lines: int | None = knob(None, low=0, short="-n")
    """Print only the last lines of each log. Default: all."""


class Printer:
    """Prints the lines of several files that grow under their names, like `tail`."""

    def __init__(self, run: Path, most: int | None) -> None:
        self.run, self.most = run, most
        self.at: dict[Path, int] = {}
        """file -> bytes that were read"""
        self.last: Path | None = None

    def show(self, all_of_it: bool = False) -> int:
        """Print new lines, and of a new file its last lines; return how many."""
        count = 0
        paths = files_of(self.run)
        for path in paths:
            lines = self.read(path, all_of_it)
            if lines and len(self.at.keys() | set(paths)) > 1 and path != self.last:
                print(f"==> {path} <==")
                self.last = path
            shown = round_line(configured_rounds(self.run)) if path.name == METRICS else str
            for text in lines:
                print(shown(text))
            count += len(lines)
        print(end="", flush=True)
        return count

    def read(self, path: Path, all_of_it: bool) -> list[str]:
        """Return the new lines of a file; an unfinished last line only if `all_of_it`."""
        at, most = self.at.get(path, 0), None if path in self.at else self.most
        try:
            with open(path, "rb") as file:
                at = min(at, file.seek(0, 2))  # a run that is resumed writes its rounds anew
                file.seek(at)
                new = file.read()
        except OSError:
            return []
        new = new if all_of_it else new[: new.rfind(b"\n") + 1]
        self.at[path] = at + len(new)
        lines = new.decode(errors="replace").splitlines()
        return lines if most is None else lines[len(lines) - min(most, len(lines)) :]


def main(arguments: list[str]) -> int:
    """`fedmpi logs RUN [-f] [-n LINES]`: print a run's log; return the exit code."""
    options = read_options(LogsOptions, arguments, "logs", ABOUT, usage="RUN [-f] [-n LINES]")
    if not options.run:
        raise UserError("logs needs a run folder: fedmpi logs RUN")
    run = Path(options.run)
    if (run / SWEEP).exists():
        begun = [name for name in sweep_runs(run) if (run / name).is_dir()]
        some = f"name one of its runs, such as {run / begun[0]}" if begun else "none of its runs has started"
        raise UserError(f"'{run}' is a sweep; {some}")
    seen = look(run)  # raises if it is not a run
    printer = Printer(run, options.lines)
    count = printer.show(all_of_it=not options.follow)
    if options.follow:
        follow(run, printer)
    elif not count and options.lines != 0:
        complain(f"{run} has printed nothing yet; it is {in_short(seen['state'], seen['why'])}")
    return 0


def follow(run: Path, printer: Printer) -> None:
    """Print new lines until the run ends."""
    looked = -LOOK
    over = False
    while True:
        if time.monotonic() - looked >= LOOK:
            seen, looked = look(run), time.monotonic()
            over = seen["state"] in AT_REST and seen["why"] != SILENT
        printer.show(all_of_it=over)
        if over:
            complain(f"{run} is {in_short(seen['state'], seen['why'])}")
            return
        time.sleep(POLL)


def in_short(state: str, why: str) -> str:
    return f"{state} ({why})" if why else state


def files_of(run: Path) -> list[Path]:
    """Return the log files of a run: those of its sweep or its job, whichever is newer, else its metrics."""
    job, sweep = job_of(run), run.absolute().parent / LOGS / f"{run.absolute().name}.log"
    submitted = [] if job is None else sorted(log_folder(run).glob(f"{job.id}_*_log.*"))
    submitted.sort(key=lambda path: path.suffix != ".out")
    found = [path for path in submitted if path.suffix in (".out", ".err") and path.stat().st_size]
    if sweep.exists() and age(sweep) >= max(map(age, found), default=0.0):
        return [sweep]
    return found or [run / METRICS]


def round_line(rounds: int | None) -> Callable[[str], str]:
    """Return a function from a line of metrics.jsonl to the line that the run printed; it keeps unreadable lines."""
    from ..runs.log import line, report_of

    def shown(text: str) -> str:
        try:
            record = json.loads(text)
            lost = {name: math.nan for name in ("train_loss", "test_loss") if record[name] is None}
            return line(report_of(record | lost), rounds or record["round"])
        except (ValueError, TypeError, KeyError, StopIteration):
            return text

    return shown
