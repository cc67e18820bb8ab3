"""Which ranks share a node, and which of them carries what between the nodes.

Every rank owns a slice of the vector. Between nodes a slice travels once per node, whatever the number of ranks there:
the ranks of a node share the slices of all other nodes among them, in turn. A rank *carries* its share: it adds up what
its node has for such a slice and sends the sum to the owner, and it receives the owner's new slice for the whole node.

    slice s of node B, as node A sees it:   ranks of A -> (shared memory) -> carrier(A, s) -> (link) -> s -> and back
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property


class Links:
    """The nodes, each a list of its ranks in ascending order, as one rank sees them."""

    def __init__(self, rank: int, nodes: Sequence[Sequence[int]]) -> None:
        self.rank, self.nodes = rank, [list(ranks) for ranks in nodes]
        self.mates = next(ranks for ranks in self.nodes if rank in ranks)  # this rank among them

    @classmethod
    def apart(cls, rank: int, size: int) -> Links:
        """Return the links of ranks that share nothing: each is a node of its own."""
        return cls(rank, [[r] for r in range(size)])

    @cached_property
    def size(self) -> int:
        """Return the number of ranks."""
        return sum(map(len, self.nodes))

    @cached_property
    def node_of(self) -> list[int]:
        """Return the number of each rank's node."""
        found = [0] * self.size
        for number, ranks in enumerate(self.nodes):
            for rank in ranks:
                found[rank] = number
        return found

    @cached_property
    def carried(self) -> list[int]:
        """Return the slices of other nodes that this rank carries, the one after its own first: not all send to rank 0
        at the same time."""
        return sorted(self.carried_by(self.rank), key=lambda s: (s - self.rank) % self.size)

    @cached_property
    def partners(self) -> list[int]:
        """Return the rank of each other node that carries this rank's slice, in the order of the nodes."""
        others = (ranks for ranks in self.nodes if ranks is not self.mates)
        return [ranks[(self.rank - bisect_left(ranks, self.rank)) % len(ranks)] for ranks in others]

    def carried_by(self, mate: int) -> list[int]:
        """Return the slices of other nodes that a rank of this node carries."""
        mine = set(self.mates)
        away = (s for s in range(self.size) if s not in mine)
        place, count = self.mates.index(mate), len(self.mates)
        return [s for number, s in enumerate(away) if number % count == place]
