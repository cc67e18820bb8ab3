"""The files of a checkpoint: their names, the manifest with its seal, and what a file must be to count as sound."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import __version__
from ...errors import UserError
from .. import folder
from ..schema import Damaged, FileRecord, Manifest, Part, checked, load, opened, parse

FORMAT = 1  # of the files: raise it with a change that an older fedmpi cannot read
MANIFEST, CLIENTS = "manifest.json", "clients"
NAME = re.compile(r"round-([1-9][0-9]{0,15})")
MISSING = (FileNotFoundError, NotADirectoryError)  # other errors may pass: no sign of damage


@dataclass(frozen=True)
class File:
    """One file of a checkpoint."""

    name: str
    sha256: str
    bytes: int

    def damage(self, base: Path) -> str:
        """Return what is wrong with the file, '' if it is sound. An OSError says that it cannot be read right now."""
        path = base / self.name
        try:
            with opened(path) as file:
                size = os.fstat(file.fileno()).st_size
            if size != self.bytes:
                return f"{self.name} has {size} bytes, not {self.bytes}"
            return "" if digest(path) == self.sha256 else f"the SHA-256 of {self.name} does not match"
        except MISSING:
            return f"{self.name} is missing"
        except Damaged as error:
            return error.what


Placed = tuple[Path, File]
"""a file and its folder"""


@dataclass(frozen=True)
class Progress:
    """The results of a run so far, next to its state."""

    best: float | None = None
    """the best test metric"""
    last: Mapping[str, Any] | None = None
    """the last round's record, as in metrics.jsonl"""


@dataclass(frozen=True)
class Fingerprint:
    """What a checkpoint and the run that resumes from it must have in common."""

    config: Mapping[str, Any]
    """every knob, by its dotted name"""
    prints: Mapping[str, str]
    """SHA-256 of the data set with its split, the model and the rules, by these names"""


@dataclass(frozen=True)
class FoundCheckpoint:
    """A sound checkpoint."""

    round: int
    ranks: int
    about: Manifest
    slices: tuple[Path, ...]
    memories: tuple[Path, ...]
    """oldest first: the last file that has a client counts"""

    @property
    def progress(self) -> Progress:
        """Return the results up to the checkpoint."""
        return Progress(self.about["best"], self.about["last"])


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with opened(path) as file:
        sha = hashlib.sha256()
        while block := file.read(1 << 20):
            sha.update(block)
    return sha.hexdigest()


def sealed(about: Mapping[str, Any]) -> str:
    """Return a manifest as text, with a SHA-256 of the rest in it."""
    body = json.dumps(about, sort_keys=True)
    return json.dumps({**about, "sha256": hashlib.sha256(body.encode()).hexdigest()}, sort_keys=True) + "\n"


def read_sealed(path: Path) -> Manifest:
    """Return a manifest whose seal matches; raise a `UserError` for one that needs a newer fedmpi. The seal is the same
    in every format, so a damaged format number is not taken for a newer one."""
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


def read_manifest(path: Path) -> tuple[Manifest, list[Placed]]:
    """Return the manifest of a checkpoint and its files, each with its folder: per rank the slice, then memories."""
    about = read_sealed(path / MANIFEST)
    if path.name != f"round-{about['round']}":
        raise Damaged(path / MANIFEST, f"is that of round {about['round']}, and its folder is {path.name}")
    if len(about["parts"]) != about["ranks"]:
        raise Damaged(path / MANIFEST, f"has {about['ranks']} ranks and {len(about['parts'])} parts")
    files: list[Placed] = []
    for rank, sha in enumerate(about["parts"]):
        list_path = path / f"part-{rank}.json"
        raw = load_file(list_path)
        if hashlib.sha256(raw).hexdigest() != sha:
            raise Damaged(list_path, "does not match its SHA-256")
        part = checked(list_path, parse(list_path, raw), Part)
        files.append((path, as_file(part["slice"])))
        files += [(path.parent / CLIENTS, as_file(record)) for record in part["clients"]]
    return about, files


def load_file(path: Path) -> bytes:
    """Return the content of a small file; a missing one is `Damaged`. An OSError says that it cannot be read right
    now."""
    try:
        return load(path)
    except MISSING:
        raise Damaged(path, "is missing") from None


def as_file(record: FileRecord) -> File:
    """Return the file that a record describes."""
    return File(record["name"], record["sha256"], record["bytes"])


def rounds_in(base: Path) -> list[int]:
    """Return the rounds of the checkpoints in a folder, newest first."""
    names = [path.name for path in base.iterdir()] if base.is_dir() else []
    return sorted((int(match[1]) for name in names if (match := NAME.fullmatch(name))), reverse=True)


def set_aside(path: Path) -> None:
    """Rename something damaged, so that it can still be inspected."""
    os.rename(path, path.with_name(f"damaged-{path.name}-{time.time_ns()}"))


def discard(path: Path) -> None:
    """Remove a checkpoint; it is renamed first, because a half removed one must not look like a checkpoint."""
    if path.exists():
        aside = path.with_name(f".old-{path.name}-{time.time_ns()}")
        os.rename(path, aside)
        folder.remove(aside)
