"""Queries to Slurm about jobs, as few as possible.

A job has a number, "1234"; an element of a job array is named by the array's number and its index, "1234_7". An element
also gets its own number when it is taken from the array to run; the last one to be taken has that of the array. Until
then all waiting elements are one record of Slurm's, so one query per array is enough.

`scontrol` needs no accounting but forgets a job some minutes after its end. With accounting, `sacct` is asked as well.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable

JobRecord = dict[str, str]

# Slurm's states except those of a running job
WAITING = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
ENDED = "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED TIMEOUT".split()
UNLIMITED = {"SLURM_BITSTR_LEN": "0"}  # print all waiting elements; Slurm cuts the list at 64 characters by default


def ask_slurm(*command: str) -> subprocess.CompletedProcess[str] | None:
    """Run a command of Slurm; return None if it is not installed or does not answer."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | UNLIMITED)
    except (OSError, subprocess.TimeoutExpired):
        return None


def slurm_job(job: str) -> JobRecord | None:
    """Return what Slurm knows about a job: {} if it has forgotten it, None if it does not answer."""
    return slurm_jobs([job])[job]


def slurm_jobs(jobs: Iterable[str]) -> dict[str, JobRecord | None]:
    """Return the same for several jobs, by their names, with one query per array."""
    wanted: dict[str, list[str]] = {}
    for job in jobs:
        wanted.setdefault(job.partition("_")[0], []).append(job)
    out: dict[str, JobRecord | None] = {}
    answers = True
    for first, names in wanted.items():
        known = ask_about(first, names) if answers else None
        answers = known is not None  # after one timeout, do not wait for another
        out |= {name: None if known is None else known.get(name, {}) for name in names}
    return out


def ask_about(job: str, names: list[str]) -> dict[str, JobRecord] | None:
    """Return what Slurm knows about a job or the elements of an array, by their names; None if it does not answer."""
    answer = ask_slurm("scontrol", "--oneliner", "show", "job", job)
    if answer is None or (answer.returncode and "Invalid job id" not in answer.stderr):
        return None
    known = records_of(answer.stdout)
    if not all(name in known for name in names):  # the accounting, if there is one, remembers longer
        columns = ("--format", "JobID,State")
        accounting = ask_slurm("sacct", "--allocations", "--noheader", "--parsable2", "--jobs", job, *columns)
        if accounting is not None and accounting.returncode == 0:
            known = accounting_states(accounting.stdout) | known
    return known


def records_of(output: str) -> dict[str, JobRecord]:
    """Return the records that `scontrol --oneliner show job` prints, by all names of each."""
    out: dict[str, JobRecord] = {}
    for line in output.splitlines():
        facts: JobRecord = dict(re.findall(r"(?:^| )(\w+)=(\S*)", line))
        indices = indices_in(facts.get("ArrayTaskId", ""))
        if len(indices) > 1:
            facts.pop("StartTime", None)  # it is that of the first one
        names = [f"{facts.get('ArrayJobId')}_{index}" for index in indices]
        out |= {name: facts for name in [*names, facts.get("JobId", "")] if name}
    return out


def accounting_states(output: str) -> dict[str, JobRecord]:
    """Return the states that `sacct` prints after the names of jobs, such as 1234, 1234_7 or 1234_[8-9%2]."""
    out: dict[str, JobRecord] = {}
    for line in output.splitlines():
        name, _, state = line.partition("|")
        first, _, indices = name.partition("_")
        facts = {"JobState": state.split()[0]} if state.strip() else {}  # without the user who cancelled it
        out |= {f"{first}_{index}": facts for index in indices_in(indices.strip("[]"))} if indices else {first: facts}
    return out


def indices_in(text: str) -> list[int]:
    """Return the indices in an array that text such as "7" or "0,3-5,8-12:2%4" stands for; [] for other text."""
    out: list[int] = []
    for item in text.partition("%")[0].split(","):
        if match := re.fullmatch(r"(\d+)(?:-(\d+)(?::([1-9]\d*))?)?", item):
            first, last, step = match.groups()
            out += range(int(first), int(last or first) + 1, int(step or 1))
    return out
