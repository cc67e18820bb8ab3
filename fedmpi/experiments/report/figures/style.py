"""What all pictures of a report share: their looks, the grid of their panels, and how they are written.

Nothing is told by colour alone: a line has a dash and a marker of its own, a bar a hatch. The colours are apart for any
colour vision, and each has another for a dark page, which takes its place there (page.py). Lengths are in inches.
"""

from __future__ import annotations

import io
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE, NARROW = 9.0, 4.1  # a page of a desk, and one of a phone
PANEL = 2.2  # the least width of a panel
LETTER, TITLE_LETTER = 0.072, 0.08  # widths of letters in a legend and in a title: most are less
FEWEST = 5  # letters of a name, however little room there is
DPI = 160
INK, FAINT, RULE, PAPER = "#222222", "#666666", "#dcdcdc", "#ffffff"
COLOURS = "#1f5fa8 #cf6a1f #1a7f5a #8c3f8f #8a6a00 #00818a #b0305c #555555".split()
DARK = {
    INK: "#e4e4e4",
    FAINT: "#a4a4a4",
    RULE: "#3c3f44",
    PAPER: "#17191c",
    **dict(zip(COLOURS, "#7db4f5 #f59a6b #5fcba3 #d795da #d8b443 #4fc6cf #f07fa6 #b5b5b5".split(), strict=True)),
}
"""what takes the place of a colour on a dark page"""
DASHES = ("solid", (0, (5, 2)), (0, (1, 1.4)), (0, (6, 1.5, 1, 1.5)))
MARKERS = "osD^vPX*"
MOST_LOOKS = 2 * len(MARKERS) * len(DASHES)  # filled or not
HATCHES = ("", "////", "....", "\\\\\\\\", "xxxx", "----", "++++", "oooo")
SHADES = "viridis_r"  # even steps of lightness, so that its order can be read in grey
SETTINGS: dict[Any, Any] = {
    "svg.hashsalt": "fedmpi",  # equal runs, equal bytes
    "svg.fonttype": "path",  # looks the same wherever it is opened
    "text.parse_math": False,  # names of runs may have a dollar in them
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.labelsize": 9,
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.linewidth": 0.8,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "text.color": INK,
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "hatch.linewidth": 0.6,
    "hatch.color": PAPER,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.handlelength": 2.8,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
}


@dataclass(frozen=True)
class Look:
    """How a series is drawn."""

    colour: str
    dash: Any
    marker: str
    filled: bool

    @property
    def face(self) -> str:
        """What a marker is filled with."""
        return self.colour if self.filled else PAPER


@dataclass(frozen=True)
class Picture:
    """A picture of a report: `draw(width)` makes it for a page of that width."""

    name: str
    alt: str
    """what it shows, for those who cannot see it"""
    caption: str
    draw: Callable[[float], Figure]
    adapts: bool = True
    """whether its colours may change with the scheme of the screen"""


@contextmanager
def settings() -> Iterator[None]:
    """Draw and write with these settings, whatever those of the user are."""
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(SETTINGS)
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # of a name; the page's text has it
        yield


def render(picture: Picture, kinds: Iterable[str], width: float = WIDE) -> dict[str, bytes]:
    """A picture as files: png, svg or pdf. The same content gives the same bytes."""
    undated: dict[str, dict[str, None]] = {
        "png": {"Software": None},
        "svg": {"Date": None, "Creator": None},
        "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    }
    found = {}
    with settings():
        figure = picture.draw(width)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # it is laid out: to do so again for every file would take half of the time
        for kind in kinds:
            out = io.BytesIO()
            figure.savefig(out, format=kind, dpi=DPI, metadata=undated[kind])
            found[kind] = out.getvalue()
    return found


def looks(series: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Look]:
    """A look for each series of (kind, mask), also without its colour another for each of the first `MOST_LOOKS`: the
    colour and the marker tell the kind, the dash and the filling the mask, as long as there are enough of them; where
    all have one mask or one kind, all four tell the other."""
    distinct = list(dict.fromkeys(series))
    told = telling_looks(distinct)
    return told if len(set(told.values())) == len(told) else dict(zip(distinct, every_look(), strict=False))


def telling_looks(series: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Look]:
    """Looks that tell the kind and the mask; with many of these, some are the same."""
    kinds, masks = (list(dict.fromkeys(one)) for one in zip(*series, strict=True)) if series else ([], [])
    made = {}
    for kind, mask in series:
        k, m = kinds.index(kind), masks.index(mask)
        colour = k if len(kinds) > 1 and len(masks) > 1 else k + m
        dash = colour if len(masks) == 1 else m
        made[kind, mask] = Look(
            COLOURS[colour % len(COLOURS)],
            DASHES[dash % len(DASHES)],
            MARKERS[colour % len(MARKERS)],
            filled=(m == 0) if len(masks) > 1 else colour < len(COLOURS),
        )
    return made


def every_look() -> Iterator[Look]:
    """All the looks there are, those beside each other as different as can be, and then again from the first."""
    for number in itertools.count():
        row = number // len(MARKERS)
        yield Look(
            COLOURS[number % len(COLOURS)],
            DASHES[(number + row) % len(DASHES)],
            MARKERS[number % len(MARKERS)],
            filled=row // len(DASHES) % 2 == 0,
        )


def panels(count: int, width: float, height: float, columns: int = 4, **how: Any) -> tuple[Figure, list[Axes]]:
    """A figure of that many panels, as many beside each other as there is room for, each `height` high."""
    from matplotlib.figure import Figure

    even = 2 if count <= 4 else 3 if count % 3 == 0 or count % 4 else 4  # fours, such as four algorithms, stay together
    across = max(1, min(count if count == 3 else even, count, columns, int(width / PANEL)))
    down = math.ceil(count / across)
    figure = Figure(figsize=(width, down * height), layout="constrained")
    every = list(figure.subplots(down, across, squeeze=False, **how).flat)
    for spare in every[count:]:
        spare.set_visible(False)
    return figure, every[:count]


def name_axes(axes: Sequence[Axes], across: str, down: str) -> None:
    """Name the axes of panels at the left and at the bottom of their figure."""
    shape = axes[0].get_gridspec().ncols  # type: ignore[union-attr]
    for number, one in enumerate(axes):
        if number % shape == 0:
            one.set_ylabel(down)
        if number + shape >= len(axes):  # nothing stands below it
            one.set_xlabel(across)
            one.tick_params(labelbottom=True)


def put_title(axes: Axes, text: str, width: float, beside: float = 0.3) -> None:
    """The title of a panel, as far as there is room for it in a figure of that width, what stands `beside` apart."""
    across = axes.get_gridspec().ncols  # type: ignore[union-attr]
    axes.set_title(short(text, int((width / across - beside) / TITLE_LETTER)))


def legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str], width: float) -> None:
    """One legend for all panels, above them, in as many columns as there is room for; the figure grows by it."""
    if not labels:
        return
    names = [short(label, int((width - 0.6) / LETTER)) for label in labels]
    columns = max(1, min(len(names), int((width - 0.1) / (0.6 + LETTER * max(map(len, names))))))
    rows = math.ceil(len(names) / columns)
    figure.set_figheight(figure.get_figheight() + 0.1 + 0.18 * rows)
    # A name that begins with a line below would be left out of it.
    shown = [f"\u200a{name}" if name.startswith("_") else name for name in names]
    figure.legend(handles, shown, loc="outside upper left", ncols=columns, borderaxespad=0.1, columnspacing=1.4)


def short(text: str, most: int) -> str:
    """A name cut in its middle where it is longer than there is room for."""
    most = max(most, FEWEST)
    return text if len(text) <= most else f"{text[: (most - 1) // 2]}…{text[-(most // 2) :]}"


def grid(axes: Axes, axis: Any = "y") -> None:
    """Faint lines behind the data."""
    axes.grid(axis=axis)
    axes.tick_params(length=0)
