"""`fedmpi train --ranks N`: start N ranks on this machine, watch over them, and restart them when one dies.

The ranks are forked from a process that has imported torch once; where torch is built for CUDA, which a process may not
use after a fork, each rank is a new interpreter. They meet through a file in a folder that only its owner can enter,
so nothing listens for them; gloo itself stays on the loopback interface. In a Slurm step with one task per node every
task starts the ranks of its node; these meet over TCP (comm/torch.py), and the job is requeued where one of them dies.

Every rank is in a process group of its own, so that a Ctrl-C at the terminal reaches the launcher alone, which passes
each signal on once.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import torch

from ..comm.env import STORE, TORCH, Place, find_place, rendezvous
from ..comm.leftovers import MEMORY, in_use, sweep
from ..errors import AGAIN, UserError, complain, exit_code
from ..runs.config import Launch
from ..runs.options import parse
from ..runs.stop import INTERRUPTED

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGHUP)
FINAL = (2, AGAIN, INTERRUPTED)  # exit codes after which a restart is no use
OTHERS_SECONDS = 15.0  # for ranks to notice that another one is gone
SAVED_SECONDS = 120.0  # the same where it has stopped in good order: the others may be writing still
RESTARTS = 3


def launch(asked: Launch, arguments: list[str]) -> int:
    """Run `fedmpi train` on several ranks of this machine; return their exit code: 0, 2, 75, 130, or 1 for a fault."""
    node = find_place(os.environ)
    check(asked, node, parse(arguments).comm)
    restarts = asked.max_restarts if asked.max_restarts is not None else RESTARTS if node.size == 1 else 0
    sweep()
    gc.freeze()  # or the first collection in a rank would write to, and so copy, the memory that it shares
    with meeting_folder() as folder, blocked_signals():
        for attempt in range(restarts + 1):
            world = variables(asked.ranks, node, folder / f"attempt-{attempt}", attempt)
            ranks = Ranks([start(world | own, arguments) for own in numbers(asked.ranks, node)])
            code = ranks.wait()
            if code == 0 or code in FINAL:
                break
            again = attempt < restarts and not ranks.told
            complain(ranks.blame() + (f"; restart {attempt + 1} of {restarts}" if again else ""))
            if not again:
                break
    return code


def check(asked: Launch, node: Place, comm: str) -> None:
    """Refuse ranks inside ranks, and what these ranks cannot do."""
    if node.size > 1 and not (node.launcher == "srun" and node.local_size == 1):
        raise UserError(
            f"--ranks is {asked.ranks} but {node.launcher} has started {node.size} ranks already; leave out one of them"
        )
    if comm == "mpi":
        raise UserError(
            f"--ranks starts no MPI ranks, but --comm is mpi; start with 'mpiexec -n {asked.ranks} python -m mpi4py -m "
            "fedmpi train --comm mpi ...', or leave --comm out"
        )
    if asked.max_restarts and node.size > 1:
        raise UserError(
            f"--max_restarts is {asked.max_restarts} but the ranks are on {node.size} nodes, where a rank that died is "
            "restarted with its job ('fedmpi requeue'); leave it out"
        )


def numbers(count: int, node: Place) -> list[dict[str, str]]:
    """The variables that differ between the ranks of this node."""
    return [{TORCH[0]: str(node.rank * count + k), TORCH[2]: str(k)} for k in range(count)]


def variables(count: int, node: Place, store: Path, attempt: int) -> dict[str, str]:
    """The variables that tell ranks who they are and where they meet."""
    world = {TORCH[1]: str(node.size * count), TORCH[3]: str(count), STORE: str(store) if node.size == 1 else ""}
    world |= {"FEDMPI_LAUNCH": f"{socket.gethostname()}-{os.getpid()}", "FEDMPI_RESTART_COUNT": str(attempt)}
    if node.size > 1 and (meeting := rendezvous(node, os.environ)) is not None:
        world |= {"MASTER_ADDR": meeting[0], "MASTER_PORT": str(meeting[1])}
    return world


@contextlib.contextmanager
def meeting_folder() -> Iterator[Path]:
    """Make a folder that only its owner can enter, in use while a process of this launch is alive."""
    shared = MEMORY if os.access(MEMORY, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="fedmpi-launch-", dir=shared))
    try:
        with in_use(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def blocked_signals() -> Iterator[None]:
    """Keep signals for `Ranks.wait`, which takes them one by one."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*PASSED_ON, signal.SIGCHLD))
    try:
        yield
    finally:
        while signal.sigtimedwait([*PASSED_ON, signal.SIGCHLD], 0):  # the ranks have ended: nobody is left to be told
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start(own: dict[str, str], arguments: list[str]) -> int:
    """Start a rank; return its process id."""
    if torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return start_anew(own, arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        be_rank(own, arguments)
    return pid


def start_anew(own: dict[str, str], arguments: list[str]) -> int:
    """Start a rank as a new interpreter; return its process id."""
    command = [sys.executable, "-m", "fedmpi", "train", *arguments]
    process = subprocess.Popen(command, env=os.environ | own, stdin=subprocess.DEVNULL, preexec_fn=stand_alone)
    process.returncode = 0  # `Ranks` waits for it
    return process.pid


def stand_alone() -> None:
    """In a new rank: leave the launcher's process group, and take signals again."""
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*PASSED_ON, signal.SIGCHLD))


def be_rank(own: dict[str, str], arguments: list[str]) -> NoReturn:
    """Train as a rank in a forked process, and end it."""
    from ..runs.rank import Rank

    code = 1
    try:
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.environ |= own
        stand_alone()
        code = exit_code(lambda: Rank.begin().train(arguments))
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Ranks:
    """The ranks of one attempt."""

    def __init__(self, pids: list[int]) -> None:
        self.running = dict(zip(pids, range(len(pids)), strict=True))
        self.codes: dict[int, int] = {}  # of the ranks that have ended, in that order
        self.told = False
        self.deadline: float | None = None

    def wait(self) -> int:
        """Pass signals on until all ranks have ended; return the code that says most about how."""
        while self.running:
            caught = signal.sigtimedwait([*PASSED_ON, signal.SIGCHLD], 1.0)
            if caught is not None and caught.si_signo != signal.SIGCHLD:
                self.told = True
                self.send(signal.SIGTERM if caught.si_signo == signal.SIGHUP else signal.Signals(caught.si_signo))
            for pid in list(self.running):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.codes[self.running.pop(pid)] = os.waitstatus_to_exitcode(status)
                    self.see_to_the_others()
            if self.deadline is not None and time.monotonic() > self.deadline:
                self.send(signal.SIGKILL)
        codes = set(self.codes.values())
        return 0 if codes == {0} else next((code for code in FINAL if code in codes), 1)

    def see_to_the_others(self) -> None:
        """Limit the time of the ranks that are left; end those that wait for a word that has been said."""
        code = list(self.codes.values())[-1]
        if code in (2, INTERRUPTED):
            self.send(signal.SIGTERM)
        if code and self.deadline is None:
            self.deadline = time.monotonic() + (SAVED_SECONDS if code == AGAIN else OTHERS_SECONDS)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the ranks that are left."""
        for pid in self.running:
            os.kill(pid, number)  # it exists until it is waited for

    def blame(self) -> str:
        """Return which rank failed first, and how."""
        rank, code = next((rank, code) for rank, code in self.codes.items() if code)
        how = f"ended with exit code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
        return f"rank {rank} of {len(self.codes)} {how}"
