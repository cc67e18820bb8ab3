"""Published numbers next to runs that deviate from the recipe: every such comparison is marked."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from reported import a_round

from fedmpi.commands import main
from fedmpi.experiments.report.sections.published import departure, published_table
from fedmpi.experiments.runs import find_runs, group, read_sweep_record
from fedmpi.experiments.sweep.command import check, parse
from fedmpi.experiments.sweep.plan import describe
from fedmpi.experiments.sweep.reference import bundled_reference, read_reference
from fedmpi.experiments.tables import Difference

FILE: dict[str, Any] = {
    "base": {"data": "glyphs", "rounds": 1000, "local": {"steps": 5}},
    "variants": {"algorithm": {"fedavg": {"algorithm": "fedavg"}, "fedprox": {"algorithm": "fedprox"}}},
    "grid": {"mask": ["mean", "gma"]},
    "seeds": 3,
    "published": {
        "source": "a paper",
        "measure": "best",
        "columns": "mask",
        "rows": [{"algorithm": "fedavg", "mean": 90.0, "gma": 91.0}, {"algorithm": "fedprox", "mean": 92.0}],
    },
}


def swept(home: Path, *options: str, file: dict[str, Any] | str = FILE, done: bool = True) -> Path:
    """Make the folder of a sweep as the command makes it, with runs of two rounds by hand."""
    name = file if isinstance(file, str) else str(home.with_suffix(".yaml"))
    if not isinstance(file, str):
        Path(name).write_text(yaml.safe_dump(file, sort_keys=False))
    todo = check(parse([name, "--out", str(home), *options]))
    describe(todo)
    for point in todo.points:
        run = todo.home / point.name
        run.mkdir()
        (run / "config.yaml").write_text(yaml.safe_dump(dataclasses.asdict(todo.configs[point.name])))
        (run / "metrics.jsonl").write_text("".join(json.dumps(a_round(n, 0.2 * n)) + "\n" for n in (1, 2)))
        if done:
            (run / "finished.json").write_text(json.dumps({"rounds": 2}))
    return home


def meanings(home: Path, **wanted: str) -> list[str]:
    """How the groups with these labels differ from the recipe."""
    sweep = read_sweep_record(home)
    reference = read_reference(sweep.get("recipe")) or bundled_reference(sweep)
    groups = [one for one in group(find_runs([home])) if wanted.items() <= one.first.labels.items()]
    return [departure(sweep, reference, one, wanted).removeprefix("differs from the recipe: ") for one in groups]


def test_a_recipe_with_fewer_rounds_is_marked_wherever_it_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home, out = swept(tmp_path / "short", "--set", "rounds=12"), tmp_path / "report"
    said = "differs from the recipe: rounds 12 instead of 1000"
    assert main(["report", str(home), "--out", str(out), "--formats", "svg"]) == 0
    assert f"published: † {said}." in capsys.readouterr().out.splitlines()
    page = (out / "index.html").read_text()
    assert f"† {said}." in page and "-50.00 †" in page and "3 of 3 comparisons are with runs that differ" in page
    markdown, latex = ((out / "tables" / f"published.{kind}").read_text() for kind in ("md", "tex"))
    assert "| fedavg | 90.00 | 40.00 ± 0.00 † | -50.00 † | 91.00 | 40.00 ± 0.00 † | -51.00 † |" in markdown
    assert f"\n† {said}.\n" in markdown and r"$-$50.00 \dag{}" in latex and rf"\dag{{}} {said}." in latex
    with open(out / "tables" / "published.csv") as file:
        first, second = csv.DictReader(file)
    assert first["mean difference note"] == first["gma difference note"] == first["mean measured note"] == said
    assert second["mean difference note"] == said and second["gma difference note"] == ""
    assert "fedavg †" in (out / "figures" / "published.svg").read_text()


def test_runs_as_the_recipe_has_them_bear_no_mark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home, out = swept(tmp_path / "whole", "--set", "log=none", "threads=2", "--seeds", "4", "5", "6"), tmp_path / "out"
    assert main(["report", str(home), "--out", str(out), "--formats", "none"]) == 0
    assert "differs" not in capsys.readouterr().out and "†" not in (out / "tables" / "published.md").read_text()
    assert meanings(home) == [""] * 4


def test_each_kind_of_difference_has_a_mark_of_its_own(tmp_path: Path) -> None:
    home = swept(tmp_path / "mixed", "--only", "algorithm=fedavg", "seed=0,1")
    swept(home, "--only", "algorithm=fedprox", "--set", "local.lr=0.5", "rounds=2", file=FILE)
    sweep = read_sweep_record(home)
    table = published_table(group(find_runs([home])), sweep["published"][0], sweep)
    assert table is not None
    marks = [cell.mark for row in table.rows for cell in row if isinstance(cell, Difference) and cell.mark]
    assert [mark.sign for mark in marks] == ["†", "†", "‡"]
    assert [mark.meaning for mark in marks[1:]] == [
        "differs from the recipe: 2 seeds instead of 3",
        "differs from the recipe: rounds 2 instead of 1000; local.lr 0.5 instead of 0.01",
    ]


def test_a_choice_among_fewer_and_a_run_that_is_not_done_are_marked(tmp_path: Path) -> None:
    rates = {"grid": {"mask": ["mean"], "local.lr": [0.01, 0.1, 1.0]}, "variants": {}}
    search = FILE | rates | {"seeds": 1, "published": FILE["published"] | {"rows": [{"mean": 90.0}]}}
    home = swept(tmp_path / "search", "--only", "local.lr=0.1,1.0", file=search, done=False)
    said = ["local.lr 0.1, 1.0 instead of 0.01, 0.1, 1.0; not done: 2 of 1000 rounds"] * 2
    assert meanings(home, mask="mean") == said


def test_an_older_record_is_compared_with_the_bundled_recipe_of_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--only", "clients=10", "algorithm=fedavg", "--set", "rounds=12", "data=glyphs"]
    home = swept(tmp_path / "older", *options, file="tmlr-table3-quantity")
    record = json.loads((home / "sweep.json").read_text())
    del record["recipe"]
    (home / "sweep.json").write_text(json.dumps(record))
    assert (
        meanings(home, algorithm="fedavg", clients="10")
        == ["data glyphs instead of cifar10; rounds 12 instead of 100"] * 2
    )
    (home / "sweep.json").write_text(json.dumps(record | {"name": "mine"}))
    assert main(["report", str(home), "--out", str(tmp_path / "report"), "--formats", "none"]) == 0
    assert "is not known: sweep.json was written by an older version" in (tmp_path / "report/index.html").read_text()
