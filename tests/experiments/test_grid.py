"""Sweep files: the runs that they stand for, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from fedmpi.errors import UserError
from fedmpi.experiments.sweep.grid import Point, Sweep, points
from fedmpi.experiments.sweep.sweepfile import changed, narrowed, read_sweep

SMALL: dict[str, Any] = {
    "about": "one line",
    "base": {"data": "glyphs", "rounds": 9, "local": {"momentum": 0.9, "lr": 0.5}},
    "variants": {
        "setting": {"few": {"clients": 10}, "many": {"clients": 100, "local": {"batch": 8}}},
        "algorithm": {"fedavg": {"algorithm": "fedavg"}, "fedadam": {"algorithm": "fedadam", "server.lr": 0.02}},
    },
    "grid": {"mask": ["mean", "gma"], "local.lr": [0.01, 0.1]},
    "where": [
        {"if": {"setting": "few", "algorithm": "fedavg"}, "set": {"local.batch": 7, "rounds": 3}},
        {"if": {"mask": ["gma"], "setting": "few", "algorithm": "fedavg"}, "set": {"rounds": 4}},
    ],
    "seeds": [3, 5],
}


def write(tmp_path: Path, tree: Any, name: str = "mine.yaml") -> str:
    path = tmp_path / name
    path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree, sort_keys=False))
    return str(path)


def small(tmp_path: Path, **changes: Any) -> Sweep:
    return read_sweep(write(tmp_path, SMALL | changes))


def test_every_combination_once_and_seed_by_seed(tmp_path: Path) -> None:
    found = points(small(tmp_path))
    assert len(found) == 2 * 2 * 2 * 2 * 2
    assert [p.seed for p in found] == [3] * 16 + [5] * 16
    assert found[0].labels == {"setting": "few", "algorithm": "fedavg", "mask": "mean", "local.lr": "0.01"}
    assert found[0].name == "few_fedavg_mean_lr0.01_s3"
    assert len({p.name for p in found}) == len(found)


def find(found: list[Point], name: str) -> Point:
    return next(p for p in found if p.name == name)


def test_later_knobs_win(tmp_path: Path) -> None:
    found = points(small(tmp_path))
    many = find(found, "many_fedadam_gma_lr0.1_s5")
    assert many.knobs == {
        "data": "glyphs",
        "rounds": 9,
        "local.momentum": 0.9,
        "local.lr": 0.1,
        "local.batch": 8,
        "clients": 100,
        "algorithm": "fedadam",
        "server.lr": 0.02,
        "mask": "gma",
        "seed": 5,
    }
    assert find(found, "few_fedavg_mean_lr0.1_s3").knobs["rounds"] == 3  # where wins over grid and base
    assert find(found, "few_fedavg_mean_lr0.1_s3").knobs["local.batch"] == 7
    assert find(found, "few_fedavg_gma_lr0.1_s3").knobs["rounds"] == 4  # and the later where over the earlier


def test_only_and_set(tmp_path: Path) -> None:
    sweep = small(tmp_path)
    few = narrowed(sweep, ["mask=gma", "algorithm=fedavg,fedadam", "seed=5"])
    assert len(few) == 8 and all(p.labels["mask"] == "gma" and p.seed == 5 for p in few)
    short = points(changed(sweep, ["rounds=2", "augment=none", "meta.weights=[1, 2]"]))
    assert {p.knobs["rounds"] for p in short} == {2}  # over where too
    assert short[0].knobs["augment"] == "none" and short[0].knobs["meta.weights"] == [1, 2]


def test_a_base_may_start_from_a_recipe(tmp_path: Path) -> None:
    sweep = read_sweep(write(tmp_path, {"base": {"config": "glyphs-noniid-100", "rounds": 2}, "seeds": 2}))
    values = points(sweep)[1].knobs
    assert (values["algorithm"], values["rounds"], values["seed"]) == ("fedyogi", 2, 1)
    assert [p.name for p in points(sweep)] == ["s0", "s1"]


def test_names_distinguish_numbers_of_two_knobs(tmp_path: Path) -> None:
    tree = {"grid": {"local.lr": [0.1], "server.lr": [0.1, 1], "deterministic": [True]}}
    names = [p.name for p in points(read_sweep(write(tmp_path, tree)))]
    assert names == ["local.lr0.1_server.lr0.1_deterministictrue_s0", "local.lr0.1_server.lr1_deterministictrue_s0"]


WRONG: list[tuple[Any, str]] = [
    ("- 1\n", "is no sweep"),
    ({"rounds": 3}, "is no sweep"),
    ({"grid": {"mask": ["gma"]}, "bass": {}}, "unknown part 'bass'"),
    ({"grid": {"maks": ["gma"]}}, "did you mean 'mask'"),
    ({"grid": {"local": [{"lr": 1}]}}, "unknown option 'local'"),
    ({"grid": {"mask": "gma"}}, "must be a list"),
    ({"grid": {"mask": ["gma", "gma"]}}, "has a value twice"),
    ({"grid": {"mask": []}}, "has no label"),
    ({"grid": {"seed": [1]}}, "write 'seeds'"),
    ({"seeds": 0}, "must be a number of seeds"),
    ({"seeds": [1, 1]}, "must be a number of seeds"),
    ({"seeds": 1, "base": {"out": "x"}}, "cannot be set in a sweep file"),
    ({"seeds": 1, "base": {"lokal": {}}}, "unknown option 'lokal'"),
    ({"seeds": 1, "variants": {"a": {"x": {"local": 3}}}}, "local"),
    ({"seeds": 1, "variants": {"mask": {"x": {}}}, "grid": {"mask": ["gma"]}}, "both variants and grid"),
    ({"seeds": 1, "where": [{"if": {"b": "x"}, "set": {}}]}, "unknown axis in 'where'"),
    ({"grid": {"tau": [0.1]}, "where": [{"if": {"tau": 0.2}, "set": {}}]}, "unknown label of 'tau'"),
    ({"seeds": 1, "where": [{"set": {}}]}, "each entry must be"),
    ({"seeds": 1, "choose": {"over": ["tau"]}}, "unknown axis in 'choose'"),
    ({"grid": {"tau": [0, 1]}, "choose": {"by": "test"}}, "lacks 'over'"),
    ({"grid": {"tau": [0, 1]}, "choose": {"over": ["tau"], "by": "luck"}}, "unknown rule"),
    ({"grid": {"tau": [0, 1]}, "choose": {"over": ["tau"], "last": 0}}, "whole number"),
    ({"grid": {"tau": [0, 1]}, "stop": {}}, "needs choose"),
    ({"grid": {"tau": [0, 1]}, "choose": {"over": ["tau"]}, "stop": {"quantile": 2}}, "in (0, 1)"),
    ({"seeds": 1, "reach": ["high"]}, "must be a number"),
    ({"seeds": 1, "about": "two\nlines"}, "one line"),
    ({"grid": {"mask": ["gma"]}, "published": {"columns": "mask", "rows": [{"mean": 3}]}}, "unknown axis or label"),
    ({"grid": {"mask": ["gma"]}, "published": {"columns": "tau", "rows": [{"gma": 3}]}}, "unknown axis"),
    ({"seeds": 1, "published": {"measure": "worst"}}, "unknown measure 'worst'; known: best, final"),
    ({"seeds": 1, "published": [{"measure": "best"}, 3]}, "must be a mapping of names to values"),
    ({"grid": {"mask": None}}, "has no label"),
    ({"grid": {"mask": ["gma"]}, "choose": ["mask"]}, "mine.yaml: choose is ['mask']; it must be a mapping"),
    ({"grid": {"mask": ["gma"]}, "choose": {"over": "mask"}}, "choose.over is 'mask'"),
    ({"grid": {"mask": ["gma"]}, "choose": {"over": None}}, "lacks 'over'"),
    ({"grid": {"tau": [0, 1]}, "choose": {"over": ["tau"]}, "stop": [20]}, "stop is [20]"),
    ({"grid": {"mask": ["gma"]}, "published": {"columns": ["mask"], "rows": [{"gma": 3}]}}, "unknown axis"),
    ({"grid": {"mask": ["gma"]}, "published": {"columns": "mask", "rows": [{"gma": [3]}]}}, "a number or a word"),
    ({"grid": {"mask": ["gma"]}, "where": [{"if": {}, "set": {"mask": "mean"}}]}, "labels would be wrong"),
    ("grid: {local.lr: [1e-3, 0.001]}", "has a value twice"),
    ("seeds: 1\nwhere: [{if: {}, set: {rounds: 1, rounds: 2}}]", "duplicate key"),
    ({"variants": {"a": {"x/y": {}, "x y": {}}}}, "two runs"),
    ({"variants": {"a": {"x" * 300: {}}}}, "shorten labels"),
    ("grid: {mask: [gma], mask: [mean]}", "duplicate key"),
    ("a: &a [1]\nseeds: *a", "alias"),
]


@pytest.mark.parametrize(("tree", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_is_wrong_is_named(tmp_path: Path, tree: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        points(read_sweep(write(tmp_path, tree)))
    assert message in str(error.value)


def test_a_missing_file_names_the_nearest_recipe() -> None:
    with pytest.raises(UserError, match="did you mean 'tmlr-table2-fmnist'"):
        read_sweep("tmlr-table2-fmnits")


def test_too_many_runs_are_refused_before_they_are_made(tmp_path: Path) -> None:
    tree = {"grid": {knob: list(range(1, 101)) for knob in ("rounds", "clients", "local.batch")}}
    with pytest.raises(UserError, match="1,000,000 runs"):
        points(read_sweep(write(tmp_path, tree)))


@pytest.mark.parametrize(
    ("only", "message"),
    [("mask", "write axis=label"), ("maks=gma", "an axis of"), ("mask=gam", "did you mean 'gma'"), ("seed=4", "3, 5")],
)
def test_only_names_what_there_is(tmp_path: Path, only: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        narrowed(small(tmp_path), [only])


@pytest.mark.parametrize(
    ("text", "message"),
    [("rounds", "write knob=value"), ("mask=gma", "is an axis"), ("round=1", "did you mean"), ("seed=1", "seeds")],
)
def test_set_names_what_there_is(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        changed(small(tmp_path), [text])


def test_a_file_that_fixes_the_rules_is_not_renamed(tmp_path: Path) -> None:
    """The config.yaml of a run has the rules of its algorithm, which another name would not change."""
    config = {"algorithm": "fedavg", "local": {"rule": "sgd"}, "server": {"rule": "sgd", "lr": 1.0}}
    begin = {"config": write(tmp_path, config, "run.yaml")}
    tree: dict[str, Any] = {"base": begin, "variants": {"a": {"avg": {}, "adam": {"algorithm": "fedadam"}}}}
    with pytest.raises(UserError, match="run 'adam_s0' has algorithm fedadam, but base.config fixes local.rule"):
        points(read_sweep(write(tmp_path, tree)))
    with pytest.raises(UserError, match="base.config fixes"):
        points(changed(read_sweep(write(tmp_path, {"base": begin, "seeds": 1})), ["algorithm=fedadam"]))
    tree["variants"]["a"]["adam"] |= {"local.rule": None, "server.rule": None, "server.lr": 0.1}
    assert len(points(read_sweep(write(tmp_path, tree)))) == 2


def test_labels_that_yaml_takes_for_something_else(tmp_path: Path) -> None:
    text = "variants: {mom: {on: {local.momentum: 0.9}, off: {}}}\ngrid: {local.lr: [1e-3]}\n"
    sweep = read_sweep(write(tmp_path, text + "where: [{if: {mom: on}, set: {rounds: 7}}]"))
    assert [p.name for p in points(sweep)] == ["true_lr0.001_s0", "false_lr0.001_s0"]
    assert [p.knobs.get("rounds") for p in points(sweep)] == [7, None]


def test_a_folder_does_not_hide_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tmlr-convex").mkdir()
    assert read_sweep("tmlr-convex").name == "tmlr-convex"
