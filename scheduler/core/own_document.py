"""The document that a scheduler publishes about itself, made from its state."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler.core.gpu import Gpu, ResourceRequest, ids_of
from scheduler.core.job import TICKS_A_SECOND, Job, Process
from scheduler.core.observations import Now
from scheduler.core.scheduler_state import SchedulerState
from scheduler.core.shared_bookings import MOST_WANTS, Booking, Document, Want


def own_document(
    state: SchedulerState,
    now: Now,
    key: str,
    boot: str,
    process: Process | None,
    supervisors: tuple[Process, ...],
    space: int,
) -> Document:
    """Return the document of a scheduler. ``key``, ``boot``, ``process``, ``supervisors``, ``space``: as in `Document`.

    Also adds the use since the last document to the own use. ``now.since_boot`` must be known.
    """
    at, sharing = now.since_boot or 0.0, state.sharing
    bookings = tuple(_bookings(state, now))
    used = 0.0
    if sharing is not None:
        sharing.account(at, sum(one.parts for one in bookings) / 1000)
        used = sharing.used
    managed = state.fleet.managed
    return Document(
        key, boot, process=process, supervisors=supervisors, space=space, gpus=tuple(gpu.uuid for gpu in managed),
        waiting=state.waiting(), wants=() if state.queue_paused or not state.may_start else _wants(state, managed),
        used=used, used_at=at, bookings=bookings, reserved=tuple(_reserved(state)),
    )  # fmt: skip


def _bookings(state: SchedulerState, now: Now) -> Iterator[Booking]:
    for job in state.live.values():
        if job.need.total and job.attempt_key not in state.unbooked:
            since, until = _times(state, job, now)
            processes = () if job.process is None else (job.process,)
            yield from _on_gpus(state, job.need, job.gpus, job.spec.vram_mib or 0, since, until, processes)
    for held in state.holdings.values():
        if held.need.total and held.key not in state.unbooked:
            at = now.since_boot or 0.0
            yield from _on_gpus(state, held.need, held.gpus, held.vram_mib, at, None, held.processes[:16])


def _reserved(state: SchedulerState) -> Iterator[Booking]:
    """Yield what is free on the GPUs that the first job reserves until it fits (`core/take_turns.py: Turns.reserves`)."""
    if state.sharing is None or state.sharing.reserving is None:
        return
    job, since = state.sharing.reserving
    for number, mask, kind in state.fleet.reserved:
        for i in ids_of(mask) if number == job else ():
            parts = min(kind.need.parts, state.fleet.free[i])
            if parts:
                yield Booking(state.fleet.gpus[i].uuid, parts, 0, since)


def _on_gpus(
    state: SchedulerState,
    need: ResourceRequest,
    gpus: tuple[int, ...],
    vram_mib: int,
    since: float,
    until: float | None,
    processes: tuple[Process, ...],
) -> Iterator[Booking]:
    for index in gpus:
        gpu = state.fleet.gpus.get(index)
        if gpu is not None:
            yield Booking(gpu.uuid, need.parts, vram_mib, since, until, processes)


def _times(state: SchedulerState, job: Job, now: Now) -> tuple[float, float | None]:
    """Return start and expected end of a job, in seconds since boot."""
    if job.process is not None:
        since = job.process.ticks / TICKS_A_SECOND
    else:
        since = max(0.0, (now.since_boot or 0.0) - max(0.0, now.wall - (job.started_at or now.wall)))
    expected = state.estimates.of(job.spec, job.need)
    if job.spec.time_limit_s is not None:
        expected = min(expected or job.spec.time_limit_s, job.spec.time_limit_s)
    return since, None if expected is None else since + expected


def _wants(state: SchedulerState, managed: list[Gpu]) -> tuple[Want, ...]:
    """Return what waits for GPUs that others may leave: jobs that could start if others had booked nothing."""
    uuids = {gpu.index: gpu.uuid for gpu in managed}
    found = []
    for kind, number in state.queue.sizes().items():
        if kind.need.total and not kind.need.by_name and not state.fleet.can_ever_hold(kind):
            usable = state.fleet.could_use(kind)
            if usable:
                gpus = () if usable == state.fleet.all_mask else tuple(uuids[i] for i in ids_of(usable))
                found.append(Want(kind.need.count, kind.need.parts, kind.vram_mib, gpus, number))
    return tuple(found[:MOST_WANTS])
