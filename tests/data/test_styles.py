"""Feature skew: colours and angles as the tables say, who gets which, and the same bits in any batch."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import REPO, need
from torch import Tensor

from fedmpi.data.arrays import Arrays
from fedmpi.data.sets import ood, vision
from fedmpi.data.splits import Partition, SplitSpec, split
from fedmpi.data.styles import assign_styles, seen, tint, turn
from fedmpi.errors import UserError
from fedmpi.runs.build import load_data
from fedmpi.runs.config import Config, Skew

SETS: dict[str, Callable[[Path], Arrays]] = {
    "cmnist2": ood.cmnist2,
    "fedcmnist": ood.fedcmnist,
    "fedrotmnist": ood.fedrotmnist,
    "fedrotmnist-clients": ood.fedrotmnist_clients,
}
GOLDEN = {
    "cmnist2": "eb2ed919d87dfb29",
    "fedcmnist": "98b0e9ca9094182e",
    "fedrotmnist": "8e9af1586aa4918f",
    "fedrotmnist-clients": "3d9708be6778f895",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in MNIST's layout: 600 and 200 images of noise, each with a pixel of no ink and one of full ink."""
    folder = tmp_path_factory.mktemp("data")
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for part, n in (("train", 600), ("t10k", 200)):
        images = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        images[:, 0, :2] = 0, 255
        (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">4I", 0x803, n, 28, 28) + images.tobytes())
        labels = (np.arange(n) % 10).astype(np.uint8)
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 0x801, n) + labels.tobytes())
    return folder


@pytest.fixture(scope="module")
def mnist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the real MNIST."""
    raw = Path(os.environ.get("FEDMPI_TEST_DATA", REPO.parent / "shared" / "data")) / "mnist" / "MNIST" / "raw"
    need("data", raw.is_dir(), f"no MNIST is in {raw}; set FEDMPI_TEST_DATA to the folder that has mnist/MNIST/raw")
    folder = tmp_path_factory.mktemp("real")
    (folder / "MNIST").mkdir()
    (folder / "MNIST" / "raw").symlink_to(raw)
    return folder


def many(arrays: Arrays, n: int) -> Arrays:
    """The data set with n train and n test samples of one pixel, for what depends on labels alone."""
    y = torch.arange(n) % arrays.classes
    x = torch.full((n, 1, 1, 1), 255, dtype=torch.uint8)
    return replace(arrays, x=x, y=y, test_x=x, test_y=y, strata=None)


def dealt(arrays: Arrays, clients: int, seed: int = 0) -> Arrays:
    """The data, dealt evenly to the clients and styled."""
    return assign_styles(arrays, split(SplitSpec("iid", arrays.y.numpy(), clients, 0)), seed)


def clients_of(arrays: Arrays, clients: int) -> np.ndarray:
    """The client of each sample of `dealt`."""
    part = split(SplitSpec("iid", arrays.y.numpy(), clients, 0))
    client = np.empty(len(arrays.y), dtype=np.int64)
    client[part.order] = np.repeat(np.arange(clients), part.sizes)
    return client


def within(count: float, n: int, p: float) -> bool:
    """Whether a count of n is within five standard deviations of a chance p."""
    return abs(count - n * p) <= 5 * math.sqrt(n * p * (1 - p)) + 1


def rgb(*names: str) -> Tensor:
    """Colours as the model sees them: each hexadecimal digit doubled."""
    return torch.tensor([[int(digit * 2, 16) for digit in name] for name in names], dtype=torch.uint8)


def bar(height: int = 28, width: int = 28) -> Tensor:
    """A level bar through the centre, [1, 1, height, width]."""
    down, right = (torch.arange(n) - (n - 1) / 2 for n in (height, width))
    return 255.0 * ((down.abs() < 1.6)[:, None] & (right.abs() < 9)[None]).float()[None, None]


def slope(image: Tensor) -> float:
    """The angle of an image's long axis above the level, counter-clockwise, in degrees, by its second moments."""
    weight = image.double()
    height, width = weight.shape
    up, right = -(torch.arange(height) - (height - 1) / 2)[:, None], (torch.arange(width) - (width - 1) / 2)[None]
    xx, yy, xy = ((weight * m).sum() for m in (right * right, up * up, right * up))
    return math.degrees(0.5 * math.atan2(2 * float(xy), float(xx - yy)))


# ---- colours


def test_cmnist2_is_red_and_green_on_black(root: Path) -> None:
    data = dealt(ood.cmnist2(root), 3)
    assert data.classes == 2 and data.shape == (3, 28, 28) and data.mean == data.std == (0.5, 0.5, 0.5)
    assert data.y.tolist() == [int(i % 10 >= 5) for i in range(600)]
    images = seen(data, torch.arange(600))
    assert images.dtype == torch.uint8 and images.shape == (600, 3, 28, 28)
    assert (images[:, :, 0, 0] == rgb("000")).all(), "no ink is black"
    red, green = ((images[:, :, 0, 1] == rgb(name)).all(1) for name in ("f00", "0f0"))
    assert (red | green).all(), "full ink is red or green"
    assert torch.equal(images.amax(1), data.x[:, 0]), "ink in between is as bright as it was grey"
    assert 0.75 < float((green == (data.y == 1)).float().mean()) < 0.95


def test_label_skew_of_the_two_classes_goes_by_digit(root: Path) -> None:
    cfg = Config(data="cmnist2", data_root=str(root), split="mixed", clients=10, skew=Skew(classes=2))
    data, partition, _ = load_data(cfg)
    digits = vision.mnist(root).y.numpy()
    assert [len(np.unique(digits[partition.of(c)])) for c in range(10)] == [2] * 10
    assert len(np.unique(data.y)) == 2
    with pytest.raises(UserError, match="has strata of torch.int64 \\[3\\]; it needs torch.int64 \\[600\\]"):
        replace(data, strata=torch.zeros(3, dtype=torch.int64))


def test_a_client_flips_colours_at_its_own_rate(root: Path) -> None:
    data = dealt(many(ood.cmnist2(root), 40_000), 10, seed=3)
    assert data.style is not None
    flipped, client = (data.style != data.y).numpy(), clients_of(data, 10)
    counts = np.bincount(client, weights=flipped)
    for count in counts:
        low, high = (math.sqrt(4000 * p * (1 - p)) * 5 for p in (0.1, 0.2))
        assert 400 - low <= count <= 800 + high
    chance = 4000 * 0.15 * 0.85  # the variance if all had the same rate; clients' own rates add (400 ** 2) / 12
    assert counts.var() > 6 * chance
    for label in (0, 1):  # and at the same rate for both classes
        mine = data.y.numpy() == label
        share = np.bincount(client[mine], weights=flipped[mine]) / np.bincount(client[mine])
        assert np.abs(share - counts / 4000).max() < 5 * math.sqrt(0.2 * 0.8 / 2000)


def test_rates_cover_a_tenth_to_a_fifth(root: Path) -> None:
    data = dealt(many(ood.cmnist2(root), 400_000), 200)
    assert data.style is not None
    rates = np.bincount(clients_of(data, 200), weights=(data.style != data.y).numpy()) / 2000
    assert rates.mean() == pytest.approx(0.15, abs=0.01)
    assert rates.min() < 0.115 and rates.max() > 0.185
    assert np.histogram(rates, 4, (0.1, 0.2))[0].min() > 25  # 50 expected of a uniform draw


def test_the_binary_test_is_reversed(root: Path) -> None:
    data = dealt(many(ood.cmnist2(root), 40_000), 10)
    assert data.test_style is not None
    assert within(int((data.test_style != data.test_y).sum()), 40_000, 0.9)
    other = dealt(ood.cmnist2(root), 3)
    ink = seen(other, torch.arange(200), test=True)[:, :, 0, 1]
    red = (ink == rgb("f00")).all(1)
    assert within(int((red == (other.test_y == 1)).sum()), 200, 0.9), "the others are mostly red now"


def test_classes_have_their_colours(root: Path) -> None:
    data = dealt(ood.fedcmnist(root), 3)
    assert data.classes == 10 and data.shape == (3, 28, 28)
    images = seen(data, torch.arange(600))
    for label, (inks, papers) in enumerate(ood.TRAIN_COLOURS):
        mine = images[data.y == label]
        used = [(tuple(image[:, 0, 1].tolist()), tuple(image[:, 0, 0].tolist())) for image in mine]
        listed = [tuple(map(tuple, pair)) for pair in itertools.product(rgb(*inks).tolist(), rgb(*papers).tolist())]
        assert set(used) == set(listed), "the four pairs of the class and no other"
        assert all(within(used.count(pair), 60, 0.25) for pair in listed)
    raw = data.x[0, 0, 5, 5].item() / 255
    ink, paper = images[0, :, 0, 1].double(), images[0, :, 0, 0].double()
    assert torch.allclose(images[0, :, 5, 5].double(), paper + (ink - paper) * raw, atol=0.51)


def test_test_colours_are_drawn_from_the_ten_alike(root: Path) -> None:
    images = seen(dealt(many(ood.fedcmnist(root), 1), 1), torch.tensor([0]))
    assert images.shape == (1, 3, 1, 1)
    data = dealt(many(ood.fedcmnist(root), 45_000), 3)
    assert data.test_style is not None and data.styles is not None
    pairs, counts = np.unique(data.styles.table[data.test_style].numpy(), axis=0, return_counts=True)
    assert len(pairs) == 90, "every ink on every other paper"
    assert all(within(count, 45_000, 1 / 90) for count in counts)
    assert (pairs[:, 0] != pairs[:, 1]).any(axis=1).all()
    listed = {tuple(colour) for colour in rgb(*ood.TEST_COLOURS).tolist()}
    assert {tuple(colour) for colour in pairs.reshape(-1, 3)} == listed
    for label in range(10):  # and the same for each class
        mine = data.test_style[data.test_y == label] - 40
        assert within(int((mine < 45).sum()), len(mine), 0.5)


def luminance(name: str) -> float:
    """Of a colour, 0 to 1, as the sRGB standard defines it."""
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in (rgb(name)[0] / 255).tolist()]
    return sum(w * v for w, v in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(a: str, b: str) -> float:
    """The ratio of luminances, as web standards define it: 1 to 21; 3 is asked of graphics."""
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_colours_are_far_apart_and_readable() -> None:
    train = [name for colours in ood.TRAIN_COLOURS for names in colours for name in names]
    everything = rgb(*train, *ood.TEST_COLOURS).float()
    assert len(train) == 40 and len(ood.TEST_COLOURS) == 10
    assert torch.pdist(everything).min() >= 51, "all fifty are different"
    for inks, papers in ood.TRAIN_COLOURS:
        assert all(contrast(ink, paper) >= 3 for ink, paper in itertools.product(inks, papers))
    assert torch.pdist(rgb(*ood.TEST_COLOURS).float()).min() > 140
    assert all(contrast(*pair) > 1.2 for pair in itertools.combinations(ood.TEST_COLOURS, 2))


# ---- angles


def test_a_quarter_turn_is_counter_clockwise() -> None:
    image = torch.rand(1, 1, 28, 28, generator=torch.Generator().manual_seed(0)) * 255
    for angle, quarters in ((90, 1), (-90, -1), (180, 2)):
        turned = turn(image, ood.angle_table([angle]))
        assert torch.allclose(turned, torch.rot90(image, quarters, (2, 3)), atol=0.01)
    corner = torch.zeros(1, 1, 28, 28)
    corner[..., 3, 24] = 255  # top right
    assert turn(corner, ood.angle_table([90]))[0, 0, 3, 3] > 250, "goes to the top left"


@pytest.mark.parametrize("shape", [(28, 28), (40, 28), (28, 40)])
def test_bars_are_turned_by_the_angle_and_keep_their_size(shape: tuple[int, int]) -> None:
    angles = [*ood.CLASS_ANGLES, *ood.CLIENT_ANGLES[::9], 45]
    turned = turn(bar(*shape).expand(len(angles), -1, -1, -1), ood.angle_table(angles))
    for angle, image in zip(angles, turned, strict=True):
        assert (slope(image[0]) - angle + 90) % 180 - 90 == pytest.approx(0, abs=0.7)
        assert float(image.sum()) == pytest.approx(float(bar(*shape).sum()), rel=0.03)


def test_no_angle_gives_the_image_back_and_outside_is_empty() -> None:
    image = torch.randint(0, 256, (4, 1, 28, 28), generator=torch.Generator().manual_seed(1)).float()
    assert torch.allclose(turn(image, ood.angle_table([0] * 4)), image, atol=1e-3)
    full = turn(torch.full((1, 1, 28, 28), 255.0), ood.angle_table([45]))[0, 0]
    assert full[0, 0] == full[0, 27] == full[27, 0] == full[27, 27] == 0
    assert torch.allclose(full[5:23, 5:23], torch.tensor(255.0))


def test_classes_have_their_angles_and_the_test_is_upright(root: Path) -> None:
    data = ood.fedrotmnist(root)
    bars = bar().to(torch.uint8).expand(20, -1, -1, -1)
    labels = torch.arange(20) % 10
    data = dealt(replace(data, x=bars, y=labels, test_x=bars, test_y=labels), 4)
    assert data.shape == (1, 28, 28) and len(data.mean) == 1
    measured = [slope(image[0]) for image in seen(data, torch.arange(20))]
    assert measured == pytest.approx([10, -10, 20, -20, 30, -30, 40, -40, 50, -50] * 2, abs=0.7)
    assert torch.equal(seen(data, torch.arange(20), test=True), bars)


def test_each_client_has_one_angle_of_its_own_and_the_test_another(root: Path) -> None:
    bars = bar().to(torch.uint8).expand(720, -1, -1, -1)
    labels = torch.arange(720) % 10
    data = dealt(replace(ood.fedrotmnist_clients(root), x=bars, y=labels, test_x=bars, test_y=labels), 180)
    client, images = clients_of(data, 180), seen(data, torch.arange(720))
    measured = np.array([slope(image[0]) for image in images])
    degrees = np.rint(measured).astype(int)
    assert np.abs(measured - degrees).max() < 0.5
    for cid in range(180):
        assert len(np.unique(degrees[client == cid] % 180)) == 1
    held = sorted({int(d) for d in degrees % 180})
    assert held == [d for d in range(180) if d != 45], "all different (90 and -90 look alike in a bar)"
    assert data.style is not None and len(data.style.unique()) == 180 and int(data.style.max()) == 179
    tests = seen(data, torch.arange(5), test=True)
    assert [slope(image[0]) for image in tests] == pytest.approx([45] * 5, abs=0.5)


@pytest.mark.parametrize("clients", [1, 7, 180, 181, 500])
def test_angles_are_dealt_evenly(clients: int, root: Path) -> None:
    data = dealt(many(ood.fedrotmnist_clients(root), 2 * clients), clients)
    assert data.style is not None
    client, style = clients_of(data, clients), data.style.numpy()
    angle = np.zeros(clients, dtype=np.int64)
    angle[client] = style
    assert (angle[client] == style).all(), "one a client"
    counts = np.bincount(angle, minlength=180)
    assert len(counts) == 180 and counts.max() - counts.min() <= 1


# ---- for all sets


@pytest.mark.parametrize("name", SETS)
def test_a_sample_gets_the_same_bits_in_any_batch(name: str, root: Path) -> None:
    data = dealt(SETS[name](root), 7)
    assert data.name == name and data.styles is not None and data.style is not None
    x, rows = data.x[:500].float(), data.styles.table[data.style[:500]]
    whole = data.styles.apply_style(x, rows)
    assert whole.shape == (500, *data.shape) and whole.dtype == torch.float32
    assert whole.min() >= 0 and whole.max() <= 255 + 1e-3
    for size in (1, 7):
        parts = [data.styles.apply_style(a, b) for a, b in zip(x.split(size), rows.split(size), strict=True)]
        assert torch.equal(torch.cat(parts), whole)
    shuffled = torch.randperm(500, generator=torch.Generator().manual_seed(0))
    assert torch.equal(data.styles.apply_style(x[shuffled], rows[shuffled]), whole[shuffled])
    precise = data.styles.apply_style(x.double(), rows)
    assert precise.dtype == torch.float64 and torch.allclose(precise, whole.double(), atol=1e-2)
    assert torch.equal(x, data.x[:500].float()), "what is rendered is not written to"


@pytest.mark.parametrize("name", SETS)
def test_looks_are_a_function_of_the_split_and_the_seed(name: str, root: Path) -> None:
    data = many(SETS[name](root), 5000)
    first, other = dealt(data, 20, seed=1), dealt(data, 20, seed=2)
    np.random.seed(5)
    torch.manual_seed(5)
    again = dealt(data, 20, seed=1)
    assert first.style is not None and other.style is not None and again.style is not None
    assert torch.equal(first.style, again.style) and first.style.dtype == torch.int64
    assert first.test_style is not None and other.test_style is not None
    assert torch.equal(first.test_style, other.test_style), "the test set is the same in every run"
    by_client = name in ("cmnist2", "fedrotmnist-clients")
    assert torch.equal(first.style, other.style) != by_client, "what belongs to clients is drawn anew, the rest is not"
    part = split(SplitSpec("iid", data.y.numpy(), 20, 0))
    turned = np.concatenate([part.of(cid)[::-1] for cid in range(20)])
    stirred = assign_styles(data, Partition(part.offsets, turned), 1).style
    assert stirred is not None and torch.equal(stirred, first.style), "the order within a client is no matter"


@pytest.mark.parametrize("name", SETS)
def test_held_out_samples_have_the_styles_of_one_more_client(name: str, root: Path) -> None:
    data = many(SETS[name](root), 20_000)
    part = Partition(np.array([0, 5000, 10_000]), np.arange(10_000), shared=np.arange(15_000, 20_000))
    styled = assign_styles(data, part, 0)
    assert styled.style is not None and data.styles is not None
    held = styled.style[10_000:]
    assert 0 <= int(styled.style.min()) and int(styled.style.max()) < len(data.styles.table)
    if name == "cmnist2":
        assert 0.09 < float((held != data.y[10_000:]).float().mean()) < 0.21
    if name == "fedrotmnist-clients":
        assert len({*styled.style[:5000].tolist()}) == len({*held.tolist()}) == 1
        assert len(styled.style.unique()) == 3


def test_looks_stay_as_they_are(root: Path) -> None:
    digests = {}
    for name, make in SETS.items():
        data = dealt(many(make(root), 3000), 30, seed=7)
        assert data.styles is not None and data.style is not None and data.test_style is not None
        table = (data.styles.table * 10_000).round().long()
        content = b"".join(t.numpy().astype("<i8").tobytes() for t in (table, data.style, data.test_style))
        digests[name] = hashlib.sha256(content).hexdigest()[:16]
    assert digests == GOLDEN, "a changed digest changes published results: say so in the CHANGELOG"


def test_seen_shows_data_without_styles() -> None:
    x, y = torch.arange(12, dtype=torch.uint8).view(3, 1, 2, 2), torch.tensor([0, 1, 0])
    plain = Arrays("plain", 2, x, y, x + 100, y, (0.5,), (0.5,))
    assert assign_styles(plain, Partition(np.array([0, 3]), np.arange(3)), 0) is plain
    assert seen(plain, torch.tensor([2, 0])).tolist() == x[[2, 0]].tolist()
    assert seen(plain, torch.tensor([1]), test=True).tolist() == (x[[1]] + 100).tolist()


def test_tint_by_hand() -> None:
    grey = torch.tensor([[[[0.0, 255.0, 51.0]]], [[[0.0, 255.0, 102.0]]]])
    pairs = torch.tensor([[[255.0, 0, 100], [0, 255, 50]], [[10.0, 20, 30], [10, 20, 30]]])
    first, second = tint(grey, pairs)[:, :, 0]
    assert torch.allclose(first.T, torch.tensor([[0.0, 255, 50], [255, 0, 100], [51, 204, 60]]))
    assert torch.allclose(second.T, torch.tensor([10.0, 20, 30]))


# ---- on MNIST itself


def test_real_digits_in_colours(mnist: Path) -> None:
    two = ood.cmnist2(mnist)
    assert len(two.y) == 60_000 and len(two.test_y) == 10_000
    assert int((two.y == 0).sum()) == 5923 + 6742 + 5958 + 6131 + 5842
    assert int((two.test_y == 0).sum()) == 980 + 1135 + 1032 + 1010 + 982
    data = dealt(two, 100, seed=4)
    assert data.style is not None
    counts = np.bincount(clients_of(data, 100), weights=(data.style != data.y).numpy())
    assert all(60 - 5 * 7.4 <= count <= 120 + 5 * 9.8 for count in counts), "600 a client, at 0.1 to 0.2"
    rendered = seen(data, torch.arange(100))
    channel = data.style[:100]
    assert torch.equal(rendered[torch.arange(100), channel], data.x[:100, 0]), "the ink is in the channel of the style"
    assert int(rendered[:, 2].max()) == 0 and int(rendered[torch.arange(100), 1 - channel].max()) == 0
    ten = dealt(ood.fedcmnist(mnist), 10)
    assert ten.y.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    corner = seen(ten, torch.arange(500))[:, :, 0, 0]  # no digit reaches there
    for label, (_, papers) in enumerate(ood.TRAIN_COLOURS):
        assert {*map(tuple, corner[ten.y[:500] == label].tolist())} == {*map(tuple, rgb(*papers).tolist())}
    tests = seen(ten, torch.arange(500), test=True)[:, :, 0, 0]
    assert {*map(tuple, tests.tolist())} == {*map(tuple, rgb(*ood.TEST_COLOURS).tolist())}


def test_real_digits_turned(mnist: Path) -> None:
    data = dealt(ood.fedrotmnist(mnist), 10)
    ones = (data.y == 1).nonzero().flatten()[:400]  # a one is a bar: its own slant, minus 10 degrees
    before, after = (
        np.array([slope(image[0]) % 180 for image in images]) for images in (data.x[ones], seen(data, ones))
    )
    assert float(np.median(after - before)) == pytest.approx(-10, abs=1)
    some = torch.arange(300)
    assert torch.equal(seen(data, some, test=True), data.test_x[some])
    ink = seen(data, some).float().sum((1, 2, 3)) / data.x[some].float().sum((1, 2, 3))
    assert float((ink - 1).abs().max()) < 0.05, "digits stay inside"
    turned = dealt(ood.fedrotmnist_clients(mnist), 10)
    ones = (turned.test_y == 1).nonzero().flatten()[:400]
    before, after = (
        np.array([slope(image[0]) % 180 for image in images])
        for images in (turned.test_x[ones], seen(turned, ones, test=True))
    )
    assert float(np.median((after - before) % 180)) == pytest.approx(45, abs=1.5)
