"""Rules from outside are tried before a run: what does not work is refused with one message, and a run whose rules
work has the bits that it would have had."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from shell import ALONE, CPU, sandbox
from torch import Tensor

import fedmpi
from fedmpi.algorithms import Algorithm
from fedmpi.comm.threads import run_threads
from fedmpi.commands import main
from fedmpi.errors import UserError
from fedmpi.local import LocalResult, sgd
from fedmpi.masks import Mask, make_mask, try_out
from fedmpi.runs.build import prepare
from fedmpi.runs.options import parse
from fedmpi.runs.run import run
from fedmpi.server import ServerKnobs, make_server

QUICK = "--data tiny --split iid --model logistic --clients 8 --cohort 4 --rounds 2 --threads 1 --log none".split()

RULES = """
import torch
from fedmpi.local import Channel, LocalResult, LocalRule, sgd


def works(knobs):
    return sgd(knobs.lr, knobs.momentum, knobs.weight_decay, knobs.clip)


def hasty(knobs):
    def run(job):
        return LocalResult(job.x_P - undefined)
    return run


def leaves(knobs):
    def run(job):
        raise SystemExit(3)
    return run


def bare(knobs):
    return lambda job: job.x_P - job.start_P


def short(knobs):
    return lambda job: LocalResult((job.x_P - job.start_P)[1:])


def lost(knobs):
    return LocalRule(lambda job: LocalResult(job.x_P - job.start_P), sends=(Channel("velocity"),))


def bent(knobs):
    def run(job):
        return LocalResult(job.x_P - job.start_P, keeps={"velocity": torch.zeros(3)})
    return LocalRule(run, keeps=("velocity",))


def careless(knobs):
    def run(job):
        job.start_P.add_(1)
        return LocalResult(job.x_P - job.start_P)
    return run


def greedy(knobs):
    \"\"\"Needs three batches.\"\"\"
    def run(job):
        batches = iter(job.batches())
        for _ in range(3):
            job.x_P.sub_(job.grad(job.x_P, next(batches)), alpha=0.1)
        return LocalResult(torch.sub(job.x_P, job.start_P, out=job.delta_P))
    return run
"""

REFUSED = {
    "hasty": r"raised NameError \(rules.py, line \d+\): name 'undefined' is not defined when it was tried on a "
    "client's first batches",
    "leaves": r"raised SystemExit \(rules.py, line \d+\): 3 when it was tried on a client's first batches",
    "bare": "returned Tensor for a client; it must return a LocalResult",
    "short": "raised ValueError: its delta is torch.float32 of shape .* when it was tried on a client's first batches",
    "lost": r"does not deliver what it declares: it sends \[\], but its rule declares \['velocity'\]",
    "bent": r"does not deliver what it declares: it keeps a 'velocity' of shape \(3,\), not \(\d+,\)",
    "careless": "wrote to job.start_P, job.shared or job.memory, which all clients share; .*",
}


@pytest.fixture(autouse=True)
def rules(tmp_path: Path) -> Iterator[None]:
    (tmp_path / "rules.py").write_text(RULES)
    with sandbox() as patch:
        patch.chdir(tmp_path)
        patch.setattr(sys, "dont_write_bytecode", True)
        yield


@pytest.mark.parametrize("together", ["1", "2"])
@pytest.mark.parametrize(("name", "words"), REFUSED.items(), ids=REFUSED)
def test_a_client_rule_that_does_not_work_is_refused_before_a_run(
    name: str, words: str, together: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*QUICK, "--local.rule", f"rules:{name}", "--step.together", together, "--out", "run"]
    assert main(["train", *options]) == 2
    said = capsys.readouterr()
    assert re.fullmatch(f"fedmpi: local rule 'rules:{name}' {words}: see docs/own-algorithm.md\n", said.err), said.err
    assert said.out == "" and not Path("run").exists()


def test_every_rank_refuses_a_client_rule_with_the_same_message() -> None:
    ready = prepare(parse([*QUICK, "--local.rule", "rules:bare", "--out", "run"]))

    def work(comm: fedmpi.comm.Comm) -> str:
        with pytest.raises(UserError) as caught:
            run(ready, comm, ALONE, CPU, {})
        return str(caught.value)

    assert len(set(run_threads(2, work))) == 1


def test_the_trial_leaves_no_trace_in_the_bits(capsys: pytest.CaptureFixture[str]) -> None:
    for rule in ("sgd", "rules:works"):
        assert main(["train", *QUICK, "--local.rule", rule, "--out", rule[:5]]) == 0
    assert Path("sgd/model.safetensors").read_bytes() == Path("rules/model.safetensors").read_bytes()


def test_a_rule_that_needs_more_batches_than_the_trial_has_is_accepted() -> None:
    assert main(["train", *QUICK, "--local.rule", "rules:greedy", "--local.steps", "3", "--out", "run"]) == 0
    assert main(["train", *QUICK, "--local.rule", "rules:greedy", "--local.steps", "2", "--out", "two"]) == 2


# Masks


def median(votes_S: Tensor, clients: int) -> Tensor:
    return (votes_S.abs() > votes_S.abs().median()).float()


def signed_median(votes_S: Tensor, clients: int) -> Tensor:
    return (votes_S.abs() >= votes_S.median()).float()


def scaled(votes_S: Tensor, clients: int) -> Tensor:
    return votes_S.abs().float() / votes_S.abs().max().clamp_min(1)


def first_only(votes_S: Tensor, clients: int) -> Tensor:
    mask = torch.zeros(votes_S.shape)
    mask[0] = 1
    return mask


def counted() -> Mask:
    calls: list[int] = []

    def keep(votes_S: Tensor, clients: int) -> Tensor:
        calls.append(1)
        return torch.full(votes_S.shape, 1.0 / len(calls))

    return Mask(keep)


@pytest.mark.parametrize("mask", [Mask(median), Mask(signed_median), Mask(scaled), Mask(first_only), counted()])
def test_a_mask_that_is_not_elementwise_is_refused(mask: Mask) -> None:
    with pytest.raises(UserError, match="^mask 'm' is not elementwise: cut elsewhere, the same votes give"):
        try_out("m", mask)


@pytest.mark.parametrize("name", ["mean", "gma", "and", "sand"])
def test_the_built_in_masks_pass_the_trial(name: str) -> None:
    try_out(name, make_mask(name, 0.4))


def test_a_mask_by_layers_must_be_elementwise_within_its_layer() -> None:
    try_out("m", Mask(lambda votes_S, clients, layer: (votes_S.abs() > layer.quantile(0.5)).float(), layers=True))
    with pytest.raises(UserError, match="is not elementwise"):
        try_out("m", Mask(lambda votes_S, clients, layer: median(votes_S, clients), layers=True))
    with pytest.raises(UserError, match="raised TypeError"):
        try_out("m", Mask(lambda votes_S, clients: votes_S.float(), layers=True))


def test_rules_that_are_handed_over_as_objects_are_tried_too() -> None:
    data = [(torch.randn(8, 4), torch.randint(0, 2, (8,))) for _ in range(2)]

    def refused(algorithm: Algorithm) -> str:
        with pytest.raises(UserError) as caught:
            fedmpi.train("logistic", data, data[0], algorithm=algorithm, rounds=1, threads=1, quiet=True)
        return str(caught.value)

    good = Algorithm(sgd(0.1), make_mask("gma", 0.4), make_server("sgd", ServerKnobs()))
    assert refused(Algorithm(good.local, Mask(median), good.server)).startswith("mask 'of your own' is not elementwise")
    bare = fedmpi.local.LocalRule(lambda job: job.x_P)
    assert "local rule 'of your own' returned Tensor for a client; it must return a LocalResult" in refused(
        Algorithm(bare, good.mask, good.server)
    )
    rule = fedmpi.local.LocalRule(lambda job: LocalResult(job.x_P - job.start_P))
    fedmpi.train("logistic", data, data[0], algorithm=Algorithm(rule, good.mask, good.server), rounds=1, threads=1)
