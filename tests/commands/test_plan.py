"""`fedmpi plan` against what real ranks send and hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shell
import torch
from conftest import BIN, REPO, rank_environment

from fedmpi.aggregate import exchange
from fedmpi.aggregate.sums import Accumulator
from fedmpi.comm import Comm, share_node
from fedmpi.comm.env import Place
from fedmpi.comm.threads import run_threads
from fedmpi.commands import main
from fedmpi.commands.plan import nodes_of
from fedmpi.runs.build import prepare
from fedmpi.runs.config import Config
from fedmpi.runs.options import parse
from fedmpi.runs.run import run

TINY = ["--data", "tiny", "--split", "iid", "--model", "test_plan:plain", "--log_to", "none", "--local.batch", "10"]
TINY += ["--clients", "12", "--cohort", "5", "--rounds", "2", "--seed", "3", "--checkpoint.keep", "0"]
RUNS: dict[str, list[str]] = {
    "fedavg": [],
    "one client a rank": ["--cohort", "2", "--sum", "float32"],
    "float32": ["--sum", "float32"],
    "bf16": ["--sum", "float32", "--wire", "bf16"],
    "scaffold": ["--algorithm", "scaffold", "--split", "quantity"],
    "scaffold float32": ["--algorithm", "scaffold", "--sum", "float32", "--cohort", "2"],
    "fedgma2021": ["--algorithm", "fedgma2021"],
    "sand": ["--mask", "sand"],
    "meta step": ["--algorithm", "fedmeta", "--meta.size", "20"],
    "moments": ["--algorithm", "fedadam"],
    "many votes": ["--clients", "150", "--cohort", "130", "--rounds", "1"],
    "batch norm": ["--model", "test_plan:normed"],
}


def plain() -> torch.nn.Module:
    """A model of 11,843 parameters."""
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(144, 80), torch.nn.ReLU(), torch.nn.Linear(80, 3))


def normed() -> torch.nn.Module:
    """A model with float and integer buffers."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.Flatten(), torch.nn.Linear(300, 3)
    )


@pytest.fixture(autouse=True)
def tiny_data():
    """Add the tiny data set to the table."""
    with shell.sandbox():
        yield


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    """Return the forecasts of a command line."""
    assert main(["plan", "--json", *arguments]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def train_all(comm: Comm, runs: list[Config], ranks_per_node: int) -> None:
    """Run everything on this rank."""
    share_node(comm, comm.rank // ranks_per_node)
    place = Place("alone", comm.rank, comm.size, comm.rank, comm.size)
    with shell.sandbox():
        for cfg in runs:
            run(prepare(cfg), comm, place, torch.device("cpu"), {})


@pytest.mark.processes
@pytest.mark.parametrize(
    ("ranks", "ranks_per_node", "names"),
    [(2, 1, list(RUNS)), (4, 3, ["fedavg", "bf16", "scaffold", "sand", "meta step", "batch norm"])],
)
def test_planned_bytes_are_those_that_real_ranks_count(
    ranks: int,
    ranks_per_node: int,
    names: list[str],
    gloo: Callable[..., None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = [parse([*TINY, *RUNS[name], "--out", str(tmp_path / name)]) for name in names]
    gloo(ranks, train_all, runs, ranks_per_node)
    for name in names:
        rounds = [record["bytes_sent"] for record in shell.metrics(tmp_path / name)]
        (plan,) = planned(capsys, "--ranks", str(ranks), "--ranks_per_node", str(ranks_per_node), *TINY, *RUNS[name])
        away = [record["bytes_between_nodes"] for record in shell.metrics(tmp_path / name)]
        whole = "float32" not in RUNS[name] or "scaffold" in name  # exact sums take 4 to 8 bytes, and 5 are planned
        for planned_bytes, counted in ((plan["sent"]["total"], rounds), (plan["sent"]["away"], away)):
            real = sum(counted) / len(counted)
            low, high = (0.8, 1.4) if whole else (0.9999, 1.0001)  # packed votes may have an odd half byte
            assert low * planned_bytes <= real <= high * planned_bytes, name
        assert plan["sent"]["away"] > 0 and plan["sent"]["node"] >= plan["sent"]["away"] / plan["nodes"], name


WIDE = """
from torch import nn


def wide(classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 4000), nn.ReLU(), nn.Linear(4000, classes))
"""

RANK = """
import os, resource, sys
from pathlib import Path

from fedmpi.commands import main

code = main(["train", *sys.argv[1:]])
peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
(Path(__file__).parent / f"peak-{os.environ['RANK']}").write_text(str(peak))
sys.exit(code)
"""


@pytest.mark.processes
def test_planned_memory_is_near_that_of_real_ranks(tmp_path: Path) -> None:
    (tmp_path / "wide_model.py").write_text(WIDE)
    options = ["--data", "glyphs", "--split", "iid", "--algorithm", "scaffold", "--model", "wide_model:wide"]
    options += ["--rounds", "2", "--cohort", "2", "--clients", "100", "--local.steps", "2", "--log_to=none"]
    options += ["--eval.samples", "500"]
    environment = rank_environment()
    environment["PYTHONPATH"] += f"{os.pathsep}{tmp_path}"
    asked = [sys.executable, "-m", "fedmpi", "plan", "--json", "--ranks", "2", "--ranks_per_node", "2", *options]
    done = subprocess.run(asked, env=environment, capture_output=True, text=True, timeout=400, check=True)
    plan = json.loads(done.stdout)
    command = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node=2", str(tmp_path / "rank.py"), *options]
    (tmp_path / "rank.py").write_text(RANK)
    ended = subprocess.run(
        [*command, "--out", str(tmp_path / "run")], env=environment, capture_output=True, text=True, timeout=400
    )
    assert ended.returncode == 0, ended.stderr
    real = max(int((tmp_path / f"peak-{rank}").read_text()) for rank in range(2))
    assert 0.8 * real < plan["rank_bytes"] < 1.2 * real
    assert plan["node_bytes"] < 2 * plan["rank_bytes"]


def test_memory_follows_what_an_algorithm_keeps(capsys: pytest.CaptureFixture[str]) -> None:
    (plain,) = planned(capsys, "--ranks", "2", "--ranks_per_node", "2", *TINY)
    (float32,) = planned(capsys, "--ranks", "2", "--ranks_per_node", "2", *TINY, "--sum", "float32")
    (adam,) = planned(capsys, "--ranks", "2", "--ranks_per_node", "2", *TINY, "--algorithm", "fedadam")
    (scaffold,) = planned(capsys, "--ranks", "2", "--ranks_per_node", "2", *TINY, "--algorithm", "scaffold")
    params = 11844  # 11,843 and an element of padding
    # a rank's own row, its row for the other, and the other's row for it, half a vector each; the node has four rows
    assert plain["memory"]["sums"] == {"rank": 3 * 4 * params, "node": 4 * 4 * params}
    assert float32["memory"]["sums"] == {"rank": 3 * 2 * params, "node": 4 * 2 * params}
    assert plain["memory"]["votes"]["rank"] == 3 * params // 2
    assert plain["memory"]["model"]["node"] == 4 * params
    assert adam["memory"]["server's moments"]["node"] == 2 * 4 * params
    assert scaffold["memory"]["channels"] == plain["memory"]["sums"]
    assert scaffold["memory"]["clients' memories"]["rank"] % (4 * 11843) == 0
    assert "clients' memories" not in plain["memory"]


def test_rows_for_other_nodes_are_not_shared(capsys: pytest.CaptureFixture[str]) -> None:
    (one,) = planned(capsys, "--ranks", "2", "--ranks_per_node", "2", *TINY)
    (two,) = planned(capsys, "--ranks", "2", *TINY)
    assert 2 * one["memory"]["sums"]["rank"] == 3 * two["memory"]["sums"]["rank"]  # with the mate's for its slice
    assert two["memory"]["sums"]["node"] == two["memory"]["sums"]["rank"]
    assert two["memory"]["of the wire"]["rank"] > 5 * 11844 > 100 * one["memory"]["of the wire"]["rank"]
    assert two["nodes"] == 2 and one["nodes"] == 1


def test_what_travels_takes_the_memory_of_the_buckets_under_way(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in real ranks: 3 of 6 buckets, with 5 of 8 bytes of an exact sum filled."""
    ranks = ["--ranks", "4", "--ranks_per_node", "2"]
    (whole,) = planned(capsys, *ranks, *TINY)
    monkeypatch.setattr(exchange, "LEAST", 64)
    (plan,) = planned(capsys, *ranks, *TINY)

    def boxes(comm: Comm) -> float:
        share_node(comm, comm.rank // 2)
        sums = Accumulator(comm, 11844 // 4, cohort=5, kind="exact")
        sums.add(torch.full((11844,), 1e-3), 1)
        for _, parts in exchange.reduce(comm, [(sums, 1)], 11843, most=3):
            for part in parts:
                list(part)
        sizes = {name: sum(map(len, lane.boxes.values())) for name, lane in sums.lanes.items()}  # type: ignore[attr-defined]
        return sizes["sums"] * 5 / 8 + sizes["votes"]

    real = max(run_threads(4, boxes))
    assert 0.9 * real < plan["memory"]["of the wire"]["rank"] < 1.1 * real
    assert plan["memory"]["of the wire"]["rank"] < 0.7 * whole["memory"]["of the wire"]["rank"]


def test_only_vectors_that_a_client_writes_to_take_memory(tmp_path: Path) -> None:
    (tmp_path / "wide_model.py").write_text(WIDE.replace("4000", "16000"))
    environment = rank_environment()
    environment["PYTHONPATH"] += f"{os.pathsep}{tmp_path}"
    options = ["--data", "glyphs", "--split", "iid", "--clients", "8", "--cohort", "2", "--eval.samples", "8"]
    options += ["--model", "wide_model:wide", "--local.batch", "1"]
    step = {}
    for momentum in ("0", "0.5"):
        asked = [sys.executable, "-m", "fedmpi", "plan", "--json", "--ranks=1", *options, "--local.momentum", momentum]
        done = subprocess.run(asked, env=environment, capture_output=True, text=True, timeout=100, check=True)
        step[momentum] = json.loads(done.stdout)["memory"]["a client's step"]["rank"] / (4 * 785 * 16000)
    assert 0.9 < step["0"] < 1.7, "a gradient, as autograd makes it"
    assert 0.8 < step["0.5"] - step["0"] < 1.3, "the momentum"


def test_a_thousand_ranks_can_be_planned(capsys: pytest.CaptureFixture[str]) -> None:
    small, large = planned(capsys, "--ranks", "4", "1024", "--ranks_per_node", "4", *TINY)
    assert large["nodes"] == 256 and large["balance"]["empty"] == 1019
    assert large["balance"]["clients"] == 5 / 1024 and large["balance"]["most"] == 1
    assert large["sent"]["most"] < 1.2 * small["sent"]["most"]  # a rank sends hardly more, all of them much more
    assert large["sent"]["total"] > 200 * small["sent"]["total"]


def test_one_rank_sends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    (plan,) = planned(capsys, "--ranks=1", *TINY, "--algorithm", "fedmeta", "--meta.size", "20")
    assert plan["sent"] == {"total": 0, "away": 0, "most": 0, "node": 0}


def test_balance_is_that_of_the_real_draw(capsys: pytest.CaptureFixture[str]) -> None:
    even = ["--split", "iid", "--clients", "10", "--cohort", "10"]
    two, three = planned(capsys, "--ranks", "2", "3", *TINY, *even)
    assert two["balance"]["ratio"] == two["balance"]["worst"] == 1 and two["balance"]["waiting"] == 0
    assert three["balance"]["ratio"] == pytest.approx(4 / (10 / 3)) and three["balance"]["most"] == 4
    assert three["balance"]["waiting"] == pytest.approx(1 - 10 / 12)


def test_the_tables_name_what_they_count(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--ranks", "1", "2", *TINY, "--algorithm", "scaffold"]) == 0
    out = capsys.readouterr().out
    assert "scaffold with mask" in out and "1 rank (" not in out
    for words in (
        "ranks  nodes",
        "waiting",
        "sent/round",
        "work vector",
        "program",
        "clients' memories",
        "channels",
    ):
        assert words in out


def test_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--ranks", "2", *TINY]) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rounds", "2"], "plan needs world sizes, such as --ranks 2 4 64"),
        (["--ranks"], "--ranks needs a value"),
        (["--ranks", "two"], "--ranks is 'two'; it must be a whole number"),
        (["--ranks", "2", "0"], "--ranks is [2, 0]; each must be in [1, 65536]"),
        (["--ranks", "2", "--ranks_per_node", "x"], "--ranks_per_node is 'x'; it must be a whole number"),
        (["--ranks", "2", "--ranks-per-node", "0"], "--ranks_per_node is 0; it must be in [1, 65536]"),
        (["--ranks", "2", "--algorithm", "fedavgg"], "unknown algorithm 'fedavgg'; did you mean 'fedavg'?"),
        (["--ranks", "2", "--chort", "3"], "unknown option '--chort'"),
        (["--ranks", "2", "--cohort", "5000"], "--cohort is 5000 but there are only 100 clients"),
    ],
)
def test_a_wrong_argument_is_one_error_message(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["plan", "--help"])
    assert left.value.code == 0 and "--ranks_per_node" in capsys.readouterr().out
    assert main(["plan"]) == 2


def test_the_last_node_may_have_fewer_ranks() -> None:
    assert nodes_of(5, 2) == [[0, 1], [2, 3], [4]]
    assert nodes_of(2, 4) == [[0, 1]]


# The benchmarks


def benchmark(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPO / "benchmarks" / name), *arguments]
    return subprocess.run(command, env=rank_environment(), capture_output=True, text=True, timeout=400)


@pytest.mark.launchers
def test_the_benchmark_of_scale_prints_its_ratios() -> None:
    tiny = ["--clients", "400", "--cohorts", "5", "130", "--samples", "2000", "--rounds", "3", "--turns", "1"]
    done = benchmark("scale.py", *tiny, "--json")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["clients"], row["cohort"]) for row in rows] == [(400, 5), (400, 130)]
    assert all(row["peak_mb"] > 100 and row["round_ms"] > 0 and row["startup_s"] > 0 for row in rows)
    assert rows[0]["peak_mb_ratio"] == 1 and "us_a_client" in rows[1]


@pytest.mark.launchers
def test_the_benchmark_of_the_balance_prints_what_ranks_wait() -> None:
    tiny = ["--ranks", "2", "--betas", "5", "--model", "logistic", "--clients", "100", "--cohort", "8", "--rounds", "2"]
    done = benchmark("balance.py", *tiny, "--json")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["algorithm"] for row in rows] == ["fedavg", "scaffold"]
    for row in rows:
        assert row["even_rounds"] == 2
        for name in ("planned", "planned_in_turn", "waiting", "cpu", "load", "steps", "samples", "homes"):
            assert 0 <= row[name] < 1, name
    assert "planned_homes" in rows[1] and rows[0]["planned"] == rows[1]["planned"], "on one node as without a memory"


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("scale.py", ["--clients", "10", "--cohorts", "20"], "the largest --cohorts must fit the largest --clients"),
        ("balance.py", ["--ranks", "1"], "a rank alone waits for nobody"),
        ("balance.py", ["--model", "lent"], "unknown model 'lent'"),
    ],
)
def test_a_benchmark_refuses_impossible_options(name: str, arguments: list[str], words: str) -> None:
    done = benchmark(name, *arguments)
    assert done.returncode == 2 and words in done.stderr


def test_what_leaves_a_node_does_not_grow_with_its_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    sent = [
        planned(capsys, "--ranks", str(2 * n), "--ranks_per_node", str(n), "--sum", "float32", *TINY)[0]["sent"]
        for n in (1, 2, 4, 8)
    ]
    assert max(one["node"] for one in sent) < 1.03 * min(one["node"] for one in sent)
    assert [one["away"] <= one["total"] for one in sent] == [True] * 4 and sent[3]["total"] > 4 * sent[0]["total"]


def test_the_time_on_the_link_of_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    (plan,) = planned(capsys, "--ranks", "4", "--ranks_per_node", "2", *TINY)
    assert main(["plan", "--ranks", "4", "--ranks_per_node", "2", "--gbit", "0.001", "25", *TINY]) == 0
    head, _, row = capsys.readouterr().out.splitlines()[-3:]
    assert head.split() == "ranks nodes out of a node at 0.001 Gbit/s at 25 Gbit/s".split()
    bits = 8 * plan["sent"]["node"]
    assert row.split()[-4:] == [f"{bits / 1e6:.3g}", "s", f"{bits / 25e9:.3g}", "s"]
    assert main(["plan", "--ranks", "4", "--gbit", "0", *TINY]) == 2
    assert "--gbit is [0.0]; rates are in Gbit/s and above 0" in capsys.readouterr().err
