"""Reading run folders of every version, whole and torn, finding them, and putting those of one kind together; and what
is measured of a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import rank_environment
from hypothesis import given
from hypothesis import strategies as st
from made_runs import BASE, made, records, write_run, write_sweep
from shell import sandbox, settings_of, train

from fedmpi.errors import FileError, UserError
from fedmpi.experiments.measures import (
    best,
    final,
    final_loss,
    mean_last,
    mean_of,
    measure,
    round_seconds,
    rounds_to,
    total_bytes,
    total_seconds,
    train_loss,
)
from fedmpi.experiments.runs import (
    DEFAULTS,
    IDLE,
    Group,
    Run,
    differences,
    find_runs,
    flat,
    group,
    read_run,
    read_sweep_record,
)
from fedmpi.runs.config import FREE, Config, Eval

OLD = Path(__file__).parents[1] / "old_runs"
FIVE = ("1-first", "2-catalogue", "3-data", "4-checkpoints", "5-steps")


def seeds_of(one: Group) -> list[int]:
    """Return the seeds of a group's runs."""
    return [run.seed for run in one.runs]


# Runs of older versions


@pytest.mark.parametrize("name", FIVE)
def test_a_run_of_an_older_version_is_read_in_full(name: str) -> None:
    run = read_run(OLD / name)
    assert [record["round"] for record in run.records] == [1, 2, 3, 4, 5]
    assert (run.metric, run.rises, run.labels, run.done) == ("accuracy", True, {}, True)
    assert list(run.series("test_accuracy")) == [2, 4, 5], "scored every second round, and in the last"
    assert final(run) == run.finished["test_accuracy"] and best(run) == run.finished["best_test_accuracy"]
    assert final_loss(run) == run.finished["test_loss"]
    assert (run.config["local.lr"], run.config["eval.every"], run.config["data"]) == (0.05, 2, "glyphs")


@pytest.mark.parametrize("name", FIVE)
def test_an_older_version_has_all_the_knobs_of_today(name: str) -> None:
    config = read_run(OLD / name).config
    assert config.keys() == DEFAULTS.keys()
    unset = {knob for knob, value in config.items() if value is None}
    assert unset <= {"data_root", "augment", "max_minutes", "threads", "local.steps", "meta.weights"} | {
        "memory.folder",
        "eval.samples",
        "checkpoint.every",
        "local.freeze",
        "local.private",
        "lora",
        "generate",
        "skew.owner",
        *(f"text.{name}" for name in ("column", "label", "test", "length", "pad", "tokenizer")),
    }, "what an algorithm fills in is filled in, also where its version had no such knob"


def test_runs_of_all_versions_with_the_same_knobs_are_seeds_of_one_group() -> None:
    plain, masked = sorted(group(find_runs([OLD])), key=lambda one: one.label, reverse=True)
    assert (plain.label, seeds_of(plain)) == ("fedavg + mean", [0])
    assert (masked.label, seeds_of(masked)) == ("fedavg + gma", [0, 1, 2, 3, 4, 5])
    assert [run.folder.name for run in masked.runs] == [*FIVE, "6-stopped"]


def test_a_run_that_was_stopped_is_read_as_far_as_it_came() -> None:
    run = read_run(OLD / "6-stopped")
    assert (len(run.records), run.finished, run.done, best(run)) == (1, {}, False, None)
    assert total_seconds(run)["local"] > 0


def test_the_first_version_timed_no_meta_step() -> None:
    first, later = (total_seconds(read_run(OLD / name)) for name in ("1-first", "5-steps"))
    assert list(first) == ["local", "wait", "reduce", "server", "gather", "eval"]
    assert list(later) == ["local", "wait", "reduce", "server", "gather", "meta", "eval"]


def test_no_file_of_the_old_runs_is_large() -> None:
    for config in OLD.glob("*/config.yaml"):
        assert sum(file.stat().st_size for file in config.parent.iterdir()) < 10_000


def test_options_a_checkpoint_ignores_do_not_distinguish_runs() -> None:
    assert set(FREE) <= set(IDLE)


# The run of today


@pytest.fixture(scope="module")
def today(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "today"
    with sandbox():
        train(settings_of(out, rounds=5, eval=Eval(every=2), seed=3))
    return out


def test_a_run_of_today_is_read_as_it_was_configured(today: Path) -> None:
    run = read_run(today)
    written = yaml.safe_load((today / "config.yaml").read_text())
    assert run.config == flat(written) and run.config.keys() == DEFAULTS.keys()
    assert run.config["local.batch"] == written["local"]["batch"] == 10
    assert (run.seed, run.mask, run.folder.name, run.metric) == (3, "gma", "today", "accuracy")
    assert run.records == [json.loads(line) for line in (today / "metrics.jsonl").read_text().splitlines()]
    assert run.finished["rounds"] == 5


def test_reading_runs_takes_no_torch() -> None:
    modules = "fedmpi.experiments.report.sections.masks, fedmpi.commands.compare"
    code = f"import sys; import {modules}; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=rank_environment(), capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "False\n", done.stderr


# What is torn, damaged or no run


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", records([0.1, 0.2, 0.3]))
    text = (folder / "metrics.jsonl").read_text()
    for cut in range(1, len(text.splitlines()[-1])):
        (folder / "metrics.jsonl").write_text(text[:-1][:-cut])
        assert [record["round"] for record in read_run(folder).records] == [1, 2], text[:-cut]


def test_damaged_lines_are_left_out_and_a_round_that_came_twice_counts_once(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    lines = [json.dumps(one) for one in records([0.1, 0.2, 0.3])]
    again = json.dumps({**json.loads(lines[1]), "test_accuracy": 0.25})
    odd = ["\x00\x00", "{}", "[3]", '{"round": 0}', '{"round": true}', '{"round": 2.5}', '{"round": 4, "kept": "all"}']
    odd += [
        '{"round": 4, "seconds": 3}',
        '{"round": 4, "seconds": {"local": "long"}}',
        '{"round": 4, "test_loss": [1]}',
    ]
    odd += [
        "[" * 5000,
        '{"round": 4, "kept": 1' + "0" * 400 + "}",
        '{"round": 4, "layers": ' + '{"a":' * 900 + "1" + "}" * 901,
    ]
    mixed = [lines[2], *odd, lines[0], lines[1], again]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in mixed))
    run = read_run(folder)
    assert [record["round"] for record in run.records] == [1, 2, 3], "by round, whatever the order of the lines"
    assert run.series("test_accuracy") == {1: 0.1, 2: 0.25, 3: 0.3}


def test_a_round_beyond_all_that_can_be_is_damage(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", records([0.1, 0.2, 0.3]))
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"round": 4000000000}\n')
    assert [record["round"] for record in read_run(folder).records] == [1, 2, 3]
    with pytest.raises(FileError, match="metrics.jsonl is damaged: line 4 is no round"):
        read_run(folder, whole=True)


def test_numbers_that_are_not_finite_are_none(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "metrics.jsonl").write_text(
        '{"round": 1, "train_loss": NaN, "test_accuracy": Infinity, "seconds": {"local": -Infinity, "eval": 1.0}}\n'
    )
    run = read_run(folder)
    assert run.records == [
        {"round": 1, "train_loss": None, "test_accuracy": None, "seconds": {"local": None, "eval": 1.0}}
    ]
    assert best(run) is None and train_loss(run, 20) is None and round_seconds(run) == {1: 1.0}


def test_what_a_later_version_may_add_does_no_harm(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", records([0.5], remark="new", parts=[{"a": 1}]), done=False)
    tree = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump(tree | {"novel": 7, "other": {"knob": "x"}}))
    run = read_run(folder)
    assert (run.config["novel"], run.config["other.knob"], run.records[0]["remark"]) == (7, "x", "new")


def test_a_run_before_its_first_round_has_no_measure(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", done=False))
    assert (run.records, run.metric, run.rises, run.finished, run.done) == ([], "accuracy", True, {}, False)
    for name in ("best", "last10", "final", "test_loss", "rounds:0.1", "train_loss20"):
        assert measure(name).of(run) is None
    assert total_bytes(run) == 0 and total_seconds(run) == {} and mean_of(run, "kept") is None


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("config.yaml", None, "No such file"),
        ("metrics.jsonl", None, "No such file"),
        ("config.yaml", "- a\n", "config.yaml has no knobs"),
        ("config.yaml", "", "config.yaml has no knobs"),
        ("config.yaml", "a: [1\n", "while parsing"),
        ("config.yaml", "algorithm: fedavg\n", "has no valid 'mask'"),
        ("config.yaml", yaml.safe_dump(BASE | {"seed": "one"}), "has no valid 'seed'"),
        ("config.yaml", yaml.safe_dump(BASE | {"deep": {"er": {"x": 1}}}), "'deep.er' .* is not a knob's value"),
        ("config.yaml", yaml.safe_dump(BASE | {"x": [[1]]}), "'x' in config.yaml is not a knob's value"),
        ("config.yaml", yaml.safe_dump(BASE | {"skew": {"alpha": "abc"}}), "has no valid 'skew.alpha'"),
        ("config.yaml", yaml.safe_dump(BASE | {"skew": {"alpha": None}}), "has no valid 'skew.alpha'"),
        ("config.yaml", yaml.safe_dump(BASE | {"split": ["a", "b"]}), "has no valid 'split'"),
        ("config.yaml", yaml.safe_dump(BASE | {"server": {"variant": ["x"]}}), "has no valid 'server.variant'"),
        ("config.yaml", "[" * 100_000, "nested more than 16 levels deep"),
        ("config.yaml", "a: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
        ("config.yaml", "a: &a [0, 0]\nb: &b [*a, *a]\n" + yaml.safe_dump(BASE), r"alias \*a is not supported"),
        ("metrics.jsonl", "nonsense\n", "line 1 is no round"),
        ("metrics.jsonl", "{}\n[1]\n", "line 1 has no 'round'"),
    ],
)
def test_what_is_no_run_is_refused_in_one_line(tmp_path: Path, name: str, text: str | None, words: str) -> None:
    folder = write_run(tmp_path / "run", records([0.5]))
    if text is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(text)
    if text is None:
        kind, pattern = UserError, rf"^'{folder}' is no run folder that can be read \(.*{words}.*\); give the --out"
    else:
        kind, pattern = FileError, rf"^{folder / name} .*{words}.*; restore it from a copy, or move it away"
    with pytest.raises(kind, match=pattern):
        read_run(folder)


def test_a_folder_that_is_to_be_whole_may_not_be_torn(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", records([0.5, 0.6]))
    assert read_run(folder, whole=True) == read_run(folder)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"round": 3')
    assert len(read_run(folder).records) == 2
    with pytest.raises(FileError, match="metrics.jsonl is damaged: line 3 is no round"):
        read_run(folder, whole=True)


def test_the_metric_and_its_direction_are_those_of_the_objective(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", records([0.5, 0.2], metric="error"))
    assert (read_run(folder).metric, read_run(folder).rises) == ("error", False), (
        "nobody said so, but it is no accuracy"
    )
    for rises in (True, False):
        (folder / "partition.json").write_text(json.dumps({"objective": {"metric": "error", "rises": rises}}))
        run = read_run(folder)
        assert (run.metric, run.rises, best(run)) == ("error", rises, 0.5 if rises else 0.2)
    (folder / "metrics.jsonl").write_text("")
    assert read_run(folder).metric == "error", "also before the first round"


# Finding runs


def names(paths: list[Path]) -> list[str]:
    return [run.folder.name for run in find_runs(paths)]


def test_runs_are_found_in_trees_by_name_and_none_twice(tmp_path: Path) -> None:
    for name in ("b/seed10", "b/seed2", "a", "b/c/deep", ".hidden/run"):
        write_run(tmp_path / name, records([0.5]))
    write_run(tmp_path / "a" / "checkpoints" / "inner", records([0.5]))
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.yaml").write_text("x")
    assert names([tmp_path]) == ["a", "deep", "seed2", "seed10"], "what lies in a run folder is the run's own"
    assert names([tmp_path / "b" / "seed10", tmp_path]) == ["seed10", "a", "deep", "seed2"]


def test_links_lead_to_runs_and_not_into_trees(tmp_path: Path) -> None:
    far = write_run(tmp_path / "elsewhere" / "far", records([0.5]))
    write_run(tmp_path / "here" / "near", records([0.5]))
    for name, target in (
        ("to-far", far),
        ("tree", far.parent),
        ("again", tmp_path / "here" / "near"),
        ("up", tmp_path),
    ):
        (tmp_path / "here" / name).symlink_to(target)
    assert names([tmp_path / "here"]) == ["again", "to-far"], "one of them by the name that comes first"
    assert names([tmp_path / "here" / "tree"]) == ["far"], "but where a link is given, it is meant"


def test_a_sweep_has_its_runs_in_its_own_order_and_labels(tmp_path: Path) -> None:
    runs = {
        "z-0": {"mask": "gma", "local.lr": "0.1", "seed": "0"},
        "a-0": {"mask": "mean", "local.lr": "0.1", "seed": "0"},
        "never-begun": {"mask": "mean", "local.lr": "1.0", "seed": "0"},
    }
    sweep = write_sweep(tmp_path / "sweep", runs)
    for name in ("z-0", "a-0", "of-another-sweep"):
        write_run(sweep / name, records([0.5]))
    assert names([sweep]) == names([tmp_path]) == ["z-0", "a-0"]
    assert [run.labels for run in find_runs([sweep])] == [
        {"mask": "gma", "local.lr": "0.1"},
        {"mask": "mean", "local.lr": "0.1"},
    ]
    assert read_run(sweep / "z-0").labels["mask"] == "gma", "also of a run that is given itself"
    assert read_run(sweep / "of-another-sweep").labels == {}
    assert read_sweep_record(sweep)["axes"] == {"mask": ["gma", "mean"], "local.lr": ["0.1", "1.0"]}


@pytest.mark.parametrize("name", ["../outside", "", "..", "/etc", "a/b"])
def test_a_sweep_cannot_name_folders_elsewhere(tmp_path: Path, name: str) -> None:
    write_run(tmp_path / "outside", records([0.5]))
    sweep = write_sweep(tmp_path / "sweep", {name: {"seed": "0"}})
    with pytest.raises(UserError, match="which is no folder next to it"):
        find_runs([sweep])


@pytest.mark.parametrize(
    "record",
    [
        "",
        "[]",
        "{}",
        '{"runs": [], "axes": {}}',
        '{"runs": {"x": 3}, "axes": {}}',
        '{"runs": {}, "axes": {"mask": 3}}',
        '{"runs": {}, "axes": 3}',
        '{"runs": {}, "axes": {}, "published": [1]}',
        '{"runs": {}, "axes": {}, "published": 1}',
    ]
    + ['{"runs": {}, "axes": {}, "published": {"rows": [1]}}', '{"runs": {}, "axes": {}, "published": {"columns": 2}}']
    + ['{"runs": {}, "axes": {}, "published": {"rows": 7}}'],
)
def test_a_record_of_a_sweep_that_cannot_be_read_is_refused(tmp_path: Path, record: str) -> None:
    (tmp_path / "sweep.json").write_text(record)
    with pytest.raises(UserError, match="is no record of a sweep; start the sweep again"):
        find_runs([tmp_path])


def test_a_folder_without_a_run_is_refused_by_its_name(tmp_path: Path) -> None:
    here = write_run(tmp_path / "here", records([0.5]))
    (tmp_path / "empty" / "below").mkdir(parents=True)
    for name, words in (("empty", "and there is none below it"), ("nowhere", "No such file or directory")):
        with pytest.raises(UserError, match=rf"^'{tmp_path / name}' is no run folder .*{words}"):
            find_runs([here, tmp_path / name])
    (tmp_path / "empty" / "config.yaml").write_text("hello\n")
    with pytest.raises(UserError, match="No such file or directory: .*metrics.jsonl"):
        find_runs([tmp_path / "empty"])


def test_a_file_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="Not a directory"):
        find_runs([tmp_path / "file"])


# Groups


def labels(runs: list[Run]) -> list[str]:
    return [one.label for one in group(runs)]


def test_groups_are_what_differs_in_more_than_the_seed() -> None:
    runs = [
        made([0.5], algorithm="fedavg", mask="gma", local__lr=0.1, seed=1, out="x", comm="mpi", threads=2),
        made([0.5], algorithm="fedavg", mask="gma", local__lr=0.01, seed=0),
        made([0.5], algorithm="fedavg", mask="gma", local__lr=0.1, seed=0, log_to="none", checkpoint__keep=0),
    ]
    first, second = group(runs)
    assert (seeds_of(first), seeds_of(second)) == ([0, 1], [0])
    assert (first.label, second.label) == ("local.lr 0.1, fedavg + gma", "local.lr 0.01, fedavg + gma")
    assert first.runs == [runs[2], runs[0]] and first.repeats == []


def test_labels_have_the_mask_and_the_options_that_differ() -> None:
    def one(**knobs: Any) -> Run:
        return made([0.5], **knobs)

    adam = {"algorithm": "fedadam", "server__rule": "adam", "server__lr": 0.02}
    assert labels([one(seed=0), one(seed=1)]) == ["fedavg + gma"]
    assert labels([one(mask="mean"), one(mask="gma")]) == ["fedavg + mean", "fedavg + gma"]
    assert labels([one(), one(**adam)]) == ["fedavg + gma", "fedadam + gma"], "rule and rate go with the algorithm"
    assert labels([one(), one(mask="mean"), one(**adam)]) == ["fedavg + gma", "fedavg + mean", "fedadam + gma"]
    assert labels([one(local__lr=0.1), one(local__lr=1.0), one(**adam, local__lr=0.5)]) == [
        "local.lr 0.1, fedavg + gma",
        "local.lr 1, fedavg + gma",
        "local.lr 0.5, fedadam + gma",
    ]
    assert labels([one(server__mask_moments=True), one(server__mask_moments=False)]) == [
        "server.mask_moments true, fedavg + gma",
        "server.mask_moments false, fedavg + gma",
    ]
    shown = [f"meta.weights {weights}, fedavg + gma" for weights in ("[2, 1]", "null")]
    assert labels([one(meta__weights=[2, 1]), one()]) == shown


def test_a_label_of_a_sweep_that_hides_the_mask_is_followed_by_it() -> None:
    masks = {"on": "gma", "cautious": "my_masks:cautious", "mean": "mean"}
    runs = [made([0.5], labels={"mask": label}, mask=mask) for label, mask in masks.items()]
    assert labels(runs) == ["fedavg + on (gma)", "fedavg + cautious", "fedavg + mean"]
    taus = {"gma": 0.2, "and": 0.8}
    arms = [made([0.5], labels={"arm": mask.upper()}, mask=mask, tau=tau) for mask, tau in taus.items()]
    assert labels(arms) == ["GMA, fedavg + gma 0.2", "AND, fedavg + and 0.8"], "and tau, as that differs"
    own = [made([0.5], algorithm="fedgma2021", mask="and", tau=0.8), made([0.5], algorithm="fedyogi", mask="mean")]
    assert labels(own) == ["fedgma2021 + and", "fedyogi + mean"]
    plain, masked = ([made([0.5], labels={"tau": str(t)}, tau=t, mask=m) for t in (0.2, 0.4)] for m in ("mean", "gma"))
    assert labels(masked) == ["fedavg + gma 0.2", "fedavg + gma 0.4"]
    assert labels(plain) == ["tau 0.2, fedavg + mean", "tau 0.4, fedavg + mean"], "each has a label of its own"


def test_labels_name_another_task_even_if_the_masks_differ() -> None:
    gma = [made([0.5], tau=tau, data="fmnist", rounds=40) for tau in (0.2, 0.4)]
    assert labels([*gma, made([0.5], mask="mean", data="mnist", rounds=50)]) == [
        "fmnist, rounds 40, fedavg + gma 0.2",
        "fmnist, rounds 40, fedavg + gma 0.4",
        "mnist, rounds 50, fedavg + mean",
    ]
    for knob, values in {"model": ("lenet", "cnn"), "split": ("iid", "classes"), "clients": (10, 100)}.items():
        shown = labels([made([0.5], mask=mask, **{knob: values[mask == "gma"]}) for mask in ("mean", "gma")])
        assert [label.split(",")[0].split()[-1] for label in shown] == [str(value) for value in values]
    swept = [made([0.5], labels={"mask": mask}, mask=mask, data=f"of-{mask}") for mask in ("mean", "gma")]
    assert labels(swept) == ["fedavg + mean", "fedavg + gma"], "the sweep says what its labels stand for"


def test_plain_averaging_has_no_threshold() -> None:
    runs = [made([0.5], mask=mask, tau=tau) for mask, tau in (("mean", 0.4), ("gma", 0.4), ("gma", 0.2), ("and", 0.4))]
    assert labels(runs) == ["fedavg + mean", "fedavg + gma 0.4", "fedavg + gma 0.2", "fedavg + and 0.4"]
    assert len(group([made([0.5], mask="mean", tau=tau, seed=tau > 0) for tau in (0.0, 0.9)])) == 1
    assert len(group([made([0.5], mask="gma", sharpness=sharp) for sharp in (1.0, 9.0)])) == 1, "which sand alone reads"
    assert len(group([made([0.5], mask="sand", sharpness=sharp) for sharp in (1.0, 9.0)])) == 2


def test_runs_of_one_sweep_are_grouped_by_their_labels() -> None:
    def one(seed: int, lr: float = 0.1, **axes: str) -> Run:
        return made([0.5], labels={"setting": "small", **axes}, seed=seed, local__lr=lr, mask=axes["mask"])

    runs = [one(0, algorithm="fedavg", mask="gma"), one(0, algorithm="fedavg", mask="mean")]
    runs += [one(1, 0.5, algorithm="fedavg", mask="gma"), one(0, algorithm="fedprox", mask="mean")]
    found = group(runs)
    assert [g.label for g in found] == ["fedavg + gma", "fedavg + mean", "fedprox + mean"]
    assert [seeds_of(g) for g in found] == [[0, 1], [0], [0]], "their labels say that they belong together"
    assert found[0].key == {"algorithm": "fedavg", "mask": "gma"}
    others = [made([0.5], labels={"clients": label}, clients=int(label)) for label in ("10", "100")]
    assert labels(others) == ["clients 10, fedavg + gma", "clients 100, fedavg + gma"]


def test_a_run_outside_a_sweep_is_grouped_with_it_by_knobs() -> None:
    swept = [made([0.5], labels={"mask": mask}, mask=mask) for mask in ("mean", "gma")]
    assert labels([*swept, made([0.6], mask="gma", seed=1)]) == ["fedavg + mean", "fedavg + gma"]


def test_a_seed_that_was_run_twice_counts_once() -> None:
    runs = [
        made([0.5], name="short", done=False),
        made([0.5, 0.6], name="long", rounds=11),
        made([0.5, 0.7], name="too", rounds=11),
    ]
    (found,) = group(runs)
    assert [run.folder.name for run in found.runs] == ["long"]
    assert [run.folder.name for run in found.repeats] == ["short", "too"]


@given(st.permutations(range(6)))
def test_the_order_of_the_runs_changes_no_group(order: list[int]) -> None:
    runs = [made([0.5], seed=seed, mask=mask) for mask in ("mean", "gma") for seed in range(3)]
    found = {one.label: seeds_of(one) for one in group([runs[i] for i in order])}
    assert found == {"fedavg + mean": [0, 1, 2], "fedavg + gma": [0, 1, 2]}


def test_nothing_makes_no_group() -> None:
    assert group([]) == [] and differences([]) == {}


def test_differences_are_the_knobs_with_more_than_one_value() -> None:
    runs = [
        made([0.5], seed=seed, local__lr=lr, out=str(seed), threads=seed) for seed, lr in ((0, 0.1), (1, 1), (2, 1.0))
    ]
    assert differences(runs) == {"seed": [0, 1, 2], "local.lr": [0.1, 1, 1.0]}
    assert differences(runs[1:]) == {"seed": [1, 2]}
    assert differences([made([0.5], novel=1), made([0.5])]) == {"novel": [1, None]}


def test_every_knob_is_known_by_its_dotted_name() -> None:
    assert DEFAULTS["local.batch"] == Config().local.batch and "local" not in DEFAULTS


# Measures, by hand


def test_measures_of_a_metric_that_rises() -> None:
    run = made([0.1, None, 0.5, 0.9, None, 0.7])
    assert (best(run), final(run)) == (0.9, 0.7)
    assert mean_last(run, 2) == pytest.approx(0.7) and mean_last(run, 3) == pytest.approx(0.8)
    assert mean_last(run, 10) == pytest.approx((0.1 + 0.5 + 0.9 + 0.7) / 4), "as many as there are"
    assert [rounds_to(run, value) for value in (0.0, 0.1, 0.2, 0.9, 0.91)] == [1, 1, 3, 4, None]
    assert final_loss(run) == pytest.approx(0.3)
    assert train_loss(run, 2) == pytest.approx((1 / 5 + 1 / 6) / 2) and train_loss(run, 1) == pytest.approx(1 / 6)


def test_the_last_rounds_are_rounds_whether_they_were_scored_or_not() -> None:
    run = made([n / 100 if n % 5 == 0 else None for n in range(1, 51)])
    assert mean_last(run, 10) == pytest.approx((0.45 + 0.50) / 2) and mean_last(run, 11) == pytest.approx(0.45)
    under_way = made([0.2, 0.6, None, None, None])
    assert mean_last(under_way, 2) == 0.6, "the last that was scored, where none of the last rounds was"
    assert mean_last(made([None, None]), 10) is None


def test_measures_of_a_metric_that_falls() -> None:
    run = made([0.9, 0.4, 0.6], metric="error", rises=False)
    assert (best(run), final(run)) == (0.4, 0.6)
    assert [rounds_to(run, value) for value in (1.0, 0.5, 0.4, 0.3)] == [1, 2, 2, None]
    assert not measure("best").rises(run) and measure("best").rises(made([0.1]))
    assert not measure("rounds:0.5").rises(made([0.1])), "fewer rounds are better"


def test_a_loss_that_was_not_finite_among_the_last_rounds_has_no_mean() -> None:
    run = made([0.5] * 30)
    run.records[8]["train_loss"] = None
    assert train_loss(run, 21) == pytest.approx(sum(1 / n for n in range(10, 31)) / 21)
    assert train_loss(run, 22) is None


def test_a_last_loss_that_was_not_finite_is_not_replaced_by_an_earlier_one() -> None:
    run = made([0.5, 0.4])
    run.records[1]["test_loss"] = None
    assert final(run) == 0.4 and final_loss(run) is None


def test_bytes_seconds_and_agreement_are_summed_up() -> None:
    run = made([0.5, 0.6])
    run.records[0] |= {"bytes_sent": 3, "seconds": {"eval": 1.0, "local": 2.0, "nap": 0.5}, "agreement": 0.2}
    run.records[1] |= {"bytes_sent": 4, "seconds": {"local": 3.0, "wait": None}, "layers": {"a": {"agreement": 0.5}}}
    assert total_bytes(run) == 7 and list(total_seconds(run)) == ["local", "wait", "eval", "nap"]
    assert total_seconds(run) == {"local": 5.0, "wait": 0, "eval": 1.0, "nap": 0.5}
    assert round_seconds(run) == {1: 3.5, 2: 3.0}
    assert mean_of(run, "agreement") == 0.2 and mean_of(run, "layers", "a", "agreement") == 0.5
    assert run.series("layers", "b", "agreement") == run.series("agreement", "deeper") == {}


def test_measures_have_names() -> None:
    run = made([0.1, 0.6, 0.8])
    values = {"best": 0.8, "final": 0.8, "last2": 0.7, "last10": 0.5, "rounds:0.5": 2, "rounds:1": None}
    for name, value in (values | {"train_loss20": 11 / 18, "test_loss": 0.2}).items():
        assert measure(name).of(run) == (None if value is None else pytest.approx(value)), name
        assert measure(name).name == name
    assert measure("participating").of(run) is measure("others").of(run) is None
    run.records[0] |= {"clients_accuracy": {"participating": 0.3, "others": 0.2}}
    run.records[1] |= {"clients_accuracy": {"participating": 0.7, "others": None}}
    assert measure("participating").of(run) == 0.7 and measure("others").of(run) == 0.2, "where there were others last"
    own = made([0.4], metric="error", rises=False)
    own.records[0] |= {"clients_error": {"participating": 0.3, "others": 0.5}}
    assert measure("participating").of(own) == 0.3 and measure("others").of(own) == 0.5
    kinds = {name: measure(name).kind for name in ("last20", "rounds:0.8", "train_loss20")}
    assert kinds == {"last20": "metric", "rounds:0.8": "rounds", "train_loss20": "loss"}


@pytest.mark.parametrize("name", ["", "beste", "last", "last0", "last-1", "last1.5", "rounds", "rounds:", "rounds:x"])
def test_an_unknown_measure_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"unknown measure '{name}'; known: best, final, lastN"):
        measure(name)
