"""Offers: the smallest changes by which a waiting job would start now, each as a command to paste.

Each offer was tried on a copy of the state with the code that will carry it out (`core/simulation.py`): an offer that
does not start the job is not made. Offers are ranked by what they cost others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from scheduler.core.decide import decide
from scheduler.core.gpu import WHOLE, ResourceRequest, gpu_ids_text, ids_of, is_are, named_gpus
from scheduler.core.job import Job, JobState
from scheduler.core.observations import Asked, Ended, Now, Observation
from scheduler.core.placement_class import class_of
from scheduler.core.requests import Cancel, Edit, First, PauseQueue, Release, Request, Resume
from scheduler.core.rights import Caller
from scheduler.core.scheduler_state import SchedulerState
from scheduler.core.simulation import copy_of
from scheduler.core.units import span_text

MOST_OFFERS = 4
MOST_CANCELS_TRIED = 24
MOST_CANCELLED = 8  # jobs that one offer ends
LEAST_SHARE = 50  # thousandths: no smaller share is offered
NOBODY, THIS_JOB, LATER_JOBS, RUNNING_JOBS = range(4)  # who pays, the least first


@dataclass(frozen=True, slots=True)
class Offer:
    """A change by which a job would start now.

    ``command``: words of a command line, such as ``gpujob resume 3``; ``cost``: a sentence about what it costs and whom;
    ``payer``: NOBODY, THIS_JOB, LATER_JOBS or RUNNING_JOBS; ``lost``: GPU seconds of work that are lost.
    """

    command: str
    cost: str
    request: Request
    payer: int
    lost: float = 0.0


def offers(state: SchedulerState, job: Job, now: Now, by: Caller | None = None, most: int = MOST_OFFERS) -> list[Offer]:
    """Return the best offers for a waiting job, those that cost others least first.

    ``by``: who would give the commands; offers that this user may not carry out are left out.
    """
    found: list[Offer] = []
    if job.state is not JobState.PENDING or not state.may_start:
        return found
    for candidates in (_free_of_cost(state, job), _of_this_job(state, job), _first(job), _cancels(state, job, now, by)):
        for offer in candidates:
            if len(found) < most and starts(state, job.id, offer.request, now, by):
                found.append(offer)
    return sorted(found, key=lambda offer: (offer.payer, offer.lost))


def starts(state: SchedulerState, job: int, request: Request, now: Now, by: Caller | None = None) -> bool:
    """Return whether a waiting job starts as soon as a request is carried out and the processes that it ends are gone."""
    tried = copy_of(state)
    told: list[Observation] = [Asked(1, request, by)]
    while told:
        plan = decide(tried, told, now)
        told = [Ended(stop.job.id, stop.job.attempt, None, 15, now.wall) for stop in plan.stops]
    return job in tried.live


def _free_of_cost(state: SchedulerState, job: Job) -> Iterator[Offer]:
    if job.held:
        yield Offer(f"gpujob release {job.id}", "it was held by its owner", Release((job.id,)), NOBODY)
    if state.queue_paused:
        yield Offer("gpujob queue resume", "other waiting jobs may start, too", PauseQueue(False), NOBODY)
    paused = ids_of(state.fleet.paused_mask & state.fleet.allowed_mask(job.allowed))
    for gpus in (*((gpu,) for gpu in paused), paused if len(paused) > 1 else ()):
        if gpus:
            cost = f"{named_gpus(gpus)} {is_are(gpus)} paused; other jobs may start there, too"
            yield Offer(f"gpujob resume {gpu_ids_text(gpus)}", cost, Resume(gpus), NOBODY)
            if job.need.count <= 1 and starts_on(state, job, gpus):
                return


def starts_on(state: SchedulerState, job: Job, gpus: tuple[int, ...]) -> bool:
    """Return whether a job could be placed on these GPUs if they were not paused."""
    fleet = state.fleet.copy()
    fleet.paused_mask &= ~sum(1 << gpu for gpu in gpus)
    return fleet.find(class_of(job)) is not None


def _of_this_job(state: SchedulerState, job: Job) -> Iterator[Offer]:
    fleet, need = state.fleet, job.need
    if state.parked.get(job.id) == "depends":
        changes = {name: () for name in ("after", "after_ok") if getattr(job.spec, name)}
        words = " ".join(f'--{name.replace("_", "-")} ""' for name in changes)
        cost = "it no longer waits for other jobs"
        yield Offer(f"gpujob edit {job.id} {words}", cost, Edit((job.id,), changes), THIS_JOB)
    if need.by_name or not need.total or fleet.has_nodes:
        return
    kind = class_of(job)
    if job.allowed is not None:
        elsewhere = fleet.find(replace(kind, allowed=None))
        if elsewhere is not None:
            ids = gpu_ids_text(elsewhere)
            change = Edit((job.id,), {"allowed": elsewhere})
            cost = (
                f"it may use {named_gpus(elsewhere)} instead of {named_gpus(ids_of(fleet.allowed_mask(job.allowed)))}"
            )
            yield Offer(f"gpujob edit {job.id} --allowed {ids}", cost, change, THIS_JOB)
    for less in _smaller(need):
        if fleet.find(replace(kind, need=less)) is not None:
            change = Edit((job.id,), {"gpus": str(less)}, (_numbers(less),))
            cost = f"it gets {less.in_words()} instead of {need.in_words()}"
            yield Offer(f"gpujob edit {job.id} --gpus {less}", cost, change, THIS_JOB)
            return


def _smaller(need: ResourceRequest) -> Iterator[ResourceRequest]:
    """Yield smaller requests, the largest first: shares in steps of a twentieth, or fewer GPUs."""
    if need.count > 1:
        yield from (replace(need, count=count) for count in range(need.count - 1, 0, -1))
    elif need.parts > LEAST_SHARE:
        first = (need.parts - 1) // LEAST_SHARE * LEAST_SHARE
        yield from (replace(need, parts=parts) for parts in range(first, 0, -LEAST_SHARE))


def _numbers(need: ResourceRequest) -> tuple[int, int]:
    return (need.count, need.parts)


def _first(job: Job) -> Iterator[Offer]:
    yield Offer(f"gpujob first {job.id}", "jobs before it wait longer", First((job.id,)), LATER_JOBS)


def _cancels(state: SchedulerState, job: Job, now: Now, by: Caller | None) -> Iterator[Offer]:
    """Yield offers that end running jobs: one job, the cheapest first; if one is not enough, several of one server."""
    if not job.need.total:
        return
    allowed = state.fleet.allowed_mask(job.allowed)
    running = [one for one in state.live.values() if any(allowed >> gpu & 1 for gpu in one.gpus)]
    running.sort(key=lambda one: (_lost(one, now), one.id))
    single = next((one for one in running[:MOST_CANCELS_TRIED] if _ends(state, job, (one,), now, by)), None)
    if single is not None:
        yield _cancel((single,), now)
        return
    best: tuple[Job, ...] = ()
    for mask in state.fleet.server_masks:
        here = [one for one in running if any(mask >> gpu & 1 for gpu in one.gpus)][:MOST_CANCELLED]
        if not _ends(state, job, here, now, by):
            continue
        for one in reversed(here):  # without those that are not needed, the most expensive first
            without = [other for other in here if other is not one]
            if _ends(state, job, without, now, by):
                here = without
        if not best or sum(_lost(one, now) for one in here) < sum(_lost(one, now) for one in best):
            best = tuple(here)
    if best:
        yield _cancel(best, now)


def _ends(state: SchedulerState, job: Job, ended: Iterable[Job], now: Now, by: Caller | None) -> bool:
    ids = tuple(one.id for one in ended)
    return bool(ids) and starts(state, job.id, Cancel(ids), now, by)


def _lost(job: Job, now: Now) -> float:
    """Return the GPU seconds that a running job has used."""
    return (max(0.0, now.wall - job.started_at) if job.started_at is not None else 0.0) * job.need.total / WHOLE


def _cancel(ended: Sequence[Job], now: Now) -> Offer:
    ids = tuple(sorted(one.id for one in ended))
    longest = max(now.wall - (one.started_at or now.wall) for one in ended)
    jobs = f"job {ids[0]}, which has run for" if len(ids) == 1 else f"{len(ids)} jobs, which have run for up to"
    lost = sum(_lost(one, now) for one in ended)
    return Offer(
        f"gpujob cancel {' '.join(map(str, ids))}", f"ends {jobs} {span_text(longest)}", Cancel(ids), RUNNING_JOBS, lost
    )
