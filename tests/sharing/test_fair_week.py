"""Five users share a server for a week: shares follow the weights, no GPU idles while a job fits, newcomers start soon."""

from __future__ import annotations

import random
import statistics

import pytest

from tests.sharing.simulated_users import World

HOUR, DAY, DAYS = 3600.0, 86_400.0, 7
WEIGHTS = {"ann": 1.0, "ben": 1.0, "cat": 2.0, "dan": 1.0, "eve": 3.0}
NEEDS = ("0.5", "1", "1", "2")


def keep_busy(world: World, name: str, waiting: int, dice: random.Random) -> None:
    """Give a user new jobs whenever few of them wait."""

    def fill() -> None:
        for _ in range(waiting - world.users[name].state.waiting()):
            world.submit(name, dice.choice(NEEDS), dice.uniform(0.2, 2.0) * HOUR)
        world.at(world.time + HOUR / 4, fill)

    fill()


@pytest.mark.parametrize("seed", [1, 2])
def test_five_users_get_their_shares_in_a_week(seed: int) -> None:
    world, dice = World(8, WEIGHTS, seed), random.Random(seed)
    for name in WEIGHTS:
        keep_busy(world, name, 12, dice)
    begun = world.time
    world.run(begun + DAYS * DAY)
    total, weights = sum(user.used for user in world.users.values()), sum(WEIGHTS.values())
    shares = {name: user.used / total / (WEIGHTS[name] / weights) for name, user in world.users.items()}
    print(seed, {k: round(v, 3) for k, v in shares.items()}, world.idle_s / (8 * DAYS * DAY), total / (8 * 7 * DAY))
    assert all(0.95 <= share <= 1.05 for share in shares.values()), shares
    assert world.idle_s < 0.001 * 8 * DAYS * DAY
    durations = [duration for user in world.users.values() for duration in user.durations.values()]
    world.weights = {**WEIGHTS, "new": 1.0}
    world.add("new")
    world.submit("new", "1", HOUR)
    world.run(world.time + DAY)
    new = world.users["new"]
    print("newcomer", new.starts[1] - new.arrived[1], statistics.median(durations))
    assert new.starts[1] - new.arrived[1] <= statistics.median(durations)
