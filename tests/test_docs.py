"""The documents match the code: their commands parse, their links resolve, their scripts run."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO, rank_environment
from shell import ALONE

from fedmpi import api
from fedmpi.algorithms import ALGORITHMS
from fedmpi.masks import MASKS
from fedmpi.plugins.knobs import knobs
from fedmpi.runs.build import prepare
from fedmpi.runs.config import Config, Launch
from fedmpi.runs.options import parse, single_runs, split_launch

OWN = (REPO / "docs" / "own-data.md").read_text(encoding="utf-8")
PAGES = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md")), REPO / "CONTRIBUTING.md", REPO / "CHANGELOG.md"]


def commands() -> list[str]:
    """Return the options of every `fedmpi train` in the code blocks of the documents and in the README's tables."""
    readme = (REPO / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"`[^`\n]*fedmpi train (--[^`\n]*)`", readme)
    for page in PAGES:
        fenced = page.read_text(encoding="utf-8").split("```")[1::2]
        lines = [line for block in fenced for line in block.replace("\\\n", " ").splitlines()]
        found += [line.partition("fedmpi train ")[2] for line in lines if "fedmpi train " in line]
    return found


@pytest.mark.parametrize("command", commands())
def test_every_command_in_the_documents_is_accepted(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = shlex.split(command.partition(" > ")[0], comments=True)
    monkeypatch.chdir(tmp_path)
    if "my_data:" in command:
        blocks = [block.removeprefix("python\n") for block in OWN.split("```") if block.startswith("python\n")]
        (tmp_path / "my_data.py").write_text("\n\n".join(blocks[:-2]))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "my_data", raising=False)
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "my.yaml").write_text("mask: gma\ntau: 0.3\n")
    for run in ("b", "first"):
        (tmp_path / "runs" / run).mkdir(parents=True)
        (tmp_path / "runs" / run / "config.yaml").write_text("mask: gma\ntau: 0.3\n")
    _, options = split_launch([word for word in words if word not in ("...", "--print_config")])
    prepare(parse(options))


def test_there_are_commands_in_the_documents() -> None:
    assert len(commands()) > 10


def test_the_python_example_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = (REPO / "README.md").read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(api, "find_place", lambda environ: ALONE)
    space: dict[str, Any] = {}
    exec(block, space)
    assert len(space["result"].reports) == 20 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, anchor = target.partition("#")
        if name.startswith("http"):
            continue
        file = page.parent / name if name else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}, target


def test_the_readme_lists_every_algorithm_and_mask() -> None:
    rows = re.findall(r"^\| `(\w[\w-]*)`", (REPO / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(rows) == set(ALGORITHMS) | set(MASKS)


def test_every_file_that_the_documents_name_exists() -> None:
    form = r"`((?:launch|slurm|fedmpi|benchmarks|tests|docs|examples)/[\w./-]*\.(?:py|sh|sbatch|md|yaml))"
    named = {(page.name, file) for page in PAGES for file in re.findall(form, page.read_text(encoding="utf-8"))}
    assert len(named) > 20
    assert not {(page, file) for page, file in named if not (REPO / file).exists()}


def test_the_guide_names_every_option() -> None:
    named = set(re.findall(r"--[\w.]+", (REPO / "docs" / "guide.md").read_text(encoding="utf-8")))
    options = {name: value for part in (Config(), Launch()) for name, value in knobs(part).items()}
    listed = [name for name, value in options.items() if not is_dataclass(value) and not name.startswith("skew.")]
    assert not [name for name in listed if f"--{name}" not in named]  # data.md has --skew.*


@pytest.mark.parametrize("name", single_runs())
def test_every_recipe_is_a_sound_configuration(name: str) -> None:
    prepare(parse(["--config", name]))


@pytest.mark.launchers
@pytest.mark.parametrize("send", [[], ["--send"]])
def test_the_benchmark_of_the_collective_prints_its_ratios(send: list[str]) -> None:
    tiny = ["--ranks", "2", "--transport", "gloo", "--parameters", "5000", "--turns", "2", "--json", *send]
    done = subprocess.run(
        [sys.executable, str(REPO / "benchmarks" / "collective.py"), *tiny],
        env=rank_environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(r["transport"], r["ranks"], r["sum"]) for r in rows} == {("gloo", 2, "float32"), ("gloo", 2, "exact")}
    assert all(r["ratio"] > 0 and r["shared_memory"] == (not send) for r in rows)


@pytest.mark.launchers
def test_every_benchmark_explains_itself_and_is_in_the_documents() -> None:
    parts = ("kit.py", "timeline.py")  # of other scripts
    scripts = [path for path in sorted((REPO / "benchmarks").glob("*.py")) if path.name not in parts]
    listed = (REPO / "docs" / "speed.md").read_text(encoding="utf-8")
    started = {
        script.name: subprocess.Popen(
            [sys.executable, str(script), "--help"], env=rank_environment(), stdout=subprocess.PIPE, text=True
        )
        for script in scripts
    }
    for name, process in started.items():
        out, _ = process.communicate(timeout=200)
        assert process.returncode == 0 and f"benchmarks/{name}" in out, name
        assert name in listed, name
    done = subprocess.run(
        [sys.executable, str(REPO / "benchmarks" / "step.py"), "--models", "logistic", "--seconds", "0.1", "--json"],
        env=rank_environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    rows = {row["path"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert rows["plain"]["ratio"] == 1.0 and rows["contiguous"]["ratio"] > 0
