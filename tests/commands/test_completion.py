"""Shell completion, in a real bash."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from fedmpi import commands
from fedmpi.algorithms import ALGORITHMS
from fedmpi.commands import completion
from fedmpi.data import DATASETS, SPLITS
from fedmpi.masks import MASKS
from fedmpi.models import MODELS
from fedmpi.runs.help import train_options

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "fedmpi"
    path.write_text(completion.script())
    return path


def completed(script: Path, *words: str) -> set[str]:
    """What bash offers for the last word, with no Python to be found."""
    code = 'source "$0"; COMP_WORDS=(fedmpi "$@"); COMP_CWORD=$#; _fedmpi; printf "%s\\n" "${COMPREPLY[@]}"'
    command = [str(shutil.which("bash")), "--norc", "-c", code, str(script), *words]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": ""}, check=True)
    assert done.stderr == ""
    return set(done.stdout.split())


def test_commands_and_options_are_completed(script: Path) -> None:
    assert completed(script, "") == {*commands.COMMANDS, "help"}
    assert completed(script, "st") == {"status"}
    assert completed(script, "train", "--") >= {f"--{name}" for name in train_options()}
    assert completed(script, "train", "--rounds", "3", "--server.l") == {"--server.lr"}
    assert completed(script, "logs", "--") == {"--follow", "--lines", "--help"}
    assert {"--ranks_per_node", "--algorithm"} <= completed(script, "plan", "--")
    assert "--partition" in completed(script, "submit", "--") and "--partition" in completed(script, "sweep", "--")
    assert completed(script, "submit", "--nodes", "2", "--", "train", "--coh") == {"--cohort"}
    assert completed(script, "data", "show", "mnist", "--skew.a") == {"--skew.alpha"}


@pytest.mark.parametrize(
    ("option", "table"),
    [("algorithm", ALGORITHMS), ("mask", MASKS), ("data", DATASETS), ("model", MODELS), ("split", SPLITS)],
)
def test_names_are_completed(option: str, table: dict[str, object], script: Path) -> None:
    assert completed(script, "train", f"--{option}", "") == set(table)
    assert completed(script, "train", f"--{option}", "=", "") == set(table), "--option=NAME is three words to bash"
    assert completed(script, "train", f"--{option}", "=") == set(table)


def test_names_of_other_commands_and_files(script: Path) -> None:
    assert completed(script, "data", "") == {"list", "prepare", "show"}
    assert completed(script, "data", "prepare", "fm") == {"fmnist"}
    assert completed(script, "help", "doc") == {"doctor"}
    assert "glyphs-noniid-100" in completed(script, "train", "--config", "gl")
    assert completed(script, "train", "--out", "") == set() and completed(script, "status", "") == set(), "files"


def test_a_shell_that_is_not_known_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["completion", "fish"]) == 2
    assert "unknown shell 'fish'; known: bash, zsh" in capsys.readouterr().err
    assert commands.main(["completion"]) == 2
