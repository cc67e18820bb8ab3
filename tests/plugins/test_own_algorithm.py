"""docs/own-algorithm.md is true: its blocks are a module that runs, the same on any number of ranks, and a test that
passes."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import REPO
from safetensors.torch import load_file
from shell import ALONE, CPU, metrics, sandbox

from fedmpi.comm import SoloComm
from fedmpi.comm.threads import run_threads
from fedmpi.errors import UserError
from fedmpi.rounds import Report
from fedmpi.runs.build import RunSpec, prepare
from fedmpi.runs.options import parse
from fedmpi.runs.run import run

PAGE = (REPO / "docs" / "own-algorithm.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
TEST = "# test_my_rules.py\n"
TINY = "--data tiny --split iid --model logistic --clients 8 --cohort 5 --local.batch 10 --rounds 4 --log none".split()
NAMES = ("above_median", "agreement", "carry", "damped", "fedlion", "lion", "nesterov", "signal")
CHOICES = {
    "local": "--local.rule my_rules:nesterov",
    "mask": "--mask my_rules:agreement",
    "second moment": "--mask my_rules:signal",
    "layers": "--mask my_rules:above_median",
    "server": "--server.rule my_rules:lion --server.lr 0.001",
    "memory": "--local.rule my_rules:carry",
    "own option": "--local.rule my_rules:damped --local.damping 0.75",
    "row": "--algorithm my_rules:fedlion --tau 0.3",
    "built-in with a mask": "--algorithm scaffold --mask my_rules:agreement",
    "all at once": "--algorithm my_rules:fedlion --local.rule my_rules:carry --mask my_rules:signal",
    "with a schedule": "--local.rule my_rules:nesterov --local.schedule cosine --server.schedule warmup:2",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    """The page's files in the current folder, the tiny data in the table."""
    (tmp_path / "my_rules.py").write_text("\n\n".join(b for b in BLOCKS if not b.startswith(TEST)))
    (tmp_path / "test_my_rules.py").write_text("\n\n".join(b for b in BLOCKS if b.startswith(TEST)))
    with sandbox() as patch:
        patch.chdir(tmp_path)
        patch.setattr(sys, "dont_write_bytecode", True)
        yield tmp_path


def prepared(choice: str, out: str) -> RunSpec:
    return prepare(parse([*TINY, *choice.split(), "--out", out]))


def on_ranks(size: int, choice: str, out: str) -> Report:
    """The last report of a run on thread ranks."""
    ready = prepared(choice, out)
    return run_threads(size, lambda comm: run(ready, comm, ALONE, CPU, {}))[0].last


def numbers(out: Path) -> list[dict[str, Any]]:
    """The rounds of a run, without what depends on the clock or on the number of ranks."""
    return [{k: v for k, v in r.items() if not k.startswith(("seconds", "bytes_"))} for r in metrics(out)]


def imported(name: str) -> ModuleType:
    sys.path.append(".")
    return importlib.import_module(name)


def test_the_page_has_the_blocks_that_it_speaks_of() -> None:
    assert sum(block.startswith(TEST) for block in BLOCKS) == 1 and BLOCKS[-1].startswith(TEST)
    for name in NAMES:
        assert hasattr(imported("my_rules"), name)


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_a_users_rules_give_the_same_bits_alone_and_on_any_number_of_ranks(choice: str, folder: Path) -> None:
    report = run(prepared(choice, "alone"), SoloComm(), ALONE, CPU, {}).last
    assert report.clients == 5 and not report.dropped
    model = (folder / "alone" / "model.safetensors").read_bytes()
    shown = numbers(folder / "alone")
    for size in (1, 2, 3):
        on_ranks(size, choice, f"ranks-{size}")
        assert (folder / f"ranks-{size}" / "model.safetensors").read_bytes() == model, size
        assert numbers(folder / f"ranks-{size}") == shown


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_a_users_rules_learn_and_differ_from_fedavg(choice: str, folder: Path) -> None:
    run(prepared(choice, "mine"), SoloComm(), ALONE, CPU, {})
    run(prepared("", "fedavg"), SoloComm(), ALONE, CPU, {})
    mine, plain = (load_file(folder / name / "model.safetensors") for name in ("mine", "fedavg"))
    assert any(not torch.equal(mine[name], plain[name]) for name in plain)
    rounds = metrics(folder / "mine")
    assert rounds[-1]["train_loss"] < rounds[0]["train_loss"]


def test_every_option_of_the_page_is_accepted() -> None:
    table = PAGE.partition("## Run it")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`--.*?) \|", table, re.MULTILINE)
    options = [words for cell in cells for words in re.findall("`(.*?)`", cell)]
    assert len(options) >= 7
    for words in options:
        prepared(words, "out")


def test_the_memory_of_the_page_is_kept_and_its_channel_moves(folder: Path) -> None:
    """Two rounds with a momentum that is kept differ from two rounds of which each begins with none."""
    run(prepared("--local.rule my_rules:carry --rounds 1", "one"), SoloComm(), ALONE, CPU, {})
    run(prepared("--rounds 1", "one-plain"), SoloComm(), ALONE, CPU, {})
    run(prepared("--local.rule my_rules:carry --rounds 2", "two"), SoloComm(), ALONE, CPU, {})
    run(prepared("--rounds 2", "two-plain"), SoloComm(), ALONE, CPU, {})
    models = {n: (folder / n / "model.safetensors").read_bytes() for n in ("one", "one-plain", "two", "two-plain")}
    assert models["one"] == models["one-plain"] and models["two"] != models["two-plain"]


def test_the_pages_own_test_passes() -> None:
    module = imported("test_my_rules")
    tests = [function for name, function in vars(module).items() if name.startswith("test_")]
    assert len(tests) >= 5
    for function in tests:
        function()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            "--local.rule my_rule:nesterov",
            "local rule 'my_rule:nesterov': there is no module 'my_rule'; start in the folder",
        ),
        (
            "--server.rule my_rules:loin",
            "server rule 'my_rules:loin': module 'my_rules' has no 'loin'; did you mean 'lion'?",
        ),
        ("--mask broken:agreement", "mask 'broken:agreement': importing its module raised SyntaxError: "),
        (
            "--mask wrong:keep",
            "mask 'wrong:keep' raised TypeError: keep() missing 1 required positional argument: 'clients' when it was ",
        ),
        ("--local.rule my_rules:fedlion", "local rule 'my_rules:fedlion' is Row; it must be a function of the knobs"),
        ("--algorithm my_rules:lion", "algorithm 'my_rules:lion' is function; it must be a fedmpi.algorithms.Row"),
        ("--server.rule wrong:step", "server rule 'wrong:step' returned function; it must return a ServerRule"),
    ],
)
def test_the_errors_are_those_of_the_page(options: str, said: str, folder: Path) -> None:
    (folder / "broken.py").write_text("def agreement(:\n")
    (folder / "wrong.py").write_text("def keep(votes, clients):\n    return 1\n\ndef step(knobs):\n    return keep\n")
    with pytest.raises(UserError) as caught:
        prepared(options, "out")
    assert str(caught.value).startswith(said)
    words = re.sub(r"'(broken|wrong):", "'my_rules:", said).removesuffix(" ")
    assert words in PAGE
