"""Train clients and yield their updates. A client whose training raises is left out, and the run continues."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ..cohort import Work
from ..device import free_memory
from ..errors import RunError, one_line
from ..local import Job, LocalResult, LocalRule, Update
from ..local.memory import Memory
from .still import Still, changes_still

log = logging.getLogger("fedmpi")

T = TypeVar("T")


class Global(Protocol):
    """The global state that every client of a round starts from: see `rounds.State`."""

    @property
    def round(self) -> int: ...
    @property
    def model_N(self) -> Tensor: ...
    @property
    def ints(self) -> Tensor: ...
    @property
    def shared(self) -> Mapping[str, Tensor]: ...
    @property
    def memory(self) -> Memory: ...


@dataclass(frozen=True)
class Start:
    """Everything one client's job starts from: the arguments of a job. Its vectors are read-only."""

    model_N: Tensor
    ints: Tensor
    round: int
    cid: int
    work: Work
    shared: Mapping[str, Tensor] = field(default_factory=dict)
    memory: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def versions(self) -> list[int]:
        """Return torch's version counter of each vector: a write raises it."""
        return [vector._version for vector in (self.model_N, *self.shared.values(), *self.memory.values())]


@dataclass(frozen=True)
class Delivery:
    """A client's update on its way to where it is summed; the call waits for it. If it is `late`, it is copied while
    the next client trains; else it lies in the trainer's memory, and the next client overwrites it."""

    wait: Callable[[], Update]
    late: bool = False

    def __call__(self) -> Update:
        return self.wait()


class ClientJob(Job, Protocol):
    """A job that turns the result of its rule into an update."""

    def deliver(self, result: LocalResult) -> Delivery: ...


class Trainer(Protocol):
    """A model that clients train on: it makes their jobs."""

    device: torch.device
    still: Still
    drop_out_of_memory: bool  # whether a client that does not fit the device's memory is left out, or ends the run

    def job(self, start: Start) -> ClientJob: ...

    def fetch(self, state: Global) -> tuple[Tensor, Mapping[str, Tensor], Tensor]:
        """Return the model, the shared vectors and the integer buffers of a round where clients train."""

    def each(self, cids: Sequence[int], train: Callable[[Trainer, int], T]) -> Iterator[tuple[int, T]]:
        """Yield each client with the result of `train(trainer, cid)`."""


def train_clients(
    trainer: Trainer, cids: Sequence[int], state: Global, rule: LocalRule, work: Work
) -> Iterator[Update]:
    """Train clients in the round after `state`, and yield their updates. A client whose training raises (out of memory,
    a bug in a user's rule or model) is left out; the error is logged, with a traceback the first time."""
    t, logged = state.round + 1, set[str]()
    model_N, shared, ints = trainer.fetch(state)

    def attempt(trainer: Trainer, start: Start, again: bool = True) -> Delivery:
        """Train a client; if the device is out of memory, free what is cached and try once more."""
        try:
            job = trainer.job(start)
            return job.deliver(rule(job))
        except torch.OutOfMemoryError:
            if not again:
                raise
        free_memory(trainer.device)  # here, as the traceback keeps the tensors of the first attempt alive
        return attempt(trainer, start, again=False)

    def train(trainer: Trainer, cid: int) -> Delivery | None:
        start = Start(model_N, ints, t, cid, work, shared, state.memory.read(cid))
        before, delivery = start.versions, None
        try:
            delivery = attempt(trainer, start)
        except (Exception, SystemExit) as error:
            if isinstance(error, torch.OutOfMemoryError) and not trainer.drop_out_of_memory:
                raise RunError(
                    f"round {t}, client {cid}: {trainer.device} is out of memory, twice: {one_line(error)}; lower "
                    "--local.batch, start fewer ranks per GPU, or give --step.out_of_memory drop to leave such clients "
                    "out"
                ) from error
            what = type(error).__name__ if isinstance(error, torch.OutOfMemoryError) else repr(error)
            new = what not in logged
            logged.add(what)
            log.error("round %d: client %d left out: its training raised %s", t, cid, what, exc_info=new)
        if start.versions != before:
            raise RunError(
                f"round {t}, client {cid}: its rule wrote to job.start_P, job.shared or job.memory, which all clients "
                "share; train job.x_P, and copy what you want to change"
            )
        if trainer.still.written:
            raise RunError(f"round {t}, client {cid}: {changes_still(trainer.still.written)}")
        return delivery

    under_way: Delivery | None = None  # a late one: the client before
    for count, (_, delivery) in enumerate(trainer.each(cids, train), 1):
        if under_way is not None:
            yield under_way()
            under_way = None
        if delivery is not None and delivery.late:
            under_way = delivery
        elif delivery is not None:
            yield delivery()._replace(last=count == len(cids))
    if under_way is not None:
        yield under_way()._replace(last=True)
