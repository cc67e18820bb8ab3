"""What the tests of the outer shell share: a tiny data set that can be learnt, and a run alone in this process."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedmpi import data
from fedmpi.comm import SoloComm, env
from fedmpi.comm.env import Place
from fedmpi.data import Arrays, DataRow
from fedmpi.data.store import Source
from fedmpi.rounds import Report
from fedmpi.runs import run as runs
from fedmpi.runs.build import prepare
from fedmpi.runs.config import Config, Eval, Local
from fedmpi.runs.run import run

ALONE = Place("alone", 0, 1, 0, 1)
CPU = torch.device("cpu")
CLASSES, SIDE = 3, 12


def tiny(root: Path | None = None) -> Arrays:
    """200 noisy 12x12 images of three patterns, and 60 to test on."""
    rng = torch.Generator().manual_seed(7)
    patterns = torch.randint(0, 160, (CLASSES, 1, SIDE, SIDE), generator=rng)

    def some(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.arange(count) % CLASSES
        return (patterns[y] + torch.randint(0, 96, (count, 1, SIDE, SIDE), generator=rng)).to(torch.uint8), y

    (x, y), (test_x, test_y) = some(200), some(60)
    scaled = x.double() / 255
    mean, std = (float(scaled.mean()),), (float(scaled.std(correction=0)),)
    return Arrays("tiny", CLASSES, x, y, test_x, test_y, mean, std, owner=torch.arange(200) % 20)


def data_row(make: Callable[[Path | None], Arrays]) -> DataRow:
    """A row of the table of data sets for data that are made up."""
    return DataRow(make, lambda root: Source("made", 1, lambda files: {}, generated=True), "made up")


def settings_of(out: Path, **changes: Any) -> Config:
    """A run of three rounds on the tiny data: a fraction of a second."""
    cfg = Config(
        mask="gma",
        data="tiny",
        split="iid",
        model="logistic",
        clients=8,
        cohort=4,
        rounds=3,
        log_to="none",
        local=Local(batch=10, lr=0.05),
        eval=Eval(batch=25),
        out=str(out),
    )
    return replace(cfg, **changes)


def train(cfg: Config) -> Report:
    """The last report of the run, alone in this process."""
    return run(prepare(cfg), SoloComm(), ALONE, CPU, {}).last


def metrics(out: Path) -> list[dict[str, Any]]:
    """The rounds of a run, read by a parser that knows no NaN."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    return [json.loads(text, parse_constant=refuse) for text in (out / "metrics.jsonl").read_text().splitlines()]


def without_seconds(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rounds without what depends on the clock."""
    return [{k: v for k, v in r.items() if k != "seconds"} for r in rounds]


@contextlib.contextmanager
def sandbox() -> Iterator[pytest.MonkeyPatch]:
    """The tiny data in the table, no launcher's variables seen, and the logger and the threads put back behind it.

    Ranks that are threads make their models one after another: torch's seed belongs to the process.
    """
    lock, make_task = threading.Lock(), runs.make_task

    def one_at_a_time(*given: Any) -> Any:
        with lock:
            return make_task(*given)

    logger, threads = logging.getLogger("fedmpi"), torch.get_num_threads()
    before = logger.handlers[:], logger.level, logger.propagate
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(data.DATASETS, "tiny", data_row(tiny))
        patch.setattr(env, "find_place", lambda environ: ALONE)
        patch.setattr(runs, "make_task", one_at_a_time)
        yield patch
    logger.handlers[:], logger.level, logger.propagate = before
    torch.set_num_threads(threads)
