"""From sample numbers to what a model takes: in memory, and from Datasets with workers that read ahead."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from federation import SIZES, algorithm, arrays, norm_model, partition, plan
from shell import CPU, tiny
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from fedmpi.clients.augment import make_augment
from fedmpi.clients.feed import ArrayFeed, Batch, DatasetFeed, Feed, Pair, keys_of, make_feed
from fedmpi.clients.task import Task, choose_tests
from fedmpi.clients.training import Start
from fedmpi.cohort import Work
from fedmpi.comm import Comm, SoloComm
from fedmpi.comm.threads import run_threads
from fedmpi.data import Arrays, Data, Datasets
from fedmpi.data.objective import NEXT
from fedmpi.rounds import State, begin, rounds
from fedmpi.runs.measures.score import Score, evaluate

DATA = tiny()


def batch(samples: Sequence[int], seed: int = 7) -> Batch:
    return Batch(torch.tensor(samples), seed)


def same(a: Pair, b: Pair) -> bool:
    return all(torch.equal(p, q) and p.dtype == q.dtype for p, q in zip(a, b, strict=True))


# --- arrays: images


def test_normalised_training_images_have_mean_0_and_deviation_1() -> None:
    images, _ = ArrayFeed(DATA, CPU, torch.float64).train(batch(range(len(DATA.x))))
    assert float(images.mean()) == pytest.approx(0, abs=1e-9)
    assert float(images.std(correction=0)) == pytest.approx(1, abs=1e-9)


def colours() -> Arrays:
    x = torch.randint(0, 256, (20, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return Arrays("colour", 20, x, torch.arange(20), x[:7], torch.arange(7), (0.1, 0.5, 0.9), (0.2, 1.0, 4.0))


def test_every_channel_is_normalised_by_its_own_numbers() -> None:
    data = colours()
    before = data.x.clone()
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (data.mean, data.std))
    feed = ArrayFeed(data, CPU)
    images, labels = feed.train(batch([3, 0, 19]))
    assert torch.allclose(images, (data.x[[3, 0, 19]] / 255 - mean) / std, atol=1e-5)
    assert images.dtype == torch.float32 and labels.tolist() == [3, 0, 19]
    assert torch.equal(data.x, before), "the data themselves are not normalised"
    assert torch.equal(feed.train(batch([3, 0, 19]))[0], images)


def test_a_whole_task_may_be_of_doubles() -> None:
    images, labels = ArrayFeed(colours(), CPU, torch.float64).train(batch([1, 2]))
    assert images.dtype == torch.float64 and labels.dtype == torch.int64


def test_test_blocks_are_picked_by_index() -> None:
    data = colours()
    feed = ArrayFeed(data, CPU)
    blocks = [torch.tensor([6, 0]), torch.tensor([2]), torch.arange(1, 4)]
    pairs = list(feed.test(blocks))
    assert feed.tests == 7 and [y.tolist() for _, y in pairs] == [[6, 0], [2], [1, 2, 3]]
    for (x, _), block in zip(pairs, blocks, strict=True):
        assert torch.equal(x, feed.inputs(data.test_x[block]))
    assert list(feed.test([])) == []


# --- arrays: augmentation


def test_augmentation_is_of_the_batchs_seed_and_only_in_training() -> None:
    plain, moved = ArrayFeed(DATA, CPU), ArrayFeed(replace(DATA, augment="crop:2+flip"), CPU)
    some = list(range(30))
    augment = make_augment("crop:2+flip")
    assert augment is not None
    by_hand = plain.inputs(augment(DATA.x[some], 7))
    assert torch.equal(moved.train(batch(some, 7))[0], by_hand)
    assert torch.equal(moved.train(batch(some, 7))[0], by_hand), "the same again"
    assert not torch.equal(moved.train(batch(some, 8))[0], by_hand)
    assert not torch.equal(plain.train(batch(some, 7))[0], by_hand)
    for a, b in zip(moved.test([torch.arange(60)]), plain.test([torch.arange(60)]), strict=True):
        assert same(a, b), "test images are as they are"
    assert torch.equal(moved.x, DATA.x)


def what_clients_see(task: Task, seed_of: list[tuple[int, int]]) -> list[tuple[int, ...]]:
    """All training batches of (round, client) pairs, as numbers that can be compared."""
    out = []
    for round, cid in seed_of:
        job = task.job(Start(*task.start(), round, cid, Work(epochs=2, batch=5)))
        for one in job.batches():
            x, _ = task.feed.train(one)
            out.append((*one.samples.tolist(), hash(x.numpy().tobytes())))
    return out


def augmented_task(seed: int = 11, ranks: int = 1) -> Task:
    torch.manual_seed(3)
    return Task(norm_model(), replace(arrays(), augment="crop:2+flip"), partition(), seed, CPU, ranks)


def test_augmentation_is_the_same_for_the_same_seed_round_client_and_batch_on_any_rank() -> None:
    who = [(1, 0), (1, 4), (2, 4)]
    first = what_clients_see(augmented_task(), who)
    torch.rand(5), random.random(), np.random.rand(3)
    assert what_clients_see(augmented_task(ranks=3), who) == first
    assert what_clients_see(augmented_task(), [(9, 2), *who])[6:] == first, "whoever trained before"
    assert what_clients_see(augmented_task(seed=12), who) != first


def test_augmentation_differs_between_batches_rounds_and_clients() -> None:
    task = augmented_task()
    seeds = []
    for round, cid in ((1, 0), (1, 4), (2, 4)):
        job = task.job(Start(*task.start(), round, cid, Work(epochs=3, batch=5)))
        seeds += [one.seed for one in job.batches()]
    images = {task.feed.train(batch(range(20), seed))[0].numpy().tobytes() for seed in seeds}
    assert len(images) == len(seeds) == 3 + 12 + 12, "the same samples look different every time"


def test_augmented_training_gives_the_same_bits_on_any_number_of_ranks() -> None:
    data = replace(arrays(), augment="crop:1+flip")
    models = [final(data, size) for size in (1, 2, 3)]
    assert torch.equal(models[0], models[1]) and torch.equal(models[0], models[2])
    assert not torch.equal(models[0], final(arrays(), 1))


# --- arrays: sequences and numbers


def test_sequences_become_indices() -> None:
    x = torch.tensor([[0, 255], [3, 4], [200, 1]], dtype=torch.uint8)
    data = Arrays("text", 3, x, torch.arange(3), x, torch.arange(3), tokens=256, objective=NEXT)
    tokens, labels = ArrayFeed(data, CPU).train(batch([2, 0]))
    assert tokens.dtype == labels.dtype == torch.int64
    assert tokens.tolist() == [[200, 1], [0, 255]] and labels.tolist() == [2, 0]
    ((tokens, _),) = ArrayFeed(data, CPU).test([torch.tensor([1])])
    assert tokens.tolist() == [[3, 4]] and tokens.dtype == torch.int64


def test_sequences_are_not_augmented_whatever_is_said() -> None:
    x = torch.zeros(3, 2, dtype=torch.uint8)
    data = Arrays("text", 3, x, torch.arange(3), x, torch.arange(3), tokens=4, augment="flip")
    assert ArrayFeed(data, CPU).train(batch([0]))[0].tolist() == [[0, 0]]


def test_numbers_are_taken_as_they_are() -> None:
    x, y = torch.tensor([[1e6, -0.5], [3.25, 255.0]]), torch.tensor([0.5, -7.0])
    data = Arrays("numbers", 0, x, y, x, y)
    for dtype in (torch.float32, torch.float64):
        numbers, labels = ArrayFeed(data, CPU, dtype).train(batch([1, 0]))
        assert numbers.tolist() == x[[1, 0]].tolist() and labels.tolist() == [-7.0, 0.5]
        assert numbers.dtype == labels.dtype == dtype


@pytest.mark.parametrize("most", [1, 60, 2**19])
def test_batches_made_ahead_are_those_picked_one_by_one(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedmpi.clients.feed.AHEAD", most)
    feed, wanted = ArrayFeed(DATA, CPU), [batch([1, 2]), batch([3]), batch([0, 2]), batch([2])]
    ahead = list(feed.ahead(iter(wanted)))
    assert [(b.samples.tolist(), b.seed) for b in ahead] == [(b.samples.tolist(), b.seed) for b in wanted]
    for one, other in zip(ahead, wanted, strict=True):
        assert one.data is not None and other.data is None
        assert all(torch.equal(a, b) for a, b in zip(feed.train(one), feed.train(other), strict=True))


def test_a_batch_made_ahead_that_a_model_has_overwritten_is_made_anew() -> None:
    feed, wanted = ArrayFeed(DATA, CPU), [batch([1, 2]), batch([3])]
    first, second = feed.ahead(wanted)
    before = feed.train(first)[0].clone()
    feed.train(first)[0].zero_()
    assert torch.equal(feed.train(first)[0], before)
    assert torch.equal(feed.train(second)[0], feed.train(wanted[1])[0])


def test_what_is_augmented_is_made_batch_by_batch() -> None:
    feed, wanted = ArrayFeed(replace(DATA, augment="flip"), CPU), [batch([1, 2]), batch([3])]
    found = list(feed.ahead(iter(wanted)))
    assert [one._replace(drawn=None) for one in found] == wanted
    for one, alone in zip(found, wanted, strict=True):  # drawn for all at once: the same as for each
        assert torch.equal(feed.train(one)[0], feed.train(alone)[0])
    assert list(feed.ahead(iter([]))) == []


# --- Datasets


class Noisy(Dataset[Any]):
    """Samples with noise from all three sources of random numbers, as transforms draw it."""

    def __init__(self, count: int = 40, noise: float = 1.0) -> None:
        self.count, self.noise = count, noise
        self.targets = [i % 3 for i in range(count)]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        drawn = torch.rand(2).tolist() + np.random.rand(2).tolist() + [random.random(), random.random()]
        return torch.full((6,), float(index)) + self.noise * torch.tensor(drawn), index % 3


def noisy_feed(workers: int = 0) -> DatasetFeed:
    return DatasetFeed(Datasets(Noisy(), Noisy(7)), CPU, workers=workers)


def read(feed: DatasetFeed, wanted: list[Batch]) -> list[Pair]:
    return [feed.train(one) for one in feed.ahead(iter(wanted))]


def test_reading_ahead_is_reading() -> None:
    feed, wanted = noisy_feed(), [batch([3, 1, 4], 1), batch([1], 2), batch([39, 0], 3)]
    ahead = list(feed.ahead(iter(wanted)))
    assert [(a.samples, a.seed) for a in ahead] == [(w.samples, w.seed) for w in wanted]
    assert all(a.data is not None for a in ahead)
    for a, w in zip(ahead, wanted, strict=True):
        assert same(feed.train(a), feed.train(w))
    x, y = feed.train(wanted[0])
    assert x.floor().tolist() == [[3.0] * 6, [1.0] * 6, [4.0] * 6] and y.tolist() == [0, 1, 1]


def test_what_an_item_draws_depends_on_the_batchs_seed_and_the_sample_alone() -> None:
    feed = noisy_feed()
    first = feed.train(batch([5, 6, 7], 1))
    torch.manual_seed(9), np.random.seed(9), random.seed(9)
    feed.train(batch([1, 2], 3))
    assert same(feed.train(batch([5, 6, 7], 1)), first)
    assert same(feed.train(batch([6], 1)), tuple(t[1:2] for t in first)), "whoever else is in the batch"
    assert not torch.equal(feed.train(batch([5, 6, 7], 2))[0], first[0])
    noise = first[0] - first[0].floor()
    assert len(noise.unique()) == 18, "and every draw of every sample is another"


def test_a_sample_drawn_twice_in_a_batch_is_the_same_sample() -> None:
    x, _ = noisy_feed().train(batch([5, 5], 1))
    assert torch.equal(x[0], x[1])


def test_keys_of_neighbouring_batches_never_meet() -> None:
    """Seeds of batches follow one another (seed, seed + 1, ...), and so do samples: their sums must not coincide."""
    keys = [seed for start in range(50) for _, seed in keys_of(torch.arange(200), 2**62 + start)]
    assert len(set(keys)) == len(keys) == 10_000 and all(0 <= key < 2**63 for key in keys)


@pytest.mark.processes
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(workers: int) -> None:
    wanted = [batch([3, 1, 4], 1), batch([1], 2), batch([39, 0], 3), batch([5, 9], 4), batch([2, 6], 5)]
    alone, helped = noisy_feed(), noisy_feed(workers)
    first = read(alone, wanted)
    for _ in range(2):  # and again after others were read
        assert all(same(a, b) for a, b in zip(first, read(helped, wanted), strict=True))
        read(helped, [batch([11, 12], 77)])
    blocks = [torch.tensor([0, 5]), torch.tensor([6])]
    assert all(same(a, b) for a, b in zip(alone.test(blocks), helped.test(blocks), strict=True))


def test_test_samples_draw_the_same_always() -> None:
    feed, blocks = noisy_feed(), [torch.arange(3), torch.arange(3, 7)]
    first = list(feed.test(blocks))
    torch.manual_seed(1), feed.train(batch([1]))
    assert all(same(a, b) for a, b in zip(feed.test(blocks), first, strict=True))
    (whole,) = feed.test([torch.arange(7)])
    assert torch.equal(whole[0], torch.cat([x for x, _ in first])), "in whatever blocks"


class Items(Dataset[Any]):
    """Given items."""

    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def fed(*items: Any, dtype: torch.dtype = torch.float32, **about: Any) -> Pair:
    """What all items become in a batch."""
    feed = DatasetFeed(Datasets(Items(*items), Items(*items), **about), CPU, dtype)
    return feed.train(batch(range(len(items))))


def test_images_of_bytes_are_divided_by_255() -> None:
    image = torch.tensor([[[0, 51], [255, 102]]], dtype=torch.uint8)
    x, y = fed((image, 1), (image, 0))
    assert x.shape == (2, 1, 2, 2) and x[0].flatten().tolist() == pytest.approx([0, 0.2, 1, 0.4])
    assert x.dtype == torch.float32 and y.tolist() == [1, 0] and y.dtype == torch.int64
    assert fed((image, 1), (image, 0), dtype=torch.float64)[0].dtype == torch.float64


def test_items_of_numpy_and_of_python_are_taken() -> None:
    x, y = fed((np.array([1.5, 2.5]), np.int64(3)), (np.array([0.0, -1.0]), np.int64(1)))
    assert x.tolist() == [[1.5, 2.5], [0.0, -1.0]] and x.dtype == torch.float32
    assert y.tolist() == [3, 1] and y.dtype == torch.int64


def test_sequences_of_a_dataset_become_indices() -> None:
    for kind in (torch.int64, torch.int32, torch.int16):
        x, _ = fed((torch.tensor([3, 1], dtype=kind), 0), tokens=4)
        assert x.dtype == torch.int64 and x.tolist() == [[3, 1]]


@pytest.mark.parametrize("label", [0.5, torch.tensor(0.5), np.float32(0.5), torch.tensor(0.5, dtype=torch.float64)])
def test_numbers_to_predict_stay_numbers(label: Any) -> None:
    x, y = fed((torch.zeros(2), label), (torch.zeros(2), label))
    assert y.tolist() == [0.5, 0.5] and y.dtype == torch.float32
    assert fed((torch.zeros(2), label), dtype=torch.float64)[1].dtype == torch.float64


def test_the_feed_follows_the_data() -> None:
    assert isinstance(make_feed(DATA, CPU), ArrayFeed)
    made = make_feed(Datasets(Noisy(), Noisy(7)), CPU, workers=2)
    assert isinstance(made, DatasetFeed) and made.workers == 2 and made.tests == 7


# --- training on either


def as_datasets(data: Arrays) -> Datasets:
    """The same floats as a Dataset of items."""
    feed: Feed = ArrayFeed(data, CPU)
    x, y = feed.train(batch(range(data.samples)))
    ((test_x, test_y),) = feed.test([torch.arange(data.tests)])
    return Datasets(TensorDataset(x, y), TensorDataset(test_x, test_y), name=data.name)


def final(data: Data, size: int, make: Any = norm_model, workers: int = 0) -> Tensor:
    """The model after three rounds on that many thread ranks."""
    ours = []
    for _ in range(size):
        torch.manual_seed(3)
        ours.append(Task(make(), data, partition(), seed=11, device=CPU, ranks=size, workers=workers))
    algo, how = algorithm(), plan()

    def work(comm: Comm) -> State:
        state = begin(ours[comm.rank], algo, comm)
        for after, report in rounds(state, how, algo, ours[comm.rank], comm):
            assert not report.dropped
            state = after
        return state

    states = run_threads(size, work)
    return states[0].model_N[: ours[0].layout.length].clone()


def test_training_on_datasets_is_training_on_arrays_bit_for_bit_on_any_number_of_ranks() -> None:
    expected, sets = final(arrays(), 1), as_datasets(arrays())
    for size in (1, 2, 3):
        assert torch.equal(final(sets, size), expected), size


def noisy_datasets() -> Datasets:
    return Datasets(Noisy(sum(SIZES)), Noisy(30), name="noisy")


def linear() -> nn.Module:
    return nn.Linear(6, 3)


@pytest.mark.processes
def test_training_with_random_transforms_repeats_with_any_number_of_workers() -> None:
    expected = final(noisy_datasets(), 1, linear)
    assert torch.equal(final(noisy_datasets(), 1, linear), expected)
    assert torch.equal(final(noisy_datasets(), 1, linear, workers=2), expected)
    quiet = Datasets(Noisy(sum(SIZES), noise=0.0), Noisy(30), name="quiet")
    assert not torch.equal(final(quiet, 1, linear), expected)


def train_noisy(comm: Comm) -> tuple[Tensor, Score]:
    """A rank's part of a training with random transforms: the model, and its score."""
    torch.manual_seed(3)
    task, algo = Task(linear(), noisy_datasets(), partition(), seed=11, device=CPU, ranks=comm.size), algorithm()
    *_, (state, _) = rounds(begin(task, algo, comm), plan(), algo, task, comm)
    return state.model_N[: task.layout.length], evaluate(task, state, comm, block=7)


def train_noisy_together(comm: Comm) -> None:
    """Train with others and then alone: the same bits."""
    together, alone = train_noisy(comm), train_noisy(SoloComm())
    assert torch.equal(together[0], alone[0]) and together[1] == alone[1]


@pytest.mark.processes
def test_training_with_random_transforms_is_the_same_on_two_processes(gloo: Any) -> None:
    gloo(2, train_noisy_together)


def test_reading_leaves_what_layers_draw_alone() -> None:
    """A Dataset's items are read ahead of the batch, and seed torch: dropout must not notice."""

    def dropping() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(36, 3))

    assert torch.equal(final(as_datasets(arrays()), 1, dropping), final(arrays(), 1, dropping))


# --- which test samples


def test_a_fixed_subset_of_the_test_samples_is_scored() -> None:
    some = choose_tests(1000, 100)
    assert torch.equal(some, choose_tests(1000, 100)) and len(some.unique()) == 100
    assert torch.equal(some, some.sort().values) and 0 <= int(some.min()) and int(some.max()) < 1000
    assert 300 < float(some.float().mean()) < 700, "from all over the set"
    assert choose_tests(50, None).tolist() == choose_tests(50, 50).tolist() == list(range(50))
    assert choose_tests(50, 51).tolist() == list(range(50))


@pytest.mark.parametrize("seed", [11, 12])
def test_the_subset_does_not_depend_on_seed_and_ranks(seed: int) -> None:
    tasks = [Task(norm_model(), arrays(), partition(), seed, CPU, ranks, tests=8) for ranks in (1, 3)]
    assert tasks[0].tests.tolist() == tasks[1].tests.tolist() == choose_tests(30, 8).tolist()
    scored = list(tasks[0].score([slice(0, 5), slice(5, 8)]))
    assert [one.labels for one in scored] == [5, 3]
    torch.manual_seed(0)
    task = Task(norm_model(), arrays(), partition(), seed, CPU, tests=8)
    feed = ArrayFeed(arrays(), CPU)
    ((x, y),) = feed.test([choose_tests(30, 8)])
    task.model.eval()
    with torch.no_grad():
        right = int((task.model(x).argmax(1) == y).sum())
    assert sum(one.metric for one in task.score([slice(0, 8)])) == right


class Sums(Dataset[tuple[Tensor, int]]):
    """Items that are sums of many numbers, whose last bits depend on the number of threads."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.randn(300_000).exp().sum().view(1), index % 2


def test_workers_do_not_matter_where_threads_do() -> None:
    torch.set_num_threads(2)
    try:
        batches = [Batch(torch.arange(4), seed=3)]
        read = [
            next(DatasetFeed(Datasets(Sums(), Sums(), classes=2), CPU, workers=n).ahead(batches)).data[0]
            for n in (0, 1)
        ]
    finally:
        torch.set_num_threads(1)
    assert torch.equal(*read)


class Deadly(Dataset[tuple[Tensor, int]]):
    """Items that can be drawn from, the third of which ends a worker process."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == 2 and torch.utils.data.get_worker_info() is not None:
            os._exit(1)
        return torch.rand(2) + index, index % 2


def test_a_worker_that_dies_costs_time_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    batches = [Batch(torch.tensor([i, i + 1]), seed=i) for i in range(0, 8, 2)]
    data = Datasets(Deadly(), Deadly(), classes=2)
    alone, helped = ([b.data[0] for b in DatasetFeed(data, CPU, workers=n).ahead(batches)] for n in (0, 1))
    assert torch.equal(torch.stack(alone), torch.stack(helped)) and len(alone) == 4
    assert "a worker process died" in caplog.text
