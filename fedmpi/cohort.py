"""Who trains this round, and on which rank: drawn from (seed, round) on every rank alike, so that no message is
needed."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from .seeds import generator
from .work import Work

A_STEP_A_SAMPLE = Work(batch=1)


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


def draw(
    seed: int,
    round: int,
    sizes: np.ndarray,
    count: int,
    ranks: int,
    work: Work = A_STEP_A_SAMPLE,
    at_home: bool = False,
) -> Cohort:
    """`count` clients without replacement, placed by what they have to do, or each on its home rank."""
    cids = np.sort(generator(seed, "cohort", round).choice(len(sizes), count, replace=False, shuffle=False)).tolist()
    weights = sizes[cids].tolist()
    if at_home:
        placed = tuple(home(cid, ranks) for cid in cids)
    else:
        placed = place([load(work, seed, round, c, w) for c, w in zip(cids, weights, strict=True)], ranks)
    return Cohort(tuple(cids), tuple(weights), placed)


def load(work: Work, seed: int, round: int, cid: int, samples: int) -> int:
    """What a client has to do in a round, in quarters of a sample: a client costs as much as a batch, each of its steps
    as much as a quarter of one, and then there are its samples. So a short last batch counts for less than a full one.

    Measured with batches of 32, when this was chosen, a client costs 29 samples and a step 1 (LeNet), 30 and 11 (CNN),
    271 and 148 (logistic) or none and 7 (ResNet-18): this waits less than longest first by steps or by samples
    (benchmarks/balance.py). What this run takes must not be measured: who trains where would depend on the clock.
    """
    steps = work.count(seed, round, cid, samples)
    epochs, rest = divmod(steps, -(-samples // work.batch))
    return work.batch * (4 + steps) + 4 * (epochs * samples + min(rest * work.batch, samples))


def home(cid: int, ranks: int) -> int:
    """The rank that keeps a client's memory."""
    return cid % ranks


def place(loads: list[int], ranks: int) -> tuple[int, ...]:
    """A rank for each client: the longest first, each to the rank with the least to do (ties: the lowest rank)."""
    busy = [(0, rank) for rank in range(ranks)]
    placed = [0] * len(loads)
    for i in sorted(range(len(loads)), key=lambda i: (-loads[i], i)):
        load, rank = heapq.heappop(busy)
        placed[i] = rank
        heapq.heappush(busy, (load + loads[i], rank))
    return tuple(placed)
