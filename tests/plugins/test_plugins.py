"""A user's own rules, masks and algorithms by their import path: every mistake as a one-line error, and whole runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from shell import metrics, sandbox

from fedmpi.algorithms import find_row
from fedmpi.commands import main
from fedmpi.errors import UserError
from fedmpi.local import LocalKnobs, LocalRule, make_local
from fedmpi.masks import Mask, make_mask
from fedmpi.plugins import call_with, find, import_path
from fedmpi.runs.build import prepare
from fedmpi.runs.options import parse
from fedmpi.server import ServerKnobs, make_server

QUICK = "--data tiny --split iid --model logistic --clients 8 --cohort 4 --rounds 2 --threads 1 --log_to none".split()

MINE = """
import torch
from fedmpi.algorithms import Row
from fedmpi.local import LocalResult, LocalRule
from fedmpi.masks import Mask
from fedmpi.server import ServerRule

seen = []
number = 3


def slow(knobs):
    def rule(job):
        for batch in job.batches():
            job.x_P.sub_(job.grad(job.x_P, batch), alpha=knobs.rate(job.round) / 2)
        return LocalResult(torch.sub(job.x_P, job.start_P, out=job.delta_P))

    return rule


def slow_record(knobs):
    return LocalRule(slow(knobs))


def half(knobs):
    seen.append(knobs)
    return lambda votes_S, clients: torch.full(votes_S.shape, 0.5)


def steady(knobs):
    def mask(votes_S, clients, mean_S, square_S):
        return (mean_S.square() / square_S.clamp_min(1e-30)).clamp(0, 1)

    return Mask(mask, second_moment=True)


def backwards(knobs):
    def step(w, d, m, moments, t):
        w.sub_(d.mul_(m).mul_(knobs.rate(t)))

    return ServerRule({}, step)


fedmine = Row("mine:slow", "mine:backwards", mask="mine:half", local_lr=0.25, server_lr=0.125)


def takes_two(knobs, more):
    return lambda job: None


def raises(knobs):
    raise ZeroDivisionError("made for\\nthis test")


def returns_a_word(knobs):
    return "rule"


def returns_nothing(knobs):
    pass


def too_much(knobs):
    return lambda votes_S, clients: votes_S.abs().float()


def not_a_number(knobs):
    return lambda votes_S, clients: votes_S / 0 * 0


def whole(knobs):
    return lambda votes_S, clients: votes_S.abs() // clients


def too_short(knobs):
    return lambda votes_S, clients: torch.ones(1)


def wants_more(knobs):
    return lambda votes_S, clients, mean_S: votes_S


def limping(knobs):
    def step(w, d, m, moments, t):
        moments["nothing"].add_(d)

    return ServerRule({}, step)
"""


@pytest.fixture(autouse=True)
def patch(tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """A folder with a module `mine` to work in."""
    (tmp_path / "mine.py").write_text(MINE)
    with sandbox() as patch:
        patch.chdir(tmp_path)
        patch.setattr(sys, "dont_write_bytecode", True)
        yield patch


# Where a name is looked for


def test_a_module_in_the_current_folder_is_found_and_looked_for_last(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('this is not the json you want')")
    assert import_path("mask", "mine:number") == 3
    assert import_path("mask", "json:dumps")([1]) == "[1]"
    assert sys.path[-1] == str(tmp_path)
    import_path("mask", "mine:half")
    assert sys.path.count(str(tmp_path)) == 1


def test_a_module_in_a_package(tmp_path: Path) -> None:
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "__init__.py").touch()
    (tmp_path / "lab" / "masks.py").write_text(
        "def one(knobs):\n    return lambda votes, clients: votes.abs() / clients\n"
    )
    assert isinstance(make_mask("lab.masks:one", 0.4), Mask)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "nowhere:half",
            "mask 'nowhere:half': there is no module 'nowhere'; start in the folder that holds it, install it, "
            "or add its folder to PYTHONPATH",
        ),
        (
            "nowhere.deep.er:half",
            "mask 'nowhere.deep.er:half': there is no module 'nowhere'; start in the folder that holds it, install it, "
            "or add its folder to PYTHONPATH",
        ),
        (
            "mine.deeper:half",
            "mask 'mine.deeper:half': there is no module 'mine.deeper'; start in the folder that holds it, install it, "
            "or add its folder to PYTHONPATH",
        ),
        ("broken:half", "mask 'broken:half': importing its module raised ValueError (broken.py, line 1): two ..."),
        ("typo:half", "mask 'typo:half': importing its module raised SyntaxError: ..."),
        ("leaves:half", "mask 'leaves:half': importing its module raised SystemExit (leaves.py, line 1): 3"),
        ("hungry:half", "mask 'hungry:half': its module needs 'not_installed_anywhere', which is not installed"),
        ("mine:halv", "mask 'mine:halv': module 'mine' has no 'halv'; did you mean 'half'?"),
        ("mine:quantum", "mask 'mine:quantum': module 'mine' has no 'quantum'"),
        (":half", "mask ':half' is no import path; write package.module:name, with dots and without .py"),
        ("mine.py:half", "mask 'mine.py:half' is no import path; write package.module:name, with dots and without .py"),
        ("mine:", "mask 'mine:' is no import path; write package.module:name, with dots and without .py"),
        ("mine:number", "mask 'mine:number' is int; it must be a function of the knobs"),
        (
            "mine:takes_two",
            "mask 'mine:takes_two' raised TypeError: takes_two() missing 1 required positional argument: 'more' "
            "when it was given its knobs; it must take one argument, a MaskKnobs, and return what "
            "docs/own-algorithm.md describes",
        ),
        (
            "mine:raises",
            "mask 'mine:raises' raised ZeroDivisionError (mine.py, line ...",
        ),
        (
            "mine:returns_a_word",
            "mask 'mine:returns_a_word' returned str; it must return a Mask, or a function of votes and clients: "
            "see docs/own-algorithm.md",
        ),
        (
            "mine:returns_nothing",
            "mask 'mine:returns_nothing' returned NoneType; it must return a Mask, or a function of votes and clients: "
            "see docs/own-algorithm.md",
        ),
        ("mine:slow_record", "mask 'mine:slow_record' raised TypeError: ..."),
        ("mine:wants_more", "mask 'mine:wants_more' raised TypeError: ..."),
        (
            "mine:whole",
            "mask 'mine:whole' returned torch.int8 of shape (41,); it must be torch.float32 of the shape of the votes",
        ),
        (
            "mine:too_short",
            "mask 'mine:too_short' returned torch.float32 of shape (1,); it must be torch.float32 of the shape of ...",
        ),
        (
            "mine:too_much",
            "mask 'mine:too_much' returned 4 for -4 votes of 4 clients; it must keep to 0 ... 1",
        ),
        ("mine:not_a_number", "mask 'mine:not_a_number' returned nan for -4 votes of 4 clients; it must keep ..."),
        (
            "gmaa",
            "unknown mask 'gmaa'; did you mean 'gma'? known: and, gma, mean, sand, or your own as ...",
        ),
    ],
)
def test_every_mistake_is_a_one_line_error_with_exit_code_2(
    tmp_path: Path, path: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.py").write_text("raise ValueError('two lines\\n in one')")
    (tmp_path / "typo.py").write_text("def half(:\n")
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)")
    (tmp_path / "hungry.py").write_text("import not_installed_anywhere\n")
    assert main(["train", *QUICK, "--out", "run", "--mask", path]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.endswith("\n") and said.err.count("\n") == 1
    shown = said.err.removeprefix("fedmpi: ").rstrip("\n")
    assert shown == message or (message.endswith("...") and shown.startswith(message[:-3])), shown
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("option", "kind", "knobs"),
    [("--local.rule", "local rule", "LocalKnobs"), ("--server.rule", "server rule", "ServerKnobs")],
)
def test_errors_name_the_rule_they_belong_to(
    option: str, kind: str, knobs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, words in (
        ("mine:slov", f"{kind} 'mine:slov': module 'mine' has no 'slov'; did you mean 'slow'?"),
        ("mine:takes_two", f"it must take one argument, a {knobs}, and return"),
        ("mine:returns_a_word", f"{kind} 'mine:returns_a_word' returned str; it must return"),
    ):
        assert main(["train", *QUICK, option, path]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "path"),
    [
        ("--local.rule", "mine:backwards"),  # a server's rule
        ("--mask", "mine:backwards"),
        ("--server.rule", "mine:slow"),
        ("--server.rule", "mine:steady"),
    ],
)
def test_a_rule_of_another_kind_is_refused_before_anything_is_written(
    option: str, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *QUICK, "--out", "run", option, path]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"'{path}' returned " in said
    assert not Path("run").exists()


def test_a_server_rule_that_cannot_step_is_refused_before_anything_is_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", *QUICK, "--out", "run", "--server.rule", "mine:limping"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("fedmpi: server rule 'mine:limping' raised KeyError (mine.py, line ")
    assert said.endswith("): 'nothing' in a step on six elements\n") and said.count("\n") == 1
    assert not Path("run").exists()


def test_an_algorithm_is_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert find_row("mine:fedmine").defaults["local.lr"] == 0.25
    for path, words in (
        ("mine:number", "algorithm 'mine:number' is int; it must be a fedmpi.algorithms.Row"),
        ("mine:half", "algorithm 'mine:half' is function; it must be a fedmpi.algorithms.Row"),
        ("mine:fedmin", "algorithm 'mine:fedmin': module 'mine' has no 'fedmin'; did you mean 'fedmine'?"),
        ("fedavgg", "unknown algorithm 'fedavgg'; did you mean 'fedavg'? known: "),
    ):
        assert main(["train", *QUICK, "--algorithm", path]) == 2
        assert words in capsys.readouterr().err


def test_a_users_own_error_comes_through_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "strict.py").write_text(
        "from fedmpi.errors import UserError\n\ndef rule(knobs):\n    raise UserError('mu must be 1 for this rule')\n"
    )
    with pytest.raises(UserError, match="^mu must be 1 for this rule$"):
        make_local("strict:rule", LocalKnobs())


def test_a_row_of_the_table_goes_before_everything() -> None:
    assert find("thing", "a", {"a": lambda k: lambda: k}, 5)() == 5


# What comes of it


def test_bare_functions_and_records_will_do() -> None:
    assert isinstance(make_local("mine:slow", LocalKnobs()), LocalRule)
    assert make_local("mine:slow_record", LocalKnobs()).sends == ()
    half = make_mask("mine:half", 0.25, 2.0)
    assert not half.second_moment and half(torch.tensor([1, 2]), 4).tolist() == [0.5, 0.5]
    knobs = sys.modules["mine"].seen[-1]
    assert (knobs.tau, knobs.sharpness) == (0.25, 2.0)
    steady = make_mask("mine:steady", 0.4)
    assert steady.second_moment
    assert steady(torch.tensor([1]), 2, torch.tensor([1.0]), torch.tensor([4.0])).tolist() == [0.25]
    w = torch.ones(1)
    make_server("mine:backwards", ServerKnobs(lr=2.0)).step(w, torch.tensor([0.5]), torch.tensor([0.5]), {}, 1)
    assert w.item() == 0.5  # 1 - 2 * 0.5 * 0.5


@pytest.mark.parametrize(
    ("words", "header"),
    [
        ("--local.rule mine:slow", "client mine:slow lr 0.01, server sgd lr 1\n"),
        ("--mask mine:half", "fedavg with mask mine:half (tau 0.4): client sgd"),
        ("--mask mine:steady", "fedavg with mask mine:steady (tau 0.4): client sgd"),
        ("--server.rule mine:backwards", "server mine:backwards lr 1"),
        ("--algorithm mine:fedmine", "mine:fedmine with mask mine:half (tau 0.4): client mine:slow lr 0.25"),
    ],
)
def test_it_runs_from_the_command_line(words: str, header: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *QUICK, *words.split(), "--out", "run"]) == 0
    said = capsys.readouterr()
    assert said.err == "" and header in said.out
    rounds = metrics(Path("run"))
    assert len(rounds) == 2 and all(r["dropped"] == 0 for r in rounds)
    again = parse(["--config", "run/config.yaml", "--out", "again"])
    assert prepare(again).cfg == again


def test_each_of_a_users_choices_changes_the_model() -> None:
    models = set()
    for number, words in enumerate(
        ("", "--local.rule mine:slow", "--mask mine:half", "--mask mine:steady", "--server.rule mine:backwards")
    ):
        assert main(["train", *QUICK, *words.split(), "--out", str(number)]) == 0
        models.add(Path(str(number), "model.safetensors").read_bytes())
    assert len(models) == 5


def test_the_default_folder_of_an_import_path_is_a_plain_name() -> None:
    assert prepare(parse([*QUICK, "--algorithm", "mine:fedmine"])).out == Path("runs/mine-fedmine-mine-half-tiny-0")
    assert prepare(parse([*QUICK, "--mask", "mine:steady"])).out == Path("runs/fedavg-mine-steady-tiny-0")


SERVERS = """
import torch
from fedmpi.algorithms import Row
from fedmpi.server import ServerRule

def returns(knobs):
    return ServerRule({}, lambda w, d, m, moments, t: w + d)

def rebinds(knobs):
    def step(w, d, m, moments, t):
        moments["z"] = moments["z"] + d
        w.add_(moments["z"])
    return ServerRule({"z": 0.0}, step)

def scaled(knobs):
    def step(w, d, m, moments, t):
        w.add_(d / d.norm())
    return ServerRule({}, step)

def not_finite(knobs):
    def step(w, d, m, moments, t):
        w.add_(d / 0.0)
    return ServerRule({}, step)

uphill = Row("sgd", "sgd", local_lr=-1.0)
words = Row("sgd", "sgd", local_lr="0.1")
nothing = Row("sgd", None)
"""


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--server.rule servers:returns", "a step changes w and its moments in place (add_, copy_), returns nothing"),
        ("--server.rule servers:rebinds", "a step changes w and its moments in place (add_, copy_), returns nothing"),
        ("--server.rule servers:scaled", "server rule 'servers:scaled' is not elementwise: each rank has a slice"),
        ("--server.rule servers:not_finite", "server rule 'servers:not_finite' makes NaN or infinity of the delta"),
        ("--algorithm servers:uphill", "algorithm 'servers:uphill': --local.lr is -1.0; it must be above 0"),
        ("--algorithm servers:words", "algorithm 'servers:words' has local.lr = '0.1'; it must be like 0.01"),
        ("--algorithm servers:nothing", "algorithm 'servers:nothing' has server = None; it must be a name"),
    ],
)
def test_a_rule_or_row_that_would_train_wrongly_is_refused(
    option: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "servers.py").write_text(SERVERS)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError) as caught:
        prepare(parse(option.split()))
    assert message in str(caught.value)


# Functions that take what they name of what is offered


OFFERED = {"channels": 3, "classes": 10}


def takes_some(classes: int) -> int:
    return classes


def takes_all(channels: int, *, classes: int, spare: str = "x", **more: int) -> tuple[object, ...]:
    return channels, classes, spare, more


class Takes:
    def __init__(self, channels: int = 7, other: int = 1) -> None:
        self.got = channels, other


def test_a_function_gets_what_its_parameters_name_and_nothing_else() -> None:
    assert call_with("model", "m", takes_some, OFFERED) == 10
    assert call_with("model", "m", takes_all, OFFERED) == (3, 10, "x", {})
    assert call_with("model", "m", Takes, OFFERED).got == (3, 1), "an offer comes before a default"
    assert call_with("model", "m", Takes, {}).got == (7, 1)
    assert call_with("model", "m", lambda: 5, OFFERED) == 5
    assert call_with("model", "m", partial(takes_all, 4), {"classes": 2}) == (4, 2, "x", {})


@pytest.mark.parametrize(
    ("make", "offered", "message"),
    [
        (7, OFFERED, "model 'm' is int; it must be a function or a class"),
        (
            lambda width, depth, classes: 0,
            OFFERED,
            "model 'm' asks for width, depth; there is channels, classes to ask for by these names, and other "
            "parameters need a default",
        ),
        (takes_some, {}, "model 'm' asks for classes; there is nothing to ask for by these names"),
        (lambda: 1 / 0, OFFERED, "model 'm' raised ZeroDivisionError (test_plugins.py, line "),
        (lambda: sys.exit(4), OFFERED, "model 'm' raised SystemExit (test_plugins.py, line "),
    ],
)
def test_a_function_with_an_unknown_parameter_is_refused(make: Any, offered: dict, message: str) -> None:
    with pytest.raises(UserError) as caught:
        call_with("model", "m", make, offered)
    assert str(caught.value).startswith(message)


def test_an_error_message_of_the_function_is_passed_on() -> None:
    def refuses() -> None:
        raise UserError("my own message")

    with pytest.raises(UserError, match="^my own message$"):
        call_with("model", "m", refuses, OFFERED)
