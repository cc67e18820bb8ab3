"""How measured runs differ from the recipe whose published numbers they are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..runs import Group, counted, word
from ..sweep.reference import Reference, bundled_reference, read_reference
from ..tables import Mark

SIGNS = "†‡§¶"
UNKNOWN = (
    "Whether the runs differ from the sweep's file is not known: sweep.json was written by an older version. Run the "
    "same 'fedmpi sweep' again to record it."
)


@dataclass
class Departures:
    """The differences between runs and the recipe of their sweep, one mark per kind."""

    sweep: Mapping[str, Any]
    """sweep.json"""
    reference: Reference | None
    marks: dict[str, Mark] = field(default_factory=dict)
    """by meaning, in the order of first use"""

    def mark(self, group: Group, wanted: Mapping[str, str]) -> Mark | None:
        """Return the mark of the group that represents the runs with the `wanted` labels; None if it follows the
        recipe."""
        found = [*self.knobs(group), *self.axes(group, wanted), *self.seeds(group), *unfinished(group)]
        if not found:
            return None
        meaning = f"differs from the recipe: {'; '.join(found)}"
        sign = SIGNS[len(self.marks) % len(SIGNS)] * (1 + len(self.marks) // len(SIGNS))
        return self.marks.setdefault(meaning, Mark(sign, meaning))

    @property
    def notes(self) -> list[str]:
        known = [] if self.reference is not None else [UNKNOWN]
        return known + [f"{mark.sign} {mark.meaning}." for mark in self.marks.values()]

    def knobs(self, group: Group) -> list[str]:
        """Return the knobs that differ in any run that counts."""
        planned = self.reference.of(group.first.labels) if self.reference is not None else None
        found: dict[str, None] = {}
        for run in counted(group):
            for name, value in (planned or {}).items():
                if run.config.get(name) != value:
                    found[f"{name} {word(run.config.get(name))} instead of {word(value)}"] = None
        return list(found)

    def axes(self, group: Group, wanted: Mapping[str, str]) -> list[str]:
        """Return the axes that the published number does not name and that were run in part."""
        home = group.first.sweep or Path()
        found = []
        for axis, labels in self.sweep["axes"].items():
            runs = [name for name, one in self.sweep["runs"].items() if wanted.items() <= one.items()]
            begun = {self.sweep["runs"][name].get(axis) for name in runs if (home / name).is_dir()}
            if axis not in wanted and begun < set(labels):
                some = ", ".join(label for label in labels if label in begun)
                found.append(f"{axis} {some} instead of {', '.join(labels)}")
        return found

    def seeds(self, group: Group) -> list[str]:
        """Return a text if there are fewer seeds than in the recipe."""
        used, planned = len(counted(group)), 0 if self.reference is None else len(self.reference.seeds)
        return [f"{used} {'seed' if used == 1 else 'seeds'} instead of {planned}"] if used < planned else []


def unfinished(group: Group) -> list[str]:
    """Return a text if no run of a group is done."""
    rounds = [len(run.records) for run in counted(group) if not run.done]
    return [f"not done: {min(rounds)} of {group.config['rounds']} rounds"] if rounds else []


def departures_of(sweep: Mapping[str, Any]) -> Departures:
    """Return the differences of the runs of a sweep, by its sweep.json."""
    recorded = read_reference(sweep.get("recipe"))
    return Departures(sweep, recorded if recorded is not None else bundled_reference(sweep))
