"""Declared GPUs: GPUs that the settings name and that the daemon books in the ledger but never reads."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.core.gpu import Gpu


def declared(ids: Iterable[int]) -> list[Gpu]:
    """Return declared GPUs with these ids.

    GPU N gets the UUID ``declared:N``. So all schedulers of this machine use the same UUID for the same declared GPU.
    """
    return [Gpu(n, f"declared:{n}", "declared") for n in ids]
