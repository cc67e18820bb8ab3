"""Shared memory between the ranks of one node, so that nothing is sent between them.

A rank's rows for the slices that another rank of the node adds up - its own, and those that it carries to other nodes
(links.py) - are one file in the node's memory file system, mapped by these two ranks. So a rank can read its share of
another rank's sums and nothing else. A vector that is the same on every rank (the model) is mapped by all ranks of the
node: one copy per node instead of one per rank. Files are unlinked as soon as they are mapped, so a run leaves nothing
behind, however it ends. If a run is killed before that, the next start cleans up (leftovers.py).

If memory cannot be shared (no such file system, too little space, ranks in separate containers), all ranks agree to
fall back to sending.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import ref

import torch
from torch import Tensor

from .base import Rows
from .leftovers import MEMORY, in_use, sweep
from .links import Links

if TYPE_CHECKING:
    from .base import Comm

log = logging.getLogger("fedmpi")

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def share_node(comm: Comm, node: int | None = None) -> None:
    """Share memory between the ranks of each node from now on; `node` overrides the node's number. Collective."""
    if comm.size > 1:
        ranks = ranks_by_node(comm, this_node() if node is None else node)
        token = torch.frombuffer(bytearray(os.urandom(8)), dtype=torch.int64).clone()
        comm.broadcast(token)  # makes the name unguessable
        comm.links = Links(comm.rank, ranks)
        comm.node = Node(comm, comm.links, MEMORY / f"fedmpi-{int(token) & (2**63 - 1):x}")
        if comm.node.leads:
            sweep()


def this_node() -> int:
    """Return a number that identifies the running system."""
    boot = BOOT_ID.read_text() if BOOT_ID.exists() else ""
    return int.from_bytes(hashlib.sha256((platform.node() + boot).encode()).digest()[:7], "big")


def ranks_by_node(comm: Comm, node: int) -> list[list[int]]:
    """Return the ranks of every node, nodes in the order of their first rank."""
    numbers = torch.zeros(comm.size, dtype=torch.int64)
    numbers[comm.rank] = node
    comm.sum(numbers)
    found: dict[int, list[int]] = {}
    for rank, number in enumerate(numbers.tolist()):
        found.setdefault(number, []).append(rank)
    return list(found.values())


class Node:
    """This rank's node: which ranks are on it, and the memory that they share."""

    def __init__(self, comm: Comm, links: Links, folder: Path) -> None:
        self.comm, self.links, self.folder = comm, links, folder
        self.ranks = links.mates
        self.leads = comm.rank == self.ranks[0]
        self.made, self.refused = 0, False
        self.vectors: list[ref[Tensor]] = []  # weak: they are freed with their run

    def rows(self, length: int, dtype: torch.dtype) -> Rows | None:
        """Return rows of `length` elements that the ranks of this node add up together; None if memory cannot be
        shared."""
        me, links = self.comm.rank, self.links
        added = {r: [r, *links.carried_by(r)] for r in self.ranks}  # the slices that each rank of the node adds up
        others = [r for r in self.ranks if r != me]
        make = {f"{me}-{r}": length * len(added[r]) for r in others}
        maps = self._share(make, {f"{r}-{me}": length * len(added[me]) for r in others}, dtype)
        if maps is None:
            return None
        files = {r: maps[f"{me}-{r}"] for r in others} | {me: self.private(length * len(added[me]), dtype)}
        mine = {s: row for r in self.ranks for s, row in zip(added[r], files[r].view(-1, length), strict=True)}
        theirs = {r: (maps[f"{r}-{me}"] if r in others else files[me]).view(-1, length) for r in self.ranks}
        near = {s: [theirs[r][number] for r in self.ranks] for number, s in enumerate(added[me])}
        return Rows([mine[s] for s in range(self.comm.size)], near, links)

    def private(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Return memory of this rank alone."""
        return torch.zeros(elements, dtype=dtype)

    def vector(self, slice_length: int) -> Tensor | None:
        """Return one vector for the whole node; None if memory cannot be shared."""
        whole = {"vector": slice_length * self.comm.size}
        maps = self._share(whole if self.leads else {}, {} if self.leads else whole, torch.float32)
        if not maps:
            return None
        self.vectors = [known for known in self.vectors if known() is not None] + [ref(maps["vector"])]
        return maps["vector"]

    def bytes(self, count: int) -> Tensor | None:
        """Return memory for what is the same on every rank of the node, which its first rank must fill; None if there
        is not enough. Collective."""
        whole, refused = {"bytes": count}, self.refused
        maps = self._share(whole if self.leads else {}, {} if self.leads else whole, torch.uint8)
        self.refused = refused  # the sums, which are smaller, may still fit
        return maps["bytes"] if maps else None

    def holds(self, x_N: Tensor) -> bool:
        """Return whether a vector is in this node's shared memory."""
        return any(x_N is known() for known in self.vectors)

    def _share(self, make: dict[str, int], find: dict[str, int], dtype: torch.dtype) -> dict[str, Tensor] | None:
        """Map the files that this rank creates and those created for it: on all ranks, or none. Collective."""
        if self.refused:
            return None
        folder = Path(f"{self.folder}-{self.made}-{self.ranks[0]}")
        self.made += 1
        maps: dict[str, Tensor] = {}
        kept = ExitStack()

        def make_folder() -> None:
            folder.mkdir(mode=0o700)
            kept.enter_context(in_use(folder))

        steps: list[Callable[[], object]] = [
            lambda: make_folder() if self.leads else None,
            lambda: maps.update({name: create(folder / name, length, dtype) for name, length in make.items()}),
            lambda: maps.update({name: attach(folder / name, length, dtype) for name, length in find.items()}),
        ]
        try:
            self.refused = any(self._fails(step) for step in steps)  # stops at the first failure
        finally:  # also if another rank is gone
            if self.leads:
                shutil.rmtree(folder, ignore_errors=True)
                kept.close()
        return None if self.refused else maps

    def _fails(self, step: Callable[[], object]) -> bool:
        """Run one step on every rank; return whether it failed on any. Collective."""
        failed = torch.zeros(1, dtype=torch.int64)
        try:
            step()
        except (OSError, RuntimeError) as error:
            log.warning("the ranks of this node cannot share that much memory (%s); each uses its own", error)
            failed += 1
        self.comm.sum(failed)
        return bool(failed)


def create(path: Path, elements: int, dtype: torch.dtype) -> Tensor:
    """Create and map a file of zeros. Its space is reserved: a full file system is an error here, not a crash later."""
    size = elements * torch.empty((), dtype=dtype).element_size()
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, max(size, 1))
    finally:
        os.close(descriptor)
    return attach(path, elements, dtype)


def attach(path: Path, elements: int, dtype: torch.dtype) -> Tensor:
    """Map a file of that many elements; writes are visible to every process that maps it."""
    return torch.from_file(str(path), shared=True, size=elements, dtype=dtype)
