"""Takes turns with other users: keeps GPUs for waiting jobs of users who have used less, for one decision."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.core.fair_shares import CHARGE_S, HALF_LIFE_S, shares_used
from scheduler.core.gpu import WHOLE, ResourceRequest
from scheduler.core.job import Reason
from scheduler.core.neighbours import LeftTo, Sharing
from scheduler.core.placement import Fleet
from scheduler.core.placement_class import PlacementClass
from scheduler.core.units import span_text

PATIENCE_S = 3.0  # how long GPUs are left to another user whose turn it is


@dataclass(slots=True)
class _Want:
    kind: PlacementClass
    number: int


class Turns:
    """The order of users within one pass.

    `give_way` books GPUs in the ledger for the waiting jobs of other users, as their own schedulers will do. `end` takes
    these bookings back. So the own jobs get what remains, and no GPU is kept for a job that does not fit.
    """

    def __init__(self, sharing: Sharing, fleet: Fleet, mono: float) -> None:
        self._sharing, self._fleet, self._mono = sharing, fleet, mono
        standings = sharing.standings()
        self._standing = {user: one.value for user, one in standings.items()}
        self._wants = {user: [_Want(*each) for each in wants] for user, wants in sharing.wants(fleet.managed).items()}
        self._kept: list[tuple[PlacementClass, tuple[int, ...]]] = []
        self._left_to: dict[str, set[int]] = {}  # user → GPUs
        self._had_chance: set[str] = set()

    def give_way(self) -> None:
        """Keep GPUs for users whose standing is lower than the own, lowest first, as far as their jobs fit."""
        mine = self._standing[self._sharing.user]
        while ahead := [user for user in self._wants if self._standing.get(user, 0.0) < mine]:
            self._keep_one(min(ahead, key=lambda user: (self._standing.get(user, 0.0), user)))

    def _keep_one(self, user: str) -> None:
        for want in self._wants[user]:
            kind = want.kind
            gpus = self._fleet.find(kind) if want.number else None
            if gpus is None:
                continue
            if user not in self._left_to and not self._is_patient_with(user):
                self._had_chance.add(user)
                break
            self._left_to.setdefault(user, set()).update(gpus)
            self._fleet.take(kind.need, gpus, kind.vram_mib)
            self._kept.append((kind, gpus))
            want.number -= 1
            self._charge(user, kind.need)
            return
        del self._wants[user]  # nothing fits, or the user had the chance

    def _is_patient_with(self, user: str) -> bool:
        """Return whether GPUs are still left to a user.

        Patience begins when GPUs are first left to the user, and again when the user has booked a part of them.
        """
        left = self._sharing.left_to.setdefault(user, LeftTo(self._mono))
        new = self._sharing.bookings_of(user) - left.bookings
        if any(booking.gpu in left.gpus for booking in new):
            left = self._sharing.left_to[user] = LeftTo(self._mono)
        return self._mono - left.since < PATIENCE_S

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
        sharing = self._sharing
        for user in {*sharing.left_to} - {*self._left_to} - self._had_chance:
            del sharing.left_to[user]  # nothing could be kept for this user: the patience begins anew next time
        for user, left in self._left_to.items():
            uuids = frozenset(gpu.uuid for gpu in self._fleet.managed if gpu.index in left)
            sharing.left_to[user] = LeftTo(sharing.left_to[user].since, uuids, sharing.bookings_of(user))
        sharing.waits_for = min(self._left_to, default="")
        sharing.due = min((sharing.left_to[user].since + PATIENCE_S for user in self._left_to), default=None)


def why_others_first(sharing: Sharing) -> Reason:
    """Return the reason of jobs that would fit, while GPUs are left to another user."""
    used, fair = shares_used(sharing.standings(), sharing.user)
    half = sharing.half_life_s
    span = "since yesterday" if half == HALF_LIFE_S else f"in the last {span_text(half)}"
    text = f"you have used {used:.1f} of your {fair:.1f} shares {span}; user {sharing.waits_for} waits"
    return Reason("fair-share", text)
