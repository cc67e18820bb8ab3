"""Time and bytes."""

from __future__ import annotations

from ...measures import total_seconds
from ...runs import Group, counted
from ..figures import rows
from ..figures.style import Picture
from ..page import Absent, Named, Section
from ..results import bytes_table, cost_table
from .material import Material

LEAST = 0.001  # share of a round below which a phase is not drawn


def section(material: Material) -> Section:
    """Return seconds per round by phase, and the tables of time and bytes."""
    groups = [group for group in material.groups if any(run.records for run in counted(group))]
    if not groups:
        return Section("costs", "Time and bytes", [Absent("No run has finished a round yet.")])
    tables = Named("costs", cost_table(groups)), Named("client-bytes", bytes_table(groups))
    return Section("costs", "Time and bytes", [tables[0], *pictures(groups), tables[1]])


def seconds(group: Group) -> dict[str, float]:
    """Return the mean seconds per round and phase, over all seeds that count."""
    totals = [total_seconds(run) for run in counted(group)]
    rounds = sum(len(run.records) for run in counted(group))
    phases = dict.fromkeys(phase for found in totals for phase in found)
    return {phase: sum(found.get(phase, 0.0) for found in totals) / rounds for phase in phases}


def pictures(groups: list[Group]) -> list[Picture]:
    """Return one bar per group with one piece per phase; none if nothing was timed."""
    each = {group.label: seconds(group) for group in groups}
    phases = [
        phase
        for phase in dict.fromkeys(phase for found in each.values() for phase in found)
        if any(found.get(phase, 0.0) > LEAST * sum(found.values()) for found in each.values())
    ]
    stacks = [(label, [found.get(phase, 0.0) for phase in phases]) for label, found in each.items()]
    totals = "; ".join(f"{label} {sum(lengths):.3g} s" for label, lengths in stacks[:12])
    made = Picture(
        "time",
        f"Stacked bars of the seconds per round by phase: {', '.join(phases)}. Totals: {totals}.",
        "Seconds per round by phase, mean over rounds and seeds: local training, waiting for the slowest rank, "
        "exchange (reduce, gather), server step, meta step and evaluation. Phases below 0.1% of a round are left out.",
        lambda: rows.draw_stacks(stacks, phases, "seconds per round"),
    )
    return [made] if phases else []
