"""Run folders that are written by hand, for what a report makes of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from fedmpi.runs.config import Config

LAYERS = ("conv.weight", "conv.bias", "fc.weight")


def a_round(number: int, score: float | None, metric: str = "accuracy", **more: Any) -> dict[str, Any]:
    """A round as metrics.jsonl has it: 1000 bytes, and two seconds of training and one of evaluation."""
    phases = {"local": 1.5, "wait": 0.1, "reduce": 0.2, "server": 0.1, "gather": 0.1, "meta": 0.0, "eval": 1.0}
    return {
        "round": number,
        "clients": 4,
        "train_loss": 2.0 / number,
        "kept": 0.6,
        "agreement": 0.5,
        "bytes_sent": 1000,
        "seconds": phases,
        "test_loss": None if score is None else 1.0 / number,
        "dropped_clients": [],
        "dropped": 0,
        f"test_{metric}": score,
    } | more


def measured(number: int, score: float, seed: int = 0) -> dict[str, Any]:
    """A round with everything that --evaluate adds."""
    return a_round(
        number,
        score,
        below_tau=0.5 - 0.01 * number,
        layers={name: {"agreement": 0.1 * (i + 1) + 0.01 * seed, "below_tau": 0.4} for i, name in enumerate(LAYERS)},
        clients_accuracy={"participating": score + 0.05, "others": score - 0.05},
        train_accuracy=score + 0.1,
        train_sample_loss=0.3,
    )


def write_run(
    folder: Path,
    records: Sequence[dict[str, Any]],
    rises: bool | None = None,
    done: bool = True,
    histogram: Any = ((30, 0), (0, 20), (10, 10), (5, 40)),
    **knobs: Any,
) -> Path:
    """Write a run folder with these rounds; knobs as in `Config`."""
    folder.mkdir(parents=True)
    cfg = replace(Config(mask="gma", tau=0.4, rounds=len(records), clients=4, cohort=4, model="logistic"), **knobs)
    (folder / "config.yaml").write_text(yaml.safe_dump(dataclasses.asdict(cfg), sort_keys=False))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    about: dict[str, Any] = {"data": cfg.data, "split": cfg.split, "skew": dataclasses.asdict(cfg.skew), "clients": 4}
    if rises is not None:
        metric = next(k for k in records[0] if k.startswith("test_") and k != "test_loss").removeprefix("test_")
        about["objective"] = {"name": "own", "metric": metric, "rises": rises}
    (folder / "partition.json").write_text(json.dumps(about | {"histogram": histogram}))
    (folder / "environment.json").write_text(json.dumps({"versions": {"fedmpi": "0.1.0", "torch": "2.4"}, "size": 2}))
    (folder / "starts.jsonl").write_text(json.dumps({"time": 1_700_000_000.0, "round": 0}) + "\n")
    if done:
        (folder / "finished.json").write_text(json.dumps({"rounds": len(records)}))
    return folder


def write_sweep(
    home: Path,
    axes: dict[str, dict[str, dict[str, Any]]],
    seeds: int,
    rounds: Callable[..., list[dict[str, Any]]],
    **more: Any,
) -> Path:
    """Write a sweep of all combinations of labels; `rounds(labels, seed)` has the rounds of a run."""
    runs: dict[str, dict[str, str]] = {"": {}}
    values: dict[str, dict[str, Any]] = {"": {}}
    for axis, labels in axes.items():
        both = [(name, label) for name in runs for label in labels]
        values = {f"{name}{label}_": values[name] | labels[label] for name, label in both}
        runs = {f"{name}{label}_": runs[name] | {axis: label} for name, label in both}
    listed = {}
    for name, labels_of in runs.items():
        for seed in range(seeds):
            write_run(home / f"{name}s{seed}", rounds(labels_of, seed), seed=seed, **values[name])
            listed[f"{name}s{seed}"] = labels_of | {"seed": str(seed)}
    record = {"name": home.name, "about": "by hand", "axes": {a: list(found) for a, found in axes.items()}}
    (home / "sweep.json").write_text(json.dumps(record | {"runs": listed} | more))
    return home
