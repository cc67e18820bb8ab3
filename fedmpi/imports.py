"""The one place that imports torchvision, which may not want to be imported."""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any

import torch

from .errors import UserError

_declared: list[torch.library.Library] = []  # a declaration lasts as long as its Library object


def import_torchvision() -> ModuleType:
    """The module torchvision, also where its compiled part cannot load."""
    ready_torchvision()
    try:
        return importlib.import_module("torchvision")
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"torchvision cannot be imported ({error}); install the one that belongs to torch {torch.__version__}"
        ) from error


def ready_torchvision() -> None:
    """Let torchvision be imported by whoever wants to, also where its compiled part cannot load.

    A torchvision built for CUDA finds no CUDA library beside a CPU-only torch; its operators are then missing, and
    its own import dies when it describes `nms`, although nothing here uses an operator. So load the compiled part as
    torchvision would, and only where `nms` is still missing declare it. Declaring first would clash with a healthy
    torchvision, and trying the plain import first would leave half of its modules behind.
    """
    if "torchvision" in sys.modules or _declared:
        return
    _load_operators()
    if not hasattr(torch.ops.torchvision, "nms"):
        library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(library)


def _load_operators() -> None:
    """Load torchvision's compiled operators where they can be loaded."""
    package = importlib.util.find_spec("torchvision")
    for folder in (package.submodule_search_locations if package else None) or []:
        loader = (importlib.machinery.ExtensionFileLoader, importlib.machinery.EXTENSION_SUFFIXES)
        compiled = importlib.machinery.FileFinder(folder, loader).find_spec("_C")
        if compiled is not None and compiled.origin is not None:
            with contextlib.suppress(OSError, RuntimeError):
                torch.ops.load_library(compiled.origin)  # type: ignore[no-untyped-call]
