"""A client's job with a real model: its batches, its gradient, its delta, and what they depend on."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from shell import CLASSES, CPU, SIDE, tiny
from torch import Tensor, nn

from fedmpi.clients.task import Batch, ModelJob, Task
from fedmpi.clients.training import Start
from fedmpi.cohort import Work, make_share
from fedmpi.data import Partition
from fedmpi.local import LocalResult, sgd, whole_gradient
from fedmpi.models.lenet import LeNet
from fedmpi.models.logistic import Logistic
from fedmpi.seeds import STREAMS

DATA = tiny()
SIZES = (25, 10, 1, 64)


def partition() -> Partition:
    """Four clients of uneven sizes; the samples from 100 on are nobody's."""
    offsets = np.concatenate([[0], np.cumsum(SIZES)])
    return Partition(offsets, np.random.default_rng(3).permutation(100))


def make_task(model: nn.Module | None = None, seed: int = 0, channels_last: bool = False) -> Task:
    torch.manual_seed(0)
    model = model or Logistic((1, SIDE, SIDE), CLASSES)
    return Task(model, DATA, partition(), seed, CPU, channels_last=channels_last)


def job_of(task: Task, round: int = 1, cid: int = 0, work: Work | None = None) -> ModelJob:
    return task.job(Start(*task.start(), round, cid, work or Work(batch=10)))


def order(task: Task, round: int, cid: int, work: Work | None = None) -> list[list[int]]:
    return [batch.samples.tolist() for batch in job_of(task, round, cid, work).batches()]


def by_hand(model: nn.Module, samples: Tensor) -> Tensor:
    """The mean loss of a batch, normalised with plain arithmetic."""
    images = (DATA.x[samples].float() / 255 - DATA.mean[0]) / DATA.std[0]
    return F.cross_entropy(model(images), DATA.y[samples])


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
    task = Task(Logistic((1, SIDE, SIDE), CLASSES), DATA, twins, 0, CPU)
    assert order(task, 1, 0) != order(task, 1, 1)


def test_epochs_at_the_end_can_be_left_out() -> None:
    def left(leave: int, **work: int) -> list[list[int]]:
        return [batch.samples.tolist() for batch in job_of(make_task(), 2, 0, Work(batch=10, **work)).batches(leave)]

    three = left(0, epochs=3)
    assert left(1, epochs=3) == three[:6] and left(2, epochs=3) == three[:3]  # 10, 10, 5 an epoch
    assert left(3, epochs=3) == left(9, epochs=3) == []
    assert left(1, epochs=1, steps=4) == left(0, epochs=2)[:4]  # steps are those before what is left out


def test_a_straggler_takes_the_first_of_its_batches() -> None:
    work = Work(epochs=4, batch=10, share=make_share("uniform:0.1,0.9"))
    counts = set()
    for round in range(1, 20):
        fewer, all_of_them = order(make_task(), round, 0, work), order(make_task(), round, 0, Work(epochs=4, batch=10))
        assert fewer == all_of_them[: len(fewer)] and len(fewer) == work.count(0, round, 0, 25)
        counts.add(len(fewer))
    assert len(counts) > 4


def test_batches_can_be_gone_through_again() -> None:
    job = job_of(make_task(), work=Work(epochs=2, batch=10))
    once, again = list(job.batches()), list(job.batches())
    assert [(b.samples.tolist(), b.seed) for b in once] == [(b.samples.tolist(), b.seed) for b in again]


def test_everything_is_every_sample_once_in_shares_that_add_up_to_one() -> None:
    task = make_task()
    for cid, size in enumerate(SIZES):
        whole = list(job_of(task, cid=cid).everything())
        assert [i for batch, _ in whole for i in batch.samples.tolist()] == partition().of(cid).tolist()
        assert [share for _, share in whole] == [len(batch.samples) / size for batch, _ in whole]
        assert sum(share for _, share in whole) == pytest.approx(1, abs=1e-12)
        assert max(len(batch.samples) for batch, _ in whole) <= 10


def test_everything_does_not_depend_on_how_much_is_trained() -> None:
    for work in (
        Work(epochs=7, batch=10),
        Work(steps=1, batch=10),
        Work(batch=10, share=make_share("uniform:0.1,0.1")),
    ):
        shares = [share for _, share in job_of(make_task(), work=work).everything()]
        assert shares == [10 / 25, 10 / 25, 5 / 25]


def test_samples_that_all_clients_share_are_trained_on_and_part_of_everything() -> None:
    torch.manual_seed(0)
    shared = Partition(partition().offsets, partition().order, shared=np.array([150, 151, 152]))
    task = Task(Logistic((1, SIDE, SIDE), CLASSES), DATA, shared, 0, CPU)
    for cid in range(4):
        expected = sorted([*partition().of(cid).tolist(), 150, 151, 152])
        job = job_of(task, cid=cid)
        assert sorted(i for batch in job.batches() for i in batch.samples.tolist()) == expected
        whole = list(job.everything())
        assert sorted(i for batch, _ in whole for i in batch.samples.tolist()) == expected
        assert sum(share for _, share in whole) == pytest.approx(1, abs=1e-12)


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
        torch.autograd.backward(by_hand(alone, batch.samples))
        for span in task.layout.spans:
            assert torch.allclose(span.view(g_P), alone.get_parameter(span.name).grad, atol=1e-6), span.name
    assert g_P.abs().max() > 1e-3


def test_the_gradient_can_be_taken_at_another_point_and_leaves_the_clients_own() -> None:
    task = make_task()
    job, batch = job_of(task), Batch(torch.arange(10), seed=1)
    own, elsewhere = job.x_P.clone(), torch.linspace(-1, 1, task.layout.params)
    there = job.grad(elsewhere, batch).clone()
    assert torch.equal(job.x_P, own)
    here = job.grad(job.x_P, batch).clone()
    job.x_P.copy_(elsewhere)
    assert torch.equal(job.grad(job.x_P, batch), there) and not torch.equal(here, there)


def test_only_gradients_that_were_asked_for_count_in_the_loss_by_their_samples() -> None:
    task = make_task()
    job = job_of(task)
    few, many = Batch(torch.arange(3), 0), Batch(torch.arange(3, 20), 0)
    losses = [task.loss(batch).item() for batch in (few, many)]
    for batch in (few, many):
        job.grad(job.x_P, batch)
    loss = job.deliver(LocalResult(job.delta_P))().loss
    assert loss == pytest.approx((3 * losses[0] + 17 * losses[1]) / 20, rel=1e-6)
    assert job_of(task).deliver(LocalResult(job.delta_P))().loss == 0.0  # a new job, and no gradient


def test_a_job_hands_on_what_all_clients_share_and_what_its_client_kept() -> None:
    task = make_task()
    start_N, ints = task.start()
    c_N, own_P = torch.arange(float(len(start_N) + 5)), torch.ones(task.layout.params)  # c is padded
    job = task.job(Start(start_N, ints, 7, 2, Work(), {"control": c_N}, {"control": own_P}))
    assert job.round == 7
    assert torch.equal(job.shared["control"], torch.arange(float(task.layout.params)))
    assert torch.equal(job.memory["control"], own_P)


def test_a_gradient_may_be_overwritten_by_its_caller() -> None:
    job, batch = job_of(make_task()), Batch(torch.arange(10), seed=1)
    first = job.grad(job.x_P, batch)
    kept = first.clone()
    first.fill_(torch.nan)
    assert torch.equal(job.grad(job.x_P, batch), kept)


def test_a_client_trains_as_torch_would() -> None:
    torch.manual_seed(0)
    model = Logistic((1, SIDE, SIDE), CLASSES)
    alone = copy.deepcopy(model)
    task = make_task(model)
    job = job_of(task, work=Work(epochs=2, batch=10))
    batches, losses, seen = list(job.batches()), 0.0, 0
    _, delta_N, ints, loss, *_ = job.deliver(sgd(lr=0.05, momentum=0.9, weight_decay=0.01)(job))()
    before = torch.cat([p.detach().reshape(-1) for p in alone.parameters()])
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    for batch in batches:
        optimizer.zero_grad()
        mean = by_hand(alone, batch.samples)
        torch.autograd.backward(mean)
        optimizer.step()
        losses, seen = losses + mean.item() * len(batch.samples), seen + len(batch.samples)
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
        job = task.job(Start(start_N, ints, 1, 0, work))
        deltas.append(job.deliver(rule(job))().delta_N.clone())
    assert torch.equal(deltas[0], deltas[1])
    assert torch.equal(start_N, make_task().start()[0])


def test_a_delta_of_a_rules_own_memory_is_taken() -> None:
    task = make_task()
    job, own = job_of(task), torch.linspace(0, 1, task.layout.params)
    result = LocalResult(own)
    trained = job.deliver(result)()
    assert torch.equal(trained.delta_N, own) and trained.result is result


def test_buffers_travel_as_deltas_and_counters_separately() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(200, CLASSES))
    task = make_task(model)
    start_N, _ = task.start()
    ints = torch.tensor([40])
    job = task.job(Start(start_N, ints, 1, 0, Work(batch=10)))
    _, delta_N, its_ints, *_ = job.deliver(sgd(lr=0.01)(job))()
    behind = slice(task.layout.params, task.layout.length)
    assert its_ints.tolist() == [43] and ints.tolist() == [40]  # three batches
    now = torch.cat([model[1].running_mean, model[1].running_var])
    assert torch.equal(delta_N[behind], now - start_N[behind]) and delta_N[behind].any()


def test_padding_stays_zero() -> None:
    torch.manual_seed(0)
    task = Task(Logistic((1, SIDE, SIDE), CLASSES), DATA, partition(), 0, CPU, ranks=8)
    job = job_of(task)
    delta_N = job.deliver(sgd(lr=0.1, weight_decay=0.1)(job))().delta_N
    assert len(delta_N) % 8 == 0 and len(delta_N) > task.layout.length
    assert not delta_N[task.layout.length :].any() and not task.x_N[task.layout.length :].any()


# What is drawn by torch


def noisy() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 30), nn.Dropout(0.5), nn.Linear(30, CLASSES))


def delta(task: Task, start: tuple[Tensor, Tensor], round: int, cid: int) -> Tensor:
    job = task.job(Start(*start, round, cid, Work(batch=5)))
    return job.deliver(sgd(lr=0.1)(job))().delta_N.clone()


def test_dropout_depends_on_seed_round_and_client_only() -> None:
    task = make_task(noisy())
    start = task.start()
    first = delta(task, start, 3, 1)
    delta(task, start, 3, 0), torch.rand(7), task.load(*start), list(task.score([slice(0, 10)]))
    assert torch.equal(delta(task, start, 3, 1), first)
    assert torch.equal(delta(make_task(noisy()), start, 3, 1), first)


def drawn(job: ModelJob, seed: int) -> tuple[float, ...]:
    """The gradient on the same samples, with what the layers draw from a seed."""
    return tuple(job.grad(job.x_P, Batch(torch.arange(100), seed)).tolist())


def test_dropout_differs_between_rounds_clients_and_seeds() -> None:
    start = make_task(noisy()).start()

    def grad(seed: int, round: int, cid: int) -> tuple[float, ...]:
        job = make_task(noisy(), seed=seed).job(Start(*start, round, cid, Work()))
        return drawn(job, next(job.batches()).seed)

    assert len({grad(0, 1, 0), grad(0, 2, 0), grad(0, 1, 1), grad(1, 1, 0)}) == 4


def test_every_batch_has_draws_of_its_own_in_epochs_and_in_everything() -> None:
    job = job_of(make_task(noisy()), work=Work(epochs=2, batch=10))
    seeds = [batch.seed for batch in job.batches()] + [batch.seed for batch, _ in job.everything()]
    assert len(seeds) == 9 and len({drawn(job, seed) for seed in seeds}) == 9


def test_a_gradient_asked_for_twice_is_the_same_bits_with_dropout_too() -> None:
    task = make_task(noisy())
    job = job_of(task, work=Work(epochs=2, batch=5))
    batches, point = list(job.batches()), job.x_P.clone()
    first = [job.grad(job.x_P, batch).clone() for batch in batches]
    job.x_P.normal_(), torch.rand(5)
    for batch, g_P in zip(reversed(batches), reversed(first), strict=True):
        assert torch.equal(job.grad(point, batch), g_P)
    job.x_P.copy_(point)
    linear, _ = job.linearise(batches[2])
    assert torch.allclose(linear, first[2], atol=1e-7) and not torch.allclose(linear, first[3], atol=1e-3)


# Second derivatives


def norm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Tanh(), nn.Flatten(), nn.Linear(200, CLASSES))


def small_lenet() -> nn.Module:
    torch.manual_seed(0)
    return LeNet(1, SIDE, SIDE, CLASSES)


class Idle(nn.Module):
    """A model with a parameter that it does not use, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.ones(5))
        self.used = noisy()
        self.used[3].bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.used(x)
        return logits


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("make", [noisy, norm, small_lenet, Idle])
def test_linearise_is_the_gradient_and_torchs_product_with_the_hessian(
    make: Callable[[], nn.Module], channels_last: bool
) -> None:
    model = make().double()
    task = Task(model, DATA, partition(), 0, CPU, channels_last=channels_last, dtype=torch.float64)
    job = job_of(task)
    batch = list(job.batches())[1]
    spans = [span for span in task.layout.spans if span.start < task.layout.params]
    others = {k: b.clone() for k, b in model.named_buffers()}
    alone = copy.deepcopy(model)

    def loss(*params: Tensor) -> Tensor:
        torch.manual_seed(batch.seed)
        images = (DATA.x[batch.samples].double() / 255 - DATA.mean[0]) / DATA.std[0]
        tensors = dict(zip((span.name for span in spans), params, strict=True)) | others
        return F.cross_entropy(torch.func.functional_call(alone, tensors, (images,)), DATA.y[batch.samples])

    params = tuple(span.view(job.x_P).clone().contiguous() for span in spans)
    g_P, times_hessian = job.linearise(batch)
    own_P = g_P.clone()
    assert torch.allclose(job.grad(job.x_P, batch), own_P, rtol=1e-9, atol=1e-12)
    v_P = torch.randn(task.layout.params, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    vs = tuple(span.view(v_P).contiguous() for span in spans)
    _, products = torch.autograd.functional.hvp(loss, params, vs)
    ours_P = times_hessian(v_P)
    for span, product in zip(spans, products, strict=True):
        assert torch.allclose(span.view(ours_P), product, rtol=1e-9, atol=1e-12), span.name
    assert ours_P.abs().max() > 1e-3


def test_a_product_with_the_hessian_can_be_taken_as_often_as_one_likes() -> None:
    task = make_task(noisy())
    job = job_of(task)
    _, times_hessian = job.linearise(next(job.batches()))
    v_P = torch.ones(task.layout.params)
    first = times_hessian(v_P).clone()
    assert torch.allclose(times_hessian(2 * v_P), 2 * first, atol=1e-6) and first.any()


def test_what_a_linearisation_returns_is_the_callers_to_overwrite() -> None:
    task = make_task(noisy())
    job, v_P = job_of(task), torch.ones(task.layout.params)
    batch = next(job.batches())
    g_P, times_hessian = job.linearise(batch)
    expected_g, expected_v = g_P.clone(), times_hessian(v_P).clone()
    g_P.fill_(torch.nan)
    job.grad(job.x_P, batch).fill_(torch.nan)
    again_g, again = job.linearise(batch)
    again(v_P).fill_(torch.nan)
    assert torch.equal(again_g, expected_g) and torch.equal(job.linearise(batch)[1](v_P), expected_v)
    assert torch.equal(v_P, torch.ones_like(v_P))


def test_a_linearisation_counts_in_no_loss() -> None:
    job = job_of(make_task())
    job.linearise(next(job.batches()))
    assert job.samples == 0 and float(job.loss_sum) == 0


# Aside


def test_gradients_aside_leave_no_trace_in_buffers_counters_and_loss() -> None:
    task = make_task(norm())
    job = job_of(task)
    batches = list(job.batches())
    job.grad(job.x_P, batches[0])
    behind = task.x_N[task.layout.params :]
    before, loss, seen = behind.clone(), float(job.loss_sum), job.samples
    assert before.any() and int(task.model[1].num_batches_tracked) == 1
    with job.without_side_effects():
        job.grad(job.x_P, batches[1])
        job.linearise(batches[2])
        assert not torch.equal(behind, before) and int(task.model[1].num_batches_tracked) == 3
    assert torch.equal(behind, before) and int(task.model[1].num_batches_tracked) == 1
    assert (float(job.loss_sum), job.samples) == (loss, seen)
    whole_gradient(job, job.start_P)
    assert torch.equal(behind, before) and (float(job.loss_sum), job.samples) == (loss, seen)
    job.grad(job.x_P, batches[1])  # and what comes after counts again
    assert job.samples == seen + len(batches[1].samples) and int(task.model[1].num_batches_tracked) == 2


def test_what_is_trained_aside_stays_trained() -> None:
    job = job_of(make_task(norm()))
    with job.without_side_effects():
        job.x_P.fill_(0.5)
    assert bool((job.x_P == 0.5).all())


def test_a_whole_gradient_is_that_of_the_mean_loss_of_all_samples() -> None:
    torch.manual_seed(0)
    model = Logistic((1, SIDE, SIDE), CLASSES)
    alone = copy.deepcopy(model)
    job = job_of(make_task(model))
    torch.autograd.backward(by_hand(alone, torch.from_numpy(partition().of(0))))
    expected = torch.cat([p.grad.reshape(-1) for p in alone.parameters()])
    assert torch.allclose(whole_gradient(job, job.start_P), expected, atol=1e-6) and expected.abs().max() > 1e-3


# The meta set


def meta_task(model: nn.Module | None = None, seed: int = 0) -> Task:
    torch.manual_seed(0)
    model = model or Logistic((1, SIDE, SIDE), CLASSES)
    return Task(model, DATA, partition(), seed, CPU, meta=np.arange(110, 140))


def meta_gradient(task: Task, block: slice, round: int) -> Tensor:
    return task.meta_gradient(*task.start(), block, round)


def test_a_meta_gradient_is_that_of_the_blocks_mean_loss() -> None:
    task = meta_task()
    alone = copy.deepcopy(task.model)
    for block in (slice(0, 16), slice(16, 30)):
        alone.zero_grad()
        torch.autograd.backward(by_hand(alone, torch.arange(110 + block.start, 110 + block.stop)))
        expected = torch.cat([p.grad.reshape(-1) for p in alone.parameters()])
        assert torch.allclose(meta_gradient(task, block, 1), expected, atol=1e-6) and expected.abs().max() > 1e-3


def test_meta_gradients_of_blocks_make_up_that_of_the_set() -> None:
    task = meta_task()
    whole = meta_gradient(task, slice(0, 30), 1).clone()
    parts = sum(meta_gradient(task, slice(at, at + 10), 1).clone() for at in (0, 10, 20))
    assert torch.allclose(parts / 3, whole, atol=1e-6)


def test_a_meta_gradient_does_not_depend_on_the_blocks_before_it_nor_on_the_mode_it_finds() -> None:
    first = meta_gradient(meta_task(noisy()), slice(20, 30), 3).clone()
    task = meta_task(noisy())
    meta_gradient(task, slice(0, 10), 3), list(task.score([slice(0, 10)])), torch.rand(3)
    assert torch.equal(meta_gradient(task, slice(20, 30), 3), first)


def test_meta_gradients_draw_by_seed_round_and_block() -> None:
    def draws(seed: int, round: int, start: int) -> tuple[float, ...]:
        torch.manual_seed(0)
        twice = np.concatenate([np.arange(10), np.arange(10)])  # two blocks of the same samples
        task = Task(noisy(), DATA, partition(), seed, CPU, meta=twice)
        return tuple(meta_gradient(task, slice(start, start + 10), round).tolist())

    assert len({draws(0, 1, 0), draws(1, 1, 0), draws(0, 2, 0), draws(0, 1, 10)}) == 4
    assert draws(0, 1, 0) == draws(0, 1, 0)


def test_streams_of_draws_are_apart() -> None:
    assert len(set(STREAMS.values())) == len(STREAMS)


# Scores


def test_a_score_counts_right_answers_and_sums_losses() -> None:
    model = noisy()
    task = make_task(model)
    images = (DATA.test_x.float() / 255 - DATA.mean[0]) / DATA.std[0]
    with torch.no_grad():
        logits = model.eval()(images)
    model.train()
    blocks = list(task.score([slice(at, min(at + 23, 60)) for at in range(0, 60, 23)]))
    assert [scored.labels for scored in blocks] == [23, 23, 14]
    assert sum(scored.metric for scored in blocks) == int((logits.argmax(1) == DATA.test_y).sum())
    assert sum(scored.loss for scored in blocks) == pytest.approx(
        float(F.cross_entropy(logits, DATA.test_y)) * 60, rel=1e-5
    )


def test_training_continues_in_training_mode_after_a_score() -> None:
    task = make_task(noisy())
    list(task.score([slice(0, 5)]))
    assert not task.model.training
    job_of(task)
    assert task.model.training
