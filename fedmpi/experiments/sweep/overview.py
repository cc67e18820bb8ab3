"""The status of a whole sweep: the states of its runs, their progress, and the expected time left.

On a terminal the last lines are redrawn; elsewhere one line is printed when a run starts or ends.
"""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, TextIO

from ...cluster.status import JOB, progress, states_of, tail_of
from ...errors import FileError, silence
from ...runs.folder import CONFIG, read_json
from ...runs.schema import read_yaml
from ...runs.text import align, duration
from ..runs import flat, pairing
from .pick import GIVEN_UP, was_given_up
from .plan import CONFIGS, LOGS

AT_REST = ("finished", "given up", "stopped", "cancelled", "failed", "unknown")
STATES = (*AT_REST, "running", "queued", "requeued", "waiting")
BAR = 20


@dataclass(frozen=True)
class Row:
    """The status of one run."""

    name: str
    state: str
    why: str = ""
    round: int = 0
    rounds: int | None = None
    metric: str | None = None
    value: float | None = None
    minutes_left: float | None = None
    minutes: float | None = None  # its total duration, as expected so far if it is unfinished
    label: str = ""  # its algorithm and mask
    threads: int | None = None  # per rank


def rows_of(runs: Sequence[Path]) -> list[Row]:
    """Return the status of runs. One of a sweep without a run folder has failed if its log has an error message: it
    could not make one."""
    begun = [run for run in runs if (run / CONFIG).exists() or (run / JOB).exists()]
    states = dict(zip(begun, states_of(begun), strict=True))
    for run in runs:
        if run not in states:
            why = last_line(run.parent / LOGS / f"{run.name}.log")
            states[run] = ("failed", why) if why else ("waiting", "")
    return [row_of(run, *states[run]) for run in runs]


def row_of(run: Path, state: str, why: str) -> Row:
    """Return the status of one run whose state is known."""
    if was_given_up(run):
        state, why = "given up", str(read_json(run / GIVEN_UP).get("why", ""))
    config = config_of(run)
    label = pairing({}, config, taus=True) if config else ""
    row = Row(run.name, state, why, label=label, threads=config.get("threads"))
    try:
        seen = progress(run, state)
    except FileError as error:
        return replace(row, state="failed", why=str(error))
    rate, rounds = seen["rounds_a_minute"], seen["rounds"]
    known = {name: seen[name] for name in ("round", "rounds", "metric", "value", "minutes_left")}
    return replace(row, **known, minutes=rounds / rate if rate and rounds else None)


def config_of(run: Path) -> dict[str, Any]:
    """Return the knobs of a run, or those that its sweep starts it with; {} if neither can be read."""
    for file in (run / CONFIG, run.parent / CONFIGS / f"{run.name}.yaml"):
        with suppress(FileError, ValueError):
            return flat(read_yaml(file))
    return {}


def last_line(log: Path, start: int = 0) -> str:
    """Return the last line of a log after its first `start` bytes, or fedmpi's own error message if there is one:
    launchers print a lot after it."""
    lines = tail_of(log, start)
    return next((line for line in reversed(lines) if line.startswith("fedmpi: ")), lines[-1] if lines else "")


def minutes_left(rows: list[Row], at_once: int) -> float | None:
    """Return the expected minutes until a sweep is done, from the rates of its runs so far; None if none has a rate."""
    known = [row.minutes for row in rows if row.minutes]
    if not known:
        return None
    left = [row.minutes_left or 0.0 for row in rows if row.state == "running"]
    left += [fmean(known) for row in rows if row.state in ("waiting", "queued", "requeued")]
    return max(sum(left) / at_once, max(left, default=0.0))


def summary(rows: list[Row], at_once: int) -> str:
    """Return all runs in one line."""
    counts = Counter(row.state for row in rows)
    states = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
    left = minutes_left(rows, at_once)
    more = f"; about {duration(left)} left" if left and any(row.state not in AT_REST for row in rows) else ""
    used = sorted({row.threads for row in rows if row.threads})
    threads = f"; {' or '.join(map(str, used))} thread{'' if used == [1] else 's'} per rank" if used else ""
    return f"{len(rows)} runs: {states}{more}{threads}"


def progress_of(row: Row) -> str:
    """Return the rounds, score and time left of a run."""
    done = round(BAR * row.round / row.rounds) if row.rounds else 0
    bar = f"[{'#' * done}{'.' * (BAR - done)}] {row.round}/{row.rounds or '?'}"
    score = f"  {row.metric} {row.value:.4f}" if row.value is not None else ""
    left = f"  {duration(row.minutes_left)} left" if row.minutes_left is not None else ""
    why = f"  ({row.why})" if row.why else ""
    return f"{bar}{score}{left}{why}"


def lines_of(rows: Sequence[Row]) -> list[str]:
    """Return one aligned line per run."""
    labelled = any(row.label for row in rows)
    cells = [[row.name, *([row.label] if labelled else []), row.state, progress_of(row)] for row in rows]
    return align(cells, widths=(0, 0, 8) if labelled else (0, 8)) if rows else []


def table(rows: list[Row], at_once: int) -> str:
    """Return one line per run, then the summary."""
    return "\n".join([*lines_of(rows), summary(rows, at_once)])


class Screen:
    """The output of a sweep: lines that stay, and on a terminal a status that is redrawn."""

    def __init__(self, out: TextIO | None = None) -> None:
        self.out = sys.stdout if out is None else out
        self.live = self.out.isatty()
        self.drawn = 0  # lines that will be redrawn

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._write(self._erase() + f"{text}\n")

    def draw(self, rows: list[Row], at_once: int) -> None:
        """Redraw the running runs and the summary; only on a terminal."""
        if not self.live:
            return
        columns, height = shutil.get_terminal_size()
        running = [row for row in rows if row.state == "running"]
        shown = running[: max(1, height - 4)]
        hidden = [f"and {len(running) - len(shown)} more"] if len(running) > len(shown) else []
        lines = lines_of(shown) + hidden + [summary(rows, at_once)]
        self._write(self._erase() + "".join(f"{text[: columns - 1]}\n" for text in lines))
        self.drawn = len(lines)

    def _erase(self) -> str:
        """Return the control sequence that erases the drawn lines."""
        drawn, self.drawn = self.drawn, 0
        return f"\x1b[{drawn}F\x1b[J" if drawn else ""

    def _write(self, text: str) -> None:
        """Write text. If the terminal is gone, the runs continue without output."""
        try:
            self.out.write(text)
            self.out.flush()
        except OSError:
            silence(self.out)
