"""`fedmpi recipes`: the bundled experiments, one line each, by the paper that they reproduce; or the file of one.

A recipe is a YAML file in experiments/recipes: a sweep, or the configuration of a single run. Its name begins with the
key of its paper in `PAPERS`.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from ...errors import unknown
from ...runs.options import flag, is_sweep, positional, read_options, read_yaml, recipes
from ...runs.text import align
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
class Recipe:
    """A bundled experiment."""

    name: str
    kind: str
    """sweep or run"""
    runs: int
    about: str
    paper: str
    """empty if it belongs to none"""


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
        found = [describe(name, path) for name, path in ordered(recipes())]
        print(
            json.dumps([asdict(recipe) for recipe in found], indent=2) if options.json else listing(found), flush=True
        )
        return 0
    if options.name not in recipes():
        raise unknown("recipe", options.name, recipes())
    path = recipes()[options.name]
    if options.json:
        whole = asdict(describe(options.name, path)) | {"file": read_yaml(path, str(path))}
        print(json.dumps(whole, indent=2), flush=True)
    else:
        print(path.read_text(encoding="utf-8"), end="", flush=True)
    return 0


def describe(name: str, path: Path) -> Recipe:
    """Return the description of a recipe; that of a single run is the comment in the first line of its file."""
    paper = PAPERS.get(name.partition("-")[0], "")
    if not is_sweep(read_yaml(path, str(path))):
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        return Recipe(name, "run", 1, first.lstrip("# "), paper)
    sweep = read_sweep(str(path))
    return Recipe(name, "sweep", len(points(sweep)), sweep.about, paper)


def ordered(found: dict[str, Path]) -> list[tuple[str, Path]]:
    """Return the recipes sorted by name, with numbers in numerical order: table 10 comes after table 9."""

    def key(item: tuple[str, Path]) -> list[str | int]:
        return [
            int(part) if part.isdigit() else part for part in re.split(r"(\d+)", item[0])
        ]  # words and numbers alternate

    return sorted(found.items(), key=key)


def listing(found: list[Recipe]) -> str:
    """Return the recipes as aligned lines under the names of their papers, single runs of no paper last."""
    lines = dict(zip(found, align([(r.name, count(r), r.about) for r in found], "lrl"), strict=True))
    blocks = []
    for paper in (*PAPERS.values(), ""):
        own = [f"  {line}" for recipe, line in lines.items() if recipe.paper == paper]
        blocks += ["\n".join([paper or SINGLE, *own])] if own else []
    return "\n\n".join([*blocks, HINT])


def count(recipe: Recipe) -> str:
    """Return its number of runs with a unit."""
    return "1 run " if recipe.runs == 1 else f"{recipe.runs} runs"
