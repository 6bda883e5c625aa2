"""The verb `demo`: runs the example jobs with a scheduler in a temporary folder, and shows a table and a chart."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from typing import TYPE_CHECKING

import scheduler
from scheduler.client.client import SchedulerClient
from scheduler.client.overview import Overview
from scheduler.core.errors import NoGpuData, SchedulerError
from scheduler.core.job import Job
from scheduler.core.job_text import how_it_ended
from scheduler.gpus.nvidia import NvidiaProbe
from scheduler.system.forked_command import need_own_process
from scheduler.system.own_process import own_command, start_own
from scheduler.system.waiting import wait_until
from scheduler.views import render

if TYPE_CHECKING:
    from rich.table import Table

LIMIT_S = 55.0
LOOK_S = 0.2
END_S = 10.0
WIDTH = 60


def demo(*, keep: bool = False) -> int:
    """Run the example jobs. Return 0 if all jobs ended as expected, else 1. ``keep``: do not delete the folder."""
    need_own_process()
    folder = tempfile.mkdtemp(prefix="gpujob-demo-")
    try:
        return _run(folder)
    finally:
        if keep:
            print(f"folder kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _gpus() -> dict[str, object]:
    probe = NvidiaProbe(os.environ)
    try:
        found = [gpu for gpu in probe.first().gpus if not gpu.mig and not gpu.profile]
    except NoGpuData:
        print("gpujob: no GPU found; the demo simulates two GPUs", file=sys.stderr)
        return {"gpus": 2, "gpu_interval": 0, "share_bookings": "false"}  # these GPUs do not exist
    finally:
        probe.close()
    return {"gpu_ids": ",".join(str(gpu.ordinal) for gpu in found[:8])}


def _examples(folder: str) -> None:
    package = os.path.dirname(os.path.abspath(scheduler.__file__))
    shutil.copytree(os.path.join(package, "examples"), os.path.join(folder, "scheduler", "examples"))
    for source, target in (("jobs.example.txt", "jobs.txt"), ("llm_config.json", "llm_config.json")):
        places = (os.path.join(package, "examples", source), os.path.join(os.path.dirname(package), source))
        found = next((path for path in places if os.path.isfile(path)), None)
        if found is None:
            raise SchedulerError(
                f"cannot find {source}: it is missing from this installation", do="install gpujob again"
            )
        shutil.copy(found, os.path.join(folder, target))


class _Daemon:
    """The daemon of the demo, a child of this process."""

    def __init__(self, pid: int) -> None:
        self.pid, self._over = pid, False

    def over(self) -> bool:
        """Return whether the daemon has ended."""
        try:
            self._over = self._over or os.waitpid(self.pid, os.WNOHANG)[0] == self.pid
        except ChildProcessError:  # SIGCHLD is ignored in this process, so the kernel has reaped the daemon
            self._over = True
        return self._over

    def end(self) -> None:
        """Send SIGTERM to the daemon and wait until it has ended, at most `END_S` seconds."""
        if not self.over():
            os.kill(self.pid, signal.SIGTERM)
            wait_until(self.over, END_S, LOOK_S)


def _run(folder: str) -> int:
    _examples(folder)
    state_file = os.path.join(folder, "gpu_scheduler_state.json")
    root = os.path.dirname(os.path.dirname(os.path.abspath(scheduler.__file__)))
    environ = {k: v for k, v in os.environ.items() if not k.startswith("GPUJOB_")}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environ.get("PYTHONPATH")]))
    words = own_command("start", {**_gpus(), "drain": True, "cpu_slots": 2, "python": sys.executable})
    print(f"$ gpujob start {' '.join(words[3:])}      (in {folder}, with jobs.example.txt as jobs.txt)\n")
    output = os.path.join(folder, "daemon.out")
    with open(output, "wb") as stream:
        daemon = _Daemon(start_own(words, environ, files={1: stream.fileno(), 2: stream.fileno()}, folder=folder))
    client = SchedulerClient(state_file)
    try:
        _watch(client, daemon, time.monotonic() + LIMIT_S)
    finally:
        daemon.end()
    view = client.overview()
    if not view.jobs:
        with open(output, encoding="utf-8", errors="replace") as text:
            print(text.read(), file=sys.stderr)
        raise SchedulerError("cannot run the scheduler", do="see its output above")
    print("\n".join(_summary(view)))
    expected = all(job.state.ended and (job.succeeded or job.exit_code == 3) for job in view.jobs)
    return 0 if expected and not view.refused else 1


def _watch(client: SchedulerClient, daemon: _Daemon, until: float) -> None:
    """Show the jobs until the daemon ends, or until ``until`` (monotonic seconds).

    On a terminal a table is redrawn in place; elsewhere each change is printed as a line.
    """
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if console.is_terminal:
        with Live(console=console, auto_refresh=False, transient=True) as live:
            while not daemon.over() and time.monotonic() < until:
                live.update(_table(client.overview()), refresh=True)
                time.sleep(LOOK_S)
        return
    seen: dict[int, str] = {}
    while True:
        over = daemon.over() or time.monotonic() >= until
        for job in sorted(client.overview().jobs, key=lambda job: job.id):
            state = f"{job.state.value} on GPU {render.gpus_text(job)}" if job.gpus else job.state.value
            if seen.get(job.id) != state:
                seen[job.id] = state
                print(f"job {job.id} {job.spec.shown_name}: {state}", flush=True)
        if over:
            return
        time.sleep(LOOK_S)


def _table(view: Overview) -> Table:
    from rich.table import Table

    table = Table(title=f"{render.counts_text(view.counts)}", title_justify="left", box=None, pad_edge=False)
    for head in ("ID", "STATE", "NAME", "NEED", "GPU", "TIME", "WHY IT WAITS"):
        table.add_column(head, no_wrap=head != "WHY IT WAITS")
    colours = {"running": "green", "failed": "red", "done": "dim", "pending": "yellow"}
    now = time.time()
    for job in sorted(view.jobs, key=lambda job: job.id):
        reason = view.reasons.get(job.id)
        how = f" ({how_it_ended(job)})" if job.state.ended else ""
        table.add_row(
            str(job.id), job.state.value + how, job.spec.shown_name, str(job.need), render.gpus_text(job),
            render.run_time(job, now), reason.sentence if reason else "",
            style=colours.get(job.state.value, ""),
        )  # fmt: skip
    return table


def _summary(view: Overview) -> list[str]:
    jobs = sorted(view.jobs, key=lambda job: job.id)
    rows = [
        (job.id, job.spec.shown_name, job.priority, job.need, render.gpus_text(job), _seconds(job),
         f"{job.state.value} ({how_it_ended(job)})" if job.outcome else job.state.value)
        for job in jobs
    ]  # fmt: skip
    lines = ["", *render.table(("ID", "NAME", "PRIORITY", "NEED", "GPU", "RAN", "ENDED"), rows), "", *_gantt(jobs)]
    failed = [job for job in jobs if job.failure]
    for job in failed:
        lines.append(f"job {job.id} failed on purpose; its hint: {job.failure.hint if job.failure else ''}")
    return lines


def _seconds(job: Job) -> str:
    if job.started_at is None or job.finished_at is None:
        return "-"
    return f"{job.finished_at - job.started_at:.1f} s"


def _gantt(jobs: list[Job]) -> list[str]:
    """Return a chart of the runs: a row per job and GPU, from the job's start to its end. Empty if no job ran."""
    ran = [job for job in jobs if job.started_at is not None and job.finished_at is not None and job.gpus]
    if not ran:
        return []
    begin = min(job.started_at or 0.0 for job in ran)
    span = max(0.1, max(job.finished_at or 0.0 for job in ran) - begin)
    lines = []
    for gpu in sorted({gpu for job in ran for gpu in job.gpus}):
        for job in sorted((j for j in ran if gpu in j.gpus), key=lambda j: j.started_at or 0.0):
            left = int(((job.started_at or 0.0) - begin) / span * WIDTH)
            length = max(1, round(((job.finished_at or 0.0) - (job.started_at or 0.0)) / span * WIDTH))
            mark = "x" if not job.succeeded else "#"
            lines.append(
                f"GPU {gpu}  |{' ' * left}{mark * length}{' ' * (WIDTH - left - length)}|  job {job.id} ({job.need})"
            )
    return [*lines, f"       0 s{' ' * (WIDTH - 8)}{span:.0f} s", ""]
