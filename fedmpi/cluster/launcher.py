"""`fedmpi train --ranks N`: start N ranks on this machine, watch them, and restart all of them when one dies.

The ranks are forked from a process that has imported torch once. CUDA cannot be used after a fork, so with a torch
built for it each rank is a new interpreter. They rendezvous through a file in a private folder, so there is no
listening socket; gloo itself stays on the loopback interface. In a Slurm step with one task per node every task starts
the ranks of its node; these rendezvous over TCP (comm/torch.py), and the job is requeued when one of them dies.

Every rank has its own process group, so that a Ctrl-C at the terminal reaches only the launcher, which forwards each
signal once.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import math
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from ..comm.env import STORE, TORCH, Place, find_place, rendezvous
from ..comm.leftovers import MEMORY, in_use, sweep
from ..device import survives_fork
from ..errors import AGAIN, UserError, complain, exit_code
from ..runs.config import Launch
from ..runs.options import parse
from ..runs.stop import INTERRUPTED
from .requeue import may_restart

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGHUP)
REPORTED = (2, AGAIN, INTERRUPTED)  # exit codes of a rank that are the launcher's too, the most telling first
OTHERS_SECONDS = 15.0  # for ranks to notice that another one is gone
SAVED_SECONDS = 120.0  # the same if that stopped in good order: the others may still be writing
RESTARTS = 3


def launch(options: Launch, arguments: list[str]) -> int:
    """Run `fedmpi train` on several ranks of this machine; return their exit code: 0, 2, 75, 130, or 1 for a
    failure."""
    node = find_place(os.environ)
    check(options, node, parse(arguments).comm)
    restarts = options.max_restarts
    if restarts is None:
        restarts = RESTARTS if node.size == 1 else 0

    def again(attempt: int, code: int, ranks: Ranks) -> bool:
        if code in REPORTED:
            return False
        more = not ranks.signalled and may_restart(code, attempt, restarts)
        complain(ranks.blame() + (f"; restart {attempt + 1} of {restarts}" if more else ""))
        return more

    return run_ranks(options.ranks, node, arguments, again)


def run_ranks(
    count: int,
    node: Place,
    arguments: list[str],
    again: Callable[[int, int, Ranks], bool],
    grace: float = math.inf,
) -> int:
    """Start ranks on this node and wait for them, as long as they fail and are to be started `again` (attempt, exit
    code, ranks); return their last exit code. After a signal they have `grace` seconds to exit."""
    sweep()
    gc.freeze()  # the first collection in a rank would write to the shared memory, and so copy it
    with meeting_folder() as folder, blocked_signals():
        attempt = 0
        while True:
            worlds = variables(count, node, folder / f"attempt-{attempt}", attempt)
            ranks = Ranks([start(own, arguments) for own in worlds], grace)
            code = ranks.wait()
            if code == 0 or not again(attempt, code, ranks):
                return code
            attempt += 1


def check(options: Launch, node: Place, comm: str) -> None:
    """Refuse ranks within ranks, and options that these ranks cannot have."""
    if node.size > 1 and not (node.launcher == "srun" and node.local_size == 1):
        raise UserError(
            f"--ranks is {options.ranks} but {node.launcher} has started {node.size} ranks already; use one of them"
        )
    if comm == "mpi":
        raise UserError(
            f"--ranks starts no MPI ranks, but --comm is mpi; start with 'mpiexec -n {options.ranks} python -m mpi4py "
            "-m fedmpi train --comm mpi ...', or leave --comm out"
        )
    if options.max_restarts and node.size > 1:
        raise UserError(
            f"--max_restarts is {options.max_restarts} but the ranks are on {node.size} nodes, where a dead rank is "
            "restarted with its job ('fedmpi requeue'); leave it out"
        )


def variables(count: int, node: Place, store: Path, attempt: int) -> list[dict[str, str]]:
    """Return the variables that give each rank of this node its number, its world and its rendezvous."""
    world = {TORCH[1]: str(node.size * count), TORCH[3]: str(count), STORE: str(store) if node.size == 1 else ""}
    world |= {"FEDMPI_LAUNCH": f"{socket.gethostname()}-{os.getpid()}", "FEDMPI_RESTART_COUNT": str(attempt)}
    if node.size > 1 and (meeting := rendezvous(node, os.environ)) is not None:
        world |= {"MASTER_ADDR": meeting[0], "MASTER_PORT": str(meeting[1])}
    return [world | {TORCH[0]: str(node.rank * count + k), TORCH[2]: str(k)} for k in range(count)]


@contextlib.contextmanager
def meeting_folder() -> Iterator[Path]:
    """Make a private folder, marked as in use while a process of this launch is alive."""
    shared = MEMORY if os.access(MEMORY, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="fedmpi-launch-", dir=shared))
    try:
        with in_use(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def blocked_signals() -> Iterator[None]:
    """Block signals: `Ranks.wait` takes them one by one."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*FORWARDED, signal.SIGCHLD))
    try:
        yield
    finally:
        while signal.sigtimedwait([*FORWARDED, signal.SIGCHLD], 0):  # all ranks have ended
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start(own: dict[str, str], arguments: list[str]) -> int:
    """Start a rank, by a fork or, with CUDA, as a new interpreter; return its process id."""
    if not survives_fork():
        command = [sys.executable, "-m", "fedmpi", "train", *arguments]
        process = subprocess.Popen(command, env=os.environ | own, stdin=subprocess.DEVNULL, preexec_fn=stand_alone)
        process.returncode = 0  # `Ranks` waits for it
        return process.pid
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        be_rank(own, arguments)
    return pid


def stand_alone() -> None:
    """Leave the launcher's process group and unblock signals, in a new rank."""
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*FORWARDED, signal.SIGCHLD))


def be_rank(own: dict[str, str], arguments: list[str]) -> NoReturn:
    """Train as a rank in a forked process, then exit."""
    from ..runs.rank import begin, train

    code = 1
    try:
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.environ |= own
        stand_alone()
        code = exit_code(lambda: train(arguments, *begin()))
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

    def __init__(self, pids: list[int], grace: float = math.inf) -> None:
        self.running = dict(zip(pids, range(len(pids)), strict=True))
        self.codes: dict[int, int] = {}  # of ended ranks, in the order in which they ended
        self.signalled, self.grace = False, grace
        self.deadline = math.inf

    def wait(self) -> int:
        """Forward signals until all ranks have ended; return their most telling exit code."""
        while self.running:
            caught = signal.sigtimedwait([*FORWARDED, signal.SIGCHLD], 1.0)
            if caught is not None and caught.si_signo != signal.SIGCHLD:
                self.signalled = True
                self.limit(self.grace)
                self.send(signal.SIGTERM if caught.si_signo == signal.SIGHUP else signal.Signals(caught.si_signo))
            for pid in list(self.running):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    code = os.waitstatus_to_exitcode(status)
                    self.codes[self.running.pop(pid)] = code
                    if code in (2, INTERRUPTED):
                        self.send(signal.SIGTERM)  # the others would only repeat the error
                    if code:
                        self.limit(SAVED_SECONDS if code == AGAIN else OTHERS_SECONDS)
            if time.monotonic() > self.deadline:
                self.send(signal.SIGKILL)
        codes = set(self.codes.values())
        return 0 if codes == {0} else next((code for code in REPORTED if code in codes), 1)

    def limit(self, seconds: float) -> None:
        """Kill the ranks that are left after this time; the first limit counts."""
        if self.deadline == math.inf:
            self.deadline = time.monotonic() + seconds

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the remaining ranks."""
        for pid in self.running:
            os.kill(pid, number)  # it exists until it is waited for

    def blame(self) -> str:
        """Return an error message with the rank that failed first."""
        rank, code = next((rank, code) for rank, code in self.codes.items() if code)
        how = f"ended with exit code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
        return f"rank {rank} of {len(self.codes)} {how}"
