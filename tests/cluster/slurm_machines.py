"""A real SLURM on this machine: a controller, and a slurmd per simulated machine in a network namespace of its own.

Needs root, and Debian's slurm-wlm, munge and iproute2 (`make test-cluster`)."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.waiting import wait_for

_NET = "10.213.77"
_CONF = """
ClusterName=test
SlurmctldHost={host}({net}.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldPort=26817
ProctrackType=proctrack/cgroup
TaskPlugin=task/none
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
KillWait=60
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
"""


def run(*command: str, **options: object) -> str:
    done = subprocess.run(command, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return str(done.stdout)


@contextmanager
def namespaces(count: int) -> Iterator[list[tuple[str, str]]]:
    """Yield the names and addresses of network namespaces that reach each other, and this one, by a bridge."""
    names = [f"afm{number}" for number in range(count)]
    hosts = Path("/etc/hosts")
    before = hosts.read_text()
    with ExitStack() as stack:
        run("ip", "link", "add", "afbridge", "type", "bridge")
        stack.callback(run, "ip", "link", "del", "afbridge")
        run("ip", "addr", "add", f"{_NET}.1/24", "dev", "afbridge")
        run("ip", "link", "set", "afbridge", "up")
        found = []
        for number, name in enumerate(names):
            address = f"{_NET}.{number + 10}"
            run("ip", "netns", "add", name)
            stack.callback(run, "ip", "netns", "del", name)
            run("ip", "link", "add", f"{name}-v", "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "link", "set", f"{name}-v", "master", "afbridge", "up")
            for line in (f"addr add {address}/24 dev eth0", "link set eth0 up", "link set lo up"):
                run("ip", "-n", name, *line.split())
            found.append((name, address))
        lines = "".join(f"{address} {name}\n" for name, address in found)
        stack.callback(hosts.write_text, before)
        hosts.write_text(f"{before}\n{lines}")
        yield found


@contextmanager
def slurm(folder: Path, machines: list[tuple[str, str]]) -> Iterator[dict[str, str]]:
    """Yield the environment in which SLURM's commands reach the cluster, with partitions `low`, whose jobs `high`
    preempts, and which has GPUs in name only."""
    cores = os.cpu_count() or 1
    lines = [_CONF.format(folder=folder, net=_NET, host=os.uname().nodename)]
    for number, (name, address) in enumerate(machines):
        where = f"NodeHostname={name} NodeAddr={address} Port={26900 + number}"
        lines.append(f"NodeName={name} {where} CPUs={cores} RealMemory=4000 Gres=gpu:2 State=UNKNOWN")
    names = ",".join(name for name, _ in machines)
    lines.append(f"PartitionName=low Nodes={names} Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=60")
    lines.append(f"PartitionName=high Nodes={names} MaxTime=INFINITE PriorityTier=9")
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
    for number in range(2):
        # GPUs in name only
        (folder / f"gpu{number}").touch()
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-1]\n")
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (folder / "state").mkdir()
    env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    with ExitStack() as stack:
        for path in (Path("/run/munge"), Path("/var/log/munge"), Path("/var/lib/munge")):
            path.mkdir(exist_ok=True)
            shutil.chown(path, "munge", "munge")
        key = Path("/etc/munge/munge.key")
        if not key.exists():
            run("mungekey", "--create")
            shutil.chown(key, "munge", "munge")
        command = ["runuser", "-u", "munge", "--", "munged", "--foreground"]
        stack.enter_context(_daemon(command, folder / "munged.log", env))
        wait_for(lambda: Path("/run/munge/munge.socket.2").exists(), 20)
        stack.enter_context(_daemon(["slurmctld", "-D", "-c"], folder / "slurmctld.log", env))
        for name, _ in machines:
            (folder / f"spool-{name}").mkdir()
            daemon = ["nsenter", f"--net=/run/netns/{name}", "slurmd", "-D", "-N", name]
            stack.enter_context(_daemon(daemon, folder / f"slurmd-{name}.log", env))
        wait_for(lambda: _idle(env) == len(machines), 60)
        yield env


def _idle(env: dict[str, str]) -> int:
    told = subprocess.run(["sinfo", "-h", "-N", "-p", "low", "-o", "%T"], env=env, capture_output=True, text=True)
    return told.stdout.split().count("idle")


@contextmanager
def _daemon(command: list[str], log: Path, env: dict[str, str]) -> Iterator[None]:
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)
