"""Check of inotify: whether the kernel can notify the scheduler of changed files."""

from __future__ import annotations

import contextlib
import ctypes
import os
from dataclasses import dataclass

from scheduler.doctor.examination import Examination
from scheduler.doctor.finding import DoctorUser, Finding, Mark, good, not_determined
from scheduler.doctor.programs import number_in

SPARE = 0.9  # share of a limit; a user who has more in use may reach the limit at the next start
INSTANCES, WATCHES = 1024, 524288  # lowest limits that a proposed command sets
IN_DELETE_SELF = 0x400


@dataclass(frozen=True, slots=True)
class InotifySeen:
    """The result of trying to watch a folder, and the limits of inotify."""

    refused: str = ""  # what the kernel refused: instance, watch
    instances: int | None = None  # fs.inotify.max_user_instances
    space_instances: int | None = None  # user.max_inotify_instances of this user namespace
    watches: int | None = None  # fs.inotify.max_user_watches
    space_watches: int | None = None  # user.max_inotify_watches of this user namespace
    used: int | None = None  # instances that this user has
    setting: str = "auto"  # the setting `watch`


def judge(seen: InotifySeen, who: DoctorUser) -> Finding:
    """Return the finding on inotify: whether instances and watches are left."""
    if seen.setting == "poll":
        return good("inotify", "not used (watch: poll)")
    limits = ", ".join(
        f"{text} {number}"
        for text, number in (
            ("instances", _least(seen.instances, seen.space_instances)),
            ("watches", _least(seen.watches, seen.space_watches)),
        )
        if number is not None
    )
    used = "" if seen.used is None else f"; {seen.used} instances in use"
    told = f"limits: {limits or 'unknown'}{used}"
    refuses = "the scheduler does not start (watch: inotify)"
    then = refuses if seen.setting == "inotify" else "files are polled every second instead"
    mark = Mark.BAD if seen.setting == "inotify" else Mark.WARN
    if seen.refused == "instance":
        wrong = f"no inotify instance is left: {then}"
        return Finding("inotify", mark, told, wrong, _raise("instances", seen.instances, seen.space_instances, who))
    if seen.refused == "watch":
        wrong = "no inotify watch is left: the scheduler notices changes of files late"
        return Finding("inotify", Mark.WARN, told, wrong, _raise("watches", seen.watches, seen.space_watches, who))
    most = _least(seen.instances, seen.space_instances)
    if most is None or seen.used is None:
        return not_determined("inotify", "how many inotify instances are left", "an instance was available just now")
    if seen.used >= SPARE * most:
        wrong = f"nearly all inotify instances of this user are in use; when none is left, {then}"
        return Finding(
            "inotify", Mark.WARN, told, wrong, _raise("instances", seen.instances, seen.space_instances, who)
        )
    return good("inotify", told)


def _least(one: int | None, other: int | None) -> int | None:
    return min((number for number in (one, other) if number is not None), default=None)


def _raise(what: str, machine: int | None, space: int | None, who: DoctorUser) -> str:
    """Return the command that raises the limit on ``what`` ("instances" or "watches").

    ``machine``: limit of the machine; ``space``: limit of this user namespace. The command raises the lower of these
    two limits. They differ only in containers.
    """
    name = f"fs.inotify.max_user_{what}"
    if space is not None and (machine is None or space < machine):
        name = f"user.max_inotify_{what}"
    low = _least(machine, space) or 0
    return who.root(f"sysctl -w {name}={max(INSTANCES if what == 'instances' else WATCHES, 2 * low)}")


def look(folder: str, setting: str) -> InotifySeen:
    """Try to watch a folder, and read the limits of inotify."""
    libc = ctypes.CDLL(None, use_errno=True)
    refused = ""
    fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:
        refused = "instance"
    else:
        if libc.inotify_add_watch(fd, os.fsencode(folder), IN_DELETE_SELF) < 0 and os.path.exists(folder):
            refused = "watch"
        os.close(fd)
    return InotifySeen(
        refused,
        number_in("/proc/sys/fs/inotify/max_user_instances"),
        number_in("/proc/sys/user/max_inotify_instances"),
        number_in("/proc/sys/fs/inotify/max_user_watches"),
        number_in("/proc/sys/user/max_inotify_watches"),
        _inotify_used(),
        setting,
    )


def _inotify_used() -> int | None:
    """Return how many inotify instances this user's processes have."""
    number = 0
    me = os.getuid()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError):  # the process has ended, or may not be examined
            if os.stat(f"/proc/{name}").st_uid == me:
                for fd in os.listdir(f"/proc/{name}/fd"):
                    with contextlib.suppress(OSError):
                        number += os.readlink(f"/proc/{name}/fd/{fd}") == "anon_inode:inotify"
    return number


def check_inotify(exam: Examination) -> list[Finding]:
    """Check that changes of files can be watched."""
    return [judge(look(os.path.dirname(exam.places.state_dir), exam.config.watch), exam.who)]
