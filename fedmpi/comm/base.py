"""What a rank can say to the others: five verbs and abort.

    sum(x)               every rank's x, added up, on every rank (small integer and float records)
    exchange(send, recv) row r of send goes to rank r, row r of recv comes from rank r; returns at once with a `Pending`
    gather(x_S, out_N)   every rank's slice, laid end to end, on every rank
    broadcast(x, root)   root's x on every rank
    barrier()            no rank leaves before every rank has come

Arithmetic on large vectors is not done here: a transport moves slices, `reduce.py` adds them up, so that there is one
sum and not one a transport. All verbs are collective: every rank calls them in the same order. A verb that cannot
finish raises `RunError` with the missing ranks in it where the transport can tell.

N: a full padded vector of size * S elements.  S: the slice a rank owns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from ..errors import UserError

MESSAGE_BYTES = 1024  # an error's sentence, shared by `agreed`


class Pending(Protocol):
    """An exchange under way."""

    def wait(self) -> None:
        """Return when every row has left and arrived."""


class Comm(ABC):
    """One rank's end of the line. `sent` and `received` count the payload bytes of this rank since it was made."""

    rank: int
    size: int
    name: str

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.sent = self.received = 0

    @property
    def others(self) -> list[int]:
        """The other ranks, each rank starting behind itself, so that not all talk to rank 0 first."""
        return [(self.rank + k) % self.size for k in range(1, self.size)]

    def exchange(self, send: Sequence[Tensor], recv: Sequence[Tensor]) -> Pending:
        """Start to send row r to rank r and to receive row r from it; a rank's own row stays where it is."""
        self._count(sum(send[r].nbytes for r in self.others), sum(recv[r].nbytes for r in self.others))
        return self._exchange(send, recv)

    def gather(self, x_S: Tensor, out_N: Tensor) -> None:
        """Every rank's slice, laid end to end in out_N; x_S may be this rank's part of out_N itself."""
        rows = out_N.view(self.size, -1).unbind(0)
        self.exchange([x_S] * self.size, rows).wait()
        if rows[self.rank].data_ptr() != x_S.data_ptr():
            rows[self.rank].copy_(x_S)

    def sum(self, x: Tensor) -> None:
        """Every rank's x added up, in place. Counted as an all-reduce that sends each element twice."""
        self._count(*[2 * x.nbytes * (self.size - 1) // self.size] * 2)
        self._sum(x)

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        """Root's x, in place."""
        alone = self.size == 1
        self._count(x.nbytes if self.rank == root and not alone else 0, 0 if self.rank == root else x.nbytes)
        self._broadcast(x, root)

    def _count(self, sent: int, received: int) -> None:
        self.sent += sent
        self.received += received

    @abstractmethod
    def _exchange(self, send: Sequence[Tensor], recv: Sequence[Tensor]) -> Pending: ...

    @abstractmethod
    def _sum(self, x: Tensor) -> None: ...

    @abstractmethod
    def _broadcast(self, x: Tensor, root: int) -> None: ...

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has called it."""

    @abstractmethod
    def abort(self, code: int = 1) -> NoReturn:
        """End this rank at once and the others with it, because something is wrong that they cannot know of."""

    def close(self) -> None:  # noqa: B027 - most transports hold nothing
        """Let go of the transport; call it on every rank after the last verb."""


@contextmanager
def agreed(comm: Comm) -> Iterator[None]:
    """Run a block that may find a mistake on some ranks only; then every rank raises the same `UserError`, or none.

    Collective. For work before training that differs between ranks: reading data, writing the run folder.
    """
    sentence = ""
    try:
        yield
    except (UserError, OSError) as error:
        sentence = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    said = torch.zeros(comm.size, MESSAGE_BYTES, dtype=torch.uint8)
    raw = sentence.encode()[:MESSAGE_BYTES]
    said[comm.rank, : len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else 0
    comm.sum(said)  # each rank fills its own row
    for rank, row in enumerate(said.numpy()):
        if row.any():
            where = f"rank {rank}: " if comm.size > 1 else ""
            raise UserError(where + row.tobytes().rstrip(b"\0").decode(errors="replace"))
