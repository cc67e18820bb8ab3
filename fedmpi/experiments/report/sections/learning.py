"""Curves over rounds: test metric and losses, two sides of one run and their difference, and all further numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ....runs.metrics import Round
from ...measures import client_bytes, mean_of_last, round_seconds, total_bytes
from ...runs import Group, Run, counted
from ...tables import Cell, Table
from ..figures.rows import Row
from ..figures.style import Picture, numbered_style
from ..layout import MOST_PANELS, Placed
from ..page import Absent, Named, Part
from .material import (
    Curve,
    Material,
    Plot,
    by_suffix,
    capitalised,
    dots,
    line,
    mark,
    plot,
    slug,
    summed,
    unit,
)
from .results import mean_cell

MOST_NUMBERS = 24  # further numbers with a figure
STYLES = (numbered_style(0), numbered_style(1, 1, filled=False))
LAST = 10  # rounds whose mean is in a table
Reading = Callable[[Run], Curve]


def learning(material: Material) -> list[Part]:
    """Return the learning curves, per metric."""
    parts: list[Part] = []
    for suffix, placed in by_suffix(material.placed).items():
        metric, smooth = placed[0].group.metric, material.smooth
        score, (name, factor) = f"test_{metric}", unit(metric)
        tested = Plot(f"{slug(metric)}-rounds", f"test {metric} against rounds", f"test {name}", smooth, factor)
        parts += curves(tested, placed, score)
        loss = Plot(f"test-loss{suffix}", "test loss against rounds", "test loss", smooth)
        parts += curves(loss, placed, "test_loss")
        for file, about, across, reading in AGAINST:
            what = replace(tested, name=f"{slug(metric)}-{file}", about=f"test {metric} against {about}", across=across)
            there = [one for one in placed if any(map(reading, counted(one.group)))]
            parts += curves(what, there, score, reading=reading)
        loss = Plot(f"train-loss{suffix}", "training loss of the round's clients", "training loss", smooth)
        parts += curves(loss, placed, "train_loss")
    if parts and not any(total_bytes(run) for run in material.runs):
        parts.append(Absent("No figure against bytes sent: a run on one rank sends none."))
    return parts


def curves(what: Plot, placed: Sequence[Placed], *path: str, reading: Reading | None = None) -> list[Picture]:
    """Return figures of one curve per group: the numbers at a path in the records, over rounds or over a reading."""
    drawn = []
    for one in placed:
        runs = [run for run in counted(one.group) if reading is None or reading(run)]
        across = [] if reading is None else [reading(run) for run in runs]
        drawn.append((one.panel, line(what, one, [run.series(*path) for run in runs], across)))
    return plot(what, placed, drawn)


def megabytes(run: Run) -> Curve:
    """Return the MB that all ranks had sent by each round; empty if they sent none."""
    return {t: total / 1e6 for t, total in summed(run.series("bytes_sent")).items()} if total_bytes(run) else {}


def megabytes_uploaded(run: Run) -> Curve:
    """Return the MB that all clients had uploaded by each round; empty if not counted in all of them."""
    series = run.series("client_bytes_up") if client_bytes(run, "up") else {}
    return {t: total / 1e6 for t, total in summed(series).items()}


def training_seconds(run: Run) -> Curve:
    """Return the seconds up to each round, without evaluation."""
    scoring = run.series("seconds", "eval")
    return summed({t: took - scoring.get(t, 0.0) for t, took in round_seconds(run).items()})


AGAINST: tuple[tuple[str, str, str, Reading], ...] = (
    ("bytes", "bytes sent by all ranks", "MB sent", megabytes),
    ("uploaded", "bytes uploaded by all clients", "MB uploaded by clients", megabytes_uploaded),
    ("time", "seconds of training (without evaluation)", "seconds of training", training_seconds),
)
"""what the test metric is drawn against: file name, content, axis and values"""


def further(material: Material) -> list[Part]:
    """Return a curve for each number in metrics.jsonl that no other section shows, whatever measured it."""
    paths = list(dict.fromkeys(path for run in material.runs for path in further_numbers(run)))
    parts: list[Part] = []
    for number, path in enumerate(paths[:MOST_NUMBERS], 1):
        name = " ".join(path)
        what = Plot(f"further-{number}-{slug(name)[:60]}", f"{name} against rounds", name, material.smooth)
        parts += curves(what, material.placed, *path)
    if len(paths) > MOST_NUMBERS:
        parts.append(Absent(f"The first {MOST_NUMBERS} of {len(paths)} numbers; metrics.jsonl has all of them."))
    return parts


def further_numbers(run: Run) -> Iterator[tuple[str, ...]]:
    """Yield the keys of numbers in the records, also those one level down, that no other section shows."""
    shown = {*Round.__required_keys__, *Round.__optional_keys__, "test_loss"}
    shown |= {run.score, run.sides, f"train_{run.metric}"}
    for record in run.records:
        for key, value in record.items():
            inside = value if isinstance(value, dict) else {}
            if key not in shown:
                yield from [(key,)] if is_number(value) else [(key, name) for name in inside if is_number(inside[name])]


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# Two curves of one run


def clients(material: Material) -> list[Part]:
    """Return the metric on clients that took part in a round and on the others."""
    sides: dict[str, Reading] = {
        "participating": lambda run: run.series(run.sides, "participating"),
        "others": lambda run: run.series(run.sides, "others"),
    }
    return two_sides(material, "clients", "Participating and other clients", sides)


def gap(material: Material) -> list[Part]:
    """Return the metric on training data and on test data, which out of distribution may be far apart."""
    sides: dict[str, Reading] = {
        "training data": lambda run: run.series(f"train_{run.metric}"),
        "test data": lambda run: run.series(run.score),
    }
    return two_sides(material, "gap", "Training and test data", sides)


def two_sides(material: Material, key: str, title: str, sides: dict[str, Reading]) -> list[Part]:
    """Return, per metric, a table of the last rounds and a figure."""
    first = next(iter(sides.values()))
    measured = [one for one in material.placed if any(first(run) for run in counted(one.group))]
    parts: list[Part] = []
    for suffix, placed in by_suffix(measured).items():
        metric = placed[0].group.metric
        name, factor = unit(metric)
        file = f"gap-{slug(metric)}" if key == "gap" else f"{key}{suffix}"
        what = Plot(file, f"{metric} on {' and on '.join(sides)}", name, material.smooth, factor)
        parts.append(Named(file, sides_table([one.group for one in placed], sides, title, percent=factor == 100)))
        parts += sides_pictures(what, placed, sides)
    return parts


def sides_pictures(what: Plot, placed: Sequence[Placed], sides: dict[str, Reading]) -> list[Picture]:
    """Return a panel with both curves per group; for many groups, a row with both means of the last rounds."""
    styled = list(zip(sides.items(), STYLES, strict=True))
    if len(placed) <= MOST_PANELS:
        named = [(replace(one, label=name, style=style), read) for one in placed for (name, read), style in styled]
        lines = [(one.group.label, line(what, one, list(map(read, counted(one.group))))) for one, read in named]
        return plot(what, placed, lines)
    drawn = [
        Row(one.group.label, [mark(name, style, last(one.group, read), what.factor) for (name, read), style in styled])
        for one in placed
    ]
    caption = f"{capitalised(what.about)}: means over the last {LAST} rounds, with a tick per seed."
    return [dots(what.name, f"{what.about}, in {len(drawn)} rows", caption, drawn, what.down)]


def last(group: Group, read: Reading) -> list[float | None]:
    """Return the mean over the last rounds, per seed."""
    return [mean_of_last(run, read(run), LAST) for run in counted(group)]


def sides_table(groups: Sequence[Group], sides: dict[str, Reading], title: str, percent: bool) -> Table:
    """Return the means of both curves over their last rounds, and their difference."""
    lines: list[list[Cell]] = []
    for group in groups:
        first, second = (last(group, read) for read in sides.values())
        gaps = [a - b for a, b in zip(first, second, strict=True) if a is not None and b is not None]
        cells = [mean_cell(found, 2 if percent else 4, percent) for found in (first, second, gaps)]
        lines.append([group.label, *cells])
    notes = [f"Means over the scored ones of the last {LAST} rounds; mean and sample standard deviation over seeds."]
    return Table(title, ["runs", *sides, "difference"], lines, [*notes, "In percent."] if percent else notes)
