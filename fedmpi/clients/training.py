"""Train clients and yield their updates. A client whose training raises is left out, and the run continues."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from torch import Tensor

from ..cohort import Work
from ..errors import RunError
from ..local import Job, LocalResult, LocalRule, Update
from ..local.memory import Memory

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


class ClientJob(Job, Protocol):
    """A job that turns the result of its rule into an update."""

    def finish(self, result: LocalResult) -> Update: ...


class Trainer(Protocol):
    """A model that clients train on: it makes their jobs."""

    def job(self, start: Start) -> ClientJob: ...

    def each(self, cids: Sequence[int], train: Callable[[Trainer, int], T]) -> Iterator[tuple[int, T]]:
        """Yield each client with the result of `train(trainer, cid)`."""


def train_clients(
    trainer: Trainer, cids: Sequence[int], state: Global, rule: LocalRule, work: Work
) -> Iterator[Update]:
    """Train clients in the round after `state`, and yield their updates. A client whose training raises (out of memory,
    a bug in a user's rule or model) is left out; the error is logged, with a traceback the first time."""
    t, logged = state.round + 1, set[str]()

    def train(trainer: Trainer, cid: int) -> Update | None:
        start = Start(state.model_N, state.ints, t, cid, work, state.shared, state.memory.read(cid))
        before, update = start.versions, None
        try:
            job = trainer.job(start)
            update = job.finish(rule(job))
        except (Exception, SystemExit) as error:
            what = repr(error)
            new = what not in logged
            logged.add(what)
            log.error("round %d: client %d left out: its training raised %s", t, cid, what, exc_info=new)
        if start.versions != before:
            raise RunError(
                f"round {t}, client {cid}: its rule wrote to job.start_P, job.shared or job.memory, which all clients "
                "share; train job.x_P, and copy what you want to change"
            )
        return update

    for count, (_, update) in enumerate(trainer.each(cids, train), 1):
        if update is not None:
            yield update._replace(last=count == len(cids))
