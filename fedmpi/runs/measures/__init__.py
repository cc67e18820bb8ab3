"""What is measured beside the test score (`--evaluate`), after Tenison et al., TMLR 2023.

    agreement    the share of elements below tau, and by layer (figure 4); counted in the round itself (agreement.py)
    clients      the test score of the clients that took part in the round, and of the others (tables 4 and 5)
    gap          the score on samples that the model was trained on, to be held against the test score (figure 3a)
    membership   an attack on the finished model: was it trained on this sample? (appendix F)

Nothing here touches what is trained, and every number is made of whole numbers that the ranks sum: it is the same on
any number of them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...clients.task import Task, choose_tests
from ...cohort import draw
from ...comm import Comm, common_trouble
from ...data import Data, Ints, Partition
from ...errors import CommonError, RunError, UserError, one_line
from ...rounds import Plan, Report, State
from ...schedules import read_names
from .score import evaluate, evaluate_train

if TYPE_CHECKING:
    from ..build import Given

log = logging.getLogger("fedmpi")

MEASURES = ("agreement", "clients", "gap", "membership")


@dataclass(frozen=True)
class Holdings:
    """How many samples of which class clients have of their own: a row for each client and class that it has, so that
    a million clients cost megabytes."""

    kinds: int
    clients: int
    client: Ints
    kind: Ints
    count: Ints

    @classmethod
    def of(cls, partition: Partition, labels: Ints, kinds: int) -> Holdings:
        """What the clients of a partition have, of samples with these classes."""
        owner = np.repeat(np.arange(partition.clients), np.diff(partition.offsets))
        cells, count = np.unique(owner * kinds + labels[partition.order], return_counts=True)
        return cls(kinds, partition.clients, cells // kinds, cells % kinds, count)

    def means(self, classes: Sequence[float], took_part: Iterable[int]) -> dict[str, float | None]:
        """The mean score of the clients that took part and of the others; None where there are none.

        A client's test set is the test set in its own mix of classes: its score is the mean of the scores of the
        classes, weighted by its samples of each. Classes that the test set does not have (NaN) are left out, and so is
        a client that has no others.
        """
        score = np.asarray(classes)[self.kind]
        known = np.isfinite(score)
        client, count = self.client[known], self.count[known]
        size = np.bincount(client, weights=count, minlength=self.clients)
        total = np.bincount(client, weights=count * score[known], minlength=self.clients)
        inside = np.zeros(self.clients, dtype=bool)
        inside[list(took_part)] = True
        sides = {"participating": inside & (size > 0), "others": ~inside & (size > 0)}
        return {
            side: float((total[those] / size[those]).mean()) if those.any() else None for side, those in sides.items()
        }


@dataclass(frozen=True)
class Asked:
    """What scored rounds are asked for beside the test score."""

    holdings: Holdings | None = None
    """where clients are: what each of them has"""
    samples: Tensor | None = None
    """where the gap is: the train samples to score, always the same"""

    @property
    def classes(self) -> int:
        """How many classes the test score has to be told apart by."""
        return self.holdings.kinds if self.holdings else 0


def measure_names(names: str) -> list[str]:
    """The measurements in a list with commas; `none` is the empty one."""
    return read_names("measurement (--evaluate)", names, MEASURES)


def ask(names: Collection[str], data: Data, task: Task) -> Asked:
    """What scored rounds are asked for by these names; a `UserError` where the data do not have it."""
    return Asked(
        hold(data, task) if "clients" in names else None,
        choose_train(task.partition, len(task.tests)) if "gap" in names else None,
    )


def choose_train(partition: Partition, wanted: int) -> Tensor:
    """As many train samples that clients have as are wanted, or all, always the same ones."""
    pool = torch.from_numpy(np.concatenate([partition.order, partition.shared]))
    return pool[choose_tests(len(pool), wanted)]


def hold(data: Data, task: Task) -> Holdings:
    """What the clients have, for data that can be scored by class."""
    labels = data.class_labels(needed=True)
    if labels is None:
        raise UserError(
            f"--evaluate clients goes by class, and '{data.name}' has numbers for labels; leave clients out of it"
        )
    try:
        next(task.score([slice(0, 2)], by_class=True))
    except Exception as error:
        raise UserError(
            f"--evaluate clients scores the samples of a class by themselves, which raised {type(error).__name__} for "
            f"the outputs of the model: {one_line(error)}; leave clients out of it"
        ) from error
    return Holdings.of(task.partition, labels, data.kinds)


def scored(report: Report, plan: Plan, task: Task, state: State, comm: Comm, block: int, asked: Asked) -> Report:
    """The report with the test set's score in it, and what else is asked for. Collective."""
    started, metric = perf_counter(), task.goal.metric
    score = evaluate(task, state, comm, block, asked.classes)
    found: dict[str, Any] = {}
    if asked.holdings is not None:
        found[f"clients_{metric}"] = asked.holdings.means(score.classes, took_part(report, plan, task.partition))
    if asked.samples is not None:
        seen = evaluate_train(task, state, comm, block, asked.samples)
        found |= {f"train_{metric}": seen.metric, "train_sample_loss": seen.loss}
    seconds = report.seconds | {"eval": perf_counter() - started}
    measures = report.measures | found
    return replace(report, test_metric=score.metric, test_loss=score.loss, seconds=seconds, measures=measures)


def took_part(report: Report, plan: Plan, partition: Partition) -> set[int]:
    """The clients whose updates were used in a round."""
    drawn = draw(plan.seed, report.round, partition.sizes, plan.cohort, 1, at_home=True)
    return set(drawn.cids) - set(report.dropped)


def check_folder(names: Collection[str], out: Path | None) -> None:
    """Refuse an attack on a run that leaves nothing to attack."""
    if "membership" in names and out is None:
        raise UserError(
            "--evaluate membership attacks a finished run in its folder, and this run has none; give out, or leave "
            "membership out of it"
        )


def attack(out: Path, given: Given, comm: Comm) -> str:
    """Let rank 0 attack the finished run in a folder while the others wait; returns what it found, in a line. Where it
    fails all ranks say so, and the run stays as it is. Collective."""
    trouble, found = "", {}
    if comm.rank == 0:
        try:
            from ...experiments.attack.command import attack_run  # not earlier: it imports the whole of a run

            found = attack_run(out, given=given)
        except Exception as error:
            known = isinstance(error, UserError | RunError)
            if not known:
                log.error("the membership attack raised %r", error, exc_info=True)
            trouble = str(error) if known else f"{type(error).__name__}: {one_line(error)}"
    if trouble := common_trouble(comm, trouble):
        raise CommonError(
            f"the run in {out} is finished, but the membership attack on it failed ({trouble}); put that right and try "
            f"'fedmpi attack {out}'"
        )
    verdicts = {"the outputs": found.get("logistic"), "the loss": found.get("loss")}
    by = [f"{verdict['accuracy']:.4f} by {what}" for what, verdict in verdicts.items() if verdict]
    return f"membership attack: accuracy {', '.join(by)}; guessing has 0.5"
