"""What can be told of a run from outside: by its folder, by the job that it was submitted as, and by Slurm.

Nothing here takes part in a run. Files may be torn, missing or a moment old: whoever reads them gets what there is.
The folder tells what Slurm has forgotten (slurm.py).

A run folder has, beside what `folder.py` names, the files of jobs:

    job.json          the job that it was submitted as last, alone or in an array
    lives.jsonl       a line for every life of a job that did not end the run, and whether it is to begin again
    cancelled         there since `fedmpi cancel`: what ends now is not to begin again
    slurm/            submitit's files and the logs of the ranks; those of an array are with the folder of all its runs
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import AGAIN, FileError, UserError
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
from .slurm import ENDED, WAITING, Facts, slurm_job, slurm_jobs

SILENT = "Slurm does not answer here"
JOB, LIVES, CANCELLED, FILES, KEEPER = "job.json", "lives.jsonl", "cancelled", "slurm", "keeper"

TAIL_BYTES = 1 << 16
RECENT = 20  # rounds that a rate is made of
SHOWN = 8  # lines of a log


@dataclass(frozen=True)
class Job:
    """The job that runs a run, or that ran it last."""

    id: str
    executor: str
    """slurm or local"""
    host: str = ""
    """where a local job runs"""

    def __str__(self) -> str:
        return f"{'Slurm' if self.executor == 'slurm' else self.executor} job {self.id}"


def job_of(run: Path) -> Job | None:
    """The job of a run folder; None where it never was one. A run that a batch script started has one too."""
    made, holds, begun = read(run / JOB, Submitted), holder(run), records(run / STARTS, Start)
    record: Mapping[str, Any] = holds if holds and holds.get("job") else begun[-1] if begun else {}
    latest = record.get("job")
    if made is None or (
        latest
        and made.get("executor") == "slurm"
        and number(latest) > number(made["job"])
        and not is_of(record, made["job"])
    ):
        return Job(latest, "slurm") if latest else None
    return Job(made["job"], made.get("executor", "None"), made.get("host", ""))


def is_of(record: Mapping[str, Any], job: str) -> bool:
    """Whether a record of a folder is of this job, by either of the names that an element of an array has."""
    return job in (record.get("job"), record.get("element"))


def number(job: Any) -> int:
    """A job's id as a number, that of the whole array for an element of one; 0 for what is none."""
    first = str(job).partition("_")[0]
    return int(first) if first.isdecimal() else 0


def kept_alive(run: Path) -> bool:
    """Whether the process that keeps a local job is there: it has the lock of its file for as long as it lives."""
    try:
        with opened(run / FILES / KEEPER) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (OSError, Damaged):
        pass
    return False


def alive(run: Path, job: Job | None, facts: Facts | None = None) -> str:
    """A job that waits or runs, in words; empty where there is none. `facts`: what Slurm knows of it, where it has been
    asked already."""
    if job is None:
        return ""
    if job.executor == "local":
        return f"{job} on {job.host}, which is running" if kept_alive(run) else ""
    state = (slurm_job(job.id) or {} if facts is None else facts).get("JobState", "COMPLETED")
    return "" if state in ENDED else f"{job}, which is {state}"


# What a folder tells


def newest_checkpoint(run: Path) -> int | None:
    """The round of the newest checkpoint, None where there is none."""
    found = (re.fullmatch(r"round-(\d+)", path.parent.name) for path in (run / CHECKPOINTS).glob("*/manifest.json"))
    return max((int(match[1]) for match in found if match), default=None)


def cancelled(run: Path) -> bool:
    """Whether the run was cancelled since it was last started."""
    begun, told = records(run / STARTS, Start), read(run / CANCELLED, Cancelled)
    return told is not None and all(told["time"] >= start.get("time", 0) for start in begun[-1:])


def verdict(code: int, run: Path | None, retries: int, job: str, restarts: int) -> tuple[bool, str]:
    """Whether a job whose ranks ended with this code is to begin again, and the reason in words.

    A run that stopped in good order goes on, and so does one that a fault has ended, as long as its lives get anywhere:
    after `retries` of them in vain, the next would be in vain as well. A folder tells how far they got, and whether a
    run stopped in good order where its launcher hides the code; without one, `restarts` counts against a fault.
    """
    if code == 0:
        return False, "the run is done"
    if code == 2:
        return False, "it would end in the same way"
    if run is None or not (run / CONFIG).exists():  # where nothing is kept, nothing can be counted
        again = code == AGAIN or restarts < retries
        return again, "" if again else f"it was started again {restarts} times"
    if (run / FINISHED).exists():
        return False, "the run is done"
    with suppress(FileError):  # a damaged note must not cost the run its next life
        if cancelled(run):
            return False, "the run was cancelled"
    saved = newest_checkpoint(run) or 0
    vain = 0
    for life in reversed([life for life in records(run / LIVES, Restart) if life.get("job") == job]):
        if life.get("round") != saved:
            break
        vain += 1
    if vain >= (max(1, retries) if stopped_well(code, run) else retries):
        lives = "this life" if vain == 0 else f"{vain + 1} lives"
        return False, f"no round was added to the {saved} that are saved in {lives}"
    return True, ""


def stopped_well(code: int, run: Path | None) -> bool:
    """Whether the ranks stopped in good order; torchrun makes another code of theirs, but the folder knows."""
    return code == AGAIN or (code not in (0, 2) and run is not None and (run / STOPPED).exists())


# All of it together


def look(run: Path) -> dict[str, Any]:
    """How it stands with a run; a `UserError` for a folder that is none."""
    return look_at([run])[0]


def look_at(runs: list[Path]) -> list[dict[str, Any]]:
    """The same for several runs; Slurm is asked once for those of an array."""
    for run in runs:
        if not (run / CONFIG).exists() and not (run / JOB).exists():
            there = "holds no run" if run.is_dir() else "is no folder"
            raise UserError(f"'{run}' {there}; give the --out of a training run, such as runs/fedavg-gma-glyphs-0")
    return [told(run, job, facts) for run, (job, facts) in zip(runs, jobs_of(runs), strict=True)]


def states_of(runs: list[Path]) -> list[tuple[str, str]]:
    """The state of each run and what more there is to say of it, for an overview; what is not there has not begun, and
    what has damaged files has failed."""
    return [
        state_or_damage(run, job, facts) for run, (job, facts) in zip(runs, jobs_of(runs, strict=False), strict=True)
    ]


def state_or_damage(run: Path, job: Job | None, facts: Facts | None) -> tuple[str, str]:
    """A run's state; one with damaged files has failed, and they are named."""
    try:
        return state_of(run, job or job_of(run), facts)
    except FileError as error:
        return "failed", str(error)


def jobs_of(runs: list[Path], strict: bool = True) -> list[tuple[Job | None, Facts | None]]:
    """The job of each run and what Slurm knows of it, as `slurm_jobs` has it; empty for what is no job of Slurm's. If
    not `strict`, a run whose files are damaged has none."""
    jobs = [job_of(run) if strict else job_or_none(run) for run in runs]
    known = slurm_jobs(job.id for job in jobs if job is not None and job.executor == "slurm")
    return [(job, {} if job is None else known.get(job.id, {})) for job in jobs]


def job_or_none(run: Path) -> Job | None:
    """The job of a run folder; None where it never was one, or its files are damaged."""
    try:
        return job_of(run)
    except FileError:
        return None


def told(run: Path, job: Job | None, facts: Facts | None) -> dict[str, Any]:
    """All that is told of a run. `facts`: what Slurm knows of its job."""
    begun = records(run / STARTS, Start)
    state, why = state_of(run, job, facts)
    made: Mapping[str, Any] = read(run / JOB, Submitted) or {}
    last: Mapping[str, Any] = begun[-1] if begun else {}
    out: dict[str, Any] = {"run": str(run), "state": state, "why": why}
    out["job"] = None if job is None else job.id
    out["executor"] = None if job is None else job.executor
    out["nodes"] = nodes_of(run, job, facts or {}) if state == "running" else None
    out["ranks"] = last.get("ranks", made.get("ranks"))
    out["starts"], out["checkpoint"] = len(begun), newest_checkpoint(run)
    out |= progress(run, state)
    out["error"] = errors_of(run, job) if state == "failed" else []
    return out


def state_of(run: Path, job: Job | None, facts: Facts | None) -> tuple[str, str]:
    """A run's state and what more there is to say of it. `facts`: what Slurm knows of its job."""
    slurm = (facts or {}).get("JobState", "")
    if read(run / FINISHED, Finished) and slurm not in WAITING:  # a finished run may be queued for more rounds
        return "finished", ""
    if slurm in WAITING:
        reason = (facts or {}).get("Reason", "")
        start = (facts or {}).get("StartTime", "Unknown")
        expected = "" if start in ("Unknown", "N/A") else f", start expected {start.replace('T', ' ')}"
        return "requeued" if number((facts or {}).get("Restarts")) else "queued", reason + expected
    if slurm and slurm not in ENDED:
        begins = "" if holder(run) is not None else "starting or ending"
        return "running", begins if slurm in ("RUNNING", "COMPLETING") else slurm.lower()
    if job is not None and job.executor == "local" and kept_alive(run):
        return "running", "" if holder(run) is not None else "starting or ending"
    if (owner := holder(run)) is not None:
        return "running", f"process {owner.get('pid')} on {owner.get('host')}, launched by {owner.get('launcher')}"
    return state_at_rest(run, job, facts, slurm)


def state_at_rest(run: Path, job: Job | None, facts: Facts | None, slurm: str) -> tuple[str, str]:
    """The state of a run that is not finished and that nobody runs."""
    lives = [life for life in records(run / LIVES, Restart) if job is not None and is_of(life, job.id)]
    given_up = str(lives[-1].get("why")) if lives and not lives[-1].get("again") else ""
    if cancelled(run) or slurm == "CANCELLED":
        return "cancelled", "" if cancelled(run) else "by scancel"
    if facts is None:
        return "unknown", SILENT
    if stopped := read(run / STOPPED, Stopped):
        why = f"by {stopped['why']} after round {stopped['round']}"
        return "stopped", f"{why}; not started again, as {given_up}" if given_up else why
    begun = records(run / STARTS, Start)
    if not begun and not slurm and not lives:
        return "unknown", "it has not begun" if job is None else "Slurm has forgotten the job, and the run never began"
    code = f"exit code {lives[-1].get('code')}" if lives else ""
    word = slurm.lower().replace("_", " ") if slurm not in ("", "FAILED", "COMPLETED") else ""
    said = "; ".join(filter(None, [word, code, given_up and f"not started again, as {given_up}"]))
    return "failed", said or "it ended before it was done"


def nodes_of(run: Path, job: Job | None, facts: Facts) -> str | None:
    """Where a run runs."""
    if job is not None and job.executor == "local":
        return job.host
    names = facts.get("NodeList", "(null)")
    return str((holder(run) or {}).get("host") or "") or None if names == "(null)" else names


def progress(run: Path, state: str) -> dict[str, Any]:
    """Rounds done and to do, how fast they go, and the last test metric."""
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
    """How many rounds a run is to have, None where its configuration cannot be read."""
    try:
        return int(read_yaml(run / CONFIG)["rounds"])
    except (FileError, ValueError, KeyError, TypeError, OverflowError):
        return None


def rate_of(rounds: list[dict[str, Any]]) -> float | None:
    """Rounds a minute, by the seconds that the rounds took."""
    each = [line["seconds"].values() for line in rounds if isinstance(line.get("seconds"), dict)]
    total = sum(value for values in each for value in values if isinstance(value, int | float))
    return 60 * len(each) / total if total > 0 else None


def errors_of(run: Path, job: Job | None) -> list[str]:
    """The last lines of the newest error logs of a job, each log with its name in front."""
    logs = [] if job is None else sorted(log_folder(run).glob(f"{job.id}_*_log.err"), key=age)[-3:]
    out: list[str] = []
    for path in logs:
        if lines := tail_of(path):
            out += [f"{path}:", *(f"  {line}" for line in lines)]
    return out


def log_folder(run: Path) -> Path:
    """Where the job of a run writes its logs."""
    made = read(run / JOB, Submitted)
    return Path(os.path.normpath(run / (made.get("logs", FILES) if made else FILES)))


def age(path: Path) -> float:
    """When a file was last written to; long ago where it is gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def tail_of(path: Path) -> list[str]:
    """The last lines of a log that say something."""
    try:
        with opened(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            text = file.read(TAIL_BYTES).decode(errors="replace")
    except (OSError, Damaged):
        return []
    lines = [line.rstrip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("submitit ")][-SHOWN:]


def in_words(seen: dict[str, Any]) -> str:
    """What `look` found, for people."""
    rows = [("state", seen["state"] + (f" ({seen['why']})" if seen["why"] else ""))]
    if seen["job"] is not None:
        where = f" on {seen['nodes']}" if seen["nodes"] else ""
        rows.append(("job", f"{Job(seen['job'], seen['executor'])}{where}"))
    if seen["ranks"]:
        rows.append(("ranks", str(seen["ranks"])))
    pace = seen["rounds_a_minute"]
    rate = f", {pace:,.{0 if pace >= 100 else 1 if pace >= 1 else 3}f} a minute" if pace else ""
    left = f", {duration(seen['minutes_left'])} left" if seen["minutes_left"] is not None else ""
    rows.append(("round", f"{seen['round']} of {seen['rounds'] or '?'}{rate}{left}"))
    if seen["metric"]:
        rows.append((f"test {seen['metric']}", f"{seen['value']:.4f} (round {seen['scored']})"))
    saved = "none" if seen["checkpoint"] is None else f"round {seen['checkpoint']}"
    rows += [("checkpoint", saved), ("starts", str(seen["starts"]))]
    lines = [seen["run"], *(f"  {line}" for line in align(rows))]
    return "\n".join(lines + [f"  {line}" for line in seen["error"]])
