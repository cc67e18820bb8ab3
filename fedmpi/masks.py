"""Agreement masks: how much of each element of the mean delta to keep (Tenison et al., TMLR 2023, eq. 3).

S: elements of the slice this rank owns.  votes_S = sum over clients of sign(delta), so |votes_S| <= clients; a client
whose element did not move abstains.  Agreement A = |votes| / clients, unweighted: every client has one vote whatever
its size.

A mask is a function (votes_S, clients) -> mask_S. One that looks at magnitudes too asks for the second moment and is
given (votes_S, clients, mean_S, square_S); only then do the squares travel. Masks are elementwise, because a rank has
no more than its slice. One that needs to know how whole layers voted asks for `layers`: it is called layer by layer,
with a `Layer` as its last argument. No rank gathers a layer, which may lie on several: what travels is how many of its
elements have |votes| = 0, 1, ..., clients. These whole numbers are summed over the ranks, so they are the same bits on
any number of ranks, and they hold every quantile and every mean of a layer's agreement.

To add a mask, write it, declare its knobs in `knobs.py` and give it a row in `MASKS`, or name it from outside as
`package.module:name`: a function of `MaskKnobs`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import torch
from torch import Tensor

from .errors import UserError, raised
from .flat import Layout, Span
from .knobs import MaskKnobs
from .plugins import find, refuse

__all__ = ["MASKS", "Layer", "Mask", "MaskKnobs", "make_mask", "quorum"]


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


@dataclass(frozen=True)
class Mask:
    """How much of each element to keep, from 0 to 1."""

    keep: Callable[..., Tensor]  # (votes_S, clients[, mean_S, square_S][, layer]) -> mask_S
    second_moment: bool = False  # whether it reads mean and mean square of the deltas, weighted by samples
    layers: bool = False  # whether it is given, as its last argument, the `Layer` that the elements belong to

    def __call__(
        self,
        votes_S: Tensor,
        clients: int,
        mean_S: Tensor | None = None,
        square_S: Tensor | None = None,
        layer: Layer | None = None,
    ) -> Tensor:
        moments = (mean_S, square_S) if self.second_moment else ()
        return self.keep(votes_S, clients, *moments, *((layer,) if self.layers else ()))

    def over(
        self, start: int, votes_S: Tensor, clients: int, mean_S: Tensor, square_S: Tensor | None, layers: LayerVotes
    ) -> Tensor:
        """Return the mask of a tile of the vector that begins at element `start`; one that asks for layers is called
        once for each layer in the tile."""
        if not self.layers:
            return self(votes_S, clients, mean_S, square_S)
        masks = []
        for layer, own in layers.of_tile(start, votes_S.numel()):
            square = None if square_S is None else square_S[own]
            masks.append(self(votes_S[own], clients, mean_S[own], square, layer))
        return torch.cat(masks)


def quorum(tau: float, clients: int) -> int:
    """Return the smallest |votes| that counts as agreement: ceil(tau * clients), tau read as a fraction. (In floating
    point 0.1 * 30 is a little over 3 and would ask for 4 votes.)"""
    return math.ceil(Fraction(tau).limit_denominator(1_000_000) * clients)


def mean() -> Mask:
    """Return the mask that is 1 everywhere: plain weighted averaging."""
    return Mask(lambda votes_S, clients: torch.ones(votes_S.shape, device=votes_S.device))


def at_least(size_S: Tensor, least: int) -> Tensor:
    """Return 1 where a whole number is at least `least`, else 0, in the type of the votes. (Arithmetic on small
    integers: a comparison or a selection costs several times as much.)"""
    return (size_S - least).clamp_(-1, 0).add_(1)


def gma(tau: float) -> Mask:
    """Return the mask 1 where A >= tau, A elsewhere: disagreement scales a step down, it never stops it."""

    def mask(votes_S: Tensor, clients: int) -> Tensor:
        size_S = votes_S.abs()
        full_S = at_least(size_S, quorum(tau, clients)).mul_(clients)
        return torch.maximum(size_S, full_S).float().div_(clients)

    return Mask(mask)


def hard(tau: float) -> Mask:
    """Return the mask 1 where A >= tau, 0 elsewhere: the AND-mask that the paper compares with."""
    return Mask(lambda votes_S, clients: at_least(votes_S.abs(), quorum(tau, clients)).float())


def sand(tau: float, sharpness: float) -> Mask:
    """Return the mask max(0, tanh(sharpness * (A - tau) / r)): nothing up to tau, then the more the clients agree in
    sign *and in size*, the more is kept, smoothly (after SAND-mask, Shahtalebi et al., 2021).

    r = variance / mean square of the clients' deltas, weighted by samples, in [0, 1]: 0 where all moved alike, 1 where
    they cancel out. SAND-mask divides by the variance itself, which for deltas of 1e-3 is 1e-6 and makes the mask a
    hard one. Relative to the mean square it has no unit. Nor is the mask scaled up to mean 1 here.
    """
    if tau >= 1:
        raise UserError(f"--tau is {tau:g}, with which the mask sand keeps nothing; it must be below 1")

    def mask(votes_S: Tensor, clients: int, mean_S: Tensor, square_S: Tensor) -> Tensor:
        r_S = (square_S - mean_S.square()).div_(square_S.clamp_min(TINY)).clamp_min_(TINY)  # below 0 by rounding only
        above_S = votes_S.abs().float().div_(clients).sub_(tau)
        return above_S.mul_(sharpness).div_(r_S).tanh_().clamp_min_(0.0)

    return Mask(mask, second_moment=True)


TINY = 1e-30  # instead of zero where no client moved an element, or all moved it alike

MASKS: dict[str, Callable[[MaskKnobs], Mask]] = {
    "mean": lambda k: mean(),
    "gma": lambda k: gma(k.tau),
    "and": lambda k: hard(k.tau),
    "sand": lambda k: sand(k.tau, k.sharpness),
}


def make_mask(
    name: str, tau: float = MaskKnobs.tau, sharpness: float = MaskKnobs.sharpness, knobs: MaskKnobs | None = None
) -> Mask:
    """Return the mask of that name, or of that import path, which may be a bare function of votes and clients. `knobs`
    stand for tau, sharpness and those that a plug-in declares."""
    mask = find("mask", name, MASKS, MaskKnobs(tau, sharpness) if knobs is None else knobs)
    if not callable(mask):
        raise refuse("mask", name, mask, "a Mask, or a function of votes and clients")
    mask = mask if isinstance(mask, Mask) else Mask(mask)
    if name not in MASKS:
        try_out(name, mask)
    return mask


def try_out(name: str, mask: Mask) -> None:
    """Refuse a mask from outside that does not work, before a run begins: on votes that are mixed and on votes in
    order, whole and cut as ranks would have them."""
    mixed_S, clients = torch.arange(41).mul(7).remainder(9).sub(4).to(torch.int8), 4
    for votes_S in (mixed_S, mixed_S.sort().values):
        try:
            tiles = [[try_tile(name, mask, votes_S, clients, *ends) for ends in pairwise(at)] for at in CUTS]
            whole, *cuts = map(torch.cat, tiles)
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            raise UserError(f"mask '{name}' raised {raised(error)} on the votes of {clients} clients") from error
        if odd := (~((whole >= 0) & (whole <= 1))).nonzero().flatten().tolist():
            given = f"{whole[odd[0]]:g} for {votes_S[odd[0]]} votes of {clients} clients"
            raise UserError(f"mask '{name}' returned {given}; it must keep to 0 ... 1")
        if not all(torch.equal(whole, cut) for cut in cuts):
            raise UserError(
                f"mask '{name}' is not elementwise: cut elsewhere, the same votes give other values, and so would "
                "another number of ranks; decide element by element, or ask how whole layers voted: "
                "Mask(keep, layers=True)"
            )


def try_tile(name: str, mask: Mask, votes_S: Tensor, clients: int, low: int, high: int) -> Tensor:
    """Return the mask of a tile of these votes, which are those of two layers; refuse one of the wrong type or shape,
    and a mask that writes to its arguments."""
    mean_S = votes_S / clients + torch.linspace(-0.2, 0.2, 41)
    square_S = mean_S.square() + torch.linspace(0.0, 0.5, 41)
    spans = [Span("a", 0, torch.Size([24]), False), Span("b", 24, torch.Size([17]), False)]
    layers = LayerVotes(spans, clients, votes_S.device)
    layers.add([(0, votes_S)])
    votes, mean, square = given = [t[low:high].clone() for t in (votes_S, mean_S, square_S)]
    kept_S: object = mask.over(low, votes, clients, mean, square, layers)
    if not all(torch.equal(t, of[low:high]) for t, of in zip(given, (votes_S, mean_S, square_S), strict=True)):
        raise UserError(f"mask '{name}' writes into what it is given, which is used again; work on copies")
    if not isinstance(kept_S, Tensor) or kept_S.shape != votes.shape or kept_S.dtype != torch.float32:
        came = type(kept_S).__name__
        if isinstance(kept_S, Tensor):
            came = f"{kept_S.dtype} of shape {tuple(kept_S.shape)}"
        raise UserError(f"mask '{name}' returned {came}; it must be torch.float32 of the shape of the votes")
    return kept_S


# ranks' slices of 41 elements, the whole first
CUTS = ((0, 41), (0, 1, 41), (0, 20, 41), (0, 8, 24, 40, 41), (0, 7, 13, 22, 31, 41))
