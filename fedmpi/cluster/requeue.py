"""Restarts: the rule by which a run that ended early is started again, and `fedmpi requeue`, its use in batch scripts.

A run that stopped in good order (exit code 75) or failed is restarted and resumes from its newest checkpoint. It is
given up after a number of consecutive restarts without a new checkpoint. Exit codes 0 and 2 are final: the run is
finished, or would fail in the same way. `may_restart` is this rule. The launcher of ranks, the supervisor of local
jobs, batch scripts and sweeps all decide by it.

`lives.jsonl` in the run folder has one line per attempt of a job that did not finish the run.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..comm.env import job_names
from ..errors import AGAIN, FileError, RunError, UserError, complain
from ..plugins.knobs import knob
from ..runs import folder
from ..runs.options import positional, read_options
from ..runs.schema import Restart, records
from .slurm import ask_slurm, slurm_job
from .status import LIVES, cancelled, newest_checkpoint

FINAL = {0: "the run is finished", 2: "it would fail in the same way"}
"""exit codes after which a run is never restarted, with the reason"""
ABOUT = "At the end of a batch script: requeue the job if the run is unfinished and restarts make progress."


@dataclass(frozen=True)
class RequeueOptions:
    """The options of `fedmpi requeue`."""

    retries: int = knob(3, low=0, high=1000)
    """Give up after this many consecutive restarts without a new checkpoint."""
    run: str | None = None
    """Run folder, whose checkpoints show the progress. Default: count restarts by SLURM_RESTART_COUNT."""
    code: str = positional("CODE")
    """Exit code of the run: $? directly after it."""


# The rule


def may_restart(code: int, wasted: int, limit: int) -> bool:
    """Return whether to restart a run that ended with this exit code, after `wasted` consecutive restarts without
    progress, of which `limit` are allowed."""
    return code not in FINAL and wasted < limit


def decide(code: int, run: Path | None, retries: int, job: str, restarts: int) -> tuple[bool, str]:
    """Return whether to restart a job whose ranks ended with this exit code, and if not, why.

    The checkpoints in the run folder show which attempts made progress. Without a run folder every restart after a
    failure counts as wasted, and a run that stopped in good order is always restarted.
    """
    if code in FINAL:
        return False, FINAL[code]
    if run is None or not (run / folder.CONFIG).exists():
        again = code == AGAIN or may_restart(code, restarts, retries)
        return again, "" if again else f"it was restarted {restarts} times"
    if (run / folder.FINISHED).exists():
        return False, FINAL[0]
    with suppress(FileError):  # a damaged file must not prevent a restart
        if cancelled(run):
            return False, "the run was cancelled"
    saved = newest_checkpoint(run) or 0
    wasted = 0
    for attempt in reversed([one for one in records(run / LIVES, Restart) if one.get("job") == job]):
        if attempt.get("round") != saved:
            break
        wasted += 1
    limit = max(1, retries) if stopped_cleanly(code, run) else retries
    if may_restart(code, wasted, limit):
        return True, ""
    attempts = "this attempt" if wasted == 0 else f"{wasted + 1} attempts"
    return False, f"no round was added to the {saved} saved ones in {attempts}"


def stopped_cleanly(code: int, run: Path | None) -> bool:
    """Return whether the ranks stopped in good order. torchrun replaces their exit code, but the folder shows it."""
    return code == AGAIN or (code not in FINAL and run is not None and (run / folder.STOPPED).exists())


def record_attempt(
    run: Path | None, code: int, names: dict[str, str | None], restarts: int, again: bool, why: str
) -> None:
    """Append to the run folder how an attempt of a job, given by its names, ended. Only run folders are written to."""
    if run is None or not (run / folder.CONFIG).exists():
        return
    record = {"time": time.time(), **names, "restart": restarts, "code": code}
    record |= {"round": newest_checkpoint(run) or 0, "again": again, "why": why}
    try:
        folder.append(run / LIVES, json.dumps(record))
    except OSError as error:
        raise RunError(
            f"{run / LIVES} cannot be written ({error.strerror}), so job {names['job']} is not restarted"
        ) from None


# In a batch script


def requeue(arguments: list[str]) -> int:
    """Run `fedmpi requeue CODE`: requeue the job of this batch script if it may restart. Return CODE."""
    options = read_options(RequeueOptions, arguments, "requeue", ABOUT, usage="CODE [options]")
    if not options.code.isdecimal() or int(options.code) > 255:
        raise UserError(f"the exit code is '{options.code}'; it must be a number from 0 to 255, such as $?")
    code = int(options.code)
    if code == 0:
        return 0
    names = job_names(os.environ)
    job = names["job"]
    if job is None:
        raise UserError("SLURM_JOB_ID is not set; call requeue in a batch script, after the run")
    run = None if options.run is None else Path(options.run).expanduser()
    restarts = folder.restarts(os.environ)
    again, why = decide(code, run, options.retries, job, restarts)
    # Recorded before the job is requeued: an attempt that is not counted could be repeated for ever.
    record_attempt(run, code, names, restarts, again, why)
    if again and (why := requeue_job(job)):
        again = False
        record_attempt(run, code, names, restarts, again, why)
    ended = "stopped in good order" if stopped_cleanly(code, run) else f"ended with exit code {code}"
    complain(f"job {job} {ended}; " + ("queued again" if again else f"not queued again: {why}"))
    return code


def requeue_job(job: str) -> str:
    """Requeue a running job; return why that failed, '' if it worked."""
    facts = slurm_job(job)
    if facts is None:
        return "Slurm does not answer"
    state = facts.get("JobState", "gone")
    if state != "RUNNING":  # cancelled, or requeued by somebody else
        return f"it is {state} already"
    answer = ask_slurm("scontrol", "requeue", job)
    if answer is None or answer.returncode:
        return "scontrol requeue failed: " + " ".join((answer.stderr if answer else "no answer").split())
    return ""
