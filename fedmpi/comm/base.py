"""The interface of a transport: five collective operations, and abort.

    sum(x)             add up every rank's x, on every rank (small records of counts)
    offer(rows...)     make this rank's rows readable on its node
    start(send, recv)  send tensors to some ranks and receive from others, while this rank does something else
    gather(x_N)        make every rank's slice of a vector readable on every rank
    broadcast(x, root) copy root's x to every rank
    barrier()          wait for all ranks

Large vectors are in memory that the transport allocates: `rows` has one row per slice, `vector` one slice per rank.
Ranks of one node share that memory (`node.py`) and copy nothing; between nodes it is sent point to point, once per
node (`links.py`). So after an `offer` or a `gather`, the data of other ranks may be read, and data offered to others
must not be changed, until the next sum, gather or barrier.

Both work bucket by bucket, to overlap communication with computation: `start` and `start_gather` send a bucket while
the next one is computed.

Transports do no arithmetic on large vectors in host memory: they make rows readable, and `aggregate` adds them up, so
that there is one sum and not one per transport. On accelerators a transport may add them up itself (`start_reduce`).
Every rank calls the operations in the same order. An operation that cannot finish raises `RunError`, which names the
missing ranks if the transport knows them.

N: a full padded vector of size * S elements.  S: the slice a rank owns.
"""

from __future__ import annotations

import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
    """This rank's sums, a row per slice in `mine`. `near[s]` are the rows for slice s of all ranks of the node, in
    their order: of this rank's own slice, and of those that it carries (`Links`). `block` is all of `mine` as one
    tensor, if nothing is shared; `offered` are the slices whose rows another rank of the node reads."""

    mine: list[Tensor]
    near: dict[int, list[Tensor]]
    links: Links
    block: Tensor | None = None

    @property
    def offered(self) -> list[int]:
        """Return the slices whose rows another rank of the node reads."""
        return [s for s in range(len(self.mine)) if s not in self.near]


@dataclass(frozen=True)
class Update:
    """Memory for a gather of updates in another type: of this rank's slice, and those received for other slices."""

    mine_S: Tensor
    theirs: dict[int, Tensor]


class Comm(ABC):
    """One rank's endpoint of a transport. `sent` counts the payload bytes that this rank has provided to others, `away`
    those of them that left its node. A rank is a node of its own until `share_node`."""

    name: str

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.sent = self.away = 0
        self.links = Links.apart(rank, size)
        self.node: Node | None = None

    @property
    def others(self) -> list[int]:
        """Return the other ranks, starting after this one, so that not all ranks talk to rank 0 first."""
        return [(self.rank + k) % self.size for k in range(1, self.size)]

    def rows(self, length: int, dtype: torch.dtype, device: torch.device | None = None) -> Rows:
        """Allocate rows of `length` elements, one per slice. Collective; once per run."""
        shared = self.node.rows(length, dtype) if self.node else None
        if shared is not None:
            return shared
        block = torch.zeros(self.size, length, dtype=dtype, device=device)
        mine = list(block.unbind(0))
        return Rows(mine, {s: [row] for s, row in enumerate(mine)}, Links.apart(self.rank, self.size), block)

    def vector(self, slice_length: int, device: torch.device | None = None) -> Tensor:
        """Allocate a float32 vector of zeros for `gather`: a rank writes its slice and reads all. Collective."""
        shared = self.node.vector(slice_length) if self.node else None
        return torch.zeros(slice_length * self.size, device=device) if shared is None else shared

    def own(self, x_N: Tensor) -> Tensor:
        """Return this rank's slice of a padded vector, as a view."""
        return x_N.view(self.size, -1)[self.rank]

    def offer(self, many: Sequence[Rows], bucket: slice = WHOLE) -> None:
        """Make a bucket of this rank's rows readable by the other ranks of its node, and theirs by this one: nothing is
        copied. Collective."""
        self.sent += sum(rows.mine[s][bucket].nbytes for rows in many for s in rows.offered)
        if any(len(rows.links.mates) > 1 for rows in many):
            self.meet()

    def start(self, send: Mapping[int, Tensor], recv: Mapping[int, Tensor]) -> Wait:
        """Start to send a tensor to each rank in `send` and to receive one from each in `recv`. What arrives may be
        shorter than the memory for it. Collective between each sender and its receiver, in the same order."""
        for to, x in send.items():
            self._count(x.nbytes, away=to not in self.links.mates)
        return self._start(send, recv)

    def _count(self, count: int, away: bool) -> None:
        self.sent += count
        self.away += count * away

    def meet(self) -> None:
        """Return when every rank of this node has called it. Collective on the node."""
        mates = self.links.mates
        if len(self.links.nodes) == 1:
            self.barrier()
            return
        place, step = mates.index(self.rank), 1
        token, came = torch.zeros(2, 1, dtype=torch.uint8)
        while step < len(mates):  # after each step twice as many ranks are known to have arrived
            after, before = mates[(place + step) % len(mates)], mates[(place - step) % len(mates)]
            self._start({after: token}, {before: came})()
            step *= 2

    def reduces(self, device: torch.device) -> bool:
        """Return whether this transport adds up and gathers vectors on that device itself, whole slices at a time."""
        return False

    def start_reduce(self, block: Tensor, sum: Tensor) -> Wait:
        """Start to add up row r of every rank's block at rank r, into `sum`. Collective, if the transport `reduces`."""
        self._count(block.nbytes * (self.size - 1) // self.size, away=len(self.links.nodes) > 1)
        return self._start_reduce(block, sum)

    def gather(self, x_N: Tensor, under_way: Sequence[Wait] | None = None) -> None:
        """Make every rank's slice of a vector from `vector` readable on every rank. With `under_way`, finish what
        `start_gather` has started."""
        for wait in [self.start_gather(x_N)] if under_way is None else under_way:
            wait()
        if self.node is not None and self.node.holds(x_N):
            self.meet()

    def start_gather(self, x_N: Tensor, bucket: slice = WHOLE, update: Update | None = None) -> Wait:
        """Start to send a bucket of this rank's slice and to receive the others'. With `update`, the update is sent
        instead and added to the slice where it arrives; the caller has added it to this rank's own slice."""
        slices = [x_S[bucket] for x_S in x_N.view(self.size, -1).unbind(0)]
        links = self._links(x_N)
        own = slices[self.rank]
        if update is None and self.reduces(x_N.device) and len(own) == len(self.own(x_N)):
            self._count(own.nbytes * (self.size - 1), away=len(self.links.nodes) > 1)
            return self._start_gather(x_N, own)
        mine = own if update is None else update.mine_S[bucket]
        self.sent += own.nbytes * (len(links.mates) - 1)
        if update is None:
            return self.start({r: own for r in links.partners}, {r: slices[r] for r in links.carried})
        theirs = {r: update.theirs[r][bucket] for r in links.carried}
        wait = self.start({r: mine for r in links.partners}, theirs)

        def finish() -> None:
            wait()
            for r, x in theirs.items():
                slices[r].add_(x)

        return finish

    def update(self, x_N: Tensor, dtype: torch.dtype) -> Update | None:
        """Allocate memory for a gather that sends updates of x_N in that type; None, on all ranks, if none is sent."""
        links = self._links(x_N)
        if len(links.nodes) == 1:
            return None
        mine_S = torch.zeros(x_N.numel() // self.size, dtype=dtype, device=x_N.device)
        return Update(mine_S, {r: torch.zeros_like(mine_S) for r in links.carried})

    def _links(self, x_N: Tensor) -> Links:
        """Return the links by which a vector is gathered: if it is not shared, each rank receives for itself."""
        shared = self.node is not None and self.node.holds(x_N)
        return self.links if shared else Links.apart(self.rank, self.size)

    def sum(self, x: Tensor) -> None:
        """Add up every rank's x, in place. Counted as an all-reduce that sends each element twice."""
        self._count(2 * x.nbytes * (self.size - 1) // self.size, away=len(self.links.nodes) > 1)
        self._sum(x)

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        """Copy root's x to every rank, in place."""
        if self.rank == root and self.size > 1:
            self._count(x.nbytes, away=len(self.links.nodes) > 1)
        self._broadcast(x, root)

    @abstractmethod
    def _start(self, send: Mapping[int, Tensor], recv: Mapping[int, Tensor]) -> Wait:
        """Start to send a tensor to each rank in `send` and to receive one from each in `recv`. Between two ranks,
        transfers are matched in the order of their start."""

    # Called only if the transport `reduces`.

    def _start_reduce(self, block: Tensor, sum: Tensor) -> Wait:
        raise NotImplementedError

    def _start_gather(self, x_N: Tensor, own: Tensor) -> Wait:
        raise NotImplementedError

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
