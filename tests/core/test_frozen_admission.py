"""Tests of simulations beside readings: what keeps a job waiting in the scheduler keeps it waiting in a copy of its state."""

from __future__ import annotations

from dataclasses import replace

from scheduler.core.admission import Admission
from scheduler.core.decide import decide
from scheduler.core.engine_placement import EngineFleet, EngineRules
from scheduler.core.forecast import Forecast
from scheduler.core.gpu import Gpu
from scheduler.core.gpu_admission import Thresholds
from scheduler.core.gpu_snapshot import GpuProcess, GpuSnapshot
from scheduler.core.job import JobState
from scheduler.core.observations import EnginePlace, Readings
from scheduler.core.offers import offers
from scheduler.core.placement import Fleet
from scheduler.core.simulation import copy_of
from tests.builders import Play, a_job, a_policy, some_gpus

HOUR, DAY = 3600.0, 86400.0
CARD_MIB = 80_000


def read_play(number: int) -> Play:
    """Return a Play with GPUs that are read."""
    gpus = some_gpus(number, memory_mib=CARD_MIB)
    play = Play(Fleet(gpus), policy=a_policy(max_overtakes=10))
    play.scheduler.fleet.admission = Admission.of(gpus, Thresholds(), play.now)
    play.scheduler.watch_admission()
    return play


def card(index: int, used: int = 0, **changes: object) -> GpuSnapshot:
    """Return a reading of a GPU without processes."""
    return replace(GpuSnapshot(f"declared:{index}", index, "a card", CARD_MIB, used, 0.0, None, ()), **changes)


def read(play: Play, *cards: GpuSnapshot, after: float = 5.0) -> None:
    """Let a reading arrive after some time."""
    play.tell(Readings(play.mono + after, cards), after=after)


def offered(play: Play, job: int) -> list[str]:
    assert play.state(job) is JobState.PENDING
    return [offer.command for offer in offers(play.scheduler, play.job(job), play.now)]


def test_a_gpu_that_others_keep_busy_is_reserved_neither_by_the_scheduler_nor_in_a_copy() -> None:
    play, busy = read_play(3), card(0, load=95.0)
    for _ in range(3):
        read(play, busy, card(1), card(2))
    play.arrive(a_job(1, time_limit_s=2 * DAY), a_job(2, time_limit_s=2 * DAY + 600))
    play.tell(play.began(1), play.began(2))
    play.arrive(a_job(50, "2", time_limit_s=HOUR), *(a_job(n, time_limit_s=12 * HOUR) for n in range(60, 70)))
    read(play, busy, card(1), card(2), after=2 * DAY - 300)
    copied = copy_of(play.scheduler)
    decide(copied, [], play.now)
    assert [one.mask for one in play.scheduler.fleet.reserved] == [0b110]
    assert [one.mask for one in copied.fleet.reserved] == [0b110]


def test_a_job_that_names_a_lost_gpu_gets_no_offer_and_no_prediction() -> None:
    play = read_play(2)
    read(play, card(0), card(1, lost=True))
    play.arrive(a_job(1, on=(1,), time_limit_s=60.0))
    assert offered(play, 1) == []
    forecast = Forecast(play.scheduler, play.now)
    forecast.simulate()
    assert 1 not in forecast.predictions()


def test_memory_that_a_job_uses_beyond_its_request_is_not_offered_to_another_job() -> None:
    play = read_play(1)
    read(play, card(0))
    play.arrive(a_job(1, "0.125", vram_mib=10_000))
    play.tell(play.began(1))
    used = card(0, 11_400, processes=(GpuProcess(1001, 11_400, started_at=play.wall, owner="1.1"),))
    for _ in range(3):
        read(play, used, after=100.0)
    play.arrive(a_job(2, "0.863", vram_mib=69_000))
    read(play, used)
    assert all("cancel" in command or "edit" in command for command in offered(play, 2))
    play.arrive(a_job(3, vram_mib=79_990))
    read(play, used)
    assert "gpujob first 3" not in offered(play, 3)


def test_a_job_in_the_queue_of_an_engine_waits_in_predictions_too() -> None:
    fleet = EngineFleet([Gpu(i, f"g1/{i}", node="g1") for i in range(2)], EngineRules("Slurm", 0), 8)
    play = Play(fleet, policy=a_policy(release_ahead=3))
    fleet.admission = Admission()
    play.arrive(*(a_job(number, time_limit_s=HOUR) for number in range(1, 6)))
    assert play.started == [1, 2, 3, 4, 5], "three wait in the queue of the engine"
    for job in (1, 2):
        place = EnginePlace("g1", (f"g1/{job - 1}",))
        play.tell(replace(play.began(job), place=place))
    forecast = Forecast(play.scheduler, play.now)
    forecast.simulate()
    found = forecast.predictions()
    assert [found[job].start is None for job in (1, 2, 3, 4, 5)] == [True, True, False, False, False]
    third, fifth = found[3].start, found[5].start
    assert third is not None and fifth is not None and 0 < third.middle < fifth.middle


def test_nothing_is_reserved_for_a_job_that_waits_for_no_other_job() -> None:
    """Foreign processes keep the first job from the GPU; it would be in the way of the second job for ever."""
    play = read_play(1)
    used = card(0, 4000, processes=(GpuProcess(4711, 4000, started_at=play.wall),))
    for _ in range(3):
        read(play, used)
    play.arrive(a_job(1))
    read(play, used)
    assert play.reason(1) == "foreign"
    play.arrive(a_job(2, "0.5"))
    assert play.state(2) is JobState.STARTING and not play.scheduler.fleet.reserved


def test_the_reason_names_a_lost_gpu_also_while_a_job_is_on_it() -> None:
    play = read_play(1)
    read(play, card(0))
    play.arrive(a_job(1, "0.5"))
    play.tell(play.began(1))
    read(play, card(0, lost=True))
    play.arrive(a_job(2))
    assert play.reason(2) == "gone"
