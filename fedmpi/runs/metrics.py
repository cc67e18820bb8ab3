"""Read metrics.jsonl: for the run that resumes, for reports and tables, and for the status.

A line is a round. It is read line by line, so that a file of any size takes no more memory than its rounds. Nothing
here imports torch.
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

SIDES = "clients_"  # in front of the metric's name: the record of --evaluate clients
REQUIRED = ("clients", "train_loss", "kept", "agreement", "bytes_sent", "seconds", "dropped_clients")
"""what every version that writes checkpoints has in each round, beside the test metric"""

Record = dict[str, Any]


class RoundOptional(TypedDict, total=False):
    clients: float | None
    train_loss: float | None
    kept: float | None
    agreement: float | None
    bytes_sent: float | None
    client_bytes_up: float | None
    client_bytes_down: float | None
    dropped: float | None
    dropped_clients: list[int]
    below_tau: float | None
    seconds: Numbers | None
    layers: dict[str, float | None | Numbers] | None


class Round(RoundOptional):
    """A line of metrics.jsonl; it also has test_METRIC, and what --evaluate adds."""

    round: Annotated[int, range(1, 2**53)]


@dataclass(frozen=True)
class Line:
    """One line of the file."""

    number: int
    record: Record | None
    """the round; None where the line is none"""
    wrong: str = ""
    """what a line that is whole has that a round has not; '' also where it was cut short"""
    torn: bool = False
    """whether it has no end: the last line, of a run that is writing it or was killed then"""


def read_lines(folder: Path, tail: int | None = None) -> Iterator[Line]:
    """Return the lines of a run's metrics, or of the last `tail` bytes; none where there is no file."""
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
    """Return what is wrong with a round; '' if it has its number, and numbers where they are read."""
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
    """Return the rounds up to `done` for a run that resumes. Rounds may be absent, as lines may be cut short or gone;
    but one that stands twice, out of order or with other than numbers is `Damaged`: the history would be wrong."""
    found: list[Record] = []
    last = 0
    for line in read_lines(folder) if done else ():
        if line.record is None and not line.wrong:
            continue  # cut short, or overwritten
        wrong = line.wrong or incomplete(line.record or {}, last)
        if line.record is None or wrong:
            cure = "restore the file from a copy, remove it to resume without these metrics, or start over with "
            raise Damaged(folder / METRICS, f"is damaged: line {line.number} {wrong}", f"{cure}--resume never")
        last = line.record["round"]
        if last <= done:
            found.append(line.record)
    return found


def with_last(records: list[Record], last: Record) -> list[Record]:
    """Return the rounds with the last one, as a checkpoint has it, where metrics.jsonl lacks that."""
    before = records[-1]["round"] if records else 0
    return [*records, last] if last and not (trouble(last) or incomplete(last, before)) else records


def incomplete(record: Record, last: int) -> str:
    """Return why a round cannot follow that of number `last`; '' if it can."""
    if record["round"] <= last:
        return f"has round {record['round']} after round {last}"
    missing = [name for name in REQUIRED if name not in record or (name == "seconds" and record[name] is None)]
    if not any(name.startswith("test_") and name != "test_loss" for name in record):
        missing.append("test_METRIC")
    return f"has no '{missing[0]}'" if missing else ""


def lacking(records: Iterable[Record], done: int) -> str:
    """Return which of the rounds up to `done` are not there, in words; '' if all are."""
    there = {record["round"] for record in records}
    absent = [t for t in range(1, done + 1) if t not in there]
    spans = [[t for _, t in run] for _, run in groupby(enumerate(absent), lambda pair: pair[1] - pair[0])]
    texts = [str(span[0]) if len(span) == 1 else f"{span[0]} to {span[-1]}" for span in spans]
    if len(texts) > 5:
        texts = [*texts[:5], f"{len(absent) - sum(map(len, spans[:5]))} more"]
    return ("rounds " if len(absent) > 1 else "round ") + ", ".join(texts) if texts else ""
