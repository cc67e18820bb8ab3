"""A federation of parabolas, for rounds worked out by hand: client n's loss is 1/2 * sum_j a_nj (x_j - b_nj)^2.

`QuadraticTask` stands in for `clients.task.Task` and its jobs are whole `fedmpi.local.Job`s, with memory handled as
strangely as theirs: a gradient lives until the next one, a delta until the next job. Every batch of a client has the
same loss, so only the number of steps matters. N: the padded vector.  P: the two parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from federation import run_rounds
from torch import Tensor

from fedmpi.algorithms import Algorithm
from fedmpi.clients.task import Task
from fedmpi.clients.training import Global, Start, train_clients
from fedmpi.cohort import Work
from fedmpi.comm import Comm
from fedmpi.comm.threads import run_threads
from fedmpi.data import Partition
from fedmpi.flat import Layout
from fedmpi.local import Job, LocalResult, LocalRule
from fedmpi.local.update import Update
from fedmpi.rounds import Plan, Report, State, begin

NO_INTS = torch.zeros(0, dtype=torch.int64)


@dataclass(frozen=True)
class Client:
    """Curvatures, the lowest point, and how many samples stand behind it."""

    a: tuple[float, float]
    b: tuple[float, float]
    samples: int


class QuadraticJob:
    """One client's work in one round."""

    def __init__(self, task: QuadraticTask, start: Start) -> None:
        self.task, self.round, self.cid, self.work = task, start.round, start.cid, start.work
        client = task.clients[start.cid]
        self.a, self.b = torch.tensor(client.a), torch.tensor(client.b)
        self.start_P = start.model_N[:2]
        self.shared: Mapping[str, Tensor] = {name: vector_N[:2] for name, vector_N in start.shared.items()}
        self.memory = start.memory
        task.x_N.copy_(start.model_N)
        self.x_P, self.delta_P = task.x_N[:2], task.delta_N[:2].fill_(torch.nan)
        self.readable = [self.start_P, *self.shared.values(), *self.memory.values()]
        self.before = [vector_P.clone() for vector_P in self.readable]
        self.losses: list[float] = []

    def batches(self, leave: int = 0) -> Iterator[int]:
        yield from range(self.work.count(self.task.seed, self.round, self.cid, self.samples, leave))

    def everything(self) -> Iterator[tuple[int, float]]:
        for first in range(0, self.samples, self.work.batch):
            yield first, min(self.work.batch, self.samples - first) / self.samples

    @property
    def samples(self) -> int:
        return int(self.task.partition.sizes[self.cid])

    def grad(self, x_P: Tensor, batch: int) -> Tensor:
        away_P = x_P - self.b
        self.losses.append(float((self.a * away_P.square()).sum()) / 2)
        return torch.mul(self.a, away_P, out=self.task.grad_P)

    def linearise(self, batch: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        here_P = self.x_P.clone()

        def times_hessian(v_P: Tensor) -> Tensor:
            assert torch.equal(here_P, self.x_P), "the product is valid until x_P moves"
            return self.a * v_P

        return self.a * (here_P - self.b), times_hessian

    @contextmanager
    def aside(self) -> Iterator[None]:
        kept = self.losses[:]
        yield
        self.losses = kept

    def finish(self, result: LocalResult) -> Update:
        for now_P, before_P in zip(self.readable, self.before, strict=True):
            assert torch.equal(now_P, before_P), "a rule wrote to what is to be read only"
        if result.delta_P is not self.delta_P:
            self.delta_P.copy_(result.delta_P)
        return Update(self.cid, self.task.delta_N, NO_INTS, sum(self.losses) / max(len(self.losses), 1), result)


class QuadraticTask:
    """Clients with parabolas; the meta set is points whose loss is 1/2 * |x - point|^2."""

    device = torch.device("cpu")
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

    def job(self, start: Start) -> QuadraticJob:
        return QuadraticJob(self, start)

    def train(self, cids: Sequence[int], state: Global, rule: LocalRule, work: Work) -> Iterator[Update]:
        return train_clients(self, cids, state, rule, work)

    def meta_gradient(self, model_N: Tensor, ints: Tensor, block: slice, round: int) -> Tensor:
        self.x_N.copy_(model_N)
        return torch.sub(self.x_N[:2], self.meta[block].mean(0), out=self.grad_P)


@dataclass(frozen=True)
class Outcome:
    """Where a federation ended, as plain numbers, and what was reported of its rounds."""

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
    """Run the plan's rounds on that many thread ranks; `make(ranks)` makes a rank's task. With `tau`, agreement is
    measured."""

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
        reports=[replace(report, seconds={}, bytes_sent=0) for report in results[0][1]],
    )


def losing(rule: LocalRule, round: int, cids: set[int]) -> LocalRule:
    """The rule, but that in one round what some clients send is not a number."""

    def run(job: Job) -> LocalResult:
        result = rule(job)
        if job.round == round and job.cid in cids:  # type: ignore[attr-defined]
            result.delta_P[0] = torch.nan
        return result

    return replace(rule, run=run)
