"""Measure how long ranks wait for the slowest one if clients have very different numbers of samples (--split quantity).

    python benchmarks/balance.py
    python benchmarks/balance.py --ranks 2 --betas 0.5 --model logistic --cohort 50 --json
    python benchmarks/balance.py --algorithms scaffold --ranks 4 --nodes 2

Gloo ranks train the cohorts of the first rounds, placed by fedmpi and, for comparison, round robin; rules with a memory
(SCAFFOLD) also with every client at rank `cid mod ranks`, as it was before the ranks of a node shared memories
("homes"). These alternate. On several (pretend) nodes clients with a memory train on their node, and nothing else is
measured by the clock. Waiting is what ranks wait for the slowest of them, on average, as a share of its local
training. Medians over the rounds whose cohort allows an even spread (its largest client has at most a rank's part),
with quartiles, and how many of them there were.

  planned    by the loads that clients are placed by (cohort.load)
  waiting    by the clock
  cpu        by the ranks' processor time: what it is where every rank has a core of its own, which the clock cannot
             show where ranks share cores or the machine has other work
Then, from the processor time that each client's training took, what placements would have waited:
  load       longest first by load, as fedmpi does it
  steps      longest first by steps      samples    longest first by samples
  homes      every client at rank `cid mod ranks`
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import torch
from kit import above_zero, positive
from torch.distributed import FileStore

from fedmpi.cohort import Cohort, draw, load, place
from fedmpi.comm import Comm, share_node
from fedmpi.comm.torch import TorchComm
from fedmpi.errors import UserError
from fedmpi.local import Job, LocalResult, LocalRule
from fedmpi.rounds import Plan, begin, make_sums
from fedmpi.runs.build import load_data, make_task, plan_of, prepare
from fedmpi.runs.config import Config, Local, Skew

CPU = torch.device("cpu")
WAYS, OTHERS = ("waiting", "cpu"), ("in_turn", "homes")


def waiting(times: np.ndarray) -> float:
    """The mean over the ranks of what they wait for the slowest, as a share of its time."""
    return float(1 - times.mean() / times.max())


def in_turn(cohort: Cohort, ranks: int) -> Cohort:
    """The same clients, placed in their order."""
    return replace(cohort, ranks=tuple(i % ranks for i in range(len(cohort.cids))))


def at_home(cohort: Cohort, ranks: int) -> Cohort:
    """The same clients, each at the rank that used to be its home."""
    return replace(cohort, ranks=tuple(cid % ranks for cid in cohort.cids))


def by(loads: list[int], placed: tuple[int, ...], ranks: int) -> np.ndarray:
    """What each rank has to do."""
    return np.bincount(placed, weights=loads, minlength=ranks)


def measure(comm: Comm, given: argparse.Namespace, name: str, beta: float, folder: str) -> list[dict[str, Any]]:
    """A record for each round: planned and measured waiting of each placement."""
    cfg = Config(
        algorithm=name,
        data=given.data,
        data_root=given.data_root,
        model=given.model,
        split="quantity",
        clients=given.clients,
        cohort=given.cohort,
        rounds=given.rounds + 1,
        log_to="none",
        out=folder,
        local=Local(batch=given.batch),
        skew=Skew(beta=beta),
    )
    prepared = prepare(cfg)
    data, partition, meta = load_data(cfg)
    prepared, task = make_task(prepared, data, partition, meta, comm.size, CPU)
    taken: dict[int, list[float]] = {}

    def timed(job: Job) -> LocalResult:
        started = time.process_time()
        result = prepared.algorithm.local(job)
        taken.setdefault(job.cid, []).append(time.process_time() - started)
        return result

    rule = prepared.algorithm.local
    algorithm = replace(prepared.algorithm, local=LocalRule(timed, rule.sends, rule.keeps, rule.normalised))
    plan: Plan = plan_of(prepared)
    state = begin(task, algorithm, comm)
    sums = make_sums(plan, algorithm, task, comm, state.model_N)

    def train(cohort: Cohort) -> tuple[float, float]:
        sums.reset(cohort, state.round + 1, state.ints)
        state.memory.reserve(cohort.cids)
        comm.barrier()
        started, used = time.perf_counter(), time.process_time()
        for update in task.train(cohort.on(comm.rank), state, algorithm.local, plan.work):
            if sums.add(update):
                state.memory.stage(update.cid, update.result.keeps)
        times = torch.zeros(2, comm.size, dtype=torch.float64)
        times[:, comm.rank] = torch.tensor([time.perf_counter() - started, time.process_time() - used])
        comm.sum(times)
        return waiting(times[0].numpy()), waiting(times[1].numpy())

    records = []
    for number in range(given.rounds + 1):
        state = replace(state, round=number)
        cohort = draw(cfg.seed, number + 1, partition.sizes, cfg.cohort, comm.size, plan.work, state.memory.homes)
        pairs = list(zip(cohort.cids, cohort.weights, strict=True))
        loads = [load(plan.work, cfg.seed, number + 1, cid, weight) for cid, weight in pairs]
        steps = [plan.work.count(cfg.seed, number + 1, cid, weight) for cid, weight in pairs]
        taken.clear()
        ways = {"": cohort}
        if given.nodes == 1 or not rule.keeps:
            ways["_in_turn"] = in_turn(cohort, comm.size)
        if given.nodes == 1 and rule.keeps:
            ways["_homes"] = at_home(cohort, comm.size)
        measured = {way: train(placed) for way, placed in ways.items()}
        state.memory.commit(cohort.cids)
        seconds = torch.zeros(len(pairs), dtype=torch.float64)
        for i, (cid, _) in enumerate(pairs):
            seconds[i] = sum(taken.get(cid, []))
        comm.sum(seconds)
        cost = seconds.tolist()
        others = {
            "load": cohort.ranks,
            "steps": place(steps, comm.size),
            "samples": place(list(cohort.weights), comm.size),
            "homes": at_home(cohort, comm.size).ranks,
        }
        record: dict[str, Any] = {"allows": max(cost) <= sum(cost) / comm.size, "first": number == 0}
        for way, placed in ways.items():
            record[f"planned{way}"] = waiting(by(loads, placed.ranks, comm.size))
            record |= {f"{what}{way}": share for what, share in zip(WAYS, measured[way], strict=True)}
        record |= {name: waiting(by(cost, placed, comm.size)) for name, placed in others.items()}
        records.append(record)
    return records


def summary(
    records: list[dict[str, Any]], ranks: int, algorithm: str, beta: float, given: argparse.Namespace
) -> dict[str, Any]:
    """Medians and quartiles over the rounds that allow an even spread; the first round warms up."""
    counted = [record for record in records if not record["first"]]
    even = [record for record in counted if record["allows"]]
    row: dict[str, Any] = {
        "algorithm": algorithm,
        "ranks": ranks,
        "nodes": given.nodes,
        "beta": beta,
        "model": given.model,
        "cohort": given.cohort,
    }
    row |= {"clients": given.clients, "rounds": len(counted), "even_rounds": len(even)}
    for name in records[0]:
        values = [record[name] for record in even]
        if name in ("allows", "first") or not values:
            continue
        row[name] = round(median(values), 4)
        ends = quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
        row[f"{name}_quartiles"] = [round(ends[0], 4), round(ends[2], 4)]
    return row


def work(rank: int, ranks: int, meeting: str, given: argparse.Namespace) -> None:
    """What each rank does; rank 0 prints."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    comm = TorchComm(FileStore(meeting, ranks), rank, ranks, CPU, 300.0)
    share_node(comm, None if given.nodes == 1 else rank * given.nodes // ranks)
    for algorithm, beta in product(given.algorithms, given.betas):
        records = measure(comm, given, algorithm, beta, str(Path(meeting).parent / "run"))
        row = summary(records, ranks, algorithm, beta, given)
        if rank == 0:
            print(json.dumps(row) if given.json else line(row), flush=True)
    comm.close()


def line(row: dict[str, Any]) -> str:
    """A row in words."""
    start = "{algorithm}, {ranks} ranks on {nodes}, beta {beta:g}, {even_rounds} of {rounds} rounds: ".format(**row)
    if not row["even_rounds"]:
        return start + "no cohort allows an even spread; use a larger --cohort, fewer --ranks or more --rounds"
    parts = []
    for name in ("planned", "waiting", "cpu"):
        low, high = row[f"{name}_quartiles"]
        others = [f", {way.replace('_', ' ')} {row[f'{name}_{way}']:.1%}" for way in OTHERS if f"{name}_{way}" in row]
        parts.append(f"{name} {row[name]:.1%} ({low:.1%} to {high:.1%})" + "".join(others))
    after = ", ".join(f"{name} {row[name]:.1%}" for name in ("load", "steps", "samples", "homes"))
    return start + "; ".join(parts) + f"; others: {after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", default=["fedavg", "scaffold"])
    parser.add_argument("--nodes", type=positive, default=1, help="pretend nodes that the ranks are spread over")
    parser.add_argument("--ranks", nargs="+", type=positive, default=[2, 4])
    parser.add_argument("--betas", nargs="+", type=above_zero, default=[0.5, 0.2], help="of the split quantity")
    parser.add_argument("--data", default="glyphs")
    parser.add_argument("--data_root", help="folder of the data sets; else $FEDMPI_DATA, else the user's cache")
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--batch", type=positive, default=32)
    parser.add_argument("--clients", type=positive, default=1000)
    parser.add_argument("--cohort", type=positive, default=20)
    parser.add_argument("--rounds", type=positive, default=16)
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    given = parser.parse_args()
    try:
        for name in given.algorithms:
            what = Config(data=given.data, model=given.model, clients=given.clients, cohort=given.cohort)
            prepare(replace(what, algorithm=name))
        if 1 in given.ranks:
            raise UserError("--ranks is 1; a rank alone waits for nobody: give 2 or more")
        for ranks in given.ranks:
            with tempfile.TemporaryDirectory() as folder:
                torch.multiprocessing.spawn(work, (ranks, f"{folder}/meeting", given), nprocs=ranks)
    except UserError as error:
        print(f"fedmpi: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
