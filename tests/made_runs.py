"""Runs with numbers that are known, as records and as folders."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from fedmpi.experiments.runs import Run, flat

BASE = {"algorithm": "fedavg", "mask": "gma", "tau": 0.4, "data": "glyphs", "rounds": 0, "seed": 0}


def records(scores: Sequence[float | None], metric: str = "accuracy", **more: Any) -> list[dict[str, Any]]:
    """A round for each score; the training loss falls as 1 / round."""
    return [
        {"round": n, "train_loss": 1 / n, "test_loss": None if s is None else 1 - s, f"test_{metric}": s, **more}
        for n, s in enumerate(scores, 1)
    ]


def made(
    scores: Sequence[float | None],
    metric: str = "accuracy",
    rises: bool = True,
    labels: dict[str, str] | None = None,
    name: str = "run",
    done: bool = True,
    **knobs: Any,
) -> Run:
    """A run that came to these scores; knobs by their dotted names, with two underscores for the dot."""
    given = BASE | {"rounds": len(scores) if done else len(scores) + 10}
    config = flat(given | {knob.replace("__", "."): value for knob, value in knobs.items()})
    finished = {"rounds": len(scores)} if done else {}
    return Run(
        Path("sweep" if labels else ".") / name, config, records(scores, metric), metric, rises, finished, labels or {}
    )


def seeds(finals: Iterable[float], **knobs: Any) -> list[Run]:
    """A run of one scored round for each of these, with the seeds 0, 1, ..."""
    return [made([final], seed=seed, **knobs) for seed, final in enumerate(finals)]


def write_run(folder: Path, rounds: Sequence[dict[str, Any]] = (), done: bool = True, **knobs: Any) -> Path:
    """A folder with what the reader needs of a run; knobs as in `made`."""
    folder.mkdir(parents=True, exist_ok=True)
    tree: dict[str, Any] = dict(BASE) | {"rounds": len(rounds) or 1}
    for knob, value in knobs.items():
        group, dot, name = knob.partition("__")
        tree |= {group: {**tree.get(group, {}), name: value}} if dot else {group: value}
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rounds))
    if done:
        (folder / "finished.json").write_text(json.dumps({"rounds": len(rounds)}))
    return folder


def write_sweep(folder: Path, runs: dict[str, dict[str, str]], **more: Any) -> Path:
    """A sweep's record in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    axes: dict[str, list[str]] = {}
    for labels in runs.values():
        for axis, label in labels.items():
            if axis != "seed" and label not in axes.setdefault(axis, []):
                axes[axis].append(label)
    (folder / "sweep.json").write_text(json.dumps({"name": folder.name, "axes": axes, "runs": runs, **more}))
    return folder
