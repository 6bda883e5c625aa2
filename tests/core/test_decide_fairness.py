"""Tests of fairness: limit of overtakes, reservations, jobs that name their GPUs, slots of jobs without GPUs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from scheduler.core.decision_pass import Plan
from scheduler.core.gpu import WHOLE, ResourceRequest
from scheduler.core.job import Job, JobState
from scheduler.core.placement_class import class_of
from scheduler.core.requests import Cancel, Edit, Hold, Pause, PauseQueue, Release, Resume
from scheduler.core.runtime_estimate import Estimates
from tests.builders import Play, a_job, a_world, examples

S = JobState


def started(plan: Plan) -> list[int]:
    return [job.id for job in plan.starts]


def unknowing(*servers: int, **settings: Any) -> Play:
    """Return a Play in which no run time is ever known, so that only the number of overtakes counts."""
    play = a_world(*servers, **settings)
    play.scheduler.estimates = Estimates().frozen()
    return play


def full(k: int, wide: Job, *servers: int, cpu_slots: int = 1 << 30, first: Job | None = None) -> Play:
    """Return a Play in which job 1 runs and job 2 (``wide``) waits for room. ``k``: the limit of overtakes.

    ``servers``: the number of GPUs of each server; without them, one server with two GPUs. ``first``: job 1.
    """
    play = unknowing(*(servers or (2,)), cpu_slots=cpu_slots, max_overtakes=k)
    play.run(first or a_job(1))
    assert started(play.arrive(wide)) == []
    return play


def stream(play: Play, count: int, first: int = 10, **wish: object) -> list[int]:
    """Let ``count`` jobs arrive one by one; return the ids of the jobs that start in this time.

    When a job has arrived, all jobs that were running before its arrival end, except job 1.
    """
    before = len(play.started)
    need = str(wish.pop("need", "1"))
    for number in range(first, first + count):
        running = sorted(set(play.scheduler.live) - {1})
        play.arrive(a_job(number, need, **wish))
        play.tell(*(play.ended(job) for job in running))
    return play.started[before:]


# -- overtaking --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2, 3, 10])
def test_s4_36_a_wide_job_is_overtaken_a_limited_number_of_times_then_gets_free_gpus(k: int) -> None:
    """S4.36: One-GPU jobs overtake a two-GPU job at most ``k`` times.

    Then free GPUs are reserved for the two-GPU job.
    """
    play = full(k, a_job(2, "2"))
    assert stream(play, 20) == list(range(10, 10 + k))
    assert play.reason(10 + k) == "reserved" and play.reason(2) == "no-wide-room"
    assert "job 2" in play.scheduler.class_reasons()[class_of(play.job(10 + k)).key].sentence
    assert started(play.tell(play.ended(1))) == [2]
    assert started(play.tell(play.ended(2))) == [10 + k, 11 + k]


def test_s4_36_with_limit_zero_a_job_may_be_overtaken_without_end() -> None:
    """S4.36: With `max_overtakes: 0` a job may be overtaken without limit."""
    assert len(stream(full(0, a_job(2, "2")), 40)) == 40


def test_s4_36_many_starts_in_one_pass_respect_the_limit_of_overtakes() -> None:
    """S4.36: The limit of overtakes also holds if many jobs could start in one pass."""
    play = full(3, a_job(2, "6"), 6)
    assert started(play.arrive(*(a_job(n) for n in range(3, 12)))) == [3, 4, 5]
    assert started(play.tell(*(play.ended(n) for n in (1, 3, 4)))) == []
    assert started(play.tell(play.ended(5))) == [2]


def test_s4_36_a_job_whose_script_has_vanished_overtakes_no_job() -> None:
    """S4.36: A job overtakes only if it starts.

    A job that cannot start, because its script has vanished, does not count.
    """
    gone: set[str] = set()
    play = unknowing(2, max_overtakes=2, missing=lambda job: "no such file" if job.spec.script in gone else "")
    play.run(a_job(1), a_job(2))
    play.arrive(a_job(3, "2"), *(a_job(number, script="/gone.py") for number in range(4, 9)))
    gone.add("/gone.py")
    assert started(play.tell(play.ended(2))) == []
    assert [play.reason(number) for number in range(4, 9)] == ["missing"] * 5
    assert stream(play, 9) == [10, 11]


def test_s4_36_the_limit_of_overtakes_protects_a_request_for_part_of_a_gpu() -> None:
    """S4.36: The limit also protects a job that waits for a share of a GPU."""
    play = full(2, a_job(2, "0.7"), 1, first=a_job(1, "0.5"))
    assert stream(play, 9, need="0.5") == [10, 11]
    assert started(play.tell(play.ended(1))) == [2]


def test_s4_36_the_limit_of_overtakes_protects_a_request_for_slots() -> None:
    """S4.36 S4.19: The limit of overtakes protects a job that needs two slots from jobs that need one slot."""
    play = full(2, a_job(2, "0", slots=2), cpu_slots=2, first=a_job(1, "0"))
    assert stream(play, 9, need="0") == [10, 11]
    assert play.reason(12) == "reserved" and play.reason(2) == "no-room"
    assert started(play.arrive(a_job(50))) == [50], "GPUs are another matter"
    assert started(play.tell(play.ended(1))) == [2]


def test_s4_19_jobs_of_few_slots_overtake_a_job_of_many_slots() -> None:
    """S4.19: Jobs that need few slots overtake a job that needs many slots. Only `max_overtakes` limits this."""
    play = full(0, a_job(2, "0", slots=3), cpu_slots=3, first=a_job(1, "0"))
    assert started(play.arrive(a_job(3, "0"), a_job(4, "0"), a_job(5, "0"))) == [3, 4]
    play.tell(play.ended(1), play.ended(3))
    assert play.started[-1] == 5 and play.scheduler.fleet.cpu_free == 1


def test_s4_36_a_job_on_other_gpus_does_not_count_as_an_overtake() -> None:
    """S4.36: A job overtakes a waiting job only if it uses a GPU that the waiting job may use."""
    play = full(1, a_job(2, "2", allowed=(0, 1)), 4, first=a_job(1, allowed=(0,)))
    assert len(stream(play, 9, allowed=(2, 3))) == 9
    assert len(stream(play, 9, first=30, need="0")) == 9
    assert play.scheduler.queue.overtaken(2) == 0
    assert stream(play, 3, first=50, allowed=(1,)) == [50]


def test_s4_36_a_more_urgent_job_does_not_count_as_overtaking() -> None:
    """S4.36: A more urgent job that arrives later does not count as overtaking."""
    play = full(1, a_job(2, "2"))
    assert len(stream(play, 9, priority=-1)) == 9
    assert play.scheduler.queue.overtaken(2) == 0


def test_s4_36_the_count_of_overtakes_restarts_after_a_release_or_an_edit() -> None:
    """S4.36: If a waiting job is edited, or held and released, the other jobs may overtake it as often as at first."""
    for ask in ((Hold((2,)), Release((2,))), (Edit((2,), {"label": "x"}),)):
        play = full(2, a_job(2, "2"))
        assert stream(play, 5) == [10, 11]
        for request in ask:
            play.ask(request)
        assert play.scheduler.queue.overtaken(2) <= 1


def test_s4_36_no_gpu_is_reserved_for_a_job_that_waits_for_a_paused_gpu() -> None:
    """S4.36: No GPU is reserved for a job that cannot run because one of its GPUs is paused."""
    play = full(1, a_job(2, "2"))
    assert stream(play, 5) == [10]
    play.ask(Pause((0,)))
    assert len(stream(play, 3, first=20)) == 3
    play.ask(Resume((0,)))
    play.tell(*(play.ended(job) for job in list(play.scheduler.live)))
    assert play.state(2) is S.STARTING


def test_s4_36_no_slot_is_reserved_for_a_job_that_needs_more_slots_than_exist() -> None:
    """S4.36 S4.19: If `-S` was lowered, a job may need more slots than exist. No slot is reserved for such a job."""
    play = full(1, a_job(2, "0", slots=3), cpu_slots=3, first=a_job(1, "0"))
    assert stream(play, 3, need="0") == [10]
    play.scheduler.fleet.resize(2)
    assert len(stream(play, 9, first=20, need="0")) == 9
    assert play.reason(2) == "never"
    play.scheduler.fleet.resize(3)
    play.tell(*(play.ended(job) for job in list(play.scheduler.live)))
    assert play.state(2) is S.STARTING


def test_s4_36_an_overtake_counts_for_each_of_two_equal_waiting_jobs() -> None:
    """S4.36: If two equal jobs wait, an overtake counts for both of them.

    If the first job is cancelled, the count of the second job stays.
    """
    play = full(1, a_job(2, "2"))
    play.arrive(a_job(3, "2"))
    assert stream(play, 3) == [10]  # job 10 overtakes both waiting jobs
    play.ask(Cancel((2,)))
    assert play.started[-1] == 10 and play.reason(11) == "reserved"
    assert "job 3" in play.scheduler.class_reasons()[class_of(play.job(11)).key].sentence


LATER = st.lists(st.sampled_from(["0.25", "0.5", "0.6", "1", "2", "2x0.5"]), min_size=1, max_size=4)


@examples(60)
@given(
    st.sampled_from([(1,), (2,), (3,), (4,), (2, 2), (3, 1), (1, 1, 2)]),
    st.sampled_from(["0.75", "1", "2", "3", "4", "2x0.75", "3x0.5"]),
    st.integers(1, 4),
    LATER,
    st.lists(st.integers(0, 99), min_size=1, max_size=20),
)
def test_s4_36_each_waiting_job_starts_in_the_end_although_others_keep_arriving(
    servers: tuple[int, ...], need: str, k: int, later: list[str], picks: list[int]
) -> None:
    """S4.36: Each waiting job starts at some time, even if later jobs keep arriving.

    This holds for any order in which running jobs end.
    """
    play = unknowing(*servers, max_overtakes=k)
    last = 0

    def some(count: int) -> list[Job]:
        nonlocal last
        made = []
        for _ in range(count):
            last += 1
            job = a_job(last, later[last % len(later)])
            if not play.scheduler.fleet.can_ever_hold(class_of(job)):
                made.append(job)
        return made

    play.arrive(*some(8))
    last += 1
    wide = a_job(last, need)
    assume(not play.scheduler.fleet.can_ever_hold(class_of(wide)))
    play.arrive(wide)
    # A wide job of shares leaves a part of each GPU free; jobs that use that part do not overtake.
    of_all = len(servers) == 1 and wide.need.count == servers[0] and wide.need.parts == WHOLE
    rounds = 0
    while play.state(wide.id) is S.PENDING:
        rounds += 1
        assert rounds <= 40, f"starved; {later} pass it for ever"
        going = sorted(play.scheduler.live)
        while going and play.state(wide.id) is S.PENDING:
            pick = picks[(rounds + len(going)) % len(picks)]
            play.tell(play.ended(going.pop(pick % len(going))))
            play.arrive(*some(6))
    passed = [job for job in play.started if job > wide.id]
    assert not of_all or len(passed) <= k, "more have taken what it waits for than may"


# -- GPUs by name ------------------------------------------------------------------------------------------


def test_s4_31_a_job_that_names_its_gpus_starts_at_once_on_used_or_reserved_gpus() -> None:
    """S4.31: A job that names its GPUs starts at once, even if these GPUs are in use or reserved."""
    play = full(1, a_job(2, "2"))
    assert stream(play, 3) == [10]
    assert play.reason(11) == "reserved"
    assert started(play.arrive(a_job(30, on=(0, 1), priority=9), a_job(31, on=(1,)))) == [31, 30]
    assert play.scheduler.fleet.claims == {0: 1, 1: 2}
    assert started(play.tell(play.ended(1))) == []
    assert play.reason(2) == "claimed" and play.reason(11) == "reserved"


def test_s4_32_a_gpu_named_by_two_jobs_stays_claimed_until_both_have_ended() -> None:
    """S4.32: A GPU that two running jobs have named gets no other job until both jobs have ended."""
    play = a_world(1)
    play.run(a_job(1, on=(0,)), a_job(2, on=(0,)))
    assert started(play.arrive(a_job(3, "0.1"))) == [] and play.reason(3) == "claimed"
    assert started(play.tell(play.ended(1))) == []
    assert started(play.tell(play.ended(2))) == [3] and play.scheduler.fleet.claims == {}


def test_s4_31_a_job_that_names_its_gpus_waits_only_for_a_pause() -> None:
    """S4.31: A job that names its GPUs waits only while the queue or one of these GPUs is paused."""
    play = a_world(2)
    play.ask(Pause((1,)))
    assert started(play.arrive(a_job(1, on=(0, 1)), a_job(2, on=(0,)))) == [2]
    assert play.reason(1) == "paused"
    assert started(play.ask(Resume((1,)))) == [1]
    play.ask(PauseQueue(True))
    assert started(play.arrive(a_job(3, on=(0,)))) == []
    assert started(play.ask(PauseQueue(False))) == [3]


def test_s4_32_claims_are_restored_after_a_restart() -> None:
    """S4.32 P1: After a restart, the GPUs that running jobs have named are claimed again."""
    play = a_world(2)
    play.run(a_job(1, on=(0, 1)), a_job(2, on=(0,)))
    again = a_world(2)
    again.rows = play.rows
    for job in (1, 2):
        again.scheduler.adopt(play.job(job), again.now)
    assert again.scheduler.fleet.claims == {0: 2, 1: 1}
    assert started(again.arrive(a_job(3))) == []
    assert started(again.tell(again.ended(1))) == [3] and again.job(3).gpus == (1,)
    again.tell(again.ended(2), again.ended(3))
    assert again.scheduler.fleet.claims == {} and again.scheduler.fleet.free == {0: 1000, 1: 1000}


def test_s4_31_leftover_processes_of_a_job_keep_the_gpus_that_it_named_claimed() -> None:
    """S4.32: While leftover processes of a job run, the GPUs that the job named stay claimed."""
    from scheduler.core.job import Process
    from scheduler.core.observations import Gone

    play = a_world(1)
    play.run(a_job(1, on=(0,)))
    play.tell(play.ended(1, leftovers=(Process(5, 5),)))
    assert play.state(1) is S.DONE and play.scheduler.holdings["1.1"].need == ResourceRequest(1, 0)
    assert started(play.arrive(a_job(2))) == [] and play.reason(2) == "claimed"
    assert started(play.tell(Gone("1.1"))) == [2]
