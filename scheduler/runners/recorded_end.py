"""Applies recorded endings to jobs that the store still shows as running, while no scheduler runs."""

from __future__ import annotations

import os
from dataclasses import replace

from scheduler.core.admission import Admission
from scheduler.core.endings import CANCELLED, Meaning, Rules, after_no_start, after_run, ran
from scheduler.core.host_oom import with_host_oom
from scheduler.core.job import Event, Job, JobState
from scheduler.core.memory_at_end import with_memory
from scheduler.core.observations import NeverRan
from scheduler.core.recovery import Record
from scheduler.core.states import Move, move
from scheduler.runners import attempt_record
from scheduler.runners.adoption import not_started
from scheduler.runners.log_end import log_finding_of

ENDED_ALONE = "the job ended while no scheduler was running"


def as_recorded(job: Job, attempts: str, rules: Rules) -> tuple[Job, Event | None]:
    """Return a copy of ``job`` with the ending from its attempt record, and an event.

    The event says that the job will be retried; None: the job is not retried.
    When the next scheduler starts, it gives the job the same state. If the record has no ending or cannot be read,
    ``job`` itself is returned. ``attempts``: folder of the attempt records.
    """
    try:
        told = attempt_record.read(os.path.join(attempts, job.attempt_key))
    except OSError:
        return job, None  # an unreadable record proves nothing
    now = replace(job)
    if told.kind is Record.ENDED:
        return _after_run(now, told, rules)
    if told.kind is Record.NEVER_RAN:
        return _after_no_start(now, told, rules)
    return job, None


def _after_run(job: Job, told: attempt_record.AttemptRecord, rules: Rules) -> tuple[Job, Event | None]:
    job.exit_code, job.signal, note = attempt_record.meaning(told.how, told.code)
    job.started_at = job.started_at or told.started_at
    job.finished_at = told.ended_at
    found = log_finding_of(job, job.exit_code, job.signal, rules.own_classes)
    if job.state is not JobState.STOPPING:  # else the scheduler itself has ended it
        found = with_host_oom(found, job.exit_code, told.oom_kills, own=rules.own_classes)
    job.log_finding = with_memory(job, found, rules.gpus, Admission())
    job.notes = (*job.notes, *([note] if note else ()), ENDED_ALONE)
    if job.state is JobState.STARTING:
        move(job, Move.STARTED, told.ended_at or 0.0)
    return _moved(job, after_run(job, rules), told.ended_at or 0.0)


def _after_no_start(job: Job, told: attempt_record.AttemptRecord, rules: Rules) -> tuple[Job, Event | None]:
    at = told.ended_at or 0.0
    observation = not_started(job.id, job.attempt, told, at)
    if isinstance(observation, NeverRan):
        means = after_no_start(job, observation.why, observation.lasting, rules)
        if means.how is Move.FAILED:
            job.notes = (*job.notes, f"could not start: {observation.why}")
        return _moved(job, means, at)
    if job.state is JobState.STOPPING:
        return _moved(job, CANCELLED, at)
    move(job, Move.RETRY_SCHEDULED, at)  # the attempt never began: the job waits again
    return job, None


def _moved(job: Job, means: Meaning, at: float) -> tuple[Job, Event | None]:
    detail = {"attempt": job.attempt, "why": means.why, **ran(job)}
    move(job, means.how, at)
    if means.how is not Move.RETRY_SCHEDULED:
        job.outcome = means.outcome
        return job, None
    job.need = means.need or job.need
    if means.vram_mib:
        job.spec = replace(job.spec, vram_mib=means.vram_mib)
    job.reason_code, job.reason = "backoff", f"{means.why}; the job starts again when a scheduler runs (gpujob start)"
    return job, Event(job.id, at, "retry_scheduled", detail)
