"""Glyphs: ten classes of generated digits by many writers, so that nothing needs a download.

A digit is a few strokes through control points. A writer has fixed offsets of those points and habits (slant, width,
thickness, ink and so on, `HABITS`, and a favourite form of each digit, `FORMS`); every sample varies a little more.
Strokes become smooth curves (Catmull-Rom), curves become short segments, and a pixel is inked by its distance to the
nearest segment. Test writers have no train samples.

The same arguments give the same bytes on any machine. Random numbers are raw bits of PCG64, the part of numpy's random
module with a guaranteed stream, and the arithmetic on them is elementwise float32 addition, multiplication, division
and square root, one numpy call each, which IEEE 754 defines to the last bit. There is no sine, exponential, matrix
product or sum over an axis, because those differ between libraries and processors.

Axes: the batch is last, [height, width, batch], so that every inner loop is long and contiguous.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedmpi.data.arrays import Arrays
from fedmpi.data.store import Source, Tensors, as_tensors, load
from fedmpi.errors import UserError
from fedmpi.seeds import raw_bits

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

VERSION = 1  # part of the prepared file's name: raise it with any change to the bytes
SIDE = 28
BATCH = 128  # buffers of 400 kB fit the second-level cache; it determines the order of the noise: see VERSION
SPANS = 3  # segments between two control points of a curve
MEAN, STD = (0.1435,), (0.2691,)  # measured on the default data set


# Three forms of each digit, 0 to 9: control points "x,y" in hundredths, with " / " between strokes
PATTERNS = """\
50,2 78,17 86,50 78,83 50,98 22,83 14,50 22,17 50,2
62,4 30,12 14,48 24,86 52,98 80,80 86,45 70,10 44,3
50,2 76,17 82,50 76,83 50,98 24,83 18,50 24,17 50,2 / 78,12 50,50 22,88
50,2 50,50 50,98
28,26 54,3 / 54,3 53,50 52,98
30,24 52,3 / 52,3 52,50 52,97 / 28,97 52,97 76,97
18,26 36,5 64,4 80,27 60,58 16,96 / 16,96 50,95 86,96
20,24 44,3 76,18 68,52 36,88 16,88 28,74 54,86 88,94
18,20 48,3 78,22 62,54 16,94 / 16,94 36,86 60,95 86,88
20,14 50,2 78,20 66,42 40,48 / 40,48 72,53 84,74 60,97 18,88
20,5 50,5 80,5 / 80,5 45,42 / 45,42 80,54 82,82 48,98 16,86
22,10 56,3 76,22 56,44 44,48 66,50 86,72 62,96 16,92
66,2 40,34 12,66 / 12,66 50,66 92,66 / 66,2 66,50 66,98
24,4 22,30 18,54 / 18,54 50,56 84,52 / 76,4 73,50 70,98
30,3 16,40 30,58 60,54 78,44 / 80,6 76,50 74,98
80,4 54,4 28,5 / 28,5 24,44 / 24,44 56,37 84,62 68,92 40,98 16,88
82,6 48,6 28,22 36,44 66,54 80,76 56,97 18,90
26,6 24,42 / 24,42 58,38 82,66 60,96 16,90 / 26,6 54,8 84,3
70,4 36,25 17,60 28,90 55,98 80,78 68,56 42,54 19,70
46,2 26,36 18,72 38,97 72,92 78,68 54,56 26,68
74,10 48,4 20,36 18,74 46,98 78,82 74,60 46,54 20,72
14,6 50,5 84,6 / 84,6 60,48 40,98
14,6 50,5 84,6 / 84,6 58,48 42,98 / 30,52 52,51 76,48
14,22 15,7 / 15,7 50,9 86,5 / 86,5 56,40 46,70 44,98
50,47 24,30 26,10 50,2 74,10 76,30 50,47 / 50,47 80,64 80,88 50,98 20,88 20,64 50,47
78,16 50,2 22,18 36,40 66,56 80,78 50,98 20,80 36,56 66,38 78,16
72,8 38,4 24,24 50,46 80,70 62,96 30,92 22,70 54,46 84,10
80,26 56,3 24,18 25,44 54,52 80,26 / 80,26 78,62 66,98
78,22 52,2 22,22 34,48 62,46 78,22 / 78,22 82,66 58,97 22,90
80,8 44,4 20,28 42,50 70,36 80,8 / 80,8 74,52 72,98
"""


def read_form(pattern: str) -> tuple[Floats, list[list[int]]]:
    """Return a form: control points in the unit square (y down), [point, xy], and strokes as paths over their numbers.
    Equal points are one point, so strokes stay joined."""
    number: dict[str, int] = {}
    strokes = [[number.setdefault(p, len(number)) for p in stroke.split()] for stroke in pattern.split(" / ")]
    return np.array([[int(v) / 100 for v in p.split(",")] for p in number], np.float32), strokes


FORMS = [read_form(pattern) for pattern in PATTERNS.splitlines()]


class Habit(NamedTuple):
    """The distribution of a property: mean, standard deviations between writers and within one, and bounds."""

    centre: float
    writers: float
    samples: float
    low: float = -np.inf
    high: float = np.inf


HABITS = {
    "slant": Habit(0.10, 0.24, 0.08),  # x moves by this share of the height above the middle
    "tilt": Habit(0.00, 0.10, 0.05),  # y moves by this share of the distance from the middle
    "width": Habit(14.5, 1.80, 0.80),  # pixels
    "height": Habit(19.0, 1.50, 0.70),
    "left": Habit(0.00, 0.95, 0.85),  # pixels off the centre
    "top": Habit(0.00, 0.85, 0.75),
    "radius": Habit(1.25, 0.32, 0.12, 0.6, 2.4),  # half the thickness of a stroke, pixels
    "soft": Habit(1.30, 0.25, 0.10, 0.7, 2.2),  # width of a stroke's edge, pixels
    "ink": Habit(0.90, 0.08, 0.05, 0.45, 1.0),
    "noise": Habit(0.07, 0.025, 0.01, 0.0, 0.15),  # standard deviation of the grain
    "wobble": Habit(0.048, 0.013, 0.00, 0.0, 0.1),  # how far a sample's points stray, share of the unit square
}
HAND = 0.038  # how far a writer's own points lie from the pattern's, share of the unit square


class Bits:
    """Random numbers from the raw stream of PCG64 for (seed, purpose): the same on every machine and numpy version."""

    def __init__(self, seed: int, purpose: int) -> None:
        self._pcg = raw_bits(seed, purpose)

    def raw(self, n: int) -> npt.NDArray[np.uint64]:
        """Return n numbers of 64 random bits."""
        return np.asarray(self._pcg.random_raw(n), dtype="<u8")

    def below(self, n: int, bound: int) -> Ints:
        """Return n integers below bound, from the top 32 bits (a bias of 2^-32 does not matter here)."""
        top: Ints = (self.raw(n) >> np.uint64(32)).astype(np.int64)
        return (top * bound) >> 32

    def shuffled(self, values: Ints) -> Ints:
        """Return the values in random order."""
        return values[np.argsort(self.raw(len(values)), kind="stable")]

    def bell(self, *shape: int) -> Floats:
        """Return numbers of mean 0 and deviation 1, bell-shaped within +-3.5: integer sums of four 16-bit uniforms."""
        n = int(np.prod(shape))
        parts = self.raw(n).view(np.uint16).reshape(n, 4).astype(np.int32)
        total = parts[:, 0] + parts[:, 1] + parts[:, 2] + parts[:, 3]
        return np.reshape((total - 131070).astype(np.float32) * np.float32(1.7320508 / 65536), shape)

    def grain(self, *shape: int) -> Floats:
        """Return numbers of mean 0 and deviation 1, a random byte minus another: cheap, for pixel noise."""
        n = int(np.prod(shape))
        byte = self.raw((n + 3) // 4).view(np.uint8).astype(np.int16)
        return np.reshape((byte[:n] - byte[n : 2 * n]).astype(np.float32) * np.float32(1 / 104.5), shape)


def glyphs(root: Path | None = None, **sizes: int) -> Arrays:
    """Load the generated digits, which are drawn once and stored like any prepared data set."""
    return load(source(root, **sizes), root).arrays("glyphs", 10, mean=MEAN, std=STD)


def source(
    root: Path | None = None, train: int = 60_000, test: int = 10_000, writers: int = 500, seed: int = 0
) -> Source:
    """Return the source of the digits, which draws them."""
    if min(train - writers, test - 1, writers - 1, seed) < 0:
        given = f"{train} train and {test} test samples, {writers} writers and seed {seed}"
        raise UserError(f"glyphs got {given}; it needs a sample per writer, one to test, and a seed >= 0")

    def read(files: list[Path]) -> Tensors:
        x, y, owner = draw(train, writers, Bits(seed, 1))
        test_x, test_y, _ = draw(test, min(test, max(1, writers // 5)), Bits(seed, 2))  # by other writers
        return as_tensors(x=x, y=y, test_x=test_x, test_y=test_y, owner=owner)

    return Source(f"glyphs-{train}-{test}-{writers}-{seed}", VERSION, read=read, generated=True)


def draw(n: int, writers: int, bits: Bits) -> tuple[npt.NDArray[np.uint8], Ints, Ints]:
    """Return n images [n, 1, 28, 28], their labels (equally many per digit) and their writers (each with a sample)."""
    y = bits.shuffled(np.arange(n) % 10)
    owner = _owners(n, writers, bits)
    favourite = bits.below(writers * 10, 3).reshape(writers, 10)[owner, y]
    stray = bits.below(n, 12)  # sometimes a writer uses another form
    form = np.where(stray < 3, stray, favourite)
    habit = _habits(owner, writers, bits)
    x = np.empty((n, SIDE, SIDE), dtype=np.uint8)
    for number, (points, strokes) in enumerate(FORMS):
        hand = points[:, :, None] + np.float32(HAND) * bits.bell(*points.shape, writers)
        chosen = np.flatnonzero(3 * y + form == number)
        for rows in (chosen[i : i + BATCH] for i in range(0, len(chosen), BATCH)):
            own = {name: values[rows] for name, values in habit.items()}
            p = hand[:, :, owner[rows]] + own["wobble"] * bits.bell(*points.shape, len(rows))
            x[rows] = _ink(_segments(strokes, _place(p, own)), own, bits).transpose(2, 0, 1)
    return x[:, None], y, owner


def _owners(n: int, writers: int, bits: Bits) -> Ints:
    """Return the writer of each sample: one each, the rest at random, some writers three times as often as others."""
    busy = np.cumsum(1000 + bits.below(writers, 2001))
    more = np.searchsorted(busy, bits.below(n - writers, int(busy[-1])), side="right")
    return bits.shuffled(np.concatenate([np.arange(writers), more]))


def _habits(owner: Ints, writers: int, bits: Bits) -> dict[str, Floats]:
    """Return each habit's value per sample."""
    values = {}
    for name, habit in HABITS.items():
        centre, between, within, low, high = map(np.float32, habit)
        writer = centre + between * bits.bell(writers)
        values[name] = np.clip(writer[owner] + within * bits.bell(len(owner)), low, high)
    return values


def _place(p: Floats, own: dict[str, Floats]) -> Floats:
    """Map control points [point, xy, batch] from the unit square to pixels, by the habits."""
    half = np.float32(0.5)
    u, v = p[:, 0] - half, p[:, 1] - half
    x = (u - own["slant"] * v) * own["width"]
    y = (v + own["tilt"] * u) * own["height"]
    middle = np.float32((SIDE - 1) / 2)
    return np.stack([x + (middle + own["left"]), y + (middle + own["top"])], axis=1)


def _segments(strokes: list[list[int]], p: Floats) -> list[tuple[Floats, Floats]]:
    """Return the ends of all segments, each [xy, batch]; strokes of more than two points are smooth curves."""
    pairs = []
    for stroke in strokes:
        k = len(stroke)
        closed = stroke[0] == stroke[-1]
        line = [p[stroke[0]]]
        for i in range(k - 1):
            before = stroke[i - 1] if i else stroke[-2 if closed else 0]
            after = stroke[i + 2] if i + 2 < k else stroke[1 if closed else -1]
            steps = 1 if k == 2 else SPANS
            line += [_curve(p[before], p[stroke[i]], p[stroke[i + 1]], p[after], s / steps) for s in range(1, steps)]
            line.append(p[stroke[i + 1]])
        pairs += list(zip(line, line[1:], strict=False))
    return pairs


def _curve(a: Floats, b: Floats, c: Floats, d: Floats, t: float) -> Floats:
    """Return the point at t between b and c of the Catmull-Rom curve through a, b, c, d."""
    tt, ttt = t * t, t * t * t
    wa, wb = -0.5 * t + tt - 0.5 * ttt, 1 - 2.5 * tt + 1.5 * ttt
    wc, wd = 0.5 * t + 2 * tt - 1.5 * ttt, 0.5 * ttt - 0.5 * tt
    point: Floats = (np.float32(wa) * a + np.float32(wb) * b) + (np.float32(wc) * c + np.float32(wd) * d)
    return point


def _ink(segments: list[tuple[Floats, Floats]], own: dict[str, Floats], bits: Bits) -> npt.NDArray[np.uint8]:
    """Return the images [height, width, batch]: soft-edged strokes along the segments, the writer's ink, and grain."""
    batch = segments[0][0].shape[1]
    nearest = np.full((SIDE, SIDE, batch), 1e6, dtype=np.float32)  # squared distance
    along, across = np.empty_like(nearest), np.empty_like(nearest)
    grid = np.arange(SIDE, dtype=np.float32)[:, None]
    zero, half = np.float32(0), np.float32(0.5)
    for (ax, ay), (bx, by) in segments:
        dx, dy = bx - ax, by - ay
        length = np.sqrt(dx * dx + dy * dy) + np.float32(1e-3)
        dx, dy = dx / length, dy / length
        gx, gy = grid - half * (ax + bx), grid - half * (ay + by)  # pixels relative to the segment's middle
        np.add((gx * dx)[None], (gy * dy)[:, None], out=along)
        np.subtract((gx * dy)[None], (gy * dx)[:, None], out=across)
        np.abs(along, out=along)
        np.subtract(along, half * length, out=along)
        np.maximum(along, zero, out=along)
        np.multiply(along, along, out=along)
        np.multiply(across, across, out=across)
        np.add(along, across, out=along)
        np.minimum(nearest, along, out=nearest)
    cover = np.clip((own["radius"] - np.sqrt(nearest)) / own["soft"] + half, zero, np.float32(1))
    value = cover * own["ink"] + own["noise"] * bits.grain(SIDE, SIDE, batch)
    image: npt.NDArray[np.uint8] = (np.clip(value, zero, np.float32(1)) * np.float32(255) + half).astype(np.uint8)
    return image
