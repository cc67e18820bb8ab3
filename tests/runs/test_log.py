"""What a run reports: the line, the metrics, TensorBoard, the bar and the warnings."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import pty
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from shell import sandbox
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fedmpi.errors import UserError
from fedmpi.rounds import Report
from fedmpi.runs.log import COLOURS, Log, folded, line, phases, record, set_up, sink_names


@pytest.fixture(autouse=True)
def patch() -> Iterator[pytest.MonkeyPatch]:
    with sandbox() as patch:
        yield patch


def report(round: int = 3, **changes: Any) -> Report:
    """A round with numbers that are easy to find again."""
    seconds = {"local": 4.811, "wait": 0.902, "reduce": 0.1, "server": 0.02, "gather": 0.003, "eval": 0.5}
    fields: dict[str, Any] = dict(
        round=round,
        clients=9,
        dropped=(),
        train_loss=1.25,
        kept=0.375,
        agreement=0.5,
        bytes_sent=12_345,
        seconds=seconds,
        test_metric=0.7131,
        test_loss=0.91249,
    )
    return Report(**fields | changes)


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """What TensorBoard itself reads: numbers by tag and step."""
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


# The line


def test_a_round_in_one_line() -> None:
    said = "round   3/200  acc 0.7131  loss 0.9125  train 1.2500  kept 0.38  agree 0.50  6.34s"
    assert line(report(), 200) == said
    assert line(report(), 200, hidden=("kept",)) == said.replace("  kept 0.38", "")


def test_a_round_that_was_not_scored_shows_no_score() -> None:
    said = line(report(test_metric=None, test_loss=None), 5)
    assert said.startswith("round 3/5  train 1.2500  kept") and "acc" not in said


def test_clients_left_out_are_counted_in_the_line() -> None:
    assert "  dropped 2  6.34s" in line(report(dropped=(4, 8)), 5)
    assert "dropped" not in line(report(), 5)


def test_phases_are_a_second_line_without_what_is_zero_by_construction() -> None:
    assert phases(report(), several=True) == (
        "    local 4.81s  wait 0.90s  reduce 0.10s  server 0.02s  gather 0.00s  eval 0.50s"
    )
    alone = report(seconds=report().seconds | {"wait": 0.0, "reduce": 2e-5, "gather": 1e-6})
    assert phases(alone, several=False) == "    local 4.81s  server 0.02s  eval 0.50s"
    timed = report(seconds=report().seconds | {"meta": 0.25})
    assert "  meta 0.25s" in phases(timed, several=True) and record(timed)["seconds"]["meta"] == 0.25
    assert "meta" not in phases(report(seconds=report().seconds | {"meta": 0.0}), several=True)


LONG = {
    "train_loss": 12345.678,
    "test_loss": 1e-5,
    "dropped": tuple(range(100)),
    "seconds": dict.fromkeys(("local", "wait", "reduce", "server", "gather", "meta", "eval"), 1000.0),
    "measures": {
        "below_tau": 0.1,
        "train_accuracy": 0.5,
        "clients_accuracy": {"participating": 0.5, "others": 0.5},
    },
}


@pytest.mark.parametrize("metric", ["accuracy", "mean absolute percentage error of all"])
@pytest.mark.parametrize("value", [0.7131, 1e-5, -123456.0, math.nan, math.inf])
@pytest.mark.parametrize("left_out", [(), ("measures",), ("dropped", "measures")])
def test_a_line_always_fits_100_columns(metric: str, value: float, left_out: tuple[str, ...]) -> None:
    shown = report(1000, metric=metric, test_metric=value, **{k: v for k, v in LONG.items() if k not in left_out})
    said = line(shown, 1000)
    assert len(said) <= 100 and len(phases(shown, several=True)) <= 100
    assert said.startswith("round 1000/1000  ") and said.endswith("  7000s")
    assert re.sub("\033.*?m", "", line(shown, 1000, COLOURS)) == said
    if len(left_out) == 2 and metric == "accuracy":
        assert said.count("  ") == 6 and ("1.00e-05" in said), "nothing is left out of an ordinary line"


def test_small_losses_are_distinguished() -> None:
    assert "loss 1.00e-05  train 2.50e-04" in line(report(test_loss=1e-5, train_loss=2.5e-4), 5)
    assert "loss 0.0000" in line(report(test_loss=0.0), 5)


def test_rounds_are_aligned() -> None:
    assert len({line(report(round=n), 100).index("acc") for n in (1, 10, 100)}) == 1


# The record


def test_a_record_is_the_report() -> None:
    made = record(report(dropped=(4, 8)))
    assert (made["dropped"], made["dropped_clients"]) == (2, [4, 8])
    assert (made["round"], made["kept"], made["seconds"]["local"]) == (3, 0.375, 4.811)
    assert json.loads(json.dumps(made, allow_nan=False)) == made


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_becomes_null(value: float) -> None:
    made = record(report(test_loss=value, train_loss=value))
    assert made["test_loss"] is None and made["train_loss"] is None
    json.dumps(made, allow_nan=False)


def test_seconds_have_the_same_names_whether_scored_or_not() -> None:
    unscored = report(seconds={k: 1.0 for k in ("local", "wait", "reduce", "server", "gather")})
    assert set(record(unscored)["seconds"]) == set(record(report())["seconds"])
    assert record(unscored)["seconds"]["eval"] == 0.0
    assert "eval" not in unscored.seconds  # the report itself is left alone


# Sinks


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        ("tensorboard", ["tensorboard"]),
        ("none", []),
        ("", []),
        (" tensorboard , none", ["tensorboard"]),
    ],
)
def test_sinks_are_named_in_a_list(names: str, wanted: list[str]) -> None:
    assert sink_names(names) == wanted


def test_an_unknown_sink_gets_the_closest_match() -> None:
    with pytest.raises(UserError, match="unknown sink .* 'tensorbord'; did you mean 'tensorboard'.*none"):
        sink_names("none,tensorbord")


def test_every_round_is_a_line_of_json_at_once(tmp_path: Path) -> None:
    with Log(tmp_path, rounds=3, sinks=[], speaks=True) as log:
        for round in (1, 2, 3):
            log.round(report(round=round))
            lines = (tmp_path / "metrics.jsonl").read_text().splitlines()  # before it is closed
            assert [json.loads(text)["round"] for text in lines] == list(range(1, round + 1))
    assert json.loads(lines[-1]) == record(report())
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_tensorboard_reads_the_same_numbers(tmp_path: Path) -> None:
    rounds = [
        report(round=1),
        report(round=2, test_metric=None, test_loss=None),
        report(round=3, train_loss=math.nan),
    ]
    with Log(tmp_path, rounds=3, sinks=["tensorboard"], speaks=True) as log:
        for r in rounds:
            log.round(r)
    read = scalars(tmp_path)
    for r in rounds:
        for name, value in record(r).items():
            for tag, number in (
                {f"{name}/{k}": v for k, v in value.items()} if isinstance(value, dict) else {name: value}
            ).items():
                if isinstance(number, int | float):
                    assert read[tag][r.round] == pytest.approx(number, rel=1e-6), tag
                else:
                    assert r.round not in read.get(tag, {}), tag
    assert set(read["train_loss"]) == {1, 2} and set(read["test_accuracy"]) == {1, 3}


def test_tensorboard_shows_nothing_of_a_run_that_was_started_over(tmp_path: Path) -> None:
    for loss, rounds in ((9.0, 4), (1.0, 2)):
        with Log(tmp_path, rounds, ["tensorboard"], speaks=True) as log:
            for round in range(1, rounds + 1):
                log.round(report(round=round, train_loss=loss))
    assert scalars(tmp_path)["train_loss"] == {1: 1.0, 2: 1.0}
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_only_the_rank_that_speaks_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Log(tmp_path, 3, ["tensorboard"], speaks=False) as log:
        log.say("hello")
        log.round(report())
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


# The screen


def test_lines_go_to_standard_output_and_no_bar_where_there_is_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Log(tmp_path, 5, [], speaks=True) as log:
        log.say("header")
        log.round(report())
    assert capsys.readouterr() == ("header\n" + line(report(), 5) + "\n", "")


def test_a_terminal_gets_a_bar(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    patch.setattr(sys, "stderr", Terminal())
    with Log(tmp_path, 5, [], speaks=True) as log:
        log.round(report())
        log.bar.refresh()
        assert "1/5" in sys.stderr.getvalue()


def test_quiet_prints_nothing_and_keeps_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Log(tmp_path, 5, [], speaks=True, quiet=True) as log:
        log.say("header")
        log.round(report())
    assert capsys.readouterr() == ("", "")
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == record(report())


def test_verbose_adds_the_phases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Log(tmp_path, 5, [], speaks=True, verbose=True) as log:
        log.round(report())
    assert capsys.readouterr().out == line(report(), 5) + "\n" + phases(report(), several=False) + "\n"


@pytest.mark.parametrize(("no_color", "coloured"), [(None, True), ("", True), ("1", False)])
def test_a_terminal_gets_colours_unless_it_wants_none(
    no_color: str | None, coloured: bool, tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    patch.setenv("TERM", "xterm")
    patch.delenv("NO_COLOR", raising=False)
    if no_color is not None:
        patch.setenv("NO_COLOR", no_color)
    ours, theirs = pty.openpty()
    with open(theirs, "w") as terminal:
        patch.setattr(sys, "stdout", terminal)
        with Log(tmp_path, 5, [], speaks=True) as log:
            log.round(report(dropped=(1,)))
        said = os.read(ours, 10_000).decode()
    os.close(ours)
    assert ("\033[32macc 0.7131\033[0m" in said) == coloured == ("\033[" in said)


def test_a_long_header_is_folded() -> None:
    said = folded("short\n" + "a-word " * 30 + "\n" + "x" * 120)
    assert [len(one) <= 100 for one in said.splitlines()] == [True, True, True, True, False]
    assert said.replace("\n    ", " ").splitlines()[1] == ("a-word " * 30).rstrip()


def test_a_log_is_closed_when_a_round_fails(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Log(tmp_path, 5, [], speaks=True) as log:
        log.round(report())
        raise ZeroDivisionError
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


# Warnings


@pytest.mark.parametrize(("rank", "size", "who"), [(0, 1, ""), (3, 4, "rank 3: "), (0, 2, "rank 0: ")])
def test_warnings_name_their_rank_where_there_are_several(
    rank: int, size: int, who: str, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up(rank, size)
    logging.getLogger("fedmpi").warning("client %d left out", 7)
    assert capsys.readouterr() == ("", f"WARNING: {who}client 7 left out\n")


def test_setting_up_twice_says_things_once(capsys: pytest.CaptureFixture[str]) -> None:
    set_up(0, 1)
    set_up(1, 2)
    logging.getLogger("fedmpi.train").warning("once")
    assert capsys.readouterr().err == "WARNING: rank 1: once\n"
