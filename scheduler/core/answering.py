"""What people ask for, carried out: cancel, retry, pause; part of the one place that chooses (`decide.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler.core.errors import Refused, SchedulerError
from scheduler.core.facts import Asked
from scheduler.core.gpu import gpu_ids_text, ids_of, mask_of
from scheduler.core.job import Job, JobState, Outcome
from scheduler.core.requests import Answer, Cancel, Pause, PauseQueue, Requeue, Resume
from scheduler.core.states import Move, move

if TYPE_CHECKING:
    from scheduler.core.decide import Turn


def answer(turn: Turn, fact: Asked) -> None:
    """Carry out what was asked, as far as it can be, and answer for each part of it."""
    request, lines, code = fact.request, [], 0
    if isinstance(request, (Cancel, Requeue)):
        for job_id in request.jobs:
            job = turn.find(job_id)
            if job is None:
                lines.append(f"no job {job_id}")
                code = 6
                continue
            try:
                if isinstance(request, Requeue) and request.unless_done and job.succeeded:
                    lines.append(f"job {job.id} has ended well meanwhile; it is not run again")
                else:
                    lines.append(_cancel(turn, job) if isinstance(request, Cancel) else _requeue(turn, job))
            except SchedulerError as error:
                lines.append(str(error))
                code = code or error.exit_code
    elif isinstance(request, PauseQueue):
        turn.world.queue_paused = request.on
        turn.plan.pauses_changed = True
        lines.append("the queue is paused; running jobs go on" if request.on else "the queue goes on")
    else:
        lines, code = _pause(turn, request)
    turn.plan.answers.append(Answer(fact.row, code, tuple(lines)))
    turn.plan.must_sync = True


def _pause(turn: Turn, request: Pause | Resume) -> tuple[list[str], int]:
    fleet = turn.world.fleet
    known = [gpu for gpu in request.gpus if fleet.manages(gpu)]
    managed = gpu_ids_text(ids_of(fleet.all_mask)) or "none"
    lines = [f"no GPU {gpu} is managed here (managed: {managed})" for gpu in request.gpus if gpu not in known]
    code = 6 if lines else 0
    if isinstance(request, Pause):
        fleet.paused_mask |= mask_of(known)
    else:
        fleet.paused_mask &= ~mask_of(known)
        if request.force:
            fleet.telemetry.accept(known, turn.now)
    turn.plan.pauses_changed = True
    paused = gpu_ids_text(ids_of(fleet.paused_mask)) or "none"
    for gpu in known:
        accepted = "; what others have on it is accepted" if isinstance(request, Resume) and request.force else ""
        done = "paused" if isinstance(request, Pause) else "resumed"
        lines.append(f"GPU {gpu} {done} (paused now: {paused}){accepted}")
    return lines, code


def _cancel(turn: Turn, job: Job) -> str:
    now = turn.now
    if job.state.ended:
        return f"job {job.id} has ended already ({job.state.value})"
    if job.state is JobState.STOPPING:
        if job.stop_why != "cancelled":  # its time limit was first; it must not be tried again all the same
            job.stop_why = "cancelled"
            turn.changed(job, "stopping", why=job.stop_why)
        return f"job {job.id} is being stopped already"
    job.stop_why, job.stop_at = "cancelled", now.wall
    if job.state is JobState.PENDING:
        turn.world.queue.drop(job.id)
        turn.world.parked.pop(job.id, None)
        job.finished_at = now.wall
        move(job, Move.STOP_ASKED, now.wall)
        job.outcome = Outcome.CANCELLED
        job.not_before = None
        turn.changed(job, "cancelled", outcome="cancelled")
        turn.after_end(job)
        return f"job {job.id} cancelled before it ran"
    turn.stop(job)
    return f"job {job.id}: SIGTERM to all its processes, SIGKILL after {turn.world.policy.kill_grace_s:g} s"


def _requeue(turn: Turn, job: Job) -> str:
    if not job.state.ended:
        return f"job {job.id} is {job.state.value} already"
    equal = _equal(turn, job)
    if equal is not None:
        raise Refused(
            f"job {job.id} cannot run again: job {equal.id} ({equal.state.value}) is the same script, arguments and environment",
            do=f"gpujob retry {equal.id}" if equal.state.ended else f"see gpujob why {equal.id}",
        )
    before = job.state.value
    move(job, Move.REQUEUED, turn.now.wall)
    job.start_failures = job.runs_failed = job.oom_retries = 0
    job.not_before = job.failure = None
    turn.changed(job, "requeued", before=before)
    turn.enqueue(job)
    if job.state is not JobState.PENDING:
        return f"job {job.id} is {job.state.value} again: a job that it needs has not ended well"
    return f"job {job.id} waits again (it was {before})"


def _equal(turn: Turn, job: Job) -> Job | None:
    """Another job with this one's identity that waits, runs or has succeeded."""
    if not job.identity:
        return None
    for other in (*turn.plan.changed.values(), turn.world.blocker(job.identity)):
        if other is not None and other.id != job.id and other.identity == job.identity:
            if turn.find(other.id) is other or other.id not in turn.plan.changed:
                if other.state is JobState.DONE or not other.state.ended:
                    return other
    return None
