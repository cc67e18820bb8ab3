"""Who trains this round, and on which rank: drawn from (seed, round) on every rank alike, so that no message is
needed."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from .seeds import generator


@dataclass(frozen=True)
class Cohort:
    """The clients of one round: ids in ascending order, their weights (samples) and the rank that hosts each."""

    cids: tuple[int, ...]
    weights: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def total(self) -> int:
        """The weight of the whole cohort."""
        return sum(self.weights)

    def at(self, rank: int) -> list[int]:
        """The positions in the cohort of the clients that a rank hosts."""
        return [i for i, r in enumerate(self.ranks) if r == rank]

    @property
    def most_on_a_rank(self) -> int:
        """The largest number of clients that one rank hosts."""
        return int(np.bincount(self.ranks).max())


def draw(seed: int, round: int, sizes: np.ndarray, count: int, ranks: int) -> Cohort:
    """`count` clients without replacement, placed longest first."""
    cids = np.sort(generator(seed, "cohort", round).choice(len(sizes), count, replace=False, shuffle=False))
    weights = sizes[cids]
    return Cohort(tuple(cids.tolist()), tuple(weights.tolist()), place(weights.tolist(), ranks))


def place(weights: list[int], ranks: int) -> tuple[int, ...]:
    """A rank for each client: the longest first, each to the rank with the least to do (ties: the lowest rank)."""
    loads = [(0, rank) for rank in range(ranks)]
    placed = [0] * len(weights)
    for i in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        load, rank = heapq.heappop(loads)
        placed[i] = rank
        heapq.heappush(loads, (load + weights[i], rank))
    return tuple(placed)
