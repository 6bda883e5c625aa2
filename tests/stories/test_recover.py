"""A store that is damaged, cut, gone or old: refused untouched, rebuilt from what is left, nothing runs twice."""

from __future__ import annotations

import os
import random
import shutil
import signal
from pathlib import Path

import pytest

from tests.stories.harness import alive, wait_for

PAGE = 4096
FILLERS = 30


def store_of(s) -> Path:
    return s.folder / ".gpujob" / "store.db"


def filled(s, fillers: int = 0):
    """Jobs in every state: done (1), failed (2), running on GPU 0 (3), waiting for it (4), for the paused GPU 1 (5),
    submitted and waiting (6), and then ``fillers`` more that wait.
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
    return s


def refuses(s) -> str:
    """`start` says one line that names the way out, with exit code 1, and leaves the store as it is."""
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
    """After the rebuild: the running job is adopted with its GPU, the ended ones have their true codes."""
    status = s.status()
    assert [gpu["allocated"] for gpu in status["gpus"]] == [1.0, 0.0], status["gpus"]
    assert [gpu["paused"] for gpu in status["gpus"]] == [False, True]
    states = s.states()
    assert [states[n] for n in (1, 2, 3)] == ["done", "failed", "running"], states
    assert (s.job(1)["exit_code"], s.job(2)["exit_code"]) == (0, 3)
    if waiting:
        assert [states[n] for n in (4, 5, 6)] == ["pending"] * 3, states


def ends_well(s, ran: str = "done bad run wait paused submitted") -> None:
    s.release("run")
    s.cli("resume", "1")
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
def test_e01_e02_e03_damaged_is_refused_and_rebuilt(scheduler, kind):
    """E01 E02 E03: running jobs go on, the damaged file is kept whole, nothing runs twice, ids are not given anew."""
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
    lines_lost = "lines to decide about" in said
    s.start()
    all_goes_on(s, waiting=not lines_lost)
    new = s.cli("submit", "--allowed", "0", "--", "true").stdout
    assert int(new.split()[0].strip()) == 7, new
    if lines_lost:
        assert "jobs.txt:4: not known any more whether it ran" in said
        assert any("not known any more" in r for r in s.cli("status").stdout.splitlines())
        ends_well(s, "done bad run")
    else:
        ends_well(s)
    assert len([e for e in s.ledger() if e[0] == "start" and e[1] == "run"]) == 1


def test_recover_of_a_sound_store_changes_nothing(scheduler):
    """Healthy: said so; while a scheduler runs it is refused, naming the pid."""
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
