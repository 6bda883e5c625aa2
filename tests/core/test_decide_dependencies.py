"""Tests of dependencies: a job waits until other jobs have ended or succeeded.

If a job that must succeed fails, the jobs that depend on it are skipped.
"""

from __future__ import annotations

import pytest

from scheduler.core.job import JobState, Outcome, Process
from scheduler.core.observations import Arrived
from scheduler.core.requests import Cancel, Requeue
from tests.builders import Play, a_job, a_world

S = JobState


def wait_for_one(play: Play, how: str, *, begun: bool = True) -> None:
    play.arrive(a_job(1))
    if begun:
        play.tell(play.began(1))
    play.arrive(a_job(2, **{how: (1,)}))
    assert (play.state(2), play.reason(2)) == (S.PENDING, "depends")


@pytest.mark.parametrize(
    ("how", "words"), [("after", "job 1 must end first"), ("after_ok", "job 1 must succeed first")]
)
def test_the_reason_of_a_dependent_job_names_the_job_that_it_waits_for(how: str, words: str) -> None:
    play = a_world(2)
    wait_for_one(play, how)
    assert play.job(2).reason == words
    play.tell(after=1000)
    assert play.started == [1]


@pytest.mark.parametrize("how", ["after", "after_ok"])
def test_a_dependent_job_starts_in_the_pass_in_which_the_other_succeeds(how: str) -> None:
    play = a_world(1)
    wait_for_one(play, how)
    play.tell(play.ended(1, 0))
    assert (play.state(2), play.job(2).reason_code, play.job(2).reason) == (S.STARTING, "", "")


@pytest.mark.parametrize("end", ["failed", "cancelled", "lost", "never_ran"])
def test_a_job_with_after_starts_whatever_the_end_of_the_other(end: str) -> None:
    play = a_world(1)
    wait_for_one(play, "after", begun=end != "never_ran")
    end_badly(play, end)
    assert play.state(2) is S.STARTING


@pytest.mark.parametrize("end", ["failed", "cancelled", "lost", "never_ran"])
def test_a_job_with_after_ok_is_skipped_if_the_other_did_not_succeed(end: str) -> None:
    play = a_world(1)
    wait_for_one(play, "after_ok", begun=end != "never_ran")
    end_badly(play, end)
    job = play.job(2)
    assert (job.state, job.outcome, job.attempt) == (S.SKIPPED, Outcome.DEPENDENCY, 0)
    assert job.finished_at == play.wall and play.scheduler.waiting() == 0
    assert (2, "skipped") in play.journal


def end_badly(play: Play, end: str) -> None:
    if end == "cancelled":
        play.ask(Cancel((1,)))
        play.tell(play.ended(1, None, signal=15))
    elif end == "failed":
        play.tell(play.ended(1, 3))
    elif end == "lost":
        play.tell(play.lost(1))
    else:
        play.tell(play.never_ran(1, lasting=True))
    assert play.state(1).ended


def test_cancelling_a_waiting_parent_skips_its_child() -> None:
    play = a_world(1)
    play.run(a_job(9))
    play.arrive(a_job(1), a_job(2, after_ok=(1,)), a_job(3, after=(1,)))
    play.ask(Cancel((1,)))
    assert play.state(2) is S.SKIPPED
    assert (play.state(3), play.reason(3)) == (S.PENDING, "no-room")


def test_a_chain_of_dependent_jobs_is_skipped_in_one_pass() -> None:
    play = a_world(1)
    play.run(a_job(1))
    play.arrive(*(a_job(i, after_ok=(i - 1,)) for i in range(2, 12)), a_job(12, after=(11,)))
    play.tell(play.ended(1, 1))
    assert [play.state(i) for i in range(2, 12)] == [S.SKIPPED] * 10
    assert play.started == [1, 12]


@pytest.mark.parametrize("backwards", [False, True])
def test_a_chain_of_any_length_is_skipped(backwards: bool) -> None:
    """A recursion over the chain would end the pass by a RecursionError, again and again."""
    play, number = a_world(1), 3000
    play.run(a_job(1))
    follows = {i: i + 1 if backwards else i - 1 for i in range(2, number)} | {number: 1 if backwards else number - 1}
    play.arrive(*(a_job(i, after_ok=(parent,)) for i, parent in follows.items()))
    play.tell(play.ended(1, 1))
    assert {play.state(i) for i in follows} == {S.SKIPPED}
    again = a_world(1)  # a restart at which the first job has already ended
    again.arrive(*(a_job(i, after_ok=(parent,)) for i, parent in follows.items()))
    assert {again.state(i) for i in follows} == {S.SKIPPED}


def test_a_job_that_waits_for_many_jobs_is_looked_at_once_for_each() -> None:
    """Each look must not double the looks after it."""
    play, number = a_world(1), 30
    play.arrive(*(a_job(i) for i in range(1, number)), a_job(number, after=tuple(range(1, number))))
    for i in range(1, number):
        assert play.started[-1] == i
        play.tell(play.began(i))
        play.tell(play.ended(i))
    assert play.started[-1] == number


def test_a_chain_of_dependent_jobs_runs_one_after_the_other() -> None:
    play = a_world(4)
    play.arrive(*(a_job(i, after_ok=(i - 1,) if i > 1 else ()) for i in range(1, 6)))
    for i in range(1, 6):
        assert play.started == list(range(1, i + 1))
        play.tell(play.began(i))
        play.tell(play.ended(i))
    assert all(play.state(i) is S.DONE for i in range(1, 6))


def test_a_job_waits_for_all_jobs_that_it_names() -> None:
    play = a_world(4)
    play.run(a_job(1), a_job(2), a_job(3))
    play.arrive(a_job(4, after_ok=(2,), after=(1, 3)))
    assert play.job(4).reason == "job 2 must succeed first (and 2 more)"
    for parent, code in ((1, 1), (2, 0)):
        play.tell(play.ended(parent, code))
        assert play.reason(4) == "depends"
    play.tell(play.ended(3, 1))
    assert play.state(4) is S.STARTING


def test_a_child_starts_in_the_pass_in_which_all_its_parents_end() -> None:
    play = a_world(2)
    play.run(a_job(1), a_job(2))
    play.arrive(a_job(3, after=(1, 2)))
    play.tell(play.ended(1), play.ended(2))
    assert play.started == [1, 2, 3]


def test_a_child_that_arrives_in_the_pass_of_its_parents_end_starts() -> None:
    play = a_world(1)
    play.run(a_job(1))
    play.tell(play.ended(1), Arrived(a_job(2, after_ok=(1,))))
    assert play.state(2) is S.STARTING


@pytest.mark.parametrize(("code", "state"), [(0, S.STARTING), (1, S.SKIPPED)])
def test_a_child_that_arrives_after_its_parents_end_starts_or_is_skipped(code: int, state: JobState) -> None:
    play = a_world(1)
    play.run(a_job(1))
    play.tell(play.ended(1, code))
    play.arrive(a_job(2, after_ok=(1,)))
    assert play.state(2) is state


def test_an_unknown_parent_counts_as_ended_but_not_as_succeeded() -> None:
    play = a_world(2)
    plan = play.arrive(a_job(2, after_ok=(77,)), a_job(3, after=(77,)))
    assert (play.state(2), play.state(3)) == (S.SKIPPED, S.STARTING)
    skipped = next(event for event in plan.events if event.kind == "skipped")
    assert skipped.detail["why"] == "job 77 had to succeed, but it does not exist"


def test_a_parent_with_a_scheduled_retry_has_not_ended() -> None:
    play = a_world(2, assign_retry_wait_s=0.0)
    play.run(a_job(1, retries=1))
    play.arrive(a_job(2, after_ok=(1,)))
    play.tell(play.ended(1, 1))
    assert play.reason(2) == "depends"
    play.tell(play.began(1))
    play.tell(play.ended(1, 0))
    assert play.state(2) is S.STARTING


def test_a_child_starts_beside_leftover_processes_of_its_parent() -> None:
    play = a_world(2)
    wait_for_one(play, "after_ok")
    play.tell(play.ended(1, 0, leftovers=(Process(5, 5),)))
    assert play.job(2).gpus == (1,)


def test_dependencies_in_the_store_are_restored() -> None:
    play = a_world(2)
    running = a_job(1, state=S.RUNNING, attempt=1, gpus=(0,), started_at=play.wall)
    play.rows[1] = running
    play.scheduler.adopt(running, play.now)
    play.arrive(a_job(2, after_ok=(1,), reason_code="depends", reason="job 1 must succeed first"))
    assert not play.started
    play.tell(play.ended(1))
    assert play.started == [2]


def test_a_skipped_job_can_be_requeued_after_its_parent_succeeded() -> None:
    play = a_world(1)
    wait_for_one(play, "after_ok")
    play.tell(play.ended(1, 1))
    assert play.state(2) is S.SKIPPED
    play.ask(Requeue((1,)))
    play.tell(play.began(1))
    play.tell(play.ended(1, 0))
    play.ask(Requeue((2,)))
    assert play.state(2) is S.STARTING


def test_the_answer_to_a_requeue_says_if_the_job_is_skipped_again() -> None:
    play = a_world(1)
    play.run(a_job(1))
    play.tell(play.ended(1, 1))
    play.arrive(a_job(2, after_ok=(1,)))
    assert play.state(2) is S.SKIPPED
    (answer,) = play.ask(Requeue((2,))).answers
    assert play.state(2) is S.SKIPPED
    assert "queued again" not in answer.lines[0]
