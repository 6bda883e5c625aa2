"""Waits between retries: exponential back-off."""

from __future__ import annotations

import math

LONGEST_WAIT_S = 600.0


def backoff_s(attempt: int, base: float, jitter: float) -> float:
    """Return the seconds to wait after failure number ``attempt`` (from 1): base · 2^(attempt-1), ±10 %, at most 600.

    ``jitter``: a random number in [0, 1) from the caller, because this package uses no random numbers.
    """
    return min(LONGEST_WAIT_S, doubled_s(base, attempt, math.inf) * (0.9 + 0.2 * jitter))


def doubled_s(base: float, failures: int, longest: float) -> float:
    """Return the seconds to wait after ``failures`` failures in a row: base · 2^(failures-1), at most ``longest``.

    The exponent is limited, because 2.0 ** 1024 raises OverflowError, and ``failures`` can exceed 1024.
    """
    return min(longest, base * 2.0 ** min(failures - 1, 40))


class Backoff:
    """Exponential back-off: each wait is twice as long as the previous wait, up to a limit. Times are in seconds."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self.first_s, self.longest_s = first_s, longest_s
        self.wait_s, self.tries = first_s, 0

    def next(self, longest_s: float | None = None) -> float:
        """Return the wait before the next try, and double the wait that the next call returns.

        ``longest_s``: upper limit of both waits. None: the limit that was given when the object was created.
        """
        most = self.longest_s if longest_s is None else longest_s
        self.tries += 1
        wait_s = min(self.wait_s, most)
        self.wait_s = min(2 * wait_s, most)
        return wait_s

    def reset(self) -> None:
        """Begin again with the first wait. To be called after a success."""
        self.wait_s, self.tries = self.first_s, 0
