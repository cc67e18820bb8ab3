"""`fedmpi logs RUN`: what a run has printed, wherever that went.

    logs/RUN.log in the sweep's folder       a run of a sweep on this machine
    slurm/JOB_RANK_log.out and .err          a submitted run, in its folder or that of its sweep
    metrics.jsonl                            any other run: a line per round, like those that it printed
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..cluster.status import SILENT, age, configured_rounds, job_of, log_folder, look
from ..cluster.submit import Nothing
from ..errors import UserError, complain
from ..experiments.runs import SWEEP, sweep_runs
from ..experiments.sweep.overview import AT_REST
from ..experiments.sweep.plan import LOGS
from ..plugins.knobs import check_bounds, knob
from ..runs.folder import METRICS
from ..runs.options import filled, make_parser

ABOUT = "Print what a run has printed: the logs of a sweep's run or of a submitted one, else a line per round."
LOOK, POLL = 2.0, 0.3  # seconds between two looks at the state of the run, and at its files


@dataclass(frozen=True)
class Asked:
    """What `logs` is asked for."""

    run: str = ""
    follow: bool = False
    lines: int | None = knob(None, low=0)


@dataclass
class Source:
    """A file that grows, read line by line."""

    path: Path
    shown: Callable[[str], str]
    at: int = 0
    """bytes that were read"""

    def read(self, all_of_it: bool = False) -> list[str]:
        """Return the new lines; the last one only when it is whole, or if `all_of_it` is wanted."""
        try:
            with open(self.path, "rb") as file:
                self.at = min(self.at, file.seek(0, 2))  # a run that is resumed writes its rounds anew
                file.seek(self.at)
                new = file.read()
        except OSError:
            return []
        new = new if all_of_it else new[: new.rfind(b"\n") + 1]
        self.at += len(new)
        return [self.shown(line) for line in new.decode(errors="replace").splitlines()]


class Printer:
    """Prints the lines of several files, each under its name, as `tail` does it."""

    def __init__(self, run: Path, most: int | None) -> None:
        self.run, self.most = run, most
        self.sources: dict[Path, Source] = {}
        self.last: Path | None = None
        self.several = False

    def show(self, all_of_it: bool = False) -> int:
        """Print what is new, of a file that is new its last lines only; returns how many lines that was."""
        paths, count = files_of(self.run), 0
        self.several = self.several or len(paths) > 1
        for path in paths:
            shown = round_line(configured_rounds(self.run)) if path.name == METRICS else str
            new = path not in self.sources
            source = self.sources.setdefault(path, Source(path, shown))
            lines = source.read(all_of_it)
            lines = lines if not new or self.most is None else lines[len(lines) - min(self.most, len(lines)) :]
            if lines and self.several and path != self.last:
                print(f"==> {path} <==")
                self.last = path
            for text in lines:
                print(text)
            count += len(lines)
        print(end="", flush=True)
        return count


def main(arguments: list[str]) -> int:
    """`fedmpi logs RUN [-f] [-n LINES]`: what a run has printed."""
    parser = make_parser("fedmpi logs", ABOUT, Nothing)
    parser.add_argument("run", nargs="?", default="", metavar="RUN", help="run folder, also one of a sweep")
    parser.add_argument("-f", "--follow", action="store_true", help="print what comes until the run has ended")
    parser.add_argument("-n", "--lines", type=int, metavar="LINES", help="only the last lines of each log; none: all")
    asked = filled(parser, Asked, lambda: parser.parse_args(arguments))
    check_bounds(asked, prefix="")
    if not asked.run:
        raise UserError("logs was given no run folder; name one: fedmpi logs RUN")
    run = Path(asked.run)
    if (run / SWEEP).exists():
        begun = [name for name in sweep_runs(run) if (run / name).is_dir()]
        some = f"name one of its runs, such as {run / begun[0]}" if begun else "none of its runs has begun"
        raise UserError(f"'{run}' is a sweep; {some}")
    seen = look(run)  # refuses what is no run
    printer = Printer(run, asked.lines)
    count = printer.show(all_of_it=not asked.follow)
    if asked.follow:
        follow(run, printer)
    elif not count and asked.lines != 0:
        complain(f"{run} has printed nothing yet; it is {in_short(seen['state'], seen['why'])}")
    return 0


def follow(run: Path, printer: Printer) -> None:
    """Print what comes until the run has ended."""
    looked, over = -LOOK, False
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
    """The files with what a run has printed: those of its sweep or its job, whichever is newer, else its rounds."""
    job, sweep = job_of(run), run.absolute().parent / LOGS / f"{run.absolute().name}.log"
    submitted = [] if job is None else sorted(log_folder(run).glob(f"{job.id}_*_log.*"))
    submitted.sort(key=lambda path: path.suffix != ".out")
    found = [path for path in submitted if path.suffix in (".out", ".err") and path.stat().st_size]
    if sweep.exists() and age(sweep) >= max(map(age, found), default=0.0):
        return [sweep]
    return found or [run / METRICS]


def round_line(rounds: int | None) -> Callable[[str], str]:
    """Return what makes a line, as a run prints it, of one of metrics.jsonl; what cannot be read stays as it is."""
    from ..runs.log import line, report_of

    def shown(text: str) -> str:
        try:
            record = json.loads(text)
            lost = {name: math.nan for name in ("train_loss", "test_loss") if record[name] is None}
            return line(report_of(record | lost), rounds or record["round"])
        except (ValueError, TypeError, KeyError, StopIteration):
            return text

    return shown
