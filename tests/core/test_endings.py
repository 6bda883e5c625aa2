"""Tests of the meaning of an attempt's end, which is the same for the daemon, `recover`, `track` and `status`."""

from __future__ import annotations

import pytest

from scheduler.core.endings import CANCELLED, NEVER_AGAIN, Rules, after_loss, after_no_start, after_run
from scheduler.core.gpu import ResourceRequest
from scheduler.core.job import Failure, Job, JobState, Outcome
from scheduler.core.states import TABLE, Move
from tests.builders import OOM, a_job

S, M, End = JobState, Move, Outcome
DAEMON = Rules(starts=3, oom_retries=2)


def ran(code: int | None, number: int | None = None, **changes: object) -> Job:
    """Return a job whose command has ended with this exit code or signal."""
    job = a_job(1, str(changes.pop("need", "1")), **changes)
    job.state = job.state if job.state is not S.PENDING else S.RUNNING
    job.exit_code, job.signal = code, number
    return job


@pytest.mark.parametrize(
    ("state", "stop_why", "code", "number", "how", "outcome"),
    [
        (S.RUNNING, "", 0, None, M.SUCCEEDED, End.EXIT),
        (S.RUNNING, "", 7, None, M.FAILED, End.EXIT),
        (S.RUNNING, "", None, 9, M.FAILED, End.SIGNAL),
        (S.STOPPING, "cancelled", 0, None, M.STOPPED, End.CANCELLED),
        (S.STOPPING, "cancelled", None, 15, M.STOPPED, End.CANCELLED),
        (S.STOPPING, "time_limit", 0, None, M.FAILED, End.TIME_LIMIT),
        (S.STOPPING, "time_limit", None, 15, M.FAILED, End.TIME_LIMIT),
    ],
)
@pytest.mark.parametrize("rules", [DAEMON, NEVER_AGAIN])
def test_an_ending_means_one_thing(
    rules: Rules, state: JobState, stop_why: str, code: int | None, number: int | None, how: Move, outcome: Outcome
) -> None:
    ending = after_run(ran(code, number, state=state, stop_why=stop_why), rules)
    assert (ending.how, ending.outcome) == (how, outcome)
    assert how in TABLE[state]


@pytest.mark.parametrize("state, stop_why", [(S.RUNNING, ""), (S.STOPPING, "time_limit")])
def test_a_job_with_retries_left_is_run_again_but_not_after_a_cancel(state: JobState, stop_why: str) -> None:
    job = ran(3, state=state, stop_why=stop_why, retries=2, runs_failed=1)
    ending = after_run(job, DAEMON)
    how = "reached its time limit (exit code 3)" if stop_why else "failed with exit code 3"
    assert (ending.how, ending.cause, ending.why) == (M.RETRY_SCHEDULED, "failed", f"{how} (run 2 of 3)")
    assert after_run(job, NEVER_AGAIN).how is M.FAILED
    job.runs_failed = 2
    assert after_run(job, DAEMON).how is M.FAILED
    job.runs_failed, job.state, job.stop_why = 0, S.STOPPING, "cancelled"
    assert after_run(job, DAEMON) == CANCELLED


@pytest.mark.parametrize(
    ("need", "again"), [("0.3", "0.6"), ("0.7", "1"), ("2x0.4", "2x0.8"), ("1", None), ("2", None), ("0", None)]
)
def test_out_of_gpu_memory_is_run_again_with_twice_the_share(need: str, again: str | None) -> None:
    ending = after_run(ran(1, need=need, log_finding=OOM), DAEMON)
    assert ending.how is (M.RETRY_SCHEDULED if again else M.FAILED)
    assert ending.need == (ResourceRequest.parse(again) if again else None)
    assert after_run(ran(1, need=need, log_finding=OOM), NEVER_AGAIN).how is M.FAILED
    assert after_run(ran(1, need=need, log_finding=OOM, oom_retries=2), DAEMON).how is M.FAILED
    assert after_run(ran(1, need=need, log_finding=Failure("import")), DAEMON).how is M.FAILED


def test_a_job_that_books_memory_books_twice_as_much_at_most_all_there_is() -> None:
    rules = Rules(oom_retries=2, by_memory=True, most_mib=lambda job: 10_000)
    for before, after in ((3_000, 6_000), (6_000, 10_000)):
        ending = after_run(ran(1, need="0.001", vram_mib=before, log_finding=OOM), rules)
        assert (ending.how, ending.vram_mib, ending.need) == (M.RETRY_SCHEDULED, after, None)
    assert after_run(ran(1, need="0.001", vram_mib=10_000, log_finding=OOM), rules).how is M.FAILED


def test_a_share_of_a_thousandth_is_a_share_where_jobs_book_shares() -> None:
    """If jobs book shares, a need of 0.001 is a share, even if the job also requests memory in MiB."""
    assert after_run(ran(1, need="0.001", vram_mib=10, log_finding=OOM), DAEMON).need == ResourceRequest(1, 2)


def test_what_ended_with_0_has_not_failed_whatever_its_log_says() -> None:
    job = ran(0, log_finding=OOM)
    assert after_run(job, DAEMON).how is M.SUCCEEDED
    job.state = S.DONE
    assert job.failure is None and job.log_finding == OOM


@pytest.mark.parametrize(
    ("state", "stop_why", "how", "outcome"),
    [
        (S.STARTING, "", M.FAILED, End.LOST),
        (S.RUNNING, "", M.FAILED, End.LOST),
        (S.STOPPING, "cancelled", M.STOPPED, End.CANCELLED),
        (S.STOPPING, "time_limit", M.FAILED, End.LOST),
    ],
)
def test_what_nobody_saw_end_is_never_run_again(state: JobState, stop_why: str, how: Move, outcome: Outcome) -> None:
    ending = after_loss(a_job(1, state=state, stop_why=stop_why, retries=9))
    assert (ending.how, ending.outcome) == (how, outcome)


def test_a_start_that_failed_is_tried_again_unless_that_would_not_help() -> None:
    job = a_job(1, state=S.STARTING, start_failures=1)
    ending = after_no_start(job, "fork refused", False, DAEMON)
    assert (ending.how, ending.cause) == (M.RETRY_SCHEDULED, "could_not_start")
    assert ending.why == "start failed: fork refused; the next try is number 3 of 3"
    assert after_no_start(job, "no such file", True, DAEMON).how is M.FAILED
    assert after_no_start(job, "fork refused", False, NEVER_AGAIN).how is M.FAILED
    job.start_failures = 2
    assert after_no_start(job, "fork refused", False, DAEMON).outcome is End.COULD_NOT_START
    job.state = S.STOPPING
    assert after_no_start(job, "fork refused", False, DAEMON) == CANCELLED
