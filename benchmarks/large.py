"""Measure what a large model, or a large cohort on many ranks, costs: memory of ranks and nodes next to the forecast of
`fedmpi plan`, and the seconds per round outside of training.

    python benchmarks/large.py --parameters 350000000 --topology 1x2 --sum float32 exact
    sudo python benchmarks/large.py --parameters 100000000 --topology 2x2 --mbit 10000 --sum exact
    python benchmarks/large.py --topology 1x1 1x8 --clients 2000 --cohort 1000 --model lenet --local.steps 1

A topology is NODESxRANKS. Every row is a real `fedmpi train` on glyphs, with one process per rank, and the
`fedmpi plan` of the same options. Several nodes are network namespaces of this machine, each with a host name of its
own, on links of --mbit (link.py; needs root). The model is a stack of linear layers of the user's own (peers/stack.py),
whose clients take one step of one sample. Further options are those of `fedmpi train`.

  rank          the peak of the largest rank, as the kernel records it (VmHWM)
  node          the largest sum of Pss over the ranks of a node, sampled while the run is under way
  plan          what `fedmpi plan` forecasts for either, and measured / planned
  s per round   medians over the rounds after the first: waiting for the other ranks, reduce, server's step, gather;
                `outside` is their sum, and its share of the round
  MB between    bytes that left the nodes per round, as the run counts them

A run that would leave less than --reserve GB of this machine's memory, by its forecast, is not started; one that does
is ended.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from kit import columns, median, positive
from link import REPO, Topology, commands, end, network
from memory import descendants, kilobytes

OUTSIDE = ("wait", "reduce", "server", "gather", "meta")
SAMPLED = 0.2  # seconds between two looks at the memory
LIMIT = 1800  # seconds for a run
USUAL = (
    "--data glyphs --split iid --clients 16 --cohort 8 --rounds 4 --model stack:make --local.steps 1 --local.batch 1 "
    "--local.momentum 0 --eval.every 4 --eval.samples 8 --threads 1 --log_to none"
)
NAMED = 'hostname "node-$((RANK / LOCAL_WORLD_SIZE))" && exec "$@"'  # ranks with one host name are on one node


@dataclass
class Seen:
    """Bytes of memory that were seen while a run was under way."""

    ranks: dict[int, int]  # peaks, by process
    node: int = 0  # the largest sum over a node

    def look(self, nodes: Sequence[Sequence[subprocess.Popen[bytes]]]) -> None:
        """Look at every process of every node."""
        for started in nodes:
            total = 0
            for pid in (pid for process in started for pid in descendants(process.pid)):
                with suppress(OSError):  # it has ended
                    total += 1024 * kilobytes(Path(f"/proc/{pid}/smaps_rollup").read_text())["Pss"]
                    peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
                    self.ranks[pid] = 1024 * int(peak[1]) if peak else 0
            self.node = max(self.node, total)


def available() -> int:
    """Return the bytes of memory that this machine has left."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return 1024 * int(found[1]) if found else 0


def environment(parameters: int) -> dict[str, str]:
    """Return the environment of plan and ranks."""
    path = [str(Path(__file__).parent / "peers"), str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"PYTHONPATH": os.pathsep.join(path), "FEDMPI_PARAMETERS": str(parameters), "OMP_NUM_THREADS": "1"}
    return os.environ | own | {"TORCH_CPP_LOG_LEVEL": "ERROR"}


def fedmpi(*words: str) -> list[str]:
    """Return a command line of fedmpi."""
    return [sys.executable, "-m", "fedmpi", *words]


def planned(shape: Topology, words: Sequence[str], environ: dict[str, str], folder: Path) -> dict[str, Any]:
    """Return the forecast of a run."""
    asked = ["--json", "--ranks", str(shape.ranks), "--ranks_per_node", str(shape.per_node)]
    done = subprocess.run(fedmpi("plan", *asked, *words), env=environ, cwd=folder, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def starts(
    shape: Topology, names: list[str], words: Sequence[str], folder: Path
) -> Iterator[tuple[list[str], dict[str, str], int]]:
    """Yield the commands to start, their environment and their node."""
    if shape.nodes == 1:
        several = ["--ranks", str(shape.ranks), "--max_restarts", "0"] if shape.ranks > 1 else []
        yield fedmpi("train", *several, *words), {}, 0
        return
    rank = ["unshare", "--uts", "sh", "-c", NAMED, "sh", *fedmpi("train", *words)]
    for command, environ in commands("gloo", folder, names, shape.per_node, rank):
        yield command, environ | {"GLOO_SOCKET_IFNAME": "eth0"}, int(environ["RANK"]) // shape.per_node


def train(
    shape: Topology, names: list[str], words: Sequence[str], environ: dict[str, str], folder: Path, reserve: int
) -> Seen:
    """Run it, and return what memory was seen."""
    seen, nodes = Seen({}), [list[subprocess.Popen[bytes]]() for _ in range(shape.nodes)]
    deadline, failed = time.monotonic() + LIMIT, ""
    try:
        for command, more, node in starts(shape, names, words, folder):
            nodes[node].append(subprocess.Popen(command, env=environ | more, cwd=folder, start_new_session=True))
        running = [process for started in nodes for process in started]
        while not failed and any(process.poll() is None for process in running):
            seen.look(nodes)
            time.sleep(SAMPLED)
            if available() < reserve:
                failed = f"it was ended: less than {reserve / 1e9:.3g} GB of memory were left"
            elif time.monotonic() > deadline:
                failed = f"it was not done after {LIMIT} s"
            elif any(process.poll() for process in running):
                failed = "a rank failed; its message is above"
    finally:
        for process in (process for started in nodes for process in started):
            for pid in descendants(process.pid)[1:]:  # ranks of `--ranks` have process groups of their own
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            end(process)
    if failed:
        raise SystemExit(f"{shape}: {failed}")
    return seen


def measure(shape: Topology, kind: str, options: argparse.Namespace, extra: Sequence[str]) -> dict[str, Any]:
    """Return the row of a topology and a kind of sum; without what is measured if it does not fit this machine."""
    environ = environment(options.parameters)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder)))
        words = [*USUAL.split(), *extra, "--sum", kind]
        plan = planned(shape, words, environ, folder)
        row: dict[str, Any] = {"topology": str(shape), "ranks": shape.ranks, "nodes": shape.nodes, "sum": kind}
        row |= {"planned_rank_bytes": plan["rank_bytes"], "planned_node_bytes": plan["node_bytes"]}
        row |= {"planned_bytes_between_nodes": plan["sent"]["away"], "planned_memory": plan["memory"]}
        if plan["node_bytes"] * shape.nodes > available() - options.reserve * 1e9:
            return row
        link = stack.enter_context(network(shape.nodes, options.mbit) if shape.nodes > 1 else nullcontext([""]))
        out = folder / "run"
        seen = train(
            shape, link[1:], [*words, "--quiet", "--out", str(out)], environ, folder, int(options.reserve * 1e9)
        )
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        sha256 = json.loads((out / "finished.json").read_text())["model_sha256"]
    later = records[1:] or records
    seconds = {name: median([one["seconds"][name] for one in later], 4) for name in ("local", *OUTSIDE)}
    outside = [sum(one["seconds"][name] for name in OUTSIDE) for one in later]
    share = [part / (part + one["seconds"]["local"]) for part, one in zip(outside, later, strict=True)]
    peak = max(seen.ranks.values())
    return row | {
        "rank_bytes": peak,
        "rank_ratio": round(peak / plan["rank_bytes"], 3),
        "node_bytes": seen.node,
        "node_ratio": round(seen.node / plan["node_bytes"], 3),
        "seconds": seconds,
        "outside_seconds": median(outside, 4),
        "outside_share": median(share, 4),
        "bytes_between_nodes": round(median([one["bytes_between_nodes"] for one in later])),
        "clients": later[-1]["clients"],
        "model_sha256": sha256,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows in columns; memory in GB."""
    lines = [["topology", "sum", "rank", "plan", "ratio", "node", "plan", "ratio", "local", "wait", "reduce", "server"]]
    lines[0] += ["gather", "outside", "share", "MB between", "model"]
    for row in rows:
        about = [row["topology"], row["sum"]]
        plan = [f"{row[f'planned_{what}_bytes'] / 1e9:.2f}" for what in ("rank", "node")]
        if "rank_bytes" not in row:
            lines.append([*about, "-", plan[0], "-", "-", plan[1], "does not fit", *[""] * 9])
            continue
        memory = [[f"{row[f'{what}_bytes'] / 1e9:.2f}", f"{row[f'{what}_ratio']:.2f}"] for what in ("rank", "node")]
        cells = [cell for (real, ratio), told in zip(memory, plan, strict=True) for cell in (real, told, ratio)]
        times = [f"{row['seconds'][name]:.3g}" for name in ("local", "wait", "reduce", "server", "gather")]
        times += [f"{row['outside_seconds']:.3g}", f"{row['outside_share']:.0%}"]
        lines.append([*about, *cells, *times, f"{row['bytes_between_nodes'] / 1e6:.1f}", row["model_sha256"][:8]])
    return columns(lines)


def topology(word: str) -> Topology:
    """Return the topology of a word such as 1x2."""
    match = re.fullmatch(r"([1-9]\d?)x([1-9]\d?)", word)
    if match is None or int(match[1]) > 16 or int(match[2]) > 16:
        raise argparse.ArgumentTypeError(f"'{word}' must be 1 to 16 nodes times 1 to 16 ranks, such as 1x2")
    return Topology(int(match[1]), int(match[2]))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--parameters", type=positive, default=10_000_000, help="of the stack of linear layers, about")
    add("--topology", nargs="+", type=topology, default=[Topology(1, 2)], metavar="NODESxRANKS", help="default: 1x2")
    add("--sum", nargs="+", choices=("exact", "float32"), default=["exact"])
    add("--mbit", type=positive, default=10_000, help="rate of the links between nodes")
    add("--reserve", type=positive, default=3, metavar="GB", help="memory of this machine that must stay free")
    add("--folder", type=Path, help="where run folders are made; default: the system's temporary folder")
    add("--json", action="store_true", help="print one JSON object per line, in bytes, with the forecast by purpose")
    options, extra = parser.parse_known_args()
    if any(shape.nodes > 1 for shape in options.topology) and os.geteuid() != 0:
        parser.error("network namespaces are made by root only; start it with sudo, or give topologies of one node")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of the end of `network`
    rows = []
    for shape in options.topology:
        for kind in options.sum:
            try:
                rows.append(measure(shape, kind, options, extra))
            except subprocess.CalledProcessError as error:
                print(f"'{' '.join(map(str, error.cmd[:6]))} ...' failed; its message is above", file=sys.stderr)
                return 2
            if options.json:
                print(json.dumps(rows[-1]), flush=True)
    if not options.json:
        print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
