"""Cases start, gap and burst: how long it takes to start jobs, compared with a C loop that has no store."""

from __future__ import annotations

import os
import subprocess
import time

from benchmarks.figures import Report, median, p99, progress, spread
from benchmarks.house import House, append, end, ledger, wait_quiet, wait_until
from benchmarks.plan import Plan

BLOCK = 10


def start(plan: Plan) -> Report:
    """Measure the time from the append of a line to the first instruction of its job.

    An idle daemon is compared with the floor, a minimal job starter in C. First the daemon starts BLOCK jobs, then the
    floor starts BLOCK jobs, and so on in turn, so that a change of the machine's load affects both.
    """
    count = plan.count(50)
    ours: list[float] = []
    floors: list[float] = []
    with House(plan.folder, gpus=2) as house:
        beside = house.path("floor.txt")
        open(beside, "w").close()
        floor = subprocess.Popen([plan.programs.floor, "watch", beside], stdin=subprocess.DEVNULL)
        try:
            _one_start(plan, house, house.jobs_file, "w", "warm", house.pids)  # the first start is slower
            _one_start(plan, house, beside, "fw", "warm", (floor.pid,))
            for i in range(count):
                if i % BLOCK == 0:
                    first, last = i, min(i + BLOCK, count)
                    for n in range(first, last):
                        progress(f"start: {n} of {count}")
                        ours.append(_one_start(plan, house, house.jobs_file, f"a{n}", "ours", house.pids))
                    for n in range(first, last):
                        floors.append(_one_start(plan, house, beside, f"f{n}", "floor", (floor.pid,)))
        finally:
            end(floor)
        house.wait_ended(count + 1)
    report = Report("start", f"append to the job's first instruction, {count} times, idle", ("ms", "p50", "p99"))
    report.row("gpujob", median(ours), p99(ours))
    report.row("C floor", median(floors), p99(floors))
    report.row("ratio", median(ours) / median(floors), p99(ours) / p99(floors))
    report.figures = {"ms": spread(ours), "floor_ms": spread(floors), "ratio": median(ours) / median(floors)}
    return report


def _one_start(plan: Plan, house: House, file: str, word: str, kind: str, pids: tuple[int, ...]) -> float:
    """Append a line. Return the milliseconds from the append to the first instruction of the line's job.

    Returns only when the processes ``pids`` are idle again.
    """
    path = house.path(f"{kind}.ledger")
    before = os.path.getsize(path) if os.path.exists(path) else 0
    at = append(file, plan.programs.lines([f"{path} {word}"]))
    wait_until(lambda: os.path.exists(path) and os.path.getsize(path) > before, f"the job of {word}", step_s=0.02)
    wait_quiet(pids)
    found, began, _ = ledger(path)[-1]
    assert found == word
    return (began - at) / 1e6


def gap(plan: Plan) -> Report:
    """Measure the time from the end of a job to the start of the next job.

    There is one GPU, and each job in the queue needs the whole GPU.
    """
    count = plan.count(100)
    ours: list[float] = []
    floors: list[float] = []
    ratios: list[float] = []
    with House(plan.folder, gpus=1) as house:
        for turn in range(plan.repeats):
            progress(f"gap: {turn + 1} of {plan.repeats}")
            path = house.path(f"floor{turn}.ledger")
            plan.programs.run_floor(count, 1, path)
            beside = gaps(path)
            path = house.path(f"gap{turn}.ledger")
            append(house.jobs_file, plan.programs.lines([f"{path} {turn}.{n}" for n in range(count)]))
            house.wait_ended(count * (turn + 1))
            house.wait_quiet()
            found = gaps(path)
            assert len(found) == len(beside) == count - 1
            ours += found
            floors += beside
            ratios.append(median(found) / median(beside))
    report = Report(
        "gap", f"end of a job to the start of the next, 1 GPU, {plan.repeats} × {count} jobs", ("ms", "p50", "p99")
    )
    report.row("gpujob", median(ours), p99(ours))
    report.row("C floor", median(floors), p99(floors))
    report.row("ratio", median(ratios), p99(ours) / p99(floors))
    report.figures = {"ms": spread(ours), "floor_ms": spread(floors), "ratio": median(ratios), "ratios": ratios}
    return report


def gaps(path: str) -> list[float]:
    """Return the milliseconds from each end to the next start in a ledger."""
    stamps = sorted(ledger(path), key=lambda entry: entry[1])
    return [(after[1] - before[2]) / 1e6 for before, after in zip(stamps, stamps[1:])]  # noqa: B905, RUF007


def burst(plan: Plan) -> Report:
    """Measure jobs per second on two GPUs, from the append of the lines to the end of the last job.

    The jobs exit immediately.
    """
    count = plan.count(1000)
    ours: list[float] = []
    floors: list[float] = []
    with House(plan.folder, gpus=2) as house, house.reading() as store:
        for turn in range(plan.repeats):
            progress(f"burst: {turn + 1} of {plan.repeats}")
            before = plan.programs.run_floor(count, 2, "-")
            clocks = _wall_less_mono()
            at = append(house.jobs_file, plan.programs.lines([f"- {turn}.{n}" for n in range(count)]))
            house.wait_ended(count * (turn + 1), patience_s=180.0)
            last = float(store.execute("SELECT max(finished_at) FROM jobs").fetchone()[0])
            house.wait_quiet()
            after = plan.programs.run_floor(count, 2, "-")
            ours.append(count / (last - clocks - at / 1e9))
            floors.append(count / ((before + after) / 2))
    ratios = [one / other for one, other in zip(ours, floors)]  # noqa: B905
    report = Report("burst", f"{count} jobs that only exit, 2 GPUs, {plan.repeats} times", ("", "jobs/s", "best"))
    report.row("gpujob", median(ours), max(ours))
    report.row("C floor", median(floors), max(floors))
    report.row("ratio", median(ratios), max(ratios))
    report.figures = {"jobs_per_s": ours, "floor_jobs_per_s": floors, "ratio": median(ratios), "ratios": ratios}
    return report


def _wall_less_mono() -> float:
    """Return the seconds to subtract from a wall-clock time to get monotonic time."""
    return time.time() - time.monotonic()
