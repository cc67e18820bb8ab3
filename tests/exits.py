"""Count unclean exits under load: `python -m tests.exits --runs 300`.

Runs examples/python_call.py on two ranks again and again while other processes keep the cores busy, and counts the runs
that end with another code than 0. Not part of pytest: a fault at the end of a process shows once in a hundred runs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): pass"
REPO = Path(__file__).parent.parent
LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
    "alone": [sys.executable],
}


def main() -> int:
    """Run all; return 1 if one of them did not exit with 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--busy", type=int, default=2 * (os.cpu_count() or 1), help="processes that load the cores")
    parser.add_argument("--launcher", choices=LAUNCHERS, default="torchrun")
    parser.add_argument("--script", default=str(REPO / "examples" / "python_call.py"))
    asked = parser.parse_args()
    command = [*LAUNCHERS[asked.launcher], asked.script]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    codes: Counter[int] = Counter()
    load = [subprocess.Popen([sys.executable, "-c", BUSY, str(os.getpid())]) for _ in range(asked.busy)]
    began = time.monotonic()
    try:
        for number in range(1, asked.runs + 1):
            with tempfile.TemporaryDirectory() as folder:
                done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=600)
            codes[done.returncode] += 1
            if done.returncode or "terminate called" in done.stderr:
                print(f"run {number} ended with {done.returncode}:\n{done.stderr[-2000:]}", flush=True)
            if number % 10 == 0:
                print(f"{number} of {asked.runs} in {time.monotonic() - began:.0f} s, codes {dict(codes)}", flush=True)
    finally:
        for process in load:
            process.kill()
            process.wait()
    return int(set(codes) != {0})


if __name__ == "__main__":
    sys.exit(main())
