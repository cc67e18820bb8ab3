"""fedmpi's command line with the pretend device present: `python -m tests.accelerator.run train --device pretend ...`.

Launchers start it like any module: `torchrun ... -m tests.accelerator.run train ...`.
"""

from __future__ import annotations

import sys

from . import nccl, pretend


def main() -> int:
    """Run one command of fedmpi."""
    from fedmpi.commands import main as fedmpi

    assert pretend and nccl  # imported for what they register
    return fedmpi(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
