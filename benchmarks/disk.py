"""Case disk: the present cost of single disk operations. It shows whether the disk is slow or the scheduler."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from benchmarks.figures import Report, median, p99, progress, spread
from benchmarks.plan import Plan

TIMES = 40
FAST_US, BATCH, FAST_BATCHES, MOST_BATCHES = 40.0, 50, 4, 200
PAUSE_S = 0.01
BLOCK = b"\0" * 4096


def settle(folder: str, spare: str) -> None:
    """Create files in ``folder`` until this is fast, and move them to the folder ``spare``. At most 10,000 files.

    After thousands of files were deleted, ext4 takes up to 750 µs to create a file, until about a thousand new files
    have taken free inodes. The inodes belong to the folder's part of the disk, so each folder must be settled. The
    scheduler creates two files for each job: without this, the first jobs of a run would be slow.
    """
    os.makedirs(spare, exist_ok=True)
    fast = 0
    for batch in range(MOST_BATCHES):
        times = []
        for n in range(BATCH):
            name = os.path.join(folder, f"spare-{batch}.{n}")
            before = time.perf_counter_ns()
            os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            times.append((time.perf_counter_ns() - before) / 1e3)
            os.rename(name, os.path.join(spare, f"{os.path.basename(folder)}-{batch}.{n}"))
        fast = fast + 1 if median(times) < FAST_US else 0
        if fast == FAST_BATCHES:
            return


def disk(plan: Plan) -> Report:
    """Measure the three disk operations that every job needs at least once. Each operation is measured alone."""
    progress("disk")
    folder = os.path.join(plan.folder, "disk")
    os.mkdir(folder)
    settle(folder, os.path.join(plan.folder, "spare"))
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
