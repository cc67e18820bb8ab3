"""Convolutions, each followed by 2x2 max pooling and ReLU, as one function, for small images on a CPU.

The four outputs of a pool belong to four positions of the kernel in one window that is larger by one. So a convolution
with O kernels of k x k and its pooling are matrix products of windows of (k+1) x (k+1), taken at every second pixel,
with the kernels at their left and right positions, padded with a column of zeros. The upper and the lower position are
the same kernels on the first and on the last k lines of the windows:

    S  [k+1, k+1, C, L]    the windows of C channels, L = pooled outputs of all images
    W  [2, O, k, k+1, C]   the kernels, left and right
    Y  [2, 2, O, L]        Y[0] = W S[:k], Y[1] = W S[1:];  pooled[o, l] = max over the four of Y[:, :, o, l], + bias[o]

The backward pass consists of such products too. They need a fifth more multiplications, and nearly half as many again
for the gradient of W, where one large product beats two. But matrix products run several times as fast as convolutions
of few channels, and no index of the maximum has to be stored.

In memory the images of a batch are interleaved, element by element, with even lines and columns separate from odd ones:
[channel, even or odd, line, even or odd, column, image]. So the elements at one position of all windows of a line are
contiguous, over all images, and the output has the layout of the next layer's input. For LeNet with batches of 32 on
one thread, this takes well under half of the time of torch's operations (benchmarks/step.py). At that size the overhead
of a torch call is as large as its arithmetic: so memory and views are made once per shape and reused, and consecutive
layers are one function.

In a tie the gradient goes to the first of the four, as in torch's max_pool2d. Second derivatives, other devices,
autocast, compilation and vmap use torch's operations.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

past_zero = torch.ops.aten.threshold_backward.grad_input
"""(grad, x, 0, grad_input=out): grad where x > 0, else 0"""
SPARE = 8  # workspaces that are kept for reuse
AT_ONCE = 64  # images at once without a gradient: more do not fit the cache


def conv_pool_relu(x: Tensor, *convs: nn.Conv2d) -> Tensor:
    """Compute relu(max_pool2d(conv(x), 2)) for consecutive convolutions, each with a bias and square kernels of odd
    size."""
    paddings = tuple(int(conv.padding[0]) for conv in convs)
    params = [p for conv in convs for p in (conv.weight, conv.bias) if p is not None]
    assert len(params) == 2 * len(convs), "the products add a bias"
    if not takes(x, params[0]):
        return plain(x, paddings, params)
    if torch.is_grad_enabled():
        out: Tensor = ConvPoolRelu.apply(x, paddings, *params)  # type: ignore[no-untyped-call]
        return out
    parts = []
    for some in torch.split(x, AT_ONCE):
        layers, out = forward(some, paddings, params)
        leave(layers)
        parts.append(out)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def plain(x: Tensor, paddings: Sequence[int], params: Sequence[Tensor]) -> Tensor:
    """Compute the same with torch's operations. ReLU after pooling is the same on a quarter of the elements."""
    for padding, weight, bias in zip(paddings, params[::2], params[1::2], strict=True):
        x = F.relu(F.max_pool2d(F.conv2d(x, weight, bias, padding=padding), 2))
    return x


def takes(x: Tensor, weight: Tensor) -> bool:
    """Return whether the matrix products support this case."""
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype
        and x.dtype in (torch.float32, torch.float64)
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    )


class Layer(NamedTuple):
    """The result of a layer: its workspace, that workspace's turn, and the output [O, L]."""

    room: Room
    turn: int
    pooled: Tensor


def forward(x: Tensor, paddings: Sequence[int], params: Sequence[Tensor]) -> tuple[list[Layer], Tensor]:
    """Run the layers, each in its own workspace; return them and the last output."""
    layers: list[Layer] = []
    for padding, weight, bias in zip(paddings, params[::2], params[1::2], strict=True):
        room = Room.free(x.shape, weight.shape, padding, x.dtype)
        pooled = room.forward(x, weight, bias)
        layers.append(Layer(room, room.turn, pooled))
        x = pooled.view(room.out).permute(3, 0, 1, 2)
    return layers, x


def leave(layers: Sequence[Layer]) -> None:
    """Release the workspaces."""
    for layer in layers:
        layer.room.leave()


class ConvPoolRelu(torch.autograd.Function):
    """The autograd function; its parameters are weight and bias of each layer in turn."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, paddings: tuple[int, ...], *params: Tensor) -> Tensor:
        ctx.layers, out = forward(x, paddings, params)
        ctx.paddings = paddings
        ctx.save_for_backward(x, *params)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (x, *params), layers = grads, ctx.saved_tensors, ctx.layers
        ours = all(layer.room.turn == layer.turn for layer in layers)  # false in a second backward pass of this graph
        if torch.is_grad_enabled():  # the gradients will be differentiated
            found = differentiable(x, ctx.paddings, params, grad)
        else:
            if not ours:
                (layers, _), ours = forward(x, ctx.paddings, params), True
            found = backward(layers, grad, ctx.needs_input_grad[0])
        if ours:
            leave(layers)
        return found[0], None, *found[1:]


def backward(layers: Sequence[Layer], grad: Tensor, needs_x: bool) -> list[Tensor | None]:
    """Return the gradients of the images, if they are needed, and of all parameters."""
    to_x: Tensor | None = grad
    found: list[Tensor | None] = []
    for k in reversed(range(len(layers))):
        assert to_x is not None
        room, _, pooled = layers[k]
        to_x, *of_layer = room.backward(to_x, pooled, needs_x or k > 0)
        found = [*of_layer, *found]
    return [to_x, *found]


def differentiable(x: Tensor, paddings: Sequence[int], params: Sequence[Tensor], grad: Tensor) -> list[Tensor | None]:
    """Return differentiable gradients, computed with torch's operations."""
    asked = [t for t in (x, *params) if t.requires_grad]
    found = iter(torch.autograd.grad(plain(x, paddings, params), asked, grad, create_graph=True))
    return [next(found) if t.requires_grad else None for t in (x, *params)]


class Room:
    """A workspace for calls of one shape: memory and its views. It has one user at a time, until it is released;
    returned tensors never share its memory."""

    spare: ClassVar[list[Room]] = []
    """free workspaces, the most recently released at the end"""
    lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, images: torch.Size, weights: torch.Size, padding: int, dtype: torch.dtype) -> None:
        self.key = images, weights, padding, dtype
        self.turn = 0  # number of releases: a user that stored another number no longer owns it
        count, channels, height, width = images
        kernels, kernel = weights[0], weights[-1]
        side, half = kernel + 1, (kernel + 1) // 2
        rows, columns = ((length + 2 * padding - kernel + 1) // 2 for length in (height, width))
        self.out = kernels, rows, columns, count
        outputs, line = rows * columns * count, side * channels

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype)

        # The frame: images with a border, in pairs of lines and of columns. With an odd border one line is counted as
        # part of the images, and one more for an odd number of lines, so that no pair is half image and half border.
        odd, self.edge = padding % 2, padding // 2
        self.beside = odd, odd + width % 2, odd, odd + height % 2  # as F.pad takes it
        pairs = [(length + 2 * odd + length % 2) // 2 + 2 * self.edge for length in (height, width)]
        frame, summed = (zeros(channels, 2, pairs[0], 2, pairs[1], count) for _ in range(2))
        self.inner, self.summed, self.to_inner = self.within(frame), summed, self.within(summed)
        channel, odd_row, row, odd_column, column, _ = frame.stride()
        shape = half, 2, half, 2, channels, rows, columns * count
        strides = row, odd_row, column, odd_column, channel, row, 1
        self.from_frame, to_frame = (t.as_strided(shape, strides) for t in (frame, summed))  # overlapping
        self.windows = zeros(side * line, outputs)
        self.to_windows, self.windows_t = self.windows.view(shape), self.windows.t()
        self.first_lines, self.last_lines = self.windows[: kernel * line], self.windows[line:]
        self.last_line = self.windows[kernel * line :]
        # Windows are taken 2 apart, so no two of them have the same 2 x 2 part in common.
        parts = [(i, slice(None), j) for i in range(half) for j in range(half)]
        self.parts = [(to_frame[part], self.to_windows[part]) for part in parts]
        size, moved = (kernels, kernel, kernel, channels), (line, channels, 1)
        self.kernels = zeros(2 * kernels, kernel * line)
        self.kernels_t = self.kernels.t()
        apart = kernels * kernel * line + channels
        self.two = self.kernels.as_strided((2, *size), (apart, kernel * line, *moved))
        self.to_kernels = zeros(4 * kernels, side * line)
        block = kernels * side * line
        four = self.to_kernels.as_strided((2, 2, *size), (2 * block + line, block + channels, side * line, *moved))
        self.to_four = [one for two in four.unbind() for one in two.unbind()]
        self.blocks, self.ahead = zeros(4 * kernels, outputs), zeros(kernels, outputs)
        self.upper_two, self.lower_two = torch.split(self.blocks, 2 * kernels)
        self.left, self.right = self.blocks.view(2, 2, kernels, outputs).unbind(1)
        self.halves, self.to_halves = zeros(2, kernels, outputs), zeros(2, kernels, outputs)
        (self.upper, self.lower), (self.to_upper, self.to_lower) = self.halves.unbind(), self.to_halves.unbind()

    @classmethod
    def free(cls, images: torch.Size, weights: torch.Size, padding: int, dtype: torch.dtype) -> Room:
        """Return a free workspace for these shapes."""
        key, spare = (images, weights, padding, dtype), cls.spare
        with cls.lock:
            for i in range(len(spare) - 1, -1, -1):
                if spare[i].key == key:
                    return spare.pop(i)
        with torch.inference_mode(False):  # a tensor created in that mode cannot be written to outside it
            return cls(*key)

    def leave(self) -> None:
        """Release the workspace."""
        self.turn += 1
        with self.lock:
            self.spare.append(self)
            del self.spare[:-SPARE]

    def within(self, frame: Tensor) -> Tensor:
        """Return the images in a frame: [channel, pair of lines, which, pair of columns, which, image]."""
        edge, lines, columns = self.edge, frame.shape[2], frame.shape[4]
        return frame.permute(0, 2, 1, 4, 3, 5)[:, edge : lines - edge, :, edge : columns - edge]

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Return the pooled output [O, L]. Kept for the backward pass: the windows, the kernels, and the differences
        right - left (of the upper and the lower two) and lower - upper."""
        if any(self.beside):
            x = F.pad(x, self.beside)
        self.inner.copy_(x.permute(1, 2, 3, 0).view(self.inner.shape))
        self.to_windows.copy_(self.from_frame)
        self.two.copy_(weight.permute(0, 2, 3, 1))
        torch.mm(self.kernels, self.first_lines, out=self.upper_two)
        torch.mm(self.kernels, self.last_lines, out=self.lower_two)
        torch.maximum(self.left, self.right, out=self.halves)
        self.right.sub_(self.left)
        pooled = torch.maximum(self.upper, self.lower)
        self.lower.sub_(self.upper)
        return pooled.add_(bias.unsqueeze(1)).relu_()

    def backward(self, grad: Tensor, pooled: Tensor, needs_x: bool) -> list[Tensor | None]:
        """Return the gradients of images, weight and bias; None for images if it is not needed."""
        past_zero(grad.permute(1, 2, 3, 0).reshape(pooled.shape), pooled, 0, grad_input=self.ahead)
        past_zero(self.ahead, self.lower, 0, grad_input=self.to_lower)
        torch.sub(self.ahead, self.to_lower, out=self.to_upper)
        past_zero(self.to_halves, self.right, 0, grad_input=self.right)
        torch.sub(self.to_halves, self.right, out=self.left)
        torch.mm(self.blocks, self.windows_t, out=self.to_kernels)
        a, b, c, d = self.to_four
        to_weight = (a + b).add_(c).add_(d).permute(0, 3, 1, 2)
        to_bias = self.ahead.sum(1)
        if not needs_x:
            return [None, to_weight, to_bias]
        torch.mm(self.kernels_t, self.upper_two, out=self.first_lines)
        self.last_line.zero_()
        self.last_lines.addmm_(self.kernels_t, self.lower_two)
        self.summed.zero_()
        for place, part in self.parts:  # add the windows up at the positions they were taken from
            place.add_(part)
        images = self.to_inner.clone(memory_format=torch.contiguous_format).flatten(1, 2).flatten(2, 3)
        if any(self.beside):
            left, right, top, bottom = self.beside
            images = images[:, top : images.shape[1] - bottom, left : images.shape[2] - right]
        return [images.permute(3, 0, 1, 2), to_weight, to_bias]
