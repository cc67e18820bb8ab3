"""A model as one flat vector: nothing is lost, and a step on the vector is a step of the model."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedmpi.errors import UserError
from fedmpi.flat import Layout, Span, bind, layout_of, parts_of, read_ints, untouched, write_ints
from fedmpi.models.lenet import LeNet


class Tied(nn.Module):
    """An encoder and a decoder that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 6), nn.Linear(6, 6)
        self.decode.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(torch.tanh(self.encode(x.flatten(1)[:, :6])))


def normed() -> nn.Module:
    """A model with running statistics and a counter of steps."""
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 100, 3))


def frozen() -> nn.Module:
    """A model whose first layer is not trained."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 5), nn.Tanh(), nn.Linear(5, 3))
    model[1].requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lenet": lambda: LeNet(1, 12, 12, 3),
    "batch norm": normed,
    "frozen": frozen,
    "tied": Tied,
}


def bound(model: nn.Module, channels_last: bool = False, ranks: int = 1) -> tuple[Layout, Tensor]:
    """The layout of a model, and the vector that it is bound to."""
    layout = layout_of(model, channels_last)
    x = torch.zeros(layout.padded(ranks))
    bind(model, layout.spans, x)
    return layout, x


@pytest.fixture(params=[(name, last) for name in MODELS for last in (False, True)], ids=lambda p: f"{p[0]}-{p[1]}")
def pair(request: pytest.FixtureRequest) -> tuple[nn.Module, nn.Module, Layout, Tensor]:
    """A model in its own memory, its twin bound to a vector, and the twin's layout, vector and gradient."""
    name, channels_last = request.param
    torch.manual_seed(1)
    model = MODELS[name]()
    twin = copy.deepcopy(model)
    return model, twin, *bound(twin, channels_last)


Pair = tuple[nn.Module, nn.Module, Layout, Tensor]
IMAGES = torch.rand(8, 1, 12, 12, generator=torch.Generator().manual_seed(2))


def test_binding_changes_no_value(pair: Pair) -> None:
    model, twin, *_ = pair
    mine, its = model.state_dict(), twin.state_dict()
    assert list(mine) == list(its)
    assert all(torch.equal(mine[name], its[name]) for name in mine)
    assert torch.allclose(twin(IMAGES), model(IMAGES), atol=1e-5)


def test_the_vector_holds_every_element_once(pair: Pair) -> None:
    model, _, layout, x = pair
    assert layout.params == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert layout.length == layout.params + sum(b.numel() for b in model.buffers() if b.is_floating_point())
    ends = [span.start + span.shape.numel() for span in layout.spans]
    assert [span.start for span in layout.spans] == [0, *ends[:-1]] and ends[-1] == layout.length
    everything = [p for p in model.parameters() if p.requires_grad]
    everything += [b for b in model.buffers() if b.is_floating_point()]
    assert torch.equal(x.sort()[0], torch.cat([t.detach().reshape(-1) for t in everything]).sort()[0])


def test_a_vector_makes_the_model_and_the_model_the_vector(pair: Pair) -> None:
    _, twin, layout, x = pair
    other = torch.arange(len(x)) / len(x)
    x.copy_(other)
    again = copy.deepcopy(twin)  # in memory of its own
    back = torch.zeros_like(x)
    bind(again, layout.spans, back)
    assert torch.equal(back, other)


def test_a_step_on_the_vector_is_a_step_of_the_model(pair: Pair) -> None:
    model, twin, layout, x = pair
    model.eval(), twin.eval()
    before = twin(IMAGES)
    x[: layout.params] *= 0.5
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p *= 0.5
    assert torch.allclose(twin(IMAGES), model(IMAGES), atol=1e-5)
    assert not torch.allclose(twin(IMAGES), before, atol=1e-3)


def test_a_bound_model_has_the_gradients_of_an_unbound_one(pair: Pair) -> None:
    model, twin, layout, _ = pair
    torch.autograd.backward(model(IMAGES).square().mean())
    torch.autograd.backward(twin(IMAGES).square().mean())
    alone, there = dict(model.named_parameters()), dict(twin.named_parameters())
    for span in layout.spans:
        if span.start < layout.params:
            assert there[span.name].grad.any(), span.name
            assert torch.allclose(there[span.name].grad, alone[span.name].grad, atol=1e-6), span.name


def test_gradients_of_the_plain_layout_are_bit_for_bit_those_of_an_unbound_model() -> None:
    torch.manual_seed(1)
    model = LeNet(1, 12, 12, 3)
    twin = copy.deepcopy(model)
    bound(twin)
    torch.autograd.backward(model(IMAGES).square().mean())
    torch.autograd.backward(twin(IMAGES).square().mean())
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_channels_last_weights_lie_with_channels_innermost() -> None:
    model = LeNet(3, 12, 12, 3)
    layout, x = bound(model, channels_last=True)
    assert model.conv2.weight.is_contiguous(memory_format=torch.channels_last)
    assert model.fc1.weight.is_contiguous() and not model.conv2.weight.is_contiguous()
    span = next(span for span in layout.spans if span.name == "conv2.weight")
    assert x[span.start : span.start + 6].tolist() == model.conv2.weight[0, :, 0, 0].tolist()


def test_buffers_follow_the_parameters_and_counters_are_apart() -> None:
    layout = layout_of(normed())
    assert [span.name for span in layout.spans if span.start >= layout.params] == ["1.running_mean", "1.running_var"]
    assert layout.ints == ("1.num_batches_tracked",)


def test_running_statistics_move_in_the_vector() -> None:
    model = normed()
    layout, x = bound(model)
    before = x.clone()
    model.train()(IMAGES)
    assert torch.equal(x[: layout.params], before[: layout.params])
    assert torch.equal(x[layout.params :], torch.cat([model[1].running_mean, model[1].running_var]))
    assert not torch.equal(x[layout.params :], before[layout.params :])


def test_frozen_parameters_are_left_out() -> None:
    model = frozen()
    layout, x = bound(model)
    assert [span.name for span in layout.spans] == ["3.weight", "3.bias"]
    assert layout.params == 5 * 3 + 3
    torch.autograd.backward(model(IMAGES).sum())
    assert model[1].weight.grad is None


def test_tied_weights_are_one_span_and_stay_tied() -> None:
    model = Tied()
    layout, x = bound(model)
    assert layout.params == 36 + 6 + 6
    assert model.encode.weight is model.decode.weight
    x.zero_()
    assert not model.decode.weight.any()


def test_padding_makes_equal_slices_and_stays_zero() -> None:
    model = LeNet(1, 12, 12, 3)
    layout, x = bound(model, ranks=7)
    assert len(x) % 7 == 0 and 0 < len(x) - layout.length < 7
    torch.autograd.backward(model(IMAGES).sum())
    assert not x[layout.length :].any()


@given(st.integers(1, 10**9), st.integers(1, 10**4))
def test_the_padded_length_is_the_next_multiple(length: int, ranks: int) -> None:
    padded = Layout((), 0, length, ()).padded(ranks)
    assert padded % ranks == 0 and length <= padded < length + ranks


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_numbers_than_float32_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(UserError, match=r"'0.weight' is torch.\w+; what is trained must be float32: call model.float"):
        layout_of(nn.Sequential(nn.Linear(2, 2, dtype=dtype)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_a_buffer_that_cannot_ride_in_the_vector_is_still(dtype: torch.dtype) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("phase", torch.ones(3, dtype=dtype))
    assert list(parts_of(model).still) == ["phase"] and layout_of(model).length == 6


@pytest.mark.parametrize("model", [nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)], ids=["none", "frozen"])
def test_a_model_that_cannot_learn_is_refused(model: nn.Module) -> None:
    with pytest.raises(UserError, match="no trainable parameter"):
        layout_of(model)


def test_integer_buffers_go_out_and_come_back_in_their_own_types() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("table", torch.tensor([[1, 2], [3, 4]], dtype=torch.int32))
    model.register_buffer("allowed", torch.tensor([True, False]))
    model.register_buffer("steps", torch.tensor(9))
    layout = layout_of(model)
    ints = read_ints(model, layout)
    assert ints.dtype == torch.int64 and ints.tolist() == [1, 2, 3, 4, 1, 0, 9]
    write_ints(model, layout, torch.tensor([5, 6, 7, 8, 0, 1, 2**40]))
    assert model.table.tolist() == [[5, 6], [7, 8]] and model.table.dtype == torch.int32
    assert model.allowed.tolist() == [False, True] and model.allowed.dtype == torch.bool
    assert int(model.steps) == 2**40


def test_a_model_without_integer_buffers_has_none() -> None:
    model = nn.Linear(2, 2)
    assert read_ints(model, layout_of(model)).tolist() == []


@given(st.tuples(*[st.integers(1, 4)] * 4), st.booleans(), st.integers(0, 3))
def test_a_span_is_a_view_that_reads_and_writes_its_own_elements(
    shape: tuple[int, int, int, int], channels_last: bool, start: int
) -> None:
    span = Span("w", start, torch.Size(shape), channels_last)
    count = span.shape.numel()
    x = torch.zeros(start + count + 2)
    values = torch.arange(1.0, count + 1).view(shape)
    span.view(x).copy_(values)
    assert torch.equal(span.view(x), values)
    assert x[start : start + count].sort()[0].tolist() == values.reshape(-1).tolist()
    assert not x[:start].any() and not x[start + count :].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_untouched_memory_is_zero_and_aligned(dtype: torch.dtype) -> None:
    x = untouched(1000, torch.device("cpu"), dtype)
    assert x.dtype == dtype and len(x) == 1000 and x.data_ptr() % 64 == 0 and not x.any()
    x.fill_(1)
    assert bool((x == 1).all())


UNTOUCHED = """
import torch
from fedmpi.commands.plan import status
from fedmpi.flat import untouched
before = status("RssAnon")
x = untouched(16 << 20, torch.device("cpu"), torch.float32)
print(status("RssAnon") - before)
x.fill_(1)
print(status("RssAnon") - before)
"""


def test_memory_that_nothing_has_written_to_takes_none() -> None:
    """In a process of its own: elsewhere the memory may be some that was used before."""
    done = subprocess.run([sys.executable, "-c", UNTOUCHED], capture_output=True, text=True, timeout=100, check=True)
    made, written = map(int, done.stdout.split())
    assert made < 16 << 20 and written >= 64 << 20
