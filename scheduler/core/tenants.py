"""Tenants: the attempts with an allocation on a GPU, and the memory that they leave to another job. All memory is in MiB."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scheduler.core.gpu import WHOLE
from scheduler.core.observations import Now

OUTGROWN = 1.1  # a job that uses more than this multiple of its share counts with the memory that it uses
LEAST_GROWTH_MIB = 64  # less is no growth: a job that runs evenly allocates and frees small amounts


@dataclass(frozen=True, slots=True)
class Tenant:
    """An attempt of this scheduler with an allocation on a GPU, or a user with bookings of other schedulers on it.

    ``key``: the attempt, such as ``12.1``, or `user_key`; ``parts``: thousandths of the GPU that are booked; ``vram_mib``: MiB that
    the job requested on each GPU (0: none requested); ``started_at``: seconds since 1970, None before the start; ``user``: of
    the job, in a scheduler of several users.
    """

    key: str
    job: int
    parts: int
    vram_mib: int = 0
    started_at: float | None = None
    user: str = ""

    @property
    def name(self) -> str:
        """The tenant in words: "job 12", or "user lab3"."""
        return f"user {self.key[1:]}" if self.key.startswith("@") else f"job {self.job}"


def user_key(user: str) -> str:
    """Return the key of the tenant that stands for the bookings of a user by other schedulers."""
    return f"@{user}"


def promised(tenant: Tenant, capacity: float) -> float:
    """Return the memory that a tenant may count on: its share of ``capacity``, or what it requested if that is more."""
    return max(tenant.vram_mib, capacity * tenant.parts / WHOLE)


def outgrown(tenant: Tenant, own: float, capacity: float) -> bool:
    """Return whether a tenant uses so much more than its share that the excess counts. ``own``: the memory in use."""
    return own > OUTGROWN * promised(tenant, capacity)


def use_beyond(tenants: Sequence[Tenant], own: Mapping[str, float], capacity: float) -> float:
    """Return the memory that tenants use beyond their shares, of those that have outgrown them."""
    used = ((tenant, own.get(tenant.key, 0.0)) for tenant in tenants)
    return sum(mib - promised(tenant, capacity) for tenant, mib in used if outgrown(tenant, mib, capacity))


def overcommit(mib: float, capacity: float, tolerance: float) -> int:
    """Return memory that is in use beyond the shares as thousandths of a GPU, without the tolerance (0 to 1)."""
    return math.ceil(WHOLE * max(0.0, mib - tolerance * capacity) / capacity)


def room_of_shares(tenants: Sequence[Tenant], own: Mapping[str, float], capacity: float) -> float:
    """Return the part of ``capacity`` that is left beside the shares of the tenants.

    A tenant that has outgrown its share counts with the memory that it uses. ``own``: attempt → memory in use.
    """
    room = capacity
    for tenant in tenants:
        used = own.get(tenant.key, 0.0)
        room -= used if outgrown(tenant, used, capacity) else promised(tenant, capacity)
    return room


def room_beside_requests(tenants: Sequence[Tenant], own: Mapping[str, float], capacity: float) -> float:
    """Return the part of ``capacity`` that is left beside the memory that the tenants requested or, if more, use."""
    return capacity - sum(max(tenant.vram_mib, own.get(tenant.key, 0.0)) for tenant in tenants)


@dataclass(frozen=True, slots=True)
class Growth:
    """The growth of the memory of one tenant. ``mib``: after the last growth; ``at``: its time, in monotonic seconds."""

    mib: float
    at: float


def growth_after(before: Growth | None, tenant: Tenant, mib: float, settle_s: float, now: Now) -> Growth:
    """Return the growth of a tenant after a reading in which it uses ``mib``.

    A tenant that already runs for longer than ``settle_s`` when it is first seen, such as after a restart of the
    scheduler, counts as grown at its start.
    """
    if before is not None and mib < before.mib + LEAST_GROWTH_MIB:
        return before
    age = now.wall - tenant.started_at if tenant.started_at is not None else 0.0
    if before is None and (age > settle_s or mib < LEAST_GROWTH_MIB):
        return Growth(mib, now.mono - age)
    return Growth(mib, now.mono)


def is_settled(tenant: Tenant, growth: Growth, settle_s: float, now: Now) -> bool:
    """Return whether the memory that a tenant uses is what it needs: it has not grown for ``settle_s`` seconds.

    A tenant that has used no memory yet gets twice that time.
    """
    if tenant.started_at is None:
        return False
    age, still = now.wall - tenant.started_at, now.mono - growth.at
    return age > settle_s and still > settle_s and (growth.mib > 0 or age >= 2 * settle_s)
