"""Tests of retention: old jobs and old logs are removed, a few in each step. All other files are kept."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from scheduler.core.config import Config
from scheduler.core.gpu import ResourceRequest
from scheduler.core.job import Event, Holding, Job, JobSpec, JobState, Process
from scheduler.core.observations import Now
from scheduler.daemon import retention
from scheduler.daemon.retention import Retention
from scheduler.recovery.job_reconstruction import logs_in
from scheduler.store import jobs as rows
from scheduler.store.database import Database
from scheduler.store.paths import Places

WHOLE = ResourceRequest(1, 1000)
DAY = 86400.0
NOW = time.time()


class Bench:
    """A store, a log folder, and the Retention that removes old jobs and logs from them.

    ``said``: logged texts; ``quiet``: whether the daemon's loop is idle.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "logs"
        self.folder.mkdir(0o700)
        self.db = Database(Places(str(folder / "gpu_scheduler_state.json")))
        self.said: list[str] = []
        self.config, self.quiet = Config(log_dir=str(self.folder)), True
        self.retention = Retention(
            self.db, self.db.places, lambda text, level: self.said.append(text), lambda: self.config, lambda: self.quiet
        )

    def step(self) -> None:
        """Run one slice of a round, if a slice is due."""
        self.retention.step(Now(time.time(), 0.0))

    def job(self, days: float, *, state: JobState = JobState.DONE, attempts: int = 1, size: int = 100) -> Job:
        """Add a job that ended ``days`` days ago; return the job. Each of its attempts has a log of ``size`` bytes."""
        with self.db.writing() as connection:
            job = rows.insert(connection, JobSpec(script="/x.py"), WHOLE, "", (), NOW)
            job.state, job.attempt = state, attempts
            job.finished_at = NOW - days * DAY if state.ended else None
            for attempt in range(1, attempts + 1):
                again = f"_a{attempt}" if attempt > 1 else ""
                job.log = str(self.folder / f"job_{job.id}_20200101_000000{again}.log")
                Path(job.log).write_bytes(b"x" * size)
                os.utime(job.log, (NOW - days * DAY, NOW - days * DAY))
                if attempt < attempts:
                    rows.write_events(
                        connection, [Event(job.id, 1.0, "retry_scheduled", {"log": job.log, "attempt": attempt})]
                    )
            rows.save(connection, [job])
        return job

    def round(self, logs: str = "", finished: str = "") -> list[str]:
        """Run a whole round of retention with these limits; return the names of the remaining logs."""
        self.config = replace(self.config, keep_logs=logs, keep_finished=finished)
        self.retention._wish = None
        self.step()
        while self.retention._work is not None:
            self.retention._next_slice = 0.0
            self.step()
        return sorted(os.listdir(self.folder))

    def names(self, *jobs: Job) -> list[str]:
        return sorted(os.path.basename(job.log) for job in jobs)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.db.close()


def test_logs_are_removed_by_the_age_of_the_job_end_and_of_the_file(bench: Bench) -> None:
    old, young, again = bench.job(31), bench.job(29), bench.job(40)
    os.utime(again.log)  # written after the job's end, by a leftover process
    silent = bench.job(1)
    os.utime(silent.log, (NOW - 50 * DAY, NOW - 50 * DAY))  # its last output is older than its end
    assert bench.round("30d") == bench.names(young, again, silent)
    assert bench.said == ["removed 100 bytes of logs"] and old.id == 1
    assert bench.round("30d") == bench.names(young, again, silent) and len(bench.said) == 1


def test_logs_are_removed_by_size_oldest_job_first_with_all_its_attempts(bench: Bench) -> None:
    bench.job(5, size=1 << 10)
    two = bench.job(4, attempts=3, size=1 << 10)
    three = bench.job(3, size=1 << 10)
    living = bench.job(0, state=JobState.PENDING, attempts=2, size=9 << 10)
    kept = [f"job_{two.id}_20200101_000000_a{n}.log" for n in (2, 3)]
    alive = [f"job_{living.id}_20200101_000000.log", f"job_{living.id}_20200101_000000_a2.log"]
    assert bench.round("3K") == sorted([*kept, *bench.names(three), *alive])
    assert bench.said == ["removed 2 KB of logs"]
    assert bench.round("1s 100G") == alive


def test_f16_logs_with_a_number_in_their_name_are_removed_too(bench: Bench) -> None:
    """F16: A log gets a name that ends with `_2.log` if a file with the name without `_2` exists already.

    Retention removes such a log when it is old. `recover` finds the job and the attempt from such a name.
    """
    ended = bench.job(31, attempts=2)
    for name in ("", "_a2"):
        old = bench.folder / f"job_{ended.id}_20200101_000000{name}.log"
        os.link(old, bench.folder / f"job_{ended.id}_20200101_000000{name}_2.log")
    with bench.db.writing() as connection:
        ended.log = f"{ended.log.removesuffix('.log')}_2.log"
        rows.save(connection, [ended])
    assert set(logs_in([str(bench.folder)], bench.db.places)) == {(ended.id, 1), (ended.id, 2)}
    assert f"job_{ended.id}_20200101_000000_a2_2.log" not in bench.round("30d")


def test_s8_retention_removes_only_logs_of_ended_jobs(bench: Bench, tmp_path: Path) -> None:
    """S8, A19: Retention removes a file only if it is in the log folder and is the log of an ended job.

    The log of an ended job that still holds GPUs is kept. Also kept are files whose name is not the name of a log, logs
    of unknown jobs, links, folders, and logs outside the log folder.
    """
    mine = bench.job(99)
    running, waiting = bench.job(0, state=JobState.RUNNING), bench.job(0, state=JobState.PENDING, attempts=2)
    for job in (running, waiting):
        os.utime(job.log, (1, 1))
    holding, linked, elsewhere, odd, folder, alien = (bench.job(99) for _ in range(6))
    with bench.db.writing() as connection:
        rows.save_holdings(connection, [Holding("x", holding.id, WHOLE, (0,), 0, (Process(1, 1),))], [], "boot")
        for job, log in (
            (elsewhere, tmp_path / f"job_{elsewhere.id}_20200101_000000.log"),
            (odd, bench.folder / "notes.txt"),
            (alien, bench.folder / "job_77_20200101_000000.log"),
        ):
            os.rename(job.log, log)
            job.log = str(log)
        rows.save(connection, [elsewhere, odd, alien])
    target = tmp_path / "precious"
    target.write_text("precious")
    os.unlink(linked.log)
    os.symlink(target, linked.log)
    os.unlink(folder.log)
    os.mkdir(folder.log)
    (bench.folder / "job_12345_20200101_000000.log").write_text("another scheduler's")
    os.utime(bench.folder / "job_12345_20200101_000000.log", (1, 1))
    before = set(os.listdir(bench.folder))
    assert before - set(bench.round("1s 1K")) == {os.path.basename(mine.log)}
    assert target.read_text() == "precious" and Path(elsewhere.log).exists()
    assert bench.said == ["removed 100 bytes of logs"]


def test_s8_retention_does_not_follow_a_link_in_the_place_of_the_log_folder(bench: Bench, tmp_path: Path) -> None:
    """S8: If a link replaces the log folder, retention reports it once, does not follow it, and removes nothing.

    When the folder is back, the next round removes old logs again.
    """
    job = bench.job(99)
    other = tmp_path / "moved"
    bench.folder.rename(other)
    bench.folder.symlink_to(other)
    assert bench.round("1d") == bench.round("1d") == bench.names(job)
    assert len(bench.said) == 1 and "old jobs and logs were not removed: " in bench.said[0]
    bench.folder.unlink()
    assert bench.retention.due() > time.monotonic() + 3000
    other.rename(bench.folder)
    assert bench.round("1d") == []


def test_s8_retention_does_not_follow_a_link_that_replaces_a_selected_log(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S8, A19: Retention selects old logs and then removes them.

    If a link replaces a selected log, it is not followed.
    """
    job = bench.job(99)
    target = tmp_path / "precious"
    target.write_text("precious")

    def swap(name: str) -> None:
        if name == "prune.selected":
            os.unlink(job.log)
            os.symlink(target, job.log)

    monkeypatch.setattr(retention, "crash_point", swap)
    assert bench.round("1d") == bench.names(job)
    assert target.read_text() == "precious" and bench.said == []


def test_logs_of_deleted_jobs_count_towards_the_limit(bench: Bench) -> None:
    """If `keep_finished` deletes a job, the logs of this job are kept until `keep_logs` removes them."""
    jobs = [bench.job(10 - n, attempts=2) for n in range(5)]
    everything = set(os.listdir(bench.folder))
    assert set(bench.round(finished="2")) == everything
    assert bench.said == ["removed 3 ended jobs"]
    assert [row[0] for row in bench.db.connection.execute("SELECT id FROM jobs")] == [4, 5]
    os.unlink(jobs[0].log)  # as a user may do
    assert set(bench.round("8d12h", "2")) == {n for n in everything if n[:5] not in ("job_1", "job_2")}
    assert bench.said[1:] == ["removed 300 bytes of logs"]
    assert bench.db.connection.execute("SELECT count(*) FROM old_logs").fetchone() == (2,)
    bench.round("1d", "1")
    assert bench.said[2:] == ["removed 1 ended job and 600 bytes of logs"]
    assert bench.db.connection.execute("SELECT count(*) FROM old_logs").fetchone() == (0,)


def test_retention_works_in_short_steps(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention works in slices of about 5 ms. While the daemon's loop is busy, only one slice a second is run.

    The next round begins one hour after the beginning of the last round. If the settings change, the next round begins
    at once.
    """
    clock = itertools.count(time.monotonic(), 0.001)  # each reading of the clock, and so each step, takes 1 ms
    monkeypatch.setattr(retention.time, "monotonic", lambda: next(clock))
    most = 10 * (1 + round(retention.SLICE_S / 0.001))
    for n in range(400):
        bench.job(30 + n / 1000)
    last = bench.job(0)
    bench.config = replace(bench.config, keep_logs="20d", keep_finished="20d")
    bench.quiet, slices = False, 0
    bench.step()
    left = len(os.listdir(bench.folder))
    bench.retention._next_slice = 0.0
    bench.step()
    assert len(os.listdir(bench.folder)) == left, "it waits for a quiet moment"
    bench.quiet = True
    while bench.retention._work is not None:
        assert bench.retention.due() <= time.monotonic() + 1
        bench.retention._next_slice = 0.0
        before = (bench.retention.jobs, bench.retention.logs)
        bench.step()
        assert bench.retention.jobs - before[0] + bench.retention.logs - before[1] <= most
        slices += 1
    assert slices > 3 and bench.retention.jobs == 400 and os.listdir(bench.folder) == bench.names(last)
    assert bench.retention.due() > time.monotonic() + 3000
    bench.step()
    assert bench.retention._work is None
    bench.round("21d")  # other settings start a round immediately
    assert len(bench.said) == 1 and bench.retention.due() > time.monotonic() + 3000


@pytest.mark.parametrize(
    ("logs", "finished", "seconds"),
    [("", "", 3600), ("20G", "100", 3600), ("30d", "", 3600), ("10m", "90d", 60), ("90d", "30s", 3), ("1s", "", 1)],
)
def test_retention_runs_more_often_for_short_age_limits(bench: Bench, logs: str, finished: str, seconds: float) -> None:
    """If an age limit is short, rounds are more frequent, so that no log is kept much longer than the limit."""
    before = time.monotonic()
    bench.round(logs, finished)
    assert before + seconds <= bench.retention.due() <= time.monotonic() + seconds


def test_a_store_error_ends_only_the_current_retention_round(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """E08 in part: If the store cannot be written, the current round removes no job; the error is logged once.

    A later round removes the jobs.
    """
    bench.job(5), bench.job(1)
    bench.db.connection.execute("PRAGMA query_only=1")
    names = bench.round("", "1")
    bench.round("", "1")
    assert len(names) == 2 and len(bench.said) == 1 and "tries again within the hour" in bench.said[0]
    bench.db.connection.execute("PRAGMA query_only=0")
    bench.round("", "1")
    assert bench.said[1:] == ["removed 1 ended job"]
