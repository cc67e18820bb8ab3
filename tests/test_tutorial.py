"""Run docs/tutorial.md: write its files and run its commands, top to bottom, in an empty folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO, rank_environment

PAGE = (REPO / "docs" / "tutorial.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def script(folder: Path) -> str:
    """Return the page as a shell script that also writes its files."""
    lines = ["set -euo pipefail"]
    for number, (kind, text) in enumerate(BLOCKS):
        if kind == "bash":
            lines.append(text)
            continue
        name = re.match(r"# file: (\S+)\n", text)
        assert name is not None, f"block {number} is {kind} and names no file"
        kept = folder / f"block-{number}"
        kept.write_text(text)
        lines.append(f"cp '{kept}' {name[1]}")
    return "\n".join(lines)


def test_every_block_is_run_or_written() -> None:
    kinds = [kind for kind, _ in BLOCKS]
    assert set(kinds) == {"bash", "python", "yaml"}
    assert PAGE.count("```") == 2 * len(BLOCKS)  # none is left out by the way that blocks are found


@pytest.mark.launchers
@pytest.mark.timeout(600)
def test_the_page_runs_from_top_to_bottom(tmp_path: Path) -> None:
    blocks, work = tmp_path / "blocks", tmp_path / "work"
    blocks.mkdir()
    work.mkdir()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script(blocks)],
        cwd=work,
        env=rank_environment() | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    assert "the same bits" in done.stdout
    assert "12 runs: 12 finished" in done.stdout
    for page in ("report", "own-report"):
        assert (work / page / "index.html").stat().st_size > 10_000
    chosen = json.loads((work / "runs" / "search" / "chosen.json").read_text())
    assert chosen["cells"][0]["best"] is not None
    assert len(list((work / "runs" / "own").glob("*/finished.json"))) == 6
    assert (work / "runs" / "first" / "attack.json").exists()
