"""Kills of processes at every named crash point, in three ways.

``once``: a process is killed when it first passes the point; ``again``: the next process is killed as well; ``third``:
a process is killed when it passes the point for the third time. `make test` tests each point in one way, and successive
points in different ways; `make test-long` tests the other two ways. `test_a21_every_crash_point_has_a_test` fails if a
crash point in the source has no test here.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from scheduler.client.client import SchedulerClient
from scheduler.client.send_request import do
from scheduler.core.requests import Cancel
from scheduler.store.migrations import VERSION
from tests.stories.harness import ROOT, Scheduler, alive, wait_for
from tests.stories.pouring import Pouring
from tests.stories.test_great_numbers import multiply
from tests.stories.test_recover import all_goes_on, ends_well, filled, overwrite, recovers, store_of

WAYS = ("once", "again", "third")
each_way = pytest.mark.parametrize("way", [WAYS[0], *(pytest.param(way, marks=pytest.mark.long) for way in WAYS[1:])])


def crossed(points: Sequence[str]) -> pytest.MarkDecorator:
    """Parametrize a test with each combination of a point and a way.

    For each point, `make test` runs only one of the three ways. The other two ways are marked ``long``.
    """
    return pytest.mark.parametrize(
        ("point", "way"),
        [
            pytest.param(point, way, id=f"{point}-{way}", marks=() if n % 3 == k else pytest.mark.long)
            for n, point in enumerate(points)
            for k, way in enumerate(WAYS)
        ],
    )


DAEMON = (
    "ingest.read", "ingest.batch", "ingest.committed", "store.before_commit", "store.committed", "start.chosen",
    "start.committed", "start.sent", "start.running", "finish.seen", "finish.committed", "finish.told", "cancel.marked",
    "cancel.term_sent", "cancel.kill_sent", "retry.scheduled", "state.tmp_written", "state.renamed",
)  # fmt: skip
ADOPTING = ("adopt.found", "adopt.committed")
FENCE = ("fence.taken", "fence.requeued")
SUPERVISOR = (
    "supervisor.before_claim", "supervisor.claimed", "supervisor.spawned", "supervisor.pid_written", "supervisor.before_record",
    "supervisor.recorded",
)  # fmt: skip
SHIM = tuple(name.replace("supervisor", "shim") for name in SUPERVISOR)
RECOVER = ("recover.built", "recover.noted", "recover.aside", "recover.placed")
PRUNE = ("prune.selected", "prune.deleted")  # test_retention.py
AFTERWARDS = ("afterwards.begun", "afterwards.done")  # test_streams.py
SINGLE = ("screen.created", "add.written", "migrate.step")
# Crash points that every start passes.
AT_EACH_START = ("adopt.committed", "store.committed", "state.renamed", "store.before_commit")

# Put before the ledger job of the harness: jobs whose key begins with "deaf" ignore SIGTERM.
DEAF = "import signal, sys\nif sys.argv[2].startswith('deaf'): signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


def test_a21_every_crash_point_has_a_test() -> None:
    """Each crash point in the source has a test, and each point named in the tests is in the source."""
    found = set()
    for path in (ROOT / "scheduler").rglob("*.py"):
        for call in re.findall(r"crash_point\(([^)]*)\)", path.read_text()):
            found |= set(re.findall(r'"([a-z_]+\.[a-z_]+)"', call))
    told = {*DAEMON, *ADOPTING, *FENCE, *SUPERVISOR, *SHIM, *RECOVER, *PRUNE, *AFTERWARDS, *SINGLE}
    assert found == told
    retention = (ROOT / "tests" / "stories" / "test_retention.py").read_text()
    assert all(f'"{name}"' in retention for name in PRUNE)
    streams = (ROOT / "tests" / "stories" / "test_streams.py").read_text()
    assert all(f'"{name}"' in streams for name in AFTERWARDS)


class Lives:
    """Successive daemons ("lives") of one scheduler; each except the last is killed at its crash point."""

    def __init__(self, s: Scheduler, *points: str) -> None:
        self.s, self.points, self.deaths = s, list(points), 0
        self.next()

    def next(self) -> None:
        """Start the next daemon.

        If this daemon has a crash point, do not wait until it is ready: it may be killed before that.
        """
        if self.points:
            self.s.start(ready=False, GPUJOB_CRASH_AT=self.points.pop(0))
        else:
            self.s.start()

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for ``condition``. Whenever a daemon is killed in the meantime, start the next one."""

        def found() -> object:
            code = self.s.process.poll()
            if code is not None:
                assert code == -signal.SIGKILL, self.s.said()[-3000:]
                self.deaths += 1
                self.next()
            return condition()

        wait_for(found, f"{what}\n{self.s.states()}\n{self.s.said()[-3000:]}")


def spelled(point: str, way: str) -> str:
    return f"{point}:3" if way == "third" else point


def second(point: str) -> str:
    """Return the crash point for the next daemon, after the first daemon was killed at ``point``.

    Every start passes the returned crash point.
    """
    return AT_EACH_START[sum(point.encode()) % len(AT_EACH_START)]


PLAIN = {f"k{n}": n for n in range(9)}
DEAFS, FLAKY = ("deaf1", "deaf2", "deaf3"), ("flaky1", "flaky2")


def steps(s: Scheduler, known: int) -> Iterator[tuple[Callable[[], object], str]]:
    """Add and cancel jobs so that each crash point is passed at least three times.

    Between the steps, yield pairs of a condition to wait for and its description. A wait for the start of a job also
    ends if the job is recorded as failed: a lost job is recorded as failed, and may never have run. `judge` checks
    whether the job was allowed to be lost.
    """
    names = list(PLAIN)
    s.append(*(s.line(key, PLAIN[key], 0.02) for key in names[known:5]))
    yield lambda: len(s.states()) >= 5, "the first lines are taken"
    s.append(*(s.line(key, 0, 600) for key in DEAFS), *(s.line(key, 5) + ";retries=3" for key in FLAKY))
    for number, key in enumerate(DEAFS, 6):
        yield lambda key=key, number=number: s.starts(key) or s.states().get(number) == "failed", f"{key} runs"
        asked = s.cli("cancel", str(number), code=None)
        assert asked.returncode in (0, 5), asked.stderr  # carried out, or stored for the next daemon
        yield lambda number=number: s.states()[number] in ("stopping", "cancelled", "failed"), f"{key} is being stopped"
    for number, key in enumerate(names[5:], 11):
        s.append(s.line(key, PLAIN[key], 0.02))
        yield lambda key=key, number=number: s.starts(key) or s.states().get(number) == "failed", f"{key} runs"
    ended = {"done", "failed", "cancelled"}
    yield lambda: len(s.states()) == 14 and set(s.states().values()) <= ended, "all have ended"


def judge(s: Scheduler, *, lost: bool = False) -> None:
    """Assert that the store agrees with the ledger that the jobs wrote. Only with ``lost`` may jobs be lost."""
    started = Counter((entry[1], entry[5]) for entry in s.ledger() if entry[0] == "start")
    assert set(started.values()) <= {1}, started
    rows = s.rows("SELECT spec, state, outcome, exit_code, notes FROM jobs ORDER BY id")
    assert len(rows) == len(PLAIN) + len(DEAFS) + len(FLAKY)
    for spec, state, outcome, code, notes in rows:
        key = json.loads(spec)["arguments"][1]
        runs = sum(1 for name, _ in started if name == key)
        if outcome == "lost":
            assert lost, (key, notes, s.said()[-3000:])
        elif key in DEAFS:
            assert state == "cancelled" and runs == 1, (key, state, runs)
        elif key in FLAKY:
            assert (state, outcome, code, runs) == ("failed", "exit", 5, 4), (key, state, code, runs)
        else:
            assert (outcome, code, runs) == ("exit", PLAIN[key], 1), (key, outcome, code, runs, notes)
    told = s.rows(
        "SELECT job, json_extract(detail, '$.attempt'), count(*) FROM (SELECT * FROM events WHERE detail<>'' LIMIT 1000000)"
        " WHERE json_extract(detail, '$.outcome') IS NOT NULL GROUP BY 1, 2"
    )
    assert {(job, attempt) for job, attempt, _ in told} and {number for *_, number in told} == {1}, told
    wait_for(lambda: all(gpu["allocated"] == 0 for gpu in s.status()["gpus"]), "GPUs free")
    sound(s)


def sound(s: Scheduler) -> None:
    """Check that store and state file are valid, and that no temporary file of a killed process is left."""
    assert s.rows("PRAGMA quick_check") == [("ok",)]
    state_file = s.folder / "gpu_scheduler_state.json"
    wait_for(state_file.exists, "the state file")
    assert json.loads(state_file.read_text())

    def left() -> list[str]:
        found = [str(p) for p in s.folder.rglob("*") if re.search(r"\.new(-\d+)?$|\.tmp$|^packet-", p.name)]
        # A file with the pid of a live process may be in use, or the kernel has reused the pid of a killed process.
        return [name for name in found if not ((pid := re.search(r"\.new-(\d+)$", name)) and alive(int(pid[1])))]

    # A new version of the state file that was not put in place may hold an edit: the first pass after a start deletes it.
    wait_for(lambda: not left(), f"no temporary file is left: {left()}")


def busy(scheduler: Callable[..., Scheduler], gpus: int = 5) -> Scheduler:
    s = scheduler(gpus=gpus, kill_grace="0.2", assign_retry_wait="0.05", state_interval="0.1")
    s.script.write_text(DEAF + s.script.read_text())
    return s


@crossed([*DAEMON, *ADOPTING, *FENCE])
def test_a01_to_a17_each_attempt_runs_once_after_a_kill_of_the_daemon(scheduler, point, way):
    """A01–A17, P1–P7: After a kill of the daemon at any crash point, each line is one job and each attempt runs once.

    The recorded exit codes are true.
    """
    s = busy(scheduler)
    first = list(PLAIN)[:3]
    known = 0
    if point in (*ADOPTING, *FENCE):
        known = len(first)
        s.append(*(s.line(key, PLAIN[key]) for key in first))
        for key in first:
            s.hold(key)
        if point in FENCE:  # three starts that were recorded but never sent
            s.start(GPUJOB_CRASH_AT="start.committed", ready=False)
            assert s.process.wait(30) == -signal.SIGKILL
        else:
            s.start()
            wait_for(lambda: all(map(s.starts, first)), "they run")
            s.kill()
    each_start = point in ("adopt.committed", "fence.requeued") and way == "third"  # passed once per start
    points = [point] * 3 if each_start else [spelled(point, way)] + ([second(point)] if way == "again" else [])
    lives = Lives(s, *points)
    for condition, what in steps(s, known):
        for key in first:
            s.release(key)
        lives.until(condition, what)
    assert lives.deaths >= (2 if way == "again" else 1), f"{point} was not passed"
    judge(s)


@crossed(SUPERVISOR)
def test_b02_no_attempt_runs_twice_after_a_kill_of_the_supervisor(scheduler, point, way):
    """A07, A08, B02: When supervisors are killed, no attempt runs twice.

    The exit codes of all jobs that are not lost are true. With ``again``, the daemon is killed, too.
    """
    s = busy(scheduler)
    s.start(GPUJOB_CRASH_AT=spelled(point, way))
    deaths, supervisor = 0, s.supervisor_pid()

    def found(condition: Callable[[], object]) -> object:
        nonlocal deaths, supervisor
        if deaths < (2 if way == "again" else 1) and not alive(supervisor):
            deaths += 1
            if way == "again":
                s.kill()
                s.start(**({"GPUJOB_CRASH_AT": point} if deaths == 1 else {}))
            else:
                s.stop()
                s.start()
            supervisor = s.supervisor_pid()
        return condition()

    for condition, what in steps(s, 0):
        # A job that this supervisor cannot start is started by the next one.
        wait_for(lambda ask=condition: found(ask), f"{what}\n{s.states()}\n{s.said()[-3000:]}")
    assert deaths, f"{point} was not passed"
    judge(s, lost=True)


@crossed(SHIM)
def test_j10_no_attempt_starts_twice_after_a_kill_of_the_shim(screens, point, way):
    """J10, P1: When shims are killed, no attempt starts twice, and no failed job is shown as done.

    The GPUs become free. ``once``: every shim is killed. ``again``: every shim is killed, and the daemon is killed
    when the first job is no longer pending. ``third``: only the shim that is started third is killed.
    """
    s = screens(gpus=2, max_assign_attempts=2, assign_retry_wait="0.1")
    codes = {1: 0, 2: 0, 3: 5, 4: 7}
    s.append(*(s.line(f"k{n}", code=code, seconds=0.2) for n, code in codes.items()))
    s.start(GPUJOB_CRASH_AT=spelled(point, way))
    if way == "again":
        wait_for(lambda: any(state != "pending" for state in s.states().values()), "a first start")
        s.kill()
        s.start(GPUJOB_CRASH_AT=point)
    s.wait_ended(4)
    s.judge(codes)
    rows = s.rows("SELECT outcome, exit_code, signal FROM jobs ORDER BY id")
    if way == "third":
        right = [row for row, code in zip(rows, codes.values(), strict=True) if row == ("exit", code, None)]
        assert len(right) >= 3, rows
    elif point == "shim.before_claim":
        assert s.ledger() == [] and all(row[0] == "could_not_start" for row in rows), rows
    elif point == "shim.claimed":
        assert s.ledger() == [] and all(row[0] in ("could_not_start", "lost") for row in rows), rows
    elif point == "shim.recorded" and way == "once":
        assert [row[1] for row in rows] == list(codes.values()), rows
    else:  # without its shim the terminal closes, which ends the job if it still runs
        assert all(row[0] in ("signal", "lost", "exit") for row in rows), rows
    wait_for(lambda: all(gpu["allocated"] == 0 for gpu in s.status()["gpus"]), "GPUs free")
    s.wait_no_session()


@each_way
def test_j10_a_job_runs_once_if_the_daemon_dies_before_it_records_the_session(screens, way):
    """J10, P1: If the daemon dies before it records a session, the job runs once, and its exit code is recorded."""
    s = screens(gpus=2)
    s.append(*(s.line(f"k{n}", code=n, seconds=0.3) for n in range(4)))
    lives = {"once": ["screen.created"], "again": ["screen.created", "adopt.found"], "third": ["screen.created"] * 3}
    for point in lives[way]:
        s.start(GPUJOB_CRASH_AT=point, ready=False)
        assert s.process.wait(60) == -signal.SIGKILL
    s.hold("k3")
    s.start()
    s.wait_state(4, "running")
    name = "gpujob_0_unknown_4" if s.job(4)["gpus"] == [0] else "gpujob_1_unknown_4"
    wait_for(lambda: s.session(4).partition(".")[::2] == (str(s.sessions().get(name)), name), "its number is known")
    s.release("k3")
    s.wait_ended(4)
    s.judge({n + 1: n for n in range(4)})
    assert s.rows("SELECT outcome, exit_code FROM jobs ORDER BY id") == [("exit", n) for n in range(4)], s.said()
    assert [s.starts(f"k{n}") for n in range(4)] == [1] * 4
    s.wait_no_session()


@crossed(RECOVER)
def test_e02_a_killed_recover_loses_nothing_when_it_is_repeated(scheduler, point, way):
    """E02: After a kill of `recover` no command uses the store until `recover` runs again; that run loses nothing."""
    s = filled(scheduler(gpus=2))
    s.kill()
    path = store_of(s)
    overwrite(path, 0, os.urandom(3 * 4096))
    log = Path(f"{path}-wal")
    overwrite(log, 0, bytes(32))
    damaged, damaged_log = path.read_bytes(), log.read_bytes()
    # "third": kill at the second file that is set aside; a point that is passed only once is tested in three runs.
    wanted = {"once": [point], "again": [point, "recover.placed"], "third": [point] * 3}[way]
    if (point, way) == ("recover.aside", "third"):
        wanted = ["recover.aside:2"]
    elif (point, way) == ("recover.noted", "third"):  # `recover` passes it only if no note exists
        wanted = ["recover.noted", "recover.aside", "recover.placed"]
    for name in wanted:
        s.environ["GPUJOB_CRASH_AT"] = name
        assert s.cli("recover", code=None).returncode == -signal.SIGKILL
        del s.environ["GPUJOB_CRASH_AT"]
        if name != "recover.placed" or not path.exists():
            assert "gpujob recover" in s.cli("start", "--gpus", "2", code=1).stderr
    assert "gpujob recover" in s.cli("status", code=1).stderr
    recovers(s)
    kept = {p.name.split(".bad-")[1][15:]: p.read_bytes() for p in path.parent.iterdir() if ".bad-" in p.name}
    assert kept[""] == damaged and kept["-wal"] == damaged_log
    assert not any(p.name in ("recovering.json", "store.db.new", "recover.tmp") for p in path.parent.iterdir())
    s.start()
    all_goes_on(s, waiting=False)
    assert "nothing to rebuild" not in s.cli("status").stdout
    ends_well(s, "done bad run")


@pytest.mark.parametrize("way", ["old", "new"])
def test_a18_a_kill_during_a_migration_of_the_store_loses_no_job(scheduler, way):
    """A18: If the scheduler is killed while it migrates an old store, the store stays valid and keeps its old version.

    The next start completes the migration. A copy of the old store is kept, and no job is lost.
    """
    s = scheduler(gpus=1)
    store = s.folder / ".gpujob" / "store.db"
    store.parent.mkdir(mode=0o700)
    if way == "old":
        with sqlite3.connect(store) as connection:
            connection.executescript((ROOT / "tests" / "data" / "store-v1.sql").read_text())
        connection.close()
        store.chmod(0o600)

    def look(path: Path) -> tuple[int, int]:
        there = sqlite3.connect(path)
        try:
            version = there.execute("PRAGMA user_version").fetchone()[0]
            return version, there.execute("SELECT count(*) FROM jobs").fetchone()[0] if version else 0
        finally:
            there.close()

    before = look(store) if way == "old" else (0, 0)
    assert (before[0] == 1 and before[1] > 0) or way == "new"
    for step in range(1, VERSION - before[0] + 1):  # killed at each step, one after the other
        s.start(GPUJOB_CRASH_AT=f"migrate.step:{step}", ready=False)
        assert s.process.wait(30) == -signal.SIGKILL, s.said()
        assert look(store) == before
    s.start()
    assert look(store) == (VERSION, before[1])
    assert way == "new" or look(Path(f"{store}.v1")) == before
    s.append(s.line("a"))
    wait_for(lambda: s.starts("a") == 1, "it works")


@each_way
def test_a04_a_killed_add_leaves_a_complete_line_and_its_repetition_adds_no_job(scheduler, way):
    """A04, P4: A killed `add` leaves a complete line; the same command again creates no second job."""
    s = scheduler(gpus=1)
    s.start()
    words = ("add", str(s.script), "--args", f"{s.folder} a 0 0")
    tries = {"once": 1, "again": 2, "third": 3}[way]
    for _ in range(tries):
        s.environ["GPUJOB_CRASH_AT"] = "add.written"
        assert s.cli(*words, code=None).returncode == -signal.SIGKILL
        del s.environ["GPUJOB_CRASH_AT"]
        if way == "again":
            s.kill()
            s.start()
    s.wait_ended(1)
    assert len(s.jobs_file.read_text().splitlines()) == tries
    s.append(s.line("b"))
    wait_for(lambda: s.starts("b"), "the line after it")
    assert s.starts("a") == 1 and s.job(1)["exit_code"] == 0 and len(s.states()) == 2


@crossed(["store.before_commit", "store.committed"])
def test_a04_a_killed_submit_or_cancel_takes_effect_only_if_it_committed(scheduler, point, way):
    """A04, P4: A killed `submit` or `cancel` takes effect if and only if it committed, with or without a daemon."""
    s = scheduler(gpus=1)
    if way != "again":
        s.start()
    tries = 3 if way == "third" else 1
    for number in range(1, tries + 1):
        s.environ["GPUJOB_CRASH_AT"] = point
        words = ("submit", "--", "python3", str(s.script), str(s.folder), f"a{number}", "4", "0")
        assert s.cli(*words, code=None).returncode == -signal.SIGKILL
        del s.environ["GPUJOB_CRASH_AT"]
    if way == "again":
        s.start()
    s.append(s.line("b"))
    wait_for(lambda: s.starts("b"), "the line after it")
    made = point == "store.committed"
    s.wait_ended(tries + 1 if made else 1)
    assert [s.starts(f"a{number}") for number in range(1, tries + 1)] == [int(made)] * tries
    s.hold("c")
    s.append(s.line("c"))
    wait_for(lambda: s.starts("c"), "it runs")
    number = str(max(s.states()))
    s.environ["GPUJOB_CRASH_AT"] = point
    assert s.cli("cancel", number, code=None).returncode == -signal.SIGKILL
    del s.environ["GPUJOB_CRASH_AT"]
    if made:
        s.wait_state(int(number), "cancelled")
    else:
        s.wait_state(int(number), "running")
        s.release("c")
        s.wait_state(int(number), "done")
    sound(s)


@pytest.mark.smoke
def test_a20_ten_killed_starts_leave_the_running_job_untouched(scheduler):
    """A20: Ten starts, each killed at a crash point, leave the running job untouched and leave no files behind."""
    s = scheduler(gpus=2)
    s.hold("a")
    s.append(s.line("a", 6))
    s.start()
    wait_for(lambda: s.starts("a"), "it runs")
    s.kill()
    files = None
    for point in ("store.before_commit", "adopt.found", "adopt.committed", "state.tmp_written", "state.renamed") * 2:
        s.start(GPUJOB_CRASH_AT=point, ready=False)
        assert s.process.wait(30) == -signal.SIGKILL
        now = sorted(p.name for p in (s.folder / ".gpujob").rglob("*"))
        files = files or now
        assert len(now) <= len(files) + 1, set(now) - set(files)
    s.release("a")
    s.start()
    s.wait_ended(1)
    assert (s.job(1)["exit_code"], s.starts("a")) == (6, 1)
    sound(s)


@each_way
def test_a03_each_line_runs_once_if_the_daemon_is_killed_between_two_batches(scheduler, way):
    """A03, P2: If the daemon is killed between two batches of lines, at the start or later, each line runs once."""
    s = scheduler(gpus=1)
    p = Pouring(s)
    lines = [p.good(n) for n in range(1000)]
    if way == "once":
        s.append(*lines)
    s.start(GPUJOB_CRASH_AT="ingest.batch:2", ready=False)
    if way != "once":
        p.pour(*lines)
    assert s.process.wait(60) == -signal.SIGKILL, s.said()
    if way == "again":
        s.start(GPUJOB_CRASH_AT="store.before_commit:2", ready=False)
        assert s.process.wait(60) == -signal.SIGKILL, s.said()
    s.start()
    s.wait_ended(1000)
    assert sorted(map(int, p.noted())) == list(range(1000)) and len(s.states()) == 1000


def test_a04_the_next_daemon_carries_out_a_request_that_a_killed_one_did_not_answer(scheduler):
    """A04, P3, P4: If the daemon is killed before it answers a verb, the verb exits with 5.

    The next daemon carries out the request.
    """
    s = scheduler(gpus=1)
    s.hold("a")
    s.append(s.line("a"))
    s.start()
    s.wait_state(1, "running")
    s.freeze()  # the requests are stored, but the daemon does not read them
    words = {"cwd": s.folder, "env": s.environ, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    asked = [subprocess.Popen([*s.command, *verb], **words) for verb in (("cancel", "1"), ("queue", "pause"))]
    wait_for(lambda: s.rows("SELECT count(*) FROM requests WHERE code IS NULL") == [(2,)], "they have asked")
    s.kill()
    ((first,),) = s.rows("SELECT min(made_at) FROM requests")
    # A verb waits 5 s: the first verb may give up before the daemon is killed, if the second verb was slow to ask.
    may_be_late = time.time() - first > 2
    for one in asked:
        out, error = one.communicate(timeout=30)
        assert (one.returncode, out, error.count("\n")) == (5, "", 1), (out, error)
        assert "ended before it answered" in error or (may_be_late and "no answer from the scheduler" in error), error
    s.start()
    s.wait_state(1, "cancelled")
    assert s.starts("a") == 1 and s.status()["paused"]


def test_a04_a_verb_whose_daemon_dies_before_the_request_acts_as_without_daemon(scheduler, monkeypatch):
    """A04, P4: A daemon may die after a verb has found it alive, but before the verb stores its request.

    In this case the verb handles the request as it does when no daemon runs.
    """
    s = scheduler(gpus=1)
    s.hold("a")
    s.append(s.line("a"))
    s.start()
    s.wait_state(1, "running")
    alive_now = SchedulerClient.alive

    def killed_once_seen(client: SchedulerClient) -> bool:
        found = alive_now(client)
        s.kill()
        return found

    monkeypatch.setattr(SchedulerClient, "alive", killed_once_seen)
    answer, by_daemon = do(SchedulerClient(str(s.folder / "gpu_scheduler_state.json")), Cancel((1,)))
    monkeypatch.undo()
    assert (answer.code, by_daemon) == (5, False) and "at the next start of the scheduler" in answer.lines[0]
    s.start()
    s.wait_state(1, "cancelled")
    assert s.starts("a") == 1


def test_a16_the_due_time_of_a_retry_survives_a_kill(scheduler):
    """A16: The due time and the number of retries survive a kill of the daemon.

    No retry starts early, and none runs twice.
    """
    s = scheduler(gpus=1, assign_retry_wait="6")
    s.append(s.line("a", 3) + ";retries=1")
    s.start(GPUJOB_CRASH_AT="retry.scheduled", ready=False)
    assert s.process.wait(60) == -signal.SIGKILL
    before = s.rows("SELECT not_before, runs_failed, attempt FROM jobs")
    assert before[0][0] and before[0][1:] == (1, 1)
    for _ in range(2):
        s.start()
        found, starts = s.rows("SELECT not_before, runs_failed, attempt FROM jobs"), s.starts("a")
        assert time.time() >= before[0][0] or (found == before and starts == 1)  # after that time the retry is due
        s.kill()
    s.start()
    s.wait_ended(1)
    first, second = (float(entry[6]) for entry in s.ledger() if entry[0] == "start")
    assert second - first > 4 and s.starts("a") == 2 and s.job(1)["attempt"] == 2


def test_a20_each_start_is_quick_with_many_jobs_in_the_store(scheduler):
    """A20: With 10,000 jobs in the store, a start takes less than 2 s of CPU time; the running job continues."""
    s = scheduler(gpus=1)
    s.append(s.line("template"))
    s.start()
    s.wait_ended(1)
    s.stop()
    multiply(s, 10_000)
    s.hold("a")
    s.append(s.line("a", 6))
    s.start()
    wait_for(lambda: s.starts("a"), "it runs")
    for _ in range(5):
        s.kill()
        s.start()
        fields = Path(f"/proc/{s.pid}/stat").read_text().rsplit(")", 1)[1].split()
        assert (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") < 2.0
    s.release("a")
    s.wait_state(10_001, "failed")
    assert (s.job(10_001)["exit_code"], s.starts("a")) == (6, 1)
