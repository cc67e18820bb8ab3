"""A model and its data on one rank's device: makes a client's job, and scores test images.

The model's tensors are views of one work vector, so a job's `x_P` is the model and its gradient arrives in one flat
vector. Images stay uint8 in memory; a batch is picked by index and normalised when it is used. What a client draws
depends on (seed, round, client) alone.

N: the full padded vector.  P: its trainable parameters.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .data.arrays import Arrays
from .data.splits import Partition
from .flat import bind, layout_of, read_ints, write_ints
from .local import LocalResult
from .seeds import generator, torch_seed


@dataclass(frozen=True)
class Work:
    """How much a client trains in a round: `epochs` over its samples, or `steps` batches where given."""

    epochs: int = 1
    steps: int | None = None
    batch: int = 32


class Trained(NamedTuple):
    """What a client brings back. The delta lies in the task's own memory: it is valid until the next job."""

    delta_N: Tensor
    ints: Tensor
    loss: float


class ModelJob:
    """One client's training with a real model: a `local.Job`."""

    def __init__(self, task: Task, start_N: Tensor, ints: Tensor, round: int, cid: int, work: Work) -> None:
        self.task, self.round, self.cid, self.work = task, round, cid, work
        self.start_N = start_N
        self.start_P = start_N[: task.layout.params]
        task.load(start_N, ints)
        self.x_P = task.x_N[: task.layout.params]
        self.delta_P = task.delta_N[: task.layout.params]
        task.model.train()
        torch.manual_seed(torch_seed(task.seed, "torch", round, cid))  # for dropout and the like
        self.loss_sum = torch.zeros((), device=task.device)
        self.seen = 0

    def batches(self) -> Iterator[Tensor]:
        """Sample indices, batch by batch; a short last batch of an epoch is used."""
        mine = self.task.partition.of(self.cid)
        rng = generator(self.task.seed, "batches", self.round, self.cid)
        steps = 0
        for _ in range(self.work.epochs) if self.work.steps is None else itertools.count():
            order = torch.from_numpy(mine[rng.permutation(len(mine))]).to(self.task.device)
            for batch in torch.split(order, self.work.batch):
                if steps == self.work.steps:
                    return
                steps += 1
                yield batch

    def grad(self, x_P: Tensor, batch: Tensor) -> Tensor:
        """The gradient of the batch's mean loss at x_P."""
        elsewhere = x_P.data_ptr() != self.x_P.data_ptr()
        kept_P = self.x_P.clone() if elsewhere else self.x_P
        if elsewhere:
            self.x_P.copy_(x_P)
        self.task.grad_P.zero_()
        loss = F.cross_entropy(self.task.model(self.task.images(self.task.x[batch])), self.task.y[batch])
        torch.autograd.backward(loss)
        if elsewhere:
            self.x_P.copy_(kept_P)  # what the client has trained so far
        self.loss_sum.add_(loss.detach() * len(batch))
        self.seen += len(batch)
        return self.task.grad_P

    def finish(self, result: LocalResult) -> Trained:
        """What the client brings back, with the float buffers' delta behind that of the parameters."""
        layout = self.task.layout
        if result.delta_P.data_ptr() != self.delta_P.data_ptr():
            self.delta_P.copy_(result.delta_P)
        behind = slice(layout.params, layout.length)
        torch.sub(self.task.x_N[behind], self.start_N[behind], out=self.task.delta_N[behind])
        loss = float(self.loss_sum) / max(self.seen, 1)
        return Trained(self.task.delta_N, read_ints(self.task.model, layout), loss)


class Task:
    """A model bound to flat vectors, and the arrays it learns from."""

    def __init__(
        self,
        model: nn.Module,
        arrays: Arrays,
        partition: Partition,
        seed: int,
        device: torch.device,
        ranks: int = 1,
        channels_last: bool = False,
    ) -> None:
        self.model, self.partition, self.seed, self.device = model.to(device), partition, seed, device
        self.layout = layout_of(model, channels_last)
        length = self.layout.padded(ranks)
        self.x_N, self.delta_N = (torch.zeros(length, device=device) for _ in range(2))
        self.grad_P = torch.zeros(self.layout.params, device=device)
        bind(model, self.layout, self.x_N, self.grad_P)
        self.x, self.y, self.test_x, self.test_y = (
            t.to(device) for t in (arrays.x, arrays.y, arrays.test_x, arrays.test_y)
        )
        self.scale, self.shift = (torch.tensor(v, device=device).view(1, -1, 1, 1) for v in normalisation(arrays))

    def images(self, raw: Tensor) -> Tensor:
        """uint8 images as normalised floats."""
        return raw.float().mul_(self.scale).add_(self.shift)

    def start(self) -> tuple[Tensor, Tensor]:
        """The model as it is now: a vector of its own, and the integer buffers."""
        return self.x_N.clone(), read_ints(self.model, self.layout)

    def load(self, model_N: Tensor, ints: Tensor) -> None:
        """Make the model that of the vector."""
        self.x_N.copy_(model_N)
        write_ints(self.model, self.layout, ints)

    def job(self, start_N: Tensor, ints: Tensor, round: int, cid: int, work: Work) -> ModelJob:
        """Client `cid`'s job in a round. There is one model a rank: a new job ends the one before."""
        return ModelJob(self, start_N, ints, round, cid, work)

    @torch.inference_mode()
    def score(self, block: slice) -> tuple[int, float]:
        """Right answers and the sum of the losses on a block of the test set, for the model that was loaded."""
        self.model.eval()
        logits = self.model(self.images(self.test_x[block]))
        right = (logits.argmax(1) == self.test_y[block]).sum()
        return int(right), float(F.cross_entropy(logits, self.test_y[block], reduction="sum"))


def normalisation(arrays: Arrays) -> tuple[list[float], list[float]]:
    """Scale and shift a channel, so that raw * scale + shift has mean 0 and deviation 1 over the training set."""
    mean, std = np.asarray(arrays.mean), np.asarray(arrays.std)
    return (1 / (255 * std)).tolist(), (-mean / std).tolist()
