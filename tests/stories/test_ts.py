"""`ts`, statement by statement: queueing, the list, waiting, removing."""

from __future__ import annotations

from collections.abc import Callable

from tests.stories.spooler import Spooler


def test_s4_3_queueing_prints_the_id_alone_from_zero_on(spooler: Callable[..., Spooler]) -> None:
    """S4.3: one line, the id, from 0 on after -K; with -n nothing."""
    s = spooler()
    assert s.ts("true") == "0" and s.ts("true") == "1"
    assert s.ts("-n", "true") == ""
    s.ts("-w", "2")
    s.ts("-K")
    assert s.ts("true") == "0"
    assert s.ts("-w", "0") == ""
