"""The panel, label and style of each group in figures.

Up to six lines share a panel. More become small multiples: one panel per combination of the axes other than mask and
algorithm, and per algorithm if that is not enough. A line has the same style in all panels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..runs import Group, describe, speaks
from .figures.style import Style, assign_styles

MOST_LINES, MOST_PANELS = 6, 12  # per panel, per figure


@dataclass(frozen=True)
class Placed:
    """A group with its place in figures."""

    group: Group
    panel: str
    """title of its panel; '' if there is one for all"""
    label: str
    """its name within the panel"""
    style: Style


def place(groups: Sequence[Group]) -> list[Placed]:
    """Return the groups with their panels, labels and styles."""
    inside, masking = inner_axes(groups), axes_of(groups, "mask")
    kinds = [words(group, lambda axis: axis in inside and axis not in masking) for group in groups]
    # Labels instead of masks: several may have one mask, with other thresholds or rates.
    masks = [words(group, lambda axis: axis in masking) if masking else group.first.mask for group in groups]
    styles = assign_styles(list(zip(kinds, masks, strict=True)))
    # Only then may a line's label, which is the same in all panels, name them.
    lines = [(group.first.mask, *map(group.key.get, inside)) for group in groups]
    algorithm, taus = (determine(lines, [group.config[knob] for group in groups]) for knob in ("algorithm", "tau"))
    return [
        Placed(
            group,
            words(group, lambda axis: axis not in inside),
            describe(some(group, lambda axis: axis in inside), group.config, group.taus and taus, algorithm),
            styles[kind, mask],
        )
        for group, kind, mask in zip(groups, kinds, masks, strict=True)
    ]


def determine(labels: Iterable[object], values: Sequence[object]) -> bool:
    """Return whether labels determine the values next to them."""
    pairs = set(zip(labels, values, strict=True))
    return len({label for label, _ in pairs}) == len(pairs)


def inner_axes(groups: Sequence[Group]) -> list[str]:
    """Return the axes that separate the lines of a panel; the others separate panels."""
    axes = list(dict.fromkeys(axis for group in groups for axis in group.key))
    masking = axes_of(groups, "mask")
    choices = (axes, [*masking, *axes_of(groups, "algorithm")], masking)
    return next((inner for inner in choices if most_lines(groups, inner) <= MOST_LINES), masking)


def axes_of(groups: Sequence[Group], knob: str) -> list[str]:
    """Return the axes whose labels determine a knob, whatever the sweep calls them."""
    axes = dict.fromkeys(axis for group in groups for axis in group.key)
    values = [group.config[knob] for group in groups]
    differ = len(set(values)) > 1
    return [axis for axis in axes if differ and determine([group.key.get(axis) for group in groups], values)]


def most_lines(groups: Sequence[Group], inner: Iterable[str]) -> int:
    """Return the most lines of a panel if these axes separate its lines."""
    panels = [tuple((axis, label) for axis, label in group.key.items() if axis not in inner) for group in groups]
    return max(map(panels.count, panels), default=0)


def words(group: Group, wanted: Callable[[str], bool]) -> str:
    """Return the labels of the wanted axes in a few words."""
    return ", ".join(label if speaks(axis, label) else f"{axis} {label}" for axis, label in some(group, wanted).items())


def some(group: Group, wanted: Callable[[str], bool]) -> dict[str, str]:
    return {axis: label for axis, label in group.key.items() if wanted(axis)}
