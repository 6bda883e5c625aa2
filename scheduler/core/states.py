"""The states of a job: the table of moves, and the only function that changes a job's state."""

from __future__ import annotations

import enum

from scheduler.core.errors import InvalidMove
from scheduler.core.job import Job, JobState


class Move(enum.Enum):
    """An event that changes the state of a job."""

    PLACED = "placed"
    STARTED = "started"
    SUCCEEDED = "succeeded"
    RETRY_SCHEDULED = "retry_scheduled"  # the attempt is over, another follows: waits until not_before
    FAILED = "failed"  # no other attempt follows
    STOP_ASKED = "stop_asked"
    STOPPED = "stopped"
    SKIPPED = "skipped"
    REQUEUED = "requeued"


S, M = JobState, Move
# Only commands of `gpujob track` move from CANCELLED or FAILED to SKIPPED.
TABLE: dict[JobState, dict[Move, JobState]] = {
    S.PENDING: {M.PLACED: S.STARTING, M.STOP_ASKED: S.CANCELLED, M.SKIPPED: S.SKIPPED},
    S.STARTING: {M.STARTED: S.RUNNING, M.RETRY_SCHEDULED: S.PENDING, M.FAILED: S.FAILED, M.STOP_ASKED: S.STOPPING},
    S.RUNNING: {M.SUCCEEDED: S.DONE, M.RETRY_SCHEDULED: S.PENDING, M.FAILED: S.FAILED, M.STOP_ASKED: S.STOPPING},
    S.STOPPING: {M.STOPPED: S.CANCELLED, M.SUCCEEDED: S.DONE, M.RETRY_SCHEDULED: S.PENDING, M.FAILED: S.FAILED},
    S.DONE: {M.REQUEUED: S.PENDING},
    S.CANCELLED: {M.REQUEUED: S.PENDING, M.SKIPPED: S.SKIPPED},
    S.SKIPPED: {M.REQUEUED: S.PENDING},
    S.FAILED: {M.REQUEUED: S.PENDING, M.SKIPPED: S.SKIPPED},
}


def move(job: Job, what: Move, now: float) -> JobState:
    """Move ``job`` to the state that ``what`` leads to, set the dependent fields, and return its previous state.

    ``now``: seconds since 1970. Raises InvalidMove, and changes nothing, if the table has no such move.
    """
    after = TABLE[job.state].get(what)
    if after is None:
        story = f"attempt {job.attempt}, submitted {job.submitted_at:.0f}"
        if job.started_at is not None:
            story += f", started {job.started_at:.0f}"
        raise InvalidMove(f"cannot apply {what.value} to job {job.id}: it is {job.state.value} ({story})")
    before, job.state = job.state, after
    if after.ended:
        if job.finished_at is None:
            job.finished_at = now
        job.reason_code = job.reason = ""
    elif after is S.PENDING:
        job.finished_at = job.started_at = job.process = job.stop_at = None
        job.gpus = ()
        job.node = job.partition = job.engine_job = ""
        job.stop_why = ""
        job.outcome = job.exit_code = job.signal = None
    return before
