"""What follows from Ctrl-C in a run in the foreground: when it is asked, and what each answer does (the words: `cli/run.py`)."""

from __future__ import annotations

import json
import select
from typing import Protocol

from scheduler.core.errors import StoreTrouble
from scheduler.core.job import JobState
from scheduler.core.requests import Cancel
from scheduler.daemon.context import Context
from scheduler.daemon.loop import Daemon
from scheduler.store import jobs as rows

LEAVE, END, GO_ON = "leave", "end", "go on"
INTERRUPTED = "interrupted"  # in `meta`: jobs that were ended so, which the next such run takes up again


class Question(Protocol):
    """Asks the person at the terminal what is to become of the jobs that run, and must not block."""

    fd: int

    def heard(self) -> bool:
        """Whether there is somebody who can answer now."""

    def ask(self, jobs: int) -> None:
        """Ask, while so many run."""

    def answer(self) -> str:
        """LEAVE, END or GO_ON, once ``fd`` can be read; empty for what was no answer, which it has said."""

    def over(self) -> None:
        """Nobody is waited for any more."""


class Interrupt:
    """Whether the scheduler is to end, when Ctrl-C was pressed. ``question``: None where nobody can be asked."""

    def __init__(self, context: Context, question: Question | None) -> None:
        self._context, self.question = context, question
        self.asked = False

    def on_ctrl_c(self, daemon: Daemon, epoll: select.epoll) -> bool:
        """True if the scheduler is to end at once: nobody to ask, nothing to ask for, or pressed once more."""
        if self.question is None or self.asked or daemon.closing or not daemon.state.live or not self.question.heard():
            self._over(epoll)
            return True
        self.asked = True
        epoll.register(self.question.fd, select.EPOLLIN)
        self.question.ask(len(daemon.state.live))
        return False

    def look(self, daemon: Daemon, epoll: select.epoll) -> bool:
        """Take the answer if there is one. True if the scheduler is to end and leave the jobs running."""
        if not self.asked or self.question is None:
            return False
        if not daemon.state.live:  # they have all ended by themselves
            self._over(epoll)
            return False
        if not select.select([self.question.fd], [], [], 0)[0]:
            return False
        answer = self.question.answer()
        if answer:
            self._over(epoll)
        if answer == END:
            end_jobs(daemon, self._context)
        if answer != LEAVE:
            return False
        self.question = None  # it was answered: nothing is asked any more
        return True

    def _over(self, epoll: select.epoll) -> None:
        if self.asked and self.question is not None:
            self.asked = False
            epoll.unregister(self.question.fd)
            self.question.over()


def end_jobs(daemon: Daemon, context: Context) -> None:
    """Start nothing more and cancel what runs; which jobs that were is noted down for the next run."""
    # What somebody has cancelled already is not to be run again.
    ids = tuple(job.id for job in daemon.state.live.values() if job.state is not JobState.STOPPING)
    try:
        with context.db.writing() as connection:
            rows.ask(connection, Cancel(ids), daemon.now().wall)
            before = json.loads(rows.meta(connection, INTERRUPTED) or "[]")
            rows.set_meta(connection, INTERRUPTED, json.dumps(sorted({*before, *ids})))
    except StoreTrouble as error:
        context.say(f"the jobs cannot be ended now: {error}; press Ctrl-C again", 40, kind="store")
        return
    daemon.stop_starting()
