"""Memory that the ranks of one node share, so that between them nothing has to be sent.

A row lies in a file of its own in the node's memory file system, mapped by two ranks: the one that writes it and the
one it is for. So a rank can reach its own slice of another rank's sums and nothing else of them. A vector that is the
same on every rank (the model) is mapped by all ranks of the node: one copy instead of one a rank. A file's name is gone
as soon as it is mapped, so a run that ends later, however it ends, leaves nothing behind; what a run that is killed
before that leaves, the next start removes (leftovers.py).

Where that cannot be had (no such file system, too small a one, ranks in containers of their own) the ranks find out
together and the transport sends instead.
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

from .leftovers import MEMORY, in_use, sweep

if TYPE_CHECKING:
    from .base import Comm

log = logging.getLogger("fedmpi")

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def share_node(comm: Comm, node: int | None = None) -> None:
    """Let the ranks of each node share memory from now on; `node` numbers the node where it is not what it seems.

    Collective.
    """
    if comm.size > 1:
        ranks = ranks_by_node(comm, this_node() if node is None else node)
        token = torch.frombuffer(bytearray(os.urandom(8)), dtype=torch.int64).clone()
        comm.broadcast(token)  # a name that nobody else can guess
        comm.node = Node(comm, ranks, MEMORY / f"fedmpi-{int(token) & (2**63 - 1):x}")
        if comm.node.leads:
            sweep()


def this_node() -> int:
    """A number for the running system that this process is on."""
    boot = BOOT_ID.read_text() if BOOT_ID.exists() else ""
    return int.from_bytes(hashlib.sha256((platform.node() + boot).encode()).digest()[:7], "big")


def ranks_by_node(comm: Comm, node: int) -> list[list[int]]:
    """The ranks of every node, nodes in the order of their first rank."""
    numbers = torch.zeros(comm.size, dtype=torch.int64)
    numbers[comm.rank] = node
    comm.sum(numbers)
    found: dict[int, list[int]] = {}
    for rank, number in enumerate(numbers.tolist()):
        found.setdefault(number, []).append(rank)
    return list(found.values())


class Node:
    """This rank's node: which ranks are on it, and the memory that they share."""

    def __init__(self, comm: Comm, nodes: list[list[int]], folder: Path) -> None:
        self.comm, self.folder = comm, folder
        self.ranks = next(ranks for ranks in nodes if comm.rank in ranks)
        self.leads = comm.rank == self.ranks[0]
        self.other_leaders = [ranks[0] for ranks in nodes if ranks is not self.ranks]
        self.made, self.refused = 0, False
        self.vectors: list[ref[Tensor]] = []  # a run's go with the run

    def rows(self, length: int, dtype: torch.dtype) -> dict[int, tuple[Tensor, Tensor]] | None:
        """For each other rank of the node, my row for it and its row for me; None where memory cannot be shared."""
        me, others = self.comm.rank, [r for r in self.ranks if r != self.comm.rank]
        mine = {f"{me}-{r}": length for r in others}
        theirs = {f"{r}-{me}": length for r in others}
        maps = self._share(mine, theirs, dtype)
        return None if maps is None else {r: (maps[f"{me}-{r}"], maps[f"{r}-{me}"]) for r in others}

    def vector(self, slice_length: int) -> Tensor | None:
        """One vector for the whole node; None where memory cannot be shared."""
        whole = {"vector": slice_length * self.comm.size}
        maps = self._share(whole if self.leads else {}, {} if self.leads else whole, torch.float32)
        if not maps:
            return None
        self.vectors = [known for known in self.vectors if known() is not None] + [ref(maps["vector"])]
        return maps["vector"]

    def holds(self, x_N: Tensor) -> bool:
        """Whether a vector is one of this node's."""
        return any(x_N is known() for known in self.vectors)

    def _share(self, make: dict[str, int], find: dict[str, int], dtype: torch.dtype) -> dict[str, Tensor] | None:
        """Map the files that this rank makes and those that others make for it: on all ranks, or none. Collective."""
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
            self.refused = any(self._fails(step) for step in steps)  # the first that fails is the last that is tried
        finally:  # also where another rank is gone
            if self.leads:
                shutil.rmtree(folder, ignore_errors=True)
                kept.close()
        return None if self.refused else maps

    def _fails(self, step: Callable[[], object]) -> bool:
        """Do one step on every rank; whether it failed on any. Collective."""
        failed = torch.zeros(1, dtype=torch.int64)
        try:
            step()
        except (OSError, RuntimeError) as error:
            log.warning("the ranks of this node cannot share memory (%s); they will send instead", error)
            failed += 1
        self.comm.sum(failed)
        return bool(failed)


def create(path: Path, elements: int, dtype: torch.dtype) -> Tensor:
    """A new file of zeros, mapped. Its space is reserved: a full file system is an error here, not a crash later."""
    size = elements * torch.empty((), dtype=dtype).element_size()
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, max(size, 1))
    finally:
        os.close(descriptor)
    return attach(path, elements, dtype)


def attach(path: Path, elements: int, dtype: torch.dtype) -> Tensor:
    """A file of that many elements, mapped so that writes are seen by all who map it."""
    return torch.from_file(str(path), shared=True, size=elements, dtype=dtype)
