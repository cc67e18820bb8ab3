"""What clients keep from one of their rounds to the next (SCAFFOLD's control variates, private parameters), on their
home rank.

A client gets a row when it has first taken part; clients that never did cost nothing. What is kept in a round is
staged in spare rows and takes its place when the round is done, so a round that fails changes nothing. Rows live in
memory up to a limit and beyond it in files that are mapped into memory: 500 clients of a ResNet-18 are 22 GB. The
files are unlinked as soon as they are mapped, so a run that ends, however it ends, leaves none; its checkpoints hold
what is kept.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..errors import RunError

BLOCK_BYTES = 64 << 20


class Memory:
    """Vectors by client id and name, float32. Before a client has kept one it is zero and of that length, or is what
    `first` has by its name."""

    def __init__(
        self,
        names: tuple[str, ...] = (),
        length: int = 0,
        limit_bytes: int = 1 << 62,
        folder: Path | None = None,
        first: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.names, self.length, self.limit_bytes, self.folder = names, length, limit_bytes, folder
        self.first = first or {}
        self.sizes = [self.first[name].numel() if name in self.first else length for name in names]
        self.rows: dict[int, Tensor] = {}
        self.staged: dict[int, Tensor] = {}
        self.spare: list[Tensor] = []
        self.changed: set[int] = set()  # the clients that have kept something since the last `pin`
        self.pinned: set[int] = set()  # ids of the rows that a thread reads
        self.waiting: list[Tensor] = []  # rows that have been replaced while they are pinned
        self.in_memory = self.on_disk = 0  # bytes of all rows, of clients and spare ones

    def __len__(self) -> int:
        """Return how many clients have kept something."""
        return len(self.rows)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self.rows))

    def read(self, cid: int) -> dict[str, Tensor]:
        """Return what a client kept: read only, and valid until the next `commit`."""
        if (row := self.rows.get(cid)) is not None:
            return self._by_name(row)
        zeros = torch.zeros(self.length)
        return {name: self.first.get(name, zeros) for name in self.names}

    def stage(self, cid: int, values: Mapping[str, Tensor]) -> None:
        """Stage a client's vectors, to replace those it kept before."""
        if set(values) != set(self.names):
            raise ValueError(f"client {cid} keeps {sorted(values)}, but its rule declares {sorted(self.names)}")
        if not self.names:
            return
        if cid not in self.staged:
            self.staged[cid] = self.spare.pop() if self.spare else self._new_row()
        for name, vector in self._by_name(self.staged[cid]).items():
            vector.copy_(values[name])

    def commit(self) -> None:
        """Replace what was kept by everything that was staged."""
        for cid in self.staged.keys() & self.rows.keys():
            row = self.rows[cid]
            (self.waiting if id(row) in self.pinned else self.spare).append(row)
        self.rows |= self.staged
        self.changed |= self.staged.keys()
        self.staged = {}

    def discard(self) -> None:
        """Drop what a failed round staged."""
        self.spare += self.staged.values()
        self.staged = {}

    def pin(self, also: set[int]) -> dict[int, Tensor]:
        """Return the rows that have changed since the last time, and those of the clients `also`: left unchanged until
        `unpin`, so that a thread may read them during the next rounds."""
        rows = {cid: self.rows[cid] for cid in sorted(self.changed | also)}
        self.changed, self.pinned = set(), {id(row) for row in rows.values()}
        return rows

    def unpin(self) -> None:
        """Release the pinned rows."""
        self.spare += self.waiting
        self.waiting, self.pinned = [], set()

    def restore(self, cid: int, row: Tensor) -> None:
        """Give a client a row that was saved."""
        if cid not in self.rows:
            self.rows[cid] = self.spare.pop() if self.spare else self._new_row()
        self.rows[cid].copy_(row)
        self.changed.add(cid)

    def _by_name(self, row: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.names, torch.split(row, self.sizes), strict=True)) if self.names else {}

    def _new_row(self) -> Tensor:
        elements = sum(self.sizes)
        if self.in_memory + 4 * elements <= self.limit_bytes:
            self.in_memory += 4 * elements
            return torch.empty(elements)
        self.spare += self._new_block(elements)
        return self.spare.pop()

    def _new_block(self, elements: int) -> list[Tensor]:
        """Return rows in a file of their own. Its space is allocated at once: writing to a mapping on a full disk would
        kill the process. It is mapped by torch, which keeps no descriptor open."""
        count = max(BLOCK_BYTES // (4 * elements), 1)
        where = self.folder or Path(tempfile.gettempdir())
        try:
            handle, name = tempfile.mkstemp(prefix=".fedmpi-memory-", dir=where)
            try:
                os.posix_fallocate(handle, 0, count * 4 * elements)
                block = torch.from_file(name, shared=True, size=count * elements, dtype=torch.float32)
            finally:
                os.close(handle)
                os.unlink(name)
        except OSError as error:
            raise RunError(
                f"clients' memories need {count * 4 * elements / 1e6:.3g} MB more in {where}, which failed "
                f"({error.strerror}); name another --memory.folder, or raise --memory.limit"
            ) from None
        self.on_disk += count * 4 * elements
        # Rows of a block share a version counter, by which writes to a client's memory are noticed; `.data` gives each
        # its own.
        return [row.data for row in block.view(count, elements).unbind(0)]
