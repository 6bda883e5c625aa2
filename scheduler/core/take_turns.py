"""Takes turns with other users: keeps GPUs for waiting jobs of users who have used less, for one decision."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.core.fair_shares import CHARGE_S, HALF_LIFE_S, shares_used
from scheduler.core.gpu import WHOLE, ResourceRequest
from scheduler.core.job import Reason
from scheduler.core.neighbours import Sharing
from scheduler.core.placement import Fleet
from scheduler.core.placement_class import PlacementClass
from scheduler.core.shared_bookings import LEASE
from scheduler.core.units import span_text

PATIENCE_S = 3.0  # how long GPUs are left to another user whose turn it is
STAGGER_S = 0.3  # more for each further user ahead, so that schedulers whose patience ends do so in the order of users


@dataclass(slots=True)
class _Want:
    kind: PlacementClass
    number: int


class Turns:
    """The order of users within one pass.

    `give_way` books GPUs in the ledger for the waiting jobs of other users, as their own schedulers will do. `end` takes
    these bookings back. So the own jobs get what remains, and no GPU is kept for a job that does not fit.

    GPUs are left to all users ahead together, for a limited time. If one of them books a part of these GPUs, the time
    begins again. Afterwards these users are passed over until none of their waiting jobs fits any more.
    """

    def __init__(self, sharing: Sharing, fleet: Fleet, mono: float) -> None:
        self._sharing, self._fleet, self._mono = sharing, fleet, mono
        standings = sharing.standings()
        self._standing = {user: one.value for user, one in standings.items()}
        self._wants = {user: [_Want(*each) for each in wants] for user, wants in sharing.wants(fleet.managed).items()}
        self._kept: list[tuple[PlacementClass, tuple[int, ...]]] = []
        self._fitting: set[str] = set()  # users ahead of whose waiting jobs one fits
        self._left_to: set[int] = set()  # GPUs
        self._first = ""  # the first user to whom a GPU is left
        self._judge_patience()

    def give_way(self) -> None:
        """Keep GPUs for users whose standing is lower than the own, lowest first, as far as their jobs fit."""
        find, mine = self._fleet.find, self._standing[self._sharing.user]
        for user, wants in self._wants.items():
            if self._standing.get(user, 0.0) < mine and any(find(want.kind) is not None for want in wants):
                self._fitting.add(user)
        while ahead := [user for user in self._ahead() if self._standing.get(user, 0.0) < mine]:
            self._keep_one(min(ahead, key=lambda user: (self._standing.get(user, 0.0), user)))

    def _ahead(self) -> set[str]:
        return self._fitting & self._wants.keys() - self._sharing.left.passed_over

    def _judge_patience(self) -> None:
        left = self._sharing.left
        if left.since is None:
            return
        new = self._sharing.bookings_of(left.users) - left.bookings
        if any(gpu in left.gpus for gpu, _, _ in new):
            left.since = self._mono
        elif self._mono >= left.until:
            left.since, left.passed_over = None, left.passed_over | left.users

    def _keep_one(self, user: str) -> None:
        for want in self._wants[user]:
            kind = want.kind
            gpus = self._fleet.find(kind) if want.number else None
            if gpus is None:
                continue
            self._left_to.update(gpus)
            self._first = self._first or user
            self._fleet.take(kind.need, gpus, kind.vram_mib)
            self._kept.append((kind, gpus))
            want.number -= 1
            self._charge(user, kind.need)
            return
        del self._wants[user]  # nothing more fits

    def reserves(self, job: int, most: int) -> bool:
        """Return whether GPUs are reserved for a job that does not fit. They are published, so that no other job takes them.

        ``most``: the setting `max_overtakes`. A job that needs several GPUs, or a whole one, would wait for ever if the
        jobs of others took each part that becomes free. So after ``most`` starts of others it reserves, but only while its
        user is the one who has used least.
        """
        sharing = self._sharing
        if sharing.first is None or sharing.first[0] != job:
            sharing.first = (job, sharing.taken, sharing.neighbours.at)
        if sharing.taken - sharing.first[1] < most:
            return False
        mine = (self._standing[sharing.user], sharing.user, sharing.key)
        for one in sharing.neighbours.living:
            waits = one.document.kind != LEASE and one.document.wants and one.user not in sharing.left.passed_over
            if waits and (self._standing.get(one.user, 0.0), one.user, one.document.key) < mine:
                return False
        sharing.reserving = True
        return True

    def placed(self, need: ResourceRequest) -> None:
        """Charge the own user for a job that was just placed."""
        self._charge(self._sharing.user, need)

    def _charge(self, user: str, need: ResourceRequest) -> None:
        cost = need.total / WHOLE * CHARGE_S / self._sharing.weight(user)
        self._standing[user] = self._standing.get(user, 0.0) + cost

    def end(self) -> None:
        """Take back the bookings for others. Record to whom GPUs are left, and when the patience ends."""
        for kind, gpus in self._kept:
            self._fleet.give_back(kind.need, gpus, kind.vram_mib)
        sharing, left = self._sharing, self._sharing.left
        left.passed_over &= self._fitting
        left.users = frozenset(self._fitting - left.passed_over)
        if self._left_to:
            left.since = self._mono if left.since is None else left.since
            left.until = left.since + PATIENCE_S + STAGGER_S * (len(left.users) - 1)
            left.gpus = frozenset(gpu.uuid for gpu in self._fleet.managed if gpu.index in self._left_to)
            left.bookings = sharing.bookings_of(left.users)
        else:
            left.since = None
        sharing.waits_for = self._first
        sharing.due = None if left.since is None else left.until


def why_others_first(sharing: Sharing) -> Reason:
    """Return why jobs that would fit do not start while GPUs are left to another user."""
    used, fair = shares_used(sharing.standings(), sharing.user)
    half = sharing.half_life_s
    span = "since yesterday" if half == HALF_LIFE_S else f"in the last {span_text(half)}"
    text = f"you have used {used:.1f} of your {fair:.1f} shares {span}; user {sharing.waits_for} waits"
    return Reason("fair-share", text)
