"""Recurrent layers: those of cuDNN, with one derivative, and those that torch composes of other operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .counting import counts
from .kernels import order_access, own_randomness
from .memory import NAME, alias, memory
from .streams import current_stream

aten = torch.ops.aten
CUDNN_RNN = (
    "the derivative for '_cudnn_rnn_backward' is not implemented. Double backwards is not supported for CuDNN RNNs due "
    "to limitations in the CuDNN API. To run double backwards, please disable the CuDNN backend temporarily while "
    "running the forward pass of your RNN. For example: \nwith torch.backends.cudnn.flags(enabled=False):\n"
    "    output = model(inputs)"
)


class Recurrent(torch.autograd.Function):
    """A recurrent layer in one kernel, forward and backward."""

    @staticmethod
    def forward(ctx: Any, op: Any, rest: tuple[Any, ...], sizes: tuple[int, int], *tensors: torch.Tensor) -> Any:
        index = tensors[0].device.index
        counts.kernel("cudnn_rnn")
        on = current_stream(index)
        number = on.issue()
        order_access([t for t in tensors if t.device.type == NAME], [], on, number, "cudnn_rnn")
        with own_randomness(index):
            outs, inputs = forward_on_cpu(op, rest, sizes, tensors)
        ctx.outs, ctx.inputs, ctx.index = outs, inputs, index
        return tuple(memory.adopt(out.detach(), index, number) for out in outs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, None, *RecurrentBackward.apply(ctx.outs, ctx.inputs, ctx.index, *grads)


class RecurrentBackward(torch.autograd.Function):
    """The derivative of `Recurrent`, which has none itself."""

    @staticmethod
    def forward(ctx: Any, outs: Any, inputs: Any, index: int, *grads: torch.Tensor) -> Any:
        counts.kernel("cudnn_rnn_backward")
        on = current_stream(index)
        number = on.issue()
        order_access(list(grads), [], on, number, "cudnn_rnn_backward")
        wanted = [t for t in inputs if t.requires_grad]
        with torch.enable_grad():
            low = [alias(g) for g in grads]
            made = iter(torch.autograd.grad(outs, wanted, low, retain_graph=True, allow_unused=True))
        found = [next(made) if t.requires_grad else None for t in inputs]
        return tuple(None if g is None else memory.adopt(g.clone(), index, number) for g in found)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise NotImplementedError(CUDNN_RNN)


def forward_on_cpu(op: Any, rest: Any, sizes: tuple[int, int], tensors: Any) -> tuple[Any, Any]:
    """Run a recurrent layer on the CPU's tensors with its history; return results and inputs."""
    inputs = [alias(t).requires_grad_(t.requires_grad) for t in tensors]
    states, params = inputs[1 : 1 + sizes[0]], inputs[1 + sizes[0] :]
    enabled, lower = torch.is_autocast_enabled(NAME), torch.get_autocast_dtype(NAME)
    with torch.enable_grad(), torch.autocast("cpu", lower, enabled=enabled):
        return op(inputs[0], states if op is aten.lstm.input else states[0], params, *rest), inputs


def layer(op: Any, cell: Callable[..., Any]) -> Callable[..., Any]:
    """Return the kernel of a recurrent layer."""

    def call(x: torch.Tensor, hx: Any, params: list[torch.Tensor], *rest: Any) -> Any:
        states = list(hx) if isinstance(hx, list | tuple) else [hx]
        for t in [x, *states, *params]:
            if t.device != x.device:
                found = f"found input tensor at {x.device} and parameter tensor at {t.device}"
                raise RuntimeError(f"Input and parameter tensors are not at the same device, {found}")
        if torch.backends.cudnn.enabled:
            return Recurrent.apply(op, rest, (len(states), len(params)), x, *states, *params)
        return unrolled(cell, x, states, params, *rest)

    return call


def unrolled(
    cell: Callable[..., Any],
    x: torch.Tensor,
    states: list[torch.Tensor],
    params: list[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout_p: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    """Compose a recurrent layer of other operations, as torch does on the CPU."""
    x = x.transpose(0, 1) if batch_first else x
    per, directions = (4 if has_biases else 2), 2 if bidirectional else 1
    ends: list[list[torch.Tensor]] = [[] for _ in states]
    for layer in range(num_layers):
        outs = []
        for direction in range(directions):
            at = layer * directions + direction
            weights = params[at * per : (at + 1) * per]
            w_ih, w_hh, b_ih, b_hh = weights if has_biases else (*weights, None, None)
            state = [s[at] for s in states]
            gates = torch.nn.functional.linear(x, w_ih, b_ih).unbind(0)
            steps = []
            for gate in reversed(gates) if direction else gates:
                state = cell(gate, state, w_hh, b_hh)
                steps.append(state[0])
            outs.append(torch.stack(steps[::-1] if direction else steps))
            for end, s in zip(ends, state, strict=True):
                end.append(s)
        x = outs[0] if directions == 1 else torch.cat(outs, -1)
        if dropout_p and train and layer < num_layers - 1:
            x = torch.nn.functional.dropout(x, dropout_p, train)
    return (x.transpose(0, 1) if batch_first else x, *(torch.stack(end) for end in ends))


def gru_cell(gate: torch.Tensor, state: list[torch.Tensor], w_hh: torch.Tensor, b_hh: Any) -> list[torch.Tensor]:
    """Take one step of a GRU; `gate` is what the input contributes."""
    (hidden,) = state
    i_reset, i_update, i_new = gate.chunk(3, 1)
    h_reset, h_update, h_new = torch.nn.functional.linear(hidden, w_hh, b_hh).chunk(3, 1)
    reset, update = (h_reset + i_reset).sigmoid(), (h_update + i_update).sigmoid()
    new = (i_new + h_new * reset).tanh()
    return [(hidden - new) * update + new]


def lstm_cell(gate: torch.Tensor, state: list[torch.Tensor], w_hh: torch.Tensor, b_hh: Any) -> list[torch.Tensor]:
    """Take one step of an LSTM."""
    hidden, memory_cell = state
    i, f, g, o = (torch.nn.functional.linear(hidden, w_hh, b_hh) + gate).chunk(4, 1)
    memory_cell = f.sigmoid() * memory_cell + i.sigmoid() * g.tanh()
    return [o.sigmoid() * memory_cell.tanh(), memory_cell]


def plain_cell(activation: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., list[torch.Tensor]]:
    """Return the step of an Elman layer."""

    def cell(gate: torch.Tensor, state: list[torch.Tensor], w_hh: torch.Tensor, b_hh: Any) -> list[torch.Tensor]:
        return [activation(torch.nn.functional.linear(state[0], w_hh, b_hh) + gate)]

    return cell


CELLS = {
    "gru.input": gru_cell,
    "lstm.input": lstm_cell,
    "rnn_tanh.input": plain_cell(torch.tanh),
    "rnn_relu.input": plain_cell(torch.relu),
}
