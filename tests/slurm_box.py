"""A real Slurm on this machine for tests: munged, slurmctld and a slurmd for each node, in a folder of their own.

Nodes are named by loopback addresses, so that a rank can reach the first node by its name. Everything listens on the
loopback interface only; daemons are ended by the process ids that they wrote.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd", "srun")

CONF = """
ClusterName=box
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={base}/munge.sock
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool-%n
SlurmctldPidFile={base}/slurmctld.pid
SlurmdPidFile={base}/slurmd-%n.pid
SlurmctldLogFile={base}/slurmctld.log
SlurmdLogFile={base}/slurmd-%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
KillWait=5
ReturnToService=2
SlurmdParameters=config_overrides
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> list[str]:
    """The programs of Slurm that are not installed."""
    return [name for name in DAEMONS if shutil.which(name) is None]


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, all different."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def slurm(nodes: int = 2) -> Iterator[dict[str, str]]:
    """The variables under which Slurm's commands talk to a cluster of that many nodes, ended on the way out."""
    base = Path(tempfile.mkdtemp(prefix="slurm-"))
    base.chmod(0o755)  # munged refuses a socket in a folder that not everybody may enter
    (base / "state").mkdir()
    key = base / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    ports = free_ports(nodes + 1)
    host = socket.gethostname().partition(".")[0]
    lines = [
        f"NodeName=127.0.0.{n} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=2000 State=UNKNOWN"
        for n, port in enumerate(ports[1:], 1)
    ]
    conf = base / "slurm.conf"
    conf.write_text(CONF.format(base=base, host=host, ctld_port=ports[0], nodes="\n".join(lines)))
    variables = {"SLURM_CONF": str(conf)}
    env = os.environ | variables

    def start(*command: str) -> None:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, f"{command[0]}: {done.stderr}"

    try:
        files = [f"--{name}-file={base}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        start("munged", *files, f"--socket={base}/munge.sock", "--num-threads=2")
        start("slurmctld", "-c")
        for n in range(1, nodes + 1):
            (base / f"spool-127.0.0.{n}").mkdir()
            start("slurmd", "-N", f"127.0.0.{n}")
        wait_until_idle(env, nodes)
        yield variables
    finally:
        stop(base, env)
        shutil.rmtree(base, ignore_errors=True)


def wait_until_idle(env: dict[str, str], nodes: int) -> None:
    """Return when all nodes take jobs."""
    deadline = time.monotonic() + 30
    while True:
        seen = subprocess.run(["sinfo", "-h", "-N", "-o", "%T"], env=env, capture_output=True, text=True, timeout=30)
        if seen.stdout.split() == ["idle"] * nodes:
            return
        assert time.monotonic() < deadline, f"Slurm did not start: {seen.stdout} {seen.stderr}"
        time.sleep(0.1)


def stop(base: Path, env: dict[str, str]) -> None:
    """Cancel what still runs and wait for its end, then end the daemons: slurmd before slurmctld before munged."""
    with contextlib.suppress(subprocess.SubprocessError):  # also where nothing has started
        subprocess.run(["scancel", "-u", "root"], env=env, capture_output=True, timeout=20)
        deadline = time.monotonic() + 20
        while subprocess.run(["squeue", "-h"], env=env, capture_output=True, timeout=20).stdout:
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
    deadline = time.monotonic() + 20
    files = [*sorted(base.glob("slurmd-*.pid")), base / "slurmctld.pid", base / "munge.pid"]
    pids = [int(file.read_text()) for file in files if file.exists() and file.read_text().strip()]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
