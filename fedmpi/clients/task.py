"""A model and its data on one rank's device: makes a client's job, and scores test and train samples.

The model's tensors are views of one work vector, so a job's `x_P` is the model and its gradient arrives in one flat
vector. What a client draws depends on (seed, round, client) alone, and what a layer (dropout) or an augmentation draws
on the batch as well, so that a gradient is a function of a point and a batch.

N: the full padded vector.  P: its trainable parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ..cohort import Work
from ..data import Data, Partition
from ..data.objective import Objective, cross_entropy
from ..flat import bind, layout_of, read_ints, write_ints
from ..local import LocalResult, LocalRule
from ..local.update import Update
from ..models.kernels.byhand import by_hand
from ..seeds import generator, torch_seed
from .execution import PLAIN, Path
from .feed import ArrayFeed, Batch, Pair, make_feed
from .training import Global, Start, Trainer, train_clients

T = TypeVar("T")

Total = Callable[[Tensor, Tensor], tuple[float, int]]
"""(outputs, labels) of a block -> the sum of a metric, and how many values were summed"""


class Scored(NamedTuple):
    """The metric and the loss of a block, each summed over its labels, and how many labels that were."""

    metric: float
    loss: float
    labels: int
    classes: dict[int, tuple[float, int]] = {}
    """where asked, metric and labels of the samples of each class in the block"""
    more: dict[str, tuple[float, int]] = {}
    """where asked, further metrics by name: the sum, and how many values were summed"""


class ModelJob:
    """One client's training with a real model: a `local.Job`."""

    def __init__(self, task: Task, start: Start) -> None:
        self.task, self.round, self.cid, self.work = task, start.round, start.cid, start.work
        self.start_N, params = start.model_N, task.layout.params
        self.start_P = start.model_N[:params]
        self.shared: Mapping[str, Tensor] = {name: vector_N[:params] for name, vector_N in start.shared.items()}
        self.memory: Mapping[str, Tensor] = {name: vector_P.to(task.device) for name, vector_P in start.memory.items()}
        task.load(start.model_N, start.ints)
        self.x_P = task.x_N[: task.layout.params]
        self.delta_P = task.delta_N[: task.layout.params]
        task.model.train()
        self.loss_sum = torch.zeros((), device=task.device)
        self.seen = 0

    def batches(self, leave: int = 0) -> Iterator[Batch]:
        """Batch by batch; a short last batch of an epoch is used."""
        return self.task.feed.ahead(self.draw_batches(leave))

    def draw_batches(self, leave: int) -> Iterator[Batch]:
        """Sample indices, batch by batch."""
        mine = self.task.partition.of(self.cid)
        seed = self.task.seed
        rng = generator(seed, "batches", self.round, self.cid)
        draws = torch_seed(seed, "torch", self.round, self.cid)
        steps, wanted = 0, self.work.count(seed, self.round, self.cid, len(mine), leave)
        while steps < wanted:
            order = torch.from_numpy(mine[rng.permutation(len(mine))]).to(self.task.device)
            for samples in torch.split(order, self.work.batch)[: wanted - steps]:
                yield Batch(samples, draws + steps)
                steps += 1

    def everything(self) -> Iterator[tuple[Batch, float]]:
        """All samples in the order of the partition."""
        mine = torch.from_numpy(self.task.partition.of(self.cid)).to(self.task.device)
        draws = torch_seed(self.task.seed, "whole", self.round, self.cid)
        batches = (Batch(samples, draws + i) for i, samples in enumerate(torch.split(mine, self.work.batch)))
        for batch in self.task.feed.ahead(batches):
            yield batch, len(batch.samples) / len(mine)

    def grad(self, x_P: Tensor, batch: Batch) -> Tensor:
        """The gradient of the batch's mean loss at x_P."""
        with self.standing_at(x_P):
            loss = self.task.gradient(batch)
        self.loss_sum.add_(loss, alpha=len(batch.samples))
        self.seen += len(batch.samples)
        return self.task.grad_P

    def linearise(self, batch: Batch) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """The gradient at x_P, and the product with the second derivative there, by a graph of this batch alone."""
        return self.task.linearise(batch)

    @contextmanager
    def standing_at(self, x_P: Tensor) -> Iterator[None]:
        """With the model's parameters at x_P; what the client has trained so far is put back afterwards."""
        if x_P.data_ptr() == self.x_P.data_ptr():
            yield
            return
        kept_P = self.x_P.clone()
        self.x_P.copy_(x_P)
        yield
        self.x_P.copy_(kept_P)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Put the model's buffers and the loss back as they were."""
        behind = self.task.x_N[self.task.layout.params :]
        kept, ints = behind.clone(), read_ints(self.task.model, self.task.layout)
        loss_sum, seen = self.loss_sum.clone(), self.seen
        yield
        behind.copy_(kept)
        write_ints(self.task.model, self.task.layout, ints)
        self.loss_sum, self.seen = loss_sum, seen

    def finish(self, result: LocalResult) -> Update:
        """What the client brings back, with the float buffers' delta behind that of the parameters."""
        layout = self.task.layout
        if result.delta_P.shape != self.delta_P.shape or not result.delta_P.is_floating_point():
            given = f"{result.delta_P.dtype} of shape {tuple(result.delta_P.shape)}"
            raise ValueError(f"its delta is {given}; it must be floating point of shape {tuple(self.delta_P.shape)}")
        if result.delta_P.data_ptr() != self.delta_P.data_ptr():
            self.delta_P.copy_(result.delta_P)
        behind = slice(layout.params, layout.length)
        torch.sub(self.task.x_N[behind], self.start_N[behind], out=self.task.delta_N[behind])
        loss = float(self.loss_sum) / max(self.seen, 1)
        return Update(self.cid, self.task.delta_N, read_ints(self.task.model, layout), loss, result)


class Task:
    """A model bound to flat vectors, and the data it learns from."""

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        partition: Partition,
        seed: int,
        device: torch.device,
        ranks: int = 1,
        channels_last: bool = False,
        meta: np.ndarray | None = None,
        dtype: torch.dtype = torch.float32,
        workers: int = 0,
        tests: int | None = None,
        path: Path = PLAIN,
    ) -> None:
        self.model, self.partition, self.seed, self.device = model.to(device), partition, seed, device
        self.path, self.forward = path, path.forward(self.model, device)
        self.layout = layout_of(model, channels_last, dtype)
        length = self.layout.padded(ranks)
        self.x_N, self.delta_N = (torch.zeros(length, device=device, dtype=dtype) for _ in range(2))
        self.grad_P = torch.zeros(self.layout.params, device=device, dtype=dtype)
        self.feed, self.goal = make_feed(data, device, dtype, workers), data.goal
        self.attach()
        self.meta = torch.from_numpy(np.zeros(0, dtype=np.int64) if meta is None else meta).to(device)
        self.tests = choose_tests(self.feed.tests, tests)

    def attach(self) -> None:
        """Make the model's tensors views of `x_N`, and have views of `grad_P` ready for its gradients."""
        bind(self.model, self.layout, self.x_N)
        tensors = dict(self.model.named_parameters())
        self.spans = [span for span in self.layout.spans if span.start < self.layout.params]
        self.params = [tensors[span.name] for span in self.spans]
        self.grads = [span.view(self.grad_P) for span in self.spans]
        plain = self.path == PLAIN and self.goal.loss is cross_entropy
        self.by_hand = by_hand(self.model, self.params, self.grads) if plain else None

    def loss(self, batch: Batch, forward: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """The mean loss of a batch for the model as it is, called by way of `forward` where that is given."""
        x, y = self.feed.train(batch)
        seed_layers(self.device, batch.seed)
        return self.goal.loss((forward or self.forward)(x), y, "mean")

    def gradient(self, batch: Batch) -> Tensor:
        """Put the gradient of a batch's mean loss into `grad_P`; returns the loss."""
        if self.by_hand is not None:
            x, y = self.feed.train(batch)
            if isinstance(self.feed, ArrayFeed) or int(y.min()) >= 0:  # the cross entropy passes over labels of -100
                seed_layers(self.device, batch.seed)
                return self.by_hand(x, y)
        with torch.enable_grad():
            loss = self.loss(batch)
        grads = torch.autograd.grad(loss, self.params, allow_unused=True, materialize_grads=True)
        torch._foreach_copy_(self.grads, grads)  # less than to clear the vector and let autograd add to it
        return loss.detach()

    def linearise(self, batch: Batch) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """The gradient of a batch's mean loss, and the function v -> H v; valid until the model moves."""
        forward = self.path.uncompiled.forward(self.model, self.device)
        with torch.enable_grad():
            grads = torch.autograd.grad(
                self.loss(batch, forward), self.params, create_graph=True, allow_unused=True, materialize_grads=True
            )

        def times_hessian(v_P: Tensor) -> Tensor:
            curved = [(g, span.view(v_P)) for g, span in zip(grads, self.spans, strict=True) if g.requires_grad]
            out_P = torch.zeros_like(v_P)
            if curved:  # nothing is curved where the loss is linear in every parameter
                products = torch.autograd.grad(
                    [g for g, _ in curved],
                    self.params,
                    [v for _, v in curved],
                    retain_graph=True,  # for another product; the graph goes with this function
                    allow_unused=True,
                    materialize_grads=True,
                )
                self.flatten(products, out_P)
            return out_P

        flat_P = torch.empty_like(self.grad_P)
        self.flatten([g.detach() for g in grads], flat_P)
        return flat_P, times_hessian

    def flatten(self, tensors: Sequence[Tensor], out_P: Tensor) -> None:
        """Write tensors shaped like the trainable parameters into a flat vector."""
        for span, tensor in zip(self.spans, tensors, strict=True):
            span.view(out_P).copy_(tensor)

    def start(self) -> tuple[Tensor, Tensor]:
        """The model as it is now: a vector of its own, and the integer buffers."""
        return self.x_N.clone(), read_ints(self.model, self.layout)

    def load(self, model_N: Tensor, ints: Tensor) -> None:
        """Make the model that of the vector."""
        self.x_N.copy_(model_N)
        write_ints(self.model, self.layout, ints)

    def job(self, start: Start) -> ModelJob:
        """Return a client's job. There is one model per rank: a new job ends the one before."""
        return ModelJob(self, start)

    @property
    def sizes(self) -> np.ndarray:
        """Samples per client."""
        return self.partition.sizes

    def train(self, cids: Sequence[int], state: Global, rule: LocalRule, work: Work) -> Iterator[Update]:
        """Train clients in the round after `state`; yield what each brings back."""
        return train_clients(self, cids, state, rule, work)

    def each(self, cids: Sequence[int], train: Callable[[Trainer, int], T]) -> Iterator[tuple[int, T]]:
        """Every client with what `train(task, cid)` returns, one after another. What that has of the task's memory is
        valid until the next is asked for."""
        for cid in cids:
            yield cid, train(self, cid)

    @property
    def meta_size(self) -> int:
        """Samples of the meta set."""
        return len(self.meta)

    def meta_gradient(self, model_N: Tensor, ints: Tensor, block: slice, round: int) -> Tensor:
        """Return the gradient of the mean loss on a block of the meta set, as in training. Valid until the next one."""
        self.load(model_N, ints)  # for each block: buffers move, and it must not depend on the blocks before it
        self.model.train()
        self.gradient(Batch(self.meta[block], torch_seed(self.seed, "meta", round, block.start)))
        return self.grad_P

    def score(
        self, blocks: Sequence[slice], by_class: bool = False, metrics: Mapping[str, Total] | None = None
    ) -> Iterator[Scored]:
        """Yield how the model that was loaded does on each block of the test set; also by class, and by further
        metrics."""
        return self.judge(self.feed.test([self.tests[block] for block in blocks]), by_class, metrics or {})

    def score_train(self, samples: Sequence[Tensor]) -> Iterator[Scored]:
        """How the model that was loaded does on blocks of train samples, not augmented, one after another."""
        return self.judge(self.feed.plain(samples), False, {})

    @torch.inference_mode()
    def judge(self, pairs: Iterator[Pair], by_class: bool, metrics: Mapping[str, Total]) -> Iterator[Scored]:
        """Yield the scores of what the model says to blocks of samples."""
        self.model.eval()
        for x, y in pairs:
            outputs = self.model(x)
            classes = each_class(self.goal, outputs, y) if by_class else {}
            total, loss = float(self.goal.total(outputs, y)), float(self.goal.loss(outputs, y, "sum"))
            more = {name: metric(outputs, y) for name, metric in metrics.items()}
            yield Scored(total, loss, y.numel(), classes, more)


def each_class(goal: Objective, outputs: Tensor, y: Tensor) -> dict[int, tuple[float, int]]:
    """The metric and the number of labels of the samples of each class; a sequence is of its last position's class."""
    kinds = y.reshape(len(y), -1)[:, -1]
    found = {}
    for kind in set(kinds.tolist()):
        mine = kinds == kind
        found[kind] = float(goal.total(outputs[mine], y[mine])), y[mine].numel()
    return found


def choose_tests(there: int, wanted: int | None) -> Tensor:
    """The test samples to score: all, or as many as are wanted, always the same ones."""
    if wanted is None or wanted >= there:
        return torch.arange(there)
    return torch.from_numpy(np.sort(generator(0, "tests").choice(there, wanted, replace=False)))


def seed_layers(device: torch.device, seed: int) -> None:
    """Seed what layers draw on a device. (`torch.manual_seed` seeds every device there is, in 60 times as long.)"""
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
