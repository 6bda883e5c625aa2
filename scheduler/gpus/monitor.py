"""The GPUs of a daemon: which GPUs it manages, when it reads them, and which job owns each process on them."""

from __future__ import annotations

import math
import os
import pwd
import re
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from scheduler.core.backoff import doubled_s
from scheduler.core.config import Config
from scheduler.core.errors import NoGpuData, Refused
from scheduler.core.gpu import Gpu, gpu_ids_text, is_are, named_gpus
from scheduler.core.gpu_snapshot import GpuProcess, GpuSnapshot
from scheduler.core.job import Job
from scheduler.core.observations import Readings
from scheduler.core.protocols import Probe
from scheduler.core.topology import with_links
from scheduler.gpus.declared import declared
from scheduler.gpus.nvidia import NvidiaProbe
from scheduler.system.processes import environment_of, seen

UNREAD = "unread:"  # begins the UUID of a GPU that the driver has not reported yet
DECLARED = "declared:"
MOST_PARENTS = 64
LONGEST_BACKOFF_S = 30.0


@dataclass(slots=True)
class Managed:
    """The GPUs to manage, and the GPU reader for them.

    ``probe``: the GPU reader; None if the GPUs are declared, or if no GPUs are managed. ``notes``: messages for the
    user. ``first``: the first reading; None if the GPUs have not been read.
    """

    gpus: list[Gpu]
    probe: Probe | None = None
    notes: list[str] = field(default_factory=list)
    first: Readings | None = None
    shown: list[Gpu] = field(default_factory=list)  # all GPUs that the driver shows, managed or not


def managed_gpus(
    config: Config,
    environ: Mapping[str, str],
    stored: Sequence[Gpu] = (),
    say: Callable[[str], None] = lambda text: None,
    meanwhile: Callable[[], None] = lambda: None,
) -> Managed:
    """Return the GPUs to manage according to the settings and the driver.

    ``stored``: the GPUs that the previous daemon of this scheduler managed. ``say``: called with a message for the user
    if the driver is slow. ``meanwhile``: called several times a second during the wait for the driver; an exception
    that ``meanwhile`` raises ends the wait.

    If a driver is installed but does not answer, the GPUs of the settings or of the previous daemon are managed. No job
    gets a GPU until the driver answers. Raises NoGpuData if it is not known which GPUs there are, and Refused if the
    settings name a GPU that does not exist.
    """
    wanted = _wanted(config)
    if wanted == ():
        return Managed([], None, ["no GPU is managed (gpus: 0): only jobs that need no GPU can start"])
    if not config.gpu_interval:
        if wanted is None:
            raise NoGpuData(
                "the number of GPUs is not known, because GPUs are not read (gpu_interval: 0)", do="set it: --gpus N"
            )
        ids = gpu_ids_text(wanted)
        text = f"GPUs are not read (gpu_interval: 0): gpujob uses the declared GPUs ({ids}) without readings"
        return Managed(declared(wanted), None, [text])
    probe: Probe = NvidiaProbe(environ)
    try:
        first = probe.first(lambda: say("waiting for the GPU driver to answer …"), meanwhile)
    except NoGpuData as error:
        try:
            return _without_answer(probe, wanted, stored, error)
        except NoGpuData:
            if not config.without_gpus:
                raise
            return Managed([], None, [f"no GPU is managed: {error.what}; only jobs that need no GPU can start"])
    except BaseException:
        probe.close()
        raise
    notes: list[str] = []
    numbered = _numbered(first, stored, notes)
    by_uuid = {gpu.uuid: index for index, gpu in numbered.items()}
    found = {gpu.index: gpu for gpu in with_links(numbered.values(), first.gpus, by_uuid)}
    empty = [one.ordinal for one in first.gpus if one.mig and not any(gpu.parent == one.uuid for gpu in first.gpus)]
    if empty:
        notes.append(
            f"{named_gpus(empty)} {is_are(empty)} in MIG mode and without instances (nvidia-smi mig -cgi creates them)"
        )
    if not found and not config.without_gpus:
        probe.close()
        raise NoGpuData(f"no GPU can be used: {notes[-1]}", do="create MIG instances, or switch the MIG mode off")
    if wanted is None:
        wanted = _visible(environ.get("CUDA_VISIBLE_DEVICES"), found, notes)
    wanted = _with_instances(wanted, found)
    beyond = [gpu for gpu in wanted if gpu not in found]
    if beyond and config.without_gpus:
        notes.append(f"there is no GPU {gpu_ids_text(beyond)}: the driver shows {named_gpus(found)}")
        wanted = tuple(gpu for gpu in wanted if gpu in found)
    elif beyond:
        probe.close()
        raise Refused(f"there is no GPU {gpu_ids_text(beyond)}", do=f"the driver shows {named_gpus(found)}")
    return Managed([found[gpu] for gpu in wanted], probe, notes, first, list(found.values()))


def _wanted(config: Config) -> tuple[int, ...] | None:
    """Return the ids of the GPUs that the settings name; None if the settings name no GPUs."""
    if config.gpu_ids is not None:
        return config.gpu_ids
    return None if config.gpus is None else tuple(range(config.gpus))


def _with_instances(wanted: Iterable[int], found: Mapping[int, Gpu]) -> tuple[int, ...]:
    """Return ``wanted``, with the MIG instances of a card in place of its own id."""
    out: list[int] = []
    for index in wanted:
        of_card = [i for i, gpu in found.items() if gpu.profile and i // 100 == index + 1]
        out += of_card if of_card and index not in found else [index]
    return tuple(dict.fromkeys(out))


def managed_after_change(
    config: Config, now: Sequence[Gpu], shown: Sequence[Gpu], environ: Mapping[str, str]
) -> list[Gpu]:
    """Return the GPUs to manage after the settings changed while the daemon runs.

    ``now``: the GPUs that the daemon manages; ``shown``: all GPUs that the driver showed when the daemon started.
    Raises Refused if the change needs a restart, or if the settings name a GPU that does not exist.
    """
    wanted = _wanted(config)
    known = {gpu.index: gpu for gpu in shown}
    if now and all(gpu.uuid.startswith(DECLARED) for gpu in now) and wanted is not None:
        return declared(wanted)
    if not known:
        raise Refused("GPUs are detected only at the start", do="restart the scheduler; its jobs continue")
    if wanted is None:
        wanted = _visible(environ.get("CUDA_VISIBLE_DEVICES"), known, [])
    wanted = _with_instances(wanted, known)
    beyond = [gpu for gpu in wanted if gpu not in known]
    if beyond and not config.without_gpus:
        raise Refused(f"there is no GPU {gpu_ids_text(beyond)}", do=f"the driver shows {named_gpus(known)}")
    return [known[gpu] for gpu in wanted if gpu in known]


def _numbered(first: Readings, stored: Sequence[Gpu], notes: list[str]) -> dict[int, Gpu]:
    """Return the GPUs by index. The index of a GPU is normally the driver's number of this GPU.

    ``stored``: the GPUs that the previous daemon managed. If one of these GPUs is no longer shown by the driver, the
    other GPUs keep their previous indexes, because jobs and pauses refer to GPUs by index. The missing GPU stays in the
    result, so that admission reports it as gone, and a message is added to ``notes``.
    """
    before = {gpu.uuid: gpu for gpu in stored if not gpu.uuid.startswith((DECLARED, UNREAD))}
    by_ordinal = {gpu.index: gpu for gpu in before.values()}
    shown: list[Gpu] = []
    for reading in first.gpus:
        if reading.mig:
            continue  # its instances are listed instead
        uuid, name = reading.uuid, reading.name
        if not uuid:  # lost: the driver counts the GPU but does not name it
            known = by_ordinal.get(reading.ordinal)
            uuid, name = (known.uuid, known.name) if known else (f"{UNREAD}{reading.ordinal}", "lost")
        shown.append(Gpu(reading.ordinal, uuid, name, 0, reading.memory_total_mib, profile=reading.profile))
    # A MIG instance that is gone was deleted, and a card in MIG mode is still there: nobody has to look for them.
    there = {gpu.uuid for gpu in shown} | {reading.uuid for reading in first.gpus if reading.mig}
    vanished = [gpu for uuid, gpu in before.items() if uuid not in there and not gpu.profile]
    if not vanished:
        return {gpu.index: gpu for gpu in shown}
    numbered = {gpu.index: gpu for gpu in vanished}
    for gpu in shown:
        if gpu.uuid in before:
            numbered[before[gpu.uuid].index] = replace(gpu, index=before[gpu.uuid].index)
    for gpu in shown:
        if gpu.uuid not in before:
            free = gpu.index
            while free in numbered:
                free += 1
            numbered[free] = replace(gpu, index=free)
    lost = named_gpus([gpu.index for gpu in vanished])
    notes.append(
        f"the driver no longer shows {lost} ({', '.join(gpu.uuid for gpu in vanished)}), which it showed at the "
        "last start; the other GPUs keep their numbers"
    )
    return numbered


def _without_answer(probe: Probe, wanted: tuple[int, ...] | None, stored: Sequence[Gpu], error: NoGpuData) -> Managed:
    """Return the GPUs to manage when the first reading failed.

    ``wanted``: the GPUs that the settings name; None if the settings name none. A known GPU is a GPU in ``stored`` that
    a driver once showed. The cases are:

    - The settings name no GPUs, and no GPU is known: raises NoGpuData.
    - The settings name GPUs, no GPU is known, and no driver is installed: returns the named GPUs as declared GPUs.
    - In all other cases: returns the named GPUs, or the known GPUs if the settings name none. No job starts until the
      driver answers.
    """
    real = {gpu.index: gpu for gpu in stored if not gpu.uuid.startswith((DECLARED, UNREAD))}
    if probe.absent and not real:
        probe.close()
        if wanted is None:
            raise error
        text = f"there is no NVIDIA driver: gpujob uses the declared GPUs ({gpu_ids_text(wanted)}) without readings"
        return Managed(declared(wanted), None, [text])
    if wanted is None and not real:  # not known which GPUs to wait for
        probe.close()
        raise NoGpuData(
            error.what, do="repair the driver, or allocate GPUs without readings: --gpus N --gpu-interval 0"
        )
    gpus = [
        real.get(index) or Gpu(index, f"{UNREAD}{index}", "not read yet")
        for index in _with_instances(wanted or sorted(real), real)
    ]
    without = "; to allocate GPUs without readings: --gpus N --gpu-interval 0"
    return Managed(gpus, probe, [f"{error.what}: no job is started until the driver answers{without}"])


def _visible(text: str | None, found: Mapping[int, Gpu], notes: list[str]) -> tuple[int, ...]:
    """Return the ids of the GPUs that CUDA_VISIBLE_DEVICES lists, up to the first entry that names no GPU in ``found``.

    ``text``: the value of this variable in the daemon's environment; None if the variable is not set. If ``text`` is
    None, or its first entry names no GPU, all ids are returned. If ``text`` is not None, a message is added to
    ``notes``.
    """
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
        notes.append(f"CUDA_VISIBLE_DEVICES={text!r} names no GPU of this machine and is ignored; all GPUs are managed")
        return everything
    notes.append(
        f"CUDA_VISIBLE_DEVICES={text} in the scheduler's environment: gpujob manages only {named_gpus(sorted(set(chosen)))} "
        f"(--gpus and --gpu-ids override it)"
    )
    return tuple(sorted(set(chosen)))


def moved_gpus(before: Iterable[Gpu], after: Iterable[Gpu]) -> dict[int, int]:
    """Return old index → new index of each GPU whose index has changed. GPUs are matched by UUID."""
    new = {gpu.uuid: gpu.index for gpu in after}
    return {gpu.index: new[gpu.uuid] for gpu in before if gpu.uuid in new and new[gpu.uuid] != gpu.index}


class GpuMonitor:
    """Reads the GPUs at intervals and finds the owner of each process on them. Its methods never block.

    ``state_file``: path of this scheduler's state file. A process that has this path in its environment variable
    GPUJOB_STATE_FILE belongs to a job of this scheduler. ``jobs`` returns the starting, running and stopping jobs.
    """

    def __init__(self, probe: Probe, state_file: str, jobs: Callable[[], Iterable[Job]]) -> None:
        import psutil  # imported here: it takes 30 ms, and declared GPUs do not need it

        self._process, self._gone = psutil.Process, psutil.Error
        self.probe, self._jobs = probe, jobs
        self._mark = b"GPUJOB_STATE_FILE=" + os.fsencode(state_file)
        self._known: dict[tuple[int, int], GpuProcess] = {}
        self._read_at = -math.inf
        self._failures = 0
        self._under_way = False
        self._asked_at = 0.0
        self._once_more = False
        self._me = os.getuid()

    def read(self, since: float) -> None:
        """Request a reading that begins at ``since`` (monotonic seconds) or later.

        If an older reading is under way, the requested reading begins after it.
        """
        if not self._under_way:
            self._under_way, self._asked_at = True, time.monotonic()
            self.probe.ask()
        elif self._asked_at < since:
            self._once_more = True  # the reading under way may be too old

    def look(self, now_mono: float, interval_s: float) -> Readings | None:
        """Return the result of a reading that has finished or failed since the last call; None if there is none.

        This call also begins the next reading if it is due. ``now_mono``: monotonic seconds; ``interval_s``: seconds
        between two readings.
        """
        found = self.probe.look()
        if found is not None:
            self._under_way = False
            self._read_at = now_mono
            self._failures = self._failures + 1 if found.problem else 0
            found = replace(found, gpus=tuple(map(self._identified, found.gpus)))
        if self._once_more and not self._under_way:
            self._once_more = False
            self.read(now_mono)
        elif not self._under_way and now_mono >= self._due(interval_s):
            self.read(now_mono)
        return found

    def identified(self, readings: Readings) -> Readings:
        """Return the readings. For each process, the user, the start time and the owner (an attempt) are added."""
        return replace(readings, gpus=tuple(map(self._identified, readings.gpus)))

    def next_look(self, interval_s: float) -> float:
        """Return when to call `look` again (monotonic seconds)."""
        due = self.probe.next_look()
        return self._due(interval_s) if due is None else due

    def _due(self, interval_s: float) -> float:
        """Return when to read the GPUs again (monotonic seconds).

        The wait grows with each failure in a row, because each try starts two processes.
        """
        if self._failures:
            interval_s = max(interval_s, doubled_s(interval_s, self._failures, LONGEST_BACKOFF_S))
        return self._read_at + interval_s

    def _identified(self, reading: GpuSnapshot) -> GpuSnapshot:
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
                about = self._process(process.pid)
                known = GpuProcess(
                    pid=process.pid,
                    user=about.username(),
                    ours=about.uids().real == self._me,
                    owner=self._owner(process.pid, leaders),
                    started_at=about.create_time(),
                )
            except self._gone:
                return replace(process, visible=False)
            if len(self._known) > 4096:
                self._known.clear()
            self._known[found.pid, found.ticks] = known
        return replace(known, memory_mib=process.memory_mib, compute=process.compute, load=process.load)

    def _owner(self, pid: int, leaders: Mapping[int, str]) -> str:
        """Return the key of the attempt that a process belongs to; empty if it belongs to no attempt.

        The process belongs to an attempt if the environment or the session of the process, or of one of its ancestors,
        shows this.
        """
        for _ in range(MOST_PARENTS):
            if pid in leaders:
                return leaders[pid]
            entries = environment_of(pid)
            if self._mark in entries and _belongs(pid, self._me):  # another user may have set the same variables
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
    """An abstract Unix socket whose name announces a scheduler that does not share its bookings (`share_bookings`).

    The name contains user id, pid and GPUs; every user can read it in /proc/net/unix. No process listens on the socket.
    """

    def __init__(self, gpus: Iterable[Gpu]) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        ids = gpu_ids_text(gpu.index for gpu in gpus if not gpu.node) or "none"  # GPUs of other nodes are not here
        try:
            self._socket.bind(f"\0gpujob/{os.getuid()}/{os.getpid()}/{ids}"[:100])
        except OSError:
            self.close()  # the name is taken (same pid in another container): only the warning is lost

    def close(self) -> None:
        """Close the socket, which removes the name."""
        self._socket.close()


def _belongs(pid: int, uid: int) -> bool:
    try:
        return os.stat(f"/proc/{pid}").st_uid == uid
    except OSError:
        return False


def schedulers_here() -> list[tuple[str, int, str]]:
    """Return pid (as text), user id and GPUs of each other scheduler on this machine that manages GPUs.

    Schedulers of all users are included.
    """
    try:
        with open("/proc/net/unix", encoding="utf-8", errors="replace") as stream:
            names = [line.rstrip("\n").partition("@gpujob/")[2] for line in stream if "@gpujob/" in line]
    except OSError:
        return []  # not readable in this container: only the warning is lost
    found = []
    for name in sorted(set(names)):
        found_name = re.fullmatch(r"(\d{1,10})/(\d{1,10})/([\d,-]+|none)", name, re.ASCII)
        if found_name is None:
            continue  # any user can make such a name: only this form is accepted, and only from the user that it names
        uid, pid, ids = found_name.groups()
        if ids == "none":
            continue  # it manages no GPU
        if int(pid) != os.getpid() and _belongs(int(pid), int(uid)):
            found.append((pid, int(uid), ids))
    return found


def other_schedulers() -> list[str]:
    """Return a warning for each other scheduler on this machine that manages GPUs, whichever user runs it."""
    return [
        f"another scheduler runs on this machine: pid {pid} of user {_user(uid)}, GPUs {ids}; it does not share its "
        "bookings (share_bookings), so give each scheduler its own GPUs (--gpu-ids)"
        for pid, uid, ids in schedulers_here()
    ]
