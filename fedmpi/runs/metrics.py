"""Read metrics.jsonl, for resuming, reports, tables and the status.

Each line is a round. The file is read line by line, so that it takes no more memory than its rounds. Nothing here
imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, TypedDict

from .folder import METRICS
from .schema import WHOLE, Damaged, Numbers, fault, lines, parse

SIDES = "clients_"  # prefix of the metric's name in the record of --evaluate clients
REQUIRED = ("clients", "train_loss", "kept", "agreement", "bytes_sent", "seconds", "dropped_clients")
"""fields of each round, besides the test metric, in all versions that write checkpoints"""

Record = dict[str, Any]


class RoundOptional(TypedDict, total=False):
    """The fields of a line of metrics.jsonl that may be absent."""

    clients: float | None
    train_loss: float | None
    kept: float | None
    agreement: float | None
    bytes_sent: float | None
    bytes_between_nodes: float | None
    client_bytes_up: float | None
    client_bytes_down: float | None
    dropped: float | None
    dropped_clients: list[int]
    below_tau: float | None
    seconds: Numbers | None
    layers: dict[str, float | None | Numbers] | None


class Round(RoundOptional):
    """A line of metrics.jsonl; it also has test_METRIC and the measurements of --evaluate."""

    round: Annotated[int, range(1, 2**53)]


@dataclass(frozen=True)
class Line:
    """One line of the file."""

    number: int
    record: Record | None
    """the round; None if the line is not a valid one"""
    wrong: str = ""
    """what is wrong with a complete line; '' if nothing is, or if it is truncated"""
    torn: bool = False
    """whether its line break is missing: the run is writing it, or was killed meanwhile"""


def read_lines(folder: Path, tail: int | None = None) -> Iterator[Line]:
    """Yield the lines of a run's metrics, or of their last `tail` bytes; none if there is no file."""
    path = folder / METRICS
    for number, raw in enumerate(lines(path, tail), 1):
        try:
            found = parse(path, raw)
        except Damaged:
            found = None
        if not isinstance(found, dict):
            yield Line(number, None, torn=not raw.endswith(b"\n"))
        elif wrong := trouble(found):
            yield Line(number, None, wrong)
        else:
            yield Line(number, {key: finite(value) for key, value in found.items()})


def trouble(record: Record) -> str:
    """Return what is wrong with a record; '' if it has a round number and the fields that are read are numbers."""
    if found := fault(record, Round, WHOLE):
        return found
    for key, value in record.items():
        kind = float if key.startswith(("test_", "train_")) else float | Numbers if key.startswith(SIDES) else Any
        if value is not None and (found := fault(value, kind, f"'{key}'")):
            return found
    return ""


def finite(value: Any) -> Any:
    """Return the value with None for numbers that are not finite, which older versions may have written as NaN."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def history(folder: Path, done: int) -> list[Record]:
    """Return the rounds up to `done`, to resume a run. Rounds may be missing, because lines may be truncated or lost.
    Raise `Damaged` if a round is duplicated, out of order or invalid: the history would be wrong."""
    found: list[Record] = []
    last = 0
    for line in read_lines(folder) if done else ():
        if line.record is None and not line.wrong:
            continue  # truncated or overwritten
        wrong = line.wrong or incomplete(line.record or {}, last)
        if line.record is None or wrong:
            fix = "restore the file from a copy, remove it to resume without these metrics, or start over with "
            raise Damaged(folder / METRICS, f"is damaged: line {line.number} {wrong}", f"{fix}--resume never")
        last = line.record["round"]
        if last <= done:
            found.append(line.record)
    return found


def with_last(records: list[Record], last: Record) -> list[Record]:
    """Return the rounds, with the last one of the checkpoint appended if metrics.jsonl lacks it."""
    before = records[-1]["round"] if records else 0
    return [*records, last] if last and not (trouble(last) or incomplete(last, before)) else records


def incomplete(record: Record, last: int) -> str:
    """Return why a record cannot follow that of round `last`; '' if it can."""
    if record["round"] <= last:
        return f"has round {record['round']} after round {last}"
    missing = [name for name in REQUIRED if name not in record or (name == "seconds" and record[name] is None)]
    if not any(name.startswith("test_") and name != "test_loss" for name in record):
        missing.append("test_METRIC")
    return f"has no '{missing[0]}'" if missing else ""


def lacking(records: Iterable[Record], done: int) -> str:
    """Return which of the rounds up to `done` are missing, as text; '' if none is."""
    present = {record["round"] for record in records}
    absent = [t for t in range(1, done + 1) if t not in present]
    spans = [[t for _, t in run] for _, run in groupby(enumerate(absent), lambda pair: pair[1] - pair[0])]
    texts = [str(span[0]) if len(span) == 1 else f"{span[0]} to {span[-1]}" for span in spans]
    if len(texts) > 5:
        texts = [*texts[:5], f"{len(absent) - sum(map(len, spans[:5]))} more"]
    return ("rounds " if len(absent) > 1 else "round ") + ", ".join(texts) if texts else ""
