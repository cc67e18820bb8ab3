"""Where the time went and what was sent."""

from __future__ import annotations

from ...measures import total_seconds
from ...runs import Group, counted
from ..figures import rows
from ..figures.rows import Stack
from ..figures.style import Picture
from ..page import Absent, Named, Part, Section
from ..results import bytes_table, cost_table
from .material import Material

LEAST = 0.001  # of a round, below which a phase could not be seen


def section(material: Material) -> Section:
    """Seconds of a round by phase, and the table with the bytes."""
    groups = [group for group in material.groups if any(run.records for run in counted(group))]
    if not groups:
        return Section("costs", "Time and bytes", [Absent("No run has finished a round yet.")])
    each = [seconds(group) for group in groups]
    phases = [
        phase
        for phase in dict.fromkeys(phase for found in each for phase in found)
        if any(found.get(phase, 0.0) > LEAST * sum(found.values()) for found in each)
    ]
    parts: list[Part] = [Named("costs", cost_table(groups))]
    if phases:
        parts.append(picture(groups, each, phases))
    parts.append(Named("client-bytes", bytes_table(groups)))
    return Section("costs", "Time and bytes", parts)


def seconds(group: Group) -> dict[str, float]:
    """The mean seconds of a round in each phase, over the rounds of all seeds that count."""
    totals = [total_seconds(run) for run in counted(group)]
    rounds = sum(len(run.records) for run in counted(group))
    phases = dict.fromkeys(phase for found in totals for phase in found)
    return {phase: sum(found.get(phase, 0.0) for found in totals) / rounds for phase in phases}


def picture(groups: list[Group], each: list[dict[str, float]], phases: list[str]) -> Picture:
    """A bar for each group, of a piece for each phase."""
    stacks = [
        Stack(group.label, [found.get(phase, 0.0) for phase in phases])
        for group, found in zip(groups, each, strict=True)
    ]
    longest = "; ".join(f"{stack.label} {sum(stack.pieces):.3g} s" for stack in stacks[:12])
    return Picture(
        "time",
        f"Stacked bars of the seconds of a round by phase: {', '.join(phases)}. In all: {longest}.",
        "Seconds of a round by phase, mean over rounds and seeds: local training of the clients, waiting for the "
        "slowest rank, the exchange (reduce, gather), the server's step, the meta step and evaluation. Phases that "
        "nowhere take a thousandth of a round are left out.",
        lambda width: rows.draw_stacks(stacks, phases, "seconds a round", width),
    )
