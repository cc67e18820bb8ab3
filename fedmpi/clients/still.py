"""The still part of a model: frozen parameters of any type, and buffers that no client changes.

It is in no vector: it is neither trained, sent, summed nor saved. A run keeps one copy per rank, or one per node if the
ranks train on the CPU. Only its SHA-256 is compared, between ranks and with the checkpoint that a run resumes from. A
model that writes to it in training would make results depend on who trained before, so that ends the run.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from ..errors import UserError, one_line
from ..flat import parts_of

ALIGNED = 64  # bytes that a tensor begins at in shared memory
RETURNED = 2**26  # bytes that are freed before they are returned to the system


class Still:
    """The still tensors of a model by name; false if there are none."""

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        self.tensors = parts_of(model, dtype).still
        self.versions = self.count_writes()

    def __bool__(self) -> bool:
        return bool(self.tensors)

    @property
    def elements(self) -> int:
        """Return how many elements they have."""
        return sum(t.numel() for t in self.tensors.values())

    @property
    def bytes(self) -> int:
        """Return the memory that they take."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    def count_writes(self) -> list[int]:
        """Return torch's version counter of each tensor: a write raises it."""
        return [t._version for t in self.tensors.values()]

    @property
    def written(self) -> str:
        """Return the name of a tensor that was written to; '' if none was."""
        pairs = zip(self.tensors, self.versions, self.count_writes(), strict=True)
        return next((name for name, before, now in pairs if now != before), "")

    def sha256(self) -> str:
        """Return the SHA-256 of names, types, shapes and values."""
        sha = hashlib.sha256()
        for name, tensor in self.tensors.items():
            sha.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
            try:
                sha.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            except (RuntimeError, TypeError, NotImplementedError) as error:
                kind = f"{type(tensor).__name__} of {tensor.dtype}"
                raise UserError(
                    f"frozen tensor '{name}' is a {kind}, whose bytes cannot be read ({one_line(error)}); use another "
                    "quantisation of the model, or none"
                ) from error
        return sha.hexdigest()

    def places(self) -> Iterator[tuple[Tensor, slice]]:
        """Yield the tensors that can lie in shared memory, each with its bytes there."""
        at = 0
        for tensor in self.tensors.values():
            if type(tensor) in (nn.Parameter, Tensor) and tensor.device.type == "cpu" and tensor.is_contiguous():
                size = tensor.numel() * tensor.element_size()
                yield tensor, slice(at, at + size)
                at += math.ceil(size / ALIGNED) * ALIGNED

    @property
    def shareable(self) -> int:
        """Return how many bytes of shared memory they need."""
        return max((part.stop for _, part in self.places()), default=0)

    def move_to(self, memory: Tensor, fill: bool, freed: Callable[[], object]) -> None:
        """Let the tensors be those in shared memory, which is filled with them first if asked for. Their own memory is
        freed one by one, and `freed` is called now and then to return it, so that a rank never holds two copies."""
        since = 0
        for tensor, part in list(self.places()):
            if fill:
                memory[part].copy_(tensor.detach().reshape(-1).view(torch.uint8))
            tensor.data = memory[part].view(tensor.dtype).view(tensor.shape)
            since += part.stop - part.start
            if since >= RETURNED:
                freed()
                since = 0
        freed()
        self.versions = self.count_writes()


def changes_still(name: str) -> str:
    """Return the error message for a still tensor that training changes."""
    return (
        f"training changed '{name}', which is frozen or a constant buffer, so results would depend on who trained "
        "before; train it (requires_grad), or register the buffer in float32 with persistent=True: it is then averaged"
    )


def twin(model: nn.Module) -> nn.Module:
    """Return a copy of a model that shares the memory of its frozen parameters, and nothing else."""
    frozen = [p for p in model.parameters() if type(p) is nn.Parameter and not p.requires_grad]
    shared = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in frozen}
    return copy.deepcopy(model, dict(shared))
