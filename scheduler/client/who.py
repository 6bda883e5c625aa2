"""Use of the GPUs of this machine by user: bookings of all schedulers and leases, beside what their processes use."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from scheduler.client.machine_gpus import machine_gpus
from scheduler.client.neighbours import published
from scheduler.core.fair_shares import HALF_LIFE_S
from scheduler.core.gpu import WHOLE, Gpu
from scheduler.core.neighbours import Neighbour, Neighbours, Sharing
from scheduler.core.shared_bookings import LEASE, Booking
from scheduler.intake.machine_settings import machine_settings
from scheduler.sharing.bookings_folder import Published, user_name


@dataclass(slots=True)
class Holder:
    """The part of one GPU that one user has.

    ``share``: booked share, 0 to 1; ``memory_mib``, ``load``: in use by the user's processes (None: not known);
    ``processes``: their number; ``since``, ``until``: seconds since 1970; ``kind``: ``jobs``, ``lease``, ``reserved``
    (for a job that waits) or ``foreign`` (nothing is booked); ``own``: the user asks about himself.
    """

    gpu: Gpu
    user: str
    share: float = 0.0
    memory_mib: int | None = None
    load: float | None = None
    processes: int | None = None
    since: float | None = None
    until: float | None = None
    kind: str = "foreign"
    own: bool = False

    @property
    def idle(self) -> bool:
        """True if a part of the GPU is booked and no process of the user is on the GPU. False if this is not known."""
        return self.share > 0 and self.processes == 0 and self.kind != "reserved"


def who(environ: Mapping[str, str]) -> tuple[list[Gpu], list[Holder], list[str]]:
    """Return the GPUs of this machine, who has them, and problems with the bookings. Raises NoGpuData."""
    documents, problems = published(environ)
    machine = machine_gpus(environ, documents, strict=False)
    if machine.problem:
        problems = [*problems, machine.problem]
    me, found = user_name(os.getuid()), dict[tuple[str, str, str], Holder]()
    by_uuid = {gpu.uuid: gpu for gpu in machine.gpus}
    leaders = dict[tuple[str, str, str], set[int]]()
    for one in documents:
        _add_bookings(one, one.document.bookings, _kind(one), by_uuid, found, me)
        _add_bookings(one, one.document.reserved, "reserved", by_uuid, found, me)
        for booking in one.document.bookings:
            key = (booking.gpu, one.user, _kind(one))
            leaders.setdefault(key, set()).update(process.pid for process in booking.processes)
    for uuid, snapshot in machine.snapshots.items():
        for holder in found.values():
            if holder.gpu.uuid == uuid and snapshot.processes is not None:
                holder.processes, holder.memory_mib = 0, 0
        for process in snapshot.processes or ():
            user = process.user or "?"
            kinds = [kind for kind in ("jobs", "lease") if (uuid, user, kind) in found]
            if len(kinds) == 2 and leaders[uuid, user, "lease"] & _with_ancestors(process.pid):
                kinds.reverse()
            key = (uuid, user, kinds[0] if kinds else "foreign")
            holder = found.setdefault(key, Holder(by_uuid[uuid], user, own=user == me))
            holder.processes = (holder.processes or 0) + 1
            if process.memory_mib is not None:
                holder.memory_mib = (holder.memory_mib or 0) + process.memory_mib
            if process.load is not None:
                holder.load = min(1.0, (holder.load or 0.0) + process.load)
            if not holder.share and process.started_at:
                holder.since = min(holder.since or process.started_at, process.started_at)
    holders = sorted(found.values(), key=lambda one: (one.gpu.index, one.user, one.kind))
    return machine.gpus, holders, problems


def _add_bookings(
    one: Published,
    bookings: Iterable[Booking],
    kind: str,
    gpus: Mapping[str, Gpu],
    found: dict[tuple[str, str, str], Holder],
    me: str,
) -> None:
    offset = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    for booking in bookings:
        if booking.gpu not in gpus:
            continue
        key = (booking.gpu, one.user, kind)
        holder = found.setdefault(key, Holder(gpus[booking.gpu], one.user, kind=kind, own=one.user == me))
        since = booking.since + offset
        holder.since = since if not holder.share else min(holder.since or since, since)
        until = None if booking.until is None else booking.until + offset
        first = not holder.share
        holder.until = until if first else None if until is None or holder.until is None else max(holder.until, until)
        holder.share = min(1.0, holder.share + booking.parts / WHOLE)


def _kind(one: Published) -> str:
    return "lease" if one.document.kind == LEASE else "jobs"


def _with_ancestors(pid: int) -> set[int]:
    """Return the pids of a process and of its ancestors, as far as they are known."""
    import psutil

    try:
        return {pid, *(one.pid for one in psutil.Process(pid).parents())}
    except psutil.Error:
        return {pid}


@dataclass(frozen=True, slots=True)
class UserUse:
    """The use of a user on this machine. ``used_h``: GPU hours, decayed; ``share``: of the use of all users, 0 to 1;
    ``fair``: what a fair division would give; ``booked``: GPUs booked now; ``waiting``: waiting jobs.
    """

    user: str
    used_h: float
    share: float
    fair: float
    booked: float
    waiting: int
    own: bool


def use_by_user(environ: Mapping[str, str]) -> tuple[list[UserUse], float, list[str]]:
    """Return the use of each user with a scheduler or lease, the half-life in seconds, and problems with the bookings."""
    settings, me = machine_settings(environ), user_name(os.getuid())
    found, problems = published(environ, ended=True)
    half_life = settings.fair_half_life or HALF_LIFE_S
    neighbours = tuple(Neighbour(one.user, one.user == me, one.document) for one in found)
    sharing = Sharing(me, half_life, settings.weights)
    sharing.take(Neighbours(time.clock_gettime(time.CLOCK_BOOTTIME), neighbours), ())
    standings = sharing.standings()
    total = sum(one.used for one in standings.values())
    weights = sum(one.weight for one in standings.values())
    waiting = Counter(dict.fromkeys(standings, 0))
    for one in found:
        waiting[one.user] += one.document.waiting
    uses = [
        UserUse(
            user, one.used / 3600, one.used / total if total else 0.0, one.weight / weights, one.rate, waiting[user], user == me
        )
        for user, one in sorted(standings.items())
    ]  # fmt: skip
    return uses, half_life, problems
