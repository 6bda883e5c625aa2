"""Tests of the journal of a real store: when lines are written, what happens after errors, and no delay of the loop."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scheduler.core.config import Config
from scheduler.core.decision_pass import Plan
from scheduler.core.errors import StoreTrouble, UsageError
from scheduler.core.gpu import ResourceRequest
from scheduler.core.job import Event, Job, JobSpec, JobState, Outcome, Process
from scheduler.core.observations import Now
from scheduler.daemon import journal_writer
from scheduler.daemon.ingest import IngestResult
from scheduler.daemon.journal_writer import JournalWriter, check_apart
from scheduler.daemon.parts import NEVER
from scheduler.store import jobs as rows
from scheduler.store.database import Database
from scheduler.store.deletion import forget
from scheduler.store.journal_file import JournalFile
from scheduler.store.paths import Places

T0 = 1_000_000.0


def now() -> Now:
    return Now(time.time(), time.monotonic())


class Keeping:
    """A store with jobs, and the journal of this store.

    ``said``: logged texts with their levels; ``noted``: the text of each trouble that the journal has reported, and an
    empty text for the end of a trouble.
    """

    def __init__(self, folder: Path) -> None:
        self.db = Database(Places(str(folder / "gpu_scheduler_state.json")))
        self.path = folder / "queue.jsonl"
        self.said: list[tuple[str, int]] = []
        self.noted: list[str] = []
        self.journal = JournalWriter(
            self.db, str(self.path), self._say, lambda: self.noted.append(self.journal.trouble)
        )

    def _say(self, text: str, level: int) -> None:
        self.said.append((text, level))

    def submit(self, *commands: str) -> list[Job]:
        """Add one job for each of these commands, as one pass of the daemon does; return the jobs."""
        with self.db.writing(sync=False) as connection:
            made = [
                rows.insert(
                    connection, JobSpec(source="submit", arguments=(one,)), ResourceRequest(1, 1000), "", (), T0
                )
                for one in commands
            ]
        self.journal.take(Plan(), IngestResult(jobs=made))
        return made

    def change(self, job: Job, kind: str, state: JobState, second: float = 1.0, **changes: Any) -> Job:
        """Change a job's state, with an event of this kind, as one pass does; return the changed job."""
        job = replace(job, state=state, **changes)
        event = Event(job.id, T0 + second, kind)
        with self.db.writing(sync=False) as connection:
            rows.save(connection, [job])
            rows.write_events(connection, [event])
        self.journal.take(Plan(changed={job.id: job}, events=[event]), IngestResult())
        return job

    def run(self, job: Job, code: int = 0) -> Job:
        """Start and end a job, each in its own pass; return the ended job."""
        job = self.change(
            job, "started", JobState.RUNNING, 1, process=Process(77, 1), started_at=T0 + 1, attempt=1, gpus=(0,)
        )
        self.journal.step(now())
        end = JobState.DONE if code == 0 else JobState.FAILED
        kind, how = end.value, Outcome.EXIT
        return self.change(job, kind, end, 2, exit_code=code, finished_at=T0 + 2, outcome=how)

    def steps(self) -> None:
        """Run steps of the journal until all changes are written. Do not wait until a step is due."""
        while self.journal.due() != NEVER:
            self.journal._not_before = 0.0
            self.journal.step(now())

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def seen(self) -> list[tuple[int, str]]:
        return [(line["id"], line["status"]) for line in self.lines()]


@pytest.fixture
def keeping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Keeping]:
    """Yield a `Keeping`. The rewrites of its journal may take a minute each, because the disk may be busy.

    The journal is rewritten when the daemon starts and when it ends.
    """
    monkeypatch.setattr(journal_writer, "BEGIN_S", 60.0)
    monkeypatch.setattr(journal_writer, "END_S", 60.0)
    made = Keeping(tmp_path)
    yield made
    made.journal.end()
    made.journal.close()
    made.db.close()


def test_s1_6_each_status_change_adds_a_line_and_the_end_keeps_the_last_of_each_job(keeping: Keeping) -> None:
    """S1.6: Each change of a job's status adds one line.

    When the daemon ends, the journal is reduced to the last line of each job.
    """
    keeping.journal.begin()
    assert keeping.path.read_bytes() == b"" and keeping.journal.due() == NEVER
    one, two = keeping.submit("a", "b")
    assert keeping.journal.due() == 0.0
    keeping.journal.step(now())
    assert keeping.seen() == [(1, "pending"), (2, "pending")]
    keeping.run(two, 3)
    keeping.change(one, "held", JobState.PENDING)
    keeping.journal.step(now())
    assert keeping.seen() == [(1, "pending"), (2, "pending"), (2, "running"), (2, "failed")]
    assert keeping.lines()[-1]["exit_code"] == 3
    assert [word for _, word in keeping.lines()[-1]["history"]] == ["pending", "running", "failed"]
    size = keeping.path.stat().st_size
    keeping.journal.step(now())
    assert keeping.path.stat().st_size == size and keeping.journal.due() == NEVER
    keeping.journal.end()
    assert keeping.seen() == [(1, "pending"), (2, "failed")] and not keeping.said and not keeping.noted


def test_the_end_of_the_daemon_writes_no_journal_without_a_change(keeping: Keeping) -> None:
    keeping.submit("a")
    keeping.journal.begin()
    before = keeping.path.stat()
    keeping.journal.end()
    assert keeping.path.stat().st_ino == before.st_ino


def test_s1_8_an_incomplete_journal_is_rewritten_from_the_store_at_the_start(keeping: Keeping) -> None:
    """S1.8, S1.12: When the daemon starts, an incomplete or outdated journal is rewritten from the store."""
    jobs = keeping.submit(*"abc")
    keeping.run(jobs[1])
    keeping.journal.begin()
    whole = keeping.path.read_bytes()
    assert keeping.seen() == [(1, "pending"), (2, "completed"), (3, "pending")]
    lines = whole.splitlines(keepends=True)
    for content in (b"", lines[0], whole[:-9], whole.replace(b"completed", b"pending"), whole + lines[0], lines[1]):
        keeping.path.write_bytes(content)
        again = JournalWriter(keeping.db, str(keeping.path), keeping._say, lambda: None)
        keeping.journal.file.close()
        again.begin()
        again.end()
        again.close()
        assert keeping.path.read_bytes() == whole


def test_a_deleted_job_keeps_its_last_line_in_the_journal(keeping: Keeping) -> None:
    """A job that `keep_finished` or `reset` has deleted keeps its last line in the journal."""
    one, two = keeping.submit("a", "b")
    keeping.journal.begin()
    keeping.run(one)
    keeping.journal.step(now())
    with keeping.db.writing() as connection:
        forget(connection, [one.id])
    keeping.run(two)
    keeping.journal.end()
    assert keeping.seen() == [(1, "completed"), (2, "completed")]


def test_a_journal_that_has_grown_too_large_is_rewritten(keeping: Keeping) -> None:
    """A journal that has grown too large is rewritten in slices.

    Changes made during the rewrite are in the new file.
    """
    jobs = keeping.submit(*map(str, range(120)))
    keeping.journal.begin()
    compact = keeping.path.stat().st_size
    old = keeping.path.stat().st_ino
    rounds = 0
    while keeping.path.stat().st_ino == old:
        keeping.journal._not_before = 0.0
        for job in jobs[:60]:
            keeping.change(job, "edited", JobState.PENDING)
        keeping.journal.step(now())
        rounds += 1
        assert rounds < 200
    assert rounds > 1
    keeping.steps()
    found = {line["id"]: line for line in keeping.lines()}
    assert (
        len(keeping.lines()) < 400
        and sorted(found) == [job.id for job in jobs]
        and keeping.path.stat().st_size < 2 * compact + (64 << 10)
    )


def test_a_removed_journal_is_rewritten_at_the_next_change(keeping: Keeping) -> None:
    one, two = keeping.submit("a", "b")
    keeping.journal.begin()
    keeping.path.unlink()
    keeping.run(two)
    keeping.steps()
    assert keeping.seen() == [(1, "pending"), (2, "running"), (2, "completed")]
    assert one.id == 1 and not keeping.said


def test_many_journal_lines_are_written_in_several_steps(keeping: Keeping) -> None:
    """Many new jobs are appended in several passes, so that ten thousand pasted lines do not delay the loop."""
    keeping.journal.begin()
    keeping.submit(*map(str, range(450)))
    numbers = []
    while keeping.journal.due() != NEVER:
        keeping.journal.step(now())
        numbers.append(len(keeping.lines()))
    assert numbers == [200, 400, 450]


def test_pending_journal_lines_are_written_at_the_end(keeping: Keeping, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the daemon ends, it appends the changes that it has not written yet.

    This holds even if no time is left for a rewrite.
    """
    keeping.submit("a")
    keeping.journal.begin()
    keeping.submit(*map(str, range(450)))
    monkeypatch.setattr(journal_writer, "END_S", -1.0)
    keeping.journal.end()
    assert [line["id"] for line in keeping.lines()] == list(range(1, 452))


def test_after_a_failed_pass_the_journal_is_rewritten(keeping: Keeping) -> None:
    """After a failed pass the journal is rewritten from the store.

    The failed pass may have recorded changes in the store that it did not report to the journal (`take`).
    """
    keeping.submit("a")
    keeping.journal.begin()
    keeping.submit("b")
    keeping.journal._owed.clear()
    keeping.journal.distrust()
    keeping.steps()
    assert keeping.seen() == [(1, "pending"), (2, "pending")]


def test_a_journal_error_is_logged_once_and_the_write_is_retried(keeping: Keeping) -> None:
    """If the journal cannot be written, the error is logged once, and reported as a trouble until a write succeeds.

    The write is tried again at growing intervals. No change is lost.
    """
    keeping.path.mkdir()
    one, two = keeping.submit("a", "b")
    before = time.monotonic()
    keeping.journal.begin()
    for wait in (2, 4, 8, 16, 32, 60, 60):
        assert before + wait <= keeping.journal._not_before <= time.monotonic() + wait
        keeping.journal.step(Now(time.time(), before))  # not due yet
        keeping.journal._not_before = 0.0
        before = time.monotonic()
        keeping.journal.step(now())
    keeping.run(two)
    text = f"cannot write the journal {keeping.path}: not a regular file; jobs are not affected"
    assert keeping.said == [(text, 30)] and keeping.noted == [text]
    assert keeping.journal.due() > time.monotonic()
    keeping.path.rmdir()
    keeping.steps()
    assert keeping.seen() == [(1, "pending"), (2, "completed")] and one.id == 1
    assert keeping.said[1:] == [(f"the scheduler can write the journal {keeping.path} again", 20)]
    assert keeping.noted == [text, ""]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), StoreTrouble("the store is damaged")])
def test_journal_lines_that_could_not_be_written_are_appended_later(
    keeping: Keeping, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P4: Lines that could not be appended are appended later.

    If there are too many such lines, the file is rewritten.
    """
    keeping.submit("a")
    keeping.journal.begin()
    node = keeping.path.stat().st_ino

    def fail(_file: JournalFile, _data: bytes, _first: int = 0) -> bool:
        raise error

    for most, same in ((10_000, True), (1, False)):
        monkeypatch.setattr(journal_writer, "MOST_OWED", most)
        with monkeypatch.context() as patch:
            patch.setattr(JournalFile, "append", fail)
            keeping.submit("b", "c", "d")
            keeping.journal._not_before = 0.0
            keeping.journal.step(now())
        assert str(getattr(error, "strerror", None) or error) in keeping.said[-1][0]
        keeping.steps()
        assert (keeping.path.stat().st_ino == node) == same
        assert keeping.said[-1] == (f"the scheduler can write the journal {keeping.path} again", 20)
    assert keeping.seen() == [(number, "pending") for number in range(1, 8)]


def test_an_unreadable_row_is_reported_and_the_journal_stays_unchanged(keeping: Keeping) -> None:
    """If a row of the store cannot be read, this is reported, and the journal's file stays unchanged."""
    keeping.run(*keeping.submit("a"))
    with keeping.db.writing() as connection:
        connection.execute("UPDATE jobs SET state='nonsense'")
    keeping.path.write_text('{"mine": 1}\n')
    keeping.journal.begin()
    assert ": the store is damaged (job 1: " in keeping.said[0][0] and keeping.path.read_text() == '{"mine": 1}\n'


def test_s1_6_the_journal_overwrites_no_other_file(tmp_path: Path) -> None:
    """S1.6: A journal path that names another file of the scheduler is refused; that file is not overwritten."""
    places = Places(str(tmp_path / "state.json"))
    places.make()
    (tmp_path / "link").symlink_to("jobs.txt")
    config = Config(state_file=places.state_file, jobs_file=str(tmp_path / "jobs.txt"), commands_file="")
    cases: list[tuple[str, Callable[[str], bool]]] = [
        ("jobs.txt", lambda text: text.endswith("is also the jobs file; name another file")),
        ("link", lambda text: "is also the jobs file" in text),
        ("state.json", lambda text: "is also the state file" in text),
        ("c.yaml", lambda text: "is also the config" in text),
        (
            f"{os.path.basename(places.state_dir)}/store.db",
            lambda text: "is in the state folder of the scheduler" in text,
        ),
    ]
    for name, expected in cases:
        with pytest.raises(UsageError) as caught:
            check_apart(replace(config, journal=str(tmp_path / name)), str(tmp_path / "c.yaml"), places)
        assert expected(str(caught.value)), str(caught.value)
    for name in ("", str(tmp_path / "queue.jsonl")):
        check_apart(replace(config, journal=name), "", places)
