"""The bundled recipes: every run of every one is sound, what they say of the papers is right, and `fedmpi recipes`."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import rank_environment

from fedmpi.commands import main
from fedmpi.data.splits import SplitSpec, split
from fedmpi.errors import UserError
from fedmpi.experiments.measures import measure
from fedmpi.experiments.sweep import sweepfile
from fedmpi.experiments.sweep.grid import Point, Sweep, label_of, points
from fedmpi.experiments.sweep.recipes import PAPERS
from fedmpi.plugins.knobs import with_values
from fedmpi.runs import options
from fedmpi.runs.build import prepare
from fedmpi.runs.config import Config

read_sweep = functools.cache(sweepfile.read_sweep)
ALL = options.recipes()
SINGLE = sorted(options.single_runs())
SWEEPS = sorted(set(ALL) - set(SINGLE))
SIZES = {"cifar10": (50_000, 10), "cifar100": (50_000, 100), "tinyimagenet": (100_000, 200)}  # others: (60_000, 10)
LOOKS = ("cmnist2", "fedcmnist", "fedrotmnist")
WRITERS = 3000  # so many train in the TMLR paper; the stand-in has fewer


def config_of(point: Point) -> Config:
    """The configuration of a point, quickly: kinds of values are not checked."""
    return with_values(Config(), point.knobs)


def settings(sweep: Sweep) -> list[Point]:
    """The points of a sweep, with one seed."""
    return [point for point in points(sweep) if point.seed == sweep.seeds[0]]


def covering(found: list[Point]) -> list[Point]:
    """Few points that have every label of the given ones."""
    chosen: list[Point] = []
    missing = {pair for point in found for pair in point.labels.items()}
    while missing:
        chosen.append(max(found, key=lambda point: len(missing & set(point.labels.items()))))
        missing -= set(chosen[-1].labels.items())
    return chosen


def rates_of(sweep: Sweep, **labels: str) -> tuple[float, float]:
    """The learning rates of the points with these labels, the server's first; they must be the same for all."""
    found = [p.knobs for p in settings(sweep) if labels.items() <= p.labels.items()]
    rates = {(knobs["server.lr"], knobs["local.lr"]) for knobs in found}
    assert len(rates) == 1
    return rates.pop()


def rounds_of(found: list[Point], labels: dict[str, str]) -> int:
    """The rounds of the first point with these labels."""
    return next(int(point.knobs["rounds"]) for point in found if labels.items() <= point.labels.items())


def said(name: str, columns: tuple[str, ...] = ("mean", "gma"), **labels: str) -> tuple[float | str, ...]:
    """What a recipe says was published of a setting."""
    rows = [row for table in read_sweep(name).published for row in table["rows"]]
    row = next(r for r in rows if all(label_of(r[axis]) == label for axis, label in labels.items()))
    return tuple(row[column] for column in columns)


# Every recipe


@pytest.mark.parametrize("name", SINGLE)
def test_a_single_run_is_a_sound_configuration(name: str) -> None:
    prepare(options.parse(["--config", name]))


@pytest.mark.parametrize("name", SWEEPS)
def test_every_run_of_a_sweep_is_a_sound_configuration(name: str) -> None:
    found = settings(read_sweep(name))
    for point in found:
        prepare(config_of(point))
    parser = options.make_parser("test", Config)
    for point in covering(found):
        asked = options.filled(parser, Config, lambda point=point: parser.parse_object(options.as_tree(point.knobs)))
        assert asked == config_of(point)


def test_every_run_names_its_mask() -> None:
    """The default is for who starts a run by hand; an experiment says what it compares."""
    files = [*map(str, sorted((Path(__file__).parents[2] / "docs" / "results").glob("*.yaml"))), *SWEEPS]
    assert len(files) > len(SWEEPS)
    assert [name for name in files for point in settings(read_sweep(name)) if not point.knobs.get("mask")] == []
    assert [name for name in SINGLE if options.parse(["--config", name]).mask is None] == []


@pytest.mark.parametrize("name", SWEEPS)
def test_the_data_can_be_split_as_a_sweep_asks(name: str) -> None:
    rng = np.random.default_rng(0)
    asked = {}
    for point in settings(read_sweep(name)):
        cfg = prepare(config_of(point)).cfg
        asked[cfg.data, cfg.split, cfg.clients, cfg.skew, cfg.meta.size] = cfg
    for cfg in asked.values():
        samples, classes = SIZES.get(cfg.data, (60_000, 10))
        partition = split(
            SplitSpec(
                cfg.split,
                rng.integers(classes, size=samples - (cfg.meta.size or 0)),
                cfg.clients,
                seed=0,
                classes_per_client=cfg.skew.classes or 2,
                alpha=cfg.skew.alpha,
                beta=cfg.skew.beta,
                noise=cfg.skew.noise,
                owner=rng.integers(WRITERS, size=samples - (cfg.meta.size or 0)),
                owners=cfg.skew.owners,
                skewed=cfg.data in LOOKS,
            )
        )
        assert partition.clients == cfg.clients
        assert cfg.split != "natural" or cfg.data in ("femnist", "shakespeare")


@pytest.mark.parametrize("name", SWEEPS)
def test_what_was_published_is_of_runs_that_there_are(name: str) -> None:
    sweep = read_sweep(name)
    assert sweep.published
    for table in sweep.published:
        check_published(sweep, table)


def check_published(sweep: Sweep, published: dict[str, Any]) -> None:
    found = settings(sweep)
    assert published["source"] and published["measure"]
    if published["measure"] == "curve":
        assert "rows" not in published and "columns" not in published
        return
    kind, columns = measure(published["measure"]).kind, published["columns"]
    assert kind != "rounds" or float(published["measure"].partition(":")[2]) in sweep.reach
    seen = []
    for row in published["rows"]:
        labels = {axis: label_of(row[axis]) for axis in row if axis in sweep.axes}
        cells = {label_of(key): value for key, value in row.items() if key not in sweep.axes}
        chosen_from = set(sweep.choose.over) if sweep.choose else set()
        assert cells and set(labels) == set(sweep.axes) - {columns} - chosen_from
        for column, value in cells.items():
            wanted = labels | {columns: column}
            assert any(wanted.items() <= point.labels.items() for point in found)
            if kind == "rounds":
                assert isinstance(value, int) and value > 0 or re.fullmatch(r">\d+", value)
                assert rounds_of(found, wanted) >= int(str(value).lstrip(">"))
            else:
                assert 5 < value < 100  # percent, and no share
        seen.append(labels)
    assert all(seen.count(labels) == 1 for labels in seen)


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_says_what_it_is_of_and_what_the_paper_leaves_open(name: str) -> None:
    text = ALL[name].read_text(encoding="utf-8")
    sweep = read_sweep(name)
    assert 20 < len(sweep.about) <= 110 and "\n" not in sweep.about
    assert name.partition("-")[0] in PAPERS
    comment = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    assert "# rounds:" in text or name == "neurips2021-fig4-tau" or re.search(r"rounds, \d+|one round", comment)
    assert max(map(len, text.splitlines())) <= 120
    number = re.search(r"(table|fig)(\d[\d.a-d]*)", name)
    for part in (sweep.about, *(table["source"] for table in sweep.published)):
        assert number is None or re.search(rf"(table|figure)s? {re.escape(number[2])}", part)


def test_the_papers_tables_and_figures_are_all_there() -> None:
    def there(start: str) -> bool:
        return any(re.match(rf"{re.escape(start)}($|-)", name) for name in ALL)

    figures = ("fig2", "fig3a", "fig3d", "fig4", "fig5", "table8-fig3c", "table9-fig3b", "convex", "membership")
    wanted = [f"tmlr-table{n}" for n in range(2, 11)] + [f"tmlr-{name}" for name in figures]
    wanted += [f"thesis-table4.{n}" for n in (1, 2, 4, 5, 6, 7, 8)]  # 4.3 is in the file of 4.2
    wanted += [f"neurips2021-table{n}" for n in (5, 6, 7)] + ["iclr2021-fig2", "uga-table1", "uga-fig1"]
    assert [name for name in wanted if not there(name)] == []
    assert {f"tmlr-table2-{data}" for data in ("mnist", "fmnist", *SIZES)} <= ALL.keys()


# What the papers say


@pytest.mark.parametrize(
    ("data", "split", "clients", "numbers"),
    [
        ("mnist", "noniid", "500", (96.24, 97.36, 95.80, 96.55, 97.75, 98.48, 98.21, 98.38)),
        ("mnist", "noniid", "100", (98.60, 98.75, 97.76, 98.64, 98.88, 98.94, 98.58, 98.82)),
        ("mnist", "noniid", "10", (99.07, 99.09, 98.91, 99.08, 98.51, 98.44, 97.54, 98.74)),
        ("fmnist", "noniid", "100", (85.58, 86.27, 85.14, 85.78, 85.91, 87.18, 85.32, 86.40)),
        ("fmnist", "iid", "500", (83.07, 83.94, 83.47, 82.77, 85.44, 86.73, 85.55, 86.42)),
        ("fmnist", "iid", "10", (89.35, 89.65, 89.92, 90.12, 88.66, 88.86, 88.85, 89.85)),
        ("cifar10", "noniid", "500", (73.38, 74.44, 72.21, 73.95, 76.41, 77.12, 76.13, 77.56)),
        ("tinyimagenet", "iid", "10", (30.66, 30.45, 29.04, 29.83, 28.98, 32.02, 27.75, 30.78)),
    ],
)
def test_numbers_of_table_2(data: str, split: str, clients: str, numbers: tuple[float, ...]) -> None:
    algorithms = ("fedavg", "fedprox", "fedadam", "fedyogi")
    found = [said(f"tmlr-table2-{data}", split=split, clients=clients, algorithm=algorithm) for algorithm in algorithms]
    assert tuple(value for pair in found for value in pair) == numbers


def test_numbers_of_other_tables() -> None:
    assert said("tmlr-convex", work="epoch", split="iid") == (92.4, 92.5)
    assert said("tmlr-convex", work="step", split="noniid") == (87.0, 88.5)
    assert said("tmlr-table3-fedcmnist", split="mixed", clients="10", algorithm="fedavg") == (86.77, 89.17)
    assert said("tmlr-table3-fedcmnist", split="feature", clients="10", algorithm="fedavg") == (89.37, 90.36)
    assert said("tmlr-table10-rates", **{"server.lr": "1.5", "local.lr": "0.001"}) == (77.11, 75.63)
    assert said("tmlr-table10-rates", **{"server.lr": "0.01", "local.lr": "0.001"}) == (10.0, 10.0)
    assert said("thesis-table4.8", model="resnet18-gn", split="noniid", algorithm="scaffold") == (84.01, 85.36)
    assert said("thesis-table4.4", setting="cifar10-quantity", algorithm="scaffold") == (80.58, 81.81)
    assert said("neurips2021-table6-cifar10", algorithm="fedavg") == (">300", 132)
    names = ("fedavg", "fedshare", "uga", "fedmeta", "fedmeta-uga")
    assert said("uga-table1", names) == (90.22, 90.74, 95.87, 94.98, 98.18)


@pytest.mark.parametrize(
    ("data", "split", "rates"),
    [  # thesis, appendix A.2: the server's and the clients' for FedAvg, FedProx, FedAdam, FedYogi
        ("mnist", "noniid", ((1.0, 0.01), (1.0, 0.01), (0.05, 0.001), (0.05, 0.001))),
        ("fmnist", "iid", ((1.0, 0.1), (1.0, 0.1), (0.05, 0.001), (0.05, 0.001))),
        ("fmnist", "noniid", ((1.0, 0.01), (1.0, 0.01), (0.05, 0.001), (0.05, 0.001))),
        ("cifar10", "iid", ((1.0, 0.01), (1.0, 0.01), (0.01, 0.001), (0.01, 0.001))),
        ("cifar10", "noniid", ((1.5, 0.01), (1.0, 0.001), (0.05, 0.001), (0.05, 0.001))),
    ],
)
def test_learning_rates_are_those_of_the_thesis(data: str, split: str, rates: tuple[tuple[float, float], ...]) -> None:
    algorithms = ("fedavg", "fedprox", "fedadam", "fedyogi")
    for algorithm, wanted in zip(algorithms, rates, strict=True):
        assert rates_of(read_sweep(f"tmlr-table2-{data}"), split=split, algorithm=algorithm) == wanted
        assert rates_of(read_sweep("thesis-table4.4"), setting=f"{data}-{split}", algorithm=algorithm) == wanted


def test_scaffold_has_the_thesis_rates_too() -> None:
    sweep = read_sweep("thesis-table4.4")
    rates = {name: rates_of(sweep, setting=name, algorithm="scaffold") for name in sweep.axes["setting"]}
    assert rates["mnist-iid"] == rates["fmnist-noniid"] == rates["femnist-noniid"] == (1.0, 0.01)
    assert [rates[name] for name in ("femnist-iid", "cifar10-iid")] == [(1.5, 0.1), (1.5, 0.01)]
    assert rates["cifar10-noniid"] == (1.5, 0.001)


def test_the_search_has_the_papers_grid_and_its_rule() -> None:
    sweep = read_sweep("tmlr-search-fmnist")
    assert list(sweep.axes["local.lr"]) == ["0.001", "0.01", "0.05", "0.1"]
    assert set(sweep.axes["server.lr"]) == {"0.01", "0.1", "1.0", "1.5", "2.0"} | {"0.05"}  # the last is the thesis's
    assert sweep.choose is not None and sweep.stop is not None
    assert (sweep.choose.by, sweep.choose.last, set(sweep.choose.over)) == ("train_loss", 20, {"local.lr", "server.lr"})


# The command


def test_the_list_has_every_recipe_under_its_paper(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    blocks = capsys.readouterr().out.split("\n\n")
    assert [block.splitlines()[0] for block in blocks[: len(PAPERS)]] == list(PAPERS.values())
    lines = {line.split()[0]: line for block in blocks[:-1] for line in block.splitlines()[1:]}
    assert lines.keys() == ALL.keys()
    assert re.fullmatch(r"  tmlr-fig5-binary +12 runs  TMLR figure 5, .*", lines["tmlr-fig5-binary"])
    assert re.fullmatch(r"  glyphs-noniid-100 +1 run   The embedded digits .*", lines["glyphs-noniid-100"])
    order = [name for name in lines if name.startswith("tmlr-table")]
    assert order.index("tmlr-table10-rates") == len(order) - 1, "numbers are in their order"


def test_the_list_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "--json"]) == 0
    listed = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert listed.keys() == ALL.keys()
    assert {name for name, one in listed.items() if one["kind"] == "run"} == set(SINGLE)
    for name in SWEEPS:
        sweep = read_sweep(name)
        assert (listed[name]["runs"], listed[name]["about"]) == (len(points(sweep)), sweep.about)


def test_a_recipe_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "tmlr-convex"]) == 0
    assert capsys.readouterr().out == ALL["tmlr-convex"].read_text(encoding="utf-8")
    assert main(["recipes", "tmlr-convex", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["kind"], printed["runs"], printed["file"]["base"]["model"]) == ("sweep", 32, "logistic")


def test_a_name_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "tmlr-convexx"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("fedmpi: unknown recipe 'tmlr-convexx'; did you mean 'tmlr-convex'? known: ")


def test_a_sweep_is_not_for_train(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--config", "tmlr-convex"]) == 2
    message = "--config tmlr-convex is a sweep; run it with 'fedmpi sweep tmlr-convex'"
    assert capsys.readouterr().err == f"fedmpi: {message}\n"
    assert main(["train", "--algorithm", "fedavg", "--config=tmlr-convex"]) == 2
    assert capsys.readouterr().err == f"fedmpi: {message}\n"


def test_a_sweep_of_the_users_own_is_not_for_train(tmp_path: Path) -> None:
    own = tmp_path / "my sweep.yaml"
    own.write_text("base: {rounds: 2}\nseeds: 3\n")
    with pytest.raises(UserError, match=f"is a sweep; run it with 'fedmpi sweep '{re.escape(str(own))}''"):
        options.parse(["--config", str(own)])


def test_a_single_run_is_not_for_sweep() -> None:
    with pytest.raises(UserError, match="is no sweep: .* 'fedmpi train --config glyphs-noniid-100' runs it"):
        read_sweep("glyphs-noniid-100")


def test_only_single_runs_are_offered_to_train() -> None:
    offered = ", ".join(SINGLE)
    with pytest.raises(UserError, match=f"--config 'nothing' is neither a file nor a recipe; recipes: {offered}$"):
        options.parse(["--config", "nothing"])


def test_a_reader_that_leaves_early_is_no_fault() -> None:
    command = f"'{sys.executable}' -m fedmpi recipes | head -n 1"
    done = subprocess.run(["bash", "-c", command], env=rank_environment(), capture_output=True, text=True, timeout=100)
    assert done.stderr == "" and done.stdout.count("\n") == 1
