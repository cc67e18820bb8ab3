"""Run `python -m fedmpi`, for launchers that start a module."""

import sys

from .commands import main

sys.exit(main())
