"""`fedmpi train`: train as a rank of whatever launched this process; with --ranks, launch the ranks."""

from __future__ import annotations

from ..runs.rank import Rank


def main(arguments: list[str]) -> int:
    """Train; return the exit code."""
    rank = Rank.begin()
    from ..runs.options import split_launch

    asked, arguments = split_launch(arguments)
    if asked.ranks == 1:
        return rank.train(arguments)
    from ..cluster.launcher import launch

    return launch(asked, arguments)
