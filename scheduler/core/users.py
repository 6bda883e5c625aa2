"""The users of one queue: whose turn it is. How much each of them may have: `core/user_limits.py`.

Users take turns as in `core/fair_shares.py`: the user with the lowest standing goes first. Within the jobs of a user, the
order of the queue counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from scheduler.core.fair_shares import HALF_LIFE_S, Standing, decayed, shares_used
from scheduler.core.gpu import WHOLE, ResourceRequest
from scheduler.core.job import Holding, Job, Reason
from scheduler.core.units import span_text
from scheduler.core.user_limits import UserLimits

HALF_LIVES = 5.0  # older use does not count


@dataclass(slots=True)
class Users:
    """The users of the queue.

    ``weights``: user → weight, 1.0 by default. ``across``: priorities count among the jobs of all users. ``at``: time of
    the last account (monotonic seconds); 0: never.
    """

    half_life_s: float = HALF_LIFE_S
    weights: Mapping[str, float] = field(default_factory=dict)
    limits: UserLimits = field(default_factory=UserLimits)
    across: bool = False
    standings: dict[str, Standing] = field(default_factory=dict)
    paused: set[str] = field(default_factory=set)  # users who have paused all their jobs
    at: float = 0.0

    def copy(self) -> Users:
        """Return a copy, which changes apart from the original."""
        standings = {user: replace(one) for user, one in self.standings.items()}
        return replace(self, standings=standings, paused=set(self.paused))

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

    def running(self, user: str) -> float:
        """Return the number of GPUs that the jobs of a user have now."""
        return self.standings[user].rate if user in self.standings else 0.0

    def charge(self, user: str, need: ResourceRequest) -> None:
        """Charge a user for a job that was just placed."""
        self.standing(user).rate += need.total / WHOLE

    # -- limits -------------------------------------------------------------------------------------------

    def keeps_back(self, user: str, need: ResourceRequest) -> Reason | None:
        """Return why no job of a user with this need may start, whatever is free; None if jobs may start."""
        if user in self.paused:
            return Reason("paused", f"user {user} has paused all jobs of this user; resume them: gpujob queue resume")
        over = self.limits.over_gpus(user, need, self.running)
        return Reason("limit", over) if over else None

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
