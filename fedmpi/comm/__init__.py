"""Transports between ranks, shared memory on a node, and who launched this process (`env`).

Names are imported when they are first used: `fedmpi.comm.env` alone does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .base import Comm, Rows, Update, Wait, agreed, common_trouble, tell_all
    from .node import share_node
    from .solo import SoloComm
    from .transports import agree_early, connect, pick

__all__ = ["Comm", "Rows", "Update", "Wait", "agreed", "common_trouble", "tell_all"]
__all__ += ["SoloComm", "agree_early", "connect", "pick", "share_node"]

_HOMES = {"SoloComm": "solo", "agree_early": "transports", "connect": "transports", "pick": "transports"}
_HOMES |= {"share_node": "node"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'fedmpi.comm' has no attribute '{name}'")
    return getattr(import_module(f"fedmpi.comm.{_HOMES.get(name, 'base')}"), name)
