"""Offers: the smallest changes by which a waiting job would start now, each as a command to paste.

Each offer was tried on a copy of the state with the code that will carry it out (`core/simulation.py`): an offer that
does not start the job is not made. Offers are ranked by what they cost others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from scheduler.core.decide import decide
from scheduler.core.gpu import WHOLE, ResourceRequest, gpu_ids_text, ids_of, is_are, named_gpus
from scheduler.core.job import Job, JobState
from scheduler.core.model_table import ModelTable, model_in, need_of, words_of
from scheduler.core.observations import Asked, Ended, Now
from scheduler.core.placement_class import PlacementClass, class_for, class_of
from scheduler.core.requests import Cancel, Edit, First, PauseQueue, Release, Request, Resume
from scheduler.core.rights import Caller
from scheduler.core.scheduler_state import SchedulerState
from scheduler.core.simulation import copy_of
from scheduler.core.topology import Link
from scheduler.core.units import span_text

MOST_OFFERS = 4
MOST_CANCELS_TRIED = 24
MOST_CANCELLED = 8  # jobs that one offer ends
LEAST_SHARE = 50  # thousandths: no smaller share is offered
NOBODY, THIS_JOB, LATER_JOBS, RUNNING_JOBS = range(4)  # who pays, the least first


@dataclass(frozen=True, slots=True)
class Offer:
    """A change by which a job would start now.

    ``command``: a command line, such as ``gpujob resume 3``; two commands are joined by ``&&``. ``cost``: what it costs, and
    whom, as a clause. ``requests``: the requests of the commands. ``payer``: NOBODY, THIS_JOB, LATER_JOBS or RUNNING_JOBS;
    ``lost``: GPU seconds (or slot seconds) of work that are lost.
    """

    command: str
    cost: str
    requests: tuple[Request, ...]
    payer: int
    lost: float = 0.0

    @property
    def parts(self) -> frozenset[str]:
        """The single commands."""
        return frozenset(self.command.split(" && "))


def offers(state: SchedulerState, job: Job, now: Now, by: Caller | None = None, most: int = MOST_OFFERS) -> list[Offer]:
    """Return the best offers for a waiting job, those that cost others least first.

    ``by``: who would give the commands; offers that this user may not carry out are left out.
    """
    found: list[Offer] = []
    if job.state is not JobState.PENDING or not state.may_start:
        return found
    attempt = _Attempt(state, job, now, by)
    if attempt.starts(()):  # it starts by itself
        return found
    changes = (*_free_of_cost(state, job), *_of_this_job(state, job))
    first = _first(job)
    obstacles = [
        offer for offer in (_joined(_all_free_of_cost(state, job)), *_no_dependency(state, job)) if offer.requests
    ]
    # Several things may keep it, and jobs before it may take what becomes free: then one change is not enough.
    together = [obstacles[:number] for number in range(1, len(obstacles) + 1)]
    for offer in (*changes, first, *map(_joined, together), *(_joined([first, one]) for one in changes),
                  *(_joined([first, *parts]) for parts in together)):  # fmt: skip
        needless = any(known.parts <= offer.parts for known in found)
        if not needless and attempt.starts(offer.requests):
            found.append(offer)
    before = [(), (first,)] if found else [(), (first,), *together, *((first, *parts) for parts in together)]
    found += [one for one in _cancels(attempt, before) if not any(known.parts <= one.parts for known in found)]
    return sorted(found, key=lambda offer: (offer.payer, offer.lost))[:most]


@dataclass(frozen=True, slots=True)
class _Attempt:
    """Tries requests for a waiting job on copies of the state."""

    state: SchedulerState
    job: Job
    now: Now
    by: Caller | None

    def starts(self, requests: Iterable[Request]) -> bool:
        """Return whether the job starts as soon as requests are carried out and the processes that they end are gone.

        Jobs do not end at the same time: whichever of them ends first, no other waiting job may take its place.
        """
        tried = copy_of(self.state)
        decide(tried, [], self.now)
        stopped: list[Job] = []
        for request in requests:
            stopped += [stop.job for stop in decide(tried, [Asked(1, request, self.by)], self.now).stops]
        if not stopped:
            return self.job.id in tried.live
        ends = [Ended(job.id, job.attempt, None, 15, self.now.wall) for job in stopped]
        one_by_one = ([[end] for end in ends[at:] + ends[:at]] for at in range(len(ends)))
        return all(self._starts_after(tried, passes) for passes in ([ends], *one_by_one))

    def _starts_after(self, state: SchedulerState, passes: Iterable[list[Ended]]) -> bool:
        """Return whether the job starts when jobs have ended. ``passes``: the ends that come together, in their order."""
        state = copy_of(state)
        for ends in passes:
            decide(state, ends, self.now)
        return self.job.id in state.live


def _joined(parts: Sequence[Offer]) -> Offer:
    """Return several offers as one."""
    requests = tuple(request for one in parts for request in one.requests)
    command, cost = " && ".join(one.command for one in parts), "; ".join(one.cost for one in parts)
    payer = max((one.payer for one in parts), default=NOBODY)
    return Offer(command, cost, requests, payer, sum(one.lost for one in parts))


def _free_of_cost(state: SchedulerState, job: Job) -> list[Offer]:
    """Return the offers that cost nobody anything; of the paused GPUs, each alone before all together."""
    found = _all_free_of_cost(state, job)
    paused = ids_of(state.fleet.paused_mask & state.fleet.devices(class_of(job)))
    if len(paused) < 2:
        return found
    return [*found[:-1], *(_resume((gpu,)) for gpu in paused), found[-1]]


def _all_free_of_cost(state: SchedulerState, job: Job) -> list[Offer]:
    found = []
    if job.held:
        found.append(Offer(f"gpujob release {job.id}", "it was held by its owner", (Release((job.id,)),), NOBODY))
    if state.queue_paused:
        found.append(Offer("gpujob queue resume", "other jobs may start, too", (PauseQueue(False),), NOBODY))
    paused = ids_of(state.fleet.paused_mask & state.fleet.devices(class_of(job)))
    return [*found, _resume(paused)] if paused else found


def _resume(gpus: tuple[int, ...]) -> Offer:
    cost = f"{named_gpus(gpus)} {is_are(gpus)} paused; other jobs may start there, too"
    return Offer(f"gpujob resume {gpu_ids_text(gpus)}", cost, (Resume(gpus),), NOBODY)


def _no_dependency(state: SchedulerState, job: Job) -> Iterator[Offer]:
    if state.parked.get(job.id) == "depends":
        changes = {name: () for name in ("after", "after_ok") if getattr(job.spec, name)}
        words = " ".join(f'--{name.replace("_", "-")} ""' for name in changes)
        cost = "it no longer waits for other jobs"
        yield Offer(f"gpujob edit {job.id} {words}", cost, (Edit((job.id,), changes),), THIS_JOB)


def _of_this_job(state: SchedulerState, job: Job) -> Iterator[Offer]:
    fleet, need = state.fleet, job.need
    yield from _no_dependency(state, job)
    if need.by_name or not need.total or fleet.has_nodes:
        return
    kind = class_of(job)
    if job.allowed is not None:
        elsewhere = fleet.find(replace(kind, allowed=None))
        edited = _edited(state, job, {"allowed": elsewhere}) if elsewhere is not None else None
        if elsewhere is not None and edited is not None:
            ids = gpu_ids_text(elsewhere)
            cost = f"it may use {named_gpus(elsewhere)} instead of {named_gpus(ids_of(fleet.devices(kind)))}"
            yield Offer(f"gpujob edit {job.id} --allowed {ids}", cost, (edited[0],), THIS_JOB)
    for link in Link:
        if link > kind.link and fleet.find(replace(kind, link=link)) is not None:
            change, word = Edit((job.id,), {"link": link.word}), link.word or '""'
            wanted = kind.link.in_words
            cost = f"its GPUs need not be joined by {wanted}"
            if link.word:
                cost = f"its GPUs are joined by {link.in_words} instead of {wanted}"
            yield Offer(f"gpujob edit {job.id} --link {word}", cost, (change,), THIS_JOB)
            break
    for less in _smaller(need):
        edited = _edited(state, job, {"gpus": str(less)})
        if edited is not None and edited[1].need == less and fleet.find(edited[1]) is not None:
            cost = f"it gets {less.in_words()} instead of {need.in_words()}"
            yield Offer(f"gpujob edit {job.id} --gpus {less}", cost, (edited[0],), THIS_JOB)
            return


def _edited(state: SchedulerState, job: Job, changes: dict[str, Any]) -> tuple[Edit, PlacementClass] | None:
    """Return the request that `gpujob edit` makes of changes, and the placement class of the job after it.

    The need is computed as in `client/edit_needs.py`. Return None if it depends on the model table, which is not known here.
    """
    spec, need = replace(job.spec, **changes), job.need
    needs: tuple[tuple[int, int, str], ...] = ()
    if "gpus" in changes or (spec.vram_mib and not job.oom_retries):
        if not spec.gpus and model_in(words_of(spec)) is not None:
            return None
        need, _ = need_of(spec, ModelTable(), state.fleet.managed)
        needs = ((need.count, need.parts, need.profile),)
    return Edit((job.id,), changes, needs), class_for(need, spec.allowed, spec)


def _smaller(need: ResourceRequest) -> Iterator[ResourceRequest]:
    """Yield smaller requests, the largest first: shares in steps of a twentieth, or fewer GPUs.

    A MIG instance has no smaller one of its profile.
    """
    if need.count > 1:
        yield from (replace(need, count=count) for count in range(need.count - 1, 0, -1))
    elif need.parts > LEAST_SHARE and not need.profile:
        first = (need.parts - 1) // LEAST_SHARE * LEAST_SHARE
        yield from (replace(need, parts=parts) for parts in range(first, 0, -LEAST_SHARE))


def _first(job: Job) -> Offer:
    return Offer(f"gpujob first {job.id}", "other waiting jobs may start later", (First((job.id,)),), LATER_JOBS)


def _cancels(attempt: _Attempt, before: Sequence[Sequence[Offer]]) -> list[Offer]:
    """Return the best offer that ends running jobs, as a list; an empty list if there is none.

    It ends one job, the one with the least work; if one is not enough, several jobs of one server or group of linked GPUs. ``before``: other
    offers that may come before it; the first of them with which the job starts are taken.
    """
    state, job, now = attempt.state, attempt.job, attempt.now
    if job.need.by_name:
        return []
    allowed = state.fleet.devices(class_of(job))
    running = [one for one in state.live.values() if any(allowed >> gpu & 1 for gpu in one.gpus)]
    if not job.need.count:
        running = [one for one in state.live.values() if not one.need.count]
    running.sort(key=lambda one: (_lost(one, now), one.id))
    groups: list[Sequence[Job]] = [(one,) for one in running[:MOST_CANCELS_TRIED]]
    if not job.need.count and len(running) > 1:
        groups.append(running[:MOST_CANCELLED])
    for mask in state.fleet.groups(class_of(job)) if job.need.count else ():
        here = [one for one in running if any(mask >> gpu & 1 for gpu in one.gpus)][:MOST_CANCELLED]
        if len(here) > 1:
            groups.append(here)
    for others in before:
        requests = _joined(others).requests
        found = [_fewest(attempt, group, requests) for group in groups if attempt.starts((*requests, _cancel(group)))]
        if found:
            best = min(found, key=lambda group: (sum(_lost(one, now) for one in group), len(group)))
            return [_joined([*others, _cancel_offer(best, now)])]
    return []


def _fewest(attempt: _Attempt, group: Sequence[Job], before: tuple[Request, ...]) -> Sequence[Job]:
    """Return a group of jobs without those that need not end; those with the most work are kept if possible."""
    for one in reversed(group):
        without = [other for other in group if other is not one]
        if without and attempt.starts((*before, _cancel(without))):
            group = without
    return group


def _cancel(group: Iterable[Job]) -> Cancel:
    return Cancel(tuple(sorted(one.id for one in group)))


def _lost(job: Job, now: Now) -> float:
    """Return the GPU seconds that a running job has used; of a job without a GPU, the seconds times its slots."""
    ran_s = max(0.0, now.wall - job.started_at) if job.started_at is not None else 0.0
    return ran_s * (job.need.total / WHOLE if job.need.count else job.need.slots)


def _cancel_offer(ended: Sequence[Job], now: Now) -> Offer:
    ids = sorted(one.id for one in ended)
    longest = max(now.wall - (one.started_at or now.wall) for one in ended)
    jobs = f"job {ids[0]}, which has run for" if len(ids) == 1 else f"{len(ids)} jobs, which have run for up to"
    lost = sum(_lost(one, now) for one in ended)
    command = f"gpujob cancel {' '.join(map(str, ids))}"
    return Offer(command, f"ends {jobs} {span_text(longest)}", (_cancel(ended),), RUNNING_JOBS, lost)
