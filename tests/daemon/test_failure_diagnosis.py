"""Tests of the causes that the daemon adds to the endings of attempts."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from scheduler.core.job import Failure, JobState
from scheduler.core.observations import Ended
from scheduler.core.own_classes import OwnClass
from scheduler.daemon.failure_diagnosis import with_causes, with_time_limits
from tests.builders import OOM, a_job

TERM = Ended(1, 1, None, signal.SIGTERM, 5.0)
LICENSE = OwnClass("license", ("no seat",), "ask the admins")


def cause(folder: Path, end: Ended, text: str, own: tuple[OwnClass, ...] = (), **changes: object) -> Failure | None:
    log = folder / "1.log"
    log.write_text(text)
    job = a_job(1, **{"state": JobState.RUNNING, "attempt": 1, "log": str(log), **changes})
    (found,) = with_causes({1: job}, [end], own)
    assert isinstance(found, Ended)
    return found.failure


def test_exit_code_signal_and_the_classes_of_the_user_count(tmp_path: Path) -> None:
    failed = replace(TERM, exit_code=1, signal=None)
    assert cause(tmp_path, TERM, "") == Failure("interrupted", "", cause(tmp_path, TERM, "").hint)  # type: ignore[union-attr]
    assert cause(tmp_path, failed, "no seat\n", (LICENSE,)) == Failure("license", "no seat", "ask the admins")
    assert cause(tmp_path, failed, "bye\n") is None
    assert cause(tmp_path, replace(failed, exit_code=0), "KeyError: 'x'\n") is None


@pytest.mark.parametrize(("why", "kind"), [("time_limit", "time_limit"), ("cancelled", None), ("trespass", None)])
def test_a_signal_of_the_scheduler_itself_is_told_as_what_it_is(tmp_path: Path, why: str, kind: str | None) -> None:
    found = cause(tmp_path, TERM, "step 1\n", state=JobState.STOPPING, stop_why=why)
    assert (found.kind if found else None) == kind


def test_the_time_limit_is_added_to_what_agents_report() -> None:
    late = a_job(1, state=JobState.STOPPING, attempt=1, stop_why="time_limit")
    for said, kind in ((None, "time_limit"), (OOM, "time_limit"), (Failure("license"), "license")):
        (found,) = with_time_limits({1: late}, [replace(TERM, failure=said)], (LICENSE,))
        assert isinstance(found, Ended) and found.failure is not None and found.failure.kind == kind
    running = a_job(1, state=JobState.RUNNING, attempt=1)
    assert with_time_limits({1: running}, [TERM], ()) == [TERM]
