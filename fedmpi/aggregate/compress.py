"""bf16 between nodes (`--wire bf16`): half the bytes, with error feedback.

What is sent is rounded to bf16 (8 bits of precision, the range of float32). The sender keeps the rounding error in
`State.unsent` and adds it the next time (error feedback: Seide et al., Interspeech 2014; Karimireddy et al., ICML
2019). Two things travel in bf16:

sums    a rank's rows for ranks of other nodes; they are widened and added up in float32. The error is kept as a part of
        the mean, as the weight of a cohort differs from round to round.
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


class Compressor:
    """Rounds what a rank sends, and keeps the rounding errors in the `unsent` that it is given. Made once."""

    def __init__(self, comm: Comm, sums: Rows, slice_length: int, model_N: Tensor) -> None:
        self.comm, self.sums, self.tile = comm, sums, tile_size(model_N.device)
        self.update = comm.update(model_N, BF16)
        self.before_S = None if self.update is None else torch.zeros(slice_length, device=model_N.device)
        self.flushed = False  # whether errors left by a run on other ranks were added to rows that do not travel

    def round_sums(self, unsent_N: Tensor, weight: int, bucket: slice) -> None:
        """Round a bucket of every row that is sent."""
        for rank, unsent_S in enumerate(unsent_N.view(self.comm.size, -1)):
            if rank in self.sums.out:
                for tile in tiles(bucket.start, bucket.stop, self.tile):
                    x = torch.add(self.sums.mine[rank][tile], unsent_S[tile], alpha=float(weight))
                    error = round_off(x, self.sums.out[rank][tile])
                    torch.mul(error, 1 / weight, out=unsent_S[tile])
            elif not self.flushed:
                self.sums.mine[rank][bucket].add_(unsent_S[bucket], alpha=float(weight))
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
