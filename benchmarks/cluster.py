"""Case cluster: a full queue and many running jobs on a large Slurm (a stand-in, see `slurm_stand_in.py`)."""

from __future__ import annotations

import os
import sqlite3
import tempfile
import time

from benchmarks.figures import Report, median, progress
from benchmarks.house import House, append, end, wait_until
from benchmarks.plan import Plan
from benchmarks.process_figures import memory_of, used_by
from benchmarks.slurm_stand_in import StandIn

NODES, GPUS = 128, 8
PATIENCE_S = 1800.0
IDLE_S = 30.0
ROUNDS = 7


def cluster(plan: Plan) -> Report:
    """Measure a daemon on a cluster: release of jobs, one round of status, calls of Slurm, memory, `status`, restart."""
    nodes, waiting = plan.count(NODES, 1), plan.count(100_000)
    running = nodes * GPUS * 2
    folder = tempfile.mkdtemp(prefix="slurm-", dir=plan.folder)
    stand_in = StandIn(folder, nodes, GPUS)
    environ = {"PATH": f"{folder}:{os.environ['PATH']}"}
    try:
        with (
            House(plan.folder, gpus=0, words=("--engine", "slurm"), environ=environ) as house,
            house.reading() as store,
        ):
            line = "0,train.py,,--seed {};gpus=0.5\n"
            open(house.path("train.py"), "w").close()
            progress(f"cluster: {running} jobs start")
            began = time.monotonic()
            append(house.jobs_file, "".join(map(line.format, range(running))))
            wait_until(lambda: _in_state(store, "running") >= running, f"{running} jobs run", PATIENCE_S)
            rate = running / (time.monotonic() - began)
            progress(f"cluster: {waiting} jobs wait")
            append(house.jobs_file, "".join(map(line.format, range(running, running + waiting))))
            house.wait_accepted(running + waiting, PATIENCE_S)
            house.wait_quiet(PATIENCE_S)
            progress("cluster: rounds")
            rounds = [_round(stand_in, store, ended) for ended in range(1, ROUNDS + 1)]
            progress("cluster: polls")
            polls, reports, each = _polls(stand_in, house.pid)
            status = median([house.command("status") for _ in range(5)])
            mib = memory_of(house.pid)["rss"]
            assert house.daemon is not None
            end(house.daemon, PATIENCE_S)
            progress("cluster: start")
            began = time.monotonic()
            house.start()
            started = time.monotonic() - began
    finally:
        stand_in.close()
    report = Report("cluster", f"{waiting:,} waiting, {running:,} running, {nodes * GPUS:,} GPUs", ("", "value"))
    report.row("jobs released and started, jobs/s", rate)
    report.row("from squeue with an ended job until its end is in the store, median s", median(rounds))
    report.row("the same, longest s", max(rounds))
    report.row(f"calls of squeue in {IDLE_S:g} s", polls)
    report.row(f"calls of sinfo in {IDLE_S:g} s", reports)
    report.row("CPU of the daemon for each call of squeue, s", each)
    report.row("memory of the daemon, MiB", mib)
    report.row("gpujob status, ms", status * 1e3)
    report.row("start of the daemon on this queue, s", started)
    report.figures = {
        "waiting": waiting, "running": running, "gpus": nodes * GPUS, "starts_per_s": rate, "round_s": rounds,
        "seconds": IDLE_S, "polls": polls, "reports": reports, "cpu_s_a_poll": each, "rss_mib": mib,
        "status_ms": status * 1e3, "start_s": started,
    }  # fmt: skip
    return report


def _in_state(store: sqlite3.Connection, state: str) -> int:
    return int(store.execute("SELECT count(*) FROM jobs WHERE state=?", (state,)).fetchone()[0])


def _round(stand_in: StandIn, store: sqlite3.Connection, ended: int) -> float:
    """End a job; return the seconds from the call of `squeue` that tells it until ``ended`` jobs are done in the store."""
    stand_in.end(1)
    wait_until(lambda: _in_state(store, "done") >= ended, "the end is recorded", PATIENCE_S, 0.002)
    return (time.time_ns() - stand_in.calls("squeue")[1]) / 1e9


def _polls(stand_in: StandIn, pid: int) -> tuple[int, int, float]:
    """Return the calls of `squeue` and `sinfo` in IDLE_S seconds, and the daemon's CPU seconds for each call of `squeue`."""
    polls, reports, cpu = stand_in.calls("squeue")[0], stand_in.calls("sinfo")[0], used_by(pid)[0]
    time.sleep(IDLE_S)
    polls = stand_in.calls("squeue")[0] - polls
    return polls, stand_in.calls("sinfo")[0] - reports, (used_by(pid)[0] - cpu) / polls
