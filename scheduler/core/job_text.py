"""Events and endings of jobs as sentences for people."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from scheduler.core.gpu import gpu_ids_text, named_gpus
from scheduler.core.job import Event, Job, Outcome
from scheduler.core.units import mib_text, span_text

DURING_ITS_RUN = "during its run: "  # how a note about a GPU of a running job begins, in its first attempt
UNDYING = "it does not end after SIGKILL (stuck in the kernel, on a disk or a driver?); its GPUs stay allocated"
INFO, WARNING = 20, 30  # levels of the standard library's logging
_UNSAFE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
STOPPED_BECAUSE = {"time_limit": "its time limit is reached", "trespass": "it uses a GPU that it was not given"}
PLAIN = {"held": "held", "released": "released", "first": "put first", "requeued": "queued again"}


def harmless(text: str) -> str:
    """Return ``text`` in a form that cannot control a terminal.

    Control characters, line breaks and characters that change the text direction are escaped.
    """
    if text.isascii() and text.isprintable():
        return text  # most texts: this test is faster than the search
    return _UNSAFE.sub(
        lambda found: f"\\x{ord(found.group()):02x}" if ord(found.group()) < 256 else f"\\u{ord(found.group()):04x}",
        text,
    )


def during_run(job: Job) -> str:
    """Return how a note begins that tells what happened to a GPU during the current attempt of a job."""
    return DURING_ITS_RUN if job.attempt <= 1 else f"during its run (attempt {job.attempt}): "


def where_it_runs(job: Job) -> dict[str, Any]:
    """Return the keys of an event that tell where an attempt runs: its pid; on a cluster, its node and its id there."""
    if job.process is not None:
        return {"pid": job.process.pid}
    return {"node": job.node, "engine_job": job.engine_job}


def _where(detail: Mapping[str, Any]) -> str:
    """Return in words what `where_it_runs` put into an event."""
    return f"pid {detail['pid']}" if "pid" in detail else f"node {detail['node']} (job {detail['engine_job']} there)"


def sentence(event: Event, job: Job) -> tuple[str, int]:
    """Return the sentence for an event of ``job``, and its level for the standard library's logging."""
    name = job_name(job)
    detail = event.detail
    gpus = f"GPU {gpu_ids_text(detail['gpus'])}" if detail.get("gpus") else "no GPU"
    attempt = f", attempt {detail['attempt']}" if detail.get("attempt", 1) != 1 else ""
    if event.kind == "started":
        session = f"; gpujob attach {job.id}, or screen -r {job.session_name}" if job.session else ""
        return f"{name} runs on {gpus}, {_where(detail)}{attempt}{session}", INFO
    if event.kind == "gpu_gone":
        return f"{name} runs on GPU {detail['gpu']}, which is gone; gpujob does not end the job", WARNING
    if event.kind == "stray":
        used = f" ({mib_text(detail['memory'] >> 20)})" if detail.get("memory") else ""
        given = (
            f"; it was given {named_gpus(detail['gpus']) if detail['gpus'] else 'no GPU'}" if "gpus" in detail else ""
        )
        return (
            f"{name}: its process {detail['pid']} uses GPU {detail['gpu']}{used}, which is not allocated to the job{given}",
            WARNING,
        )
    if event.kind == "gpu_error":
        return f"{name} runs on GPU {detail['gpu']}, which reported {harmless(str(detail.get('why')))}", WARNING
    if event.kind == "done":
        if job.log_finding is not None:
            return (
                f"{name} done: exit code 0{attempt}, but its log shows an error: {harmless(job.log_finding.line)}",
                WARNING,
            )
        return f"{name} done: exit code 0{attempt}", INFO
    if event.kind == "failed":
        hint = f"; hint: {job.failure.hint}" if job.failure else ""
        why = f" ({harmless(str(detail['why']))})" if detail.get("why") else ""
        return f"{name} failed: {ending(detail)}{why}{attempt}{hint}", WARNING
    if event.kind == "cancelled":
        return f"{name} cancelled", INFO
    if event.kind == "skipped":
        return f"{name} skipped: {detail.get('why')}", WARNING
    if event.kind == "retry_scheduled":
        when = f"in {detail['wait']:.0f} s" if detail.get("wait") else "immediately"
        return f"{name} is tried again {when}: {harmless(str(detail.get('why')))}", WARNING
    if event.kind == "adopted":
        return f"{name} still runs on {gpus}, {_where(detail)}{attempt}", INFO
    if event.kind == "leader_ended":
        return f"{name}: its main process has ended; its other processes are being ended", INFO
    if event.kind == "leftovers":
        ids = detail.get("gpus") or ()
        kept = f": {named_gpus(ids)} stay{'s' * (len(ids) == 1)} allocated until they end" if ids else ""
        return f"{name} left processes {detail.get('pids')} running{kept}", WARNING
    if event.kind == "missing":
        return f"{name} waits: {harmless(str(detail.get('why')))}", WARNING
    if event.kind == "stopping":
        why = STOPPED_BECAUSE.get(str(detail.get("why")), "it was cancelled")
        return f"{name} is being ended: {why}", INFO
    if event.kind == "swapped":
        return f"{name} swapped places with job {detail.get('with_job')}", INFO
    if event.kind == "edited":
        what = ", ".join(map(str, detail.get("what") or ["its need"]))
        return f"{name} edited: {harmless(what)}", INFO
    if event.kind == "undying":
        return f"{name}: {UNDYING}", WARNING
    if event.kind in PLAIN:
        return f"{name} {PLAIN[event.kind]}", INFO
    if event.kind == "unclaimed":
        return f"{name} waits again: its start was interrupted before the command ran", WARNING
    return f"{name}: {event.kind}", INFO


def ending(detail: dict[str, object]) -> str:
    """Return in words how an attempt ended. ``detail``: the details of the event that recorded the end."""
    outcome = detail.get("outcome")
    how = (
        f"exit code {detail.get('exit_code')}"
        if detail.get("exit_code") is not None
        else f"signal {detail.get('signal')}"
    )
    if outcome == "time_limit":
        return f"time limit reached ({how})"
    if outcome == "trespass":
        return f"it used a GPU that it was not given ({how})"
    if outcome == "could_not_start":
        return "could not be started"
    if outcome == "lost":
        return "lost: its outcome is not known"
    return how


def accepted(job: Job) -> str:
    """Return the log message about a job that was just accepted. It includes the notes of the job."""
    notes = f" ({'; '.join(map(harmless, job.notes))})" if job.notes else ""
    return f"{job_name(job)} accepted from {job.spec.origin or job.spec.source}{notes}"


def how_it_ended(job: Job) -> str:
    """Return how a job ended, as a short text: ``exit 3``, ``signal 9``, ``lost``. Empty if the job has not ended."""
    if job.outcome is Outcome.EXIT:
        warning = f" ({job.log_finding.kind}?)" if job.succeeded and job.log_finding is not None else ""
        return f"exit {job.exit_code}{warning}"
    if job.outcome is Outcome.SIGNAL:
        return f"signal {job.signal}"
    if job.outcome is Outcome.TIME_LIMIT:
        return f"time limit {span_text(job.spec.time_limit_s)}" if job.spec.time_limit_s else "time limit"
    if job.outcome is Outcome.TRESPASS:
        return "used a GPU that it was not given"
    return "" if job.outcome is None else job.outcome.value.replace("_", " ")


def state_text(job: Job) -> str:
    """Return the state of an ended job, and its outcome if this differs: ``failed: exit 3``, ``cancelled``."""
    how = how_it_ended(job)
    return job.state.value if how in ("", job.state.value) else f"{job.state.value}: {how}"


def job_name(job: Job) -> str:
    """Return id and name of a job for messages, with its user in a scheduler of several users: ``job 12 (train.py, lab3)``."""
    user = f", {job.spec.user}" if job.spec.user else ""
    return f"job {job.id} ({harmless(job.spec.shown_name)}{harmless(user)})"
