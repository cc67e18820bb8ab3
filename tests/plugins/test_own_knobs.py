"""Knobs that a plug-in declares are options on the command line, in YAML and in Python: checked, written down and
compared."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from shell import sandbox

import fedmpi
from fedmpi.algorithms import ALGORITHMS, KEYWORDS, Row
from fedmpi.commands import main
from fedmpi.errors import UserError
from fedmpi.experiments.sweep.grid import points
from fedmpi.experiments.sweep.sweepfile import changed, read_sweep
from fedmpi.knobs import MaskKnobs, ServerKnobs
from fedmpi.local import LocalKnobs, make_local
from fedmpi.plugins.knobs import knob, options
from fedmpi.runs.build import prepare, resolve
from fedmpi.runs.config import Config, Local, Server
from fedmpi.runs.extend import config_for
from fedmpi.runs.help import train_help
from fedmpi.runs.options import from_values, parse

TINY = "--data tiny --split iid --model logistic --clients 8 --cohort 4 --rounds 2 --threads 1 --log_to none".split()
RULE = ["--local.rule", "own:damped"]

OWN = '''
from __future__ import annotations

from dataclasses import dataclass

import torch
from fedmpi.algorithms import Row
from fedmpi.local import Descent, LocalKnobs, LocalResult, LocalRule
from fedmpi.masks import Mask, MaskKnobs
from fedmpi.knobs import knob
from fedmpi.server import ServerKnobs, ServerRule


@dataclass(frozen=True)
class Damped(LocalKnobs):
    damping: float = knob(0.5, low=0, high=1)
    """share of the way that a client goes"""
    times: int = knob(1, low=1)
    """how often it is damped"""
    loud: bool = False
    """whether it matters"""
    lr: float = 0.125


def damped(knobs: Damped) -> LocalRule:
    descent = Descent.of(knobs)

    def run(job):
        descent.run(job)
        delta_P = torch.sub(job.x_P, job.start_P, out=job.delta_P)
        return LocalResult(delta_P.mul_(knobs.damping**knobs.times))

    return LocalRule(run)


@dataclass(frozen=True)
class Floor(MaskKnobs):
    least: float = knob(0.25, low=0, high=1)
    """what is kept at least"""


def floor(knobs: Floor) -> Mask:
    return Mask(lambda votes_S, clients: (votes_S.abs().float() / clients).clamp_min(knobs.least))


@dataclass(frozen=True)
class Slow(ServerKnobs):
    factor: float = knob(0.5, low=0, open_low=True)
    """of the step"""


def slow(knobs: Slow) -> ServerRule:
    def step(w, d, m, moments, t):
        w.add_(d.mul_(m).mul_(knobs.rate(t) * knobs.factor))

    return ServerRule({}, step)


@dataclass(frozen=True)
class Alone:
    damping: float = 0.5


def alone(knobs: Alone) -> LocalRule:
    return damped(knobs)


@dataclass(frozen=True)
class Clash(LocalKnobs):
    epochs: int = 3


def clash(knobs: Clash) -> LocalRule:
    return damped(knobs)


row = Row("own:damped", "own:slow", {"mask": "own:floor", "local.lr": 0.25})
'''


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with a module `own` to work in."""
    (tmp_path / "own.py").write_text(OWN)
    with sandbox() as patch:
        patch.chdir(tmp_path)
        patch.setattr(sys, "dont_write_bytecode", True)
        yield tmp_path


def written(out: str) -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load(Path(out, "config.yaml").read_text())
    return tree


def model(out: str) -> bytes:
    return Path(out, "model.safetensors").read_bytes()


# Set, used and written down


def test_a_rules_own_knob_is_set_on_the_command_line_in_yaml_and_in_python() -> None:
    assert main(["train", *TINY, *RULE, "--local.damping", "0.25", "--local.loud", "--out", "typed"]) == 0
    local = written("typed")["local"]
    assert (local["damping"], local["times"], local["loud"]) == (0.25, 1, True)
    assert list(local)[-3:] == ["damping", "times", "loud"], "after the built-in ones"
    Path("own.yaml").write_text("local: {rule: own:damped, damping: 0.25, loud: true}\n")
    assert main(["train", *TINY, "--config", "own.yaml", "--out", "yaml"]) == 0
    assert main(["train", "--config", "typed/config.yaml", "--out", "again"]) == 0, "a run is repeated by its file"
    values: Any = {"split": "iid", "clients": 8, "cohort": 4, "rounds": 2, "threads": 1}
    values["local"] = {"rule": "own:damped", "damping": 0.25, "loud": True}
    fedmpi.train("logistic", "tiny", out="python", **values)
    assert model("typed") == model("yaml") == model("again") == model("python")
    assert main(["train", *TINY, *RULE, "--out", "usual"]) == 0
    assert written("usual")["local"]["damping"] == 0.5 and model("usual") != model("typed")


def test_options_of_masks_and_server_rules() -> None:
    words = "--mask own:floor --mask_options.least 0.5 --server.rule own:slow --server.factor=0.75".split()
    assert main(["train", *TINY, *words, "--out", "run"]) == 0
    tree = written("run")
    assert tree["mask_options"] == {"least": 0.5} and tree["server"]["factor"] == 0.75
    cfg = parse(["--config", "run/config.yaml"])
    assert dataclasses.asdict(prepare(cfg).cfg) == tree, "resolved once and for all"
    values = {"mask": "own:floor", "mask_options": {"least": 0.5}, "server": {"rule": "own:slow", "factor": 0.75}}
    assert from_values({"data": "tiny", **values}).server == replace_rule(cfg.server)
    votes = torch.tensor([0, 4], dtype=torch.int8)
    assert prepare(cfg).algorithm.mask(votes, 4).tolist() == [0.5, 1.0]


def replace_rule(server: Server) -> Server:
    """The group as it was given, with nothing filled in."""
    return dataclasses.replace(server, lr=None, momentum=None, b2=None, eps=None)


def test_a_row_names_plug_ins_and_a_plug_in_may_change_a_default() -> None:
    cfg = prepare(parse([*TINY, "--algorithm", "own:row", "--local.damping", "1", "--mask_options.least", "0"])).cfg
    assert (cfg.local.lr, cfg.mask, dataclasses.asdict(cfg)["local"]["damping"]) == (0.25, "own:floor", 1.0)
    assert prepare(parse([*TINY, *RULE])).cfg.local.lr == 0.125, "the plug-in's own, where no row says otherwise"
    assert prepare(parse([*TINY, *RULE, "--local.lr", "0.5"])).cfg.local.lr == 0.5


def test_a_resume_compares_own_knobs(capsys: pytest.CaptureFixture[str]) -> None:
    run = ["train", *TINY, *RULE, "--local.damping", "0.25", "--out", "run", "--checkpoint.every", "1"]
    assert main(run) == 0
    changed = [word.replace("0.25", "0.75") for word in run]
    capsys.readouterr()
    Path("run", "finished.json").unlink()
    assert main(changed) == 2
    assert "--local.damping is 0.75 and was 0.25" in capsys.readouterr().err
    assert main([*run, "--rounds", "3", "--resume", "force"]) == 0


# Refused, with exit code 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--local.rule own:damped --local.damping much", "--local.damping is 'much'; it must be a number"),
        ("--local.rule own:damped --local.times 1.5", "--local.times is '1.5'; it must be a whole number"),
        ("--local.rule own:damped --local.damping 1.5", "--local.damping is 1.5; it must be in [0, 1]"),
        ("--local.rule own:damped --local.damping null", "--local.damping is 'None'; it must be a number"),
        (
            "--local.rule own:damped --local.dampin 0.5",
            "unknown option '--local.dampin'; did you mean '--local.damping'?",
        ),
        ("--local.damping 0.5", "unknown option '--local.damping'; "),
        ("--local.rule sgd --local.damping 0.5", "unknown option '--local.damping'; "),
        ("--mask own:floor --mask_options.least 2", "--mask_options.least is 2.0; it must be in [0, 1]"),
        ("--mask own:floor --mask_options.most 1", "unknown option '--mask_options.most'; "),
        ("--server.rule own:slow --server.factor 0", "--server.factor is 0.0; it must be above 0"),
        ("--local.rule nowhere:damped --local.damping 1", "local rule 'nowhere:damped': there is no module 'nowhere'"),
        ("--local.rule own:alone", "local rule 'own:alone' takes a Alone, which does not extend LocalKnobs"),
        ("--local.rule own:clash", "knob 'epochs' of Clash is an option of every run; give it another name"),
    ],
)
def test_a_wrong_own_option_is_refused(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *TINY, *words.split(), "--out", "run"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"fedmpi: {message}") and said.count("\n") == 1, said
    assert not Path("run").exists()


def test_a_wrong_own_option_in_yaml_and_in_python_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("own.yaml").write_text("local: {rule: own:damped, dampin: 0.25}\n")
    assert main(["train", "--config", "own.yaml"]) == 2
    said = capsys.readouterr().err
    assert "unknown option 'local.dampin' in --config own.yaml; did you mean 'local.damping'?" in said
    with pytest.raises(UserError, match="--local.damping is 'much'; it must be a number"):
        from_values({"local": {"rule": "own:damped", "damping": "much"}})


def test_a_rule_made_by_hand_has_the_defaults_of_its_own_knobs() -> None:
    assert make_local("own:damped", LocalKnobs(lr=0.1)).sends == ()


# Declared once


def test_help_shows_the_texts_of_declared_knobs_and_of_a_plug_ins(capsys: pytest.CaptureFixture[str]) -> None:
    own, of_rule = "share of the way that a client goes", "pull towards the global model"
    for option, shows in (("--help", {own: True, of_rule: False}), ("--help-all", {own: True, of_rule: True})):
        with pytest.raises(SystemExit, match="0"):
            main(["train", *RULE, option])
        said = " ".join(capsys.readouterr().out.split())
        assert {text: text in said for text in shows} == shows and "Agreement threshold of the" in said


def test_a_knob_declared_in_one_place_is_an_option_with_default_bounds_and_text() -> None:
    @dataclasses.dataclass(frozen=True)
    class More(LocalKnobs):
        """With one more."""

        zeal: float = knob(0.75, low=0, high=2)
        """how eager a client is"""

    group = options("Local", More, Local)
    assert list(dataclasses.asdict(group()))[-1] == "zeal" and group().zeal == 0.75
    known = {f.name for part in (LocalKnobs, ServerKnobs, MaskKnobs) for f in dataclasses.fields(part)}
    in_config = {f.name for part in (Config, Local, Server) for f in dataclasses.fields(part)}
    assert known <= in_config
    text = train_help(config_for({"local.rule": "own:damped"}), everything=True)
    for name in known | {"damping"}:
        assert re.search(rf"--\S*\b{name} \S+\n? +\S", text), f"{name} has a text"


def test_an_old_row_and_a_new_one_are_the_same() -> None:
    assert Row("sgd", "adam", local_lr=0.1, share=True) == Row("sgd", "adam", {"local.lr": 0.1, "meta.share": True})
    every = Row("sgd", "sgd", {option: None for option in KEYWORDS.values()})
    assert dataclasses.replace(every, tau=0.1).defaults["tau"] == 0.1
    with pytest.raises(UserError, match="unknown keyword of a Row 'locallr'; did you mean 'local_lr'?"):
        Row("sgd", "sgd", locallr=0.1)
    with pytest.raises(UserError, match="unknown default in the row of algorithm 'own' 'local.mu'"):
        resolve(Config(algorithm="own"), Row("prox", "sgd", {"local.mu": 0.1}))
    assert all(set(row.defaults) <= set(KEYWORDS.values()) for row in ALGORITHMS.values())


# In a sweep


def test_a_sweep_sets_the_knobs_of_the_plug_ins_that_it_names(tmp_path: Path) -> None:
    file = tmp_path / "damped.yaml"
    file.write_text("base: {local.rule: 'own:damped'}\ngrid: {local.damping: [0.2, 0.7]}\nseeds: 1\n")
    sweep = changed(read_sweep(str(file)), ["local.times=2"])
    local = [from_values(point.knobs).local for point in points(sweep)]
    assert [(vars(one)["damping"], vars(one)["times"]) for one in local] == [(0.2, 2), (0.7, 2)]
    file.write_text("base: {local.rule: 'own:damped'}\ngrid: {local.dampin: [0.2]}\nseeds: 1\n")
    with pytest.raises(UserError, match=r"unknown option 'local.dampin' in grid; did you mean 'local.damping'\?"):
        read_sweep(str(file))
    file.write_text("grid: {local.damping: [0.2]}\nseeds: 1\n")
    with pytest.raises(UserError, match="unknown option 'local.damping'"):
        read_sweep(str(file))
