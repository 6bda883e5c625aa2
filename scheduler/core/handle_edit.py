"""Carries out the request `edit`: a change of a waiting job's spec; part of the decisions (`decide.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from scheduler.core.allowed import allowed_text, check_nodes
from scheduler.core.errors import NotFound, Refused, SchedulerError, UsageError
from scheduler.core.gpu import ResourceRequest, gpu_ids_text
from scheduler.core.job import Job, JobState
from scheduler.core.job_options import EDITABLE
from scheduler.core.model_table import VRAM_NOTE, vram_notes, with_need_notes
from scheduler.core.placement_class import class_of, remedy
from scheduler.core.units import mib_text, span_text

if TYPE_CHECKING:
    from scheduler.core.decision_pass import DecisionPass


Ahead = dict[tuple[int, ...], set[int]]  # jobs → these jobs, and all unfinished jobs that they wait for


def edit(
    decision: DecisionPass, job: Job, changes: Mapping[str, Any], need: tuple[int, int, str] | None, ahead: Ahead
) -> str:
    """Change a waiting job's spec, queue the job again, and return the answer for the user.

    ``changes``: field of JobSpec → new value; ``need``: the new request as (count, parts, profile), None if the request stays
    the same; ``ahead``: what was found for other jobs of the same request. Raises SchedulerError, and changes nothing, if
    the edit is not possible.
    """
    if job.state is not JobState.PENDING:
        hint = f"queue it again: gpujob queue pause, then gpujob retry {job.id}" if job.state.ended else ""
        raise SchedulerError(
            f"cannot edit job {job.id}: it is {job.state.value}, and only a waiting job can be edited", do=hint
        )
    unknown = [name for name in changes if name not in EDITABLE]
    if unknown:
        raise UsageError(f"cannot change {unknown[0]} of a job")
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in changes.items()
    }
    if job.spec.on and {"allowed", "gpus"} & set(values):
        raise Refused(
            f"cannot change the GPUs of job {job.id}: it was submitted for named GPUs (on={gpu_ids_text(job.spec.on)})",
            do="cancel it and submit it again",
        )
    values["edited"] = tuple(dict.fromkeys((*job.spec.edited, *values)))
    spec = replace(job.spec, **values)
    check_nodes(spec.allowed, decision.state.fleet.has_nodes)
    _check_parents(decision, job, (*values.get("after", ()), *values.get("after_ok", ())), ahead)
    before = job.spec, job.need, job.allowed, job.priority, job.notes
    told: tuple[str, ...] = ()
    job.spec, job.allowed = spec, spec.allowed
    job.priority = values.get("priority", job.priority)  # after a swap it differs from the priority of the spec
    if need is not None:
        job.need = ResourceRequest(*need)
    if {"gpus", "vram_mib", "allowed"} & set(values) and not (job.oom_retries and job.need == before[1]):
        told = vram_notes(spec, job.need, decision.state.fleet.managed)
        job.notes = with_need_notes(job.notes, told, (VRAM_NOTE,))
    never = decision.state.fleet.can_ever_hold(class_of(job)) if decision.state.fleet.gpus else ""
    if never:
        ways = remedy(class_of(job))
        job.spec, job.need, job.allowed, job.priority, job.notes = before
        raise Refused(f"cannot edit job {job.id}: {never}", do=ways)
    old = {name: getattr(before[0], name) for name in values} | {"priority": before[3]}
    shown = [
        f"{EDITABLE[name].flag[2:]} {_shown(name, old[name])} -> {_shown(name, value)}"
        for name, value in values.items()
        if name in EDITABLE and value != old[name]
    ]
    if not shown and job.need == before[1]:
        job.spec, job.need, job.allowed, job.priority, job.notes = before
        return f"job {job.id} is unchanged: it already has these values"
    decision.plan.respecs[job.id] = job
    decision.changed(job, "edited", what=shown)
    decision.enqueue(job)
    if job.state is not JobState.PENDING:
        return f"job {job.id} is {job.state.value}: a dependency did not succeed"
    answer = f"job {job.id}: {', '.join(shown) or f'need {before[1]} -> {job.need}'}"
    return "; ".join((answer, *told))


def _check_parents(decision: DecisionPass, job: Job, parents: tuple[int, ...], ahead: Ahead) -> None:
    """Check the jobs that this job would wait for in addition.

    Raises NotFound if one of them does not exist, and Refused if this job would wait for itself, even indirectly.
    """
    if parents not in ahead:
        for parent in parents:
            if decision.find(parent) is None:
                raise NotFound(f"cannot wait for job {parent}: there is no such job", do="see gpujob jobs")
        ahead[parents] = _with_all_before(decision, parents)
    if job.id in ahead[parents]:
        raise Refused(f"cannot edit job {job.id}: it would wait for itself", do="leave out the jobs that wait for it")


def _with_all_before(decision: DecisionPass, jobs: tuple[int, ...]) -> set[int]:
    """Return these jobs, and all unfinished jobs that they wait for."""
    seen = set(jobs)
    ahead = [*jobs]
    while ahead:
        other = decision.find(ahead.pop())
        if other is not None and not other.state.ended:
            new = {*other.spec.after, *other.spec.after_ok} - seen
            seen |= new
            ahead += new
    return seen


def _shown(name: str, value: Any) -> str:
    if name == "allowed":
        return "any" if value is None else allowed_text(value)
    if value in (None, "", ()):
        return {"gpus": "(not given)", "cuda": "(default)", "link": "any"}.get(name, "none")
    if name == "vram_mib":
        return mib_text(value)
    if name == "time_limit_s":
        return span_text(value)
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
