"""Jobs on this machine: a process in the background that restarts a run where Slurm would requeue it.

The supervisor has a session of its own, so it keeps running when the terminal is closed. It starts the ranks and waits
for them like `fedmpi train --ranks` (launcher.py), and decides about a restart like `fedmpi requeue`. On SIGTERM it
signals the ranks, which save and exit. While it is alive it holds the lock of a file in the run folder, by which others
see it.
"""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..comm.env import Place
from ..errors import UserError, complain, exit_code
from .requeue import decide, record_attempt
from .status import FILES, SUPERVISOR, Job

if TYPE_CHECKING:
    from .launcher import Ranks
    from .submit import SubmitOptions

GRACE = 120.0  # seconds for ranks to save after a signal


def start(options: SubmitOptions, run: Path, arguments: list[str]) -> Job:
    """Start the supervisor of a run that trains with these arguments; return the job, whose id is its process id."""
    environ = dict(os.environ)
    if options.gpus_per_node is not None:
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(options.gpus_per_node)))
    command = [sys.executable, "-m", __name__, str(run), str(options.ranks), str(options.retries), *arguments]
    if options.setup is not None:
        command = ["bash", "-c", f'{options.setup}\nexec "$@"', "bash", *command]
    files = run / FILES
    lock = os.open(files / SUPERVISOR, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of the open file, which the supervisor inherits
        with open(files / f"{SUPERVISOR}.log", "a") as log:
            process = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[lock],
                start_new_session=True,
            )
    except BlockingIOError:
        raise UserError(f"{run} has just been submitted by another process; see 'fedmpi status'") from None
    finally:
        os.close(lock)
    process.returncode = 0  # it outlives this process: nobody waits for it
    return Job(str(process.pid), "local", socket.gethostname())


def supervise(run: Path, ranks: int, retries: int, arguments: list[str]) -> int:
    """Start the ranks until the run is finished or not to be restarted; return the exit code of the last attempt."""
    import fedmpi.runs.run  # noqa: F401  # once, before the ranks are forked

    from .launcher import run_ranks

    job = str(os.getpid())

    def again(attempt: int, code: int, ended: Ranks) -> bool:
        more, why = decide(code, run, retries, job, attempt)
        if more and ended.signalled:
            more, why = False, "its supervisor was signalled to stop"
        record_attempt(run, code, {"job": job}, attempt, more, why)
        complain(f"attempt {attempt}: {ended.blame()}; " + ("restarting" if more else f"end: {why}"))
        return more

    for handle, kind in ((1, "out"), (2, "err")):
        with open(run / FILES / f"{job}_0_log.{kind}", "ab") as log:
            os.dup2(log.fileno(), handle)
    return run_ranks(ranks, Place("alone", 0, 1, 0, 1), arguments, again, GRACE)


if __name__ == "__main__":
    folder, count, most, *rest = sys.argv[1:]
    sys.exit(exit_code(lambda: supervise(Path(folder), int(count), int(most), rest)))
