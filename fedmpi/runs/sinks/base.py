"""The interface of sinks, what they know of the run, and the identity of a run in a tool that has runs."""

from __future__ import annotations

import hashlib
import importlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ... import __version__
from ...errors import UserError, reason
from ..config import FREE, flat
from ..folder import append, read_json, write

ID = "fedmpi.json"  # in a tool's folder: the id of the run in the tool
MARKS = "rounds.txt"  # in a tool's folder: an id and a round per line; the last line counts


@dataclass(frozen=True)
class About:
    """What a sink knows of the run when it is opened."""

    folder: Path
    done: int = 0
    """the round that the run resumes after"""
    config: Mapping[str, Any] = field(default_factory=dict)
    """every knob by its dotted name"""
    records: Sequence[dict[str, Any]] = ()
    """the rounds up to `done`"""

    @property
    def name(self) -> str:
        """Return the folder's name."""
        return self.folder.resolve().name

    @property
    def tags(self) -> dict[str, str]:
        """Return the tags to search runs by."""
        asked = {name: str(self.config[name]) for name in ("algorithm", "mask", "data", "seed") if name in self.config}
        return asked | {"fedmpi": __version__}


class Sink:
    """A destination for the metrics of each round. It may already have rounds of earlier starts."""

    last = 0
    """the last round that it has"""

    def mark(self, round: int) -> None:
        """Record that the sink has the rounds up to this one."""
        self.last = round

    def add(self, numbers: dict[str, Any], step: int) -> None:
        """Log numbers at a step: those of a round."""
        raise NotImplementedError

    def end(self, record: dict[str, Any], more: dict[str, Any]) -> None:
        """Add the measurements at the end of the run, `more`, to the last round, whose record is now `record`."""
        self.add(more, record["round"])

    def close(self, how: str) -> None:
        """Close the run, or this start of it; `how` is finished, stopped or failed."""


class SinkWithRuns(Sink):
    """A tool that has runs. The id of a run there, and the last round logged, are kept in files of the tool's folder.

    The id stays the same, unless rounds that the tool already has will be trained again with other knobs."""

    def __init__(self, home: Path, about: About) -> None:
        home.mkdir(mode=0o700, exist_ok=True)
        self.marks = home / MARKS
        trained = {name: value for name, value in about.config.items() if not name.startswith((*FREE, "rounds"))}
        knobs = hashlib.sha256(json.dumps(trained, sort_keys=True).encode()).hexdigest()
        saved = read_json(home / ID)
        self.id = str(saved.get("id", ""))
        last = self.marked(otherwise=about.done)
        self.new = not self.id.isalnum() or (saved.get("knobs") != knobs and last > about.done)
        """whether the tool has to start a new run"""
        if self.new:
            self.id, last = secrets.token_hex(8), 0
        write(home / ID, json.dumps({"id": self.id, "knobs": knobs}) + "\n")
        self.mark(last)

    def marked(self, otherwise: int) -> int:
        """Return the last marked round, 0 if there is none; `otherwise` without a file of marks (older versions)."""
        if not self.marks.exists():
            return otherwise
        words = self.marks.read_text(encoding="utf-8", errors="replace").split("\n")[-2:-1]
        id, _, last = "".join(words).partition(" ")
        return int(last) if id == self.id and last.isdecimal() else 0

    def mark(self, round: int) -> None:
        super().mark(round)
        append(self.marks, f"{self.id} {round}")


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in a record by name; names of nested ones are joined by a slash."""
    return {name: value for name, value in flat(record, "/").items() if isinstance(value, int | float)}


def imported(sink: str, module: str) -> Any:
    """Import a module that a sink needs, and return it."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # whatever a damaged installation raises
        raise missing(sink, module, reason(error)) from error


def missing(sink: str, package: str, why: str) -> UserError:
    """Return the error for a missing package of a sink."""
    return UserError(
        f"--log_to {sink} needs the package {package}, which cannot be imported ({why}); pip install 'fedmpi[{sink}]', "
        "or leave it out"
    )
