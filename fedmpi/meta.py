"""The meta step of FedMeta (Yao et al., 2019, section 3.2): after the server's step, w -= lr * gradient of the mean
loss on a small set that was held out of training."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .aggregate.exchange import reduce
from .aggregate.sums import Accumulator, Unusable
from .algorithms import MetaStep
from .comm import Comm
from .errors import CommonError
from .flat import Layout, even_slices


class MetaSet(Protocol):
    """What the meta step needs of `rounds.Clients`."""

    @property
    def layout(self) -> Layout: ...
    @property
    def meta_size(self) -> int: ...

    def meta_gradient(self, model_N: Tensor, ints: Tensor, block: slice, round: int) -> Tensor: ...


def take_meta_step(
    model_N: Tensor, ints: Tensor, round: int, step: MetaStep, data: MetaSet, sums: Accumulator, comm: Comm
) -> None:
    """Move the model in place. Blocks of the set go to the ranks in turn, and their gradients are summed exactly: the
    same bits on any number of ranks. Collective."""
    params = data.layout.params
    sums.reset(data.meta_size)
    bad = torch.zeros(1, dtype=torch.int64)
    for number, block in enumerate(even_slices(data.meta_size, step.batch)):
        if number % comm.size == comm.rank:
            gradient_P = data.meta_gradient(model_N, ints, block, round)
            try:
                sums.check(gradient_P)
            except Unusable:
                bad += 1
                continue
            sums.add(gradient_P, block.stop - block.start)
    comm.sum(bad)
    if bad:
        raise CommonError(
            f"round {round}: the gradient on the meta set is not a number or beyond {sums.limit:g}: the model has "
            "diverged; lower --meta.lr, --server.lr or --local.lr"
        )
    for _, (gradients,) in reduce(comm, [(sums, sums.total)], params, most=0):
        for averages in gradients:
            if averages.start < params:
                model_N[averages.start : averages.stop].sub_(averages.mean.mul_(step.lr))
    comm.gather(model_N)
