"""What all figures of a report share: line styles, the panel grid, the legend, and how files are written.

Colour never carries information alone: lines also differ in dash and marker, bars in hatching. Lengths are in inches.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 9.0
LETTER, TITLE_LETTER = 0.072, 0.08  # widths of letters in a legend and in a title; most are narrower
SHORTEST = 5  # letters to which a name may be cut
DPI = 160
INK, FAINT, RULE, PAPER = "#222222", "#666666", "#dcdcdc", "#ffffff"
COLOURS = "#1f5fa8 #cf6a1f #1a7f5a #8c3f8f #8a6a00 #00818a #b0305c #555555".split()  # for any colour vision
DASHES = ("solid", (0, (5, 2)), (0, (1, 1.4)), (0, (6, 1.5, 1, 1.5)))
MARKERS = "osD^vPX*"
MOST_STYLES = 2 * len(MARKERS) * len(DASHES)  # filled or not
HATCHES = ("", "////", "....", "\\\\\\\\", "xxxx", "----", "++++", "oooo")
SETTINGS: dict[Any, Any] = {
    "svg.hashsalt": "fedmpi",  # equal runs, equal bytes
    "svg.fonttype": "path",  # the same on every machine
    "text.parse_math": False,  # names of runs may contain a dollar
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.edgecolor": FAINT,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "hatch.linewidth": 0.6,
    "hatch.color": PAPER,
    "legend.frameon": False,
    "legend.handlelength": 2.8,
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 8.5),
    **dict.fromkeys(("xtick.color", "ytick.color"), FAINT),
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), INK),
}


@dataclass(frozen=True)
class Style:
    """How a series is drawn."""

    colour: str
    dash: Any = "solid"
    marker: str = "o"
    filled: bool = True

    @property
    def face(self) -> str:
        """Return the fill colour of the marker."""
        return self.colour if self.filled else PAPER


@dataclass(frozen=True)
class Picture:
    """A figure of the report with its file name, alternative text and caption."""

    name: str
    alt: str
    caption: str
    draw: Callable[[], Figure]


@contextmanager
def settings() -> Iterator[None]:
    """Draw with the settings of the report, whatever the user's are."""
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(SETTINGS)
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # the page shows the name as text
        yield


def render(picture: Picture, kinds: Iterable[str]) -> dict[str, bytes]:
    """Return a picture as files by kind: png, svg or pdf. The same content gives the same bytes."""
    undated: dict[str, dict[str, None]] = {
        "png": {"Software": None},
        "svg": {"Date": None, "Creator": None},
        "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    }
    found = {}
    with settings():
        figure = picture.draw()
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # laid out once: repeating it for every file would take half of the time
        for kind in kinds:
            out = io.BytesIO()
            figure.savefig(out, format=kind, dpi=DPI, metadata=undated[kind])
            found[kind] = out.getvalue()
    return found


def assign_styles(series: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Style]:
    """Return a style for each series of (kind, mask), distinct in black and white for the first `MOST_STYLES`.

    Colour and marker show the kind, dash and fill the mask, while that keeps them distinct; else styles are counted
    through.
    """
    distinct = list(dict.fromkeys(series))
    kinds, masks = (list(dict.fromkeys(one)) for one in zip(*distinct, strict=True)) if distinct else ([], [])
    found = {}
    for kind, mask in distinct:
        k, m = kinds.index(kind), masks.index(mask)
        colour = k if len(kinds) > 1 and len(masks) > 1 else k + m
        filled = m == 0 if len(masks) > 1 else colour < len(COLOURS)
        found[kind, mask] = numbered_style(colour, colour if len(masks) == 1 else m, filled)
    if len(set(found.values())) == len(found):
        return found
    rows = [(number, number // len(MARKERS)) for number in range(len(distinct))]
    styles = [numbered_style(number, number + row, row // len(DASHES) % 2 == 0) for number, row in rows]
    return dict(zip(distinct, styles, strict=True))


def numbered_style(colour: int, dash: int = 0, filled: bool = True) -> Style:
    """Return the style with these numbers, counted modulo what there is."""
    marker = MARKERS[colour % len(MARKERS)]
    return Style(COLOURS[colour % len(COLOURS)], DASHES[dash % len(DASHES)], marker, filled)


def panels(count: int, height: float, columns: int = 4, **how: Any) -> tuple[Figure, list[Axes]]:
    """Return a figure of `count` panels in up to `columns` columns, each `height` high."""
    from matplotlib.figure import Figure

    even = 2 if count <= 4 else 3 if count % 3 == 0 or count % 4 else 4  # fours, such as four algorithms, stay together
    across = min(count if count == 3 else even, count, columns)
    down = math.ceil(count / across)
    figure = Figure(figsize=(WIDTH, down * height), layout="constrained")
    every = list(figure.subplots(down, across, squeeze=False, **how).flat)
    for spare in every[count:]:
        spare.set_visible(False)
    return figure, every[:count]


def name_axes(axes: Sequence[Axes], across: str, down: str) -> None:
    """Label the outer axes of panels."""
    columns = axes[0].get_gridspec().ncols  # type: ignore[union-attr]
    for number, one in enumerate(axes):
        if number % columns == 0:
            one.set_ylabel(down)
        if number + columns >= len(axes):  # nothing below it
            one.set_xlabel(across)
            one.tick_params(labelbottom=True)


def set_title(axes: Axes, text: str, margin: float = 0.3) -> None:
    """Set the title of a panel, shortened to its width less `margin`."""
    columns = axes.get_gridspec().ncols  # type: ignore[union-attr]
    axes.set_title(shortened(text, int((WIDTH / columns - margin) / TITLE_LETTER)))


def legend(figure: Figure, handles: dict[str, Any]) -> None:
    """Add one legend (label -> handle) above all panels; the figure grows by its height."""
    if not handles:
        return
    names = [shortened(label, int((WIDTH - 0.6) / LETTER)) for label in handles]
    columns = max(1, min(len(names), int((WIDTH - 0.1) / (0.6 + LETTER * max(map(len, names))))))
    figure.set_figheight(figure.get_figheight() + 0.1 + 0.18 * math.ceil(len(names) / columns))
    # matplotlib leaves out names that begin with an underscore
    shown = [f"\u200a{name}" if name.startswith("_") else name for name in names]
    tight = {"borderaxespad": 0.1, "columnspacing": 1.4}
    figure.legend(list(handles.values()), shown, loc="outside upper left", ncols=columns, **tight)


def shortened(text: str, most: int) -> str:
    """Return a name, cut in its middle if it is longer than `most` letters."""
    most = max(most, SHORTEST)
    return text if len(text) <= most else f"{text[: (most - 1) // 2]}…{text[-(most // 2) :]}"


def grid(axes: Axes, axis: Any = "y") -> None:
    """Draw faint grid lines and no ticks."""
    axes.grid(axis=axis)
    axes.tick_params(length=0)
