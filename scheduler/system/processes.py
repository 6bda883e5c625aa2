"""Identifies a process, reads its state and environment, and signals it. A signal never reaches a reused pid."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass

from scheduler.core.job import Process
from scheduler.system.proc import command_words, environment_entries, stat_fields, whole

PR_SET_CHILD_SUBREAPER = 36
EXEC_LIMIT_S = 2.0  # an exec takes milliseconds; on a busy machine it waits for a processor
SUPERVISOR_MARK = b"GPUJOB_SUPERVISOR="  # variable of supervisors and shims; its value is the state file's path
SHORT_OF = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})  # our own shortage; says nothing about the process


@dataclass(frozen=True, slots=True)
class Seen:
    """A process as /proc shows it. ``ticks``: start time in clock ticks since boot."""

    pid: int
    ticks: int
    state: str
    parent: int
    group: int
    session: int

    @property
    def alive(self) -> bool:
        """Whether the process lives. A zombie does not: it neither runs nor holds memory."""
        return self.state not in "ZX"


def _unless_short(error: OSError) -> None:
    """Raise ``error`` again if it means that this process has no free descriptor or memory (`SHORT_OF`).

    Such an error says nothing about the process that was to be examined: that process may still exist.
    """
    if error.errno in SHORT_OF:
        raise error


def seen(pid: int) -> Seen | None:
    """Return the process that has this pid now; None if no process has it.

    Raises OSError if /proc cannot be read because this process has no free descriptor or memory (`SHORT_OF`).
    """
    try:
        fields = stat_fields(pid)
    except OSError as error:
        _unless_short(error)
        return None
    return Seen(pid, int(fields[19]), fields[0].decode(), int(fields[1]), int(fields[2]), int(fields[3]))


def real_uid(pid: int) -> int | None:
    """Return the real user id of a process; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/status", "rb") as stream:
            return next((int(line.split()[1]) for line in stream if line.startswith(b"Uid:")), None)
    except OSError as error:
        _unless_short(error)
        return None


def seen_as(process: Process) -> Seen | None:
    """Return the current state of this process, which may be a zombie; None if its pid is free or reused.

    Raises OSError as `seen` does.
    """
    found = seen(process.pid)
    return found if found is not None and found.ticks == process.ticks else None


def stands(process: Process) -> bool:
    """Return whether this process still exists, alive or as a zombie."""
    return seen_as(process) is not None


def zombie_status(process: Process) -> int | None:
    """Return the wait status of a zombie; None if the process is no zombie or the status cannot be read.

    The status is field 52 of /proc/PID/stat. If we may not trace the process (a process of another user, or a setuid
    program such as `sudo`), the kernel shows 0 in this field. This 0 would look like exit code 0. So the function also
    reads the link /proc/PID/ns/pid. This fails if we may not trace the process. Raises OSError as `seen` does.
    """
    try:
        fields = stat_fields(process.pid)
        if int(fields[19]) != process.ticks or fields[0] != b"Z" or len(fields) < 50:
            return None
        os.readlink(f"/proc/{process.pid}/ns/pid")
    except OSError as error:
        _unless_short(error)
        return None
    return int(fields[49])


def lives(process: Process) -> bool:
    """Return whether this process still runs. A zombie, or another process with the same pid, does not count."""
    found = seen_as(process)
    return found is not None and found.alive


def open_pidfd(process: Process) -> int:
    """Return a descriptor that becomes readable when this process ends; -1 if the process is already gone.

    The start time is compared after the descriptor was opened, so that a process with a reused pid is never mistaken
    for this process. Raises OSError.
    """
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return -1
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.EINVAL):
            return -1
        raise
    try:
        right = stands(process)
    except OSError:
        os.close(fd)
        raise
    if not right:
        os.close(fd)
        return -1
    return fd


def send(process: Process, number: int) -> bool:
    """Send a signal to this process. Return False if the process has ended or the signal is not permitted.

    Raises OSError if the process cannot be examined.
    """
    fd = open_pidfd(process)
    if fd < 0:
        return False
    try:
        signal.pidfd_send_signal(fd, number)
        return True
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(fd)


def become_subreaper() -> None:
    """Let this process become the parent of its descendants whose own parent ends, so that no process of a job escapes.

    Raises OSError if the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def own_children() -> list[int]:
    """Return the pids of this process's children. The cost does not grow with the number of all processes."""
    me = os.getpid()
    try:
        return [int(word) for word in whole(f"/proc/{me}/task/{me}/children").split()]
    except OSError as error:  # a kernel without CONFIG_PROC_CHILDREN
        _unless_short(error)
        return [pid for pid in all_pids() if (found := seen(pid)) is not None and found.parent == me]


def all_pids() -> list[int]:
    """Return the pids of all processes."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def members(session: int, uid: int) -> tuple[Process, ...]:
    """Return the live processes of a user in a session. Raises OSError if /proc cannot be read now (`SHORT_OF`)."""
    found = [one for pid in all_pids() if (one := seen(pid)) is not None and one.session == session and one.alive]
    return tuple(Process(one.pid, one.ticks) for one in found if real_uid(one.pid) == uid)


JOB_NAMES = ("GPUJOB_ID", "GPUJOB_ATTEMPT", "GPUJOB_STATE_FILE")  # the variables that mark processes of jobs


@dataclass(frozen=True, slots=True)
class Mark:
    """The mark of an attempt: variables in the environment of all its processes, unless a process removed them.

    ``names``: names of the three variables (job, attempt, state file). The commands of `gpujob track` may run within a
    job, so other names are used for them than for jobs (`track/plan.py`).
    """

    job: int
    attempt: int
    state_file: str
    names: tuple[str, str, str] = JOB_NAMES

    def is_of_another(self, entries: Collection[bytes]) -> bool:
        """Return whether the environment ``entries`` have the mark of another attempt of the same scheduler."""
        job, attempt, state_file = self.lines()
        if state_file not in entries or {job, attempt} <= set(entries):
            return False
        names = tuple(name.encode() + b"=" for name in self.names[:2])
        return all(any(entry.startswith(name) for entry in entries) for name in names)

    def lines(self) -> tuple[bytes, ...]:
        """Return the mark as environment entries, as in /proc/PID/environ."""
        values = (b"%d" % self.job, b"%d" % self.attempt, os.fsencode(self.state_file))
        return tuple(name.encode() + b"=" + value for name, value in zip(self.names, values, strict=True))


def environment_of(pid: int) -> list[bytes]:
    """Return the environment entries of a process of our own user.

    The result is empty if the process is gone, is a zombie, or has an empty environment. If the process is in an exec,
    wait until the exec completes, for at most EXEC_LIMIT_S. This is necessary because `posix_spawn` and
    `subprocess.Popen` return early: the environment of the new process is empty until the kernel has set it up.
    """
    try:
        entries = environment_entries(pid)
        return entries or (environment_entries(pid) if _exec_completes(pid) else [])
    except OSError as error:
        _unless_short(error)
        return []


def _exec_completes(pid: int) -> bool:
    """Wait at most EXEC_LIMIT_S seconds until a process is not in an exec. Return whether it then has an environment.

    In an exec the kernel first sets start and end of the environment to one address. It then moves the end, and finally
    sets the end of the program's code. So equal addresses have two meanings: there is no environment, or it is not set
    yet. The end of the code in /proc/PID/stat shows which: once it is set, the environment is complete. A kernel thread
    or zombie has no memory, and so is not in an exec.
    """
    until = time.monotonic() + EXEC_LIMIT_S
    while True:
        last = time.monotonic() > until  # before the look: this process may itself have waited long for a processor
        fields = stat_fields(pid)
        memory, code_end, begin, end = (int(fields[index]) for index in (20, 24, 47, 48))
        if code_end or not memory or last:
            return begin < end
        time.sleep(0.0002)


def is_supervisor(pid: int, state_file: str) -> bool:
    """Return whether ``pid`` is this process, or a supervisor or shim of the scheduler.

    Such a process may still record the ending of a job that is its child.
    """
    return pid == os.getpid() or SUPERVISOR_MARK + os.fsencode(state_file) in environment_of(pid)


def starter_lives(key: str, state_file: str) -> bool:
    """Return whether a live process may still start the attempt ``key``.

    Such a process is the attempt's shim, or a supervisor that a previous daemon started. The supervisor counts only
    while its socket is open: it closes the socket after it has read the last start message. A process that a shim or
    supervisor has just forked counts, too.
    """
    ours = SUPERVISOR_MARK + os.fsencode(state_file)
    handed = b"/" + os.fsencode(key) + b".launch"
    for pid in all_pids():
        words = _words_of(pid)
        supervisor = any(word.endswith(b"/supervisor.py") for word in words)
        if not supervisor and not any(word.endswith(b"/shim.py") for word in words):
            continue
        entries = environment_of(pid)
        found = seen(pid)
        if ours not in entries or found is None or not found.alive:
            continue
        if supervisor and found.parent != os.getpid() and _has_socket(pid):
            return True
        if not supervisor and any(entry.startswith(b"GPUJOB_LAUNCH=") and entry.endswith(handed) for entry in entries):
            return True
    return False


def _words_of(pid: int) -> list[bytes]:
    try:
        return command_words(pid)
    except OSError as error:
        _unless_short(error)
        return []


def _has_socket(pid: int) -> bool:
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # not permitted: it may have one
    for name in names:
        with contextlib.suppress(OSError):  # just closed
            if os.readlink(f"{folder}/{name}").startswith("socket:"):
                return True
    return False


def session_of(leader: Process) -> str:
    """Return the screen session of a job in the form PID.NAME; empty if the session is unknown.

    ``leader``: the job's main process. Its parent is the shim, and the shim's environment names the session.
    """
    found = seen_as(leader)
    if found is None:
        return ""
    for entry in environment_of(found.parent):
        name, _, value = entry.partition(b"=")
        if name == b"STY":
            number, dot, _ = value.partition(b".")
            above = seen(found.parent)
            if dot and above is not None and number == b"%d" % above.parent:
                return os.fsdecode(value)
    return ""


def carries(pid: int, mark: Mark) -> bool:
    """Return whether a process has the attempt's mark in its environment."""
    entries = environment_of(pid)
    return bool(entries) and all(line in entries for line in mark.lines())


def reap(pid: int) -> None:
    """Reap the child ``pid`` if it has ended, so that it does not stay a zombie."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def own_limits() -> dict[int, tuple[int, int]]:
    """Return the resource limits of this process: resource number → (soft, hard); -1: unlimited."""
    known = {number for name, number in vars(resource).items() if name.startswith("RLIMIT_")}
    return {which: resource.getrlimit(which) for which in sorted(known)}
