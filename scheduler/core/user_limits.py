"""The limits of users and groups in one queue (setting `limits`): running GPUs and waiting jobs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from scheduler.core.errors import Refused
from scheduler.core.gpu import WHOLE, ResourceRequest, decimal_text

EACH = "*"  # in the setting `limits`: each user without a limit of their own


@dataclass(frozen=True, slots=True)
class Limit:
    """The most that a user or group may have. ``gpus``: running, such as 2.5; ``waiting``: jobs; None: any number."""

    gpus: float | None = None
    waiting: int | None = None


@dataclass(frozen=True, slots=True)
class LimitOf:
    """A limit that counts for a user. ``who``: such as "user ada" or "group lab"; ``users``: who share it."""

    who: str
    limit: Limit
    users: frozenset[str]


@dataclass(slots=True)
class UserLimits:
    """The limits. ``by_name``: user, ``@group`` or ``*`` → limit; ``groups``: user → names of the user's groups.

    ``groups`` has the users who have submitted a job.
    """

    by_name: Mapping[str, Limit] = field(default_factory=dict)
    groups: Mapping[str, Collection[str]] = field(default_factory=dict)

    def of(self, user: str) -> list[LimitOf]:
        """Return the limits that count for a user."""
        found = []
        own = user if user in self.by_name else EACH
        if own in self.by_name:
            found.append(LimitOf(f"user {user}", self.by_name[own], frozenset({user})))
        for group in self.groups.get(user, ()):
            if f"@{group}" in self.by_name:
                members = frozenset(one for one, names in self.groups.items() if group in names)
                found.append(LimitOf(f"group {group}", self.by_name[f"@{group}"], members | {user}))
        return found

    def over_gpus(self, user: str, need: ResourceRequest, running: Callable[[str], float]) -> str:
        """Return why a limit keeps a job of a user from starting, as a sentence; empty if none does.

        ``running``: returns the GPUs of a user's running jobs.
        """
        if not self.by_name or not need.total:
            return ""
        for one in self.of(user):
            if one.limit.gpus is None:
                continue
            has = sum(map(running, one.users))
            if has + need.total / WHOLE > one.limit.gpus + 1e-9:
                return f"{one.who} has {_number(has)} of at most {_number(one.limit.gpus)} GPUs (limits)"
        return ""

    def over_waiting(self, user: str, waiting: Mapping[str, int]) -> str:
        """Return why a limit forbids a further waiting job of a user, as a sentence; empty if none does.

        ``waiting``: user → number of waiting jobs, those on hold included.
        """
        for one in self.of(user):
            number = sum(waiting.get(name, 0) for name in one.users)
            if one.limit.waiting is not None and number >= one.limit.waiting:
                return f"{one.who} has {number} of at most {one.limit.waiting} waiting jobs (limits)"
        return ""

    def check_possible(self, user: str, need: ResourceRequest) -> None:
        """Raise Refused if a job of a user needs more GPUs than a limit of the user allows at any time."""
        for one in self.of(user):
            if one.limit.gpus is not None and need.total / WHOLE > one.limit.gpus + 1e-9:
                raise Refused(
                    f"the job needs {_number(need.total / WHOLE)} GPUs, and {one.who} may have {_number(one.limit.gpus)} (limits)",
                    do="request less",
                )


def _number(gpus: float) -> str:
    return decimal_text(round(gpus * WHOLE))
