"""Writes the journal (setting `journal`): appends the jobs that a pass changed, and rewrites the file when needed.

The journal is made only from the store, after a commit. So no job waits for the journal, and a rewrite repairs a
damaged journal.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Generator, Iterator

from scheduler.core.backoff import Backoff
from scheduler.core.config import OPTIONS, Config
from scheduler.core.decision_pass import Plan
from scheduler.core.errors import StoreTrouble, UsageError
from scheduler.core.job import Job
from scheduler.core.journal import SHOWN, Who, is_beginning, line_of, record_of, torn_id
from scheduler.core.observations import Now
from scheduler.core.units import utc
from scheduler.daemon.ingest import IngestResult
from scheduler.daemon.parts import NEVER
from scheduler.store import jobs as rows
from scheduler.store.database import Database
from scheduler.store.journal_file import JournalFile, holds_records
from scheduler.store.paths import Places

A_TURN = 200  # lines appended in one step: about 10 ms
A_PAGE = 50  # jobs written in one step of a rewrite
MOST_OWED = 10_000  # changed jobs to remember while the file cannot be written; more need a rewrite
SLICE_S = 0.005
BETWEEN_S = 0.02  # between two slices of a rewrite: leaves four fifths of the time to the loop
BEGIN_S = 0.5  # for a rewrite at the start (about 10,000 jobs); the rest is done in slices
END_S = 2.0  # for a rewrite at the end; the rest is left to the next start
AGAIN_S, LONGEST_AGAIN_S = 2.0, 60.0  # back-off after an error


class JournalWriter:
    """Writes the journal of a running scheduler.

    An error is logged once, and `status` shows it while it lasts. It delays no job.

    ``say`` logs a text at a level. ``note`` is called whenever the text returned by `troubles` has changed.
    """

    def __init__(self, db: Database, path: str, say: Callable[[str, int], None], note: Callable[[], None]) -> None:
        self.db, self.path, self.say, self.note = db, path, say, note
        self.file = JournalFile(path, self._is_ours, self._is_torn)
        self.trouble = ""
        self._whole = True  # the file cannot be relied on and must be rewritten
        self._owed: set[int] = set()  # ids of changed jobs, not appended yet
        self._new: set[int] = set()  # those of ``_owed`` that have no line yet
        self._work: Generator[None, None, None] | None = None
        self._position = -1  # the current rewrite has written the jobs up to this id; -1: none
        self._late: set[int] = set()  # those jobs that have changed since they were written
        self._not_before = 0.0
        self._again = Backoff(AGAIN_S, LONGEST_AGAIN_S)

    def begin(self) -> None:
        """Rewrite the journal when the daemon starts, with all jobs of the store."""
        self._run(BEGIN_S)

    def take(self, plan: Plan, gathered: IngestResult) -> None:
        """Note the jobs that a recorded pass has changed. The next `step` appends these jobs."""
        self._new.update(job.id for job in gathered.jobs)
        self._owed |= self._new
        self._owed.update(event.job for event in (*gathered.events, *plan.events) if event.kind in SHOWN)

    def distrust(self) -> None:
        """Make the next step rewrite the whole journal.

        Called when a pass may have been committed without a call of `take`.
        """
        self._whole = True
        self._drop_work()

    def due(self) -> float:
        """Return the monotonic time of the next step; ``NEVER`` if nothing is to be written."""
        return self._not_before if self._busy else NEVER

    def step(self, now: Now) -> None:
        """Append the changed jobs, and continue a rewrite if one is needed. Takes at most a few milliseconds."""
        if self._busy and now.mono >= self._not_before:
            self._try(SLICE_S)

    def end(self) -> None:
        """Rewrite the journal when the daemon ends, so that it has one line per job, and sync the file to disk.

        If this takes longer than ``END_S`` seconds, the rewrite is left to the next start.
        """
        self.note = lambda: None  # the daemon ends: problems are no longer recorded
        self._run(END_S)
        self._drop_work()

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def troubles(self) -> list[str]:
        """Return a sentence if the journal cannot be written, else an empty list."""
        return [self.trouble] if self.trouble else []

    # -- writing ------------------------------------------------------------------------------------------

    @property
    def _busy(self) -> bool:
        return bool(self._owed or self._whole or self._work is not None or self.file.grown)

    def _run(self, limit_s: float) -> None:
        """Append all changed jobs, then rewrite the file if needed (at most ``limit_s`` seconds). Stop at an error."""
        while self._owed and not (self._whole or self.trouble):
            self._try(0.0)  # first, because the rewrite may take too long
        if self._whole or self.file.appended:
            self.distrust()
            self._try(limit_s)

    def _try(self, limit_s: float) -> None:
        now = time.monotonic()
        try:
            self._append()
            self._rewrite(now + limit_s)
        except (OSError, StoreTrouble, sqlite3.Error) as error:
            self._failed(error)
            return
        for text, level in self.file.told:
            self.say(text, level)
        self.file.told.clear()
        self._not_before = time.monotonic() + BETWEEN_S if self._work is not None else 0.0
        if self._work is None and not (self._whole or self.file.grown):
            self._well()

    def _append(self) -> None:
        some = sorted(self._owed)[:A_TURN]
        if some and not self._whole:
            first = self._lines_of([job for job in some if job in self._new])
            if self.file.append(first + self._lines_of([job for job in some if job not in self._new]), len(first)):
                self._late.update(job for job in some if job <= self._position)
                self._owed.difference_update(some)
                self._new.difference_update(some)
            else:
                self.distrust()
        if self._whole:  # the rewrite includes the changed jobs
            self._late.update(job for job in self._owed if job <= self._position)
            self._owed.clear()
            self._new.clear()

    def _rewrite(self, until: float) -> None:
        if self._work is None:
            if not (self._whole or self.file.grown):
                return
            self._position = -1
            self._late.clear()
            self._work = self.file.write_new_file(self._pages(), lambda: self._lines_of(sorted(self._late)))
        for _ in self._work:
            if time.monotonic() >= until:
                return
        self._drop_work()
        self._whole = False

    def _pages(self) -> Iterator[bytes]:
        while page := rows.page(self.db.connection, self._position, A_PAGE):
            self._position = page[-1].id
            yield b"".join(map(self._line, page))
        while len(self._late) > A_TURN:
            some = sorted(self._late)[:A_PAGE]
            self._late.difference_update(some)
            yield self._lines_of(some)

    def _lines_of(self, jobs: list[int]) -> bytes:
        found = (rows.get(self.db.connection, job) for job in jobs)
        return b"".join(self._line(job) for job in found if job is not None)

    def _line(self, job: Job) -> bytes:
        return line_of(record_of(job, rows.moments_of(self.db.connection, job.id)))

    def _is_ours(self, who: Who) -> bool:
        accepted = rows.accepted_at(self.db.connection, who[0])
        # Earlier versions of gpujob sometimes wrote this time 1 ms too early.
        return accepted is not None and who[1] in (utc(accepted), utc(accepted - 0.001))

    def _is_torn(self, torn: bytes) -> bool:
        number = torn_id(torn)
        if number is None:
            return is_beginning(torn, None)
        job = rows.get(self.db.connection, number)
        return job is not None and is_beginning(torn, job)

    def _drop_work(self) -> None:
        if self._work is not None:
            self._work.close()
        self._work = None
        self._position = -1
        self._late.clear()

    # -- trouble ------------------------------------------------------------------------------------------

    def _failed(self, error: Exception) -> None:
        self._drop_work()
        if len(self._owed) > MOST_OWED:
            self._whole = True
            self._owed.clear()
            self._new.clear()
        self._not_before = time.monotonic() + self._again.next()
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        text = f"cannot write the journal {self.path}: {why}; jobs are not affected"
        if text != self.trouble:
            self.trouble = text
            self.say(text, 30)
            self.note()

    def _well(self) -> None:
        self._again.reset()
        if self.trouble:
            self.trouble = ""
            self.say(f"the scheduler can write the journal {self.path} again", 20)
            self.note()


def check_apart(config: Config, config_file: str, places: Places) -> None:
    """Raise UsageError if the journal cannot be written at the path in the setting `journal`.

    The path must not be the path of another file of this scheduler, and must not be in the state folder. If a file
    exists at the path, it must be a journal.
    """
    if not config.journal:
        return
    path = os.path.realpath(config.journal)
    others = {name: getattr(config, name) for name in OPTIONS if OPTIONS[name].metadata["path"]}
    others = {name: other for name, other in others.items() if name not in ("journal", "log_dir")}
    for name, other in {**others, "config": config_file}.items():
        if other and os.path.realpath(other) == path:
            raise UsageError(f"journal: {config.journal} is also the {name.replace('_', ' ')}", do="name another file")
    if not holds_records(config.journal):
        raise UsageError(
            "this file is not a journal, and gpujob would move its contents away", where=config.journal,
            do="name another file with the setting journal (in gpujob run: jobs_file)",
        )  # fmt: skip
    if os.path.commonpath((path, os.path.realpath(places.state_dir))) == os.path.realpath(places.state_dir):
        raise UsageError(f"journal: {config.journal} is in the state folder of the scheduler", do="name another file")
