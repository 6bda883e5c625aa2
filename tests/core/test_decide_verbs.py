"""Tests of requests that change waiting jobs: hold, release, first, swap, edit."""

from __future__ import annotations

import pytest

from scheduler.core.job import Job, JobState
from scheduler.core.placement import Fleet
from scheduler.core.queue import Order
from scheduler.core.requests import Cancel, Edit, First, Hold, PauseQueue, Release, Requeue, Swap
from tests.builders import Play, a_gpu, a_job, a_world

S = JobState


def full(jobs: int = 3, **of_world: object) -> Play:
    """Return a Play in which job 1 runs on the only GPU, and jobs 2 to ``jobs`` wait."""
    play = a_world(1, **of_world)
    play.run(a_job(1))
    for number in range(2, jobs + 1):
        play.arrive(a_job(number))
    return play


def starts_next(play: Play, running: int = 1) -> int:
    """End the running job. Return the id of the job that then starts."""
    play.tell(play.ended(running))
    return play.started[-1]


def line(play: Play, request: object) -> tuple[int, str]:
    plan = play.ask(request)  # type: ignore[arg-type]
    return plan.answers[0].code, "\n".join(plan.answers[0].lines)


def test_a_held_job_waits_until_it_is_released() -> None:
    play = full()
    assert line(play, Hold((2,))) == (0, "job 2 is held; release it: gpujob release 2")
    assert line(play, Hold((2,))) == (0, "job 2 is already held")
    assert play.job(2).reason_code == "hold-user" and starts_next(play) == 3
    assert line(play, Release((2,))) == (0, "job 2 is released")
    assert starts_next(play, 3) == 2
    assert line(play, Release((2,)))[1].startswith("job 2 is not held")


@pytest.mark.parametrize("request_", [Hold((1,)), First((1,)), Swap((1, 2)), Swap((2, 1)), Edit((1,), {"priority": 1})])
def test_only_waiting_jobs_can_be_held_moved_or_edited(request_: object) -> None:
    play = full()
    code, said = line(play, request_)
    assert code == 1 and "job 1" in said and ": it is running, and only a waiting job can be" in said
    assert starts_next(play) == 2


@pytest.mark.parametrize(
    "request_", [Hold((9,)), Release((9,)), First((9,)), Swap((9, 2)), Swap((2, 9)), Edit((9,), {})]
)
def test_a_request_for_an_unknown_job_is_answered_with_an_error(request_: object) -> None:
    assert line(full(), request_) == (6, "there is no job 9")


def test_a_requeue_does_not_change_a_held_job() -> None:
    play = full()
    play.ask(Hold((2,)))
    play.ask(Requeue((2,)))
    assert play.job(2).held and play.state(2) is S.PENDING


@pytest.mark.parametrize("parent", [(), (1,)])
def test_a_cancelled_job_that_was_held_cannot_be_released(parent: tuple[int, ...]) -> None:
    """A held job that is cancelled stays cancelled and keeps the time of its end, even if it is released later.

    This also holds if a job that it depended on has failed.
    """
    play = full()
    play.arrive(a_job(4, after_ok=parent))
    play.ask(Hold((4,)))
    play.tell(play.ended(1, code=3))
    play.ask(Cancel((4,)))
    ended = play.job(4).finished_at
    code, said = line(play, Release((4,)))
    assert (code, said.startswith("job 4 cannot be released: it is cancelled")) == (1, True)
    assert play.state(4) is S.CANCELLED and play.job(4).finished_at == ended
    assert play.scheduler.waiting() == 1


@pytest.mark.parametrize("order", [Order(), Order("short"), Order("fifo", 2.0)])
def test_first_puts_a_job_before_every_priority_in_every_order(order: Order) -> None:
    play = full(2, order=order)
    play.arrive(a_job(3, priority=-100))
    play.arrive(a_job(4, priority=50))
    assert line(play, First((4,))) == (0, "job 4 is now first in the queue")
    assert starts_next(play) == 4


def test_several_jobs_put_first_keep_their_order_in_the_request() -> None:
    play = full(5)
    assert line(play, First((5, 4))) == (0, "job 5 is now first in the queue\njob 4 is now first in the queue")
    play.ask(First((3,)))
    order, running = [], 1
    for _ in range(4):
        running = starts_next(play, running)
        order.append(running)
    assert order == [3, 5, 4, 2]


def test_first_does_not_apply_to_a_requeued_job() -> None:
    play = full(3)
    play.ask(First((3,)))
    assert starts_next(play) == 3
    play.tell(play.ended(3, code=1))
    assert play.started[-1] == 2
    play.arrive(a_job(4, priority=-1))
    play.ask(Requeue((3,)))
    assert starts_next(play, 2) == 4


def test_swap_exchanges_priority_and_place_of_two_jobs() -> None:
    play = full(3)
    play.arrive(a_job(4, priority=9))
    assert line(play, Swap((2, 4))) == (0, "jobs 2 and 4 have changed places")
    assert starts_next(play) == 4 and starts_next(play, 4) == 3 and starts_next(play, 3) == 2
    assert line(full(), Swap((2, 2)))[0] == 2


def test_an_edit_of_another_field_keeps_the_priority_of_a_swapped_job() -> None:
    play = full(3)
    play.arrive(a_job(4, priority=9))
    play.ask(Swap((2, 4)))
    play.ask(Edit((2,), {"label": "x"}))
    assert line(play, Edit((2,), {"label": "x"})) == (0, "job 2 is unchanged: it already has these values")
    assert play.job(2).priority == 9 and play.job(2).spec.edited == ("label",)
    assert line(play, Edit((2,), {"priority": 0})) == (0, "job 2: priority 9 -> 0")
    assert play.job(2).priority == 0


def test_swap_is_refused_if_the_order_is_computed() -> None:
    code, said = line(full(order=Order("short")), Swap((2, 3)))
    assert code == 1 and "order: short" in said and "gpujob first 2" in said


def test_an_edited_job_is_placed_by_its_new_request() -> None:
    play = a_world(2)
    play.run(a_job(1))
    play.arrive(a_job(2, "2"))
    plan = play.ask(Edit((2,), {"gpus": "0.5", "allowed": [1], "label": "eval"}, ((1, 500),)))
    assert plan.answers[0].lines == ("job 2: gpus (not given) -> 0.5, allowed any -> 1, label none -> eval",)
    job = play.job(2)
    assert play.started == [1, 2] and job.gpus == (1,) and job.need.parts == 500
    assert job.spec.edited == ("gpus", "allowed", "label") and plan.respecs == {2: job}


def test_the_answer_and_the_notes_tell_that_memory_needs_a_larger_share() -> None:
    play = Play(Fleet([a_gpu(memory_mib=81_920)]))
    play.ask(PauseQueue(True))
    play.arrive(a_job(1, "0.25", gpus="0.25", notes=("another note",)))
    told = "vram=40G is 0.5 of the smallest allowed GPU that has it; the job books 0.5"
    assert line(play, Edit((1,), {"vram_mib": 40_960}, ((1, 500),))) == (0, f"job 1: vram none -> 40 GiB; {told}")
    assert play.job(1).notes == ("another note", told) and play.job(1).need.parts == 500
    assert line(play, Edit((1,), {"vram_mib": 90_000}, ((1, 250),)))[0] == 3
    assert play.job(1).notes == ("another note", told), "a refused edit changes nothing"
    assert line(play, Edit((1,), {"vram_mib": None}, ((1, 250),))) == (0, "job 1: vram 40 GiB -> none")
    assert play.job(1).notes == ("another note",) and play.job(1).need.parts == 250


def test_an_edit_that_makes_a_job_impossible_is_refused() -> None:
    play = full()
    code, said = line(play, Edit((2,), {"gpus": "3"}, ((3, 1000),)))
    assert code == 3 and said.startswith("cannot edit job 2: needs 3 whole GPUs")
    code, said = line(play, Edit((2,), {"allowed": [7]}))
    assert code == 3 and "GPU 7 is not managed here" in said
    assert play.job(2).spec.edited == () and play.job(2).allowed is None and starts_next(play) == 2


@pytest.mark.parametrize("changes", [{"allowed": [0]}, {"gpus": "0.5"}, {"allowed": None}, {"gpus": "", "label": "x"}])
def test_the_gpus_of_a_job_that_names_them_cannot_be_edited(changes: dict[str, object]) -> None:
    """S4.31: The GPUs of a job that names them cannot be edited; its label and priority can be edited."""
    play = a_world(2)
    play.ask(PauseQueue(True))
    play.arrive(a_job(1, on=(0, 1)))
    code, said = line(play, Edit((1,), changes, ((1, 500),)))
    assert (code, said) == (
        3,
        "cannot change the GPUs of job 1: it was submitted for named GPUs (on=0,1); cancel it and submit it again",
    )
    assert play.job(1).allowed == (0, 1) and play.job(1).need.by_name and play.job(1).spec.label == ""
    assert line(play, Edit((1,), {"label": "mine", "priority": 3})) == (
        0, "job 1: label none -> mine, priority 0 -> 3",
    )  # fmt: skip
    play.ask(PauseQueue(False))
    assert play.started == [1] and play.job(1).gpus == (0, 1)


def test_the_answer_to_an_edit_without_a_change_says_so() -> None:
    assert line(full(), Edit((2,), {"priority": 0})) == (0, "job 2 is unchanged: it already has these values")
    assert line(full(), Edit((2,), {"script": "/x"}))[0] == 2


def test_edited_priorities_change_the_order_of_the_queue() -> None:
    play = full(4)
    play.ask(Edit((4, 3), {"priority": -1}))
    assert starts_next(play) == 3 and starts_next(play, 3) == 4 and starts_next(play, 4) == 2


def test_an_edit_that_makes_a_job_wait_for_itself_is_refused() -> None:
    play = full(4)
    assert line(play, Edit((2,), {"after": [3]}))[0] == 0
    assert line(play, Edit((3,), {"after_ok": [4]}))[0] == 0
    code, said = line(play, Edit((4,), {"after": [2]}))
    assert (code, said) == (3, "cannot edit job 4: it would wait for itself; leave out the jobs that wait for it")
    assert line(play, Edit((4,), {"after": [4]}))[0] == 3
    assert line(play, Edit((4,), {"after": [77]})) == (
        6,
        "cannot wait for job 77: there is no such job; see gpujob jobs",
    )
    assert starts_next(play) == 4 and starts_next(play, 4) == 3 and starts_next(play, 3) == 2


def test_an_edit_of_many_jobs_looks_at_the_jobs_before_them_once() -> None:
    """Otherwise a request for thousands of jobs after a long chain takes minutes, in which nobody's job starts."""
    play = full(1)
    play.arrive(*(a_job(i, after=(i - 1,)) for i in range(2, 302)), *(a_job(i) for i in range(302, 602)))
    asked, fetch = [0], play.scheduler.fetch

    def counting(number: int) -> Job | None:
        asked[0] += 1
        return fetch(number)

    play.scheduler.fetch = counting
    code, said = line(play, Edit(tuple(range(302, 602)), {"after": [301]}))
    assert code == 0, said
    assert asked[0] < 5 * 600
    assert line(play, Edit((2,), {"after": [601]}))[0] == 3


def test_an_edit_to_wait_for_a_failed_job_skips_the_job_and_reports_it() -> None:
    play = full(2)
    play.tell(play.ended(1, code=3))
    play.arrive(a_job(3))
    code, said = line(play, Edit((3,), {"after_ok": [1]}))
    assert play.state(3) is S.SKIPPED and code == 0 and "skipped" in said
