"""Starts the configuration of docs/slurm on two network namespaces, and runs a jobs file on it (`make two-nodes`)."""

from __future__ import annotations

import contextlib
import re
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.namespaces import Hosts
from tests.slurm_cluster import Node, SlurmCluster

DOCS = Path(__file__).parents[1] / "docs" / "slurm"
NODES = (Node("server1", 4), Node("server2", 4))


def here(text: str, folder: Path) -> str:
    """Return a file of docs/slurm with the changes that this machine needs: no systemd, no GPUs, two addresses of one host."""
    host = socket.gethostname().split(".")[0]
    for pattern, new in (
        (r"SlurmctldHost=server1", f"SlurmctldHost={host}({Hosts.address(1)})"),
        (r"AuthType=auth/munge", f"AuthType=auth/munge\nAuthInfo=socket={folder}/munge/socket"),
        (r"SlurmUser=slurm", "SlurmUser=root\nSlurmdUser=root"),
        (r"StateSaveLocation=\S+", f"StateSaveLocation={folder}/state"),
        (r"SlurmdSpoolDir=\S+", f"SlurmdSpoolDir={folder}/spool/%n"),
        (
            r"SlurmctldLogFile=\S+",
            f"SlurmctldLogFile={folder}/log/slurmctld.log\nSlurmctldPidFile={folder}/run/slurmctld.pid",
        ),
        (r"SlurmdLogFile=\S+", f"SlurmdLogFile={folder}/log/slurmd.%n.log\nSlurmdPidFile={folder}/run/slurmd.%n.pid"),
        (r"ProctrackType=\S+", "ProctrackType=proctrack/linuxproc\nSlurmdParameters=config_overrides"),
        (r"TaskPlugin=\S+", "TaskPlugin=task/none"),
        (r"DefMemPerCPU=\d+", "DefMemPerCPU=100"),
        (r"RealMemory=\d+", "RealMemory=4000"),
        (r"NodeName=(server)(\d) CPUs", rf"NodeName=\1\2 NodeHostname={host} NodeAddr=10.88.0.\2 CPUs"),
        (r"/dev/nvidia", f"{folder}/dev/fgpu"),
    ):
        text = re.sub(f"(?m)^([^#\n]*?){pattern}", lambda found, new=new: found[1] + found.expand(shifted(new)), text)
    return text


def shifted(text: str) -> str:
    """Return a replacement with its groups counted from 2: the first group is the beginning of the line."""
    return re.sub(r"\\(\d)", lambda found: rf"\{int(found[1]) + 1}", text)


@contextlib.contextmanager
def two_nodes(folder: Path) -> Iterator[tuple[SlurmCluster, Hosts]]:
    """Yield the running cluster of docs/slurm, in two network namespaces."""
    with Hosts(2) as hosts:
        cluster = SlurmCluster(
            folder, NODES, port=6817,
            spaces={"": hosts.space(1), "server1": hosts.space(1), "server2": hosts.space(2)},
            conf_text=here((DOCS / "slurm.conf").read_text(), folder), gres_text=here((DOCS / "gres.conf").read_text(), folder),
        )  # fmt: skip
        try:
            cluster.start()
            yield cluster, hosts
        finally:
            cluster.stop()


def main() -> None:
    """Start the cluster, run four jobs on it by the jobs file, and print what `gpujob status` and `gpujob jobs` show."""
    from tests.slurm.conftest import ClusterScheduler

    with tempfile.TemporaryDirectory(prefix="gpujob-two-nodes-") as name:
        folder = Path(name)
        (folder / "slurm").mkdir()
        with two_nodes(folder / "slurm") as (cluster, hosts), contextlib.ExitStack() as stack:
            print(cluster.run("sinfo", "-N", "-o", "%N %T %G"))
            scheduler = ClusterScheduler(folder, cluster)
            scheduler.command = [*hosts.enter(1), sys.executable, "-m", "scheduler"]
            stack.callback(scheduler.end_all)
            scheduler.start()
            for key in ("half", "whole", "wide", "other"):
                scheduler.hold(key)
            scheduler.append(
                scheduler.line("half") + ";gpus=0.5", scheduler.line("whole"), scheduler.line("wide") + ";gpus=4",
                scheduler.line("other", gpus="server1"),
            )  # fmt: skip
            for number in (1, 2, 3, 4):
                scheduler.wait_state(number, "running")
            print(scheduler.cli("status").stdout)
            for key in ("half", "whole", "wide", "other"):
                scheduler.release(key)
            scheduler.wait_ended(4)
            print(scheduler.cli("jobs").stdout)


if __name__ == "__main__":
    main()
