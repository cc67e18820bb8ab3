"""The round: the same bits on any number of ranks, bad clients left out, buffers averaged and never masked."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from federation import SIZES, algorithm, federate, plain_model, plan, tasks

from fedmpi.cohort import draw
from fedmpi.comm import Comm, SoloComm
from fedmpi.comm.node import share_node
from fedmpi.comm.threads import ThreadComm, run_threads
from fedmpi.errors import RunError
from fedmpi.evaluate import evaluate
from fedmpi.local import Job, LocalResult, sgd
from fedmpi.masks import MASKS
from fedmpi.server import RULES
from fedmpi.tally import Tally
from fedmpi.task import Task
from fedmpi.train import begin, largest, rounds

LENGTH = tasks(1)[0].layout.length
PARAMS = tasks(1)[0].layout.params


def bits(x: torch.Tensor) -> list[int]:
    return x[:LENGTH].view(torch.int32).tolist()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("server", RULES)
def test_same_bits_and_same_metrics_on_any_number_of_ranks(mask: str, server: str) -> None:
    algo = algorithm(mask, server, lr=0.1, momentum=0.5)
    alone, reports = federate(1, algo)
    for size in (2, 3, 4, 7):
        states, theirs = federate(size, algo)
        for state in states:
            assert bits(state.model_N) == bits(alone[0].model_N)
            assert state.ints.tolist() == alone[0].ints.tolist()
        for one, two in zip(reports, theirs, strict=True):
            assert replace(one, bytes_sent=0, seconds={}) == replace(two, bytes_sent=0, seconds={})


def test_the_models_moments_are_shared_out_and_not_copied() -> None:
    algo = algorithm("gma", "yogi", lr=0.1)
    alone, _ = federate(1, algo)
    states, _ = federate(3, algo)
    for name in ("v", "z"):
        assert [s.moments[name].numel() for s in states] == [-(-LENGTH // 3)] * 3
        together = torch.cat([s.moments[name] for s in states])
        assert torch.equal(together[:PARAMS], alone[0].moments[name][:PARAMS])


@pytest.mark.parametrize("how", ["exact", "float32"])
@pytest.mark.parametrize("server", RULES)
def test_tau_zero_is_the_mean_bit_for_bit(how: str, server: str) -> None:
    mean, _ = federate(2, algorithm("mean", server), plan(sum=how))
    for mask in ("gma", "and"):
        masked, reports = federate(2, algorithm(mask, server, tau=0.0), plan(sum=how))
        assert bits(masked[0].model_N) == bits(mean[0].model_N)
        assert all(report.kept == 1.0 for report in reports)


def test_float32_differs_from_exact_by_rounding_only() -> None:
    exact, _ = federate(3, algorithm("mean"))
    rounded, _ = federate(3, algorithm("mean"), plan(sum="float32"))
    assert torch.allclose(exact[0].model_N, rounded[0].model_N, atol=1e-5)


def test_float32_sends_no_votes_where_every_rank_has_one_client() -> None:
    one_each, _ = federate(5, algorithm(), plan(sum="float32"))
    _, reports = federate(5, algorithm(), plan(sum="float32"))
    padded, counts = -(-LENGTH // 5) * 5, (2 + 5) * 8
    sums_and_gather = 2 * 4 * padded * 4 // 5
    small = 2 * counts * 4 // 5 + 2 * (5 * 8) * 4 // 5  # the counts, and the integer buffer's rows
    assert reports[0].bytes_sent == 5 * (sums_and_gather + small)
    _, crowded = federate(3, algorithm(), plan(sum="float32"))
    padded = -(-LENGTH // 3) * 3
    small = 2 * counts * 2 // 3 + 2 * (3 * 8) * 2 // 3
    assert crowded[0].bytes_sent == 3 * ((2 * 4 + 1) * padded * 2 // 3 + small)
    assert one_each[0].round == 3


def by_hand(mask: str, tau: float, without: int | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The first round done in one place: every client trained but one, plain mean, votes counted, the paper's mask."""
    task = tasks(1)[0]
    start_N, ints = task.start()
    how = plan()
    cohort = draw(how.seed, 1, task.partition.sizes, how.cohort, 1)
    deltas, sizes = [], []
    for cid, samples in zip(cohort.cids, cohort.weights, strict=True):
        if cid != without:
            job = task.job(start_N, ints, 1, cid, how.work)
            deltas.append(job.finish(sgd(0.05, 0.9)(job)).delta_N.clone().double())
            sizes.append(samples)
    weights = torch.tensor(sizes, dtype=torch.float64)
    mean = (torch.stack(deltas) * weights[:, None]).sum(0) / weights.sum()
    agreement = torch.stack(deltas).sign().mean(0).abs()
    keep = {"gma": torch.where(agreement >= tau, 1.0, agreement), "and": (agreement >= tau).double()}.get(mask)
    step = mean if keep is None else torch.cat([(mean * keep)[:PARAMS], mean[PARAMS:]])
    return start_N.double() + step, agreement, start_N


@pytest.mark.parametrize("mask", MASKS)
def test_a_round_is_the_papers_formula(mask: str) -> None:
    want, agreement, start_N = by_hand(mask, 0.6)
    states, reports = federate(3, algorithm(mask, tau=0.6), plan(rounds=1))
    got = states[0].model_N[:LENGTH].double()
    assert torch.allclose(got, want[:LENGTH], atol=1e-6)
    assert reports[0].agreement == pytest.approx(agreement[:PARAMS].mean().item())
    kept = 1.0 if mask == "mean" else (agreement[:PARAMS] >= 0.6).double().mean().item()
    assert reports[0].kept == pytest.approx(kept)
    assert not torch.equal(states[0].model_N[:PARAMS], start_N[:PARAMS])


def test_batch_norm_statistics_are_averaged_and_never_masked() -> None:
    want, agreement, start_N = by_hand("and", 1.0)
    states, _ = federate(2, algorithm("and", "yogi", tau=1.0), plan(rounds=1))
    statistics = states[0].model_N[PARAMS:LENGTH]
    assert (agreement[PARAMS:LENGTH] < 1.0).any(), "a mask would have held some of them back"
    assert torch.allclose(statistics.double(), want[PARAMS:LENGTH], atol=1e-6)
    assert not torch.equal(statistics, start_N[PARAMS:LENGTH])


def test_integer_buffers_take_the_largest() -> None:
    states, _ = federate(3, algorithm(), plan(rounds=1))
    cohort = draw(11, 1, tasks(1)[0].partition.sizes, 5, 1)
    steps = max(2 * -(-SIZES[cid] // 4) for cid in cohort.cids)  # two epochs in batches of 4
    assert states[0].ints.tolist() == [steps]


def test_the_largest_integers_count_whoever_has_them() -> None:
    def work(comm: Comm) -> list[int]:
        return largest(torch.tensor([comm.rank, -comm.rank]), comm).tolist()

    assert run_threads(3, work) == [[2, 0]] * 3


@pytest.mark.parametrize("server", RULES)
def test_pieces_of_a_slice_move_with_their_own_moments(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    algo = algorithm("gma", server, lr=0.1, momentum=0.5)
    whole, _ = federate(2, algo)
    monkeypatch.setattr("fedmpi.reduce.PIECE", 4)
    pieces, _ = federate(2, algo)
    assert bits(pieces[0].model_N) == bits(whole[0].model_N)
    for name, moment in whole[0].moments.items():
        assert torch.equal(moment, pieces[0].moments[name])


def test_a_rule_is_told_the_number_of_the_round() -> None:
    """Bias correction: in round t = 1 Adam of torch moves every element that moved by lr, whatever its size."""
    states, _ = federate(2, algorithm("mean", "adam", lr=0.1, variant="torch"), plan(rounds=1))
    want, _, start_N = by_hand("mean", 0.0)
    moved = (want - start_N.double()).abs() > 1e-5
    steps = (states[0].model_N[:PARAMS] - start_N[:PARAMS]).abs()[moved[:PARAMS]]
    assert torch.allclose(steps, torch.tensor(0.1), atol=1e-3) and len(steps) > 50


def test_a_rank_without_clients_takes_part() -> None:
    states, reports = federate(7, algorithm(), plan(cohort=2))
    alone, _ = federate(1, algorithm(), plan(cohort=2))
    assert all(bits(s.model_N) == bits(alone[0].model_N) for s in states)
    assert reports[0].clients == 2


def spoiled(kind: str, victims: set[int]):
    """Local SGD that goes wrong for some clients."""
    good = sgd(0.05, 0.9)

    def run(job: Job) -> LocalResult:
        result = good(job)
        if job.cid in victims:  # type: ignore[attr-defined]
            if kind == "raises":
                raise MemoryError("out of memory, as a test")
            result.delta_P[0] = {"nan": float("nan"), "inf": float("inf"), "huge": 1e30}[kind]
        return result

    return run


@pytest.mark.parametrize("kind", ["nan", "inf", "huge", "raises"])
@pytest.mark.parametrize("mask", MASKS)
def test_an_unusable_client_is_left_out_named_and_renormalised_away(
    mask: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Four of five deliver, and agreement is over those four: at tau 0.5 two net votes agree; of five, three."""
    logging.getLogger("fedmpi").propagate = True
    cohort = draw(11, 1, tasks(1)[0].partition.sizes, 5, 1)
    victim = cohort.cids[2]
    algo = algorithm(mask, tau=0.5, local=spoiled(kind, {victim}))
    outcomes = [federate(size, algo, plan(rounds=1)) for size in (1, 2, 4)]
    assert len({tuple(bits(s.model_N)) for states, _ in outcomes for s in states}) == 1
    for _, reports in outcomes:
        assert reports[0].dropped == (victim,) and reports[0].clients == 4
    assert f"client {victim} left out" in caplog.text
    want, agreement, _ = by_hand(mask, 0.5, without=victim)
    assert torch.allclose(outcomes[0][0][0].model_N.double(), want, atol=1e-6)
    assert outcomes[0][1][0].agreement == pytest.approx(agreement[:PARAMS].mean().item())


@pytest.mark.parametrize("size", [1, 3])
def test_too_few_usable_clients_fail_on_every_rank_with_the_same_sentence(size: int) -> None:
    ours = tasks(size)
    cohort = draw(11, 1, ours[0].partition.sizes, 5, 1)
    algo = algorithm(local=spoiled("nan", set(cohort.cids[:3])))

    def work(comm: Comm) -> tuple[str, bool]:
        state = begin(ours[comm.rank], algo, comm)
        before = state.model_N.clone()
        with pytest.raises(RunError) as told:
            next(rounds(state, plan(min_clients=3), algo, ours[comm.rank], comm))
        return str(told.value), torch.equal(state.model_N, before)

    results = run_threads(size, work)
    assert len(set(results)) == 1 and results[0][1], "the model is not touched"
    names = ", ".join(map(str, cohort.cids[:3]))
    assert results[0][0].startswith(
        f"round 1: 2 of 5 clients delivered a usable update, but min_clients is 3; left out: {names}."
    )


def test_all_clients_bad_is_an_error_and_not_a_division_by_zero() -> None:
    with pytest.raises(RunError, match="0 of 5 clients"):
        federate(2, algorithm(local=spoiled("nan", set(range(7)))))


class Watched(ThreadComm):
    """A thread's comm that notes what arrives from each rank: type and number of elements."""

    def _swap(self, send, recv):
        self.arrived += [(x.dtype, x.numel()) for x in recv.values()]
        return super()._swap(send, recv)


def test_no_rank_ever_receives_a_full_tensor_of_sums_or_votes(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 3
    monkeypatch.setattr("fedmpi.comm.threads.ThreadComm", Watched)
    Watched.arrived = []
    federate(size, algorithm(), plan(rounds=1, cohort=3))
    padded = -(-LENGTH // size) * size
    for dtype in (torch.int64, torch.int8):  # sums and votes of `exact`
        large = [n for kind, n in Watched.arrived if kind == dtype and n > 20]
        assert large == [padded // size] * (size * (size - 1)), "one slice from each of the others, and nothing else"


def test_the_tally_is_all_that_a_rank_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory does not grow with the clients: one delta buffer a rank is used for all of them."""
    seen: set[int] = set()
    add = Tally.add
    monkeypatch.setattr(
        Tally, "add", lambda self, delta_N, weight: (seen.add(delta_N.data_ptr()), add(self, delta_N, weight))
    )
    federate(1, algorithm(), plan(cohort=7))
    assert len(seen) == 1


def test_it_learns_and_evaluation_is_the_same_on_any_number_of_ranks() -> None:
    scores = []
    for size in (1, 2, 4):
        ours = tasks(size)
        algo = algorithm("gma")

        def work(comm: Comm, ours: list[Task] = ours, algo=algo):
            state = begin(ours[comm.rank], algo, comm)
            before = evaluate(ours[comm.rank], state, comm, block=7)
            for after, _ in rounds(state, plan(rounds=12), algo, ours[comm.rank], comm):
                state = after
            return before, evaluate(ours[comm.rank], state, comm, block=7)

        scores += run_threads(size, work)
    assert len(set(scores)) == 1
    before, after = scores[0]
    assert after.accuracy > max(before.accuracy, 0.6) and after.loss < before.loss


@pytest.mark.parametrize("size", [float("nan"), float("inf"), 2.4e11, 1e12, 1e30])
def test_a_diverged_model_scores_nan_and_not_an_error(size: float) -> None:
    task = tasks(1, plain_model)[0]
    state = begin(task, algorithm(), SoloComm())
    state.model_N.mul_(size)
    score = evaluate(task, state, SoloComm(), block=10)
    assert score.loss != score.loss and 0 <= score.accuracy <= 1


def test_rank_zeros_model_counts_where_the_ranks_start_from_different_ones() -> None:
    ours = tasks(2)
    ours[1].x_N.add_(1.0)

    def work(comm: Comm) -> torch.Tensor:
        return begin(ours[comm.rank], algorithm(), comm).model_N

    models = run_threads(2, work)
    assert torch.equal(models[0], models[1]) and torch.equal(models[0], tasks(2)[0].x_N)


def test_a_model_without_buffers_works_too() -> None:
    states, _ = federate(2, algorithm(), make=plain_model)
    assert states[0].ints.numel() == 0 and states[0].round == 3


def train_on_nodes(comm: Comm, want: list[int], nodes: list[int] | None, how: str) -> None:
    """Train in processes that share memory on nodes numbered as given, and compare with what one process got."""
    if nodes is not None:
        share_node(comm, nodes[comm.rank])
    task, algo = tasks(comm.size)[0], algorithm("gma", "yogi", lr=0.1)
    state = begin(task, algo, comm)
    for after, _ in rounds(state, plan(sum=how), algo, task, comm):
        state = after
    comm.barrier()  # nobody may be moving the model any more
    if how == "exact":
        assert bits(state.model_N) == want
    else:
        got = state.model_N[:LENGTH]
        assert torch.allclose(got, torch.tensor(want, dtype=torch.int32).view(torch.float32), atol=1e-4)


@pytest.mark.processes
@pytest.mark.parametrize("nodes", [None, [0, 0, 0], [0, 1, 0], [7, 8, 9]], ids=["sent", "one node", "two", "three"])
def test_same_bits_in_processes_on_any_nodes(nodes: list[int] | None, gloo) -> None:
    alone, _ = federate(1, algorithm("gma", "yogi", lr=0.1))
    gloo(3, train_on_nodes, bits(alone[0].model_N), nodes, "exact")


@pytest.mark.processes
def test_float32_in_processes_with_votes_read_off_the_sums(gloo) -> None:
    alone, _ = federate(1, algorithm("gma", "yogi", lr=0.1), plan(sum="float32"))
    gloo(5, train_on_nodes, bits(alone[0].model_N), [0, 0, 1, 1, 2], "float32")


def test_an_error_while_folding_ends_the_run_and_is_not_taken_for_a_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a delta in the sums could not be taken back: to go on without the client would be silently wrong."""

    def fold(self: Tally, delta_N: torch.Tensor, weight: int) -> None:
        raise MemoryError("in the middle of a fold, as a test")

    monkeypatch.setattr(Tally, "add", fold)
    with pytest.raises(MemoryError, match="in the middle of a fold"):
        federate(1, algorithm())
