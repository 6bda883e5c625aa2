"""Cases idle and edit: a daemon without work, and edits of the state file."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from benchmarks.figures import Report, median, p99, progress, spread
from benchmarks.house import House, append, wait_until
from benchmarks.plan import Plan
from benchmarks.process_figures import memory_of, used_by
from benchmarks.programs import TRUE
from tests.gpus.stub import FakeDriver

WAITING = 10_000


def idle(plan: Plan) -> Report:
    """Measure the processor time, wake-ups and memory of a daemon and its supervisor while no job starts or ends.

    First without waiting jobs and with declared GPUs, then with ``WAITING`` waiting jobs and eight simulated GPUs that
    are read. The queue is paused in the second case.
    """
    span = max(3.0, 30.0 * plan.scale)
    report = Report(
        "idle",
        f"{span:g} s without a start or end",
        ("", "CPU %", "CPU ms", "wake-ups", "RSS MiB", "PSS MiB", "threads"),
    )
    report.figures["seconds"] = span
    waiting = plan.count(WAITING)
    folder = Path(plan.folder, "idle-driver")
    folder.mkdir()
    driver = FakeDriver(folder)
    with driver.together():
        for n in range(8):
            driver.gpu(f"GPU-{n}")
    for name, environ, jobs in (
        ("8 declared GPUs", {}, 0),
        (f"8 GPUs read, {waiting:,} jobs wait", driver.environ(), waiting),
    ):
        with House(plan.folder, gpus=8, environ=environ) as house:
            append(house.jobs_file, f"0,{TRUE},,once\n")  # so that parts that the first job sets up are measured too
            house.wait_ended(1)
            if jobs:
                house.command("queue", "pause")
                append(house.jobs_file, "".join(f"0,{TRUE},,{n}\n" for n in range(jobs)))
                house.wait_accepted(1 + jobs)
            house.wait_quiet()
            progress(f"idle, {name}: {span:g} s")
            used = {pid: used_by(pid) for pid in house.pids}
            time.sleep(span)
            rest = {pid: [b - a for a, b in zip(used[pid], used_by(pid))] for pid in house.pids}  # noqa: B905
            _add_idle(report, name, house, rest, span)
    return report


def _add_idle(report: Report, name: str, house: House, rest: dict[int, list[float]], span: float) -> None:
    total = [0.0] * 6
    figures: dict[str, dict[str, float]] = {}
    for which, pid in (("daemon", house.pid), ("supervisor", house.supervisor)):
        cpu, exact, woken = rest[pid]
        mib = memory_of(pid)
        cells = [100 * (exact or cpu) / span, exact * 1e3, woken, mib["rss"], mib["pss"], mib["threads"]]
        total = [a + b for a, b in zip(total, cells)]  # noqa: B905
        names = ("cpu_percent", "cpu_ms", "wakeups", "rss_mib", "pss_mib", "threads")
        figures[which] = dict(zip(names, cells))  # noqa: B905
    report.row(name, *total[:2], int(total[2]), *total[3:5], int(total[5]))
    report.figures[name] = figures


def edit(plan: Plan) -> Report:
    """Measure how long the daemon takes to obey an edit of the state file, and to write a new version of the file.

    Both times begin with the edit, which replaces the file by a rename. The daemon has obeyed the edit when the edit is
    in the store. Both times are measured with an idle daemon, and again while jobs start and end.
    """
    count = plan.count(100)
    with House(plan.folder, gpus=2) as house, house.reading() as store:
        path, other = house.path("gpu_scheduler_state.json"), house.path("edited.json")
        wait_until(lambda: os.path.exists(path), "state file")
        report = Report("edit", f"{count} edits of paused_gpus", ("ms", "p50", "p99", "worst"))
        for name, churn in (("quiet", 0), ("jobs come and go", 60 * count)):
            append(house.jobs_file, "".join(f"0,{TRUE},,{name} {n};gpus=0\n" for n in range(churn)))
            obeyed, shown = [], []
            for n in range(count):
                progress(f"edit, {name}: {n} of {count}")
                if not churn:
                    house.wait_quiet()
                with open(path, encoding="utf-8") as stream:
                    document = json.load(stream)
                wanted = [] if document["paused_gpus"] else [0]
                with open(other, "w", encoding="utf-8") as stream:
                    json.dump({**document, "paused_gpus": wanted}, stream)
                at = time.monotonic()
                os.rename(other, path)
                wait_until(
                    lambda w=wanted: [r[0] for r in store.execute("SELECT gpu FROM pauses")] == w, "obeyed", 60.0, 5e-4
                )
                obeyed.append((time.monotonic() - at) * 1e3)
                wait_until(lambda r=document["revision"]: _revision(path) > r, "shown", 60.0, 5e-4)  # type: ignore[misc]
                shown.append((time.monotonic() - at) * 1e3)
            for what, values in ((f"{name}: obeyed", obeyed), (f"{name}: shown", shown)):
                report.row(what, median(values), p99(values), max(values))
                report.figures[what] = spread(values)
    return report


def _revision(path: str) -> int:
    with open(path, encoding="utf-8") as stream:
        return int(json.load(stream)["revision"])
