"""The gradient in pieces: large parameters as autograd has made them, the rest through the vector; the same steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from federation import CPU, arrays, partition
from torch import Tensor, nn

from fedmpi.clients import task as clients_task
from fedmpi.clients.task import Task
from fedmpi.clients.together import Together
from fedmpi.clients.training import Start
from fedmpi.cohort import Work
from fedmpi.local import sgd

WORK = Work(epochs=2, batch=4)


class Uneven(nn.Module):
    """Large and small parameters in turn, a transposed one, one that is used twice and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.wide, self.narrow = nn.Linear(288, 12), nn.Linear(12, 3)
        self.turned, self.unused = nn.Parameter(torch.randn(12, 12) * 0.1), nn.Parameter(torch.ones(200))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.wide(torch.relu(self.conv(x)).flatten(1)))
        logits: Tensor = self.narrow((x @ self.turned.t()) @ self.turned)
        return logits


def made(channels_last: bool = False) -> Task:
    torch.manual_seed(3)
    return Task(Uneven(), arrays(), partition(), seed=11, device=CPU, channels_last=channels_last)


def job_of(task: Task) -> Any:
    model_N, ints = task.start()
    return task.job(Start(model_N, ints, 1, 4, WORK, {}, {}))


@pytest.fixture(params=[1, 100, 1000])
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Call parameters large from so many elements on, and cut them into pieces of 50."""
    monkeypatch.setattr(clients_task, "LARGE", request.param)
    monkeypatch.setattr(clients_task, "PIECE", 50)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("channels_last", [False, True])
def test_pieces_cover_the_gradient(channels_last: bool) -> None:
    task = made(channels_last)
    job = job_of(task)
    for batch in list(job.batches())[:3]:
        loss, pieces = task.pieces(batch)
        found = torch.full_like(task.grad_T, torch.nan)
        for at, g in pieces:
            assert found[at].isnan().all(), "no element twice"
            found[at] = g
        assert float(task.gradient(batch)) == float(loss) and torch.equal(found, task.grad_T)
    vector = task.grad_T.untyped_storage().data_ptr()
    direct = [len(g) for _, g in pieces if g.untyped_storage().data_ptr() != vector]
    assert direct and max(direct) <= 50, "some are not in the vector"


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("channels_last", [False, True])
def test_steps_by_pieces_have_the_bits_of_steps_by_the_whole_vector(channels_last: bool, momentum: float) -> None:
    """A limit that is never reached makes the descent take whole gradients."""
    moved = []
    for clip in (None, 1e9):
        job = job_of(made(channels_last))
        sgd(0.1, momentum, clip=clip)(job)
        moved.append((job.x_P.clone(), job.delta_P.clone(), job.loss_sum.clone()))
    assert all(torch.equal(a, b) for a, b in zip(*moved, strict=True))
    assert not torch.equal(moved[0][0], job.start_P)


@pytest.mark.usefixtures("small")
def test_a_stack_of_clients_still_computes_large_gradients_at_once() -> None:
    torch.manual_seed(3)
    stack = Together(Uneven(), arrays(), partition(), seed=11, device=CPU, clients=2)
    model_N, ints = stack.start()
    alone, computed = stack.stacked, list[int]()
    stack.stacked = lambda rows, pairs: (computed.append(len(rows)), alone(rows, pairs))[1]  # type: ignore[method-assign]

    def train(place: Any, cid: int) -> Any:
        return sgd(0.1)(place.job(Start(model_N, ints, 1, cid, Work(steps=2, batch=4), {}, {})))

    with torch.no_grad():
        assert len(list(stack.each([2, 4], train))) == 2
    assert computed == [2, 2]
