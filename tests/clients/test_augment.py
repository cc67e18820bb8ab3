"""Augmentation: every cut and every mirror image by hand, drawn from the seed alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedmpi.clients.augment import make_augment
from fedmpi.errors import UserError


def picture(channels: int = 2, height: int = 3, width: int = 4) -> Tensor:
    """One image whose pixels all differ and of which none is black."""
    return torch.arange(1, channels * height * width + 1, dtype=torch.uint8).view(1, channels, height, width)


def many(count: int = 400) -> Tensor:
    return picture().expand(count, -1, -1, -1).clone()


def windows(image: Tensor, pixels: int) -> list[Tensor]:
    """All pieces of the image's size that can be cut out of it, with black around it: row by row, left to right."""
    _, height, width = image.shape
    padded = torch.zeros(image.shape[0], height + 2 * pixels, width + 2 * pixels, dtype=image.dtype)
    padded[:, pixels : pixels + height, pixels : pixels + width] = image
    steps = range(2 * pixels + 1)
    return [padded[:, top : top + height, left : left + width] for top in steps for left in steps]


def which(image: Tensor, candidates: list[Tensor]) -> list[int]:
    """The numbers of the candidates that an image equals."""
    return [i for i, candidate in enumerate(candidates) if torch.equal(image, candidate)]


def augmented(text: str, images: Tensor, seed: int = 1) -> Tensor:
    augment = make_augment(text)
    assert augment is not None
    return augment(images, seed)


@pytest.mark.parametrize("pixels", [1, 2])
def test_a_crop_is_one_of_the_windows_of_the_padded_image_and_all_of_them_occur(pixels: int) -> None:
    out, candidates = augmented(f"crop:{pixels}", many()), windows(picture()[0], pixels)
    found = [which(image, candidates) for image in out]
    assert all(len(one) == 1 for one in found), "each output is just one of the windows"
    counts = torch.bincount(torch.tensor(found).flatten(), minlength=(2 * pixels + 1) ** 2)
    assert len(counts) == (2 * pixels + 1) ** 2 and int(counts.min()) > 0
    assert int(counts.max()) < 4 * 400 / len(counts), "and none is preferred"


def test_a_crop_wider_than_the_image_may_leave_it_black() -> None:
    out = augmented("crop:4", many())
    assert bool((out.flatten(1) == 0).all(1).any()) and bool((out == picture()).flatten(1).all(1).any())


def test_a_flip_is_the_mirror_image_for_about_half() -> None:
    out, mirrored = augmented("flip", many()), picture().flip(-1)[0]
    found = [which(image, [picture()[0], mirrored]) for image in out]
    assert all(len(one) == 1 for one in found)
    assert 160 < sum(one[0] for one in found) < 240, "four deviations of a fair coin"


def test_a_flip_exchanges_left_and_right_and_not_top_and_bottom() -> None:
    image = torch.zeros(1, 1, 2, 3, dtype=torch.uint8)
    image[0, 0, 0, 0] = 9  # upper left
    out = augmented("flip", image.expand(50, -1, -1, -1))
    places = {tuple(place.tolist()) for place in out[:, 0].nonzero()[:, 1:]}
    assert places == {(0, 0), (0, 2)}


def test_both_together_give_every_window_and_its_mirror_image() -> None:
    candidates = windows(picture()[0], 1)
    candidates += [window.flip(-1) for window in candidates]
    found = [which(image, candidates) for image in augmented("crop:1+flip", many())]
    assert all(len(one) == 1 for one in found) and {one[0] for one in found} == set(range(18))


def test_steps_are_taken_in_the_order_of_the_text() -> None:
    """The draws are the same in number, not in order: the text that names a step first lets it draw first."""
    a, b = augmented("crop:1+flip", many()), augmented("flip+crop:1", many())
    assert not torch.equal(a, b)
    assert torch.equal(augmented("flip+flip", many()), augmented("flip+flip", many()))


@pytest.mark.parametrize("text", ["crop:2", "flip", "crop:2+flip"])
def test_what_is_drawn_depends_on_the_seed_alone(text: str) -> None:
    first = augmented(text, many(), seed=5)
    torch.manual_seed(0), torch.rand(9)
    assert torch.equal(augmented(text, many(), seed=5), first)
    assert not torch.equal(augmented(text, many(), seed=6), first)
    state = torch.get_rng_state()
    augmented(text, many(), seed=7)
    assert torch.equal(torch.get_rng_state(), state), "torch's own numbers are left alone"


def test_a_dropout_layer_under_the_same_seed_does_not_draw_the_same_numbers() -> None:
    coins = torch.randint(2, (400,), generator=torch.Generator().manual_seed(5)).bool()
    flipped = (augmented("flip", many(), seed=5) != many()).flatten(1).any(1)
    assert 100 < int((coins == flipped).sum()) < 300


@given(st.integers(0, 2**63 - 1), st.integers(1, 9))
def test_any_seed_of_a_batch_is_taken(seed: int, count: int) -> None:
    assert augmented("crop:1+flip", many(count), seed).shape == (count, 2, 3, 4)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
@pytest.mark.parametrize("text", ["crop:1", "flip", "crop:1+flip"])
def test_images_keep_shape_and_kind_and_are_left_as_they_are(text: str, dtype: torch.dtype) -> None:
    images = many().to(dtype)
    out = augmented(text, images)
    assert out.dtype == dtype and out.shape == images.shape
    assert torch.equal(images, many().to(dtype)), "the data set itself is not changed"
    assert torch.equal(out.double(), augmented(text, many()).double()), "the same pieces whatever the kind"


def test_all_channels_of_an_image_move_together() -> None:
    images = torch.arange(1, 13, dtype=torch.uint8).view(1, 1, 3, 4).expand(60, 3, -1, -1)
    out = augmented("crop:2+flip", images)
    assert torch.equal(out[:, 0], out[:, 1]) and torch.equal(out[:, 0], out[:, 2])
    assert len({tuple(image.flatten().tolist()) for image in out}) > 20, "and images of a batch apart"


def test_the_padding_is_black_also_for_floats() -> None:
    out = augmented("crop:1", torch.ones(200, 1, 2, 2))
    assert set(out.unique().tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("text", ["none", "none+none"])
def test_none_is_nothing_to_do(text: str) -> None:
    assert make_augment(text) is None


def test_a_none_after_a_step_keeps_the_step() -> None:
    assert torch.equal(augmented("none+flip", many()), augmented("flip", many()))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("crop", "--augment is 'crop'; write it as crop:pixels, with numbers"),
        ("crop:", "--augment is 'crop:'; write it as crop:pixels"),
        ("crop:x", "--augment is 'crop:x'; write it as crop:pixels"),
        ("crop:1,2", "--augment is 'crop:1,2'; write it as crop:pixels"),
        ("crop:0", "--augment is 'crop:0'; crop needs a whole number of pixels, at least 1"),
        ("crop:-3", "--augment is 'crop:-3'; crop needs a whole number of pixels"),
        ("crop:1.5", "--augment is 'crop:1.5'; crop needs a whole number of pixels"),
        ("crop:nan", "--augment is 'crop:nan'; write it as"),
        ("flip:2", "--augment is 'flip:2'; write it as flip"),
        ("flop", "unknown --augment 'flop'; did you mean 'flip'? known: crop:pixels, flip, none"),
        ("crop:4+", "unknown --augment ''"),
        ("", "unknown --augment ''"),
        ("crop:4,flip", "--augment is 'crop:4,flip'; write it as crop:pixels"),
    ],
)
def test_an_invalid_text_is_a_one_line_error(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        make_augment(text)
    assert str(caught.value).startswith(message)


def test_the_error_names_the_option_that_was_given() -> None:
    with pytest.raises(UserError, match="^unknown augment of 'mine' 'crap'; did you mean 'crop:pixels'"):
        make_augment("crap", option="augment of 'mine'")
