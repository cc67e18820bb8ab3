"""What a rank can say to the others: five verbs and abort.

    sum(x)             every rank's x, added up, on every rank (small records of counts)
    exchange(rows...)  what every rank has for me comes within reach; what I have for them, within theirs
    gather(x_N)        every rank's slice of a vector, on every rank
    broadcast(x, root) root's x on every rank
    barrier()          no rank leaves before every rank has come

The two heavy verbs work on memory that the transport made: `rows` has one row for each rank, `vector` one slice for
each rank. Between ranks of one node that memory is shared (`node.py`) and nothing is copied; between nodes it travels
point to point. So after an `exchange` or a `gather`, what others wrote may be read, and what is offered to others must
be left alone, until the next sum, gather or barrier.

Both can be had bucket by bucket, so that a link is busy while there is something to compute: `stream` is an exchange
that yields each bucket when it has come, `start_gather` sends one while the next is made.

Arithmetic on large vectors is not done here: a transport brings slices within reach, `reduce.py` adds them up, so that
there is one sum and not one a transport. All verbs are collective: every rank calls them in the same order. A verb that
cannot finish raises `RunError` with the missing ranks in it where the transport can tell.

N: a full padded vector of size * S elements.  S: the slice a rank owns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from ..errors import CommonError, FileError, UserError, of_path

if TYPE_CHECKING:
    from .node import Node

Wait = Callable[[], None]
"""returns when what was started has come and gone"""
WHOLE = slice(None)


@dataclass(frozen=True)
class Rows:
    """Memory for `exchange`: row r of `mine` is for rank r to read, row r of `theirs` is what rank r has for me.

    This rank's own row is the same tensor in both. `shared` are the ranks whose rows lie in memory shared with this
    one; `None` where no rank shares any, which all ranks know of each other. Where rows travel in another type than
    they are kept in, `out` has what is sent in place of `mine`, and `theirs` is of that type.
    """

    mine: list[Tensor]
    theirs: list[Tensor]
    shared: frozenset[int] | None = None
    out: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Update:
    """Memory for a gather of updates in another type: what is added to this rank's slice, and to the slices that come
    here, on every rank alike."""

    mine_S: Tensor
    theirs: dict[int, Tensor]


class Comm(ABC):
    """One rank's end of the line. `sent` counts the payload bytes that this rank has had for others so far."""

    rank: int
    size: int
    name: str

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.sent = 0
        self.node: Node | None = None

    @property
    def others(self) -> list[int]:
        """The other ranks, each rank starting behind itself, so that not all talk to rank 0 first."""
        return [(self.rank + k) % self.size for k in range(1, self.size)]

    def rows(
        self, length: int, dtype: torch.dtype, device: torch.device | None = None, wire: torch.dtype | None = None
    ) -> Rows:
        """Memory for `exchange`, a row of `length` elements for each rank. Collective; made once, not every round.

        With `wire`, the rows that are not shared travel in that type; whoever fills them fills `out` as well.
        """

        def private(of: torch.dtype = dtype) -> Tensor:
            return torch.zeros(length, dtype=of, device=device)

        shared = self.node.rows(length, dtype) if self.node else None
        away = [r for r in self.others if r not in (shared or ())]
        own = private()
        pairs = [
            (own, own) if r == self.rank else (shared or {}).get(r) or (private(), private(wire or dtype))
            for r in range(self.size)
        ]
        mine, theirs = ([pair[side] for pair in pairs] for side in (0, 1))
        out = {r: private(wire) for r in away} if wire else {}
        return Rows(mine, theirs, None if shared is None else frozenset(shared), out)

    def vector(self, slice_length: int, device: torch.device | None = None) -> Tensor:
        """A float32 vector of zeros for `gather`: this rank writes its slice, reads all. Collective; made once."""
        shared = self.node.vector(slice_length) if self.node else None
        return torch.zeros(slice_length * self.size, device=device) if shared is None else shared

    def own(self, x_N: Tensor) -> Tensor:
        """Return this rank's slice of a padded vector, as a view."""
        return x_N.view(self.size, -1)[self.rank]

    def exchange(self, *many: Rows) -> None:
        """Bring every rank's row for this rank within its reach: sent between nodes, already there on the same node."""
        for _ in self.stream(many):
            pass

    def stream(
        self,
        many: Sequence[Rows],
        buckets: Sequence[slice] = (WHOLE,),
        prepare: Callable[[slice], None] = lambda bucket: None,
    ) -> Iterator[slice]:
        """`exchange` bucket by bucket: yields each when it has come. All are under way at once; each is prepared before
        it is sent. Collective: every rank names the same buckets and takes them all."""
        flights: list[list[Wait]] = []
        for bucket in buckets:
            prepare(bucket)
            flights.append([self._start_rows(rows, bucket) for rows in many])
        if any(rows.shared is not None for rows in many):  # the same on every rank, also on one alone on its node
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
        """Bring every rank's slice of a vector made by `vector` within reach of every rank; with `under_way`, what
        `start_gather` has started bucket by bucket."""
        for wait in [self.start_gather(x_N)] if under_way is None else under_way:
            wait()
        if self._holds(x_N):
            self.barrier()

    def start_gather(self, x_N: Tensor, bucket: slice = WHOLE, update: Update | None = None) -> Wait:
        """Send a bucket of this rank's slice and begin to receive those of the others. With `update`, what travels is
        added to the slices where it arrives; whoever calls this has added it to this rank's own."""
        slices = [x_S[bucket] for x_S in x_N.view(self.size, -1).unbind(0)]
        to, come = self._ways(x_N)
        own = slices[self.rank]
        within = len(self.node.ranks) - 1 if self.node is not None and self._holds(x_N) else 0
        mine = own if update is None else update.mine_S[bucket]
        self.sent += own.nbytes * within + mine.nbytes * len(to)
        if update is None:
            return self._start({r: own for r in to}, {r: slices[r] for r in come})
        theirs = {r: update.theirs[r][bucket] for r in come}
        wait = self._start({r: mine for r in to}, theirs)

        def finish() -> None:
            wait()
            for r, x in theirs.items():
                slices[r].add_(x)

        return finish

    def update(self, x_N: Tensor, dtype: torch.dtype) -> Update | None:
        """Memory for a gather of x_N in which updates of that type travel; None, on all ranks, where none has to."""
        to, come = self._ways(x_N)
        if not to:
            return None
        mine_S = torch.zeros(x_N.numel() // self.size, dtype=dtype, device=x_N.device)
        return Update(mine_S, {r: torch.zeros_like(mine_S) for r in come})

    def _holds(self, x_N: Tensor) -> bool:
        return self.node is not None and self.node.holds(x_N)

    def _ways(self, x_N: Tensor) -> tuple[list[int], list[int]]:
        """The ranks that this rank's slice of a vector has to be sent to, and those whose slices come here."""
        if self.node is None or not self.node.holds(x_N):
            return self.others, self.others
        # One rank of each node receives for all of its node.
        away = [r for r in self.others if r not in self.node.ranks]
        return self.node.other_leaders, away if self.node.leads else []

    def sum(self, x: Tensor) -> None:
        """Every rank's x added up, in place. Counted as an all-reduce that sends each element twice."""
        self.sent += 2 * x.nbytes * (self.size - 1) // self.size
        self._sum(x)

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        """Root's x, in place."""
        self.sent += x.nbytes if self.rank == root and self.size > 1 else 0
        self._broadcast(x, root)

    @abstractmethod
    def _start(self, send: Mapping[int, Tensor], recv: Mapping[int, Tensor]) -> Wait:
        """Begin to send a tensor to each rank in `send` and to receive one from each in `recv`. Between two ranks what
        was started first is matched first."""

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
    """Run a block that may fail on some ranks only; then every rank raises the same error, or none: a `UserError` for a
    mistake, a `CommonError` for a file that cannot be read or written.

    Collective. For work before training that differs between ranks: reading data, writing the run folder.
    """
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


FAULT = "\0"  # in front of a message among ranks that is no mistake: no message has it


def common_trouble(comm: Comm, sentence: str) -> str:
    """The first sentence that any rank has to say, with that rank in front, on every rank; empty where none has.
    Collective."""
    for rank, text in enumerate(tell_all(comm, sentence)):
        if text:
            return (f"rank {rank}: " if comm.size > 1 else "") + text
    return ""


def tell_all(comm: Comm, text: str) -> list[str]:
    """What every rank has to say. Collective."""
    raw = text.encode(errors="replace")
    lengths = torch.zeros(comm.size, dtype=torch.int64)
    lengths[comm.rank] = len(raw)
    comm.sum(lengths)
    if not lengths.any():
        return [""] * comm.size
    said = torch.zeros(comm.size, int(lengths.max()), dtype=torch.uint8)
    said[comm.rank, : len(raw)] = torch.tensor(list(raw), dtype=torch.uint8)
    comm.sum(said)  # each rank fills its own row
    return [bytes(row[:length].tolist()).decode() for row, length in zip(said, lengths.tolist(), strict=True)]
