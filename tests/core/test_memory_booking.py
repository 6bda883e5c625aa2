"""Tests of jobs that book memory instead of a share.

The tests check the choice of the GPU, memory that is booked but not in use yet, and the memory that a retry books.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.admission import PASSING, Admission
from scheduler.core.gpu import BY_MEMORY, WHOLE, ResourceRequest
from scheduler.core.gpu_admission import NOTHING_FORBIDDEN, Thresholds
from scheduler.core.gpu_snapshot import GpuSnapshot
from scheduler.core.job import JobSpec, JobState
from scheduler.core.model_table import ModelTable, booking_memory, need_of
from scheduler.core.observations import Now, Readings
from scheduler.core.placement import Fleet
from scheduler.core.placement_class import PlacementClass
from scheduler.core.tenants import Tenant
from tests.builders import M0, OOM, T0, Play, a_gpu, a_job, a_policy
from tests.core.test_admission import TOTAL, Bench, a_process, a_tenant

MINIMUM = 6_000
SETTLE = 120.0
BOOKED = ResourceRequest(1, BY_MEMORY)


@pytest.fixture
def bench() -> Bench:
    """Return a Bench whose jobs book memory, and whose GPU 0 was read once while it was empty."""
    made = Bench(by_memory=True, settle_s=SETTLE, default_mib=MINIMUM)
    assert made.read(after=0.0) == NOTHING_FORBIDDEN
    return made


def free(bench: Bench) -> int:
    return bench.admission.free_mib(0)


# -- what is free -----------------------------------------------------------------------------------------


def test_s1_11_booked_memory_counts_as_used_until_the_settle_time_has_passed(bench: Bench) -> None:
    """S1.11: Booked memory counts as used until the settle time has passed since the job's start.

    After that, only the memory in use counts.
    """
    bench.read(1_000)
    assert free(bench) == TOTAL - 1_000
    bench.on = [a_tenant(1, BY_MEMORY, MINIMUM, started_at=None)]  # placed, but not started
    assert free(bench) == TOTAL - 1_000 - MINIMUM
    bench.on = [a_tenant(1, BY_MEMORY, MINIMUM, started_at=bench.wall)]
    ours = a_process(10, 500, owner="1.1")
    bench.read(1_500, ours)
    assert free(bench) == TOTAL - 1_000 - MINIMUM, "500 MiB of it are in use, the rest is still to come"
    bench.read(9_000, replace(ours, memory_mib=8_000))
    assert free(bench) == TOTAL - 9_000, "it uses more than it booked: that counts"
    bench.read(1_500, ours)
    bench.read(1_500, ours, after=SETTLE + 1)
    assert free(bench) == TOTAL - 1_500, "settled: what it uses is what it needs"


def test_s1_2_only_free_memory_limits_jobs_that_book_memory(bench: Bench) -> None:
    """S1.2: A job that books memory is limited only by the free memory of the GPU, not by thresholds or load."""
    for _ in range(3):
        assert bench.read(74_000, a_process(9, 73_000), load=100) == NOTHING_FORBIDDEN
    assert free(bench) == TOTAL - 74_000
    assert bench.admission.forbids(0, BY_MEMORY, WHOLE, MINIMUM) == NOTHING_FORBIDDEN
    bench.read(74_001, a_process(9, 73_001), load=100)
    verdict = bench.admission.forbids(0, BY_MEMORY, WHOLE, MINIMUM)
    assert verdict.code == "foreign" and "neither in use nor booked" in verdict.sentence, verdict
    bench.on = [a_tenant(1, BY_MEMORY, MINIMUM, started_at=bench.wall)]
    assert bench.admission.forbids(0, BY_MEMORY, WHOLE, MINIMUM).code == "no-room", "it may be ours that are in the way"


def test_a_job_that_uses_more_memory_than_it_booked_is_not_over_its_share(bench: Bench) -> None:
    bench.on = [a_tenant(1, BY_MEMORY, MINIMUM, started_at=bench.wall)]
    bench.read(60_800, a_process(10, 60_000, owner="1.1"))
    assert bench.card.overcommit == bench.card.overcommit_mib == 0 and bench.card.why_overcommit == NOTHING_FORBIDDEN
    assert bench.card.reason == ""


def test_a_gpu_with_unknown_memory_use_has_no_free_memory(bench: Bench) -> None:
    bench.read(None)
    assert free(bench) == 0 and bench.card.verdict.code == "unhealthy"
    bench.trouble()
    assert bench.card.verdict.code == "stale"


@given(
    used=st.integers(0, TOTAL),
    tenants=st.lists(
        st.tuples(
            st.one_of(st.just(MINIMUM), st.integers(0, TOTAL)), st.integers(0, TOTAL), st.booleans()
        ),  # booked, uses, settled
        max_size=5,
    ),
)
def test_free_memory_is_at_least_zero_and_at_most_what_the_driver_reports(
    used: int, tenants: list[tuple[int, int, bool]]
) -> None:
    bench = Bench(by_memory=True, settle_s=SETTLE, default_mib=MINIMUM)
    bench.on = [
        a_tenant(n, BY_MEMORY, booked, started_at=T0 - 2 * SETTLE if settled else T0)
        for n, (booked, _, settled) in enumerate(tenants, 1)
    ]
    own = [a_process(100 + n, uses, owner=f"{n}.1") for n, (_, uses, _) in enumerate(tenants, 1)]
    bench.read(used, *own, after=0.0)
    assert 0 <= free(bench) <= TOTAL - used
    if all((settled and booked == MINIMUM) or booked <= uses for booked, uses, settled in tenants):
        slack = sum(TOTAL * BY_MEMORY // WHOLE for _ in tenants)  # each booking includes one thousandth of the GPU
        assert free(bench) >= max(0, TOTAL - used - slack)


# -- choice of the GPU ------------------------------------------------------------------------------------


def a_fleet(*used: int, tenants: dict[int, list[Tenant]] | None = None) -> Fleet:
    """Return a fleet of GPUs. Each argument is the number of MiB that are in use on one GPU. Each GPU has TOTAL MiB."""
    gpus = [a_gpu(i, memory_mib=TOTAL) for i in range(len(used))]
    now = Now(T0, M0)
    fleet = Fleet(gpus)
    fleet.admission = Admission.of(gpus, Thresholds(by_memory=True, settle_s=SETTLE), now)
    fleet.admission.tenants = lambda gpu: (tenants or {}).get(gpu, [])
    told = tuple(GpuSnapshot(f"declared:{i}", i, "a card", TOTAL, mib, 0.0, processes=()) for i, mib in enumerate(used))
    fleet.admission.take(Readings(M0, told), now)
    return fleet


def wants(mib: int = MINIMUM, allowed: tuple[int, ...] | None = None) -> PlacementClass:
    return PlacementClass(BOOKED, allowed, mib)


@pytest.mark.parametrize(
    ("used", "kind", "gpus"),
    [
        ((500, 400, 700), wants(), (1,)),  # the GPU with the most free memory
        ((500, 500), wants(), (0,)),  # equal: the lowest id
        ((500, 400, 700), wants(allowed=(0, 2)), (0,)),
        ((75_000, 74_000), wants(), (1,)),  # exactly the minimum is free
        ((75_000, 74_001), wants(), None),
        ((75_000, 74_001), wants(1_000), (1,)),
    ],
    ids=str,
)
def test_s1_2_a_job_that_books_memory_gets_the_gpu_with_the_most_free_memory(
    used: tuple[int, ...], kind: PlacementClass, gpus: tuple[int, ...] | None
) -> None:
    """S1.2: A job that books memory gets the GPU with the most free memory. If this is not enough, the job waits."""
    fleet = a_fleet(*used)
    assert fleet.find(kind) == gpus
    if gpus is None:
        why = fleet.why_not(kind)
        assert why.code in PASSING and why.sentence.startswith("GPU 1 has 5.9 G"), why


def test_s1_11_each_job_counts_the_memory_booked_before_it_in_the_same_pass() -> None:
    """S1.11: In one pass, a job gets only memory that the jobs placed before it in this pass have not booked."""
    tenants: dict[int, list[Tenant]] = {0: [], 1: []}
    fleet = a_fleet(TOTAL - 20_000, TOTAL - 14_000, tenants=tenants)
    chosen = []
    while (gpus := fleet.find(wants())) is not None:
        chosen.append(gpus[0])
        tenants[gpus[0]].append(Tenant(f"{len(chosen)}.1", len(chosen), BY_MEMORY, MINIMUM, None))
        fleet.take(BOOKED, gpus, MINIMUM)
    assert chosen == [0, 0, 1, 0, 1], "20, 14, 14, 8, 8 GB were free on the one with the most"


def test_requested_memory_may_be_what_the_driver_needs_but_not_more_than_the_gpu_has() -> None:
    fleet = a_fleet(400)
    for need in ("0.001", "0.25"):
        assert fleet.find(PlacementClass(ResourceRequest.parse(need), None, TOTAL)) == (0,)
        assert fleet.find(PlacementClass(ResourceRequest.parse(need), None, TOTAL + 1)) is None


def test_a_whole_gpu_request_does_not_get_a_gpu_with_booked_memory() -> None:
    fleet = a_fleet(400)
    fleet.take(BOOKED, (0,), MINIMUM)
    assert fleet.find(PlacementClass(ResourceRequest(1, WHOLE))) is None


# -- amount of a booking ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "read", "need", "vram"),
    [
        (JobSpec(arguments=("x",)), True, "0.001", MINIMUM),
        (JobSpec(arguments=("x",)), False, "1", None),  # GPUs that are not read get one job each
        (JobSpec(arguments=("x",), gpus="0.5"), True, "0.5", None),  # the job asks for a share
        (JobSpec(arguments=("x",), gpus="0"), True, "0", None),
        (JobSpec(arguments=("x",), vram_mib=9_000), True, "0.001", 9_000),
        (JobSpec(arguments=("x",), on=(0,)), True, "1 by name", None),
    ],
    ids=str,
)
def test_a_job_books_its_memory_request_or_the_minimum(spec: JobSpec, read: bool, need: str, vram: int | None) -> None:
    booked = booking_memory(spec, MINIMUM, read=read)
    assert str(need_of(booked, ModelTable())[0]) == need and booked.vram_mib == vram
    assert booking_memory(spec, 0, read=read) is spec


def test_an_out_of_memory_retry_books_twice_the_memory_up_to_the_limit() -> None:
    policy = a_policy(thresholds=Thresholds(by_memory=True), oom_retries=9)
    play = Play(Fleet([a_gpu(memory_mib=20_000)]), policy=policy)
    play.scheduler.fleet.admission = Admission.of([a_gpu(memory_mib=20_000)], Thresholds(by_memory=True), play.now)

    def read() -> Readings:
        return Readings(play.mono + 1, (GpuSnapshot("declared:0", 0, "a card", 20_000, 300, 0.0, processes=()),))

    play.tell(read(), after=1.0)
    play.scheduler.fleet.admission.tenants = play.scheduler.tenants
    play.run(a_job(1, "0.001", vram_mib=MINIMUM))
    booked = []
    for _ in range(2):
        play.tell(play.ended(1, 1, failure=OOM))
        booked.append(play.job(1).spec.vram_mib)
        assert 1 in play.plan.respecs
        play.tell(read(), after=1.0)
        play.tell(play.began(1))
        assert play.state(1) is JobState.RUNNING
    play.tell(play.ended(1, 1, failure=OOM))
    assert booked == [12_000, 19_300] and play.state(1) is JobState.FAILED, "it had all there is"
    assert str(play.job(1).need) == "0.001" and len(play.job(1).notes) == 2


def test_a_request_of_a_thousandth_gets_the_best_fit_if_jobs_book_shares() -> None:
    """If jobs book shares, the request 0.001 gets the GPU with the best fit, not the one with the most free memory."""
    fleet = Fleet([a_gpu(index, memory_mib=TOTAL) for index in range(2)])
    fleet.admission = Admission.of(fleet.gpus.values(), Thresholds(), Now(T0, M0))
    used = [GpuSnapshot(gpu.uuid, gpu.index, "", TOTAL, 1_000 * (1 + gpu.index), 0.0) for gpu in fleet.gpus.values()]
    fleet.admission.take(Readings(M0, tuple(used)), Now(T0, M0))
    fleet.take(ResourceRequest(1, 500), (1,))
    for vram_mib in (0, 10):
        assert fleet.find(PlacementClass(BOOKED, None, vram_mib)) == (1,)
