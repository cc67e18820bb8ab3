"""The files of a checkpoint: their names, the manifest with its seal, and what a file must be to count as sound."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
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
class Progress:
    """The results of a run so far: the best test metric, and the last round's record, as in metrics.jsonl."""

    best: float | None = None
    last: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Fingerprint:
    """What a checkpoint and the run that resumes from it must have in common: every knob by its dotted name, and the
    SHA-256 of the data set with its split, the model and the rules, by these names."""

    config: Mapping[str, Any]
    prints: Mapping[str, str]


@dataclass(frozen=True)
class FoundCheckpoint:
    """A sound checkpoint. `memories` are oldest first: the last file that has a client counts."""

    about: Manifest
    slices: Sequence[Path]
    memories: Sequence[Path]

    @property
    def round(self) -> int:
        """Return the round that it was saved after."""
        return self.about["round"]

    @property
    def ranks(self) -> int:
        """Return how many ranks have saved it."""
        return self.about["ranks"]


def sha256(content: bytes) -> str:
    """Return the SHA-256 of bytes."""
    return hashlib.sha256(content).hexdigest()


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with opened(path) as file:
        sha = hashlib.sha256()
        while block := file.read(1 << 20):
            sha.update(block)
    return sha.hexdigest()


def file_damage(path: Path, wanted: FileRecord) -> str:
    """Return what is wrong with a file, '' if it is sound. An OSError says that it cannot be read right now."""
    try:
        with opened(path) as file:
            size = os.fstat(file.fileno()).st_size
        if size != wanted["bytes"]:
            return f"{path.name} has {size} bytes, not {wanted['bytes']}"
        return "" if digest(path) == wanted["sha256"] else f"the SHA-256 of {path.name} does not match"
    except MISSING:
        return f"{path.name} is missing"
    except Damaged as error:
        return error.what


def sealed(about: Mapping[str, Any]) -> str:
    """Return a manifest as text, with a SHA-256 of the rest in it."""
    sha = sha256(json.dumps(about, sort_keys=True).encode())
    return json.dumps({**about, "sha256": sha}, sort_keys=True) + "\n"


def read_sealed(path: Path) -> Manifest:
    """Return a manifest whose seal matches; raise a `UserError` for one that needs a newer fedmpi. The seal is the same
    in every format, so a damaged format number is not taken for a newer one."""
    about = parse(path, load_file(path))
    if not isinstance(about, dict):
        raise Damaged(path, "is no manifest")
    sha = about.pop("sha256", None)
    if sha256(json.dumps(about, sort_keys=True).encode()) != sha:
        raise Damaged(path, "does not match its SHA-256")
    if isinstance(about.get("format"), int) and about["format"] > FORMAT:
        raise UserError(
            f"{path} has format {about['format']}, written by fedmpi {about.get('fedmpi')}; this is fedmpi "
            f"{__version__}, which reads up to format {FORMAT}: use the newer one, or --resume never to start over"
        )
    return checked(path, about, Manifest)


def read_manifest(path: Path) -> tuple[Manifest, list[tuple[Path, FileRecord]]]:
    """Return the manifest of a checkpoint and its files: per rank the slice, then memories."""
    about = read_sealed(path / MANIFEST)
    if path.name != f"round-{about['round']}":
        raise Damaged(path / MANIFEST, f"is that of round {about['round']}, and its folder is {path.name}")
    if len(about["parts"]) != about["ranks"]:
        raise Damaged(path / MANIFEST, f"has {about['ranks']} ranks and {len(about['parts'])} parts")
    files: list[tuple[Path, FileRecord]] = []
    for rank, sha in enumerate(about["parts"]):
        list_path = path / f"part-{rank}.json"
        raw = load_file(list_path)
        if sha256(raw) != sha:
            raise Damaged(list_path, "does not match its SHA-256")
        part = checked(list_path, parse(list_path, raw), Part)
        files.append((path / part["slice"]["name"], part["slice"]))
        files += [(path.parent / CLIENTS / one["name"], one) for one in part["clients"]]
    return about, files


def load_file(path: Path) -> bytes:
    """Return the content of a small file; a missing one is `Damaged`."""
    try:
        return load(path)
    except MISSING:
        raise Damaged(path, "is missing") from None


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
