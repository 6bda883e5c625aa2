"""Five users share a server for a week: shares follow the weights, no GPU idles while a job fits, newcomers start soon.

If some jobs need several GPUs, then GPUs are reserved for them, so they idle for a while. Without that, these jobs would
wait until several GPUs become free at the same moment, and their users would get less than their share.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

import pytest

from tests.sharing.simulated_users import World

HOUR, DAY, DAYS = 3600.0, 86_400.0, 7
WEIGHTS = {"ann": 1.0, "ben": 1.0, "cat": 2.0, "dan": 1.0, "eve": 3.0}
NARROW, WIDE = ("0.25", "0.5", "1", "1"), ("0.5", "1", "1", "2")


def keep_busy(world: World, name: str, waiting: int, dice: random.Random, needs: Sequence[str]) -> None:
    """Give a user new jobs whenever few of them wait."""

    def fill() -> None:
        for _ in range(waiting - world.users[name].state.waiting()):
            world.submit(name, dice.choice(needs), dice.uniform(0.2, 2.0) * HOUR)
        world.at(world.time + HOUR / 4, fill)

    fill()


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    ("needs", "max_overtakes", "least_used", "most_idle"),
    [(NARROW, 0, 0.97, 0.001), (WIDE, 10, 0.95, 0.04)],
    ids=["narrow", "wide"],
)
def test_five_users_get_their_shares_in_a_week(
    seed: int, needs: Sequence[str], max_overtakes: int, least_used: float, most_idle: float
) -> None:
    """``least_used``: of the GPU time; ``most_idle``: GPU time during which a waiting job would have fitted."""
    world, dice = World(8, WEIGHTS, seed, max_overtakes), random.Random(seed)
    for name in WEIGHTS:
        keep_busy(world, name, 12, dice, needs)
    begun, all_time = world.time, 8 * DAYS * DAY
    world.run(begun + DAYS * DAY)
    total, weights = sum(user.used for user in world.users.values()), sum(WEIGHTS.values())
    shares = {name: user.used / total / (WEIGHTS[name] / weights) for name, user in world.users.items()}
    print(f"shares {shares}, used {total / all_time:.4f}, idle {world.idle_s / all_time:.5f}")
    assert all(0.95 <= share <= 1.05 for share in shares.values()), shares
    assert total >= least_used * all_time and world.idle_s <= most_idle * all_time
    waits = [world.wait(user, job) for user in world.users.values() for job in user.jobs]
    print(f"longest wait {max(waits) / HOUR:.1f} h")
    durations = [duration for user in world.users.values() for duration in user.durations.values()]
    world.weights = {**WEIGHTS, "new": 1.0}
    new = world.add("new")
    world.submit("new", "1", HOUR)
    world.run(world.time + DAY)
    print(f"first job of a new user: {world.wait(new, 1):.0f} s; median job: {statistics.median(durations):.0f} s")
    assert world.wait(new, 1) <= statistics.median(durations)


@pytest.mark.parametrize(("gpus", "need"), [(2, "2"), (4, "3"), (8, "8")])
def test_a_wide_job_starts_beside_a_long_queue_of_narrow_jobs(gpus: int, need: str) -> None:
    """The other user frees and takes GPUs one by one, so that no two are free at the same time."""
    world = World(gpus, {"ann": 1.0, "ben": 1.0}, max_overtakes=10)
    for number in range(400):
        world.submit("ben", "1", 100.0 + number * 37 % 61)
    world.run(world.time + 50.0)
    world.submit("ann", need, 100.0)
    world.run(world.time + 3000.0)
    assert world.wait(world.users["ann"], 1) < 1500.0 and world.users["ben"].state.waiting() > 100


def test_a_job_that_keep_free_forbids_reserves_nothing() -> None:
    world = World(2, {"ann": 1.0, "ben": 1.0}, max_overtakes=5)
    world.users["ann"].state.fleet.keep_free = 1
    for _ in range(20):
        world.submit("ben", "1", 100.0)
    world.submit("ann", "2", 100.0)
    world.run(world.time + 2000.0)
    assert world.users["ben"].state.waiting() == 0 and not world.users["ann"].document.reserved
