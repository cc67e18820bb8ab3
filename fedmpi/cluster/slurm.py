"""What Slurm knows of jobs, and asking it as seldom as possible.

A job is named by its number, "1234", an element of a job array by the array's number and its place in it, "1234_7". An
element has a number of its own as well, once it is taken from the array to be run; the last one to be taken has that of
the array. Until then Slurm keeps all that wait as one record, so an array is asked about once, however many elements
are looked at.

Slurm is asked by `scontrol`, which needs no accounting but forgets a job some minutes after its end. With accounting
there is `sacct` as well.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable

Facts = dict[str, str]

# Slurm's states, but for those of a job that runs
WAITING = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
ENDED = (
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "TIMEOUT",
)
WHOLE = {"SLURM_BITSTR_LEN": "0"}  # which elements wait, told in full; Slurm would cut that after 64 characters


def ask_slurm(*command: str) -> subprocess.CompletedProcess[str] | None:
    """What a command of Slurm says; None where it is not installed or does not answer."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | WHOLE)
    except (OSError, subprocess.TimeoutExpired):
        return None


def slurm_job(job: str) -> Facts | None:
    """What Slurm knows of a job: empty where it has forgotten it, None where Slurm cannot be asked."""
    return slurm_jobs([job])[job]


def slurm_jobs(jobs: Iterable[str]) -> dict[str, Facts | None]:
    """The same for several jobs, by their names; an array is asked about once."""
    wanted: dict[str, list[str]] = {}
    for job in jobs:
        wanted.setdefault(job.partition("_")[0], []).append(job)
    out: dict[str, Facts | None] = {}
    answers = True
    for first, names in wanted.items():
        known = ask_about(first, names) if answers else None
        answers = known is not None  # who does not answer once is not asked again
        out |= {name: None if known is None else known.get(name, {}) for name in names}
    return out


def ask_about(job: str, names: list[str]) -> dict[str, Facts] | None:
    """What Slurm knows of a job or of an array's elements, by their names; None where it cannot be asked."""
    said = ask_slurm("scontrol", "--oneliner", "show", "job", job)
    if said is None or (said.returncode and "Invalid job id" not in said.stderr):
        return None
    known = records_of(said.stdout)
    if not all(name in known for name in names):  # with accounting there is one more place to look
        columns = ("--format", "JobID,State")
        kept = ask_slurm("sacct", "--allocations", "--noheader", "--parsable2", "--jobs", job, *columns)
        if kept is not None and kept.returncode == 0:
            known = states_kept(kept.stdout) | known
    return known


def records_of(said: str) -> dict[str, Facts]:
    """The records that `scontrol --oneliner show job` prints, by every name that each of them has."""
    out: dict[str, Facts] = {}
    for line in said.splitlines():
        facts: Facts = dict(re.findall(r"(?:^| )(\w+)=(\S*)", line))
        places = places_in(facts.get("ArrayTaskId", ""))
        if len(places) > 1:
            facts.pop("StartTime", None)  # that of the first of them
        names = [f"{facts.get('ArrayJobId')}_{place}" for place in places]
        out |= {name: facts for name in [*names, facts.get("JobId", "")] if name}
    return out


def states_kept(said: str) -> dict[str, Facts]:
    """The states that `sacct` prints beside the names of jobs, such as 1234, 1234_7 or 1234_[8-9%2]."""
    out: dict[str, Facts] = {}
    for line in said.splitlines():
        name, _, state = line.partition("|")
        first, _, places = name.partition("_")
        facts = {"JobState": state.split()[0]} if state.strip() else {}  # without who cancelled it
        out |= {f"{first}_{place}": facts for place in places_in(places.strip("[]"))} if places else {first: facts}
    return out


def places_in(text: str) -> list[int]:
    """The places in an array that are meant by text such as "7" or "0,3-5,8-12:2%4"; what makes no sense is none."""
    out: list[int] = []
    for item in text.partition("%")[0].split(","):
        if match := re.fullmatch(r"(\d+)(?:-(\d+)(?::([1-9]\d*))?)?", item):
            first, last, step = match.groups()
            out += range(int(first), int(last or first) + 1, int(step or 1))
    return out
