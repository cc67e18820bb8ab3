"""Counters: the kernels that a device was given, the bytes that were moved, and what made the host wait."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Iterator


class Counts:
    """What happened since the last `clear`. `where` attributes a wait to the innermost frame of a watched package."""

    def __init__(self) -> None:
        self.kernels: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.where: Counter[str] = Counter()
        self.bytes_to_host = 0
        self.bytes_to_device = 0
        self.cache_emptied = 0
        self.watched: tuple[str, ...] = ("fedmpi",)
        self._thread = threading.local()

    def clear(self) -> None:
        """Set every counter to zero."""
        self.kernels.clear()
        self.waits.clear()
        self.where.clear()
        self.bytes_to_host = self.bytes_to_device = self.cache_emptied = 0

    def kernel(self, name: str) -> None:
        """Count one kernel."""
        if not getattr(self._thread, "inside", False):
            self.kernels[name] += 1

    @contextlib.contextmanager
    def one(self, name: str) -> Iterator[None]:
        """Count everything in the block as one kernel, as where CUDA has a fused one."""
        self.kernel(name)
        before = getattr(self._thread, "inside", False)
        self._thread.inside = True
        try:
            yield
        finally:
            self._thread.inside = before

    def wait(self, what: str) -> None:
        """Count that the host waited for the device."""
        self.waits[what] += 1
        place = self.place()
        if place is not None:
            self.where[f"{what}: {place}"] += 1

    def place(self) -> str | None:
        """Return "package/file.py:line" of the innermost frame of a watched package, or None."""
        frame = sys._getframe(1)
        while frame is not None:
            package = frame.f_globals.get("__name__", "").partition(".")[0]
            if package in self.watched:
                path = frame.f_code.co_filename
                _, found, inner = path.rpartition(f"/{package}/")
                return f"{package}/{inner}:{frame.f_lineno}" if found else f"{path}:{frame.f_lineno}"
            frame = frame.f_back
        return None


counts = Counts()


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    """Clear the counters and yield them."""
    counts.clear()
    yield counts
