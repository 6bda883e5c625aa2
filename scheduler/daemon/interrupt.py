"""Handles Ctrl-C in `gpujob run`: asks the user what to do, and acts on the answer (texts: `cli/run.py`)."""

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

LEAVE, END, GO_ON = "leave", "end", "continue"
INTERRUPTED = "interrupted"  # key in `meta`: ids of jobs ended by Ctrl-C, which the next `run` queues again


class Question(Protocol):
    """Asks the user at the terminal what to do with running jobs. ``fd`` becomes readable when the user answers."""

    fd: int

    def heard(self) -> bool:
        """Return whether a user can answer now."""

    def ask(self, jobs: int) -> None:
        """Ask the user. ``jobs``: the number of running jobs."""

    def answer(self) -> str:
        """Read the answer from ``fd``. Return LEAVE, END or GO_ON; an empty text: the user must answer again."""

    def over(self) -> None:
        """End the question: an answer is no longer expected."""


class Interrupt:
    """Decides whether Ctrl-C ends the scheduler.

    ``question``: the object that asks the user; None if no user can be asked.
    """

    def __init__(self, context: Context, question: Question | None) -> None:
        self._context, self.question = context, question
        self.asked = False

    def on_ctrl_c(self, daemon: Daemon, epoll: select.epoll) -> bool:
        """Ask the user what to do and return False, or return True if the scheduler must end without a question.

        The scheduler ends if no user can be asked, if no job runs, if it already starts no more jobs, or if Ctrl-C is
        pressed again before the user has answered.
        """
        if self.question is None or self.asked or daemon.closing or not daemon.state.live or not self.question.heard():
            self._over(epoll)
            return True
        self.asked = True
        epoll.register(self.question.fd, select.EPOLLIN)
        self.question.ask(len(daemon.state.live))
        return False

    def look(self, daemon: Daemon, epoll: select.epoll) -> bool:
        """Act on the answer, if there is one. Return True if the scheduler must end and leave the jobs running."""
        if not self.asked or self.question is None:
            return False
        if not daemon.state.live:  # all jobs have ended in the meantime
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
        self.question = None  # answered: do not ask again
        return True

    def _over(self, epoll: select.epoll) -> None:
        if self.asked and self.question is not None:
            self.asked = False
            epoll.unregister(self.question.fd)
            self.question.over()


def end_jobs(daemon: Daemon, context: Context) -> None:
    """Start no more jobs, cancel the running jobs, and record their ids so that the next `run` queues them again."""
    # A job that is already being ended must not be queued again by the next run.
    ids = tuple(job.id for job in daemon.state.live.values() if job.state is not JobState.STOPPING)
    try:
        with context.db.writing() as connection:
            rows.ask(connection, Cancel(ids), daemon.now().wall)
            before = json.loads(rows.meta(connection, INTERRUPTED) or "[]")
            rows.set_meta(connection, INTERRUPTED, json.dumps(sorted({*before, *ids})))
    except StoreTrouble as error:
        context.say(f"the jobs were not ended: {error}; press Ctrl-C again", 40, kind="store")
        return
    daemon.stop_starting()
