"""The story of Slurm with a real Ray, in network namespaces (`make test-ray`; not a part of `make test`)."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scheduler.runners import attempt_record
from tests.namespaces import Hosts
from tests.ray.conftest import RayCluster
from tests.stories.harness import Scheduler, alive, wait_for

RAY = os.environ.get("GPUJOB_TEST_RAY", "")
pytestmark = pytest.mark.timeout(400)
PORT = 8265


class RayScheduler(Scheduler):
    """A scheduler that runs its jobs on Ray; the scheduler runs on the host of the head."""

    def __init__(self, folder: Path, hosts: Hosts, token: Path, **settings: Any) -> None:
        super().__init__(
            folder, gpus=None, engine="ray", engine_token_file=token, engine_interval=0.3, gpu_interval=1, **settings
        )
        self.command = [*hosts.enter(1), sys.executable, "-m", "scheduler"]

    def in_office(self) -> None:
        """Do nothing: there is no supervisor."""


@pytest.fixture
def on_ray(cluster: RayCluster, tmp_path: Path) -> Iterator[RayScheduler]:
    made = RayScheduler(tmp_path, cluster.hosts, cluster.token)
    yield made
    made.end_all()


def test_a_jobs_file_runs_on_ray(on_ray: RayScheduler) -> None:
    (on_ray.folder / "llm_config.json").write_text('{"models": {"small": 0.5, "large": 1}}')
    on_ray.start()
    on_ray.says("6 GPUs on 2 nodes")
    on_ray.append(
        on_ray.line("half", more="--llm small"), on_ray.line("whole", more="--llm large"), on_ray.line("wide") + ";gpus=4",
        on_ray.line("fails", 7), on_ray.line("killed", "s9"), on_ray.line("none") + ";gpus=0", on_ray.line("second", gpus="n2"),
        on_ray.line("child") + ";after=1", on_ray.line("orphan") + ";after_ok=4",
    )  # fmt: skip
    states = on_ray.wait_ended(9, 120)
    assert Counter(states.values()) == Counter(done=6, failed=2, skipped=1)
    assert all(
        on_ray.starts(key) == (key != "orphan")
        for key in ("half", "whole", "wide", "fails", "killed", "none", "second")
    )
    assert (on_ray.job(3)["node"], on_ray.job(3)["gpus"]) == ("n1", [0, 1, 2, 3])
    assert on_ray.job(7)["node"] == "n2" and on_ray.job(4)["exit_code"] == 7 and on_ray.job(5)["signal"] == 9


def test_priorities_count_because_the_queue_stays_in_gpujob(on_ray: RayScheduler) -> None:
    on_ray.start()
    on_ray.hold("long")
    on_ray.append(on_ray.line("long") + ";gpus=4")
    on_ray.wait_state(1, "running")
    on_ray.append(*(on_ray.line(f"p{n}", priority=n) + ";gpus=4" for n in (5, 0, 3)))
    wait_for(lambda: len(on_ray.states()) == 4, "all jobs")
    on_ray.release("long")
    on_ray.wait_ended(4, 120)
    assert [entry[1] for entry in on_ray.ledger() if entry[0] == "start"] == ["long", "p0", "p3", "p5"]


def test_p1_p6_a_killed_scheduler_finds_its_jobs_again(on_ray: RayScheduler) -> None:
    on_ray.start()
    for key in ("runs", "ends"):
        on_ray.hold(key)
    on_ray.append(on_ray.line("runs", 3) + ";gpus=2", on_ray.line("ends", 7) + ";gpus=2")
    for number in (1, 2):
        on_ray.wait_state(number, "running")
    on_ray.kill()
    on_ray.release("ends")
    path = on_ray.folder / ".gpujob" / "attempts" / "2.1"
    wait_for(lambda: attempt_record.read(str(path)).how == "exit", "the end of a job without a scheduler")
    on_ray.start()
    on_ray.wait_state(2, "failed")
    assert on_ray.states()[1] == "running" and on_ray.job(2)["exit_code"] == 7
    on_ray.release("runs")
    assert on_ray.wait_ended(2) == {1: "failed", 2: "failed"}
    assert on_ray.starts("runs") == on_ray.starts("ends") == 1


def test_cancel_ends_a_job_and_its_processes(on_ray: RayScheduler) -> None:
    on_ray.start()
    on_ray.hold("a")
    on_ray.append(on_ray.line("a"))
    on_ray.wait_state(1, "running")
    pid = int(on_ray.ledger()[0][2])
    on_ray.cli("cancel", "1")
    on_ray.wait_state(1, "cancelled")
    wait_for(lambda: not alive(pid), "the end of its process")


def test_a_wrong_token_is_told(cluster: RayCluster, tmp_path: Path) -> None:
    token = tmp_path / "wrong"
    token.touch(0o600)
    token.write_text("wrong")
    scheduler = RayScheduler(tmp_path, cluster.hosts, token)
    scheduler.start(ready=False)
    wait_for(lambda: scheduler.process.poll() is not None or "refuses the token" in scheduler.said(), "the refusal", 90)
    assert "wrong" not in scheduler.said().replace(str(tmp_path), "")
    scheduler.end_all()


def test_a_lost_head_loses_its_jobs_with_that_reason(cluster: RayCluster, tmp_path: Path) -> None:
    """The last test: the head is killed. Its running job is lost; a waiting job waits until there is a head again."""
    scheduler = RayScheduler(tmp_path, cluster.hosts, cluster.token)
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(scheduler.end_all)
        scheduler.start()
        scheduler.hold("a")
        scheduler.append(scheduler.line("a") + ";gpus=4", scheduler.line("b") + ";gpus=4")
        scheduler.wait_state(1, "running")
        begun = time.monotonic()
        cluster.kill_head()
        wait_for(lambda: any("Ray does not answer" in text for text in scheduler.status()["trouble"]), "the trouble")
        scheduler.wait_state(1, "failed", limit=300)
        print(f"lost after {time.monotonic() - begun:.0f} s: {json.dumps(scheduler.job(1)['notes'])}")
        assert scheduler.job(1)["outcome"] == "lost" and "head" in " ".join(scheduler.job(1)["notes"])
        cluster.stop()
        cluster.start()
        scheduler.wait_state(2, "done", limit=120)
        assert scheduler.starts("a") == scheduler.starts("b") == 1
