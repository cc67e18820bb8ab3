"""Which processes run a sweep on their machines: each holds the lock of a file of its own in the sweep's folder for as
long as it lives. Several may share a folder. `fedmpi cancel` ends them by that."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PREFIX = "process-"


@contextmanager
def announced(home: Path) -> Iterator[None]:
    """Announce this process in the folder of a sweep while it runs it."""
    path = home / f"{PREFIX}{socket.gethostname()}-{os.getpid()}"
    with open(path, "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}) + "\n")
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def processes(home: Path) -> list[dict[str, Any]]:
    """Return the processes that run a sweep now; files that a killed one has left are not counted."""
    found = []
    for path in sorted(home.glob(f"{PREFIX}*")):
        try:
            with open(path, encoding="utf-8") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    found.append(json.loads(file.readline()))
        except (OSError, ValueError):  # it has just ended, or has just begun
            continue
    return [one for one in found if isinstance(one, dict) and {"host", "pid"} <= one.keys()]
