"""What sinks have in common: what they are told, what they must do, and who a run is in a tool that knows runs."""

from __future__ import annotations

import hashlib
import importlib
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ... import __version__
from ...errors import UserError, reason
from ..config import FREE
from ..folder import read_json, write

ID = "fedmpi.json"  # in a tool's folder: who the run is there


@dataclass(frozen=True)
class About:
    """What a sink is told of the run when it is opened."""

    folder: Path
    done: int = 0
    """the round that the run goes on after"""
    config: Mapping[str, Any] = field(default_factory=dict)
    """every knob by its dotted name"""
    records: Sequence[dict[str, Any]] = ()
    """the rounds up to `done`"""

    @property
    def name(self) -> str:
        """What the run is called: as its folder."""
        return self.folder.resolve().name

    @property
    def tags(self) -> dict[str, str]:
        """What one looks for runs by."""
        asked = {name: str(self.config[name]) for name in ("algorithm", "mask", "data", "seed") if name in self.config}
        return asked | {"fedmpi": __version__}


class Sink(Protocol):
    """Somewhere that takes a round's metrics."""

    def write(self, record: dict[str, Any]) -> None: ...

    def close(self, how: str) -> None:
        """The end of the run, or of this life of it; `how` is finished, stopped or failed."""


class Tool(Sink, Protocol):
    """A sink that may have rounds of earlier lives."""

    last: int
    """the last round that it has"""


def scalars(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers in a record, those of what is nested with a slash in their names."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            yield f"{prefix}{name}", value


def known_id(home: Path) -> str | None:
    """The id under which a tool knows the run, from the tool's folder; None where it has not been told of it."""
    id = read_json(home / ID).get("id")
    return id if isinstance(id, str) and id.isalnum() else None


def settle_id(home: Path, about: About, last: int) -> str:
    """The id under which a tool is to know the run from now on: the one that it knows, but a new one where rounds that
    it has, up to `last`, will be trained again with other knobs."""
    trained = {name: value for name, value in about.config.items() if not name.startswith((*FREE, "rounds"))}
    knobs = hashlib.sha256(json.dumps(trained, sort_keys=True).encode()).hexdigest()
    id, same = known_id(home), read_json(home / ID).get("knobs") == knobs
    id = id if id and (same or last <= about.done) else secrets.token_hex(8)
    write(home / ID, json.dumps({"id": id, "knobs": knobs}) + "\n")
    return id


def imported(sink: str, module: str) -> Any:
    """A module that a sink needs."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # whatever a damaged installation raises
        raise missing(sink, module, reason(error)) from error


def missing(sink: str, package: str, why: str) -> UserError:
    """The error for a package that a sink needs."""
    return UserError(
        f"--log_to {sink} needs the package {package}, which cannot be imported ({why}); pip install 'fedmpi[{sink}]', "
        "or leave it out"
    )
