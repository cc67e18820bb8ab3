"""Check counts and ratios for a loss of speed; exit with 1 if one is beyond its limit.

    python benchmarks/guard.py

Counts (calls of torch in a client's step, verbs in a round) are the same everywhere, and their limits are close. Ratios
to a plain baseline in the same run are not, so a limit is about twice what is measured on a quiet machine: this finds
what has become much slower, not what has become a little slower. For that there are the other benchmarks.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any

import collective
import step
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedmpi.algorithms import Algorithm
from fedmpi.cohort import Work
from fedmpi.comm.threads import run_threads
from fedmpi.local import sgd
from fedmpi.masks import make_mask
from fedmpi.rounds import Plan, begin, rounds
from fedmpi.server import ServerKnobs, make_server

VERBS = ("sum", "offer", "start", "gather", "broadcast", "barrier")


@dataclass(frozen=True)
class Row:
    """What was looked at, what it is and what it may be."""

    what: str
    value: float
    limit: float

    @property
    def sound(self) -> bool:
        return self.value <= self.limit


class Calls(TorchDispatchMode):
    """Counts the operations that torch carries out."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def calls_in_a_step() -> float:
    """Operations of torch in a step of LeNet by the default path, a client's beginning and end shared out."""
    case = step.make_case("lenet", step.CPU)
    client = step.by_fedmpi(case, case.task(channels_last=True))
    client()
    with Calls() as calls:
        client()
    return calls.count / case.steps


def step_ratio() -> float:
    """A step of LeNet by the default path to one of the plain loop."""
    rows = step.measure("lenet", ["channels_last"], 4.0, step.CPU)
    return next(float(str(row["ratio"])) for row in rows if row["default"])


def verbs_in_a_round() -> dict[str, int]:
    """How often a rank of two speaks in a round of FedAvg."""
    case = step.make_case("lenet", step.CPU)
    counted: Counter[str] = Counter()
    lock = threading.Lock()

    def rank(comm: Any) -> None:
        task = step.Task(case.model(), case.arrays, case.partition, 0, step.CPU, comm.size, True)
        algorithm = Algorithm(sgd(0.01), make_mask("gma", 0.4), make_server("sgd", ServerKnobs()))
        state = begin(task, algorithm, comm)
        training = rounds(state, Plan(0, 2, 4, Work(steps=1)), algorithm, task, comm)
        next(training)
        if comm.rank == 0:
            for verb in VERBS:
                watch(comm, verb)
        next(training)

    def watch(comm: Any, verb: str) -> None:
        plain = getattr(comm, verb)

        def counting(*given: Any) -> Any:
            with lock:
                counted[verb] += 1
            return plain(*given)

        setattr(comm, verb, counting)

    run_threads(2, rank)
    return dict(counted)


def collective_ratios() -> dict[str, float]:
    """The masked collective to gloo's all-reduce on two ranks that share memory."""
    rows = collective.launch("gloo", 2, 4_000_000, 15, send=False, mask="gma")
    return {str(row["case"]): float(str(row["ratio"])) for row in rows}


def look() -> list[Row]:
    """Everything there is to look at."""
    torch.set_num_threads(1)
    verbs, ratios = verbs_in_a_round(), collective_ratios()
    return [
        Row("calls of torch in a LeNet step", calls_in_a_step(), 140),
        *(Row(f"{verb} in a round", verbs.get(verb, 0), limit) for verb, limit in LIMITS.items()),
        Row("LeNet step to the plain loop's", step_ratio(), 0.85),
        Row("masked float32 collective to gloo's all-reduce", ratios["float32"], 1.5),
        Row("masked exact collective to gloo's all-reduce", ratios["exact"], 2.0),
    ]


LIMITS = {"sum": 2, "offer": 1, "start": 3, "gather": 1, "broadcast": 0, "barrier": 0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    options = parser.parse_args()
    rows = look()
    for row in rows:
        verdict = "ok" if row.sound else "TOO MUCH"
        data = {"what": row.what, "value": round(row.value, 3), "limit": row.limit, "sound": row.sound}
        print(json.dumps(data) if options.json else f"{row.what:50} {row.value:8.2f}  at most {row.limit:g}  {verdict}")
    return 0 if all(row.sound for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
