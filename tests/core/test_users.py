"""Users of one queue: turns, weights, limits of users and groups, priorities."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.decide import decide
from scheduler.core.gpu import Gpu
from scheduler.core.gpu_snapshot import GpuProcess
from scheduler.core.job import Job, Process
from scheduler.core.observations import Arrived, Ended, Now, Started
from scheduler.core.placement import Fleet
from scheduler.core.placement_class import class_of
from scheduler.core.scheduler_state import SchedulerState
from scheduler.core.user_limits import EACH, Limit, UserLimits
from scheduler.core.users import Users
from tests.builders import M0, T0, a_job

HOUR = 3600.0


class Queue:
    """A queue of several users, with a clock."""

    def __init__(self, gpus: int, users: Users, **policy: object) -> None:
        self.jobs: dict[int, Job] = {}
        self.state = SchedulerState(Fleet([Gpu(i, f"GPU-{i}") for i in range(gpus)]), self.jobs.get)
        self.state.policy = replace(self.state.policy, **policy)  # type: ignore[arg-type]
        self.state.users = self.users = users
        self.time = 0.0
        self.running: dict[int, float] = {}  # job → when it ends

    def now(self) -> Now:
        return Now(T0 + self.time, M0 + self.time, 1000.0 + self.time)

    def tell(self, *observations: object) -> list[int]:
        """Decide; return the ids of the jobs that start, which run at once."""
        started: list[int] = []
        told = list(observations)
        while told:
            plan = decide(self.state, told, self.now())  # type: ignore[arg-type]
            told = [Started(job.id, job.attempt, Process(job.id, 1), T0 + self.time) for job in plan.starts]
            started += [job.id for job in plan.starts]
        return started

    def arrive(self, number: int, user: str, need: str = "1", **also: object) -> list[int]:
        self.jobs[number] = a_job(number, need, user=user, uid=1, **also)
        return self.tell(Arrived(self.jobs[number]))

    def end(self, number: int) -> list[int]:
        return self.tell(Ended(number, self.jobs[number].attempt, 0, None, T0 + self.time))

    def why(self, number: int) -> str:
        reason = self.state.class_reasons()[class_of(self.jobs[number]).key]
        return f"{reason.code}: {reason.sentence}"


def test_the_user_who_has_used_less_goes_first() -> None:
    queue = Queue(1, Users())
    queue.arrive(1, "ada")
    for number in (2, 3, 4):
        queue.arrive(number, "ada")
    queue.time = HOUR
    queue.arrive(5, "bob")
    assert "user ada has used 1.0 of 1.0 shares since yesterday; user bob goes first" in queue.why(
        2
    ) or "2.0 of" in queue.why(2)
    assert queue.end(1) == [5]
    queue.time += HOUR / 2
    assert queue.end(5) == [2], "ada waited; bob has no more jobs"


def test_users_who_begin_together_take_turns() -> None:
    queue = Queue(4, Users())
    queue.state.queue_paused = True
    for number in range(8):
        queue.arrive(number + 1, "ada" if number < 4 else "bob")
    queue.state.queue_paused = False
    assert sorted(queue.tell(Arrived(queue.jobs[8]))) == [1, 2, 5, 6]


def test_limits_of_users_and_groups() -> None:
    limits = {"ada": Limit(gpus=1), "@lab": Limit(gpus=2), EACH: Limit(gpus=3)}
    queue = Queue(8, Users(limits=UserLimits(limits, {"bob": ["lab"], "cleo": ["lab", "x"]})))
    assert queue.arrive(1, "ada") == [1] and queue.arrive(2, "ada", "0.5") == []
    assert "limit: user ada has 1 of at most 1 GPUs" in queue.why(2)
    assert queue.arrive(3, "bob") == [3] and queue.arrive(4, "cleo") == [4] and queue.arrive(5, "cleo", "0.1") == []
    assert "limit: group lab has 2 of at most 2 GPUs" in queue.why(5)
    assert queue.arrive(6, "dan", "3") == [6] and queue.arrive(7, "dan") == []
    assert "user dan has 3 of at most 3" in queue.why(7)
    assert queue.end(3) == [5]


@pytest.mark.parametrize("across", [False, True])
def test_priorities_count_among_the_jobs_of_a_user_unless_the_configuration_allows_more(across: bool) -> None:
    queue = Queue(1, Users(across=across))
    queue.arrive(1, "cleo")
    queue.arrive(2, "ada")
    queue.arrive(3, "bob", priority=5)
    queue.arrive(4, "bob", priority=-5)
    queue.time = 10.0
    assert queue.end(1) == ([4] if across else [2])


def test_put_first_is_first_among_the_jobs_of_the_user() -> None:
    """Also if priorities count among all users: nobody gets before others by `gpujob first`."""
    queue = Queue(1, Users(across=True))
    queue.arrive(1, "cleo")
    queue.arrive(2, "ada", priority=-1)
    queue.arrive(3, "bob")
    queue.arrive(4, "bob", order=-1)
    assert queue.end(1) == [2]
    assert queue.end(2) == [4]


def test_a_wide_job_gets_its_turn_beside_the_jobs_of_others() -> None:
    """After `max_overtakes` starts of others, GPUs are reserved for the job of several GPUs of the user who is next."""
    queue = Queue(2, Users(), max_overtakes=3, backfill=False)
    queue.arrive(1, "ada")
    queue.arrive(2, "ada")
    queue.time = HOUR
    queue.arrive(3, "bob", "2")
    started: list[int] = []
    for number in range(10, 30):
        queue.arrive(number, "ada")
    for number in range(100):
        queue.time += 60.0
        live = sorted(queue.state.live)
        started += queue.end(live[number % len(live)])
        if 3 in started:
            break
    assert 3 in started and len(started) <= 3 + 3, started


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["0.25", "0.5", "1", "2"])), max_size=40),
    st.integers(1, 4),
)
def test_no_limit_and_no_gpu_is_exceeded(jobs: list[tuple[str, str]], gpus: int) -> None:
    queue = Queue(gpus, Users(limits=UserLimits({"a": Limit(gpus=1.5), "@g": Limit(gpus=2)}, {"b": ["g"], "c": ["g"]})))
    for number, (user, need) in enumerate(jobs, 1):
        queue.arrive(number, user, need)
        if number % 3 == 0 and queue.state.live:
            queue.time += 100.0
            queue.end(min(queue.state.live))
        has = {
            user: sum(job.need.total for job in queue.state.live.values() if job.spec.user == user) for user in "abc"
        }
        assert has["a"] <= 1500 and has["b"] + has["c"] <= 2000 and sum(has.values()) <= gpus * 1000


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_shares_of_a_busy_week_are_the_weights(seed: int) -> None:
    """Issue 25, 6: five users with weights 1:1:2:1:3 and always waiting jobs get these parts of the GPU time."""
    weights = {"a": 1.0, "b": 1.0, "c": 2.0, "d": 1.0, "e": 3.0}
    dice, queue = random.Random(seed), Queue(8, Users(weights=weights))
    used, number, ends = dict.fromkeys(weights, 0.0), 0, list[tuple[float, int]]()

    def submit(user: str) -> list[int]:
        nonlocal number
        number += 1
        return queue.arrive(number, user, dice.choice(["0.25", "0.5", "1", "1"]))

    def begin(started: list[int]) -> None:
        for one in started:
            job = queue.jobs[one]
            ran = dice.uniform(0.3, 2.0) * HOUR
            used[job.spec.user] += ran * job.need.total / 1000
            ends.append((queue.time + ran, one))

    for user in weights:
        for _ in range(12):
            begin(submit(user))
    while queue.time < 7 * 24 * HOUR:
        ends.sort()
        queue.time, ended = ends.pop(0)
        user = queue.jobs[ended].spec.user
        begin(queue.end(ended))
        begin(submit(user))
    total = sum(used.values())
    for user, weight in weights.items():
        assert used[user] / total * 8.0 / weight == pytest.approx(1.0, abs=0.05), (user, used)


def test_a_process_of_a_user_with_a_job_on_the_gpu_belongs_to_the_last_job_of_the_user() -> None:
    """The scheduler of all users cannot read the environments of processes: the user tells to which job they belong."""
    queue = Queue(1, Users())
    for number, user in ((1, "ada"), (2, "ada"), (3, "bob")):
        queue.time += 10.0
        queue.arrive(number, user, "0.25")
    tenants = {tenant.job: tenant for tenant in queue.state.tenants(0)}
    assert [tenants[number].user for number in (1, 2, 3)] == ["ada", "ada", "bob"]
    admission = queue.state.fleet.admission

    def owner(user: str) -> str:
        return admission._settling(GpuProcess(pid=9, user=user, started_at=T0), [*tenants.values()], queue.now())

    assert [owner(user) for user in ("ada", "bob", "dan")] == ["2.1", "3.1", ""]


def test_jobs_on_lent_gpus_stay_within_the_limit_of_their_user() -> None:
    """A reserved GPU is lent to jobs of a user only as far as the limits of the user allow."""
    queue = Queue(4, Users(limits=UserLimits({"bob": Limit(gpus=1.0)})), max_overtakes=10)
    for number in range(1, 5):
        queue.arrive(number, "ada", time_limit_s=25 * HOUR)
    queue.arrive(5, "ada", "4", time_limit_s=HOUR)
    queue.time = 24.5 * HOUR
    for number in (10, 11, 12):
        queue.arrive(number, "bob", time_limit_s=60.0)
    queue.users.standing("bob").used = 1e9  # it is ada's turn, so her job reserves before bob's jobs are looked at
    started = queue.tell(*(Ended(number, 1, 0, None, T0 + queue.time) for number in (1, 2, 3)))
    assert started == [10] and [one.job for one in queue.state.fleet.reserved] == [5], started
