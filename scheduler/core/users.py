"""The users of one queue: whose turn it is, and how much each of them may have.

Users take turns as in `core/fair_shares.py`: the user with the lowest standing goes first. Within the jobs of a user, the
order of the queue counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from scheduler.core.errors import Refused
from scheduler.core.fair_shares import HALF_LIFE_S, Standing, decayed, shares_used
from scheduler.core.gpu import WHOLE, ResourceRequest, decimal_text
from scheduler.core.job import Holding, Job, Reason
from scheduler.core.units import span_text

HALF_LIVES = 5.0  # older use does not count
EACH = "*"  # in the setting `limits`: each user without a limit of their own


@dataclass(frozen=True, slots=True)
class Limit:
    """The most that a user or group may have. ``gpus``: running, such as 2.5; ``waiting``: jobs; None: any number."""

    gpus: float | None = None
    waiting: int | None = None


@dataclass(frozen=True, slots=True)
class LimitOf:
    """A limit that counts for a user. ``who``: the user, or the group after ``@``; ``users``: who share it."""

    who: str
    limit: Limit
    users: frozenset[str]


@dataclass(slots=True)
class Users:
    """The users of the queue.

    ``weights``: user → weight, 1.0 by default. ``limits``: user, ``@group`` or ``*`` → limit. ``groups``: user → names of
    the user's groups, of users who have submitted a job. ``across``: priorities count among the jobs of all users.
    ``at``: time of the last account (monotonic seconds); 0: never.
    """

    half_life_s: float = HALF_LIFE_S
    weights: Mapping[str, float] = field(default_factory=dict)
    limits: Mapping[str, Limit] = field(default_factory=dict)
    groups: Mapping[str, Collection[str]] = field(default_factory=dict)
    across: bool = False
    standings: dict[str, Standing] = field(default_factory=dict)
    paused: set[str] = field(default_factory=set)  # users who have paused all their jobs
    at: float = 0.0

    def account(self, at: float, live: Iterable[Job], held: Iterable[Holding] = ()) -> None:
        """Add the use since the last call, and set what each user has now. ``live``: jobs with GPUs.

        ``held``: GPUs that leftover processes of ended jobs still have.
        """
        elapsed = at - self.at if self.at else 0.0
        self.at = at
        for one in self.standings.values():
            one.used, one.rate = decayed(one.used, elapsed, self.half_life_s, one.rate), 0.0
        for job in live:
            self.standing(job.spec.user).rate += job.need.total / WHOLE
        for holding in held:
            self.standing(holding.user).rate += holding.need.total / WHOLE
        for user, one in self.standings.items():
            one.weight = self.weights.get(user, 1.0)

    def add_past(self, runs: Iterable[tuple[str, float, float | None, int]], wall: float) -> None:
        """Add the use by earlier attempts. ``runs``: user, start, end (None: it runs), thousandths of GPUs.

        ``wall``: now. Times are seconds since 1970.
        """
        for user, started, finished, parts in runs:
            end = wall if finished is None else finished
            one = decayed(0.0, end - started, self.half_life_s, parts / WHOLE)
            self.standing(user).used += decayed(one, wall - end, self.half_life_s)

    def standing(self, user: str) -> Standing:
        """Return the standing of a user."""
        found = self.standings.get(user)
        if found is None:
            found = self.standings[user] = Standing(weight=self.weights.get(user, 1.0))
        return found

    def rank(self, user: str) -> float:
        """Return the sort key of a user: the lowest goes first."""
        return self.standing(user).value

    def charge(self, user: str, need: ResourceRequest) -> None:
        """Charge a user for a job that was just placed."""
        self.standing(user).rate += need.total / WHOLE

    # -- limits -------------------------------------------------------------------------------------------

    def limits_of(self, user: str) -> list[LimitOf]:
        """Return the limits that count for a user."""
        found = []
        own = user if user in self.limits else EACH
        if own in self.limits:
            found.append(LimitOf(user, self.limits[own], frozenset({user})))
        for group in self.groups.get(user, ()):
            name = f"@{group}"
            if name in self.limits:
                members = frozenset(one for one, names in self.groups.items() if group in names)
                found.append(LimitOf(name, self.limits[name], members | {user}))
        return found

    def keeps_back(self, user: str, need: ResourceRequest) -> Reason | None:
        """Return why no job of a user with this need may start, whatever is free; None if jobs may start."""
        if user in self.paused:
            return Reason("paused", f"user {user} has paused all jobs of this user; resume them: gpujob queue resume")
        over = self.over_limit(user, need)
        return Reason("limit", over) if over else None

    def over_limit(self, user: str, need: ResourceRequest) -> str:
        """Return why a limit keeps a job of a user from starting, as a sentence; empty if none does."""
        if not self.limits or not need.total:
            return ""
        for one in self.limits_of(user):
            if one.limit.gpus is None:
                continue
            has = sum(self.standings[name].rate for name in one.users if name in self.standings)
            if has + need.total / WHOLE > one.limit.gpus + 1e-9:
                who = f"user {user}" if one.who == user else f"group {one.who[1:]}"
                return f"{who} has {_number(has)} of at most {_number(one.limit.gpus)} GPUs (limits)"
        return ""

    def check_possible(self, user: str, need: ResourceRequest) -> None:
        """Raise Refused if a job of a user needs more GPUs than a limit of the user allows at any time."""
        for one in self.limits_of(user):
            if one.limit.gpus is not None and need.total / WHOLE > one.limit.gpus + 1e-9:
                who = f"user {user}" if one.who == user else f"group {one.who[1:]}"
                raise Refused(
                    f"the job needs {_number(need.total / WHOLE)} GPUs, and {who} may have {_number(one.limit.gpus)} (limits)",
                    do="request less",
                )

    def over_waiting(self, user: str, waiting: Mapping[str, int]) -> str:
        """Return why a limit forbids a further waiting job of a user, as a sentence; empty if none does.

        ``waiting``: user → number of waiting jobs.
        """
        for one in self.limits_of(user):
            number = sum(waiting.get(name, 0) for name in one.users)
            if one.limit.waiting is not None and number >= one.limit.waiting:
                who = f"user {user}" if one.who == user else f"group {one.who[1:]}"
                return f"{who} has {number} of at most {one.limit.waiting} waiting jobs (limits)"
        return ""

    # -- reasons ------------------------------------------------------------------------------------------

    def with_turn(self, user: str, reason: Reason, waiting: Collection[str]) -> Reason:
        """Return the reason why a job of a user waits, with the user who goes first. ``waiting``: users who wait for GPUs."""
        ahead = [one for one in waiting if (self.rank(one), one) < (self.rank(user), user)]
        if not ahead:
            return reason
        first = min(ahead, key=lambda one: (self.rank(one), one))
        used, fair = shares_used(self.standings, user)
        span = "since yesterday" if self.half_life_s == HALF_LIFE_S else f"in the last {span_text(self.half_life_s)}"
        text = f"user {user} has used {used:.1f} of {fair:.1f} shares {span}; user {first} goes first"
        return Reason(reason.code, f"{reason.sentence}; {text}")


def _number(gpus: float) -> str:
    return decimal_text(round(gpus * WHOLE))
