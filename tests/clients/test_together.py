"""Several clients at once: the same as one after another but for rounding, whatever the rule and whoever fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import CPU, SIZES, algorithm, arrays, norm_model, partition, plain_model, plan
from shell import ALONE, sandbox, settings_of, train
from torch import Tensor, nn

from fedmpi.algorithms import Algorithm
from fedmpi.clients.feed import Batch, make_feed
from fedmpi.clients.task import Task
from fedmpi.clients.together import Seat, Strand, Together
from fedmpi.clients.training import Start
from fedmpi.cohort import Work, make_share
from fedmpi.comm import Comm, SoloComm
from fedmpi.comm.threads import run_threads
from fedmpi.errors import RunError, UserError
from fedmpi.local import Descent, Job, LocalResult, LocalRule, fedgma2021, nova, prox, scaffold, sgd, uga
from fedmpi.local.memory import Memory
from fedmpi.rounds import Plan, Report, State, begin, rounds
from fedmpi.runs.build import prepare
from fedmpi.runs.config import Local, Step
from fedmpi.runs.run import run

Maker = Callable[[], nn.Module]


def conv_model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))


class Odd(nn.Module):
    """A model with a frozen tensor, one that it does not use, one that is used twice, and one without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.idle = nn.Parameter(torch.ones(5))
        self.first, self.again, self.last = nn.Linear(36, 36), nn.Linear(36, 36), nn.Linear(36, 3)
        self.again.weight = self.first.weight
        self.last.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.again(self.first(x.flatten(1)).tanh()).tanh()) * self.scale
        return logits


def task(make: Maker, ranks: int = 1, at_once: int = 1, **named: Any) -> Task:
    """A task in double precision, so that rounding is not what differs; one that stacks where there are several."""
    torch.manual_seed(3)
    named = {"dtype": torch.float64} | named
    given = (make().to(named["dtype"]), arrays(), partition(), 11, CPU, ranks)
    return Together(*given, clients=at_once, **named) if at_once > 1 else Task(*given, **named)


def federate(tasks: list[Task], algo: Algorithm, how: Plan | None = None) -> tuple[State, list[Report]]:
    """The last state and the reports of rank 0."""

    def work(comm: Comm) -> tuple[State, list[Report]]:
        state, reports = begin(tasks[comm.rank], algo, comm), []
        for after, report in rounds(state, how or plan(), algo, tasks[comm.rank], comm):
            state = after
            reports.append(report)
        return state, reports

    return run_threads(len(tasks), work)[0]


def assert_same(one: tuple[State, list[Report]], other: tuple[State, list[Report]], atol: float = 1e-9) -> None:
    (a, its), (b, others) = one, other
    assert torch.allclose(a.model_N[: len(b.model_N)], b.model_N[: len(a.model_N)], rtol=1e-5, atol=atol)
    assert torch.equal(a.ints, b.ints) and a.shared.keys() == b.shared.keys()
    for report, like in zip(its, others, strict=True):
        assert (report.clients, report.dropped) == (like.clients, like.dropped)
        assert report.train_loss == pytest.approx(like.train_loss, rel=1e-6)


def own(job: Job) -> LocalResult:
    """A rule from outside: two gradients a step, at a point beside the model and at the model, and a look aside."""
    kept = job.x_P.clone()
    for batch in job.batches():
        g_P = job.grad(job.x_P, batch).clone()
        with job.without_side_effects():
            g_P += job.grad(kept + 0.1, batch)
        job.x_P.sub_(g_P, alpha=0.02)
    return LocalResult(job.x_P - job.start_P)


DESCENT = Descent(0.05, 0.9, weight_decay=0.01, clip=2.0)
RULES: dict[str, LocalRule] = {
    "sgd": sgd(0.05, 0.9),
    "prox": prox(DESCENT, 0.1),
    "scaffold I": scaffold(DESCENT, "I"),
    "scaffold II": scaffold(DESCENT, "II"),
    "nova": nova(DESCENT),
    "fedgma2021": fedgma2021(DESCENT, "last"),
    "fedgma2021 initial": fedgma2021(DESCENT, "initial"),
    "uga": uga(Descent(0.05, 0.5)),
    "own": LocalRule(own),
}


@pytest.mark.parametrize("name", RULES)
def test_rules_do_not_notice(name: str) -> None:
    single = name == "fedgma2021 initial"  # which takes a gradient at the global model, and that is float32
    algo = algorithm(local=RULES[name], mask="mean" if single else "gma")
    dtype = torch.float32 if single else torch.float64
    alone, stacked = (federate([task(norm_model, at_once=k, dtype=dtype)], algo) for k in (1, 3))
    assert_same(alone, stacked, atol=1e-5 if single else 1e-9)
    for name_of, vector_N in alone[0].shared.items():
        assert torch.allclose(vector_N, stacked[0].shared[name_of], rtol=1e-5, atol=1e-9)
    for cid in range(len(SIZES)):
        for key, kept_P in alone[0].memory.read(cid).items():
            assert torch.allclose(kept_P, stacked[0].memory.read(cid)[key], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("make", [plain_model, conv_model, norm_model, Odd])
@pytest.mark.parametrize("channels_last", [False, True])
def test_models_can_be_stacked_in_either_layout(make: Maker, channels_last: bool) -> None:
    alone, stacked = (federate([task(make, at_once=k, channels_last=channels_last)], algorithm()) for k in (1, 5))
    assert_same(alone, stacked)


@pytest.mark.parametrize("at_once", [2, 4, 5, 7])
def test_any_number_at_once_with_uneven_work(at_once: int) -> None:
    how = plan(work=Work(epochs=2, batch=4, share=make_share("uniform:0.2,1.0")))
    assert_same(
        federate([task(norm_model)], algorithm(), how), federate([task(norm_model, at_once=at_once)], algorithm(), how)
    )


def test_on_two_ranks() -> None:
    algo = algorithm(local=RULES["scaffold II"])
    alone, stacked = (federate([task(norm_model, 2, k) for _ in range(2)], algo) for k in (1, 3))
    assert_same(alone, stacked)


def watched(whole: Together, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, tuple[int, ...]]]:
    """Will hold the stacks that are made: how many clients, and the shape of a batch."""
    made, stacked = [], whole.stacked

    def watch(rows: list[int], pairs: Any) -> Tensor:
        made.append((len(rows), tuple(pairs[0][0].shape)))
        return stacked(rows, pairs)

    monkeypatch.setattr(whole, "stacked", watch)
    return made


def test_batches_are_stacked_with_those_of_their_shape_and_a_lone_one_goes_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = task(plain_model, at_once=7)
    assert isinstance(whole, Together)
    made = watched(whole, monkeypatch)
    how = plan(rounds=1, cohort=7, work=Work(epochs=1, batch=4))
    federate([whole], algorithm(), how)
    # sizes 5, 9, 14, 3, 20, 7, 11 in batches of 4: step by step 6 full and a 3; then 1, 4, 4, 4, 3, 4; then 1, 4, 4, 3;
    # then 2, 4; then 4
    assert [(count, shape[0]) for count, shape in made] == [(6, 4), (4, 4), (2, 4)]


def test_a_seat_that_is_free_goes_to_the_next_client(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = task(plain_model, at_once=2)
    assert isinstance(whole, Together)
    made, order = watched(whole, monkeypatch), []
    start, work = whole.start(), Work(epochs=1, batch=4)

    def one(seat: Task, cid: int) -> float:
        assert isinstance(seat, Seat)
        job = seat.job(Start(*start, 1, cid, work))
        order.append((cid, seat.row))
        return job.deliver(sgd(0.1)(job))().loss

    found = dict(whole.each([4, 0, 5, 6], one))  # 20, 5, 7 and 11 samples: 5, 2, 2 and 3 steps
    assert order == [(4, 0), (0, 1), (5, 1), (6, 1)] and list(found) == [0, 5, 4, 6]
    assert len(made) == 3  # the first steps of 0, 5 and 6 beside one of 4; the short ones go alone
    alone = task(plain_model)
    for cid, loss in found.items():
        job = alone.job(Start(*start, 1, cid, work))
        assert loss == pytest.approx(job.deliver(sgd(0.1)(job))().loss, rel=1e-6)


def test_a_client_that_raises_is_left_out_alone(caplog: pytest.LogCaptureFixture) -> None:
    def picky(job: Any) -> LocalResult:
        result = sgd(0.05, 0.9)(job)
        if job.cid in (2, 4):
            raise ValueError("not today")
        return result

    algo = algorithm(local=LocalRule(picky))
    alone, stacked = (federate([task(norm_model, at_once=k)], algo) for k in (1, 3))
    assert_same(alone, stacked)
    assert {2, 4} & set(stacked[1][0].dropped + stacked[1][1].dropped) and "not today" in caplog.text


def test_a_batch_that_cannot_be_read_is_its_clients_own_trouble() -> None:
    whole, alone = task(norm_model, at_once=3), task(norm_model)
    assert isinstance(whole, Together)
    for one in (whole, *whole.seats, alone):
        read = one.feed.train

        def broken(batch: Batch, read: Any = read) -> Any:
            if int(partition().of(4)[0]) in batch.samples.tolist():
                raise OSError("unreadable")
            return read(batch)

        attributes = {"train": staticmethod(broken), "ahead": staticmethod(iter), "index_device": torch.device("cpu")}
        one.feed = type("Broken", (), attributes)()
    states = [federate([one], algorithm(), plan(cohort=7)) for one in (alone, whole)]
    assert_same(*states)
    assert states[1][1][0].dropped == (4,)


def test_a_stack_that_raises_is_undone_one_by_one(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = task(norm_model, at_once=3)

    def full(*given: object) -> Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(whole, "stacked", full)
    assert_same(federate([task(norm_model)], algorithm()), federate([whole], algorithm()), atol=0)
    logged = [r.getMessage() for r in caplog.records if "out of memory" in r.getMessage()]
    assert len(logged) == 1 and "a stacked step of" in logged[0]


def test_a_rule_that_writes_to_what_all_share_ends_the_run_and_leaves_no_thread() -> None:
    def rude(job: Any) -> LocalResult:
        result = sgd(0.05)(job)
        job.start_P.add_(1)
        return result

    before = threading.active_count()
    whole = task(norm_model, at_once=3)
    algo = algorithm(local=LocalRule(rude))
    with pytest.raises(RunError, match="wrote to job.start_P"):
        for _ in rounds(begin(whole, algo, SoloComm()), plan(), algo, whole, SoloComm()):
            pass
    assert threading.active_count() == before


def test_a_strand_runs_only_while_its_owner_waits_and_ends_where_it_is() -> None:
    seen: list[str] = []

    def work() -> str:
        for n in range(3):
            seen.append(f"step {n}")
            strand.pause()
        return "done"

    strand = Strand(work)
    assert seen == []
    strand.resume()
    assert seen == ["step 0"] and not strand.done
    strand.resume()
    strand.end()
    assert seen == ["step 0", "step 1"] and strand.done and not strand.result and not strand.thread.is_alive()
    strand = Strand(work)
    for _ in range(4):
        strand.resume()
    assert strand.result == ["done"]


def test_augmentation_is_that_of_the_client() -> None:
    def flipped(at_once: int) -> tuple[State, list[Report]]:
        one = task(conv_model, at_once=at_once)
        changed = make_feed(replace(arrays(), augment="crop:1+flip"), CPU, torch.float64)
        for place in (one, *(one.seats if isinstance(one, Together) else ())):
            place.feed = changed
        return federate([one], algorithm())

    alone, stacked = flipped(1), flipped(3)
    assert_same(alone, stacked)
    assert not torch.allclose(alone[0].model_N, federate([task(conv_model)], algorithm())[0].model_N, atol=1e-4)


# As an option


@pytest.fixture
def box() -> Iterator[None]:
    with sandbox():
        yield


def test_a_run_at_once_is_that_of_one_after_another_but_for_rounding(tmp_path: Path, box: None) -> None:
    local = Local(batch=10, lr=0.05, epochs=2)
    one, other = (
        train(settings_of(tmp_path / str(k), model="lenet", local=local, step=Step(together=k))) for k in (1, 3)
    )
    assert one.train_loss == pytest.approx(other.train_loss, rel=1e-4)
    assert one.test_loss == pytest.approx(other.test_loss, rel=1e-4)


def test_clients_at_once_may_be_trained_in_bf16(tmp_path: Path, box: None) -> None:
    one, other = (train(settings_of(tmp_path / str(k), step=Step(precision="bf16", together=k))) for k in (1, 4))
    assert one.train_loss == pytest.approx(other.train_loss, rel=1e-2)


def test_models_that_draw_or_cannot_be_stacked_are_refused_before_anything_starts(tmp_path: Path, box: None) -> None:
    with pytest.raises(UserError, match=r"'cnn' cannot be trained with several clients at once: it draws .*dropout"):
        train(settings_of(tmp_path / "drawn", model="cnn", step=Step(together=2)))
    assert not (tmp_path / "drawn").exists()
    with pytest.raises(UserError, match="--step.together is 2 and --step.compile is default"):
        prepare(settings_of(tmp_path / "compiled", step=Step(together=2, compile="default")))


def test_no_more_seats_are_made_than_clients_train_in_a_round(
    tmp_path: Path, box: None, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = run(prepare(settings_of(tmp_path / "many", step=Step(together=1000))), SoloComm(), ALONE, CPU, {})
    assert isinstance(outcome.task, Together) and len(outcome.task.seats) == 4
    assert "step: contiguous, float32, 4 clients at once\n" in capsys.readouterr().out


def test_memories_beyond_the_limit_are_not_mistaken_for_written_ones(tmp_path: Path) -> None:
    """Rows in a file share one block of memory: what one client keeps must not count as a write to another's."""

    def end(limit: int) -> Tensor:
        algo = algorithm(local=scaffold(Descent(0.05, 0.0)))
        ours = task(plain_model, at_once=3, dtype=torch.float32)
        state = begin(ours, algo, SoloComm(), Memory(algo.local.keeps, ours.layout.params, limit, tmp_path))
        for after, report in rounds(state, plan(rounds=3, cohort=7), algo, ours, SoloComm()):
            state = after
            assert not report.dropped
        return state.model_N.clone()

    assert torch.equal(end(limit=0), end(limit=1 << 40))
