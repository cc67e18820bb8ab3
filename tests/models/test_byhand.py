"""Gradients that are written out, against those of autograd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from federation import CPU, partition
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedmpi.clients.execution import Mode
from fedmpi.clients.feed import Batch
from fedmpi.clients.task import Task
from fedmpi.data import Arrays
from fedmpi.data.objective import CLASSIFY, REGRESS
from fedmpi.models.kernels.byhand import by_hand
from fedmpi.models.kernels.convpool import Room
from fedmpi.models.kernels.recognise import recognised
from fedmpi.models.lenet import LeNet
from fedmpi.models.logistic import Logistic

SAMPLES, CLASSES = 30, 5


def colour() -> LeNet:
    return LeNet(3, 20, 17, CLASSES, widths=(4, 3))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lenet": lambda: LeNet(3, 20, 17, CLASSES),
    "dropout": lambda: LeNet(3, 20, 17, CLASSES, dropout=0.5),
    "narrow": colour,
    "logistic": lambda: Logistic((3, 20, 17), CLASSES),
}


def arrays() -> Arrays:
    rng = torch.Generator().manual_seed(2)
    x = torch.randn(SAMPLES, 3, 20, 17, generator=rng)
    y = torch.randint(0, CLASSES, (SAMPLES,), generator=rng)
    return Arrays("made", CLASSES, x, y, x[:2], y[:2])


def task(model: nn.Module, channels_last: bool = False, grey: bool = False, **changes) -> Task:
    data = replace(arrays(), **changes.pop("data", {}))
    if grey:
        data = replace(data, x=data.x[:, :1, :12, :12], test_x=data.test_x[:, :1, :12, :12])
    made = {"dtype": torch.float64} | changes
    made_of = Task(model.to(made["dtype"]), data, partition(), 11, CPU, 1, channels_last, **made)
    made_of.model.train()
    return made_of


def both(of: Task, batch: Batch) -> tuple[list[Tensor], list[Tensor]]:
    """Loss and gradient: written out, and by autograd."""
    assert of.by_hand is not None
    of.grad_T.fill_(torch.nan)  # all of it is written
    ours = [of.gradient(batch), of.grad_T.clone()]
    hand, of.by_hand = of.by_hand, None
    theirs = [of.gradient(batch), of.grad_T.clone()]
    of.by_hand = hand
    return ours, theirs


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", MODELS)
@settings(deadline=None, max_examples=15)
@given(numbers=st.lists(st.integers(0, SAMPLES - 1), min_size=1, max_size=9), seed=st.integers(0, 2**40))
def test_it_is_the_gradient_of_autograd(name: str, channels_last: bool, numbers: list[int], seed: int) -> None:
    """Of any batch, and with what dropout draws for it, which is what autograd's forward pass would draw."""
    torch.manual_seed(5)
    ours, theirs = both(task(MODELS[name](), channels_last), Batch(torch.tensor(numbers), seed))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-13)
    assert ours[1].any()


def test_dropout_drops_for_each_batch_anew_and_for_the_same_one_alike() -> None:
    of = task(MODELS["dropout"]())
    losses = [float(of.gradient(Batch(torch.arange(8), seed))) for seed in (1, 2, 1)]
    assert losses[0] == losses[2] != losses[1]


def test_the_gradient_is_where_the_parameters_are_now() -> None:
    """The task moves them in place."""
    of, batch = task(colour()), Batch(torch.arange(6), 0)
    before = of.gradient(batch)
    of.x_N.mul_(0.5)
    ours, theirs = both(of, batch)
    assert ours[0] != before and torch.allclose(ours[1], theirs[1], rtol=1e-10, atol=1e-13)


class FromADataset:
    """A feed whose labels nobody has checked."""

    def __init__(self, y: Tensor) -> None:
        self.y = y

    def train(self, batch: Batch) -> tuple[Tensor, Tensor]:
        x = arrays().x.double()[batch.samples]
        return x, self.y[batch.samples]


@pytest.mark.parametrize("passed_over", [True, False])
def test_labels_that_the_cross_entropy_passes_over_are_left_to_autograd(
    passed_over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes -100 for no label; and a column of labels for labels."""
    of, y = task(colour()), arrays().y.unsqueeze(1)
    if passed_over:
        y[1] = -100
    monkeypatch.setattr(of, "feed", FromADataset(y))
    called: list[int] = []
    hand = of.by_hand
    monkeypatch.setattr(of, "by_hand", lambda x, y: (called.append(len(y)), hand(x, y))[1])
    ours, theirs = both(of, Batch(torch.arange(4), 0))
    assert torch.allclose(ours[0], theirs[0]) and torch.allclose(ours[1], theirs[1], rtol=1e-10, atol=1e-13)
    assert called == ([] if passed_over else [4])


def test_rooms_are_given_back() -> None:
    Room.spare.clear()
    of = task(colour())
    for count in (4, 4, 3):
        of.gradient(Batch(torch.arange(count), 0))
    assert sorted(room.key[0][0] for room in Room.spare) == [3, 3, 4, 4]


class Inverted(LeNet):
    """A LeNet that does more than its layers."""

    def forward(self, x: Tensor) -> Tensor:
        return -super().forward(x)


class Named(LeNet):
    """A LeNet that does not."""


def hooked() -> nn.Module:
    model = colour()
    model.fc1.register_forward_hook(lambda module, inputs, out: 2 * out)
    return model


class Stranger(nn.Linear):
    """Somebody's model that has a network of another kind."""

    @property
    def network(self) -> str:
        raise RuntimeError("nobody is to ask")


def hooked_tensor() -> nn.Module:
    model = colour()
    model.fc1.bias.register_hook(lambda grad: 2 * grad)
    return model


def frozen() -> nn.Module:
    model = colour()
    model.fc2.weight.requires_grad_(False)
    return model


def without_bias() -> nn.Module:
    model = colour()
    model.fc2 = nn.Linear(120, 84, bias=False)
    return model


def another_layer() -> nn.Module:
    model = colour()

    class Twice(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model.fc2 = Twice(120, 84)
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: Inverted(3, 20, 17, CLASSES),
        hooked,
        hooked_tensor,
        frozen,
        without_bias,
        another_layer,
        lambda: nn.Linear(3, 2),
        lambda: Stranger(3, 2),
    ],
)
def test_what_is_more_than_its_network_is_left_to_autograd(make: Callable[[], nn.Module]) -> None:
    model = make()
    params = [p for p in model.parameters() if p.requires_grad]
    assert by_hand(model, params, [torch.zeros_like(p) for p in params]) is None


def test_so_are_other_losses_and_other_paths() -> None:
    assert task(Named(3, 20, 17, CLASSES)).by_hand is not None
    assert task(colour(), mode=Mode(precision="bf16"), dtype=torch.float32).by_hand is None
    own = replace(CLASSIFY, loss=lambda outputs, labels, how: CLASSIFY.loss(outputs, labels, how))
    assert task(colour(), data={"objective": own}).by_hand is None
    numbers = {"y": torch.randn(SAMPLES, CLASSES), "test_y": torch.randn(2, CLASSES), "objective": REGRESS}
    of = task(Logistic((3, 20, 17), CLASSES), data=numbers | {"classes": 0})
    assert of.by_hand is None
    of.gradient(Batch(torch.arange(4), 0))
    assert of.grad_T.any()


# Models of the user's own


class Own(nn.Module):
    """A LeNet as people write it."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 5, padding=2), nn.Conv2d(4, 6, 3)
        self.pool, self.drop = nn.MaxPool2d(2, 2), nn.Dropout(drop)
        self.fc1, self.fc2 = nn.Linear(24, 10), nn.Linear(10, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = F.max_pool2d(self.conv2(x), 2).relu()
        x = x.view(x.size(0), -1)
        return self.fc2(self.drop(F.relu(self.fc1(x))))


class Shaped(Own):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(F.max_pool2d(self.conv1(x), kernel_size=2, stride=2))
        x = self.pool(torch.relu(self.conv2(x))).reshape(x.shape[0], -1)
        return self.fc2(self.drop(self.fc1(x).relu()))


class Branched(Own):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.fc2.bias


class Noisy(Own):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.1 * torch.randn_like(x) if self.training else x)


class Chosen(Own):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


class Fickle(Own):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) if self.calls % 2 else super().forward(x).relu()


class Mean(Own):
    """Of a pool that keeps the size, and of the mean of what the pool left."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(F.relu(self.conv1(x)), 2)
        return self.fc2(F.relu(self.fc1(self.pool(F.relu(self.conv2(x))).flatten(1))))


def stride() -> nn.Module:
    layers = [nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, CLASSES)]
    return nn.Sequential(*layers)


def mlp(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 10), nn.ReLU(), *more, nn.Linear(10, CLASSES))


RECOGNISED: dict[str, Callable[[], nn.Module]] = {
    "own": Own,
    "dropout": lambda: Own(0.5),
    "shaped": Shaped,
    "mlp": mlp,
    "mlp with dropout": lambda: mlp(nn.Identity(), nn.Dropout(0.3)),
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(144, CLASSES)),
}
OTHER: dict[str, Callable[[], nn.Module]] = {
    "branched": Branched,
    "noisy": Noisy,
    "chosen by values": Chosen,
    "fickle": Fickle,
    "mean pool": Mean,
    "stride": stride,
    "log-softmax": lambda: nn.Sequential(mlp(), nn.LogSoftmax(1)),
    "tanh": lambda: nn.Sequential(nn.Flatten(), nn.Linear(144, 10), nn.Tanh(), nn.Linear(10, CLASSES)),
    "norm": lambda: mlp(nn.BatchNorm1d(10)),
    "no bias": lambda: nn.Sequential(nn.Flatten(), nn.Linear(144, CLASSES, bias=False)),
    "dropout on images": lambda: nn.Sequential(nn.Dropout(0.5), mlp()),
    "two dropouts": lambda: mlp(nn.Dropout(0.1), nn.Linear(10, 10), nn.ReLU(), nn.Dropout(0.2)),
}


@pytest.mark.parametrize("name", RECOGNISED)
@settings(deadline=None, max_examples=8)
@given(numbers=st.lists(st.integers(0, SAMPLES - 1), min_size=1, max_size=9), seed=st.integers(0, 2**40))
def test_a_model_of_such_layers_is_recognised_and_has_the_gradient_of_autograd(
    name: str, numbers: list[int], seed: int
) -> None:
    torch.manual_seed(5)
    ours, theirs = both(task(RECOGNISED[name](), grey=True), Batch(torch.tensor(numbers), seed))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)
    assert ours[1].any()


@pytest.mark.parametrize("name", OTHER)
def test_what_does_more_is_left_to_autograd(name: str) -> None:
    assert task(OTHER[name](), grey=True).by_hand is None


def test_it_can_be_turned_off_and_leaves_the_mode_alone() -> None:
    model = Own().eval()
    assert recognised(model, (1, 12, 12), torch.float32) is not None and not model.training
    assert recognised(model, (1, 28, 28), torch.float32) is None, "of another size"
    assert task(Own(), grey=True, kernels=False).by_hand is None
