"""Randomness by counters: every draw is a function of (seed, purpose, round, client) and of nothing else.

So it does not matter which rank hosts a client, which clients ran before it, or how often a run was restarted. Every
stream of fedmpi is made here. Their numbers must never change: old runs resume, and data sets keep their SHA-256.
"""

from __future__ import annotations

import numpy as np

STREAMS = {"model": 0, "cohort": 1, "batches": 2, "torch": 3, "work": 4, "whole": 5, "meta": 6, "tests": 7}
DATA_STREAMS = {"split": 0x5F117, "holdout": 0x4E7A, "styles": 0x100C5}
ATTACK, AUGMENT = 0xA77AC, 0x5EED_A06


def sequence(seed: int, stream: str, *counters: int) -> np.random.SeedSequence:
    """Return the seed sequence of one purpose in training; streams and counters never overlap."""
    return np.random.SeedSequence(seed, spawn_key=(STREAMS[stream], *counters))


def generator(seed: int, stream: str, *counters: int) -> np.random.Generator:
    """Return a fresh numpy generator for one purpose in training."""
    return np.random.Generator(np.random.Philox(sequence(seed, stream, *counters)))


def torch_seed(seed: int, stream: str, *counters: int) -> int:
    """Return a number for `torch.manual_seed`, for what torch draws by itself (initial weights, dropout)."""
    return int(sequence(seed, stream, *counters).generate_state(1, np.uint64)[0] >> 1)


def augmentation_seed(seed: int) -> int:
    """Return the seed of a batch's augmentation; layers draw other numbers under the seed of the batch itself."""
    return seed ^ AUGMENT


def data_generator(seed: int, stream: str, *counters: int) -> np.random.Generator:
    """Return a fresh numpy generator for what happens to data before training: split, held-out set, styles."""
    return np.random.default_rng(np.random.SeedSequence([seed, DATA_STREAMS[stream], *counters]))


def attack_generator(seed: int, purpose: int) -> np.random.Generator:
    """Return a fresh numpy generator for an attack: its samples (purpose 0), the halves of a repeat (1, 2, ...)."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(ATTACK, purpose)))


def raw_bits(*numbers: int) -> np.random.PCG64:
    """Return PCG64 for data that are made or chosen once: its raw bits are the same in every version of numpy."""
    return np.random.PCG64(np.random.SeedSequence(numbers))
