"""Case slow-disk: how long a pass of the daemon takes on a slow disk, with many waiting jobs and an open web page.

The daemon runs with a library that delays each of its synced writes by ``DELAY_S``, and records when the daemon begins
and ends to wait for events (slow_sync.c). A pass is the time between two waits. Commands and the page run without this
library.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figures import Report, median, p99, progress, spread
from benchmarks.house import House, Stuck, append, end
from benchmarks.page import Page
from benchmarks.plan import Plan
from benchmarks.programs import build_library
from benchmarks.queued import SLEEP

DELAY_S = 0.1
SPAN_S = 60.0
RUN_S = (
    0.3  # how long each job runs, less than a thousandth longer: digits are appended, so that no two lines are equal
)
LOOK_S = 0.25  # between two requests of the web page's client


def slow_disk(plan: Plan) -> Report:
    """Measure the passes while jobs start and end, lines, commands and edits arrive, and a client loads the page.

    A pass counts without the delays of its syncs.
    """
    count = plan.count(1_000_000 if plan.million else 100_000)
    span = max(5.0, SPAN_S * plan.scale)
    report = Report(
        "slow-disk",
        f"{count:,} jobs wait, 2 run, page open, each sync of the daemon takes {DELAY_S * 1e3:g} ms longer, {span:g} s",
        ("", "value"),
    )
    library = build_library(plan.folder, "slow_sync")
    slow = os.path.join(plan.folder, "slow-sync")  # while this folder exists, the disk is slow
    environ = {"LD_PRELOAD": library, "SLOW_SYNC": slow, "SLOW_SYNC_US": f"{DELAY_S * 1e6:.0f}"}
    with House(plan.folder, gpus=2, environ=environ) as house:
        for name in environ:  # the commands and the page run without the library
            del house.environ[name]
        house.command("queue", "pause")
        progress(f"slow-disk: {count} lines")
        append(house.jobs_file, "".join(f"0,{SLEEP},,{RUN_S}000{n:07d}\n" for n in range(count)))
        house.wait_accepted(count)
        house.wait_quiet(1800.0)
        page = Page(house)
        try:
            with _client(page) as loads:
                os.mkdir(slow)
                house.command("queue", "resume")
                changes = _make_changes(house, count, span)
                os.rename(slow, f"{slow}.ended")
        finally:
            end(page.process)
        passes = passes_of(Path(f"{slow}.ended", str(house.pid)).read_text(encoding="ascii"))
    if not any(synced for _, synced in passes):
        raise Stuck("no sync of the daemon was recorded")
    beyond = [max(0.0, took - synced * DELAY_S) * 1e3 for took, synced in passes]
    report.row("passes", len(passes))
    report.row("syncs in them", sum(synced for _, synced in passes))
    report.row("commands, edits and appends", changes)
    report.row("answers of the page", len(loads))
    report.row("slowest answer of the page, ms", max(loads) * 1e3)
    report.row("pass beyond the injected delays, p50, ms", median(beyond))
    report.row("the same, p99, ms", p99(beyond))
    report.row("the same, longest, ms", max(beyond))
    report.figures = {
        "jobs": count, "delay_s": DELAY_S, "seconds": span, "changes": changes, "beyond_ms": spread(beyond),
        "page_s": spread(loads),
    }  # fmt: skip
    return report


def passes_of(record: str) -> list[tuple[float, int]]:
    """Return (seconds, number of syncs) of each pass, from the record that slow_sync.c writes.

    A pass lasts from the end of a wait for events until the begin of the next wait.
    """
    passes: list[tuple[float, int]] = []
    began, synced = 0, 0
    for line in record.splitlines():
        what, at = line.split()
        if what == "s":
            synced += 1
        elif what == "e":
            began, synced = int(at), 0
        elif began:
            passes.append(((int(at) - began) / 1e9, synced))
    return passes


@contextlib.contextmanager
def _client(page: Page) -> Iterator[list[float]]:
    """Load the page every ``LOOK_S`` seconds during a with block. Yield the seconds that each answer took.

    Raises Stuck at the end of the block if the page has not answered each request with status 200.
    """
    over = threading.Event()
    took: list[float] = []
    failures: list[str] = []

    def ask() -> None:
        head = {"Authorization": f"Bearer {page.token}", "Accept": "text/html"}
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", page.port, timeout=60)) as connection:
            while not (failures or over.wait(LOOK_S)):
                began = time.monotonic()
                try:
                    connection.request("GET", "/", headers=head)
                    answer = connection.getresponse()
                    answer.read()
                except (OSError, http.client.HTTPException) as error:
                    failures.append(repr(error))
                else:
                    took.append(time.monotonic() - began)
                    if answer.status != 200:
                        failures.append(f"status {answer.status}")

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    try:
        yield took
    finally:
        over.set()
        asking.join(60.0)
    if failures or not took:
        raise Stuck(f"the page did not answer: {''.join(failures)}")


def _make_changes(house: House, count: int, span: float) -> int:
    """Append lines, run commands and edit the state file for ``span`` seconds; return the number of these changes."""
    state, other = house.path("gpu_scheduler_state.json"), house.path("edited.json")
    until = time.monotonic() + span
    number = 0
    while time.monotonic() < until:
        progress(f"slow-disk: {until - time.monotonic():.0f} s left")
        last = str(count - number)
        match number % 8:
            case 0:
                append(house.jobs_file, "".join(f"0,{SLEEP},,{RUN_S}000{number:03d}{n:03d}1\n" for n in range(100)))
            case 1:
                house.command("status")
            case 2:
                house.command("first", last)
            case 3:
                house.command("cancel", last)
            case 4:
                house.command("edit", last, "--priority", "3")
            case 5:
                house.command("submit", "--cpu", "--", SLEEP, "0.01")
            case 6:
                house.command("hold", last)
            case _:
                with open(state, encoding="utf-8") as stream:
                    document = json.load(stream)
                with open(other, "w", encoding="utf-8") as stream:
                    json.dump({**document, "paused_gpus": [] if document["paused_gpus"] else [0]}, stream)
                os.rename(other, state)
        number += 1
    return number
