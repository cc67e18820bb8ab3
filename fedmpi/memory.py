"""What clients keep from one of their rounds to the next (SCAFFOLD's control variates), on their home rank.

A client gets a row when it has first taken part; clients that never did cost nothing. Rows live in memory up to a
limit and beyond it in files that are mapped into memory: 500 clients of a ResNet-18 are 22 GB. The files have no name
(they are unlinked as soon as they are open), so a run that ends, however it ends, leaves none behind; what must
outlive a run belongs in a checkpoint.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from .errors import RunError

BLOCK_BYTES = 64 << 20


class Memory:
    """Vectors by client id and name, float32 of one length, zero before they were kept first."""

    def __init__(
        self, names: tuple[str, ...] = (), length: int = 0, limit_bytes: int = 1 << 62, folder: Path | None = None
    ) -> None:
        self.names, self.length, self.limit_bytes, self.folder = names, length, limit_bytes, folder
        self.rows: dict[int, Tensor] = {}
        self.in_memory = self.on_disk = 0
        self.free: list[Tensor] = []

    def __len__(self) -> int:
        """How many clients have kept something."""
        return len(self.rows)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self.rows))

    def read(self, cid: int) -> dict[str, Tensor]:
        """What a client kept, to be read only and valid until it is written."""
        row = self.rows.get(cid)
        if row is None:
            return {name: torch.zeros(self.length) for name in self.names}
        return dict(zip(self.names, row.view(len(self.names), -1).unbind(0), strict=True))

    def write(self, cid: int, values: Mapping[str, Tensor]) -> None:
        """Keep a client's vectors, in place of those it kept before."""
        if set(values) != set(self.names):
            raise ValueError(f"client {cid} keeps {sorted(values)}, but its rule declares {sorted(self.names)}")
        if not self.names:
            return
        row = torch.cat([values[name].cpu() for name in self.names])  # first, as values may be views of the old row
        if cid not in self.rows:
            self.rows[cid] = self._new_row()
        self.rows[cid].copy_(row)

    def _new_row(self) -> Tensor:
        elements = len(self.names) * self.length
        if self.in_memory + 4 * elements <= self.limit_bytes:
            self.in_memory += 4 * elements
            return torch.empty(elements)
        if not self.free:
            self.free = self._new_block(elements)
        self.on_disk += 4 * elements
        return self.free.pop()

    def _new_block(self, elements: int) -> list[Tensor]:
        """Rows in a file of their own. Its space is claimed at once: writing to a mapping on a full disk would kill
        the process."""
        count = max(BLOCK_BYTES // (4 * elements), 1)
        where = self.folder or Path(tempfile.gettempdir())
        try:
            with tempfile.TemporaryFile(dir=where) as file:
                os.posix_fallocate(file.fileno(), 0, count * 4 * elements)
                block = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.float32)
        except OSError as error:
            raise RunError(
                f"clients' memories need {count * 4 * elements >> 20} MB more in {where}, which cannot be had "
                f"({error.strerror}); name a larger --memory.folder, or raise --memory.limit"
            ) from None
        return list(block.view(count, elements).unbind(0))
