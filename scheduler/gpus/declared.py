"""GPUs told by the config: declared, booked, never measured."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.core.gpu import Gpu


def declared(ids: Iterable[int]) -> list[Gpu]:
    """Declared GPUs with these ids; `declared:n` is the same GPU for every scheduler of this machine."""
    return [Gpu(n, f"declared:{n}", "declared") for n in ids]
