"""The document that a scheduler publishes about itself, made from its state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from scheduler.core.gpu import WHOLE, Gpu, ResourceRequest, ids_of
from scheduler.core.job import TICKS_A_SECOND, Job, Process
from scheduler.core.observations import Now
from scheduler.core.scheduler_state import SchedulerState
from scheduler.core.shared_bookings import MOST_BOOKINGS, MOST_PROCESSES, MOST_WANTS, Booking, Document, Want

MANY = MOST_BOOKINGS // 2  # bookings, from which on those of a GPU are merged


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
    if len(bookings) > MANY:
        bookings = tuple(_merged(bookings))
    used = 0.0
    if sharing is not None:
        sharing.account(at, sum(one.parts for one in bookings) / WHOLE)
        used = sharing.used
    managed = state.fleet.managed
    return Document(
        key, boot, process=process, supervisors=supervisors, space=space, gpus=tuple(gpu.uuid for gpu in managed),
        waiting=state.waiting(), wants=() if state.queue_paused or not state.may_start else _wants(state, managed),
        used=used, used_at=at, bookings=bookings, reserved=tuple(_reserved(state)),
    )  # fmt: skip


def _bookings(state: SchedulerState, now: Now) -> Iterator[Booking]:
    for job in state.live.values():
        if job.need.count:
            since, until = _times(state, job, now)
            processes = () if job.process is None else (job.process,)
            yield from _on_gpus(state, job.need, job.gpus, job.spec.vram_mib or 0, since, until, processes)
    for held in state.holdings.values():
        if held.need.count:
            since = min((one.ticks for one in held.processes), default=0) / TICKS_A_SECOND
            yield from _on_gpus(state, held.need, held.gpus, held.vram_mib, since, None, held.processes[:16])


def _reserved(state: SchedulerState) -> Iterator[Booking]:
    """Yield the GPUs that the first job reserves until it fits (`core/take_turns.py: Turns.reserves`).

    They may be in use still: no other scheduler refills what becomes free.
    """
    if state.sharing is None or state.sharing.first is None or not state.sharing.reserving:
        return
    job, _, since = state.sharing.first
    for one in state.fleet.reserved:
        for i in ids_of(one.mask) if one.job == job else ():
            yield Booking(state.fleet.gpus[i].uuid, one.kind.need.parts, 0, since)


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
            # A job that names its GPUs shares them with no other job that starts later.
            yield Booking(gpu.uuid, WHOLE if need.by_name else need.parts, vram_mib, since, until, processes)


def _merged(bookings: Iterable[Booking]) -> Iterator[Booking]:
    """Yield one booking for each GPU, which stands for all bookings on this GPU."""
    by_gpu: dict[str, list[Booking]] = {}
    for one in bookings:
        by_gpu.setdefault(one.gpu, []).append(one)
    for gpu, ones in by_gpu.items():
        known = [one.until for one in ones if one.until is not None]
        until = max(known) if len(known) == len(ones) else None
        processes = sorted({process for one in ones for process in one.processes}, key=lambda each: each.pid)
        parts, mib = min(WHOLE, sum(one.parts for one in ones)), sum(one.memory_mib for one in ones)
        yield Booking(gpu, parts, mib, min(one.since for one in ones), until, tuple(processes[:MOST_PROCESSES]))


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
    """Return the needs of the waiting jobs that could start if others had booked nothing."""
    uuids = {gpu.index: gpu.uuid for gpu in managed}
    found, named = [], 0
    for kind, number in state.queue.sizes().items():
        if kind.need.total and not kind.need.by_name and not state.fleet.can_ever_hold(kind):
            usable = state.fleet.could_use(kind)
            if usable:
                gpus = () if usable == state.fleet.all_mask else tuple(uuids[i] for i in ids_of(usable))
                named += len(gpus)
                if named > MANY:
                    break
                found.append(Want(kind.need.count, kind.need.parts, kind.vram_mib, gpus, number))
    return tuple(found[:MOST_WANTS])
