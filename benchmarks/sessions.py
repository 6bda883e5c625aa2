"""Cases screen and readings: the cost of a screen session for each job, and the cost of GPU readings."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from benchmarks.figures import Report, median, p99, progress, spread
from benchmarks.house import House, append, ledger, wait_quiet, wait_until
from benchmarks.plan import Plan
from benchmarks.process_figures import used_by
from scheduler.gpus.nvidia import NvidiaProbe
from tests.gpus.stub import FakeDriver


def screen(plan: Plan) -> Report:
    """Measure the start of a job in screen mode, and for comparison the start of `screen` alone.

    Then measures how long it takes to start many sessions together.
    """
    count, many = plan.count(20), plan.count(100)
    ours: list[float] = []
    floors: list[float] = []
    with House(plan.folder, gpus=2, words=("--screen", "--cpu-slots", str(many))) as house:
        _start(plan, house, "warm", "warm")
        for n in range(count):
            progress(f"screen: {n} of {count}")
            ours.append(_start(plan, house, "ours", f"a{n}"))
            floors.append(_bare(plan, house, f"f{n}"))
        house.wait_ended(count + 1)
        progress(f"screen: {many} at once")
        path = house.path("many.ledger")
        at = append(house.jobs_file, "".join(f"0,{plan.programs.job},,{path} m{n};gpus=0\n" for n in range(many)))
        wait_until(lambda: os.path.exists(path) and len(ledger(path)) >= many, f"{many} sessions", step_s=0.02)
        began = (max(entry[1] for entry in ledger(path)) - at) / 1e9
        house.wait_ended(count + 1 + many)
        over = time.monotonic() - at / 1e9
    report = Report(
        "screen", f"append to the job's first instruction, {count} times; {many} sessions at once", ("", "p50", "p99")
    )
    report.row("gpujob, ms", median(ours), p99(ours))
    report.row("bare screen, ms", median(floors), p99(floors))
    report.row("ratio", median(ours) / median(floors), p99(ours) / p99(floors))
    report.row(f"last of {many} begun / all told ended, s", began, over)
    report.figures = {"ms": spread(ours), "floor_ms": spread(floors), "many_begun_s": began, "many_ended_s": over}
    return report


def _start(plan: Plan, house: House, kind: str, word: str) -> float:
    path = house.path(f"{kind}.ledger")
    before = os.path.getsize(path) if os.path.exists(path) else 0
    at = append(house.jobs_file, plan.programs.lines([f"{path} {word}"]))
    wait_until(lambda: os.path.exists(path) and os.path.getsize(path) > before, f"the job of {word}", step_s=0.02)
    wait_quiet((house.pid,))
    return (ledger(path)[-1][1] - at) / 1e6


def _bare(plan: Plan, house: House, word: str) -> float:
    path = house.path("bare.ledger")
    at = time.monotonic_ns()
    subprocess.run(
        ["screen", "-D", "-m", "-S", f"bench_{os.getpid()}_{word}", plan.programs.job, path, word],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=house.environ, check=False, timeout=60,
    )  # fmt: skip
    return (ledger(path)[-1][1] - at) / 1e6


def readings(plan: Plan) -> Report:
    """Measure the time of one reading of eight simulated GPUs.

    Then measure job starts and the CPU time of an idle daemon, without readings and with readings.
    """
    folder = Path(plan.folder, "driver")
    folder.mkdir(exist_ok=True)
    driver = FakeDriver(folder)
    with driver.together():
        for n in range(8):
            driver.gpu(f"GPU-{n}")
    probe = NvidiaProbe({**os.environ, **driver.environ()})
    took = []
    try:
        probe.first()
        for _ in range(plan.count(500)):
            began = time.perf_counter()
            probe.first()
            took.append((time.perf_counter() - began) * 1e3)
    finally:
        probe.close()
    starts: dict[str, list[float]] = {}
    used = {}
    span = max(5.0, 20.0 * plan.scale)
    for name, environ in (("declared", {}), ("read", driver.environ())):
        with House(plan.folder, gpus=8, environ=environ) as house:
            _start(plan, house, "warm", "warm")
            starts[name] = [_start(plan, house, "ours", f"{n}") for n in range(plan.count(30))]
            house.wait_quiet()
            before = used_by(house.pid)
            time.sleep(span)
            used[name] = (used_by(house.pid)[1] - before[1]) * 1e3
    report = Report("readings", "eight GPUs of a pretended driver", ("ms", "p50", "p99"))
    report.row("one reading", median(took), p99(took))
    for name, values in starts.items():
        report.row(f"start, GPUs {name}", median(values), p99(values))
        report.row(f"CPU in {span:g} s idle, GPUs {name}", used[name], "")
    report.figures = {
        "reading_ms": spread(took),
        "start_ms": {k: spread(v) for k, v in starts.items()},
        "idle_cpu_ms": used,
    }
    return report
