"""The stopwatch of a round."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..device import CPU, synchronise

PHASES = ("local", "wait", "reduce", "server", "gather", "meta")


class Clock:
    """Seconds by phase of a round: a stopwatch that is always in one phase, or in none. A phase on an accelerator ends
    when that has done its work."""

    def __init__(self, phase: str | None = None, device: torch.device = CPU) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.device, self.phase, self.began = device, phase, time.perf_counter()

    def switch(self, phase: str | None) -> None:
        """End the current phase, and start another."""
        if phase != self.phase:
            synchronise(self.device)
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
