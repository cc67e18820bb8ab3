"""What more clients cost outside of their training: time to the first client, memory, and time a round.

    python benchmarks/scale.py
    python benchmarks/scale.py --clients 1000 1000000 --cohorts 10 1000 --split quantity --json

The data stay the same (two million samples of four numbers, dealt to more and more clients), and a client's rule does
nothing, so all of a round is what the federation adds. Every row is a real run on two gloo ranks that share memory, in
processes of their own. The rows take turns, the medians are printed, and quartiles with --json. The first rows have the
smallest cohort and more and more clients; the following rows the most clients and larger cohorts.

  start-up   seconds from the command to the first client, imports and two million samples included
  cpu        processor seconds of that after the imports, which other programs on the machine disturb less
  peak       MB of the larger rank (its Rss), and what of it is beyond program and data
  a round    milliseconds from one round's first client to the next one's, and processor milliseconds of rank 0
  a client   what one more client of the cohort adds to a rank's processor time
Ratios are to the first row; those of larger cohorts to the row with as many clients and the smallest cohort.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from kit import columns, positive
from torch import nn
from torch.distributed import FileStore

from fedmpi.algorithms import Algorithm
from fedmpi.comm import share_node
from fedmpi.comm.env import Place
from fedmpi.comm.torch import TorchComm
from fedmpi.data import SPLITS, Arrays
from fedmpi.local import Job, LocalResult, LocalRule
from fedmpi.masks import make_mask
from fedmpi.runs.build import Overrides, prepare
from fedmpi.runs.config import Config, Eval
from fedmpi.runs.run import run
from fedmpi.server import ServerKnobs, make_server

FEATURES, CLASSES, RANKS = 4, 10, 2
MEASURES = ("startup_s", "startup_cpu_s", "peak_mb", "beyond_data_mb", "round_ms", "round_cpu_ms")

RATIOS = {"startup_s": ".2f", "startup_cpu_s": ".2f", "peak_mb": ".0f", "round_ms": ".2f", "round_cpu_ms": ".2f"}


def many(samples: int) -> Arrays:
    """Random numbers with random labels."""
    rng = torch.Generator().manual_seed(0)
    x, y = torch.rand(samples, FEATURES, generator=rng), torch.randint(CLASSES, (samples,), generator=rng)
    return Arrays("many", CLASSES, x, y, x[:100].clone(), y[:100].clone())


def kilobytes(field: str) -> int:
    """A field of the kernel's account of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1])


def rank(me: int, folder: Path, began: float, case: dict[str, Any]) -> None:
    """What each rank does: the run, and a line with what it took."""
    imported, program = time.process_time(), kilobytes("VmRSS")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    arrays, first = many(case["samples"]), dict[int, tuple[float, float]]()

    def nothing(job: Job) -> LocalResult:
        if job.round not in first:
            first[job.round] = time.time(), time.process_time()
        return LocalResult(job.delta_P.zero_())

    hidden = max(case["parameters"] // (FEATURES + CLASSES + 1), 1)
    model = nn.Sequential(nn.Linear(FEATURES, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES))
    algorithm = Algorithm(LocalRule(nothing), make_mask("gma", 0.4), make_server("sgd", ServerKnobs()))
    rounds = case["rounds"]
    cfg = Config(
        split=case["split"],
        clients=case["clients"],
        cohort=case["cohort"],
        rounds=rounds + 1,
        eval=Eval(every=rounds + 1),
        out=str(folder / "run"),
        log_to="none",
        quiet=True,
    )
    prepared = prepare(cfg, Overrides(arrays, model, algorithm))
    comm = TorchComm(FileStore(str(folder / "meeting"), RANKS), me, RANKS, torch.device("cpu"), 300.0)
    share_node(comm)
    run(prepared, comm, Place("alone", me, RANKS, me, RANKS), torch.device("cpu"), {})
    comm.close()
    data = sum(t.nbytes for t in (arrays.x, arrays.y, arrays.test_x, arrays.test_y)) + 8 * case["samples"]
    peak = kilobytes("VmHWM")
    row = {
        "startup_s": first[1][0] - began,
        "startup_cpu_s": first[1][1] - imported,
        "peak_mb": peak / 1e3,
        "beyond_data_mb": (peak - program) / 1e3 - data / 1e6,
        "round_ms": 1e3 * median(first[k + 1][0] - first[k][0] for k in range(2, rounds)),
        "round_cpu_ms": 1e3 * median(first[k + 1][1] - first[k][1] for k in range(2, rounds)),
    }
    print(json.dumps(row), flush=True)


def measure(case: dict[str, Any]) -> dict[str, float]:
    """One run: times of rank 0, memory of the larger rank."""
    with tempfile.TemporaryDirectory() as folder:
        began = str(time.time())
        commands = [
            [sys.executable, __file__, "--rank", str(me), folder, began, json.dumps(case)] for me in range(RANKS)
        ]
        processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
        try:
            said = [process.communicate(timeout=300)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    if any(process.returncode for process in processes):
        raise SystemExit("fedmpi: a rank failed; what it said stands above")
    rows = [json.loads(text) for text in said]
    return rows[0] | {name: max(row[name] for row in rows) for name in ("peak_mb", "beyond_data_mb")}


def result(case: dict[str, Any], taken: list[dict[str, float]]) -> dict[str, Any]:
    """Medians and quartiles of a case."""
    row: dict[str, Any] = {name: case[name] for name in ("clients", "cohort", "split", "samples", "parameters")}
    for name in MEASURES:
        values = [one[name] for one in taken]
        row[name] = round(median(values), 4)
        ends = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
        row[f"{name}_quartiles"] = [round(ends[0], 4), round(ends[2], 4)]
    return row


def add_ratios(rows: list[dict[str, Any]]) -> None:
    """To the first row; of larger cohorts to the row with as many clients and the smallest cohort."""
    for row in rows:
        base = rows[0]
        if row["cohort"] > base["cohort"]:
            base = next(one for one in rows if (one["clients"], one["cohort"]) == (row["clients"], base["cohort"]))
            more = row["cohort"] - base["cohort"]
            row["us_a_client"] = round(1e3 * (row["round_cpu_ms"] - base["round_cpu_ms"]) * RANKS / more, 1)
        for name in RATIOS:
            row[f"{name}_ratio"] = round(row[name] / base[name], 3)


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in columns."""
    measured = ("start-up", "cpu", "peak", "a round", "cpu")
    lines = [("clients", "cohort", *(cell for name in measured for cell in (name, "ratio")), "beyond", "us a client")]
    for row in rows:
        cells = [f"{row['clients']:,}", str(row["cohort"])]
        for name, form in RATIOS.items():
            cells += [format(row[name], form), f"{row[f'{name}_ratio']:.2f}"]
        lines.append((*cells, f"{row['beyond_data_mb']:.0f}", str(row.get("us_a_client", ""))))
    return columns(lines)


def options() -> argparse.Namespace:
    """What the caller asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", nargs="+", type=positive, default=[1000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--cohorts", nargs="+", type=positive, default=[10, 100, 1000])
    parser.add_argument("--samples", type=positive, default=2_000_000)
    parser.add_argument("--parameters", type=positive, default=10_000, help="of the model, about")
    parser.add_argument("--split", choices=sorted(SPLITS), default="iid")
    parser.add_argument("--rounds", type=positive, default=40, help="measured a run; the median counts")
    parser.add_argument("--turns", type=positive, default=3, help="runs of each row; the medians are printed")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.clients, given.cohorts = sorted(set(given.clients)), sorted(set(given.cohorts))
    if given.cohorts[-1] > given.clients[-1] or given.cohorts[0] > given.clients[0]:
        parser.error("the largest --cohorts must fit the largest --clients, and the smallest the smallest")
    if given.rounds < 3:
        parser.error(f"--rounds is {given.rounds}; give at least 3, as the first is not counted")
    if given.samples < max(given.clients[-1], 100):
        parser.error(f"--samples is {given.samples}; every client needs one, and the test set 100: give more")
    return given


def main() -> None:
    given = options()
    if given.rank:
        me, folder, began, case = given.rank
        rank(int(me), Path(folder), float(began), json.loads(case))
        return
    common = {name: getattr(given, name) for name in ("samples", "parameters", "split", "rounds")}
    pairs = [(clients, given.cohorts[0]) for clients in given.clients]
    pairs += [(given.clients[-1], cohort) for cohort in given.cohorts[1:]]
    cases = [{"clients": clients, "cohort": cohort, **common} for clients, cohort in pairs]
    taken: list[list[dict[str, float]]] = [[] for _ in cases]
    for _ in range(given.turns):
        for case, found in zip(cases, taken, strict=True):
            found.append(measure(case))
    rows = [result(case, found) for case, found in zip(cases, taken, strict=True)]
    add_ratios(rows)
    if given.json:
        print("\n".join(map(json.dumps, rows)))
    else:
        about = f"{given.samples:,} samples, split {given.split}, about {given.parameters:,} parameters"
        print(f"{about}, {RANKS} ranks; medians of {given.turns} runs\n")
        print(table(rows))


if __name__ == "__main__":
    main()
