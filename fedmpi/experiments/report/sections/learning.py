"""How the runs learnt: the test metric and the loss against rounds, bytes and time, and the training loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...measures import client_bytes, round_seconds, total_bytes
from ...runs import Run, counted
from ..arrange import Placed, by_metric
from ..figures.curves import Line
from ..figures.style import Picture
from ..page import Absent, Part, Section
from .material import Curve, Material, Plot, line, plot, slug, smoothed, summed, unit

ALONE = "No run sent any bytes: a run on one rank has nobody to send to, so there is no picture against bytes."


def section(material: Material) -> Section:
    """The curves, for each metric that there is."""
    metrics = by_metric(material.placed)
    parts: list[Part] = []
    for metric, placed in metrics.items():
        ending = f"-{slug(metric)}" if len(metrics) > 1 else ""
        parts += pictures(metric, placed, material.smooth, ending)
    if not parts:
        parts.append(Absent("No run has finished a round yet, so there is nothing to draw."))
    elif not any(total_bytes(run) for run in material.runs):
        parts.append(Absent(ALONE))
    return Section("learning", "How the runs learnt", parts)


def pictures(metric: str, placed: Sequence[Placed], smooth: int, ending: str) -> list[Picture]:
    """The curves of groups that share a metric."""
    name, factor = unit(metric)
    score = f"test_{metric}"
    sent = [one for one in placed if any(total_bytes(run) for run in one.group.runs)]
    counting = [one for one in placed if any(client_bytes(run, "up") for run in counted(one.group))]
    rounds = Plot(f"{slug(metric)}-rounds", f"test {metric} against rounds", "round", f"test {name}", factor)
    moved = Plot(
        f"{slug(metric)}-bytes",
        f"test {metric} against what all ranks together had sent",
        "MB sent",
        f"test {name}",
        factor,
    )
    uploaded = Plot(
        f"{slug(metric)}-uploaded",
        f"test {metric} against what all clients together had uploaded",
        "MB uploaded by clients",
        f"test {name}",
        factor,
    )
    timed = Plot(
        f"{slug(metric)}-time",
        f"test {metric} against the seconds of training (evaluation not counted)",
        "seconds of training",
        f"test {name}",
        factor,
    )
    lost = Plot(f"test-loss{ending}", "test loss against rounds", "round", "test loss")
    trained = Plot(f"train-loss{ending}", "training loss of the round's clients", "round", "training loss")

    def over_rounds(one: Placed, key: str) -> list[Line | None]:
        return [line(one, [smoothed(run.series(key), smooth) for run in counted(one.group)])]

    def over(one: Placed, across: Callable[[Run], Curve]) -> list[Line | None]:
        runs = [run for run in counted(one.group) if across(run)]
        return [line(one, [smoothed(run.series(score), smooth) for run in runs], [across(run) for run in runs])]

    return [
        *plot(rounds, placed, lambda one: over_rounds(one, score), smooth),
        *plot(lost, placed, lambda one: over_rounds(one, "test_loss"), smooth),
        *plot(moved, sent, lambda one: over(one, megabytes), smooth),
        *plot(uploaded, counting, lambda one: over(one, megabytes_uploaded), smooth),
        *plot(timed, placed, lambda one: over(one, training_seconds), smooth),
        *plot(trained, placed, lambda one: over_rounds(one, "train_loss"), smooth),
    ]


def megabytes(run: Run) -> Curve:
    """What all ranks had sent by each round."""
    return {number: total / 1e6 for number, total in summed(run.series("bytes_sent")).items()}


def megabytes_uploaded(run: Run) -> Curve:
    """What all clients had uploaded by each round; empty where that was not counted in all of them."""
    series = run.series("client_bytes_up") if client_bytes(run, "up") is not None else {}
    return {number: total / 1e6 for number, total in summed(series).items()}


def training_seconds(run: Run) -> Curve:
    """The seconds up to each round, without those of evaluation."""
    scoring = run.series("seconds", "eval")
    return summed({number: took - scoring.get(number, 0.0) for number, took in round_seconds(run).items()})
