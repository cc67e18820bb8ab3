"""The models: shapes, sizes, the function they compute, and what is said where one does not fit the data."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import REPO
from torch import Tensor, nn

from fedmpi.errors import UserError
from fedmpi.flat import bind, layout_of
from fedmpi.models import MODELS, ModelRow, find_model, fits, make_model
from fedmpi.models.gru import GRU
from fedmpi.models.lenet import LeNet, cnn
from fedmpi.models.logistic import Logistic
from fedmpi.models.vision import names, resnet18_bn, resnet18_gn


def images(channels: int, height: int, width: int, classes: int = 10) -> dict[str, Any]:
    """What images offer."""
    shape = (channels, height, width)
    return {"shape": shape, "channels": channels, "height": height, "width": width, "classes": classes}


def sequences(tokens: int, length: int, classes: int) -> dict[str, Any]:
    """What sequences offer."""
    return {"shape": (length,), "tokens": tokens, "length": length, "classes": classes}


def made(name: str, offers: dict[str, Any], data: str = "these") -> nn.Module:
    return make_model(name, find_model(name), offers, data)


def refusal(name: str, offers: dict[str, Any], data: str = "these") -> str:
    """What is said of a model that cannot be made."""
    with pytest.raises(UserError) as caught:
        made(name, offers, data)
    return str(caught.value)


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def samples(offers: dict[str, Any], n: int = 2) -> Tensor:
    """A batch for data that offer this."""
    if "tokens" in offers:
        return torch.randint(0, offers["tokens"], (n, *offers["shape"]))
    return torch.rand(n, *offers["shape"])


# All rows

IMAGES = [(1, 28, 28, 10), (3, 32, 32, 100), (1, 12, 12, 2), (3, 64, 64, 200), (2, 13, 40, 5), (1, 31, 33, 3)]
SEQUENCES = [(80, 80, 80), (2, 1, 7), (300, 5, 2)]
NUMBERS = [{"shape": (7,), "classes": 3}, {"shape": (2, 5), "classes": 1}]
REGRESSIONS = [{"shape": (7,), "outputs": 1}, {"shape": (2, 3), "outputs": 4}, images(1, 6, 5) | {"outputs": 2}]
for offers in REGRESSIONS:
    offers.pop("classes", None)
DATA = [images(*i) for i in IMAGES] + [sequences(*s) for s in SEQUENCES] + NUMBERS + REGRESSIONS
PAIRS = [(name, offers) for name, row in MODELS.items() for offers in DATA if fits(row, offers)]


@pytest.mark.parametrize(("name", "offers"), PAIRS, ids=[f"{name}-{o['shape']}" for name, o in PAIRS])
def test_a_model_gives_one_number_a_class_or_an_output(name: str, offers: dict[str, Any]) -> None:
    model = made(name, offers)
    wanted = offers.get("classes") or offers["outputs"]
    assert model(samples(offers)).shape == (2, wanted)
    assert model.eval()(samples(offers, 1)).shape == (1, wanted)
    assert all(p.dtype == torch.float32 and p.requires_grad for p in model.parameters())


def test_every_row_fits_some_data_and_all_data_but_theirs_are_refused() -> None:
    assert {name for name, _ in PAIRS} == set(MODELS)
    by_kind = {kind: {name for name, row in MODELS.items() if kind in row.takes} for kind in ("images", "sequences")}
    assert by_kind == {"images": set(MODELS) - {"gru"}, "sequences": {"gru"}}
    assert [name for name, row in MODELS.items() if row.regresses] == ["logistic"]


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_same_seed_draws_the_same_weights(name: str) -> None:
    offers = sequences(20, 6, 20) if name == "gru" else images(3, 16, 16)

    def weights(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        return list(made(name, offers).state_dict().values())

    one, two, other = weights(7), weights(7), weights(8)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(one, other, strict=True) if a.dim() > 1)


# LeNet and the CNN


def test_lenet_has_the_parameters_of_lecuns() -> None:
    assert parameters(LeNet(1, 28, 28, 10)) == 61_706
    assert parameters(LeNet(1, 32, 32, 10)) == 61_706  # 28x28 is padded to 32x32
    assert parameters(LeNet(3, 32, 32, 10)) == 62_006


def test_lenet_computes_relu_before_pooling_just_as_well() -> None:
    torch.manual_seed(0)
    model, x = LeNet(1, 28, 28, 10), torch.randn(8, 1, 28, 28)

    def as_published(x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(model.conv1(x)), 2)
        x = F.max_pool2d(F.relu(model.conv2(x)), 2)
        return model.fc3(F.relu(model.fc2(F.relu(model.fc1(x.flatten(1))))))

    assert torch.allclose(model(x), as_published(x), rtol=1e-4, atol=1e-6)
    assert torch.allclose(model.double()(x.double()), as_published(x.double()), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("shape", "weights", "outputs"),
    [
        (
            (1, 28, 28, 10),
            "a82f1669b2f1a3343ce18776c1020fb9bd19c1b3f90b861f6e1ffdbf00ac48a4",
            "1b33a618b094c9dfb7e3fa55c9dbd38e3d25ec5a4591f0fc0e566a268f50927a",
        ),
        (
            (3, 32, 32, 100),
            "603581500d6ff9c5f47c1555ec81248524d034a0cebcdfcfba941ce550cfa57d",
            "e3422d21ffec8b60fb9a64510b52c554861beb14cc33c83ab15382cff5a2e53c",
        ),
        (
            (2, 13, 40, 5),
            "13eab7211540a847a7421aaa94705fd73e4838de031f3d27d726e6f9173f0759",
            "4cc0ddac48bb64f1c99a54d7c2ca2842811fed46274c734d57c5882fbbf95d1e",
        ),
    ],
)
def test_lenet_is_the_one_it_was_before_there_was_a_cnn(
    shape: tuple[int, int, int, int], weights: str, outputs: str
) -> None:
    torch.manual_seed(0)
    model = LeNet(*shape)
    sha = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        sha.update(name.encode() + tensor.numpy().tobytes())
    assert sha.hexdigest() == weights
    x = torch.linspace(-2, 2, 4 * shape[0] * shape[1] * shape[2], dtype=torch.float64).reshape(4, *shape[:3])
    before = torch.get_rng_state()
    text = " ".join(f"{v:.6f}" for v in model.double().train()(x).flatten().tolist())  # the same on every processor
    assert hashlib.sha256(text.encode()).hexdigest() == outputs
    assert torch.equal(torch.get_rng_state(), before)  # it draws nothing


def test_the_cnn_is_wider_where_there_is_colour() -> None:
    assert parameters(cnn(1, 28, 28, 10)) == 61_706
    linear = (16 * 5 * 5 * 120 + 120) + (120 * 84 + 84) + (84 * 10 + 10)
    assert parameters(cnn(3, 32, 32, 10)) == (3 * 25 * 32 + 32) + (32 * 25 * 16 + 16) + linear
    assert parameters(cnn(2, 28, 28, 10)) == (2 * 25 * 32 + 32) + (32 * 25 * 16 + 16) + linear
    assert cnn(1, 28, 28, 10).state_dict().keys() == LeNet(1, 28, 28, 10).state_dict().keys()


def test_the_cnn_is_lenet_where_nothing_is_dropped() -> None:
    torch.manual_seed(0)
    model, plain, x = cnn(1, 28, 28, 10), LeNet(1, 28, 28, 10), torch.randn(8, 1, 28, 28)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(x), plain(x))
    model.train()
    assert not torch.equal(model(x), model(x))


def test_dropout_of_a_half_follows_the_first_two_linear_layers_of_the_cnn() -> None:
    torch.manual_seed(0)
    model = cnn(1, 28, 28, 10).train()
    seen: dict[str, Tensor] = {}
    for name in ("fc1", "fc2", "fc3"):
        layer = model.get_submodule(name)
        layer.register_forward_hook(
            lambda _, given, out, name=name: seen.update({name: given[0], "after " + name: out})
        )
    logits = model(torch.randn(64, 1, 28, 28))
    for before, after in (("fc1", "fc2"), ("fc2", "fc3")):
        alive = seen["after " + before] > 0
        assert float((seen[after][alive] == 0).float().mean()) == pytest.approx(0.5, abs=0.05)
        kept = seen[after][alive] != 0
        assert torch.equal(seen[after][alive][kept], 2 * seen["after " + before][alive][kept])
    assert torch.equal(logits, seen["after fc3"])


@pytest.mark.parametrize("name", ["lenet", "cnn"])
@pytest.mark.parametrize(("height", "width"), [(11, 11), (11, 40), (40, 11), (1, 1)])
def test_lenet_and_cnn_refuse_an_image_that_pools_away(name: str, height: int, width: int) -> None:
    assert refusal(name, images(1, height, width)) == (
        f"lenet and cnn need images of at least 12x12; these are {height}x{width}: use --model logistic"
    )


# Logistic regression


def test_logistic_is_one_linear_layer_with_bias() -> None:
    assert parameters(Logistic((1, 28, 28), 10)) == 28 * 28 * 10 + 10
    for shape in ((2, 3, 4), (24,)):
        model, x = Logistic(shape, classes=5), torch.rand(6, *shape)
        weight, bias = model.parameters()
        assert torch.allclose(model(x), x.reshape(6, 24) @ weight.T + bias, atol=1e-6)


# ResNet-18


@pytest.mark.parametrize("make", [resnet18_gn, resnet18_bn])
def test_a_resnet18_has_the_parameters_of_cifars(make: Callable[..., nn.Module]) -> None:
    assert parameters(make(3, 32, 32, 10)) == 11_173_962
    assert parameters(make(1, 28, 28, 10)) == 11_173_962 - 2 * 9 * 64
    assert parameters(make(3, 64, 64, 200)) == 11_173_962 + 190 * 513


def test_group_normalisation_keeps_no_buffers_and_batch_normalisation_does() -> None:
    group, batch = (make(3, 32, 32, 10) for make in (resnet18_gn, resnet18_bn))
    assert not list(group.buffers())
    assert len(list(batch.buffers())) == 3 * 20
    norms = [module for module in group.modules() if isinstance(module, nn.GroupNorm)]
    assert len(norms) == 20 and {norm.num_groups for norm in norms} == {2}
    assert not any(isinstance(module, nn.BatchNorm2d) for module in group.modules())


@pytest.mark.parametrize("make", [resnet18_gn, resnet18_bn])
def test_the_stem_of_a_resnet18_keeps_the_size_and_is_drawn_like_its_other_convolutions(
    make: Callable[..., nn.Module],
) -> None:
    torch.manual_seed(0)
    model = make(3, 32, 32, 10)
    sizes: list[torch.Size] = []
    for layer in ("conv1", "layer1", "layer2", "layer3", "layer4"):
        model.get_submodule(layer).register_forward_hook(lambda *given: sizes.append(given[-1].shape[1:]))
    model(torch.rand(2, 3, 32, 32))
    assert sizes == [(64, 32, 32), (64, 32, 32), (128, 16, 16), (256, 8, 8), (512, 4, 4)]
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert convolutions[0].bias is None
    for convolution in convolutions:  # He et al.: a variance of 2 / fan_out
        fan_out = convolution.out_channels * convolution.kernel_size[0] ** 2
        assert float(convolution.weight.detach().std()) == pytest.approx((2 / fan_out) ** 0.5, rel=0.05)


@pytest.mark.parametrize("name", ["resnet18-gn", "resnet18-bn"])
def test_a_resnet18_takes_8x8_and_no_less(name: str) -> None:
    assert made(name, images(1, 8, 8)).train()(torch.rand(2, 1, 8, 8)).shape == (2, 10)
    assert refusal(name, images(1, 8, 7)) == (
        "resnet18-gn and resnet18-bn need images of at least 8x8; these are 8x7: use --model logistic"
    )
    assert "these are 7x32" in refusal(name, images(1, 7, 32))


def test_torchvision_is_imported_only_for_a_model_that_needs_it() -> None:
    program = (
        "import sys; from fedmpi.models import find_model\n"
        "find_model('lenet').make(1, 28, 28, 10), find_model('resnet18-gn')\n"
        "assert 'torchvision' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=REPO, check=True)


# The character model


def test_the_gru_has_8_and_256_units_and_reads_the_last_position() -> None:
    torch.manual_seed(0)
    model = GRU(80, 70)
    assert parameters(model) == 80 * 8 + 3 * 256 * (8 + 256 + 2) + 256 * 70 + 70
    x = torch.randint(0, 80, (3, 9))
    state, weights = torch.zeros(3, 256), dict(model.named_parameters())
    for position in range(9):  # the cell of Cho et al. as PyTorch writes it
        into = model.embed(x[:, position]) @ weights["gru.weight_ih_l0"].T + weights["gru.bias_ih_l0"]
        back = state @ weights["gru.weight_hh_l0"].T + weights["gru.bias_hh_l0"]
        (r_in, z_in, n_in), (r_back, z_back, n_back) = into.chunk(3, 1), back.chunk(3, 1)
        reset, keep = torch.sigmoid(r_in + r_back), torch.sigmoid(z_in + z_back)
        state = keep * state + (1 - keep) * torch.tanh(n_in + reset * n_back)
    assert torch.allclose(model(x), model.head(state), atol=1e-5)


def test_the_gradient_of_the_gru_reaches_every_parameter() -> None:
    torch.manual_seed(0)
    model = GRU(20, 20)
    F.cross_entropy(model(torch.arange(20).repeat(3, 1)), torch.tensor([1, 2, 3])).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and bool((parameter.grad != 0).any(dim=-1).all()), name


# The second derivative, which UGA needs


def smooth_resnet() -> nn.Module:
    """A resnet18-gn without kinks, so that finite differences are exact."""
    model = resnet18_gn(1, 16, 16, 3)
    for module in list(model.modules()):
        if hasattr(module, "relu"):
            module.relu = nn.Softplus()
    return model


@pytest.mark.parametrize(
    ("make", "x", "channels_last"),
    [
        (lambda: GRU(20, 3), torch.arange(20).reshape(2, 10), False),
        (smooth_resnet, torch.linspace(-1, 1, 512, dtype=torch.float64).reshape(2, 1, 16, 16), False),
        (smooth_resnet, torch.linspace(-1, 1, 512, dtype=torch.float64).reshape(2, 1, 16, 16), True),
    ],
    ids=["gru", "resnet18-gn", "resnet18-gn, channels last"],
)
def test_a_model_can_be_differentiated_twice(make: Callable[[], nn.Module], x: Tensor, channels_last: bool) -> None:
    torch.manual_seed(0)
    model, labels, step = make().double(), torch.tensor([0, 2]), 1e-6
    layout = layout_of(model, channels_last, torch.float64)
    x_N, v_N = torch.zeros(layout.length).double(), torch.randn(layout.length).double()
    bind(model, layout.spans, x_N)
    parts = list(model.parameters())

    def gradient(create_graph: bool = False) -> tuple[Tensor, ...]:
        return torch.autograd.grad(F.cross_entropy(model(x), labels), parts, create_graph=create_graph)

    product = torch.autograd.grad(gradient(True), parts, [span.view(v_N) for span in layout.spans])
    x_N.add_(v_N, alpha=step)
    above = gradient()
    x_N.sub_(v_N, alpha=2 * step)
    slope = [(a - b) / (2 * step) for a, b in zip(above, gradient(), strict=True)]
    for ours, theirs in zip(product, slope, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6 * float(theirs.abs().max()) + 1e-9)


# Any classifier of torchvision


def train_a_step(model: nn.Module, x: Tensor) -> None:
    """Check that a step of SGD moves every parameter that it should, and that outputs are a tensor of logits."""
    before = [p.detach().clone() for p in model.parameters()]
    outputs = model.train()(x)
    assert isinstance(outputs, Tensor) and outputs.shape == (2, 5)
    F.cross_entropy(outputs, torch.tensor([0, 4])).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    moved = [not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)]
    assert all(p.grad is not None for p in model.parameters()) and sum(moved) > len(moved) / 2


@pytest.mark.parametrize(
    ("name", "side"),
    [
        ("mobilenet_v3_small", 32),
        ("shufflenet_v2_x0_5", 64),
        ("squeezenet1_0", 64),
        ("googlenet", 75),
        ("inception_v3", 75),
    ],
)
def test_a_classifier_of_torchvision_trains(name: str, side: int) -> None:
    torch.manual_seed(0)
    train_a_step(made(f"torchvision:{name}", images(3, side, side, 5)), torch.rand(2, 3, side, side))


@pytest.mark.parametrize(
    ("name", "channels"), [("mobilenet_v3_small", 1), ("shufflenet_v2_x0_5", 2), ("squeezenet1_0", 1)]
)
def test_a_classifier_of_torchvision_takes_any_number_of_channels(name: str, channels: int) -> None:
    torch.manual_seed(0)
    model, usual = (made(f"torchvision:{name}", images(c, 64, 64, 5)) for c in (channels, 3))
    train_a_step(model, torch.rand(2, channels, 64, 64))
    ours, theirs = (next(m for m in each.modules() if isinstance(m, nn.Conv2d)) for each in (model, usual))
    assert ours.in_channels == channels and ours.weight.shape[1] == channels
    for same in ("out_channels", "kernel_size", "stride", "padding", "dilation", "groups"):
        assert getattr(ours, same) == getattr(theirs, same)
    assert (ours.bias is None) == (theirs.bias is None)
    assert [p.shape for p in model.parameters()][1:] == [p.shape for p in usual.parameters()][1:]


def test_some_classifiers_of_torchvision_get_the_image_size() -> None:
    with torch.device("meta"):  # no memory, no arithmetic
        for name, side in (("vit_b_16", 64), ("maxvit_t", 448)):
            model = made(f"torchvision:{name}", images(1, side, side, 5))
            assert model(torch.rand(2, 1, side, side)).shape == (2, 5)
    vit = "torchvision:vit_b_16"
    assert refusal(vit, images(1, 32, 64)) == "torchvision model 'vit_b_16' needs square images; these are 32x64"
    assert refusal(vit, images(1, 28, 28)).startswith(f"model '{vit}' raised ")


def test_a_name_that_torchvision_does_not_know_is_refused_at_once() -> None:
    lists = "python -c 'from fedmpi.models.vision import names; print(*names())' lists them"
    for given, hint in (("resnet81", "did you mean 'resnet18'? "), ("ResNet18", "did you mean 'resnet18'? "), ("", "")):
        with pytest.raises(UserError) as caught:
            find_model(f"torchvision:{given}")
        said = f"unknown torchvision model '{given}'; {hint}there are {len(names())}: {lists}"
        assert str(caught.value) == said
    assert "mobilenet_v3_small" in names() and "fasterrcnn_resnet50_fpn" not in names()


# A model that is not for these data


@pytest.mark.parametrize(
    ("name", "offers", "said"),
    [
        (
            "gru",
            images(1, 28, 28),
            "model 'gru' takes sequences; 'these' has images: use lenet, cnn, resnet18-gn, resnet18-bn or logistic",
        ),
        ("gru", NUMBERS[0], "model 'gru' takes sequences; 'these' has numbers: use logistic"),
        ("lenet", sequences(80, 80, 80), "model 'lenet' takes images; 'these' has sequences: use gru"),
        ("logistic", sequences(80, 80, 80), "model 'logistic' takes images or numbers; 'these' has sequences: use gru"),
        ("resnet18-bn", NUMBERS[0], "model 'resnet18-bn' takes images; 'these' has numbers: use logistic"),
        ("cnn", REGRESSIONS[2], "model 'cnn' takes classes for labels; 'these' has numbers to predict: use logistic"),
        (
            "torchvision:resnet18",
            sequences(80, 80, 80),
            "model 'torchvision:resnet18' takes images; 'these' has sequences: use gru",
        ),
        (
            "gru",
            {"shape": (4,), "tokens": 5, "length": 4, "outputs": 1},
            "model 'gru' takes classes for labels; 'these' has numbers to predict: use your own as package.module:name",
        ),
    ],
)
def test_data_that_a_model_is_not_for(name: str, offers: dict[str, Any], said: str) -> None:
    assert refusal(name, offers) == said
    assert f"'shakespeare' has {said.partition(' has ')[2]}" in refusal(name, offers, "shakespeare")


def test_the_error_of_an_unknown_model_has_the_closest_match_and_lists_all() -> None:
    with pytest.raises(UserError) as caught:
        find_model("lenett")
    assert str(caught.value) == (
        "unknown model 'lenett'; did you mean 'lenet'? known: cnn, gru, hf:NAME_OR_FOLDER, lenet, logistic, "
        "resnet18-bn, resnet18-gn, torchvision:NAME, or your own as package.module:name"
    )


# A user's own, by import path

MINE = """
import torch
from torch import nn

def flat(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], classes))

class Wide(nn.Module):
    def __init__(self, channels, height, width, classes, hidden=3):
        super().__init__()
        self.inner = nn.Linear(channels * height * width, hidden)
        self.outer = nn.Linear(hidden, classes)

    def forward(self, x):
        return self.outer(self.inner(x.flatten(1)))

def lazy():
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(10))

def anything(*layers, **others):
    assert not layers and not others
    return nn.Linear(1, 1)

ready = nn.Sequential(nn.Flatten(), nn.Linear(12, 10))
number = 3

def reads(tokens, length, classes):
    return nn.Embedding(tokens, classes)

def word(classes):
    return "model"

def raises(classes):
    raise ZeroDivisionError("made for\\nthis test")

knot = nn.Linear(2, 2)
knot.extra = torch.ones(1, requires_grad=True) * 2
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the current folder that holds a user's models."""
    (tmp_path / "my_models.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return "my_models"


@pytest.mark.parametrize("name", ["flat", "Wide", "lazy", "ready"])
def test_a_model_of_the_users_own_gets_what_its_parameters_name(mine: str, name: str) -> None:
    model = made(f"{mine}:{name}", images(1, 3, 4))
    assert model(torch.rand(2, 1, 3, 4)).shape == (2, 10)
    assert not find_model(f"{mine}:{name}").channels_last
    if name == "Wide":
        assert model.inner.out_features == 3


def test_a_function_that_takes_anything_is_given_nothing(mine: str) -> None:
    assert isinstance(made(f"{mine}:anything", images(1, 3, 4)), nn.Linear)


def test_a_module_that_is_there_already_is_copied(mine: str) -> None:
    row = find_model(f"{mine}:ready")
    one, two = (make_model("ready", row, images(1, 3, 4), "these") for _ in range(2))
    original = sys.modules[mine].ready
    assert one is not two and one is not original
    with torch.no_grad():
        one[1].weight.zero_()
    assert torch.equal(two[1].weight, original[1].weight) and bool(original[1].weight.any())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("number", "model 'my_models:number' is int; it must be a function or a class"),
        ("word", "model 'my_models:word' is made as str; it must be a torch.nn.Module"),
        ("raises", "model 'my_models:raises' raised ZeroDivisionError (my_models.py, line 34): made for this test"),
        (
            "reads",
            "model 'my_models:reads' asks for tokens, length; there is shape, channels, height, width, classes to ask "
            "for by these names, and other parameters need a default",
        ),
        ("lazzy", "model 'my_models:lazzy': module 'my_models' has no 'lazzy'; did you mean 'lazy'?"),
    ],
)
def test_a_mistake_in_a_model_of_the_users_own(mine: str, name: str, said: str) -> None:
    assert refusal(f"{mine}:{name}", images(1, 3, 4)) == said


def test_a_module_that_cannot_be_copied_is_refused(mine: str) -> None:
    assert refusal(f"{mine}:knot", images(1, 3, 4)).startswith("model 'my_models:knot' raised RuntimeError: Only ")


def test_a_row_without_kinds_is_given_any_data() -> None:
    row = ModelRow(lambda shape: nn.Linear(shape[0], 2))
    for offers in (sequences(4, 5, 6), NUMBERS[0], REGRESSIONS[0]):
        assert isinstance(make_model("mine", row, offers, "these"), nn.Linear)
