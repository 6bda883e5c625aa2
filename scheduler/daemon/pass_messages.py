"""Logs the results of a pass: new jobs, events of jobs, refused and repeated lines, notices about GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from scheduler.core.decision_pass import Plan
from scheduler.core.job import Event, Job, JobState
from scheduler.core.job_text import accepted, harmless, sentence, where_it_runs
from scheduler.daemon.context import Context
from scheduler.daemon.ingest import IngestResult

MOST_NAMED = 20


class PassMessages:
    """Logs the results of passes. ``ended_badly``: the number of jobs that have failed so far."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._told_running: set[int] = set()  # jobs logged as running
        self.ended_badly = 0

    def adopted(self, jobs: Iterable[Job], wall: float) -> None:
        """Log that the running jobs among ``jobs`` are adopted. Leave out jobs that were already logged as running.

        ``wall``: the time of the adoption, in seconds since 1970.
        """
        for job in jobs:
            if job.began and job.state is JobState.RUNNING and job.id not in self._told_running:
                detail = {"gpus": list(job.gpus), **where_it_runs(job), "attempt": job.attempt}
                text, level = sentence(Event(job.id, wall, "adopted", detail), job)
                self._context.say(text, level, kind="adopted", job=job)
                self._told_running.add(job.id)

    def announce(self, plan: Plan, gathered: IngestResult, find: Callable[[int], Job | None]) -> None:
        """Log the results of one pass.

        ``find`` returns the job with a given id. It is called only for jobs that the pass has not changed.
        """
        if len(gathered.jobs) > MOST_NAMED:
            first, last = gathered.jobs[0], gathered.jobs[-1]
            self._context.say(f"{len(gathered.jobs)} jobs accepted: {first.id} to {last.id}", kind="accepted")
        for job in gathered.jobs if len(gathered.jobs) <= MOST_NAMED else ():
            self._context.say(accepted(job), kind="accepted", job=job)
        told = {job.id: job for job in gathered.jobs}
        told.update((job.id, job) for job in gathered.changed)
        told.update(plan.changed)
        for event in (*gathered.events, *plan.events):
            about = told.get(event.job) or find(event.job)
            if about is None:
                continue
            if event.kind == "failed":
                self.ended_badly += 1
            if event.kind == "started":
                if about.id in self._told_running:
                    continue  # already logged as adopted
                self._told_running.add(about.id)
            elif event.kind in ("done", "failed", "cancelled", "retry_scheduled", "unclaimed"):
                self._told_running.discard(about.id)
            text, level = sentence(event, about)
            self._context.say(text, level, kind=event.kind, job=about)
        for answer in plan.answers:
            for line in answer.lines if answer.row in gathered.left_for_start else ():
                # The command that made the request has ended: it does not show the answer.
                self._context.say(
                    f"requested before the start: {harmless(line)}", 30 if answer.code else 20, kind="asked"
                )
        for text, warns in plan.notices:
            self._context.say(text, 30 if warns else 20, kind="gpu")
        for text in gathered.left_out:
            self._context.say(harmless(text), 30, kind="file")
        for refusal in gathered.refusals:
            name = os.path.basename(refusal.path)
            self._context.say(f"{name}:{refusal.number}: {harmless(refusal.reason)}", 30, kind="refused")
        self._say_repeated(gathered)

    def _say_repeated(self, gathered: IngestResult) -> None:
        if gathered.repeated:
            path, number, blocker = gathered.repeated[0]
            lines = len(gathered.repeated)
            state = blocker.state.value
            which = f"line {number} repeats job {blocker.id} ({state})"
            if state == "done":
                which += f" (to run it again: gpujob retry {blocker.id})"
            if lines > 1:
                which = f"{lines} lines repeat waiting, running or done jobs (line {number}: job {blocker.id}, {state})"
            self._context.say(f"{os.path.basename(path)}: {which}; not run again", 20, kind="repeated")
