"""Handing runs to Slurm through submitit: one run as a job, several as a job array with one `sbatch`.

Every element of an array is a job of its own, named such as "1234_7". It is requeued alone and resumes from its own
checkpoint, and `fedmpi status`, `cancel` and `submit` accept its run folder like any other. submitit keeps the pickles
and logs of all elements in one folder: slurm/ in the folder that contains the runs.

submitit is imported when something is submitted, not before.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import RunError, UserError
from .status import FILES, Job

if TYPE_CHECKING:
    from .submit import SubmitOptions, Train

UNSENT = re.compile(r"[0-9a-f]{32}\.pkl|\.submission_file_[0-9a-f]{32}\.sh")  # submitit's files before a job exists

# In a batch script, before the run: a secret of the job's processes, new for each start.
SEAL = """FEDMPI_SECRET=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \\n')  # authenticates the ranks' rendezvous
export FEDMPI_SECRET"""
# srun runs in the background: a signal to the script itself (scancel --batch) would otherwise end bash at once or, with
# a trap, be handled only after the run.
BATCH_SRUN = """srun() {  # in the background, so that a signal to this script is forwarded to the ranks, which save
    local code=0 signalled=0 step
    command srun "$@" </dev/null &
    step=$!
    trap 'signalled=1; kill -USR2 "$step" 2>/dev/null || true' TERM USR2
    while :; do
        wait "$step" && code=0 || code=$?
        ((signalled)) || break
        signalled=0
    done
    trap '' TERM USR2  # so that the job can still be requeued
    return "$code"
}"""


def to_slurm(
    options: SubmitOptions, tasks: list[Train], outs: list[Path], home: Path, at_once: int | None = None
) -> list[Job]:
    """Submit tasks with their run folders, several as one array of which `at_once` elements may run at a time; return
    one job per task. `home` is the folder that contains the runs, or the run folder of a single one."""
    try:
        import submitit
    except ImportError as error:
        why = f"submit needs submitit, which cannot be imported ({error})"
        raise UserError(f"{why}; pip install submitit, or use a script of slurm/ with sbatch") from None
    files = home / FILES
    executor = submitit.SlurmExecutor(folder=files, max_num_timeout=options.retries)
    executor.update_parameters(**slurm_parameters(options, outs, home, at_once))
    before = set(files.iterdir())
    try:
        with contextlib.redirect_stderr(io.StringIO()), without_array_variables():  # submitit prints what it raises
            jobs = executor.submit_array(tasks)
    except submitit.core.utils.FailedJobError as error:
        for path in set(files.iterdir()) - before:
            if UNSENT.fullmatch(path.name):
                path.unlink()
        raise refusal(str(error)) from None
    return [Job(job.job_id, "slurm", socket.gethostname()) for job in jobs]


def refusal(message: str) -> UserError | RunError:
    """Return the error for a job that sbatch refused with this message."""
    lines = [line.removeprefix("sbatch: error: ") for line in message.splitlines()]
    text = f"sbatch refused the job: {'; '.join(lines) or 'no reason given'}"
    if "contact slurm controller" in message.lower():
        return RunError(f"{text}; check that 'sinfo' works")
    if "job array specification" in message.lower():
        return UserError(f"{text}; an array has at most MaxArraySize runs, see 'scontrol show config'")
    return UserError(f"{text}; 'sinfo' lists the partitions and their limits")


@contextlib.contextmanager
def without_array_variables() -> Iterator[None]:
    """Hide the variables of a job array: a job that inherits them would take itself for an element of that array."""
    inherited = {name: value for name, value in os.environ.items() if name.startswith("SLURM_ARRAY_")}
    for name in inherited:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(inherited)


def slurm_parameters(
    options: SubmitOptions, outs: list[Path], home: Path, at_once: int | None = None
) -> dict[str, Any]:
    """Return the parameters for submitit: sbatch's options and the lines of the batch script."""
    srun = ["--kill-on-bad-exit=1", "--open-mode=append", f"--mpi={options.mpi}"]
    if options.cpus_per_rank is not None:  # since Slurm 22.05 srun does not inherit it from sbatch
        srun.append(f"--cpus-per-task={options.cpus_per_rank}")
    given = {
        "job_name": options.name or f"fedmpi-{home.name}",
        "nodes": options.nodes,
        "ntasks_per_node": options.ranks_per_node,
        "time": options.minutes,
        "signal_delay_s": options.warning_seconds,
        "partition": options.partition,
        "cpus_per_task": options.cpus_per_rank,
        "gpus_per_node": options.gpus_per_node,
        "mem": None if options.mem is None else f"{max(1, round(options.mem * 1024))}M",
        "account": options.account,
        "qos": options.qos,
        "constraint": options.constraint,
        "srun_args": srun,
        "setup": [SEAL, BATCH_SRUN, *([options.setup] if options.setup else [])],
        "teardown": teardown(options, outs),
        "array_parallelism": at_once or len(outs),
        "additional_parameters": {"requeue": True},  # not the default on every cluster
    }
    return {name: value for name, value in given.items() if value is not None} | {"wckey": None}  # not submitit's own


def teardown(options: SubmitOptions, outs: list[Path]) -> list[str]:
    """Return the lines of the batch script after srun, which requeue the job of its own run."""
    command = shlex.join([sys.executable, "-m", "fedmpi", "requeue", "--retries", str(options.retries), "--run"])
    return [
        "code=$?",
        f"runs=({shlex.join(map(str, outs))})",
        f'{command} "${{runs[${{SLURM_ARRAY_TASK_ID:-0}}]}}" $code',
        "exit $?",
    ]
