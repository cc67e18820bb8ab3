"""Models by name. A row has a function that makes the model, the kinds of samples it takes, and the memory layout of
its weights. The function asks for properties of the data by parameter name:

    images      channels, height, width     shape       always: that of a sample
    sequences   tokens, length              classes     or `outputs`, if labels are numbers to predict

`torchvision:NAME` is any classifier of torchvision, `hf:NAME_OR_FOLDER` a model of transformers (hf.py), and
`package.module:name` the user's own: a function or class with such parameters, or an instance of nn.Module.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from ..errors import UserError, squeezed, unknown
from ..plugins import call_with, import_path
from ..plugins.hub import on_hub
from .gru import GRU
from .hf import make_hub_model
from .lenet import LeNet, cnn
from .logistic import Logistic
from .vision import classifier, names, resnet18_bn, resnet18_gn


@dataclass(frozen=True)
class ModelRow:
    """How to make a model, and for which data."""

    make: Callable[..., nn.Module]
    channels_last: bool = False  # whether its convolutions are faster on a CPU with channels innermost
    takes: tuple[str, ...] = ()  # kinds of samples: images, sequences, numbers; (): not checked
    regresses: bool = False  # whether labels may be numbers to predict


IMAGES = ("images",)

# After each row: the time of a training step with channels_last relative to that without, batches of 32, one thread.
# (For lenet and cnn with torch's operations; with the matrix products they use on a CPU it makes no difference.)
MODELS = {
    "lenet": ModelRow(LeNet, channels_last=True, takes=IMAGES),  # 0.77
    "cnn": ModelRow(cnn, channels_last=True, takes=IMAGES),  # 0.78 for grey images, 0.69 for colour
    "resnet18-gn": ModelRow(resnet18_gn, takes=IMAGES),  # 0.92 to 1.05: no clear gain
    "resnet18-bn": ModelRow(resnet18_bn, channels_last=True, takes=IMAGES),  # 0.93
    "gru": ModelRow(GRU, takes=("sequences",)),
    "logistic": ModelRow(Logistic, takes=("images", "numbers"), regresses=True),
}


def find_model(name: str) -> ModelRow:
    """Return the row of that name, of torchvision's classifier, or of the model at that import path."""
    if name in MODELS:
        return MODELS[name]
    if ":" not in name:
        wanted = squeezed(name)
        near = [known for known in MODELS if squeezed(known).startswith(wanted)]
        with contextlib.suppress(UserError):  # torchvision is not installed
            near += [f"torchvision:{known}" for known in names() if squeezed(known) == wanted]
        others = ["torchvision:NAME", "hf:NAME_OR_FOLDER"]
        raise unknown("model", name, [*MODELS, *others], own=True, near="' or '".join(near))
    if name.startswith("torchvision:"):
        make = classifier(name.removeprefix("torchvision:"))
        return ModelRow(make, channels_last=True, takes=IMAGES)  # 0.78 to 1.02, for seven of them
    if on_hub(name):
        return ModelRow(partial(make_hub_model, name))
    own = import_path("model", name)
    return ModelRow(partial(copy.deepcopy, own) if isinstance(own, nn.Module) else own)


def make_model(name: str, row: ModelRow, offers: Mapping[str, Any], data: str) -> nn.Module:
    """Make the model of a row for data with these properties."""
    if row.takes and not fits(row, offers):
        takes, has = " or ".join(row.takes), kind_of(offers)
        if has in row.takes:
            takes, has = "classes for labels", "numbers to predict"
        *others, last = [n for n, r in MODELS.items() if fits(r, offers)] or ["your own as package.module:name"]
        use = f"{', '.join(others)} or {last}" if others else last
        raise UserError(f"model '{name}' takes {takes}; '{data}' has {has}: use {use}")
    model = call_with("model", name, row.make, offers)
    if not isinstance(model, nn.Module):
        raise UserError(f"model '{name}' is made as {type(model).__name__}; it must be a torch.nn.Module")
    return model


def fits(row: ModelRow, offers: Mapping[str, Any]) -> bool:
    """Return whether a row takes data with these properties."""
    return kind_of(offers) in row.takes and (row.regresses or "outputs" not in offers)


def kind_of(offers: Mapping[str, Any]) -> str:
    """Return the kind of samples: images, sequences or numbers."""
    return "images" if "channels" in offers else "sequences" if "tokens" in offers else "numbers"
