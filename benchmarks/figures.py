"""Medians and percentiles of samples, and the report of a case as a table and as a line of JSON."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import scheduler


def median(values: Sequence[float]) -> float:
    """Return the median. For an even number of values, this is the mean of the middle two values."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def p99(values: Sequence[float]) -> float:
    """Return the 99th percentile (nearest rank). For fewer than 100 values, this is the largest value."""
    return sorted(values)[math.ceil(len(values) * 0.99) - 1]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, p99, smallest value, largest value and number of values, for the results file."""
    return {"median": median(values), "p99": p99(values), "min": min(values), "max": max(values), "n": len(values)}


@dataclass(slots=True)
class Report:
    """The results of one case: ``columns`` and ``rows`` for the printed table, ``figures`` for the JSON line."""

    case: str
    title: str
    columns: tuple[str, ...]
    rows: list[tuple[object, ...]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def row(self, *cells: object) -> None:
        """Add a row to the table."""
        self.rows.append(cells)

    def text(self) -> str:
        """Return the table as plain text, under a line with case and title."""
        lines = [self.columns, *(tuple(_cell(cell) for cell in row) for row in self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        out = [f"{self.case}: {self.title}"]
        for line in lines:
            cells = [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:]))]  # noqa: B905
            out.append("  " + "  ".join(cells).rstrip())
        return "\n".join(out)

    def append_to(self, path: str) -> None:
        """Append the figures and facts about the machine to a file, as one line of JSON."""
        found = {
            "case": self.case,
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "version": scheduler.__version__,
            "python": platform.python_version(),
            "kernel": platform.release(),
            "cpus": os.cpu_count(),
            "load": round(os.getloadavg()[0], 2),
            "figures": self.figures,
        }
        with open(path, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(found) + "\n")


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}"


def progress(text: str) -> None:
    """Replace the progress line on stderr; does nothing unless stderr is a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()
