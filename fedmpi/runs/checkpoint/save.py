"""Save the state of a run while it trains.

A save costs the round one copy of the rank's slices; a thread writes them, into a folder aside. When every rank has
written, which the ranks find out at the end of some later round, rank 0 adds the manifest and renames the folder: from
then on the checkpoint exists, and is complete.

Of client memories only those that changed are written, into files that several checkpoints refer to. A file of which
less than half is still valid is written again with them, so the disk holds at most about twice what the clients keep.

N: a full padded vector.  S: the slice this rank owns.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from ... import __version__
from ...comm import Comm, agreed, common_trouble, from_first, tell_all
from ...errors import CommonError, UserError, reason
from ...rounds import State
from .. import folder
from ..config import Checkpoint
from ..schema import Damaged, FileRecord
from .format import (
    CLIENTS,
    FORMAT,
    MANIFEST,
    NAME,
    Fingerprint,
    FoundCheckpoint,
    Progress,
    digest,
    discard,
    read_manifest,
    rounds_in,
    sealed,
    set_aside,
)

log = logging.getLogger("fedmpi")

SEAL_SECONDS = 5.0  # that a run which ends in an error waits for a checkpoint that is almost complete
LIVE_SHARE = 0.5  # a file of memories with a smaller valid share is written again


@dataclass
class MemoryFile:
    """A file of client memories that this rank has written: of those that it owns."""

    file: FileRecord
    rows: int
    live: set[int] = field(default_factory=set)
    """the clients whose newest memory it has"""


class Saver:
    """Saves a run's state as it trains. Every rank has one and calls it at the same points."""

    def __init__(
        self, out: Path | None, knobs: Checkpoint, fingerprint: Fingerprint, comm: Comm, found: FoundCheckpoint | None
    ) -> None:
        self.comm, self.knobs, self.fingerprint = comm, knobs, fingerprint
        self.out = None if out is None or not knobs.keep else out
        self.base = (out or Path()) / folder.CHECKPOINTS
        self.kept = found.round if found else 0
        """the round of the newest complete checkpoint"""
        self.last, self.last_time = self.kept, time.monotonic()
        self.trouble = ""
        """why something else could not be written into the folder on this rank, to be raised on all"""
        self.writing: int | None = None
        """the round that is being written"""
        self.about: dict[str, Any] = {}
        self.mine: Future[str] | None = None
        self.sealing: Future[int] | None = None
        self.memories: list[MemoryFile] = []
        self.copies: dict[str, Tensor] = {}
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="fedmpi-checkpoint")
        # A dying rank of an earlier start cannot write into the files of this one.
        self.token = from_first(comm, secrets.token_hex(8))
        if self.out is not None:
            self._make_base()

    def _make_base(self) -> None:
        """Make the folders and remove what earlier starts left half written."""
        with agreed(self.comm):
            if self.comm.rank == 0:
                (self.base / CLIENTS).mkdir(mode=0o700, parents=True, exist_ok=True)
                for left in (*self.base.glob(".*"), *(self.base / CLIENTS).glob(".*")):
                    folder.remove(left)
                for round in rounds_in(self.base):
                    if round > self.kept:  # found damaged: it would take the place of a sound one among those kept
                        set_aside(self.base / f"round-{round}")
        with agreed(self.comm):
            if not (self.base / CLIENTS).is_dir():
                raise UserError(
                    f"{self.base} is not seen here, so this rank cannot save its part; put the run folder where all "
                    "nodes see it, or switch checkpoints off with --checkpoint.keep 0"
                )

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self.sealing is not None:
            wait([self.sealing], timeout=SEAL_SECONDS)
        # After an error the rank must report it, not wait for its disk.
        self.thread.shutdown(wait=kind is None, cancel_futures=kind is not None)

    def round_done(self, state: State, progress: Progress, flags: list[int], last: bool) -> list[int]:
        """Save if a checkpoint is due; return the flags summed over the ranks. After a flag, and after the last round,
        everything is on the disk. Collective."""
        due = self.comm.rank == 0 and self._due(state.round)
        words = torch.tensor([*flags, due, self._busy(), bool(self.trouble)], dtype=torch.int64)
        self.comm.sum(words)
        *summed, due, busy, troubled = words.tolist()
        if troubled:
            self.agree()
        if self.out is None:
            return summed
        ends = last or any(summed)
        if self.writing and (ends or not busy):
            self._complete()
        if (due or ends) and not self.writing and self.last != state.round:
            self._start(state, progress)
        if ends:
            if self.writing:
                self._complete()
            self.agree(self._seal_trouble(wait=True))
        return summed

    def _due(self, round: int) -> bool:
        every, minutes = self.knobs.every, self.knobs.minutes
        by_rounds = every is not None and round // every > self.last // every
        return by_rounds or (minutes > 0 and time.monotonic() - self.last_time >= 60 * minutes)

    def _busy(self) -> bool:
        return self.mine is not None and not self.mine.done()

    def _start(self, state: State, progress: Progress) -> None:
        """Copy what the next round will change, and let the thread write it."""
        vectors = state.vectors(self.comm)
        for name, vector in vectors.items():  # into the same buffers: page faults on fresh memory cost more than a copy
            self.copies.setdefault(name, torch.empty(vector.shape)).copy_(vector)
        scattered = {cid for one in self.memories if len(one.live) < LIVE_SHARE * one.rows for cid in one.live}
        rows = state.memory.pin(scattered)
        self.about = {
            "format": FORMAT,
            "fedmpi": __version__,
            "torch": torch.__version__,
            "round": state.round,
            "ranks": self.comm.size,
            "vectors": sorted(vectors),
            "memory": list(state.memory.names),
            "ints": state.ints.tolist(),
            "config": dict(self.fingerprint.config),
            "prints": dict(self.fingerprint.prints),
            "best": progress.best,
            "last": dict(progress.last or {}),
        }
        self.writing = self.last = state.round
        self.last_time = time.monotonic()
        self.memory = state.memory
        self.mine = self.thread.submit(self._write_part, state.round, rows)

    def _aside(self, round: int) -> Path:
        return self.base / f".round-{round}-{self.token}"

    def _write_part(self, round: int, rows: dict[int, Tensor]) -> str:
        """Write the copies of this rank's slices, the memories that have changed, and a list of both, in the thread;
        return the SHA-256 of the list."""
        rank, size = self.comm.rank, self.comm.size
        aside = self._aside(round)
        aside.mkdir(mode=0o700, exist_ok=True)
        own = write_tensors(self.copies, aside / f"slice-{rank}-of-{size}.safetensors")
        if rows:
            name = f"round-{round}-{rank}-of-{size}-{self.token}.safetensors"
            file = write_tensors({str(cid): row for cid, row in rows.items()}, self.base / CLIENTS / name)
            for one in self.memories:
                one.live -= rows.keys()
            self.memories = [one for one in self.memories if one.live]
            self.memories.append(MemoryFile(file, len(rows), set(rows)))
        part = {"slice": own, "clients": [one.file for one in self.memories]}
        path = aside / f"part-{rank}.json"
        folder.write(path, json.dumps(part))
        return digest(path)

    def _complete(self) -> None:
        """Wait until every rank has written its part, then let rank 0 make it a checkpoint. Collective."""
        assert self.mine is not None and self.writing is not None
        trouble, sha = "", ""
        try:
            sha = self.mine.result()
        except (OSError, safetensors.SafetensorError) as error:
            trouble = reason(error)
        self.memory.unpin()
        self.agree(trouble)
        parts = tell_all(self.comm, sha)
        if self.comm.rank == 0:
            self.sealing = self.thread.submit(self._seal, self.about | {"parts": parts}, self.writing)
        self.mine = self.writing = None

    def _seal(self, about: dict[str, Any], round: int) -> int:
        """Make a checkpoint of what all ranks have written, and remove the oldest; on rank 0, in its thread."""
        aside, target = self._aside(round), self.base / f"round-{round}"
        with suppress(FileNotFoundError):  # somebody may remove it
            folder.sync(self.base.parent / folder.METRICS)  # it has every round that the checkpoint has
        folder.write(aside / MANIFEST, sealed(about))
        discard(target)  # one that was found damaged
        os.rename(aside, target)
        folder.sync(self.base)
        try:
            self._prune(round)
        except (OSError, Damaged, UserError) as error:  # the new checkpoint is sound all the same
            log.warning("old checkpoints in %s could not be removed (%s)", self.base, error)
        return round

    def _prune(self, newest: int) -> None:
        """Keep the newest checkpoints and the memories that they refer to; keep all where a manifest is unreadable."""
        rounds = rounds_in(self.base)
        keep = [round for round in rounds if round <= newest][: self.knobs.keep]
        listed = [read_manifest(self.base / f"round-{round}")[1] for round in keep]
        used = {file.name for files in listed for file, _ in files if file.parent.name == CLIENTS}
        for round in set(rounds) - set(keep):
            discard(self.base / f"round-{round}")
        for path in (self.base / CLIENTS).iterdir():
            match = NAME.match(path.name)
            if match is None:
                continue  # safetensors writes into a file of another name first, perhaps just now
            coming = self.token in path.name and int(match[1]) > newest
            if path.name not in used and not coming:
                folder.remove(path)

    def _seal_trouble(self, wait: bool = False) -> str:
        """Return why rank 0 could not make the last checkpoint, '' if it could or is still at it."""
        if self.sealing is None or not (wait or self.sealing.done()):
            return ""
        try:
            self.kept = self.sealing.result()
        except OSError as error:
            return reason(error)
        self.sealing = None
        return ""

    def agree(self, trouble: str = "") -> None:
        """Raise the first rank's trouble on every rank, or on none. Collective."""
        trouble = common_trouble(self.comm, trouble or self.trouble or self._seal_trouble())
        if trouble:
            self._seal_trouble(wait=True)  # the checkpoint before may be complete by now
            kept = from_first(self.comm, self.kept)
            raise CommonError(folder.write_failed(self.base.parent, trouble, kept))


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> FileRecord:
    """Write tensors to a file and sync it."""
    save_file(dict(tensors), path)
    folder.sync(path)
    folder.sync(path.parent)
    return {"name": path.name, "sha256": digest(path), "bytes": path.stat().st_size}
