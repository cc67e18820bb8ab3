"""The gradient of a small network without autograd, whose overhead is a fifth to a third of a step of such layers.

A `Layered` model declares that it consists of its `network` and nothing else: convolutions, each followed by 2x2 max
pooling and ReLU (convpool.py), then linear layers with ReLU and dropout between them. Its gradient under the cross
entropy is written out here: the same as autograd's up to rounding, and written to its destination. (benchmarks/step.py:
a fifth less time for a step of LeNet, a third less for logistic regression.)

A batch of vectors is a matrix of columns, [element, sample]. So the output of the last convolution is the input of the
first linear layer without a copy, and so is the gradient in the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import convpool
from .convpool import past_zero


@dataclass(frozen=True)
class Network:
    """The layers of a model in order; dropout follows every linear layer but the last."""

    convs: tuple[nn.Conv2d, ...]
    linears: tuple[nn.Linear, ...]
    dropout: float = 0.0

    @property
    def layers(self) -> tuple[nn.Conv2d | nn.Linear, ...]:
        """Return all layers in order."""
        return *self.convs, *self.linears


class Layered(nn.Module):
    """A model whose forward pass is that of its network."""

    @property
    def network(self) -> Network:
        """Return the layers."""
        raise NotImplementedError(f"{type(self).__name__} does not declare its network")


def by_hand(
    model: nn.Module, params: Sequence[Tensor], grads: Sequence[Tensor], network: Network | None = None
) -> ByHand | None:
    """Return a function that writes the gradient of a model with respect to `params` to `grads`; None if autograd is
    needed: the model is not layered (by its own declaration, or as a `network` that was recognised in it), its forward
    pass does more, or not all of it is trained on a CPU."""
    if network is None:
        definer = next(kind for kind in type(model).__mro__ if {"forward", "network"} & vars(kind).keys())
        if not isinstance(model, Layered) or "network" not in vars(definer):  # a subclass overrides the forward pass
            return None
        network = model.network
    plain = all(type(layer) in (nn.Conv2d, nn.Linear) for layer in network.layers)
    hooks: list[object] = [p._backward_hooks for p in params]
    for m in model.modules():
        hooks += m._forward_pre_hooks, m._forward_hooks, m._backward_pre_hooks, m._backward_hooks
    ours = [id(p) for layer in network.layers for p in (layer.weight, layer.bias)] == list(map(id, params))
    here = all(p.device.type == "cpu" and p.dtype in (torch.float32, torch.float64) for p in params)
    return ByHand(network, params, grads) if plain and ours and here and not any(hooks) else None


class ByHand:
    """A function (x, labels) -> mean loss of a batch, which also writes the gradient."""

    def __init__(self, network: Network, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        count, params = 2 * len(network.convs), [p.detach() for p in params]
        self.paddings = [int(conv.padding[0]) for conv in network.convs]
        self.conv_params, self.conv_grads = params[:count], list(grads[:count])
        weights, biases = params[count::2], [b.unsqueeze(1) for b in params[count + 1 :: 2]]
        self.linears = list(zip(weights, biases, strict=True))
        self.ways_back = list(zip([w.t() for w in weights], grads[count::2], grads[count + 1 :: 2], strict=True))
        self.dropout = network.dropout

    def __call__(self, x: Tensor, labels: Tensor) -> Tensor:
        """Write the gradient; return the loss. Dropout draws the same numbers as in the model's forward pass."""
        layers, _ = convpool.forward(x, self.paddings, self.conv_params)
        column = layers[-1].pooled.view(-1, len(x)) if layers else x.flatten(1).t()
        columns, noise = [column], list[Tensor]()
        for weight, bias in self.linears[:-1]:
            column = torch.addmm(bias, weight, column).relu_()
            if self.dropout:
                noise.append(F.dropout(x.new_ones(len(x), len(column)), self.dropout).t())
                column.mul_(noise[-1])
            columns.append(column)
        weight, bias = self.linears[-1]
        log_p, right = torch.log_softmax(torch.addmm(bias, weight, column), 0), labels.flatten().unsqueeze(0)
        loss = log_p.gather(0, right).mean().neg_()
        ahead = log_p.exp_().scatter_add_(0, right, x.new_full(right.shape, -1.0)).div_(len(x))
        for k in reversed(range(len(columns))):
            weight_t, to_weight, to_bias = self.ways_back[k]
            torch.mm(ahead, columns[k].t(), out=to_weight)
            torch.sum(ahead, 1, out=to_bias)
            if k:
                ahead = torch.mm(weight_t, ahead)
                if noise:
                    ahead.mul_(noise[k - 1])
                past_zero(ahead, columns[k], 0, grad_input=ahead)
        if layers:
            images = torch.mm(self.ways_back[0][0], ahead).view(layers[-1].room.out).permute(3, 0, 1, 2)
            found = convpool.backward(layers, images, needs_x=False)
            torch._foreach_copy_(self.conv_grads, [g for g in found if g is not None])
            convpool.leave(layers)
        return loss
