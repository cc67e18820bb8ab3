"""Federated training as a Python call, with clients that are at hand as data sets of their own.

Five hospitals have records of ten measurements each and one of three diagnoses. They see different shares of the
diagnoses and have instruments of their own. From the root of the checkout, alone or on several ranks:

    python examples/python_call.py
    torchrun --standalone --nproc-per-node=2 examples/python_call.py
    mpiexec -n 2 python -m mpi4py examples/python_call.py

All of them print the same two lines, to the last bit of the weights. Every rank runs the whole script, makes the same
calls and gets the same results; so make the data in the same way on all of them, and let one rank do the printing.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import fedmpi
from fedmpi.local import sgd
from fedmpi.masks import make_mask
from fedmpi.server import ServerKnobs, make_server

HOSPITALS = {"Aare": 120, "Birs": 60, "Doubs": 200, "Emme": 40, "Reuss": 90}  # how many records each has


def records(count: int, shares: Tensor, typical: Tensor, rng: torch.Generator) -> TensorDataset:
    """Records of patients: the diagnoses in these shares, and measurements around what is typical of each."""
    diagnosis = torch.multinomial(shares, count, replacement=True, generator=rng)
    return TensorDataset(typical[diagnosis] + torch.randn(count, 10, generator=rng), diagnosis)


def digest(model: nn.Module) -> str:
    """The SHA-256 of a model's weights."""
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in model.state_dict().values())).hexdigest()


def main() -> None:
    """Train twice and print the results."""
    rng = torch.Generator().manual_seed(0)
    typical = 0.7 * torch.randn(3, 10, generator=rng)
    clients = {
        name: records(count, torch.rand(3, generator=rng), typical + 0.3 * torch.randn(10, generator=rng), rng)
        for name, count in HOSPITALS.items()
    }
    test = records(300, torch.ones(3), typical, rng)

    torch.manual_seed(0)  # before the model is made: its weights are yours to draw. On several ranks, rank 0's count
    model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 3))

    mine = fedmpi.Algorithm(
        local=sgd(lr=0.05, momentum=0.9),
        mask=make_mask("gma", tau=0.4),
        server=make_server("adam", ServerKnobs(lr=0.05)),
    )
    knobs = {"rounds": 10, "cohort": 4, "threads": 1, "quiet": True, "local": {"batch": 20}}
    results = {
        "put together": fedmpi.train(model, clients, test, algorithm=mine, **knobs),
        "by its name": fedmpi.train(model, clients, test, algorithm="scaffold", mask="mean", **knobs),
    }
    for name, result in results.items():
        if result.rank == 0:
            print(f"{name}: accuracy {result.reports[-1]['test_accuracy']:.3f}, sha256 {digest(result.model)}")


if __name__ == "__main__":
    main()
