"""Blocks of memory that all ranks of a node map: for what clients keep from round to round.

A block is in the node's memory file system or in a file of a folder; both are unlinked as soon as they are mapped.
Where memory cannot be shared, every rank is a node of its own, and its blocks in memory are its own.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CommonError, reason
from .base import Comm, common_trouble, from_first
from .links import Links
from .node import attach, create


class NodeBlocks:
    """Makes blocks of float32, of sizes[n] elements on node n. Every method is collective over all ranks."""

    def __init__(self, comm: Comm) -> None:
        self.comm, self.rank, self.links = comm, comm.rank, Links.apart(comm.rank, comm.size)

    def nodes(self) -> list[list[int]]:
        """Return the ranks of each node, as far as ranks can share memory; blocks are made for these from then on."""
        if self.comm.node is not None and self.comm.node.bytes(1) is not None:
            self.links = self.comm.links
        return self.links.nodes

    def in_memory(self, sizes: Sequence[int]) -> Tensor | None:
        """Return a block in memory; None, on all ranks, if there is not enough."""
        elements = sizes[self.links.node_of[self.rank]]
        if self.comm.node is None or len(self.links.nodes) == self.comm.size:
            return torch.empty(elements)
        found = self.comm.node.bytes(max(4 * elements, 4))
        return None if found is None else found.view(torch.float32)[:elements]

    def on_disk(self, sizes: Sequence[int], folder: Path) -> Tensor:
        """Return a block in a mapped file of a folder; raise the same error on all ranks if one cannot have it. Its
        space is allocated at once: writing to a mapping on a full disk would kill the process."""
        number, leads = self.links.node_of[self.rank], self.rank == self.links.mates[0]
        elements, token = sizes[number], from_first(self.comm, secrets.token_hex(8))
        path, block = folder / f".fedmpi-memory-{token}-{number}", torch.empty(0)

        def find() -> Tensor:
            path.stat()  # to map a file that is not there would make it
            return attach(path, elements, torch.float32)

        steps: list[tuple[bool, Callable[[], Tensor]]] = [
            (leads, lambda: create(path, elements, torch.float32)),
            (not leads, find),
        ]
        try:
            for mine, step in steps:
                trouble = ""
                try:
                    block = step() if mine and elements else block
                except (OSError, RuntimeError) as error:
                    trouble = (
                        f"clients' memories need {4 * elements / 1e6:.3g} MB more in {folder}, which failed "
                        f"({reason(error)}); name another --memory.folder, or raise --memory.limit"
                    )
                if trouble := common_trouble(self.comm, trouble):
                    raise CommonError(trouble)
        finally:  # also if another rank is gone
            if leads:
                with suppress(OSError):
                    path.unlink()
        return block
