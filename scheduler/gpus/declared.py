"""Declared GPUs: named by the settings, booked in the ledger, never read."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.core.gpu import Gpu


def declared(ids: Iterable[int]) -> list[Gpu]:
    """Return declared GPUs with these ids. The UUID ``declared:N`` is GPU N for every scheduler of this machine."""
    return [Gpu(n, f"declared:{n}", "declared") for n in ids]
