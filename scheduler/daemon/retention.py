"""Removes old ended jobs (`keep_finished`) and old job logs (`keep_logs`), a few at a time."""

from __future__ import annotations

import math
import os
import re
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator

from scheduler.core.config import Config
from scheduler.core.errors import StoreTrouble
from scheduler.core.observations import Now
from scheduler.core.retention import Keep, keep_finished, keep_logs, size_text
from scheduler.store.database import Database
from scheduler.store.deletion import (
    drop_old_logs,
    ended_with_logs,
    forget_until,
    last_to_go,
    old_logs,
    sweep_environments,
)
from scheduler.store.paths import Places
from scheduler.system.crash_points import crash_point

LONGEST_ROUND_S, SHORTEST_ROUND_S = 3600.0, 1.0
PART_OF_AGE = 0.1  # part of the age limit between two rounds: with a limit of 10 minutes, removed within 11 minutes
SLICE_S = 0.005
BETWEEN_S = 0.02  # between two slices: leaves four fifths of the time to the loop
BUSY_S = 1.0  # between two slices while the loop is never idle
JOBS_A_STEP = 10
LOGS_A_STEP = 10
_NAME = re.compile(r"job_(\d+)_\d{8}_\d{6}(?:_a\d+)?(?:_\d+)?\.log(?:\.gz)?(?:\.e)?", re.ASCII)


class Retention:
    """Removes old jobs and logs in rounds. A round is cut into short slices, which run between passes of the daemon.

    ``settings`` returns the current config. ``quiet`` returns whether the daemon has nothing else to do.

    A round begins when the daemon starts, when the settings have changed, and once an hour. Rounds are more frequent if
    an age limit is below ten hours (`_round_s`). An error ends the round and is logged; the next round removes the
    jobs and logs that this round has not removed.
    """

    def __init__(
        self,
        db: Database,
        places: Places,
        say: Callable[[str, int], None],
        settings: Callable[[], Config],
        quiet: Callable[[], bool],
    ) -> None:
        self.db, self.places, self.say, self._settings, self._quiet = db, places, say, settings, quiet
        self._wish: tuple[str, str, str] | None = None
        self._work: Iterator[None] | None = None
        self._next_round = self._next_slice = self._last_slice = -math.inf
        self._trouble = ""
        self.jobs = self.logs = self.size = 0  # removed in this round: jobs, logs, and bytes of logs

    def due(self) -> float:
        """Return the monotonic time of the next slice or round."""
        return self._next_slice if self._work is not None else self._next_round

    def close(self) -> None:
        """Do nothing: the first round of the next daemon removes what this daemon has not removed yet."""

    def step(self, _now: Now) -> None:
        """Run one slice of the round, if it is due; begin a new round when it is time."""
        now, config = time.monotonic(), self._settings()
        wish = (config.keep_logs, config.keep_finished, config.log_dir)
        if wish != self._wish:
            self._wish, self._work, self._next_round = wish, None, now
        if self._work is None:
            if now < self._next_round:
                return
            self._next_round = now + _round_s(config)
            self.jobs = self.logs = self.size = 0
            self._work = self._round(config)
        if now < self._next_slice:
            return
        self._next_slice = now + BETWEEN_S
        if not self._quiet() and now < self._last_slice + BUSY_S:
            return
        try:
            while time.monotonic() < now + SLICE_S:
                next(self._work)
        except StopIteration:
            self._over("")
        except (OSError, StoreTrouble, sqlite3.Error) as error:
            self._over(str(error))
        self._last_slice = time.monotonic()
        self._next_slice = self._last_slice + BETWEEN_S

    def _over(self, trouble: str) -> None:
        self._work = None
        done = [f"{self.jobs} ended job{'s' * (self.jobs != 1)}"] if self.jobs else []
        done += [f"{size_text(self.size)} of logs"] if self.logs else []
        if done:
            self.say(f"removed {' and '.join(done)}", 20)
        if trouble and trouble != self._trouble:
            self.say(f"old jobs and logs were not removed: {trouble}; gpujob tries again within the hour", 30)
        self._trouble = trouble

    def _round(self, config: Config) -> Iterator[None]:
        finished = keep_finished(config.keep_finished)
        if finished:
            yield from self._forget_jobs(finished)
        yield from sweep_environments(self.db, self.places)
        logs = keep_logs(config.keep_logs)
        if logs:
            yield from _Logs(self, config.log_dir, logs).remove()

    def _forget_jobs(self, keep: Keep) -> Iterator[None]:
        before = None if keep.age_s is None else time.time() - keep.age_s
        bound = last_to_go(self.db.connection, keep.most, before)
        yield
        number = JOBS_A_STEP
        while number == JOBS_A_STEP:
            # Not synced: jobs that a power loss brings back are removed again.
            with self.db.writing(sync=False) as connection:
                number = forget_until(connection, bound, JOBS_A_STEP)
            self.jobs += number
            yield


def _round_s(config: Config) -> float:
    """Return the seconds between two rounds: a tenth of the shortest age limit, at least 1 s and at most 1 h."""
    ages = [keep.age_s for keep in (keep_logs(config.keep_logs), keep_finished(config.keep_finished)) if keep.age_s]
    return min(LONGEST_ROUND_S, max(SHORTEST_ROUND_S, PART_OF_AGE * min(ages, default=math.inf)))


class _Logs:
    """Removes logs of ended jobs from ``folder``, if they are too old or if all logs together exceed the size limit.

    To meet the size limit, the logs of deleted jobs are removed first, then the oldest logs of the other ended jobs.
    Only files whose paths are in this store are removed, because other schedulers and people may also have files in the
    folder.
    """

    def __init__(self, pruner: Retention, folder: str, keep: Keep) -> None:
        self.pruner, self.folder, self.keep = pruner, folder, keep
        self.total = 0
        self.oldest = -math.inf if keep.age_s is None else time.time() - keep.age_s
        self.fd = -1

    def remove(self) -> Iterator[None]:
        """Check all logs and remove the logs that are due. Yields between two steps of this work. Raises OSError."""
        try:
            self.fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            if os.fstat(self.fd).st_uid != os.getuid():
                raise OSError(f"{self.folder} belongs to another user")
            yield from self._of_ended_jobs()
            yield from self._of_forgotten_jobs()
        finally:
            os.close(self.fd)

    def _of_ended_jobs(self) -> Iterator[None]:
        before = (math.inf, 0)
        # Chosen and removed in one step: between two steps a user may retry a job.
        while page := ended_with_logs(self.pruner.db.connection, before, LOGS_A_STEP):
            chosen = [log for at, number, logs in page for log in logs if self._is_due(log, at, number)]
            self._unlink(chosen)
            before = page[-1][:2]
            yield

    def _of_forgotten_jobs(self) -> Iterator[None]:
        before = (math.inf, "")
        while page := old_logs(self.pruner.db.connection, before, LOGS_A_STEP):
            self._unlink([log for at, log in page if self._is_due(log, at)])
            gone = [(at, log) for at, log in page if os.path.dirname(log) == self.folder and not self._there(log)]
            if gone:
                with self.pruner.db.writing(sync=False) as connection:
                    drop_old_logs(connection, gone)
            before = page[-1]
            yield

    def _there(self, path: str) -> os.stat_result | None:
        try:
            return os.stat(os.path.basename(path), dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def _is_due(self, path: str, ended: float, number: int | None = None) -> bool:
        """Return whether a log must be removed because it is too old or because ``total`` exceeds the size limit.

        The size of the log is first added to ``total``. If the file is missing, is not a job log in ``folder`` or
        belongs to another user, nothing is added and the result is False. ``ended``: when the log's job ended, in
        seconds since 1970. ``number``: the job id that the name of the log must contain; None: any id.
        """
        folder, name = os.path.split(path)
        named = _NAME.fullmatch(name)
        if folder != self.folder or not named or number not in (None, int(named[1])):
            return False
        status = self._there(path)
        if status is None or not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            return False
        self.total += status.st_size
        too_much = self.keep.most is not None and self.total > self.keep.most
        return too_much or max(ended, status.st_mtime) < self.oldest

    def _unlink(self, chosen: list[str]) -> None:
        if not chosen:
            return
        crash_point("prune.selected")
        for path in chosen:
            status = self._there(path)
            if status is not None and stat.S_ISREG(status.st_mode):
                os.unlink(os.path.basename(path), dir_fd=self.fd)
                self.pruner.logs += 1
                self.pruner.size += status.st_size
        crash_point("prune.deleted")
