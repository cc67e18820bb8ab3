"""The panel, label and style of each group in figures.

Up to six lines share a panel. More become small multiples: one panel per combination of the axes other than mask and
algorithm, and per algorithm if that is not enough. A line has the same style in all panels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

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
    algorithm, taus = determine(groups, inside, "algorithm"), determine(groups, inside, "tau")
    return [
        Placed(
            group,
            words(group, lambda axis: axis not in inside),
            describe(some(group, lambda axis: axis in inside), group.config, group.taus and taus, algorithm),
            styles[kind, mask],
        )
        for group, kind, mask in zip(groups, kinds, masks, strict=True)
    ]


def determine(groups: Sequence[Group], axes: Sequence[str], knob: str) -> bool:
    """Return whether the labels of these axes and the mask determine a knob: only then may a line's label, which is the
    same in all panels, contain it."""
    found: dict[tuple[str | None, ...], set[Any]] = {}
    for group in groups:
        found.setdefault((group.first.mask, *map(group.key.get, axes)), set()).add(group.config[knob])
    return all(len(values) == 1 for values in found.values())


def inner_axes(groups: Sequence[Group]) -> list[str]:
    """Return the axes that separate the lines of a panel; the others separate panels."""
    axes = list(dict.fromkeys(axis for group in groups for axis in group.key))
    masking = axes_of(groups, "mask")
    choices = (axes, [*masking, *axes_of(groups, "algorithm")], masking)
    return next((inner for inner in choices if most_lines(groups, inner) <= MOST_LINES), masking)


def axes_of(groups: Sequence[Group], knob: str) -> list[str]:
    """Return the axes whose labels determine a knob, whatever the sweep calls them."""
    found = []
    for axis in dict.fromkeys(axis for group in groups for axis in group.key):
        pairs = {(group.key.get(axis), str(group.config[knob])) for group in groups}
        if len({label for label, _ in pairs}) == len(pairs) > 1 and len({value for _, value in pairs}) > 1:
            found.append(axis)
    return found


def most_lines(groups: Sequence[Group], inner: Iterable[str]) -> int:
    """Return the most lines of a panel if these axes separate its lines."""
    panels = [tuple((axis, label) for axis, label in group.key.items() if axis not in inner) for group in groups]
    return max(map(panels.count, panels), default=0)


def words(group: Group, wanted: Callable[[str], bool]) -> str:
    """Return the labels of the wanted axes in a few words."""
    return ", ".join(label if speaks(axis, label) else f"{axis} {label}" for axis, label in some(group, wanted).items())


def some(group: Group, wanted: Callable[[str], bool]) -> dict[str, str]:
    return {axis: label for axis, label in group.key.items() if wanted(axis)}


def sort_by(placed: Sequence[Placed], key: Callable[[Placed], str]) -> dict[str, list[Placed]]:
    """Return the groups by a key, in the order in which the keys first occur."""
    found: dict[str, list[Placed]] = {}
    for one in placed:
        found.setdefault(key(one), []).append(one)
    return found


def by_panel(placed: Sequence[Placed]) -> dict[str, list[Placed]]:
    return sort_by(placed, lambda one: one.panel)
