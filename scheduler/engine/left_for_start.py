"""What is asked, while no scheduler runs, of jobs that ran when the last one ended: left for the next start.

Only that takes note of how they ended. What it would refuse is refused at once.
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
    Pause,
    PauseQueue,
    Release,
    Request,
    Requeue,
    Resume,
    StateEdited,
    Swap,
)  # fmt: skip

JobsRequest = Cancel | Requeue | Hold | Release | First | Swap | Edit
Whole = (Pause, Resume, PauseQueue, StateEdited)  # concern no single job
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
    """What the next start would answer, by the records as they are now, and whether the request would change a job."""

    answer: Answer
    changes: bool


@dataclass(slots=True)
class Divided:
    """A request in parts: what is carried out at once, what is left for the next start, and what is told of that.

    ``code``: the exit code that the refused ones of ``lines`` ask for.
    """

    at_once: Request
    later: list[JobsRequest] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    code: int = 0


def divide(
    request: Request, recorded: Mapping[int, Job], earlier: Collection[Request], try_out: Callable[[JobsRequest], Tried]
) -> Divided:
    """``recorded``: those of the request's jobs that ran when the last scheduler ended, as their records tell them.
    ``earlier``: what was left for the start already.

    What would be refused, or would change nothing, is answered now. When something is left for the start, all that remains is,
    because the parts of a request count in their order (those of a cancel do not). What is asked later of the same jobs is left,
    too, and so is a change of places after another.
    """
    if isinstance(request, Whole):
        return Divided(request)
    touched = {job for wish in earlier if not isinstance(wish, Whole) for job in wish.jobs}
    if isinstance(request, (First, Swap)) and any(isinstance(wish, (First, Swap)) for wish in earlier):
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
        unknown = job is not None and job.state.holds_gpus and isinstance(request, (Cancel, Requeue))  # how it will end
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
    line = f"jobs {', '.join(map(str, request.jobs))} change places when the scheduler starts again"
    return Divided(_only(request, ()), [request], [line])


def _requeues(request: Requeue, left: Collection[int], recorded: Mapping[int, Job]) -> list[JobsRequest]:
    """One that runs on, and ends well meanwhile, is not run twice; of one that has ended, the attempt is told."""
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
        done += ", if it has not ended well,"
    if job not in recorded:
        return f"job {job} is {done} when the scheduler starts again"
    state = recorded[job].state
    now = (
        "is to run again"
        if state is JobState.PENDING
        else f"has ended ({state.value})"
        if state.ended
        else "was running at last"
    )
    return f"job {job} {now}; it is {done} when the scheduler starts again"


def _only(request: JobsRequest, wanted: Collection[int]) -> JobsRequest:
    """The same request for those of its jobs that are ``wanted``."""
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
