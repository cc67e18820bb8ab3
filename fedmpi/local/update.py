"""What a client delivers in a round."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .job import LocalResult


class Update(NamedTuple):
    """One client's contribution to a round. `delta_N` lies in the trainer's memory: valid until the next client."""

    cid: int
    delta_N: Tensor
    """the change of parameters and float buffers"""
    ints: Tensor
    """the model's integer buffers after training"""
    loss: float
    """the mean training loss"""
    result: LocalResult
    last: bool = False
    """whether this rank has no further client in this round"""
