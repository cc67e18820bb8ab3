"""What is learned: losses and metrics by hand, and whole runs with sequences and with numbers to predict."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from shell import ALONE, CPU, metrics, sandbox, settings_of, without_seconds
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fedmpi.comm import Comm, SoloComm
from fedmpi.comm.threads import run_threads
from fedmpi.commands.compare import COLUMNS
from fedmpi.data import Arrays, Datasets
from fedmpi.data.objective import CLASSIFY, NEXT, REGRESS, Objective, check_outputs
from fedmpi.errors import UserError
from fedmpi.experiments.runs import read_run
from fedmpi.runs.build import Overrides, prepare
from fedmpi.runs.config import Config, Eval, Local, Meta
from fedmpi.runs.run import Outcome, run


@pytest.fixture(autouse=True)
def patch() -> Iterator[pytest.MonkeyPatch]:
    with sandbox() as patch:
        yield patch


# --- by hand


def test_classification_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3)], [math.log(4), 0.0]])  # shares 1/4, 3/4 and 4/5, 1/5
    labels = torch.tensor([1, 1])
    losses = [math.log(4 / 3), math.log(5)]
    assert float(CLASSIFY.loss(logits, labels, "sum")) == pytest.approx(sum(losses), rel=1e-6)
    assert float(CLASSIFY.loss(logits, labels, "mean")) == pytest.approx(sum(losses) / 2, rel=1e-6)
    assert int(CLASSIFY.total(logits, labels)) == 1
    assert (CLASSIFY.metric, CLASSIFY.rises, CLASSIFY.whole) == ("accuracy", True, True)


@pytest.mark.parametrize("goal", [CLASSIFY, NEXT])
def test_labels_of_every_position_count_each(goal: Objective) -> None:
    """Two sequences of three positions: six labels, and the mean is over all six."""
    logits = torch.zeros(2, 3, 2)
    logits[0, :, 1] = math.log(3)
    labels = torch.tensor([[1, 1, 0], [0, 0, 1]])
    losses = [math.log(4 / 3), math.log(4 / 3), math.log(4), *[math.log(2)] * 3]
    assert float(goal.loss(logits, labels, "sum")) == pytest.approx(sum(losses), rel=1e-6)
    assert float(goal.loss(logits, labels, "mean")) == pytest.approx(sum(losses) / 6, rel=1e-6)
    assert int(goal.total(logits, labels)) == 4, "at a tie the first class is the answer"


@pytest.mark.parametrize("shape", [(3,), (3, 1), (1, 3)])
def test_regression_by_hand_whatever_shape_the_outputs_have(shape: tuple[int, ...]) -> None:
    outputs, labels = torch.tensor([1.0, 2.0, -1.0]).view(shape), torch.tensor([0.0, 2.0, 1.0])
    assert float(REGRESS.loss(outputs, labels, "sum")) == 5.0
    assert float(REGRESS.loss(outputs, labels, "mean")) == pytest.approx(5 / 3)
    assert float(REGRESS.total(outputs, labels)) == 3.0
    assert (REGRESS.metric, REGRESS.rises, REGRESS.whole) == ("error", False, False)


def test_regression_of_several_numbers_a_sample() -> None:
    outputs, labels = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 0.0], [0.0, 4.0]])
    assert float(REGRESS.loss(outputs, labels, "mean")) == 13 / 4 and float(REGRESS.total(outputs, labels)) == 5.0


@pytest.mark.parametrize(
    ("labels", "goal"),
    [
        (torch.tensor([1, 2]), CLASSIFY),
        (torch.tensor([[1, 2]]), CLASSIFY),
        (torch.tensor([1, 2], dtype=torch.uint8), CLASSIFY),
        (torch.tensor([1.0, 2.0]), REGRESS),
        (torch.tensor([1.0], dtype=torch.float64), REGRESS),
    ],
)
def test_the_usual_objective_follows_the_labels(labels: Tensor, goal: Objective) -> None:
    x = torch.zeros(1, 2)
    assert Datasets(TensorDataset(x, labels[:1]), TensorDataset(x, labels[:1]), classes=3).goal is goal


# --- outputs that do not fit


@pytest.mark.parametrize(
    ("outputs", "labels", "goal"),
    [
        (torch.zeros(2, 3), torch.tensor([0, 1]), CLASSIFY),
        (torch.zeros(2, 1000), torch.tensor([0, 1]), CLASSIFY),  # answers that are never right do no harm
        (torch.zeros(2, 4, 3), torch.zeros(2, 4, dtype=torch.int64), NEXT),
        (torch.zeros(2), torch.zeros(2), REGRESS),
        (torch.zeros(2, 1), torch.zeros(2), REGRESS),
        (torch.zeros(2, 5), torch.zeros(2, 5), REGRESS),
    ],
)
def test_outputs_that_fit_are_taken(outputs: Tensor, labels: Tensor, goal: Objective) -> None:
    check_outputs(outputs, labels, 3, goal, "mine")


@pytest.mark.parametrize(
    ("outputs", "labels", "goal", "message"),
    [
        (
            torch.zeros(2, 2),
            torch.tensor([0, 1]),
            CLASSIFY,
            "a tensor [2, 2] for 2 samples; classification needs a tensor [2, 3]",
        ),
        (
            torch.zeros(4, 3),
            torch.tensor([0, 1]),
            CLASSIFY,
            "a tensor [4, 3] for 2 samples; classification needs a tensor [2, 3]",
        ),
        (
            torch.zeros(2),
            torch.tensor([0, 1]),
            CLASSIFY,
            "a tensor [2] for 2 samples; classification needs a tensor [2, 3]",
        ),
        (
            torch.zeros(2, 3),
            torch.zeros(2, 4, dtype=torch.int64),
            NEXT,
            "a tensor [2, 3] for 2 samples; next character needs a tensor [2, 4, 3]",
        ),
        (
            torch.zeros(2, 3, 4),
            torch.zeros(2, 4, dtype=torch.int64),
            NEXT,
            "a tensor [2, 3, 4] for 2 samples; next character needs a tensor [2, 4, 3]",
        ),
        (
            torch.zeros(2, 3),
            torch.zeros(2),
            REGRESS,
            "a tensor [2, 3] for 2 samples; regression needs a tensor [2]",
        ),
        (
            (torch.zeros(2, 3), None),
            torch.tensor([0, 1]),
            CLASSIFY,
            "tuple for 2 samples; classification needs a tensor [2, 3]",
        ),
        (None, torch.zeros(2, 5), REGRESS, "NoneType for 2 samples; regression needs a tensor [2, 5]"),
    ],
)
def test_outputs_that_do_not_fit_are_a_one_line_error(
    outputs: Any, labels: Tensor, goal: Objective, message: str
) -> None:
    with pytest.raises(UserError) as caught:
        check_outputs(outputs, labels, 3, goal, "mine")
    assert str(caught.value) == f"model 'mine' returned {message}"


def test_an_objective_of_ones_own_takes_what_it_likes() -> None:
    own = replace(CLASSIFY, name="mine", loss=lambda outputs, labels, reduction: outputs.sum())
    check_outputs({"any": "thing"}, torch.tensor([0]), 3, own, "mine")


OBJECTIVES: dict[str, tuple[dict[str, Any], str]] = {
    "raises": ({"loss": lambda o, y, how: o @ o}, "its loss for 'mean' raised RuntimeError: "),
    "a loss each": (
        {"loss": lambda o, y, how: o.flatten() - y},
        "its loss for 'mean' returned a tensor [2]; it must be a tensor of one number",
    ),
    "knows no sum": (
        {"loss": lambda o, y, how: {"mean": o.mean()}[how]},
        "its loss for 'sum' raised KeyError: 'sum'",
    ),
    "no tensor": ({"total": lambda o, y: 0.5}, "its total returned float; it must be a tensor of one number"),
    "leaves": ({"total": lambda o, y: sys.exit(3)}, "its total raised SystemExit: 3"),
}


@pytest.mark.parametrize(("changes", "message"), OBJECTIVES.values(), ids=OBJECTIVES)
def test_a_failing_objective_is_reported_before_training(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    own = replace(REGRESS, name="mine", **changes)
    with pytest.raises(UserError) as caught:
        train_on(replace(line(), objective=own), settings(tmp_path / "run"))
    assert str(caught.value).startswith(f"objective 'mine': {message}") and not (tmp_path / "run").exists()


@pytest.mark.parametrize("metric", ["loss", "my metric", "", "f1-score"])
def test_a_metric_that_cannot_be_reported_by_its_name_is_refused(metric: str) -> None:
    with pytest.raises(UserError, match=f"^an objective's metric is '{metric}'; it must be a name such as accuracy"):
        replace(CLASSIFY, metric=metric)


# --- whole runs


def line(noise: float = 0.05) -> Arrays:
    """Points near a plane: y = 2 a - b + 0.5 c, of twelve owners."""
    rng = torch.Generator().manual_seed(4)
    x = torch.randn(300, 3, generator=rng)
    y = x @ torch.tensor([2.0, -1.0, 0.5]) + noise * torch.randn(300, generator=rng)
    return Arrays("plane", 0, x[:240], y[:240], x[240:], y[240:], owner=torch.arange(240) % 12)


def sentences(positions: bool = False) -> Arrays:
    """Tokens that count up by one, mod 5: the next is easy to tell."""
    rng = torch.Generator().manual_seed(5)
    start = torch.randint(0, 5, (360, 1), generator=rng)
    text = (start + torch.arange(7)) % 5
    x = text[:, :6].to(torch.uint8)
    y = text[:, 1:] if positions else text[:, 6]
    return Arrays("count", 5, x[:300], y[:300], x[300:], y[300:], tokens=5, objective=NEXT)


def settings(out: Path, **changes: Any) -> Config:
    return settings_of(out, **({"data": "given", "model": None} | changes))


def train_on(data: Arrays, cfg: Config, comm: Comm | None = None, model: nn.Module | None = None) -> Outcome:
    return run(prepare(cfg, Overrides(data, model)), comm or SoloComm(), ALONE, CPU, {})


def finished(out: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((out / "finished.json").read_text())
    return record


def test_numbers_are_learned_and_reported_as_an_error(tmp_path: Path) -> None:
    outcome = train_on(line(), settings(tmp_path, rounds=8, split="natural", eval=Eval(every=2, batch=25)))
    rounds, done = metrics(tmp_path), finished(tmp_path)
    assert all("test_error" in r and "test_accuracy" not in r and "test_metric" not in r for r in rounds)
    scored = [r["test_error"] for r in rounds if r["test_error"] is not None]
    assert len(scored) == 4 and scored[-1] < 0.2 < scored[0]
    assert not any("accuracy" in key for key in done)
    assert done["test_error"] == scored[-1] == outcome.last.test_metric and outcome.last.test_accuracy is None
    assert done["best_test_error"] == min(scored), "the smallest error is the best"
    tensors, data = load_file(tmp_path / "model.safetensors"), line()
    weight = tensors["1.weight"][0]
    away = data.test_x @ weight + tensors["1.bias"] - data.test_y
    assert float(away.abs().mean()) == pytest.approx(scored[-1], rel=1e-4)
    assert float(away.square().mean()) == pytest.approx(done["test_loss"], rel=1e-4)
    assert weight.tolist() == pytest.approx([2.0, -1.0, 0.5], abs=0.3)


def test_the_best_error_is_the_smallest_also_where_it_is_not_the_last(tmp_path: Path) -> None:
    train_on(line(noise=1.0), settings(tmp_path, rounds=25, local=Local(batch=10, lr=0.1)))
    errors = [r["test_error"] for r in metrics(tmp_path)]
    assert min(errors) < errors[-1] and finished(tmp_path)["best_test_error"] == min(errors) != max(errors)


@pytest.mark.parametrize("every", [1, 2])
def test_the_table_of_runs_shows_an_error_as_one(tmp_path: Path, every: int) -> None:
    train_on(line(), settings(tmp_path, rounds=4, eval=Eval(every=every)))
    cells = {title: cell(read_run(tmp_path, whole=True)) for title, cell in COLUMNS.items()}
    errors = [r["test_error"] for r in metrics(tmp_path) if r.get("test_error") is not None]
    assert cells["best acc"] == f"{min(errors):.4f} error" and cells["last acc"] == f"{errors[-1]:.4f} error"


def test_a_round_of_regression_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = train_on(line(), settings(tmp_path, rounds=2))
    said = capsys.readouterr().out.splitlines()
    assert f"round 2/2  error {outcome.last.test_metric:.4f}  loss {outcome.last.test_loss:.4f}  train" in said[-1]
    assert "logistic, 4 parameters" in "".join(said[:3]), "the model that fits the data"


@pytest.mark.parametrize("split", ["classes", "dirichlet"])
def test_a_split_by_label_is_refused_for_numbers(tmp_path: Path, split: str) -> None:
    with pytest.raises(UserError, match=f"split '{split}' goes by class, and 'plane' has numbers for labels; use"):
        train_on(line(), settings(tmp_path, split=split))
    assert not any(tmp_path.iterdir())


def test_a_meta_set_by_classes_is_refused_for_numbers_and_one_without_is_taken(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--meta.weights go by class, and 'plane' has numbers"):
        train_on(
            line(), settings(tmp_path / "a", algorithm="fedmeta", meta=Meta(size=20, weights=[1.0, 1.0]), rounds=1)
        )
    outcome = train_on(line(), settings(tmp_path / "b", algorithm="fedmeta", meta=Meta(size=20), rounds=6))
    assert outcome.last.test_metric is not None and outcome.last.test_metric < 0.6


def test_augmenting_what_are_no_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--augment is 'flip', but 'plane' has numbers, not images; use none"):
        train_on(line(), settings(tmp_path, augment="flip"))
    train_on(line(), settings(tmp_path, augment="none", rounds=1))


def test_several_numbers_a_sample_are_learned(tmp_path: Path) -> None:
    plain = line()
    twice = replace(plain, y=torch.stack([plain.y, -plain.y], 1), test_y=torch.stack([plain.test_y, -plain.test_y], 1))
    last = train_on(twice, settings(tmp_path, rounds=6)).last
    tensors = load_file(tmp_path / "model.safetensors")
    away = twice.test_x @ tensors["1.weight"].t() + tensors["1.bias"] - twice.test_y
    assert last.test_metric == pytest.approx(float(away.abs().mean()), rel=1e-4), "over all labels"
    assert last.test_loss == pytest.approx(float(away.square().mean()), rel=1e-4) and last.test_metric < 0.5


def test_sequences_are_learned_by_the_gru(tmp_path: Path) -> None:
    outcome = train_on(sentences(), settings(tmp_path, rounds=4, local=Local(batch=10, lr=0.5), mask="mean"))
    assert outcome.cfg.model == "gru" and outcome.last.test_accuracy == 1.0
    assert metrics(tmp_path)[-1]["test_accuracy"] == 1.0


class EachPosition(nn.Module):
    """Logits for what follows every position."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(x))
        return logits


def test_every_position_is_a_label(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, data = EachPosition(), sentences(positions=True)
    cfg = settings(tmp_path, rounds=6, split="classes", local=Local(batch=10, lr=0.5), mask="mean")
    outcome = train_on(data, cfg, model=model)
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    with torch.no_grad():
        right = (model(data.test_x.long()).argmax(-1) == data.test_y).float().mean()
    assert outcome.last.test_accuracy == pytest.approx(float(right), abs=1e-7) and float(right) > 0.9
    written = json.loads((tmp_path / "partition.json").read_text())
    assert sum(map(sum, written["histogram"])) == 300, "dealt by the label of the last position"


def test_a_model_for_the_last_position_is_refused_where_labels_are_of_all(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model 'gru' returned a tensor \[2, 5\] .* needs a tensor \[2, 6, 5\]"):
        train_on(sentences(positions=True), settings(tmp_path))


def test_an_objective_of_ones_own_is_descended_and_reported(tmp_path: Path) -> None:
    """The distance instead of its square, and the share of answers that are far off."""

    def distance(outputs: Tensor, labels: Tensor, reduction: str) -> Tensor:
        away = (outputs.flatten() - labels).abs()
        return away.mean() if reduction == "mean" else away.sum()

    far = Objective("l1", distance, "far", lambda o, y: ((o.flatten() - y).abs() > 1).sum(), rises=False, whole=False)
    train_on(replace(line(), objective=far), settings(tmp_path, rounds=10))
    rounds, done = metrics(tmp_path), finished(tmp_path)
    assert rounds[-1]["test_far"] < rounds[0]["test_far"] and "test_error" not in rounds[0]
    assert done["best_test_far"] == min(r["test_far"] for r in rounds)
    cells = {title: cell(read_run(tmp_path, whole=True)) for title, cell in COLUMNS.items()}
    assert cells["best acc"] == f"{min(r['test_far'] for r in rounds):.4f} far", "compare knows what is better, too"


@pytest.mark.parametrize("make", [line, sentences])
def test_the_same_bits_on_any_number_of_ranks(tmp_path: Path, make: Any) -> None:
    data = make()
    changes = {"rounds": 2, "local": Local(batch=10, lr=0.05, steps=3)}
    train_on(data, settings(tmp_path / "alone", **changes))
    for size in (2, 3):
        out = tmp_path / str(size)
        run_threads(size, lambda comm, out=out: train_on(data, settings(out, **changes), comm))
        assert (out / "model.safetensors").read_bytes() == (tmp_path / "alone" / "model.safetensors").read_bytes()
        logged = [without_seconds(metrics(tmp_path / name)) for name in ("alone", str(size))]
        shown = [[{k: v for k, v in r.items() if not k.startswith("bytes_")} for r in of_run] for of_run in logged]
        assert shown[0] == shown[1]


@pytest.mark.parametrize("metric", ["loss", "", "two words", "a-b"])
def test_a_metric_has_a_name_that_can_be_reported(metric: str) -> None:
    with pytest.raises(UserError, match=f"metric is '{metric}'; it must be a name such as accuracy, and not loss"):
        replace(CLASSIFY, metric=metric)


def test_an_objective_is_tried_before_the_first_round(tmp_path: Path) -> None:
    def two(outputs: Tensor, labels: Tensor) -> Tensor:
        return outputs.sum()

    for change, words in (
        (
            {"total": lambda outputs, labels: outputs},
            "its total returned a tensor .*; it must be a tensor of one number",
        ),
        ({"total": lambda outputs, labels: 1.0}, "its total returned float"),
        ({"loss": two}, "its loss for 'mean' raised TypeError: .*positional arguments"),
    ):
        with pytest.raises(UserError, match=f"objective 'odd': {words}"):
            train_on(replace(line(), objective=replace(REGRESS, name="odd", **change)), settings(tmp_path))
    assert not list(tmp_path.iterdir())


def test_compare_knows_which_way_a_metric_of_ones_own_is_better(tmp_path: Path) -> None:
    for name, rises in (("up", True), ("down", False)):
        own = replace(REGRESS, name="own", metric="distance", rises=rises)
        train_on(replace(line(), objective=own), settings(tmp_path / name, rounds=6, split="natural"))
        values = [r["test_distance"] for r in metrics(tmp_path / name)]
        best = {title: cell(read_run(tmp_path / name, whole=True)) for title, cell in COLUMNS.items()}["best acc"]
        assert best == f"{(max if rises else min)(values):.4f} distance" and max(values) > min(values)


def test_logits_for_more_classes_than_there_are_do_no_harm() -> None:
    labels = torch.tensor([0, 2])
    check_outputs(torch.zeros(2, 10), labels, 3, CLASSIFY, "wide")
    with pytest.raises(UserError, match="needs a tensor"):
        check_outputs(torch.zeros(2, 2), labels, 3, CLASSIFY, "narrow")
