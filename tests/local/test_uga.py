"""Unbiased gradients with real models: against differences, against torch's own graph through all steps, and what the
way back costs and leaves."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import federation
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import rank_environment
from federation import CPU, norm_model, plain_model
from hypothesis import given
from hypothesis import strategies as st
from quadratic import BENT, Parabola
from shell import CLASSES, SIDE, tiny
from torch import Tensor, nn

from fedmpi.clients.feed import Batch
from fedmpi.clients.task import ModelJob, Task
from fedmpi.clients.training import Start
from fedmpi.cohort import Work
from fedmpi.data import Partition
from fedmpi.local import Descent, uga
from fedmpi.local.descent import whole_gradient
from fedmpi.local.uga import Trace
from fedmpi.models.lenet import LeNet
from fedmpi.schedules import make_rate

PLAIN = Descent(0.1)
HEAVY = Descent(0.05, momentum=0.9, weight_decay=0.02)
CLIPPED = Descent(0.1, momentum=0.5, weight_decay=0.02, clip=0.8)
GROUPED = replace(CLIPPED, accumulate=2, schedule="warmup:2+cosine")
WORK = Work(epochs=3, batch=4)


class Recurrent(nn.Module):
    """A GRU over the rows of an image."""

    def __init__(self, side: int, classes: int) -> None:
        super().__init__()
        self.rows, self.head = nn.GRU(side, 5, batch_first=True), nn.Linear(5, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.rows(x[:, 0])[0][:, -1])
        return logits


def dropout_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 20), nn.Tanh(), nn.Dropout(0.5), nn.Linear(20, 3))


def group_model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))


def smooth_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 4), nn.Tanh(), nn.Linear(4, 3))


def small(make: Callable[[], nn.Module], channels_last: bool = False) -> Task:
    """A model in float64 on the small federation's 6x6 images."""
    torch.manual_seed(3)
    model = make().double()
    return Task(model, federation.arrays(), federation.partition(), 11, CPU, 1, channels_last, dtype=torch.float64)


def large(make: Callable[[], nn.Module], channels_last: bool = False) -> Task:
    """A model in float64 on 12x12 images."""
    torch.manual_seed(3)
    two = Partition(np.array([0, 7, 20]), np.arange(20))
    return Task(make().double(), tiny(), two, 11, CPU, 1, channels_last, dtype=torch.float64)


TASKS: dict[str, Callable[[], Task]] = {
    "plain": partial(small, plain_model),
    "batchnorm": partial(small, norm_model),
    "dropout": partial(small, dropout_model),
    "groupnorm": partial(small, group_model),
    "lenet": partial(large, lambda: LeNet(1, SIDE, SIDE, CLASSES)),
    "lenet, channels last": partial(large, lambda: LeNet(1, SIDE, SIDE, CLASSES), channels_last=True),
    "gru": partial(small, lambda: Recurrent(6, 3)),
}


def job_at(task: Task, start_N: Tensor, ints: Tensor, work: Work = WORK) -> ModelJob:
    return task.job(Start(start_N, ints, round=2, cid=1, work=work))


def gradient(descent: Descent, job: ModelJob, trace_bytes: int = 1 << 30) -> Tensor:
    """What `uga` sends, but for the sign."""
    trace = Trace(descent, job, trace_bytes)
    trace.forward()
    a_P = whole_gradient(job, job.x_P, counted=True)
    with job.without_side_effects():
        return trace.backward(a_P)


def loss_after_the_steps(descent: Descent, job: ModelJob) -> float:
    """L(h(w)): the steps of the first epochs as torch takes them, then the loss of all samples."""
    x = job.start_P.clone().requires_grad_()
    optimizer = torch.optim.SGD([x], descent.rate(job), descent.momentum, weight_decay=descent.weight_decay)
    for batch in job.batches(leave=1):
        x.grad = job.grad(x.detach(), batch).clone()
        if descent.clip is not None:
            x.grad.mul_(min(1.0, descent.clip / float(x.grad.norm())))
        optimizer.step()
    job.x_P.copy_(x.detach())
    with torch.no_grad():
        return sum(share * float(job.task.loss(batch)) for batch, share in job.everything())


@pytest.mark.parametrize("descent", [PLAIN, HEAVY, CLIPPED], ids=["plain", "momentum and decay", "clipped"])
@pytest.mark.parametrize("name", TASKS)
def test_the_gradient_is_the_slope_of_the_loss_after_the_steps(name: str, descent: Descent) -> None:
    task = TASKS[name]()
    start_N, ints = task.start()
    g_P = gradient(descent, job_at(task, start_N, ints)).clone()
    draws = torch.Generator().manual_seed(5)
    directions = [torch.randn(len(g_P), dtype=torch.float64, generator=draws) for _ in range(2)]
    for v_P in (g_P, *directions):
        v_P = v_P / v_P.norm()
        losses = []
        for eps in (1e-6, -1e-6):
            moved_N = start_N.clone()
            moved_N[: len(v_P)].add_(v_P, alpha=eps)
            losses.append(loss_after_the_steps(descent, job_at(task, moved_N, ints)))
        slope = (losses[0] - losses[1]) / 2e-6
        # rounding of the losses alone gives 1e-10 of error in a slope
        assert float(g_P @ v_P) == pytest.approx(slope, rel=1e-5, abs=1e-8)
    assert float(g_P.norm()) > 1e-2


@pytest.mark.parametrize("name", TASKS)
def test_the_clipped_descent_does_clip(name: str) -> None:
    task = TASKS[name]()
    job = job_at(task, *task.start())
    sizes = [float(job.grad(job.x_P, batch).norm()) for batch in job.batches(leave=1)]
    assert max(sizes) > 0.9
    assert min(sizes) < 0.7 or name not in ("lenet", "gru")  # and these have gradients that it leaves alone


def unrolled(task: Task, start_N: Tensor, ints: Tensor, descent: Descent, work: Work = WORK) -> Tensor:
    """The gradient by one graph through all steps, on a copy of the model that is bound to nothing."""
    job, alone = job_at(task, start_N, ints, work), copy.deepcopy(task.model)
    spans = [span for span in task.layout.spans if span.start < task.layout.params]
    buffers = {name: buffer.clone() for name, buffer in alone.named_buffers()}

    def loss(x_P: Tensor, batch: Batch) -> Tensor:
        torch.manual_seed(batch.seed)
        tensors = {span.name: span.view(x_P) for span in spans} | {k: b.clone() for k, b in buffers.items()}
        logits = torch.func.functional_call(alone, tensors, (task.feed.inputs(task.feed.x[batch.samples]),))
        return F.cross_entropy(logits, task.feed.y[batch.samples])

    w_P = start_N[: task.layout.params].clone().requires_grad_()
    x_P, v_P = w_P, torch.zeros_like(w_P)
    batches = list(job.batches(leave=1))
    groups = [batches[i : i + descent.accumulate] for i in range(0, len(batches), descent.accumulate)]
    rates = make_rate("", descent.schedule, descent.rate(job), len(groups))
    for number, group in enumerate(groups, 1):
        mean_loss = torch.stack([loss(x_P, batch) for batch in group]).mean()
        (g_P,) = torch.autograd.grad(mean_loss, x_P, create_graph=True)
        if descent.clip is not None:
            g_P = g_P * (descent.clip / g_P.norm()).clamp_max(1.0)
        v_P = descent.momentum * v_P + g_P + descent.weight_decay * x_P
        x_P = x_P - rates(number) * v_P
    whole = sum(share * loss(x_P, batch) for batch, share in job.everything())
    return torch.autograd.grad(whole, w_P)[0]


@pytest.mark.parametrize(
    "descent", [PLAIN, HEAVY, CLIPPED, GROUPED], ids=["plain", "momentum and decay", "clipped", "accumulated"]
)
@pytest.mark.parametrize("make", [smooth_model, norm_model, dropout_model])
def test_the_gradient_is_that_of_one_graph_through_all_steps(make: Callable[[], nn.Module], descent: Descent) -> None:
    task = small(make)
    start = task.start()
    expected_P = unrolled(task, *start, descent)
    found_P = gradient(descent, job_at(task, *start))
    assert torch.allclose(found_P, expected_P, rtol=1e-10, atol=1e-10) and float(expected_P.norm()) > 1e-2


@pytest.mark.parametrize("clip", [None, 0.05])
def test_what_is_sent_is_the_gradient_downhill_as_long_as_it_is(clip: float | None) -> None:
    descent = Descent(0.1, 0.5, clip=clip)
    task = small(smooth_model)
    start = task.start()
    expected_P = unrolled(task, *start, descent)
    assert float(expected_P.norm()) > 0.05
    job = job_at(task, *start)
    assert torch.allclose(uga(descent)(job).delta_P, -expected_P, rtol=1e-10, atol=1e-10)


def test_steps_that_are_asked_for_come_before_the_evaluation() -> None:
    task, work = small(smooth_model), Work(epochs=1, steps=4, batch=4)
    start = task.start()
    expected_P = unrolled(task, *start, PLAIN, work)
    assert torch.allclose(uga(PLAIN)(job_at(task, *start, work)).delta_P, -expected_P, atol=1e-12)
    without_P = uga(PLAIN)(job_at(task, *start, Work(epochs=1, batch=4))).delta_P
    assert not torch.allclose(without_P, -expected_P, atol=1e-3)


# What the way back costs


class Watched(Parabola):
    """A job that looks at the trace whenever a gradient or a product is asked for."""

    trace: Trace | None = None
    most = products = 0

    def look(self) -> None:
        if self.trace is not None:
            self.most = max(self.most, len(self.trace.points) + 2 * len(self.trace.begins))

    def grad(self, x_P: Tensor, batch: object) -> Tensor:
        self.look()
        return super().grad(x_P, batch)

    def linearise(self, batch: object) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        self.look()
        self.products += 1
        return super().linearise(batch)


def watched(steps: int, trace_bytes: int, descent: Descent = HEAVY) -> tuple[Watched, Tensor]:
    """A job of two parameters (16 bytes) after so many steps and the way back, and the gradient."""
    job = Watched((1.0, -2.0), [(0.1 * i, 0.5) for i in range(2 * steps)], BENT, epochs=2, whole=[((0.3, 0.2), 1.0)])
    job.trace = Trace(descent, job, trace_bytes)
    job.trace.forward()
    a_P = whole_gradient(job, job.x_P, counted=True)
    with job.without_side_effects():
        return job, job.trace.backward(a_P)


@given(st.integers(0, 150))
def test_segments_keep_a_few_roots_of_the_steps_and_take_each_at_most_twice(steps: int) -> None:
    job, _ = watched(steps, trace_bytes=0)
    assert job.most <= 3 * (math.isqrt(max(steps - 1, 0)) + 1)
    assert job.products == steps and len(job.calls) <= 2 * steps + 1


@given(st.integers(0, 60), st.integers(0, 80))
def test_segments_change_no_bit(steps: int, fits: int) -> None:
    some, all_of_them = watched(steps, 16 * fits), watched(steps, 1 << 30)
    assert torch.equal(some[1], all_of_them[1])
    assert [c for c in some[0].calls if c.counts] == all_of_them[0].calls


def test_where_all_points_fit_nothing_is_computed_again() -> None:
    job, _ = watched(50, trace_bytes=16 * 50)
    assert job.most == 50 + 2 and len(job.calls) == 50 + 1 and all(call.counts for call in job.calls)


def test_where_some_fit_segments_are_as_long_as_that() -> None:
    job, _ = watched(50, trace_bytes=16 * 25)
    assert job.most == 25 + 2 * 2 and len(job.calls) == 50 + 1 + 25  # the first of two segments again


@pytest.mark.parametrize("name", ["batchnorm", "dropout", "lenet", "gru"])
def test_segments_change_no_bit_of_a_real_model(name: str) -> None:
    task = TASKS[name]()
    start = task.start()
    whole, cut = (gradient(CLIPPED, job_at(task, *start), size).clone() for size in (1 << 30, 0))
    assert torch.equal(whole, cut) and whole.any()


# What it leaves


@pytest.mark.parametrize("trace_bytes", [0, 1 << 30])
def test_buffers_counters_and_loss_are_those_of_the_steps_and_the_evaluation(trace_bytes: int) -> None:
    task = small(norm_model)
    start = task.start()
    job = job_at(task, *start)
    v_P = torch.zeros_like(job.x_P)
    for batch in job.batches(leave=1):
        v_P.mul_(0.9).add_(job.grad(job.x_P, batch).add_(job.x_P, alpha=0.02))
        job.x_P.sub_(v_P, alpha=0.05)
    for batch, _ in job.everything():
        job.grad(job.x_P, batch)
    behind = slice(task.layout.params, task.layout.length)
    expected = task.x_N[behind].clone(), int(task.model[1].num_batches_tracked), float(job.loss_sum) / job.samples
    job = job_at(task, *start)
    trained = job.deliver(uga(HEAVY, trace_bytes)(job))()
    assert torch.equal(task.x_N[behind], expected[0]) and not torch.equal(start[0][behind], expected[0])
    assert torch.equal(trained.delta_N[behind], expected[0] - start[0][behind])
    assert trained.ints.tolist() == [expected[1]] == [2 * 3 + 3]  # 9 samples in batches of 4: two epochs, and all
    assert trained.loss == expected[2]


@pytest.mark.slow
def test_five_epochs_of_lenet_fit_a_small_machine_and_more_epochs_take_no_more() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LENET], env=rank_environment(), capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    after_two, after_five = (int(word) / 1024 for word in done.stdout.split())  # MB
    assert after_five < 1000
    assert after_five < after_two + 70  # the 57 further points are 14 MB; a graph kept for each adds 150


# getrusage starts from the parent's value, which may be more.
LENET = """
import re
import numpy as np, torch
from fedmpi.data import Arrays, Partition
from fedmpi.local import Descent, uga
from fedmpi.models.lenet import LeNet
from fedmpi.clients.task import Task
from fedmpi.clients.training import Start
from fedmpi.cohort import Work

torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randint(0, 256, (600, 1, 28, 28), dtype=torch.uint8)
y = torch.randint(0, 10, (600,))
arrays = Arrays("noise", 10, x, y, x, y, (0.5,), (0.3,))
partition = Partition(np.array([0, 600]), np.arange(600))
task = Task(LeNet(1, 28, 28, 10), arrays, partition, 0, torch.device("cpu"))
start = task.start()
for epochs in (2, 5):
    job = task.job(Start(*start, 1, 0, Work(epochs=epochs, batch=32)))
    trained = job.deliver(uga(Descent(0.01))(job))()
    assert torch.isfinite(trained.delta_N).all() and trained.delta_N.any()
    print(re.search("VmHWM:[^0-9]*([0-9]+) kB", open("/proc/self/status").read())[1])
"""
