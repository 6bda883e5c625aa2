"""Who a process is, which processes belong to an attempt, and signals that never hit a stranger."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from scheduler.core.job import Process
from scheduler.system.proc import command_words, environment_entries, stat_fields

PR_SET_CHILD_SUBREAPER = 36
MOST_SWEEPS = 8
SUPERVISOR_MARK = b"GPUJOB_SUPERVISOR="  # in the environment of supervisors and shims, before the state file's path
SHORT_OF = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})  # nothing could be looked at, so nothing is known


@dataclass(frozen=True, slots=True)
class Seen:
    """A process as /proc shows it."""

    pid: int
    ticks: int
    state: str
    parent: int
    group: int
    session: int

    @property
    def alive(self) -> bool:
        """False for a zombie: nothing of it runs or holds memory."""
        return self.state not in "ZX"


def _unless_short(error: OSError) -> None:
    """Raise it again when it says nothing about the process: out of descriptors is not gone."""
    if error.errno in SHORT_OF:
        raise error


def seen(pid: int) -> Seen | None:
    """The process with this number now, or None. Raises OSError when it cannot be looked at (``SHORT_OF``)."""
    try:
        fields = stat_fields(pid)
    except OSError as error:
        _unless_short(error)
        return None
    return Seen(pid, int(fields[19]), fields[0].decode(), int(fields[1]), int(fields[2]), int(fields[3]))


def seen_as(process: Process) -> Seen | None:
    """This very process, or its zombie; None when its number is free or another's. Raises OSError like `seen`."""
    found = seen(process.pid)
    return found if found is not None and found.ticks == process.ticks else None


def stands(process: Process) -> bool:
    """Whether this very process is still there, if only as a zombie that nobody has reaped."""
    return seen_as(process) is not None


def zombie_status(process: Process) -> int | None:
    """The wait status of a zombie of ours, from field 52 of its stat; None if it is none or may not be read."""
    try:
        fields = stat_fields(process.pid)
    except OSError as error:
        _unless_short(error)
        return None
    if int(fields[19]) != process.ticks or fields[0] != b"Z" or len(fields) < 50:
        return None
    return int(fields[49])


def lives(process: Process) -> bool:
    """Whether this very process (not another with its number) still runs."""
    found = seen_as(process)
    return found is not None and found.alive


def open_pidfd(process: Process) -> int:
    """A descriptor that is readable once this very process has ended; -1 if it is gone already.

    Opened first and compared after, so that a reused number is never taken for it.
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
    """Send a signal to this very process; False if it is gone."""
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
    """Orphans of our descendants become our children, so that none of a job's processes can hide. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def own_children() -> list[int]:
    """Pids of our own children: one read, however many processes the machine has."""
    me = os.getpid()
    try:
        with open(f"/proc/{me}/task/{me}/children", encoding="ascii") as stream:
            return [int(word) for word in stream.read().split()]
    except OSError as error:  # a kernel without CONFIG_PROC_CHILDREN
        _unless_short(error)
        return [pid for pid in _all_pids() if (found := seen(pid)) is not None and found.parent == me]


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


JOB_NAMES = ("GPUJOB_ID", "GPUJOB_ATTEMPT", "GPUJOB_STATE_FILE")  # the variables of the scheduler's jobs


@dataclass(frozen=True, slots=True)
class Mark:
    """What every process of an attempt carries in its environment, unless it took it away.

    ``names``: of the variables; a tracked command has others than a job, for it may run inside one (`track/plan.py`).
    """

    job: int
    attempt: int
    state_file: str
    names: tuple[str, str, str] = JOB_NAMES

    def is_of_another(self, entries: Collection[bytes]) -> bool:
        """Whether an environment carries the mark of another attempt of the same scheduler."""
        job, attempt, state_file = self.lines()
        if state_file not in entries or {job, attempt} <= set(entries):
            return False
        names = tuple(name.encode() + b"=" for name in self.names[:2])
        return all(any(entry.startswith(name) for entry in entries) for name in names)

    def lines(self) -> tuple[bytes, ...]:
        """The environment entries, as they stand in /proc/PID/environ."""
        values = (b"%d" % self.job, b"%d" % self.attempt, os.fsencode(self.state_file))
        return tuple(name.encode() + b"=" + value for name, value in zip(self.names, values, strict=True))


def environment_of(pid: int) -> list[bytes]:
    """Environment entries of a process of our own user; empty when it is gone, or in the midst of its exec.

    (`posix_spawn` returns a moment before the kernel has laid the new environment out.)
    """
    try:
        return environment_entries(pid)
    except OSError as error:
        _unless_short(error)
        return []


def is_supervisor(pid: int, state_file: str) -> bool:
    """Whether a process is a supervisor or shim of this scheduler, or this process. Each may yet record how its child ended."""
    return pid == os.getpid() or SUPERVISOR_MARK + os.fsencode(state_file) in environment_of(pid)


def starter_lives(key: str, state_file: str) -> bool:
    """Whether somebody lives who was told to start the attempt ``key`` and may be in the midst of it.

    That is its shim, or a supervisor of a daemon before this one that has not read out its socket (one that has, closes
    it), or what either of them has just forked.
    """
    ours = SUPERVISOR_MARK + os.fsencode(state_file)
    handed = b"/" + os.fsencode(key) + b".launch"
    for pid in _all_pids():
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
        return True  # not to be seen: then it may
    for name in names:
        with contextlib.suppress(OSError):  # closed a moment ago
            if os.readlink(f"{folder}/{name}").startswith("socket:"):
                return True
    return False


def session_of(leader: Process) -> str:
    """PID.name of the screen session that a job's parent, its shim, was started in; "" if that cannot be told."""
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
    """Whether this process has the attempt's mark in its environment."""
    entries = environment_of(pid)
    return bool(entries) and all(line in entries for line in mark.lines())


def members(mark: Mark, leader: Process | None, known: Iterable[Process] = (), *, sure: bool = False) -> list[Process]:
    """All live processes of an attempt: its leader, its session, its descendants, whoever carries its mark.

    Zombies do not count. A session or group number proves something only while the leader of that number is the
    recorded one; with the leader gone the number may be a stranger's, so then a process counts by it only when
    nobody has the number as pid and, if ``sure`` (for signals), never without the mark.
    """
    table: dict[int, Seen] = {}
    for pid in _all_pids():
        found = seen(pid)
        if found is not None:
            table[pid] = found
    mine = {process.pid for process in (*known, *((leader,) if leader else ())) if _is(table, process)}
    if leader is not None:
        number = leader.pid
        led = number in mine
        for pid, found in table.items():
            if (found.session == number or found.group == number) and found.ticks >= leader.ticks:
                if led or (number not in table and (not sure or carries(pid, mark))):
                    mine.add(pid)
    grew = True
    while grew:
        grew = False
        for pid, found in table.items():
            if pid not in mine and found.parent in mine:
                mine.add(pid)
                grew = True
    me = os.getpid()
    for pid, found in table.items():
        if pid not in mine and found.alive and pid != me and carries(pid, mark):
            mine.add(pid)
    return [Process(pid, table[pid].ticks) for pid in sorted(mine) if table[pid].alive and pid != me]


def _is(table: dict[int, Seen], process: Process) -> bool:
    found = table.get(process.pid)
    return found is not None and found.ticks == process.ticks


def signal_all(
    mark: Mark, leader: Process | None, known: Iterable[Process], hard: bool, soft: int = signal.SIGTERM
) -> list[Process]:
    """SIGTERM, or ``soft`` (SIGKILL when ``hard``), to every process of an attempt; returns those that were found.

    Swept again until a sweep finds nobody new, so that a child forked meanwhile does not slip through. A stopped
    process is continued after the SIGTERM, else it could not act on it.
    """
    told: set[Process] = set()
    known = tuple(known)
    for _ in range(MOST_SWEEPS):
        found = [process for process in members(mark, leader, known, sure=True) if process not in told]
        if not found:
            break
        for process in found:
            send(process, signal.SIGKILL if hard else soft)
            if not hard:
                send(process, signal.SIGCONT)
        told.update(found)
        if not hard:
            break  # a second SIGTERM would be a second wish; who forked meanwhile meets the SIGKILL
    return sorted(told, key=lambda process: process.pid)


def reap(pid: int) -> None:
    """Take a child's ending away so that it does not stay a zombie."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def own_limits() -> dict[int, tuple[int, int]]:
    """Each limit of this process: resource → soft, hard (-1: none)."""
    known = {number for name, number in vars(resource).items() if name.startswith("RLIMIT_")}
    return {which: resource.getrlimit(which) for which in sorted(known)}
