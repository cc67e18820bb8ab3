"""The still part of a model: what is frozen is neither sent nor saved, whatever its type, and does not change."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from shell import ALONE, CLASSES, CPU, SIDE, metrics, sandbox, settings_of, tiny
from torch import Tensor, nn

import fedmpi
from fedmpi import api
from fedmpi.clients.still import Still, twin
from fedmpi.clients.task import Task
from fedmpi.comm import Comm, SoloComm
from fedmpi.comm.env import Place
from fedmpi.comm.node import share_node
from fedmpi.commands import main
from fedmpi.data import Partition
from fedmpi.errors import CommonError, RunError, UserError
from fedmpi.flat import layout_of, parts_of
from fedmpi.runs.build import Overrides, prepare
from fedmpi.runs.run import run, share_still

INPUTS, WIDTH = SIDE * SIDE, 24


class Tuned(nn.Module):
    """A bf16 base, normalised, with what a checkpoint does not have; and a head that is trained."""

    position: Tensor
    mask: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(INPUTS, WIDTH).bfloat16().requires_grad_(False)
        self.norm, self.head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, CLASSES)
        self.register_buffer("position", torch.arange(WIDTH) / WIDTH, persistent=False)
        self.register_buffer("mask", torch.ones(WIDTH, WIDTH, dtype=torch.bool).tril(), persistent=False)
        self.register_buffer("scale", torch.tensor(0.5, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.base(x.flatten(1).bfloat16()) * self.scale
        logits: Tensor = self.head(self.norm(hidden.float() + self.position @ self.mask.float()).relu())
        return logits


def tuned(change: Callable[[Tuned], object] = lambda model: None) -> Tuned:
    torch.manual_seed(4)
    model = Tuned()
    change(model)
    return model


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with sandbox():
        monkeypatch.setattr(api, "find_place", lambda environ: ALONE)
        monkeypatch.setattr(api, "_connected", [])
        yield


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def train_on(comm: Comm, out: Path, rounds: int, mask: str) -> None:
    """Train the model with the frozen base on all ranks."""
    share_node(comm)
    cfg = replace(settings_of(out, rounds=rounds, mask=mask, resume="force"), model=None)
    with sandbox():
        run(prepare(cfg, Overrides(model=tuned())), comm, Place("alone", comm.rank, comm.size, 0, 1), CPU, {})


# What is in which part


def test_the_vector_has_what_is_trained_or_averaged_and_nothing_else() -> None:
    model = tuned()
    assert [span.name for span in layout_of(model).spans] == [
        *("norm.weight", "norm.bias", "head.weight", "head.bias"),
        *("norm.running_mean", "norm.running_var"),
    ]
    parts = parts_of(model)
    assert list(parts.ints) == ["norm.num_batches_tracked"]
    assert list(parts.still) == ["base.weight", "base.bias", "position", "mask", "scale"]
    still = Still(model)
    assert still.elements == INPUTS * WIDTH + WIDTH + WIDTH + WIDTH**2 + 1
    assert still.bytes == 2 * (INPUTS * WIDTH + WIDTH) + 4 * WIDTH + WIDTH**2 + 2


def test_a_fingerprint_is_of_names_types_shapes_and_values() -> None:
    def changed(change: Callable[[Tuned], object]) -> str:
        return Still(tuned(change)).sha256()

    alike = Still(tuned()).sha256()
    assert changed(lambda model: model.head.weight.data.zero_()) == alike
    others = [
        changed(lambda model: model.base.weight.data[0].zero_()),
        changed(lambda model: model.base.float()),
        changed(lambda model: model.mask.data[1].zero_()),
        changed(lambda model: model.head.bias.requires_grad_(False)),
        changed(lambda model: setattr(model.base.weight, "data", model.base.weight.data.view(INPUTS, WIDTH))),
    ]
    assert len({alike, *others}) == 6


def test_a_twin_shares_what_is_frozen_and_nothing_else() -> None:
    model = tuned()
    other = twin(model)
    assert isinstance(other, Tuned)
    assert other.base.weight.data_ptr() == model.base.weight.data_ptr() and other.base.weight is not model.base.weight
    assert not other.base.weight.requires_grad and other.head.weight.requires_grad
    for one, same in ((model.head.weight, other.head.weight), (model.norm.running_mean, other.norm.running_mean)):
        assert one is not None and same is not None
        assert torch.equal(one, same) and one.data_ptr() != same.data_ptr()
    other.base.float()
    assert model.base.weight.dtype == torch.bfloat16


# Training


@pytest.mark.processes
@pytest.mark.parametrize("mask", ["mean", "gma"])
def test_equal_bits_on_any_number_of_ranks_and_after_a_resume_on_another(
    mask: str, gloo: Callable[..., None], tmp_path: Path
) -> None:
    train_on(SoloComm(), tmp_path / "1", 4, mask)
    gloo(3, train_on, tmp_path / "3", 4, mask)
    gloo(2, train_on, tmp_path / "2-then-1", 2, mask)
    train_on(SoloComm(), tmp_path / "2-then-1", 4, mask)
    models = [tmp_path / name / "model.safetensors" for name in ("1", "3", "2-then-1")]
    assert len({sha256(path) for path in models}) == 1
    saved = load_file(models[0])
    assert sorted(saved) == sorted(name for name, t in tuned().state_dict().items() if name[:4] not in ("base", "scal"))
    model = tuned()
    missing, unexpected = model.load_state_dict(saved, strict=False)
    assert missing == ["scale", "base.weight", "base.bias"] and not unexpected


@pytest.mark.processes
def test_ranks_of_a_node_share_one_copy(gloo: Callable[..., None]) -> None:
    gloo(3, check_shared)


def check_shared(comm: Comm) -> None:
    share_node(comm)
    model, data = tuned(), tiny()
    task = Task(model, data, Partition(torch.tensor([0, 200]).numpy(), torch.arange(200).numpy()), 0, CPU, comm.size)
    values = {name: t.detach().clone() for name, t in task.still.tensors.items()}
    share_still(task, comm)
    assert all(torch.equal(t, values[name]) for name, t in task.still.tensors.items())
    assert model.base.weight is task.still.tensors["base.weight"] and not task.still.written
    comm.barrier()
    if comm.rank == 1:
        model.base.weight.data[3, 5] = 77.0
        model.mask[0, 1] = True
    comm.barrier()
    assert model.base.weight[3, 5] == 77.0 and model.mask[0, 1]


def test_what_is_sent_and_saved_follows_what_is_trained(tmp_path: Path) -> None:
    train_on(SoloComm(), tmp_path / "run", 2, "gma")
    moved = layout_of(tuned()).length
    (first, _) = metrics(tmp_path / "run")
    assert first["client_bytes_up"] == 4 * (4 * moved + 8)
    (slices,) = (tmp_path / "run" / "checkpoints" / "round-2").glob("slice-*")
    with safe_open(slices, "pt") as file:
        assert file.get_slice("model").get_shape() == [moved]


def test_a_model_from_python_comes_back_whole() -> None:
    model, data = tuned(), tiny()
    parts = [(data.x[i::4].float(), data.y[i::4]) for i in range(4)]
    result = fedmpi.train(model, parts, parts[0], rounds=2, threads=1, quiet=True, local={"lr": 0.1})
    mine, its = model.state_dict(), result.model.state_dict()
    assert list(mine) == list(its)
    for name in mine:
        still = name in ("base.weight", "base.bias", "scale")
        assert torch.equal(mine[name], its[name]) == still, name
        assert mine[name].data_ptr() != its[name].data_ptr() and mine[name].dtype == its[name].dtype


def test_freezing_by_pattern_keeps_the_values_and_trains_the_rest(tmp_path: Path) -> None:
    def trained(name: str, freeze: str | None) -> dict[str, Tensor]:
        cfg = settings_of(tmp_path / name, model="lenet")
        run(prepare(replace(cfg, local=replace(cfg.local, freeze=freeze))), SoloComm(), ALONE, CPU, {})
        return load_file(tmp_path / name / "model.safetensors")

    everything = trained("everything", None)
    names = list(everything)
    assert list(trained("modules", "conv1,conv2")) == [n for n in names if not n.startswith("conv")]
    assert list(trained("patterns", "*.bias, fc?.weight")) == ["conv1.weight", "conv2.weight"]


def test_a_frozen_run_can_be_attacked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = settings_of(tmp_path / "run", model="lenet")
    run(prepare(replace(cfg, local=replace(cfg.local, freeze="conv1"))), SoloComm(), ALONE, CPU, {})
    assert main(["attack", str(tmp_path / "run")]) == 0, capsys.readouterr().err


def test_the_plan_counts_a_frozen_part_once_per_node(capsys: pytest.CaptureFixture[str]) -> None:
    given = "--data tiny --split iid --model lenet --clients 8 --cohort 4 --ranks 4 --ranks_per_node 2 --json".split()
    assert main(["plan", *given]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert main(["plan", *given, "--local.freeze", "fc1,fc2"]) == 0
    part = json.loads(capsys.readouterr().out)
    frozen = 4 * (16 * 120 + 120 + 120 * 84 + 84)  # images of 12x12 leave 1x1 in 16 channels
    assert part["memory"]["frozen part"] == {"rank": frozen, "node": frozen}
    assert "frozen part" not in whole["memory"] and part["sent"]["total"] < whole["sent"]["total"] / 2


# What is refused


class Scratch(nn.Module):
    """A model that writes to what it does not train."""

    seen: Tensor

    def __init__(self, persistent: bool, secretly: bool = False) -> None:
        super().__init__()
        self.layer, self.secretly = nn.Linear(INPUTS, CLASSES), secretly
        self.register_buffer("seen", torch.zeros(1), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            target = self.seen.data if self.secretly else self.seen
            target += 1
        logits: Tensor = self.layer(x.flatten(1))
        return logits


def attempt(model: nn.Module, tmp_path: Path, **local: Any) -> None:
    cfg = replace(settings_of(tmp_path / "run"), model=None)
    cfg = replace(cfg, local=replace(cfg.local, **local))
    run(prepare(cfg, Overrides(model=model)), SoloComm(), ALONE, CPU, {})


def test_a_buffer_that_is_not_saved_must_not_change(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="training changed 'seen'.*persistent=True"):
        attempt(Scratch(persistent=False), tmp_path)
    attempt(Scratch(persistent=True), tmp_path)  # it is averaged


def test_a_write_that_torch_does_not_count_is_found_at_the_end(tmp_path: Path) -> None:
    with pytest.raises(CommonError, match="training changed the frozen part"):
        attempt(Scratch(persistent=False, secretly=True), tmp_path)


def test_a_late_write_ends_the_run_with_the_name(tmp_path: Path) -> None:
    class Late(Scratch):
        def forward(self, x: Tensor) -> Tensor:
            if self.training and torch.is_grad_enabled():
                self.calls = getattr(self, "calls", 0) + 1
                if self.calls > 2:
                    self.seen += 1
            logits: Tensor = self.layer(x.flatten(1))
            return logits

    with pytest.raises(RunError, match="round 1, client .*training changed 'seen'"):
        attempt(Late(persistent=False), tmp_path)


def test_another_frozen_part_is_refused_on_resuming(tmp_path: Path) -> None:
    out = tmp_path / "run"
    train_on(SoloComm(), out, 2, "gma")
    cfg = replace(settings_of(out, rounds=4, resume="force"), model=None)
    other = tuned(lambda model: model.base.weight.data[0].zero_())
    with pytest.raises(UserError, match="another frozen part of the model"):
        run(prepare(cfg, Overrides(model=other)), SoloComm(), ALONE, CPU, {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.requires_grad_(False), "no trainable parameter"),
        (lambda model: model.base.requires_grad_(), "'base.weight' is torch.bfloat16.*freeze it"),
        (lambda model: tie_by_memory(model), "'norm.weight' and 'norm.bias' share memory"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(
    change: Callable[[Tuned], object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        attempt(tuned(change), tmp_path)


def tie_by_memory(model: Tuned) -> None:
    model.norm.bias.data = model.norm.weight.data


def test_a_pattern_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--local.freeze: 'haed' matches nothing in the model.*base.weight"):
        attempt(tuned(), tmp_path, freeze="haed")
    with pytest.raises(UserError, match="no trainable parameter"):
        attempt(tuned(), tmp_path, freeze="*")


class Eight(nn.Module):
    """A base of whole numbers with a scale, as 8-bit quantisation keeps it, and a trained head."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.randint(-127, 128, (8, 4), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
        self.codes, self.head = nn.Parameter(codes, requires_grad=False), nn.Linear(8, 3)
        self.register_buffer("scale", torch.full((8, 1), 0.01, dtype=torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.relu(x @ (self.codes.float() * self.scale.float()).t()))
        return logits


def test_a_base_of_eight_bits_is_still() -> None:
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(40, 4, generator=rng)
    pair = x, (x.sum(1) > 0).long()
    result = fedmpi.train(Eight(), [pair, pair], pair, rounds=3, lr=0.1, threads=1, quiet=True)
    assert result.model.codes.dtype == torch.int8 and torch.equal(result.model.codes, Eight().codes)
    assert result.reports[-1]["client_bytes_up"] == 2 * 4 * (8 * 3 + 3), "the head alone travels"
