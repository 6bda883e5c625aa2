"""Limits of users and groups (`core/user_limits.py`)."""

from __future__ import annotations

import pytest

from scheduler.core.errors import Refused
from scheduler.core.gpu import ResourceRequest
from scheduler.core.user_limits import EACH, Limit, UserLimits


def test_limits_on_waiting_jobs() -> None:
    limits = UserLimits({"ada": Limit(waiting=2), "@lab": Limit(waiting=3)}, {"bob": ["lab"], "cleo": ["lab"]})
    assert limits.over_waiting("ada", {"ada": 1}) == ""
    assert limits.over_waiting("ada", {"ada": 2}) == "user ada has 2 of at most 2 waiting jobs (limits)"
    assert limits.over_waiting("bob", {"bob": 1, "cleo": 2}) == "group lab has 3 of at most 3 waiting jobs (limits)"
    assert limits.over_waiting("dan", {"dan": 1000}) == ""


def test_a_need_of_nothing_has_no_limit() -> None:
    """Jobs without GPUs take no share, and no limit on GPUs keeps them back."""
    limits = UserLimits({EACH: Limit(gpus=0)})
    assert limits.over_gpus("a", ResourceRequest(0, 0), lambda _: 0.0) == ""
    assert "at most 0 GPUs" in limits.over_gpus("a", ResourceRequest(1, 10), lambda _: 0.0)


def test_a_need_above_a_limit_is_refused() -> None:
    limits = UserLimits({"ada": Limit(gpus=1.5), "@lab": Limit(gpus=2)}, {"bob": ["lab"]})
    limits.check_possible("ada", ResourceRequest(1, 1000))
    with pytest.raises(Refused, match=r"the job needs 2 GPUs, and user ada may have 1\.5 \(limits\)"):
        limits.check_possible("ada", ResourceRequest(2, 1000))
    with pytest.raises(Refused, match="group lab may have 2"):
        limits.check_possible("bob", ResourceRequest(3, 1000))
