"""Jobs on this machine: submitit's local executor, with a keeper that starts a run again where Slurm would queue it.

The keeper is a process in a session of its own, so that it outlives the terminal. It starts the ranks, each life at a
port of its own, waits for them, and decides as `fedmpi requeue` does. Told to end (SIGTERM), it tells the ranks, which
save and leave. It has the lock of a file in the run folder for as long as it lives, which is how others see that it
does.
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
from .status import FILES, KEEPER, verdict
from .submit import add_life

if TYPE_CHECKING:
    from .submit import Train

GRACE = 120.0  # seconds that ranks have to save after they were told to end
OTHERS = 15.0  # seconds that ranks have to notice that another one is gone
PORTS = range(20000, 30000)  # below those that Linux hands out by itself


def start(train: Train, run: Path, ranks: int, retries: int, gpus: int | None, setup: str | None) -> int:
    """Start a keeper with its ranks; returns its process id."""
    return int(Kept(run, ranks, retries, gpus, setup).submit(train).job_id)


class Kept(LocalExecutor):
    """submitit's local executor, with our keeper in place of its controller."""

    def __init__(self, run: Path, ranks: int, retries: int, gpus: int | None, setup: str | None) -> None:
        super().__init__(run / FILES)
        self.run, self.retries, self.gpus, self.setup = run, retries, gpus, setup
        self.update_parameters(tasks_per_node=ranks)

    def _submit_command(self, command: str) -> LocalJob[Any]:
        ranks = self.parameters["tasks_per_node"]
        variables = {
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_NTASKS": str(ranks),
            "SUBMITIT_LOCAL_COMMAND": command,
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_LOCAL_TIMEOUT_S": "0",
            "SUBMITIT_LOCAL_SIGNAL_DELAY_S": "0",
            "SUBMITIT_LOCAL_WITH_SHELL": "",
            "SUBMITIT_STDERR_TO_STDOUT": "",
        }
        if self.gpus is not None:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(self.gpus)))
        keeper = [sys.executable, "-m", "fedmpi.cluster.supervisor", str(self.run), str(self.retries)]
        if self.setup is not None:
            keeper = ["bash", "-c", f'{self.setup}\nexec "$@"', "bash", *keeper]
        lock = os.open(self.folder / KEEPER, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of what is opened here: the keeper has it from us
            with open(self.folder / f"{KEEPER}.log", "a") as log:
                process = subprocess.Popen(
                    keeper,
                    env=os.environ | variables,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[lock],
                    start_new_session=True,
                )
        except BlockingIOError:
            raise UserError(f"{self.run} has just been submitted by somebody else; see 'fedmpi status'") from None
        finally:
            os.close(lock)
        process.returncode = 0  # as far as we are concerned: it is there to outlive us, not to be waited for
        return LocalJob(folder=self.folder, job_id=str(process.pid), tasks=list(range(ranks)))


class Keeper(Controller):
    """Starts the ranks, waits for them, and starts them again."""

    def __init__(self, run: Path, retries: int) -> None:
        self.told: float | None = None
        """when it was told to end"""
        super().__init__(run / FILES)
        self.run_folder, self.retries = run, retries
        signal.signal(signal.SIGTERM, self._tell)
        signal.signal(signal.SIGINT, self._tell)

    def _tell(self, *_: object) -> None:
        self.told = self.told or time.monotonic()

    def keep(self) -> int:
        """Let the run live until it is done or not to begin again; returns the code of its last life."""
        for life in itertools.count():
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            os.environ[SECRET] = secrets.token_hex(32)
            os.environ |= {"FEDMPI_RESTART_COUNT": str(life), "FEDMPI_LAUNCH": f"keeper {self.pid}"}
            self.start_tasks()
            code = overall(self.wait())
            self.kill_tasks()
            again, why = verdict(code, self.run_folder, self.retries, self.pid, life)
            if again and self.told is not None:
                again, why = False, "its keeper was told to end"
            if code:
                add_life(self.run_folder, code, {"job": self.pid}, life, again, why)
            complain(f"life {life} ended with code {code}; {'starting again' if again else 'the end'} {why}".rstrip())
            if not again:
                return code
        raise AssertionError("a count has no end")

    def wait(self, freq: int = 10) -> list[int]:
        """The exit codes of all ranks. Who is told to end, or left behind by the others, has some time to do so."""
        left: float | None = None
        next_word = 0.0
        while True:
            codes = [task.poll() for task in self.tasks]
            ended = [code for code in codes if code is not None]
            if len(ended) == len(codes):
                return ended
            now = time.monotonic()
            if any(ended) and left is None:
                left = now
            if self.told is not None and now >= next_word:  # again and again: submitit's handler swallows it at first
                self._forward_signal(signal.SIGTERM)
                next_word = now + 3
            if (self.told and now > self.told + GRACE) or (left and now > left + OTHERS):
                self._forward_signal(signal.SIGKILL)
            time.sleep(1 / freq)


def overall(codes: list[int]) -> int:
    """One exit code for all ranks: 0 where all are done, and what asks for most where they differ."""
    found = {AGAIN if code == LOCAL_REQUEUE_RETURN_CODE else code if code >= 0 else 128 - code for code in codes}
    return AGAIN if AGAIN in found else 2 if 2 in found else max(found)


def free_port() -> int:
    """A port at which nobody listens now."""
    for port in random.sample(PORTS, 100):
        with socket.socket() as one:
            try:
                one.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue
    raise UserError(f"100 ports between {PORTS.start} and {PORTS.stop} were tried and none is free")


if __name__ == "__main__":
    sys.exit(Keeper(Path(sys.argv[1]), int(sys.argv[2])).keep())
