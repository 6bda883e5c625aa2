"""Case peers: gpujob beside other programs that queue jobs, each measured in the same way and with the floor beside it.

Measured are the peers that are installed: `tsp` and `nq` (Debian), `simple_gpu_scheduler` and the module `hyperqueue`
(PyPI). Each runs with its own defaults. None but gpujob syncs a job to the disk before the job starts.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

from benchmarks.disk import settle
from benchmarks.figures import Report, median, p99, progress, spread
from benchmarks.house import House, append, ledger, wait_until
from benchmarks.plan import Plan

Submit = Callable[[Sequence[Sequence[str]]], None]  # hands commands over, in order; returns before they have ended
PATIENCE_S = 300.0


@contextlib.contextmanager
def _gpujob(plan: Plan, slots: int) -> Iterator[Submit]:
    with House(plan.folder, gpus=slots) as house:

        def submit(jobs: Sequence[Sequence[str]]) -> None:
            append(house.jobs_file, "".join(f"0,{job[0]},,{' '.join(job[1:])}\n" for job in jobs))

        yield submit


@contextlib.contextmanager
def _tsp(plan: Plan, slots: int) -> Iterator[Submit]:
    folder = tempfile.mkdtemp(dir=plan.folder)
    settle(folder, os.path.join(plan.folder, "spare"))
    environ = {**os.environ, "TS_SOCKET": os.path.join(folder, "socket"), "TMPDIR": folder}

    def call(*words: str) -> None:
        subprocess.run(["tsp", *words], env=environ, stdout=subprocess.DEVNULL, check=True, timeout=PATIENCE_S)

    def submit(jobs: Sequence[Sequence[str]]) -> None:
        for job in jobs:
            call(*job)

    call("-S", str(slots))
    try:
        yield submit
    finally:
        call("-K")


@contextlib.contextmanager
def _nq(plan: Plan, slots: int) -> Iterator[Submit]:
    folders = [tempfile.mkdtemp(dir=plan.folder) for _ in range(slots)]  # each folder is a queue that runs one job
    for folder in folders:
        settle(folder, os.path.join(plan.folder, "spare"))

    def submit(jobs: Sequence[Sequence[str]]) -> None:
        for number, job in enumerate(jobs):
            environ = {**os.environ, "NQDIR": folders[number % slots]}
            subprocess.run(["nq", "-q", *job], env=environ, check=True, timeout=PATIENCE_S)

    yield submit


@contextlib.contextmanager
def _simple(plan: Plan, slots: int) -> Iterator[Submit]:
    words = ["simple_gpu_scheduler", "--gpus", *map(str, range(slots))]
    with subprocess.Popen(
        words,
        cwd=tempfile.mkdtemp(dir=plan.folder),  # it writes two files for each job
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdin is not None
        pipe = process.stdin

        def submit(jobs: Sequence[Sequence[str]]) -> None:
            pipe.write("".join(f"{' '.join(job)}\n" for job in jobs))
            pipe.flush()

        yield submit
        pipe.close()


@contextlib.contextmanager
def _hyperqueue(plan: Plan, slots: int) -> Iterator[Submit]:
    from hyperqueue import Job, LocalCluster  # type: ignore[import-not-found]
    from hyperqueue.cluster import WorkerConfig  # type: ignore[import-not-found]

    folder = tempfile.mkdtemp(dir=plan.folder)  # it writes the output of each job into two files
    settle(folder, os.path.join(plan.folder, "spare"))
    with LocalCluster() as cluster:
        cluster.start_worker(WorkerConfig(cores=slots))
        client = cluster.client()

        def submit(jobs: Sequence[Sequence[str]]) -> None:
            one = Job(default_workdir=folder)
            for words in jobs:
                one.program(list(words))
            client.submit(one)

        yield submit


PEERS: dict[str, tuple[Callable[[Plan, int], contextlib.AbstractContextManager[Submit]], Callable[[], bool]]] = {
    "gpujob": (_gpujob, lambda: True),
    "tsp": (_tsp, lambda: shutil.which("tsp") is not None),
    "nq": (_nq, lambda: shutil.which("nq") is not None),
    "simple-gpu-scheduler": (_simple, lambda: shutil.which("simple_gpu_scheduler") is not None),
    "HyperQueue": (_hyperqueue, lambda: importlib.util.find_spec("hyperqueue") is not None),
}


def peers(plan: Plan) -> Report:
    """Measure a burst of short jobs, the time from handing a job over to its start, and the gap between two jobs.

    The ratios compare with the floor, a C program that only spawns, which runs beside each measurement. In the burst,
    a higher ratio is better; for start and gap a lower one.
    """
    count, starts, gaps = plan.count(1000), plan.count(50), plan.count(300)
    report = Report(
        "peers",
        f"burst of {count} jobs, 2 slots, median of {plan.repeats}; start of {starts} single jobs; gap between {gaps} jobs, 1 slot",
        ("", "jobs/s", "× floor", "start p50 ms", "p99", "× floor", "gap p50 ms", "p99", "× floor"),
    )
    folder = tempfile.mkdtemp(dir=plan.folder)
    for name, (running, is_installed) in PEERS.items():
        if not is_installed():
            continue
        cells: list[float] = []
        rates: list[float] = []
        ratios: list[float] = []
        with running(plan, 2) as submit:
            for turn in range(plan.repeats):
                progress(f"peers: {name}, burst {turn + 1} of {plan.repeats}")
                path = os.path.join(folder, f"{name}.burst.{turn}")
                floor = count / plan.programs.run_floor(count, 2, f"{path}.floor")
                began = time.monotonic_ns()
                submit([(plan.programs.job, path, str(n)) for n in range(count)])
                ended = max(end for _, _, end in _complete(path, count))
                rates.append(count / ((ended - began) / 1e9))
                ratios.append(rates[-1] / floor)
                time.sleep(1.0)  # what the program does after the last job is not part of the next floor
        cells += [median(rates), median(ratios)]
        progress(f"peers: {name}, start")
        with running(plan, 2) as submit:
            took = [_start(plan, submit, os.path.join(folder, f"{name}.start.{n}")) for n in range(-1, starts)][1:]
        floors = _floor_starts(plan, os.path.join(folder, f"{name}.floor.start"), starts)
        cells += [median(took), p99(took), median(took) / median(floors)]
        progress(f"peers: {name}, gap")
        floor_gaps = os.path.join(folder, f"{name}.floor.gap")
        plan.programs.run_floor(gaps, 1, floor_gaps)
        with running(plan, 1) as submit:
            path = os.path.join(folder, f"{name}.gap")
            submit([(plan.programs.job, path, str(n)) for n in range(gaps)])
            found = gaps_of(_complete(path, gaps))
        cells += [median(found), p99(found), median(found) / median(gaps_of(ledger(floor_gaps)))]
        report.row(name, *cells)
        report.figures[name] = {
            "jobs_per_s": rates, "burst_ratios": ratios, "start_ms": spread(took), "start_ratio": cells[4],
            "gap_ms": spread(found), "gap_ratio": cells[7],
        }  # fmt: skip
    return report


def gaps_of(entries: Sequence[tuple[str, int, int]]) -> list[float]:
    """Return the milliseconds from the end of each job to the start of the next."""
    stamps = sorted(entries, key=lambda entry: entry[1])
    return [(after[1] - before[2]) / 1e6 for before, after in zip(stamps, stamps[1:])]  # noqa: B905, RUF007


def _complete(path: str, count: int) -> list[tuple[str, int, int]]:
    wait_until(lambda: os.path.exists(path) and len(ledger(path)) >= count, f"{count} jobs ended", PATIENCE_S, 0.2)
    return ledger(path)


def _start(plan: Plan, submit: Submit, path: str) -> float:
    time.sleep(0.05)  # so that the program is idle
    began = time.monotonic_ns()
    submit([(plan.programs.job, path, "0")])
    return (_complete(path, 1)[0][1] - began) / 1e6


def _floor_starts(plan: Plan, path: str, count: int) -> list[float]:
    """Return the milliseconds from the append of a line to the first instruction of its job, for the floor."""
    lines = f"{path}.lines"
    open(lines, "w").close()
    floor = subprocess.Popen([plan.programs.floor, "watch", lines], stdin=subprocess.DEVNULL)
    took = []
    try:
        for n in range(-1, count):
            time.sleep(0.05)
            at = append(lines, plan.programs.lines([f"{path}.{n} 0"]))
            took.append((_complete(f"{path}.{n}", 1)[0][1] - at) / 1e6)
    finally:
        floor.kill()
        floor.wait()
    return took[1:]
