"""Find the newest sound checkpoint of a run folder and restore its state.

The ranks share the work of verifying every SHA-256; where one does not match, all fall back to the next older
checkpoint. A rank then takes its slice out of those that cover it, and its part of the memories of its node's clients,
so the number of ranks that wrote does not matter.

N: a full padded vector.  S: the slice this rank owns.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from ...comm import Comm, agreed, common_trouble, from_first
from ...errors import CommonError, FileError, UserError, reason
from ...local.memory import Memory
from ...rounds import State
from .. import folder
from ..config import FREE
from ..schema import Damaged, Manifest
from .format import CLIENTS, Fingerprint, FoundCheckpoint, file_damage, read_manifest, rounds_in, set_aside

log = logging.getLogger("fedmpi")


def find(out: Path, fingerprint: Fingerprint, comm: Comm, force: bool) -> FoundCheckpoint | None:
    """Return the newest sound checkpoint of a run folder, None if there is none. A damaged one is logged; one of
    another run is a `UserError`. Collective."""
    base = out / folder.CHECKPOINTS
    rounds = share_rounds(base, comm)
    for round in rounds:
        path = base / f"round-{round}"
        found, changes, damage, unreadable = None, "", "", ""
        with agreed(comm):
            try:
                about, files = read_manifest(path)
                changes = compare(out, about, fingerprint, force)
                slices = [file for file, _ in files if file.parent == path]
                found = FoundCheckpoint(about, slices, [file for file, _ in files if file.parent != path])
                mine = files[comm.rank :: comm.size]
                damages = (file_damage(file, wanted) or tensor_damage(file, about) for file, wanted in mine)
                damage = next(filter(None, damages), "")
            except Damaged as error:
                damage = error.what
            except OSError as error:
                unreadable = f"{path} cannot be read ({reason(error)})"
        if unreadable := common_trouble(comm, unreadable):  # it may pass: a checkpoint that may be sound is not dropped
            raise CommonError(f"{unreadable}; nothing was changed: see to that and start the same command again")
        damage = common_trouble(comm, damage)
        if found is not None and not damage:
            saved = found.about["torch"]
            if comm.rank == 0 and changes:
                log.warning("resuming with changed settings: %s", changes)
            if comm.rank == 0 and saved != torch.__version__:
                log.warning("saved with torch %s, this is %s: bits may differ from here on", saved, torch.__version__)
            return found
        if comm.rank == 0:
            log.warning("the checkpoint of round %d is damaged: %s; looking for an older one", round, damage)
    if comm.rank == 0 and rounds:
        log.warning("no checkpoint in %s is sound: starting over; they are kept next to it", base)
        set_aside(base)
    return None


def share_rounds(base: Path, comm: Comm) -> list[int]:
    """Return the rounds that rank 0 finds checkpoints of, newest first. Collective."""
    rounds: list[int] = []
    with agreed(comm):
        if comm.rank == 0:
            if base.is_symlink() and not base.is_dir():  # its disk may not be mounted right now
                raise FileError(f"{base} is a link to no folder; see to that and start the same command again")
            if base.exists() and not base.is_dir():
                log.warning("%s is no folder: starting over; it is kept next to it", base)
                set_aside(base)
            rounds = rounds_in(base)
    rounds = from_first(comm, rounds)
    with agreed(comm):
        if rounds and not base.is_dir():  # none of its checkpoints is damaged: they must not be removed
            raise UserError(f"{base} is not seen here; put the run folder where all nodes see it")
    return rounds


def tensor_damage(path: Path, about: Manifest) -> str:
    """Return which tensor a file lacks or should not have, '' if it is sound."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            names = set(file.keys())
    except safetensors.SafetensorError as error:
        return f"{path.name} is no file of tensors ({reason(error)})"
    if path.parent.name == CLIENTS:
        odd = next((name for name in names if not re.fullmatch("[0-9]{1,15}", name)), None)
        return "" if odd is None else f"{path.name} has '{odd}', which is no client"
    missing = sorted(set(about["vectors"]) - names)
    return f"{path.name} has no '{missing[0]}'" if missing else ""


def compare(out: Path, about: Manifest, fingerprint: Fingerprint, force: bool) -> str:
    """Refuse a checkpoint of another run, with what differs. `force` lets knobs differ, but not what the state is made
    of; return the knobs that do, in words."""
    saved: Mapping[str, Any] = about["config"]
    given = {name: value for name, value in fingerprint.config.items() if name in saved and not name.startswith(FREE)}
    if given.get("threads") is None:
        given["threads"] = saved["threads"]  # the run will use as many
    changed = [name for name, value in given.items() if value != saved[name]]
    changes = ", ".join(f"--{name} is {given[name]} and was {saved[name]}" for name in changed)
    prints = [what for what, sha in fingerprint.prints.items() if about["prints"].get(what) != sha]
    way_out = "choose another --out, or start over with --resume never"
    if changed and not force:
        raise UserError(
            f"{out} holds an unfinished run with other settings: {changes}; give the same, {way_out}; --resume force "
            "resumes with the new ones"
        )
    if prints:
        why = f" ({changes})" if changes else ""
        if not changes and "model" in prints:
            why = " (or another --step.layout of it)"
        raise UserError(f"{out} holds an unfinished run with another {' and '.join(prints)}{why}; {way_out}")
    return changes


def restore(found: FoundCheckpoint, start: State, length: int, comm: Comm) -> State:
    """Return the saved state on this many ranks, in the memory of the state before the first round. The first `length`
    elements of a vector count, the rest is padding. Collective."""
    slice_length = start.model_N.numel() // comm.size
    first = comm.rank * slice_length
    last = min(first + slice_length, length)
    targets = start.vectors(comm)
    if "unsent.model" not in found.about["vectors"]:  # saved with --wire float32
        targets = {name: vector for name, vector in targets.items() if not name.startswith("unsent.")}
    unsent_N = targets.pop("unsent.sums", None)
    with readable(found, comm):
        if len(found.about["ints"]) != start.ints.numel():
            raise ValueError(f"it has {len(found.about['ints'])} whole numbers, not {start.ints.numel()}")
        for rank in range(found.ranks):
            read_slice(found, rank, targets, first=first, last=last, length=length)
        if unsent_N is not None:
            read_unsent(found, unsent_N, comm, length)
    read_memories(found, start.memory, comm)
    for vector_N in (start.model_N, *start.shared.values()):
        comm.gather(vector_N)
    ints = torch.tensor(found.about["ints"], dtype=torch.int64)
    return replace(start, round=found.round, ints=ints)


@contextmanager
def readable(found: FoundCheckpoint, comm: Comm) -> Iterator[None]:
    """Run a block that reads a checkpoint; if it fails on a rank, all raise what to do. Collective."""
    with agreed(comm):
        try:
            yield
        except (safetensors.SafetensorError, RuntimeError, ValueError, OSError) as error:
            where = found.slices[0].parent
            raise FileError(
                f"{where} cannot be read into this model ({reason(error)}); move it away to resume from an older "
                "checkpoint, or start over with --resume never"
            ) from error


def read_slice(
    found: FoundCheckpoint, rank: int, targets: Mapping[str, Tensor], *, first: int, last: int, length: int
) -> None:
    """Copy what a rank saved of the elements first..last into the targets, which begin at `first`."""
    with safetensors.safe_open(found.slices[rank], "pt") as file:
        saved_length = file.get_slice("model").get_shape()[0]  # depends on ranks and alignment
        start = rank * saved_length
        low, high = max(first, start), min(last, start + saved_length, length)
        if low >= high:
            return
        for name, target in targets.items():
            target[low - first : high - first].copy_(file.get_slice(name)[low - start : high - start])


def read_unsent(found: FoundCheckpoint, unsent_N: Tensor, comm: Comm, length: int) -> None:
    """Restore the rounding errors of the sums, of `length` elements and padding. On as many ranks as before each takes
    its own; else the owner of a slice takes those of all ranks for it, so that nothing is lost."""
    slice_length = unsent_N.numel() // comm.size
    own, paths = slice(comm.rank * slice_length, min((comm.rank + 1) * slice_length, length)), found.slices
    if found.ranks == comm.size:
        own, paths = slice(0, length), found.slices[comm.rank : comm.rank + 1]
    for path in paths if own.start < own.stop else ():
        with safetensors.safe_open(path, "pt") as file:
            unsent_N[own].add_(file.get_slice("unsent.sums")[own].to(unsent_N))


def read_memories(found: FoundCheckpoint, memory: Memory, comm: Comm) -> None:
    """Restore the newest memory of each client: a node reads it once, by the rank that owns it. Collective."""
    newest: dict[int, Path] = {}
    with readable(found, comm):
        for path in found.memories:
            with safetensors.safe_open(path, "pt") as file:
                newest |= dict.fromkeys(map(int, file.keys()), path)
    memory.reserve(sorted(newest))
    with readable(found, comm):
        for path in found.memories:
            with safetensors.safe_open(path, "pt") as file:
                for cid in (int(key) for key in file.keys()):  # noqa: SIM118 - not a dict
                    if newest[cid] == path and memory.owns(cid):
                        memory.staged(cid).copy_(file.get_tensor(str(cid)))
    memory.commit(newest)
