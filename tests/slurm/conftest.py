"""A real Slurm for the tests of this folder: slurmctld and three slurmd with fake GPUs, one for each worker."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.slurm_cluster import SlurmCluster, missing_programs, slurm_cluster
from tests.stories.harness import Scheduler


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder."""
    for item in items:
        if "/slurm/" in str(item.path):
            item.add_marker("slurm")
            item.add_marker("story")


def need_slurm() -> None:
    """Skip the test if Slurm cannot be started here; fail if CI is set."""
    why = "" if os.getuid() == 0 else "slurmd needs root"
    missing = missing_programs()
    if missing:
        why = f"not installed: {', '.join(missing)} (as root: apt-get install -y slurm-wlm munge)"
    if why:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(why)


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[SlurmCluster]:
    need_slurm()
    folder = Path(tempfile.mkdtemp(prefix="gpujob-slurm-"))
    with slurm_cluster(folder) as made:
        yield made
    shutil.rmtree(folder)


class ClusterScheduler(Scheduler):
    """A scheduler that runs its jobs on a cluster."""

    def __init__(self, folder: Path, cluster: SlurmCluster, **settings: Any) -> None:
        super().__init__(folder, gpus=None, engine="slurm", engine_interval=0.2, **settings)
        self.cluster = cluster
        self.environ["SLURM_CONF"] = str(cluster.conf)

    def in_office(self) -> None:
        """Do nothing: there is no supervisor."""

    def queue(self) -> list[list[str]]:
        """Return name, state and node of this scheduler's jobs that Slurm has and that have not ended."""
        text = self.cluster.run("squeue", "-h", "-o", "%j %T %N")
        return [line.split() for line in text.splitlines()]


@pytest.fixture
def cluster(shared_cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    """Yield a cluster without jobs."""
    yield shared_cluster
    shared_cluster.run("scancel", "-u", "root", check=False)
    shared_cluster.wait(lambda: not shared_cluster.run("squeue", "-h", check=False).strip(), "no job left")


@pytest.fixture
def on_slurm(cluster: SlurmCluster, tmp_path: Path) -> Iterator[ClusterScheduler]:
    """Yield a scheduler that is not started yet."""
    made = ClusterScheduler(tmp_path, cluster)
    yield made
    made.end_all()
