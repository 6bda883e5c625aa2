"""The page, the timeline and the metrics of a scheduler whose jobs run on a cluster."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.client.client import SchedulerClient
from scheduler.core.gpu import Gpu, ResourceRequest
from scheduler.core.job import Job, JobSpec, JobState
from scheduler.store import jobs as rows
from scheduler.store.daemon_lock import DaemonLock
from scheduler.store.database import Database
from scheduler.views import render
from scheduler.web.metrics import metrics
from scheduler.web.timeline import Run, by_server
from tests.web.test_pages import Client, Read

NOW = time.time()


def running(id: int, gpus: tuple[int, ...], node: str) -> Job:
    spec = JobSpec(script=f"/a/job{id}.py")
    return Job(
        id, spec, ResourceRequest(max(1, len(gpus)), 1000), JobState.RUNNING, gpus=gpus, runner="slurm", node=node, partition="main",
        engine_job=str(100 + id), started_at=NOW - 60, attempt=1, submitted_at=NOW - 90,
    )  # fmt: skip


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[SchedulerClient]:
    """Yield a client of a scheduler with 60 nodes of two GPUs, a paused GPU, and jobs on two nodes."""
    client = SchedulerClient(str(tmp_path / "gpu_scheduler_state.json"))
    gpus = [Gpu(2 * n + i, f"g{n}/{i}", "a100", n, None, f"g{n}", "main") for n in range(60) for i in range(2)]
    database, lock = Database(client.places), DaemonLock(client.places)
    lock.take({"pid": os.getpid(), "runner": "slurm"})
    with database.writing() as connection:
        rows.save_gpus(connection, gpus)
        rows.save_pauses(connection, [5], False, [])
        rows.restore(connection, [running(1, (0, 1), "g0"), running(2, (4,), "g2")])
    yield client
    database.close()
    lock.leave()


def test_the_page_has_a_card_for_each_node_and_folds_the_idle_ones(lab: SchedulerClient) -> None:
    page = Client(lab).get("/").text
    read = Read(page)
    cards = [attrs["data-key"] for tag, attrs in read.tags if tag == "article"]
    assert cards[:2] == ["node-g0", "node-g2"] and len(cards) == 60
    assert "58 idle nodes" in read.text and "jobs on Slurm" in read.text
    assert "2 a100, main" in read.text and "2 of 2" in read.text and "1 BUSY, 1 PAUSED" in read.text
    assert 'data-post="/api/gpus/5/resume"' in page and 'data-post="/api/gpus/4/pause"' in page
    assert page.index("58 idle nodes") > page.index("node-g2")


def test_the_timeline_has_a_band_for_each_node(lab: SchedulerClient) -> None:
    text = Read(Client(lab).get("/timeline?hours=1").text).text
    assert "node g0" in text and "node g59" in text and "GPU 0" not in text


def test_the_height_of_a_bar_is_the_share_of_the_node() -> None:
    gpus = [Gpu(0, "a/0", server=0), Gpu(1, "a/1", server=0), Gpu(2, "b/0", server=1), Gpu(3, "b/1", server=1)]
    runs = [
        Run(n, 1, 0.0, 1.0, its, parts, "done")
        for n, (its, parts) in enumerate([((0, 1), 1000), ((2,), 500), ((), 0), ((9,), 1000)])
    ]
    found = by_server(runs, gpus)
    assert [(run.gpus, run.parts) for run in found] == [((0,), 1000), ((1,), 250), ((), 1), ((), 1000)]


def test_the_metrics_of_gpus_have_the_node_and_the_partition(lab: SchedulerClient) -> None:
    text = metrics(lab).decode()
    assert 'gpujob_gpu_allocated_ratio{gpu="0",node="g0",partition="main",uuid="g0/0"} 1.0' in text
    assert len(re.findall(r'^gpujob_gpu_paused\{.*node="g2"', text, re.MULTILINE)) == 2


def test_status_has_a_line_for_each_node_and_names_the_nodes_of_jobs(lab: SchedulerClient) -> None:
    lines = render.status_lines(lab.overview(), "/x", NOW)
    text = "\n".join(lines)
    assert re.search(r"^g2 +main +4,5 +2 a100 +1 of 2 +1 BUSY, 1 PAUSED +2", text, re.MULTILINE)
    assert (
        re.search(r"^1 +running +job1.py +0,1 +g0 \(job 101\)", text, re.MULTILINE)
        and "NODE" in text
        and "PID" not in text
    )
    assert "… and 20 more nodes: gpujob status --json" in text or "and 20 more nodes" in text
