"""`fedmpi status` and `fedmpi cancel`, for runs and sweeps."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..cluster.cancel import cancel_jobs, kept, running_job, running_jobs, wait_until
from ..cluster.status import JOB, age, in_words, look_at
from ..errors import UserError, complain
from ..experiments.runs import SWEEP, read_sweep_record, sweep_runs
from ..experiments.sweep.local import processes
from ..experiments.sweep.overview import Row, lines_of, rows_of, summary, table
from ..experiments.sweep.plan import CONFIGS
from ..runs.folder import CONFIG, LOCK, METRICS, STARTS, holder
from ..runs.options import flag, positional, read_options

HOME = Path("runs")  # where to look for runs
DEEPEST = 3  # folders below HOME to search
STATUS_ABOUT = (
    "Show the status of runs: state, round, rounds/min, time left, last lines of the error log. For the folder of "
    "a sweep, one line per run. Without a folder, all runs and sweeps under runs/, newest first."
)
CANCEL_ABOUT = (
    "Cancel the jobs of runs, or all runs of a sweep. Checkpoints are kept: the same command resumes from there."
)


@dataclass(frozen=True)
class CancelOptions:
    """Options of `fedmpi cancel`."""

    runs: list[str] = positional("RUN", many=True)
    """Folder of a run or a sweep."""


@dataclass(frozen=True)
class StatusOptions(CancelOptions):
    """Options of `fedmpi status`."""

    json: bool = flag()
    """Print a list of JSON objects, one per run."""


def is_sweep(folder: Path) -> bool:
    """Return whether a folder is that of a sweep."""
    return (folder / SWEEP).exists()


# status


def status(arguments: list[str]) -> int:
    """`fedmpi status [RUN ...] [--json]`: show the status of runs and sweeps; return the exit code."""
    options = read_options(StatusOptions, arguments, "status", STATUS_ABOUT, usage="[RUN ...] [--json]")
    given = [Path(run) for run in options.runs] or list(found_under(HOME))
    if options.json:
        print(json.dumps([one for path in given for one in objects(path)], indent=2), flush=True)
    elif not given:
        print(f"no runs under {HOME}/ here; 'fedmpi train' and 'fedmpi sweep' write theirs there", flush=True)
    elif not options.runs:
        print("\n".join(listed(given)), flush=True)
    else:
        seen = iter(look_at([path for path in given if not is_sweep(path)]))
        print("\n\n".join(overview(path) if is_sweep(path) else in_words(next(seen)) for path in given), flush=True)
    return 0


def overview(home: Path) -> str:
    """Return the status of a sweep: one line per run and a summary."""
    rows = asked_for(home)
    rest = len(sweep_runs(home)) - len(rows)
    more = f"\n{rest} more runs of the sweep file have not been requested yet (--only)" if rest else ""
    return f"{home}: sweep {read_sweep_record(home).get('name')}\n{table(rows, at_once(home))}{more}"


def asked_for(home: Path) -> list[Row]:
    """Return the requested runs of a sweep: those with a folder, or with a configuration to start them."""
    runs = [home / name for name in sweep_runs(home)]
    return rows_of([run for run in runs if run.exists() or (home / CONFIGS / f"{run.name}.yaml").exists()])


def at_once(home: Path) -> int:
    """Return how many runs of a sweep are running, at least 1."""
    return max(1, sum(holder(home / name) is not None for name in sweep_runs(home)))


def objects(path: Path) -> list[dict[str, Any]]:
    """Return the status of a run, or of each run of a sweep, for programs."""
    if not is_sweep(path):
        return look_at([path])
    rows = asked_for(path)
    begun = [row for row in rows if (path / row.name / CONFIG).exists() or (path / row.name / JOB).exists()]
    seen = dict(zip((row.name for row in begun), look_at([path / row.name for row in begun]), strict=True))
    waiting: dict[str, Any] = {"round": 0, "starts": 0, "checkpoint": None, "job": None, "error": []}
    return [seen.get(r.name, waiting | {"run": str(path / r.name)}) | {"state": r.state, "why": r.why} for r in rows]


def found_under(home: Path) -> Iterator[Path]:
    """Yield the runs and sweeps below a folder, newest first."""

    def inside(folder: Path, deep: int) -> Iterator[Path]:
        if is_sweep(folder) or (folder / CONFIG).exists() or (folder / JOB).exists():
            yield folder
        elif deep:
            with suppress(OSError):
                for one in sorted(folder.iterdir()):
                    if one.is_dir() and not one.name.startswith(".") and not one.is_symlink():
                        yield from inside(one, deep - 1)

    yield from sorted(inside(home, DEEPEST), key=newest, reverse=True)


def newest(folder: Path) -> float:
    """Return when a run, or any run of a sweep, last wrote."""
    runs = [folder, *(folder.glob("*/") if is_sweep(folder) else [])]
    return max(age(run / name) for run in runs for name in (METRICS, STARTS, CONFIG, SWEEP, JOB))


def listed(found: list[Path]) -> list[str]:
    """Return one line per run or sweep."""
    runs = [path for path in found if not is_sweep(path)]
    rows = [replace(row, name=str(path)) for path, row in zip(runs, rows_of(runs), strict=True)]
    texts = dict(zip(runs, lines_of(rows), strict=True))
    width = max(len(str(path)) for path in found)
    return [texts.get(path) or f"{str(path).ljust(width)}  sweep, {brief(path)}" for path in found]


def brief(home: Path) -> str:
    """Return a summary of a sweep, or why it cannot be read."""
    try:
        return summary(asked_for(home), at_once(home))
    except UserError as error:
        return str(error)


# cancel


def cancel(arguments: list[str]) -> int:
    """`fedmpi cancel RUN [RUN ...]`: cancel the jobs of runs and the processes of sweeps; return the exit code."""
    options = read_options(CancelOptions, arguments, "cancel", CANCEL_ABOUT, usage="RUN [RUN ...]")
    if not options.runs:
        raise UserError("cancel needs a run folder: fedmpi cancel RUN [RUN ...]")
    paths = [Path(run) for run in options.runs]
    jobs = {path: running_job(path) for path in paths if not is_sweep(path)}
    for text in cancel_jobs(jobs) if jobs else []:
        print(text, flush=True)
    for path in paths:
        if is_sweep(path):
            cancel_sweep(path)
    return 0


def cancel_sweep(home: Path) -> None:
    """End the processes of a sweep, the jobs of its runs, and runs that have lost their sweep process."""
    runs = [home / name for name in sweep_runs(home) if (home / name).is_dir()]
    jobs = running_jobs(runs)
    sweeps = processes(home)
    lone = {run / LOCK: owner for run in runs if run not in jobs and (owner := holder(run)) is not None}
    end_processes(sweeps)
    said = cancel_jobs(jobs) if jobs else []
    end_processes(lone)  # most of them have ended with the sweep's process
    for lock, one in (sweeps | lone).items():
        run, over = lock.parent, holder(lock.parent, lock.name) is None
        if not over and not on_this_machine(one):
            how = f"runs on {one.get('host')}: cancel it there"
        elif lock in sweeps:
            how = "ended" if over else "stopping, waiting for its runs"
        else:
            how = "stopped" if over else "stopping after its current round"
        process = f"{home}: the sweep's process {one.get('pid')} {how}"
        said.append(process if lock in sweeps else f"{run}: {how}; {kept(run)}")
    for text in said:
        print(text, flush=True)
    counts = Counter(row.state for row in asked_for(home))
    states = ", ".join(f"{count} {state}" for state, count in counts.items()) or "no run started"
    if not said:
        raise UserError(f"'{home}' has no running or queued runs: {states}")
    print(f"{home}: {states}; the same 'fedmpi sweep' resumes it", flush=True)


def end_processes(owners: Mapping[Path, Mapping[str, Any]]) -> None:
    """Signal the processes on this machine that hold these locks, and wait until they have ended."""

    def alive_here() -> list[int]:
        held = [owner for lock, owner in owners.items() if holder(lock.parent, lock.name) is not None]
        return [int(owner["pid"]) for owner in held if on_this_machine(owner)]

    for pid in alive_here():
        try:
            os.kill(pid, signal.SIGTERM)
        except ProcessLookupError:
            pass
        except PermissionError:
            complain(f"process {pid} belongs to another user")
    wait_until(lambda: not alive_here())


def on_this_machine(owner: Mapping[str, Any]) -> bool:
    """Return whether a process is on this machine."""
    return owner.get("host") == socket.gethostname() and isinstance(owner.get("pid"), int)
