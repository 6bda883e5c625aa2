"""How long to wait before the next try."""

from __future__ import annotations

LONGEST_WAIT_S = 600.0


def backoff_s(attempt: int, base: float, jitter: float) -> float:
    """Seconds after failed try number ``attempt`` (from 1): base · 2^(attempt-1), ±10 %, at most 600.

    ``jitter`` is a number in [0, 1), given by the caller: core has no dice.
    """
    wait = base * 2.0 ** min(attempt - 1, 40)
    return min(LONGEST_WAIT_S, wait * (0.9 + 0.2 * jitter))


class Backoff:
    """How long to wait before the next try: twice as long each time, up to a limit."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self.first_s, self.longest_s = first_s, longest_s
        self.wait_s, self.tries = first_s, 0

    def next(self, longest_s: float | None = None) -> float:
        """The wait before this try, in seconds; the one after it is twice as long. ``longest_s``: another limit from now on."""
        most = self.longest_s if longest_s is None else longest_s
        self.tries += 1
        wait_s = min(self.wait_s, most)
        self.wait_s = min(2 * wait_s, most)
        return wait_s

    def reset(self) -> None:
        """Begin anew: it went well."""
        self.wait_s, self.tries = self.first_s, 0
