"""A node of a real Slurm is cut off from the network while a job runs on it."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest

from tests.namespaces import Hosts
from tests.slurm.conftest import ClusterScheduler, need_slurm
from tests.slurm_cluster import Node, SlurmCluster
from tests.stories.harness import alive, wait_for


@pytest.mark.waits
def test_p1_a_job_on_a_node_that_is_cut_off_is_lost_and_never_run_twice(tmp_path: Path) -> None:
    """P1: The job on the lost node is `lost`, with the node; it is not started again; the other jobs continue."""
    need_slurm()
    with Hosts(2) as hosts, contextlib.ExitStack() as stack:
        nodes = (Node("g1", 1), Node("g2", 2))
        spaces = {"": hosts.space(1), "g1": hosts.space(1), "g2": hosts.space(2)}
        addresses = {"": hosts.address(1), "g1": hosts.address(1), "g2": hosts.address(2)}
        folder = tmp_path / "slurm"
        folder.mkdir()
        cluster = SlurmCluster(folder, nodes, silent_s=5, addresses=addresses, spaces=spaces)
        stack.callback(cluster.stop)
        cluster.start()
        scheduler = ClusterScheduler(tmp_path, cluster)
        scheduler.command = [*hosts.enter(1), sys.executable, "-m", "scheduler"]
        stack.callback(scheduler.end_all)
        scheduler.start()
        for key in ("cut", "stays"):
            scheduler.hold(key)
        scheduler.append(scheduler.line("cut") + ";gpus=2", scheduler.line("stays", gpus="g1"))
        for number in (1, 2):
            scheduler.wait_state(number, "running")
        pid = next(int(entry[2]) for entry in scheduler.ledger() if entry[1] == "cut")
        hosts.cut(2)
        scheduler.wait_state(1, "failed", limit=90)
        job = scheduler.job(1)
        assert job["outcome"] == "lost" and any("NODE_FAIL on node g2" in note for note in job["notes"]), job
        assert scheduler.states()[2] == "running" and alive(pid)  # nobody can end a job on a node that is cut off
        hosts.heal(2)
        wait_for(lambda: not alive(pid), "Slurm ends the rest of the job", 60)
        scheduler.append(scheduler.line("next", gpus="g2"))
        scheduler.wait_state(3, "done")
        scheduler.release("stays")
        assert scheduler.wait_ended(3) == {1: "failed", 2: "done", 3: "done"}
        assert scheduler.starts("cut") == 1
