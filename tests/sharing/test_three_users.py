"""Schedulers of three real users on one machine: no GPU is given away twice, whatever is killed."""

from __future__ import annotations

import random
import time

import pytest

from tests.sharing.conftest import Person, most_of_a_gpu
from tests.stories.harness import wait_for

NEEDS = ("0.25", "0.5", "0.5", "1", "2", "4")
LIMIT_S = 600.0


def test_two_users_meet_on_one_gpu(people: list[Person]) -> None:
    one, two, _ = people
    one.start("--gpus", "1")
    two.start("--gpus", "1")
    one.append(one.line("first", 3.0, "1"))
    wait_for(lambda: "1 running" in one.gpujob("status")[1], "the first job")
    two.append(two.line("second", 0.0, "0.5"))
    wait_for(lambda: "booked-outside" in two.gpujob("why", "1")[1], "the reason")
    told = two.gpujob("why", "1")[1]
    assert f"GPU 0 is booked by user {one.user.name}" in told, told
    status = two.gpujob("status")[1]
    assert "FOREIGN" in status and f"booked by user {one.user.name}" in status, status
    who = two.gpujob("who")[1]
    assert one.user.name in who and "first" not in who, "no command of another user is shown"
    wait_for(lambda: len(two.ledger()) == 1, "the second job", 30.0)
    assert most_of_a_gpu(people) == 1.0


def test_bookings_outlive_a_killed_scheduler(people: list[Person]) -> None:
    one, two, _ = people
    one.start("--gpus", "1")
    one.append(one.line("first", 2.0, "1"))
    wait_for(lambda: "1 running" in one.gpujob("status")[1], "the first job")
    one.kill()
    two.start("--gpus", "1")
    two.append(two.line("second", 0.0, "1"))
    wait_for(lambda: "booked-outside" in two.gpujob("why", "1")[1], "the reason")
    wait_for(lambda: len(two.ledger()) == 1, "the second job", 30.0)
    assert most_of_a_gpu(people) == 1.0 and len(one.ledger()) == 1


@pytest.mark.parametrize("jobs", [120, pytest.param(1000, marks=pytest.mark.long)])
def test_no_gpu_is_given_away_twice_while_schedulers_are_killed(people: list[Person], jobs: int) -> None:
    """P1: Jobs of three users, random starts and SIGKILLs of their schedulers: no job is lost, and none runs twice."""
    dice = random.Random(jobs)
    for person in people:
        person.start()
    for number in range(jobs):
        person = dice.choice(people)
        person.append(person.line(f"k{number}", dice.choice((0.0, 0.02, 0.1)), dice.choice(NEEDS)))
    end = time.monotonic() + LIMIT_S
    kills = 0
    while any(len(person.ledger()) < len(person.keys) for person in people):
        assert time.monotonic() < end, [(len(person.ledger()), len(person.keys)) for person in people]
        time.sleep(dice.uniform(0.2, 1.5))
        person = dice.choice(people)
        person.kill()
        kills += 1
        person.start()
    for person in people:
        ran = [key for key, *_ in person.ledger()]
        assert sorted(ran) == sorted(person.keys)
        wait_for(lambda person=person: f"{len(person.keys)} done" in person.gpujob("status")[1], "all jobs done")  # type: ignore[misc]
    assert most_of_a_gpu(people) <= 1.0
    assert kills > 3
