"""The round: the same bits on any number of ranks, bad clients left out, buffers averaged and never masked."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from federation import SIZES, algorithm, federate, norm_model, plain_model, plan, tasks
from torch import Tensor

from fedmpi.aggregate import mean as plain
from fedmpi.aggregate.sums import Accumulator, largest
from fedmpi.clients.task import ModelJob, Task
from fedmpi.clients.training import Start
from fedmpi.cohort import draw
from fedmpi.comm import Comm, SoloComm
from fedmpi.comm.node import share_node
from fedmpi.comm.threads import ThreadComm, run_threads
from fedmpi.errors import CommonError, RunError, UserError
from fedmpi.local import Channel, Job, LocalResult, LocalRule, fedgma2021, nova, scaffold, sgd
from fedmpi.local.descent import Descent
from fedmpi.masks import MASKS, Mask, MaskKnobs
from fedmpi.rounds import State, begin, rounds
from fedmpi.runs.measures.score import evaluate
from fedmpi.server import RULES, Moments, ServerRule

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
            free = {"bytes_sent": 0, "bytes_between_nodes": 0, "seconds": {}}
            assert replace(one, **free) == replace(two, **free)


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
    padded, counts = -(-LENGTH // 5) * 5, (3 + 5) * 8
    sums_and_gather = 2 * 4 * padded * 4 // 5
    small = 2 * counts * 4 // 5 + 2 * (5 * 8) * 4 // 5  # the counts, and the integer buffer's rows
    assert reports[0].bytes_sent == 5 * (sums_and_gather + small)
    _, crowded = federate(3, algorithm(), plan(sum="float32"))
    padded = -(-LENGTH // 3) * 3
    small = 2 * counts * 2 // 3 + 2 * (3 * 8) * 2 // 3
    votes = padded // 3 / 2  # of up to two clients: half a byte each, and a tile ends where the parameters end
    assert crowded[0].bytes_sent == pytest.approx(3 * ((2 * 4) * padded * 2 // 3 + 2 * votes + small), abs=3 * 2 * 2)
    assert one_each[0].round == 3


def by_hand(mask: str, tau: float, without: int | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return model, agreement and start of the first round by the plain definition: mean, votes, the paper's mask."""
    task = tasks(1)[0]
    start_N, ints = task.start()
    how = plan()
    cohort = draw(how.seed, 1, task.partition.sizes, how.cohort, 1)
    deltas, sizes = [], []
    for cid, samples in zip(cohort.cids, cohort.weights, strict=True):
        if cid != without:
            job = task.job(Start(start_N, ints, 1, cid, how.work))
            deltas.append(job.deliver(sgd(0.05, 0.9)(job))().delta_N.clone())
            sizes.append(samples)
    mean = plain.mean(deltas, sizes, cohort.total).double()
    square = plain.mean_square(deltas, sizes, cohort.total).double()
    agreement = plain.votes(deltas).abs() / len(deltas)
    spread = ((square - mean.square()) / square.clamp_min(1e-30)).clamp_min(1e-30)
    keep = {
        "gma": torch.where(agreement >= tau, 1.0, agreement),
        "and": (agreement >= tau).double(),
        "sand": (MaskKnobs.sharpness * (agreement - tau) / spread).tanh().clamp_min(0.0),
    }.get(mask)
    step = mean if keep is None else torch.cat([(mean * keep)[:PARAMS], mean[PARAMS:]])
    return start_N.double() + step, agreement, start_N


@pytest.mark.parametrize("mask", MASKS)
def test_a_round_is_the_papers_formula(mask: str) -> None:
    want, agreement, start_N = by_hand(mask, 0.6)
    states, reports = federate(3, algorithm(mask, tau=0.6), plan(rounds=1))
    got = states[0].model_N[:LENGTH].double()
    assert torch.allclose(got, want[:LENGTH], atol=1e-6)
    assert reports[0].agreement == pytest.approx(agreement[:PARAMS].mean().item())
    agreed = (agreement[:PARAMS] >= 0.6).double().mean().item()
    if mask == "sand":  # in full it keeps only what the clients moved nearly alike
        assert reports[0].kept < agreed
    else:
        assert reports[0].kept == pytest.approx(1.0 if mask == "mean" else agreed)
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
def test_tiles_of_a_slice_move_with_their_own_moments(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    algo = algorithm("gma", server, lr=0.1, momentum=0.5)
    whole, _ = federate(2, algo)
    monkeypatch.setattr("fedmpi.aggregate.travel.TILE", 4)
    tiles, _ = federate(2, algo)
    assert bits(tiles[0].model_N) == bits(whole[0].model_N)
    for name, moment in whole[0].moments.items():
        assert torch.equal(moment, tiles[0].moments[name])


def test_a_rule_gets_the_number_of_the_round() -> None:
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


def spoiled(kind: str, victims: set[int]) -> LocalRule:
    """Local SGD that goes wrong for some clients."""
    good = sgd(0.05, 0.9)

    def run(job: ModelJob) -> LocalResult:
        result = good(job)
        if job.cid in victims:
            if kind == "raises":
                raise MemoryError("out of memory, as a test")
            result.delta_P[0] = {"nan": float("nan"), "inf": float("inf"), "huge": 1e30}[kind]
        return result

    return LocalRule(run)


@pytest.mark.parametrize("kind", ["nan", "inf", "huge", "raises"])
@pytest.mark.parametrize("mask", MASKS)
def test_an_unusable_client_is_left_out_named_and_renormalised_away(
    mask: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Four of five deliver, and agreement is over those four: at tau 0.5 two net votes agree; of five, three."""
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
def test_too_few_usable_clients_fail_on_every_rank_with_the_same_message(size: int) -> None:
    ours = tasks(size)
    cohort = draw(11, 1, ours[0].partition.sizes, 5, 1)
    algo = algorithm(local=spoiled("nan", set(cohort.cids[:3])))

    def work(comm: Comm) -> tuple[str, bool]:
        state = begin(ours[comm.rank], algo, comm)
        before = state.model_N.clone()
        with pytest.raises(RunError) as caught:
            next(rounds(state, plan(min_clients=3), algo, ours[comm.rank], comm))
        return str(caught.value), torch.equal(state.model_N, before)

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

    def _start(self, send, recv):
        self.arrived += [(x.dtype, x.numel()) for x in recv.values()]
        return super()._start(send, recv)


def test_no_rank_ever_receives_a_full_tensor_of_sums_or_votes(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 3
    monkeypatch.setattr("fedmpi.comm.threads.ThreadComm", Watched)
    Watched.arrived = []
    federate(size, algorithm(), plan(rounds=1, cohort=3))
    padded = -(-LENGTH // size) * size
    slice_length = padded // size
    parcels = [n for kind, n in Watched.arrived if kind == torch.uint8]  # sums and votes of `exact`
    assert len(parcels) == 2 * size * (size - 1), "one slice from each of the others, and nothing else"
    most = 8 * slice_length + 16, -(-slice_length * 2 // 8) + 1  # room for 8 bytes each, and two bits
    assert all(n <= most[0] for n in parcels) and sum(n <= most[1] for n in parcels) == len(parcels) / 2


def test_the_sums_are_all_that_a_rank_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory does not grow with the clients: one delta buffer per rank is used for all of them."""
    seen: set[int] = set()
    add = Accumulator.add
    monkeypatch.setattr(
        Accumulator, "add", lambda self, delta_N, *args: (seen.add(delta_N.data_ptr()), add(self, delta_N, *args))
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
    assert all(score == scores[0] for score in scores)
    before, after = scores[0]
    assert after.metric > max(before.metric, 0.6) and after.loss < before.loss


@pytest.mark.parametrize("size", [float("nan"), float("inf"), 2.4e11, 1e12, 1e30])
def test_a_diverged_model_scores_nan_and_not_an_error(size: float) -> None:
    task = tasks(1, plain_model)[0]
    state = begin(task, algorithm(), SoloComm())
    state.model_N.mul_(size)
    score = evaluate(task, state, SoloComm(), block=10)
    assert score.loss != score.loss and 0 <= score.metric <= 1


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


@pytest.mark.parametrize("size", [1, 5])  # on five ranks each has one client, which is folded as it is sent
def test_an_error_while_folding_ends_the_run_and_is_not_taken_for_a_clients(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a delta in the sums could not be taken back: to continue without the client would be silently wrong."""

    def fold(self: Accumulator, *args: object) -> None:
        raise MemoryError("in the middle of a fold, as a test")

    monkeypatch.setattr(Accumulator, "_add_tile", fold)
    with pytest.raises(MemoryError, match="in the middle of a fold"):
        federate(size, algorithm())


# The mask that reads the variance


def test_squares_travel_only_under_a_mask_that_reads_them() -> None:
    size, padded = 3, -(-LENGTH // 3) * 3
    for how, low, high in (("exact", 4, 8.5), ("float32", 4, 4)):
        sent = {mask: federate(size, algorithm(mask), plan(rounds=1, sum=how))[1][0].bytes_sent for mask in MASKS}
        assert sent["mean"] == sent["gma"] == sent["and"]
        each = (sent["sand"] - sent["gma"]) / ((size - 1) * padded)
        assert low <= each <= high


def moved_by(size: float, victims: set[int], buffer: bool = False) -> LocalRule:
    """Local SGD, but some clients move one parameter (or a buffer of the model) that far."""
    good = sgd(0.05, 0.9)

    def run(job: ModelJob) -> LocalResult:
        result = good(job)
        if job.cid in victims:
            if buffer:
                job.task.x_N[PARAMS] = job.start_N[PARAMS] + size
            else:
                result.delta_P[0] = size
        return result

    return LocalRule(run)


FIRST = draw(11, 1, tasks(1)[0].partition.sizes, 5, 1)


@pytest.mark.parametrize(
    ("mask", "how", "buffer", "dropped"),
    [
        ("sand", "exact", False, True),
        ("sand", "exact", True, False),
        ("sand", "float32", False, False),
        ("gma", "exact", False, False),
    ],
)
def test_a_parameter_that_moves_by_16_leaves_its_client_out_under_sand_and_exact(
    mask: str, how: str, buffer: bool, dropped: bool
) -> None:
    victim = FIRST.cids[1]
    for size in (1, 3):
        algo = algorithm(mask, local=moved_by(16.0, {victim}, buffer))
        states, reports = federate(size, algo, plan(rounds=1, sum=how))
        assert reports[0].dropped == ((victim,) if dropped else ())
        assert states[0].model_N.isfinite().all()
    usual, _ = federate(3, algorithm(mask), plan(rounds=1, sum=how))
    if buffer:  # weight / total of 16 in the buffer, and the parameters as ever
        share = FIRST.weights[1] / FIRST.total
        assert torch.equal(states[0].model_N[:PARAMS], usual[0].model_N[:PARAMS])
        assert abs(states[0].model_N[PARAMS] - 16 * share) < 1


def test_a_step_that_float32_can_hold_but_its_square_cannot_makes_no_nan() -> None:
    algo = algorithm("sand", local=moved_by(1e25, {FIRST.cids[1]}))
    states, _ = federate(1, algo, plan(rounds=1, sum="float32"))
    assert not states[0].model_N.isnan().any()


# Channels: further vectors of the clients


def pattern(cid: int) -> torch.Tensor:
    """What client cid sends: numbers whose sum depends on the order in float32."""
    return torch.randn(PARAMS, generator=torch.Generator().manual_seed(cid)) * 10.0 ** (cid % 3)


def sending(victim: int | None = None, spoil: str = "delta") -> LocalRule:
    """Clients that stay where they are and send a pattern through a channel of each kind; one of them fails."""

    def run(job: ModelJob) -> LocalResult:
        cid = job.cid
        sends = {"drift": pattern(cid), "news": pattern(cid) * 2}
        result = LocalResult(job.delta_P.zero_(), sends=sends)
        if cid == victim:
            {"delta": result.delta_P, **sends}[spoil][0] = float("nan")
        return result

    return LocalRule(run, sends=(Channel("drift", to="model"), Channel("news", to="shared")))


@pytest.mark.parametrize("spoil", [None, "delta", "drift", "news"])
@pytest.mark.parametrize("how", ["exact", "float32"])
@pytest.mark.parametrize("mask", MASKS)
def test_channels_are_exact_and_never_masked_and_nothing_of_a_dropped_client_is_in_them(
    mask: str, how: str, spoil: str | None
) -> None:
    victim = FIRST.cids[1] if spoil else None
    algo = algorithm(mask, tau=0.99, local=sending(victim, spoil or "delta"))
    outcomes = [federate(size, algo, plan(rounds=1, sum=how)) for size in (1, 2, 3, 7)]
    used = [(cid, w) for cid, w in zip(FIRST.cids, FIRST.weights, strict=True) if cid != victim]
    start_N, _ = tasks(1)[0].start()
    drift = sum(pattern(cid).double() * w for cid, w in used) / sum(w for _, w in used)
    news = sum(pattern(cid).double() * 2 for cid, _ in used) / len(SIZES)  # over all clients there are
    for states, reports in outcomes:
        assert reports[0].dropped == ((victim,) if spoil else ())
        for state in states:
            assert torch.allclose(state.model_N[:PARAMS].double(), start_N[:PARAMS] + drift, rtol=1e-6, atol=1e-6)
            assert torch.allclose(state.shared["news"][:PARAMS].double(), news, rtol=1e-6, atol=1e-9)
            assert torch.equal(state.model_N[PARAMS:LENGTH], start_N[PARAMS:LENGTH]), "a channel has no buffers"
            assert bits(state.model_N) == bits(outcomes[0][0][0].model_N)
            assert bits(state.shared["news"]) == bits(outcomes[0][0][0].shared["news"])
    assert list(outcomes[0][0][0].shared) == ["news"]


def test_a_shared_vector_adds_up_over_the_rounds_and_is_what_clients_find() -> None:
    found: dict[int, torch.Tensor] = {}

    def run(job: Job) -> LocalResult:
        found[job.round] = job.shared["news"].clone()
        return LocalResult(job.delta_P.zero_(), sends={"news": torch.ones(PARAMS)})

    states, _ = federate(1, algorithm(local=LocalRule(run, sends=(Channel("news"),))), plan(rounds=3))
    for round, vector in found.items():  # five clients of seven send a one in each round before
        assert vector.tolist() == pytest.approx([5 / 7 * (round - 1)] * PARAMS)
    assert states[0].shared["news"][:PARAMS].tolist() == pytest.approx([15 / 7] * PARAMS)


def test_all_that_clients_send_goes_in_one_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    offer = Comm.offer
    monkeypatch.setattr(
        Comm, "offer", lambda self, many, *args: (calls.append((self.rank, len(many))), offer(self, many, *args))[1]
    )
    federate(3, algorithm("sand", local=sending()), plan(rounds=2))
    assert sorted(calls) == [(rank, 5) for rank in range(3) for _ in range(2)]  # sums, votes, squares, two channels


def test_a_channel_costs_about_6_bytes_an_element_and_its_shared_vector_4_more() -> None:
    size, padded = 3, -(-LENGTH // 3) * 3
    plain, with_c = (
        federate(size, algorithm(local=rule), plan(rounds=1, sum="float32"))[1][0].bytes_sent
        for rule in (sgd(0.05), scaffold(Descent(0.05)))
    )
    assert 5 + 4 <= (with_c - plain) / ((size - 1) * padded) <= 6.5 + 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sends": {}}, "it sends [], but its rule declares ['news']"),
        ({"sends": {"news": 0, "more": 0}}, "it sends ['more', 'news'], but its rule declares ['news']"),
        ({"keeps": {"diary": 0}}, "it keeps ['diary'], but its rule declares []"),
        ({"sends": {"news": float("inf")}}, "it sends a 'news' that holds NaN or infinity"),
        ({"sends": {"news": 2.0**17}}, "its update reaches 1.31e+05, beyond the range of 1.31e+05"),
        ({"sends": {"news": "short"}}, f"it sends a 'news' of shape ({PARAMS - 1},), not ({PARAMS},)"),
        ({"sends": {"news": "long"}}, f"it sends a 'news' of shape ({2 * LENGTH},), not ({PARAMS},)"),
    ],
)
def test_a_client_that_delivers_other_than_its_rule_declares_is_left_out(
    given: dict[str, dict[str, float | str]], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A vector of another length than the parameters' cannot be averaged with the others."""
    lengths = {"short": PARAMS - 1, "long": 2 * LENGTH}

    def vector(what: float | str) -> torch.Tensor:
        return torch.zeros(lengths[what]) if isinstance(what, str) else torch.full((PARAMS,), float(what))

    def run(job: ModelJob) -> LocalResult:
        sound = {"sends": {"news": 1.0}, "keeps": {}}
        parts = sound | given if job.cid == FIRST.cids[2] else sound
        vectors = {kind: {name: vector(v) for name, v in some.items()} for kind, some in parts.items()}
        return LocalResult(job.delta_P.zero_(), **vectors)

    algo = algorithm(local=LocalRule(run, sends=(Channel("news"),)))
    for size in (1, 2):
        _, reports = federate(size, algo, plan(rounds=1))
        assert reports[0].dropped == (FIRST.cids[2],)
    assert message in caplog.text


@pytest.mark.parametrize("length", [1, PARAMS - 1, PARAMS + 1])
def test_a_client_that_keeps_a_vector_of_another_length_is_left_out(length: int) -> None:
    def run(job: ModelJob) -> LocalResult:
        wrong = job.cid == FIRST.cids[2]
        return LocalResult(job.delta_P.zero_(), keeps={"diary": torch.ones(length if wrong else PARAMS)})

    states, reports = federate(1, algorithm(local=LocalRule(run, keeps=("diary",))), plan(rounds=1))
    assert reports[0].dropped == (FIRST.cids[2],)
    assert list(states[0].memory) == [cid for cid in FIRST.cids if cid != FIRST.cids[2]]


# Rules whose deltas come divided by their steps


def stepping(steps: dict[int, float], normalised: bool = True) -> LocalRule:
    """Client n moves every parameter by n + 1 and says that it took so many steps."""

    def run(job: ModelJob) -> LocalResult:
        cid = job.cid
        return LocalResult(job.delta_P.fill_(cid + 1.0), steps=steps.get(cid, 1.0))

    return LocalRule(run, normalised=normalised)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("how", ["exact", "float32"])
def test_the_server_multiplies_by_the_weighted_mean_of_the_steps(size: int, how: str) -> None:
    steps = {cid: 1.5 + cid for cid in range(7)}
    states, _ = federate(size, algorithm("gma", local=stepping(steps)), plan(rounds=1, sum=how))
    mean = sum(w * (cid + 1.0) for cid, w in zip(FIRST.cids, FIRST.weights, strict=True)) / FIRST.total
    factor = sum(w * (cid + 1.5) for cid, w in zip(FIRST.cids, FIRST.weights, strict=True)) / FIRST.total
    start_N, _ = tasks(1)[0].start()
    moved = states[0].model_N[:PARAMS] - start_N[:PARAMS]
    assert torch.allclose(moved, torch.tensor(mean * factor), rtol=1e-5)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), 2.0**20])
def test_steps_that_cannot_be_averaged_leave_their_client_out(bad: float, caplog: pytest.LogCaptureFixture) -> None:
    victim = FIRST.cids[0]
    states, reports = federate(2, algorithm("mean", local=stepping({victim: bad})), plan(rounds=1))
    assert reports[0].dropped == (victim,)
    assert f"its steps are {bad}, which must be a number between 0 and" in caplog.text
    rest = list(zip(FIRST.cids, FIRST.weights, strict=True))[1:]
    mean = sum(w * (cid + 1.0) for cid, w in rest) / sum(w for _, w in rest)  # their steps are 1 each
    assert torch.allclose(states[0].model_N[:PARAMS] - tasks(2)[0].start()[0][:PARAMS], torch.tensor(mean), rtol=1e-5)


@pytest.mark.parametrize("odd", [0.0, 17.0, 2.0**30, float("nan"), float("inf")])
def test_the_steps_of_a_rule_that_is_not_normalised_do_not_matter(odd: float) -> None:
    usual, _ = federate(1, algorithm(local=stepping({}, normalised=False)), plan(rounds=1))
    states, reports = federate(1, algorithm(local=stepping({FIRST.cids[0]: odd}, normalised=False)), plan(rounds=1))
    assert reports[0].dropped == () and bits(states[0].model_N) == bits(usual[0].model_N)


@pytest.mark.parametrize("mask", MASKS)
def test_uneven_steps_are_the_same_bits_on_any_number_of_ranks(mask: str) -> None:
    algo = algorithm(mask, local=nova(Descent(0.05, 0.9)))
    alone, reports = federate(1, algo)
    for size in (2, 3):
        states, theirs = federate(size, algo)
        assert bits(states[0].model_N) == bits(alone[0].model_N)
        assert [r.train_loss for r in theirs] == [r.train_loss for r in reports]


def test_the_state_says_what_a_rule_asked_for() -> None:
    task = tasks(1)[0]
    state: State = begin(task, algorithm(local=scaffold(Descent(0.05))), SoloComm())
    assert list(state.shared) == ["control"] and not state.shared["control"].any()
    assert state.memory.names == ("control",) and state.memory.length == PARAMS and len(state.memory) == 0
    bare = begin(task, algorithm(), SoloComm())
    assert bare.shared == {} and bare.memory.names == ()


def test_a_client_whose_result_carries_a_graph_harms_nobody() -> None:
    """Without that, one such delta would make the task's memory part of a graph, and every later client fail."""
    good, calls = sgd(0.05, 0.9), []

    def run(job: Job) -> LocalResult:
        result = good(job)
        calls.append(job)
        if len(calls) > 1:
            return result
        with torch.enable_grad():
            return LocalResult(result.delta_P.clone().requires_grad_() * 1.0)

    states, reports = federate(1, algorithm(local=LocalRule(run)))
    alone, _ = federate(1, algorithm())
    assert not reports[0].dropped and bits(states[0].model_N) == bits(alone[0].model_N)


def test_a_rule_that_leaves_by_sys_exit_leaves_its_client_out(caplog: pytest.LogCaptureFixture) -> None:
    victim = draw(11, 1, tasks(1)[0].partition.sizes, 5, 1).cids[1]
    good = sgd(0.05, 0.9)

    def run(job: ModelJob) -> LocalResult:
        if job.cid == victim and job.round == 1:
            raise SystemExit(0)
        return good(job)

    with caplog.at_level(logging.WARNING, logger="fedmpi"):
        _, reports = federate(1, algorithm(local=LocalRule(run)), plan(rounds=1))
    assert reports[0].dropped == (victim,) and "its training raised" in caplog.text


@pytest.mark.parametrize("where", ["start_P", "shared", "memory"])
def test_a_rule_that_writes_to_what_all_clients_share_ends_the_run(where: str) -> None:
    good = scaffold(Descent(0.05))

    def run(job: Job) -> LocalResult:
        result = good(job)
        (job.start_P if where == "start_P" else getattr(job, where)["control"]).add_(0.001)
        return result

    with pytest.raises(RunError, match="its rule wrote to job.start_P, job.shared or job.memory"):
        federate(1, algorithm(local=LocalRule(run, good.sends, good.keeps)))


def test_a_model_that_is_not_finite_any_more_is_an_error_on_every_rank() -> None:
    for size in (1, 3):
        with pytest.raises(CommonError, match=r"round 1: mask and server's step left the model with NaN or infinity"):
            federate(size, algorithm("mean", lr=1e39))


def test_a_users_error_in_a_round_is_the_runs_and_not_taken_for_everybodys() -> None:
    def step(w: torch.Tensor, d: torch.Tensor, m: torch.Tensor, moments: Moments, t: int) -> None:
        raise UserError("my slice is too large")

    algo = replace(algorithm(), server=ServerRule({}, step))
    with pytest.raises(RunError, match="round 1: my slice is too large"):
        federate(1, algo)


def test_the_same_error_of_many_clients_has_one_traceback(caplog: pytest.LogCaptureFixture) -> None:
    def run(job: Job) -> LocalResult:
        raise TypeError("as a test")

    with caplog.at_level(logging.WARNING, logger="fedmpi"), pytest.raises(CommonError, match="0 of 5 clients"):
        federate(1, algorithm(local=LocalRule(run)))
    assert caplog.text.count("its training raised TypeError('as a test')") == 5
    assert caplog.text.count("Traceback") == 1


# What clients would send


def test_what_clients_upload_and_download_by_hand() -> None:
    """The model has 36 * 3 + 3 parameters; norm_model 30 + 6 + 147, two float buffers of 3 and a counter."""
    control, gradient = scaffold(Descent(0.05, 0.0)), fedgma2021(Descent(0.05, 0.0))
    for rule, up, down in ((None, 111, 111), (control, 222, 222), (gradient, 222, 111)):
        for size in (1, 3):
            _, reports = federate(size, algorithm(local=rule), plan(rounds=1), plain_model)
            assert (reports[0].client_bytes_up, reports[0].client_bytes_down) == (5 * 4 * up, 5 * 4 * down)
    for mask in ("mean", "sand"):
        _, reports = federate(2, algorithm(mask), plan(rounds=1), norm_model)
        both = 5 * (4 * (30 + 6 + 147 + 6) + 8)
        assert (reports[0].client_bytes_up, reports[0].client_bytes_down) == (both, both)


def test_a_client_that_is_left_out_has_downloaded_and_not_uploaded() -> None:
    victim = FIRST.cids[2]

    def fails(job: ModelJob) -> LocalResult:
        if job.cid == victim:
            raise ValueError("made for this test")
        return sgd(0.05)(job)

    for size in (1, 2):
        _, reports = federate(size, algorithm(local=LocalRule(fails)), plan(rounds=1), plain_model)
        assert reports[0].dropped == (victim,)
        assert (reports[0].client_bytes_up, reports[0].client_bytes_down) == (4 * 444, 5 * 444)


def test_a_mask_sees_the_normalised_mean_before_it_is_scaled_back() -> None:
    """Mean, square and votes that a mask compares are of the same deltas; the mean steps come in at the server's."""
    seen: list[Tensor] = []

    def spied(votes_S: Tensor, clients: int, mean_S: Tensor, square_S: Tensor) -> Tensor:
        seen.append(mean_S.clone())
        return torch.ones_like(mean_S)

    rule = LocalRule(lambda job: LocalResult(job.delta_P.fill_(0.5), steps=3.0), normalised=True)
    algo = replace(algorithm(local=rule, lr=1.0), mask=Mask(spied, second_moment=True))
    start = begin(tasks(1)[0], algo, SoloComm()).model_N
    (state,), _ = federate(1, algo, plan(rounds=1))
    params = tasks(1)[0].layout.params
    assert torch.equal(torch.cat(seen), torch.full((params,), 0.5))
    assert torch.allclose(state.model_N[:params] - start[:params], torch.tensor(1.5), atol=1e-6)
