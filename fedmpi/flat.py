"""A model as one flat vector: trainable parameters first, then float buffers; and how a vector is cut.

    N  the whole vector, padded so that every rank owns a slice of the same length
    P  the trainable parameters: what is trained, shared, masked and moved by the server's rule
    P..L  float buffers (BatchNorm's running statistics): averaged, never masked
    L..N  padding, always zero

`bind` makes the model's tensors views of such a vector, so that a step on the vector is a step of the model and
nothing is copied. Integer buffers (BatchNorm's step counter) are few: they travel next to the vector, and the maximum
over the clients counts. Parameters and float buffers that are *private* have a vector of their own, which belongs to
one client at a time: buffers first, then parameters, so that in memory in front of N they and P are one vector, T:
what a client trains. Everything else is *still*: frozen parameters, buffers that the model does not save
(`persistent=False`) and float buffers of another type. It is in no vector, and training must not change it
(clients/still.py). A rank owns a slice of the vector; buckets of a slice travel at once; tiles fit the cache.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from .errors import UserError

TILE = 1 << 16
LINE = 64  # bytes of a CPU's cache line
ACCELERATOR_TILE = 1 << 22  # not the size of a cache, but one that makes launches few: temporaries of up to 32 MB


@dataclass(frozen=True)
class Span:
    """Where one tensor of the model lies in the vector."""

    name: str
    start: int
    shape: torch.Size
    channels_last: bool

    def view(self, x: Tensor) -> Tensor:
        """Return the tensor as a view of the vector; with `channels_last`, channels are innermost."""
        flat = x[self.start : self.start + self.shape.numel()]
        if not self.channels_last:
            return flat.view(self.shape)
        out, inn, height, width = self.shape
        return flat.view(out, height, width, inn).permute(0, 3, 1, 2)

    def flat(self, tensor: Tensor) -> Tensor | None:
        """Return a tensor of this shape in the order of the vector; None if that needs a copy."""
        tensor = tensor.permute(0, 2, 3, 1) if self.channels_last else tensor
        return tensor.view(-1) if tensor.is_contiguous() else None


@dataclass(frozen=True)
class Private:
    """Where private tensors lie in a client's own vector: float buffers, then `params` elements that are trained."""

    spans: tuple[Span, ...] = ()
    params: int = 0
    length: int = 0


@dataclass(frozen=True)
class Layout:
    """Where the tensors of a model lie in its vector, how many elements are trained, and its integer buffers."""

    spans: tuple[Span, ...]
    params: int
    length: int
    ints: tuple[str, ...]
    align: int = field(default=1, repr=False)  # slices begin at multiples of it; no part of a run's fingerprint
    private: Private = field(default=Private(), repr=False)

    @property
    def trained(self) -> int:
        """Return the length T of what a client trains."""
        return self.private.params + self.params

    def trained_spans(self) -> list[Span]:
        """Return where the trained tensors lie in T."""
        first = self.private.length - self.private.params
        own = [replace(span, start=span.start - first) for span in self.private.spans if span.start >= first]
        shared = [span for span in self.spans if span.start < self.params]
        return own + [replace(span, start=span.start + self.private.params) for span in shared]

    def padded(self, ranks: int) -> int:
        """Return the length N: the next multiple of the number of ranks, times the alignment."""
        return -(-self.length // (ranks * self.align)) * ranks * self.align


def layout_of(
    model: nn.Module,
    channels_last: bool = False,
    dtype: torch.dtype = torch.float32,
    align: int = 1,
    private: Collection[str] = (),
) -> Layout:
    """Return the layout of a model: trainable parameters, then float buffers, in the model's order; those whose names
    are `private` in a vector of their own."""
    parts = parts_of(model, dtype)
    check_trained(parts.trained, dtype)

    def lay(*groups: dict[str, Tensor]) -> tuple[tuple[Span, ...], int]:
        spans, at = [], 0
        for group in groups:
            for name, tensor in group.items():
                spans.append(Span(name, at, tensor.shape, channels_last and tensor.dim() == 4))
                at += tensor.numel()
        return tuple(spans), at

    own, own_floats = ({n: t for n, t in group.items() if n in private} for group in (parts.trained, parts.floats))
    shared, floats = ({n: t for n, t in group.items() if n not in private} for group in (parts.trained, parts.floats))
    count, own_count = (sum(p.numel() for p in group.values()) for group in (shared, own))
    if not count:
        raise UserError("--local.private takes all trained parameters, so there is none to share; leave some out")
    (spans, length), (own_spans, own_length) = lay(shared, floats), lay(own_floats, own)
    return Layout(spans, count, length, tuple(parts.ints), align, Private(own_spans, own_count, own_length))


class Parts(NamedTuple):
    """A model's tensors by name, and by what becomes of them."""

    trained: dict[str, Tensor]
    floats: dict[str, Tensor]  # buffers that are averaged
    ints: dict[str, Tensor]  # buffers of which the maximum counts
    still: dict[str, Tensor]  # what training must not change


def parts_of(model: nn.Module, dtype: torch.dtype = torch.float32) -> Parts:
    """Return the parts of a model. Tensors that several modules share stand under their first name."""
    parts, saved = Parts({}, {}, {}, {}), model.state_dict(keep_vars=True).keys()
    for name, parameter in model.named_parameters():
        (parts.trained if parameter.requires_grad else parts.still)[name] = parameter
    for name, buffer in model.named_buffers():
        whole = not (buffer.is_floating_point() or buffer.is_complex())
        moves = name in saved and (whole or buffer.dtype == dtype)
        (parts.still if not moves else parts.ints if whole else parts.floats)[name] = buffer
    return parts


def check_trained(trained: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Refuse parameters that cannot lie next to each other in one vector: of another type, or on top of each other."""
    if not any(p.numel() for p in trained.values()):
        raise UserError("the model has no trainable parameter; check requires_grad and --local.freeze")
    for name, parameter in trained.items():
        if parameter.dtype != dtype:
            kind = str(dtype).removeprefix("torch.")
            raise UserError(
                f"trained parameter '{name}' is {parameter.dtype}; what is trained must be {kind}: call model.float(), "
                "or freeze it (frozen parameters may be of any type)"
            )
    end, before = 0, ""
    for name, parameter in sorted(trained.items(), key=lambda pair: pair[1].data_ptr()):
        if parameter.numel() and parameter.data_ptr():  # none on the meta device
            if parameter.data_ptr() < end:
                raise UserError(
                    f"trained parameters '{before}' and '{name}' share memory but are two parameters; to tie them, "
                    "assign the same nn.Parameter to both modules"
                )
            end, before = parameter.data_ptr() + parameter.numel() * parameter.element_size(), name


def matching(names: Sequence[str], patterns: str, option: str) -> list[str]:
    """Return the names of the tensors that patterns, separated by commas, match: shell patterns such as 'features.*',
    or the name of a module, which stands for all of its tensors."""
    found = dict[str, None]()
    for pattern in (word.strip() for word in patterns.split(",")):
        hits = [name for name in names if fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")]
        if not pattern or not hits:
            some = ", ".join([*names[:3], *["..."] * (len(names) > 6), *names[3:][-3:]])
            raise UserError(f"{option}: '{pattern}' matches nothing in the model; it has {some}")
        found |= dict.fromkeys(hits)
    return list(found)


def tile_size(device: torch.device, on_cpu: int = TILE) -> int:
    """Return how many elements elementwise work takes at a time: what fits the cache of a CPU."""
    return on_cpu if device.type == "cpu" else ACCELERATOR_TILE


def tiles(start: int, stop: int, size: int = TILE) -> Iterator[slice]:
    """Yield consecutive slices of at most `size` elements that cover start..stop."""
    for low in range(start, stop, size):
        yield slice(low, min(low + size, stop))


def even_slices(length: int, most: int) -> Iterator[slice]:
    """Yield the fewest consecutive slices of at most `most` elements that cover 0..length, equal up to one element."""
    count = -(-length // most)
    for k in range(count):
        yield slice(length * k // count, length * (k + 1) // count)


def untouched(length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a vector of zeros. On a CPU it takes no memory until something is written: torch writes its zeros itself,
    numpy has them from the system."""
    if device.type != "cpu":
        return torch.zeros(length, device=device, dtype=dtype)
    raw = np.zeros(length * dtype.itemsize + LINE, np.uint8)
    first = -raw.ctypes.data % LINE  # as torch aligns its own
    return torch.from_numpy(raw[first : first + length * dtype.itemsize]).view(dtype)


def bind(model: nn.Module, spans: Iterable[Span], x: Tensor) -> None:
    """Copy tensors of the model into x, then make them views of x."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for span in spans:
        tensor, view = tensors[span.name], span.view(x)
        view.copy_(tensor.detach())
        tensor.data = view


def read_ints(model: nn.Module, layout: Layout) -> Tensor:
    """Return a copy of the model's integer buffers, one after another, as int64 on the model's device."""
    buffers = dict(model.named_buffers())
    parts = [buffers[name].reshape(-1).to(torch.int64) for name in layout.ints]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)


def write_ints(model: nn.Module, layout: Layout, ints: Tensor) -> None:
    """Write integer buffers back into the model, from its own device."""
    buffers, at = dict(model.named_buffers()), 0
    for name in layout.ints:
        buffer = buffers[name]
        buffer.copy_(ints[at : at + buffer.numel()].view(buffer.shape))
        at += buffer.numel()
