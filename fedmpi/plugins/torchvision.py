"""Import torchvision, also if its compiled part cannot be loaded. Nothing else imports it.

`python -m fedmpi.plugins.torchvision` checks whether other code can import it, and names the fix.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ..errors import UserError

_declared: list[torch.library.Library] = []  # a declaration lasts as long as its Library object


def import_torchvision() -> ModuleType:
    """Return the module torchvision, also if its compiled part cannot be loaded."""
    ready_torchvision()
    try:
        return importlib.import_module("torchvision")
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"torchvision cannot be imported ({error}); install the version for torch {torch.__version__}"
        ) from error


def ready_torchvision() -> None:
    """Make torchvision importable for any code, also if its compiled part cannot be loaded.

    A torchvision built for CUDA finds no CUDA library next to a CPU-only torch. Its operators are then missing, and
    its import fails when it registers `nms`, although nothing here uses an operator. So load the compiled part as
    torchvision would, and declare `nms` only if it is still missing. Declaring it first would clash with a working
    torchvision; a failed plain import would leave half of its modules in `sys.modules`.
    """
    if "torchvision" in sys.modules or _declared:
        return
    _load_operators()
    if not hasattr(torch.ops.torchvision, "nms"):
        library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(library)


def torchvision_trouble(environ: Mapping[str, str] = os.environ) -> tuple[str, str] | None:
    """Import torchvision in a new process, as a user's script or another package would; if that fails, return the
    problem and the fix."""
    command = [sys.executable, "-c", "import torchvision"]
    try:
        done = subprocess.run(command, env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    except subprocess.TimeoutExpired:
        return "'import torchvision' has not ended within 60 s", "check whether the file system is slow"
    if done.returncode == 0:
        return None
    lines = done.stderr.decode(errors="replace").split("\n")
    why = next((line.strip() for line in reversed(lines) if line.strip()), f"exit code {done.returncode}")
    plain, _, build = torch.__version__.partition("+")
    built = torchvision_build()
    text = f"torchvision {built or '(missing)'} does not fit torch {torch.__version__}: its import fails ({why})"
    wanted = f"torch=={plain} torchvision" + (f"=={built.partition('+')[0]}" if built else "")
    fix = (
        "fedmpi works without its compiled part, but your own scripts and packages such as peft and timm do not. "
        f"Install both from one build: pip install --force-reinstall {wanted} "
        f"--index-url https://download.pytorch.org/whl/{build or 'cpu'}; if there is none, call "
        "fedmpi.plugins.torchvision.ready_torchvision() in your script before anything imports torchvision"
    )
    return text, fix


def torchvision_build() -> str:
    """Return the version of torchvision with its build, such as 0.28.0+cu130, without importing it; '' if it is not
    installed."""
    package = importlib.util.find_spec("torchvision")
    for folder in (package.submodule_search_locations if package else None) or []:
        with contextlib.suppress(OSError):
            found = re.search(r"__version__ = '([^']+)'", Path(folder, "version.py").read_text(encoding="utf-8"))
            if found:
                return found[1]
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version("torchvision")
    return ""


def _load_operators() -> None:
    """Load torchvision's compiled operators, if possible: `_C`, or `_C_stable` since torchvision 0.29."""
    package = importlib.util.find_spec("torchvision")
    for folder in (package.submodule_search_locations if package else None) or []:
        for compiled in sorted(Path(folder).glob("_C*")):
            if compiled.name.endswith(tuple(importlib.machinery.EXTENSION_SUFFIXES)):
                with contextlib.suppress(OSError, RuntimeError):
                    torch.ops.load_library(str(compiled))  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    if (trouble := torchvision_trouble()) is not None:
        sys.exit(f"{trouble[0]}; {trouble[1]}")
