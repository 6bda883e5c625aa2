"""Other schedulers and leases of this machine: their bookings, their waiting jobs, and what their users have used.

A scheduler reads the documents of the others, decides and publishes its own document under one lock of the machine. So
no part of a GPU is given away twice, and schedulers agree on whose turn it is (`core/take_turns.py`) without talking to
each other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from scheduler.core.fair_shares import HALF_LIFE_S, Standing, decayed
from scheduler.core.gpu import ANY_DEVICE, WHOLE, Gpu, ResourceRequest, decimal_text, mask_of
from scheduler.core.job import Process
from scheduler.core.placement_class import PlacementClass
from scheduler.core.shared_bookings import LEASE, Document


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A scheduler or lease. ``user``: its owner; ``own``: the owner is the user of this scheduler."""

    user: str
    own: bool
    document: Document


@dataclass(frozen=True, slots=True)
class Neighbours:
    """An observation: the documents of all other schedulers and leases, as they are while the lock is held.

    ``ended``: documents of schedulers that have ended, which still tell what their users have used; ``at``: seconds
    since boot; ``closed``: why no GPU can be booked now, as a clause; empty if GPUs can be booked.
    """

    at: float
    living: tuple[Neighbour, ...] = ()
    ended: tuple[Neighbour, ...] = ()
    closed: str = ""


@dataclass(frozen=True, slots=True)
class Outside:
    """Bookings of one user on a GPU by other schedulers and leases. ``until``: seconds since boot, None if unknown."""

    user: str
    own: bool
    parts: int
    memory_mib: int
    until: float | None
    lease: bool

    def sentence(self, gpu: int, clock: str = "") -> str:
        """Return for example "0.5 of GPU 2 is booked by user lab3 until about 14:20"."""
        what = "GPU" if self.parts >= WHOLE else f"{decimal_text(self.parts)} of GPU"
        who = "another scheduler or lease of yours" if self.own else f"user {self.user}"
        return f"{what} {gpu} is booked by {who}" + (f" until about {clock}" if clock else "")


# What does not change in a booking: UUID, thousandths, and the main process, if it is known.
BookedPart = tuple[str, int, tuple[Process, ...]]


@dataclass(slots=True)
class Left:
    """GPUs that are left to other users whose turn it is.

    ``since``, ``until``: monotonic seconds; ``since`` None: nothing is left to anybody; ``gpus``: UUIDs; ``bookings``: all
    bookings of these users at the last pass; ``passed_over``: users who did not take what was left to them.
    """

    since: float | None = None
    until: float = 0.0
    users: frozenset[str] = frozenset()
    gpus: frozenset[str] = frozenset()
    bookings: frozenset[BookedPart] = frozenset()
    passed_over: set[str] = field(default_factory=set)


def _no_clock(at: float) -> str:
    return ""


@dataclass(slots=True)
class Sharing:
    """The neighbours of a scheduler, its own use, and the turns of the users.

    ``user``: owner of the scheduler; ``key``: key of its document; ``weights``: user → weight, 1.0 by default; ``used`` and
    ``used_at``: own decayed use; ``left``: GPUs that are left to other users; ``taken``: number of bookings of other users
    that have begun; ``first``: the first job that does not fit, with ``taken`` and the time (seconds since boot) when it
    became the first; ``reserving``: whether GPUs are reserved for this job (`core/take_turns.py: Turns.reserves`).
    """

    user: str = ""
    half_life_s: float = HALF_LIFE_S
    weights: Mapping[str, float] = field(default_factory=dict)
    neighbours: Neighbours = field(default_factory=lambda: Neighbours(0.0))
    outside: dict[int, tuple[Outside, ...]] = field(default_factory=dict)
    used: float = 0.0
    used_at: float = 0.0
    rate: float = 0.0
    clock: Callable[[float], str] = _no_clock  # seconds since boot → time of day, such as 14:20
    left: Left = field(default_factory=Left)
    key: str = ""
    taken: int = 0
    first: tuple[int, int, float] | None = None
    reserving: bool = False
    waits_for: str = ""  # user to whom GPUs are left now; empty: none
    due: float | None = None  # when the patience with such a user ends (monotonic seconds)

    def weight(self, user: str) -> float:
        return self.weights.get(user, 1.0)

    def take(self, neighbours: Neighbours, gpus: Iterable[Gpu]) -> None:
        """Take in a reading of the folder. ``gpus``: the managed GPUs."""
        before, self.neighbours = self.bookings_of(self._others()), neighbours
        self.taken += sum(bool(processes) for _, _, processes in self.bookings_of(self._others()) - before)
        index = {gpu.uuid: gpu.index for gpu in gpus}
        found: dict[int, dict[tuple[str, bool], list[tuple[int, int, float | None]]]] = {}
        for neighbour in neighbours.living:
            lease = neighbour.document.kind == LEASE
            for one in (*neighbour.document.bookings, *neighbour.document.reserved):
                if one.gpu in index:
                    by_user = found.setdefault(index[one.gpu], {})
                    by_user.setdefault((neighbour.user, lease), []).append((one.parts, one.memory_mib, one.until))
        own = self.user
        self.outside = {
            gpu: tuple(
                Outside(
                    user, user == own, min(WHOLE, sum(parts for parts, _, _ in ones)), sum(mib for _, mib, _ in ones),
                    None if any(until is None for _, _, until in ones) else max(until or 0.0 for _, _, until in ones),
                    lease,
                )
                for (user, lease), ones in sorted(by_user.items())
            )
            for gpu, by_user in found.items()
        }  # fmt: skip

    def booked(self) -> dict[int, tuple[int, int, str]]:
        """Return what others have booked, for `Fleet.set_outside`."""
        return {
            gpu: (
                min(WHOLE, sum(one.parts for one in ones)), sum(one.memory_mib for one in ones),
                "; ".join(one.sentence(gpu, "" if one.until is None else self.clock(one.until)) for one in ones),
            )
            for gpu, ones in self.outside.items()
        }  # fmt: skip

    def account(self, at: float, rate: float) -> None:
        """Add the use since the last call. ``at``: seconds since boot; ``rate``: GPUs that this scheduler's jobs have now."""
        if self.used_at:
            self.used = decayed(self.used, at - self.used_at, self.half_life_s, self.rate)
        self.used_at, self.rate = at, rate

    def take_back(self, at: float, late_s: float, gpus: float) -> None:
        """Correct the own use after an end that was noticed ``late_s`` seconds later, now.

        ``at``: seconds since boot, now; ``gpus``: GPUs that the job had.
        """
        self.account(at, self.rate)
        self.used = max(0.0, self.used - decayed(0.0, late_s, self.half_life_s, gpus))

    def standings(self) -> dict[str, Standing]:
        """Return user → standing, of all users with a document."""
        at = max(self.neighbours.at, self.used_at)
        found = {self.user: Standing(weight=self.weight(self.user))}
        mine = found[self.user]
        mine.used += decayed(self.used, at - self.used_at, self.half_life_s, self.rate)
        mine.rate += self.rate
        for neighbour in (*self.neighbours.living, *self.neighbours.ended):
            document = neighbour.document
            one = found.setdefault(neighbour.user, Standing(weight=self.weight(neighbour.user)))
            rate = sum(booking.parts for booking in document.bookings) / WHOLE
            one.used += decayed(document.used, at - document.used_at, self.half_life_s, rate)
            one.rate += rate
        return found

    def wants(self, gpus: Iterable[Gpu]) -> dict[str, list[tuple[PlacementClass, int]]]:
        """Return other user → what the user's schedulers wait for: placement class and number of jobs."""
        index = {gpu.uuid: gpu.index for gpu in gpus}
        found: dict[str, list[tuple[PlacementClass, int]]] = {}
        for neighbour in self.neighbours.living:
            if neighbour.user == self.user:
                continue
            managed = neighbour.document.gpus
            for want in neighbour.document.wants:
                allowed = tuple(sorted(index[uuid] for uuid in want.gpus or managed if uuid in index))
                if want.count and want.parts and len(allowed) >= want.count:
                    profile = ANY_DEVICE if want.count == 1 else ""  # the want names the instances that it may use
                    kind = PlacementClass(ResourceRequest(want.count, want.parts, profile), allowed, want.memory_mib)
                    found.setdefault(neighbour.user, []).append((kind, want.number))
        return found

    def _others(self) -> set[str]:
        return {one.user for one in self.neighbours.living} - {self.user}

    def bookings_of(self, users: Collection[str]) -> frozenset[BookedPart]:
        """Return all bookings of other users, also on GPUs that this scheduler does not manage."""
        return frozenset(
            (booking.gpu, booking.parts, booking.processes[:1])
            for one in self.neighbours.living
            if one.user in users
            for booking in one.document.bookings
        )

    def job_mask(self) -> int:
        """Return the mask of the GPUs on which jobs of other schedulers are booked; leases do not count."""
        return mask_of(gpu for gpu, ones in self.outside.items() if any(not one.lease for one in ones))
