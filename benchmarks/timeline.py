"""Record and draw one round's collective over emulated links; used by `benchmarks/link.py --timeline FILE.png`.

A sampler next to the bridge reads the counters of all ports every few milliseconds; the ranks record when they leave
the barrier and when they have the new model, and rank 0 the phases of its clock. All clocks are CLOCK_MONOTONIC of one
machine. Of several rounds the one with the median duration is kept.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedmpi.comm import Comm

BUSY = 0.8  # of the rate
MARGIN = 0.01  # seconds drawn before and after the round: at least two samples
PHASES = {  # of rank 0's clock, and their colours
    "local": ("check of the last update", "#d9d9d9"),
    "reduce": ("reduce", "#dbe9f6"),
    "server": ("mask and server step", "#fbe3c8"),
    "gather": ("gather", "#dcefdc"),
}
NODES = ("#1f5fa8", "#c0392b", "#2a8c4a", "#7d4fa0")

# --------------------------------------------------------------------------------------------------------- the sampler


@contextmanager
def sampled(hub: str, nodes: int, mbit: int) -> Iterator[list[list[float]]]:
    """Sample the ports of the bridge in a namespace during a block; the list is filled when the block ends. A sample is
    a time, then for each node the bytes that left it and those that entered it."""
    samples: list[list[float]] = []
    every = "0.005" if mbit <= 2000 else "0.002"
    command = ["ip", "netns", "exec", hub, sys.executable, __file__, every, str(nodes)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()  # it is ready
        yield samples
        process.terminate()
        out, _ = process.communicate(timeout=60)
        samples.extend(json.loads(out))
    finally:
        process.kill()
        process.wait(timeout=20)


def sample(every: float, nodes: int) -> None:
    """Read the counters until SIGTERM or the end of the parent, then print the samples."""
    parent, ended = os.getppid(), False

    def stop(*_: object) -> None:
        nonlocal ended
        ended = True

    signal.signal(signal.SIGTERM, stop)
    with suppress(PermissionError):  # a sample takes 0.1 ms, and should not wait for a core
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    ports = Path("/sys/class/net")
    paths = [ports / f"port{n}" / "statistics" / f"{way}_bytes" for n in range(nodes) for way in ("rx", "tx")]
    counters = [os.open(path, os.O_RDONLY) for path in paths]
    print("ready", flush=True)
    samples: list[list[float]] = []
    at = time.monotonic()
    while not ended and os.getppid() == parent:
        samples.append([time.monotonic(), *(int(os.pread(counter, 32, 0)) for counter in counters)])
        at = max(at + every, time.monotonic() + every / 2)  # a late sample is not followed by a short interval
        time.sleep(max(0.0, at - time.monotonic()))
    print(json.dumps(samples))


# ----------------------------------------------------------------------------------------------- what each rank does


def trace(comm: Comm, step: Any, turns: int) -> Iterator[dict[str, Any]]:
    """Yield when the first rank began a round and the last one ended it, and the changes of phase of this rank."""
    import torch

    from fedmpi.aggregate.sums import Clock  # where other versions have it, too

    changes: list[tuple[float, str | None]] = []
    plain = Clock.switch

    def switch(clock: Clock, phase: str | None) -> None:
        plain(clock, phase)
        if phase != (changes[-1][1] if changes else "local"):
            changes.append((time.monotonic(), phase))

    Clock.switch = switch  # type: ignore[method-assign, assignment]
    for turn in range(turns + 1):
        step.prepare()
        comm.barrier()
        changes.clear()
        began = time.monotonic()
        step.work()
        times = torch.zeros(comm.size, 2, dtype=torch.float64)
        times[comm.rank] = torch.tensor([began, time.monotonic()], dtype=torch.float64)
        comm.sum(times)
        if turn:  # the first one warms up
            yield {"began": float(times[:, 0].min()), "ended": float(times[:, 1].max()), "changes": list(changes)}


# --------------------------------------------------------------------------------------------------------- the numbers


@dataclass(frozen=True)
class Panel:
    """One round: times in seconds since its begin, rates in Mbit/s of each node's port, out of it and into it."""

    mbit: int
    seconds: float
    phases: list[tuple[float, float, str]]
    edges: list[float]
    out: list[list[float]]
    into: list[list[float]]
    numbers: dict[str, Any]

    def describe(self, about: dict[str, Any]) -> str:
        """Return the numbers as text."""
        head = "{transport}, {topology} ({ranks} ranks on {nodes} nodes), {mbit} Mbit/s, {version}: ".format(**about)
        return head + (
            "{milliseconds:.0f} ms, ideal {ideal_ms:.0f} ms for {port_bytes:,} bytes at the busiest port; busier than "
            "80% of the rate for {busy:.0%} of the time (out of each node {busy_out}, into {busy_into})"
        ).format(**self.numbers)


def panel(rounds: Sequence[dict[str, Any]], samples: Sequence[Sequence[float]], mbit: int) -> Panel:
    """Return the round of median duration, with the traffic during it."""
    one = sorted(rounds, key=lambda r: r["ended"] - r["began"])[len(rounds) // 2]
    began, ended = one["began"], one["ended"]
    seconds = ended - began
    low, high = began - MARGIN, ended + MARGIN
    kept = [s for s in samples if low < s[0] < high]
    if len(kept) < 2:
        raise SystemExit("the round is shorter than two samples of the ports: give more --parameters or fewer --mbit")
    edges = [s[0] - began for s in kept]
    columns = range(1, len(kept[0]))
    rates = [[8e-6 * (b[c] - a[c]) / (b[0] - a[0]) for a, b in pairwise(kept)] for c in columns]
    inside = [max(0.0, min(b, seconds) - max(a, 0.0)) for a, b in pairwise(edges)]
    busy = [sum(t for t, r in zip(inside, line, strict=True) if r > BUSY * mbit) / seconds for line in rates]
    port = max(kept[-1][c] - kept[0][c] for c in columns)
    numbers = {
        "milliseconds": round(1e3 * seconds, 1),
        "ideal_ms": round(8e-3 * port / mbit, 1),
        "port_bytes": int(port),
        "busy": round(statistics.mean(busy), 3),
        "busy_out": [round(share, 3) for share in busy[::2]],
        "busy_into": [round(share, 3) for share in busy[1::2]],
    }
    return Panel(mbit, seconds, phases(one, began, seconds), edges, rates[::2], rates[1::2], numbers)


def phases(one: dict[str, Any], began: float, seconds: float) -> list[tuple[float, float, str]]:
    """Return begin, end and name of each phase of rank 0."""
    changes = [(0.0, "local"), *((at - began, phase) for at, phase in one["changes"]), (seconds, None)]
    return [(start, stop, phase) for (start, phase), (stop, _) in pairwise(changes) if phase]


# --------------------------------------------------------------------------------------------------------- the picture


def draw(panels: Sequence[tuple[dict[str, Any], Panel]], path: Path) -> None:
    """Draw a row per rate and a column per version."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rates = list(dict.fromkeys(panel.mbit for _, panel in panels))
    versions = list(dict.fromkeys(about["version"] for about, _ in panels))
    style = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "font.family": "DejaVu Sans"}
    with pyplot.rc_context(style):  # type: ignore[arg-type]
        size = (11, 1.1 + 2.9 * len(rates))
        figure, axes = pyplot.subplots(
            len(rates), len(versions), figsize=size, squeeze=False, sharex="row", sharey="row", layout="constrained"
        )
        for about, panel in panels:
            axis = axes[rates.index(panel.mbit)][versions.index(about["version"])]
            draw_panel(axis, panel, about["version"] if len(versions) > 1 else "")
        for row, mbit in zip(axes, rates, strict=True):
            edges = [edge for _, panel in panels if panel.mbit == mbit for edge in panel.edges]
            row[0].set_xlim(1e3 * min(edges), 1e3 * max(edges))
        for axis in axes[-1]:
            axis.set_xlabel("ms since the last client is trained")
        named = [axis.get_legend_handles_labels() for axis in axes.flat]
        handles = {label: handle for pair in named for handle, label in zip(*pair, strict=True)}
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5, frameon=False)
        about = panels[0][0]
        title = "One round's collective: {transport}, {ranks} ranks on {nodes} nodes, {parameters:,} parameters"
        figure.suptitle(title.format(**about), fontsize=11)
        figure.savefig(path, dpi=100)
        pyplot.close(figure)


def draw_panel(axis: Any, panel: Panel, version: str) -> None:
    """Draw one round: traffic out of the ports above zero, into them below."""
    numbers, edges = panel.numbers, [1e3 * t for t in panel.edges]
    for start, stop, phase in panel.phases:
        label, colour = PHASES.get(phase, (phase, "#eeeeee"))
        axis.axvspan(1e3 * start, 1e3 * stop, color=colour, linewidth=0, label=f"rank 0: {label}")
    for node, (out, into) in enumerate(zip(panel.out, panel.into, strict=True)):
        line = {"baseline": None, "color": NODES[node % len(NODES)], "linewidth": 1.1}
        axis.stairs(out, edges, label=f"node {node}", **line)
        axis.stairs([-rate for rate in into], edges, **line)
    for y in (-panel.mbit, panel.mbit):
        axis.axhline(y, color="#999999", linewidth=0.7)
    axis.axhline(0, color="black", linewidth=0.7)
    axis.axvline(numbers["ideal_ms"], color="black", linestyle="--", linewidth=1.1, label="ideal: bytes / rate")
    axis.axvline(1e3 * panel.seconds, color="black", linewidth=1.1, label="new model on every rank")
    axis.set_ylim(-1.25 * panel.mbit, 1.25 * panel.mbit)
    axis.yaxis.set_major_formatter(lambda y, _: f"{abs(y):,.0f}")
    axis.set_ylabel("into  ←  Mbit/s  →  out of a port")
    text = f"{panel.mbit / 1000:g} Gbit/s: {numbers['milliseconds']:.0f} ms, ideal {numbers['ideal_ms']:.0f} ms, "
    text += f"above {BUSY:.0%} of the rate for {numbers['busy']:.0%} of the time"
    axis.set_title(f"{version}\n{text}" if version else text, fontsize=10, loc="left")


if __name__ == "__main__":
    sample(float(sys.argv[1]), int(sys.argv[2]))
