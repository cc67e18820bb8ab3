"""Ten rounds of every algorithm with every mask on the small federation, kept in golden.json so that no change of the
arithmetic goes unseen. `python tests/golden.py` writes the file anew: only where results are meant to change, and the
change belongs in CHANGELOG.md.

Also what other tests need for that: the small federation as a user's configuration of any algorithm asks for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from federation import CPU, arrays, norm_model, partition, plain_model
from torch import nn

from fedmpi.algorithms import ALGORITHMS
from fedmpi.clients.task import Task
from fedmpi.comm import Comm, SoloComm
from fedmpi.data import Partition
from fedmpi.masks import MASKS
from fedmpi.rounds import Plan, Report, State, begin, rounds
from fedmpi.runs.build import RunSpec, prepare
from fedmpi.runs.config import Config, Local, Meta, Server
from fedmpi.runs.measures.score import evaluate

FILE = Path(__file__).with_name("golden.json")
HELD_OUT = 9  # of the 20 samples of client 4, where an algorithm has a meta set
ROUNDS, COHORT = 10, 5
TAU = 0.7  # of five clients four must agree: gma then scales by 1/5 and 3/5, which `and` drops

# Rates at which ten rounds of the small federation move, and at which the difference from FedAvg is visible.
LOCAL = Local(lr=0.01, batch=4, mu=2.0)
SERVERS = {"fedgma2021": Server(lr=0.1), "uga": Server(lr=0.1), "fedmeta-uga": Server(lr=0.1)}


def ask(algorithm: str, mask: str = "gma", rounds: int = ROUNDS, **changes: Any) -> RunSpec:
    """An algorithm on the small federation, by a configuration as a user writes it."""
    meta = Meta(size=HELD_OUT, batch=4) if ALGORITHMS[algorithm].defaults.get("meta.size") else Meta()
    server, tau = SERVERS.get(algorithm, Server()), None if algorithm == "fedgma2021" else TAU  # it has its own
    cfg = Config(algorithm, mask, tau, sharpness=1.0, rounds=rounds, seed=11, local=LOCAL, server=server, meta=meta)
    return prepare(replace(cfg, **changes))


def plan_of(asked: RunSpec, **changes: Any) -> Plan:
    cfg = asked.cfg
    return replace(Plan(cfg.seed, cfg.rounds, COHORT, asked.work), **changes)


def task_of(asked: RunSpec, ranks: int = 1, make: Callable[[], nn.Module] = norm_model) -> Task:
    """A rank's task; held-out samples are taken from the end of client 4 and shared where the algorithm says so.

    Make the tasks of several ranks one after another: torch's seed belongs to the process.
    """
    torch.manual_seed(3)
    whole, meta = partition(), np.zeros(0, dtype=np.int64)
    if asked.cfg.meta.size:
        held = np.arange(whole.offsets[5] - asked.cfg.meta.size, whole.offsets[5])
        meta = whole.order[held]
        offsets = whole.offsets - np.where(np.arange(len(whole.offsets)) > 4, len(meta), 0)
        whole = Partition(offsets, np.delete(whole.order, held), meta if asked.cfg.meta.share else meta[:0])
    return Task(make(), arrays(), whole, seed=11, device=CPU, ranks=ranks, meta=meta)


def train(asked: RunSpec, task: Task, comm: Comm, plan: Plan | None = None) -> Iterator[tuple[State, Report]]:
    """The rounds of a fresh run."""
    state = begin(task, asked.algorithm, comm)
    yield from rounds(state, plan or plan_of(asked), asked.algorithm, task, comm)


def curve(algorithm: str, mask: str) -> dict[str, list[float]]:
    """What ten rounds were like: a number a round, and the size of the model in the end."""
    asked, comm = ask(algorithm, mask), SoloComm()
    task, seen = task_of(asked, make=plain_model), []
    for state, report in train(asked, task, comm):
        score = evaluate(task, state, comm, block=10)
        seen.append((report.train_loss, report.kept, report.agreement, score.loss, score.metric))
    names = ("train_loss", "kept", "agreement", "test_loss", "test_accuracy")
    out = {
        name: [float(f"{x:.6g}") for x in values] for name, values in zip(names, zip(*seen, strict=True), strict=True)
    }
    return out | {"norm": [float(f"{state.model_N.norm():.6g}")]}


def main() -> None:
    lines = [f'"{a} {m}": {json.dumps(curve(a, m), separators=(",", ":"))}' for a in ALGORITHMS for m in MASKS]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
