"""Who may do what in a scheduler that several users share (`gpujob system`): one table, from which `docs/sharing.md` is made.

A scheduler of one user has no callers: everything is allowed there. What a user sees of the jobs of others:
`gpujobd/visible.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.core.errors import Refused
from scheduler.core.job import Job

OWNER, OTHER, ADMINISTRATOR = "owner", "other user", "administrator"
ROLES = (OWNER, OTHER, ADMINISTRATOR)
LEAST_UID = 1000  # user ids of people, on Debian and others (UID_MIN in /etc/login.defs)
HIDDEN_COMMAND = "(hidden)"  # stands for the command of another user's job (setting `hide_commands`)


@dataclass(frozen=True, slots=True)
class Caller:
    """The user who asks, as the kernel told it (SO_PEERCRED). ``admin``: root, or named in the setting `admins`."""

    uid: int
    user: str
    admin: bool = False


@dataclass(frozen=True, slots=True)
class Right:
    """A row of the table. ``what``: for docs/sharing.md; ``roles``: who may do it."""

    what: str
    roles: frozenset[str]


def _right(what: str, *roles: str) -> Right:
    return Right(what, frozenset(roles))


# An administrator is also the owner of their own jobs. Requests to the scheduler have the names of `core/requests.py`.
RIGHTS: dict[str, Right] = {
    "see": _right("see a job: state, GPUs, times, reason, exit code", *ROLES),
    "see_command": _right("see its command, folder and log path with `hide_commands: true`", OWNER, ADMINISTRATOR),
    "see_command_open": _right("see its command, folder and log path with `hide_commands: false`", *ROLES),
    "cancel": _right("cancel it", OWNER, ADMINISTRATOR),
    "requeue": _right("run it again", OWNER, ADMINISTRATOR),
    "hold": _right("hold it", OWNER, ADMINISTRATOR),
    "release": _right("release it", OWNER, ADMINISTRATOR),
    "first": _right("put it first among the jobs of its owner", OWNER, ADMINISTRATOR),
    "swap": _right("swap it with another job of its owner", OWNER, ADMINISTRATOR),
    "edit": _right("edit it", OWNER, ADMINISTRATOR),
    "depend": _right("submit a job that waits for it", *ROLES),
    "by_name": _right("submit a job that takes GPUs beside all other jobs (`on=`)", ADMINISTRATOR),
    "pause": _right("pause a GPU", ADMINISTRATOR),
    "resume": _right("resume a GPU", ADMINISTRATOR),
    "pausequeue": _right("pause or resume the whole queue (`queue pause`)", ADMINISTRATOR),
    "pause_own": _right("pause or resume all of one's own jobs (`queue pause` of a user)", *ROLES),
    "needs": _right("see the runs of all users in `needs`, and apply suggested needs", ADMINISTRATOR),
    "reset": _right("forget ended jobs", ADMINISTRATOR),
}


def roles_of(caller: Caller | None, owner: int | None = None) -> frozenset[str]:
    """Return the roles of a caller. ``owner``: user id of the owner of the job, if it is about a job."""
    if caller is None:
        return frozenset(ROLES)
    roles = {OWNER if owner == caller.uid else OTHER}
    return frozenset(roles | {ADMINISTRATOR} if caller.admin else roles)


def may(caller: Caller | None, right: str, owner: int | None = None) -> bool:
    """Return whether a caller may do something. ``right``: a key of `RIGHTS`. Raises KeyError for an unknown right."""
    return caller is None or bool(RIGHTS[right].roles & roles_of(caller, owner))


def check_job(caller: Caller | None, right: str, job: Job) -> None:
    """Raise Refused if a caller may not do something with a job."""
    if not may(caller, right, job.spec.uid):
        raise Refused(f"job {job.id} belongs to user {job.spec.user}", do="ask this user or an administrator")


def check(caller: Caller | None, right: str, what: str) -> None:
    """Raise Refused if a caller may not do something that is about no job. ``what``: such as "pause GPUs"."""
    if not may(caller, right):
        raise Refused(
            f"only an administrator may {what}", do="administrators are named in admins, in /etc/gpujob/config.yaml"
        )
