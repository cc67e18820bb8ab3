"""A model and its data on one rank's device: makes the clients' jobs, and scores test and train samples.

The model's tensors are views of one flat vector, so a job's `x_P` is the model, and its gradient is one flat vector
too. A client's random draws depend on (seed, round, client) only; those of layers (dropout) and augmentation also
depend on the batch. So a gradient is a function of a point and a batch.

N: the full padded vector.  P: its trainable parameters.  T: what a client trains: its private parameters, which lie in
memory in front of N, and P. Without private parameters T is P. Rules call it P.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cohort import Work
from ..data import Data, Partition
from ..data.objective import Objective, cross_entropy, logits
from ..data.trees import Tree, call
from ..device import CPU, Download, pins, seed_layers, upload, without_fused_rnn
from ..flat import bind, layout_of, read_ints, tiles, untouched, write_ints
from ..local import PRIVATE, LocalResult, LocalRule, Piece, Update
from ..models.kernels.byhand import by_hand
from ..models.kernels.recognise import recognised
from ..seeds import generator, torch_seed
from .execution import PLAIN, Mode
from .feed import ArrayFeed, Batch, Pair, make_feed
from .graphs import Graphs
from .still import Still
from .training import Delivery, Global, Start, Trainer, train_clients

ALIGNED = 128  # elements that slices of sums on an accelerator begin at: NCCL is slower elsewhere

LARGE = 2**16  # elements of a parameter whose gradient is not copied
PIECE = 2**18  # elements of a step at a time: three vectors of so many fit the cache

T = TypeVar("T")

# (outputs, labels) of a block -> the sum of a metric, and how many values were summed
Total = Callable[[Any, Any], tuple[float, int]]


class Scored(NamedTuple):
    """Metric and loss of a block, each summed over its labels, and the number of labels."""

    metric: float
    loss: float
    labels: int
    classes: dict[int, tuple[float, int]] = {}  # if requested: metric and number of labels per class
    more: dict[str, tuple[float, int]] = {}  # if requested: sum and number of values per further metric


class ModelJob:
    """One client's training with a real model: a `local.Job`."""

    def __init__(self, task: Task, start: Start) -> None:
        params, self.private = task.layout.params, task.layout.private.params
        self.task, self.start_N = task, start.model_N
        self.round, self.cid, self.work = start.round, start.cid, start.work
        memory = {n: upload(vector, task.device) for n, vector in start.memory.items()}
        task.load(start.model_N, start.ints, memory.pop(PRIVATE, None))
        self.x_P, self.delta_P = task.x_T, task.delta_T
        self.start_P = self.x_P.clone() if self.private else start.model_N[:params]
        self.shared: Mapping[str, Tensor] = {n: self.behind(vector_N[:params]) for n, vector_N in start.shared.items()}
        self.memory: Mapping[str, Tensor] = {n: self.behind(vector_P) for n, vector_P in memory.items()}
        task.model.train()
        self.loss_sum = torch.zeros((), device=task.device)
        self.samples = 0  # in loss_sum

    def behind(self, vector_P: Tensor) -> Tensor:
        """Return a vector of the shared parameters as one of T, with zeros for the private ones."""
        return F.pad(vector_P, (self.private, 0)) if self.private else vector_P

    def batches(self, leave: int = 0) -> Iterator[Batch]:
        """Yield batches; the last one of an epoch may be short."""
        return self.task.feed.ahead(self.draw_batches(leave))

    def draw_batches(self, leave: int) -> Iterator[Batch]:
        """Yield the sample indices of each batch."""
        mine, seed = self.task.partition.of(self.cid), self.task.seed
        rng = generator(seed, "batches", self.round, self.cid)
        draws = torch_seed(seed, "torch", self.round, self.cid)
        steps, wanted = 0, self.steps(leave)
        while steps < wanted:
            order = upload(torch.from_numpy(mine[rng.permutation(len(mine))]), self.task.feed.index_device)
            for samples in torch.split(order, self.work.batch)[: wanted - steps]:
                yield Batch(samples, draws + steps)
                steps += 1

    def steps(self, leave: int = 0) -> int:
        samples = len(self.task.partition.of(self.cid))
        return self.work.count(self.task.seed, self.round, self.cid, samples, leave)

    def tensors(self, x_P: Tensor) -> list[Tensor]:
        return [span.view(x_P) for span in self.task.layout.trained_spans()]

    def everything(self) -> Iterator[tuple[Batch, float]]:
        """Yield batches of all samples in partition order, each with its share of them."""
        mine = upload(torch.from_numpy(self.task.partition.of(self.cid)), self.task.feed.index_device)
        draws = torch_seed(self.task.seed, "whole", self.round, self.cid)
        batches = (Batch(samples, draws + i) for i, samples in enumerate(torch.split(mine, self.work.batch)))
        for batch in self.task.feed.ahead(batches):
            yield batch, len(batch.samples) / len(mine)

    def grad(self, x_P: Tensor, batch: Batch) -> Tensor:
        elsewhere = x_P.data_ptr() != self.x_P.data_ptr()
        if elsewhere:
            kept_P = self.x_P.clone()
            self.x_P.copy_(x_P)
        loss = self.task.gradient(batch)
        if elsewhere:
            self.x_P.copy_(kept_P)
        self.count(loss, batch)
        return self.task.grad_T

    def count(self, loss: Tensor, batch: Batch) -> None:
        """Add a batch's mean loss to what the client reports."""
        self.loss_sum.add_(loss, alpha=len(batch.samples))
        self.samples += len(batch.samples)

    def pieces(self, batch: Batch) -> list[Piece]:
        loss, pieces = self.task.pieces(batch)
        self.count(loss, batch)
        return pieces

    def linearise(self, batch: Batch) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        return self.task.linearise(batch)

    @contextmanager
    def without_side_effects(self) -> Iterator[None]:
        buffers = self.task.float_buffers()
        kept, ints = [buffer.clone() for buffer in buffers], read_ints(self.task.model, self.task.layout)
        loss_sum, samples = self.loss_sum.clone(), self.samples
        yield
        torch._foreach_copy_(buffers, kept)
        write_ints(self.task.model, self.task.layout, ints)
        self.loss_sum, self.samples = loss_sum, samples

    def deliver(self, result: LocalResult) -> Delivery:
        """Return the client's update on its way: the delta of the parameters, followed by that of the float buffers."""
        layout = self.task.layout
        if result.delta_P.shape != self.delta_P.shape or not result.delta_P.is_floating_point():
            given = f"{result.delta_P.dtype} of shape {tuple(result.delta_P.shape)}"
            raise ValueError(f"its delta is {given}; it must be floating point of shape {tuple(self.delta_P.shape)}")
        in_place = result.delta_P.data_ptr() == self.x_P.data_ptr() and not self.private
        delta_N = self.task.x_N if in_place else self.task.delta_N  # in place: the other one takes no memory
        if not in_place and result.delta_P.data_ptr() != self.delta_P.data_ptr():
            self.delta_P.copy_(result.delta_P)
        buffers = slice(layout.params, layout.length)
        torch.sub(self.task.x_N[buffers], self.start_N[buffers], out=delta_N[buffers])
        ints = read_ints(self.task.model, layout)
        if self.private:
            shared = slice(self.private, None)
            result = replace(
                result,
                delta_P=self.delta_P[shared],
                sends={name: vector[shared] for name, vector in result.sends.items()},
                keeps={name: vector[shared] for name, vector in result.keeps.items()},
            )
        if layout.private.length:
            result = replace(result, keeps={**result.keeps, PRIVATE: self.task.private})
        return self.task.deliver(self.cid, delta_N, self.loss_sum, max(self.samples, 1), ints, result)


class Task:
    """A model bound to flat vectors, and the data it learns from: a `rounds.Clients`."""

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
        mode: Mode = PLAIN,
        sums_device: torch.device | None = None,
        data_on_host: bool = False,
        drop_out_of_memory: bool = False,
        graphs: bool = False,
        private: Collection[str] = (),
        kernels: bool = True,
    ) -> None:
        self.model, self.partition, self.seed, self.device = model.to(device), partition, seed, device
        self.sums_device = device if sums_device is None else sums_device
        self.download = Download(device) if self.sums_device == CPU and pins(device) else None
        self.mode, self.forward = mode, mode.forward(self.model, device)
        self.plain = PLAIN.forward(self.model, device)  # as tests call it
        self.layout = layout_of(model, channels_last, dtype, 1 if self.sums_device == CPU else ALIGNED, private)
        self.still = Still(model, dtype)
        front = -(-self.layout.private.length // ALIGNED) * ALIGNED
        length = front + self.layout.padded(ranks)
        x, delta = torch.zeros(length, device=device, dtype=dtype), untouched(length, device, dtype)
        self.x_N, self.delta_N = x[front:], delta[front:]
        trained = slice(front - self.layout.private.params, front + self.layout.params)
        self.x_T, self.delta_T = x[trained], delta[trained]
        self.private = x[front - self.layout.private.length : front]
        self.grad_T = untouched(self.layout.trained, device, dtype)
        self.feed, self.goal = make_feed(data, device, dtype, workers, data_on_host), data.goal
        self.drop_out_of_memory = drop_out_of_memory
        image = data.kind in ("images", "numbers") and device.type == "cpu"
        self.network = recognised(model, data.shape, dtype) if kernels and image else None
        self.attach()
        self.first_private = self.private.clone()  # what a client starts from that has none of its own yet
        self.graphs = Graphs(self.by_autograd, self.buffers) if graphs else None
        self.meta = upload(torch.from_numpy(np.zeros(0, np.int64) if meta is None else meta), self.feed.index_device)
        self.fetched: dict[str, Tensor] = {}  # on an accelerator: the state of the round
        self.tests = choose_tests(self.feed.tests, tests)

    def attach(self) -> None:
        """Make the model's tensors views of `x_N`, and prepare views of `grad_T` for its gradients."""
        bind(self.model, self.layout.spans, self.x_N)
        bind(self.model, self.layout.private.spans, self.private)
        tensors = dict(self.model.named_parameters())
        self.spans = self.layout.trained_spans()
        self.params = [tensors[span.name] for span in self.spans]
        self.grads = [span.view(self.grad_T) for span in self.spans]
        on_cpu = self.device.type == "cpu"
        self.large = {k for k, span in enumerate(self.spans) if on_cpu and span.shape.numel() >= LARGE}
        plain = self.mode == PLAIN and self.goal.loss is cross_entropy and self.goal.align is logits
        self.by_hand = by_hand(self.model, self.params, self.grads, self.network) if plain else None

    def loss(self, batch: Batch, forward: Callable[..., Any] | None = None) -> Tensor:
        """Return the mean loss of a batch at the current parameters; `forward` replaces the usual call of the model."""
        x, y = self.feed.train(batch)
        seed_layers(self.device, batch.seed)
        return self.mean_loss(x, y, forward)

    def mean_loss(self, x: Tree, y: Tree, forward: Callable[..., Any] | None = None) -> Tensor:
        """Return the mean loss of inputs and labels."""
        return self.goal.loss(*self.goal.align(call(forward or self.forward, x), y), "mean")

    def pieces(self, batch: Batch) -> tuple[Tensor, list[Piece]]:
        """Return the loss of a batch, and the gradient of its mean in pieces: of large parameters as autograd has made
        it, as writing it to `grad_T` and reading it there would take as long as the step."""
        if not self.large or self.by_hand is not None or self.graphs is not None:
            return self.gradient(batch), [Piece(slice(0, len(self.grad_T)), self.grad_T)]
        x, y = self.feed.train(batch)
        seed_layers(self.device, batch.seed)
        loss, grads = self.grads_of(x, y)
        pieces, small, end = list[Piece](), list[int](), 0
        for number, (span, grad) in enumerate(zip(self.spans, grads, strict=True)):
            flat = span.flat(grad) if number in self.large else None
            if flat is None:
                small.append(number)
                continue
            if end < span.start:
                pieces.append(Piece(slice(end, span.start), self.grad_T[end : span.start]))
            end = span.start + len(flat)
            pieces += (
                Piece(tile, flat[tile.start - span.start : tile.stop - span.start])
                for tile in tiles(span.start, end, PIECE)
            )
        if end < len(self.grad_T):
            pieces.append(Piece(slice(end, len(self.grad_T)), self.grad_T[end:]))
        if small:
            torch._foreach_copy_([self.grads[number] for number in small], [grads[number] for number in small])
        return loss, pieces

    def gradient(self, batch: Batch) -> Tensor:
        """Write the gradient of a batch's mean loss to `grad_T`; return the loss."""
        if self.by_hand is not None:
            x, y = self.feed.train(batch)
            if isinstance(self.feed, ArrayFeed) or int(y.min()) >= 0:  # torch's cross entropy ignores labels of -100
                seed_layers(self.device, batch.seed)
                return self.by_hand(x, y)
        x, y = self.feed.train(batch)
        seed_layers(self.device, batch.seed)
        return self.by_autograd(x, y) if self.graphs is None else self.graphs(x, y)

    def by_autograd(self, x: Tree, y: Tree) -> Tensor:
        """Write the gradient of a batch's mean loss to `grad_T`; return the loss."""
        loss, grads = self.grads_of(x, y)
        torch._foreach_copy_(self.grads, grads)  # cheaper than clearing the vector and accumulating into it
        return loss

    def grads_of(self, x: Tree, y: Tree) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the mean loss and its gradient, a tensor for each trained parameter."""
        with torch.enable_grad():
            loss = self.mean_loss(x, y)
        grads = torch.autograd.grad(loss, self.params, allow_unused=True, materialize_grads=True)
        return loss.detach(), grads

    def buffers(self) -> list[Tensor]:
        """Return what a forward pass in training may change: float buffers, and integer ones."""
        named = dict(self.model.named_buffers())
        return [*self.float_buffers(), *(named[name] for name in self.layout.ints)]

    def float_buffers(self) -> list[Tensor]:
        """Return the shared float buffers and the private ones."""
        own = self.layout.private
        return [self.x_N[self.layout.params :], self.private[: own.length - own.params]]

    def linearise(self, batch: Batch) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the gradient of a batch's mean loss and the function v -> H v, valid until the model changes."""
        forward = self.mode.uncompiled.forward(self.model, self.device)
        grad = partial(torch.autograd.grad, allow_unused=True, materialize_grads=True)
        with torch.enable_grad(), without_fused_rnn(self.model):
            grads = grad(self.loss(batch, forward), self.params, create_graph=True)

        def times_hessian(v_P: Tensor) -> Tensor:
            curved = [(g, span.view(v_P)) for g, span in zip(grads, self.spans, strict=True) if g.requires_grad]
            out_P = torch.zeros_like(v_P)
            if curved:  # empty if the loss is linear in every parameter
                of, along = zip(*curved, strict=True)
                self.flatten(grad(of, self.params, along, retain_graph=True), out_P)  # kept for further products
            return out_P

        flat_P = torch.empty_like(self.grad_T)
        self.flatten([g.detach() for g in grads], flat_P)
        return flat_P, times_hessian

    def flatten(self, tensors: Sequence[Tensor], out_P: Tensor) -> None:
        """Write tensors shaped like the trainable parameters into a flat vector."""
        for span, tensor in zip(self.spans, tensors, strict=True):
            span.view(out_P).copy_(tensor)

    def start(self) -> tuple[Tensor, Tensor]:
        """Return a copy of the current model where it is summed: its vector, and its integer buffers on the host."""
        return self.x_N.to(self.sums_device, copy=True), read_ints(self.model, self.layout).to(CPU)

    def load(self, model_N: Tensor, ints: Tensor, private: Tensor | None = None) -> None:
        """Load parameters and buffers into the model: the private ones of a client, or those of the beginning."""
        self.x_N.copy_(model_N)
        self.private.copy_(self.first_private if private is None else private)
        write_ints(self.model, self.layout, upload(ints, self.device))

    def fetch(self, state: Global) -> tuple[Tensor, Mapping[str, Tensor], Tensor]:
        """Return the model, the shared vectors and the integer buffers that the clients of a round start from, on this
        device: copied once per round if they are elsewhere."""
        if self.device == self.sums_device:
            return state.model_N, state.shared, state.ints
        for name, vector_N in {"": state.model_N, **state.shared}.items():
            if name not in self.fetched:
                self.fetched[name] = torch.empty_like(vector_N, device=self.device)
            self.fetched[name].copy_(vector_N)
        shared = {name: self.fetched[name] for name in state.shared}
        return self.fetched[""], shared, state.ints.to(self.device)

    def deliver(
        self, cid: int, delta_N: Tensor, loss_sum: Tensor, samples: int, ints: Tensor, result: LocalResult
    ) -> Delivery:
        """Return a client's update on its way to where it is summed. If that is here, nothing is copied."""
        if self.device == self.sums_device:
            return Delivery(lambda: Update(cid, delta_N, ints.to(CPU), float(loss_sum) / samples, result))
        tensors = {"delta": delta_N, "loss": loss_sum, "ints": ints}
        tensors |= {f"sends.{name}": vector_P for name, vector_P in result.sends.items()}
        tensors |= {f"keeps.{name}": vector_P for name, vector_P in result.keeps.items()}
        wait = None if self.download is None else self.download.start(tensors)

        def update() -> Update:
            found = {name: x.to(CPU) for name, x in tensors.items()} if wait is None else wait()
            brought = replace(
                result,
                delta_P=found["delta"][: self.layout.params],
                sends={name: found[f"sends.{name}"] for name in result.sends},
                keeps={name: found[f"keeps.{name}"] for name in result.keeps},
            )
            return Update(cid, found["delta"], found["ints"], float(found["loss"]) / samples, brought)

        return Delivery(update, late=wait is not None)

    def job(self, start: Start) -> ModelJob:
        """Return a client's job. There is one model per rank, so a new job invalidates the previous one."""
        return ModelJob(self, start)

    @property
    def sizes(self) -> np.ndarray:
        return self.partition.sizes

    def train(self, cids: Sequence[int], state: Global, rule: LocalRule, work: Work) -> Iterator[Update]:
        return train_clients(self, cids, state, rule, work)

    def each(self, cids: Sequence[int], train: Callable[[Trainer, int], T]) -> Iterator[tuple[int, T]]:
        """Yield each client with the result of `train(task, cid)`. A result may hold views of the task's vectors, which
        are valid until the next one is requested."""
        for cid in cids:
            yield cid, train(self, cid)

    @property
    def meta_size(self) -> int:
        return len(self.meta)

    def meta_gradient(self, model_N: Tensor, ints: Tensor, block: slice, round: int) -> Tensor:
        self.load(model_N, ints)  # per block: training moves buffers, and blocks must not depend on each other
        self.model.train()
        self.gradient(Batch(self.meta[block], torch_seed(self.seed, "meta", round, block.start)))
        return self.grad_T[self.layout.private.params :].to(self.sums_device)

    def score(
        self, blocks: Sequence[slice], by_class: bool = False, metrics: Mapping[str, Total] | None = None
    ) -> Iterator[Scored]:
        """Yield the loaded model's score on each block of the test set, per class if `by_class`, and by further
        metrics."""
        return self.judge(self.feed.test([self.tests[block] for block in blocks]), by_class, metrics or {})

    def score_train(self, samples: Sequence[Tensor]) -> Iterator[Scored]:
        """Yield the loaded model's score on each block of train samples, without augmentation."""
        return self.judge(self.feed.plain(samples), False, {})

    @torch.inference_mode()
    def judge(self, pairs: Iterator[Pair], by_class: bool, metrics: Mapping[str, Total]) -> Iterator[Scored]:
        """Yield the model's score on each block of samples."""
        self.model.eval()
        for x, y in pairs:
            outputs, labels = self.goal.align(call(self.plain, x), y)
            classes = each_class(self.goal, outputs, labels) if by_class else {}
            total, loss = float(self.goal.total(outputs, labels)), float(self.goal.loss(outputs, labels, "sum"))
            more = {name: metric(outputs, labels) for name, metric in metrics.items()}
            yield Scored(total, loss, int(self.goal.count(labels)), classes, more)


def each_class(goal: Objective, outputs: Tensor, y: Tensor) -> dict[int, tuple[float, int]]:
    """Return metric and number of labels per class; the class of a sequence is that of its last position."""
    classes = y.reshape(len(y), -1)[:, -1]
    scores = {}
    for label in set(classes.tolist()):
        mine = classes == label
        scores[label] = float(goal.total(outputs[mine], y[mine])), y[mine].numel()
    return scores


def choose_tests(available: int, wanted: int | None) -> Tensor:
    """Return the indices of the test samples to score: all, or a fixed random subset of `wanted`."""
    if wanted is None or wanted >= available:
        return torch.arange(available)
    return torch.from_numpy(np.sort(generator(0, "tests").choice(available, wanted, replace=False)))
