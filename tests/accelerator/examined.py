"""`fedmpi doctor --gpu` on the pretend device: `python -m tests.accelerator.examined doctor --gpu ...`, at small sizes.

BROKEN in the environment names kernels ("rounding,product") that are wrong on the device, as faulty ones would be:

    rounding   numbers are rounded towards zero
    product    matrix products differ in the last bits from call to call
"""

from __future__ import annotations

import itertools
import os
import sys
from typing import Any

import torch

from . import nccl, pretend
from .kernels import aten, kernel


def break_rounding(library: torch.library.Library) -> None:
    """Round towards zero."""
    library.impl("round_", lambda x: x.trunc_(), "PrivateUse1", allow_override=True)


def break_product(library: torch.library.Library) -> None:
    """Let products of matrices depend on how many there were."""
    calls = itertools.count()

    def addmm(*args: Any, **kwargs: Any) -> Any:
        return kernel(aten.addmm.default, *args, **kwargs) * (1 + 1e-6 * next(calls))

    library.impl("addmm", addmm, "PrivateUse1", allow_override=True)


BROKEN = {"rounding": break_rounding, "product": break_product}


def main() -> int:
    """Run one command of fedmpi."""
    from fedmpi.commands import gpu
    from fedmpi.commands import main as fedmpi

    assert pretend and nccl  # imported for what they register
    library = torch.library.Library("aten", "IMPL")
    for name in filter(None, os.environ.get("BROKEN", "").split(",")):
        BROKEN[name](library)
    gpu.ELEMENTS, gpu.TIMED, gpu.BUDGET = 100_000, ("lenet",), 0.05
    return fedmpi(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
