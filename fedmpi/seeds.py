"""Randomness by counters: what happens is a function of (seed, what for, round, client) and of nothing else.

So it does not matter which rank hosts a client, which clients ran before it, or how often a run was restarted.
"""

from __future__ import annotations

import numpy as np

STREAMS = {"model": 0, "cohort": 1, "batches": 2, "torch": 3, "work": 4, "whole": 5, "meta": 6, "tests": 7}


def sequence(seed: int, stream: str, *counters: int) -> np.random.SeedSequence:
    """The seed sequence of one purpose; streams and counters never overlap."""
    return np.random.SeedSequence(seed, spawn_key=(STREAMS[stream], *counters))


def generator(seed: int, stream: str, *counters: int) -> np.random.Generator:
    """A fresh numpy generator for one purpose."""
    return np.random.Generator(np.random.Philox(sequence(seed, stream, *counters)))


def torch_seed(seed: int, stream: str, *counters: int) -> int:
    """A number for `torch.manual_seed`, for what torch draws by itself (initial weights, dropout)."""
    return int(sequence(seed, stream, *counters).generate_state(1, np.uint64)[0] >> 1)
