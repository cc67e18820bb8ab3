"""bf16 on the wire: every rank has the same model, what is rounded off comes later, and nothing is lost on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from federation import algorithm, each, norm_model, plan, run_rounds, tasks
from torch import Tensor

from fedmpi.aggregate.compress import Compressor, nothing_unsent
from fedmpi.aggregate.exchange import Averages, reduce
from fedmpi.aggregate.sums import Accumulator
from fedmpi.algorithms import ALGORITHMS, Algorithm
from fedmpi.comm import Comm, SoloComm, share_node
from fedmpi.comm.threads import run_threads
from fedmpi.errors import UserError
from fedmpi.rounds import Plan, Report, State, begin, rounds
from fedmpi.runs.build import build, prepare, resolve
from fedmpi.runs.checkpoint.format import Fingerprint, Progress
from fedmpi.runs.checkpoint.load import find, restore
from fedmpi.runs.checkpoint.save import Saver
from fedmpi.runs.config import Checkpoint, Config

FINGERPRINT = Fingerprint({"seed": 1, "threads": 1}, {"data": "d"})
ODD = 1.0 + 2.0**-9 + 2.0**-12  # bf16 has 1 and 1 + 2**-7 next to it


def narrow(**changes) -> Plan:
    return plan(**({"sum": "float32", "wire": "bf16"} | changes))


def train(comm: Comm, how: Plan, algo: Algorithm, task) -> tuple[State, list[Report]]:
    """A rank's last state and its reports."""
    return run_rounds(begin(task, algo, comm, wire=how.wire), how, algo, task, comm)


def federate(size: int, how: Plan, algo: Algorithm, meta: np.ndarray | None = None) -> list[tuple[State, list[Report]]]:
    ours = tasks(size, norm_model, meta)
    return run_threads(size, lambda comm: train(comm, how, algo, ours[comm.rank]))


def total(states: list[State]) -> Tensor:
    """The model with all that is still to come."""
    later = torch.cat([state.unsent["model"] for state in states])
    return states[0].model_N.double() + later + sum(state.unsent["sums"].double() for state in states)


# --------------------------------------------------------------------------------------------------------- the round


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedgma2021", "fedmeta", "fedadam"])
def test_every_rank_has_the_same_model_and_it_is_nearly_that_of_float32(name: str) -> None:
    meta = np.arange(9) if ALGORITHMS[name].defaults.get("meta.size") else None
    algo = build(resolve(Config(algorithm=name, mask="gma", rounds=4)))
    results = federate(3, narrow(), algo, meta)
    first = results[0][0].model_N
    assert all(torch.equal(state.model_N, first) for state, _ in results)
    whole = federate(3, narrow(wire="float32"), algo, meta)[0][0].model_N
    start = begin(tasks(1, norm_model)[0], algorithm(), SoloComm()).model_N
    moved = (whole[: len(start)] - start).norm()
    assert 0 < (first - whole).norm() < 0.02 * moved


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_and_model_travel_in_half_the_bytes(size: int) -> None:
    reports = {wire: federate(size, narrow(wire=wire), algorithm())[0][1] for wire in ("float32", "bf16")}
    padded = tasks(size)[0].layout.padded(size)
    for whole, half in zip(reports["float32"], reports["bf16"], strict=True):
        assert whole.bytes_sent - half.bytes_sent == (size - 1) * (2 + 2) * padded
        assert whole.clients == half.clients


@pytest.mark.parametrize(("how", "wire"), [("exact", "float32"), ("float32", "float32"), ("float32", "bf16")])
@pytest.mark.parametrize("name", ["fedavg", "fedgma2021", "scaffold"])
def test_buckets_change_no_bit(name: str, how: str, wire: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is folded, sent, added up and gathered in buckets is what goes in one piece."""
    algo, asked = build(resolve(Config(algorithm=name, mask="gma", rounds=4))), narrow(sum=how, wire=wire)
    one = federate(3, asked, algo)[0]
    monkeypatch.setattr("fedmpi.aggregate.exchange.LEAST", 16)
    monkeypatch.setattr("fedmpi.aggregate.travel.TILE", 7)
    calls: list[int] = []
    start = Comm.start_gather
    monkeypatch.setattr(Comm, "start_gather", lambda self, *args: (calls.append(self.rank), start(self, *args))[1])
    several = federate(3, asked, algo)[0]
    assert torch.equal(one[0].model_N, several[0].model_N) and one[1][-1].kept == several[1][-1].kept
    assert calls.count(0) >= 4 * 3, "each round in four"


def test_alone_nothing_is_rounded() -> None:
    one, other = (federate(1, narrow(wire=wire), algorithm())[0][0] for wire in ("float32", "bf16"))
    assert torch.equal(one.model_N, other.model_N) and not any(x.any() for x in other.unsent.values())


def nodes_of_all_kinds(comm: Comm) -> None:
    """All sent; two nodes, one of them with two ranks; one node, where nothing is rounded."""

    def trained(wire: str) -> State:
        return train(comm, narrow(wire=wire), algorithm(), tasks(comm.size)[0])[0]

    whole = trained("float32")
    for nodes in (None, (0, 1, 1), (0, 0, 0)):
        if nodes:
            share_node(comm, nodes[comm.rank])
        state = trained("bf16")
        copies = torch.zeros(comm.size, state.model_N.numel(), dtype=torch.float64)
        copies[comm.rank] = state.model_N
        comm.sum(copies)
        assert torch.equal(copies, copies[:1].expand_as(copies)), "the same on every rank"
        alone = nodes == (0, 0, 0)
        if alone:
            whole = trained("float32")
        assert torch.equal(state.model_N, whole.model_N) == alone
        assert any(x.any() for x in state.unsent.values()) != alone
        assert (state.model_N - whole.model_N).norm() < 0.01 * whole.model_N.norm()
        slices = state.unsent["sums"].view(comm.size, -1)
        mates = [r for r in range(comm.size) if nodes and nodes[r] == nodes[comm.rank]] or [comm.rank]
        assert not any(slices[r].any() for r in mates), "rows that are shared are not rounded"


@pytest.mark.processes
def test_only_what_travels_between_nodes_is_rounded(gloo: Callable[..., None]) -> None:
    gloo(3, nodes_of_all_kinds)


# -------------------------------------------------------------------------------------------------- what is left over


def means(comm: Comm, turns: list[tuple[Tensor, int]], feedback: bool) -> tuple[Tensor, Tensor]:
    """The sum of this rank's slices of the means, and what it has left over; each rank adds (x, weight) in a turn."""
    length = turns[0][0].numel() // comm.size
    sums, model_N = Accumulator(comm, length, 5, "float32", wire="bf16"), comm.vector(length)
    wire, summed = Compressor(comm, sums.sums, sums.rounded, model_N), torch.zeros(length, dtype=torch.float64)
    unsent = nothing_unsent(model_N, length)["sums"]
    for x, weight in turns:
        everybody = weight * comm.size
        sums.reset(everybody)
        sums.add(x, weight)

        def prepare(bucket: slice, everybody=everybody) -> None:
            wire.round_sums(unsent, everybody, bucket)

        made: list[Averages] = each(reduce(comm, [(sums, everybody)], x.numel(), 1, prepare))
        summed += torch.cat([part.mean for part in made])
        if not feedback:
            unsent.zero_()
    return summed, unsent


@pytest.mark.parametrize("feedback", [True, False])
def test_over_many_rounds_the_mean_is_unbiased_with_what_was_left_over(feedback: bool) -> None:
    count, size = 64, 3
    x = torch.tensor([ODD, -ODD, 1e-6 * ODD] * size)
    results = run_threads(size, lambda comm: means(comm, [(x, 1)] * count, feedback))
    off = max(float((summed / count / x[:3] - 1).abs().max()) for summed, _ in results)
    bias = 2 / 3 * (1 - 1 / ODD)  # of the three rows that are added up two were sent
    assert off < 2.0**-8 / count if feedback else off > 0.9 * bias


def test_what_is_left_over_is_kept_as_a_part_of_the_mean() -> None:
    """Cohorts of unequal weight: what was sent and what is left add up to what was to be sent."""
    size, generator = 4, torch.Generator().manual_seed(1)
    turns = [(torch.randn(20, generator=generator), weight) for weight in (1, 900, 7, 1, 5000, 3)]
    results = run_threads(size, lambda comm: means(comm, turns, True))
    sent = torch.cat([summed for summed, _ in results])
    left = sum(unsent.double() for _, unsent in results)
    want = sum(x.double() for x, _ in turns)
    assert (sent - want).abs().max() > 1e-4, "something was rounded"
    assert torch.allclose(sent + left, want, atol=5e-6)


def test_votes_are_those_of_the_deltas_whatever_is_left_over() -> None:
    """With one client a rank float32 reads them off the sums; here what is left over may have the other sign."""

    def work(comm: Comm) -> list[int]:
        sums, model_N = Accumulator(comm, 2, 2, "float32", wire="bf16"), comm.vector(2)
        wire, unsent = Compressor(comm, sums.sums, sums.rounded, model_N), torch.full((4,), -0.5)
        sums.reset(2)
        sums.add(torch.full((4,), 1e-3), 1)
        made = each(reduce(comm, [(sums, 2)], 4, 1, lambda bucket: wire.round_sums(unsent, 2, bucket)))
        return [vote for part in made for vote in part.votes.tolist()]

    assert run_threads(2, work) == [[2, 2], [2, 2]]


def test_the_update_of_the_model_is_unbiased_too() -> None:
    def work(comm: Comm) -> tuple[Tensor, Tensor]:
        sums, model_N = Accumulator(comm, 3, 2, "float32", wire="bf16"), comm.vector(3)
        wire, unsent_S = Compressor(comm, sums.sums, sums.rounded, model_N), torch.zeros(3)
        for _ in range(50):
            wire.remember(model_N)
            comm.own(model_N).add_(torch.tensor([ODD, 0.0, -3 * ODD]))
            comm.gather(model_N, [wire.start_gather(model_N, unsent_S, slice(0, 3))])
        return model_N, unsent_S

    results = run_threads(2, work)
    assert torch.equal(results[0][0], results[1][0])
    want = 50 * torch.tensor([ODD, 0.0, -3 * ODD] * 2)
    left = torch.cat([unsent_S for _, unsent_S in results])
    assert torch.allclose(results[0][0] + left, want, rtol=1e-6)
    assert (results[0][0] - want).abs().max() < 0.02 < 50 * (ODD - 1)


# -------------------------------------------------------------------------------------------------------- checkpoints


def halfway(out: Path, size: int, algo: Algorithm, how: Plan) -> list[State]:
    """Two rounds, saved."""
    ours = tasks(size)

    def work(comm: Comm) -> State:
        state = start = begin(ours[comm.rank], algo, comm, wire=how.wire)
        with Saver(out, Checkpoint(1, 0, 2), FINGERPRINT, comm, None) as saver:
            for state, _ in rounds(start, replace(how, rounds=2), algo, ours[comm.rank], comm):
                saver.round_done(state, Progress(), [0], last=state.round == 2)
        return state

    return run_threads(size, work)


def resumed(comm: Comm, out: Path, algo: Algorithm, task, wire: str = "bf16") -> State:
    found = find(out, FINGERPRINT, comm, force=False)
    assert found is not None and found.round == 2
    return restore(found, begin(task, algo, comm, wire=wire), task.layout.length, comm)


def test_resumed_on_as_many_ranks_the_bits_are_those_of_the_undisturbed_run(tmp_path: Path) -> None:
    algo, how, ours = algorithm(server="adam"), narrow(rounds=4), tasks(3)
    halfway(tmp_path, 3, algo, how)

    def work(comm: Comm) -> State:
        return list(rounds(resumed(comm, tmp_path, algo, ours[comm.rank]), how, algo, ours[comm.rank], comm))[-1][0]

    for state, (right, _) in zip(run_threads(3, work), federate(3, how, algo), strict=True):
        assert torch.equal(state.model_N, right.model_N)
        for name in ("sums", "model"):
            assert torch.equal(state.unsent[name], right.unsent[name]) and state.unsent[name].any()


@pytest.mark.parametrize("after", [1, 2, 4, 5])
def test_resumed_on_other_ranks_nothing_is_lost(after: int, tmp_path: Path) -> None:
    algo, how, ours = algorithm(), narrow(), tasks(after)
    length = ours[0].layout.length
    before = total(halfway(tmp_path, 3, algo, how))[:length]
    states = run_threads(after, lambda comm: resumed(comm, tmp_path, algo, ours[comm.rank]))
    assert torch.allclose(total(states)[:length], before, rtol=0, atol=1e-9)
    assert (states[0].model_N[:length] - before).abs().max() > 1e-7, "there was something to lose"
    slice_length = -(-length // after)
    for rank, state in enumerate(states):
        elsewhere = [r for r in range(after) if r != rank]
        assert not state.unsent["sums"].view(after, slice_length)[elsewhere].any(), "the owner has it"


def test_alone_what_others_left_over_goes_into_the_next_round(tmp_path: Path) -> None:
    algo, how, task = algorithm("mean"), narrow(), tasks(1)[0]
    halfway(tmp_path, 3, algo, how)
    comm, ends = SoloComm(), []
    for flushed in (True, False):
        state = resumed(comm, tmp_path, algo, task)
        left = sum(state.unsent.values()).clone()
        if not flushed:
            for vector in state.unsent.values():
                vector.zero_()
        state = list(rounds(state, how, algo, task, comm))[-1][0]
        assert not any(vector.any() for vector in state.unsent.values())
        ends.append(state.model_N.clone())
    assert torch.allclose(ends[0] - ends[1], left, rtol=0, atol=1e-7) and left.abs().max() > 1e-6


def test_a_checkpoint_of_a_run_without_it_can_be_gone_on_from(tmp_path: Path) -> None:
    algo, ours = algorithm(), tasks(2)
    states = halfway(tmp_path, 2, algo, narrow(wire="float32"))
    for state in run_threads(2, lambda comm: resumed(comm, tmp_path, algo, ours[comm.rank])):
        assert torch.equal(state.model_N, states[0].model_N)
        assert not any(vector.any() for vector in state.unsent.values())


# ----------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("how", "wire", "message"),
    [
        ("exact", "bf16", "--wire bf16 rounds what travels, but --sum is exact, .*; add --sum float32"),
        ("float32", "bf61", "unknown --wire 'bf61'; did you mean 'bf16'"),
    ],
)
def test_what_cannot_travel_is_refused_before_anything_starts(how: str, wire: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        prepare(Config(data="glyphs", sum=how, wire=wire))
    with pytest.raises(UserError, match=message):
        Accumulator(SoloComm(), 4, 2, how, wire=wire)
