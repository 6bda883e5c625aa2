"""The GPUs of a daemon: which it manages, what they say, whose processes are on them."""

from __future__ import annotations

import os
import pwd
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import psutil

from scheduler.core.config import Config
from scheduler.core.errors import NoGpuData, Refused
from scheduler.core.facts import Readings
from scheduler.core.gpu import Gpu, GpuProcess, GpuReading, gpu_ids_text
from scheduler.core.job import Job
from scheduler.core.ports import Probe
from scheduler.probes.fixed import declared
from scheduler.probes.nvidia import NvidiaProbe
from scheduler.runners.processes import environment_of, seen

UNREAD = "unread:"  # in place of the UUID of a GPU that the driver has not spoken of yet
DECLARED = "declared:"
MOST_PARENTS = 64


@dataclass(slots=True)
class Managed:
    """The GPUs to manage, what reads them (None: declared, given out by booking alone), and what is to be said of it."""

    gpus: list[Gpu]
    probe: Probe | None = None
    notes: list[str] = field(default_factory=list)
    first: Readings | None = None


def managed_gpus(config: Config, environ: Mapping[str, str], stored: Sequence[Gpu] = ()) -> Managed:
    """The GPUs to manage by the settings and the driver; ``stored``: those that the last daemon managed here.

    A driver that is there but cannot be asked is not taken for none: the GPUs stand, and wait until it answers.
    Raises NoGpuData, Refused.
    """
    wanted = config.gpu_ids if config.gpu_ids is not None else None
    if wanted is None and config.gpus is not None:
        wanted = tuple(range(config.gpus))
    if wanted == ():
        return Managed([])
    probe: Probe = NvidiaProbe(environ)
    try:
        first = probe.first()
    except NoGpuData as error:
        return _without_answer(probe, wanted, stored, error)
    found = {reading.ordinal: _gpu(reading, stored) for reading in first.gpus}
    notes: list[str] = []
    if wanted is None:
        wanted = _visible(environ.get("CUDA_VISIBLE_DEVICES"), found, notes)
    beyond = [gpu for gpu in wanted if gpu not in found]
    if beyond:
        probe.close()
        raise Refused(f"there is no GPU {gpu_ids_text(beyond)}", do=f"the driver shows {gpu_ids_text(found)}")
    return Managed([found[gpu] for gpu in wanted], probe, notes, first)


def _gpu(reading: GpuReading, stored: Sequence[Gpu]) -> Gpu:
    uuid, name = reading.uuid, reading.name
    if not uuid:  # lost: the driver counts it, and no more
        before = {gpu.index: gpu for gpu in stored}.get(reading.ordinal)
        uuid, name = (before.uuid, before.name) if before else (f"{UNREAD}{reading.ordinal}", "lost")
    return Gpu(reading.ordinal, uuid, name, 0, reading.memory_total_mib)


def _without_answer(probe: Probe, wanted: tuple[int, ...] | None, stored: Sequence[Gpu], error: NoGpuData) -> Managed:
    """No reading at the start. Only where there is no driver at all may GPUs be declared."""
    real = {gpu.index: gpu for gpu in stored if not gpu.uuid.startswith((DECLARED, UNREAD))}
    if probe.absent and not (real and wanted is None):
        probe.close()
        if wanted is None:
            raise error
        text = f"no NVIDIA driver here: GPU {gpu_ids_text(wanted)} declared, given out by booking alone"
        return Managed(declared(wanted), None, [text])
    if wanted is None and not real:
        probe.close()
        raise error
    gpus = [real.get(index) or Gpu(index, f"{UNREAD}{index}", "not read yet") for index in wanted or sorted(real)]
    return Managed(gpus, probe, [f"{error.what}: nothing is started until the driver answers"])


def _visible(text: str | None, found: Mapping[int, Gpu], notes: list[str]) -> tuple[int, ...]:
    """All GPUs, or those that CUDA_VISIBLE_DEVICES in the daemon's own environment leaves it."""
    everything = tuple(sorted(found))
    if text is None:
        return everything
    chosen: list[int] = []
    for word in filter(None, (piece.strip() for piece in text.split(","))):
        match = [i for i, gpu in found.items() if word == str(i) or (len(word) > 4 and gpu.uuid.startswith(word))]
        if len(match) != 1:
            break  # CUDA itself stops at the first entry that it does not know
        chosen.append(match[0])
    if not chosen:
        notes.append(f"CUDA_VISIBLE_DEVICES={text!r} names no GPU here and is not regarded; all are managed")
        return everything
    notes.append(
        f"CUDA_VISIBLE_DEVICES={text} in the scheduler's environment: only GPU {gpu_ids_text(chosen)} managed "
        f"(--gpus or --gpu-ids say otherwise)"
    )
    return tuple(sorted(set(chosen)))


def moved_gpus(before: Iterable[Gpu], after: Iterable[Gpu]) -> dict[int, int]:
    """Old index → new index of the GPUs (by UUID) that the driver numbers otherwise than it did."""
    new = {gpu.uuid: gpu.index for gpu in after}
    return {gpu.index: new[gpu.uuid] for gpu in before if gpu.uuid in new and new[gpu.uuid] != gpu.index}


class GpuEyes:
    """Reads the GPUs at intervals and tells whose each process is. Never blocks.

    ``state_file`` marks the processes of this scheduler's jobs; ``jobs`` gives the live ones.
    """

    def __init__(self, probe: Probe, state_file: str, jobs: Callable[[], Iterable[Job]]) -> None:
        self.probe, self._jobs = probe, jobs
        self._mark = b"GPUJOB_STATE_FILE=" + os.fsencode(state_file)
        self._known: dict[tuple[int, int], GpuProcess] = {}
        self._due = 0.0
        self._under_way = False
        self._asked_at = 0.0
        self._once_more = False
        self._me = os.getuid()

    def read(self, since: float) -> None:
        """Have the GPUs read; a reading that was asked for at ``since`` (``mono``) or later will do."""
        if not self._under_way:
            self._under_way, self._asked_at = True, time.monotonic()
            self.probe.ask()
        elif self._asked_at < since:
            self._once_more = True  # the one under way may have looked before what we want to know of

    def look(self, now_mono: float, interval_s: float) -> Readings | None:
        """What was read, or that it failed; asks when it is time."""
        found = self.probe.look()
        if found is not None:
            self._under_way = False
            self._due = now_mono + interval_s
            found = replace(found, gpus=tuple(map(self._identified, found.gpus)))
        if self._once_more and not self._under_way:
            self._once_more = False
            self.read(now_mono)
        elif not self._under_way and now_mono >= self._due:
            self.read(now_mono)
        return found

    def identified(self, readings: Readings) -> Readings:
        """The same, with what /proc tells of each process."""
        return replace(readings, gpus=tuple(map(self._identified, readings.gpus)))

    def next_look(self) -> float:
        """A ``mono`` time at which to look again."""
        due = self.probe.next_look()
        return self._due if due is None else due

    def _identified(self, reading: GpuReading) -> GpuReading:
        if reading.processes is None:
            return reading
        leaders = {job.process.pid: job.attempt_key for job in self._jobs() if job.process is not None}
        return replace(reading, processes=tuple(self._who(process, leaders) for process in reading.processes))

    def _who(self, process: GpuProcess, leaders: Mapping[int, str]) -> GpuProcess:
        found = seen(process.pid)
        if found is None:
            return replace(process, visible=False)
        known = self._known.get((found.pid, found.ticks))
        if known is None or not known.owner:
            try:
                about = psutil.Process(process.pid)
                known = GpuProcess(
                    pid=process.pid,
                    user=about.username(),
                    ours=about.uids().real == self._me,
                    owner=self._owner(process.pid, leaders),
                    started_at=about.create_time(),
                )
            except psutil.Error:
                return replace(process, visible=False)
            if len(self._known) > 4096:
                self._known.clear()
            self._known[found.pid, found.ticks] = known
        return replace(known, memory_mib=process.memory_mib, compute=process.compute, load=process.load)

    def _owner(self, pid: int, leaders: Mapping[int, str]) -> str:
        """The attempt that a process belongs to: by its mark, its session, or what it descends from."""
        for _ in range(MOST_PARENTS):
            if pid in leaders:
                return leaders[pid]
            entries = environment_of(pid)
            if self._mark in entries:
                marks = dict(entry.partition(b"=")[::2] for entry in entries)
                job, attempt = marks.get(b"GPUJOB_ID", b""), marks.get(b"GPUJOB_ATTEMPT", b"")
                return f"{os.fsdecode(job)}.{os.fsdecode(attempt)}"
            found = seen(pid)
            if found is None:
                return ""
            if found.session in leaders:
                return leaders[found.session]
            if found.parent <= 1:
                return ""
            pid = found.parent
        return ""


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


# -- other schedulers of this machine ---------------------------------------------------------------------


class Flag:
    """Lets other schedulers of this machine know of us: a name that every user can read, behind which nobody listens."""

    def __init__(self, gpus: Iterable[Gpu]) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        ids = gpu_ids_text(gpu.index for gpu in gpus) or "none"
        try:
            self._socket.bind(f"\0gpujob/{os.getuid()}/{os.getpid()}/{ids}"[:100])
        except OSError:
            self.close()  # a name taken by another network namespace's twin: only the warning is lost

    def close(self) -> None:
        """Take the name away."""
        self._socket.close()


def other_schedulers() -> list[str]:
    """A sentence for each other scheduler that runs on this machine, of whatever user."""
    try:
        with open("/proc/net/unix", encoding="utf-8", errors="replace") as stream:
            names = [line.rstrip("\n").partition("@gpujob/")[2] for line in stream if "@gpujob/" in line]
    except OSError:
        return []  # no such file in this container: only the warning is lost
    found = []
    for name in sorted(set(names)):
        uid, pid, ids = [*name.split("/", 2), "", ""][:3]
        if uid.isdigit() and pid.isdigit() and int(pid) != os.getpid():
            found.append(
                f"another gpujob runs on this machine: pid {pid} of user {_user(int(uid))}, GPUs {ids}; they do not know "
                "of each other's bookings, so give each its own GPUs (--gpu-ids)"
            )
    return found
