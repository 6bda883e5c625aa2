"""Removes from the result of a call the commands, places and labels of others that the caller may not see."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from scheduler.client.overview import Overview
from scheduler.core.job import REASON_CODES, Event, Job, Reason
from scheduler.core.rights import HIDDEN_COMMAND, Caller, may
from scheduler.core.secrets import without_secrets, words_without_secrets
from scheduler.core.usage_report import Report, Total
from scheduler.daemon.followed_files import NOT_READ
from scheduler.gpujobd.agent_messages import of_user

# Details of events that every user may see.
OPEN_DETAILS = frozenset({
    "attempt", "gpus", "share", "exit_code", "signal", "outcome", "wait", "cause", "pid", "pids", "processes", "ran", "before", "with_job", "gpu", "memory", "node", "engine_job",
})  # fmt: skip
# Texts of events that may name files of the owner: other users see them empty.
CLOSED_TEXTS = frozenset({"why", "by", "changes"})


def visible(caller: Caller, name: str, result: Any, hide: bool) -> Any:
    """Return the result of a call as the caller may see it. ``hide``: setting `hide_commands`."""
    seen = as_seen_by(caller, hide)
    if isinstance(result, Overview) and not caller.admin:
        of_caller = (f"{NOT_READ}{caller.user}:", of_user(caller.uid))
        trouble = [
            text for text in result.trouble if text.startswith(of_caller) or not text.startswith((NOT_READ, "user "))
        ]
        result = replace(result, trouble=trouble)
    if not hide or may(caller, "see_command"):
        return _with_jobs(result, seen)

    def own(job: Job) -> bool:
        return job.spec.uid == caller.uid

    if name == "job":
        job, reason, events = result
        if not own(job):
            return seen(job), _closed_reason(reason), [_closed_event(event) for event in events]
    elif name == "jobs":
        jobs, reasons = result
        return [seen(job) for job in jobs], _closed_reasons(reasons, {job.id for job in jobs if own(job)})
    elif isinstance(result, Overview):
        reasons = _closed_reasons(result.reasons, {job.id for job in result.jobs if own(job)})
        return replace(result, jobs=[seen(job) for job in result.jobs], reasons=reasons)
    elif isinstance(result, Report):
        labels: dict[str, Total] = {}  # of one's own jobs: a sum with those of others would confirm a guessed label
        for line in result.lines:
            if own(line.job):
                labels.setdefault(line.job.spec.label, Total()).add(line)
        result = replace(result, labels=dict(sorted(labels.items())))
    return _with_jobs(result, seen)


def as_seen_by(caller: Caller | None, hide_commands: bool) -> Callable[[Job], Job]:
    """Return a function that returns a job as the caller may see it.

    Everybody sees their own jobs whole. Of the jobs of others, the environment and what happens at the end are hidden
    from everybody, and the command with ``hide_commands``.
    """
    right = "see_command" if hide_commands else "see_command_open"

    def seen(job: Job) -> Job:
        spec = job.spec
        if caller is None or spec.uid == caller.uid:
            return job
        spec = replace(
            spec, env_file="", variables=(), caller="", on_finish="", mail_to="", limits=(), info="",
            arguments=tuple(words_without_secrets(spec.arguments)), label=without_secrets(spec.label),
        )  # fmt: skip
        if may(caller, right, spec.uid):
            found = job.log_finding and replace(job.log_finding, good_run=None, good_at=None, differs=())
            return replace(job, spec=spec, argv=tuple(words_without_secrets(job.argv)), facts=None, log_finding=found)
        kind = {"script": HIDDEN_COMMAND} if spec.is_script else {"arguments": (HIDDEN_COMMAND,)}
        spec = replace(spec, script="", arguments=(), label="", cwd="", conda_env="", info="", origin="", log_dir="",
                       log_name="", source="submit")  # fmt: skip
        spec = replace(spec, **kind)
        return replace(
            job,
            spec=spec,
            argv=(),
            log="",
            interpreter="",
            session=None,
            log_finding=None,
            facts=None,
            notes=(),
            identity="",
            reason=REASON_CODES.get(job.reason_code, ""),
        )

    return seen


def job_news(caller: Caller, job: Job, reason: Reason | None, hide: bool) -> tuple[Job, Reason | None]:
    """Return a changed job and its reason as the caller may see them. ``hide``: setting `hide_commands`."""
    closed = hide and not may(caller, "see_command", job.spec.uid)
    return as_seen_by(caller, hide)(job), _closed_reason(reason) if closed else reason


def _closed_reason(reason: Reason | None) -> Reason | None:
    """Return the reason without a sentence that could name files or environments of another user."""
    return None if reason is None else Reason(reason.code, REASON_CODES.get(reason.code, ""))


def _closed_reasons(reasons: Mapping[int, Reason], mine: set[int]) -> dict[int, Reason]:
    """Return job → reason; of all jobs but one's own (ids: ``mine``), without a sentence that could name files."""
    return {job: one if job in mine else (_closed_reason(one) or one) for job, one in reasons.items()}


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
