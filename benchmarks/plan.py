"""How much is measured, and where."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

from benchmarks.programs import Programs, build


@dataclass(frozen=True)
class Plan:
    """What the command line asked for. ``folder`` is this run's own; it goes when the run ends."""

    folder: str
    scale: float = 1.0
    repeats: int = 3
    million: bool = True

    def count(self, full: int, least: int = 4) -> int:
        """How many of something where a whole run takes ``full``."""
        return max(least, round(full * self.scale))

    @functools.cached_property
    def programs(self) -> Programs:
        """The C programs, compiled when first asked for."""
        folder = os.path.join(self.folder, "programs")
        os.mkdir(folder)
        return build(folder)
