"""`fedmpi recipes`: the bundled experiments, one line each, by the paper that they reproduce; or the file of one.

A recipe is a YAML file in experiments/recipes: a sweep, or the configuration of a single run. Its name begins with the
key of its paper in `PAPERS`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import unknown
from ...runs.options import flag, is_sweep, positional, read_options, read_yaml, recipes
from ...runs.text import align
from ..runs import natural
from .grid import points
from .sweepfile import read_sweep

ABOUT = "List the bundled experiments, one line each, or print the file of one."
HINT = (
    "'fedmpi recipes NAME' prints a file, 'fedmpi sweep NAME' runs it;\n"
    "--dry_run lists the runs, and --only, --seeds and --set make the sweep smaller"
)
PAPERS = {
    "tmlr": "Tenison et al., Gradient Masked Averaging for Federated Learning, TMLR 2023",
    "thesis": "Tenison, Generalization in Federated Learning, thesis, Montreal 2022",
    "neurips2021": "Tenison et al., Gradient Masked Averaging for Federated Learning, NeurIPS 2021 workshop, appendix",
    "iclr2021": "Tenison et al., Gradient Masked Federated Optimization, ICLR 2021 workshop",
    "uga": "Yao et al., Federated Learning with Unbiased Gradient Aggregation and Controllable Meta Updating, 2019",
}
SINGLE = "single runs: 'fedmpi train --config NAME'"


@dataclass(frozen=True)
class RecipesOptions:
    """The arguments of `fedmpi recipes`."""

    name: str = positional("NAME")
    """Recipe to print. Default: list all, one line each."""
    json: bool = flag()
    """Print a list of objects, or one object with the file, as JSON."""


def main(arguments: list[str]) -> int:
    """List the recipes or print one; return the exit code."""
    options = read_options(RecipesOptions, arguments, "recipes", ABOUT, usage="[NAME] [--json]")
    if not options.name:
        found = [describe(path) for path in sorted(recipes().values(), key=lambda path: natural(path.with_suffix("")))]
        print(json.dumps(found, indent=2) if options.json else listing(found), flush=True)
        return 0
    if options.name not in recipes():
        raise unknown("recipe", options.name, recipes())
    path = recipes()[options.name]
    if options.json:
        print(json.dumps(describe(path) | {"file": read_yaml(path, str(path))}, indent=2), flush=True)
    else:
        print(path.read_text(encoding="utf-8"), end="", flush=True)
    return 0


def describe(path: Path) -> dict[str, Any]:
    """Return what a recipe is, as --json prints it; a single run is described by the first line of its file."""
    kind, runs = "run", 1
    about = path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
    if is_sweep(read_yaml(path, str(path))):
        sweep = read_sweep(str(path))
        kind, runs, about = "sweep", len(points(sweep)), sweep.about
    paper = PAPERS.get(path.stem.partition("-")[0], "")
    return {"name": path.stem, "kind": kind, "runs": runs, "about": about, "paper": paper}


def listing(found: list[dict[str, Any]]) -> str:
    """Return the recipes as aligned lines under the names of their papers, single runs of no paper last."""
    counts = ["1 run " if one["runs"] == 1 else f"{one['runs']} runs" for one in found]
    lines = align([(one["name"], count, one["about"]) for one, count in zip(found, counts, strict=True)], "lrl")
    blocks = []
    for paper in (*PAPERS.values(), ""):
        own = [f"  {line}" for one, line in zip(found, lines, strict=True) if one["paper"] == paper]
        blocks += ["\n".join([paper or SINGLE, *own])] if own else []
    return "\n\n".join([*blocks, HINT])
