"""A small federation in memory for tests: random images, a few clients of unequal size, a model with BatchNorm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from fedmpi.algorithms import Algorithm, MetaStep
from fedmpi.clients.task import Task, Work
from fedmpi.comm import Comm
from fedmpi.comm.threads import run_threads
from fedmpi.data import Arrays, Partition
from fedmpi.local import LocalRule, sgd
from fedmpi.local.memory import Memory
from fedmpi.masks import make_mask
from fedmpi.rounds import Clients, Plan, Report, State, begin, rounds
from fedmpi.runs.measures.agreement import Agreement
from fedmpi.server import ServerKnobs, make_server

SIZES = (5, 9, 14, 3, 20, 7, 11)
CPU = torch.device("cpu")
T = TypeVar("T")


def arrays() -> Arrays:
    """Random images whose label is written into them, so that something can be learned."""
    rng = np.random.default_rng(5)
    count = sum(SIZES)
    y = rng.integers(0, 3, count + 30)
    x = rng.integers(0, 120, (count + 30, 1, 6, 6))
    x[np.arange(len(y)), 0, y, :] += 100
    images, labels = torch.from_numpy(x.astype(np.uint8)), torch.from_numpy(y)
    return Arrays("tiny", 3, images[:count], labels[:count], images[count:], labels[count:], (0.3,), (0.2,))


def partition() -> Partition:
    order = np.random.default_rng(6).permutation(sum(SIZES))
    return Partition(np.concatenate([[0], np.cumsum(SIZES)]), order)


def norm_model() -> nn.Module:
    """A model with float and integer buffers."""
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3))


def plain_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 3))


def tasks(size: int, make=norm_model, meta: np.ndarray | None = None) -> list[Task]:
    """The same task for each rank, made one after another because torch's seed belongs to the process."""
    out = []
    for _ in range(size):
        torch.manual_seed(3)
        out.append(Task(make(), arrays(), partition(), seed=11, device=CPU, ranks=size, meta=meta))
    return out


def algorithm(
    mask: str = "gma",
    server: str = "sgd",
    tau: float = 0.4,
    local: LocalRule | None = None,
    meta: MetaStep | None = None,
    **knobs,
) -> Algorithm:
    return Algorithm(local or sgd(0.05, 0.9), make_mask(mask, tau), make_server(server, ServerKnobs(**knobs)), meta)


def plan(**changes) -> Plan:
    return Plan(**({"seed": 11, "rounds": 3, "cohort": 5, "work": Work(epochs=2, batch=4)} | changes))


def run_rounds(
    state: State, how: Plan, algo: Algorithm, clients: Clients, comm: Comm, tau: float | None = None
) -> tuple[State, list[Report]]:
    """Return a rank's last state and its reports; with `tau`, agreement is measured."""
    agreement = Agreement()
    agreement.start(clients.layout, tau or 0.0, clients.sums_device)
    reports = []
    for after, report in rounds(state, how, algo, clients, comm, [] if tau is None else [agreement]):
        state = after
        if tau is not None:
            report = replace(report, measures=agreement.read(comm, report.clients))
        reports.append(report)
    return state, reports


def federate(
    size: int,
    algo: Algorithm,
    how: Plan | None = None,
    make=norm_model,
    meta: np.ndarray | None = None,
    memory: Callable[[], Memory] | None = None,
    tau: float | None = None,
) -> tuple[list[State], list[Report]]:
    """Return every rank's last state, and rank 0's reports; with `tau`, agreement is measured."""
    ours, how = tasks(size, make, meta), how or plan()

    def work(comm: Comm) -> tuple[State, list[Report]]:
        task = ours[comm.rank]
        return run_rounds(begin(task, algo, comm, memory() if memory else None), how, algo, task, comm, tau)

    results = run_threads(size, work)
    return [state for state, _ in results], results[0][1]


def each(buckets: Iterable[tuple[slice, list[Iterator[T]]]]) -> list[T]:
    """All tiles of the first part of every bucket."""
    return [tile for _, (tiles, *_) in buckets for tile in tiles]
