"""The models: their shapes, their sizes, and the function they compute."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedmpi.errors import UserError
from fedmpi.models import MODELS, find_model
from fedmpi.models.lenet import LeNet
from fedmpi.models.logistic import logistic


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize(
    ("channels", "height", "width", "classes"),
    [(1, 28, 28, 10), (3, 32, 32, 100), (1, 12, 12, 2), (3, 64, 64, 200), (2, 13, 40, 5), (1, 31, 33, 3)],
)
def test_a_model_gives_one_logit_a_class(name: str, channels: int, height: int, width: int, classes: int) -> None:
    model = find_model(name).make(channels, height, width, classes)
    assert model(torch.rand(2, channels, height, width)).shape == (2, classes)
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_lenet_has_the_parameters_of_lecuns() -> None:
    assert parameters(LeNet(1, 28, 28, 10)) == 61_706
    assert parameters(LeNet(1, 32, 32, 10)) == 61_706  # 28x28 is padded to 32x32
    assert parameters(LeNet(3, 32, 32, 10)) == 62_006


def test_logistic_is_one_linear_layer_with_bias() -> None:
    assert parameters(logistic(1, 28, 28, 10)) == 28 * 28 * 10 + 10
    model, x = logistic(2, 3, 4, 5), torch.rand(6, 2, 3, 4)
    weight, bias = model.parameters()
    assert torch.allclose(model(x), x.reshape(6, 24) @ weight.T + bias, atol=1e-6)


def test_lenet_computes_relu_before_pooling_just_as_well() -> None:
    torch.manual_seed(0)
    model, x = LeNet(1, 28, 28, 10), torch.randn(8, 1, 28, 28)

    def as_published(x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(model.conv1(x)), 2)
        x = F.max_pool2d(F.relu(model.conv2(x)), 2)
        return model.fc3(F.relu(model.fc2(F.relu(model.fc1(x.flatten(1))))))

    assert torch.equal(model(x), as_published(x))


@pytest.mark.parametrize(("height", "width"), [(11, 11), (11, 40), (40, 11), (1, 1)])
def test_lenet_refuses_an_image_that_pools_away(height: int, width: int) -> None:
    with pytest.raises(UserError, match=f"at least 12x12; these are {height}x{width}: use --model logistic"):
        LeNet(1, height, width, 10)


def test_an_unknown_model_is_told_its_neighbour() -> None:
    with pytest.raises(UserError, match="unknown model 'lenett'; did you mean 'lenet'"):
        find_model("lenett")
