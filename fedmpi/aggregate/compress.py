"""bf16 between nodes (`--wire bf16`): half the bytes, with error feedback.

What is sent is rounded to bf16 (8 bits of precision, the range of float32). The sender keeps the rounding error in
`State.unsent` and adds it the next time (error feedback: Seide et al., Interspeech 2014; Karimireddy et al., ICML
2019). Two things travel in bf16:

sums    what a node has for a slice of another node; the owner widens the sums of the nodes and adds them in float32.
        The rank that carries the slice keeps the error, as a part of the mean, as the weight of a cohort differs from
        round to round.
model   the owner of a slice sends its update. Every rank, the owner too, adds the same rounded update to the same old
        model, so all ranks keep the same model.

Votes, squares, channels, shared vectors and the meta step travel unrounded. Rows in shared memory are not rounded.

N: the full padded vector.  S: the slice this rank owns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..comm import Comm, Rows, Wait
from ..flat import tile_size, tiles

BF16 = torch.bfloat16


def nothing_unsent(model_N: Tensor, slice_length: int) -> dict[str, Tensor]:
    """Return the rounding errors before the first round: of the sums for every slice, of the model for this rank's."""
    return {"sums": torch.zeros_like(model_N), "model": torch.zeros(slice_length, device=model_N.device)}


class Rounded:
    """float32 as bf16, with error feedback (a `Format`)."""

    even = True
    unsent_N: Tensor  # the errors, which `pack` adds and replaces: parts of the mean, of a cohort of that weight
    weight: int

    def room(self, length: int) -> int:
        return 2 * length

    def as_it_is(self, x: Tensor) -> bool:
        return False

    def pack(self, x: Tensor, out: Tensor, where: slice) -> int:
        unsent = self.unsent_N[where]
        x = torch.add(x, unsent, alpha=float(self.weight))
        torch.mul(round_off(x, out[: 2 * len(x)].view(BF16)), 1 / self.weight, out=unsent)
        return 2 * len(x)

    def unpack(self, raw: Tensor, length: int) -> Tensor:
        return raw.view(BF16).float()


class Compressor:
    """Sends sums and model rounded, and keeps the rounding errors in the `unsent` that it is given. Made once."""

    def __init__(self, comm: Comm, sums: Rows, rounded: Rounded, model_N: Tensor) -> None:
        self.comm, self.sums, self.rounded, self.tile = comm, sums, rounded, tile_size(model_N.device)
        self.update = comm.update(model_N, BF16)
        self.before_S = None if self.update is None else torch.zeros_like(comm.own(model_N))
        self.flushed = False  # whether errors for slices that other ranks carry now were added to their rows

    def round_sums(self, unsent_N: Tensor, weight: int, bucket: slice) -> None:
        """Let a bucket of the rows that this rank carries be rounded; call it before they are offered."""
        self.rounded.unsent_N, self.rounded.weight = unsent_N, weight
        if not self.flushed:
            for s, unsent_S in enumerate(unsent_N.view(self.comm.size, -1)):
                if s not in self.sums.links.carried:
                    self.sums.mine[s][bucket].add_(unsent_S[bucket], alpha=float(weight))
                    unsent_S[bucket].zero_()

    def remember(self, model_N: Tensor) -> None:
        """Copy this rank's slice of the model before it moves."""
        if self.before_S is not None:
            self.before_S.copy_(self.comm.own(model_N))

    def start_gather(self, model_N: Tensor, unsent_S: Tensor, bucket: slice) -> Wait:
        """Start to send the update of a bucket of this rank's slice and to receive those of the others."""
        own_S = self.comm.own(model_N)
        if self.update is None or self.before_S is None:
            if not self.flushed:
                own_S[bucket].add_(unsent_S[bucket])
                unsent_S[bucket].zero_()
            return self.comm.start_gather(model_N, bucket)
        for tile in tiles(bucket.start, bucket.stop, self.tile):
            before, out = self.before_S[tile], self.update.mine_S[tile]
            x = torch.sub(own_S[tile], before).add_(unsent_S[tile])
            unsent_S[tile] = round_off(x, out)
            torch.add(before, out, out=own_S[tile])
        return self.comm.start_gather(model_N, bucket, self.update)


def round_off(x: Tensor, out: Tensor) -> Tensor:
    """Round x into `out`; return the rounding error, which overwrites x."""
    out.copy_(x)
    return x.sub_(out)
