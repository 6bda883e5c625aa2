"""Tests of `wait_until`."""

from __future__ import annotations

import itertools

from scheduler.system.waiting import wait_until


def test_wait_until_checks_its_condition_until_it_is_true_and_at_least_once() -> None:
    looks = itertools.count()
    assert wait_until(lambda: next(looks) == 3, 30, every_s=0)
    assert next(looks) == 4
    assert wait_until(lambda: True, 0) and not wait_until(lambda: False, 0) and not wait_until(lambda: False, -1)
