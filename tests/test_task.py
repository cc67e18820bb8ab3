"""A client's job with a real model: its batches, its gradient, its delta, and what they depend on."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from shell import CLASSES, CPU, SIDE, tiny
from torch import Tensor, nn

from fedmpi.data import Partition
from fedmpi.local import LocalResult, sgd
from fedmpi.models.lenet import LeNet
from fedmpi.models.logistic import logistic
from fedmpi.task import ModelJob, Task, Work

DATA = tiny()
SIZES = (25, 10, 1, 64)


def partition() -> Partition:
    """Four clients of uneven sizes; the samples from 100 on are nobody's."""
    offsets = np.concatenate([[0], np.cumsum(SIZES)])
    return Partition(offsets, np.random.default_rng(3).permutation(100))


def make_task(model: nn.Module | None = None, seed: int = 0, channels_last: bool = False) -> Task:
    torch.manual_seed(0)
    model = model or logistic(1, SIDE, SIDE, CLASSES)
    return Task(model, DATA, partition(), seed, CPU, channels_last=channels_last)


def job_of(task: Task, round: int = 1, cid: int = 0, work: Work | None = None) -> ModelJob:
    return task.job(*task.start(), round, cid, work or Work(batch=10))


def order(task: Task, round: int, cid: int, work: Work | None = None) -> list[list[int]]:
    return [batch.tolist() for batch in job_of(task, round, cid, work).batches()]


def by_hand(model: nn.Module, batch: Tensor) -> Tensor:
    """The mean loss of a batch, normalised with plain arithmetic."""
    images = (DATA.x[batch].float() / 255 - DATA.mean[0]) / DATA.std[0]
    return F.cross_entropy(model(images), DATA.y[batch])


# Batches


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 3), st.integers(1, 70), st.integers(1, 3), st.integers(1, 50))
def test_every_sample_once_an_epoch_with_a_short_last_batch(cid: int, size: int, epochs: int, round: int) -> None:
    task, mine = make_task(), partition().of(cid)
    batches = order(task, round, cid, Work(epochs=epochs, batch=size))
    an_epoch = -(-len(mine) // size)
    assert len(batches) == epochs * an_epoch
    for epoch in range(epochs):
        part = batches[epoch * an_epoch : (epoch + 1) * an_epoch]
        assert sorted(i for batch in part for i in batch) == sorted(mine.tolist())
        assert all(len(batch) == size for batch in part[:-1])
        assert len(part[-1]) == len(mine) - size * (an_epoch - 1)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 7, 30])
def test_steps_give_just_so_many_batches_beyond_an_epoch_too(steps: int) -> None:
    task = make_task()
    by_steps = order(task, 1, 0, Work(epochs=99, steps=steps, batch=10))
    assert len(by_steps) == steps
    assert by_steps == order(task, 1, 0, Work(epochs=10, batch=10))[:steps]  # 25 samples: 10, 10, 5 an epoch


def test_epochs_are_shuffled_anew() -> None:
    batches = order(make_task(), 1, 3, Work(epochs=2, batch=64))
    assert batches[0] != batches[1] and sorted(batches[0]) == sorted(batches[1])


def test_the_order_depends_on_seed_round_and_client_only() -> None:
    task = make_task(seed=5)
    first = order(task, 4, 3)
    order(task, 1, 0), torch.rand(3), np.random.default_rng().random()
    assert order(task, 4, 3) == first
    assert order(make_task(LeNet(1, SIDE, SIDE, CLASSES), seed=5), 4, 3) == first
    assert order(task, 5, 3) != first
    assert order(make_task(seed=6), 4, 3) != first


def test_clients_of_equal_size_are_shuffled_differently() -> None:
    twins = Partition(np.array([0, 50, 100]), np.concatenate([np.arange(50), np.arange(50)]))
    torch.manual_seed(0)
    task = Task(logistic(1, SIDE, SIDE, CLASSES), DATA, twins, 0, CPU)
    assert order(task, 1, 0) != order(task, 1, 1)


# Gradient and delta


@pytest.mark.parametrize("channels_last", [False, True])
def test_the_gradient_is_autograds_on_an_unbound_model(channels_last: bool) -> None:
    torch.manual_seed(0)
    model = LeNet(1, SIDE, SIDE, CLASSES)
    alone = copy.deepcopy(model)
    task = make_task(model, channels_last=channels_last)
    job = job_of(task)
    for batch in job.batches():
        g_P = job.grad(job.x_P, batch)
        alone.zero_grad()
        torch.autograd.backward(by_hand(alone, batch))
        for span in task.layout.spans:
            assert torch.allclose(span.view(g_P), alone.get_parameter(span.name).grad, atol=1e-6), span.name
    assert g_P.abs().max() > 1e-3


def test_the_gradient_can_be_taken_at_another_point_and_leaves_the_clients_own() -> None:
    task = make_task()
    job, batch = job_of(task), torch.arange(10)
    own, elsewhere = job.x_P.clone(), torch.linspace(-1, 1, task.layout.params)
    there = job.grad(elsewhere, batch).clone()
    assert torch.equal(job.x_P, own)
    here = job.grad(job.x_P, batch).clone()
    job.x_P.copy_(elsewhere)
    assert torch.equal(job.grad(job.x_P, batch), there) and not torch.equal(here, there)


def test_a_gradient_may_be_overwritten_by_its_caller() -> None:
    job, batch = job_of(make_task()), torch.arange(10)
    first = job.grad(job.x_P, batch)
    kept = first.clone()
    first.fill_(torch.nan)
    assert torch.equal(job.grad(job.x_P, batch), kept)


def test_a_client_trains_as_torch_would() -> None:
    torch.manual_seed(0)
    model = logistic(1, SIDE, SIDE, CLASSES)
    alone = copy.deepcopy(model)
    task = make_task(model)
    job = job_of(task, work=Work(epochs=2, batch=10))
    batches, losses, seen = list(job.batches()), 0.0, 0
    delta_N, ints, loss = job.finish(sgd(lr=0.05, momentum=0.9, weight_decay=0.01)(job))
    before = torch.cat([p.detach().reshape(-1) for p in alone.parameters()])
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    for batch in batches:
        optimizer.zero_grad()
        mean = by_hand(alone, batch)
        torch.autograd.backward(mean)
        optimizer.step()
        losses, seen = losses + mean.item() * len(batch), seen + len(batch)
    after = torch.cat([p.detach().reshape(-1) for p in alone.parameters()])
    assert torch.allclose(delta_N, after - before, atol=1e-6) and delta_N.abs().max() > 1e-3
    assert loss == pytest.approx(losses / seen, rel=1e-5) and seen == 50
    assert ints.tolist() == []


def test_a_job_starts_from_the_vector_it_is_given_and_leaves_it_alone() -> None:
    task = make_task()
    start_N, ints = task.start()
    rule, work = sgd(lr=0.1), Work(batch=10)
    deltas = []
    for _ in range(2):  # the second finds the model where the first has left it
        job = task.job(start_N, ints, 1, 0, work)
        deltas.append(job.finish(rule(job))[0].clone())
    assert torch.equal(deltas[0], deltas[1])
    assert torch.equal(start_N, make_task().start()[0])


def test_a_delta_of_a_rules_own_memory_is_taken() -> None:
    task = make_task()
    job, own = job_of(task), torch.linspace(0, 1, task.layout.params)
    assert torch.equal(job.finish(LocalResult(own))[0], own)


def test_buffers_travel_as_deltas_behind_and_counters_beside() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(200, CLASSES))
    task = make_task(model)
    start_N, _ = task.start()
    ints = torch.tensor([40])
    job = task.job(start_N, ints, 1, 0, Work(batch=10))
    delta_N, its_ints, _ = job.finish(sgd(lr=0.01)(job))
    behind = slice(task.layout.params, task.layout.length)
    assert its_ints.tolist() == [43] and ints.tolist() == [40]  # three batches
    now = torch.cat([model[1].running_mean, model[1].running_var])
    assert torch.equal(delta_N[behind], now - start_N[behind]) and delta_N[behind].any()


def test_padding_stays_zero() -> None:
    torch.manual_seed(0)
    task = Task(logistic(1, SIDE, SIDE, CLASSES), DATA, partition(), 0, CPU, ranks=8)
    job = job_of(task)
    delta_N = job.finish(sgd(lr=0.1, weight_decay=0.1)(job))[0]
    assert len(delta_N) % 8 == 0 and len(delta_N) > task.layout.length
    assert not delta_N[task.layout.length :].any() and not task.x_N[task.layout.length :].any()


# What is drawn by torch


def noisy() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 30), nn.Dropout(0.5), nn.Linear(30, CLASSES))


def delta(task: Task, start: tuple[Tensor, Tensor], round: int, cid: int) -> Tensor:
    job = task.job(*start, round, cid, Work(batch=5))
    return job.finish(sgd(lr=0.1)(job))[0].clone()


def test_dropout_depends_on_seed_round_and_client_only() -> None:
    task = make_task(noisy())
    start = task.start()
    first = delta(task, start, 3, 1)
    delta(task, start, 3, 0), torch.rand(7), task.load(*start), task.score(slice(0, 10))
    assert torch.equal(delta(task, start, 3, 1), first)
    assert torch.equal(delta(make_task(noisy()), start, 3, 1), first)


def test_dropout_differs_between_rounds_clients_and_seeds() -> None:
    everything, start = torch.arange(100), make_task(noisy()).start()

    def grad(seed: int, round: int, cid: int) -> tuple[float, ...]:
        job = make_task(noisy(), seed=seed).job(*start, round, cid, Work())
        return tuple(job.grad(job.x_P, everything).tolist())

    assert len({grad(0, 1, 0), grad(0, 2, 0), grad(0, 1, 1), grad(1, 1, 0)}) == 4


# Images and scores


def test_normalised_training_images_have_mean_0_and_deviation_1() -> None:
    images = make_task().images(DATA.x).double()
    assert float(images.mean()) == pytest.approx(0, abs=1e-6)
    assert float(images.std(correction=0)) == pytest.approx(1, abs=1e-6)


def test_every_channel_is_normalised_by_its_own_numbers() -> None:
    x = torch.randint(0, 256, (20, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    y = torch.zeros(20, dtype=torch.int64)
    mean, std = (0.1, 0.5, 0.9), (0.2, 1.0, 4.0)
    arrays = type(DATA)("colour", 1, x, y, x, y, mean, std)
    task = Task(logistic(3, 4, 4, 1), arrays, Partition(np.array([0, 20]), np.arange(20)), 0, CPU)
    by_channel = (x / 255 - torch.tensor(mean).view(1, 3, 1, 1)) / torch.tensor(std).view(1, 3, 1, 1)
    assert torch.allclose(task.images(x), by_channel, atol=1e-5)
    assert x.dtype == torch.uint8 and task.images(x[:1]).shape == (1, 3, 4, 4)


def test_a_score_counts_right_answers_and_sums_losses() -> None:
    model = noisy()
    task = make_task(model)
    images = (DATA.test_x.float() / 255 - DATA.mean[0]) / DATA.std[0]
    with torch.no_grad():
        logits = model.eval()(images)
    model.train()
    blocks = [task.score(slice(at, at + 23)) for at in range(0, 60, 23)]  # 23, 23 and 14
    assert sum(right for right, _ in blocks) == int((logits.argmax(1) == DATA.test_y).sum())
    assert sum(loss for _, loss in blocks) == pytest.approx(float(F.cross_entropy(logits, DATA.test_y)) * 60, rel=1e-5)


def test_training_goes_on_in_training_mode_after_a_score() -> None:
    task = make_task(noisy())
    task.score(slice(0, 5))
    assert not task.model.training
    job_of(task)
    assert task.model.training
