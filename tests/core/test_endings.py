"""Tests of the effect that the end of an attempt has on its job.

The daemon, `recover`, `track` and `status` use the same rules.
"""

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
def test_state_exit_code_and_signal_decide_the_outcome_of_an_attempt(
    rules: Rules, state: JobState, stop_why: str, code: int | None, number: int | None, how: Move, outcome: Outcome
) -> None:
    ending = after_run(ran(code, number, state=state, stop_why=stop_why), rules)
    assert (ending.how, ending.outcome) == (how, outcome)
    assert how in TABLE[state]


@pytest.mark.parametrize("state, stop_why", [(S.RUNNING, ""), (S.STOPPING, "time_limit")])
def test_a_job_with_retries_left_is_repeated_but_not_after_a_cancel(state: JobState, stop_why: str) -> None:
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
def test_a_job_that_ran_out_of_gpu_memory_is_repeated_with_twice_the_share(need: str, again: str | None) -> None:
    ending = after_run(ran(1, need=need, log_finding=OOM), DAEMON)
    assert ending.how is (M.RETRY_SCHEDULED if again else M.FAILED)
    assert ending.need == (ResourceRequest.parse(again) if again else None)
    assert after_run(ran(1, need=need, log_finding=OOM), NEVER_AGAIN).how is M.FAILED
    assert after_run(ran(1, need=need, log_finding=OOM, oom_retries=2), DAEMON).how is M.FAILED
    assert after_run(ran(1, need=need, log_finding=Failure("import")), DAEMON).how is M.FAILED


def test_a_job_that_books_memory_is_repeated_with_twice_the_memory_up_to_the_limit() -> None:
    """If a job that books memory runs out of GPU memory, its retry books twice the memory, up to a limit.

    A job books memory if its need is the smallest share and it requests memory. This holds even if the scheduler is now
    set to book shares.
    """
    rules = Rules(oom_retries=2, most_mib=lambda job: 10_000)
    for before, after in ((3_000, 6_000), (6_000, 10_000)):
        ending = after_run(ran(1, need="0.001", vram_mib=before, log_finding=OOM), rules)
        assert (ending.how, ending.vram_mib, ending.need) == (M.RETRY_SCHEDULED, after, None)
    assert after_run(ran(1, need="0.001", vram_mib=10_000, log_finding=OOM), rules).how is M.FAILED


def test_a_job_with_exit_code_0_succeeds_whatever_its_log_contains() -> None:
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
def test_a_lost_attempt_is_never_repeated(state: JobState, stop_why: str, how: Move, outcome: Outcome) -> None:
    ending = after_loss(a_job(1, state=state, stop_why=stop_why, retries=9))
    assert (ending.how, ending.outcome) == (how, outcome)


def test_a_failed_start_is_retried_unless_its_cause_is_permanent() -> None:
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
