"""bf16 on the wire: half the bytes between nodes, and nothing is lost for good.

What is sent is rounded to bf16 (8 bits of each number, the range of float32). What is rounded off stays with the rank
that sent, in `State.unsent`, and goes along the next time (error feedback: Seide et al., Interspeech 2014; Karimireddy
et al., ICML 2019). Two things travel like that:

sums    a rank's rows for ranks of other nodes; they are widened and added up in float32. What was rounded off is kept
        as a part of the mean, as the weight of a cohort differs from round to round.
model   the owner of a slice sends its update. Every rank, the owner too, adds the same rounded update to the same old
        model: so the model stays the same on all of them.

Votes, squares, channels, vectors shared by all clients and the step on a meta set travel as they are. Rows that lie in
shared memory are not rounded; where nothing travels, nothing is.

N: the full padded vector.  S: the slice this rank owns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .comm import Comm, Wait
from .tally import Tally, within

BF16 = torch.bfloat16


def nothing_unsent(model_N: Tensor, slice_length: int) -> dict[str, Tensor]:
    """What is unsent before the first round: of the sums, for every slice; of the model, of this rank's slice."""
    return {"sums": torch.zeros_like(model_N), "model": torch.zeros(slice_length, device=model_N.device)}


class Wire:
    """Rounds what a rank sends, and keeps what that leaves over in the `unsent` that it is handed. Made once."""

    def __init__(self, comm: Comm, tally: Tally, model_N: Tensor) -> None:
        self.comm, self.tally = comm, tally
        self.own = slice(comm.rank * tally.slice, (comm.rank + 1) * tally.slice)
        self.update = comm.update(model_N, BF16)
        self.before_S = None if self.update is None else torch.zeros(tally.slice, device=model_N.device)
        self.settled = False
        """whether what another number of ranks left over has been added to rows and slices that do not travel"""

    def round_sums(self, unsent_N: Tensor, weight: int, bucket: slice) -> None:
        """Make a bucket of every row ready to be sent."""
        sums = self.tally.sums
        for rank, unsent_S in enumerate(unsent_N.view(self.comm.size, -1)):
            if rank in sums.out:
                for part in within(bucket):
                    x = torch.add(sums.mine[rank][part], unsent_S[part], alpha=float(weight))
                    left = round_off(x, sums.out[rank][part])
                    torch.mul(left, 1 / weight, out=unsent_S[part])
            elif not self.settled:
                sums.mine[rank][bucket].add_(unsent_S[bucket], alpha=float(weight))
                unsent_S[bucket].zero_()

    def remember(self, model_N: Tensor) -> None:
        """Keep this rank's slice of the model, which is about to be moved."""
        if self.before_S is not None:
            self.before_S.copy_(model_N[self.own])

    def start_gather(self, model_N: Tensor, unsent_S: Tensor, bucket: slice) -> Wait:
        """Send what became of a bucket of this rank's slice, begin to receive those of the others."""
        own_S = model_N[self.own]
        if self.update is None or self.before_S is None:
            if not self.settled:
                own_S[bucket].add_(unsent_S[bucket])
                unsent_S[bucket].zero_()
            return self.comm.start_gather(model_N, bucket)
        for part in within(bucket):
            before, out = self.before_S[part], self.update.mine_S[part]
            x = torch.sub(own_S[part], before).add_(unsent_S[part])
            unsent_S[part] = round_off(x, out)
            torch.add(before, out, out=own_S[part])
        return self.comm.start_gather(model_N, bucket, self.update)


def round_off(x: Tensor, out: Tensor) -> Tensor:
    """Round x into `out`; returns what that leaves over, in the place of x."""
    out.copy_(x)
    return x.sub_(out)
