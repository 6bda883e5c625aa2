"""The measured memory and load of a running attempt."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.core.gpu_snapshot import GpuProcess


@dataclass(slots=True)
class MeasuredUse:
    """The readings of one attempt. ``peak_mib``: the most MiB on one GPU; None: never measured."""

    peak_mib: int | None = None
    _load_sum: float = 0.0
    _loads: int = 0

    def add(self, mib: int, load: float | None) -> None:
        """Add a reading of one GPU: the memory of the attempt there, and its load (0 to 1; None: not measured)."""
        if self.peak_mib is None or mib > self.peak_mib:
            self.peak_mib = mib
        if load is not None:
            self._load_sum += load
            self._loads += 1

    @property
    def load(self) -> float | None:
        """The mean load, 0 to 1; None: never measured."""
        return self._load_sum / self._loads if self._loads else None


def loads_of(processes: Iterable[GpuProcess]) -> dict[str, float]:
    """Return attempt → the load that its processes put on a GPU (0 to 1), where it was measured."""
    found: dict[str, float] = {}
    for process in processes:
        if process.owner and process.load is not None:
            found[process.owner] = min(1.0, found.get(process.owner, 0.0) + process.load)
    return found
