"""Jobs on this machine: submitit's local executor with a supervisor that restarts a run where Slurm would requeue it.

The supervisor is a process in a session of its own, so it keeps running when the terminal is closed. It starts the
ranks, each attempt at a new port, waits for them, and decides about a restart as `fedmpi requeue` does. On SIGTERM it
signals the ranks, which save and exit. While it is alive it holds the lock of a file in the run folder, by which others
see it.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from submitit import LocalExecutor
from submitit.local.local import LOCAL_REQUEUE_RETURN_CODE, Controller, LocalJob

from ..comm.env import SECRET
from ..errors import AGAIN, UserError, complain
from .requeue import decide, record_attempt
from .status import FILES, SUPERVISOR, Job

if TYPE_CHECKING:
    from .submit import SubmitOptions, Train

GRACE = 120.0  # seconds for ranks to save after a signal
OTHERS = 15.0  # seconds for ranks to notice that another one is gone
PORTS = range(20000, 30000)  # below the ephemeral ports of Linux


def start(options: SubmitOptions, train: Train, run: Path) -> Job:
    """Start a supervisor and its ranks; return the job, whose id is the supervisor's process id."""
    return Job(SupervisedExecutor(options, run).submit(train).job_id, "local", socket.gethostname())


class SupervisedExecutor(LocalExecutor):
    """submitit's local executor with our supervisor instead of its controller."""

    def __init__(self, options: SubmitOptions, run: Path) -> None:
        super().__init__(run / FILES)
        self.options, self.run = options, run
        self.update_parameters(tasks_per_node=options.ranks)

    def _submit_command(self, command: str) -> LocalJob[Any]:
        variables = {
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_NTASKS": str(self.options.ranks),
            "SUBMITIT_LOCAL_COMMAND": command,
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_LOCAL_TIMEOUT_S": "0",
            "SUBMITIT_LOCAL_SIGNAL_DELAY_S": "0",
            "SUBMITIT_LOCAL_WITH_SHELL": "",
            "SUBMITIT_STDERR_TO_STDOUT": "",
        }
        if self.options.gpus_per_node is not None:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(self.options.gpus_per_node)))
        supervisor = [sys.executable, "-m", __name__, str(self.run), str(self.options.retries)]
        if self.options.setup is not None:
            supervisor = ["bash", "-c", f'{self.options.setup}\nexec "$@"', "bash", *supervisor]
        lock = os.open(self.folder / SUPERVISOR, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of the open file, which the supervisor inherits
            with open(self.folder / f"{SUPERVISOR}.log", "a") as log:
                process = subprocess.Popen(
                    supervisor,
                    env=os.environ | variables,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[lock],
                    start_new_session=True,
                )
        except BlockingIOError:
            raise UserError(f"{self.run} has just been submitted by another process; see 'fedmpi status'") from None
        finally:
            os.close(lock)
        process.returncode = 0  # it outlives this process: nobody waits for it
        return LocalJob(folder=self.folder, job_id=str(process.pid), tasks=list(range(self.options.ranks)))


class Supervisor(Controller):
    """Starts the ranks, waits for them, and restarts them."""

    def __init__(self, run: Path, retries: int) -> None:
        self.signalled: float | None = None
        """when it received SIGTERM or SIGINT"""
        super().__init__(run / FILES)
        self.run_folder, self.retries = run, retries
        signal.signal(signal.SIGTERM, self._note_signal)
        signal.signal(signal.SIGINT, self._note_signal)

    def _note_signal(self, *_: object) -> None:
        self.signalled = self.signalled or time.monotonic()

    def supervise(self) -> int:
        """Start the ranks until the run is finished or not to be restarted; return the exit code of the last
        attempt."""
        for attempt in itertools.count():
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            os.environ[SECRET] = secrets.token_hex(32)
            os.environ |= {"FEDMPI_RESTART_COUNT": str(attempt), "FEDMPI_LAUNCH": f"supervisor {self.pid}"}
            self.start_tasks()
            code = overall(self.wait())
            self.kill_tasks()
            again, why = decide(code, self.run_folder, self.retries, self.pid, attempt)
            if again and self.signalled is not None:
                again, why = False, "its supervisor was signalled to stop"
            if code:
                record_attempt(self.run_folder, code, {"job": self.pid}, attempt, again, why)
            complain(f"attempt {attempt} ended with exit code {code}; " + ("restarting" if again else f"end: {why}"))
            if not again:
                return code
        raise AssertionError("the count is endless")

    def wait(self, freq: int = 10) -> list[int]:
        """Return the exit codes of all ranks. Ranks that are signalled, or left by others, have limited time to
        exit."""
        first_failure: float | None = None
        next_signal = 0.0
        while True:
            codes = [task.poll() for task in self.tasks]
            ended = [code for code in codes if code is not None]
            if len(ended) == len(codes):
                return ended
            now = time.monotonic()
            if any(ended) and first_failure is None:
                first_failure = now
            if self.signalled is not None and now >= next_signal:  # repeated: submitit's handler ignores the first ones
                self._forward_signal(signal.SIGTERM)
                next_signal = now + 3
            if (self.signalled and now > self.signalled + GRACE) or (first_failure and now > first_failure + OTHERS):
                self._forward_signal(signal.SIGKILL)
            time.sleep(1 / freq)


def overall(codes: list[int]) -> int:
    """Return one exit code for all ranks: 75 if any rank stopped in good order, else 2 if any, else the largest."""
    found = {AGAIN if code == LOCAL_REQUEUE_RETURN_CODE else code if code >= 0 else 128 - code for code in codes}
    return AGAIN if AGAIN in found else 2 if 2 in found else max(found)


def free_port() -> int:
    """Return a port on which nobody listens."""
    for port in random.sample(PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue
    raise UserError(f"100 ports between {PORTS.start} and {PORTS.stop} were tried and none is free")


if __name__ == "__main__":
    sys.exit(Supervisor(Path(sys.argv[1]), int(sys.argv[2])).supervise())
