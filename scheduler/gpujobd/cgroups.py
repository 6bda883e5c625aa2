"""A cgroup (v2) for each job: limits of memory and CPUs, and a way to end everything that belongs to the job.

`delegate` runs as root before the launcher starts: it gives the service user a part of the tree. After that, root does
nothing: the service user makes the cgroups of the jobs and moves their processes into them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from dataclasses import dataclass, field, replace

from scheduler.core.failure_signs import HOST_MEMORY
from scheduler.core.job import Failure, Job, Process
from scheduler.core.observations import Ended, Lost
from scheduler.core.units import mib_text
from scheduler.system.processes import lives, seen

CONTROLLERS = ("memory", "cpu", "pids")
CONTROL = "/.control"  # where systemd puts the control processes of a unit with Delegate=yes
PERIOD_US = 100_000  # of cpu.max
REMOVE_AGAIN_S = 5.0
MIB = 1 << 20


def delegate(uid: int, gid: int) -> tuple[str, str]:
    """Give the service user a part of the cgroup tree, and move this process beside it.

    Return the folder for the jobs and an empty text, or an empty text and why there is no such folder.
    """
    try:
        base, own = _mount(), _own()
        if not base or own is None:
            return "", "there is no cgroup v2 here"
        top = base + own
        if own == "/" or not _delegated(top):  # another service, or another container, may use the same cgroup
            return "", "its cgroup is not delegated to it: start the service by systemd (Delegate=yes)"
        for name in ("launcher", "jobs"):
            os.makedirs(f"{top}/{name}", exist_ok=True)
        _write(f"{top}/launcher/cgroup.procs", str(os.getpid()))
        for folder in (top, f"{top}/jobs"):
            with open(f"{folder}/cgroup.controllers", encoding="ascii") as stream:
                there = stream.read().split()
            for name in CONTROLLERS:
                if name in there:
                    _write(f"{folder}/cgroup.subtree_control", f"+{name}")
        jobs = f"{top}/jobs"
        for path in (f"{top}/cgroup.procs", jobs, f"{jobs}/cgroup.procs", f"{jobs}/cgroup.subtree_control"):
            os.chown(path, uid, gid)
    except OSError as error:
        return "", f"cgroups cannot be used: {error.filename}: {error.strerror}"
    return jobs, ""


def release() -> None:
    """Take back the controllers of all cgroups of the service, which has ended. Run as root by the unit.

    While processes of jobs are in it, systemd could not start the service in a cgroup with controllers (EBUSY). Raises
    OSError.
    """
    base, own = _mount(), _own()
    if not base or not own or not own.endswith(CONTROL):
        return  # systemd has not started this process as a control process of a delegated unit
    top = base + own.removesuffix(CONTROL)
    for folder in (f"{top}/jobs", top):
        with contextlib.suppress(FileNotFoundError):
            with open(f"{folder}/cgroup.subtree_control", encoding="ascii") as stream:
                enabled = stream.read().split()
            for name in enabled:
                _write(f"{folder}/cgroup.subtree_control", f"-{name}")


def _mount() -> str:
    """Return where cgroup v2 is mounted; empty if it is not. The last mount of a folder counts."""
    found = ""
    with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as stream:
        for line in stream:
            _, folder, kind, *_ = line.split(" ")
            if kind == "cgroup2" and (not found or folder == "/sys/fs/cgroup"):
                found = folder
    return found


def _own() -> str | None:
    """Return the path of the cgroup (v2) of this process; None if there is none."""
    with open("/proc/self/cgroup", encoding="utf-8", errors="surrogateescape") as stream:
        return next((line.rstrip("\n")[3:] for line in stream if line.startswith("0::")), None)


def _delegated(folder: str) -> bool:
    """Return whether systemd has delegated a cgroup (it says so in an extended attribute)."""
    for name in ("trusted.delegate", "user.delegate"):
        with contextlib.suppress(OSError):
            if os.getxattr(folder, name) == b"1":
                return True
    return False


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as stream:
        stream.write(text)


@dataclass(slots=True)
class JobCgroups:
    """The cgroups of the jobs, below ``folder``. Names: keys of attempts, such as ``12.1``."""

    folder: str
    _left: dict[str, float] = field(default_factory=dict)  # cgroups to remove → when to try again (monotonic seconds)

    def enter(self, job: Job, process: Process) -> str:
        """Move the main process of an attempt into its cgroup. Return what cannot be limited, as a sentence; else empty."""
        path = f"{self.folder}/{job.attempt_key}"
        missing: list[str] = []
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(path)
            if job.spec.mem_mib:
                self._limit(
                    path, "memory.max", str(job.spec.mem_mib * MIB), f"mem={mib_text(job.spec.mem_mib)}", missing
                )
            if job.spec.cpus:
                limit = f"{round(job.spec.cpus * PERIOD_US)} {PERIOD_US}"
                self._limit(path, "cpu.max", limit, f"cpus={job.spec.cpus:g}", missing)
            if lives(process):
                _write(f"{path}/cgroup.procs", str(process.pid))
        except OSError as error:
            if error.errno == errno.ESRCH:
                return ""  # it has just ended
            return f"the job has no cgroup of its own: {error.strerror}"
        return f"{' and '.join(missing)} not limited: this machine has no such controller" if missing else ""

    @staticmethod
    def _limit(path: str, name: str, value: str, said: str, missing: list[str]) -> None:
        if os.path.exists(f"{path}/{name}"):
            _write(f"{path}/{name}", value)
        else:
            missing.append(said)

    def kill(self, key: str) -> None:
        """End all processes of an attempt (SIGKILL)."""
        with contextlib.suppress(OSError):
            _write(f"{self.folder}/{key}/cgroup.kill", "1")

    def processes(self, key: str) -> tuple[Process, ...]:
        """Return the live processes of an attempt."""
        try:
            with open(f"{self.folder}/{key}/cgroup.procs", encoding="ascii") as stream:
                pids = [int(line) for line in stream]
        except (OSError, ValueError):
            return ()
        found = [seen(pid) for pid in pids]
        return tuple(Process(one.pid, one.ticks) for one in found if one is not None and one.alive)

    def killed_for_memory(self, key: str) -> bool:
        """Return whether the kernel has ended a process of an attempt because memory ran out."""
        try:
            with open(f"{self.folder}/{key}/memory.events", encoding="ascii") as stream:
                events = dict(line.split() for line in stream)
        except (OSError, ValueError):
            return False
        return int(events.get("oom_kill", 0)) > 0

    def ended(self, key: str, end: Ended | Lost) -> Ended | Lost:
        """Return the end of an attempt with the processes that its cgroup still has, and with an end by the kernel.

        The cgroup is removed when it is empty.
        """
        end = replace(end, leftovers=tuple(dict.fromkeys((*end.leftovers, *self.processes(key)))))
        if isinstance(end, Ended) and end.exit_code != 0 and self.killed_for_memory(key):
            hint = "the kernel ended it because memory ran out: its own limit (mem=), or the memory of the machine"
            end = replace(end, failure=Failure(HOST_MEMORY, "", hint))
        self.remove(key)
        return end

    def remove(self, key: str) -> None:
        """Remove the cgroup of an attempt that has ended; if it still has processes, `step` tries again."""
        try:
            os.rmdir(f"{self.folder}/{key}")
        except FileNotFoundError:
            return
        except OSError:
            self._left[key] = time.monotonic() + REMOVE_AGAIN_S

    def step(self, now: float) -> None:
        """Remove cgroups that had processes before. ``now``: monotonic seconds."""
        for key in [key for key, due in self._left.items() if now >= due]:
            del self._left[key]
            self.remove(key)

    def due(self) -> float | None:
        """Return when to call `step` (monotonic seconds); None: never."""
        return min(self._left.values(), default=None)
