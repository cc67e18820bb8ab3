"""The command line: what is read, what is refused in one line, and the exit codes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from shell import metrics, sandbox

import fedmpi
from fedmpi import commands as cli
from fedmpi.aggregate.sums import SUMS
from fedmpi.algorithms import ALGORITHMS
from fedmpi.comm import SoloComm
from fedmpi.comm.env import Place
from fedmpi.commands import main
from fedmpi.data import DATASETS, SPLITS
from fedmpi.errors import AgreedError, UserError
from fedmpi.masks import MASKS
from fedmpi.models import MODELS
from fedmpi.runs import options, run
from fedmpi.runs.build import prepare
from fedmpi.runs.config import Config, Launch, Local, Server
from fedmpi.runs.help import GROUPS, SHORT, group_names, train_options
from fedmpi.runs.options import knobs, parse

QUICK = "--data tiny --split iid --model logistic --clients 8 --cohort 4 --rounds 2 --threads 1 --log_to none".split()


@pytest.fixture(autouse=True)
def patch(tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """A folder of its own to work in; everything global put back afterwards."""
    with sandbox() as patch:
        patch.chdir(tmp_path)
        yield patch


@pytest.fixture
def recipe(patch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A bundled recipe by the name of small-yogi."""
    path = tmp_path / "bundled" / "small-yogi.yaml"
    path.parent.mkdir()
    path.write_text("algorithm: fedyogi\nserver:\n  lr: 0.25\n")
    patch.setattr(options, "recipes", lambda: {"small-yogi": path, "large": path})
    return path


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one-line error with which a command leaves by exit code 2."""
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("fedmpi: ") and said.err.endswith("\n") and said.err.count("\n") == 1
    assert "Traceback" not in said.err
    return said.err.removeprefix("fedmpi: ").rstrip("\n")


# Commands


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]])
def test_help_names_every_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {command}" in out for command in cli.COMMANDS)


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == fedmpi.__version__


def test_an_unknown_command_gets_the_closest_match(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "trian") == (
        "unknown command 'trian'; did you mean 'train'? known: attack, cancel, compare, completion, data, doctor, "
        "logs, plan, recipes, report, requeue, status, submit, sweep, train"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("run --data mnist", "unknown command 'run'; did you mean 'train'? known: "),
        ("--data mnist", "option '--data' is given before a command; write 'fedmpi train --data ...'"),
        ("help nonsense", "unknown command 'nonsense'; known: "),
        ("train rounds=3", "unknown option 'rounds'; did you mean '--rounds'?"),
        ("train -lr 3", "unknown option '-lr'; did you mean '--local.lr'?"),
        ("train --data mine.py", "data set 'mine.py' is a file; write module:function, such as mine:make"),
    ],
)
def test_what_a_newcomer_types_gets_an_answer(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, *words.split()).startswith(said)


def test_help_for_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0 and capsys.readouterr().out.startswith("usage: fedmpi COMMAND")
    for command in sorted(set(cli.COMMANDS) - {"plan", "data"}):
        assert helped(capsys, "help", command).startswith(f"usage: fedmpi {command}")


def helped(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command prints as its help."""
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 0
    return capsys.readouterr().out


@pytest.fixture
def explained(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """What `fedmpi train --help-all` says of each option."""
    options = re.split(r"^  --", helped(capsys, "train", "--help-all"), flags=re.MULTILINE)[1:]
    return {option.split()[0]: " ".join(option.split("\n\n")[0].split()[1:]) for option in options}


def test_the_full_help_of_train_explains_every_option_and_its_default(explained: dict[str, str]) -> None:
    known = {name: value for name, value in knobs(Config()).items() if not hasattr(value, "__dataclass_fields__")}
    assert set(explained) == {*known, *knobs(Launch()), "config", "print_config"}
    for name in known:
        assert re.search(r" \w.{8,}\.$", explained[name]), f"--{name} is not explained: {explained[name]}"
        assert explained[name].count("Default: ") == 1, f"--{name} does not say its default: {explained[name]}"


def test_every_option_of_train_is_in_one_group() -> None:
    known = train_options()
    grouped = [name for title in GROUPS for name in group_names(title, known)]
    assert sorted(grouped) == sorted(known), "add a new option to GROUPS in fedmpi/runs/help.py"
    assert set(SHORT) <= set(known)


def test_the_short_help_has_the_common_options_in_80_columns(
    capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch
) -> None:
    patch.setenv("COLUMNS", "80")
    text = helped(capsys, "help", "train")
    assert sorted(re.findall(r"^  --(\S+)", text, re.MULTILINE)) == sorted(SHORT) and "--help-all" in text
    assert [title for title in GROUPS if f"\n{title}:\n" in text] == [title for title in GROUPS if title != "advanced"]
    assert "\x1b" not in text and max(map(len, text.splitlines())) <= 80
    patch.setenv("COLUMNS", "110")
    assert len(helped(capsys, "train", "-h").splitlines()) < len(text.splitlines())


@pytest.mark.parametrize(
    ("option", "table"),
    [
        ("algorithm", ALGORITHMS),
        ("mask", MASKS),
        ("data", DATASETS),
        ("split", SPLITS),
        ("model", MODELS),
        ("sum", SUMS),
    ],
)
def test_the_help_names_every_row_of_a_table(option: str, table: Collection[str], explained: dict[str, str]) -> None:
    assert set(table) - {"tiny"} <= set(re.findall(r"[\w-]+", explained[option]))


def test_a_module_can_be_started_and_fails_without_a_traceback() -> None:
    def start(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "fedmpi", *arguments]
        return subprocess.run(command, cwd=Path(fedmpi.__file__).parents[1], capture_output=True, text=True)

    helped = start("--help")
    assert (helped.returncode, helped.stderr) == (0, "") and "usage: fedmpi COMMAND" in helped.stdout
    wrong = start("train", "--tau", "2")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "fedmpi: --tau is 2.0; it must be in [0, 1]\n"


# Files and recipes


def test_a_file_by_its_path_and_a_recipe_by_its_name(recipe: Path) -> None:
    asked = replace(Config(), algorithm="fedyogi", server=Server(lr=0.25))
    assert parse(["--config", str(recipe)]) == asked
    assert parse(["--config", "small-yogi"]) == asked
    assert parse(["--config=small-yogi", "--server.lr", "0.5"]) == replace(asked, server=Server(lr=0.5))


def test_an_option_overrides_a_file_wherever_it_stands(recipe: Path) -> None:
    assert parse(["--server.lr", "0.5", "--config", "small-yogi"]).server.lr == 0.5
    assert parse(["--server.lr=0.5", "--config=small-yogi"]).server.lr == 0.5


def test_a_file_in_the_folder_goes_before_a_recipe_but_a_folder_does_not(recipe: Path) -> None:
    Path("large").write_text("tau: 0.125\n")
    Path("small-yogi").mkdir()
    assert parse(["--config", "large"]).tau == 0.125
    assert parse(["--config", "small-yogi"]).algorithm == "fedyogi"


def test_an_unknown_recipe_gets_the_closest_match(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "train", "--config", "small-yogy")
    assert said == (
        "--config 'small-yogy' is neither a file nor a recipe; did you mean 'small-yogi'? recipes: small-yogi, large"
    )


def test_every_bundled_recipe_is_a_sound_configuration() -> None:
    for name in options.single_runs():
        prepare(parse(["--config", name]))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("taau: 0.3\n", "unknown option 'taau' in --config f.yaml; did you mean 'tau'?"),
        ("local:\n  lrr: 1\n", "unknown option 'local.lrr' in --config f.yaml; did you mean 'local.lr'?"),
        ("local:\n  tau: 1\n", "unknown option 'local.tau' in --config f.yaml; ..."),
        ("config: g.yaml\n", "unknown option 'config' in --config f.yaml; ..."),
        ("3: 4\n", "unknown option '3' in --config f.yaml; 'fedmpi train --help-all' lists all options"),
        ("clients: many\n", "--clients is 'many'; it must be a whole number"),
        ("clients: 1.5\n", "--clients is '1.5'; it must be a whole number"),
        ("clients: true\n", "--clients is 'True'; it must be a whole number"),
        ("clients: null\n", "--clients is null; it must have a value, and ... is the default"),
        ("local:\n  lr: [1, 2]\n", "--local.lr is '[1, 2]'; it must be a number or null"),
        ("deterministic: perhaps\n", "--deterministic is 'perhaps'; it must be true or false"),
        ("algorithm: 7\n", "--algorithm is '7'; it must be a word"),
        ("timeout: .inf\n", "--timeout is inf; it must be a finite number"),
        ("tau: .nan\n", "--tau is nan; it must be in [0, 1]"),
        ("tau: 1.5\n", "--tau is 1.5; it must be in [0, 1]"),
        ("local: 3\n", "'local' in --config f.yaml holds 3; it must hold options..."),
        ("local: null\n", "'local' in --config f.yaml holds nothing; it must hold options..."),
        ("local:\n- lr\n", "'local' in --config f.yaml holds ['lr']; it must hold options..."),
        ("- a\n- b\n", "--config f.yaml holds ['a', 'b']; it must hold options..."),
        ("fedavg\n", "--config f.yaml holds 'fedavg'; it must hold options..."),
        ("", "--config f.yaml holds nothing; it must hold options..."),
        ("a: [1\nb: 2\n", "--config f.yaml cannot be read as YAML (...line 2...); correct it ..."),
        ("a: b: c\n", "--config f.yaml cannot be read as YAML (...line 1...); correct it ..."),
        ("\ttau: 1\n", "--config f.yaml cannot be read as YAML (...); correct it ..."),
        ("tau: 2020-13-45\n", "--config f.yaml cannot be read as YAML (month...); correct it ..."),
        ("a: 1\n---\nb: 2\n", "--config f.yaml cannot be read as YAML (...document...); correct it ..."),
    ],
)
def test_a_wrong_file_is_a_one_line_error(text: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("f.yaml").write_text(text)
    assert re.fullmatch(".*".join(map(re.escape, said.split("..."))), refused(capsys, "train", "--config", "f.yaml"))


@pytest.mark.parametrize(
    "text",
    [
        "tau: !!python/object/apply:os.mkdir [burnt]\n",
        "!!python/object/apply:os.mkdir [burnt]\n",
        "local: !!python/object/new:os.mkdir [burnt]\n",
        "out: !!python/name:os.mkdir\n",
    ],
)
def test_a_file_cannot_run_code(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("f.yaml").write_text(text)
    assert "could not determine a constructor for the tag" in refused(capsys, "train", "--config", "f.yaml")
    assert not Path("burnt").exists()


def test_bytes_that_are_no_text_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("f.yaml").write_bytes(b"\xff\xfe\x00tau: 1")
    assert "can't decode" in refused(capsys, "train", "--config", "f.yaml")


def test_a_folder_or_nothing_is_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("folder").mkdir()
    assert "not a regular file" in refused(capsys, "train", "--config", "folder")
    assert "--config" in refused(capsys, "train", "--config=")
    assert "--config needs a value" in refused(capsys, "train", "--config")


def test_print_config_prints_what_reads_back_the_same(capsys: pytest.CaptureFixture[str], recipe: Path) -> None:
    asked = ["--config", "small-yogi", "--tau", "0.3", "--local.lr", "1e-3", "--local.steps", "7", "--out", "a: b # c"]
    with pytest.raises(SystemExit) as left:
        main(["train", *asked, "--print_config"])
    assert left.value.code == 0
    Path("printed.yaml").write_text(capsys.readouterr().out)
    cfg = parse(["--config", "printed.yaml"])
    assert cfg == parse(asked)
    assert (cfg.algorithm, cfg.tau, cfg.local.steps, cfg.out) == ("fedyogi", 0.3, 7, "a: b # c")
    assert not Path("a: b # c").exists()


# Options


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--taau", "0.3"], "unknown option '--taau'; did you mean '--tau'?"),
        (["--taau=0.3"], "unknown option '--taau'; did you mean '--tau'?"),
        (["--local.lrr", "1"], "unknown option '--local.lrr'; did you mean '--local.lr'?"),
        (["--algor", "fedavg"], "unknown option '--algor'; did you mean '--algorithm'?"),
        (["--server.mom", "0.9"], "unknown option '--server.mom'; did you mean '--server.momentum'?"),
        (["--quantum"], "unknown option '--quantum'; 'fedmpi train --help-all' lists all options"),
        (["fedavg"], "unknown option 'fedavg'; 'fedmpi train --help-all' lists all options"),
        (["--tau", "much"], "--tau is 'much'; it must be a number or null"),
        (["--tau", "nan"], "--tau is 'nan'; it must be a number or null"),
        (["--tau", "1.5"], "--tau is 1.5; it must be in [0, 1]"),
        (["--local.steps", "0.5"], "--local.steps is '0.5'; it must be a whole number or null"),
        (["--clients", "null"], "--clients is 'None'; it must be a whole number"),
        (["--tau"], "--tau needs a value"),
        (["--tau", "-0.1"], "--tau is -0.1; it must be in [0, 1]"),
        (["--sharpness", "0"], "--sharpness is 0.0; it must be above 0"),
        (["--local.epochs", "0"], "--local.epochs is 0; it must be at least 1"),
        (["--local.momentum", "1"], "--local.momentum is 1.0; it must be in [0, 1)"),
        (["--local.clip", "-1"], "--local.clip is -1.0; it must be at least 0"),
        (["--local.mu", "-1"], "--local.mu is -1.0; it must be at least 0"),
        (["--local.mu", "null"], "--local.mu is 'None'; it must be a number"),
        (["--meta.size", "-1"], "--meta.size is -1; it must be at least 0"),
        (["--meta.size", "half"], "--meta.size is 'half'; it must be a whole number or null"),
        (["--meta.lr", "-1"], "--meta.lr is -1.0; it must be at least 0"),
        (["--meta.seed", "-1"], "--meta.seed is -1; it must be at least 0"),
        (["--meta.batch", "0"], "--meta.batch is 0; it must be in [1, 2147483647]"),
        (["--meta.share", "perhaps"], "--meta.share is 'perhaps'; it must be true or false or null"),
        (["--meta.weights", "[-1, 2]"], "--meta.weights are [-1.0, 2.0]; they must be numbers >= 0, and not all zero"),
        (["--meta.weights", "much"], "--meta.weights is 'much'; it must be a list of numbers or null"),
        (["--memory.limit", "-1"], "--memory.limit is -1.0; it must be at least 0"),
        (["--memory.limit", "much"], "--memory.limit is 'much'; it must be a number"),
        (
            ["--cohort", "11", "--clients", "10"],
            "--cohort is 11 but there are only 10 clients; lower --cohort or raise --clients",
        ),
    ],
)
def test_a_wrong_option_is_a_one_line_error(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(capsys, "train", *arguments) == said


@pytest.mark.parametrize("short", ["--al", "--algor", "--local.mom", "--print", "--conf", "--round"])
def test_abbreviations_are_refused(short: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "train", short, "1").startswith(f"unknown option '{short}'; did you mean '{short}")


@pytest.mark.parametrize(
    ("option", "given", "near"),
    [
        ("algorithm", "fedyogy", "fedyogi"),
        ("mask", "meen", "mean"),
        ("data", "mnits", "mnist"),
        ("split", "class", "classes"),
        ("model", "lenett", "lenet"),
        ("sum", "exakt", "exact"),
        ("comm", "tourch", "torch"),
        ("log_to", "tensorbord", "tensorboard"),
        ("local.rule", "sdg", "sgd"),
        ("server.rule", "adagrat", "adagrad"),
        ("server.variant", "redi", "reddi"),
        ("device", "cup", "cpu"),
        ("local.rule", "scafold", "scaffold"),
        ("local.schedule", "cosin", "cosine[:last]"),
        ("server.schedule", "stepp:3,0.1", "step:rounds,factor"),
        ("local.schedule", "warmup:3+cosin", "cosine[:last]"),
        ("local.work", "unifrom:0.1,1", "uniform:low,high"),
    ],
)
def test_an_unknown_name_gets_the_closest_match_and_leaves_nothing(
    option: str, given: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, "train", *QUICK, "--out", "run", f"--{option}", given)
    shown = given.rpartition("+")[2]  # a warm-up is separated from what follows it
    assert re.match(rf"unknown [\w .()-]+ '{re.escape(shown)}'; did you mean '{re.escape(near)}'\? known: ", said)
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--local.schedule step:3", "--local.schedule is 'step:3'; write it as step:rounds,factor, with numbers"),
        ("--server.schedule cosine:2", "--server.schedule is 'cosine:2'; its factor must lie in [0, 1]"),
        (
            "--local.schedule warmup:0.5",
            "--local.schedule is 'warmup:0.5'; a warm-up takes a whole number of rounds, ...",
        ),
        ("--local.work uniform:0,1", "--local.work is 'uniform:0,1'; it needs 0 < low <= high <= 1, and a part in ..."),
        ("--local.work stragglers:0.5", "--local.work is 'stragglers:0.5'; write it as stragglers:part,low,high, ..."),
        ("--algorithm scaffold --local.option III", "unknown --local.option 'III'; ...known: I, II"),
        ("--algorithm fedgma2021 --local.gradient first", "unknown --local.gradient 'first'; ...known: initial, last"),
        ("--algorithm fedmeta", "--meta.size is 600 but there are only 200 samples; leave some for the clients"),
        ("--algorithm fedmeta --meta.size 0", "--meta.lr is ... but --meta.size is 0; give the number of samples ..."),
        ("--algorithm fedshare --meta.size 0", "--meta.share is true but --meta.size is 0; give the number ..."),
        ("--meta.weights [1,1,1]", "--meta.weights are given but --meta.size is 0; give the number of samples ..."),
        ("--mask sand --tau 1", "--tau is 1, with which the mask sand keeps nothing; it must be below 1"),
        ("--local.option III", "unknown --local.option 'III'; ...known: I, II"),
        ("--local.gradient first", "unknown --local.gradient 'first'; ...known: initial, last"),
        ("--memory.folder nowhere", "--memory.folder nowhere cannot be written (No such file or directory); ..."),
        ("--local.mu 1e300", "--local.mu is 1e+300; it must be at most 3e+38"),
        ("--mask=", "unknown mask ''; known: and, gma, mean, sand, or your own as package.module:name"),
        ("--mask GMAA", "unknown mask 'GMAA'; did you mean 'gma'? known: ..."),
        ("--out=", "--out is ''; name a folder, or leave it out"),
        (
            "--algorithm fedmeta --meta.size 20 --meta.weights [1,1]",
            "--meta.weights are 2 numbers, but the data have 3 classes: give one each",
        ),
        (
            "--algorithm fedmeta --meta.size 70 --meta.weights [1,0,0]",
            "--meta.weights ask for 70 samples of class 0, which has 67; lower its weight or --meta.size",
        ),
        (
            "--algorithm scaffold --memory.folder nowhere",
            "--memory.folder nowhere cannot be written (No such file or directory); make it, or name another",
        ),
    ],
)
def test_a_bad_knob_is_refused_before_anything_is_written(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = refused(capsys, "train", *QUICK, "--out", "run", *words.split())
    assert re.fullmatch(".*".join(map(re.escape, said.split("..."))), shown), shown
    assert not Path("run").exists()


def test_a_part_can_be_given_whole() -> None:
    assert parse(["--local", "{lr: 0.1, epochs: 2}"]).local == Local(lr=0.1, epochs=2)


# A whole run, and how it ends


def test_train_says_what_it_does_and_where_it_left_it(capsys: pytest.CaptureFixture[str]) -> None:
    asked = "--algorithm fedyogi --mask gma --tau 0.3 --seed 5 --local.lr 0.001 --server.lr 0.05".split()
    assert main(["train", *QUICK, *asked]) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert said.err == ""
    assert lines[0] == "fedyogi with mask gma (tau 0.3): client sgd lr 0.001, server yogi lr 0.05, variant reddi"
    assert lines[1] == "logistic, 435 parameters; step: contiguous, float32, gradient by hand"
    assert lines[2] == "tiny split iid over 8 clients, 4 per round; 1 rank (solo), 1 thread each, sum exact"
    assert [line.split()[:2] for line in lines[3:5]] == [["round", "1/2"], ["round", "2/2"]]
    assert lines[5:] == ["done: runs/fedyogi-gma-tiny-5"]
    assert len(metrics(Path("runs/fedyogi-gma-tiny-5"))) == 2


def test_quiet_and_verbose_change_what_is_printed_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *QUICK, "--quiet", "--out", "a", "--mask", "mean", "--max_minutes", "1e-9"]) == 75
    assert capsys.readouterr().out == ""
    assert main(["train", *QUICK, "--out", "a", "--mask", "mean", "--verbose"]) == 0  # other settings would be refused
    resumed, done = capsys.readouterr().out.splitlines()[-3:-1], metrics(Path("a"))
    assert resumed[0].startswith("round 2/2  acc ") and "kept" not in resumed[0], "a mean keeps all of it"
    assert re.fullmatch(r"    local \S+s  server \S+s(  eval \S+s)?", resumed[1])
    assert {"kept", "seconds", "bytes_sent"} <= set(done[-1]) and "wait" in done[-1]["seconds"]
    assert refused(capsys, "train", "--quiet", "--verbose") == "--quiet and --verbose are both given; choose one"


def test_a_finished_run_is_not_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *QUICK, "--out", "run"]) == 0
    capsys.readouterr()
    assert refused(capsys, "train", *QUICK, "--out", "run") == (
        "--out run already holds a finished run; choose another folder or remove it, or resume it with more "
        "--rounds and --resume force"
    )


@pytest.fixture
def ends(patch: pytest.MonkeyPatch) -> None:
    """A rank that aborts ends this test's call, not the process."""

    def abort(self: SoloComm, code: int = 1) -> None:
        raise SystemExit(code)

    patch.setattr(SoloComm, "abort", abort)


def ended(arguments: list[str]) -> int | str | None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    return left.value.code


def test_a_round_without_usable_clients_is_a_one_line_fault(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", *QUICK, "--out", "run", "--local.lr", "1e38"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert all(line.startswith("WARNING: round 1: client ") for line in said[:-1]) and len(said) == 5
    assert said[-1].startswith("fedmpi: round 1: 0 of 4 clients delivered a usable update, but min_clients is 1")
    assert not Path("run/finished.json").exists()


def test_an_interrupt_leaves_by_130(ends: None, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    patch.setattr(run, "run", interrupted)
    assert ended(["train", *QUICK]) == 130
    assert capsys.readouterr().err == "fedmpi: interrupted\n"


def test_a_fault_of_the_program_shows_its_traceback(
    ends: None, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("made for this test")

    patch.setattr(run, "run", broken)
    assert ended(["train", *QUICK]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err and "ZeroDivisionError: made for this test" in err


def test_a_mistake_is_said_by_rank_0_at_once_and_by_others_when_nobody_has_ended_them(
    patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    patch.setattr("time.sleep", lambda seconds: said.append(capsys.readouterr().err))
    for rank, message, before in ((0, "--tau is 2.0", []), (1, "rank 1: --tau is 2.0", [""])):
        place = fedmpi.comm.env.Place("torchrun", rank, 2, rank, 2)
        patch.setattr("fedmpi.runs.rank.find_place", lambda environ, place=place: place)
        assert main(["train", "--tau", "2"]) == 2
        assert said == before, "others wait before they speak"
        assert capsys.readouterr().err == f"fedmpi: {message}; it must be in [0, 1]\n"


def test_compare_needs_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "compare") == "compare needs a run folder: fedmpi compare RUN [RUN ...]"


def test_compare_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *QUICK, "--out", "run", "--algorithm", "fedavg", "--mask", "and", "--tau", "0.7"]) == 0
    capsys.readouterr()
    assert main(["compare", "run"]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 3 and out.splitlines()[2].split()[:5] == ["run", "fedavg", "+", "and", "0.7"]


def test_later_files_override_earlier_ones_and_options_override_files_anywhere() -> None:
    Path("a.yaml").write_text("seed: 1\ntau: 0.1\nclients: 20\n")
    Path("b.yaml").write_text("seed: 2\n")
    cfg = options.parse(["--tau", "0.3", "--config", "a.yaml", "--config=b.yaml", "--rounds", "2"])
    assert (cfg.seed, cfg.tau, cfg.clients, cfg.rounds) == (2, 0.3, 20, 2)


def test_a_recipe_that_is_wrong_is_refused_too(recipe: Path) -> None:
    recipe.write_text("algoritm: fedavg\n")
    with pytest.raises(UserError, match="unknown option 'algoritm' in --config .*small-yogi.yaml; did you mean"):
        parse(["--config", "small-yogi"])


def test_a_folder_of_the_name_of_a_transport_asks_for_no_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun `--out mpi` is a folder; only `--comm mpi` lets ranks agree over MPI before they are connected."""
    asked: list[bool] = []

    def look(place: Place, over_mpi: bool, find: object) -> None:
        asked.append(over_mpi)
        raise AgreedError("as a test")

    monkeypatch.setattr("fedmpi.runs.rank.find_place", lambda environ: Place("torchrun", 0, 2, 0, 2))
    monkeypatch.setattr("fedmpi.comm.agree_early", look)
    for words in (["--out", "mpi"], ["--comm", "torch", "--out=mpi"], ["--comm", "mpi"], ["--comm=mpi"]):
        assert main(["train", *words]) == 2
    assert asked == [False, False, True, True]
