"""Measure seconds and memory of every split for very many clients.

    python benchmarks/splits.py                                   # a million clients, six million samples
    python benchmarks/splits.py --clients 1000 --samples 60000 --json

Labels are ten classes in random order; for `natural` there are as many owners as clients. Each split is run twice:
once for the time (on a clock, and of the processor, which other programs disturb less), and once under tracemalloc
for the most memory in use beside the labels and the partition that is returned. The last column is the time of the
account that goes into a run's partition.json.
"""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc
from typing import Any

import numpy as np
from kit import positive

from fedmpi.data.splits import SplitSpec, split

CASES: dict[str, dict[str, Any]] = {
    "iid": {"name": "iid"},
    "classes": {"name": "classes"},
    "classes, noise 0.1": {"name": "classes", "noise": 0.1},
    "dirichlet 0.1": {"name": "dirichlet", "alpha": 0.1},
    "dirichlet 100": {"name": "dirichlet", "alpha": 100.0},
    "quantity": {"name": "quantity"},
    "natural, choose": {"name": "natural", "owners": "choose"},
    "natural, merge": {"name": "natural", "owners": "merge"},
    "feature": {"name": "feature", "skewed": True},
    "mixed": {"name": "mixed", "skewed": True},
}
CLASSES = 10


def measure(case: str, clients: int, samples: int) -> dict[str, Any]:
    """The row of one case."""
    rng = np.random.default_rng(0)
    y = rng.permutation(samples) % CLASSES
    owner = rng.permutation(samples) % clients if CASES[case]["name"] == "natural" else None
    request = CASES[case] | {"y": y, "clients": clients, "seed": 0, "owner": owner}
    clock, processor = time.perf_counter(), time.process_time()
    partition = split(SplitSpec(**request))
    clock, processor = time.perf_counter() - clock, time.process_time() - processor
    told = time.perf_counter()
    partition.manifest(y, CLASSES)
    told = time.perf_counter() - told
    del partition
    tracemalloc.start()
    partition = split(SplitSpec(**request))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    returned = partition.offsets.nbytes + partition.order.nbytes
    return {
        "split": case,
        "clients": clients,
        "samples": samples,
        "seconds": round(clock, 2),
        "processor_seconds": round(processor, 2),
        "partition_MB": round(returned / 1e6),
        "beside_MB": round((peak - returned) / 1e6),
        "manifest_seconds": round(told, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=positive, default=1_000_000)
    parser.add_argument("--samples", type=positive, default=6_000_000)
    parser.add_argument("--split", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    options = parser.parse_args()
    show = (
        "{split:18} {seconds:6.2f} s  processor {processor_seconds:6.2f} s  partition {partition_MB:4} MB"
        "  beside it {beside_MB:4} MB  manifest {manifest_seconds:5.2f} s"
    )
    for case in options.split:
        row = measure(case, options.clients, options.samples)
        print(json.dumps(row) if options.json else show.format(**row), flush=True)


if __name__ == "__main__":
    main()
