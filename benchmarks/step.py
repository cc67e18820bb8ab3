"""Measure a client's step on each path, as a ratio to a plain loop in the same run.

    python benchmarks/step.py                                         # all models, one thread, batches of 32
    python benchmarks/step.py --models lenet --paths channels_last compiled --json
    python benchmarks/step.py --device cuda                           # both on the GPU, with repeatable kernels

The plain loop is what one writes first: load the global weights, torch.optim.SGD with momentum, autograd, weights in
the usual layout, then the difference. Each path does the same work by fedmpi's code: a job, its rule, its delta.

    contiguous, channels_last    how weights and images lie in memory
    bf16                         the model's own layout under autocast (minutes a step where a processor has no bf16 and
                                 the model is large: there it must be asked for)
    compiled                     the model's own layout under torch.compile; building takes a minute or more a model,
                                 so it must be asked for
    together                     2, 5 and 10 clients at once as one stacked model, a client's share of the time

All paths take turns; each turn gives a ratio, and the median and the quartiles over the turns are printed. With one
thread, which is the default, the processor's time is measured, so that others on the machine disturb less; with a GPU
it is the time until that has finished, and fedmpi's includes the copy of the update to the host. A path that is not for
a model says why. `*` marks what the model's row has as its default.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from kit import above_zero, device, median, positive, quartiles
from torch import nn

from fedmpi.clients.execution import PLAIN, Mode, try_mode
from fedmpi.clients.task import Task
from fedmpi.clients.together import Together
from fedmpi.clients.training import Start
from fedmpi.cohort import Work
from fedmpi.data import Arrays, Partition
from fedmpi.device import CPU, device_of, set_up, synchronise
from fedmpi.errors import UserError
from fedmpi.local import sgd
from fedmpi.models import MODELS, make_model

LR, MOMENTUM, BATCH, CLIENTS = 0.01, 0.9, 32, 10
PATHS = ("contiguous", "channels_last", "bf16", "compiled", "together")
LARGE = 0.2  # seconds a plain step: such a model fills the machine alone, so no more than 2 of it are stacked
SLOW = 4  # times the plain step, at the first try: then that one has to do

Client = Callable[[], object]
"""trains one client, or as many as there are at once"""


@dataclass(frozen=True)
class Case:
    """A model, random data for it, and how many steps a client takes."""

    name: str
    steps: int
    arrays: Arrays
    partition: Partition
    device: torch.device

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return make_model(self.name, MODELS[self.name], self.arrays.offers, self.arrays.name)

    def task(self, channels_last: bool, mode: Mode = PLAIN, together: int = 1) -> Task:
        """The case by a path; a `UserError` where it is not for the model."""
        given = (self.model(), self.arrays, self.partition, 0, self.device, 1, channels_last)
        if together > 1:
            stack = Together(*given, clients=together, sums_device=CPU)
            stack.check(self.name, next(stack.feed.test([torch.arange(2)])))
            return stack
        task = Task(*given, mode=mode, sums_device=CPU)
        try_mode(task, self.name, next(task.feed.test([torch.arange(2)])), BATCH)
        return task


def make_case(name: str, device: torch.device) -> Case:
    """Grey images of 28x28, colour images of 32x32, or lines of 80 characters, for ten clients."""
    steps = 1 if name.startswith("resnet") else 5 if name == "gru" else 20
    count, rng = CLIENTS * steps * BATCH, torch.Generator().manual_seed(1)
    if name == "gru":
        x = torch.randint(0, 80, (count, 80), generator=rng, dtype=torch.uint8)
        y = torch.randint(0, 80, (count,), generator=rng)
        arrays = Arrays("lines", 80, x, y, x[:2], y[:2], tokens=80)
    else:
        shape = (3, 32, 32) if name.startswith("resnet") else (1, 28, 28)
        x = torch.randint(0, 256, (count, *shape), generator=rng, dtype=torch.uint8)
        y = torch.randint(0, 10, (count,), generator=rng)
        arrays = Arrays("images", 10, x, y, x[:2], y[:2], (0.5,) * shape[0], (0.25,) * shape[0])
    return Case(name, steps, arrays, Partition(np.arange(CLIENTS + 1) * steps * BATCH, np.arange(count)), device)


def plain_lenet(dropout: float) -> nn.Module:
    """LeNet as one writes it first; the other models are the same module either way."""
    first = [nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)]
    middle = [nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Dropout(dropout), nn.Linear(120, 84), nn.ReLU()]
    return nn.Sequential(*first, *middle, nn.Dropout(dropout), nn.Linear(84, 10))


def plain_loop(case: Case) -> Client:
    """A client by hand."""
    arrays, client = case.arrays, case.partition.of(0)
    model = (plain_lenet(0.5 * (case.name == "cnn")) if case.name in ("lenet", "cnn") else case.model()).to(case.device)
    images, shape = arrays.mean != (), (1, -1, 1, 1)
    all_x, all_y = arrays.x.to(case.device), arrays.y.to(case.device)
    scales = (arrays.mean, arrays.std)
    mean, std = (255 * torch.tensor(v, device=case.device).view(shape) if images else None for v in scales)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rng = np.random.default_rng(0)

    def run() -> dict[str, torch.Tensor]:
        model.load_state_dict(start)
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), LR, MOMENTUM)
        order = torch.from_numpy(client[rng.permutation(len(client))]).to(case.device)
        for samples in torch.split(order, BATCH):
            x, y = all_x[samples], all_y[samples]
            x = (x.float() - mean) / std if mean is not None and std is not None else x.long()
            optimizer.zero_grad()
            torch.autograd.backward(F.cross_entropy(model(x), y))
            optimizer.step()
        return {name: tensor - start[name] for name, tensor in model.state_dict().items()}

    return run


def by_fedmpi(case: Case, task: Task, clients: int = 1) -> Client:
    """Clients by fedmpi's code."""
    rule, work = sgd(LR, MOMENTUM), Work(batch=BATCH)
    start_N, ints = task.start()
    start_N = start_N.to(case.device)

    def train(seat: Task, cid: int) -> object:
        job = seat.job(Start(start_N, ints, 1, cid, work))
        return job.deliver(rule(job))()

    @torch.no_grad()
    def run() -> list[object]:
        return list(task.each(range(clients), train))

    return run


def make_paths(
    case: Case, names: list[str], at_once: list[int]
) -> tuple[dict[str, tuple[Client, int]], dict[str, str]]:
    """Each path's client with the steps that it takes, and why others are not for the model."""
    ways: dict[str, Callable[[], tuple[Task, int]]] = {}
    usual = MODELS[case.name].channels_last
    if case.name not in ("gru", "logistic"):  # they have no convolution: one layout
        ways["channels_last" + " *" * usual] = lambda: (case.task(True), 1)
    ways["contiguous" + " *" * (not usual)] = lambda: (case.task(False), 1)
    ways["bf16"] = lambda: (case.task(usual, Mode("bf16")), 1)
    ways["compiled"] = lambda: (case.task(usual, Mode(compile="default")), 1)
    for k in at_once:
        ways[f"together {k}"] = lambda k=k: (case.task(usual, together=k), k)
    paths, refused = {}, {}
    for name, make in ways.items():
        if name.split()[0] not in names:
            continue
        try:
            task, clients = make()
        except UserError as why:
            refused[name.split()[0]] = str(why)
            continue
        paths[name] = by_fedmpi(case, task, clients), clients * case.steps
    return paths, refused


def measure(name: str, wanted: list[str] | None, seconds: float, device: torch.device) -> list[dict[str, object]]:
    """The rows of one model."""
    case = make_case(name, device)
    plain, began = plain_loop(case), time.perf_counter()
    plain()
    synchronise(device)
    large = (time.perf_counter() - began) / case.steps > LARGE
    usual = [path for path in PATHS if path != "compiled" and not (large and path == "bf16")]
    paths, refused = make_paths(case, wanted or usual, [2] if large else [2, 5, 10])
    runs = {"plain": (plain, case.steps)} | paths
    alone = torch.get_num_threads() == 1 and device == CPU
    clock = time.process_time if alone else time.perf_counter

    def a_step(path: str) -> float:
        run, steps = runs[path]
        synchronise(device)
        started = clock()
        run()
        synchronise(device)
        return (clock() - started) / steps

    first = {path: a_step(path) for path in runs}  # to warm up
    slow = [path for path in runs if first[path] > SLOW * first["plain"]]
    times: dict[str, list[float]] = {path: [] for path in runs}
    began = time.perf_counter()
    while len(times["plain"]) < 3 or time.perf_counter() - began < seconds:
        for path in runs:
            times[path].append(first[path] if path in slow else a_step(path))
    rows: list[dict[str, object]] = []
    for path, taken in times.items():
        ratios = sorted(ours / theirs for ours, theirs in zip(taken, times["plain"], strict=True))
        rows.append(
            {
                "model": name,
                "path": path.removesuffix(" *"),
                "default": path.endswith("*"),
                "ratio": median(ratios),
                "ratio_quartiles": quartiles(ratios),
                "step_ms": median([1e3 * t for t in taken], 2),
                "turns": 1 if path in slow else len(taken),
            }
        )
    rows += [{"model": name, "path": path, "default": False, "refused": why} for path, why in refused.items()]
    return rows


def show(row: dict[str, object]) -> str:
    """A row in words."""
    head = f"{row['model']:12} {row['path']}{' *' * bool(row['default']):2}".ljust(30)
    if "refused" in row:
        return f"{head} {row['refused']}"
    return f"{head} ratio {row['ratio']:5.2f}  quartiles {row['ratio_quartiles']}  {row['step_ms']} ms a step"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument(
        "--paths", nargs="+", choices=PATHS, help="all but compiled (and bf16 for large models) where none is named"
    )
    parser.add_argument("--seconds", type=above_zero, default=8.0, help="to measure a model for, in 3 turns or more")
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--device", type=device, default="cpu", help="as of 'fedmpi train'")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    options = parser.parse_args()
    place = device_of(0, options.device)
    set_up(place, deterministic=True)
    torch.set_num_threads(options.threads)
    for name in options.models:
        for row in measure(name, options.paths, options.seconds, place):
            print(json.dumps(row) if options.json else show(row), flush=True)


if __name__ == "__main__":
    main()
