"""What data cost in memory when several ranks of a node use them: mapped from the prepared file, or each in a copy. And
what the frozen part of a model costs.

    python benchmarks/memory.py --data_root /scratch/data           # CIFAR-10, 4 ranks
    python benchmarks/memory.py --data glyphs --ranks 2 --json
    python benchmarks/memory.py --base 350 --ranks 2                # a frozen base of 350 million parameters in bf16

Each rank is a process of its own. It imports fedmpi, loads the data, and takes every sample once in batches, in random
order, as training does. When all ranks have, what the kernel knows of them is read from /proc/PID/smaps_rollup, and of
the prepared file's mapping from /proc/PID/smaps. This is done for ranks that
  import     have no data, to know what the program itself takes
  map        use the data as fedmpi gives them, mapped from the prepared file
  copy       hold a copy of them each, as a program does that reads its data for itself
The node's total is the sum of the ranks' Pss: of what several processes share, each is charged its part. What is beyond
the total of `import` are the data.

With `--base`, `fedmpi train` runs a model of linear layers of width 4096, frozen in bf16, each with a trained adapter
of rank 8, and a model of the adapters alone. The difference of their memory is what the base costs: of the node while
it trains (Pss of all ranks), and of a rank at its peak, which is while every rank has made a base of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

import torch
from kit import columns, positive

from fedmpi.data import Arrays, find_data, load
from fedmpi.data.store import data_root, prepared_files
from fedmpi.errors import UserError

WAYS = ("import", "map", "copy")
BATCH = 32
HERE = Path(__file__).resolve().parent
FIELDS = ("Rss", "Pss", "Private_Clean", "Private_Dirty")


@dataclass(frozen=True)
class Row:
    """What the ranks of one way take; lists have an entry a rank."""

    data: str
    way: str
    ranks: int
    file_bytes: int
    """size of the prepared file"""
    node_bytes: int
    """Pss of all ranks"""
    rss_bytes: list[int]
    private_bytes: list[int]
    file_rss_bytes: list[int]
    """of the mapping of the prepared file"""
    file_pss_bytes: list[int]


def rank(way: str, name: str, root: str | None) -> None:
    """What each rank does: get the data, use them, say so, and stay until standard input ends."""
    torch.set_num_threads(1)
    data = None if way == "import" else arrays(name, root)
    if data is not None:
        if way == "copy":
            parts = {part: getattr(data, part).clone() for part in ("x", "y", "test_x", "test_y")}
            data = replace(data, **parts, owner=None if data.owner is None else data.owner.clone())
        take_all(data)
    print("ready", flush=True)
    sys.stdin.read()


def arrays(name: str, root: str | None) -> Arrays:
    """The data, which must be a row of the table: others are not prepared."""
    find_data(name)
    data = load(name, root)
    assert isinstance(data, Arrays), "all rows are"
    return data


def take_all(data: Arrays) -> None:
    """Take every sample once, in batches, in random order."""
    for x, y in ((data.x, data.y), (data.test_x, data.test_y)):
        for batch in torch.randperm(len(y)).split(BATCH):
            x[batch].float().sum(), y[batch].sum()


@contextmanager
def started(way: str, name: str, root: str | None) -> Iterator[subprocess.Popen[str]]:
    """A rank, which ends with the block."""
    command = [sys.executable, __file__, "--data", name, "--rank", way, *(["--data_root", root] if root else [])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)
        finally:
            process.kill()


def kilobytes(text: str) -> dict[str, int]:
    """The sums of some fields in the kernel's account of mappings."""
    found = {name: re.findall(rf"^{name}: +(\d+) kB", text, re.MULTILINE) for name in FIELDS}
    return {name: sum(map(int, values)) for name, values in found.items()}


def entries(smaps: str, file: Path) -> str:
    """The part of an account that is about one file."""
    parts = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", smaps, flags=re.MULTILINE)
    return "".join(part for part in parts if part.partition("\n")[0].endswith(f" {file}"))


def prepared_file(name: str, root: str | None) -> Path:
    """The file that the data are mapped from; they are prepared first where they are not."""
    arrays(name, root)  # let go at once: a mapping in this process would bear a part of what the ranks share
    folder = Path(root).expanduser() if root else None
    files = prepared_files(find_data(name).source(folder), data_root(folder))
    file = next((path for path in files if path.is_file()), None)
    if file is None:
        raise UserError(f"data set '{name}' could not be kept in a file; give a --data_root that can be written")
    return file.resolve()  # as the kernel names it


def measure(way: str, name: str, root: str | None, ranks: int, file: Path) -> Row:
    """What the ranks take, once all are ready."""
    with ExitStack() as stack:
        processes = [stack.enter_context(started(way, name, root)) for _ in range(ranks)]
        for process in processes:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise UserError(f"a rank that was to {way} the data ended early; what it said stands above")
        folders = [Path("/proc") / str(process.pid) for process in processes]
        whole = [kilobytes((folder / "smaps_rollup").read_text()) for folder in folders]
        mapped = [kilobytes(entries((folder / "smaps").read_text(), file)) for folder in folders]
    return Row(
        name,
        way,
        ranks,
        file_bytes=file.stat().st_size,
        node_bytes=1024 * sum(each["Pss"] for each in whole),
        rss_bytes=[1024 * each["Rss"] for each in whole],
        private_bytes=[1024 * (each["Private_Clean"] + each["Private_Dirty"]) for each in whole],
        file_rss_bytes=[1024 * each["Rss"] for each in mapped],
        file_pss_bytes=[1024 * each["Pss"] for each in mapped],
    )


def ratios(imported: Row, mapped: Row, copied: Row) -> dict[str, object]:
    """How many times as much the copies take: of the node's total, and of what the data take of it."""
    alone = [row.node_bytes - imported.node_bytes for row in (mapped, copied)]
    return {
        "data": mapped.data,
        "ranks": mapped.ranks,
        "copy_to_map": round(copied.node_bytes / mapped.node_bytes, 2),
        "copy_to_map_data_alone": round(alone[1] / alone[0], 2),
    }


def table(rows: list[Row]) -> str:
    """The rows in columns, in MB."""
    head = ("way", "node total", "data alone", "Rss a rank", "private a rank", "file: Rss a rank", "file: Pss of all")
    lines: list[tuple[str, ...]] = [head]
    for row in rows:
        values = (
            row.node_bytes,
            row.node_bytes - rows[0].node_bytes,
            fmean(row.rss_bytes),
            fmean(row.private_bytes),
            fmean(row.file_rss_bytes),
            sum(row.file_pss_bytes),
        )
        lines.append((row.way, *(f"{value / 1e6:.1f}" for value in values)))
    return columns(lines)


def train_base(millions: int, ranks: int, folder: Path) -> dict[str, float]:
    """Train a model with a base of that many million parameters; return bytes of memory, and those that it sent."""
    out = folder / f"run-{millions}"
    words = "train --data glyphs --split iid --clients 8 --cohort 4 --rounds 8 --local.steps 1 --local.batch 8 --quiet"
    words += f" --ranks {ranks} --eval.every 8 --eval.samples 8 --threads 1 --log_to none --out {out}"
    environ = os.environ | {"PYTHONPATH": f"{HERE / 'peers'}{os.pathsep}{HERE.parent}", "FEDMPI_BASE": str(millions)}
    command = [sys.executable, "-m", "fedmpi", *words.split(), "--model", "frozen:make"]
    settled, peaks = 0, dict[int, int]()
    with subprocess.Popen(command, env=environ, cwd=folder) as process:
        while process.poll() is None:
            time.sleep(0.1)
            node, all_train = 0, (out / "metrics.jsonl").exists()
            for pid in descendants(process.pid):
                with suppress(OSError):  # it has ended
                    node += 1024 * kilobytes(Path(f"/proc/{pid}/smaps_rollup").read_text())["Pss"]
                    peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
                    peaks[pid] = 1024 * int(peak[1]) if peak else 0
            settled = max(settled, node) if all_train else 0
    if process.returncode:
        raise UserError(f"training with a base of {millions} million parameters failed; what it said stands above")
    sent = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["bytes_sent"]
    return {"node": settled, "rank_peak": max(peaks.values()), "bytes_sent": sent}


def descendants(pid: int) -> list[int]:
    """Return a process and all that it has started."""
    with suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [pid, *(one for child in children for one in descendants(int(child)))]
    return []


def compare_bases(millions: int, ranks: int, as_json: bool) -> None:
    """Print what the frozen base costs."""
    with tempfile.TemporaryDirectory() as folder:
        alone, whole = (train_base(size, ranks, Path(folder)) for size in (-millions, millions))
    base = 2 * millions * 1e6
    row = {"base_bytes": base, "ranks": ranks, "bytes_sent_alone": alone["bytes_sent"], **whole}
    row |= {f"{name}_for_base": (whole[name] - alone[name]) / base for name in ("node", "rank_peak")}
    if as_json:
        print(json.dumps(row))
        return
    print(f"a frozen base of {base / 1e6:.0f} MB on {ranks} ranks; it adds")
    print(f"  to the node while it trains  {row['node_for_base']:.2f} x its size")
    print(f"  to the peak of a rank        {row['rank_peak_for_base']:.2f} x its size")
    print(f"bytes sent a round: {whole['bytes_sent']:,.0f}, without the base {alone['bytes_sent']:,.0f}")


def options() -> argparse.Namespace:
    """What the caller asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10", help="data set")
    parser.add_argument("--data_root", help="folder of the data sets; else $FEDMPI_DATA, else the user's cache")
    parser.add_argument("--ranks", type=positive, default=4)
    parser.add_argument("--base", type=positive, metavar="MILLIONS", help="parameters of a frozen base")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line, in bytes, then the ratios")
    parser.add_argument("--rank", choices=WAYS, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    given = options()
    try:
        if given.rank:
            rank(given.rank, given.data, given.data_root)
            return 0
        if not Path("/proc/self/smaps_rollup").exists():
            raise UserError("there is no /proc/self/smaps_rollup to read; run this on Linux")
        if given.base:
            compare_bases(given.base, given.ranks, given.json)
            return 0
        file = prepared_file(given.data, given.data_root)
        rows = [measure(way, given.data, given.data_root, given.ranks, file) for way in WAYS]
    except UserError as error:
        print(f"fedmpi: {error}", file=sys.stderr)
        return 2
    ratio = ratios(*rows)
    if given.json:
        print("\n".join(json.dumps(each) for each in (*map(asdict, rows), ratio)))
    else:
        print(f"{given.data} on {given.ranks} ranks, prepared file {rows[0].file_bytes / 1e6:.1f} MB; all in MB\n")
        print(table(rows))
        print("\ncopy : map = {copy_to_map} of the node's total, {copy_to_map_data_alone} of the data".format(**ratio))
    return 0


if __name__ == "__main__":
    sys.exit(main())
