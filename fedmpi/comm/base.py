"""The interface of a transport: five collective operations, and abort.

    sum(x)             add up every rank's x, on every rank (small records of counts)
    exchange(rows...)  make every rank's row for this rank readable here, and this rank's rows readable there
    gather(x_N)        make every rank's slice of a vector readable on every rank
    broadcast(x, root) copy root's x to every rank
    barrier()          wait for all ranks

`exchange` and `gather` move large vectors, in memory that the transport allocates: `rows` has one row per rank,
`vector` one slice per rank. Ranks of one node share that memory (`node.py`) and copy nothing; between nodes it is sent
point to point. So after an `exchange` or a `gather`, the data of other ranks may be read, and data offered to others
must not be changed, until the next sum, gather or barrier.

Both also work bucket by bucket, to overlap communication with computation: `stream` is an exchange that yields each
bucket when it has arrived, `start_gather` sends a bucket while the next one is computed.

Transports do no arithmetic on large vectors: they make slices readable, and `aggregate` adds them up, so that there is
one sum and not one per transport. Every rank calls the operations in the same order. An operation that cannot finish
raises `RunError`, which names the missing ranks if the transport knows them.

N: a full padded vector of size * S elements.  S: the slice a rank owns.
"""

from __future__ import annotations

import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn, TypeVar

import torch
from torch import Tensor

from ..errors import CommonError, FileError, UserError, of_path
from .links import Links

if TYPE_CHECKING:
    from .node import Node

T = TypeVar("T")
Wait = Callable[[], None]  # waits until a started transfer is complete
WHOLE = slice(None)
ROLL_CALL_SECONDS = 5.0  # how long a failed rank waits for signs of life from the others


@dataclass(frozen=True)
class Rows:
    """Memory for `exchange`: row r of `mine` is read by rank r, row r of `theirs` comes from rank r; its own row is the
    same tensor in both. `shared` are the ranks whose rows are in shared memory; `None`, on all ranks, if no rank
    shares memory. `block` is all of `mine` as one tensor, if none of them is shared. With a `wire` type, `out` is sent
    instead of `mine`, and `theirs` is of that type."""

    mine: list[Tensor]
    theirs: list[Tensor]
    shared: frozenset[int] | None = None
    block: Tensor | None = None
    out: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Update:
    """Memory for a gather of updates in another type: of this rank's slice, and those received for other slices."""

    mine_S: Tensor
    theirs: dict[int, Tensor]


class Comm(ABC):
    """One rank's endpoint of a transport. `sent` counts the payload bytes this rank has provided to others. A rank is a
    node of its own until `share_node`."""

    name: str

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.sent = 0
        self.links = Links.apart(rank, size)
        self.node: Node | None = None

    @property
    def others(self) -> list[int]:
        """Return the other ranks, starting after this one, so that not all ranks talk to rank 0 first."""
        return [(self.rank + k) % self.size for k in range(1, self.size)]

    def rows(
        self, length: int, dtype: torch.dtype, device: torch.device | None = None, wire: torch.dtype | None = None
    ) -> Rows:
        """Allocate memory for `exchange`, a row of `length` elements per rank. With `wire`, rows that are not shared
        are sent in that type, and the caller fills `out` as well. Collective; once per run."""

        def private(of: torch.dtype = dtype) -> Tensor:
            return torch.zeros(length, dtype=of, device=device)

        shared = self.node.rows(length, dtype) if self.node else None
        away = [r for r in self.others if r not in (shared or ())]
        block = None if shared else torch.zeros(self.size, length, dtype=dtype, device=device)
        pairs = dict(shared or {})
        for r in (self.rank, *away):
            own = private() if block is None else block[r]
            pairs[r] = own, own if r == self.rank else private(wire or dtype)
        mine, theirs = ([pairs[r][side] for r in range(self.size)] for side in (0, 1))
        out = {r: private(wire) for r in away} if wire else {}
        return Rows(mine, theirs, None if shared is None else frozenset(shared), block, out)

    def vector(self, slice_length: int, device: torch.device | None = None) -> Tensor:
        """Allocate a float32 vector of zeros for `gather`: a rank writes its slice and reads all. Collective."""
        shared = self.node.vector(slice_length) if self.node else None
        return torch.zeros(slice_length * self.size, device=device) if shared is None else shared

    def own(self, x_N: Tensor) -> Tensor:
        """Return this rank's slice of a padded vector, as a view."""
        return x_N.view(self.size, -1)[self.rank]

    def exchange(self, *many: Rows) -> None:
        """Make every rank's row for this rank readable: sent between nodes, in shared memory within a node."""
        for _ in self.stream(many):
            pass

    def stream(
        self,
        many: Sequence[Rows],
        buckets: Sequence[slice] = (WHOLE,),
        prepare: Callable[[slice], None] = lambda bucket: None,
    ) -> Iterator[slice]:
        """Exchange rows bucket by bucket, and yield each bucket when it has arrived. `prepare` is called before a
        bucket is sent; all are in flight at once. Collective: every rank passes the same buckets and consumes all."""
        flights: list[list[Wait]] = []
        for bucket in buckets:
            prepare(bucket)
            flights.append([self._start_rows(rows, bucket) for rows in many])
        if any(rows.shared is not None for rows in many):  # the same on every rank, even on one alone on its node
            self.barrier()
        for bucket, flight in zip(buckets, flights, strict=True):
            for wait in flight:
                wait()
            yield bucket

    def _start_rows(self, rows: Rows, bucket: slice) -> Wait:
        mine = {r: rows.out.get(r, rows.mine[r])[bucket] for r in self.others}
        self.sent += sum(x.nbytes for x in mine.values())
        away = [r for r in self.others if r not in (rows.shared or ())]
        return self._start({r: mine[r] for r in away}, {r: rows.theirs[r][bucket] for r in away})

    def gather(self, x_N: Tensor, under_way: Sequence[Wait] | None = None) -> None:
        """Make every rank's slice of a vector from `vector` readable on every rank. With `under_way`, finish what
        `start_gather` has started."""
        for wait in [self.start_gather(x_N)] if under_way is None else under_way:
            wait()
        if self.node is not None and self.node.holds(x_N):
            self.barrier()

    def start_gather(self, x_N: Tensor, bucket: slice = WHOLE, update: Update | None = None) -> Wait:
        """Start to send a bucket of this rank's slice and to receive the others'. With `update`, the update is sent
        instead and added to the slice where it arrives; the caller has added it to this rank's own slice."""
        slices = [x_S[bucket] for x_S in x_N.view(self.size, -1).unbind(0)]
        receivers, senders = self._peers(x_N)
        own = slices[self.rank]
        neighbours = len(self.node.ranks) - 1 if self.node is not None and self.node.holds(x_N) else 0
        mine = own if update is None else update.mine_S[bucket]
        self.sent += own.nbytes * neighbours + mine.nbytes * len(receivers)
        if update is None:
            return self._start({r: own for r in receivers}, {r: slices[r] for r in senders})
        theirs = {r: update.theirs[r][bucket] for r in senders}
        wait = self._start({r: mine for r in receivers}, theirs)

        def finish() -> None:
            wait()
            for r, x in theirs.items():
                slices[r].add_(x)

        return finish

    def update(self, x_N: Tensor, dtype: torch.dtype) -> Update | None:
        """Allocate memory for a gather that sends updates of x_N in that type; None, on all ranks, if none is sent."""
        receivers, senders = self._peers(x_N)
        if not receivers:
            return None
        mine_S = torch.zeros(x_N.numel() // self.size, dtype=dtype, device=x_N.device)
        return Update(mine_S, {r: torch.zeros_like(mine_S) for r in senders})

    def _peers(self, x_N: Tensor) -> tuple[list[int], list[int]]:
        """Return the ranks to which this rank's slice of a vector is sent, and those from which slices are received."""
        if self.node is None or not self.node.holds(x_N):
            return self.others, self.others
        # One rank per node receives for the whole node.
        away = [r for r in self.others if r not in self.node.ranks]
        return self.node.other_leaders, away if self.node.leads else []

    def sum(self, x: Tensor) -> None:
        """Add up every rank's x, in place. Counted as an all-reduce that sends each element twice."""
        self.sent += 2 * x.nbytes * (self.size - 1) // self.size
        self._sum(x)

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        """Copy root's x to every rank, in place."""
        self.sent += x.nbytes if self.rank == root and self.size > 1 else 0
        self._broadcast(x, root)

    @abstractmethod
    def _start(self, send: Mapping[int, Tensor], recv: Mapping[int, Tensor]) -> Wait:
        """Start to send a tensor to each rank in `send` and to receive one from each in `recv`. Between two ranks,
        transfers are matched in the order of their start."""

    @abstractmethod
    def _sum(self, x: Tensor) -> None: ...

    @abstractmethod
    def _broadcast(self, x: Tensor, root: int) -> None: ...

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has called it."""

    def abort(self, code: int = 1) -> NoReturn:
        """End this rank immediately, after an error that the others cannot see. Exiting closes its connections: the
        others fail within milliseconds, and the launcher gets the code."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def close(self) -> None:  # noqa: B027 - most transports hold nothing
        """Release the transport; called on every rank after the last operation."""


@contextmanager
def agreed(comm: Comm) -> Iterator[None]:
    """Run a block that may fail on some ranks only, such as reading data; afterwards all ranks raise the same error, or
    none does: a `UserError` for a mistake, a `CommonError` for a file that cannot be read or written. Collective."""
    failed: UserError | FileError | None = None
    try:
        yield
    except (UserError, FileError) as error:
        failed = error
    except OSError as error:
        failed = of_path(error)
    mark = FAULT if isinstance(failed, FileError) else ""
    common = common_trouble(comm, "" if failed is None else f"{mark}{failed}")
    if FAULT in common:
        raise CommonError(common.replace(FAULT, ""))
    if common:
        raise UserError(common)


FAULT = "\0"  # marks a message among ranks that is not a user's mistake; no message contains it


def common_trouble(comm: Comm, message: str) -> str:
    """Return the first error message of any rank, prefixed with its rank, on all ranks; '' if none. Collective."""
    for rank, text in enumerate(tell_all(comm, message)):
        if text:
            return (f"rank {rank}: " if comm.size > 1 else "") + text
    return ""


def tell_all(comm: Comm, text: str) -> list[str]:
    """Return the text of every rank, on all ranks. Collective."""
    raw = text.encode(errors="replace")
    lengths = torch.zeros(comm.size, dtype=torch.int64)
    lengths[comm.rank] = len(raw)
    comm.sum(lengths)
    if not lengths.any():
        return [""] * comm.size
    texts = torch.zeros(comm.size, int(lengths.max()), dtype=torch.uint8)
    texts[comm.rank, : len(raw)] = torch.tensor(list(raw), dtype=torch.uint8)
    comm.sum(texts)  # each rank fills its own row
    return [bytes(row[:length].tolist()).decode() for row, length in zip(texts, lengths.tolist(), strict=True)]


def from_first(comm: Comm, value: T) -> T:
    """Return rank 0's value, as JSON has it, on all ranks. Collective."""
    content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    size = torch.tensor([len(content)])
    comm.broadcast(size)
    if comm.rank:
        content = torch.zeros(int(size), dtype=torch.uint8)
    comm.broadcast(content)
    found: T = json.loads(bytes(content.tolist()))
    return found
