"""Tests of jobs that request GPU memory, on GPUs on which memory is booked or in use.

They also check adopted jobs that cannot be booked, for example because other jobs have their GPUs.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.core.admission import Admission
from scheduler.core.gpu import ResourceRequest
from scheduler.core.gpu_admission import NOTHING_FORBIDDEN, Thresholds
from scheduler.core.gpu_snapshot import GpuSnapshot
from scheduler.core.job import JobState, Process
from scheduler.core.observations import Gone, Now, Readings
from scheduler.core.placement import Fleet
from scheduler.core.requests import Cancel
from tests.builders import M0, T0, Play, a_gpu, a_job, a_kind, a_world
from tests.core.test_admission import DRIVER, TOTAL, Bench, a_process, a_tenant

S = JobState
CAPACITY = TOTAL - DRIVER


@pytest.fixture
def bench() -> Bench:
    """Return a Bench whose GPU 0 was read once while it was empty."""
    made = Bench()
    assert made.read(after=0.0) == NOTHING_FORBIDDEN
    return made


def fits(bench: Bench, need: str, vram_mib: int = 0) -> bool:
    """Return whether a job with this request is placed on GPU 0. Also check that `forbids` and the reasons agree."""
    fleet = Fleet([a_gpu(memory_mib=TOTAL)])
    for tenant in bench.on:
        fleet.take(ResourceRequest(1, tenant.parts), (0,), tenant.vram_mib)
    fleet.admission = bench.admission
    kind = a_kind(need, vram_mib=vram_mib)
    found = fleet.find(kind) == (0,)
    parts = ResourceRequest.parse(need).parts
    if parts <= fleet.free[0]:
        verdict = bench.admission.forbids(0, parts, fleet.free[0], vram_mib)
        held_by_ledger = vram_mib > fleet.memory_free.get(0, TOTAL)
        assert found == (verdict == NOTHING_FORBIDDEN and not held_by_ledger), verdict
        if not found:
            assert fleet.why_not(kind).sentence
    return found


@pytest.mark.parametrize(
    ("share", "vram_mib", "uses", "need", "wants", "room"),
    [
        # a job uses its half: requested memory beyond the other half does not fit
        (500, 0, 40_000, "0.5", 60_000, False),
        (500, 0, 40_000, "0.5", 39_000, True),
        (500, 0, 40_000, "0.5", 0, True),
        # a job does not use its half yet: the job still counts with its half
        (500, 0, 0, "0.5", 60_000, False),
        (500, 0, 0, "0.5", 40_000, True),
        # a job with a tenth has requested 60 GB: others get at most the rest, even if the job uses less
        (100, 60_000, 60_000, "0.9", 0, False),
        (100, 60_000, 100, "0.9", 0, False),
        (100, 60_000, 60_000, "0.2", 0, True),
        (100, 60_000, 60_000, "0.1", 19_000, True),
        # a job that uses more than its share counts with its use, except that a tenth more is tolerated
        (250, 0, 50_000, "0.25", 0, True),
        (250, 0, 50_000, "0.25", 40_000, False),
        (250, 0, 21_000, "0.75", 0, True),
    ],
)
def test_requested_memory_must_fit_beside_booked_and_used_memory(
    bench: Bench, share: int, vram_mib: int, uses: int, need: str, wants: int, room: bool
) -> None:
    bench.on = [a_tenant(1, share, vram_mib)]
    bench.read(DRIVER + uses, *([a_process(11, uses, owner="1.1")] if uses else []))
    assert fits(bench, need, wants) is room


def test_memory_requests_up_to_the_room_plus_the_tolerance_fit(bench: Bench) -> None:
    slack = int(bench.admission.thresholds.tolerance * CAPACITY)
    bench.on = [a_tenant(1, 500)]
    bench.read(DRIVER + 30_000, a_process(11, 30_000, owner="1.1"))
    most = CAPACITY // 2 + slack
    assert bench.admission.has_room(0, 500, most) and not bench.admission.has_room(0, 500, most + 1)


def test_foreign_memory_reduces_the_room_for_memory_requests(bench: Bench) -> None:
    bench.read(DRIVER + 30_000, a_process(mib=30_000))
    assert not fits(bench, "0.1", 60_000) and fits(bench, "0.1", 48_000)


def test_without_a_reading_only_the_ledger_limits_memory_requests() -> None:
    made = Bench()
    assert made.admission.has_room(0, 1000, 10**6) and made.admission.has_room(99, 1000, 10**6)


def test_the_reason_names_the_job_of_our_process_on_a_gpu_without_its_allocation(bench: Bench) -> None:
    for _ in range(2):
        verdict = bench.read(DRIVER + 66_000, a_process(11, 66_000, owner="7.2"))
    assert verdict.code == "foreign"
    assert verdict.sentence.endswith("(pid 11 of job 7, which has no allocation on this GPU)"), verdict.sentence


def test_requested_memory_has_no_tolerance_beside_requested_or_used_memory(bench: Bench) -> None:
    bench.on = [a_tenant(1, 500, 40_000)]
    bench.read(DRIVER + 100, a_process(11, 100, owner="1.1"))
    assert fits(bench, "0.5", CAPACITY - 40_000) and not fits(bench, "0.5", CAPACITY - 39_999)
    bench.read(DRIVER + 41_000, a_process(11, 41_000, owner="1.1"))
    assert fits(bench, "0.4", CAPACITY - 41_000) and not fits(bench, "0.4", CAPACITY - 40_999)
    verdict = bench.admission.forbids(0, 400, 500, CAPACITY - 40_999)
    assert verdict.code == "no-room" and verdict.sentence == (
        "GPU 0 has 38200 MiB that are neither in use nor requested by its jobs, but the job needs 38201 MiB"
    )
    assert fits(bench, "0.5"), "a share has some tolerance"


def test_memory_that_the_driver_keeps_for_itself_is_no_room(bench: Bench) -> None:
    bench.read(DRIVER, reserved_mib=600)
    assert bench.card.capacity_mib == CAPACITY - 600
    bench.on = [a_tenant(1, 100, 10_000)]
    assert fits(bench, "0.1", CAPACITY - 10_600) and not fits(bench, "0.1", CAPACITY - 10_599)


def test_memory_that_a_user_accepted_is_no_room_for_requested_memory(bench: Bench) -> None:
    bench.read(DRIVER + 30_000, a_process(mib=30_000))
    for _ in range(2):
        bench.admission.accept([0], bench.now)
        assert fits(bench, "0.1", CAPACITY - 30_000) and not fits(bench, "0.1", CAPACITY - 29_999)
        bench.read(DRIVER + 30_000, a_process(mib=30_000))
    assert fits(bench, "1"), "a job that requests a share uses the rest"
    bench.read(DRIVER)
    assert fits(bench, "0.1", CAPACITY)


def test_a_job_that_requests_more_than_the_driver_leaves_gets_a_gpu_of_its_own(bench: Bench) -> None:
    """Such a job must not wait for ever: it was accepted, because the GPU has that much memory."""
    assert fits(bench, "1", TOTAL)
    bench.read(DRIVER + 100, a_process(mib=100))
    assert not fits(bench, "1", TOTAL)
    bench.on = [a_tenant(1, 1)]
    bench.read(DRIVER + 100, a_process(11, 100, owner="1.1"))
    assert not fits(bench, "0.9", TOTAL)


MIXED = [a_gpu(0, memory_mib=81_920), a_gpu(1, memory_mib=81_920), a_gpu(2, memory_mib=24_576)]


def test_a_job_that_requests_memory_goes_to_the_smallest_gpu_that_has_it() -> None:
    fleet = Fleet(MIXED)
    kind = a_kind("0.75", vram_mib=18_432)
    found = []
    while (gpus := fleet.find(kind)) is not None:
        found.append(gpus)
        fleet.take(kind.need, gpus, kind.vram_mib)
    assert found == [(2,), (0,), (1,)]
    assert fleet.find(a_kind("0.25")) == (0,), "a job that requests only a share goes where it fits most tightly"


def test_the_reason_names_the_gpu_with_the_most_room_and_none_that_is_too_small() -> None:
    fleet, now = Fleet(MIXED), Now(T0, M0)
    fleet.admission = Admission.of(MIXED, Thresholds(), now)
    used = (30_000, 20_000, 0)
    told = [
        GpuSnapshot(g.uuid, g.index, "", g.memory_mib, mib, 0.0, processes=(a_process(mib=mib),) if mib else ())
        for g, mib in zip(MIXED, used, strict=True)
    ]
    fleet.admission.take(Readings(M0, tuple(told)), now)
    why = fleet.why_not(a_kind("0.1", vram_mib=70_000))
    assert why.sentence == (
        "GPU 1 has 60.5 GiB that are neither in use nor requested by its jobs, but the job needs 68.4 GiB; "
        "GPU 0 cannot be used either"
    )


@pytest.mark.parametrize("limit", [0.01, 0.05, 0.1, 0.8])
def test_a_gpu_is_unblocked_with_any_threshold(limit: float) -> None:
    """Without foreign load, a blocked GPU becomes free again, whatever the threshold is.

    A threshold may be lower than the usual hysteresis of 5 %.
    """
    made = Bench(load=limit, memory=max(limit, 0.1))
    assert made.read(load=90).code == "foreign"
    for _ in range(3):
        made.read(load=0)
    assert made.card.verdict == NOTHING_FORBIDDEN and made.usable()


# -- allocations that do not fit the ledger ---------------------------------------------------------------


def taken_over(play: Play, number: int, need: str, *gpus: int) -> None:
    job = a_job(number, need, state=S.RUNNING, attempt=1, gpus=gpus, process=Process(10 + number, 5))
    play.rows[number] = job
    play.scheduler.adopt(job, play.now)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("1", (0,)), ("1", (0,))),
        (("0.6", (0,)), ("0.6", (0,))),
        (("2", (0, 1)), ("1", (1,))),
        (("1", (0,)), ("1", (7,))),
        (("1", (0,)), ("2", (1,))),
        (("1", (0,)), ("1", ())),
    ],
    ids=["twice", "shares", "wide", "unmanaged", "too-few", "none"],
)
def test_jobs_whose_bookings_conflict_are_all_adopted(
    first: tuple[str, tuple[int, ...]], second: tuple[str, tuple[int, ...]]
) -> None:
    play = a_world(2)
    for number, (need, gpus) in enumerate((first, second), 1):
        taken_over(play, number, need, *gpus)
    assert set(play.scheduler.live) == {1, 2} and play.scheduler.unbooked == {"2.1"}
    assert "are also allocated to other jobs" in play.scheduler.live[2].notes[-1]
    free = dict(play.scheduler.fleet.free)
    play.tell(play.ended(2))
    assert play.state(2) is S.DONE and play.scheduler.fleet.free == free and not play.scheduler.unbooked
    play.tell(play.ended(1))
    assert play.scheduler.fleet.free == {0: 1000, 1: 1000}
    play.arrive(a_job(3, "2"))
    assert play.started == [3]


def test_leftovers_of_an_overbooked_job_free_no_booking_twice() -> None:
    play = a_world(1)
    for number in (1, 2):
        taken_over(play, number, "1", 0)
    left = (Process(99, 9),)
    play.tell(play.ended(2, leftovers=left))
    assert play.scheduler.fleet.free == {0: 0} and play.scheduler.unbooked == {"2.1"}
    play.tell(Gone("2.1"))
    assert play.scheduler.fleet.free == {0: 0} and not play.scheduler.unbooked and not play.scheduler.holdings
    play.tell(play.ended(1))
    assert play.scheduler.fleet.free == {0: 1000}


def test_uncertain_leftovers_do_not_delay_the_end_of_a_cancelled_job() -> None:
    """While processes remain after the main process of a cancelled job, the GPU of the job stays allocated.

    A process that certainly belongs to the job delays the end of the job. A process that may belong to another job
    does not delay it. Both keep the GPU allocated.
    """
    left = (Process(99, 9),)
    for unsure, after in ((left, S.CANCELLED), ((), S.STOPPING)):
        play: Play = a_world(1)
        play.run(a_job(1))
        play.ask(Cancel((1,)))
        play.tell(replace(play.ended(1), leftovers=left, unsure=unsure))
        assert play.state(1) is after
        assert play.scheduler.fleet.free == {0: 0}, "the GPU is held either way"


def test_an_attempt_that_could_not_be_booked_keeps_its_gpu_when_the_other_jobs_there_have_ended() -> None:
    """Found by random damage of the store: an adopted job whose GPU was booked twice lost it to the next waiting job."""
    play = a_world(1)
    for number in (1, 2):
        job = a_job(number, "1", state=S.RUNNING, attempt=1, gpus=(0,), process=Process(100 + number, 5), started_at=T0)
        play.rows[number] = job
        play.scheduler.adopt(job, play.now)
    assert play.scheduler.unbooked == {"2.1"}
    play.arrive(a_job(3, "0.5"))
    play.tell(play.ended(1, 0))
    assert not play.scheduler.unbooked and play.state(3) is S.PENDING
    play.tell(play.ended(2, 0))
    assert play.state(3) is S.STARTING
