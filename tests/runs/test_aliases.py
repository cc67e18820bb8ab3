"""Names of other tools: what they stand for on the command line and in Python, and the hints where that is unclear."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import REPO
from torch.distributed.run import get_args_parser

from fedmpi.errors import UserError
from fedmpi.experiments.runs import read_run
from fedmpi.experiments.sweep.grid import points
from fedmpi.experiments.sweep.sweepfile import changed, read_sweep
from fedmpi.plugins.knobs import knobs
from fedmpi.runs import aliases
from fedmpi.runs.aliases import (
    ALIASES,
    HINTS,
    SYNONYMS,
    UNCLEAR,
    names,
    real_keywords,
    real_name,
    real_options,
    squeezed,
)
from fedmpi.runs.build import prepare
from fedmpi.runs.checkpoint.format import Fingerprint
from fedmpi.runs.checkpoint.load import compare
from fedmpi.runs.config import Config, Launch, Local, Server, Skew
from fedmpi.runs.options import from_values, parse

GUIDE = (REPO / "docs" / "guide.md").read_text(encoding="utf-8")
OLD = REPO / "tests" / "old_runs"
KNOBS = {name: value for name, value in knobs(Config()).items() if not hasattr(value, "__dataclass_fields__")}


# The table


def test_every_name_stands_for_one_option() -> None:
    listed = [squeezed(alias) for some in ALIASES.values() for alias in some] + [squeezed(name) for name in HINTS]
    assert len(set(listed)) == len(listed) and set(ALIASES) <= set(KNOBS)
    assert all(names()[squeezed(name)] == name for name in KNOBS), "no alias hides an option"
    assert not {squeezed(name) for name in HINTS} & set(names()), "what has a hint is not accepted"
    assert all(real_name(alias) == real for real, some in ALIASES.items() for alias in some)


def test_hints_speak_of_options_that_there_are() -> None:
    texts = [*HINTS.values(), *(hint for hints in UNCLEAR.values() for hint in hints.values())]
    named = {name.rstrip(".") for text in texts for name in re.findall(r"--([a-z_.0-9]+)", text)}
    assert len(named) > 10 and named <= {*KNOBS, *knobs(Launch())}


def test_the_guide_shows_the_table() -> None:
    rows = dict(re.findall(r"^\| `--([a-z_.0-9]+)` \| (`--.*`) \|$", GUIDE, re.MULTILINE))
    shown = {name: re.findall(r"`--([a-z_0-9]+)`", cell) for name, cell in rows.items()}
    old = {new: [old] for old, new in aliases.RENAMED.items()}
    assert shown == {real: [*old.get(real, []), *some] for real, some in ALIASES.items()}
    hints = dict(re.findall(r"^\| `--(\w+)` \| ([^`|].*|`?--.*) \|$", GUIDE, re.MULTILINE))
    assert all(name in hints for name in HINTS), set(HINTS) - set(hints)


def test_torchrun_takes_no_option_for_its_own() -> None:
    """torchrun looks for the beginnings of its own options in all words, also in those for the script."""
    parser = get_args_parser()
    for name in (*KNOBS, *(alias for some in ALIASES.values() for alias in some)):
        arguments = ["--standalone", "-m", "fedmpi", "train", f"--{name}", "x"]
        assert parser.parse_args(arguments).training_script_args == ["train", f"--{name}", "x"], name


# On the command line and in Python


def test_a_command_from_memory_of_other_tools() -> None:
    words = "--alg fedyogi --lr 0.1 --local-epochs 2 --batch_size=16 --alpha 0.5 --server-lr 0.01 --num-clients 30"
    words += " --clients_per_round 5 --comm_round 7 --output_dir here --mu 0.3 --data-dir there --log none"
    words += " --eval_every 3"
    cfg = parse(words.split())
    assert cfg.local == Local(lr=0.1, epochs=2, batch=16, mu=0.3) and cfg.skew == Skew(alpha=0.5)
    assert cfg.server == Server(lr=0.01) and (cfg.clients, cfg.cohort, cfg.rounds) == (30, 5, 7)
    assert (cfg.out, cfg.data_root, cfg.log_to, cfg.eval.every) == ("here", "there", "none", 3)


def test_an_alias_is_the_option_in_both_places() -> None:
    for real, some in ALIASES.items():
        for alias in some:
            words = [f"--{alias}", "1", f"--{alias.replace('_', '-')}=2"]
            assert real_options(words) == [f"--{real}=1", f"--{real}=2"]
            group, _, own = real.rpartition(".")
            assert real_keywords({alias: 1}) == ({group: {own: 1}} if group else {real: 1})


def test_keywords_join_their_group() -> None:
    wanted = replace(Config(), local=Local(lr=0.1, epochs=2, batch=8))
    for group in ({"lr": 0.1, "epochs": 2, "batch": 8}, Local(lr=0.1, epochs=2, batch=8)):
        assert from_values({"local": group}) == wanted
    assert from_values({"lr": 0.1, "local": {"batch": 8}, "local.epochs": 2}) == wanted
    assert from_values({"epochs": 2, "local": Local(lr=0.1, batch=8)}) == wanted, "a dataclass says what differs"
    for twice in ({"lr": 0.1, "learning_rate": 1}, {"lr": 0.1, "local": Local(lr=0.2)}):
        with pytest.raises(UserError, match=r"are the same option, local\.lr; give one of them"):
            from_values(twice)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--optimizer adam", "unknown option '--optimizer'; --local.optimizer is the clients', --server.rule the"),
        ("--frac 0.1", "unknown option '--frac'; --cohort is the number of clients per round, not a fraction of them"),
        ("--local.batch_size 3", "unknown option '--local.batch_size'; did you mean '--local.batch'?"),
        ("--learning-rat 3", "unknown option '--learning-rat'; did you mean '--local.lr'?"),
        ("--non-iid", "unknown option '--non-iid'; write --split classes or"),
    ],
)
def test_what_is_not_clear_gets_a_hint(words: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(words.split())
    assert str(caught.value).startswith(said)


def test_a_switch_may_stand_alone() -> None:
    for words in (["--server.mask_moments"], ["--server-mask-moments", "true"], ["--server.mask_moments=true"]):
        assert parse([*words, "--rounds", "3"]).server.mask_moments is True
        assert parse(["--rounds", "3", *words]).server.mask_moments is True
    assert parse(["--deterministic", "false"]).deterministic is False


def test_a_file_has_the_real_names(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text("lr: 0.1\n")
    with pytest.raises(UserError, match="unknown option 'lr' in --config .*; did you mean 'local.lr'"):
        parse(["--config", str(tmp_path / "f.yaml")])


# Values


@pytest.mark.parametrize(
    ("option", "given", "real"),
    [
        ("algorithm", "FedAvg", "fedavg"),
        ("algorithm", "SCAFFOLD", "scaffold"),
        ("algorithm", "fedmeta_uga", "fedmeta-uga"),
        ("data", "MNIST", "mnist"),
        ("data", "CIFAR-10", "cifar10"),
        ("data", "fashion-mnist", "fmnist"),
        ("data", "FashionMNIST", "fmnist"),
        ("split", "Dirichlet", "dirichlet"),
        ("split", "IID", "iid"),
        ("mask", "GMA", "gma"),
        ("model", "LeNet", "lenet"),
        ("model", "resnet18_gn", "resnet18-gn"),
    ],
)
def test_names_are_found_whatever_their_case(option: str, given: str, real: str) -> None:
    cfg = prepare(parse([f"--{option}", given])).cfg
    assert getattr(cfg, option) == real and cfg == prepare(parse([f"--{option}", real])).cfg


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--split noniid", "--split 'noniid' is ambiguous; write classes (a few classes per client: --skew.classes)"),
        ("--split label", "--split 'label' is ambiguous; write classes"),
        ("--algorithm FedGMA", "--algorithm 'FedGMA' is ambiguous; gradient masked averaging is a mask"),
        ("--model resnet50", "unknown model 'resnet50'; did you mean 'torchvision:resnet50'? known: cnn"),
        ("--model EfficientNet-B0", "unknown model 'EfficientNet-B0'; did you mean 'torchvision:efficientnet_b0'?"),
        ("--model resnet18", "unknown model 'resnet18'; did you mean 'resnet18-gn' or 'resnet18-bn' or 'torchvision:"),
    ],
)
def test_a_value_that_is_not_clear_gets_a_hint(words: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        prepare(parse(words.split()))
    assert str(caught.value).startswith(said)


def test_synonyms_name_rows_that_there_are() -> None:
    for option, table in SYNONYMS.items():
        for given, real in table.items():
            assert getattr(prepare(parse([f"--{option}", given])).cfg, option) == real


# A knob that was renamed


def old_file(folder: Path, **changes: Any) -> Path:
    """The configuration of an earlier version, which had `log`."""
    tree = yaml.safe_load((OLD / "6-stopped" / "config.yaml").read_text()) | changes
    assert "log" in tree and "log_to" not in tree
    (folder / "old.yaml").write_text(yaml.safe_dump(tree))
    return folder / "old.yaml"


def test_a_configuration_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    file = old_file(tmp_path, log="wandb")
    assert parse(["--config", str(file)]).log_to == "wandb"
    assert parse(["--config", str(file), "--log", "none"]).log_to == "none"
    assert from_values({"log": "mlflow"}).log_to == "mlflow"
    config = read_run(OLD / "6-stopped").config
    assert config["log_to"] == "none" and "log" not in config, "as the report and the attack read it"
    assert from_values(config).log_to == "none"


def test_a_run_of_an_earlier_version_resumes() -> None:
    there = {"tau": 0.4, "threads": 1, "log": "wandb"}
    here = Fingerprint({"tau": 0.4, "threads": 1, "log_to": "none"}, {})
    assert compare(Path("run"), {"config": there, "prints": {}}, here, force=False) == ""


def test_a_sweep_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    text = f"base: {{config: {old_file(tmp_path)}, log: wandb}}\ngrid: {{tau: [0.1, 0.2]}}\n"
    (tmp_path / "sweep.yaml").write_text(text)
    sweep = read_sweep(str(tmp_path / "sweep.yaml"))
    assert [point.knobs["log_to"] for point in points(sweep)] == ["wandb", "wandb"] and "log" not in sweep.base
    assert [point.knobs["log_to"] for point in points(changed(sweep, ["log=none"]))] == ["none", "none"]
