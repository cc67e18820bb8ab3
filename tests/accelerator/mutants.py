"""Train with a fault put into `fedmpi/device.py`: `python -m tests.accelerator.mutants NAME train ...`.

Each is a mistake in the order of copies or in seeding that goes unnoticed on a CPU, and on a GPU most of the time.
"""

from __future__ import annotations

import importlib.util
import sys

MUTANTS = {
    "none": ("", ""),
    "the host reads before the copy is done": ("            done.synchronize()\n", ""),
    "the staging memory is used again before it is copied": ("current.wait_event(self.done)\n", "pass\n"),
    "the copy begins before the update is computed": ("        self.stream.wait_stream(current)\n", ""),
    "one set of host memory instead of two": ("        self.hosts = self.hosts[::-1]\n", ""),
    "the first device is seeded": ("generators[device.index or 0].manual_seed", "generators[0].manual_seed"),
}


def main() -> int:
    """Put the fault in, then run fedmpi."""
    name = sys.argv.pop(1)
    before, after = MUTANTS[name]
    spec = importlib.util.find_spec("fedmpi.device")
    assert spec is not None and spec.origin is not None
    with open(spec.origin, encoding="utf-8") as file:
        source = file.read()
    assert not before or source.count(before) == 1, f"{name}: the line is not there any more"
    module = importlib.util.module_from_spec(spec)
    sys.modules["fedmpi.device"] = module
    import fedmpi

    fedmpi.device = module  # type: ignore[attr-defined]
    exec(compile(source.replace(before, after) if before else source, spec.origin, "exec"), module.__dict__)
    from tests.accelerator.run import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
