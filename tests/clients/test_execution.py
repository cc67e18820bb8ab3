"""Ways to compute a step: each is the same step but for its rounding, and the run says which one it took."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from conftest import REPO, need, rank_environment
from shell import ALONE, CLASSES, CPU, SIDE, metrics, sandbox, settings_of, tiny, train
from test_task import job_of, partition
from torch import nn

from fedmpi.clients.execution import Mode, repeat
from fedmpi.clients.task import Task
from fedmpi.comm import SoloComm
from fedmpi.errors import UserError
from fedmpi.models.lenet import LeNet
from fedmpi.runs.build import Overrides, load_data, make_task, prepare
from fedmpi.runs.config import Local, Step
from fedmpi.runs.run import describe_step, run

BOTH = ("contiguous", "channels_last")


@pytest.fixture(autouse=True)
def box() -> Iterator[pytest.MonkeyPatch]:
    with sandbox() as patch:
        yield patch


def task(mode: Mode, channels_last: bool = False) -> Task:
    torch.manual_seed(0)
    return Task(LeNet(1, SIDE, SIDE, CLASSES), tiny(), partition(), 0, CPU, channels_last=channels_last, mode=mode)


@pytest.mark.parametrize("channels_last", [False, True])
def test_bf16_is_the_same_gradient_with_fewer_digits_in_float32(channels_last: bool) -> None:
    found = []
    for precision in ("float32", "bf16"):
        one = task(Mode(precision), channels_last)
        job = job_of(one)
        found.append(job.grad(job.x_P, next(job.batches())).clone())
        assert found[-1].dtype == one.x_N.dtype == torch.float32
        assert {p.dtype for p in one.model.parameters()} == {torch.float32}
    full, half = found
    off = float((full - half).norm() / full.norm())
    assert 1e-5 < off < 0.2  # another computation of the same thing; pools see ties in bf16


def test_outputs_of_a_path_are_float32_and_what_is_no_tensor_passes() -> None:
    forward = Mode("bf16").forward(nn.Linear(3, 2), CPU)
    assert forward(torch.ones(4, 3)).dtype == torch.float32
    assert Mode("bf16").forward(lambda x: {"logits": x}, CPU)(1) == {"logits": 1}
    model = nn.Linear(3, 2)
    assert Mode().forward(model, CPU) is model


def test_a_run_in_bf16_learns_and_is_scored_in_float32(tmp_path: Path) -> None:
    seen = []

    def watch(model: nn.Module, x: tuple[torch.Tensor], y: torch.Tensor) -> None:
        seen.append((model.training, y.dtype))

    outcome = run(prepare(settings_of(tmp_path, step=Step(precision="bf16"))), SoloComm(), ALONE, CPU, {})
    handle = outcome.task.model.register_forward_hook(watch)
    list(outcome.task.score([slice(0, 5)]))
    handle.remove()
    assert seen == [(False, torch.float32)] and outcome.last.test_accuracy > 0.9


def test_a_model_that_cannot_take_a_path_is_refused_before_anything_starts(tmp_path: Path) -> None:
    class Strict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(SIDE * SIDE, CLASSES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.linear(x.flatten(1))
            assert y.dtype == torch.float32, "digits are missing"
            return y

    given = Overrides(model=Strict())
    with pytest.raises(UserError, match="'Strict' cannot be trained with --step.precision bf16: .* digits are missing"):
        run(prepare(settings_of(tmp_path / "x", step=Step(precision="bf16")), given), SoloComm(), ALONE, CPU, {})
    assert not (tmp_path / "x").exists()


def test_trying_a_path_leaves_the_model_as_it_is(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(200, CLASSES))
    begun = []
    for precision in ("float32", "bf16"):
        data, parts, meta = load_data(settings_of(tmp_path))
        prepared = prepare(settings_of(tmp_path, step=Step(precision=precision)), Overrides(model=model))
        begun.append(make_task(prepared, data, parts, meta, 1, CPU)[1].start())
    assert torch.equal(begun[0][0], begun[1][0]) and torch.equal(begun[0][1], begun[1][1])
    assert repeat(torch.arange(3), 7).tolist() == [0, 1, 2, 0, 1, 2, 0]


# The layout


def layout_of_run(out: Path) -> str:
    return str(yaml.safe_load((out / "config.yaml").read_text())["step"]["layout"])


@pytest.mark.parametrize(("asked", "model", "taken"), [("auto", "lenet", 1), ("auto", "logistic", 0)])
def test_auto_is_what_the_models_row_says(tmp_path: Path, asked: str, model: str, taken: int) -> None:
    outcome = run(prepare(settings_of(tmp_path, model=model, step=Step(asked))), SoloComm(), ALONE, CPU, {})
    assert outcome.cfg.step.layout == layout_of_run(tmp_path) == BOTH[taken]
    assert any(span.channels_last for span in outcome.task.layout.spans) == bool(taken)


@pytest.mark.parametrize("layout", BOTH)
def test_a_layout_that_is_asked_for_is_taken(tmp_path: Path, layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run(prepare(settings_of(tmp_path, model="lenet", step=Step(layout))), SoloComm(), ALONE, CPU, {})
    assert any(span.channels_last for span in outcome.task.layout.spans) == (layout == "channels_last")
    assert f"step: {layout}, float32, gradient by hand\n" in capsys.readouterr().out


def test_the_head_of_a_run_names_the_execution_mode() -> None:
    assert describe_step(Step("contiguous")) == "contiguous, float32"
    assert describe_step(Step("channels_last", "bf16", "default")) == "channels_last, bf16, compiled (default)"
    assert describe_step(Step("contiguous", together=4)) == "contiguous, float32, 4 clients at once"


# Compiled

COMPILED = """
import sys, torch
sys.path.insert(0, {tests!r})
from pathlib import Path
from shell import *
from fedmpi.runs.config import Step
from fedmpi.errors import UserError
torch.set_num_threads(1)
with sandbox():
    try:
        local = Local(batch=16, lr=0.05, epochs=2)  # uga takes second derivatives too
        train(settings_of(Path({out!r}), step=Step(compile="default"), local=local, algorithm="uga"))
    except UserError as error:
        print("refused:", error)
"""


def train_compiled(tmp_path: Path, **environ: str) -> str:
    """What a compiled run says, in a process of its own: it has a cache of its own, and torch warns as it imports."""
    code = COMPILED.format(tests=str(REPO / "tests"), out=str(tmp_path / "compiled"))
    env = rank_environment() | {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=env | environ, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_compiled_run_is_the_same_but_for_rounding(tmp_path: Path) -> None:
    need("compiler", shutil.which(os.environ.get("CXX", "g++")) is not None, "there is no C++ compiler")
    said = train_compiled(tmp_path)
    assert "step: contiguous, float32, compiled (default)\n" in said
    train(settings_of(tmp_path / "plain", local=Local(batch=16, lr=0.05, epochs=2), algorithm="uga"))
    for ours, theirs in zip(metrics(tmp_path / "compiled"), metrics(tmp_path / "plain"), strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-4)
        assert ours["test_loss"] == pytest.approx(theirs["test_loss"], rel=1e-4)


@pytest.mark.slow
def test_without_a_compiler_it_is_refused_before_anything_starts(tmp_path: Path) -> None:
    said = train_compiled(tmp_path, CXX=str(tmp_path / "no-such-compiler"))
    assert said.startswith("refused: model 'logistic' cannot be trained with --step.compile default: ")
    assert "needs a C++ compiler" in said and said.count("\n") == 1
    assert not (tmp_path / "compiled").exists()
