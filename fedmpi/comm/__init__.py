"""Transports between ranks, shared memory within a node, and launcher detection (`env`).

Names are imported on first use: `fedmpi.comm.env` alone does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .base import Comm, Rows, Update, Wait, agreed, common_trouble, from_first, tell_all
    from .node import share_node
    from .transports import SoloComm, agree_early, connect, pick

__all__ = ["Comm", "Rows", "Update", "Wait", "agreed", "common_trouble", "from_first", "tell_all"]  # in base
__all__ += ["SoloComm", "agree_early", "connect", "pick", "share_node"]

_MODULES = {"share_node": "node"} | dict.fromkeys(("SoloComm", "agree_early", "connect", "pick"), "transports")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'fedmpi.comm' has no attribute '{name}'")
    return getattr(import_module(f"fedmpi.comm.{_MODULES.get(name, 'base')}"), name)
