"""Checkpoints: all of `State`, saved while training goes on, and read back on any number of ranks.

    checkpoints/round-12/slice-0-of-2.safetensors    a rank's slice of the model, the moments, the shared vectors; what
                                                     it has not sent yet (--wire bf16)
    checkpoints/round-12/part-0.json                 that rank's files, each with its SHA-256
    checkpoints/round-12/manifest.json               the parts with their SHA-256; round, configuration, fingerprints
    checkpoints/clients/round-9-0-of-2-....safetensors   client memories by client id, written when they have changed

Saving costs a round one copy of the rank's slices; a thread writes them, into a folder aside. When every rank has
written, which the ranks find out at the end of some later round, rank 0 adds the manifest and renames the folder: from
then on the checkpoint is there, and whole. Of client memories only those that changed are written, into files that
several checkpoints refer to; a file of which less than half is still valid is written anew with them, so the disk holds
at most about twice what the clients keep.

Reading verifies every SHA-256, each rank some of the files, and falls back to an older checkpoint where one does not
match. A rank takes its slice out of those that cover it and the memories of the clients that are at home with it, so
the number of ranks that wrote does not matter.

N: a full padded vector.  S: the slice this rank owns.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from .. import __version__
from ..cohort import home
from ..comm import Comm, agreed, common_trouble
from ..errors import CommonError, FileError, UserError, reason
from ..local.memory import Memory
from ..rounds import State
from . import folder
from .config import FREE, Checkpoint
from .schema import Damaged, FileRecord, Manifest, Part, checked, load, opened, parse

log = logging.getLogger("fedmpi")

FORMAT = 1  # of the files: raise it with a change that an older fedmpi cannot read
MANIFEST, CLIENTS = "manifest.json", "clients"
NAME = re.compile(r"round-([1-9][0-9]{0,15})")
NOT_THERE = (FileNotFoundError, NotADirectoryError)  # other errors may pass: no sign of damage
SEAL_SECONDS = 5.0  # that a run which ends in an error waits for a checkpoint which is all but made
LIVE_SHARE = 0.5  # of a file of memories: below it what is valid is written again, and the file can go


@dataclass(frozen=True)
class File:
    """One file of a checkpoint."""

    name: str
    sha256: str
    bytes: int

    def trouble(self, where: Path) -> str:
        """What is wrong with the file; empty where it is sound. An OSError where that cannot be told at the moment."""
        path = where / self.name
        try:
            with opened(path) as file:
                size = os.fstat(file.fileno()).st_size
            if size != self.bytes:
                return f"{self.name} has {size} bytes, not {self.bytes}"
            return "" if digest(path) == self.sha256 else f"the SHA-256 of {self.name} does not match"
        except NOT_THERE:
            return f"{self.name} is missing"
        except Damaged as error:
            return error.what


@dataclass(frozen=True)
class Progress:
    """What a run has come to so far, beside the state itself."""

    best: float | None = None
    """the best test metric"""
    last: Mapping[str, Any] | None = None
    """the last round's record, as in metrics.jsonl"""


@dataclass(frozen=True)
class Facts:
    """What a checkpoint must agree on with the run that reads it."""

    config: Mapping[str, Any]
    """every knob, by its dotted name"""
    prints: Mapping[str, str]
    """fingerprints by what they are of: data set, split, model, rules"""


@dataclass(frozen=True)
class Found:
    """A sound checkpoint."""

    round: int
    ranks: int
    about: Manifest
    slices: tuple[Path, ...]
    memories: tuple[Path, ...]
    """oldest first: the last word on a client counts"""

    @property
    def progress(self) -> Progress:
        return Progress(self.about["best"], self.about["last"])


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with opened(path) as file:
        sha = hashlib.sha256()
        while block := file.read(1 << 20):
            sha.update(block)
    return sha.hexdigest()


def sealed(about: Mapping[str, Any]) -> str:
    """A manifest as text, with a SHA-256 of the rest in it."""
    body = json.dumps(about, sort_keys=True)
    return json.dumps({**about, "sha256": hashlib.sha256(body.encode()).hexdigest()}, sort_keys=True) + "\n"


# ---------------------------------------------------------------------------------------------------------- saving


@dataclass
class Written:
    """A file of client memories that this rank has written."""

    file: File
    rows: int
    live: set[int] = field(default_factory=set)
    """the clients whose last word it has"""


@dataclass(frozen=True)
class Snapshot:
    """One rank's part of the state at the end of a round: copies of its slices, and the rows that have changed."""

    round: int
    slices: dict[str, Tensor]
    rows: dict[int, Tensor]


class Saver:
    """Saves a run's state as it goes. Every rank has one and calls it at the same points."""

    def __init__(self, out: Path | None, knobs: Checkpoint, facts: Facts, comm: Comm, found: Found | None) -> None:
        self.comm, self.knobs, self.facts = comm, knobs, facts
        self.out = None if out is None or not knobs.keep else out
        self.base = (out or Path()) / folder.CHECKPOINTS
        self.kept = found.round if found else 0
        """the round of the newest checkpoint that is whole"""
        self.last, self.last_time = self.kept, time.monotonic()
        self.trouble = ""
        """why something else could not be written into the folder on this rank, to be raised on all"""
        self.flying: int | None = None
        """the round that is being written"""
        self.about: dict[str, Any] = {}
        self.mine: Future[str] | None = None
        self.sealing: Future[int] | None = None
        self.memories: list[Written] = []
        self.copies: dict[str, Tensor] = {}
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="fedmpi-checkpoint")
        token = torch.frombuffer(bytearray(os.urandom(8)), dtype=torch.int64).clone()
        comm.broadcast(token)  # a dying rank of an earlier life cannot write into this one's files
        self.token = f"{int(token) & (2**63 - 1):x}"
        if self.out is not None:
            self._make_base()

    def _make_base(self) -> None:
        """Make the folders and clear away what earlier lives left half written."""
        with agreed(self.comm):
            if self.comm.rank == 0:
                (self.base / CLIENTS).mkdir(mode=0o700, parents=True, exist_ok=True)
                for left in (*self.base.glob(".*"), *(self.base / CLIENTS).glob(".*")):
                    folder.remove(left)
                for number in rounds_in(self.base):
                    if number > self.kept:  # found damaged: among those that are kept it would take a sound one's place
                        set_aside(self.base / f"round-{number}")
        with agreed(self.comm):
            if not (self.base / CLIENTS).is_dir():
                raise UserError(
                    f"{self.base} is not seen here, so this rank cannot save its part; put the run folder where all "
                    "nodes see it, or switch checkpoints off with --checkpoint.keep 0"
                )

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self.sealing is not None:
            wait([self.sealing], timeout=SEAL_SECONDS)
        # A survivor has to say who is gone, and not to wait for its disk.
        self.thread.shutdown(wait=kind is None, cancel_futures=kind is not None)

    def round_done(self, state: State, progress: Progress, flags: list[int], last: bool) -> list[int]:
        """Save where it is time to; returns the ranks' summed flags. After a flag, and after the last round, everything
        is on the disk. Collective."""
        due = self.comm.rank == 0 and self._due(state.round)
        words = torch.tensor([*flags, due, self._busy(), bool(self.trouble)], dtype=torch.int64)
        self.comm.sum(words)
        *summed, due, busy, troubled = words.tolist()
        if troubled:
            self.agree()
        if self.out is None:
            return summed
        if self.flying and not busy:
            self._land()
        ends = last or any(summed)
        if ends and self.flying:
            self._land()
        if (due or ends) and not self.flying and self.last != state.round:
            self._launch(state, progress)
        if ends:
            if self.flying:
                self._land()
            self._settle()
        return summed

    def _due(self, round: int) -> bool:
        every, minutes = self.knobs.every, self.knobs.minutes
        by_rounds = every is not None and round // every > self.last // every
        return by_rounds or (minutes > 0 and time.monotonic() - self.last_time >= 60 * minutes)

    def _busy(self) -> bool:
        return self.mine is not None and not self.mine.done()

    def _launch(self, state: State, progress: Progress) -> None:
        """Copy what the next round will change, and let the thread write it."""
        size, rank = self.comm.size, self.comm.rank
        own = slice(rank * (state.model_N.numel() // size), (rank + 1) * (state.model_N.numel() // size))
        vectors = {"model": state.model_N[own]}
        vectors |= {f"moment.{name}": moment_S for name, moment_S in state.moments.items()}
        vectors |= {f"shared.{name}": vector_N[own] for name, vector_N in state.shared.items()}
        vectors |= {f"unsent.{name}": vector for name, vector in state.unsent.items()}
        for name, vector in vectors.items():  # into memory that is had once: fresh pages cost more than the copy
            self.copies.setdefault(name, torch.empty(vector.shape)).copy_(vector)
        rows = state.memory.pin(self._scattered())
        self.about = {
            "format": FORMAT,
            "fedmpi": __version__,
            "torch": torch.__version__,
            "round": state.round,
            "ranks": size,
            "vectors": sorted(vectors),
            "memory": list(state.memory.names),
            "ints": state.ints.tolist(),
            "config": dict(self.facts.config),
            "prints": dict(self.facts.prints),
            "best": progress.best,
            "last": dict(progress.last or {}),
        }
        self.flying, self.last, self.last_time = state.round, state.round, time.monotonic()
        self.memory = state.memory
        self.mine = self.thread.submit(self._write_part, Snapshot(state.round, self.copies, rows))

    def _scattered(self) -> set[int]:
        """The clients in files of which little is still valid."""
        return {cid for one in self.memories if len(one.live) < LIVE_SHARE * one.rows for cid in one.live}

    def _aside(self, round: int) -> Path:
        return self.base / f".round-{round}-{self.token}"

    def _write_part(self, shot: Snapshot) -> str:
        """Write this rank's files and their list, in the thread; returns the SHA-256 of the list."""
        rank, size = self.comm.rank, self.comm.size
        aside = self._aside(shot.round)
        aside.mkdir(mode=0o700, exist_ok=True)
        own = save(shot.slices, aside / f"slice-{rank}-of-{size}.safetensors")
        if shot.rows:
            name = f"round-{shot.round}-{rank}-of-{size}-{self.token}.safetensors"
            file = save({str(cid): row for cid, row in shot.rows.items()}, self.base / CLIENTS / name)
            for one in self.memories:
                one.live -= shot.rows.keys()
            self.memories = [one for one in self.memories if one.live]
            self.memories.append(Written(file, len(shot.rows), set(shot.rows)))
        part = {"slice": vars(own), "clients": [vars(one.file) for one in self.memories]}
        path = aside / f"part-{rank}.json"
        folder.write(path, json.dumps(part))
        return digest(path)

    def _land(self) -> None:
        """Wait until every rank has written its part, then let rank 0 make it a checkpoint. Collective."""
        assert self.mine is not None and self.flying is not None
        trouble, sha = "", ""
        try:
            sha = self.mine.result()
        except (OSError, safetensors.SafetensorError) as error:
            trouble = reason(error)
        self.memory.unpin()
        self.agree(trouble)
        digests = torch.zeros(self.comm.size, 32, dtype=torch.uint8)
        digests[self.comm.rank] = torch.frombuffer(bytearray.fromhex(sha), dtype=torch.uint8)
        self.comm.sum(digests)
        if self.comm.rank == 0:
            parts = [bytes(row.tolist()).hex() for row in digests]
            self.sealing = self.thread.submit(self._seal, self.about | {"parts": parts}, self.flying)
        self.mine, self.flying = None, None

    def _seal(self, about: dict[str, Any], round: int) -> int:
        """Make a checkpoint of what all ranks have written, and forget the oldest; on rank 0, in its thread."""
        aside, there = self._aside(round), self.base / f"round-{round}"
        with suppress(FileNotFoundError):  # somebody may remove it
            folder.sync(self.base.parent / folder.METRICS)  # it has every round that the checkpoint has
        folder.write(aside / MANIFEST, sealed(about))
        discard(there)  # one that was found damaged
        os.rename(aside, there)
        folder.sync(self.base)
        try:
            self._prune(round)
        except (OSError, Damaged, UserError) as error:  # the checkpoint is there all the same
            log.warning("old checkpoints in %s could not be removed (%s)", self.base, error)
        return round

    def _prune(self, newest: int) -> None:
        """Keep the newest checkpoints and the memories that they refer to; where that cannot be told, keep all."""
        there = rounds_in(self.base)
        keep = [number for number in there if number <= newest][: self.knobs.keep]
        listed = [read_manifest(self.base / f"round-{number}")[1] for number in keep]
        used = {file.name for files in listed for where, file in files if where.name == CLIENTS}
        for number in set(there) - set(keep):
            discard(self.base / f"round-{number}")
        for path in (self.base / CLIENTS).iterdir():
            match = NAME.match(path.name)
            if match is None:
                continue  # safetensors writes into a file of another name first, perhaps just now
            coming = self.token in path.name and int(match[1]) > newest
            if path.name not in used and not coming:
                folder.remove(path)

    def _settle(self) -> None:
        """Wait until rank 0 has made the checkpoint. Collective."""
        self.agree(self._sealed(wait=True))

    def _sealed(self, wait: bool = False) -> str:
        """What went wrong when rank 0 made the last checkpoint, if it is done; on other ranks nothing ever does."""
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
        trouble = common_trouble(self.comm, trouble or self.trouble or self._sealed())
        if trouble:
            self._sealed(wait=True)  # the one before may be through by now
            kept = torch.tensor([self.kept])  # rank 0 knows
            self.comm.broadcast(kept)
            raise CommonError(folder.lost(self.base.parent, trouble, int(kept)))


def save(tensors: Mapping[str, Tensor], path: Path) -> File:
    """Write tensors to a file and sync it."""
    save_file(dict(tensors), path)
    folder.sync(path)
    folder.sync(path.parent)
    return File(path.name, digest(path), path.stat().st_size)


def discard(there: Path) -> None:
    """Remove a checkpoint; half removed it must not look like one."""
    if there.exists():
        aside = there.with_name(f".old-{there.name}-{time.time_ns()}")
        os.rename(there, aside)
        folder.remove(aside)


def rounds_in(base: Path) -> list[int]:
    """The rounds of the checkpoints in a folder, newest first."""
    names = [path.name for path in base.iterdir()] if base.is_dir() else []
    return sorted((int(match[1]) for name in names if (match := NAME.fullmatch(name))), reverse=True)


def set_aside(path: Path) -> None:
    """Move away what was found damaged, for whoever wants to look at it."""
    os.rename(path, path.with_name(f"damaged-{path.name}-{time.time_ns()}"))


# --------------------------------------------------------------------------------------------------------- reading

Placed = tuple[Path, File]
"""a file and the folder it lies in"""


def find(out: Path, facts: Facts, comm: Comm, force: bool) -> Found | None:
    """The newest sound checkpoint of a run folder, None where there is none. A damaged one is named in the log; one of
    another run is a `UserError`. Collective."""
    base = out / folder.CHECKPOINTS
    known = torch.zeros(1 << 10, dtype=torch.int64)  # more than anybody keeps
    with agreed(comm):
        if comm.rank == 0:
            clear_way(base)
            numbers = rounds_in(base)[: len(known)]
            known[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
    comm.broadcast(known)
    with agreed(comm):
        if known[0] and not base.is_dir():  # of its checkpoints none is damaged: they must not be removed
            raise UserError(f"{base} is not seen here; put the run folder where all nodes see it")
    for number in filter(None, known.tolist()):
        there = base / f"round-{number}"
        trouble, stuck, changes, found = "", "", "", None
        with agreed(comm):
            try:
                about, files = read_manifest(there)
                changes = compare(out, about, facts, force)
                found = understood(there, about, files)
                mine = files[comm.rank :: comm.size]
                trouble = next(filter(None, (file.trouble(where) for where, file in mine)), "")
                trouble = trouble or next(filter(None, (strange(where / file.name, about) for where, file in mine)), "")
            except Damaged as error:
                trouble = error.what
            except OSError as error:
                stuck = f"{there} cannot be read ({reason(error)})"
        if stuck := common_trouble(comm, stuck):  # perhaps it can in a minute: what may be sound is not given up
            raise CommonError(f"{stuck}; nothing was changed: see to that and start the same command again")
        trouble = common_trouble(comm, trouble)
        if found is not None and not trouble:
            if comm.rank == 0:
                tell(found, changes)
            return found
        if comm.rank == 0:
            log.warning("the checkpoint of round %d is damaged: %s; looking for an older one", number, trouble)
    if comm.rank == 0 and known[0]:
        log.warning("no checkpoint in %s is sound: starting over; they are kept beside it", base)
        set_aside(base)
    return None


def clear_way(base: Path) -> None:
    """Move away what stands in the place of the checkpoints' folder. A link to nowhere is a `FileError`: it may lead to
    a disk that is not there at the moment."""
    if base.is_symlink() and not base.is_dir():
        raise FileError(f"{base} is a link to no folder; see to that and start the same command again")
    if base.exists() and not base.is_dir():
        log.warning("%s is no folder: starting over; it is kept beside it", base)
        set_aside(base)


def read_manifest(there: Path) -> tuple[Manifest, list[Placed]]:
    """A checkpoint's manifest, and all of its files with the folder each lies in. A slice stands before the memories of
    its rank."""
    about = read_sealed(there / MANIFEST)
    if there.name != f"round-{about['round']}":
        raise Damaged(there / MANIFEST, f"is that of round {about['round']}, and its folder is {there.name}")
    if len(about["parts"]) != about["ranks"]:
        raise Damaged(there / MANIFEST, f"has {about['ranks']} ranks and {len(about['parts'])} parts")
    files: list[Placed] = []
    for rank, sha in enumerate(about["parts"]):
        path = there / f"part-{rank}.json"
        raw = load_file(path)
        if hashlib.sha256(raw).hexdigest() != sha:
            raise Damaged(path, "does not match its SHA-256")
        part = checked(path, parse(path, raw), Part)
        files.append((there, as_file(part["slice"])))
        files += [(there.parent / CLIENTS, as_file(one)) for one in part["clients"]]
    return about, files


def load_file(path: Path) -> bytes:
    """What a small file holds; an OSError where that cannot be told at the moment."""
    try:
        return load(path)
    except NOT_THERE:
        raise Damaged(path, "is missing") from None


def read_sealed(path: Path) -> Manifest:
    """A manifest that is what was written; a `UserError` for one that only a newer fedmpi can read. The seal stays the
    same in every format, so a damaged number is not taken for a newer one."""
    about = parse(path, load_file(path))
    if not isinstance(about, dict):
        raise Damaged(path, "is no manifest")
    sha = about.pop("sha256", None)
    if hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest() != sha:
        raise Damaged(path, "does not match its SHA-256")
    if isinstance(about.get("format"), int) and about["format"] > FORMAT:
        raise UserError(
            f"{path} has format {about['format']}, written by fedmpi {about.get('fedmpi')}; this is fedmpi "
            f"{__version__}, which reads up to format {FORMAT}: use the newer one, or --resume never to start over"
        )
    return checked(path, about, Manifest)


def as_file(record: FileRecord) -> File:
    """A file from its record."""
    return File(record["name"], record["sha256"], record["bytes"])


def strange(path: Path, about: Manifest) -> str:
    """What a file of tensors lacks, or has that is none of a checkpoint's; empty where it is sound."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            names = set(file.keys())
    except safetensors.SafetensorError as error:
        return f"{path.name} is no file of tensors ({reason(error)})"
    if path.parent.name == CLIENTS:
        odd = next((name for name in names if not re.fullmatch("[0-9]{1,15}", name)), None)
        return "" if odd is None else f"{path.name} has '{odd}', which is no client"
    lacks = sorted(set(about["vectors"]) - names)
    return f"{path.name} has no '{lacks[0]}'" if lacks else ""


def understood(there: Path, about: Manifest, files: Iterable[Placed]) -> Found:
    """The checkpoint that a manifest describes."""
    files = list(files)
    return Found(
        round=about["round"],
        ranks=about["ranks"],
        about=about,
        slices=tuple(where / file.name for where, file in files if where == there),
        memories=tuple(where / file.name for where, file in files if where != there),
    )


def compare(out: Path, about: Manifest, facts: Facts, force: bool) -> str:
    """Refuse a checkpoint of another run, with what differs. `force` lets knobs differ, but not what the state is made
    of; returns those that do."""
    there: Mapping[str, Any] = about["config"]
    here = facts.config
    given = {name: value for name, value in here.items() if name in there and not name.startswith(FREE)}
    if given.get("threads") is None:
        given["threads"] = there["threads"]  # taken from there
    changed = [name for name, value in given.items() if value != there[name]]
    changes = ", ".join(f"--{name} is {given[name]} and was {there[name]}" for name in changed)
    prints = [what for what, sha in facts.prints.items() if about["prints"].get(what) != sha]
    way_out = "choose another --out, or start over with --resume never"
    if changed and not force:
        raise UserError(
            f"{out} holds an unfinished run with other settings: {changes}; give the same, {way_out}; --resume force "
            "goes on with the new ones"
        )
    if prints:
        why = f" ({changes})" if changes else " (or another --step.layout of it)" * ("model" in prints)
        raise UserError(f"{out} holds an unfinished run with another {' and '.join(prints)}{why}; {way_out}")
    return changes


def tell(found: Found, changes: str) -> None:
    """Say what a user should know of the checkpoint that a run goes on from."""
    if changes:
        log.warning("going on with changed settings: %s", changes)
    saved = found.about["torch"]
    if saved != torch.__version__:
        log.warning("saved with torch %s, this is %s: bits may differ from here on", saved, torch.__version__)


def restore(found: Found, start: State, length: int, comm: Comm) -> State:
    """The saved state on this many ranks, in the memory of the state before the first round. `length` of the vectors'
    elements count, what is behind them is padding. Collective."""
    slice_length = start.model_N.numel() // comm.size
    own = slice(comm.rank * slice_length, (comm.rank + 1) * slice_length)
    targets = {"model": start.model_N[own]}
    targets |= {f"moment.{name}": moment_S for name, moment_S in start.moments.items()}
    targets |= {f"shared.{name}": vector_N[own] for name, vector_N in start.shared.items()}
    unsent = start.unsent if "unsent.model" in found.about["vectors"] else {}  # not there where --wire was float32
    targets |= {"unsent.model": unsent["model"]} if unsent else {}
    with agreed(comm):
        try:
            if len(found.about["ints"]) != start.ints.numel():
                raise ValueError(f"it has {len(found.about['ints'])} whole numbers, not {start.ints.numel()}")
            for rank, path in enumerate(found.slices):
                read_slice(path, rank, found.ranks, own.start, min(own.stop, length), targets, length)
            if unsent:
                read_unsent(found, unsent["sums"], comm.rank, comm.size, min(slice_length, length - own.start))
            read_memories(found.memories, start.memory, comm.rank, comm.size)
        except (safetensors.SafetensorError, RuntimeError, ValueError, OSError) as error:
            where = found.slices[0].parent
            raise FileError(
                f"{where} cannot be read into this model ({reason(error)}); move it away to resume from an older "
                "checkpoint, or start over with --resume never"
            ) from error
    for vector_N in (start.model_N, *start.shared.values()):
        comm.gather(vector_N)
    ints = torch.tensor(found.about["ints"], dtype=torch.int64)
    return replace(start, round=found.round, ints=ints)


def read_slice(
    path: Path, rank: int, ranks: int, start: int, stop: int, targets: Mapping[str, Tensor], length: int
) -> None:
    """Copy what a file has of the elements start to stop into the targets, which begin at start."""
    theirs = -(-length // ranks)
    low, high = max(start, rank * theirs), min(stop, (rank + 1) * theirs)
    if low >= high:
        return
    with safetensors.safe_open(path, "pt") as file:
        for name, target in targets.items():
            piece = file.get_slice(name)[low - rank * theirs : high - rank * theirs]
            target[low - start : high - start].copy_(piece)


def read_unsent(found: Found, sums_N: Tensor, rank: int, ranks: int, count: int) -> None:
    """Take what was left over of the sums: on as many ranks each its own; else all that there is for the `count`
    elements that count of this rank's slice, so that nothing is lost."""
    if found.ranks == ranks:
        with safetensors.safe_open(found.slices[rank], "pt") as file:
            sums_N.copy_(file.get_tensor("unsent.sums"))
        return
    first = rank * (sums_N.numel() // ranks)
    for path in found.slices if count > 0 else ():
        with safetensors.safe_open(path, "pt") as file:
            sums_N[first : first + count].add_(file.get_slice("unsent.sums")[first : first + count])


def read_memories(paths: Iterable[Path], memory: Memory, rank: int, ranks: int) -> None:
    """Take the memories of the clients that are at home here, the newest of each."""
    for path in paths:
        with safetensors.safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a dict
                if home(int(key), ranks) == rank:
                    memory.restore(int(key), file.get_tensor(key))
