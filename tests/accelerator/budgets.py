"""Count what training gives a device to do: `python -m tests.accelerator.budgets` prints JSON.

Of each: kernels, waits of the host, bytes to the host and to the device. A step is the difference between runs of 8
and of 3 steps, a client that between 4 and 2 clients of one round.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch

from tests.accelerator import pretend
from tests.accelerator.cases import CASES, SMALL

DEVICE = torch.device("pretend:0")
RESNET18 = 11_173_962  # parameters
COUNTED = ("kernels", "waits", "to_host", "to_device")


def counts_of(options: str, clients: int, steps: int) -> dict[str, int]:
    """Return the counts of one round with so many clients and steps, after others that allocate."""
    from fedmpi.comm import SoloComm
    from fedmpi.rounds import begin, make_sums, run_round
    from fedmpi.runs.build import load_data, make_memory, make_task, plan_of, prepare
    from fedmpi.runs.options import parse

    given = [*SMALL.split(), *options.split(), "--device", "pretend", "--out", "unused"]
    spec = prepare(parse([*given, "--cohort", str(clients), "--local.steps", str(steps)]))
    data, partition, meta = load_data(spec.cfg)
    spec, task = make_task(spec, data, partition, meta, 1, DEVICE)
    comm, plan = SoloComm(), plan_of(spec)
    state = begin(task, spec.algorithm, comm, make_memory(spec, task), spec.cfg.wire)
    sums = make_sums(plan, spec.algorithm, task, comm, state.model_N)
    for _ in range(2):  # two sets of host memory, in turn
        state, _ = run_round(state, plan, spec.algorithm, task, comm, sums)
    with pretend.counted() as counts:
        run_round(state, replace(plan), spec.algorithm, task, comm, sums)
        kernels, waits = sum(counts.kernels.values()), sum(counts.waits.values())
        found = dict(zip(COUNTED, (kernels, waits, counts.bytes_to_host, counts.bytes_to_device), strict=True))
        return found | {"synchronised": counts.waits["synchronize the device"]}


def between(more: dict[str, int], less: dict[str, int], by: int) -> dict[str, float]:
    return {name: (more[name] - less[name]) / by for name in COUNTED}


def measure(options: str) -> dict[str, Any]:
    """Return the counts per step, per client and per round of a run with these options."""
    few, many = counts_of(options, 2, 3), counts_of(options, 2, 8)
    four, none = counts_of(options, 4, 3), counts_of(options, 1, 3)
    return {
        "step": between(many, few, 10),
        "client": between(four, few, 2),
        "round": {name: 2 * none[name] - few[name] for name in COUNTED},
    }


def fold(kind: str, ranks: int) -> int:
    """Return the kernels that adding a client's delta of a ResNet-18 takes where the sums are on the devices of so many
    ranks: of the last client, whose delta may be added bucket by bucket while others travel."""
    from fedmpi.aggregate.exchange import buckets
    from fedmpi.aggregate.sums import Sums
    from fedmpi.clients.task import ALIGNED
    from fedmpi.cohort import Cohort
    from fedmpi.commands.plan import DryComm
    from fedmpi.flat import Layout
    from fedmpi.local import LocalResult, Update, sgd

    layout = Layout((), RESNET18, RESNET18, (), ALIGNED)
    comm = DryComm(0, [[rank] for rank in range(ranks)], shares=False)
    delta_N = torch.ones(layout.padded(ranks), device=DEVICE)
    sums = Sums(comm, layout, sgd(0.01), cohort=1, clients=1, kind=kind, device=DEVICE)
    no_ints = torch.zeros(0, dtype=torch.int64)
    sums.reset(Cohort((0,), (10,), (0,)), 1, no_ints)
    with pretend.counted() as counts:
        assert sums.add(Update(0, delta_N, no_ints, 0.0, LocalResult(delta_N[:RESNET18]), last=True))
        for bucket in buckets(sums.deltas.slice, sums.deltas.travels):
            sums.fold(bucket)
        return sum(counts.kernels.values())


def main() -> None:
    """Print all counts."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {
        "lenet": measure(""),
        "augmented": measure("--augment crop:2+flip"),
        "data on host": measure("--data_on host"),
        "batchnorm": measure(CASES["batchnorm"].partition(" --evaluate")[0]),
        "dataset": measure(CASES["dataset"]),
        "scaffold": measure("--algorithm scaffold"),
        "graphs": measure("--step.graphs true"),
    }
    found["fold"] = {kind: [fold(kind, ranks) for ranks in (1, 2, 4)] for kind in ("exact", "float32")}
    found["phase ends"] = {where: counts_of(f"--sums {where}", 1, 1)["synchronised"] for where in ("host", "device")}
    found["together"] = {str(k): counts_of(f"--clients 8 --step.together {k}", 8, 1)["kernels"] for k in (1, 8)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
