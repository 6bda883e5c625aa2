"""Tests of what `recover` does with a watched file if it can read only a part of the file."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from scheduler.core.identity import identity_of
from scheduler.core.job import JobSpec
from scheduler.intake.jobs_file import LineContext, parse
from scheduler.intake.tail import Follower
from scheduler.recovery.ingest_recovery import look_through, settle_file
from scheduler.store import file_offsets as kept
from scheduler.store.database import Database
from scheduler.store.paths import Places


def identity(path: Path, line: str) -> str:
    """Return the identity of the job on this line of the file."""
    parsed = parse(line, LineContext(str(path.parent), "/home/x", None), "jobs.txt:1")
    assert parsed is not None and isinstance(parsed.spec, JobSpec)
    return identity_of(parsed.spec)


def test_lines_of_known_jobs_after_a_read_error_are_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If `recover` can read only the first lines of a file, the scheduler later runs no line again whose job is known.

    `recover` stores a reading position that fits no file, so the scheduler reads the whole file again. The lines of
    known jobs count as read.
    """
    jobs = tmp_path / "jobs.txt"
    lines = [f"0,a.py,,{'x' * 1000} {number}," for number in range(1000)]
    jobs.write_text("".join(line + "\n" for line in lines))
    looks, look = [0], Follower.look

    def fails(self: Follower, now: float) -> object:
        looks[0] += 1
        if looks[0] > 1:
            raise OSError(errno.EIO, "Input/output error", str(jobs))
        return look(self, now)

    monkeypatch.setattr(Follower, "look", fails)
    looked = look_through(str(jobs), parse, None, "/home/x", False)
    assert looked.trouble and 0 < len(looked.lines) < len(lines)
    known = {identity(jobs, lines[0]), identity(jobs, lines[-1])}
    database = Database(Places(str(tmp_path / "state.json")))
    said: list[str] = []
    try:
        with database.writing() as connection:
            settle_file(connection, str(jobs), looked, known, False, 1.0, said.append)
        mark = kept.mark_of(database.connection, str(jobs))
        assert mark is not None and mark.inode == 1
        counted = kept.counted(database.connection, str(jobs))
        assert known <= counted and identity(jobs, lines[1]) in counted and identity(jobs, lines[-2]) not in counted
        assert any(
            "the scheduler runs its lines, except lines of known jobs and the lines read just now" in text
            for text in said
        )
    finally:
        database.close()
