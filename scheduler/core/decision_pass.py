"""The plan of a pass, and the steps that several kinds of decisions use: queue, park, skip or stop a job.

A parked job waits outside the queue, because it is not ready to start. A skipped job has ended in the state SKIPPED.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from scheduler.core.backoff import LONGEST_WAIT_S
from scheduler.core.job import Event, Holding, Job, JobState, Outcome
from scheduler.core.learned_needs import Group, Run
from scheduler.core.observations import (
    Now,
)
from scheduler.core.placement_class import WaitingJob, class_of
from scheduler.core.requests import Answer
from scheduler.core.scheduler_state import SchedulerState
from scheduler.core.states import Move, move


@dataclass(frozen=True, slots=True)
class Stop:
    """A signal that is to be sent to all processes of a job: SIGKILL if ``hard``, else SIGTERM."""

    job: Job
    hard: bool


@dataclass(slots=True)
class Plan:
    """The result of a pass: what to record (jobs, events, holdings, answers), then what to do (starts, stops)."""

    changed: dict[int, Job] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    starts: list[Job] = field(default_factory=list)
    stops: list[Stop] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    respecs: dict[int, Job] = field(default_factory=dict)  # jobs of ``changed`` whose spec has changed
    held: list[Holding] = field(default_factory=list)
    freed: list[str] = field(default_factory=list)  # attempts whose leftover processes have ended
    pauses_changed: bool = False
    measured: list[tuple[Group, Run]] = field(default_factory=list)  # what ended attempts used
    faults_changed: bool = False  # of GPUs (`SchedulerState.faults`)
    must_sync: bool = False  # the commit must be synced to disk
    notices: list[tuple[str, bool]] = field(default_factory=list)  # messages about no job: (text, whether a warning)
    read_since: float | None = None  # a reading is needed that was begun at this time or later (monotonic seconds)

    def read_gpus(self, since: float) -> None:
        """Request a reading of the GPUs that begins at ``since`` (monotonic seconds) or later."""
        self.read_since = since if self.read_since is None else max(self.read_since, since)

    @property
    def empty(self) -> bool:
        """True when there is nothing to record."""
        recorded = self.changed or self.events or self.answers or self.held or self.freed
        return not (recorded or self.pauses_changed or self.faults_changed)


class DecisionPass:
    """One call of `decide`: the state that it changes, the time, the plan so far, the random number for back-offs."""

    def __init__(self, state: SchedulerState, now: Now, jitter: float) -> None:
        self.state, self.now, self.jitter = state, now, jitter
        self.plan = Plan()
        self._to_follow: deque[int] = deque()  # jobs whose waiting jobs are still to be decided on

    def find(self, job_id: int) -> Job | None:
        """Return a job, with the changes of this pass; None if there is no such job.

        The job comes from the plan if this pass changed it, else from ``state.live``, else from the store.
        """
        return self.plan.changed.get(job_id) or self.state.live.get(job_id) or self.state.fetch(job_id)

    def changed(self, job: Job, kind: str, **detail: object) -> None:
        self.plan.changed[job.id] = job
        self.plan.events.append(Event(job.id, self.now.wall, kind, dict(detail)))

    # -- waiting ------------------------------------------------------------------------------------------

    def enqueue(self, job: Job, since: float | None = None) -> None:
        """Queue a PENDING job if it is ready to start. ``since``: since when it waits for room (monotonic seconds); None: now.

        If the job is not ready, park it and record the reason. If the job depends on the success of another job, and
        that job has ended without success, skip the job.
        """
        state = self.state
        state.queue.drop(job.id)
        state.parked.pop(job.id, None)
        state.front = min(state.front, job.order)
        if job.held:
            self._park(job, "hold-user", f"held by its owner; release it: gpujob release {job.id}")
            return
        if job.not_before is not None and job.not_before > self.now.wall:
            left = min(job.not_before - self.now.wall, LONGEST_WAIT_S)
            if job.reason_code != "backoff":  # it was held and released during the back-off
                self._park(job, "backoff", f"next attempt in {left:.0f} s")
            state.parked[job.id] = "backoff"
            state.at(self.now.mono + left, "retry", job)
            return
        if job.spec.after or job.spec.after_ok:
            waits_for = self._depends(job)
            if waits_for is None or waits_for:
                return
        missing = state.missing(job)
        if missing:
            self._park_missing(job, missing)
            return
        if job.reason_code:
            job.reason_code = job.reason = ""
            self.plan.changed[job.id] = job
        estimate = state.estimates.of(job.spec, job.need) if state.policy.order.rule == "short" else None
        key = state.policy.order.key(job.priority, job.order, job.submitted_at, estimate)
        state.queue.push(job.id, class_of(job), key, self.now.mono if since is None else since)

    def restore(self, jobs: Iterable[WaitingJob]) -> None:
        """Queue jobs that may start as soon as there is room. Their files are checked only when the jobs start.

        They count as waiting for room since their submission, because it is not stored since when they do.
        """
        state, order = self.state, self.state.policy.order
        for job in jobs:
            state.front = min(state.front, job.order)
            since = self.now.mono - max(0.0, self.now.wall - job.submitted_at)
            state.queue.push(job.id, job.kind, order.key(job.priority, job.order, job.submitted_at, None), since)

    def _park(self, job: Job, code: str, sentence: str) -> None:
        self.state.queue.drop(job.id)
        self.state.parked[job.id] = code
        if (job.reason_code, job.reason) != (code, sentence):
            job.reason_code, job.reason = code, sentence
            self.plan.changed[job.id] = job

    def _park_missing(self, job: Job, sentence: str) -> None:
        if job.reason_code != "missing":
            self.plan.events.append(Event(job.id, self.now.wall, "missing", {"why": sentence}))
        self._park(job, "missing", sentence)

    def _depends(self, job: Job) -> list[int] | None:
        """Return the ids of the jobs that this job must wait for. If there are such jobs, park this job.

        If a job in ``after_ok`` ended without success, or is not known, skip this job and return None.
        """
        waits_for = []
        for parent_id in dict.fromkeys((*job.spec.after_ok, *job.spec.after)):
            parent = self.find(parent_id)
            ended = parent is None or parent.state.ended
            if parent_id in job.spec.after_ok and ended and (parent is None or not parent.succeeded):
                what = "it does not exist" if parent is None else f"its state is {parent.state.value}"
                self._skip(job, f"job {parent_id} had to succeed, but {what}")
                return None
            if not ended:
                waits_for.append(parent_id)
                self.state.children.setdefault(parent_id, {})[job.id] = None
        if waits_for:
            first = waits_for[0]
            more = f" (and {len(waits_for) - 1} more)" if len(waits_for) > 1 else ""
            how = "succeed" if first in job.spec.after_ok else "end"
            self._park(job, "depends", f"job {first} must {how} first{more}")
        return waits_for

    def _skip(self, job: Job, why: str) -> None:
        self.state.queue.drop(job.id)
        self.state.parked.pop(job.id, None)
        job.finished_at = self.now.wall
        move(job, Move.SKIPPED, self.now.wall)
        job.outcome = Outcome.DEPENDENCY
        self.changed(job, "skipped", why=why)
        self.after_end(job)

    def after_end(self, job: Job) -> None:
        """Decide again on the jobs that wait for the end of ``job``: queue, park or skip each of them.

        A skipped job comes back here. The outermost call handles it then: a recursion could be as deep as a chain of jobs.
        """
        self._to_follow.append(job.id)
        if len(self._to_follow) > 1:
            return
        while self._to_follow:
            for child_id in self.state.children.pop(self._to_follow[0], {}):
                if self.state.parked.get(child_id) == "depends":
                    child = self.find(child_id)
                    if child is not None and child.state is JobState.PENDING:
                        self.enqueue(child)
            self._to_follow.popleft()

    # -- ending ---------------------------------------------------------------------------------------------

    def stop(self, job: Job) -> None:
        move(job, Move.STOP_ASKED, self.now.wall)
        job.stop_at = self.now.wall
        self.changed(job, "stopping", why=job.stop_why)
        if job.process is not None or not job.runner_kind.owns_gpus:
            self.plan.stops.append(Stop(job, hard=False))
        self.state.at(self.now.mono + self.state.policy.kill_grace_s, "kill", job)
