"""The status of a run as seen from outside: by its folder, the job that it was submitted as, and Slurm.

Nothing here takes part in a run. Files may be torn, missing or outdated by a moment: readers get what is there. The
folder still has what Slurm has forgotten (slurm.py).

The run folder contains, in addition to what `runs/folder.py` lists, the files of jobs:

    job.json          the job that it was last submitted as, alone or in an array
    lives.jsonl       one line per attempt of a job that did not finish the run, and whether it is restarted
    cancelled         written by `fedmpi cancel`: no restarts
    slurm/            submitit's files and the logs of the ranks; those of an array are next to its runs
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import FileError, UserError
from ..runs.folder import CHECKPOINTS, CONFIG, FINISHED, STARTS, STOPPED, holder
from ..runs.metrics import read_lines
from ..runs.schema import (
    Cancelled,
    Damaged,
    Finished,
    Restart,
    Start,
    Stopped,
    Submitted,
    opened,
    read,
    read_yaml,
    records,
)
from ..runs.text import align, duration
from .slurm import ENDED, WAITING, JobRecord, slurm_jobs

SILENT = "Slurm does not answer here"
JOB, LIVES, CANCELLED, FILES, SUPERVISOR = "job.json", "lives.jsonl", "cancelled", "slurm", "keeper"

TAIL_BYTES = 1 << 16
RECENT = 20  # rounds that a rate is computed from
SHOWN = 8  # lines of a log


@dataclass(frozen=True)
class Job:
    """The job that runs a run, or ran it last."""

    id: str
    executor: str
    """slurm or local"""
    host: str = ""
    """where a local job runs"""

    def __str__(self) -> str:
        return f"{'Slurm' if self.executor == 'slurm' else self.executor} job {self.id}"


def job_of(run: Path) -> Job | None:
    """Return the newest job of a run folder, submitted or started by a batch script; None if there is none."""
    submitted, owner, starts = read(run / JOB, Submitted), holder(run), records(run / STARTS, Start)
    record: Mapping[str, Any] = owner if owner and owner.get("job") else starts[-1] if starts else {}
    latest = record.get("job")
    if submitted is None:
        return Job(latest, "slurm") if latest else None
    job, executor = submitted["job"], submitted.get("executor", "None")
    if latest and executor == "slurm" and number(latest) > number(job) and not is_of(record, job):
        return Job(latest, "slurm")
    return Job(job, executor, submitted.get("host", ""))


def is_of(record: Mapping[str, Any], job: str) -> bool:
    """Return whether a record belongs to this job, by either of the names that an element of an array has."""
    return job in (record.get("job"), record.get("element"))


def number(job: Any) -> int:
    """Return a job's id as a number, for an element that of its array; 0 if it is none."""
    first = str(job).partition("_")[0]
    return int(first) if first.isdecimal() else 0


def supervisor_alive(run: Path) -> bool:
    """Return whether the supervisor of a local job is alive: it holds the lock of its file."""
    try:
        with opened(run / FILES / SUPERVISOR) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (OSError, Damaged):
        pass
    return False


def alive(run: Path, job: Job | None, facts: JobRecord) -> str:
    """Return a description of a job that is queued or running; '' if it is neither. `facts`: Slurm's answer."""
    if job is None:
        return ""
    if job.executor == "local":
        return f"{job} on {job.host}, which is running" if supervisor_alive(run) else ""
    state = facts.get("JobState", "COMPLETED")
    return "" if state in ENDED else f"{job}, which is {state}"


def newest_checkpoint(run: Path) -> int | None:
    """Return the round of the newest checkpoint; None if there is none."""
    found = (re.fullmatch(r"round-(\d+)", path.parent.name) for path in (run / CHECKPOINTS).glob("*/manifest.json"))
    return max((int(match[1]) for match in found if match), default=None)


def cancelled(run: Path) -> bool:
    """Return whether the run was cancelled after its last start."""
    starts, record = records(run / STARTS, Start), read(run / CANCELLED, Cancelled)
    return record is not None and all(record["time"] >= start.get("time", 0) for start in starts[-1:])


# The whole status


def look(run: Path) -> dict[str, Any]:
    """Return the status of a run; raise a `UserError` if the folder contains none."""
    return look_at([run])[0]


def look_at(runs: list[Path]) -> list[dict[str, Any]]:
    """Return the status of several runs; Slurm is asked once per job array."""
    for run in runs:
        if not (run / CONFIG).exists() and not (run / JOB).exists():
            found = "holds no run" if run.is_dir() else "is no folder"
            raise UserError(f"'{run}' {found}; give the --out of a training run, such as runs/fedavg-gma-glyphs-0")
    return [status_of(run, job, facts) for run, (job, facts) in zip(runs, jobs_of(runs), strict=True)]


def states_of(runs: list[Path]) -> list[tuple[str, str]]:
    """Return state and reason of each run, for an overview. A run with damaged files has failed."""
    found = []
    for run, (job, facts) in zip(runs, jobs_of(runs, strict=False), strict=True):
        try:
            found.append(state_of(run, job or job_of(run), facts))
        except FileError as error:
            found.append(("failed", str(error)))
    return found


def jobs_of(runs: list[Path], strict: bool = True) -> list[tuple[Job | None, JobRecord | None]]:
    """Return the job of each run and what Slurm answers about it (see `slurm_jobs`), {} for other jobs. If not
    `strict`, a run with damaged files has no job."""
    jobs: list[Job | None] = []
    for run in runs:
        try:
            jobs.append(job_of(run))
        except FileError:
            if strict:
                raise
            jobs.append(None)
    known = slurm_jobs(job.id for job in jobs if job is not None and job.executor == "slurm")
    return [(job, {} if job is None else known.get(job.id, {})) for job in jobs]


def status_of(run: Path, job: Job | None, facts: JobRecord | None) -> dict[str, Any]:
    """Return the status of a run. `facts`: what Slurm answers about its job."""
    starts = records(run / STARTS, Start)
    state, why = state_of(run, job, facts)
    submitted: Mapping[str, Any] = read(run / JOB, Submitted) or {}
    last: Mapping[str, Any] = starts[-1] if starts else {}
    return {
        "run": str(run),
        "state": state,
        "why": why,
        "job": None if job is None else job.id,
        "executor": None if job is None else job.executor,
        "nodes": nodes_of(run, job, facts or {}) if state == "running" else None,
        "ranks": last.get("ranks", submitted.get("ranks")),
        "starts": len(starts),
        "checkpoint": newest_checkpoint(run),
        **progress(run, state),
        "error": errors_of(run, job) if state == "failed" else [],
    }


def state_of(run: Path, job: Job | None, facts: JobRecord | None) -> tuple[str, str]:
    """Return a run's state and the reason for it. `facts`: what Slurm answers about its job, None if it does not."""
    known = facts or {}
    slurm = known.get("JobState", "")
    if read(run / FINISHED, Finished) and slurm not in WAITING:  # a finished run may be queued for more rounds
        return "finished", ""
    if slurm in WAITING:
        start = known.get("StartTime", "Unknown")
        expected = "" if start in ("Unknown", "N/A") else f", start expected {start.replace('T', ' ')}"
        return "requeued" if number(known.get("Restarts")) else "queued", known.get("Reason", "") + expected
    owner = holder(run)
    between = "" if owner is not None else "starting or ending"
    if slurm and slurm not in ENDED:
        return "running", between if slurm in ("RUNNING", "COMPLETING") else slurm.lower()
    if job is not None and job.executor == "local" and supervisor_alive(run):
        return "running", between
    if owner is not None:
        return "running", f"process {owner.get('pid')} on {owner.get('host')}, launched by {owner.get('launcher')}"
    return state_at_rest(run, job, facts, slurm)


def state_at_rest(run: Path, job: Job | None, facts: JobRecord | None, slurm: str) -> tuple[str, str]:
    """Return the state of an unfinished run that is not running."""
    attempts = [one for one in records(run / LIVES, Restart) if job is not None and is_of(one, job.id)]
    given_up = ""
    if attempts and not attempts[-1].get("again"):
        given_up = f"not restarted: {attempts[-1].get('why')}"
    if cancelled(run):
        return "cancelled", ""
    if slurm == "CANCELLED":
        return "cancelled", "by scancel"
    if facts is None:
        return "unknown", SILENT
    if stopped := read(run / STOPPED, Stopped):
        reasons = [f"by {stopped['why']} after round {stopped['round']}", given_up]
        return "stopped", "; ".join(filter(None, reasons))
    if not records(run / STARTS, Start) and not slurm and not attempts:
        return "unknown", "not started" if job is None else "Slurm has forgotten the job, and the run never started"
    reasons = [
        "" if slurm in ("FAILED", "COMPLETED") else slurm.lower().replace("_", " "),
        f"exit code {attempts[-1].get('code')}" if attempts else "",
        given_up,
    ]
    return "failed", "; ".join(filter(None, reasons)) or "it ended before it was finished"


def nodes_of(run: Path, job: Job | None, facts: JobRecord) -> str | None:
    """Return where a run is running."""
    if job is not None and job.executor == "local":
        return job.host
    names = facts.get("NodeList", "(null)")
    return str((holder(run) or {}).get("host") or "") or None if names == "(null)" else names


def progress(run: Path, state: str) -> dict[str, Any]:
    """Return completed and configured rounds, their rate, and the latest test metric."""
    rounds = [line.record for line in read_lines(run, TAIL_BYTES) if line.record is not None]
    done = rounds[-1]["round"] if rounds else 0
    wanted = configured_rounds(run)
    rate = rate_of(rounds[-RECENT:])
    left = (wanted - done) / rate if rate and wanted and state == "running" else None
    out = {"round": done, "rounds": wanted, "rounds_a_minute": rate, "minutes_left": left}
    for line in reversed(rounds):
        for name, value in line.items():
            if name.startswith("test_") and name != "test_loss" and isinstance(value, int | float):
                return out | {"metric": name.removeprefix("test_"), "value": value, "scored": line["round"]}
    return out | {"metric": None, "value": None, "scored": None}


def configured_rounds(run: Path) -> int | None:
    """Return the configured number of rounds; None if the configuration cannot be read."""
    try:
        return int(read_yaml(run / CONFIG)["rounds"])
    except (FileError, ValueError, KeyError, TypeError, OverflowError):
        return None


def rate_of(rounds: list[dict[str, Any]]) -> float | None:
    """Return rounds per minute, from the seconds that the rounds took."""
    each = [line["seconds"].values() for line in rounds if isinstance(line.get("seconds"), dict)]
    total = sum(value for values in each for value in values if isinstance(value, int | float))
    return 60 * len(each) / total if total > 0 else None


# Logs


def errors_of(run: Path, job: Job | None) -> list[str]:
    """Return the last lines of the newest error logs of a job, each log after its path."""
    logs = [] if job is None else sorted(log_folder(run).glob(f"{job.id}_*_log.err"), key=age)[-3:]
    out: list[str] = []
    for path in logs:
        if lines := tail_of(path)[-SHOWN:]:
            out += [f"{path}:", *(f"  {line}" for line in lines)]
    return out


def log_folder(run: Path) -> Path:
    """Return the folder of the logs of a run's job."""
    submitted = read(run / JOB, Submitted)
    return Path(os.path.normpath(run / (submitted.get("logs", FILES) if submitted else FILES)))


def age(path: Path) -> float:
    """Return the time of a file's last change; 0 if it does not exist."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def tail_of(path: Path, start: int = 0) -> list[str]:
    """Return the last lines of a log, after its first `start` bytes, that are not empty and not submitit's."""
    try:
        with opened(path) as file:
            file.seek(max(start, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            text = file.read(TAIL_BYTES).decode(errors="replace")
    except (OSError, Damaged):
        return []
    lines = [line.rstrip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("submitit ")]


# As text


def in_words(seen: dict[str, Any]) -> str:
    """Return the status of a run as text."""
    rows = [("state", seen["state"] + (f" ({seen['why']})" if seen["why"] else ""))]
    if seen["job"] is not None:
        where = f" on {seen['nodes']}" if seen["nodes"] else ""
        rows.append(("job", f"{Job(seen['job'], seen['executor'])}{where}"))
    if seen["ranks"]:
        rows.append(("ranks", str(seen["ranks"])))
    pace = seen["rounds_a_minute"]
    rate = f", {pace:,.{0 if pace >= 100 else 1 if pace >= 1 else 3}f} per minute" if pace else ""
    left = f", {duration(seen['minutes_left'])} left" if seen["minutes_left"] is not None else ""
    rows.append(("round", f"{seen['round']} of {seen['rounds'] or '?'}{rate}{left}"))
    if seen["metric"]:
        rows.append((f"test {seen['metric']}", f"{seen['value']:.4f} (round {seen['scored']})"))
    saved = "none" if seen["checkpoint"] is None else f"round {seen['checkpoint']}"
    rows += [("checkpoint", saved), ("starts", str(seen["starts"]))]
    lines = [seen["run"], *(f"  {line}" for line in align(rows))]
    return "\n".join(lines + [f"  {line}" for line in seen["error"]])
