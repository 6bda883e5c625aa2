"""The history of a real scheduler, its metrics, and damage to the history file.

The history has pauses and samples of GPUs and jobs.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from scheduler.client.client import SchedulerClient
from scheduler.core.history import SHORT_S, GpuSample
from scheduler.web.metrics import metrics
from tests.stories.harness import Scheduler, wait_for
from tests.stories.machine import IDLE, TOTAL, Machine, machine

__all__ = ["machine"]

MIB = 1 << 20


def desk_of(s: Scheduler) -> SchedulerClient:
    return SchedulerClient(str(s.folder / "gpu_scheduler_state.json"))


def samples(client: SchedulerClient, gpu: int = 0) -> list[GpuSample]:
    now = time.time()
    return client.gpu_history(now - 3600, now + 60, SHORT_S).get(gpu, [])


def figures(client: SchedulerClient) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return the values of all samples of the metrics. The keys are (name, labels)."""
    text = metrics(client).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def of_gpu(found: dict[Any, float], name: str, uuid: str, **more: str) -> float | None:
    index = {"GPU-a": "0", "GPU-b": "1"}[uuid]
    return found.get((f"gpujob_gpu_{name}", tuple(sorted({"gpu": index, "uuid": uuid, **more}.items()))))


def history_of(s: Scheduler) -> Path:
    return s.folder / ".gpujob" / "history.db"


@pytest.mark.waits
def test_the_history_contains_gpus_jobs_and_pauses(machine: Callable[..., Machine]) -> None:
    """The history has memory, load, power and booked share of each GPU, memory and load of each job, and all pauses.

    The metrics show the same GPUs.
    """
    m = machine().cards("GPU-a", "GPU-b")
    m.driver.gpu("GPU-a", temp=61, power=412, energy=90_000, reserved=534)
    m.driver.gpu("GPU-b", temp=None, power=None, energy=None)
    m.s.start()
    client = desk_of(m.s)
    m.s.hold("a")
    m.add("a", need="0.5", gpus="0")
    pid = m.running("a")
    m.use("GPU-a", pid, 4000, load=30, total_load=50)
    began = time.time()
    m.s.cli("pause", "1")
    wait_for(lambda: client.pause_spans(0, time.time()), "the pause in the history", 40)
    m.s.cli("resume", "1")
    booked = wait_for(
        lambda: [one for one in samples(client) if one.booked and one.own_mib and one.own_mib > 3000],
        f"samples: {samples(client)}\n{m.s.said()[-2000:]}", 60,
    )[-1]  # fmt: skip
    assert booked.used_max_mib == IDLE + 4000 and booked.power_w == 412 and booked.temperature_c == 61
    assert booked.reserved_mib is not None and booked.reserved_mib >= 534 and booked.foreign_mib == 0
    assert not booked.paused and 0 < booked.booked <= 0.5 and booked.load_max == 0.5
    other = samples(client, 1)[-1]
    assert (other.power_w, other.temperature_c) == (None, None) and other.own_mib == 0
    (span,) = wait_for(lambda: [s for s in client.pause_spans(0, time.time()) if s.end], "the end of the pause", 40)
    assert span.gpu == 1 and began - 10 < span.start < span.end <= time.time()
    measured = wait_for(lambda: [one for one in client.job_history(1).get(1, []) if one.load], "the job's own", 40)[-1]
    assert measured.memory_max_mib == 4000 and measured.load_max == 0.3
    found = figures(client)
    assert of_gpu(found, "power_watts", "GPU-a") == 412 and of_gpu(found, "power_watts", "GPU-b") is None
    assert of_gpu(found, "energy_joules_total", "GPU-a") == 90_000
    assert of_gpu(found, "temperature_celsius", "GPU-a") == 61 and of_gpu(found, "utilization_ratio", "GPU-a") == 0.5
    assert of_gpu(found, "allocated_ratio", "GPU-a") == 0.5 and of_gpu(found, "healthy", "GPU-b") == 1
    parts = {
        part: of_gpu(found, "memory_bytes", "GPU-a", part=part) for part in ("ours", "foreign", "reserved", "free")
    }
    assert parts["ours"] == 4000 * MIB and sum(filter(None, parts.values())) == TOTAL * MIB and parts["foreign"] == 0
    assert found["gpujob_tick_seconds_count", ()] > 0 and found["gpujob_up", ()] == 1
    assert history_of(m.s).stat().st_mode & 0o777 == 0o600


def test_k17_metrics_show_the_last_reading_as_stale_while_the_driver_hangs(machine: Callable[..., Machine]) -> None:
    """K17: While the driver hangs, the metrics show the last reading, its age, and that it is stale.

    Without a scheduler they show no GPU.
    """
    m = machine().cards("GPU-a")
    m.s.start()
    client = desk_of(m.s)
    m.readings(2)
    assert of_gpu(figures(client), "stale", "GPU-a") == 0
    m.driver.hang("*")
    wait_for(lambda: of_gpu(figures(client), "stale", "GPU-a") == 1, "GPU-a to be stale")
    began = time.monotonic()
    found = figures(client)
    assert time.monotonic() - began < 20  # the metrics do not wait for the driver
    age = of_gpu(found, "reading_age_seconds", "GPU-a")
    assert age is not None and age > 0 and of_gpu(found, "healthy", "GPU-a") == 0
    assert of_gpu(found, "memory_bytes", "GPU-a", part="free") is not None
    m.s.freeze()
    assert wait_for(lambda: of_gpu(figures(client), "reading_age_seconds", "GPU-a") > age, "it grows")  # type: ignore[operator]
    m.s.kill()
    found = figures(client)
    assert found["gpujob_up", ()] == 0 and not [name for name, _ in found if name.startswith("gpujob_gpu_")]


@pytest.mark.smoke
def test_counters_survive_kills_restarts_and_reset(scheduler: Callable[..., Scheduler]) -> None:
    """Each ending, retry, wait and run of a job is counted exactly once.

    The counters survive kill -9, restarts and `reset`.
    """
    s = scheduler(gpus=1)
    s.settings["assign_retry_wait"] = "0.1"
    s.append(s.line("a"), s.line("b", code=3, more=";retries=1"), s.line("c", code=1))
    s.start()
    client = desk_of(s)
    s.wait_ended(3)

    def counts() -> dict[str, float]:
        found = figures(client)
        names = {
            "done": ("gpujob_jobs_ended_total", (("state", "done"),)),
            "failed": ("gpujob_jobs_ended_total", (("state", "failed"),)),
            "exit": ("gpujob_jobs_finished_total", (("outcome", "exit"),)),
            "again": ("gpujob_retries_total", (("reason", "failed"),)),
            "asked": ("gpujob_retries_total", (("reason", "asked"),)),
            "waits": ("gpujob_job_wait_seconds_count", ()),
            "runs": ("gpujob_job_run_seconds_count", ()),
        }
        return {short: found[name] for short, name in names.items()}

    first = {"done": 1, "failed": 2, "exit": 3, "again": 1, "asked": 0, "waits": 3, "runs": 4}
    assert counts() == first
    s.kill()
    assert counts() == first
    s.start()
    s.cli("reset")
    assert not s.states() and counts() == first
    s.append(s.line("d", code=2))
    s.wait_ended(1)
    s.cli("retry", "4")
    wait_for(lambda: s.starts("d") == 2, "a second run")
    s.wait_ended(1)
    assert counts() == {"done": 1, "failed": 4, "exit": 5, "again": 1, "asked": 1, "waits": 4, "runs": 6}
    s.stop()
    assert counts()["failed"] == 4


@pytest.mark.parametrize("what", ["removed", "noise", "a link", "another version"])
def test_a_damaged_history_is_replaced_and_jobs_run(
    scheduler: Callable[..., Scheduler], what: str, tmp_path: Path
) -> None:
    """A history file that is missing, damaged or of another version is replaced with a private new one; jobs run.

    A link in its place is not followed.
    """
    s = scheduler(gpus=1)
    path, client = history_of(s), desk_of(s)
    message = {"removed": "", "a link": "curves have a gap until the scheduler can write this file again"}.get(
        what, "renamed to history.db"
    )

    def damage() -> None:
        if what == "noise":
            path.write_bytes(os.urandom(50_000))
            path.with_name("history.db-wal").unlink(missing_ok=True)  # SQLite would repair the file from it
        elif what == "another version":
            with contextlib.closing(sqlite3.connect(path)) as other:
                other.execute("PRAGMA user_version=7")
        else:
            path.unlink(missing_ok=True)
            if what == "a link":
                path.symlink_to(tmp_path / "victim")

    # At its end a scheduler waits at most one second for its history; without a sample, `wait_for` runs another one.
    def first_samples() -> list[GpuSample]:
        s.start()
        s.stop()  # at its end it writes the samples that it has
        return samples(client)

    def writes_in_spite_of_damage() -> bool:
        damage()
        assert samples(client) == [] and figures(client)["gpujob_up", ()] == 0
        s.start()
        s.wait_ended(1)
        s.stop()
        assert s.starts("a") == 1
        return message in s.said() and (what == "a link" or bool(samples(client)))

    assert all(one.used_mib is None and one.booked == 0 for one in wait_for(first_samples, "samples"))
    old = path.open("rb")  # stays open, so that no new file gets its inode
    before = path.stat().st_ino
    s.append(s.line("a"))
    wait_for(writes_in_spite_of_damage, f"{message!r} and new samples")
    old.close()
    if what == "a link":
        assert not (tmp_path / "victim").exists()
        return
    assert path.stat().st_ino != before and path.stat().st_mode & 0o777 == 0o600
    assert ("renamed to history.db" in s.said()) is (what != "removed")


@pytest.mark.long
def test_a_history_removed_or_damaged_while_running_is_replaced(scheduler: Callable[..., Scheduler]) -> None:
    """A history removed or damaged while the scheduler runs is replaced; the count of passes never decreases."""
    s = scheduler(gpus=1)
    s.start()
    path, client = history_of(s), desk_of(s)
    wait_for(lambda: samples(client), f"a first sample\n{s.said()}", 40)
    path.unlink()
    wait_for(lambda: samples(client), f"a new file\n{s.said()}", 40)
    counted = figures(client)["gpujob_tick_seconds_count", ()]
    s.kill()
    s.append(s.line("a"))
    s.start()
    s.wait_ended(1)
    s.stop()
    assert figures(client)["gpujob_tick_seconds_count", ()] > counted
    assert [one.at for one in samples(client)] == sorted({one.at for one in samples(client)})
    s.start()
    wait_for(lambda: path.with_name("history.db-wal").exists(), "it is written", 40)
    s.kill()
    for name in ("history.db", "history.db-wal"):
        with path.with_name(name).open("r+b") as stream:
            stream.write(os.urandom(8192))
    s.start()
    wait_for(lambda: "renamed to history.db.damaged" in s.said(), f"it is noticed\n{s.said()}", 60)
    assert samples(client) and path.with_name("history.db.damaged").exists()


def test_history_false_creates_no_history_file(scheduler: Callable[..., Scheduler]) -> None:
    """With `history: false` there is no history file; the metrics still have the counters of jobs."""
    s = scheduler(gpus=1, history="false")
    s.append(s.line("a"))
    s.start()
    s.wait_ended(1)
    s.stop()
    assert not history_of(s).exists()
    found = figures(desk_of(s))
    assert found["gpujob_job_run_seconds_count", ()] == 1 and ("gpujob_tick_seconds_count", ()) not in found
