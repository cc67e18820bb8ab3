"""Stop a run in good order: signals and a time budget set a flag; after each round the ranks sum their flags, save and
exit together.

A separate thread reads signals from a pipe that Python's C handler writes to, because the main thread may wait in a
collective, where no Python code runs. SIGTERM is what Slurm and torchrun send before they kill, SIGUSR2 is submitit's
warning before the time limit, SIGINT is a Ctrl-C: the first one stops the run in good order; a second one, more than a
second later, ends it at once (torchrun forwards a Ctrl-C to ranks that have already received it).
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..comm.env import STORE, Place
from ..errors import AGAIN, complain

log = logging.getLogger("fedmpi")

ALL = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
KINDS = ("SIGTERM", "SIGINT", "SIGUSR2", "time")
INTERRUPTED = 130  # the exit code of a second SIGINT
ONE_PRESS_SECONDS = 1.0
END = b"\0"  # ends the watcher
LOOK_SECONDS = 1.0  # between checks that the launcher is alive

_catching = False


def _release_in_child() -> None:
    """Stop catching signals in a forked child: they are not meant for this run."""
    global _catching
    if _catching:
        _catching = False
        with contextlib.suppress(ValueError):  # forked by another thread than the main one
            signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_release_in_child)


_following = False


def follow_launcher(place: Place, environ: Mapping[str, str]) -> None:
    """Exit if this rank's launcher is gone: nothing would end or restart the rank, and it would block the next launch.

    A thread watches the parent process. Saved files stay intact, because they are written to a temporary file and
    renamed. Ranks started by hand, or by Slurm, which ends them itself, have no such launcher.
    """
    global _following
    elastic = place.launcher == "torchrun" and "TORCHELASTIC_RUN_ID" in environ
    kept = place.launcher == "submitit" and environ.get("SUBMITIT_EXECUTOR") == "local"
    if _following or not (place.launcher in ("fedmpi", "mpi") or elastic or kept):
        return
    _following = True
    host, _, number = environ.get("FEDMPI_LAUNCH", "").rpartition("-")  # set by launcher.py or an mpiexec script
    named = int(number) if host == socket.gethostname() and number.isdecimal() else None
    parent = named if place.launcher == "fedmpi" else os.getppid()

    def look() -> None:
        while os.getppid() == parent and (named is None or runs(named)):
            time.sleep(LOOK_SECONDS)
        with contextlib.suppress(OSError, ValueError):  # standard error may be closed
            complain(f"rank {place.rank}: the launcher is gone; exiting")
        if environ.get(STORE):
            shutil.rmtree(Path(environ[STORE]).parent, ignore_errors=True)  # the rendezvous of the ranks
        os._exit(1)

    threading.Thread(target=look, name="fedmpi-launcher", daemon=True).start()


def runs(pid: int) -> bool:
    """Return whether a process on this machine is running; a zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return not Path("/proc/self/stat").exists()


class Stopped(SystemExit):
    """The exit of a run that stopped in good order and can be restarted: exit code 75."""

    def __init__(self, round: int, why: str) -> None:
        super().__init__(AGAIN)
        self.round, self.why = round, why


class Stop:
    """The reasons to stop that this rank knows of. As a context manager it catches signals, in the main thread only."""

    def __init__(
        self,
        signals: Iterable[signal.Signals] = (),
        minutes: float | None = None,
        began: float | None = None,
        speaks: bool = False,
    ) -> None:
        self.signals, self.minutes, self.speaks = tuple(signals), minutes, speaks
        self.round_began = time.monotonic()
        self.began = self.round_began if began is None else began
        self.longest = 0.0
        self.seen: set[str] = set()
        self.interrupted_at: float | None = None

    def __enter__(self) -> Stop:
        global _catching
        self.catches = bool(self.signals) and threading.current_thread() is threading.main_thread()
        if self.catches:
            self.reader, self.writer = os.pipe()
            os.set_blocking(self.writer, False)
            self.former_fd = signal.set_wakeup_fd(self.writer, warn_on_full_buffer=False)
            self.former = {number: signal.signal(number, lambda *_: None) for number in self.signals}
            _catching = True
            self.watcher = threading.Thread(target=self._watch, name="fedmpi-stop", daemon=True)
            self.watcher.start()
        self.round_began = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        global _catching
        if not self.catches:
            return
        _catching = False
        for number, handler in self.former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self.former_fd)
        os.write(self.writer, END)  # closing it would not end the watcher: processes that were forked have it, too
        self.watcher.join()
        os.close(self.writer)
        os.close(self.reader)

    def _watch(self) -> None:
        while (caught := os.read(self.reader, 1)) != END:
            with contextlib.suppress(ValueError):  # not a known signal
                self.notice(signal.Signals(caught[0]))

    def notice(self, number: signal.Signals) -> None:
        """Record a signal; a second Ctrl-C ends this process."""
        if number not in self.signals:
            return
        if number == signal.SIGINT:
            now = time.monotonic()
            if self.interrupted_at is not None and now - self.interrupted_at > ONE_PRESS_SECONDS:
                complain("interrupted")
                os._exit(INTERRUPTED)
            self.interrupted_at = self.interrupted_at or now
        if self.speaks and number.name not in self.seen:
            again = "; Ctrl-C again ends it at once" if number == signal.SIGINT else ""
            log.warning("%s: stopping after this round%s", number.name, again)
        self.seen.add(number.name)

    def round_done(self) -> None:
        """Record the time of a round, and stop if another one might exceed the time budget."""
        now = time.monotonic()
        self.longest, self.round_began = max(self.longest, now - self.round_began), now
        if self.minutes is not None and now - self.began + self.longest > 60 * self.minutes:
            self.seen.add("time")

    @property
    def flags(self) -> list[int]:
        """Return 1 or 0 per kind of reason: whether this rank knows of it."""
        return [int(kind in self.seen) for kind in KINDS]


def in_words(flags: Iterable[int]) -> str:
    """Return the reasons of all ranks, from their summed flags, as text; '' if there is none."""
    return " and ".join(kind for kind, count in zip(KINDS, flags, strict=True) if count)
