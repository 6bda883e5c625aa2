"""Runs one soak and judges it. The command line: ``python -m tests.soak --help``."""

from __future__ import annotations

import calendar
import json
import os
import re
import shutil
import signal
import sqlite3
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler.runners.screen import OLD_S
from scheduler.store.database import check_sound
from scheduler.store.paths import Places
from tests.soak.history import History, Row, now
from tests.soak.judge import judge, lost_jobs
from tests.soak.meddler import Meddler
from tests.soak.world import World, reading, wait_for, world
from tests.soak.writers_killers import WRITERS, Given, Killer, Pens, Writer

TMPFS_MIB = 256
MOST_FDS = 5  # the history file, its log and its index are opened some seconds after a start
LOOK_S = 0.5
MOST_MIB = 20
HOUSE = {"store.db", "store.lock", "daemon.lock", "daemon.json", "wakeup", "high", "watched.json", "attempts", "env", "sessions",
         "supervisor.err", "history.db", "history.db-wal", "history.db-shm"}  # fmt: skip


@dataclass
class Result:
    """The result of a soak. ``wrong``: a sentence for each error; ``figures``: name → value."""

    wrong: list[str] = field(default_factory=list)
    figures: dict[str, str] = field(default_factory=dict)

    def table(self) -> str:
        """Return the figures as a Markdown table, as in docs/reliability.md."""
        lines = ["| figure | value |", "|---|---|"]
        return "\n".join(lines + [f"| {name} | {value} |" for name, value in self.figures.items()])


def soak(
    seed: int,
    jobs: int,
    daemon_kills: int,
    supervisor_kills: int,
    seconds: float,
    keep: bool = False,
    talk: bool = False,
) -> Result:
    """Run a soak. Raises AssertionError if the judge finds an error, or if the jobs do not end.

    ``seconds``: the time over which jobs and kills are spread. ``keep``: keep the folder even if there is no error.
    ``talk``: print the progress, and end early at a signal.
    """
    result = Result()
    with world(TMPFS_MIB, shutil.which("screen") is not None, keep) as place:
        given, pens = Given(jobs), Pens()
        killer = Killer(place, given, f"killer {seed}", daemon_kills, supervisor_kills, seconds)
        pause = WRITERS * seconds / jobs
        writers = [Writer(place, given, pens, f"writer {seed} {n}", pause) for n in range(WRITERS)]
        hangs = max(1, round(seconds / 90))
        meddler = Meddler(place, given, pens, f"meddler {seed}", min(1.0, seconds / 100), hangs, seconds)
        place.start("direct")
        wait_for(lambda: place.life.early[0], "the first reading")
        at_rest = place.life.early
        began = time.monotonic()
        helpers = [_Thread(one.run) for one in (*writers, meddler)]
        if talk:
            helpers.append(_Thread(lambda: _talk(place, given, began, meddler)))
            _end_early(given, killer)
        try:
            killer.run()
            wait_for(lambda: given.done or any(one.error for one in helpers), "the last job given in", 600 + seconds)
        finally:
            given.closed = True
            meddler.over.set()
        for one in helpers:
            one.end()
        wait_for(meddler.calm, "nothing is paused")
        _wait_ended(place, meddler, 600 + seconds)
        wall = time.monotonic() - began
        wait_for(lambda: not place.left(), f"no process of a job is left: {place.left()}", 30)
        history = gathered(place, given, meddler, seed)
        result.wrong += meddler.complaints
        result.wrong += badly_said(place, given)
        result.wrong += at_the_end(place, at_rest)
        code = place.stop()
        result.wrong += [] if code == 0 else [f"SIGTERM: exit code {code}"]
        result.wrong += kept_files(place)
        history.save(place.base / "history.json")
        result.wrong += judge(history)
        result.figures = figures(place, given, meddler, history, at_rest, wall, result.wrong)
        if result.wrong:
            raise AssertionError("\n".join([f"seed {seed}", *result.wrong[:40], result.table()]))
    return result


def _end_early(given: Given, killer: Killer) -> None:
    """On Ctrl-C or SIGTERM, request no further jobs and kill no further processes.

    The soak then judges the jobs so far.
    """

    def stop(number: int, _frame: object) -> None:
        print(f"ended early by signal {number}", flush=True)
        given.closed = True
        killer.over.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


class _Thread(threading.Thread):
    """A thread that runs a function. If the function raises an exception, ``error`` is this exception."""

    def __init__(self, run: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self.what, self.error = run, None
        self.start()

    def run(self) -> None:
        try:
            self.what()
        except BaseException as error:
            self.error = error

    def end(self) -> None:
        """Wait until the thread has ended.

        Raises the exception of the thread, if there is one. Raises AssertionError if the thread has not ended after 120
        s.
        """
        self.join(120)
        assert not self.is_alive(), f"{self.what} does not end"
        if self.error is not None:
            raise self.error


def _talk(place: World, given: Given, began: float, meddler: Meddler) -> None:
    while not meddler.over.wait(15):
        kills = Counter(kill.what for kill in place.kills)
        try:
            counts = dict(place.rows("SELECT state, count(*) FROM jobs GROUP BY state"))
        except sqlite3.Error as error:
            counts = {str(error): 1}  # the store is being created, or the disk is full
        print(
            f"{time.monotonic() - began:.0f} s: {given.acknowledged} acknowledged, {counts}, killed {dict(kills)}",
            flush=True,
        )


def _wait_ended(place: World, meddler: Meddler, limit: float) -> None:
    def over() -> bool:
        meddler.logs()  # the logs of the remaining jobs would fill the disk
        meddler.cancel_cut_lines()
        ((open_,),) = place.rows(
            "SELECT EXISTS(SELECT 1 FROM jobs WHERE finished_at IS NULL)"
            " OR EXISTS(SELECT 1 FROM jobs WHERE finished_at IS NOT NULL AND state='stopping')"
        )
        ((read,),) = place.rows("SELECT place FROM files")
        return not open_ and read == place.jobs_file.stat().st_size

    while not over():
        assert limit > 0, "the end of all jobs does not come"
        limit -= LOOK_S
        time.sleep(LOOK_S)


def gathered(place: World, given: Given, meddler: Meddler, seed: int) -> History:
    """Return the history of the soak: the ledger, the store's rows, requests, kills and cancels."""
    ledger = [line.split() for line in place.ledger.read_text().splitlines()]
    shift = now() - time.time()
    rows = [
        Row(id_, json.loads(spec).get("arguments", []), state, outcome, code, number, _at_of(log, shift), notes)
        for id_, spec, state, outcome, code, number, log, notes in place.rows(
            "SELECT id, spec, state, outcome, exit_code, signal, log, notes FROM jobs"
        )
    ]
    for row in rows:
        if row.words and row.words[0] == str(place.job):  # a submitted job: the program is its first word
            del row.words[0]
    refused = [text for (text,) in place.rows("SELECT text FROM refused")]
    return History(seed, given.wishes, ledger, place.lives, place.kills, meddler.cancels, rows, refused)


def _at_of(log: str, shift: float) -> float:
    """Return the time at which the last attempt of a job began, in seconds since boot; 0 if it had no attempt.

    ``log``: the path of the log of this attempt; the name of the log contains the time. ``shift``: the current time in
    seconds since boot minus the current time in seconds since 1970.
    """
    found = re.search(r"_(\d{8}_\d{6})(?:_a\d+)?\.log$", log)
    return calendar.timegm(time.strptime(found[1], "%Y%m%d_%H%M%S")) + shift if found else 0.0


def badly_said(place: World, given: Given) -> list[str]:
    """Return the badly formed error messages that verbs and failed starts of the scheduler printed.

    A well-formed message is one line without a traceback, and names a file on the small disk.
    """
    said = [one for one in given.errors if not one.startswith("echo")]
    said += place.refused_starts
    return [f"badly said: {one}" for one in said if "Traceback" in one or "\n" in one.strip() or "/disk/" not in one]


def at_the_end(place: World, at_rest: tuple[int, int]) -> list[str]:
    """Return the errors of the idle daemon after the soak: descriptors, memory, bookings, output, store."""
    wrong = []
    wait_for(lambda: place.life.early[1], "the first reading of the last life: it may have begun this very moment")
    wait_for(lambda: abs(reading(place.life.pid)[0] - at_rest[0]) <= MOST_FDS or place.process.poll() is not None,
             f"descriptors: {at_rest[0]} at first, now {reading(place.life.pid)[0]}", 20)  # fmt: skip
    place.life.late = reading(place.life.pid)
    grown = (place.life.late[1] - place.life.early[1]) / 1024
    if grown > MOST_MIB:
        wrong.append(f"memory of the last life grew by {grown:.1f} MiB")
    if place.rows("SELECT * FROM holdings"):
        wrong.append("GPUs are still held for processes that are gone")
    status = json.loads(place.cli("status", "--json").stdout)
    wrong += [f"GPU {gpu['index']}: {gpu['allocated']} given out" for gpu in status["gpus"] if gpu["allocated"]]
    said = place.said()
    wrong += [
        f"said: {line}" for line in said.splitlines() if "Traceback" in line or "internal error of gpujob" in line
    ]
    if place.rows("PRAGMA integrity_check") != [("ok",)]:
        wrong.append("the store is damaged")
    return wrong


def kept_files(place: World) -> list[str]:
    """Return an error for each leftover file and each wrong file mode. Raises Damaged for a damaged store."""
    wrong = []
    house = place.disk / ".gpujob"
    names = {path.name for path in house.iterdir()} - HOUSE
    wrong += [f"left in .gpujob: {sorted(names)}"] if names else []
    old = time.time() - (now() - place.life.begun) - OLD_S
    for path in (*(house / "attempts").iterdir(), *(house / "sessions").iterdir()):
        known = path.name == "screenrc" or path.name.replace(".", "").isdigit()
        if not known and (path.suffix not in (".said", ".launch") or path.stat().st_mtime < old):
            wrong.append(f"left there: {path}")
    ours = [
        place.state_file,
        place.disk / "gpu_scheduler.log",
        *house.rglob("*"),
        *(place.disk / "gpu_scheduler_logs").rglob("*"),
    ]
    for path in ours:
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode != (0o700 if path.is_dir() else 0o600):
            wrong.append(f"{path} has mode {mode:o}")
    mine = {"jobs.txt", "jobs.txt~", ".gpujob", "gpu_scheduler_state.json", "gpu_scheduler_logs"}
    there = {path.name for path in place.disk.iterdir() if not path.name.startswith(("gpu_scheduler.log", "gpu_scheduler_state.json.bad-"))}  # fmt: skip
    wrong += [f"left beside the state file: {sorted(there - mine)}"] if there - mine else []
    json.loads(place.state_file.read_text())
    check_sound(Places(str(place.state_file)), pages="integrity_check", records=True)
    return wrong


def figures(place, given, meddler, history, at_rest, wall, wrong) -> dict[str, str]:
    """Return the figures of a soak: name → value."""
    kills = Counter(kill.what for kill in history.kills)
    states = Counter(row.state for row in history.rows)
    modes = Counter(life.mode for life in history.lives)
    seconds = sorted(given.seconds)
    cpu = os.times()
    rss = [life.late[1] / 1024 for life in history.lives if life.late[1]]
    return {
        "seed": str(history.seed),
        "jobs acknowledged": f"{given.acknowledged} ({', '.join(f'{way} {n}' for way, n in sorted(Counter(w.way for w in given.wishes if w.acknowledged).items()))})",
        "time": f"{wall:.0f} s",
        "daemon kills": f"{kills['daemon']} ({len(history.lives)} lives: {', '.join(f'{n} {m}' for m, n in sorted(modes.items()))})",
        "supervisor and shim kills": f"{kills['supervisor']} + {kills['shim']}",
        "meddling": ", ".join(f"{name} {count}" for name, count in sorted(meddler.did.items())) + ("" if place.mounted else ", no disk filled: not root"),
        "endings": ", ".join(f"{state} {count}" for state, count in sorted(states.items())),
        "`lost` after double kills": str(lost_jobs(history)),
        "lines of the ledger": str(len(history.ledger)),
        "lost, doubled, wrong, GPU over 1000 parts": str(len(wrong)),
        "verbs that were refused": f"{sum(given.errors.values())} ({'; '.join(f'{n} × {e[:90]}' for e, n in given.errors.most_common(4))})",
        "starts that were refused": f"{len(place.refused_starts)} ({'; '.join(sorted({one[:90] for one in place.refused_starts})[:3])})",
        "answer of `add` and `submit`": f"median {seconds[len(seconds) // 2] * 1e3:.0f} ms, p99 {seconds[len(seconds) * 99 // 100] * 1e3:.0f} ms",
        "descriptors at rest": f"{at_rest[0]} at first, {place.life.late[0]} at the end",
        "memory": f"first life {at_rest[1] / 1024:.1f} MiB at rest; last life {place.life.early[1] / 1024:.1f} MiB at its start, {place.life.late[1] / 1024:.1f} at its end; most of any {max(rss):.1f}",
        "CPU of jobs, daemons and verbs that were waited for": f"{cpu.children_user + cpu.children_system + cpu.user + cpu.system:.0f} s",
    }  # fmt: skip
