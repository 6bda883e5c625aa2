"""GPUs told by the config: declared, booked, never measured."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.core.gpu import Gpu


class FixedProbe:
    """Declared GPUs with these ids."""

    def __init__(self, ids: Iterable[int]) -> None:
        self._ids = tuple(ids)

    def gpus(self) -> list[Gpu]:
        """The declared GPUs; `declared:n` is the same GPU for every scheduler of this machine."""
        return [Gpu(n, f"declared:{n}", "declared") for n in self._ids]
