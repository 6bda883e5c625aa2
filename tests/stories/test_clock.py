"""A real scheduler while the wall clock is set, the machine sleeps, the daemon is stopped, or the time zone changes."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.gpus.stub import compiled
from tests.stories.harness import Scheduler, alive, wait_for

YEARS = 10 * 365 * 86400
FLAGS = ("-std=gnu11", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror")
DATE = re.compile(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d\d\dZ")


class Clock:
    """The wall clock that a scheduler, its commands and its jobs see; the monotonic clock is not changed."""

    def __init__(self, s: Scheduler) -> None:
        self.file = s.folder / "clock"
        self.set(0)
        library = compiled(Path(__file__).with_name("wall_clock.c"), "wall_clock.so", FLAGS)
        s.environ |= {"LD_PRELOAD": str(library), "WALL_CLOCK_SHIFT": str(self.file)}

    def set(self, shift: float) -> None:
        """Set the wall clock to ``shift`` seconds after the true time."""
        aside = self.file.with_suffix(".new")
        aside.write_text(f"{int(shift)}\n")
        aside.rename(self.file)


@pytest.mark.parametrize("shift", [-3600, YEARS], ids=["hour back", "years ahead"])
@pytest.mark.waits
def test_g01_setting_the_clock_changes_no_duration(scheduler, shift):
    """G01, P6: Setting the clock changes no time limit, no kill_grace and no wait before a retry.

    If the scheduler is then killed and started again, the running job continues.
    """
    s = scheduler(gpus=2, cpu_slots=8, kill_grace="2", assign_retry_wait="3")
    clock = Clock(s)
    s.hold("long")
    s.append(s.line("long", more=";time=1h"))
    deaf = s.folder / "deaf.sh"
    deaf.write_text("#!/bin/sh\ntrap '' TERM\ntouch deaf.runs\nwhile :; do sleep 0.1; done\n")
    deaf.chmod(0o755)
    s.append("0,deaf.sh,,;gpus=0", f"0,{s.folder}/job.py,,{s.folder} limited 0 60;gpus=0;time=2")
    s.start()
    for key in (1, 3):
        s.wait_state(key, "running")
    wait_for((s.folder / "deaf.runs").exists, "the deaf job")
    s.append(s.line("short", code=4, more=";retries=1"))
    wait_for(lambda: s.rows("SELECT 1 FROM jobs WHERE id=4 AND runs_failed>0"), "its retry is due in 3 s")
    clock.set(shift)
    asked = time.monotonic()  # read before the command, which itself takes time
    s.cli("cancel", "2")
    s.append(s.line("after"))
    s.wait_state(2, "cancelled")
    assert time.monotonic() - asked > 1.9, "the grace is as long as it was"
    wait_for(lambda: {s.states().get(n) for n in (3, 4, 5)} <= {"done", "failed"}, f"ends: {s.states()}")
    assert (s.job(2)["signal"], s.job(3)["outcome"], s.job(4)["exit_code"]) == (9, "time_limit", 4)
    first, again = (float(entry[6]) for entry in s.ledger() if entry[:2] == ["start", "short"])
    assert again - first > 2, "and so is the pause before a retry"
    s.kill()
    s.start()  # by two readings of the wall clock, job 1 has now run for ten years
    s.cli("submit", "--cpu", "--wait", "--", "true")
    assert s.job(1)["state"] == "running"
    for words in (["status"], ["jobs"], ["show", "1-5"], ["why", "1-5"]):
        shown = s.cli(*words).stdout
        assert not re.search(r"(?<![\w.-])-\d+(\.\d+)? ?(s|min|h|d)\b", shown), shown
    s.release("long")
    s.wait_ended(6)
    assert s.job(1)["state"] == "done" and [s.starts(k) for k in ("long", "short", "after", "limited")] == [1, 2, 1, 1]


def test_g02_times_are_utc_at_dst_end_and_2038(scheduler):
    """G02: Times are in UTC, and durations are correct, when summer time ends in Berlin and at 2^31 seconds (2038)."""
    s = scheduler(gpus=1, cpu_slots=4)
    clock = Clock(s)
    for moment, stamp in ((1792889999, "2026-10-25T0[01]:"), (2**31 - 2, "2038-01-19T03:14")):
        clock.set(moment - time.time())
        s.start(TZ="Europe/Berlin")
        done = s.cli("submit", "--cpu", "--wait", "--", "sleep", "2")
        job = s.job(int(done.stdout))
        assert re.match(stamp, job["started_at"]) and re.match(stamp, job["finished_at"]), job
        began, ended = (float(job[key][-7:-1]) + 60 * float(job[key][14:16]) for key in ("started_at", "finished_at"))
        assert 1.9 <= (ended - began) % 3600 < 60
        assert s.stop() == 0


def test_g03_after_a_sleep_of_eight_hours_no_job_times_out(scheduler):
    """G03: If all processes are stopped while the clock advances by 8 h, no job times out and no job runs twice."""
    s = scheduler(gpus=2, cpu_slots=4)
    clock = Clock(s)
    for key in ("a", "b"):
        s.hold(key)
    s.append(*(s.line(key, more=";time=1h") for key in ("a", "b")), s.line("c"))
    s.start()
    wait_for(lambda: len(s.ledger()) == 2, "both run")
    all_pids = [s.pid, s.supervisor_pid(), *(int(entry[2]) for entry in s.ledger())]
    for pid in all_pids:
        os.kill(pid, signal.SIGSTOP)
    clock.set(8 * 3600)
    for pid in reversed(all_pids):
        os.kill(pid, signal.SIGCONT)
    s.cli("submit", "--cpu", "--wait", "--", "true")
    assert [s.job(n)["state"] for n in (1, 2, 3)] == ["running", "running", "pending"]
    s.release("a")
    s.release("b")
    s.wait_ended(4)
    events = s.rows("SELECT job, kind, count(*) FROM events WHERE kind IN ('started', 'done', 'failed') GROUP BY 1, 2")
    assert sorted(events) == [(job, kind, 1) for job in (1, 2, 3, 4) for kind in ("done", "started")], events
    assert [s.starts(key) for key in "abc"] == [1, 1, 1]
    s.says("job 1 (job.py) done", times=1)


# Starts a scheduler that writes a dot to `looks` for each check at the safety interval.
COUNTS = """
from scheduler.daemon.problems import Problems
from scheduler.entrypoint import entry
real = Problems.look_at_runner
def counted(problems):
    with open("looks", "a") as out:
        out.write(".")
    return real(problems)
Problems.look_at_runner = counted
entry()
"""


def test_g04_a_scheduler_continued_after_sigstop_carries_out_stored_requests_once(scheduler):
    """G04: While the scheduler is stopped (SIGSTOP), `submit` and verbs that only read work as usual.

    Other requests are stored, and their commands exit with 5. When the scheduler continues, it carries out each stored
    request once.
    """
    s = scheduler(gpus=1, cpu_slots=4, monitor_interval="0.1", state_interval="0.1")
    s.command = [sys.executable, "-c", COUNTS]
    looks = s.folder / "looks"
    s.hold("a")
    s.append(s.line("a"))
    s.start()
    pid = int(wait_for(lambda: [entry[2] for entry in s.ledger()], "it runs")[0])
    s.wait_state(1, "running")  # its pid is recorded after its first line
    s.freeze()
    try:
        assert s.status()["daemon"]["pid"] == s.pid and s.job(1)["state"] == "running"
        for words in (["jobs"], ["show", "1"], ["logs", "1"], ["screens"], ["config", "show"]):
            s.cli(*words)
        s.cli("wait", "1", "--timeout", "0.2", code=124)
        said: dict[str, str] = {}

        def change(*words: str) -> None:
            said[words[0]] = s.cli(*words, code=5).stderr

        changes = [
            threading.Thread(target=change, args=words) for words in (("pause", "0"), ("cancel", "1"), ("hold", "1"))
        ]
        for one in changes:
            one.start()
        assert s.cli("submit", "--cpu", "--", str(s.script), str(s.folder), "sent", "0", "0").stdout == "2\n"
        for number in range(12):
            s.append(s.line(f"line{number}"))
        for one in changes:
            one.join(60)
        told = f"no answer from the scheduler (pid {s.pid}) within 5 s; it carries out the request later"
        assert set(said) == {"pause", "cancel", "hold"}
        for text in said.values():
            assert text.count("\n") == 1 and told in text
        assert alive(pid) and s.states() == {1: "running", 2: "pending"}
        before, went_on = looks.stat().st_size, time.monotonic()
    finally:
        os.kill(s.pid, signal.SIGCONT)
    s.wait_state(1, "cancelled")
    wait_for(lambda: len(s.states()) == 14 and s.states()[2] in ("done", "failed"), "all lines are read")
    assert s.status()["gpus"][0]["state"] == "PAUSED"
    s.cli("resume", "0")
    s.wait_ended(14)
    assert all(s.starts(f"line{number}") == 1 for number in range(12))
    for kind in ("cancelled", "paused"):
        assert s.said().count(f"job 1 (job.py) {kind}") <= 1
    made, spaced = looks.stat().st_size - before, (time.monotonic() - went_on) / 0.1
    assert 0 < made <= spaced + 3, (made, spaced)  # one check, not one for each interval that has passed


def test_g05_the_time_zone_changes_only_log_names_and_the_main_log(scheduler):
    """G05: Stored and shown times are UTC in every zone; log names and the main log use local time."""
    s = scheduler(gpus=1)
    s.append(s.line("a"))
    s.start(TZ="Asia/Tokyo")
    s.wait_ended(1)
    zones = ("UTC", "America/New_York", "Asia/Kolkata", "Nowhere/Land", ":/etc/shadow")
    plain = []
    for zone in zones:
        s.environ["TZ"] = zone
        job = s.cli("show", "1", "--json").stdout
        assert len(DATE.findall(job)) >= 4
        plain.append((job, DATE.findall(s.cli("show", "1").stdout)))
    assert all(one == plain[0] for one in plain)
    log = Path(json.loads(plain[0][0])["log"]).name
    started = json.loads(plain[0][0])["started_at"]
    tokyo = int(started[11:13]) + 9
    named = int(re.fullmatch(r"job_1_\d{8}_(\d\d)\d{4}\.log", log)[1])
    # The log is named just before the start, perhaps in the hour before.
    assert named == tokyo % 24 or (started[14:16] == "00" and named == (tokyo - 1) % 24)
    s.stop()
    s.start(TZ="America/New_York")
    s.append(s.line("b"))
    s.wait_ended(2)
    assert (s.starts("a"), s.starts("b")) == (1, 1)
    hours = [line[11:13] for line in (s.folder / "gpu_scheduler.log").read_text().splitlines()]
    assert len(set(hours)) > 1
