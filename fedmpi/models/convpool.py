"""Convolution, 2x2 max pooling and ReLU as one function, made for small images on a CPU.

The four outputs that a pool looks at belong to four positions of the kernel in one window that is larger by one. So a
convolution with O kernels of k x k and the pooling behind it are a product of windows of (k+1) x (k+1), taken at every
second pixel, with 4 O kernels, which are the O kernels at their four positions with zeros beside them; and then the
largest of four blocks of rows:

    S  [K, L]      the windows: K = (k+1)^2 * channels, L = pooled outputs of all images
    W  [4, O, K]   the kernels at their four positions
    Y = W S        [4, O, L]     pooled[o, l] = max over the four of Y[:, o, l], plus bias[o]

Backwards it is two such products. That makes nearly half as many multiplications again, but products of matrices run
several times as fast as convolutions of few channels, and no index is needed to remember which of the four it was.
In memory the images of a batch lie side by side, element by element ([channel, row, column, image]): a window is then
copied in runs as long as the batch, and what comes out lies as the next layer takes it. For LeNet with batches of 32
on one thread, convolutions and poolings take well under half of their time (benchmarks/step.py). At that size a call of
torch costs as much as its arithmetic, so memory and views are made once for a shape and used again.

At a tie the gradient goes to the first of the four, as with torch's max_pool2d. Second derivatives, other devices,
autocast, compilation and vmap take the plain operations.
"""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

past_zero = torch.ops.aten.threshold_backward.grad_input
"""(grad, x, 0, grad_input=out): grad where x > 0, else 0"""
SPARE = 8  # rooms that are kept
AT_ONCE = 64  # images, where no gradient is wanted: more would not stay in the cache


def conv_pool_relu(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """relu(max_pool2d(conv(x), 2)), for a convolution with a bias and with square kernels of an odd side."""
    assert conv.bias is not None, "the products add one"
    padding = int(conv.padding[0])
    if takes(x, conv.weight):
        if not torch.is_grad_enabled():
            parts = [forward_alone(some, conv.weight, conv.bias, padding) for some in torch.split(x, AT_ONCE)]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        out: Tensor = ConvPoolRelu.apply(x, conv.weight, conv.bias, padding)  # type: ignore[no-untyped-call]
        return out
    return plain(x, conv.weight, conv.bias, padding)


def plain(x: Tensor, weight: Tensor, bias: Tensor, padding: int) -> Tensor:
    """The same by torch's own operations. ReLU follows the pooling: the same function on a quarter of the elements."""
    return F.relu(F.max_pool2d(F.conv2d(x, weight, bias, padding=padding), 2))


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether the products are for this case."""
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype
        and x.dtype in (torch.float32, torch.float64)
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    )


class ConvPoolRelu(torch.autograd.Function):
    """See the head of this file."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, padding: int) -> Tensor:
        room = Room.free(x.shape, weight.shape, padding, x.dtype)
        pooled = room.forward(x, weight, bias)
        ctx.save_for_backward(x, weight, bias)
        ctx.room, ctx.turn, ctx.pooled = room, room.turn, pooled
        return pooled.view(room.out).permute(3, 0, 1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), needed, room, inputs = grads, ctx.needs_input_grad[:3], ctx.room, ctx.saved_tensors
        ours = room.turn == ctx.turn  # not so where this graph was gone through before
        if torch.is_grad_enabled():  # what is returned will be differentiated
            found = differentiable(inputs, needed, grad, room.padding)
        else:
            if not ours:
                room, ours = Room.free(*room.key), True
                room.forward(*inputs)
            found = room.backward(grad, ctx.pooled, needed)
        if ours:
            room.leave()
        return *found, None


def forward_alone(x: Tensor, weight: Tensor, bias: Tensor, padding: int) -> Tensor:
    """The output, where no gradient is wanted."""
    room = Room.free(x.shape, weight.shape, padding, x.dtype)
    pooled = room.forward(x, weight, bias)
    room.leave()
    return pooled.view(room.out).permute(3, 0, 1, 2)


def differentiable(
    inputs: tuple[Tensor, ...], needed: tuple[bool, ...], grad: Tensor, padding: int
) -> list[Tensor | None]:
    """The gradients by the plain operations, with a graph behind them."""
    x, weight, bias = inputs
    asked = [t for t, wanted in zip(inputs, needed, strict=True) if wanted]
    found = iter(torch.autograd.grad(plain(x, weight, bias, padding), asked, grad, create_graph=True))
    return [next(found) if wanted else None for wanted in needed]


Key = tuple[torch.Size, torch.Size, int, torch.dtype]
"""of images, of weights; padding; kind of numbers"""


class Room:
    """Memory to work in for calls of one shape, and the views of it. Whoever takes one has it until it is left; what is
    returned from it never lies in it."""

    spare: ClassVar[list[Room]] = []
    """those that nobody has, the last one left at the end"""
    lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, images: torch.Size, weights: torch.Size, padding: int, dtype: torch.dtype) -> None:
        self.key, self.padding = (images, weights, padding, dtype), padding
        self.turn = 0  # how often it was left: who remembers another number has it no more
        count, channels, height, width = images
        kernels, side = weights[0], weights[-1] + 1
        rows, columns = ((length + 2 * padding - side + 2) // 2 for length in (height, width))
        self.out = kernels, rows, columns, count
        self.padded = channels, height + 2 * padding, width + 2 * padding, count
        outputs, window = rows * columns * count, side * side * channels

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype)

        images_last = zeros(*self.padded)
        self.inner = self.without_border(images_last)  # the border stays zero
        channel, row, column, image = images_last.stride()
        self.from_images = images_last.as_strided(  # overlapping
            (side, side, channels, rows, columns, count), (row, column, channel, 2 * row, 2 * column, image)
        )
        self.windows = zeros(window, outputs)
        self.to_windows, self.windows_t = self.windows.view(self.from_images.shape), self.windows.t()
        # Windows are taken 2 apart, so no two of them have the same 2 x 2 part in common.
        parts = [(slice(i, i + 2), slice(j, j + 2)) for i in range(0, side, 2) for j in range(0, side, 2)]
        places = [self.from_images[part] for part in parts]
        self.parts = [
            (self.to_windows[part], place.shape, place.stride(), place.storage_offset())
            for part, place in zip(parts, places, strict=True)
        ]
        self.kernels, self.to_kernels = zeros(4 * kernels, window), zeros(4 * kernels, window)  # and their gradient
        line, block = side * channels, kernels * window
        shape = 2, 2, kernels, side - 1, side - 1, channels
        strides = 2 * block + line, block + channels, window, line, channels, 1
        self.four, self.kernels_t = self.kernels.as_strided(shape, strides), self.kernels.t()
        self.to_four = [four for two in self.to_kernels.as_strided(shape, strides).unbind() for four in two.unbind()]
        self.blocks, self.ahead = zeros(4 * kernels, outputs), zeros(kernels, outputs)
        self.first, self.second = self.blocks.view(2, 2, kernels, outputs).unbind(1)
        self.halves, self.to_halves = zeros(2, kernels, outputs), zeros(2, kernels, outputs)
        (self.upper, self.lower), (self.to_upper, self.to_lower) = self.halves.unbind(), self.to_halves.unbind()

    @classmethod
    def free(cls, images: torch.Size, weights: torch.Size, padding: int, dtype: torch.dtype) -> Room:
        """One for these shapes that nobody has."""
        key, spare = (images, weights, padding, dtype), cls.spare
        with cls.lock:
            for i in range(len(spare) - 1, -1, -1):
                if spare[i].key == key:
                    return spare.pop(i)
        with torch.inference_mode(False):  # a tensor made in that mode could not be written to outside it
            return cls(*key)

    def leave(self) -> None:
        """Let others have it."""
        self.turn += 1
        with self.lock:
            self.spare.append(self)
            del self.spare[:-SPARE]

    def without_border(self, images_last: Tensor) -> Tensor:
        """Images without their padding."""
        _, tall, wide, _ = self.padded
        pad = self.padding
        return images_last[:, pad : tall - pad, pad : wide - pad] if pad else images_last

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """The pooled output [O, L]. What stays here for the way back: the windows, the kernels, and by how much the
        second one wins: of the upper two, of the lower two, and of these."""
        self.inner.copy_(x.permute(1, 2, 3, 0))
        self.to_windows.copy_(self.from_images)
        self.four.copy_(weight.permute(0, 2, 3, 1))
        torch.mm(self.kernels, self.windows, out=self.blocks)
        torch.maximum(self.first, self.second, out=self.halves)
        self.second.sub_(self.first)
        pooled = torch.maximum(self.upper, self.lower)
        self.lower.sub_(self.upper)
        return pooled.add_(bias.unsqueeze(1)).relu_()

    def backward(self, grad: Tensor, pooled: Tensor, needed: tuple[bool, ...]) -> list[Tensor | None]:
        """The gradients of images, weight and bias, where they are needed."""
        past_zero(grad.permute(1, 2, 3, 0).reshape(pooled.shape), pooled, 0, grad_input=self.ahead)
        past_zero(self.ahead, self.lower, 0, grad_input=self.to_lower)
        torch.sub(self.ahead, self.to_lower, out=self.to_upper)
        past_zero(self.to_halves, self.second, 0, grad_input=self.second)
        torch.sub(self.to_halves, self.second, out=self.first)
        to_x = to_weight = to_bias = None
        if needed[1]:
            torch.mm(self.blocks, self.windows_t, out=self.to_kernels)
            a, b, c, d = self.to_four
            to_weight = (a + b).add_(c).add_(d).permute(0, 3, 1, 2)
        if needed[2]:
            to_bias = self.ahead.sum(1)
        if needed[0]:
            torch.mm(self.kernels_t, self.blocks, out=self.windows)
            to_x = self.put_windows()
        return [to_x, to_weight, to_bias]

    def put_windows(self) -> Tensor:
        """The sum of the windows where they were taken from, as images."""
        total = self.windows.new_zeros(self.padded)
        for part, shape, strides, offset in self.parts:
            total.as_strided(shape, strides, offset).add_(part)
        return self.without_border(total).permute(3, 0, 1, 2)
