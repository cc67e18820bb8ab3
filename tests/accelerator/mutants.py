"""Train with a fault put into `fedmpi/device.py`: `python -m tests.accelerator.mutants train ...`.

Each is a mistake in the order of copies or in seeding that goes unnoticed on a CPU, and on a GPU most of the time. Each
run is a fork of a process that has the device, in a folder by its number.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

MUTANTS = {
    "none": ("", ""),
    "the host reads before the copy is done": ("            done.synchronize()\n", ""),
    "the staging memory is used again before it is copied": ("current.wait_event(self.done)\n", "pass\n"),
    "the copy begins before the update is computed": ("        self.stream.wait_stream(current)\n", ""),
    "one set of host memory instead of two": ("        self.hosts = self.hosts[::-1]\n", ""),
    "the first device is seeded": ("generators[device.index or 0].manual_seed", "generators[0].manual_seed"),
}


def fork(run: Callable[[], object], number: int, source: str, path: str) -> None:
    """Run fedmpi with this source of `fedmpi/device.py`, in a process and a folder of its own."""
    os.mkdir(str(number))
    if pid := os.fork():
        os.waitpid(pid, 0)
        return
    try:
        os.chdir(str(number))
        module = importlib.util.module_from_spec(importlib.machinery.ModuleSpec("fedmpi.device", None, origin=path))
        sys.modules["fedmpi.device"] = module
        import fedmpi

        fedmpi.device = module  # type: ignore[attr-defined]
        exec(compile(source, path, "exec"), module.__dict__)
        run()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def main() -> None:
    """Run fedmpi with each fault."""
    from tests.accelerator import run  # here: it registers the device, and a test imports this file

    path = Path(__file__).parents[2] / "fedmpi/device.py"
    source = path.read_text(encoding="utf-8")
    for name, (before, _) in MUTANTS.items():
        assert not before or source.count(before) == 1, f"{name}: the line is not there any more"
    for number, (before, after) in enumerate(MUTANTS.values()):
        fork(run.main, number, source.replace(before, after) if before else source, str(path))


if __name__ == "__main__":
    main()
