"""The table of runs, from folders that real runs wrote, and folders that are none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from shell import metrics, sandbox, settings_of, train

from fedmpi.commands import main
from fedmpi.commands.compare import COLUMNS, table
from fedmpi.errors import FileError, UserError
from fedmpi.experiments.runs import read_run
from fedmpi.runs.config import Eval


@pytest.fixture(scope="module", autouse=True)
def patch() -> Iterator[None]:
    with sandbox():
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two finished runs."""
    base = tmp_path_factory.mktemp("runs")
    train(settings_of(base / "gma", algorithm="fedyogi", mask="gma", tau=0.25))
    train(settings_of(base / "mean-of-all", mask="mean", rounds=5, eval=Eval(every=2)))
    return [base / "gma", base / "mean-of-all"]


@pytest.fixture
def copied(runs: list[Path], tmp_path: Path) -> Path:
    """A run folder to spoil."""
    for name in ("config.yaml", "metrics.jsonl"):
        (tmp_path / name).write_bytes((runs[1] / name).read_bytes())
    return tmp_path


def row(folder: Path) -> list[str]:
    """Return the cells of a run."""
    return [cell(read_run(folder, whole=True)) for cell in COLUMNS.values()]


def test_a_row_is_what_the_run_wrote(runs: list[Path]) -> None:
    rounds = metrics(runs[1])
    cells = dict(zip(COLUMNS, row(runs[1]), strict=True))
    scored = [r["test_accuracy"] for r in rounds if r["test_accuracy"] is not None]
    assert (cells["run"], cells["algorithm + mask"], cells["rounds"]) == (str(runs[1]), "fedavg + mean", "5/5")
    assert cells["best acc"] == f"{max(scored):.4f}" and cells["last acc"] == f"{scored[-1]:.4f}"
    assert cells["last loss"] == f"{rounds[-1]['test_loss']:.4f}"
    assert cells["kept"] == "1.000"
    assert cells["agreement"] == f"{sum(r['agreement'] for r in rounds) / 5:.3f}"
    assert cells["MB moved"] == "0.0"
    assert cells["s/round"] == f"{sorted(sum(r['seconds'].values()) for r in rounds)[2]:.2f}"


def test_a_mask_is_shown_with_its_threshold(runs: list[Path]) -> None:
    assert row(runs[0])[1:3] == ["fedyogi + gma 0.25", "3/3"]


def test_columns_are_aligned(runs: list[Path]) -> None:
    lines = table(runs).splitlines()
    assert len(lines) == 4 and set(lines[1]) == {"-"}
    assert len({len(lines[i]) for i in (0, 2, 3)}) == 1  # the last column is set to the right
    starts = [lines[0].index(name) for name in list(COLUMNS)[:2]]
    for i, cells in ((2, row(runs[0])), (3, row(runs[1]))):
        assert [lines[i][start:].startswith(cell) for start, cell in zip(starts, cells[:2], strict=True)] == [True] * 2


def test_whatever_was_measured_is_a_column(runs: list[Path], tmp_path: Path) -> None:
    train(settings_of(tmp_path / "run", evaluate="agreement,gap", rounds=1))
    head, _, plain, measured = table([runs[0], tmp_path / "run"]).splitlines()
    assert head.split()[-3:] == ["below_tau", "train_accuracy", "train_sample_loss"], "not the layers"
    assert plain.split()[-3:] == ["-", "-", "-"]
    assert measured.split()[-2] == f"{metrics(tmp_path / 'run')[0]['train_accuracy']:.4f}"


def test_runs_stand_in_the_order_given(runs: list[Path]) -> None:
    assert [text.split()[0] for text in table(runs[::-1]).splitlines()[2:]] == [str(runs[1]), str(runs[0])]


def test_megabytes_are_summed_and_the_middle_round_is_shown(copied: Path) -> None:
    rounds = [
        {k: v for k, v in r.items() if "client_bytes" not in k} | {"bytes_sent": 2_000_000, "seconds": {"local": s}}
        for r, s in zip(metrics(copied), (1, 9, 2, 3, 8), strict=True)
    ]
    (copied / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rounds))
    assert row(copied)[-6:] == ["10.0", *"----", "3.00"], "of a version that did not count what clients send"
    clients = [r | {"clients": 4, "client_bytes_up": 1000 * n, "client_bytes_down": 400} for n, r in enumerate(rounds)]
    (copied / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in clients))
    cells = dict(zip(COLUMNS, row(copied), strict=True))
    assert (cells["client up"], cells["client down"]) == ("500 B", "100 B")
    assert (cells["all up"], cells["all down"]) == ("10 kB", "2 kB")


def test_a_run_under_way_is_shown_as_far_as_it_is(copied: Path) -> None:
    first = (copied / "metrics.jsonl").read_text().splitlines()[0]
    (copied / "metrics.jsonl").write_text(first + "\n")
    assert row(copied)[2:6] == ["1/5", "-", "-", "-"]  # evaluated every second round


def test_a_diverged_loss_is_a_dash(copied: Path) -> None:
    rounds = [r | {"test_loss": None} for r in metrics(copied)]
    (copied / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rounds))
    cells = dict(zip(COLUMNS, row(copied), strict=True))
    assert cells["last loss"] == "-" and cells["last acc"] != "-"


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match=r"is no run folder that can be read \(.*No such file.*\); give the --out"):
            table([folder])


def test_a_run_before_its_first_round_is_a_row_of_dashes(copied: Path) -> None:
    (copied / "metrics.jsonl").write_text("")
    cells = dict(zip(COLUMNS, row(copied), strict=True))
    assert cells["rounds"].startswith("0/") and cells["MB moved"] == "0.0"
    dashed = ("best acc", "last acc", "last loss", "kept", "agreement", "s/round")
    assert {cells[name] for name in dashed} == {"-"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("metrics.jsonl", '{"round": 1, "test_acc'),
        ("metrics.jsonl", "{}\n"),
        ("metrics.jsonl", "[1, 2]\n"),
        ("metrics.jsonl", "nonsense\n"),
        ("config.yaml", "a: [1\nb: 2\n"),
        ("config.yaml", "hello\n"),
        ("config.yaml", "rounds: 3\n"),
        ("config.yaml", ""),
        ("config.yaml", "mask: !!python/name:os.system\n"),
    ],
)
def test_damaged_files_are_a_one_line_error(
    copied: Path, name: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (copied / name).write_text(text)
    assert main(["compare", str(copied)]) == 1, "damage is a fault, not the caller's mistake"
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert said.err.startswith(f"fedmpi: {copied / name} ") and "Traceback" not in said.err


def test_a_last_line_that_was_cut_off_is_refused_by_its_folder(copied: Path) -> None:
    whole = (copied / "metrics.jsonl").read_text()
    (copied / "metrics.jsonl").write_text(whole[:-20])
    with pytest.raises(FileError, match=f"{copied / 'metrics.jsonl'} is damaged: line 5 is no round"):
        table([copied])


def test_one_bad_folder_spoils_the_table(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(runs[0]), str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and str(tmp_path) in said.err
