"""A real Slurm with fake GPUs in a temporary folder: slurmctld and several slurmd on this machine (needs root)."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "sinfo", "scancel", "scontrol")
START_LIMIT_S = 30.0
STOP_LIMIT_S = 20.0


@dataclass(frozen=True)
class Node:
    """A node with ``gpus`` fake GPUs and ``shards`` shards for each of them."""

    name: str
    gpus: int
    shards: int = 4


NODES = (Node("g1", 4), Node("g2", 2), Node("g3", 1))

_CONF = """\
ClusterName=fake
SlurmctldHost={host}({address})
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout={silent_s}
SlurmctldTimeout=10
KillWait=5
MinJobAge={min_age_s}
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1,default_queue_depth=1000
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PriorityType=priority/basic
GresTypes=gpu,shard
SlurmdParameters=config_overrides
"""


@dataclass
class SlurmCluster:
    """A running cluster. ``folder``: holds everything of it; ``environ``: variables with which its commands find it."""

    folder: Path
    nodes: Sequence[Node] = NODES
    port: int = 0
    silent_s: int = 10  # a node is down if it does not answer for this long
    min_age_s: int = 300  # ended jobs are listed for this long
    addresses: dict[str, str] = field(default_factory=dict)  # node → address, "" → address of slurmctld
    spaces: dict[str, str] = field(default_factory=dict)  # node → network namespace, "" → of slurmctld
    conf_text: str = ""  # contents of slurm.conf and gres.conf in place of the usual ones
    gres_text: str = ""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def conf(self) -> Path:
        return self.folder / "etc" / "slurm.conf"

    @property
    def environ(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.conf)}

    def start(self) -> None:
        """Write the configuration, start all daemons, and wait until all nodes are idle."""
        for name in ("etc", "state", "log", "dev", "run", "spool"):
            (self.folder / name).mkdir(exist_ok=True)
        if not self.port:
            self.port = _free_port()
        for number in range(max(node.gpus for node in self.nodes)):
            path = self.folder / "dev" / f"fgpu{number}"
            if not path.exists():  # with plain files Slurm gives no ids
                os.mknod(path, 0o666 | 0o020000, os.makedev(1, 3))
        self.conf.write_text(self.conf_text or self._conf())
        (self.folder / "etc" / "gres.conf").write_text(self.gres_text or self._gres())
        self._start_munge()
        self.start_controller()
        for node in self.nodes:
            self.start_node(node.name)
        self.wait(
            lambda: self.run("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == str(len(self.nodes)), "idle nodes"
        )

    def _conf(self) -> str:
        host = socket.gethostname().split(".")[0]
        text = _CONF.format(
            host=host, address=self.addresses.get("", "127.0.0.1"), port=self.port, folder=self.folder, silent_s=self.silent_s,
            min_age_s=self.min_age_s,
        )  # fmt: skip
        for at, node in enumerate(self.nodes):
            shards = f",shard:{node.gpus * node.shards}" if node.shards else ""
            port = self.port + 1 + at if not self.addresses else self.port + 1
            text += (
                f"NodeName={node.name} NodeHostname={host} NodeAddr={self.addresses.get(node.name, '127.0.0.1')} Port={port} "
                f"CPUs=16 RealMemory=4000 Gres=gpu:fake:{node.gpus}{shards}\n"
            )
        return text + "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"

    def _gres(self) -> str:
        text = "AutoDetect=off\n"
        for node in self.nodes:
            last = f"[0-{node.gpus - 1}]" if node.gpus > 1 else "0"
            text += f"NodeName={node.name} Name=gpu Type=fake File={self.folder}/dev/fgpu{last}\n"
            if node.shards:
                text += f"NodeName={node.name} Name=shard Count={node.gpus * node.shards}\n"
        return text

    def _start_munge(self) -> None:
        """Start a munged of this cluster's own: the one of the machine may not run."""
        folder = self.folder / "munge"
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o711)  # munge checks that no other user can write here, and clients must reach the socket
        key = folder / "key"
        if not key.exists():
            key.touch(0o600)
            key.write_bytes(os.urandom(128))
        self._start("munged", "", [
            "munged", "--foreground", f"--socket={folder}/socket", f"--key-file={key}", f"--pid-file={folder}/pid",
            f"--log-file={folder}/log", f"--seed-file={folder}/seed", "--num-threads=2", "--force",
        ])  # fmt: skip
        self.wait(lambda: (folder / "socket").exists(), "munged")

    def start_controller(self) -> None:
        self._start("slurmctld", "", ["slurmctld", "-D"])
        self.wait(lambda: self.run("scontrol", "ping", check=False).startswith("Slurmctld(primary) at") and
                  " UP" in self.run("scontrol", "ping", check=False), "slurmctld")  # fmt: skip

    def start_node(self, name: str) -> None:
        self._start(name, name, ["slurmd", "-D", "-N", name])

    def _start(self, key: str, space: str, words: list[str]) -> None:
        inside = self.spaces.get(space)
        enter = ["nsenter", f"--net=/run/netns/{inside}"] if inside else []
        with open(self.folder / "log" / f"{key}.out", "ab") as out:
            self.processes[key] = subprocess.Popen(
                [*enter, *words],
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                env=self.environ,
                start_new_session=True,
            )

    def kill(self, key: str) -> None:
        """Kill slurmctld or the slurmd of a node by SIGKILL."""
        process = self.processes.pop(key)
        process.kill()
        process.wait()

    def run(self, *words: str, check: bool = True) -> str:
        """Run a command of Slurm, and return its output."""
        inside = self.spaces.get("")
        enter = ["nsenter", f"--net=/run/netns/{inside}"] if inside else []
        done = subprocess.run([*enter, *words], env=self.environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0 or not check, (words, done.stderr)
        return done.stdout

    def wait(self, condition: object, what: str, limit_s: float = START_LIMIT_S) -> None:
        end = time.monotonic() + limit_s
        while not condition():  # type: ignore[operator]
            assert time.monotonic() < end, f"not seen: {what}\n{self.logs()}"
            time.sleep(0.05)

    def logs(self) -> str:
        """Return the ends of the logs of all daemons."""
        texts = sorted((self.folder / "log").glob("*"))
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in texts)

    def stop(self) -> None:
        """End all jobs, then all daemons."""
        if "slurmctld" in self.processes:
            self.run("scancel", "-u", "root", check=False)
            with contextlib.suppress(AssertionError):
                self.wait(lambda: not self.run("squeue", "-h", check=False).strip(), "no job left", STOP_LIMIT_S)
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        for process in self.processes.values():
            try:
                process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.processes.clear()
        # slurmstepd processes of jobs that did not end are in sessions of their own; they name this folder's nodes.
        for pid in _step_daemons(self.folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _step_daemons(folder: Path) -> list[int]:
    """Return the pids of slurmstepd processes of this cluster: their environment names its configuration."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            entries = (path / "environ").read_bytes().split(b"\0")
            if (
                f"SLURM_CONF={folder}/etc/slurm.conf".encode() in entries
                and b"slurmstepd" in (path / "cmdline").read_bytes()
            ):
                found.append(int(path.name))
    return found


def _free_port() -> int:
    """Return the first of ten free ports in a row."""
    for port in range(21000 + os.getpid() % 900 * 10, 40000, 10):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for offset in range(10):
                one = stack.enter_context(socket.socket())
                one.bind(("127.0.0.1", port + offset))
            return port
    raise AssertionError("no free ports")


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name) is None]


@contextlib.contextmanager
def slurm_cluster(folder: Path, **more: object) -> Iterator[SlurmCluster]:
    """Yield a running cluster in ``folder``, and stop it afterwards."""
    cluster = SlurmCluster(folder, **more)  # type: ignore[arg-type]
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


if __name__ == "__main__":  # for trying things by hand: python -m tests.slurm_cluster FOLDER, then Ctrl-C
    import sys

    where = Path(sys.argv[1])
    where.mkdir(exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with slurm_cluster(where) as running:
        print(f"export SLURM_CONF={running.conf}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
