"""Cases paste, idle, edit and cli.

paste: many lines in one append. idle: a daemon without work. edit: edits of the state file. cli: commands.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time

from benchmarks.figures import Report, median, p99, progress, spread
from benchmarks.house import House, append, timed, wait_until
from benchmarks.plan import Plan

TRUE = shutil.which("true") or "/bin/true"
TICK = os.sysconf("SC_CLK_TCK")


class _Asking(threading.Thread):
    """A thread that runs the command `status` repeatedly and records how many seconds each call takes."""

    def __init__(self, house: House) -> None:
        super().__init__(daemon=True)
        self.house, self.took, self.error = house, [], None  # type: ignore[var-annotated]
        self.over = threading.Event()

    def run(self) -> None:
        try:
            while not self.over.is_set():
                self.took.append(self.house.command("status"))
        except Exception as error:
            self.error = error

    def stop(self) -> list[float]:
        """End the thread after its current call. Return the seconds of all calls. Raises the error of a failed call."""
        self.over.set()
        self.join(70.0)
        if self.error:
            raise self.error
        return self.took


def paste(plan: Plan) -> Report:
    """Measure how fast the scheduler accepts many lines, and how long `status` takes during this time.

    All lines are appended with one write. The queue is paused, so that no job starts.
    """
    count = plan.count(10_000)
    with House(plan.folder, gpus=2) as house, house.reading() as store:
        house.command("queue", "pause")
        empty = [house.command("status") for _ in range(10)]
        house.wait_quiet()
        text = "".join(f"0,{TRUE},,{n}\n" for n in range(count))
        asking = _Asking(house)
        progress(f"paste: {count} lines")
        at = append(house.jobs_file, text)
        asking.start()
        wait_until(
            lambda: store.execute("SELECT count(*) FROM jobs").fetchone()[0] >= count,
            f"{count} lines accepted",
            120.0,
        )
        took = (time.monotonic_ns() - at) / 1e9
        during = asking.stop()
        house.wait_quiet()
        after = [house.command("status") for _ in range(10)]
        memory = _memory(house.pid)
    report = Report("paste", f"{count} lines in one append, queue paused", ("", "value", "worst"))
    report.row("all accepted, s", took, "")
    report.row("µs a line", took / count * 1e6, "")
    report.row("status before, ms", median(empty) * 1e3, max(empty) * 1e3)
    report.row(f"status meanwhile ({len(during)} times), ms", median(during) * 1e3, max(during) * 1e3)
    report.row("status after, ms", median(after) * 1e3, max(after) * 1e3)
    report.row("daemon RSS after, MiB", memory["rss"], "")
    report.figures = {
        "lines": count, "accepted_s": took, "us_a_line": took / count * 1e6, "status_before_s": spread(empty),
        "status_meanwhile_s": spread(during), "status_after_s": spread(after), "rss_mib": memory["rss"],
    }  # fmt: skip
    return report


def idle(plan: Plan) -> Report:
    """Measure the processor time, wake-ups and memory of an idle daemon and its supervisor."""
    span = max(3.0, 20.0 * plan.scale)
    with House(plan.folder, gpus=2) as house:
        append(house.jobs_file, f"0,{TRUE},,once\n")  # so that parts that the first job sets up are measured too
        house.wait_ended(1)
        house.wait_quiet()
        progress(f"idle: {span:g} s")
        used = {pid: _used(pid) for pid in house.pids}
        time.sleep(span)
        rest = {pid: [b - a for a, b in zip(used[pid], _used(pid))] for pid in house.pids}  # noqa: B905
        memory = {pid: _memory(pid) for pid in house.pids}
    report = Report(
        "idle", f"{span:g} s without a job", ("", "CPU %", "CPU ms", "wake-ups", "RSS MiB", "PSS MiB", "threads")
    )
    total = [0.0] * 6
    for name, pid in (("daemon", house.pid), ("supervisor", house.supervisor)):
        cpu, exact, woken = rest[pid]
        mib = memory[pid]
        cells = [100 * cpu / span, exact * 1e3, woken, mib["rss"], mib["pss"], mib["threads"]]
        total = [a + b for a, b in zip(total, cells)]  # noqa: B905
        report.row(name, *cells[:2], int(woken), *cells[3:5], int(cells[5]))
        names = ("cpu_percent", "cpu_ms", "wakeups", "rss_mib", "pss_mib", "threads")
        report.figures[name] = dict(zip(names, cells))  # noqa: B905
    report.row("both", *total[:2], int(total[2]), *total[3:5], int(total[5]))
    report.figures["seconds"] = span
    return report


def _used(pid: int) -> tuple[float, float, float]:
    """Return what a process has used so far: CPU seconds from `stat`, CPU seconds from `schedstat`, and its wake-ups.

    The CPU seconds from `schedstat` are more precise; they are 0 if the kernel does not keep them.
    """
    with open(f"/proc/{pid}/stat", "rb") as stream:
        data = stream.read()
    fields = data[data.rindex(b")") + 2 :].split()
    exact = woken = 0.0
    for task in os.listdir(f"/proc/{pid}/task"):
        try:
            with open(f"/proc/{pid}/task/{task}/schedstat", encoding="ascii") as stream:
                exact += int(stream.read().split()[0]) / 1e9
        except OSError:
            exact += 0.0
        with open(f"/proc/{pid}/task/{task}/status", encoding="ascii", errors="replace") as stream:
            woken += sum(int(line.split()[1]) for line in stream if line.startswith("voluntary_ctxt"))
    return (int(fields[11]) + int(fields[12])) / TICK, exact, woken


def _memory(pid: int) -> dict[str, float]:
    found = {}
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as stream:
        for line in stream:
            name = line.split(":")[0].lower()
            if name in ("rss", "pss"):
                found[name] = int(line.split()[1]) / 1024
    found["threads"] = float(len(os.listdir(f"/proc/{pid}/task")))
    return found


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
                )  # type: ignore[misc]
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


def cli(plan: Plan) -> Report:
    """Measure how long commands take, from the start to the end of their process.

    For comparison, also measures a Python interpreter that does nothing.
    """
    count = plan.count(20)
    took: dict[str, list[float]] = {}
    with House(plan.folder, gpus=2) as house:
        house.command("queue", "pause")
        for words in (("submit", "--", TRUE, "warm"), ("add", TRUE, "--args", "warm"), ("status",), ("pause", "0")):
            house.command(*words)  # so that no measured call has to compile modules
        for n in range(count):
            progress(f"cli: {n} of {count}")
            for name, words in (
                ("submit", ("submit", "--", TRUE, str(n))),
                ("add", ("add", TRUE, "--args", str(n))),
                ("status", ("status",)),
                ("pause", ("pause", "0")),
            ):
                house.wait_quiet()
                took.setdefault(name, []).append(house.command(*words))
            bare = [sys.executable, "-I", "-c", "pass"]
            took.setdefault("python -I -c pass", []).append(timed(bare, house.folder, house.environ))
        house.wait_quiet()
        with house.reading() as store:
            queued = store.execute("SELECT count(*) FROM jobs WHERE state='pending'").fetchone()[0]
        assert queued == 2 * count + 2, f"{queued} of {2 * count + 2} jobs wait"
    bare_ms = median(took["python -I -c pass"]) * 1e3
    report = Report("cli", f"whole processes, {count} times", ("ms", "p50", "p99", "beyond python"))
    for name, values in took.items():
        ms = median(values) * 1e3
        report.row(name, ms, p99(values) * 1e3, ms - bare_ms)
        report.figures[name] = spread([value * 1e3 for value in values])
    return report
