"""The examples do what their docstrings say, when started by the commands given there."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import BIN, REPO, rank_environment
from shell import ALONE, sandbox

from fedmpi import api
from fedmpi.commands import main
from fedmpi.errors import UserError
from fedmpi.plugins import hub

pytestmark = pytest.mark.timeout(300)

EXAMPLES = REPO / "examples"
TRAINING = ("own_arrays", "own_dataset", "own_model")


def commands(example: str) -> list[str]:
    """Return the commands in an example's docstring, one per line."""
    text = (EXAMPLES / f"{example}.py").read_text(encoding="utf-8").split('"""')[1].replace("\\\n", " ")
    return [line.strip() for line in text.splitlines() if re.match(r" {4}(fedmpi|python|torchrun|mpiexec) ", line)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a writable folder that looks like the root of the checkout, with fedmpi on another path."""
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "examples").symlink_to(EXAMPLES)
    (folder / "installed").mkdir()
    (folder / "installed" / "fedmpi").symlink_to(REPO / "fedmpi")
    return folder


def start(command: list[str], root: Path) -> str:
    """Run a command in the root of the checkout and return what it prints."""
    ours = {"PYTHONPATH": str(root / "installed"), "FEDMPI_CACHE": str(root / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=root, env=rank_environment() | ours, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout


def trained(command: str, root: Path) -> dict[str, Any]:
    """Return the finished.json of a `fedmpi train`, which runs on the first call only."""
    words = shlex.split(command)
    out = root / words[words.index("--out") + 1]
    if not out.exists():
        said = start([str(BIN / "fedmpi"), *words[1:], "--threads", "1"], root)
        assert f"done: {out.relative_to(root)}" in said
    finished: dict[str, Any] = json.loads((out / "finished.json").read_text())
    return finished


def test_all_examples_are_tested_here() -> None:
    here = {path.name for path in EXAMPLES.iterdir() if path.name != "__pycache__"}
    others = ("python_call", "lora_gpt2", "hf_classifier")
    assert here == {f"{name}.py" for name in (*TRAINING, *others)} | {"notebook.ipynb"}


@pytest.mark.processes
@pytest.mark.parametrize("example", TRAINING)
def test_an_example_trains_by_its_commands(example: str, root: Path) -> None:
    assert commands(example)
    for command in commands(example):
        finished = trained(command, root)
        if "test_error" in finished:  # degrees; to guess the mean is off by more than five
            assert finished["test_error"] < 2.5, command
        else:  # a third would be chance
            assert finished["best_test_accuracy"] > 0.6, command


@pytest.mark.processes
def test_workers_do_not_change_a_bit(root: Path) -> None:
    plain, with_workers = commands("own_dataset")
    assert "--workers 2" in with_workers and "--workers" not in plain
    assert trained(plain, root)["model_sha256"] == trained(with_workers, root)["model_sha256"]


def lines(said: str) -> list[str]:
    """Return the lines that examples/python_call.py prints, after checking their form."""
    found = said.splitlines()
    assert len(found) == 2 and all(re.fullmatch(r"[a-z ]+: accuracy 0\.\d{3}, sha256 [0-9a-f]{64}", f) for f in found)
    return found


@pytest.mark.launchers
def test_the_python_call_gives_the_same_alone_and_under_launchers(root: Path, mpiexec: list[str]) -> None:
    alone, torchrun, mpi = (shlex.split(command) for command in commands("python_call"))
    assert alone[0] == "python" and torchrun[0] == "torchrun" and mpi[0] == "mpiexec"
    said = lines(start([sys.executable, *alone[1:]], root))
    assert all(float(re.findall(r"0\.\d{3}", line)[0]) > 0.6 for line in said) and len(set(said)) == 2
    assert lines(start([str(BIN / "torchrun"), *torchrun[1:]], root)) == said
    mpi[mpi.index("python")] = sys.executable
    assert lines(start([*mpiexec, *mpi[1:]], root)) == said


@pytest.mark.launchers
def test_an_adapter_is_the_same_alone_and_under_launchers(root: Path, mpiexec: list[str]) -> None:
    alone, torchrun, mpi = (shlex.split(command) for command in commands("lora_gpt2"))
    assert alone[0] == "python" and torchrun[0] == "torchrun" and mpi[0] == "mpiexec"
    mpi[mpi.index("python")] = sys.executable
    launchers = ([sys.executable, *alone[1:]], [str(BIN / "torchrun"), *torchrun[1:]], [*mpiexec, *mpi[1:]])
    said = [start(command, root).splitlines() for command in launchers]
    form = r"perplexity (\d+\.\d\d) before, (\d+\.\d\d) after; adapter [0-9a-f]{64}"
    match = re.fullmatch(form, said[0][0])
    assert match and float(match[2]) < 0.6 * float(match[1])
    assert said[0][:2] == said[1][:2] == said[2][:2] and len(said[0]) == 3
    up, whole = map(int, re.findall(r"\d+", said[0][1]))
    assert up < whole / 6 and [int(lines[2].split()[-1]) > 0 for lines in said] == [False, True, True]


@pytest.mark.processes
def test_a_classifier_of_texts_learns(root: Path) -> None:
    alone, torchrun = (shlex.split(command) for command in commands("hf_classifier"))
    assert torchrun[-1] == alone[-1] == "examples/hf_classifier.py"
    match = re.fullmatch(r"accuracy (\d\.\d{3}), sha256 [0-9a-f]{64}\n", start([sys.executable, *alone[1:]], root))
    assert match and float(match[1]) > 0.9


TRANSFORMERS = (REPO / "docs" / "transformers.md").read_text(encoding="utf-8")
SHELL = [block for block in TRANSFORMERS.split("```")[1::2] if block.startswith("\n")]
OF_TEXTS = [line for block in SHELL for line in block.replace("\\\n", " ").splitlines() if line[:12] == "fedmpi train"]


def test_the_commands_of_the_page_on_transformers_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import datasets

    monkeypatch.syspath_prepend(str(REPO))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "prepared")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "plays").mkdir(parents=True)
    threads = torch.get_num_threads()
    importlib.import_module("examples.lora_gpt2").write(tmp_path / "runs" / "plays")
    torch.set_num_threads(threads)
    assert len(OF_TEXTS) == 3
    with sandbox():
        for command in OF_TEXTS:
            assert main([*shlex.split(command)[1:], "--log_to", "none", "--rounds", "2"]) == 0, capsys.readouterr().err
            out = tmp_path / shlex.split(command)[-1]
            rounds = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
            assert rounds[-1]["test_loss"] < rounds[0]["test_loss"] and (out / "adapter_config.json").exists()
        for message in re.findall(r"\| `((?:unknown|--lora|--skew)[^`]*)` \|", TRANSFORMERS):
            wrong = {"unknown": "--lora rank=8", "--lora:": "--lora targets=q_proj", "--skew.owner": "--skew.owner who"}
            given = shlex.split(OF_TEXTS[0])[1:] + wrong[message.split()[0]].split()
            capsys.readouterr()
            assert main([*given, "--out", "runs/wrong"]) == 2 and message in capsys.readouterr().err
    block = next(part for part in TRANSFORMERS.split("```") if part.startswith("python\n"))
    space: dict[str, Any] = {}
    with hub.offline():
        exec(block.removeprefix("python\n"), space)
    model, ids = space["model"], torch.arange(1, 20)[None]
    with model.disable_adapter():
        plain = model(ids).logits
    assert not torch.equal(model(ids).logits, plain) and space["merged"](ids).logits.shape == plain.shape


# The folder of pictures


@pytest.fixture
def own_dataset(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(REPO))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return importlib.import_module("examples.own_dataset")


def test_pictures_are_drawn_once_and_under_the_folder_that_is_given(own_dataset: ModuleType, tmp_path: Path) -> None:
    data = own_dataset.make(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["example-shapes"]
    assert (len(data.train), len(data.test)) == (300, 90)
    item, kind = data.train[5]
    assert item.shape == (1, 16, 16) and kind == data.train.targets[5] == 2
    file = tmp_path / "example-shapes" / "train" / "000-0.npy"
    file.unlink()
    assert len(own_dataset.make(tmp_path).train) == 299, "what is there is used as it is"


def test_pictures_go_to_the_cache_without_a_folder(
    own_dataset: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDMPI_CACHE", str(tmp_path / "cache"))
    own_dataset.make(None)
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["example-shapes"]


def test_a_process_that_comes_second_leaves_what_is_there(own_dataset: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "shapes"
    own_dataset.draw(folder)
    (folder / "train" / "000-0.npy").write_bytes(b"of the first")
    own_dataset.draw(folder)
    assert (folder / "train" / "000-0.npy").read_bytes() == b"of the first"
    assert list(tmp_path.iterdir()) == [folder]


def test_a_rename_that_fails_for_another_reason_raises(
    own_dataset: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(old: Path, new: Path) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(PermissionError, match="not here"):
        own_dataset.draw(tmp_path / "shapes")
    assert not list(tmp_path.iterdir())


# The notebook


def test_the_notebook_is_one_without_outputs() -> None:
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5) and isinstance(notebook["metadata"], dict)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"[\w-]{1,64}", name) for name in ids)
    for cell in notebook["cells"]:
        assert cell["cell_type"] in ("markdown", "code") and all(isinstance(line, str) for line in cell["source"])
        wanted = {"id", "cell_type", "metadata", "source"}
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
            wanted |= {"outputs", "execution_count"}
        assert set(cell) == wanted


def test_the_notebook_runs_from_the_first_cell_to_the_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import matplotlib

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(api, "find_place", lambda environ: ALONE)
    with matplotlib.rc_context({"backend": "Agg"}):
        import matplotlib.pyplot as plt

        monkeypatch.setattr(plt, "show", lambda: None)
        space: dict[str, Any] = {}
        for cell in json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "code":
                exec("".join(cell["source"]), space)
        plt.close("all")
    fedavg, yogi, gma = ([report["test_accuracy"] for report in r.reports] for r in space["results"].values())
    assert len(fedavg) == len(yogi) == len(gma) == 20
    assert yogi[0] < 0.5 < fedavg[0] < gma[0], "with the mask it learns from the first round on"
    assert fedavg[-1] < yogi[-1] < gma[-1] < max(yogi), "the adaptive rule has the best round, and falls again"
    assert list(space["history"]["test_accuracy"]) == gma and "<svg" in space["fedavg"]._repr_html_()
    assert [len(line.get_xdata()) for line in space["axes"].get_lines()] == [20, 20, 20]
    ratios = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert len(ratios) == 3 and min(ratios) == ratios[2], "with the mask the marks count least"
    assert not list(tmp_path.iterdir())


# The page

PAGE = (REPO / "docs" / "own-data.md").read_text(encoding="utf-8")
FENCED = PAGE.split("```")[1::2]
BLOCKS = [block.removeprefix("python\n") for block in FENCED if block.startswith("python\n")]
LINES = [line for block in FENCED if block.startswith("\n") for line in block.replace("\\\n", " ").splitlines()]
OURS = [line for line in LINES if line.startswith("fedmpi train --data my_data:")]


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Path]:
    """Return a working folder that holds the page's file."""
    (tmp_path / "my_data.py").write_text("\n\n".join(BLOCKS[:-2]))
    with sandbox() as patch:
        patch.chdir(tmp_path)
        patch.setattr(api, "find_place", lambda environ: ALONE)
        patch.syspath_prepend(tmp_path)
        patch.setattr(sys, "dont_write_bytecode", True)
        yield tmp_path


def words(command: str) -> list[str]:
    return shlex.split(command)


def test_the_page_has_the_blocks_and_commands_it_mentions() -> None:
    assert BLOCKS[0].startswith("# my_data.py") and BLOCKS[-2].startswith("# my_run.py") and len(OURS) == 7
    others = [words(line) for line in LINES if line.startswith(("fedmpi", "python", "torchrun", "mpiexec"))]
    of_examples = [words(c) for name in (*TRAINING, "python_call") for c in commands(name)]
    assert all(line in of_examples or line in map(words, OURS) for line in others)


@pytest.mark.parametrize("command", OURS, ids=lambda command: words(command)[3])
def test_the_commands_of_the_page_train(command: str, page: Path) -> None:
    assert main([*words(command)[1:], "--threads", "1", "--log_to", "none"]) == 0
    finished = json.loads((page / words(command)[-1] / "finished.json").read_text())
    assert set(finished) & {"test_accuracy", "test_hits"}
    lines = [json.loads(line) for line in (page / words(command)[-1] / "metrics.jsonl").read_text().splitlines()]
    if "--local.private" in command:  # the scored head is the one that the model came with
        return
    assert lines[-1]["test_loss"] < lines[0]["test_loss"]


def test_the_pages_arrays_its_model_and_its_script(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    knobs: dict[str, Any] = {"threads": 1, "quiet": True, "local": {"lr": 0.1, "batch": 10}}
    result = api.train("my_data:net", "my_data:arrays", split="natural", clients=20, cohort=10, rounds=5, **knobs)
    assert result.reports[-1]["test_accuracy"] > 0.8 and result.model[0].weight.shape == (8, 1, 3, 3)
    capsys.readouterr()
    space: dict[str, Any] = {}
    exec(BLOCKS[-2].replace("rounds=5", "rounds=5, threads=1"), space)
    accuracy, rate = capsys.readouterr().out.splitlines()[-1].split()
    exec(BLOCKS[-1].replace("rounds=5", "rounds=5, threads=1"), space)
    assert space["split"].config.clients == 20 and space["split"].config.skew.alpha == 0.5
    assert float(accuracy) > 0.6 and rate == "0.01" and (page / "model.pt").exists()


def test_a_model_that_asks_for_what_nobody_offers_reads_as_the_page_says(page: Path) -> None:
    with (page / "my_data.py").open("a") as file:
        file.write("\n\ndef wrong(channels, depth):\n    return net(channels, depth)\n")
    with pytest.raises(UserError) as caught:
        api.train("my_data:wrong", "my_data:plain", split="iid", clients=3, cohort=1, quiet=True)
    assert f"`{caught.value}`" in PAGE
