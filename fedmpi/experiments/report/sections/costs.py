"""Time and bytes."""

from __future__ import annotations

from collections.abc import Sequence

from ...measures import bytes_per_client, client_bytes, in_order, total_bytes, total_seconds
from ...runs import Group, Run, counted
from ...tables import Table
from ..figures import rows
from ..figures.style import Picture
from ..page import Named, Part
from .material import Material
from .results import means_table

LEAST = 0.001  # share of a round below which a phase is not drawn


def costs(material: Material) -> list[Part]:
    """Return seconds per round by phase, and the tables of time and bytes."""
    groups = [group for group in material.groups if any(run.records for run in counted(group))]
    if not groups:
        return []
    return [Named("costs", cost_table(groups)), *pictures(groups), Named("client-bytes", bytes_table(groups))]


def cost_table(groups: Sequence[Group]) -> Table:
    """Return seconds by phase and bytes sent per run."""
    phases = in_order(phase for group in groups for run in counted(group) for phase in total_seconds(run))

    def read(run: Run) -> list[float | None]:
        seconds, rounds = total_seconds(run), len(run.records)
        whole = sum(seconds.values())
        return [*map(seconds.get, phases), whole, whole / rounds if rounds else None, total_bytes(run) / 1e6]

    digits = {f"{name} s": 1 for name in [*phases, "all"]} | {"s per round": 3, "MB sent": 1}
    notes = ["Seconds of a whole run, mean over seeds; MB: sent by all ranks in all rounds."]
    return means_table("Time and bytes", groups, digits, read, notes)


def bytes_table(groups: Sequence[Group]) -> Table:
    """Return the bytes that clients upload and download, and those that the ranks sent to each other."""

    def read(run: Run) -> list[float | None]:
        found = [of(run, way) for of in (bytes_per_client, client_bytes) for way in ("up", "down")]
        return [None if value is None else value / 1e6 for value in [*found, total_bytes(run)]]

    digits = {"client up": 4, "client down": 4, "all up": 2, "all down": 2, "ranks sent": 2}
    notes = [
        "Client up and down: uploaded and downloaded per client and round; all: by all clients in all rounds.",
        "These do not depend on the number of ranks, unlike what the ranks sent to each other.",
        "A dash: the run's version did not count it.",
    ]
    return means_table("Bytes of the clients, in MB", groups, digits, read, notes)


def seconds(group: Group) -> dict[str, float]:
    """Return the mean seconds per round and phase, over all seeds that count."""
    totals = [total_seconds(run) for run in counted(group)]
    rounds = sum(len(run.records) for run in counted(group))
    phases = dict.fromkeys(phase for found in totals for phase in found)
    return {phase: sum(found.get(phase, 0.0) for found in totals) / rounds for phase in phases}


def pictures(groups: Sequence[Group]) -> list[Picture]:
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
