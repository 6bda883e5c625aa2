"""The line about a failure in tables, such as ``oom: asked 0.25 (20 GiB), peaked at 31 GiB``."""

from __future__ import annotations

from scheduler.core.endings import is_retry_note
from scheduler.core.failure_signs import CLASSES, OUT_OF_MEMORY
from scheduler.core.job import Job, JobState
from scheduler.core.out_of_memory import memory_text
from scheduler.core.secrets import without_secrets

LONGEST = 120


def failure_line(job: Job) -> str:
    """Return why a job failed, in one line; of a job that is tried again, why its earlier attempt did. Empty: neither."""
    if job.state is JobState.FAILED and job.failure is not None:
        text = _of_failure(job)
    else:
        text = next(filter(is_retry_note, reversed(job.notes)), "")
    text = without_secrets(" ".join(text.split()))
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _of_failure(job: Job) -> str:
    found = job.failure
    assert found is not None
    if found.kind == OUT_OF_MEMORY and (found.peak_mib or found.tried_mib or found.oom):
        return f"{found.kind}: {memory_text(job, found)}"
    meaning = CLASSES[found.kind].meaning if found.kind in CLASSES else found.hint
    told = found.line or found.error or meaning
    return f"{found.kind}: {told}" if told else found.kind
