"""Train every algorithm, and FedAvg with every mask, on the ranks that started this: `matrix.py OUT COMM`."""

from __future__ import annotations

import os
import sys

import torch

from fedmpi.algorithms import ALGORITHMS
from fedmpi.comm import connect, share_node
from fedmpi.comm.env import find_place
from fedmpi.runs.build import prepare
from fedmpi.runs.options import parse
from fedmpi.runs.run import run

SMALL = "--data glyphs --clients 40 --cohort 7 --rounds 2 --local.steps 4 --threads 1 --log_to none".split()
COMBINATIONS = [(name, "gma") for name in ALGORITHMS] + [("fedavg", mask) for mask in ("mean", "and", "sand")]
OPTIONS = {
    "scaffold": ["--rounds", "3", "--clients", "14"],  # so that clients come back to what they kept
    "fednova": ["--local.work", "uniform:0.3,1.0"],  # without uneven work it is FedAvg
    "fedshare": ["--meta.size", "60"],
}


def main(out: str, which: str) -> None:
    torch.set_num_threads(1)
    place, cpu = find_place(os.environ), torch.device("cpu")
    comm = connect(which, place, cpu, 60.0, os.environ)
    share_node(comm)
    for algorithm, mask in COMBINATIONS:
        options = ["--algorithm", algorithm, "--mask", mask, "--out", f"{out}/{algorithm}-{mask}"]
        own = "--clients 150 --eval.every 4 --eval.samples 500 --checkpoint.keep 0".split() + OPTIONS.get(algorithm, [])
        run(prepare(parse([*SMALL, *own, *options])), comm, place, cpu, os.environ)
    comm.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
