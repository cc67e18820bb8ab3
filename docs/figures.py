"""The curves of several runs in one picture: test accuracy over the rounds, and below it how far the clients agreed.

    python docs/figures.py runs/mean runs/gma --out docs/gma-vs-mean.png --title "FedYogi on glyphs"

A run is one line style, so the picture can be read in black and white. Accuracy is drawn thin as it was measured and
thick as its running mean, since it jumps from round to round when a client has two classes. The lower panel has the
share of elements with mask 1 (`kept`) thick, and the mean agreement thin.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib

from fedmpi.compare import read
from fedmpi.errors import UserError

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402 - after the backend is chosen
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

STYLES = (
    ("#555555", "--"),
    ("#0072b2", "-"),
    ("#d55e00", "-."),
    ("#009e73", ":"),
    ("#cc79a7", (0, (6, 1, 1, 1, 1, 1))),
)
WINDOW = 5  # evaluations in the running mean


@dataclass(frozen=True)
class Curves:
    """One run's lines."""

    label: str
    tested: list[int]
    accuracy: list[float]
    rounds: list[int]
    kept: list[float]
    agreement: list[float]


def curves(folder: Path) -> Curves:
    """The lines of a run folder; a run that was never scored is a `UserError`."""
    cfg, rounds = read(folder)
    try:
        tested = [r for r in rounds if r["test_accuracy"] is not None]
        run = Curves(
            label_of(cfg),
            [r["round"] for r in tested],
            [r["test_accuracy"] for r in tested],
            [r["round"] for r in rounds],
            [r["kept"] for r in rounds],
            [r["agreement"] for r in rounds],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"'{folder}' holds files that are no run of fedmpi ({error!r}); give another folder") from None
    if not run.tested:
        raise UserError(f"'{folder}' has no round with a test accuracy; wait for its first evaluation")
    return run


def label_of(cfg: dict[str, Any]) -> str:
    """A run's name in the legend: algorithm, mask, and tau where the mask has one."""
    tau = "" if cfg["mask"] == "mean" else f" ($\\tau$ = {cfg['tau']:g})"
    return f"{cfg['algorithm']}, {cfg['mask']}{tau}"


def told_apart(runs: Sequence[Curves], folders: Sequence[Path]) -> list[Curves]:
    """The runs, with the folder's name behind a label that several of them have."""
    labels = [run.label for run in runs]
    return [
        replace(run, label=f"{run.label}, {folder.name}") if labels.count(run.label) > 1 else run
        for run, folder in zip(runs, folders, strict=True)
    ]


def running_mean(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """The mean of each value and of those before it, `window` in all; of fewer at the start."""
    recent = [values[max(0, i + 1 - window) : i + 1] for i in range(len(values))]
    return [sum(few) / len(few) for few in recent]


def draw_accuracy(axes: Axes, runs: Sequence[Curves]) -> None:
    """The upper panel."""
    for run, (colour, style) in zip(runs, STYLES, strict=False):
        axes.plot(run.tested, run.accuracy, color=colour, linewidth=0.6, alpha=0.5)
        smooth = running_mean(run.accuracy)
        axes.plot(run.tested, smooth, color=colour, linestyle=style, linewidth=2, label=run.label)
    axes.set_ylabel("test accuracy")
    about = f"thick: mean of the last {WINDOW}; thin: as measured"
    axes.legend(title=about, loc="best", handlelength=3.5, fontsize="small", title_fontsize="small", framealpha=0.9)
    axes.tick_params(labelbottom=False)


def draw_agreement(axes: Axes, runs: Sequence[Curves]) -> None:
    """The lower panel."""
    for run, (colour, style) in zip(runs, STYLES, strict=False):
        axes.plot(run.rounds, run.kept, color=colour, linestyle=style, linewidth=1.8)
        axes.plot(run.rounds, run.agreement, color=colour, linestyle=style, linewidth=0.7)
    axes.set_ylim(0, 1.05)
    axes.set_ylabel("kept (thick)\nagreement", fontsize="small")
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def draw(runs: Sequence[Curves], title: str, out: Path) -> None:
    """Write the picture."""
    figure, (upper, lower) = plt.subplots(
        2, 1, figsize=(9, 4), sharex=True, height_ratios=(3, 1.1), layout="constrained"
    )
    draw_accuracy(upper, runs)
    draw_agreement(lower, runs)
    for axes in (upper, lower):
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    upper.set_title(title, loc="left", fontsize="medium")
    try:
        figure.savefig(out, dpi=160, metadata={"Software": None})  # no version in it: equal runs, equal bytes
    except (OSError, ValueError) as error:
        raise UserError(f"--out {out} cannot be written ({error}); choose a .png in a folder that can") from None
    finally:
        plt.close(figure)


class Parser(argparse.ArgumentParser):
    """A parser whose complaint is one sentence."""

    def error(self, message: str) -> Any:
        raise UserError(f"{message}; '{self.prog} --help' lists what there is")


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What the caller asked for."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder of 'fedmpi train'")
    parser.add_argument("--out", type=Path, required=True, help="picture to write, a .png")
    parser.add_argument("--title", default="", help="line above the picture")
    given = parser.parse_args(arguments)
    if len(given.runs) > len(STYLES):
        raise UserError(f"{len(given.runs)} runs were given but a picture holds {len(STYLES)}; leave some out")
    if given.out.suffix != ".png":
        raise UserError(f"--out is '{given.out}'; it must end in .png")
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the picture; returns the exit code."""
    try:
        given = options(arguments)
        draw(told_apart([curves(folder) for folder in given.runs], given.runs), given.title, given.out)
    except UserError as error:
        print(f"figures: {error}", file=sys.stderr)
        return 2
    print(given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
