"""How long to wait before the next try."""

from __future__ import annotations

LONGEST_WAIT_S = 600.0


def backoff_s(attempt: int, base: float, jitter: float) -> float:
    """Seconds after failed try number ``attempt`` (from 1): base · 2^(attempt-1), ±10 %, at most 600.

    ``jitter`` is a number in [0, 1), given by the caller: core has no dice.
    """
    wait = base * 2.0 ** min(attempt - 1, 40)
    return min(LONGEST_WAIT_S, wait * (0.9 + 0.2 * jitter))
