"""Case disk: the present cost of single disk operations. It shows whether the disk is slow or the scheduler."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from benchmarks.figures import Report, median, p99, progress, spread
from benchmarks.plan import Plan

TIMES = 40
PAUSE_S = 0.01
BLOCK = b"\0" * 4096


def disk(plan: Plan) -> Report:
    """Measure the three disk operations that every job needs at least once. Each operation is measured alone.

    After thousands of files were removed from an ext4 file system, creating a file on it is many times slower for about
    a minute.
    """
    progress("disk")
    folder = os.path.join(plan.folder, "disk")
    os.mkdir(folder)
    fd = os.open(os.path.join(folder, "log"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def make(n: int) -> None:
        os.close(os.open(os.path.join(folder, str(n)), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))

    def sync(n: int) -> None:
        os.pwrite(fd, BLOCK, n * len(BLOCK))
        os.fdatasync(fd)

    try:
        found = {"make a file": _times(make), "grow a file, sync": _times(sync), "write in place, sync": _times(sync)}
    finally:
        os.close(fd)
    report = Report("disk", f"each alone, {TIMES} times", ("µs", "p50", "p99"))
    for name, values in found.items():
        report.row(name, median(values), p99(values))
        report.figures[name.replace(",", "").replace(" ", "_") + "_us"] = spread(values)
    return report


def _times(work: Callable[[int], None]) -> list[float]:
    took = []
    for n in range(TIMES):
        time.sleep(PAUSE_S)
        before = time.perf_counter_ns()
        work(n)
        took.append((time.perf_counter_ns() - before) / 1e3)
    return took
