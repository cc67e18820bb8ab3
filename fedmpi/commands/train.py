"""`fedmpi train`: train as one rank of a launch, or launch --ranks on this machine."""

from __future__ import annotations

from ..runs.rank import begin, train


def main(arguments: list[str]) -> int:
    """Train; return the exit code."""
    place, began = begin()
    from ..runs.options import split_launch

    options, arguments = split_launch(arguments)
    if options.ranks == 1:
        return train(arguments, place, began)
    from ..cluster.launcher import launch

    return launch(options, arguments)
