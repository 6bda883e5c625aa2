"""Leases: GPUs that a person books for interactive work, with or without a scheduler of their own."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler.client.machine_gpus import MachineGpus, machine_gpus
from scheduler.core.admission import Admission
from scheduler.core.config import Config
from scheduler.core.errors import Refused
from scheduler.core.fair_shares import HALF_LIFE_S, decayed
from scheduler.core.gpu import WHOLE, Gpu, ResourceRequest, ids_of
from scheduler.core.job import Process, Reason
from scheduler.core.mig import driver_name
from scheduler.core.neighbours import Left, Neighbour, Neighbours, Sharing
from scheduler.core.observations import Now
from scheduler.core.placement import Fleet
from scheduler.core.placement_class import PlacementClass
from scheduler.core.policy import thresholds_of
from scheduler.core.scheduler_state import SchedulerState
from scheduler.core.shared_bookings import LEASE, MOST_PROCESSES, Booking, Document, Want
from scheduler.core.take_turns import Turns, why_others_first
from scheduler.intake.machine_settings import machine_settings
from scheduler.sharing.bookings_file import own_space
from scheduler.sharing.bookings_folder import BookingsFolder, Found, shared_folder, time_of_day, user_name
from scheduler.system.proc import boot_id
from scheduler.system.processes import seen

PAST = "leases"  # key of the document that keeps the use of ended leases


def boot_seconds() -> float:
    """Return the seconds since boot."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def process_of(pid: int) -> Process:
    """Return the identity of a process. Raises Refused if there is no such process."""
    found = seen(pid)
    if found is None or not found.alive:
        raise Refused(f"there is no process {pid}")
    return Process(found.pid, found.ticks)


@dataclass(slots=True)
class Lease:
    """A lease of this process, or of a process that already uses GPUs.

    ``key``: tells the leases of a user apart; ``process``: while it lives, the lease counts; ``environ``: names the
    folder of shared bookings and the settings of the machine; ``ignored``: users whose bookings and locks do not count.
    Raises SchedulerError, OSError.
    """

    key: str
    process: Process
    environ: Mapping[str, str]
    until: float | None = None
    gpus: list[Gpu] = field(default_factory=list)
    parts: int = WHOLE
    since: float = 0.0
    children: tuple[Process, ...] = ()
    ignored: tuple[str, ...] = ()
    _folder: BookingsFolder | None = None
    _left: Left = field(default_factory=Left)

    @property
    def folder(self) -> BookingsFolder:
        """The folder of shared bookings, opened."""
        if self._folder is None:
            self._folder = BookingsFolder(shared_folder(self.environ), self.key, boot_id(), lambda: self.ignored)
            self._folder.tidy(f"gpujob-{os.getuid()}-lease-")
        return self._folder

    def ids(self) -> str:
        """Return the ids of the GPUs, such as ``0,1``."""
        return ",".join(str(gpu.index) for gpu in self.gpus)

    def visible(self) -> str:
        """Return the GPUs as CUDA names them: ids, and the UUID of a MIG instance."""
        return ",".join(str(driver_name(gpu, None)) for gpu in self.gpus)

    def try_to_book(self, kind: PlacementClass, for_s: float | None) -> Reason | None:
        """Book GPUs if some are free and it is this user's turn. Return why not; None if they are booked.

        ``for_s``: duration of the lease. Raises NoGpuData, Refused if this machine can never grant it, OSError.
        """
        folder = self.folder
        machine = machine_gpus(self.environ, folder.read().living)  # this takes long, so it is done without the lock
        closed = folder.lock(2.0)
        try:
            folder.prepare()
            found = folder.read()
            state = self._state(machine, found, closed or found.closed)
            never = state.fleet.can_ever_hold(kind)
            if never:
                raise Refused(f"no lease: {never}", do="see gpujob who")
            assert state.sharing is not None
            turns = Turns(state.sharing, state.fleet, time.monotonic())
            turns.give_way()
            gpus = state.fleet.find(kind)
            turns.end()
            if gpus is None:
                reason, usable = state.fleet.why_not(kind), state.fleet.devices(kind)
                if state.fleet.find(kind) is not None:
                    reason = why_others_first(state.sharing)
                named = () if usable == state.fleet.all_mask else ids_of(usable)
                allowed = tuple(state.fleet.gpus[i].uuid for i in named)
                self.publish(machine, (Want(kind.need.count, kind.need.parts, kind.vram_mib, allowed),))
                return reason
            self.gpus = [gpu for gpu in machine.gpus if gpu.index in gpus]
            self.parts, self.since = kind.need.parts, boot_seconds()
            self.until = None if for_s is None else self.since + for_s
            self.publish(machine)
            return None
        finally:
            if not closed:
                folder.unlock()

    def _state(self, machine: MachineGpus, found: Found, closed: str) -> SchedulerState:
        me, settings = user_name(os.getuid()), machine_settings(self.environ)
        state = SchedulerState(Fleet(machine.gpus), lambda job: None)
        state.sharing = Sharing(me, settings.fair_half_life or HALF_LIFE_S, settings.weights, left=self._left)
        state.sharing.clock = time_of_day
        living = tuple(Neighbour(one.user, one.user == me, one.document) for one in found.living)
        ended = tuple(Neighbour(one.user, one.user == me, one.document) for one in found.ended)
        state.take_neighbours(Neighbours(boot_seconds(), living, ended, closed))
        if machine.readings is not None:
            now = Now(time.time(), time.monotonic(), boot_seconds())
            state.fleet.admission = Admission.of(machine.gpus, thresholds_of(Config()), now)
            state.watch_admission()
            state.fleet.admission.take(machine.readings, now)
        return state

    def publish(self, machine: MachineGpus | None = None, wants: tuple[Want, ...] = ()) -> None:
        """Publish the lease, or what it waits for. Raises OSError."""
        processes = (self.process, *self.children)[:MOST_PROCESSES]
        bookings = tuple(Booking(gpu.uuid, self.parts, 0, self.since, self.until, processes) for gpu in self.gpus)
        managed = machine.gpus if machine is not None else self.gpus
        self.folder.publish(
            Document(
                self.key,
                boot_id(),
                LEASE,
                self.process,
                space=own_space(),
                gpus=tuple(gpu.uuid for gpu in managed),
                waiting=len(wants),
                wants=wants,
                used_at=self.since or boot_seconds(),
                bookings=bookings,
            )
        )

    def stay_published(self) -> None:
        """Publish the lease again if its file was removed, for example by a cleaner of temporary files."""
        with contextlib.suppress(OSError):  # a full disk: tried again at the next call
            if self.folder.prepare():
                self.publish()

    def end(self, left: tuple[Process, ...] = ()) -> None:
        """End the lease. What it has used is added to the use of the user's ended leases. Raises OSError.

        ``left``: processes of the lease that still live; the GPUs stay booked until they have ended.
        """
        folder = self.folder
        try:
            if self.gpus:
                self._record_use(folder.path)
            if left and self.gpus:
                self.children = left
                self.publish()
        finally:
            folder.close(remove=not left)
            self._folder = None

    def _record_use(self, path: str) -> None:
        past = BookingsFolder(path, PAST, boot_id())
        try:
            closed = past.lock(2.0)
            past.prepare()
            at, before = boot_seconds(), past.mine()
            half_life = machine_settings(self.environ).fair_half_life or HALF_LIFE_S
            used = decayed(0.0, at - self.since, half_life, len(self.gpus) * self.parts / WHOLE)
            if before is not None and before.boot == boot_id():
                used += decayed(before.used, at - before.used_at, half_life)
            past.publish(Document(PAST, boot_id(), LEASE, used=used, used_at=at, space=own_space()))
            if not closed:
                past.unlock()
        finally:
            past.close()


def request_of(share: str, gpus: tuple[int, ...] | None) -> PlacementClass:
    """Return what a lease asks for. ``share``: as for jobs, such as 1, 2 or 0.5. Raises UsageError, Refused."""
    need = ResourceRequest.parse(share)
    if not need.total:
        raise Refused("a lease needs a GPU", do="write gpujob lease -g 1")
    return PlacementClass(need, gpus)


def lease_of_process(pid: int, environ: Mapping[str, str], for_s: float | None) -> Lease:
    """Book the GPUs that a process and its descendants already use, until the process ends.

    Raises Refused if the process belongs to another user or uses no GPU, NoGpuData if the GPUs cannot be read.
    """
    import psutil

    process = process_of(pid)
    try:
        about = psutil.Process(pid)
        owner = about.uids().real
        pids = {pid, *(child.pid for child in about.children(recursive=True))}
    except psutil.Error as error:
        raise Refused(f"process {pid} cannot be examined: {error}") from None
    if os.getuid() not in (0, owner):
        raise Refused(f"process {pid} belongs to user {user_name(owner)}; only its user can book for it")
    machine = machine_gpus(environ, None)
    used = [gpu for gpu in machine.gpus if any(one.pid in pids for one in machine.snapshots[gpu.uuid].processes or ())]
    if not used:
        raise Refused(f"process {pid} uses no GPU", do="see gpujob who")
    lease = Lease(f"lease-{pid}", process, environ, gpus=used, since=boot_seconds())
    lease.until = None if for_s is None else lease.since + for_s
    folder = lease.folder
    closed = folder.lock(2.0)  # what the process uses is in use, whoever has locked the folder
    folder.prepare()
    lease.publish()
    if not closed:
        folder.unlock()
    folder.close()
    return lease
