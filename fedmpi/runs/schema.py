"""Read the records of a run folder: regular files only, bounded in size and nesting, checked against a schema.

A schema is a TypedDict. Keys that some version does not write are in a base class that is not `total`; unknown keys are
ignored, so that versions read each other's folders. A file that is not what a run writes is `Damaged`, one that cannot
be read a `FileError`: both are faults (exit code 1), and both name the file and what to do.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import UnionType
from typing import (
    Annotated,
    Any,
    BinaryIO,
    TypedDict,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import yaml

from ..errors import FileError, one_line, reason

MOST_BYTES = 1 << 24  # of a record
MOST_LINES_BYTES = 1 << 28  # of a file of lines: a hundred thousand rounds with some kB each
LONGEST = 1 << 22  # of a line
DEEPEST = 16  # levels of nesting; a run writes 4
LOADER: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
WAY_OUT = "restore it from a copy, or move it away"

T = TypeVar("T")


class Damaged(FileError):
    """A file of a run folder that is not what a run writes there."""

    def __init__(self, path: Path, what: str, way_out: str = WAY_OUT) -> None:
        super().__init__(f"{path} {what}; {way_out}")
        self.what = f"{path.name} {what}"
        """the message without the folder and the way out"""


# ------------------------------------------------------------------------------------------------------- The records

Count = Annotated[int, range(2**53)]
Numbers = dict[str, float | None]
Plain = Annotated[str, re.compile(r"[\w-][\w.-]*", re.ASCII)]  # a file's name, never a path
JobId = Annotated[str, re.compile(r"\d+([_+]\d+)?", re.ASCII)]  # passed to kill and scancel


class Knobs(TypedDict):
    """What every run reads of a checkpoint's configuration."""

    threads: Annotated[int, range(1, 2**16)]


class Manifest(TypedDict):
    """checkpoints/round-N/manifest.json"""

    torch: str
    round: Annotated[int, range(1, 2**53)]
    ranks: Annotated[int, range(1, 2**31)]
    vectors: list[str]
    ints: list[int]
    config: Knobs
    prints: dict[str, str]
    best: float | None
    last: dict[str, Any]
    parts: list[str]


class FileRecord(TypedDict):
    """A file in a part list."""

    name: Plain
    sha256: str
    bytes: Count


class Part(TypedDict):
    """checkpoints/round-N/part-R.json"""

    slice: FileRecord
    clients: list[FileRecord]


class FinishedOptional(TypedDict, total=False):
    test_loss: float | None
    model_sha256: str
    fedmpi: str


class Finished(FinishedOptional):
    """finished.json; it also has test_METRIC and best_test_METRIC."""

    rounds: Count


class StoppedOptional(TypedDict, total=False):
    time: float
    launch: list[str]


class Stopped(StoppedOptional):
    """stopped.json"""

    round: Count
    why: str


class Owner(TypedDict, total=False):
    """lock"""

    host: str
    pid: int
    launcher: str
    ranks: int
    job: JobId | None
    element: str | None
    since: float


class Start(TypedDict, total=False):
    """A line of starts.jsonl."""

    time: float
    round: Count
    ranks: int
    launcher: str
    host: str
    job: JobId | None
    element: str | None
    restart: int
    launch: list[str]


class Restart(TypedDict, total=False):
    """A line of lives.jsonl: how a start of a job ended, and whether the job is restarted."""

    time: float
    job: JobId | None
    element: str | None
    code: int
    round: Count
    again: bool
    why: str


class SubmittedOptional(TypedDict, total=False):
    executor: str
    host: str
    ranks: int
    logs: str


class Submitted(SubmittedOptional):
    """job.json"""

    job: JobId


class Cancelled(TypedDict):
    """cancelled"""

    time: float


class Goal(TypedDict, total=False):
    """The objective in partition.json."""

    metric: str
    rises: bool


class Dealt(TypedDict, total=False):
    """partition.json; its histogram is checked by the code that draws it."""

    objective: Goal
    clients: Count
    samples: Count
    sha256: str


class Environment(TypedDict, total=False):
    """environment.json"""

    versions: dict[str, Any]
    size: int


class Verdict(TypedDict, total=False):
    """The results of an attacker."""

    accuracy: float | None
    auc: float | None
    advantage: float | None


class Control(TypedDict, total=False):
    """The attackers on the model before training."""

    logistic: Verdict | None
    loss: Verdict | None


class Attack(Control, total=False):
    """attack.json"""

    judged: Count | None
    control: Control | None


# ---------------------------------------------------------------------------------------------------------- Checking

WORDS = {bool: "true or false", str: "a text", int: "a whole number", float: "a number", list: "a list"}
WORDS |= {dict: "an object", type(None): "null"}


def fault(value: Any, kind: Any, where: str) -> str:
    """Return what is wrong with a value as JSON has it, by the type that it should have; '' if nothing is."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        return ""
    if origin in (Union, UnionType):
        each = [fault(value, one, where) for one in parts]
        return "" if "" in each else each[0]
    if origin is Annotated:
        base, rule = parts
        if found := fault(value, base, where):  # first: `in` takes for ever for a fraction and a long range
            return found
        fits = value in rule if isinstance(rule, range) else rule.fullmatch(value)
        return "" if fits else f"has {short(value)} for {where}"
    shape = dict if is_typeddict(kind) else origin or kind
    accepted = (int, float) if shape is float else shape
    sound = isinstance(value, accepted) and (shape is bool or not isinstance(value, bool))
    if not sound or (type(value) is int and abs(value) >= 2**63):
        return f"has {short(value)} for {where}, not {WORDS[shape]}"
    inside: Any = ()
    if is_typeddict(kind):
        if missing := sorted(kind.__required_keys__ - value.keys()):
            return f"has no '{missing[0]}'" + (f" in {where}" if where != WHOLE else "")
        inside = ((value[key], one, f"'{key}'") for key, one in hints(kind).items() if key in value)
    elif origin is list:
        inside = ((one, parts[0], f"an element of {where}") for one in value)
    elif origin is dict:
        inside = ((one, parts[1], f"'{short(key)}' in {where}") for key, one in value.items())
    return next(filter(None, (fault(*one) for one in inside)), "")


WHOLE = "its content"


@cache
def hints(kind: Any) -> dict[str, Any]:
    """Return the keys of a TypedDict with their types."""
    return get_type_hints(kind, include_extras=True)


def short(value: Any) -> str:
    """Return a value in a few characters, for an error message."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


# ----------------------------------------------------------------------------------------------------------- Reading


def opened(path: Path) -> BinaryIO:
    """Open a regular file, or a link to one; anything else is `Damaged`. A pipe is not waited for."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENODEV):  # a link to itself, a socket, a device
            raise Damaged(path, f"is no regular file ({error.strerror})") from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise Damaged(path, "is no regular file")
    return os.fdopen(handle, "rb")


def load(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of a small file. An OSError says that it cannot be read right now."""
    with opened(path) as file:
        check_size(path, file, most)
        return file.read(most)


def check_size(path: Path, file: BinaryIO, most: int) -> None:
    """Refuse a file that is larger than any that a run writes."""
    size = os.fstat(file.fileno()).st_size
    if size > most:
        raise Damaged(path, f"has {size:,} bytes, and a run writes at most {most:,}")


def parse(path: Path, raw: bytes) -> Any:
    """Return the JSON in a file's bytes; `Damaged` if it is none, or nested too deeply."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        raise Damaged(path, "is no JSON") from None
    if raw.count(b"{") + raw.count(b"[") > DEEPEST and deeper(found, DEEPEST):
        raise Damaged(path, f"is nested more than {DEEPEST} levels deep")
    return found


def deeper(value: Any, levels: int) -> bool:
    """Return whether a value as JSON has it is nested more than so many levels deep."""
    if not isinstance(value, list | dict):
        return False
    return levels == 0 or any(deeper(one, levels - 1) for one in (value.values() if isinstance(value, dict) else value))


def checked(path: Path, value: Any, kind: type[T]) -> T:
    """Return a value that fits its schema; else raise `Damaged`."""
    if trouble := fault(value, kind, WHOLE):
        raise Damaged(path, trouble)
    found: T = value
    return found


def read(path: Path, kind: type[T], most: int = MOST_BYTES) -> T | None:
    """Return the record in a file, None if there is no file. Raise `Damaged` for one that is not what a run writes, a
    `FileError` if the disk fails."""
    with faults(path):
        try:
            raw = load(path, most)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return checked(path, parse(path, raw), kind)


def read_yaml(path: Path) -> Any:
    """Return the configuration in a run folder; `Damaged` if it is no YAML."""
    with faults(path):
        try:
            return load_yaml(load(path).decode())
        except (ValueError, yaml.YAMLError) as error:
            raise Damaged(path, f"is no YAML ({one_line(error)})") from None


def load_yaml(text: str) -> Any:
    """Return the content of YAML without aliases and duplicate keys, else raise a YAMLError. Use libyaml if it is
    installed, as a report may read a thousand; deep nesting would overrun its stack, so that is refused first."""
    depth = 0
    for event in yaml.parse(text, Loader=LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise yaml.YAMLError(f"nested more than {DEEPEST} levels deep")
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError(f"alias *{event.anchor} is not supported")
    refuse_duplicates(yaml.compose(text, Loader=LOADER))
    return yaml.load(text, Loader=LOADER)


def refuse_duplicates(node: yaml.Node | None) -> None:
    """Refuse a key that appears twice in one group: YAML would silently drop the first."""
    inner = node.value if isinstance(node, yaml.SequenceNode) else []
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value]
        inner = [value for _, value in node.value]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise yaml.YAMLError(f"duplicate key '{twice}'")
    for one in inner:
        refuse_duplicates(one)


@contextmanager
def faults(path: Path) -> Iterator[None]:
    """Turn an OSError about a file of a run folder into a `FileError`."""
    try:
        yield
    except OSError as error:
        raise FileError(
            f"{path} cannot be read ({reason(error)}); nothing was changed: see to that and try again"
        ) from error


def lines(path: Path, tail: int | None = None) -> Iterator[bytes]:
    """Yield the lines of a file, or those of its last `tail` bytes; none if there is no file."""
    with faults(path):
        try:
            file = opened(path)
        except (FileNotFoundError, NotADirectoryError):
            return
        with file:
            if tail is None:
                check_size(path, file, MOST_LINES_BYTES)
            else:
                file.seek(max(0, os.fstat(file.fileno()).st_size - tail))
            for number, line in enumerate(iter(partial(file.readline, LONGEST), b""), 1):
                if len(line) == LONGEST:
                    raise Damaged(path, f"has a line {number} of more than {LONGEST:,} bytes")
                yield line


def records(path: Path, kind: type[T]) -> list[T]:
    """Return the sound records of a file of lines; a line that was cut short by a kill is left out."""
    found = []
    for line in lines(path):
        try:
            found.append(checked(path, parse(path, line), kind))
        except Damaged:
            continue
    return found
