"""Parabolas instead of models, for rules and rounds worked out by hand.

`Parabola` is a `fedmpi.local.Job` of its own, in float64. `QuadraticTask` is a federation, a `rounds.Clients`: client
n's loss is 1/2 * sum_j a_nj (x_j - b_nj)^2, every batch of a client has the same loss, so only the number of steps
matters. Memory is reused as a real task does: a gradient is valid until the next one, a delta until the next job.

N: the padded vector.  P: the parameters, two in a federation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import repeat
from typing import NamedTuple

import numpy as np
import torch
from federation import run_rounds
from torch import Tensor, nn

from fedmpi.algorithms import Algorithm
from fedmpi.clients.still import Still
from fedmpi.clients.task import Task
from fedmpi.clients.training import Delivery, Global, Start, train_clients
from fedmpi.cohort import Work
from fedmpi.comm import Comm
from fedmpi.comm.threads import run_threads
from fedmpi.data import Partition
from fedmpi.flat import Layout
from fedmpi.local import LocalResult, LocalRule, Piece, Update
from fedmpi.rounds import Plan, Report, State, begin

NO_INTS = torch.zeros(0, dtype=torch.int64)
Point = float | Sequence[float]
BENT = ((1.0, 0.5), (0.5, 2.0))
"""a curvature that ties two parameters to each other"""


@dataclass(frozen=True)
class Client:
    """Curvatures, the lowest point, and the number of samples."""

    a: tuple[float, float]
    b: tuple[float, float]
    samples: int


class Call(NamedTuple):
    """A gradient that was asked for: where, of which batch, and whether it counts in the reported loss."""

    x: list[float]
    batch: Point
    counts: bool


def vector(values: Point) -> Tensor:
    return torch.atleast_1d(torch.tensor(values, dtype=torch.float64))


class Parabola:
    """A job whose loss is (x - target)^T H (x - target) / 2 with H = curvature; a batch is its target.

    `whole` holds all samples as (target, share), at first those of an epoch in equal shares. It remembers what it was
    asked, and hands out one and the same memory for every gradient, as a real model does.
    """

    private = 0

    def __init__(
        self,
        start: Point,
        targets: Sequence[Point],
        curvature: float | Sequence[Sequence[float]] = 1.0,
        epochs: int = 1,
        whole: Sequence[tuple[Point, float]] | None = None,
        round: int = 1,
        c: Point | None = None,
        own: Point | None = None,
    ) -> None:
        self.start_P = vector(start)
        self.x_P, self.delta_P = self.start_P.clone(), torch.full_like(self.start_P, torch.nan)
        self.g_P = torch.full_like(self.start_P, torch.nan)
        size = len(self.start_P)
        self.curvature = (
            curvature * torch.eye(size, dtype=torch.float64) if isinstance(curvature, float) else vector(curvature)
        )
        self.targets, self.epochs, self.round, self.cid = list(targets), epochs, round, 0
        epoch = self.targets[: len(self.targets) // epochs]
        self.whole = [(target, 1 / len(epoch)) for target in epoch] if whole is None else list(whole)
        self.shared = {"control": torch.zeros(size, dtype=torch.float64) if c is None else vector(c)}
        self.memory = {"control": torch.zeros(size, dtype=torch.float64) if own is None else vector(own)}
        self.calls: list[Call] = []
        self.is_aside = False

    def batches(self, leave: int = 0) -> Iterator[Point]:
        epoch = len(self.targets) // self.epochs
        return iter(self.targets[: max(self.epochs - leave, 0) * epoch])

    def steps(self, leave: int = 0) -> int:
        return sum(1 for _ in self.batches(leave))

    def tensors(self, x_P: Tensor) -> list[Tensor]:
        return [x_P]

    def pieces(self, batch: Point) -> list[Piece]:
        return [Piece(slice(0, len(self.x_P)), self.grad(self.x_P, batch))]

    def everything(self) -> Iterator[tuple[Point, float]]:
        return iter(self.whole)

    def slope(self, x_P: Tensor, batch: Point) -> Tensor:
        return self.curvature @ (x_P - vector(batch))

    def bend(self, x_P: Tensor) -> Tensor:
        return self.curvature

    def grad(self, x_P: Tensor, batch: Point) -> Tensor:
        self.calls.append(Call(x_P.tolist(), batch, not self.is_aside))
        return self.g_P.copy_(self.slope(x_P, batch))

    def linearise(self, batch: Point) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        assert self.is_aside, "a linearisation would leave its trace in the buffers"
        here_P, bend = self.x_P.clone(), self.bend(self.x_P)

        def times_hessian(v_P: Tensor) -> Tensor:
            assert torch.equal(self.x_P, here_P), "the product was used after x_P has moved"
            return bend @ v_P

        return self.slope(self.x_P, batch), times_hessian

    @contextmanager
    def without_side_effects(self) -> Iterator[None]:
        assert not self.is_aside
        self.is_aside = True
        yield
        self.is_aside = False

    @property
    def counted(self) -> list[Point]:
        """The batches whose loss is reported."""
        return [call.batch for call in self.calls if call.counts]


class Quartic(Parabola):
    """A job of one parameter whose loss is (x - target)^4 / 4: its second derivative depends on the point."""

    def slope(self, x_P: Tensor, batch: Point) -> Tensor:
        return (x_P - vector(batch)) ** 3

    def bend(self, x_P: Tensor) -> Tensor:
        return torch.diag(3 * x_P**2)  # of a batch with target 0


class QuadraticJob(Parabola):
    """One client's work in one round of a `QuadraticTask`."""

    def __init__(self, task: QuadraticTask, start: Start) -> None:
        self.task, self.round, self.cid, self.work = task, start.round, start.cid, start.work
        client = task.clients[start.cid]
        self.a, self.b = (torch.tensor(values, dtype=torch.float32) for values in (client.a, client.b))
        self.start_P = start.model_N[:2]
        self.shared = {name: vector_N[:2] for name, vector_N in start.shared.items()}
        self.memory = dict(start.memory)
        task.x_N.copy_(start.model_N)
        self.x_P, self.delta_P, self.g_P = task.x_N[:2], task.delta_N[:2].fill_(torch.nan), task.grad_P
        self.readable = [self.start_P, *self.shared.values(), *self.memory.values()]
        self.before = [vector_P.clone() for vector_P in self.readable]
        self.calls, self.is_aside = [], False

    def batches(self, leave: int = 0) -> Iterator[Point]:
        return repeat(0.0, self.work.count(self.task.seed, self.round, self.cid, self.samples, leave))

    def everything(self) -> Iterator[tuple[Point, float]]:
        for first in range(0, self.samples, self.work.batch):
            yield 0.0, min(self.work.batch, self.samples - first) / self.samples

    @property
    def samples(self) -> int:
        return int(self.task.partition.sizes[self.cid])

    def slope(self, x_P: Tensor, batch: Point) -> Tensor:
        return self.a * (x_P - self.b)

    def bend(self, x_P: Tensor) -> Tensor:
        return torch.diag(self.a)

    def deliver(self, result: LocalResult) -> Delivery:
        return Delivery(lambda: self.finish(result))

    def finish(self, result: LocalResult) -> Update:
        for now_P, before_P in zip(self.readable, self.before, strict=True):
            assert torch.equal(now_P, before_P), "a rule wrote to what is to be read only"
        if result.delta_P is not self.delta_P:
            self.delta_P.copy_(result.delta_P)
        away = [torch.tensor(call.x) - self.b for call in self.calls if call.counts]
        losses = [float((self.a * away_P.square()).sum()) / 2 for away_P in away]
        return Update(self.cid, self.task.delta_N, NO_INTS, sum(losses) / max(len(losses), 1), result)


class QuadraticTask:
    """Clients with parabolas; the meta set is points whose loss is 1/2 * |x - point|^2."""

    device = sums_device = torch.device("cpu")
    drop_out_of_memory = False
    still = Still(nn.Module())
    layout = Layout(spans=(), params=2, length=2, ints=())

    def __init__(
        self,
        clients: Sequence[Client],
        start: tuple[float, float],
        ranks: int = 1,
        seed: int = 0,
        points: Sequence[tuple[float, float]] = (),
    ) -> None:
        self.clients, self.seed = clients, seed
        offsets = np.cumsum([0, *(client.samples for client in clients)])
        self.partition = Partition(offsets, np.arange(offsets[-1]))
        self.x_N, self.delta_N = (torch.zeros(self.layout.padded(ranks)) for _ in range(2))
        self.x_N[:2] = torch.tensor(start)
        self.grad_P = torch.zeros(2)
        self.meta, self.meta_size, self.sizes = torch.tensor(points).view(-1, 2), len(points), self.partition.sizes

    def start(self) -> tuple[Tensor, Tensor]:
        return self.x_N.clone(), NO_INTS

    each = Task.each

    def fetch(self, state: Global) -> tuple[Tensor, Mapping[str, Tensor], Tensor]:
        return state.model_N, state.shared, state.ints

    def job(self, start: Start) -> QuadraticJob:
        return QuadraticJob(self, start)

    def train(self, cids: Sequence[int], state: Global, rule: LocalRule, work: Work) -> Iterator[Update]:
        return train_clients(self, cids, state, rule, work)

    def meta_gradient(self, model_N: Tensor, ints: Tensor, block: slice, round: int) -> Tensor:
        self.x_N.copy_(model_N)
        return torch.sub(self.x_N[:2], self.meta[block].mean(0), out=self.grad_P)


@dataclass(frozen=True)
class Outcome:
    """The final state of a federation as plain numbers, and the reports of its rounds."""

    w: list[float]
    shared: dict[str, list[float]]
    memory: dict[int, list[float]]
    moments: dict[str, list[float]]
    reports: list[Report]


def descend(
    size: int,
    make: Callable[[int], QuadraticTask],
    algorithm: Algorithm,
    plan: Plan,
    tau: float | None = None,
) -> Outcome:
    """Run the plan's rounds on `size` thread ranks; `make(ranks)` makes a rank's task. `tau` asks for measured
    agreement."""

    def work(comm: Comm) -> tuple[State, list[Report]]:
        task = make(comm.size)
        return run_rounds(begin(task, algorithm, comm), plan, algorithm, task, comm, tau)

    results = run_threads(size, work)
    states = [state for state, _ in results]
    for state in states[1:]:
        assert torch.equal(state.model_N, states[0].model_N), "every rank has the same model"
    first = states[0]
    return Outcome(
        w=first.model_N[:2].tolist(),
        shared={name: vector_N[:2].tolist() for name, vector_N in first.shared.items()},
        memory={cid: torch.cat(list(s.memory.read(cid).values())).tolist() for s in states for cid in s.memory},
        moments={name: torch.cat([s.moments[name] for s in states])[:2].tolist() for name in first.moments},
        reports=[replace(report, seconds={}, bytes_sent=0, bytes_between_nodes=0) for report in results[0][1]],
    )


def losing(rule: LocalRule, round: int, cids: set[int]) -> LocalRule:
    """Return the rule with a NaN in the delta of some clients in one round."""

    def run(job: QuadraticJob) -> LocalResult:
        result = rule(job)
        if job.round == round and job.cid in cids:
            result.delta_P[0] = torch.nan
        return result

    return replace(rule, run=run)
