"""A soak of the scheduler of all users: three users submit jobs while scheduler, agents and launcher are killed."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator

import pytest

from tests.gpujobd.machine import CONFIG, Machine
from tests.stories.harness import wait_for
from tests.stories.people import ROOT_ONLY

pytestmark = [ROOT_ONLY, pytest.mark.long]

JOBS = 120  # of each user
LIMIT_S = 900.0
SUBMIT = """
n=0
while [ $n -lt {jobs} ]; do
    n=$((n + 1)); code=$((n % 5))
    gpujob submit --gpus 0.$((n % 4 + 1)) -- sh -c "echo $n >> $HOME/ran; sleep 0.$((n % 7)); exit $code" >> ids 2>> errors && echo $n $code >> accepted
done
"""


@pytest.fixture
def machine() -> Iterator[Machine]:
    with Machine(CONFIG) as made:
        for name in ("ada", "bob", "eve"):
            made.add_user(name)
        made.install()
        made.start()
        yield made


def test_three_users_under_kills(machine: Machine) -> None:
    """Issue 25, 7: under random kills each accepted job ends with its own exit code, and its command runs once."""
    dice = random.Random(int(os.environ.get("GPUJOB_SEED", "25")))
    submitters = [
        threading.Thread(target=machine.sh, args=(who, SUBMIT.format(jobs=JOBS), LIMIT_S))
        for who in ("ada", "bob", "eve")
    ]
    for one in submitters:
        one.start()
    begun, kills = time.monotonic(), 0
    while any(one.is_alive() for one in submitters):
        assert time.monotonic() - begun < LIMIT_S
        time.sleep(dice.uniform(0.5, 4.0))
        what = dice.choice(["scheduler", "agents", "agents", "launcher"])
        if what == "agents":
            machine.kill_agents()
        elif what == "scheduler":
            machine.kill_scheduler()
        else:
            machine.kill_launcher()
            machine.start()
        kills += 1
    for one in submitters:
        one.join()

    def unfinished() -> int:
        jobs = machine.gpujob("eve", "jobs", "--json", "--state", "pending,starting,running,stopping").json()["jobs"]
        return len(jobs)

    wait_for(lambda: unfinished() == 0, "the end of all jobs", 300)
    found = machine.gpujob("eve", "jobs", "--json").json()["jobs"]
    by_id = {job["id"]: job for job in found}
    for who in ("ada", "bob", "eve"):
        ids = [int(line) for line in machine.sh(who, "cat ids").out.split()]
        accepted = [tuple(map(int, line.split())) for line in machine.sh(who, "cat accepted").out.splitlines()]
        assert len(ids) == len(accepted) and len(ids) > JOBS * 0.5, machine.sh(who, "cat errors").out[-2000:]
        for number, (_, code) in zip(ids, accepted, strict=True):
            job = by_id[number]
            assert (job["user"], job["outcome"], job["exit_code"]) == (who, "exit", code), (job, kills)
        ran = [int(line) for line in machine.sh(who, "cat ran").out.split()]
        assert sorted(set(ran)) == sorted(ran), "a command ran twice"
        assert {one for one, _ in accepted} <= set(ran)
    assert kills >= 5
