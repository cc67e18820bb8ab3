"""Find out whether a model of the user's own is a chain of layers that has a gradient by hand (byhand.py).

The forward pass is traced by torch.fx: convolutions, each followed by 2x2 max pooling and ReLU in either order, then
linear layers with ReLU and, if any, equal dropout between them. Anything else is left to autograd, and so is a model
that does not trace, traces differently twice, or whose traced chain gives other outputs than the model itself.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from .byhand import Network

MOST = 2400  # weights of a convolution, as many as in LeNet's second: torch's own are faster for larger ones
LAYERS = {nn.Conv2d, nn.MaxPool2d, nn.Linear, nn.ReLU, nn.Dropout, nn.Flatten, nn.Identity}
RELU: tuple[Any, ...] = (F.relu, torch.relu, torch.relu_, "relu", "relu_")
POOL: tuple[Any, ...] = (F.max_pool2d, torch.max_pool2d)
FLATTEN: tuple[Any, ...] = (torch.flatten, "flatten")
VIEW: tuple[Any, ...] = (torch.reshape, "view", "reshape")
OF_A_SHAPE: tuple[Any, ...] = ("size", getattr, operator.getitem)  # as in view(x.size(0), -1)

Step = tuple[str, Any]


def recognised(model: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> Network | None:
    """Return the layers of a model for samples of this shape, if it consists of them in their order; else None."""
    leaves = {type(module) for module in model.modules() if not any(module.children())}
    if not leaves <= LAYERS or any(True for _ in model.buffers()):
        return None  # without calling it
    training = model.training
    model.train()
    try:
        first, second = fx.symbolic_trace(model), fx.symbolic_trace(model)
        if first.code != second.code:
            return None
        network = network_of(list(steps(first)))
        return network if network is not None and agrees(model, network, shape, dtype) else None
    except Exception:  # whatever a forward pass does that tracing or another shape of samples does not bear
        return None
    finally:
        model.train(training)


def steps(traced: fx.GraphModule) -> Iterator[Step]:
    """Yield what happens to the one input, in order; an odd step is ("other", node)."""
    before: fx.Node | None = None
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            if before is not None:
                yield "other", node
            before = node
        elif node.op == "output":
            yield ("end", None) if node.args[0] is before else ("other", node)
        elif node.target not in OF_A_SHAPE:
            used = [n for n in node.all_input_nodes if n.target not in OF_A_SHAPE]
            yield step_of(node, traced) if used == [before] else ("other", node)
            before = node


def step_of(node: fx.Node, traced: fx.GraphModule) -> Step:
    """Return the kind of a node and its layer."""
    if node.op == "call_module":
        return layer_of(traced.get_submodule(str(node.target)))
    if node.target in RELU:
        return "relu", None
    if node.target in POOL:
        pool: Any = nn.MaxPool2d
        return layer_of(pool(*node.args[1:], **node.kwargs))
    if node.target in FLATTEN and (node.args[1:] or node.kwargs) in ((1,), {"start_dim": 1}):
        return "flatten", None
    return ("flatten" if node.target in VIEW else "other"), node  # a view to another shape gives other outputs


def layer_of(layer: nn.Module) -> Step:
    """Return the kind of a layer."""
    if type(layer) is nn.Conv2d:
        kernel = layer.kernel_size[0]
        plain = layer.groups == 1 and layer.stride == layer.dilation == (1, 1) and layer.padding_mode == "zeros"
        square = layer.kernel_size == (kernel, kernel) and kernel % 2 == 1 and layer.bias is not None
        padded = isinstance(layer.padding, tuple) and layer.padding[0] == layer.padding[-1]
        return ("conv" if plain and square and padded and layer.weight.numel() <= MOST else "other"), layer
    if type(layer) is nn.MaxPool2d:
        two = [(n, n) if isinstance(n, int) else tuple(n) for n in (layer.kernel_size, layer.stride or 2)]
        rest = (layer.padding, layer.dilation, layer.ceil_mode, layer.return_indices)
        return ("pool" if two == [(2, 2)] * 2 and rest == (0, 1, False, False) else "other"), layer
    if type(layer) is nn.Linear and layer.bias is not None:
        return "linear", layer
    if type(layer) is nn.Dropout:
        return "dropout", layer.p
    if type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
        return "flatten", None
    return ("relu" if type(layer) is nn.ReLU else "same" if type(layer) is nn.Identity else "other"), layer


def network_of(chain: list[Step]) -> Network | None:
    """Return the layers of a chain of steps, if it is the one that has a gradient by hand."""
    kinds = [(kind, layer) for kind, layer in chain if kind != "same" and (kind, layer) != ("dropout", 0.0)]
    convs: list[nn.Conv2d] = []
    while kinds and kinds[0][0] == "conv" and {kind for kind, _ in kinds[1:3]} == {"relu", "pool"}:
        convs.append(kinds[0][1])
        del kinds[:3]
    if kinds and kinds[0][0] == "flatten":
        del kinds[0]
    linears, dropouts = list[nn.Linear](), list[float]()
    while kinds and kinds[0][0] == "linear":
        linears.append(kinds.pop(0)[1])
        if kinds and kinds[0][0] == "relu":
            del kinds[0]
            dropouts.append(float(kinds.pop(0)[1]) if kinds[0][0] == "dropout" else 0.0)
        else:
            break
    if [kind for kind, _ in kinds] != ["end"] or len(dropouts) != len(linears) - 1 or len(set(dropouts)) > 1:
        return None
    return Network(tuple(convs), tuple(linears), dropouts[0] if dropouts else 0.0)


@torch.no_grad()
def agrees(model: nn.Module, network: Network, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Return whether the layers do what the model does."""
    model.eval()
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected, found = model(x), x
    for conv in network.convs:
        found = F.relu(F.max_pool2d(conv(found), 2))
    found = found.flatten(1)
    for linear in network.linears[:-1]:
        found = F.relu(linear(found))
    found = network.linears[-1](found)
    same = isinstance(expected, Tensor) and expected.shape == found.shape
    return same and torch.allclose(expected, found, rtol=1e-3, atol=1e-5)
