"""Seconds by phase of a round."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

PHASES = ("local", "wait", "reduce", "server", "gather", "meta")


class Clock:
    """A stopwatch that is always in one phase, or in none."""

    def __init__(self, phase: str | None = None) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.phase, self.began = phase, time.perf_counter()

    def switch(self, phase: str | None) -> None:
        """Add the time since the last switch to the phase that ends, and start another."""
        now = time.perf_counter()
        if self.phase is not None:
            self.seconds[self.phase] += now - self.began
        self.phase, self.began = phase, now

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time a block as a phase; the phase before it ends."""
        self.switch(phase)
        try:
            yield
        finally:
            self.switch(None)
