"""The processes that run a sweep: each holds the lock of its own file in the sweep's folder for as long as it lives.

Several may share a folder. `fedmpi cancel` finds them by these files.
"""

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
    """Hold a lock file in the folder of a sweep that names this process."""
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
    """Return the processes that run a sweep now; files left by killed ones do not count."""
    found = []
    for path in sorted(home.glob(f"{PREFIX}*")):
        try:
            with open(path, encoding="utf-8") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    found.append(json.loads(file.readline()))
        except (OSError, ValueError):  # it has just ended or started
            continue
    return [one for one in found if isinstance(one, dict) and {"host", "pid"} <= one.keys()]
