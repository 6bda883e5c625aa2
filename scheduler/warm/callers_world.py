"""Gives a fork of the warm process the limits, priority and signal settings of its caller.

The caller is the process that asked the warm process to run a command.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal

# Lines of /proc/PID/status that must be equal for both processes, since a process cannot take them over from another.
COMPARED = frozenset(
    (b"Uid", b"Gid", b"Groups", b"CapInh", b"CapPrm", b"CapEff", b"CapBnd", b"CapAmb", b"NoNewPrivs", b"Seccomp", b"Mems_allowed")
)  # fmt: skip
NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts")
LIMITS = tuple(sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}))
SETTABLE_SIGNALS = tuple(sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}))


class DifferentWorldError(Exception):
    """Raised if this process cannot imitate the caller.

    The reason is that the two processes differ in rights, namespaces, root folder, limits or scheduling policy.
    """


def take_over(pid: int) -> None:
    """Take over umask, limits, nice value, CPUs, OOM score adjustment and signal settings of the process ``pid``.

    Raises DifferentWorldError if that is not possible, OSError if the process has ended.
    """
    theirs, ours = _status(pid), _status(os.getpid())
    for name in COMPARED:
        if theirs.get(name) != ours.get(name):
            raise DifferentWorldError(name.decode())
    for link in (*(f"ns/{namespace}" for namespace in NAMESPACES), "root"):
        if _file_identity(f"/proc/{pid}/{link}") != _file_identity(f"/proc/self/{link}"):
            raise DifferentWorldError(link)
    os.umask(int(theirs[b"Umask"], 8))
    try:
        _take_over_limits(pid)
    except (PermissionError, ValueError) as error:
        raise DifferentWorldError(str(error)) from None
    _take_over_signals(
        *(int(world[name], 16) for world, name in ((theirs, b"SigIgn"), (ours, b"SigIgn"), (theirs, b"SigBlk")))
    )


def _status(pid: int) -> dict[bytes, bytes]:
    with open(f"/proc/{pid}/status", "rb") as stream:
        return dict(line.split(b":", 1) for line in stream.read().splitlines())


def _file_identity(path: str) -> tuple[int, int] | None:
    """Return device and inode of a file in /proc; None if the file does not exist.

    The file of a namespace does not exist if this kernel has no such namespaces.
    """
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _take_over_limits(pid: int) -> None:
    """Take over resource limits, nice value, CPUs and OOM score adjustment.

    Raises PermissionError or ValueError if the caller's limits are higher than the limits that this process may set.
    Raises ValueError if the caller has another scheduling policy.
    """
    for kind in LIMITS:
        limits = resource.prlimit(pid, kind)
        if limits != resource.getrlimit(kind):
            resource.setrlimit(kind, limits)
    nice = os.getpriority(os.PRIO_PROCESS, pid)
    if nice != os.getpriority(os.PRIO_PROCESS, 0):
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    if os.sched_getscheduler(pid) != os.sched_getscheduler(0):
        raise ValueError("another scheduling policy")
    cpus = os.sched_getaffinity(pid)
    if cpus != os.sched_getaffinity(0):
        os.sched_setaffinity(0, cpus)
    with contextlib.ExitStack() as stack:
        theirs = stack.enter_context(open(f"/proc/{pid}/oom_score_adj", "rb", buffering=0)).read()
        if theirs != stack.enter_context(open("/proc/self/oom_score_adj", "rb", buffering=0)).read():
            stack.enter_context(open("/proc/self/oom_score_adj", "wb", buffering=0)).write(theirs)


def _take_over_signals(ignored: int, ignored_here: int, blocked: int) -> None:
    """Set signal actions and blocked signals as they would be in a new interpreter started by the caller.

    ``ignored`` and ``blocked``: the signals that the caller ignores and blocks. ``ignored_here``: the signals that this
    process ignores. In these masks, bit N-1 stands for signal N.
    """
    for number in SETTABLE_SIGNALS:
        if (ignored ^ ignored_here) >> (number - 1) & 1:
            signal.signal(number, signal.SIG_IGN if ignored >> (number - 1) & 1 else signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if not ignored >> (signal.SIGINT - 1) & 1:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [n for n in SETTABLE_SIGNALS if blocked >> (n - 1) & 1])
