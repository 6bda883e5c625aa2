"""Tests of single passes: jobs arrive, start and end, and the plan records these events."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.decide import MOST_STARTS_A_TURN, decide
from scheduler.core.gpu import WHOLE, ResourceRequest
from scheduler.core.job import Failure, Job, JobState, Outcome, Process, Reason
from scheduler.core.observations import Arrived, Asked, Ended, Gone, Missing, Now, Restored, Started, Unclaimed
from scheduler.core.placement import Fleet
from scheduler.core.placement_class import WaitingJob, class_of, reason_with_place
from scheduler.core.queue import Order
from scheduler.core.requests import Hold, Pause, PauseQueue, Resume
from scheduler.core.scheduler_state import SchedulerState
from tests.builders import M0, T0, Play, a_job, a_policy, a_world, check_ledger, some_gpus

S = JobState
LEFT = (Process(4712, 6), Process(4713, 7))


# -- starts ------------------------------------------------------------------------------------------------


def test_a_job_that_fits_starts_in_the_pass_of_its_arrival() -> None:
    play = a_world(2)
    plan = play.arrive(a_job(1, "0.5"))
    (job,) = plan.starts
    assert (job.id, job.state, job.gpus, job.attempt) == (1, S.STARTING, (0,), 1)
    assert plan.changed == {1: job} and plan.must_sync and not plan.empty
    assert play.scheduler.fleet.free == {0: 500, 1: 1000}
    assert play.scheduler.live == {1: job} and play.scheduler.waiting() == 0


@given(
    wishes=st.lists(
        st.tuples(st.sampled_from(["0.3", "1", "2"]), st.integers(-2, 2), st.integers(-3, 9)), min_size=1, max_size=8
    ),
    aging=st.sampled_from([0.0, 2.0]),
)
def test_jobs_restored_at_a_start_run_in_the_order_of_jobs_that_arrive(
    wishes: list[tuple[str, int, int]], aging: float
) -> None:
    """After a start of the scheduler, jobs start in the same order whether they were restored or have just arrived.

    A restored job is in the queue with only those of its values that the queue needs (`WaitingJob`).
    """
    started = []
    for restored in (True, False):
        play = a_world(2, order=Order(aging_h=aging))
        jobs = [
            a_job(number, need, priority=priority, order=order or number, submitted_at=T0 + number)
            for number, (need, priority, order) in enumerate(wishes, 1)
        ]
        if restored:
            play.rows.update({job.id: job for job in jobs})
            facts = [WaitingJob(job.id, class_of(job), job.priority, job.order, job.submitted_at) for job in jobs]
            play.tell(Restored(facts))
        else:
            play.arrive(*jobs)
        while play.scheduler.live:
            play.tell(*(play.ended(job) for job in list(play.scheduler.live)))
        started.append((play.started, play.scheduler.front))
    assert started[0] == started[1] and sorted(started[0][0]) == list(range(1, len(wishes) + 1))


def test_a_pass_without_events_has_an_empty_plan() -> None:
    play = a_world(1)
    play.run(a_job(1))
    play.arrive(a_job(2))
    plan = play.tell(after=5)
    assert plan.empty and not plan.starts and not plan.stops and not plan.must_sync


def test_the_most_urgent_job_starts_first_and_equal_jobs_in_file_order() -> None:
    """S3.12 S2.7: The most urgent job starts first. Jobs of equal priority start in the order of the file."""
    play = a_world(1)
    play.run(a_job(9))
    play.arrive(
        a_job(1, priority=5), a_job(2, priority=-1, order=8), a_job(3, priority=-1, order=7), a_job(4, priority=0)
    )
    for _ in range(4):
        play.tell(play.ended(play.started[-1]))
        play.tell(play.began(play.started[-1]))
    assert play.started == [9, 3, 2, 4, 1]


def test_smaller_jobs_overtake_a_job_that_does_not_fit() -> None:
    """S3.17: If a wide job does not fit, a later job that fits starts first. The wide job starts when there is room."""
    play = a_world(2)
    play.run(a_job(1))
    play.arrive(a_job(2, "2", priority=0), a_job(3, "0.5", priority=9))
    assert play.started == [1, 3]
    assert play.reason(2) == "no-wide-room"
    play.tell(play.began(3))
    play.tell(play.ended(3))
    play.tell(play.ended(1))
    assert play.started == [1, 3, 2]
    assert play.job(2).gpus == (0, 1)


def test_waiting_for_room_does_not_count_as_an_attempt() -> None:
    """S3.17: Waiting for room does not count as an attempt or as a failed start."""
    play = a_world(1)
    play.run(a_job(1))
    play.arrive(a_job(2))
    for _ in range(20):
        play.tell(after=60)
    assert (play.job(2).attempt, play.job(2).start_failures) == (0, 0)
    play.tell(play.ended(1))
    assert play.job(2).attempt == 1


def test_two_jobs_with_half_a_gpu_run_together_and_a_third_waits() -> None:
    """S3.14: Two jobs with half a GPU each run on one GPU, and a third such job waits."""
    play = a_world(1)
    play.arrive(a_job(1, "0.5"), a_job(2, "0.5"), a_job(3, "0.5"))
    assert play.started == [1, 2]
    assert play.scheduler.fleet.free[0] == 0
    play.tell(play.began(1), play.began(2))
    play.tell(play.ended(1))
    assert play.started == [1, 2, 3]
    play.tell(play.began(3))
    play.tell(play.ended(2), play.ended(3))
    assert play.scheduler.fleet.free[0] == WHOLE


def test_jobs_without_a_gpu_start_in_separate_slots() -> None:
    play = a_world(1, cpu_slots=1)
    play.arrive(a_job(1), a_job(2, "0"), a_job(3, "0"))
    assert play.started == [1, 2]
    assert play.job(2).gpus == ()
    assert play.reason(3) == "no-room"
    play.tell(play.ended(2))
    assert play.started == [1, 2, 3]


def test_a_pass_starts_a_limited_number_of_jobs_and_the_next_pass_the_rest() -> None:
    play = a_world(1)
    plan = play.arrive(*(a_job(i, "0") for i in range(1, MOST_STARTS_A_TURN + 11)))
    assert [job.id for job in plan.starts] == list(range(1, MOST_STARTS_A_TURN + 1))
    assert [job.id for job in play.tell().starts] == list(range(MOST_STARTS_A_TURN + 1, MOST_STARTS_A_TURN + 11))


def test_no_job_starts_if_starts_are_not_allowed() -> None:
    play = Play(Fleet(some_gpus(1)), may_start=False)
    assert not play.arrive(a_job(1)).starts
    assert play.scheduler.waiting() == 1


def test_the_same_input_gives_the_same_plan() -> None:
    def plan() -> object:
        play = a_world(4, 4)
        play.arrive(*(a_job(i, need, priority=i % 3) for i, need in enumerate(["0.5", "2", "1", "4", "2x0.5"] * 4, 1)))
        return play.tell(play.began(1), play.ended(1), play.never_ran(2)).changed, play.scheduler.fleet.free

    assert plan() == plan()


def test_a_job_whose_arrival_is_reported_twice_starts_once() -> None:
    play = a_world(2)
    play.arrive(a_job(1))
    play.run(a_job(2))
    play.arrive(a_job(3))
    play.arrive(a_job(3))
    play.tell(play.ended(1), play.ended(2))
    assert play.started == [1, 2, 3]


def test_a_waiting_job_with_a_new_priority_moves_in_the_queue() -> None:
    play = a_world(1)
    play.run(a_job(9))
    play.arrive(a_job(1), a_job(2))
    play.arrive(a_job(2, priority=-1))
    play.tell(play.ended(9))
    assert play.started == [9, 2]


@pytest.mark.parametrize("wish", [{"held": True}, {"not_before": T0 + 60}, {"after": (9,)}])
def test_a_job_that_becomes_held_delayed_or_dependent_leaves_the_queue(wish: dict[str, Any]) -> None:
    play = a_world(2)
    play.run(a_job(9, "2"))
    play.arrive(a_job(1))
    play.arrive(a_job(1, **wish))
    assert len(play.scheduler.queue) == 0 and play.scheduler.waiting() == 1
    play.run(a_job(8, "0"))
    assert play.state(1) is S.PENDING


def test_order_short_starts_short_jobs_before_long_ones() -> None:
    play = a_world(1, order=Order("short"))
    play.run(a_job(9))
    play.arrive(a_job(1, time_limit_s=3600.0), a_job(2, time_limit_s=60.0))
    play.tell(play.ended(9))
    assert play.started == [9, 2]


def test_the_run_time_of_a_job_becomes_the_estimate_of_similar_jobs() -> None:
    play = a_world(1)
    play.run(a_job(1))
    play.tell(play.ended(1, at=T0 + 90))
    assert play.scheduler.estimates.of(a_job(2).spec, ResourceRequest.parse("1")) == 90


# -- running and ending ------------------------------------------------------------------------------------


def test_a_started_job_is_running_with_its_process() -> None:
    play = a_world(1)
    play.arrive(a_job(1))
    plan = play.tell(Started(1, 1, Process(4711, 5), T0 + 3), after=4)
    job = play.job(1)
    assert (job.state, job.process, job.started_at) == (S.RUNNING, Process(4711, 5), T0 + 3)
    assert plan.events[0].kind == "started" and plan.events[0].detail["pid"] == 4711
    assert not plan.must_sync


def test_a_start_that_is_reported_twice_counts_once() -> None:
    play = a_world(1)
    play.run(a_job(1))
    assert play.tell(Started(1, 1, Process(9, 9), T0 + 9)).empty
    assert play.job(1).process == Process(1001, 77)


@pytest.mark.parametrize(
    ("code", "signal", "state", "outcome"),
    [
        (0, None, S.DONE, Outcome.EXIT),
        (1, None, S.FAILED, Outcome.EXIT),
        (137, None, S.FAILED, Outcome.EXIT),
        (None, 9, S.FAILED, Outcome.SIGNAL),
        (None, 15, S.FAILED, Outcome.SIGNAL),
    ],
)
def test_exit_code_and_signal_decide_the_state_of_an_ended_job(
    code: int | None, signal: int | None, state: JobState, outcome: Outcome
) -> None:
    play = a_world(1)
    play.run(a_job(1))
    plan = play.tell(play.ended(1, code, signal=signal, at=T0 + 7), after=8)
    job = play.job(1)
    assert (job.state, job.outcome, job.exit_code, job.signal, job.finished_at) == (
        state,
        outcome,
        code,
        signal,
        T0 + 7,
    )
    assert plan.must_sync and plan.events[-1].kind == state.value
    assert play.scheduler.fleet.free[0] == WHOLE and not play.scheduler.live


def test_a_reported_end_without_a_reported_start_counts_as_both() -> None:
    play = a_world(1)
    play.arrive(a_job(1))
    play.tell(play.ended(1, 0, at=T0 + 7))
    job = play.job(1)
    assert (job.state, job.started_at, job.finished_at) == (S.DONE, T0 + 7, T0 + 7)


def test_observations_of_an_old_attempt_change_nothing() -> None:
    play = a_world(1, assign_retry_wait_s=0.0)
    play.arrive(a_job(1))
    play.tell(play.never_ran(1))
    assert play.job(1).attempt == 2
    for observation in (
        Ended(1, 1, 0, None, T0),
        Started(1, 1, Process(1, 1), T0),
        Unclaimed(1, 1),
        Gone("1.1"),
        Ended(7, 1, 0, None, T0),
    ):
        assert play.tell(observation).empty
    assert play.state(1) is S.STARTING


def test_the_cause_of_a_failure_is_stored_in_the_job() -> None:
    play = a_world(1)
    play.run(a_job(1))
    failure = Failure("import", "ModuleNotFoundError: No module named 'x'", "…")
    play.tell(play.ended(1, 1, failure=failure))
    assert play.job(1).failure == failure


def test_an_unclaimed_attempt_is_repeated_and_does_not_count_as_a_failed_start() -> None:
    play = a_world(1)
    play.arrive(a_job(1))
    plan = play.tell(Unclaimed(1, 1))
    job = play.job(1)
    assert (job.state, job.attempt, job.start_failures) == (S.STARTING, 2, 0)
    assert [event.kind for event in plan.events] == ["unclaimed"]


def test_a_job_whose_end_is_unknown_is_lost_and_not_repeated() -> None:
    play = a_world(1)
    play.run(a_job(1, retries=3))
    play.tell(play.lost(1))
    job = play.job(1)
    assert (job.state, job.outcome, job.exit_code) == (S.FAILED, Outcome.LOST, None)
    assert job.notes == ("lost: nobody saw its end",)
    assert play.scheduler.fleet.free[0] == WHOLE


# -- leftover processes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["done", "failed", "lost", "retried"])
def test_gpus_stay_allocated_until_leftover_processes_are_gone(how: str) -> None:
    play = a_world(1)
    play.run(a_job(1, "0.5", retries=how == "retried"))
    play.arrive(a_job(2))
    observation = (
        play.lost(1, leftovers=LEFT) if how == "lost" else play.ended(1, 0 if how == "done" else 1, leftovers=LEFT)
    )
    plan = play.tell(observation)
    assert [(h.key, h.gpus, h.need, h.processes) for h in plan.held] == [("1.1", (0,), ResourceRequest(1, 500), LEFT)]
    assert play.scheduler.fleet.free[0] == 500
    assert play.started == [1]
    assert (1, "leftovers") in play.journal
    plan = play.tell(Gone("1.1"))
    assert plan.freed == ["1.1"] and play.started == [1, 2]
    assert play.tell(Gone("1.1")).empty


def test_leftovers_of_a_job_without_a_gpu_hold_no_gpu() -> None:
    play = a_world(1)
    play.run(a_job(1, "0"))
    assert not play.tell(play.ended(1, leftovers=LEFT)).held


# -- the reason to wait ------------------------------------------------------------------------------------


def test_each_waiting_job_has_a_reason() -> None:
    play = a_world(2, missing=lambda job: "no such file /gone.py" if job.spec.script == "/gone.py" else "")
    play.run(a_job(1, "0.7"), a_job(2, "0.7"))
    play.arrive(
        a_job(3, "0.5"),
        a_job(4, "2"),
        a_job(5, "0.5", allowed=(1,)),
        a_job(6, "0.1", script="/gone.py"),
        a_job(7, "0.1", after=(1,)),
        a_job(8, "0.1", held=True),
        a_job(9, "0.1", not_before=T0 + 60, reason_code="backoff", reason="again soon"),
        a_job(10, "3"),
    )
    assert [play.reason(job) for job in range(3, 11)] == [
        "no-room", "no-wide-room", "no-room", "missing", "depends", "hold-user", "backoff", "never"
    ]  # fmt: skip
    assert play.scheduler.waiting() == 8
    assert all(reason.sentence for reason in play.scheduler.class_reasons().values())
    assert play.job(6).reason == "no such file /gone.py"
    assert play.job(7).reason == "job 1 must end first"
    assert "gpujob release 8" in play.job(8).reason


def test_all_jobs_wait_with_the_reason_paused_if_the_queue_is_paused() -> None:
    play = a_world(1)
    play.ask(PauseQueue(True))
    play.arrive(a_job(1), a_job(2, "0.5"))
    assert {play.reason(1), play.reason(2)} == {"paused"}
    assert not play.started


def test_the_reason_of_a_job_counts_the_equal_jobs_before_it() -> None:
    reason = Reason("no-room", "needs one whole GPU; the largest free share of an allowed GPU is 0 (GPU 0)")
    assert reason_with_place(reason, 0) is reason
    assert reason_with_place(reason, 1).sentence.startswith("1 job with the same request is before it")
    behind = reason_with_place(reason, 3)
    assert behind.code == "behind" and behind.sentence.startswith("3 jobs with the same request are before it")
    assert reason.sentence in behind.sentence


def test_allowed_gpus_do_not_change_the_class_of_a_job_without_a_gpu() -> None:
    assert class_of(a_job(1, "0", allowed=(1,))) == class_of(a_job(2, "0"))
    assert class_of(a_job(1, "0.5", allowed=(1,))) != class_of(a_job(2, "0.5"))


# -- missing scripts ---------------------------------------------------------------------------------------


class Disk:
    def __init__(self, *files: str) -> None:
        self.files = set(files)

    def missing(self, job: Job) -> str:
        return "" if job.spec.script in self.files else f"no such file {job.spec.script}"


def test_a_job_without_its_script_waits_and_the_missing_script_is_reported_once() -> None:
    disk = Disk()
    play = a_world(1, missing=disk.missing)
    play.arrive(a_job(1))
    assert (play.state(1), play.reason(1)) == (S.PENDING, "missing")
    play.tell(Missing(1, "no such file /data/train.py"))
    play.arrive(play.job(1))
    assert play.journal == [(1, "missing")]
    disk.files.add("/data/train.py")
    play.arrive(play.job(1))
    assert play.started == [1]
    assert (play.job(1).reason_code, play.job(1).reason, play.job(1).attempt) == ("", "", 1)


def test_a_job_whose_script_was_deleted_while_it_waited_does_not_start() -> None:
    disk = Disk("/data/train.py", "/data/b.py")
    play = a_world(1, missing=disk.missing)
    play.run(a_job(1))
    play.arrive(a_job(2), a_job(3, script="/data/b.py"))
    disk.files.remove("/data/train.py")
    play.tell(play.ended(1))
    assert play.started == [1, 3]
    assert (play.state(2), play.reason(2), play.job(2).attempt) == (S.PENDING, "missing", 0)


# -- pauses ------------------------------------------------------------------------------------------------


def test_a_paused_gpu_gets_no_new_job_and_its_jobs_continue() -> None:
    """S3.30: A paused GPU gets no new job, and jobs that run on it continue."""
    play = a_world(2)
    play.run(a_job(1))
    plan = play.ask(Pause((0, 1)))
    assert plan.answers[0].code == 0 and plan.pauses_changed
    assert plan.answers[0].lines == ("GPU 0 paused (paused now: 0,1)", "GPU 1 paused (paused now: 0,1)")
    assert play.state(1) is S.RUNNING and not plan.stops
    play.arrive(a_job(2), a_job(3, allowed=(1,)))
    play.tell(play.ended(1))
    assert play.started == [1]
    assert (play.reason(2), play.reason(3)) == ("paused", "paused")
    play.ask(Resume((1,)))
    assert play.started == [1, 2]
    assert play.job(2).gpus == (1,)


def test_a_pause_reports_unknown_gpus_and_pauses_the_known_ones() -> None:
    """S3.32: If a pause names a GPU that is not managed, the answer is an error. The other named GPUs are paused."""
    play = a_world(2)
    plan = play.ask(Pause((7, 1)))
    assert plan.answers[0].code == 6
    assert plan.answers[0].lines == ("GPU 7 is not managed here (managed: 0,1)", "GPU 1 paused (paused now: 1)")
    assert play.scheduler.fleet.paused_mask == 0b10


def test_the_last_pause_or_resume_in_a_pass_decides() -> None:
    """S3.31: If one pass gets many pauses and resumes of a GPU, the last one decides."""
    play = a_world(1)
    for last in (Pause((0,)), Resume((0,))):
        plan = play.tell(
            *(Asked(row, Resume((0,)) if row % 2 else Pause((0,))) for row in range(1000)), Asked(1000, last)
        )
        assert [answer.row for answer in plan.answers] == list(range(1001))
        assert bool(play.scheduler.fleet.paused_mask) == isinstance(last, Pause)


def test_a_paused_queue_starts_no_job_and_starts_jobs_at_once_when_resumed() -> None:
    play = a_world(1)
    play.ask(PauseQueue(True))
    play.arrive(a_job(1))
    plan = play.ask(PauseQueue(False))
    assert plan.pauses_changed and [job.id for job in plan.starts] == [1]


# -- building the state from the store ---------------------------------------------------------------------


def test_adopted_jobs_keep_their_gpus() -> None:
    """S3.35: Running jobs that a new scheduler adopts keep their GPUs."""
    play = a_world(2)
    running = a_job(1, "0.5", state=S.RUNNING, attempt=1, gpus=(1,), process=Process(5, 5), started_at=T0 - 60)
    play.rows[1] = running
    play.scheduler.adopt(running, play.now)
    check_ledger(play.scheduler)
    play.arrive(a_job(2), a_job(3))
    assert play.job(2).gpus == (0,) and play.state(3) is S.PENDING
    play.tell(play.ended(1))
    assert play.job(3).gpus == (1,)


def test_the_next_timer_is_none_or_the_time_of_the_first_delayed_job() -> None:
    state = SchedulerState(Fleet(some_gpus(1)), lambda job: None, a_policy())
    assert state.next_timer() is None
    decide(state, [Arrived(a_job(1, not_before=T0 + 9))], Now(T0, M0))
    assert state.next_timer() == M0 + 9


def test_i19_a_wide_job_starts_when_no_more_narrow_jobs_arrive() -> None:
    """I19: While new one-GPU jobs keep arriving, they overtake a two-GPU job. Later the two-GPU job starts."""
    play = a_world(2)
    play.run(a_job(1))
    play.tell(after=1.0)
    play.run(a_job(2))
    play.arrive(a_job(3, "2"))
    for number in range(4, 40):  # whenever one GPU becomes free, a job that needs one GPU already waits
        play.arrive(a_job(number))
        play.tell(play.ended(number - 2 if number > 5 else number - 3))
        play.tell(play.began(number))
        assert play.state(3) is S.PENDING and play.reason(3) == "no-wide-room"
    play.arrive(a_job(40), a_job(41))
    play.ask(Hold((40, 41)))
    running = list(play.scheduler.live)
    for number in running:
        play.tell(play.ended(number))
    assert play.state(3) is S.STARTING and play.job(3).gpus == (0, 1)
    assert play.state(40) is play.state(41) is S.PENDING
