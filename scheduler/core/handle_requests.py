"""Carries out requests of users: cancel, retry, hold, pause and others; part of the decisions (`decide.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from scheduler.core.errors import NotFound, Refused, SchedulerError, UsageError
from scheduler.core.gpu import gpu_ids_text, ids_of, is_are
from scheduler.core.handle_edit import Ahead, edit
from scheduler.core.job import Job, JobState, Outcome
from scheduler.core.job_text import UNDYING
from scheduler.core.observations import Asked
from scheduler.core.pauses import QUEUE
from scheduler.core.requests import (
    Answer,
    Cancel,
    Edit,
    First,
    GpuRequest,
    Hold,
    JobsRequest,
    Pause,
    PauseQueue,
    Release,
    Requeue,
    Resume,
    StateEdited,
    Swap,
)
from scheduler.core.rights import Caller, check, check_job, may
from scheduler.core.states import Move, move

if TYPE_CHECKING:
    from scheduler.core.decision_pass import DecisionPass
    from scheduler.core.users import Users


def answer(decision: DecisionPass, observation: Asked) -> None:
    """Carry out a request as far as possible, and add the answer to the plan.

    An edit of the state file gets no answer.
    """
    request = observation.request
    if isinstance(request, StateEdited):
        _edited(decision, request)
        return
    try:
        lines, code = _carried_out(decision, request, observation.by)
    except Refused as error:
        lines, code = [str(error)], error.exit_code
    decision.plan.answers.append(Answer(observation.row, code, tuple(lines)))
    decision.plan.must_sync = True


def _carried_out(decision: DecisionPass, request: JobsRequest | GpuRequest, by: Caller | None) -> tuple[list[str], int]:
    """Carry out a request of a caller. Return the lines and the exit code of the answer. Raises Refused."""
    right = type(request).__name__.lower()

    def each(jobs: Iterable[int], act: Callable[[Job], str]) -> tuple[list[str], int]:
        def allowed(job: Job) -> str:
            check_job(by, right, job)
            return act(job)

        return _each(decision, jobs, allowed)

    if isinstance(request, Swap):
        return each(request.jobs[:1], lambda job: _swap(decision, job, request.jobs[1:], by))
    if isinstance(request, First):  # in reverse order, so that the first job named ends in front
        lines, code = each(request.jobs[::-1], lambda job: _first(decision, job))
        return lines[::-1], code
    if isinstance(request, Edit):
        needs = dict(zip(request.jobs, request.needs, strict=False))
        ahead: Ahead = {}
        return each(request.jobs, lambda job: edit(decision, job, request.changes, needs.get(job.id), ahead))
    if isinstance(request, Requeue):
        seen, unless_done = request.seen(), request.unless_done
        return each(request.jobs, lambda job: _requeue(decision, job, unless_done, seen.get(job.id)))
    if isinstance(request, PauseQueue):
        users = decision.state.users
        if by is not None and users is not None and not may(by, right):
            check(by, "pause_own", "pause or resume jobs")
            return [_pause_user(decision, users, by.user, request.on)], 0
        if by is not None and users is not None and not request.on:
            users.paused.discard(by.user)  # an administrator may have paused own jobs before
        return [_pause_queue(decision, request.on)], 0
    if isinstance(request, (Pause, Resume)):
        check(by, right, "pause or resume GPUs")
        return _pause(decision, request)
    return each(request.jobs, lambda job: SIMPLE[type(request)](decision, job))


def _each(decision: DecisionPass, jobs: Iterable[int], act: Callable[[Job], str]) -> tuple[list[str], int]:
    """Call ``act`` for each job. Return one answer line for each job, and the exit code.

    The exit code is that of the first error, or 0 if there is no error.
    """
    lines, code = [], 0
    for job_id in jobs:
        job = decision.find(job_id)
        if job is None:
            lines.append(f"there is no job {job_id}")
            code = code or 6
            continue
        try:
            lines.append(act(job))
        except SchedulerError as error:
            lines.append(str(error))
            code = code or error.exit_code
    return lines, code


# -- pauses -----------------------------------------------------------------------------------------------


def _set_pause(decision: DecisionPass, gpu: int, on: bool) -> None:
    fleet = decision.state.fleet
    fleet.paused_mask = fleet.paused_mask | 1 << gpu if on else fleet.paused_mask & ~(1 << gpu)
    decision.plan.pauses_changed = True


def _pause(decision: DecisionPass, request: Pause | Resume) -> tuple[list[str], int]:
    fleet, book, on = decision.state.fleet, decision.state.pauses, isinstance(request, Pause)
    # A paused GPU that is no longer managed can be resumed too: the pause would hold when it is managed again.
    away = () if on else ids_of(fleet.paused_mask & ~fleet.all_mask)
    known = [gpu for gpu in request.gpus if fleet.manages(gpu) or gpu in away]
    managed = gpu_ids_text(ids_of(fleet.all_mask)) or "none"
    lines = [f"GPU {gpu} is not managed here (managed: {managed})" for gpu in request.gpus if gpu not in known]
    code = 6 if lines else 0
    done = "paused" if on else "resumed"
    for gpu in known:
        before = bool(fleet.paused_mask >> gpu & 1)
        book.by_verb(gpu, before)
        _set_pause(decision, gpu, on)
        if before is not on:
            decision.plan.notices.append((f"GPU {gpu} {done}", False))
    cleared = {} if on else {gpu: _clear_fault(decision, gpu) for gpu in known}
    if isinstance(request, Resume) and request.force:
        fleet.admission.accept([gpu for gpu in known if fleet.manages(gpu)], decision.now)
    paused = gpu_ids_text(ids_of(fleet.paused_mask)) or "none"
    for gpu in known:
        accepted = "; its foreign processes are accepted" if isinstance(request, Resume) and request.force else ""
        fault = f"; its errors no longer count ({cleared[gpu]})" if cleared.get(gpu) else ""
        lines.append(f"GPU {gpu} {done} (paused now: {paused}){fault}{accepted}")
    return lines, code


def _clear_fault(decision: DecisionPass, gpu: int) -> str:
    """End the fault of a GPU, so that it gets jobs again, and return the error that it had reported; empty: none."""
    state = decision.state
    uuid = state.fleet.gpus[gpu].uuid if gpu in state.fleet.gpus else ""
    fault = state.faults.get(uuid)
    if fault is None or not fault.active:
        return ""
    state.faults[uuid] = replace(fault, active=False)
    decision.plan.faults_changed = True
    decision.plan.notices.append((f"the errors of GPU {gpu} no longer count ({fault.what})", False))
    return fault.what


def _pause_queue(decision: DecisionPass, on: bool) -> str:
    state = decision.state
    state.pauses.by_verb(QUEUE, state.queue_paused)
    if state.queue_paused is not on:
        decision.plan.notices.append(
            ("the queue is paused; running jobs continue" if on else "the queue is resumed", False)
        )
    state.queue_paused = on
    decision.plan.pauses_changed = True
    return "the queue is paused; running jobs continue" if on else "the queue is resumed"


def _pause_user(decision: DecisionPass, users: Users, user: str, on: bool) -> str:
    """Pause or resume all jobs of a user, also those that the user submits later."""
    (users.paused.add if on else users.paused.discard)(user)
    decision.plan.pauses_changed = True
    return f"the jobs of user {user} are {'paused; running jobs continue' if on else 'resumed'}"


def _edited(decision: DecisionPass, edit: StateEdited) -> None:
    """Apply an edit of the state file. Change only the pauses that the user meant to change (`Pauses.is_changed`)."""
    state = decision.state
    fleet, book = state.fleet, state.pauses
    # A paused GPU that is no longer managed keeps its pause: it holds when the GPU is managed again.
    known = ids_of(fleet.all_mask | fleet.paused_mask)
    unknown = [gpu for gpu in edit.gpus or () if gpu not in known]
    if unknown:
        names = gpu_ids_text(ids_of(fleet.all_mask)) or "none"
        which = f"GPU{'s' * (len(unknown) > 1)} {', '.join(map(str, unknown))}, which {is_are(unknown)}"
        text = f"the state file pauses {which} not managed here (managed: {names})"
        decision.plan.notices.append((text, True))
    for gpu in known if edit.gpus is not None else ():
        wanted, paused = gpu in (edit.gpus or ()), bool(fleet.paused_mask >> gpu & 1)
        if not book.is_changed(gpu, paused, wanted, edit.read):
            continue
        book.by_edit(gpu)
        if wanted is not paused:
            _set_pause(decision, gpu, wanted)
            decision.plan.notices.append(
                (f"GPU {gpu} {'paused' if wanted else 'resumed'} by an edit of the state file", False)
            )
    if edit.paused is not None and book.is_changed(QUEUE, state.queue_paused, edit.paused, edit.read):
        book.by_edit(QUEUE)
        if edit.paused is not state.queue_paused:
            state.queue_paused = edit.paused
            decision.plan.pauses_changed = True
            how = "is paused" if edit.paused else "is resumed"
            decision.plan.notices.append((f"the queue {how} by an edit of the state file", False))
    if decision.plan.pauses_changed:
        decision.plan.must_sync = True


# -- jobs -------------------------------------------------------------------------------------------------


def _waits(job: Job, what: str) -> None:
    """Raise SchedulerError if the job does not wait. ``what``: the intended change for the message, such as "held"."""
    if job.state is not JobState.PENDING:
        raise SchedulerError(
            f"job {job.id} cannot be {what}: it is {job.state.value}, and only a waiting job can be {what}"
        )


def _hold(decision: DecisionPass, job: Job) -> str:
    if job.held:
        return f"job {job.id} is already held"
    _waits(job, "held")
    job.held = True
    decision.changed(job, "held")
    decision.enqueue(job)
    return f"job {job.id} is held; release it: gpujob release {job.id}"


def _release(decision: DecisionPass, job: Job) -> str:
    if not job.held:
        return f"job {job.id} is not held ({job.state.value})"
    _waits(job, "released")  # a held job that was cancelled stays held, for the case that it is run again
    job.held = False
    decision.changed(job, "released")
    decision.enqueue(job)
    if job.state is not JobState.PENDING:
        return f"job {job.id} is {job.state.value}: a dependency did not succeed"
    return f"job {job.id} is released"


def _first(decision: DecisionPass, job: Job) -> str:
    _waits(job, "put first")
    decision.state.front -= 1
    job.order = decision.state.front
    decision.changed(job, "first")
    decision.enqueue(job)
    among = f" of the jobs of user {job.spec.user}" if decision.state.users is not None else " in the queue"
    return f"job {job.id} is now first{among}"


def _swap(decision: DecisionPass, job: Job, others: tuple[int, ...], by: Caller | None) -> str:
    other = decision.find(others[0]) if others else None
    if other is None:
        raise NotFound(f"there is no job {others[0] if others else ''}")
    check_job(by, "swap", other)
    if other.id == job.id:
        raise UsageError(f"cannot swap job {job.id} with itself")
    _waits(job, "swapped")
    _waits(other, "swapped")
    rule = decision.state.policy.order
    if rule.rule != "fifo" or rule.aging_h:
        how = f"order: {rule.rule}" if rule.rule != "fifo" else f"aging: {rule.aging_h:g}"
        raise SchedulerError(
            f"cannot swap jobs: a setting decides their order ({how})",
            do=f"put job {job.id} first: gpujob first {job.id}",
        )
    job.order, other.order = other.order, job.order
    job.priority, other.priority = other.priority, job.priority
    for one, another in ((job, other), (other, job)):
        decision.changed(one, "swapped", with_job=another.id)
        decision.enqueue(one)
    return f"jobs {job.id} and {other.id} have changed places"


def _cancel(decision: DecisionPass, job: Job) -> str:
    now = decision.now
    if job.state.ended:
        return f"job {job.id} has already ended ({job.state.value})"
    if job.state is JobState.STOPPING:
        if job.stop_why != "cancelled":  # the time limit stopped it; cancelling prevents a retry
            job.stop_why = "cancelled"
            decision.changed(job, "stopping", why=job.stop_why)
        return f"job {job.id} is already being stopped" + (f": {UNDYING}" if UNDYING in job.notes else "")
    job.stop_why, job.stop_at = "cancelled", now.wall
    if job.state is JobState.PENDING:
        decision.state.queue.drop(job.id)
        decision.state.parked.pop(job.id, None)
        job.finished_at = now.wall
        move(job, Move.STOP_ASKED, now.wall)
        job.outcome = Outcome.CANCELLED
        job.not_before = None
        decision.changed(job, "cancelled", outcome="cancelled")
        decision.after_end(job)
        return f"job {job.id} was cancelled before it ran"
    outside = job.waits_in_engine
    decision.stop(job)
    if outside:
        return f"job {job.id} is taken back from {job.runner}, which has not reported its start"
    return f"job {job.id}: SIGTERM to all its processes, SIGKILL after {decision.state.policy.kill_grace_s:g} s"


def _requeue(decision: DecisionPass, job: Job, unless_done: bool, seen: int | None) -> str:
    if unless_done and job.succeeded:
        return f"job {job.id} has succeeded in the meantime; it is not run again"
    if not job.state.ended:
        return f"job {job.id} is already {job.state.value}"
    if seen is not None and job.attempt > seen:
        return f"job {job.id} has already run again (attempt {job.attempt})"
    equal = _equal(decision, job)
    if equal is not None:
        raise Refused(
            f"cannot run job {job.id} again: job {equal.id} ({equal.state.value}) has the same script, arguments and environment",
            do=f"gpujob retry {equal.id}" if equal.state.ended else f"see gpujob why {equal.id}",
        )
    before = job.state.value
    move(job, Move.REQUEUED, decision.now.wall)
    job.start_failures = job.runs_failed = job.oom_retries = job.gpu_retries = 0
    job.not_before = job.log_finding = None
    job.order = job.id
    if job.spec.caller:  # the command that waited in the foreground for it has ended
        job.spec = replace(job.spec, caller="")
        decision.plan.respecs[job.id] = job
    decision.changed(job, "requeued", before=before, attempt=job.attempt, log=job.log)
    decision.enqueue(job)
    if job.state is not JobState.PENDING:
        return f"job {job.id} is {job.state.value} again: a dependency did not succeed"
    return f"job {job.id} is queued again (it was {before})"


def _equal(decision: DecisionPass, job: Job) -> Job | None:
    """Return another job with the same identity that waits, runs or has succeeded; None if there is none."""
    if not job.identity:
        return None
    for other in (*decision.plan.changed.values(), decision.state.blocker(job.identity)):
        if other is not None and other.id != job.id and other.identity == job.identity:
            if decision.find(other.id) is other or other.id not in decision.plan.changed:
                if other.state is JobState.DONE or not other.state.ended:
                    return other
    return None


SIMPLE: dict[type[Any], Callable[[DecisionPass, Job], str]] = {Cancel: _cancel, Hold: _hold, Release: _release}
