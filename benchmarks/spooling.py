"""Case ts: `gpujob ts` compared with Debian's `tsp`.

Single calls are compared, and many jobs that a shell loop queues.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.figures import Report, median, p99, progress, spread
from benchmarks.plan import Plan

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 600
CALLS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("queue", ("true",)),
    ("list", ("-l",)),
    ("state", ("-s", "0")),
    ("info", ("-i", "0")),
    ("swap", ("-U", "2-3")),
    ("remove", ("-r",)),
)


class _Program:
    """One of the `ts` programs that are compared, with its own server."""

    def __init__(self, name: str, path: str, folder: Path) -> None:
        self.name, self.path = name, path
        folder.mkdir(mode=0o700)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("TS_", "GPUJOB_"))}
        self.environ = {
            **kept,
            "PYTHONPATH": str(ROOT),
            "TS_SOCKET": str(folder / "socket"),
            "TMPDIR": str(folder),
            "HOME": str(folder),
        }
        self.folder = folder

    def call(self, *words: str) -> float:
        """Call the program and return the seconds it took. Raises CalledProcessError when it fails."""
        began = time.perf_counter()
        subprocess.run(
            [self.path, *words],
            env=self.environ,
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
        )
        return time.perf_counter() - began

    def in_a_row(self, jobs: int) -> tuple[float, float]:
        """Queue jobs in a shell loop. Return two rates in jobs per second: of queueing the jobs, and of the whole run.

        The whole run lasts until all jobs have ended.
        """
        began = time.perf_counter()
        loop = f'i=0; while [ $i -lt {jobs} ]; do "$0" true >/dev/null; i=$((i+1)); done'
        subprocess.run(["sh", "-c", loop, self.path], env=self.environ, cwd=self.folder, check=True, timeout=PATIENCE_S)
        queued = time.perf_counter() - began
        self.call("-w")
        return jobs / queued, jobs / (time.perf_counter() - began)

    def end(self) -> None:
        """End the program's server if it has one."""
        subprocess.run([self.path, "-K"], env=self.environ, stderr=subprocess.DEVNULL, check=False)


def _programs(folder: Path) -> Iterator[_Program]:
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    ours = bin_folder / "ts"
    ours.write_text(f"#!{sys.executable}\nfrom scheduler.entrypoint import entry\n\nentry()\n")
    ours.chmod(0o755)
    yield _Program("gpujob ts", str(ours), folder / "ours")
    tsp = shutil.which("tsp")
    if tsp:
        yield _Program("Debian tsp", tsp, folder / "theirs")


@contextmanager
def _busy_cores() -> Iterator[None]:
    loops = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for one in loops:
            one.kill()
            one.wait()


def spool(plan: Plan) -> Report:
    """Measure `gpujob ts` and, if it is installed, Debian's `tsp`: with idle and with busy processor cores."""
    count, jobs = plan.count(20), plan.count(1000, 20)
    report = Report(
        "ts",
        f"whole calls {count} times, ms; then {jobs} jobs in a row",
        ("call", "p50", "p99", "busy p50", "busy p99"),
    )
    bare = [_timed([sys.executable, "-I", "-c", "pass"]) for _ in range(count)]
    report.row("python -I -c pass", median(bare) * 1e3, p99(bare) * 1e3, "", "")
    rows = []
    for program in _programs(Path(plan.folder)):
        try:
            for words in (("true",), ("-w",), ("-S", "1"), ("sleep", "600"), ("true",), ("true",), ("true",)):
                program.call(*words)
            idle = _calls(program, count)
            with _busy_cores():
                busy = _calls(program, count)
            for name, values in idle.items():
                report.row(
                    f"{program.name} {name}",
                    *(one * 1e3 for one in (median(values), p99(values), median(busy[name]), p99(busy[name]))),
                )
                report.figures[f"{program.name} {name}"] = spread([value * 1e3 for value in values])
                report.figures[f"{program.name} {name}, busy"] = spread([value * 1e3 for value in busy[name]])
            program.call("-K")
            progress(f"ts: {jobs} jobs in a row by {program.name}")
            queued, done = program.in_a_row(jobs)
            rows.append((f"{program.name}: jobs/s queued; to the end", queued, done))
            report.figures[f"{program.name} in a row"] = {"queued_per_s": queued, "done_per_s": done, "jobs": jobs}
        finally:
            program.end()
    for name, queued, done in rows:
        report.row(name, queued, done, "", "")
    return report


def _calls(program: _Program, count: int) -> dict[str, list[float]]:
    took: dict[str, list[float]] = {}
    for n in range(count):
        progress(f"ts: {program.name}, {n} of {count}")
        for name, words in CALLS:
            took.setdefault(name, []).append(program.call(*words))
    return took


def _timed(words: Sequence[str]) -> float:
    began = time.perf_counter()
    subprocess.run(words, check=True)
    return time.perf_counter() - began
