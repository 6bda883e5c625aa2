"""Tests of `as_recorded`: while no scheduler runs, a job is shown in the state that the next scheduler will give it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from scheduler.core.endings import Rules
from scheduler.core.job import JobState, Outcome
from scheduler.runners import attempt_record
from scheduler.runners.recorded_end import as_recorded
from scheduler.system.proc import boot_id
from tests.builders import a_job

AT = 1_700_000_000
FULL = attempt_record.STAGES.index("log") * attempt_record.A_STAGE + errno.ENOSPC
NO_PROGRAM = attempt_record.STAGES.index("program") * attempt_record.A_STAGE + errno.ENOENT


def told(folder: Path, state: JobState, how: str = "", code: int = 0, boot: str = "", **changes: object):
    job = a_job(3, state=state, attempt=1, gpus=(0,), boot=boot or boot_id(), **changes)
    path = folder / job.attempt_key
    path.write_bytes(attempt_record.blank(job, job.boot))
    if how:
        attempt_record.write_end(str(path), how, code, AT * 10**9, sync=False)
    found, event = as_recorded(job, str(folder), Rules(starts=3))
    assert job.state is state and job.gpus == (0,), "what the store has is not changed"
    return found, event


@pytest.mark.parametrize("state", [JobState.STARTING, JobState.RUNNING])
def test_a_start_that_failed_for_a_temporary_reason_is_shown_as_pending(tmp_path: Path, state: JobState) -> None:
    job, event = told(tmp_path, state, "never", FULL, start_failures=1)
    assert (job.state, job.gpus, job.reason_code) == (JobState.PENDING, (), "backoff")
    assert (
        "No space left on device; the next try is number 3 of 3; the job starts again when a scheduler runs"
        in job.reason
    )
    assert event is not None and event.kind == "retry_scheduled"


def test_the_last_failed_start_or_a_permanent_failure_is_shown_as_failed(tmp_path: Path) -> None:
    for code, failed in ((FULL, 2), (NO_PROGRAM, 0)):
        job, event = told(tmp_path, JobState.STARTING, "never", code, start_failures=failed)
        assert (job.state, job.outcome, job.finished_at) == (JobState.FAILED, Outcome.COULD_NOT_START, AT)
        assert event is None and job.notes[-1].startswith("could not start: ")


def test_a_job_whose_start_was_withdrawn_is_shown_as_pending_or_cancelled(tmp_path: Path) -> None:
    job, event = told(tmp_path, JobState.STARTING, "never", 0)
    assert (job.state, job.gpus, job.reason_code, event) == (JobState.PENDING, (), "", None)
    job, _ = told(tmp_path, JobState.STOPPING, "never", 0, stop_why="cancelled")
    assert (job.state, job.outcome) == (JobState.CANCELLED, Outcome.CANCELLED)


def test_an_end_recorded_before_a_reboot_is_shown(tmp_path: Path) -> None:
    job, _ = told(tmp_path, JobState.RUNNING, "exit", 0, boot="another")
    assert (job.state, job.exit_code) == (JobState.DONE, 0)


def test_a_record_without_an_end_changes_no_shown_state(tmp_path: Path) -> None:
    job, event = told(tmp_path, JobState.RUNNING)
    assert (job.state, job.gpus, event) == (JobState.RUNNING, (0,), None)
