"""The best labels of a search, and runs that are given up: by numbers worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fedmpi.experiments.sweep.grid import Choose, Point, Stop, Sweep, points
from fedmpi.experiments.sweep.pick import Pruner, due, in_words, pick, quantile
from fedmpi.runs.config import Config

AXES = {
    "mask": {"mean": {"mask": "mean"}, "gma": {"mask": "gma"}},
    "local.lr": {label: {"local.lr": float(label)} for label in ("0.1", "0.5", "1")},
}


def sweep(choose: Choose | None, stop: Stop | None = None, seeds: tuple[int, ...] = (0,)) -> Sweep:
    return Sweep("s", axes=AXES, seeds=seeds, choose=choose, stop=stop)


def behind(point: Point, found: list[Point], home: Path, one: Sweep) -> str:
    assert one.choose is not None and one.stop is not None
    return Pruner(one, found, home).behind(point, one.choose, one.stop)


def excluded(point: Point, found: list[Point], home: Path, one: Sweep) -> str:
    return Pruner(one, found, home).why(point)


def write_run(home: Path, point: Point, losses: list[float], scores: list[float], finished: bool = True) -> None:
    """A run folder with these training losses and test accuracies, as far as reading goes."""
    run = home / point.name
    run.mkdir(parents=True)
    config = {"algorithm": "fedavg", "mask": "gma", "tau": 0.4, "data": "glyphs", "rounds": len(losses), "seed": 0}
    assert set(config) <= set(vars(Config()))
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    lines = [
        {"round": i, "train_loss": loss, "test_accuracy": score, "test_loss": 1.0}
        | {"clients": 3, "kept": 1.0, "agreement": 1.0, "bytes_sent": 0, "dropped": 0, "seconds": {}}
        for i, (loss, score) in enumerate(zip(losses, scores, strict=True), 1)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    if finished:
        (run / "finished.json").write_text('{"rounds": 1}')


def search(home: Path, means: dict[tuple[str, str], float], rule: Choose) -> Sweep:
    """A search whose runs end with these training losses and with an accuracy of 1 - loss / 10."""
    one = sweep(rule)
    for point in points(one):
        loss = means[point.labels["mask"], point.labels["local.lr"]]
        write_run(home, point, [9.0, loss, loss + 1], [0.1, 1 - loss / 10, 0.2])
    return one


LOSSES = {("mean", "0.1"): 3.0, ("mean", "0.5"): 2.0, ("mean", "1"): 4.0}
LOSSES |= {("gma", "0.1"): 1.0, ("gma", "0.5"): 2.5, ("gma", "1"): 4.0}


def test_each_cell_has_its_own_choice(tmp_path: Path) -> None:
    one = search(tmp_path, LOSSES, Choose(("local.lr",), "train_loss", last=2))
    mean, gma = pick(one, points(one), tmp_path)
    assert (mean.cell, mean.best) == ({"mask": "mean"}, {"local.lr": "0.5"})
    assert (gma.cell, gma.best) == ({"mask": "gma"}, {"local.lr": "0.1"})
    assert [tried.value for tried in mean.tried] == [3.5, 2.5, 4.5]  # the mean of the last two rounds


def test_axes_that_share_a_choice_are_averaged(tmp_path: Path) -> None:
    one = search(tmp_path, LOSSES, Choose(("local.lr",), "train_loss", last=2, share=("mask",)))
    (choice,) = pick(one, points(one), tmp_path)
    assert choice.best == {"local.lr": "0.1"}  # (3.5 + 1.5) / 2 is below (2.5 + 3) / 2
    assert [tried.value for tried in choice.tried] == [2.5, 2.75, 4.5]


def test_by_test_the_largest_best_metric_wins(tmp_path: Path) -> None:
    one = search(tmp_path, LOSSES, Choose(("local.lr",), "test"))
    mean, gma = pick(one, points(one), tmp_path)
    assert mean.best == {"local.lr": "0.5"} and gma.best == {"local.lr": "0.1"}
    assert [tried.value for tried in gma.tried] == pytest.approx([0.9, 0.75, 0.6])


def test_labels_with_a_run_that_did_not_finish_are_out(tmp_path: Path) -> None:
    one = search(tmp_path, LOSSES, Choose(("local.lr",), "train_loss", last=2))
    (tmp_path / "mean_lr0.5_s0" / "finished.json").unlink()
    mean, _ = pick(one, points(one), tmp_path)
    assert mean.best == {"local.lr": "0.1"}
    shown = in_words([mean], Choose(("local.lr",)), {name: "mean" for one in mean.tried for name in one.runs})
    assert "2 of 3 finished" in shown and " + mean: local.lr " in shown
    for label in ("0.1", "1"):
        (tmp_path / f"mean_lr{label}_s0" / "finished.json").unlink()
    mean, _ = pick(one, points(one), tmp_path)
    assert mean.best is None and "nothing; no labels have all" in in_words([mean], Choose(("local.lr",)), {})


@pytest.mark.parametrize(("round", "at"), [(0, 0), (19, 0), (20, 20), (29, 20), (30, 30), (57, 50)])
def test_runs_are_compared_now_and_then(round: int, at: int) -> None:
    assert due(round, Stop(after=20, every=10)) == at


def hope(home: Path, own: list[float], others: list[list[float]], stop: Stop, by: str = "test") -> str:
    """What is said of the run with lr 0.1 of the mean, next to two others of its cell."""
    one = sweep(Choose(("local.lr",), by, last=1), stop)
    mine, *rest = [p for p in points(one) if p.labels["mask"] == "mean"]
    write_run(home, mine, own, own, finished=False)
    for point, values in zip(rest, others, strict=False):
        write_run(home, point, values, values, finished=False)
    return behind(mine, points(one), home, one)


def test_a_run_below_the_median_is_stopped_early(tmp_path: Path) -> None:
    said = hope(tmp_path, [0.1, 0.2, 0.9], [[0.1, 0.3, 0.3], [0.1, 0.4, 0.4]], Stop(after=2, every=2))
    # Runs are compared at round 2, not at round 3.
    assert said == "best was 0.2000 by round 2, behind 0.3500, which is level with 50% of 2 others"


def test_a_run_that_is_level_continues(tmp_path: Path) -> None:
    assert hope(tmp_path, [0.1, 0.35], [[0.1, 0.3], [0.1, 0.4]], Stop(after=2, every=2)) == ""


def test_a_lower_quantile_is_kinder(tmp_path: Path) -> None:
    assert hope(tmp_path, [0.1, 0.32], [[0.1, 0.3], [0.1, 0.4]], Stop(after=2, every=2, quantile=0.1)) == ""


def test_a_larger_loss_is_worse(tmp_path: Path) -> None:
    assert "was 5.0000" in hope(tmp_path, [5.0, 5.0], [[3.0, 3.0], [4.0, 4.0]], Stop(2, 2), "train_loss")


def test_of_losses_the_smaller_one_is_ahead(tmp_path: Path) -> None:
    assert hope(tmp_path, [2.0, 2.0], [[3.0, 3.0], [4.0, 4.0]], Stop(2, 2), "train_loss") == ""


def test_a_run_that_is_far_ahead_is_compared_where_the_others_are(tmp_path: Path) -> None:
    said = hope(tmp_path, [0.1, 0.2, 0.2, 0.9, 0.9, 0.9], [[0.1, 0.3, 0.3], [0.1, 0.4, 0.4]], Stop(after=2, every=2))
    assert said.startswith("best was 0.2000 by round 2")


def test_one_other_is_too_few_and_so_is_one_that_has_not_come_so_far(tmp_path: Path) -> None:
    assert hope(tmp_path, [0.1, 0.1], [[0.1, 0.9], [0.9]], Stop(after=2, every=2)) == ""


def test_no_run_is_stopped_before_the_first_check(tmp_path: Path) -> None:
    assert hope(tmp_path, [0.1], [[0.9], [0.9]], Stop(after=2, every=2)) == ""


INF = float("inf")


def test_a_diverged_run_is_worse_than_any_other(tmp_path: Path) -> None:
    """The second best of six is not behind, because three others are not finite."""
    labels = {str(number): {"local.lr": float(number)} for number in range(6)}
    one = Sweep("s", axes={"local.lr": labels}, choose=Choose(("local.lr",), last=1), stop=Stop(1, 1))
    found = points(one)
    for point, loss in zip(found, [0.5, 0.56, 0.6, INF, INF, INF], strict=True):
        write_run(tmp_path, point, [loss], [0.1], finished=False)
    shown = [behind(point, found, tmp_path, one) for point in found]
    assert shown[:3] == ["", "", ""] and all("was not finite by round 1" in why for why in shown[3:])


def test_where_all_have_diverged_nobody_is_ahead(tmp_path: Path) -> None:
    assert hope(tmp_path, [INF, INF], [[INF, INF], [INF, INF]], Stop(2, 2), "train_loss") == ""


def test_the_last_labels_are_not_given_up_and_the_others_take_all_their_runs_along(tmp_path: Path) -> None:
    one = sweep(Choose(("local.lr",), last=1, share=("mask",)), Stop(1, 1), seeds=(0, 1))
    found = points(one)
    for point in found:
        write_run(tmp_path, point, [float(point.labels["local.lr"])], [0.1], finished=False)
    worst, middle = (next(p for p in found if p.labels["local.lr"] == label) for label in ("1", "0.5"))
    best = next(p for p in found if p.labels["local.lr"] == "0.1")
    assert behind(worst, found, tmp_path, one) and not excluded(worst, found, tmp_path, one)
    (tmp_path / worst.name / "given-up.json").write_text("{}")
    others = [p for p in found if p.labels["local.lr"] == "1" and p is not worst]
    assert len(others) == 3 and all(f"{worst.name} was given up" in excluded(p, found, tmp_path, one) for p in others)
    assert excluded(middle, found, tmp_path, one) == ""
    (tmp_path / best.name / "given-up.json").write_text("{}")
    assert behind(middle, found, tmp_path, one) == "", "nothing else is left to be chosen"
    (tmp_path / worst.name / "finished.json").write_text('{"rounds": 1}')  # before it heard of it
    assert excluded(others[0], found, tmp_path, one) == ""


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0.01, 0.99))
def test_a_quantile_lies_among_the_values(values: list[float], share: float) -> None:
    assert min(values) <= quantile(values, share) <= max(values)
    assert quantile([*values, *values], 0.5) == pytest.approx(quantile(sorted(values), 0.5), abs=max(map(abs, values)))


@pytest.mark.parametrize(("values", "share", "found"), [([1, 2, 3], 0.5, 2), ([4, 1], 0.5, 2.5), ([5, 1], 0.25, 2)])
def test_quantiles_by_hand(values: list[float], share: float, found: float) -> None:
    assert quantile(values, share) == found
