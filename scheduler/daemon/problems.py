"""Problems of the scheduler: logged when they begin and when they end, shown by `status` while they last."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable

from scheduler.core.errors import StoreTrouble
from scheduler.core.protocols import Runner
from scheduler.daemon.context import Context
from scheduler.store import jobs as rows
from scheduler.system.processes import SHORT_OF


class Problems:
    """The current problems of the daemon. ``sources``: functions that return a sentence for each of their problems."""

    def __init__(self, context: Context, runner: Runner) -> None:
        self._context, self._runner = context, runner
        self._of_runner = ""
        self.sources: list[Callable[[], list[str]]] = []

    def look_at_runner(self) -> None:
        """Check whether the runner can start jobs. Log the result if it differs from the last one.

        In direct mode, no job can start while the supervisor is missing or suspended (SIGSTOP).
        """
        before, self._of_runner = self._of_runner, self._runner.trouble()
        if self._of_runner == before:
            return
        if self._of_runner:
            for line in self._of_runner.splitlines():
                if line not in before.splitlines():
                    self._context.say(line, 40, kind="runner")
        else:
            self._context.say("jobs can start again, and their ends are recorded", 20, kind="runner")
        self.note()

    def note(self) -> None:
        """Record the current problems for `status`. Raises StoreTrouble, sqlite3.Error."""
        found = self._of_runner.splitlines()
        found += [text for source in self.sources for text in source()]
        text, db = json.dumps(found), self._context.db
        if text != (rows.meta(db.connection, "trouble") or "[]"):
            with db.writing(sync=False) as connection:
                rows.set_meta(connection, "trouble", text)


def passing(error: Exception, state_dir: str) -> StoreTrouble | None:
    """Return a StoreTrouble if the error is temporary: a full disk, no free descriptor, no memory. Else return None.

    A temporary error shows nothing about the file or process that the pass was working on. So the daemon tries the pass
    again later.
    """
    if not isinstance(error, OSError):
        return None
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = error.filename or state_dir
        return StoreTrouble(f"cannot be written: {error.strerror}", where=where, do="free some space")
    if error.errno in SHORT_OF:
        return StoreTrouble(f"the system is out of resources that the scheduler needs: {error.strerror}")
    return None
