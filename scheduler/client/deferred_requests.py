"""Requests made while no scheduler runs, for jobs that were running when the last scheduler ended.

Only the next start of the scheduler records how such a job ended. So a request for such a job is stored, and the next
start carries out the request. If the next start would refuse the request, it is refused immediately.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from scheduler.core.job import Job, JobState
from scheduler.core.requests import (
    Answer,
    Cancel,
    Edit,
    First,
    Hold,
    JobsRequest,
    Release,
    Request,
    Requeue,
    Swap,
)  # fmt: skip

DONE = {
    Cancel: "cancelled",
    Requeue: "run again",
    Hold: "held",
    Release: "released",
    First: "put first",
    Edit: "changed",
}


@dataclass(frozen=True, slots=True)
class Tried:
    """The result of a request on a copy of the stored jobs: the answer, and whether it changed any job."""

    answer: Answer
    changes: bool


@dataclass(slots=True)
class Divided:
    """A request in two parts: one part to carry out now, and one part to store for the next start.

    ``lines``: the answers for the jobs that are not in ``at_once``. ``code``: the exit code of the first of these jobs
    that is refused; 0 if none is refused.
    """

    at_once: Request
    later: list[JobsRequest] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    code: int = 0


def divide(
    request: Request, recorded: Mapping[int, Job], earlier: Collection[Request], try_out: Callable[[JobsRequest], Tried]
) -> Divided:
    """Split a request into the part that can be carried out now and the part that has to wait for the next start.

    ``recorded``: job id → job, for jobs that ran when the last scheduler ended, each as its attempt record shows it.
    ``earlier``: the requests that already wait for the next start.
    ``try_out``: carries out a request on a copy of the stored jobs.

    A request of a kind that names no jobs is carried out now. If the request names jobs, the first rule that fits
    applies to each of these jobs (to both jobs of a Swap together). "Later" means: at the next start.

    1. If a request in ``earlier`` names the job: later, because requests for one job keep their order.
    2. If the request is a First or Swap, and ``earlier`` has a First or Swap: later, because both change the order of
       the queue.
    3. If the request is a Cancel or Requeue, and the job may still run: later, because the result depends on how the
       job ends.
    4. If the request is refused for the job, or changes nothing: the job is answered now.
    5. If the job is in ``recorded``: later. A Swap is left for later if ``recorded`` has any job.
    6. All remaining jobs: now for a Cancel, in which the order of the jobs does not matter. For all other requests:
       later if another job of the request is handled later, because a request handles its jobs in order; else now.
    """
    if not isinstance(request, JobsRequest):
        return Divided(request)
    touched = {job for stored in earlier if isinstance(stored, JobsRequest) for job in stored.jobs}
    if isinstance(request, (First, Swap)) and any(isinstance(stored, (First, Swap)) for stored in earlier):
        touched.update(request.jobs)
    if not recorded and not touched.intersection(request.jobs):
        return Divided(request)
    if isinstance(request, Swap):
        return _of_swap(request, bool(touched.intersection(request.jobs)), try_out)
    divided = Divided(_only(request, ()))
    left: set[int] = set()
    others: set[int] = set()
    for number in request.jobs:
        job = recorded.get(number)
        # What Cancel and Requeue do with a job that may still run depends on how it ends.
        unknown = job is not None and job.state.holds_gpus and isinstance(request, (Cancel, Requeue))
        tried = None if unknown or number in touched else try_out(_only(request, {number}))
        if tried is not None and not tried.changes:
            divided.lines += tried.answer.lines
            divided.code = divided.code or tried.answer.code
        elif tried is None or job is not None:
            left.add(number)
        else:
            others.add(number)
    if left and not isinstance(request, Cancel):
        left |= others
    else:
        divided.at_once = _only(request, others)
    if isinstance(request, Requeue):
        divided.later = _requeues(request, left, recorded)
    elif left:
        divided.later = [_only(request, left)]
    divided.lines += [_line(job, part, recorded) for part in divided.later for job in part.jobs]
    return divided


def _of_swap(request: Swap, touched: bool, try_out: Callable[[JobsRequest], Tried]) -> Divided:
    tried = None if touched else try_out(request)
    if tried is not None and not tried.changes:
        return Divided(_only(request, ()), [], list(tried.answer.lines), tried.answer.code)
    line = f"jobs {', '.join(map(str, request.jobs))} change places at the next start of the scheduler"
    return Divided(_only(request, ()), [request], [line])


def _requeues(request: Requeue, left: Collection[int], recorded: Mapping[int, Job]) -> list[JobsRequest]:
    """Return requests that run the jobs in ``left`` again: one for jobs that may still run, and one for all other jobs.

    The first request runs a job again unless the job ends with DONE. The second request contains, for each job whose
    last attempt is known to have ended, the number of that attempt.
    """
    jobs = [job for job in request.jobs if job in left]
    running = tuple(job for job in jobs if job in recorded and recorded[job].state.holds_gpus)
    seen = {**request.seen(), **{job: recorded[job].attempt for job in jobs if job in recorded and job not in running}}
    ended = (*(job for job in jobs if job in seen and job not in running),
             *(job for job in jobs if job not in seen and job not in running))  # fmt: skip
    parts: list[JobsRequest] = [Requeue(running, unless_done=True)] if running else []
    if ended:
        parts.append(Requeue(ended, request.unless_done, tuple(seen[job] for job in ended if job in seen)))
    return parts


def _line(job: int, part: JobsRequest, recorded: Mapping[int, Job]) -> str:
    done = DONE[type(part)]
    if isinstance(part, Requeue) and part.unless_done:
        done += ", unless it ends successfully,"
    if job not in recorded:
        return f"job {job} is {done} at the next start of the scheduler"
    state = recorded[job].state
    now = (
        "waits for another attempt"
        if state is JobState.PENDING
        else f"has ended ({state.value})"
        if state.ended
        else "was running when the last scheduler ended"
    )
    return f"job {job} {now}; it is {done} at the next start of the scheduler"


def _only(request: JobsRequest, wanted: Collection[int]) -> JobsRequest:
    """Return the request restricted to the jobs in ``wanted``."""
    at = [place for place, job in enumerate(request.jobs) if job in wanted]
    jobs = tuple(request.jobs[place] for place in at)
    if isinstance(request, Requeue):
        return replace(
            request, jobs=jobs, after=tuple(request.after[place] for place in at if place < len(request.after))
        )
    if isinstance(request, Edit):
        return replace(
            request, jobs=jobs, needs=tuple(request.needs[place] for place in at if place < len(request.needs))
        )
    return replace(request, jobs=jobs)
