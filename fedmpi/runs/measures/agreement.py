"""How far clients agree, layer by layer (Tenison et al., TMLR 2023, figure 4), counted while a piece of the votes lies
in the cache.

A = |votes| / clients is the agreement of an element. Everything that is counted is a whole number, and whether A < tau
is decided in whole numbers, by the quorum of the masks: so the figures are the same on any number of ranks.

S: elements of the slice this rank owns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...aggregate.exchange import Tile
from ...comm import Comm
from ...flat import Layout, Span
from ...layers import overlaps, trained_spans
from ...masks import quorum


@dataclass(frozen=True)
class Layers:
    """Counts over a rank's slice, on its device, for every tensor that is trained."""

    spans: tuple[Span, ...]
    tau: float
    counts: Tensor
    """[2, layers], whole numbers in float64: the sum of |votes|, and the elements with A < tau"""

    @classmethod
    def of(cls, layout: Layout, tau: float, device: torch.device) -> Layers:
        """No votes yet."""
        spans = trained_spans(layout)
        return cls(spans, tau, torch.zeros(2, len(spans), dtype=torch.float64, device=device))

    def add(self, start: int, sizes_S: Tensor, clients: int) -> None:
        """Count a piece of |votes| that begins at element `start` of the full vector; it may straddle layers."""
        least = quorum(self.tau, clients)
        for number, part in overlaps(self.spans, start, sizes_S.numel()):
            self.counts[0, number] += sizes_S[part].sum(dtype=torch.int64)
            self.counts[1, number] += (sizes_S[part] < least).sum()

    def on_tile(self, tile: Tile, mask: Tensor, clients: int) -> None:
        """Count a tile of |votes|."""
        self.add(tile.start, tile.votes, clients)

    def after_round(self, comm: Comm, clients: int) -> dict[str, Any]:
        """What the votes of a round of all ranks mean. Collective."""
        counts = torch.tensor(self.numbers(), dtype=torch.int64)
        comm.sum(counts)
        self.counts.zero_()
        return self.read(counts.tolist(), clients)

    def numbers(self) -> list[int]:
        """The counts, to be summed over the ranks."""
        return [int(count) for count in self.counts.flatten().tolist()]

    def read(self, summed: list[int], clients: int) -> dict[str, Any]:
        """What the counts of all ranks mean: the share of elements below tau, and of each layer that and the mean A."""
        count, sizes = len(self.spans), [span.shape.numel() for span in self.spans]
        votes, below = summed[:count], summed[count:]
        layers = {
            span.name: {"agreement": v / size / clients, "below_tau": b / size}
            for span, size, v, b in zip(self.spans, sizes, votes, below, strict=True)
        }
        return {"below_tau": sum(below) / sum(sizes), "layers": layers}
