"""Convolution, pooling and ReLU as products of matrices, against torch's own operations."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedmpi.models.kernels import convpool
from fedmpi.models.kernels.convpool import AT_ONCE, SPARE, ConvPoolRelu, Room, conv_pool_relu, plain, takes

Case = tuple[nn.Conv2d, Tensor, Tensor]


@pytest.fixture(autouse=True)
def no_rooms() -> Iterator[None]:
    """Each test begins and ends without rooms."""
    Room.spare.clear()
    yield
    Room.spare.clear()


def make(
    images: int = 3,
    channels: int = 2,
    side: int = 12,
    kernels: int = 4,
    kernel: int = 5,
    padding: int = 0,
    seed: int = 0,
) -> Case:
    """A convolution, images, and a gradient for what comes out, in double precision."""
    torch.manual_seed(seed)
    conv = nn.Conv2d(channels, kernels, kernel, padding=padding).double()
    x = torch.randn(images, channels, side, side + 1, dtype=torch.float64, requires_grad=True)
    return conv, x, torch.randn_like(by_torch(x, conv))


def both(conv: nn.Conv2d, x: Tensor, ahead: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Output and gradients: ours, and torch's."""
    inputs = [x, conv.weight, conv.bias] if x.requires_grad else [conv.weight, conv.bias]
    outs = conv_pool_relu(x, conv), by_torch(x, conv)
    ours, theirs = ([out, *torch.autograd.grad(out, inputs, ahead)] for out in outs)
    return ours, theirs


def by_torch(x: Tensor, *convs: nn.Conv2d) -> Tensor:
    return plain(x, [int(conv.padding[0]) for conv in convs], [p for conv in convs for p in (conv.weight, conv.bias)])


def close(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in zip(ours, theirs, strict=True)
    )


@settings(deadline=None, max_examples=40)
@given(
    images=st.integers(1, 5),
    channels=st.integers(1, 4),
    side=st.integers(6, 15),
    kernels=st.integers(1, 5),
    kernel=st.sampled_from([1, 3, 5]),
    padding=st.integers(0, 3),
    seed=st.integers(0, 9),
)
def test_any_shape_gives_what_torch_gives(
    images: int, channels: int, side: int, kernels: int, kernel: int, padding: int, seed: int
) -> None:
    assert close(*both(*make(images, channels, side, kernels, kernel, padding, seed)))


def chain() -> tuple[list[nn.Conv2d], Tensor]:
    """Three layers behind each other, with odd and even borders and sides, and images for them."""
    torch.manual_seed(4)
    convs = [nn.Conv2d(2, 4, 5, padding=1), nn.Conv2d(4, 3, 3, padding=2), nn.Conv2d(3, 5, 3)]
    return [conv.double() for conv in convs], torch.randn(3, 2, 23, 26, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("frozen", [(), (0,), (0, 1, 2, 3), (1, 4), (2, 3), (0, 5, 6), (3, 4, 5, 6)])
def test_stacked_layers_equal_torch(frozen: tuple[int, ...]) -> None:
    """Whatever of images, weights and biases is trained; numbers are those of images and parameters in turn."""
    convs, x = chain()
    inputs = [x, *(p for conv in convs for p in (conv.weight, conv.bias))]
    for number in frozen:
        inputs[number].requires_grad_(False)
    wanted = [t for t in inputs if t.requires_grad]
    outs = conv_pool_relu(x, *convs), by_torch(x, *convs)
    ahead = torch.randn_like(outs[1])
    ours, theirs = ([out, *torch.autograd.grad(out, wanted, ahead)] for out in outs)
    assert close(ours, theirs) and all(t.any() for t in ours)
    with torch.no_grad():
        assert close([conv_pool_relu(x, *convs)], [outs[1]])
    assert len(Room.spare) == len(convs)


def test_stacked_layers_can_be_differentiated_twice() -> None:
    convs, x = chain()
    inputs = [x, *(p for conv in convs for p in (conv.weight, conv.bias))]

    def twice(out: Tensor) -> list[Tensor]:
        once = torch.autograd.grad(out, inputs, out.detach(), retain_graph=True)
        again = torch.autograd.grad(out, inputs, out.detach(), retain_graph=True)  # the rooms are others' by now
        assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
        curved = torch.autograd.grad(out, inputs, out.detach(), create_graph=True)
        total = sum((g.square().sum() for g in curved), torch.zeros(()).double())
        return [*once, *torch.autograd.grad(total, inputs[:-1])]

    assert close(twice(conv_pool_relu(x, *convs)), twice(by_torch(x, *convs)))


def test_images_that_want_no_gradient_get_none() -> None:
    conv, x, ahead = make()
    assert close(*both(conv, x.detach(), ahead))


def test_at_a_tie_the_first_one_gets_the_gradient() -> None:
    """Flat images tie everywhere; the whole gradient goes to one place, and to the one that torch chooses."""
    conv, x, ahead = make(padding=2)
    with torch.no_grad():
        conv.bias.fill_(10.0)  # none is cut off
    for flat in (torch.zeros_like(x), torch.ones_like(x), x.detach().round()):
        ours, theirs = both(conv, flat.requires_grad_(), ahead)
        assert close(ours, theirs)
        assert ours[1].any()


def test_second_derivatives_are_those_of_torch() -> None:
    conv, x, ahead = make()

    def curvature(out: Tensor) -> list[Tensor]:
        inputs = [x, conv.weight, conv.bias]
        grads = torch.autograd.grad(out, inputs, ahead * out.detach(), create_graph=True)
        total = sum((g.square().sum() for g in grads[:2]), torch.zeros(()).double())
        return list(torch.autograd.grad(total, inputs[:2]))

    ours = curvature(conv_pool_relu(x, conv))
    theirs = curvature(by_torch(x, conv))
    assert all(g.abs().max() > 0 for g in ours)
    assert close(ours, theirs)


def test_a_graph_can_be_traversed_twice_and_with_others() -> None:
    """Memory is used again by later calls: what an earlier one has kept must not be theirs."""
    conv, x, ahead = make()
    out = conv_pool_relu(x, conv)
    later = conv_pool_relu(2 * x, conv)
    inputs = [x, conv.weight, conv.bias]
    first = torch.autograd.grad(out, inputs, ahead, retain_graph=True)
    others = [conv_pool_relu(factor * x, conv) for factor in (3, 4)]  # one of them where the first one was
    torch.autograd.grad(later, inputs, ahead)
    again = torch.autograd.grad(out, inputs, ahead, retain_graph=True)
    curved = torch.autograd.grad(out, inputs, ahead, create_graph=True)
    once_more = torch.autograd.grad(out, inputs, ahead)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(first, again, once_more, strict=True))
    assert close([*first], [*curved])
    for factor, other in zip((3, 4), others, strict=True):
        theirs = torch.autograd.grad(by_torch(factor * x, conv), inputs, ahead)
        assert close([*torch.autograd.grad(other, inputs, ahead)], [*theirs])
    assert close([out, *first], both(conv, x, ahead)[1])


def test_what_was_returned_stays_as_it_is() -> None:
    conv, x, ahead = make()
    inputs = [x, conv.weight, conv.bias]
    returned = []
    for factor in (1, 2, 3):
        out = conv_pool_relu(factor * x, conv)
        returned.append([out, *torch.autograd.grad(out, inputs, ahead)])
    copies = [[t.clone() for t in some] for some in returned]
    for factor in (4, 5):
        torch.autograd.grad(conv_pool_relu(factor * x, conv), inputs, ahead)
        with torch.no_grad():
            conv_pool_relu(factor * x, conv)
    assert all(
        torch.equal(a, b) for some, kept in zip(returned, copies, strict=True) for a, b in zip(some, kept, strict=True)
    )


def test_the_bits_do_not_depend_on_what_was_computed_before() -> None:
    conv, x, ahead = make()
    conv, x, ahead = conv.float(), x.detach().float().requires_grad_(), ahead.float()
    fresh = both(conv, x, ahead)[0]
    for seed in range(3):
        other = make(seed=seed)
        both(other[0].float(), 1e6 * other[1].detach().float(), other[2].float())
    assert all(torch.equal(a, b) for a, b in zip(fresh, both(conv, x, ahead)[0], strict=True))


def test_rooms_are_used_again_and_few_are_kept() -> None:
    conv, x, ahead = make()
    for _ in range(3):
        both(conv, x, ahead)
    assert len(Room.spare) == 1
    for images in range(1, SPARE + 4):  # as the short last batches of clients
        both(*make(images=images))
    assert len(Room.spare) == SPARE
    assert [room.key[0][0] for room in Room.spare] == list(range(4, SPARE + 4)), "the last ones"
    outs = [conv_pool_relu(x, conv) for _ in range(SPARE + 3)]
    for out in outs:
        torch.autograd.grad(out, [x], ahead)
    assert len(Room.spare) == SPARE


def test_many_images_go_through_in_parts_where_no_gradient_is_wanted() -> None:
    conv, x, _ = make(images=2 * AT_ONCE + 3)
    with torch.inference_mode():
        assert torch.allclose(conv_pool_relu(x, conv), by_torch(x, conv))
    assert sorted({room.key[0][0] for room in Room.spare}) == [3, AT_ONCE]
    assert len(conv_pool_relu(x, conv)) == 2 * AT_ONCE + 3


def test_training_continues_after_evaluation() -> None:
    conv, x, ahead = make()
    with torch.inference_mode():
        conv_pool_relu(x, conv)
    assert close(*both(conv, x, ahead))
    assert len(Room.spare) == 1


def test_threads_do_not_share_rooms() -> None:
    conv, x, ahead = make(images=2, side=8)
    ahead = ahead[:, :, :2, :2]
    expected = both(conv, x, ahead)[0]

    def work(_: int) -> bool:
        return all(torch.equal(a, b) for _ in range(40) for a, b in zip(expected, both(conv, x, ahead)[0], strict=True))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


@pytest.mark.parametrize("how", ["autocast", "vmap", "half", "meta"])
def test_other_cases_take_the_plain_operations(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    conv, x, _ = make()
    conv, x = conv.float(), x.detach().float()
    monkeypatch.setattr(ConvPoolRelu, "apply", None)
    if how == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            assert not takes(x, conv.weight)
            assert conv_pool_relu(x, conv).dtype == torch.bfloat16
    elif how == "vmap":
        assert torch.vmap(lambda one: conv_pool_relu(one, conv))(x[None]).shape[0] == 1
    else:
        kind = {"dtype": torch.bfloat16} if how == "half" else {"device": "meta"}
        conv_pool_relu(x.to(**kind), conv.to(**kind))
    assert convpool.takes(torch.zeros(1), torch.zeros(1)), "and this case would not"
