"""Tests of offers: each offered command really starts the job, and the cheapest comes first."""

from __future__ import annotations

import os
import random
import shlex
from dataclasses import replace
from typing import Any

import pytest

from scheduler.client.edit_needs import needs_after
from scheduler.core.gpu import ResourceRequest, parse_gpu_ids
from scheduler.core.job import Job, JobState
from scheduler.core.job_options import changed_fields
from scheduler.core.model_table import ModelTable, need_of
from scheduler.core.offered_requests import OPTIONS
from scheduler.core.offered_requests import offered as offered_data
from scheduler.core.offers import LATER_JOBS, NOBODY, RUNNING_JOBS, THIS_JOB, Offer, offers
from scheduler.core.placement import Fleet
from scheduler.core.placement_class import class_of
from scheduler.core.requests import Cancel, Edit, First, Hold, Pause, PauseQueue, Release, Request, Resume
from scheduler.core.rights import Caller
from scheduler.core.topology import LINK_WORDS, Link
from tests.builders import Play, a_job, a_policy, a_world, an_instance, some_gpus

STATES = 1000 if os.environ.get("GPUJOB_LONG") else 200


def request_of(command: str, play: Play) -> Request:
    """Return the request that a command line makes, as the command line of gpujob builds it."""
    program, verb, *words = shlex.split(command)
    assert program == "gpujob"
    if verb == "queue":
        assert words == ["resume"]
        return PauseQueue(False)
    if verb == "resume":
        return Resume(parse_gpu_ids(words[0]) or ())
    if verb != "edit":
        kind = {"cancel": Cancel, "first": First, "release": Release}[verb]
        return kind(tuple(map(int, words)))
    number, options = int(words[0]), dict(zip(words[1::2], words[2::2], strict=True))
    changes = changed_fields({name[2:].replace("-", "_"): text for name, text in options.items()})
    needs = needs_after([play.job(number)], changes, ModelTable, lambda: play.scheduler.fleet.managed)
    return Edit((number,), changes, needs)


def starts(play: Play, job: int, command: str, *, together: bool = True) -> bool:
    """Carry out a command in the real state; return whether the job starts when the processes that it ends are gone.

    ``together``: they end at the same time.
    """
    stopped: list[int] = []
    for one in command.split(" && "):
        play.ask(request_of(one, play))
        stopped += [stop.job.id for stop in play.plan.stops]
    if together and stopped:
        play.tell(*(play.ended(number, None, signal=15) for number in stopped))
    else:  # jobs end when they like
        for number in random.Random(job).sample(stopped, len(stopped)):
            play.tell(play.ended(number, None, signal=15))
    return play.state(job) is not JobState.PENDING


def offered(play: Play, job: int, by: Caller | None = None) -> list[Offer]:
    """Return the offers for a waiting job."""
    return offers(play.scheduler, play.job(job), play.now, by)


def commands(play: Play, job: int) -> list[str]:
    return [offer.command for offer in offered(play, job)]


def test_a_held_job_is_released() -> None:
    play = a_world(1)
    play.ask(PauseQueue(True))
    play.arrive(a_job(1))
    play.ask(Hold((1,)))
    play.ask(PauseQueue(False))
    assert commands(play, 1) == ["gpujob release 1"] and offered(play, 1)[0].payer == NOBODY


def test_a_paused_queue_or_gpu_is_resumed() -> None:
    play = a_world(2)
    play.ask(Pause((0, 1)))
    play.arrive(a_job(1), a_job(2, "2"))
    assert commands(play, 1)[0] == "gpujob resume 0"
    assert commands(play, 2) == ["gpujob first 2 && gpujob resume 0,1"]
    play.ask(Resume((0, 1)))
    play.ask(PauseQueue(True))
    play.arrive(a_job(3, "0"))
    assert commands(play, 3) == ["gpujob queue resume"]


def test_other_gpus_are_allowed() -> None:
    play = a_world(8)
    play.run(*(a_job(number, allowed=(number - 1,)) for number in range(1, 5)))
    play.arrive(a_job(9, "2", allowed=(0, 1, 2, 3)))
    first = offered(play, 9)[0]
    assert (first.command, first.payer) == ("gpujob edit 9 --allowed 4,5", THIS_JOB)


def test_a_smaller_share_is_offered_then_the_cancellation_of_the_least_work() -> None:
    play = a_world(1)
    play.run(a_job(1, "0.3"))
    play.tell(after=1000.0)
    play.run(a_job(2, "0.3"))
    play.arrive(a_job(3, "0.7"))
    found = offered(play, 3)
    assert [(offer.command, offer.payer) for offer in found] == [
        ("gpujob edit 3 --gpus 0.4", THIS_JOB),
        ("gpujob cancel 2", RUNNING_JOBS),
    ]
    assert "0.4 of one GPU instead of 0.7" in found[0].cost and "job 2, which has run for" in found[1].cost


def test_a_wide_job_needs_several_cancellations_and_no_more_than_that() -> None:
    play = a_world(2, 2)
    play.run(*(a_job(number, "0.5") for number in range(1, 7)))  # six halves; GPU 3 is free
    play.arrive(a_job(9, "2"))
    found = [offer for offer in offered(play, 9) if offer.payer == RUNNING_JOBS]
    assert [offer.command for offer in found] == ["gpujob cancel 5 6"]


def test_a_job_behind_a_more_urgent_one_is_put_first() -> None:
    play = a_world(2, max_overtakes=1)
    play.run(a_job(1), a_job(2))
    play.arrive(a_job(3, "2"), a_job(4), a_job(5))
    play.scheduler.estimates = play.scheduler.estimates.frozen()
    play.tell(play.ended(1))
    play.tell(play.ended(4))
    assert play.reason(5) == "reserved"
    assert "gpujob first 5" in commands(play, 5)
    assert next(offer for offer in offered(play, 5) if "first" in offer.command).payer == LATER_JOBS


def test_a_dependency_is_dropped() -> None:
    play = a_world(2)
    play.run(a_job(1))
    play.arrive(a_job(2, after_ok=(1,)))
    assert commands(play, 2) == ['gpujob edit 2 --after-ok ""']
    assert starts(play, 2, commands(play, 2)[0])


def test_only_what_the_caller_may_do_is_offered() -> None:
    play = a_world(2)
    play.ask(Pause((1,)))
    play.run(a_job(1, uid=1000, user="ada"))
    play.arrive(a_job(2, uid=1001, user="bob"))
    assert commands(play, 2) == ["gpujob resume 1", "gpujob cancel 1"]
    assert [offer.command for offer in offered(play, 2, Caller(1001, "bob"))] == []
    admin = [offer.command for offer in offered(play, 2, Caller(0, "root", admin=True))]
    assert admin == ["gpujob resume 1", "gpujob cancel 1"]


def test_gpus_that_are_joined_less_well_are_offered() -> None:
    play = Play(Fleet(some_gpus(4, links=[Link.NVLINK, 3, 3, 3, 3, Link.PCIE])))  # 0 with 1, 2 with 3
    play.run(a_job(1, allowed=(0,)))
    play.arrive(a_job(2, "2", link="nvlink"))
    found = offered(play, 2)
    assert [offer.command for offer in found[:2]] == ["gpujob edit 2 --link pcie", "gpujob edit 2 --gpus 1"]
    assert found[0].cost == "its GPUs are joined by one PCIe switch instead of NVLink"
    assert starts(play, 2, found[0].command) and play.job(2).gpus == (2, 3)


def test_a_job_for_an_instance_is_offered_no_share_and_no_card() -> None:
    play = Play(Fleet([*some_gpus(2), an_instance(200), an_instance(201)]))
    play.run(a_job(1, "mig-1g.10gb"), a_job(2))
    play.ask(Pause((1, 201)))
    play.arrive(a_job(3, "mig-1g.10gb"))
    assert commands(play, 3) == ["gpujob resume 201", "gpujob cancel 1"]


def test_a_share_below_the_part_that_the_memory_is_is_not_offered() -> None:
    play = Play(Fleet(some_gpus(1, memory_mib=40_000)))
    play.run(a_job(1, "0.5"))
    play.arrive(a_job(2, "0.75", vram_mib=20_001))
    assert commands(play, 2) == ["gpujob cancel 1"], "20001 MiB are 0.501 of the GPU, whatever share is asked for"
    play.arrive(a_job(3, "0.75", vram_mib=16_000))
    assert commands(play, 3)[0] == "gpujob edit 3 --gpus 0.5"


def test_a_job_without_a_gpu_is_offered_the_slots_of_others() -> None:
    """Of jobs that take slots, the one that has run the shortest time is ended."""
    play = a_world(1, cpu_slots=2)
    play.run(a_job(1, "0"))
    play.tell(after=60.0)
    play.run(a_job(2, "0"))
    play.tell(after=60.0)
    wide = replace(a_job(3, "0"), need=ResourceRequest.of_slots(2))
    play.arrive(wide)
    assert commands(play, 3) == ["gpujob cancel 1 2"]
    play.arrive(a_job(4, "0"))
    assert commands(play, 4) == ["gpujob cancel 2"]
    assert commands(play, 3) == [], "job 4 would take the first free slot"
    assert starts(play, 4, "gpujob cancel 2")


def test_no_job_is_ended_where_less_is_enough() -> None:
    """`first` alone starts the job, so nothing is offered that also ends a job."""
    play = a_world(2)
    play.run(a_job(1, "1"))
    play.arrive(a_job(2, "2"))
    play.ask(PauseQueue(True))
    play.arrive(a_job(3, "1"))
    found = offered(play, 3)
    assert found and not any("cancel" in offer.command for offer in found)


def test_a_running_job_gets_no_offers() -> None:
    play = a_world(1)
    play.run(a_job(1))
    assert offered(play, 1) == []


def random_play(seed: int) -> Play:
    """Return a Play in a random state: running and waiting jobs, pauses, holds, dependencies, reservations."""
    dice = random.Random(seed)
    servers = dice.choice([(1,), (2,), (4,), (8,), (2, 2), (4, 3), (1, 1, 2)])
    links = dice.choices(list(Link), k=45) if dice.random() < 0.5 else []
    managed = some_gpus(*servers, memory_mib=dice.choice([None, 40_000]), links=links)
    divided = dice.random() < 0.3
    if divided:
        managed += [an_instance(200), an_instance(201), an_instance(202, "3g.40gb", memory_mib=40_000)]
    fleet = Fleet(managed, dice.choice([1, 2, 3, 1 << 30]))
    play = Play(fleet, policy=a_policy(max_overtakes=dice.choice([0, 1, 3, 10])))
    gpus, number = sum(servers), 0

    def a_random_job() -> Job:
        needs = ["0.2", "0.5", "0.5", "0.75", "1", "1", "2", "2x0.5", "4", "0"]
        wish: dict[str, Any] = {"priority": dice.randrange(3), "submitted_at": play.wall}
        wish["slots"] = dice.randint(1, 2)
        wish["gpus"] = dice.choice([*needs, "mig-1g.10gb", "mig-1g.10gb", "mig-3g.40gb"] if divided else needs)
        if dice.random() < 0.3:
            wish["link"] = dice.choice(LINK_WORDS)
        if dice.random() < 0.3:
            wish["vram_mib"] = dice.choice([2_000, 8_000, 30_000])
            if dice.random() < 0.3:
                wish["gpus"] = ""
        if dice.random() < 0.3:
            wish["allowed"] = tuple(sorted(dice.sample(range(gpus), dice.randint(1, gpus))))
        if dice.random() < 0.4:
            wish["time_limit_s"] = dice.choice([60.0, 3600.0, 86400.0])
        if number > 2 and dice.random() < 0.1:
            wish[dice.choice(["after", "after_ok"])] = (dice.randint(1, number - 1),)
        need, _ = need_of(a_job(number, **wish).spec, ModelTable(), managed)
        return replace(a_job(number, **wish), need=need)

    for _ in range(dice.randint(4, 30)):
        number += 1
        job = a_random_job()
        if not play.scheduler.fleet.can_ever_hold(class_of(job)):
            play.arrive(job, after=dice.uniform(0.0, 7200.0))
        live = [job for job in play.scheduler.live.values() if job.state is JobState.STARTING]
        play.tell(*(play.began(job.id) for job in live))
        if play.scheduler.live and dice.random() < 0.3:
            play.tell(play.ended(dice.choice(sorted(play.scheduler.live))))
        if dice.random() < 0.15:
            play.ask(Pause((dice.randrange(gpus),)))
        waiting = [one for one, row in play.rows.items() if row.state is JobState.PENDING]
        if waiting and dice.random() < 0.1:
            play.ask(Hold((dice.choice(waiting),)))
    if dice.random() < 0.1:
        play.ask(PauseQueue(True))
    return play


@pytest.mark.long_form
def test_in_random_states_each_offered_command_starts_the_job() -> None:
    """Issue 26, 4: running the offered command really starts the job."""
    tried = states = 0
    for seed in range(STATES):
        waiting = [number for number, job in random_play(seed).rows.items() if job.state is JobState.PENDING]
        states += bool(waiting)
        for number in waiting[:3]:
            found = offered(random_play(seed), number)
            for offer in found:
                for request in offer.requests:  # as the page shows it, and sends it back
                    told = offered_data(request)
                    assert set(told.options) <= set(OPTIONS)
                    assert not isinstance(request, Edit) or changed_fields(told.options) == request.changes
                play = random_play(seed)
                together = bool(seed % 2)
                assert starts(play, number, offer.command, together=together), (seed, number, offer.command)
                tried += 1
    assert states > STATES // 2 and tried > STATES, (states, tried)
