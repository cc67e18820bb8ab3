"""A small table of run folders, read from what the runs wrote."""

from __future__ import annotations

import contextlib
import json
import statistics
from pathlib import Path
from typing import Any

import yaml

from .errors import UserError

COLUMNS = (
    "run",
    "algorithm",
    "mask",
    "rounds",
    "best acc",
    "last acc",
    "last loss",
    "kept",
    "agreement",
    "MB moved",
    "s a round",
)


def table(folders: list[Path]) -> str:
    """The runs, one a row, in aligned columns."""
    rows = [COLUMNS, *(row(folder) for folder in folders)]
    widths = [max(len(r[i]) for r in rows) for i in range(len(COLUMNS))]
    text = [
        [cell.ljust(w) if i < 3 else cell.rjust(w) for i, (cell, w) in enumerate(zip(r, widths, strict=True))]
        for r in rows
    ]
    lines = ["  ".join(cells).rstrip() for cells in text]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def row(folder: Path) -> tuple[str, ...]:
    """One run as the cells of a row."""
    cfg, rounds = read(folder)
    try:
        return cells(folder, cfg, rounds)
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(f"'{folder}' holds files that are no run of fedmpi ({error!r}); give another folder") from None


def cells(folder: Path, cfg: dict[str, Any], rounds: list[dict[str, Any]]) -> tuple[str, ...]:
    """What a run was and how well it did, in the order of `COLUMNS`."""
    metric = next((key for r in rounds for key in r if key.startswith("test_") and key != "test_loss"), "test_accuracy")
    tested = [r for r in rounds if r[metric] is not None]
    best = (max if rises(folder, metric) else min)((r[metric] for r in tested), default=None)
    last = tested[-1] if tested else {metric: None, "test_loss": None}
    unit = "" if metric == "test_accuracy" else f" {metric.removeprefix('test_')}"
    mask = cfg["mask"] if cfg["mask"] == "mean" else f"{cfg['mask']} {cfg['tau']:g}"
    middle = statistics.median(sum(r["seconds"].values()) for r in rounds) if rounds else None
    return (
        str(folder),
        cfg["algorithm"],
        mask,
        f"{len(rounds)}/{cfg['rounds']}",
        number(best, ".4f") + unit,
        number(last[metric], ".4f") + unit,
        number(last["test_loss"], ".4f"),
        number(mean(rounds, "kept"), ".3f"),
        number(mean(rounds, "agreement"), ".3f"),
        number(sum(r["bytes_sent"] for r in rounds) / 1e6, ".1f"),
        number(middle, ".2f"),
    )


def read(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A run's configuration and its rounds."""
    try:
        cfg = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        rounds = [json.loads(line) for line in lines]
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise UserError(
            f"'{folder}' is no run folder that can be read ({why}); give the --out of a training run"
        ) from None
    return cfg, rounds


def rises(folder: Path, metric: str) -> bool:
    """Whether more of a run's metric is better, as its partition.json says."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return bool(json.loads((folder / "partition.json").read_text(encoding="utf-8"))["objective"]["rises"])
    return metric == "test_accuracy"


def mean(rounds: list[dict[str, Any]], key: str) -> float | None:
    return statistics.fmean(r[key] for r in rounds) if rounds else None


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
