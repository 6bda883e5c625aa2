"""Limits for what is kept of ended jobs: the number and age of the jobs, the size and age of their logs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from scheduler.core.errors import SchedulerError, UsageError
from scheduler.core.units import seconds_of

_SIZE = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)([KMGTkgt])(?:i?B)?", re.ASCII)
_UNITS = {"K": 10, "M": 20, "G": 30, "T": 40}


@dataclass(frozen=True, slots=True)
class Keep:
    """Limits for the ended jobs, or for their logs. None: no limit.

    ``most``: how many jobs are kept, or how many bytes of logs; the newest are kept. ``age_s``: how many seconds a job
    or a log is kept at most.
    """

    most: int | None = None
    age_s: float | None = None

    def __bool__(self) -> bool:
        return self.most is not None or self.age_s is not None


def keep_logs(text: str) -> Keep:
    """Read a limit for logs: ``30d``, ``20G``, ``30d 20G`` or an empty text (no limit). Raises UsageError."""
    return _keep(text, _bytes, "30d, 20G or 30d 20G")


def keep_finished(text: str) -> Keep:
    """Read a limit for jobs: ``10000``, ``90d``, ``10000 90d`` or an empty text (no limit). Raises UsageError."""
    return _keep(text, _number, "10000, 90d or 10000 90d")


def _bytes(word: str) -> int | None:
    # A bare m means minutes, as in every other setting; megabytes are written M.
    found = _SIZE.fullmatch(word)
    return int(float(found[1]) * (1 << _UNITS[found[2].upper()])) if found else None


def _number(word: str) -> int | None:
    return int(word) if word.isascii() and word.isdigit() and len(word) < 16 else None


def _keep(text: str, size_of: Any, example: str) -> Keep:
    do = f"write {example}, or leave it empty to keep everything"
    most: int | None = None
    age_s: float | None = None
    for word in text.replace(",", " ").split():
        size = size_of(word)
        if size is not None:
            _check_limit(word, size, most, do)
            most = size
            continue
        if not word[-1:].isalpha():
            raise UsageError(f"{word[:40]!r} has no unit", do=do)
        try:
            age = seconds_of(word)
        except SchedulerError:
            raise UsageError(f"cannot read {word[:40]!r}: it is not a limit", do=do) from None
        _check_limit(word, age, age_s, do)
        age_s = age
    return Keep(most, age_s)


def size_text(size: int) -> str:
    """Return bytes as text for people: ``3.2 GB``, ``512 KB``. Units are powers of 1024, as in the settings."""
    for unit in ("TB", "GB", "MB", "KB"):
        step = 1 << _UNITS[unit[0]]
        if size >= step:
            return f"{size / step:.1f}".removesuffix(".0") + f" {unit}"
    return f"{size} bytes"


def _check_limit(word: str, limit: float, before: float | None, do: str) -> None:
    """Raise UsageError if ``limit`` is 0, or if a limit of its kind was given ``before``."""
    if before is not None:
        raise UsageError(f"{word!r} is a second limit of the same kind", do=do)
    if not limit:
        raise UsageError(f"a limit must be above 0, not {word!r}", do=do)
