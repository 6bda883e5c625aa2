"""Conversion of durations, sizes and times between text and numbers."""

from __future__ import annotations

import math
import re

from scheduler.core.errors import UsageError

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_SIZES = {"": 1, "K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024}


LONGEST_S = 10**9  # about 30 years: a longer duration is taken for a mistake
LARGEST_MIB = 1 << 40
LATEST = 253402300799.0  # the last second of the year 9999, the latest that ``datetime`` can format


def seconds_of(text: str) -> float:
    """Read a duration such as ``90`` (seconds), ``4s``, ``30m``, ``4h``, ``2d`` or ``1h30m``; return seconds.

    ``90:00`` is minutes and seconds, ``1:30:00`` is hours, minutes and seconds, ``1-12:00`` is days, hours and minutes,
    ``1-12:00:00`` is days, hours, minutes and seconds. Raises UsageError.
    """
    bare = text.strip().lower()
    wrong = UsageError(f"{text[:40]!r} is not a duration", do="write 90, 4s, 30m, 4h, 2d or 1-12:00:00")
    if len(bare) > 40 or not bare.isascii():
        raise wrong
    clock = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d{2})(?::(\d{2}))?", bare, re.ASCII)
    if clock:
        days, first, second, third = (int(part) if part else 0 for part in clock.groups())
        if clock.group(4) is None and clock.group(1) is None:
            seconds = float(first * 60 + second)  # as in Slurm
        else:
            seconds = float(days * 86400 + first * 3600 + second * 60 + third)
    else:
        pieces = re.findall(r"(\d+(?:\.\d+)?)([smhdw]?)", bare, re.ASCII)
        whole = "".join(number + unit for number, unit in pieces) == bare
        if not pieces or not whole or (len(pieces) > 1 and any(not unit for _, unit in pieces)):
            raise wrong
        seconds = float(sum(float(number) * _UNITS[unit] for number, unit in pieces))
    if seconds > LONGEST_S:
        raise UsageError(f"{text.strip()!r} is more than 30 years", do="write 90, 4s, 30m, 4h, 2d or 1-12:00:00")
    return seconds


def mib_of(text: str) -> int:
    """Read a size such as ``18G``, ``512M`` or a number of MiB; return whole MiB, rounded up. Raises UsageError."""
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([kKmMgGtT]?)(?:i?[bB])?\s*", text, re.ASCII)
    if not match:
        raise UsageError(f"{text[:40]!r} is not a size", do="write 18G or 512M")
    mib = math.ceil(float(match.group(1)) * _SIZES[match.group(2).upper()])
    if mib > LARGEST_MIB:
        raise UsageError(f"no GPU has {text.strip()} of memory", do="write 18G or 512M")
    return mib


def span_text(seconds: float) -> str:
    """Return seconds as a duration for people: ``4 s``, ``3 min 20 s``, ``2 h 05 min``, ``3 d 4 h``."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def mib_text(mib: float) -> str:
    """Return MiB as a size for people: ``512 MiB``, ``31 GiB``, ``1.5 GiB``."""
    if mib < 1024:
        return f"{mib:.0f} MiB"
    return f"{mib / 1024:.1f}".removesuffix(".0") + " GiB"


def size_text(mib: int) -> str:
    """Return MiB as a size that `mib_of` reads: ``512M``, ``18G``."""
    return f"{mib // 1024}G" if mib and not mib % 1024 else f"{mib}M"


def utc(seconds: float) -> str:
    """Return seconds since 1970 as ISO 8601 text in UTC with milliseconds: ``2026-11-22T09:21:55.438Z``."""
    from datetime import datetime, timezone  # slow to import, and rarely needed by commands called in loops

    # Truncated, not rounded up: the text is never later than the time. The 0.001 ms compensate for float inaccuracy.
    whole, thousandths = divmod(int(min(max(seconds, 0.0), LATEST) * 1000 + 0.001), 1000)
    return f"{datetime.fromtimestamp(whole, timezone.utc):%Y-%m-%dT%H:%M:%S}.{thousandths:03d}Z"


def local_time(seconds: float, now: float) -> str:
    """Return the local time of day as ``14:02``, with the date if it is not the date of ``now`` (seconds since 1970)."""
    from datetime import datetime  # slow to import, as above

    moment, today = (datetime.fromtimestamp(min(max(at, 0.0), LATEST)).astimezone() for at in (seconds, now))
    return f"{moment:%H:%M}" if moment.date() == today.date() else f"{moment:%Y-%m-%d %H:%M}"


def maybe_utc(seconds: float | None) -> str | None:
    """Return `utc` of ``seconds``; None if ``seconds`` is None."""
    return None if seconds is None else utc(seconds)
