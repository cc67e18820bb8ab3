"""`python -m fedmpi`, for launchers that start a module."""

import sys

from .cli import main

sys.exit(main())
