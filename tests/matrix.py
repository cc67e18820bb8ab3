"""FedAvg and FedYogi with every mask, a run folder each, on the ranks that started this: `matrix.py OUT COMM`."""

from __future__ import annotations

import itertools
import os
import sys

import torch

from fedmpi.comm import connect, share_node
from fedmpi.env import find_place
from fedmpi.options import parse
from fedmpi.run import prepare, run

SMALL = "--data glyphs --clients 40 --cohort 7 --rounds 2 --local.steps 4 --threads 1 --log_to none".split()
COMBINATIONS = list(itertools.product(("fedavg", "fedyogi"), ("mean", "gma", "and")))


def main(out: str, which: str) -> None:
    torch.set_num_threads(1)
    place, cpu = find_place(os.environ), torch.device("cpu")
    comm = connect(which, place, cpu, 60.0, os.environ)
    share_node(comm)
    for algorithm, mask in COMBINATIONS:
        options = ["--algorithm", algorithm, "--mask", mask, "--out", f"{out}/{algorithm}-{mask}"]
        run(prepare(parse([*SMALL, *options])), comm, place, cpu, os.environ)
    comm.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
