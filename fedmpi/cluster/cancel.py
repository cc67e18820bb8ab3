"""Ending the jobs of runs: what `fedmpi cancel` does, and waiting until they have ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..errors import RunError, UserError
from ..runs import folder
from .slurm import ask_slurm
from .status import CANCELLED, Job, alive, jobs_of, look, newest_checkpoint

PATIENCE = 60.0  # seconds to wait for jobs to end


def cancel_jobs(jobs: dict[Path, Job]) -> list[str]:
    """End the jobs of run folders and wait until they have ended; return one line per run."""
    for run, job in jobs.items():
        try:
            folder.write(run / CANCELLED, json.dumps({"time": time.time(), "job": job.id}) + "\n")
        except OSError as error:
            raise RunError(f"{run} cannot be written ({error.strerror}); end it with 'scancel {job.id}'") from None
        try:
            end(job)
        except RunError:
            (run / CANCELLED).unlink()  # it is still running
            raise
    wait_until(lambda: not still_alive(jobs))
    left = still_alive(jobs)
    return [
        f"{run}: {job} {'signalled, still ending' if run in left else 'cancelled'}; {kept(run)}: submit it again to "
        "resume"
        for run, job in jobs.items()
    ]


def kept(run: Path) -> str:
    """Return a phrase that names the checkpoint from which a run can resume."""
    saved = newest_checkpoint(run)
    return "no checkpoint was written" if saved is None else f"the checkpoint of round {saved} is kept"


def still_alive(jobs: dict[Path, Job]) -> list[Path]:
    """Return the runs whose jobs are queued or running, or unknown because Slurm does not answer."""
    states = zip(jobs.items(), jobs_of(list(jobs)), strict=True)
    return [run for (run, job), (_, facts) in states if facts is None or alive(run, job, facts)]


def running_jobs(runs: list[Path]) -> dict[Path, Job]:
    """Return the queued and running jobs of these runs, which can be cancelled from here."""
    jobs: dict[Path, Job] = {}
    for run, (job, facts) in zip(runs, jobs_of(runs), strict=True):
        if facts is None:
            raise RunError(f"Slurm does not answer about {job} of {run}; check 'sinfo', then try again")
        if job is not None and alive(run, job, facts):
            if job.executor == "local" and job.host != socket.gethostname():
                raise UserError(f"'{run}' runs on {job.host}; cancel it there")
            jobs[run] = job
    return jobs


def running_job(run: Path) -> Job:
    """Return the queued or running job of a run; raise a `UserError` if there is none to cancel."""
    seen, jobs = look(run), running_jobs([run])
    if run in jobs:
        return jobs[run]
    if folder.holder(run) is not None:
        raise UserError(f"'{run}' is run by {folder.owner_in_words(run)}, not as a job: end it where it was started")
    raise UserError(f"'{run}' is not running: it is {seen['state']}" + (f" ({seen['why']})" if seen["why"] else ""))


def end(job: Job) -> None:
    """Ask a job to end."""
    if job.executor == "local":
        with suppress(ProcessLookupError):
            os.kill(int(job.id), signal.SIGTERM)
        return
    answer = ask_slurm("scancel", job.id)
    if answer is None or answer.returncode:
        why = " ".join((answer.stderr if answer else "Slurm does not answer").split())
        raise RunError(f"scancel {job.id} failed: {why}")


def wait_until(true: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    """Wait until a condition holds; return whether it did in that time."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.3)
    return True
