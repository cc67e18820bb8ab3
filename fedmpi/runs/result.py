"""The result of `fedmpi.train`, and its HTML for notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from .config import Config, flat

if TYPE_CHECKING:
    import pandas

WIDE, HIGH, LEFT, BELOW = 460, 190, 58, 26  # size of the plot, and the margins for its labels


class History(list[dict[str, Any]]):
    """The history without pandas: a list of rounds; indexed by a column's name, the list of its values."""

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return super().__getitem__(key)
        if not any(key in row for row in self):
            raise KeyError(key)
        return [row.get(key) for row in self]


@dataclass(frozen=True, repr=False)
class Result:
    """The result of a training, the same on every rank."""

    model: nn.Module
    """the trained model, on the CPU; the one passed to `train` is unchanged"""
    reports: list[dict[str, Any]]
    """one dict per round, like the lines of metrics.jsonl"""
    config: Config
    """every knob as it was used"""
    out: Path | None
    """the run folder, if one was given"""
    rank: int
    """rank of this process, to print or save on rank 0 only"""
    rises: bool = True
    """whether a higher test metric is better"""

    @cached_property
    def history(self) -> pandas.DataFrame | History:
        """Return `reports` as a table, one row per round, with a column per nested number ("seconds/local").

        It is a DataFrame if pandas is installed, else a `History`, which has columns by name, too."""
        rows = [flat(report, "/") for report in self.reports]
        try:
            import pandas
        except ImportError:
            return History(rows)
        return pandas.DataFrame(rows)

    @property
    def metric(self) -> str:
        """Return the key of the test metric in a report."""
        return next(name for name in self.reports[-1] if name.startswith("test_") and name != "test_loss")

    @property
    def scores(self) -> dict[int, float]:
        """Return round -> test metric, for rounds with a finite one."""
        return {report["round"]: report[self.metric] for report in self.reports if report[self.metric] is not None}

    @property
    def best(self) -> float | None:
        """Return the best test metric of all rounds."""
        values = self.scores.values()
        return (max if self.rises else min)(values) if values else None

    def __repr__(self) -> str:
        name, scores = self.metric.removeprefix("test_"), self.scores
        last = f"{name} {list(scores.values())[-1]:.4f}, best {self.best:.4f}" if scores else f"no {name}"
        out = f", out={str(self.out)!r}" if self.out else ""
        return f"<fedmpi.Result {self.title}: {len(self.reports)} rounds, {last}{out}>"

    @property
    def title(self) -> str:
        """Return algorithm, mask, model and data as text."""
        return f"{self.config.algorithm}, mask {self.config.mask}, {self.config.model} on {self.config.data}"

    def _repr_html_(self) -> str:
        """Return a title, the last round's numbers and the curve of the test metric, for notebooks."""
        shown = [(key, value) for key, value in self.reports[-1].items() if isinstance(value, int | float)]
        cells = "".join(f"<tr><td>{escape(key)}</td><td>{value:.6g}</td></tr>" for key, value in shown)
        out = f"<div>run folder: <code>{escape(str(self.out))}</code></div>" if self.out else ""
        return (
            f"<div><b>{escape(self.title)}</b>, {len(self.reports)} of {self.config.rounds} rounds</div>"
            f'<div style="display:flex;gap:2em;align-items:flex-start">{curve(self.scores, self.metric)}'
            '<table style="color:inherit"><thead><tr><th colspan="2">last round</th></tr></thead>'
            f"<tbody>{cells}</tbody></table></div>{out}"
        )


def curve(scores: Mapping[int, float], name: str) -> str:
    """Return a line plot over the rounds as SVG, in the colours of the page; '' if there is nothing to draw."""
    if not scores:
        return ""
    first, last, low, high = min(scores), max(scores), min(scores.values()), max(scores.values())

    def x(round: int) -> float:
        return LEFT + (WIDE - LEFT - 12) * (round - first) / ((last - first) or 1)

    def y(value: float) -> float:
        return 12 + (HIGH - 12 - BELOW) * (1 - (value - low) / ((high - low) or 1))

    points = [(x(round), y(value)) for round, value in scores.items()]
    line = " ".join(f"{across:.1f},{down:.1f}" for across, down in points)
    ticks = "".join(
        f'<text x="{LEFT - 6}" y="{y(value) + 4:.0f}" text-anchor="end">{value:.4g}</text>'
        f'<line x1="{LEFT}" x2="{WIDE - 12}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="currentColor" '
        'stroke-opacity="0.2"/>'
        for value in sorted({low, high})
    )
    ends = "".join(
        f'<text x="{x(end):.0f}" y="{HIGH - 8}" text-anchor="middle">{end}</text>' for end in sorted({first, last})
    )
    middle = (LEFT + WIDE - 12) / 2
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDE}" height="{HIGH}" viewBox="0 0 {WIDE} {HIGH}" '
        f'font-family="sans-serif" font-size="12" fill="currentColor" role="img" aria-label="{escape(name)} by round">'
        f'{ticks}{ends}<text x="{middle:.0f}" y="{HIGH - 8}" text-anchor="middle">{escape(name)} by round</text>'
        f'<polyline points="{line}" fill="none" stroke="#1f77b4" stroke-width="2"/>'
        f'<circle cx="{points[-1][0]:.1f}" cy="{points[-1][1]:.1f}" r="3" fill="#1f77b4"/></svg>'
    )
