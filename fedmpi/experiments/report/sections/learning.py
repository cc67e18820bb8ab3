"""Learning curves: test metric and loss against rounds, bytes and time, training loss, and all further numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from ....runs.metrics import Round
from ...measures import client_bytes, round_seconds, total_bytes
from ...runs import Run, counted
from ..figures.curves import Line
from ..figures.style import Picture
from ..layout import Placed
from ..page import Absent, Part, Section
from .material import Curve, Material, Plot, by_suffix, line, plot, slug, smoothed, summed, unit

MOST_NUMBERS = 24  # further numbers with a figure
Reading = Callable[[Run], Curve]


def section(material: Material) -> Section:
    """Return the learning curves, per metric."""
    parts: list[Part] = []
    for suffix, placed in by_suffix(material.placed).items():
        parts += pictures(placed, material.smooth, suffix)
    if not parts:
        parts.append(Absent("No run has finished a round yet."))
    elif not any(total_bytes(run) for run in material.runs):
        parts.append(Absent("No figure against bytes sent: a run on one rank sends none."))
    return Section("learning", "Learning curves", parts)


def pictures(placed: Sequence[Placed], smooth: int, suffix: str) -> list[Picture]:
    """Return the curves of groups that share a metric."""
    metric = placed[0].group.metric
    score, (name, factor) = f"test_{metric}", unit(metric)

    def over_rounds(name: str, about: str, down: str, key: str, factor: float = 1.0) -> list[Picture]:
        return curves(Plot(name, about, "round", down, factor), placed, lambda run: run.series(key), smooth)

    def against(name_of: str, about: str, across: str, reading: Reading) -> list[Picture]:
        def lines(one: Placed) -> list[Line | None]:
            runs = [run for run in counted(one.group) if reading(run)]
            return [line(one, [smoothed(run.series(score), smooth) for run in runs], [reading(run) for run in runs])]

        what = Plot(f"{slug(metric)}-{name_of}", f"test {metric} against {about}", across, f"test {name}", factor)
        return plot(what, [one for one in placed if any(map(reading, counted(one.group)))], lines, smooth)

    return [
        *over_rounds(f"{slug(metric)}-rounds", f"test {metric} against rounds", f"test {name}", score, factor),
        *over_rounds(f"test-loss{suffix}", "test loss against rounds", "test loss", "test_loss"),
        *against("bytes", "bytes sent by all ranks", "MB sent", megabytes),
        *against("uploaded", "bytes uploaded by all clients", "MB uploaded by clients", megabytes_uploaded),
        *against("time", "seconds of training (without evaluation)", "seconds of training", training_seconds),
        *over_rounds(f"train-loss{suffix}", "training loss of the round's clients", "training loss", "train_loss"),
    ]


def curves(what: Plot, placed: Sequence[Placed], reading: Reading, smooth: int) -> list[Picture]:
    """Return figures of one curve per group."""

    def lines(one: Placed) -> list[Line | None]:
        return [line(one, [smoothed(reading(run), smooth) for run in counted(one.group)])]

    return plot(what, placed, lines, smooth)


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


def further(material: Material) -> Section:
    """Return a curve for each number in metrics.jsonl that no other section shows, whatever measured it."""
    paths = list(dict.fromkeys(path for run in material.runs for path in further_numbers(run)))
    parts: list[Part] = []
    for number, path in enumerate(paths[:MOST_NUMBERS], 1):
        name = " ".join(path)
        what = Plot(f"further-{number}-{slug(name)[:60]}", f"{name} against rounds", "round", name)
        parts += curves(what, material.placed, partial(series_at, path=path), material.smooth)
    if len(paths) > MOST_NUMBERS:
        parts.append(Absent(f"The first {MOST_NUMBERS} of {len(paths)} numbers; metrics.jsonl has all of them."))
    absent = "No run measured anything else; a measurement of your own adds its numbers here."
    return Section("further", "Further measurements", parts or [Absent(absent)])


def series_at(run: Run, path: tuple[str, ...]) -> Curve:
    return run.series(*path)


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
