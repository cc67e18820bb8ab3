"""Models of torchvision: ResNet-18 for CIFAR, and any classifier as `torchvision:NAME`. Weights are random.

ResNet-18 (He et al., CVPR 2016) has a stem for images of 224x224; on 32x32 its stride and pooling would leave 8x8 for
the first block, so the stem here is one 3x3 convolution. Group normalisation with two groups, instead of batch
normalisation, is what Hsieh et al. (ICML 2020) and Reddi et al. (ICLR 2021) use for heterogeneous clients: it has no
batch statistics, which would be those of one client.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from ..errors import UserError, nearest
from ..plugins.torchvision import import_torchvision


def resnet18(norm: Callable[[int], nn.Module], channels: int, height: int, width: int, classes: int) -> nn.Module:
    """Make torchvision's ResNet-18 with that normalisation, a 3x3 stem, and without the pooling after it."""
    if min(height, width) < 8:
        given = f"these are {height}x{width}"
        raise UserError(f"resnet18-gn and resnet18-bn need images of at least 8x8; {given}: use --model logistic")
    model: Any = import_torchvision().models.resnet18(num_classes=classes, norm_layer=norm)
    model.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")  # as in torchvision
    model.maxpool = nn.Identity()
    return model  # type: ignore[no-any-return]


resnet18_gn = partial(resnet18, partial(nn.GroupNorm, 2))
resnet18_bn = partial(resnet18, nn.BatchNorm2d)


def names() -> list[str]:
    """Return the names of all classifiers of torchvision."""
    models = import_torchvision().models
    return sorted(models.list_models(module=models))


def classifier(name: str) -> Callable[..., nn.Module]:
    """Return a function that makes the classifier of that name."""
    known = names()
    if name not in known:
        near = nearest(name, known)
        hint = f"did you mean '{near}'? " if near else ""
        lists = "python -c 'from fedmpi.models.vision import names; print(*names())'"
        raise UserError(f"unknown torchvision model '{name}'; {hint}there are {len(known)}: {lists} lists them")

    def make(channels: int, height: int, width: int, classes: int) -> nn.Module:
        extras = special(name, height, width)
        model: nn.Module = import_torchvision().models.get_model(name, weights=None, num_classes=classes, **extras)
        if channels != 3:
            stem = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
            stem.in_channels = channels
            stem.weight = nn.Parameter(stem.weight.new_empty(stem.out_channels, channels, *stem.kernel_size))
            stem.reset_parameters()
        return model

    return make


def special(name: str, height: int, width: int) -> dict[str, Any]:
    """Return the further arguments that some builders need."""
    if name in ("googlenet", "inception_v3"):  # a single output in training too, and no warning about initialisation
        return {"aux_logits": False, "init_weights": True}
    if name.startswith("vit_"):  # has a parameter per position
        if height != width:
            raise UserError(f"torchvision model '{name}' needs square images; these are {height}x{width}")
        return {"image_size": height}
    if name.startswith("maxvit_"):
        return {"input_size": (height, width)}
    return {}
