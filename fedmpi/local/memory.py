"""What clients keep from one of their rounds to the next (SCAFFOLD's control variates, private parameters), in memory
that all ranks of a client's home node reach: any of them can train it.

A client gets a row when it has first taken part; clients that never did cost nothing. What is kept in a round is
staged in spare rows and takes its place when the round is done, so a round that fails changes nothing. Rows live in
memory up to a limit and beyond it in files that are mapped into memory: 500 clients of a ResNet-18 are 22 GB. The
files are unlinked as soon as they are mapped, so a run that ends, however it ends, leaves none; its checkpoints hold
what is kept.

Which row is whose needs no message. All ranks know the cohort before they train and who delivered after the counts are
summed, so every rank moves the tables of all nodes alike (`Table`), and all know when a node needs more rows: these are
made by all ranks together. Nobody reads a row while it is written: in a round only the rank that trains a client writes
to the row staged for it, and a row that was replaced is staged again in a later round, when every rank has passed the
sum of the counts of this one, which comes after all training.
"""

from __future__ import annotations

import heapq
import logging
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..cohort import A_STEP_A_SAMPLE, Homes, Work, find_homes

log = logging.getLogger("fedmpi")

BLOCK_BYTES = 64 << 20


class Blocks(Protocol):
    """What memory is made of: see `comm.blocks`. `sizes` has the elements for each node; every method is collective."""

    @property
    def rank(self) -> int: ...

    def nodes(self) -> Sequence[Sequence[int]]:
        """Return the ranks of each node."""

    def in_memory(self, sizes: Sequence[int]) -> Tensor | None:
        """Return a block in memory; None, on all ranks, if there is not enough."""

    def on_disk(self, sizes: Sequence[int], folder: Path) -> Tensor:
        """Return a block in a mapped file without a name; raise on all ranks if one cannot have it."""


class Table:
    """Which client of a node has which row, in numbers. A row belongs to a client, is staged for one, is spare, or
    waits: it was replaced while checkpoints may still read it."""

    def __init__(self) -> None:
        self.size = self.in_memory = 0
        """all rows, and those of them in memory, which are made first"""
        self.rows: dict[int, int] = {}
        self.staged: dict[int, int] = {}
        self.spare: list[int] = []
        """a heap: the lowest is used first"""
        self.waiting: list[int] = []
        self.changed: set[int] = set()
        """the clients that have kept something since the last `pin`"""
        self.pinned = False

    def grow(self, in_memory: int, on_disk: int) -> None:
        """Add spare rows."""
        for row in range(self.size, self.size + in_memory + on_disk):
            heapq.heappush(self.spare, row)
        self.size += in_memory + on_disk
        self.in_memory += in_memory

    def stage(self, cids: Collection[int]) -> None:
        """Give each client a spare row to be staged in."""
        self.staged = {cid: heapq.heappop(self.spare) for cid in cids}

    def commit(self, used: Set[int]) -> None:
        """Let these clients' staged rows replace their old ones; the other staged rows become spare."""
        for cid, row in self.staged.items():
            replaced = self.rows.get(cid) if cid in used else row
            if cid in used:
                self.rows[cid] = row
            if replaced is None:
                continue
            if self.pinned and cid in used and cid not in self.changed:
                self.waiting.append(replaced)
            else:
                heapq.heappush(self.spare, replaced)
        self.changed |= self.staged.keys() & used
        self.staged = {}

    def pin(self) -> None:
        """Leave all rows as they are until `unpin`: what replaces them goes elsewhere."""
        self.changed, self.pinned = set(), True

    def unpin(self) -> None:
        """Release the rows that were replaced meanwhile."""
        for row in self.waiting:
            heapq.heappush(self.spare, row)
        self.waiting, self.pinned = [], False


class Memory:
    """Vectors by client id and name, float32. Before a client has kept one it is zero and of that length, or is what
    `first` has by its name. `limit_bytes` are per rank; clients are spread over the nodes by `work`. One rank of a
    client's home owns its memory, in that it saves and scores it: these clients are what `len` counts and iteration
    yields."""

    def __init__(
        self,
        names: tuple[str, ...] = (),
        length: int = 0,
        limit_bytes: int = 1 << 62,
        folder: Path | None = None,
        first: Mapping[str, Tensor] | None = None,
        work: Work = A_STEP_A_SAMPLE,
    ) -> None:
        self.names, self.length, self.limit_bytes, self.folder = names, length, limit_bytes, folder
        self.first, self.work = first or {}, work
        self.sizes = [self.first[name].numel() if name in self.first else length for name in names]
        self.homes: Homes | None = None
        self.blocks: Blocks | None = None
        self.tables = [Table()]  # of every node
        self.table = self.tables[0]  # of this one
        self.rows: list[Tensor] = []  # of this node, by number

    def connect(self, sizes: np.ndarray, blocks: Blocks) -> Memory:
        """Choose where clients of these sizes are at home, and with whom this rank shares rows. Collective; before the
        first round."""
        if self.names:
            self.homes, self.blocks = find_homes(sizes, self.work, blocks.nodes()), blocks
            self.tables = [Table() for _ in self.homes.nodes]
            self.table = self.tables[next(n for n, ranks in enumerate(self.homes.nodes) if blocks.rank in ranks)]
        return self

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[int]:
        return (cid for cid in sorted(self.table.rows) if self.owns(cid))

    def owns(self, cid: int) -> bool:
        """Return whether this rank owns a client's memory: the same rank as long as a run trains."""
        assert self.homes is not None and self.blocks is not None, "connect the memory first"
        ranks = self.homes.nodes[self.homes.node(cid)]
        return ranks[cid // self.homes.ranks % len(ranks)] == self.blocks.rank

    @property
    def in_memory(self) -> int:
        """Return the bytes of this node's rows in memory."""
        return 4 * sum(self.sizes) * self.table.in_memory

    @property
    def on_disk(self) -> int:
        """Return the bytes of this node's rows in files."""
        return 4 * sum(self.sizes) * (self.table.size - self.table.in_memory)

    def read(self, cid: int) -> dict[str, Tensor]:
        """Return what a client of this node kept: read only, and valid until the next `commit`."""
        if (row := self.table.rows.get(cid)) is not None:
            return self._by_name(self.rows[row])
        zeros = torch.zeros(self.length)
        return {name: self.first.get(name, zeros) for name in self.names}

    def reserve(self, cids: Collection[int]) -> None:
        """Get a row ready for each client of a round, on all nodes; drop what a failed round staged. Collective."""
        if not self.names:
            return
        assert self.homes is not None, "connect the memory first"
        at_home: list[list[int]] = [[] for _ in self.tables]
        for cid in cids:
            at_home[self.homes.node(cid)].append(cid)
        for table in self.tables:
            table.commit(frozenset())
        missing = [max(len(here) - len(t.spare), 0) for here, t in zip(at_home, self.tables, strict=True)]
        if any(missing):
            self._grow(missing)
        for table, here in zip(self.tables, at_home, strict=True):
            table.stage(here)

    def stage(self, cid: int, values: Mapping[str, Tensor]) -> None:
        """Stage the vectors of a client that this rank has trained, to replace those it kept before."""
        if set(values) != set(self.names):
            raise ValueError(f"client {cid} keeps {sorted(values)}, but its rule declares {sorted(self.names)}")
        if self.names:
            for name, vector in self._by_name(self.staged(cid)).items():
                vector.copy_(values[name])

    def staged(self, cid: int) -> Tensor:
        """Return the row that is reserved for a client, all its vectors one after another."""
        return self.rows[self.table.staged[cid]]

    def commit(self, used: Collection[int]) -> None:
        """Replace what the clients whose updates count have kept by what was staged."""
        counted = set(used)
        for table in self.tables:
            table.commit(counted)

    def pin(self, also: set[int]) -> dict[int, Tensor]:
        """Return the rows of this rank's clients that have changed since the last time, and those of the clients
        `also`. No row changes until `unpin`, so that a thread may read them during the next rounds. At the same round
        on all ranks."""
        changed = {cid for cid in self.table.changed if self.owns(cid)}
        for table in self.tables:
            table.pin()
        return {cid: self.rows[self.table.rows[cid]] for cid in sorted(changed | also)}

    def unpin(self) -> None:
        """Release the pinned rows. At the same round on all ranks."""
        for table in self.tables:
            table.unpin()

    def _by_name(self, row: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.names, torch.split(row, self.sizes), strict=True)) if self.names else {}

    def _grow(self, missing: Sequence[int]) -> None:
        """Make at least so many rows on each node: in memory up to the limit, the rest in files. Collective."""
        assert self.homes is not None and self.blocks is not None
        elements = sum(self.sizes)
        block = max(BLOCK_BYTES // (4 * elements), 1)
        in_memory, on_disk = [0] * len(missing), [0] * len(missing)
        for node, (table, ranks) in enumerate(zip(self.tables, self.homes.nodes, strict=True)):
            ahead = min(table.size, block) if len(ranks) > 1 and missing[node] else 0  # to meet seldom
            room = self.limit_bytes * len(ranks) // (4 * elements) - table.in_memory
            in_memory[node] = max(min(max(missing[node], ahead), room), 0)
        if any(in_memory):
            made = self.blocks.in_memory([rows * elements for rows in in_memory])
            if made is None:
                self.limit_bytes, in_memory = 0, [0] * len(missing)
                if self.blocks.rank == 0:
                    log.warning("shared memory is full: what more clients keep goes to files in %s", self._folder)
            else:
                self._add(made)
        for node in range(len(missing)):
            left = missing[node] - in_memory[node]
            on_disk[node] = max(left, block) if left > 0 else 0
        if any(on_disk):
            self._add(self.blocks.on_disk([rows * elements for rows in on_disk], self._folder))
        for table, some, more in zip(self.tables, in_memory, on_disk, strict=True):
            table.grow(some, more)

    def _add(self, block: Tensor) -> None:
        # Rows of a block share a version counter, by which writes to a client's memory are noticed; `.data` gives each
        # its own.
        self.rows += [row.data for row in block.view(-1, sum(self.sizes)).unbind(0)]

    @property
    def _folder(self) -> Path:
        return self.folder or Path(tempfile.gettempdir())
