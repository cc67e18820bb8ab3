"""fedmpi: federated learning on torch.distributed, MPI and Slurm, with gradient masked averaging as one collective.

    import fedmpi
    result = fedmpi.train(model, clients, test, algorithm="fedavg", mask="gma", rounds=20)

`fedmpi.train` and what it takes are imported when they are first used: `import fedmpi` alone does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .algorithms import Algorithm, Row
    from .api import train
    from .data import Arrays, Datasets
    from .data.objective import Objective
    from .runs.config import Checkpoint, Eval, Local, Memory, Meta, Server, Skew, Step
    from .runs.result import Result

__version__ = "0.1.0"
__all__ = ["Algorithm", "Arrays", "Datasets", "Objective", "Result", "Row", "train"]
__all__ += ["Checkpoint", "Eval", "Local", "Memory", "Meta", "Server", "Skew", "Step"]  # groups of knobs

_HOMES = dict.fromkeys(("Checkpoint", "Eval", "Local", "Memory", "Meta", "Server", "Skew", "Step"), "runs.config") | {
    "Algorithm": "algorithms",
    "Arrays": "data",
    "Datasets": "data",
    "Objective": "data.objective",
    "Result": "runs.result",
    "Row": "algorithms",
    "train": "api",
}


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedmpi' has no attribute '{name}'")
    return getattr(import_module(f"fedmpi.{_HOMES[name]}"), name)
