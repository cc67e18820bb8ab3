"""Whole layers of a vector that is cut into slices: what a mask may know of a layer that lies on several ranks.

A rank owns a slice that begins and ends in the middle of layers, so nothing here gathers a layer. What travels are
counts: how many elements of a layer have |votes| = 0, 1, ..., clients. They are whole numbers that the ranks sum, so
they are the same bits on any number of ranks, and they hold every quantile and every mean of a layer's agreement.

S: elements of the slice this rank owns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from .flat import Layout, Span


@dataclass(frozen=True)
class Layer:
    """One trained tensor of the model, and how all of its elements voted, whichever rank owns them."""

    name: str
    start: int  # its first element in the flat vector
    size: int
    counts: Tensor  # [clients + 1], int64: how many of its elements have |votes| = 0, 1, ..., clients

    def quantile(self, share: float) -> int:
        """Return the smallest |votes| that at least this share of the layer's elements do not exceed; 0.5: the
        median. The share is read as a fraction."""
        wanted = max(math.ceil(Fraction(share).limit_denominator(1_000_000) * self.size), 1)
        return int((self.counts.cumsum(0) < wanted).sum())


def trained_spans(layout: Layout) -> tuple[Span, ...]:
    """Return the spans of the tensors that are trained, in their order in the vector."""
    return tuple(span for span in layout.spans if span.start < layout.params and span.shape.numel())


def overlaps(spans: Sequence[Span], start: int, length: int) -> Iterator[tuple[int, slice]]:
    """Yield, for each span that a tile of the vector touches, the span's number and its slice of the tile."""
    for number, span in enumerate(spans):
        low, high = max(span.start, start), min(span.start + span.shape.numel(), start + length)
        if low < high:
            yield number, slice(low - start, high - start)


class LayerVotes:
    """Counts of |votes| for every layer: of this rank's slice while they are added, of all ranks once summed."""

    def __init__(self, spans: Sequence[Span], clients: int, device: torch.device) -> None:
        self.spans = spans
        self.counts = torch.zeros(len(spans), clients + 1, dtype=torch.int64, device=device)

    def add(self, tiles: Iterable[tuple[int, Tensor]]) -> None:
        """Count tiles of votes, each with its first element's place in the full vector."""
        for start, votes_S in tiles:
            sizes = votes_S.abs().long()
            for number, of_tile in overlaps(self.spans, start, sizes.numel()):
                self.counts[number].scatter_add_(0, sizes[of_tile], torch.ones_like(sizes[of_tile]))

    def of_tile(self, start: int, length: int) -> Iterator[tuple[Layer, slice]]:
        """Yield the layers that a tile of the vector touches, each with its slice of the tile."""
        for number, of_tile in overlaps(self.spans, start, length):
            span = self.spans[number]
            yield Layer(span.name, span.start, span.shape.numel(), self.counts[number]), of_tile
