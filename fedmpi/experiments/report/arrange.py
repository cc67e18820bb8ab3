"""Which group is drawn how, and in which panel.

Up to six lines share a panel. More of them are small multiples: a panel for each combination of the axes other than
the mask and the algorithm, and for each algorithm too where that is not enough. A look is the same in all panels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..runs import Group, describe, speaks
from .figures.style import Look, looks

MOST_LINES, MOST_PANELS = 6, 12  # lines in a panel, panels in a picture
ARMS = ("mask", "algorithm")  # knobs that tell lines of a panel apart


@dataclass(frozen=True)
class Placed:
    """A group with its place in pictures."""

    group: Group
    panel: str
    """the title of its panel; empty where there is one for all"""
    label: str
    """what tells it from the others in its panel"""
    look: Look


def arrange(groups: Sequence[Group]) -> list[Placed]:
    """The groups with their panels, their labels in them and their looks."""
    inside, masking = inner_axes(groups), telling(groups, "mask")
    kinds = [words(group, lambda axis: axis in inside and axis not in masking) for group in groups]
    # Labels, as several may stand for one mask: with other thresholds, or with other rates.
    arms = [words(group, lambda axis: axis in masking) if masking else group.first.mask for group in groups]
    looking = looks(list(zip(kinds, arms, strict=True)))
    algorithm, taus = settles(groups, inside, "algorithm"), settles(groups, inside, "tau")
    return [
        Placed(
            group,
            words(group, lambda axis: axis not in inside),
            describe(some(group, lambda axis: axis in inside), group.config, group.taus and taus, algorithm),
            looking[kind, arm],
        )
        for group, kind, arm in zip(groups, kinds, arms, strict=True)
    ]


def settles(groups: Sequence[Group], axes: Sequence[str], knob: str) -> bool:
    """Whether groups with the same labels of these axes and the same mask have the same value of a knob: only then it
    may stand in the label of a line, which is the same in all panels."""
    found: dict[tuple[str | None, ...], set[Any]] = {}
    for group in groups:
        found.setdefault((group.first.mask, *map(group.key.get, axes)), set()).add(group.config[knob])
    return all(len(values) == 1 for values in found.values())


def inner_axes(groups: Sequence[Group]) -> list[str]:
    """The axes that tell lines of a panel apart; the others tell panels apart."""
    axes = list(dict.fromkeys(axis for group in groups for axis in group.key))
    masking = telling(groups, "mask")
    choices = (axes, [axis for knob in ARMS for axis in telling(groups, knob)], masking)
    return next((inner for inner in choices if crowd(groups, inner) <= MOST_LINES), masking)


def telling(groups: Sequence[Group], knob: str) -> list[str]:
    """The axes whose labels settle a knob, whatever the sweep calls them."""
    found = []
    for axis in dict.fromkeys(axis for group in groups for axis in group.key):
        pairs = {(group.key.get(axis), str(group.config[knob])) for group in groups}
        if len({label for label, _ in pairs}) == len(pairs) > 1 and len({value for _, value in pairs}) > 1:
            found.append(axis)
    return found


def crowd(groups: Sequence[Group], inner: Iterable[str]) -> int:
    """The most lines of a panel, if these axes tell lines apart."""
    panels = [tuple((axis, label) for axis, label in group.key.items() if axis not in inner) for group in groups]
    return max(map(panels.count, panels), default=0)


def words(group: Group, wanted: Callable[[str], bool]) -> str:
    """Some labels of a group in few words."""
    return ", ".join(label if speaks(axis, label) else f"{axis} {label}" for axis, label in some(group, wanted).items())


def some(group: Group, wanted: Callable[[str], bool]) -> dict[str, str]:
    return {axis: label for axis, label in group.key.items() if wanted(axis)}


def by_panel(placed: Sequence[Placed]) -> dict[str, list[Placed]]:
    """The panels by their titles, in the order in which they come."""
    found: dict[str, list[Placed]] = {}
    for one in placed:
        found.setdefault(one.panel, []).append(one)
    return found


def by_metric(placed: Sequence[Placed]) -> dict[str, list[Placed]]:
    """The groups by what they are judged by: what differs in that shares no scale."""
    found: dict[str, list[Placed]] = {}
    for one in placed:
        found.setdefault(one.group.metric, []).append(one)
    return found
