"""The options of a benchmark run: how much is measured, and in which folder."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

from benchmarks.programs import Programs, build


@dataclass(frozen=True)
class Plan:
    """The options of one benchmark run. ``folder`` is a temporary folder, removed when the run ends."""

    folder: str
    scale: float = 1.0
    repeats: int = 3
    million: bool = True

    def count(self, full: int, least: int = 4) -> int:
        """Return ``full``, multiplied by the scale of this run, but at least ``least``."""
        return max(least, round(full * self.scale))

    @functools.cached_property
    def programs(self) -> Programs:
        """The C programs, compiled on first use. Raises NoCompiler if there is no C compiler."""
        folder = os.path.join(self.folder, "programs")
        os.mkdir(folder)
        return build(folder)
