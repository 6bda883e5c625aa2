"""Removes from the result of a call the commands, places and labels of others that the caller may not see."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from scheduler.client.overview import Overview
from scheduler.core.job import REASON_CODES, Event, Job, Reason
from scheduler.core.rights import Caller, as_seen_by, may
from scheduler.core.usage_report import Report
from scheduler.gpujobd.messages import of_user

# Details of events that every user may see, and texts that could name files of the owner: others see them empty.
OPEN_DETAILS = frozenset({
    "attempt", "gpus", "share", "exit_code", "signal", "outcome", "wait", "cause", "pid", "pids", "processes", "ran", "before", "with_job", "gpu", "memory", "node", "engine_job",
})  # fmt: skip
CLOSED_TEXTS = frozenset({"why", "by", "changes"})


def visible(caller: Caller, name: str, result: Any, hide: bool) -> Any:
    """Return the result of a call as the caller may see it. ``hide``: setting `hide_commands`."""
    seen = as_seen_by(caller, hide)
    if isinstance(result, Overview) and not caller.admin:
        own_files = f"{caller.user}:"
        trouble = [
            text
            for text in result.trouble
            if (f"not read: {own_files}" in text or "not read: " not in text)
            and (not text.startswith("user ") or text.startswith(of_user(caller.uid)))
        ]
        result = replace(result, trouble=trouble)
    if not hide or may(caller, "see_command"):
        return _with_jobs(result, seen)

    def own(job: Job) -> bool:
        return job.spec.uid == caller.uid

    if name == "job":
        job, reason, events = result
        if not own(job):
            return seen(job), closed_reason(reason), [_closed_event(event) for event in events]
    elif name == "jobs":
        jobs, reasons = result
        theirs = {job.id for job in jobs if not own(job)}
        return [seen(job) for job in jobs], _closed_reasons(reasons, theirs)
    elif isinstance(result, Overview):
        theirs = {job.id for job in result.jobs if not own(job)}
        return replace(result, jobs=[seen(job) for job in result.jobs], reasons=_closed_reasons(result.reasons, theirs))
    elif isinstance(result, Report):
        labels = {line.job.spec.label for line in result.lines if own(line.job)}
        result = replace(result, labels={name: total for name, total in result.labels.items() if name in {*labels, ""}})
    return _with_jobs(result, seen)


def closed_reason(reason: Reason | None) -> Reason | None:
    """Return the reason without a sentence that could name files or environments of another user."""
    return None if reason is None else Reason(reason.code, REASON_CODES.get(reason.code, ""))


def _closed_reasons(reasons: Mapping[int, Reason], theirs: set[int]) -> dict[int, Reason]:
    return {job: (closed_reason(one) or one) if job in theirs else one for job, one in reasons.items()}


def _closed_event(event: Event) -> Event:
    closed = {name: "" for name in event.detail if name in CLOSED_TEXTS}
    return replace(
        event, detail={**closed, **{name: value for name, value in event.detail.items() if name in OPEN_DETAILS}}
    )


def _with_jobs(value: Any, seen: Callable[[Job], Job]) -> Any:
    """Return a value with each job in it as the caller may see it."""
    if isinstance(value, Job):
        return seen(value)
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_with_jobs(item, seen) for item in value)
    if isinstance(value, dict):
        return {key: _with_jobs(item, seen) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = {
            field.name: shown
            for field in dataclasses.fields(value)
            if field.init and (shown := _with_jobs(held := getattr(value, field.name), seen)) is not held
        }
        return replace(value, **found) if found else value
    return value
