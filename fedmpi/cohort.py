"""Who trains in a round, on which rank, and how much of the work.

Everything is drawn from (seed, round, client) on every rank alike, so no message is needed and nothing depends on where
a client is hosted. Uneven work: stragglers run fewer steps than asked (FedProx's partial work, FedNova's premise).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from .errors import UserError
from .schedules import read_spec
from .seeds import generator

Share = Callable[[np.random.Generator], float]  # draws which part of its steps a client does, in (0, 1]
SHARES = {"full": (), "uniform": ("low", "high"), "stragglers": ("part", "low", "high")}


def full(rng: np.random.Generator) -> float:
    """Return 1: every client does all of its steps."""
    return 1.0


def make_share(text: str) -> Share:
    """Return the distribution of that name: `full`, `uniform:low,high`, or `stragglers:part,low,high` (that part of
    the clients draws from low to high, the others do everything)."""
    name, numbers = read_spec("--local.work", text, SHARES)
    if name == "full":
        return full
    low, high, part = numbers["low"], numbers["high"], numbers.get("part", 1.0)
    if not (0 < low <= high <= 1 and 0 <= part <= 1):
        raise UserError(f"--local.work is '{text}'; it needs 0 < low <= high <= 1, and a part in [0, 1]")

    return lambda rng: float(rng.uniform(low, high)) if rng.random() < part else 1.0


@dataclass(frozen=True)
class Work:
    """`epochs` over the client's samples, or `steps` batches where given; of which a client does its share."""

    epochs: int = 1
    steps: int | None = None
    batch: int = 32
    share: Share = full

    def count(self, seed: int, round: int, cid: int, samples: int, leave: int = 0) -> int:
        """Return the steps that a client takes, at least one where one was asked; `leave` epochs are left out."""
        an_epoch = -(-samples // self.batch)
        asked = self.steps if self.steps is not None else max(self.epochs - leave, 0) * an_epoch
        if self.share is full or not asked:
            return asked
        return max(1, int(self.share(generator(seed, "work", round, cid)) * asked + 0.5))  # rounded half up


A_STEP_A_SAMPLE = Work(batch=1)


@dataclass(frozen=True)
class Cohort:
    """The clients of one round: ids in ascending order, their weights (samples) and the rank that hosts each."""

    cids: tuple[int, ...]
    weights: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def total(self) -> int:
        """Return the weight of the whole cohort."""
        return sum(self.weights)

    def on(self, rank: int) -> list[int]:
        """Return the clients that a rank hosts."""
        return [cid for cid, host in zip(self.cids, self.ranks, strict=True) if host == rank]

    @property
    def most_on_a_rank(self) -> int:
        """Return the largest number of clients that one rank hosts."""
        return int(np.bincount(self.ranks).max())

    def most_on_a_node(self, node_of: Sequence[int]) -> int:
        """Return the largest number of clients that one node hosts, given the node of each rank."""
        return int(np.bincount(np.array(node_of)[list(self.ranks)]).max())


def draw(
    seed: int,
    round: int,
    sizes: np.ndarray,
    count: int,
    ranks: int,
    work: Work = A_STEP_A_SAMPLE,
    homes: Homes | None = None,
) -> Cohort:
    """Draw `count` clients without replacement and place them by load: on all ranks, or on those of their home."""
    cids = np.sort(generator(seed, "cohort", round).choice(len(sizes), count, replace=False, shuffle=False)).tolist()
    weights = sizes[cids].tolist()
    loads = [load(work, seed, round, c, w) for c, w in zip(cids, weights, strict=True)]
    return Cohort(tuple(cids), tuple(weights), place(loads, ranks) if homes is None else homes.place(cids, loads))


def load(work: Work, seed: int, round: int, cid: int, samples: int) -> int:
    """Return the load of a client in a round, in quarters of a sample: a client costs as much as a batch, each of its
    steps as much as a quarter of one, plus its samples. So a short last batch counts for less than a full one.

    Measured with batches of 32, when this was chosen, a client costs 29 samples and a step 1 (LeNet), 30 and 11 (CNN),
    271 and 148 (logistic) or none and 7 (ResNet-18): this waits less than longest first by steps or by samples
    (benchmarks/balance.py). What this run takes must not be measured: who trains where would depend on the clock.
    """
    steps = work.count(seed, round, cid, samples)
    epochs, rest = divmod(steps, -(-samples // work.batch))
    return work.batch * (4 + steps) + 4 * (epochs * samples + min(rest * work.batch, samples))


def place(loads: list[int], ranks: int) -> tuple[int, ...]:
    """Return a rank for each client: the longest first, each to the least loaded rank (ties: the lowest rank)."""
    busy = [(0, rank) for rank in range(ranks)]
    placed = [0] * len(loads)
    for i in sorted(range(len(loads)), key=lambda i: (-loads[i], i)):
        load, rank = heapq.heappop(busy)
        placed[i] = rank
        heapq.heappush(busy, (load + loads[i], rank))
    return tuple(placed)


@dataclass(frozen=True)
class Homes:
    """The node where each client is at home: any of its ranks reaches what the client keeps, and no other."""

    nodes: Sequence[Sequence[int]]
    """the ranks of each node"""
    of: np.ndarray | None = None
    """the node of each client; None if there is only one"""

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return sum(map(len, self.nodes))

    def node(self, cid: int) -> int:
        """Return the node where a client is at home."""
        return 0 if self.of is None else int(self.of[cid])

    def place(self, cids: Sequence[int], loads: Sequence[int]) -> tuple[int, ...]:
        """Return a rank of its home for each client, longest first."""
        here: dict[int, list[int]] = {}
        for i, cid in enumerate(cids):
            here.setdefault(self.node(cid), []).append(i)
        placed = [0] * len(cids)
        for node, members in here.items():
            ranks = self.nodes[node]
            for i, rank in zip(members, place([loads[i] for i in members], len(ranks)), strict=True):
                placed[i] = ranks[rank]
        return tuple(placed)


HEAVIEST = 10_000  # clients that are placed one by one
GOLDEN = 2654435769  # the golden ratio of 2**32


def find_homes(sizes: np.ndarray, work: Work, nodes: Sequence[Sequence[int]]) -> Homes:
    """Return homes with about equal loads per rank, each client's as if it did all of its work.

    The heaviest clients are placed longest first on all ranks, and are at home on the node of their rank. The others,
    the next heaviest first, are dealt in fixed proportions to the nodes by what each has left: multiples of the golden
    ratio, modulo 1, fall evenly into intervals, so a node gets its share of the large clients as of the small ones.
    """
    if len(nodes) == 1:
        return Homes(nodes)
    samples, which = np.unique(sizes, return_inverse=True)
    in_full = replace(work, share=full)
    loads = np.array([load(in_full, 0, 0, 0, int(count)) for count in samples], dtype=np.int64)[which]
    order = np.argsort(-loads, kind="stable")
    heaviest, others = order[:HEAVIEST], order[HEAVIEST:]
    ranks = sum(map(len, nodes))
    node_of = np.empty(ranks, dtype=np.int32)
    for node, members in enumerate(nodes):
        node_of[list(members)] = node
    of = np.empty(len(sizes), dtype=np.int32)
    of[heaviest] = node_of[list(place(loads[heaviest].tolist(), ranks))]
    busy, total = np.zeros(len(nodes), dtype=np.int64), int(loads.sum())
    np.add.at(busy, of[heaviest], loads[heaviest])
    left = [max(total * len(members) // ranks - int(b), 0) for members, b in zip(nodes, busy, strict=True)]
    bounds = [upto * 2**32 // max(sum(left), 1) for upto in accumulate(left)]
    turns = np.arange(len(others), dtype=np.uint64) * np.uint64(GOLDEN) % np.uint64(2**32)
    of[others] = np.searchsorted(np.array(bounds[:-1], dtype=np.uint64), turns, side="right")
    return Homes(nodes, of)
