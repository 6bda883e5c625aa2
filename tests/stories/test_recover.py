"""Damaged, truncated, missing and old stores: `start` refuses them; after `recover` no job runs twice."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from pathlib import Path

import pytest

from tests.stories.harness import LONG, alive, wait_for

PAGE = 4096
FILLERS = 30


def store_of(s) -> Path:
    return s.folder / ".gpujob" / "store.db"


def filled(s, fillers: int = 0):
    """Start a scheduler with jobs in many states, and return it.

    Job 1 is done, job 2 has failed, job 3 runs on GPU 0, job 4 is held, job 5 waits for GPU 1, which is paused, and job
    6 was submitted and waits. Then follow ``fillers`` more jobs that wait.
    """
    s.hold("run")
    s.append(s.line("done", gpus="0"), s.line("bad", code=3, gpus="0"))
    s.start()
    s.wait_ended(2)
    s.cli("pause", "1")
    s.append(s.line("run", gpus="0"), s.line("wait", gpus="0"), s.line("paused", gpus="1"))
    s.wait_state(3, "running")
    s.wait_state(5, "pending")
    s.cli("submit", "--allowed", "0", "--", "python3", str(s.script), str(s.folder), "submitted", "0", "0")
    s.append(*(s.line(f"f{n}", gpus="0", more="x" * 300) for n in range(fillers)))
    s.wait_state(6 + fillers, "pending")
    wait_for(lambda: s.starts("run"), "it runs")
    s.cli("hold", "4")
    return s


def refuses(s) -> str:
    """Check that `start` exits with 1 and leaves the store unchanged; return the error that it prints.

    Also check that the error is one line that names `gpujob recover`.
    """
    path = store_of(s)
    before = path.read_bytes() if path.exists() else None
    error = s.cli("start", "--gpus", "2", code=1).stderr
    assert "gpujob recover" in error and error.count("\n") == 1, error
    assert (path.read_bytes() if path.exists() else None) == before
    return error


def recovers(s, code: int | None = None) -> str:
    done = s.cli("recover", code=code)
    assert done.returncode in (0, 1) and not done.stderr, done.stderr
    return done.stdout


def nothing_twice(s) -> None:
    keys = [entry[1] for entry in s.ledger() if entry[0] == "start"]
    assert len(keys) == len(set(keys)), keys


def all_goes_on(s, waiting: bool = True) -> None:
    """Check after a rebuild and a start that the jobs and pauses of `filled` have not changed.

    Job 3 runs on its GPU, GPU 1 is paused, and jobs 1 and 2 have their exit codes. With ``waiting``, jobs 4, 5 and 6
    wait, and only job 4 is held.
    """
    status = s.status()
    assert [gpu["allocated"] for gpu in status["gpus"]] == [1.0, 0.0], status["gpus"]
    assert [gpu["paused"] for gpu in status["gpus"]] == [False, True]
    s.wait_state(3, "running")  # in an older store the job is STARTING until it is adopted
    states = s.states()
    assert [states[n] for n in (1, 2, 3)] == ["done", "failed", "running"], states
    assert s.rows("SELECT exit_code FROM jobs WHERE id < 3 ORDER BY id") == [(0,), (3,)]
    if waiting:
        assert [states[n] for n in (4, 5, 6)] == ["pending"] * 3, states
        assert s.rows("SELECT held FROM jobs WHERE id IN (4, 5, 6) ORDER BY id") == [(1,), (0,), (0,)]


def ends_well(s, ran: str = "done bad run wait paused submitted") -> None:
    s.release("run")
    s.cli("resume", "1")
    if s.states().get(4) == "pending":
        s.cli("release", "4")
    wait_for(lambda: set(s.states().values()) <= {"done", "failed", "cancelled", "skipped"}, "all end")
    nothing_twice(s)
    assert {entry[1] for entry in s.ledger() if entry[0] == "start"} >= set(ran.split())


def overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as stream:
        stream.seek(at)
        stream.write(data)


DAMAGES = {
    "e01_head": lambda path: overwrite(path, 0, bytes(100)),
    "e01_first_page": lambda path: overwrite(path, 0, random.Random(1).randbytes(PAGE)),
    "e02_page_5": lambda path: overwrite(path, 4 * PAGE, random.Random(2).randbytes(PAGE)),
    "e02_jobs": lambda path: overwrite(path, 2 * PAGE, random.Random(3).randbytes(PAGE)),
    "e03_half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "e03_nothing": lambda path: os.truncate(path, 0),
    "e01_text": lambda path: path.write_text("this is no store\n" * 100),
    "e03_gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_e01_e02_e03_a_damaged_store_is_refused_and_rebuilt(scheduler, kind):
    """E01 E02 E03: A damaged store is refused and rebuilt; running jobs continue, and nothing runs twice.

    The damaged file is kept unchanged, and no id is assigned twice.
    """
    s = filled(scheduler(gpus=2))
    s.stop()
    path = store_of(s)
    DAMAGES[kind](path)
    bad = path.read_bytes() if path.exists() else None
    refuses(s)
    if kind not in ("e02_page_5",):
        shown = s.cli("jobs", code=1)
        assert "gpujob recover" in shown.stderr and shown.stderr.count("\n") <= 2
    before = sorted(p.name for p in path.parent.iterdir())
    dry = s.cli("recover", "--dry-run", code=None)
    assert "nothing was changed" in dry.stdout and sorted(p.name for p in path.parent.iterdir()) == before
    said = recovers(s)
    kept = [p for p in path.parent.iterdir() if ".bad-" in p.name and not p.name.endswith(("-wal", "-shm"))]
    assert [p.read_bytes() for p in kept] == ([bad] if bad is not None else []), said
    assert all(p.stat().st_mode & 0o777 == 0o600 for p in path.parent.iterdir() if p.is_file())
    lines_lost = "lines need your decision" in said
    s.start()
    all_goes_on(s, waiting=not lines_lost)
    new = s.cli("submit", "--allowed", "0", "--", "true").stdout
    assert int(new.split()[0].strip()) == 7, new
    if lines_lost:
        assert "jobs.txt:4: it is not known whether this line ran" in said
        assert "it is not known whether this line ran" in " ".join(s.cli("status").stdout.split()), "it is still shown"
        ends_well(s, "done bad run")
    else:
        ends_well(s)
    assert len([e for e in s.ledger() if e[0] == "start" and e[1] == "run"]) == 1


def test_recover_of_a_sound_store_changes_nothing(scheduler):
    """`recover` of a sound store reports that there is nothing to rebuild, and changes nothing.

    While a scheduler runs, `recover` is refused with a message that names the scheduler's pid.
    """
    s = filled(scheduler(gpus=2))
    error = s.cli("recover", code=1).stderr
    assert f"(pid {s.pid})" in error and error.count("\n") == 1
    s.stop()
    before = s.rows("SELECT * FROM jobs")
    assert "nothing to rebuild" in recovers(s, 0)
    assert s.rows("SELECT * FROM jobs") == before
    s.start()
    all_goes_on(s)
    ends_well(s)


def pages_of(path: Path) -> int:
    return path.stat().st_size // PAGE


@pytest.mark.long
def test_e02_recover_succeeds_whichever_page_is_overwritten(scheduler):
    """E02: Whichever page is overwritten, `recover` succeeds: nothing runs twice, and the running job keeps its GPU.

    `recover` names each waiting job that is lost.
    """
    s = filled(scheduler(gpus=2), FILLERS)
    s.stop()
    path = store_of(s)
    whole = path.read_bytes()
    assert not Path(f"{path}-wal").exists()
    sound = []
    for page in range(pages_of(path)):
        path.write_bytes(whole)
        overwrite(path, page * PAGE, random.Random(page).randbytes(PAGE))
        done = s.cli("recover", code=None)
        assert not done.stderr, (page, done.stderr)
        if "nothing to rebuild" in done.stdout:
            sound.append(page)
        s.start()
        try:
            all_goes_on(s, waiting=False)
            states = s.states()
            named = done.stdout.count("it is not known whether this line ran")
            waiting = [n for n in range(4, 7 + FILLERS) if states.get(n) == "pending"]
            # Only the rows in the damaged page are lost. `recover` prints their lines, or the id of a submitted job.
            missing = 3 + FILLERS - len(waiting)
            submitted = states.get(6) == "pending" or "no trace found of: job" in done.stdout
            assert submitted and missing <= named + 1, (page, done.stdout, states)
            assert max(states) == 6 + FILLERS, page
            nothing_twice(s)
        finally:
            s.stop()
    path.write_bytes(whole)
    free = s.rows("PRAGMA freelist_count")[0][0]  # a damaged free page loses no data
    assert len(sound) <= free, sound
    s.start()
    ends_well(s, "done bad run")


@pytest.mark.parametrize("quarter", [1, 2, 3])
def test_e03_recover_of_a_truncated_store_keeps_the_rows_before_the_cut(scheduler, quarter):
    """E03: From a truncated store, `recover` keeps the rows before the cut; nothing runs twice.

    `recover` restores the other jobs from attempt records and from the jobs file.
    """
    s = filled(scheduler(gpus=2), FILLERS)
    s.stop()
    path = store_of(s)
    os.truncate(path, path.stat().st_size * quarter // 4 - 100)
    refuses(s)
    said = recovers(s)
    s.start()
    all_goes_on(s, waiting=False)
    assert len(s.states()) + said.count("it is not known whether this line ran") >= 6 + FILLERS - 1, said
    ends_well(s, "done bad run")


def test_e04_recover_without_write_ahead_log_reads_the_attempt_records(scheduler):
    """E04: If the write-ahead log is lost, `recover` finds out from the attempt records which jobs ran.

    `recover` names each line for which it does not know whether the line ran. Such a line runs only if it is appended
    again.
    """
    s = filled(scheduler(gpus=2))
    s.kill()  # the write-ahead log is not copied back into the store
    path = store_of(s)
    for ending in ("-wal", "-shm"):
        os.unlink(f"{path}{ending}")
    refuses(s)
    said = recovers(s, 1)
    assert "jobs.txt:4: it is not known whether this line ran" in said and "jobs.txt:3" not in said
    s.start()
    all_goes_on(s, waiting=False)
    s.append(*(line for line in s.jobs_file.read_text().splitlines() if " wait " in line))
    ends_well(s, "done bad run wait")


def test_e04_a_store_with_a_damaged_write_ahead_log_is_refused_and_rebuilt(scheduler):
    """E04: If the header of the write-ahead log is damaged, `start` refuses the store; `recover` rebuilds it."""
    s = filled(scheduler(gpus=2))
    s.kill()  # the write-ahead log is not copied back into the store
    path = store_of(s)
    overwrite(Path(f"{path}-wal"), 0, bytes(32))
    before = Path(f"{path}-wal").read_bytes()
    refuses(s)
    assert Path(f"{path}-wal").read_bytes() == before
    recovers(s, 1)
    kept = [p for p in path.parent.iterdir() if p.name.endswith("-wal") and ".bad-" in p.name]
    assert [p.read_bytes() for p in kept] == [before]
    s.start()
    all_goes_on(s, waiting=False)
    ends_well(s, "done bad run")


@pytest.mark.smoke
def test_e03_recover_reads_all_jobs_of_an_emptied_store_from_its_write_ahead_log(scheduler):
    """E03: An empty store beside its write-ahead log is refused, and `recover` reads all jobs from the log.

    SQLite would delete the log when it opens the empty file.
    """
    s = filled(scheduler(gpus=2))
    s.kill()  # the write-ahead log is not copied back into the store
    os.truncate(store_of(s), 0)
    refuses(s)
    assert "lines need your decision" not in recovers(s, 0)
    s.start()
    all_goes_on(s)
    ends_well(s)


@pytest.mark.parametrize("records", ["records stay", "records removed"])
def test_e05_no_job_runs_twice_after_an_old_copy_of_the_store_is_put_back(scheduler, records):
    """E05: If an old copy of the store is put back, attempt records show which jobs have ended since the copy was made.

    No job runs twice. If the attempt records are missing, all jobs that had not ended in the old copy are recorded as
    lost, and `recover` names the lines that the old copy does not contain.
    """
    s = scheduler(gpus=1)
    s.append(s.line("a", code=4))
    s.start()
    s.wait_ended(1)
    s.hold("b")
    s.append(s.line("b"), s.line("c"))
    s.wait_state(3, "pending")
    s.stop()
    old = s.folder / "old.db"
    shutil.copy(store_of(s), old)  # job a has failed, b runs, c waits
    s.start()
    s.release("b")
    s.append(s.line("d", code=5), s.line("e"))
    s.wait_ended(5)
    s.stop()
    shutil.copy(old, store_of(s))
    if records == "records removed":
        for path in (s.folder / ".gpujob" / "attempts").iterdir():
            path.unlink()
    error = refuses(s)
    assert "the store is out of date" in error
    assert "gpujob recover" in s.cli("submit", "--", "true", code=1).stderr
    said = recovers(s)
    s.start()
    states = s.states()
    nothing_twice(s)
    if records == "records stay":
        assert states == {1: "failed", 2: "done", 3: "done", 4: "failed", 5: "done"}, said
        assert s.job(4)["exit_code"] == 5 and "lines need your decision" not in said
    else:
        assert states[1] == "failed" and states[2] == states[3] == "failed", (states, said)
        assert [s.job(n)["outcome"] for n in (2, 3)] == ["lost", "lost"]
        assert "jobs.txt:4: it is not known" in said and "jobs.txt:5: it is not known" in said
    new = s.cli("submit", "--", "true").stdout
    assert int(new) == 6
    s.wait_state(6, "done")
    nothing_twice(s)


def test_e18_a_running_job_without_attempt_record_is_adopted(scheduler):
    """E18: A running job whose attempt record is missing is adopted by its pid and start time.

    If it then ends while no daemon runs, its outcome is lost, and it does not run again.
    """
    s = filled(scheduler(gpus=2))
    s.kill()
    (s.folder / ".gpujob" / "attempts" / "3.1").unlink()
    s.start()
    all_goes_on(s)
    pid = s.job(3)["pid"]
    s.kill()
    s.release("run")
    wait_for(lambda: not alive(pid), "its end")
    s.start()
    s.wait_state(3, "failed", "done")
    assert s.job(3)["outcome"] == "lost" and s.starts("run") == 1
    s.wait_state(6, "done")


def test_e18_a_job_known_only_by_its_processes_keeps_its_gpu(scheduler):
    """E18 with E03: If store and attempt record are missing, a job keeps its GPU as long as one of its processes lives.

    The recorded outcome of the job is `lost`.
    """
    s = filled(scheduler(gpus=2))
    s.stop()
    (s.folder / ".gpujob" / "attempts" / "3.1").unlink()
    store_of(s).unlink()
    refuses(s)
    recovers(s, 1)
    s.start()
    assert [gpu["allocated"] for gpu in s.status()["gpus"]] == [1.0, 0.0]
    s.cli("submit", "--allowed", "0", "--gpus", "1", "--", "true")
    assert s.states()[7] == "pending"
    s.release("run")
    s.wait_state(7, "done")
    assert s.starts("run") == 1 and s.job(3)["outcome"] == "lost"


def test_e04_no_job_runs_twice_wherever_the_write_ahead_log_is_cut(scheduler):
    """E04: Wherever the write-ahead log is cut, `start` refuses the store, and after `recover` nothing runs twice."""
    s = filled(scheduler(gpus=2))
    s.cli("submit", "--allowed", "0", "--", "true")  # every cut loses this id at least; .gpujob/high still has it
    s.kill()
    path = store_of(s)
    log = Path(f"{path}-wal")
    whole, whole_log = path.read_bytes(), log.read_bytes()
    used = len(whole_log.rstrip(b"\0"))
    for eighth in range(8):
        for one in (path, log, Path(f"{path}-shm")):
            one.unlink(missing_ok=True)
        path.write_bytes(whole)
        log.write_bytes(whole_log[: used * eighth // 8])
        refuses(s)
        recovers(s)
        s.start()
        all_goes_on(s, waiting=False)
        nothing_twice(s)
        s.kill()
    s.start()
    ends_well(s, "done bad run")


def test_e03_recover_finds_a_jobs_file_that_an_option_of_start_named(scheduler):
    """E03: Without the store, `recover` still finds the jobs file that was named by an option of `start`.

    The old lines of this file do not run again.
    """
    s = scheduler(gpus=1, jobs_file="other.txt")
    s.jobs_file = s.folder / "other.txt"
    s.append(s.line("a"), s.line("b", code=1))
    s.start()
    s.wait_ended(2)
    s.stop()
    store_of(s).unlink()
    for record in (s.folder / ".gpujob" / "attempts").iterdir():
        record.unlink()
    assert "other.txt:1: it is not known whether this line ran" in recovers(s, 1)
    s.append(s.line("c"))
    s.start()
    wait_for(lambda: s.starts("c"), "the new line")
    nothing_twice(s)
    assert max(s.states()) == 3


def test_e03_after_a_rebuild_a_repeated_line_runs_only_if_its_job_failed(scheduler):
    """E03: After a rebuild, a repeated line runs again if its job has failed, and does not run if its job is done."""
    s = scheduler(gpus=1)
    s.append(s.line("good"), s.line("bad", code=1))
    s.start()
    s.wait_ended(2)
    s.stop()
    os.truncate(store_of(s), 0)
    assert "lines need your decision" not in recovers(s)
    s.append(s.line("good"), s.line("bad", code=1))
    s.start()
    s.wait_ended(3)
    wait_for(lambda: "not run again" in s.said(), "the repetition")
    assert (s.starts("good"), s.starts("bad")) == (1, 2)


def test_e03_lines_of_known_jobs_do_not_run_again_when_the_jobs_file_is_back(scheduler):
    """E03: If the jobs file is missing during the rebuild and comes back, lines of known jobs do not run again."""
    s = scheduler(gpus=1)
    s.append(s.line("a"), s.line("b", code=1))
    s.start()
    s.wait_ended(2)
    s.stop()
    store_of(s).unlink()
    text = s.jobs_file.read_text()
    s.jobs_file.unlink()
    assert "once the file can be read again, the scheduler runs its lines, except lines of known jobs" in recovers(s)
    s.start()
    back = s.folder / "back"
    back.write_text(text + s.line("c") + "\n")
    back.rename(s.jobs_file)  # in one step: lines that are appended later would count as new
    wait_for(lambda: s.starts("c"), "the new line")
    nothing_twice(s)


def test_e03_leftover_processes_keep_their_gpu_after_a_rebuild(scheduler):
    """E03, P7: If the store is lost, leftover processes are found by their mark, and their GPU stays allocated."""
    s = scheduler(gpus=1)
    s.hold("left")
    child = f"import os, time\nwhile os.path.exists({str(s.folder / 'hold-left')!r}): time.sleep(0.01)\n"
    (s.folder / "child.py").write_text(child)
    s.start()
    s.cli("submit", "--gpus", "1", "--", "sh", "-c", f"python3 {s.folder}/child.py & exit 0")
    s.wait_state(1, "done")
    wait_for(lambda: s.rows("SELECT 1 FROM holdings"), "a held GPU")
    s.stop()
    os.truncate(store_of(s), 0)
    assert "held by leftover processes" in recovers(s)
    s.append(s.line("next", gpus="0"))
    s.start()
    s.append(s.line("later", gpus="0"))
    s.wait_state(2, "pending")
    assert s.ledger() == []
    s.release("left")
    wait_for(lambda: s.starts("later"), "the GPU is free")
    nothing_twice(s)


def test_e01_screen_job_is_adopted_with_its_session(screens):
    """E01: A job in a screen session is adopted together with its session after a rebuild."""
    s = screens(gpus=1)
    s.hold("a")
    s.append(s.line("a", code=3))
    s.start()
    s.wait_state(1, "running")
    session = wait_for(lambda: s.job(1)["session"], "its session")
    s.stop()
    store_of(s).unlink()
    recovers(s)
    s.start()
    assert (s.job(1)["state"], s.job(1)["session"]) == ("running", session)
    s.release("a")
    s.wait_ended(1)
    assert (s.job(1)["exit_code"], s.starts("a")) == (3, 1)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20 if LONG else 3))
def test_e02_e04_no_job_runs_twice_after_random_damage_and_kills(scheduler, seed):
    """E01 to E05 mixed: After kill -9, random damage and `recover`, no job runs twice and no GPU is overbooked."""
    dice = random.Random(seed)
    s = scheduler(gpus=2)
    path = store_of(s)
    given = 0
    for _ in range(4):
        s.append(*(s.line(f"j{given + n}", code=dice.choice([0, 0, 3]), seconds=dice.choice([0, 0.1, 0.6])) +
                   f";gpus={dice.choice(['0.5', '1'])}" for n in range(6)))  # fmt: skip
        given += 6
        old = path.read_bytes() if path.exists() else b""
        s.start()
        target = min(given, len(s.ledger()) // 2 + dice.randint(1, 6))
        wait_for(lambda t=target: sum(e[0] == "start" for e in s.ledger()) >= t or
                 not {"pending", "running", "starting"} & set(s.states().values()), "some starts")  # fmt: skip
        s.kill()
        log = Path(f"{path}-wal")
        kind = dice.choice(["head", "page", "cut", "log gone", "log cut", "old", "gone"])
        if kind == "head":
            overwrite(path, 0, dice.randbytes(PAGE))
        elif kind == "page":
            overwrite(log, 32 + dice.randrange(20) * (PAGE + 24), dice.randbytes(PAGE))
        elif kind == "cut":
            os.truncate(path, path.stat().st_size // 2)
        elif kind == "log gone":
            log.unlink()
        elif kind == "log cut":
            os.truncate(log, len(log.read_bytes().rstrip(b"\0")) // 2)
        elif kind == "old":
            log.unlink()
            path.write_bytes(old)
        else:
            path.unlink()
        recovers(s)
        nothing_twice(s)
    s.start()
    wait_for(lambda: not {"pending", "running", "starting"} & set(s.states().values()), "all end")
    nothing_twice(s)
    load: dict[str, float] = {}
    for what, _key, _pid, gpus, share, *_ in sorted(s.ledger(), key=lambda entry: float(entry[6])):
        for gpu in gpus.split(","):
            load[gpu] = load.get(gpu, 0.0) + (float(share) if what == "start" else -float(share))
            assert load[gpu] <= 1.0001, s.ledger()


@pytest.mark.parametrize("what", ["e02 a row", "e01 the version"])
def test_e01_e02_a_store_of_valid_pages_with_wrong_contents_is_refused_and_rebuilt(scheduler, what):
    """E01 E02: A store whose pages are valid but whose contents are wrong is refused with one line, and rebuilt."""
    s = filled(scheduler(gpus=2))
    s.stop()
    path = store_of(s)
    if what == "e02 a row":
        connection = sqlite3.connect(path)
        connection.execute("UPDATE jobs SET spec='{' WHERE id=5")
        connection.commit()
        connection.close()
    else:
        overwrite(path, 60, b"\x7f\xff\x01\x02")
    refuses(s)
    said = recovers(s)
    assert ("jobs.txt:5: it is not known whether this line ran" in said) == (what == "e02 a row"), said
    s.start()
    all_goes_on(s, waiting=what != "e02 a row")
    ends_well(s, "done bad run wait")


def test_e02_a_deleted_job_is_not_restored(scheduler):
    """E02, E05: If a user deletes the rows of a job from the store, `start` accepts the store.

    If the store is rebuilt later, the job is not restored.
    """
    s = scheduler(gpus=1)
    s.append(s.line("a"), s.line("b"))
    s.start()
    s.wait_ended(2)
    s.stop()
    connection = sqlite3.connect(store_of(s))
    connection.execute("DELETE FROM jobs WHERE id=1")
    connection.execute("DELETE FROM events WHERE job=1")
    connection.commit()
    connection.close()
    s.start()
    s.stop()
    overwrite(store_of(s), 5 * PAGE, random.Random(5).randbytes(PAGE))  # damages the table of events
    refuses(s)
    assert "lines need your decision" not in recovers(s, 1)
    s.append(s.line("c"))
    s.start()
    s.wait_state(3, "done")
    assert s.states() == {2: "done", 3: "done"}
    nothing_twice(s)


@pytest.mark.parametrize("kind", ["none", "e01_text", "e03_gone", "e03_half"])
def test_p4_the_id_of_the_newest_deleted_job_is_not_reused(scheduler, kind):
    """P4 E01 E03: The id of the newest deleted job is not assigned again: neither after `reset` nor after a rebuild."""
    s = scheduler(gpus=1)
    s.append(s.line("a"), s.line("b"), s.line("c"))
    s.start()
    s.wait_ended(3)
    assert "3 " in s.cli("reset").stdout and s.states() == {}
    s.stop()
    if kind != "none":
        DAMAGES[kind](store_of(s))
        recovers(s)
    s.start()
    assert s.cli("submit", "--", "true").stdout.split()[0] == "4"
    nothing_twice(s)


@pytest.mark.parametrize("kind", ["e01_text", "e03_gone"])
def test_s4_3_ids_of_ts_are_not_reused_after_a_rebuild(spooler, kind):
    """S4.3 E01 E03: Ids of `ts` jobs are not assigned again after a rebuild. (Only after `ts -K` ids start at 0.)"""
    s = spooler()
    for number in range(3):
        assert s.add("true") == number
        s.ts("-w", str(number))
    s.ts("-C")
    assert s.add("true") == 3
    s.ts("-w", "3")
    s.ts("-r", "3")
    s.kill()
    DAMAGES[kind](Path(s.server.places.store))
    assert "gpujob recover" in s.run("true").stderr
    s.gpujob("recover", code=None)
    assert s.add("true") == 4
    assert s.ts("-w", "4") == ""
