"""Log a run: one line per round and a progress bar on rank 0, `metrics.jsonl`, and other tools on request (sinks/).

Metrics are JSON lines. Each is written at once and flushed, so that a run can be followed, and a killed one keeps its
metrics.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from dataclasses import fields as fields_of
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from ..errors import UserError, silence
from ..rounds import Report
from ..schedules import read_names
from .folder import METRICS, append, write
from .metrics import Record, finite, lacking, read_lines
from .sinks import SINKS, About, Guarded, Sink, need
from .sinks.base import scalars
from .stop import Stopped

WIDTH = 100  # columns of printed lines
LEAST_FIRST = ("kept", "agree", "train", "loss", "below", "others", "part")  # order of dropping from long lines
OWN = "own:"  # prefix of fields of user-defined measurements
PLAIN: Mapping[str, str] = {}
COLOURS = {"round": "1", "metric": "32", "dropped": "33", "time": "2"}  # bold, green, yellow, dim

log = logging.getLogger("fedmpi")


class JsonLines(Sink):
    """The sink that writes metrics.jsonl. `records`: the rounds up to `done`, of earlier starts."""

    def __init__(self, folder: Path, done: int, records: Sequence[Record]) -> None:
        self.path = folder / METRICS
        if absent := lacking(records, done):
            kept = ""
            if any(line.record is None for line in read_lines(folder)):
                copy = folder / f"{METRICS}.damaged-{len(list(folder.glob(f'{METRICS}*')))}"
                os.replace(self.path, copy)
                kept = f"; the old file is kept as {copy.name}"
            log.warning("%s lacks %s%s; the model is not affected", self.path, absent, kept)
        write(self.path, "".join(json.dumps(record) + "\n" for record in records))

    def add(self, numbers: Record, step: int) -> None:
        if not self.path.exists() and self.path.parent.exists():  # if the folder is gone, `append` raises
            log.warning("%s was removed: a new file has the rounds from %d on", self.path, step)
        append(self.path, json.dumps(numbers, allow_nan=False))

    def end(self, record: Record, more: Record) -> None:
        """Replace the record of the last round."""
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True) if self.path.exists() else []
        write(self.path, "".join(lines[:-1]) + json.dumps(record, allow_nan=False) + "\n")


def sink_names(names: str) -> list[str]:
    """Return the sinks in a comma-separated list, without duplicates; `none` is the empty list. Refuse sinks that are
    not installed."""
    wanted = read_names("sink (--log_to)", names, SINKS)
    for name in wanted:
        need(name)
    return wanted


def record(report: Report) -> Record:
    """Return a report as a record of metrics.jsonl."""
    values = asdict(report)
    values["dropped_clients"] = list(values.pop("dropped"))
    values["dropped"] = len(values["dropped_clients"])
    values[f"test_{values.pop('metric')}"] = values.pop("test_metric")
    values["seconds"].setdefault("eval", 0.0)
    values |= values.pop("measures")
    return {name: finite(value) for name, value in values.items()}


def report_of(record: Record) -> Report:
    """Return the report that a record was made from."""
    metric = next(name for name in record if name.startswith("test_") and name != "test_loss")
    known = {field.name for field in fields_of(Report)} - {"dropped", "metric", "test_metric", "measures"}
    ours = known | {"dropped", "dropped_clients", metric}
    return Report(
        **{name: value for name, value in record.items() if name in known},
        dropped=tuple(record["dropped_clients"]),
        test_metric=record[metric],
        metric=metric.removeprefix("test_"),
        measures={name: value for name, value in record.items() if name not in ours},
    )


def fields(report: Report, rounds: int) -> dict[str, str]:
    """Return the fields of a round's line as short texts by name."""
    name = shortest(report.metric)
    found = {"round": f"round {report.round:>{len(str(rounds))}}/{rounds}"}
    if report.test_metric is not None:
        found |= {"metric": f"{name} {number(report.test_metric)}", "loss": f"loss {number(report.test_loss)}"}
    found["train"] = f"train {number(report.train_loss)}"
    found |= {"kept": f"kept {report.kept:.2f}", "agree": f"agree {report.agreement:.2f}"}
    found |= measured(report, name)
    found |= {"dropped": f"dropped {len(report.dropped)}"} if report.dropped else {}
    return found | {"time": duration(sum(report.seconds.values()))}


def measured(report: Report, name: str) -> dict[str, str]:
    """Return the fields of further measurements, under a short word or their own names; `name`: short name of the
    metric. Grouped numbers, such as those per layer, are too many for a line."""
    numbers = scalars(report.measures)
    sides = f"clients_{report.metric}"
    words = {"below_tau": "below", f"train_{report.metric}": f"train-{name}", "train_sample_loss": ""}
    words |= {f"{sides}/participating": "part", f"{sides}/others": "others"}
    known = {word: f"{word} {numbers[key]:.2f}" for key, word in words.items() if word and key in numbers}
    own = {key: value for key, value in numbers.items() if key not in words and "/" not in key}
    return known | {f"{OWN}{key}": f"{shortest(key.removeprefix('test_'))} {number(v)}" for key, v in own.items()}


def shortest(metric: str) -> str:
    """Return a metric's name, shortened for a line."""
    return "acc" if metric == "accuracy" else metric if len(metric) <= 12 else f"{metric[:11]}~"


def number(value: float | None) -> str:
    """Return a loss or metric in at most nine characters; small and large values in scientific notation."""
    if value is None:
        return "-"
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e4 or not math.isfinite(value) else f"{value:.2e}"


def duration(seconds: float) -> str:
    """Return seconds as a short text."""
    return f"{seconds:.2f}s" if seconds < 99.995 else f"{seconds:.0f}s"


def line(report: Report, rounds: int, styles: Mapping[str, str] = PLAIN, hidden: tuple[str, ...] = ()) -> str:
    """Return a round as one line of at most WIDTH columns, without the `hidden` fields. If it is too long, the least
    important fields are dropped. Escape codes of the `styles` take no columns."""
    found = {name: text for name, text in fields(report, rounds).items() if name not in hidden}
    for least in [*(name for name in reversed(found) if name.startswith(OWN)), *LEAST_FIRST]:
        if len("  ".join(found.values())) > WIDTH:
            found.pop(least, None)
    return "  ".join(styled(text, styles.get(name, "")) for name, text in found.items())


def phases(report: Report, several: bool, styles: Mapping[str, str] = PLAIN) -> str:
    """Return the seconds of a round by phase, without a meta step or an evaluation that did not take place, and on a
    single rank without communication."""
    least = {"meta": 1e-9, "eval": 1e-9} | ({} if several else dict.fromkeys(("wait", "reduce", "gather"), 0.005))
    found = [f"{k} {duration(v)}" for k, v in report.seconds.items() if v >= least.get(k, 0)]
    return styled("    " + "  ".join(found), styles.get("time", ""))


def styled(text: str, code: str) -> str:
    """Return a text in an ANSI style; '' is no style."""
    return f"\033[{code}m{text}\033[0m" if code else text


def styles_for(stream: TextIO) -> Mapping[str, str]:
    """Return colours if the stream is a terminal and NO_COLOR (https://no-color.org) is not set."""
    plain = not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return PLAIN if plain else COLOURS


def folded(text: str) -> str:
    """Wrap a text into lines of at most WIDTH columns, broken at spaces."""
    wrap = partial(textwrap.wrap, width=WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return "\n".join("\n".join(wrap(one)) for one in text.splitlines())


class Log:
    """Rank 0's log of a run; on other ranks it does nothing. Without a folder nothing is written. It resumes after
    round `done`, with the `records` of the rounds before. `several`: there is more than one rank; `hidden`: fields of
    a round's line that are the same in every round of this run."""

    def __init__(
        self,
        folder: Path | None,
        rounds: int,
        sinks: list[str],
        speaks: bool,
        quiet: bool = False,
        done: int = 0,
        config: Mapping[str, Any] | None = None,
        records: Sequence[Record] = (),
        verbose: bool = False,
        several: bool = False,
        hidden: tuple[str, ...] = (),
    ) -> None:
        self.rounds, self.speaks = rounds, speaks and not quiet
        self.verbose, self.several, self.hidden = verbose, several, hidden
        self.styles = styles_for(sys.stdout)
        self.sinks: list[Sink] = []
        if speaks and folder is not None:
            self.sinks.append(JsonLines(folder, done, records))
            about = About(folder, done, config or {}, records)
            try:
                for name in sinks:
                    self.sinks.append(Guarded(name, about))
            except UserError:
                self.close("failed")
                raise
        terminal = self.speaks and sys.stderr.isatty()
        self.bar = tqdm(total=rounds, initial=done, unit="round", disable=not terminal, leave=False, dynamic_ncols=True)

    def say(self, text: str) -> None:
        """Print a line to standard output, above the bar. If the pipe is closed, the run continues without output."""
        if not self.speaks:
            return
        try:
            tqdm.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            self.speaks = False
            silence(sys.stdout)

    def round(self, report: Report) -> None:
        """Print and record one round."""
        self.say(line(report, self.rounds, self.styles, self.hidden))
        if self.verbose:
            self.say(phases(report, self.several, self.styles))
        self.bar.update()
        for sink in self.sinks:
            sink.add(record(report), report.round)

    def end(self, report: Report, more: Record) -> None:
        """Add the measurements at the end of the run, `more`, to the record of its last round."""
        for sink in self.sinks:
            sink.end(record(report), finite(more))

    def close(self, how: str) -> None:
        """Close all sinks; `how` is finished, stopped or failed."""
        for sink in self.sinks:
            sink.close(how)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.bar.close()
        self.close("finished" if kind is None else "stopped" if issubclass(kind, Stopped) else "failed")


def set_up(rank: int, size: int) -> None:
    """Send the package's warnings to standard error, prefixed with the rank if there are several."""
    who = f"rank {rank}: " if size > 1 else ""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"%(levelname)s: {who}%(message)s"))
    logger = logging.getLogger("fedmpi")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
