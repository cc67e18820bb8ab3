"""Keep the memory that a step frees for the next step.

The C library returns large blocks to the system as soon as they are free, and every step has to ask for them again: the
system then clears them page by page. For ResNet-18 that is 14,000 pages and a fifth of the time of a step.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

TRIM, MMAP = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h
KEPT = 2**31 - 1  # bytes that may stay free
LARGEST = 2**25  # bytes of a block that is kept; larger ones are for a test set, and rare
CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Ask the C library to keep freed memory; return whether it will. It is not asked if the user has chosen, or if it
    is not glibc."""
    if any(name in environ for name in CHOSEN):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(*given) == 1 for given in ((MMAP, LARGEST), (TRIM, KEPT)))


def release_freed_memory() -> None:
    """Return the memory that is free now to the system, after something large has gone for good."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
