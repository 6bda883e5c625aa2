"""Reads the sizes in a message about a lack of GPU memory."""

from __future__ import annotations

import re
from dataclasses import dataclass

from scheduler.core.traceback_text import visible_lines

_MIB = 1 << 20
_LARGEST = 1 << 50  # bytes; no GPU has as much, so a larger number is not a size
_UNITS = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}  # by the first letter
_SIZE = r"([\d.,]{1,20}) ?(bytes|[KMGT]i?B|B)\b"
_WHOLE_USE = re.compile("this process has", re.IGNORECASE)  # older messages tell the use without the CUDA context
_OTHER = re.compile(rf"Process \d+ has {_SIZE} memory in use")


@dataclass(frozen=True, slots=True)
class OomDetails:
    """The sizes that a message names, in MiB; None: it does not. They are about one GPU.

    ``tried``: what the program tried to allocate; ``used``: what this process had; ``capacity``, ``free``: of the GPU;
    ``others``: what all other processes and the driver had.
    """

    tried: int | None = None
    used: int | None = None
    capacity: int | None = None
    free: int | None = None
    others: int | None = None


# Field → expressions, of which the first that matches counts.
_FIELDS = {
    "tried": (
        rf"tried to allocate {_SIZE}",
        rf"trying to allocate {_SIZE}",
        rf"out of memory allocating {_SIZE}",
        rf"failed to allocate (?:request for )?{_SIZE}",
        rf"allocating {_SIZE} on device",
        rf"unable to allocate {_SIZE}",
    ),
    "used": (
        rf"this process has {_SIZE} memory in use",
        rf"{_SIZE} reserved in total by pytorch",
        rf"{_SIZE} already allocated",
        rf"allocated so far: {_SIZE}",
    ),
    "capacity": (rf"total capaci?ty of {_SIZE}", rf"{_SIZE} total capacity"),
    "free": (rf"of which {_SIZE} is free", rf"{_SIZE} free"),
}
_PATTERNS = {name: [re.compile(text, re.IGNORECASE) for text in texts] for name, texts in _FIELDS.items()}


def oom_details(tail: str) -> OomDetails | None:
    """Return the sizes in the last line of ``tail`` that names the size of an allocation that failed; None: no line does."""
    for line in reversed(list(visible_lines(tail))):
        tried = _first("tried", line)
        if tried is not None:
            capacity, free, used = (_first(name, line) for name in ("capacity", "free", "used"))
            return OomDetails(tried, used, capacity, free, _others(line, capacity, free, used))
    return None


def _others(line: str, capacity: int | None, free: int | None, used: int | None) -> int | None:
    """Return the memory of other processes, as listed or as the rest; None if the line does not tell all of it."""
    if None not in (capacity, free, used) and _WHOLE_USE.search(line):
        return max(0, (capacity or 0) - (free or 0) - (used or 0))
    listed = [_mib(*found) for found in _OTHER.findall(line)]
    known = [size for size in listed if size is not None]
    return sum(known) if known else None


def _first(name: str, line: str) -> int | None:
    for pattern in _PATTERNS[name]:
        found = pattern.search(line)
        if found:
            return _mib(*found.groups())
    return None


def _mib(number: str, unit: str) -> int | None:
    """Return a size in MiB, at least 1 if it is above 0; None if it is not a number, or above 1 PiB."""
    try:
        size = float(number.rstrip(".").replace(",", "")) * _UNITS[unit[0].lower()]
    except ValueError:
        return None
    if size > _LARGEST:
        return None
    return max(1, round(size / _MIB)) if size else 0
