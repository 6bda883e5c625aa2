"""Cases queued and running: many waiting jobs, and a restart with many running jobs."""

from __future__ import annotations

import csv
import os
import shutil
import signal
import sqlite3
import time

from benchmarks.figures import Report, median, progress
from benchmarks.house import House, append, end, wait_until
from benchmarks.plan import Plan
from benchmarks.process_figures import memory_of, used_by

BATCH = 1000
PATIENCE_S = 1800.0
SLEEP = shutil.which("sleep") or "/bin/sleep"


def queued(plan: Plan) -> Report:
    """Measure waiting jobs: how fast lines are accepted, the start of a daemon on them, `status`, and memory.

    For comparison, a program without a scheduler parses the same lines and writes one row a line (`_simple_program`).
    """
    sizes = [plan.count(10_000), plan.count(100_000)]
    if plan.million:
        sizes.append(plan.count(1_000_000))
    report = Report(
        "queued",
        "lines in one append, queue paused",
        ("lines", "accepted s", "µs a line", "simple µs", "ratio", "start s", "its CPU s", "MiB", "status ms"),
    )
    for count in sizes:
        with House(plan.folder, gpus=2) as house:
            house.command("queue", "pause")
            progress(f"queued: {count} lines")
            open(house.path("train.py"), "w").close()
            text = "".join(f"0,train.py,,--seed {n}\n" for n in range(count))
            at = append(house.jobs_file, text)
            house.wait_accepted(count)
            took = (time.monotonic_ns() - at) / 1e9
            simple = _simple_program(house.path("simple.db"), house.jobs_file)
            house.wait_quiet(PATIENCE_S)
            assert house.daemon is not None
            end(house.daemon, PATIENCE_S)
            progress(f"queued: start on {count} lines")
            began = time.monotonic()
            house.start()
            started = time.monotonic() - began
            cpu = used_by(house.pid)[0]
            house.wait_quiet(PATIENCE_S)
            mib = memory_of(house.pid)["rss"]
            status = median([house.command("status") for _ in range(5)])
        each = took / count * 1e6
        report.row(f"{count:,}", took, each, simple, each / simple, started, cpu, mib, status * 1e3)
        report.figures[str(count)] = {
            "accepted_s": took, "us_a_line": each, "simple_us_a_line": simple, "start_s": started, "start_cpu_s": cpu,
            "rss_mib": mib, "status_ms": status * 1e3,
        }  # fmt: skip
    return report


def _simple_program(path: str, jobs_file: str) -> float:
    """Parse all lines as CSV, and write one row a line with synced commits of BATCH rows; return µs a line."""
    store = sqlite3.connect(path, isolation_level=None)
    try:
        store.execute("PRAGMA journal_mode=WAL")
        store.execute("PRAGMA synchronous=FULL")
        store.execute("CREATE TABLE jobs (id INTEGER PRIMARY KEY, priority INT, script TEXT, env TEXT, arguments TEXT)")
        began, count = time.monotonic(), 0
        with open(jobs_file, encoding="utf-8", newline="") as stream:
            lines = csv.reader(stream)
            while some := [row for _, row in zip(range(BATCH), lines, strict=False)]:
                store.execute("BEGIN IMMEDIATE")
                for row in some:
                    store.execute(
                        "INSERT INTO jobs (priority, script, env, arguments) VALUES (?,?,?,?)", (int(row[0]), *row[1:4])
                    )
                store.execute("COMMIT")
                count += len(some)
        return (time.monotonic() - began) / count * 1e6
    finally:
        store.close()


def running(plan: Plan) -> Report:
    """Measure many running jobs: memory of each, adoption after the daemon is killed, and the recording of their ends.

    The jobs sleep, so that they use no processor time themselves.
    """
    count = plan.count(1000)
    words = ("--cpu-slots", str(count))
    with House(plan.folder, gpus=1, words=words) as house:
        before = sum(memory_of(pid)["pss"] for pid in house.pids)
        progress(f"running: {count} jobs")
        append(house.jobs_file, "".join(f"0,{SLEEP},,{100_000 + n};gpus=0\n" for n in range(count)))
        with house.reading() as store:
            wait_until(lambda: _in_state(store, "running") >= count, f"{count} jobs run", PATIENCE_S)
            pids = [pid for (pid,) in store.execute("SELECT pid FROM jobs")]
        house.wait_quiet()
        each = (sum(memory_of(pid)["pss"] for pid in house.pids) - before) * 1024 / count
        assert house.daemon is not None
        house.daemon.kill()
        house.daemon.wait()
        began = time.monotonic()
        house.start()
        adopted = time.monotonic() - began
        house.wait_quiet()
        progress(f"running: {count} jobs end")
        with house.reading() as store:
            began = time.monotonic()
            for pid in pids:
                os.kill(pid, signal.SIGTERM)  # our own jobs: nothing else can have these pids while they are not reaped
            wait_until(lambda: _in_state(store, "failed") >= count, f"{count} ends recorded", PATIENCE_S)
            ended = time.monotonic() - began
    bare = _bare_start(plan)
    report = Report("running", f"{count} running jobs", ("", "value"))
    report.row("KiB for each job (daemon and supervisor, PSS)", each)
    report.row("start that adopts them after kill -9, s", adopted)
    report.row("start without jobs, s", bare)
    report.row("from the signal to all jobs until their ends are recorded, s", ended)
    report.figures = {"jobs": count, "kib_a_job": each, "adopted_s": adopted, "bare_start_s": bare, "ended_s": ended}
    return report


def _in_state(store: sqlite3.Connection, state: str) -> int:
    return int(store.execute("SELECT count(*) FROM jobs WHERE state=?", (state,)).fetchone()[0])


def _bare_start(plan: Plan) -> float:
    began = time.monotonic()
    with House(plan.folder, gpus=1) as house:
        return house.started_at - began
