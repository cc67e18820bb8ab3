"""How far clients agree, layer by layer (Tenison et al., TMLR 2023, figure 4), counted while a tile of votes is in the
cache.

A = |votes| / clients is the agreement of an element. Everything that is counted is a whole number, and whether A < tau
is decided in whole numbers, by the quorum of the masks: so the numbers are the same on any number of ranks.

S: elements of the slice this rank owns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...aggregate.exchange import Tile
from ...comm import Comm
from ...flat import Layout
from ...masks import MaskKnobs, overlaps, quorum, trained_spans
from ...rounds import Report
from ..config import Config
from .base import Measure, Numbers, Ranks, Run


class Agreement(Measure):
    """The share of elements below tau, and per layer that and the mean A."""

    def prepare(self, run: Run) -> None:
        self.start(run.task.layout, threshold(run.cfg), run.task.sums_device)

    def start(self, layout: Layout, tau: float, device: torch.device) -> None:
        """Begin without votes."""
        self.spans, self.tau = trained_spans(layout), tau
        self.counts = torch.zeros(2, len(self.spans), dtype=torch.float64, device=device)
        """[2, layers], whole numbers of this rank's slice: the sum of |votes|, and the elements with A < tau"""

    def on_tile(self, tile: Tile, mask: Tensor, clients: int) -> None:
        """Count |votes|; a tile may straddle layers."""
        least = quorum(self.tau, clients)
        for number, part in overlaps(self.spans, tile.start, tile.votes.numel()):
            self.counts[0, number] += tile.votes[part].sum(dtype=torch.int64)
            self.counts[1, number] += (tile.votes[part] < least).sum()

    def after_round(self, run: Run, report: Report) -> Numbers:
        return self.read(run.comm, report.clients)

    def read(self, comm: Comm | Ranks, clients: int) -> dict[str, Any]:
        """Return what the votes of all ranks mean, and begin again. Collective."""
        counts = self.counts.to("cpu", torch.int64)
        comm.sum(counts)
        self.counts.zero_()
        sizes = [span.shape.numel() for span in self.spans]
        votes, below = counts.tolist()
        layers = {
            span.name: {"agreement": v / size / clients, "below_tau": b / size}
            for span, size, v, b in zip(self.spans, sizes, votes, below, strict=True)
        }
        return {"below_tau": sum(below) / sum(sizes), "layers": layers}


def threshold(cfg: Config) -> float:
    """Return the tau that agreement is measured by; 0 would count nothing, so it means that of the papers."""
    return cfg.tau or MaskKnobs.tau
