"""Tests of the ledger: where a request fits best, why a request fits nowhere, and that no GPU is over-booked."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.gpu import ANY_DEVICE, WHOLE, ResourceRequest, ids_of, mask_of
from scheduler.core.job import Reason
from scheduler.core.placement import Fleet
from scheduler.core.placement_class import PlacementClass
from scheduler.core.topology import Link
from tests.builders import a_gpu, a_kind, an_instance, some_gpus
from tests.core.slow_twin import SlowFleet


def a_fleet(*servers: int, free: dict[int, int] | None = None, paused: tuple[int, ...] = (), slots: int = 8) -> Fleet:
    """Return a fleet. Each positional argument is the number of GPUs of one server.

    ``free``: the free thousandths of some GPUs; the other GPUs are free. ``paused``: ids of paused GPUs; ``slots``: the
    number of slots.
    """
    fleet = Fleet(some_gpus(*servers), slots)
    for gpu, parts in (free or {}).items():
        if parts < WHOLE:
            fleet.take(ResourceRequest(1, WHOLE - parts), (gpu,))
    fleet.paused_mask = mask_of(paused)
    return fleet


@pytest.mark.parametrize(
    ("servers", "free", "kind", "gpus"),
    [
        # a share goes to the GPU with the least free thousandths that still hold it
        ((4,), {}, a_kind("0.5"), (0,)),
        ((4,), {2: 500}, a_kind("0.5"), (2,)),
        ((4,), {1: 700, 2: 600, 3: 400}, a_kind("0.5"), (2,)),
        ((4,), {0: 300, 1: 300, 2: 300, 3: 300}, a_kind("0.5"), None),
        ((4,), {0: 499, 1: 500}, a_kind("0.5"), (1,)),
        ((4,), {0: 0, 1: 999}, a_kind("1"), (2,)),
        # ties: the server with the fewest whole free GPUs, then the lowest id
        ((4, 4), {0: 500, 4: 500, 5: 0}, a_kind("0.5"), (4,)),
        ((4, 4), {0: 500, 4: 500}, a_kind("0.5"), (0,)),
        ((4, 2), {}, a_kind("0.5"), (4,)),
        ((2, 2), {}, a_kind("1"), (0,)),
        # a wide job: all GPUs on one server, the one with the fewest whole free GPUs that has enough
        ((4, 4), {}, a_kind("2"), (0, 1)),
        ((4, 4), {4: 0, 5: 0}, a_kind("2"), (6, 7)),
        ((4, 4), {4: 0, 5: 0, 6: 0}, a_kind("2"), (0, 1)),
        ((4, 4), {0: 999, 4: 999}, a_kind("4"), None),
        ((2, 2), {}, a_kind("4"), None),
        ((8,), {}, a_kind("8"), (0, 1, 2, 3, 4, 5, 6, 7)),
        ((4,), {1: 0}, a_kind("3"), (0, 2, 3)),
        # shares of several GPUs: on the server, the GPUs with the least free thousandths
        ((4,), {2: 500, 3: 600}, a_kind("2x0.5"), (2, 3)),
        ((4,), {3: 500}, a_kind("2x0.5"), (0, 3)),
        ((2, 2), {0: 400, 2: 400}, a_kind("2x0.5"), None),
        ((2, 2), {0: 400}, a_kind("2x0.5"), (2, 3)),
        # only allowed GPUs
        ((4,), {}, a_kind("0.5", (2, 3)), (2,)),
        ((4,), {0: 500}, a_kind("0.5", (3,)), (3,)),
        ((4,), {3: 0}, a_kind("0.5", (3,)), None),
        ((4,), {}, a_kind("2", (1, 3)), (1, 3)),
        ((4, 4), {}, a_kind("2", (3, 4)), None),
        ((4,), {}, a_kind("0.5", (9,)), None),
        # no GPU exists, or none is needed
        ((), {}, a_kind("1"), None),
        ((), {}, a_kind("0"), ()),
        ((2,), {0: 0, 1: 0}, a_kind("0"), ()),
    ],
)
def test_a_request_is_placed_on_the_gpus_where_it_fits_best(
    servers: tuple[int, ...], free: dict[int, int], kind: PlacementClass, gpus: tuple[int, ...] | None
) -> None:
    """S3.15: A request is placed on the GPUs where it fits best."""
    assert a_fleet(*servers, free=free).find(kind) == gpus


def test_two_requests_for_half_a_gpu_share_one_gpu_and_a_third_does_not_fit() -> None:
    """S3.14: Two requests for half a GPU fit on one GPU, and a third such request does not fit."""
    fleet, half = a_fleet(1), a_kind("0.5")
    fleet.take(half.need, (0,))
    assert fleet.find(half) == (0,)
    fleet.take(half.need, (0,))
    assert fleet.find(half) is None and fleet.free[0] == 0
    fleet.give_back(half.need, (0,))
    fleet.give_back(half.need, (0,))
    assert fleet.free[0] == WHOLE


def test_no_request_is_placed_on_a_paused_gpu() -> None:
    """S3.30: No request is placed on a paused GPU."""
    fleet = a_fleet(4, paused=(0, 2))
    assert fleet.find(a_kind("0.5")) == (1,)
    assert fleet.find(a_kind("2")) == (1, 3)
    assert fleet.find(a_kind("3")) is None
    assert fleet.find(a_kind("0.5", (0, 2))) is None


def test_requests_without_a_gpu_are_placed_in_separate_slots() -> None:
    fleet, nothing = a_fleet(1, slots=2), a_kind("0")
    for _ in range(2):
        assert fleet.find(nothing) == ()
        fleet.take(nothing.need, ())
    assert fleet.find(nothing) is None
    assert fleet.free[0] == WHOLE
    assert fleet.why_not(nothing).code == "no-room"
    fleet.give_back(nothing.need, ())
    assert fleet.find(nothing) == ()


def test_a_retired_gpu_can_be_booked_but_gets_no_new_job() -> None:
    fleet = Fleet(some_gpus(2), retired=(5,))
    assert not fleet.manages(5)
    fleet.take(ResourceRequest(1, 500), (5,))
    assert fleet.find(a_kind("1", (5,))) is None
    assert fleet.find(a_kind("3")) is None
    fleet.give_back(ResourceRequest(1, 500), (5,))
    assert fleet.find(a_kind("0.5")) == (0,)
    assert fleet.can_ever_hold(a_kind("1", (5,)))


@pytest.mark.parametrize(
    ("need", "gpus"),
    [
        (ResourceRequest(1, 501), (0,)),
        (ResourceRequest(2, 500), (0, 1)),
        (ResourceRequest(1, 500), (7,)),
        (ResourceRequest(2, 100), (2,)),
        (ResourceRequest(2, 100), (2, 2)),
    ],
)
def test_a_booking_that_does_not_fit_is_refused_without_a_change(need: ResourceRequest, gpus: tuple[int, ...]) -> None:
    fleet = a_fleet(3, free={0: 500, 1: 400})
    before = dict(fleet.free)
    with pytest.raises(ValueError, match="does not fit"):
        fleet.take(need, gpus)
    assert fleet.free == before
    assert fleet.find(a_kind("0.5")) == (0,)


def test_freeing_what_is_not_booked_is_refused_without_a_change() -> None:
    fleet = a_fleet(2, free={0: 500})
    before = dict(fleet.free)
    with pytest.raises(ValueError, match="freed twice"):
        fleet.give_back(ResourceRequest(2, 500), (0, 1))
    assert fleet.free == before


def test_requested_memory_of_all_jobs_stays_within_the_memory_of_the_gpu() -> None:
    fleet = Fleet(some_gpus(2, memory_mib=24_000))
    big = a_kind("0.3", vram_mib=18_000)
    fleet.take(big.need, (0,), big.vram_mib)
    assert fleet.find(a_kind("0.3")) == (0,)
    assert fleet.find(big) == (1,)
    fleet.take(big.need, (1,), big.vram_mib)
    assert fleet.find(big) is None
    assert fleet.find(a_kind("0.3", vram_mib=6_000)) == (0,)
    assert "18000 MiB" in fleet.why_not(big).sentence
    fleet.give_back(big.need, (1,), big.vram_mib)
    assert fleet.find(big) == (1,)


def test_a_gpu_of_unknown_memory_size_accepts_any_memory_request() -> None:
    assert a_fleet(1).find(a_kind("0.5", vram_mib=10**6)) == (0,)


# -- slots and GPUs by name --------------------------------------------------------------------------------


def of_slots(slots: int) -> PlacementClass:
    return PlacementClass(ResourceRequest.of_slots(slots))


def by_name(*gpus: int) -> PlacementClass:
    return PlacementClass(ResourceRequest(len(gpus), 0), gpus)


@pytest.mark.parametrize(
    ("slots", "used", "wanted", "fits", "code", "sentence"),
    [
        (4, 0, 4, True, "", ""),
        (4, 3, 1, True, "", ""),
        (4, 3, 2, False, "no-room", "needs 2 slots; 1 of 4 is free"),
        (4, 4, 1, False, "no-room", "all 4 slots for jobs without a GPU are in use"),
        (4, 2, 3, False, "no-room", "needs 3 slots; 2 of 4 are free"),
        (4, 0, 5, False, "never", "needs 5 slots, but there are only 4"),
        (1, 0, 2, False, "never", "needs 2 slots, but there are only 1"),
    ],
)
def test_a_job_without_gpus_is_placed_if_enough_slots_are_free(
    slots: int, used: int, wanted: int, fits: bool, code: str, sentence: str
) -> None:
    """S4.19: A job without GPUs is placed if enough slots are free. Otherwise the reason names the slots."""
    fleet = a_fleet(1, slots=slots)
    for _ in range(used):
        fleet.take(of_slots(1).need, ())
    assert (fleet.find(of_slots(wanted)) == ()) == fits
    if not fits:
        reason = fleet.why_not(of_slots(wanted))
        assert (reason.code, reason.sentence) == (code, sentence)


def test_running_jobs_keep_their_slots_if_the_number_of_slots_is_lowered() -> None:
    """S4.19: Running jobs keep their slots when `-S` lowers the number of slots."""
    fleet = a_fleet(1, slots=4)
    for _ in range(3):
        fleet.take(of_slots(1).need, ())
    fleet.resize(2)
    assert (fleet.cpu_slots, fleet.cpu_free) == (2, -1)
    assert fleet.find(of_slots(1)) is None
    assert fleet.why_not(of_slots(2)).sentence == "needs 2 slots; 0 of 2 are free"
    assert fleet.why_not(of_slots(3)).code == "never"
    fleet.give_back(of_slots(1).need, ())
    assert fleet.find(of_slots(1)) is None, "two run, and two may"
    fleet.give_back(of_slots(1).need, ())
    assert fleet.find(of_slots(1)) == ()
    fleet.resize(5)
    assert fleet.find(of_slots(4)) == () and fleet.can_ever_hold(of_slots(5)) == ""


@given(st.lists(st.tuples(st.sampled_from(["take", "take", "give", "resize"]), st.integers(1, 6)), max_size=60))
def test_slots_are_overbooked_only_after_their_number_was_lowered(steps: list[tuple[str, int]]) -> None:
    """S4.19: More slots than exist are in use only if the number of slots was lowered."""
    fleet, running = a_fleet(1, slots=4), []
    slots = 4
    for what, number in steps:
        before = sum(running)
        if what == "take":
            found = fleet.find(of_slots(number))
            assert (found == ()) == (before + number <= slots)
            assert found is not None or fleet.why_not(of_slots(number)).sentence
            if found is not None:
                fleet.take(of_slots(number).need, found)
                running.append(number)
        elif what == "give" and running:
            fleet.give_back(of_slots(running.pop(number % len(running))).need, ())
        elif what == "resize":
            fleet.resize(number)
            slots = number
        assert fleet.cpu_free == slots - sum(running)
        assert sum(running) <= max(slots, before), "more run than may"
    for number in running:
        fleet.give_back(of_slots(number).need, ())
    assert fleet.cpu_free == fleet.cpu_slots == slots


@pytest.mark.parametrize(
    ("free", "paused", "named", "code"),
    [
        ({}, (), (0,), ""),
        ({}, (), (0, 3), ""),
        ({0: 0, 3: 0}, (), (0, 3), ""),  # other jobs on the GPUs do not matter
        ({}, (1,), (0, 3), ""),
        ({}, (3,), (0, 3), "paused"),
        ({}, (0, 3), (0, 3), "paused"),
        ({}, (), (0, 4), "never"),
        ({}, (), (9,), "never"),
    ],
)
def test_a_job_gets_the_gpus_that_it_names_even_if_they_are_in_use(
    free: dict[int, int], paused: tuple[int, ...], named: tuple[int, ...], code: str
) -> None:
    """S4.31: A job gets the GPUs that it names, even if they are in use.

    It waits if one of these GPUs is paused or not managed.
    """
    fleet = a_fleet(2, 2, free=free, paused=paused)
    assert fleet.find(by_name(*named)) == (None if code else named)
    if code:
        assert fleet.why_not(by_name(*named)).code == code
    else:
        fleet.take(ResourceRequest(len(named), 0), named)
        assert fleet.find(by_name(*named)) == named, "also when another such job is there already"


def test_the_reason_names_the_paused_gpu_that_the_job_named() -> None:
    """S4.31: If a job waits because one of the GPUs that it named is paused, the reason names this GPU."""
    sentence = a_fleet(3, paused=(2,)).why_not(by_name(0, 2)).sentence
    assert sentence == "GPU 2, which the job named, is paused"
    assert a_fleet(3, paused=(0, 2)).why_not(by_name(0, 2)).code == "paused"


def test_a_claimed_gpu_gets_no_other_job_until_the_last_claim_has_ended() -> None:
    """S4.32: If jobs name a GPU, the GPU gets no other job until the last of these jobs has ended."""
    fleet = a_fleet(2)
    for _ in range(2):
        fleet.take(ResourceRequest(1, 0), (0,))
    assert fleet.free == {0: WHOLE, 1: WHOLE}, "nothing of it is booked"
    assert fleet.find(a_kind("0.1")) == (1,) and fleet.find(a_kind("0.1", (0,))) is None
    assert fleet.find(a_kind("2")) is None and fleet.find(by_name(0, 1)) == (0, 1)
    for kind in (a_kind("2"), a_kind("0.1", (0,))):
        reason = fleet.why_not(kind)
        assert (reason.code, reason.sentence) == (
            "claimed",
            "no other job starts on GPU 0: a running job named it (on=)",
        )
    fleet.give_back(ResourceRequest(1, 0), (0,))
    assert fleet.find(a_kind("2")) is None, "the other one is still there"
    fleet.give_back(ResourceRequest(1, 0), (0,))
    assert fleet.find(a_kind("2")) == (0, 1) and fleet.claims == {}


def test_the_reason_names_each_claimed_gpu_that_prevents_the_placement() -> None:
    """S4.32: The reason to wait names each claimed GPU that prevents the placement. It names no other claimed GPU."""
    fleet = a_fleet(3)
    fleet.take(ResourceRequest(2, 0), (0, 2))
    assert (
        fleet.why_not(a_kind("2")).sentence == "no other job starts on GPUs 0,2: a running job named each of them (on=)"
    )
    assert fleet.why_not(a_kind("2", (0, 1))).sentence == "no other job starts on GPU 0: a running job named it (on=)"
    full = a_fleet(2, free={1: 0})
    full.take(ResourceRequest(1, 0), (0,))
    assert full.why_not(a_kind("2")).code == "no-wide-room", "without the claim there would be no room either"


# -- reservations ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("servers", "free", "paused", "claimed", "kind", "kept"),
    [
        # the GPUs that lack the fewest thousandths
        ((4,), {0: 0, 1: 300, 2: 600, 3: 0}, (), (), a_kind("1"), (2,)),
        ((4,), {0: 0, 1: 300, 2: 600, 3: 0}, (), (), a_kind("2"), (1, 2)),
        ((4,), {0: 0, 1: 0, 2: 0, 3: 0}, (), (), a_kind("2"), (0, 1)),
        ((4,), {0: 0, 1: 300, 2: 600, 3: 0}, (), (), a_kind("2", (0, 1, 3)), (0, 1)),
        ((4,), {0: 0, 1: 300, 2: 600, 3: 0}, (2,), (), a_kind("1"), (1,)),
        ((4,), {0: 0, 1: 300, 2: 0, 3: 0}, (), (1,), a_kind("1"), (0,)),  # a claimed GPU only if it is needed
        ((2,), {0: 0}, (), (0,), a_kind("2"), (0, 1)),
        # on the server that lacks the fewest thousandths
        ((2, 2), {0: 0, 1: 0, 2: 500, 3: 500}, (), (), a_kind("2"), (2, 3)),
        ((2, 2), {0: 0, 2: 400, 3: 400}, (), (), a_kind("2"), (0, 1)),  # server 0 lacks 1000, server 1 lacks 1200
        ((1, 3), {1: 0, 2: 0, 3: 0}, (), (), a_kind("2"), (1, 2)),
        ((4,), {0: 200, 1: 300, 2: 100}, (3,), (), a_kind("2x0.4"), (0, 1)),
        # nothing is reserved for a request that cannot be placed
        ((2, 2), {0: 0, 2: 0}, (), (), a_kind("3"), ()),
        ((2,), {0: 0}, (1,), (), a_kind("2"), ()),
        ((2,), {0: 0}, (), (), a_kind("1", (7,)), ()),
    ],
)
def test_the_gpus_that_lack_the_least_are_reserved_for_an_overtaken_job(
    servers: tuple[int, ...], free: dict[int, int], paused: tuple[int, ...], claimed: tuple[int, ...], kind: PlacementClass,
    kept: tuple[int, ...],
) -> None:  # fmt: skip
    """S4.36: For an overtaken job, those GPUs are reserved on which the least room is missing.

    No other job gets them.
    """
    fleet = a_fleet(*servers, free=free, paused=paused)
    for gpu in claimed:
        fleet.take(ResourceRequest(1, 0), (gpu,))
    fleet.reserve(5, kind)
    assert [one.mask for one in fleet.reserved] == ([mask_of(kept)] if kept else [])
    assert not set(fleet.find(a_kind("0.001")) or ()) & set(kept)
    fleet.open_to_all()
    assert fleet.kept_mask == mask_of(claimed)


def test_two_overtaken_jobs_get_reservations_of_different_gpus() -> None:
    """S4.36: Two jobs that were overtaken too often get reservations of different GPUs."""
    fleet = a_fleet(4, free=dict.fromkeys(range(4), 500))
    fleet.reserve(5, a_kind("2"))
    fleet.reserve(6, a_kind("1"))
    assert [one.mask for one in fleet.reserved] == [0b0011, 0b0100]
    assert fleet.find(a_kind("0.5")) == (3,)
    reason = fleet.why_not(a_kind("0.5", (0, 1)))
    assert (reason.code, reason.sentence) == (
        "reserved",
        "GPUs 0,1 are reserved for job 5, which was overtaken too often",
    )
    assert fleet.why_not(a_kind("0.5", (2,))).sentence == "GPU 2 is reserved for job 6, which was overtaken too often"
    assert fleet.find(by_name(0, 1)) == (0, 1), "who names them waits for nobody"


def test_the_reason_of_a_job_with_a_reservation_does_not_name_this_reservation() -> None:
    """S4.36: If GPUs are reserved for a job, its reason to wait names what the job lacks, never its own reservation."""
    fleet = a_fleet(2)
    fleet.take(ResourceRequest(1, 0), (0,))
    wide = a_kind("2")
    fleet.reserve(5, wide)
    assert (fleet.why_not(wide).code, fleet.why_not(a_kind("0.5", (1,))).code) == ("claimed", "reserved")


def test_free_slots_are_reserved_for_the_first_overtaken_job_without_gpus() -> None:
    """S4.36: Free slots are reserved for only one of the jobs without GPUs that were overtaken too often.

    This is the job for which `reserve` is called first.
    """
    fleet = a_fleet(1, slots=4)
    fleet.take(of_slots(2).need, ())
    fleet.reserve(0, of_slots(3))  # 0 is a valid job id
    fleet.reserve(6, of_slots(4))
    assert fleet.find(of_slots(1)) is None
    reason = fleet.why_not(of_slots(1))
    assert (reason.code, reason.sentence) == (
        "reserved", "the next free slots are reserved for job 0, which was overtaken too often",
    )  # fmt: skip
    assert fleet.why_not(of_slots(3)).sentence == "needs 3 slots; 2 of 4 are free"
    assert fleet.find(a_kind("1")) == (0,), "GPUs are another matter"
    fleet.open_to_all()
    assert fleet.find(of_slots(1)) == ()


def test_no_slot_is_reserved_for_a_job_that_needs_more_slots_than_exist() -> None:
    """S4.36: If `-S` was lowered, a job may need more slots than exist. No slot is reserved for such a job."""
    fleet = a_fleet(1, slots=4)
    fleet.resize(2)
    fleet.reserve(5, of_slots(3))
    assert fleet.find(of_slots(2)) == ()


def test_no_gpu_is_reserved_if_a_needed_gpu_is_gone() -> None:
    """S4.36: If a GPU is gone or unhealthy, too few GPUs may remain for a job. Then no GPU is reserved for this job."""
    fleet = a_fleet(3, free={2: 0})
    fleet.admission.blocked_mask = fleet.admission.lasting_mask = 0b001
    fleet.reserve(5, a_kind("3"))
    assert fleet.reserved == [] and fleet.find(a_kind("1")) == (1,)
    fleet.reserve(5, a_kind("2"))
    assert [one.mask for one in fleet.reserved] == [0b110]


@pytest.mark.parametrize(
    ("waits", "given", "gpus", "competes"),
    [
        (a_kind("2"), ResourceRequest(1, 500), (0,), True),
        (a_kind("2", (2, 3)), ResourceRequest(1, 500), (0,), False),
        (a_kind("2", (2, 3)), ResourceRequest(2, 1000), (1, 2), True),
        (a_kind("2"), ResourceRequest(1, 0), (0,), True),  # GPUs by name
        (a_kind("2"), ResourceRequest(0, 0), (), False),
        (a_kind("0"), ResourceRequest(0, 0), (), True),
        (of_slots(3), ResourceRequest(0, 2), (), True),
        (of_slots(3), ResourceRequest(1, 1000), (0,), False),
    ],
)
def test_an_assignment_competes_if_it_takes_what_a_waiting_job_could_use(
    waits: PlacementClass, given: ResourceRequest, gpus: tuple[int, ...], competes: bool
) -> None:
    """S4.36: A start competes with a waiting job if it takes GPUs or slots that the waiting job could use."""
    assert a_fleet(4).competes(waits, given, gpus) == competes


# -- reasons to wait ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("servers", "free", "paused", "kind", "code", "sentence"),
    [
        (
            (3,),
            {0: 100, 1: 200, 2: 300},
            (),
            a_kind("0.5"),
            "no-room",
            "needs 0.5 of one GPU; the largest free share of an allowed GPU is 0.3 (GPU 2)",
        ),
        (
            (2,),
            {0: 900, 1: 0},
            (),
            a_kind("1"),
            "no-room",
            "needs one whole GPU; the largest free share of an allowed GPU is 0.9 (GPU 0)",
        ),
        (
            (2,),
            {0: 0},
            (1,),
            a_kind("1"),
            "no-room",
            "needs one whole GPU; the largest free share of an allowed GPU is 0 (GPU 0); paused: GPU 1",
        ),
        (
            (4,),
            {0: 0, 1: 0},
            (),
            a_kind("4"),
            "no-wide-room",
            "needs 4 whole GPUs of one server; 2 are free",
        ),
        ((2, 2), {0: 0, 2: 0}, (), a_kind("2"), "no-wide-room", "needs 2 whole GPUs of one server; 1 is free"),
        (
            (8,),
            {0: 0, 1: 0, 2: 0, 3: 0},
            (),
            a_kind("0.5", (0, 1, 2, 3)),
            "allowed-busy",
            "would fit on GPU 4, but only GPUs 0-3 are allowed",
        ),
        ((2,), {0: 0}, (), a_kind("1", (0,)), "allowed-busy", "would fit on GPU 1, but only GPU 0 is allowed"),
        ((4,), {}, (0, 1), a_kind("1", (0, 1)), "paused", "its GPUs 0,1 are paused"),
        ((4,), {}, (2,), a_kind("1", (2,)), "paused", "its GPU 2 is paused"),
        ((2,), {}, (0, 1), a_kind("1"), "paused", "its GPUs 0,1 are paused"),
        ((2,), {}, (), a_kind("3"), "never", "needs 3 whole GPUs of one server, but only 2 GPUs are managed"),
        ((2,), {}, (), a_kind("1", (7,)), "never", "GPU 7 is not managed here (managed: 0,1)"),
    ],
)
def test_the_reason_names_the_first_rule_that_fails_with_its_values(
    servers: tuple[int, ...],
    free: dict[int, int],
    paused: tuple[int, ...],
    kind: PlacementClass,
    code: str,
    sentence: str,
) -> None:
    reason = a_fleet(*servers, free=free, paused=paused).why_not(kind)
    assert (reason.code, reason.sentence) == (code, sentence)


def test_the_reason_of_a_wide_job_that_lacks_memory_names_the_memory() -> None:
    fleet = Fleet(some_gpus(2, memory_mib=24_000))
    for gpu in (0, 1):
        fleet.take(ResourceRequest(1, 100), (gpu,), 20_000)
    wide = a_kind("2x0.5", vram_mib=10_000)
    assert fleet.find(wide) is None
    assert "10000 MiB" in fleet.why_not(wide).sentence


# -- requests that can never run ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("servers", "kind", "says"),
    [
        ((2,), a_kind("1"), ""),
        ((2,), a_kind("2"), ""),
        ((2,), a_kind("2x0.5", (0, 1)), ""),
        ((), a_kind("0"), ""),
        ((), a_kind("0", (7,)), ""),
        ((2,), a_kind("3"), "only 2 GPUs are managed"),
        ((2, 2), a_kind("3"), "at most 2 GPUs of one server are managed"),
        ((), a_kind("1"), "no GPU is managed"),
        ((4,), a_kind("2", (1,)), "only GPU 1 is allowed"),
        ((2, 2), a_kind("2", (1, 2)), "no server has more than 1 of the allowed GPUs 1,2"),
        ((2,), a_kind("1", (2,)), "GPU 2 is not managed here (managed: 0,1)"),
        ((2,), a_kind("1", (1, 2)), "GPU 2 is not managed here"),
        ((), a_kind("1", (0,)), "GPU 0 is not managed here (managed: none)"),
        ((2, 2), by_name(1, 2), ""),  # GPUs by name may be on two servers
        ((2,), by_name(0, 7), "GPU 7 is not managed here (managed: 0,1)"),
        ((), by_name(0), "GPU 0 is not managed here (managed: none)"),
        ((2,), of_slots(8), ""),
        ((2,), of_slots(9), "needs 9 slots, but there are only 8"),
    ],
)
def test_an_impossible_request_is_recognized_at_once(servers: tuple[int, ...], kind: PlacementClass, says: str) -> None:
    said = a_fleet(*servers).can_ever_hold(kind)
    assert says in said and bool(said) == bool(says)


def test_a_request_for_more_memory_than_any_allowed_gpu_has_is_recognized_at_once() -> None:
    gpus = [replace(gpu, memory_mib=size) for gpu, size in zip(some_gpus(2), (24_000, 80_000), strict=True)]
    fleet = Fleet(gpus)
    assert fleet.can_ever_hold(a_kind("1", vram_mib=80_000)) == ""
    assert (
        fleet.can_ever_hold(a_kind("1", vram_mib=80_001))
        == "needs 80001M on a GPU; the largest GPU has 78.1 GiB (80000 MiB)"
    )
    assert (
        fleet.can_ever_hold(a_kind("1", (0,), vram_mib=30_000))
        == "needs 30000M on a GPU; the largest allowed GPU has 23.4 GiB (24000 MiB)"
    )


def test_a_wide_request_for_which_too_few_gpus_have_the_memory_is_recognized_at_once() -> None:
    gpus = [replace(gpu, memory_mib=size) for gpu, size in zip(some_gpus(2), (24_000, 80_000), strict=True)]
    fleet = Fleet(gpus)
    wide = a_kind("2", vram_mib=40_000)
    assert fleet.find(wide) is None
    told = "needs 40000M on each of 2 GPUs of one server, but at most 1 GPU of one server has it"
    assert fleet.can_ever_hold(wide) == told


@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from([16_000, 24_000, None])), max_size=10),
    st.sampled_from(["0", "0.3", "1", "2", "2x0.5", "4", "8"]),
    st.one_of(st.none(), st.sets(st.integers(0, 9), min_size=1)),
    st.sampled_from([0, 0, 16_000, 20_000, 30_000]),
)
def test_exactly_the_requests_that_fit_an_empty_machine_are_possible(
    machine: list[tuple[int, int | None]], need: str, allowed: set[int] | None, vram_mib: int
) -> None:
    fleet = Fleet([a_gpu(i, server=server, memory_mib=memory) for i, (server, memory) in enumerate(machine)])
    kind = a_kind(need, None if allowed is None else sorted(allowed), vram_mib)
    never = fleet.can_ever_hold(kind)
    unmanaged = kind.need.count and any(not fleet.manages(gpu) for gpu in allowed or ())
    assert bool(never) == (fleet.find(kind) is None or bool(unmanaged))


# -- comparison with the slow scheduler --------------------------------------------------------------------

NEEDS = ("0", "0.001", "0.1", "0.25", "0.3334", "0.5", "0.75", "1", "2", "4", "8", "2x0.5", "3x0.25", "2x0.9")


@st.composite
def machines(draw: st.DrawFn) -> list[tuple[int, int | None]]:
    """Return (server, MiB of memory) of each GPU. The ids of the GPUs of one server need not be consecutive."""
    servers = draw(st.lists(st.integers(0, 3), min_size=1, max_size=12))
    known = draw(st.booleans())
    return [(server, draw(st.sampled_from([16_000, 24_000])) if known else None) for server in servers]


@st.composite
def kinds(draw: st.DrawFn) -> PlacementClass:
    form = draw(st.sampled_from(["shares"] * 4 + ["slots", "by name", "instance", "memory"]))
    if form == "instance":
        return a_kind(draw(st.sampled_from(["mig-1g.10gb", "mig-3g.40gb"])))
    if form == "memory":
        parts, mib = draw(st.sampled_from([(300, 6_000), (WHOLE, 16_000)]))
        return PlacementClass(ResourceRequest(1, parts, ANY_DEVICE), None, mib)
    if form == "slots":
        return PlacementClass(ResourceRequest.of_slots(draw(st.integers(1, 4))))
    if form == "by name":
        named = draw(st.sets(st.integers(0, 11), min_size=1, max_size=3))
        return PlacementClass(ResourceRequest(len(named), 0), tuple(sorted(named)))
    allowed = draw(st.one_of(st.none(), st.sets(st.integers(0, 11), min_size=1, max_size=6)))
    return a_kind(
        draw(st.sampled_from(NEEDS)),
        None if allowed is None else sorted(allowed),
        draw(st.sampled_from([0, 0, 6_000, 20_000])),
        draw(st.sampled_from(["", "", "", "nvlink", "numa"])),
    )


@given(
    machines(),
    st.lists(st.tuples(kinds(), st.integers(0, 99)), max_size=40),
    st.lists(st.sampled_from(Link), max_size=28),
    st.dictionaries(st.integers(0, 11), st.sampled_from(["1g.10gb", "3g.40gb"]), max_size=4),
)
def test_find_agrees_with_a_scan_of_all_gpus(
    machine: list[tuple[int, int | None]],
    steps: list[tuple[PlacementClass, int]],
    links: list[Link],
    profiles: dict[int, str],
) -> None:
    """`find` gives the GPUs that a search of all sets gives; so do links, on servers with so few GPUs that all are compared."""
    joined = some_gpus(len(machine), links=links if len(machine) <= 8 else ())
    gpus = [
        replace(gpu, server=server, memory_mib=memory, profile=profiles.get(gpu.index, ""))
        for gpu, (server, memory) in zip(joined, machine, strict=True)
    ]
    fleet, twin = Fleet(gpus, 2), SlowFleet(gpus, 2)
    booked: list[tuple[PlacementClass, tuple[int, ...]]] = []
    for kind, chance in steps:
        if chance % 7 == 0:
            twin.paused ^= {chance % len(gpus)}
            fleet.paused_mask = mask_of(twin.paused)
        if chance % 3 == 0 and booked:
            old, where = booked.pop(chance % len(booked))
            fleet.give_back(old.need, where, old.vram_mib)
            twin.change(old.need, where, old.vram_mib, +1)
        found = fleet.find(kind)
        assert found == twin.find(kind)
        if found is not None:
            assert kind.need.by_name or not set(found) & set(fleet.claims), "put on a GPU that others named"
            fleet.take(kind.need, found, kind.vram_mib)
            twin.change(kind.need, found, kind.vram_mib, -1)
            booked.append((kind, found))
            assert not twin.paused & set(found)
        else:
            assert fleet.why_not(kind).sentence
            assert "starts shortly" not in fleet.why_not(kind).sentence
        assert fleet.free == twin.free and fleet.memory_free == twin.memory
        assert set(fleet.claims) == set(twin.claims) and 0 <= fleet.cpu_free == twin.cpu_free
    for old, where in booked:
        fleet.give_back(old.need, where, old.vram_mib)
    fleet.paused_mask = 0
    fresh = Fleet(gpus, 2)
    assert not fleet.claims
    assert (fleet.free, fleet.memory_free, fleet.cpu_free) == (fresh.free, fresh.memory_free, fresh.cpu_free)
    for kind, _ in steps:
        assert fleet.find(kind) == fresh.find(kind)


# -- links ----------------------------------------------------------------------------------------------------------

TWO_PAIRS = [Link.NVLINK, Link.SYSTEM, Link.SYSTEM, Link.SYSTEM, Link.SYSTEM, Link.NVLINK]  # 0 with 1, 2 with 3
PAIRS_OF_A_CPU = [Link.NVLINK, Link.NUMA, Link.NUMA, Link.NUMA, Link.NUMA, Link.NVLINK]


def a_linked_fleet(*busy: int, links: list[Link] = TWO_PAIRS, servers: tuple[int, ...] = (4,)) -> Fleet:
    fleet = Fleet(some_gpus(*servers, links=links))
    for gpu in busy:
        fleet.take(ResourceRequest(1, WHOLE), (gpu,))
    return fleet


@pytest.mark.parametrize(
    ("busy", "kind", "gpus"),
    [
        ((), a_kind("2"), (0, 1)),
        ((0,), a_kind("2"), (2, 3)),
        ((0, 2), a_kind("2"), (1, 3)),  # only a preference
        ((0, 2), a_kind("2", link="nvlink"), None),
        ((0,), a_kind("2", link="nvlink"), (2, 3)),
        ((), a_kind("2", (1, 2, 3), link="nvlink"), (2, 3)),
        ((), a_kind("1", link="nvlink"), (0,)),  # no effect
        ((0, 2), a_kind("2x0.5", link="pcie"), None),
    ],
)
def test_linked_gpus_are_preferred_and_with_link_they_are_required(
    busy: tuple[int, ...], kind: PlacementClass, gpus: tuple[int, ...] | None
) -> None:
    assert a_linked_fleet(*busy).find(kind) == gpus


def test_the_reason_names_the_largest_group_of_linked_gpus() -> None:
    fleet, kind = a_linked_fleet(0, 2), a_kind("2", link="nvlink")
    assert fleet.why_not(kind) == Reason(
        "no-link", "needs 2 GPUs joined by NVLink (link); the largest free group has 1 (GPU 1)"
    )
    fleet.paused_mask = 1 << 3
    assert fleet.why_not(kind).code == "no-wide-room", "one GPU is free: links are not the cause"
    fleet = a_linked_fleet(0)
    fleet.paused_mask = 1 << 3
    assert fleet.why_not(kind).sentence == (
        "needs 2 GPUs joined by NVLink (link); the largest free group has 1 (GPU 1); paused: GPU 3"
    )


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (a_kind("3", link="nvlink"), "needs 3 GPUs joined by NVLink (link); the largest group has 2 (GPUs 0,1)"),
        (a_kind("2", (0, 2), link="pcie"), "needs 2 GPUs joined by one PCIe switch or better (link); the largest allowed group has 1 (GPU 0)"),
        (a_kind("3", link="numa"), ""),
        (a_kind("2", link="nvlink"), ""),
        (a_kind("5", link="nvlink"), "needs 5 whole GPUs of one server, but only 4 GPUs are managed"),
    ],
)  # fmt: skip
def test_a_request_for_more_linked_gpus_than_any_group_has_is_recognized_at_once(
    kind: PlacementClass, says: str
) -> None:
    assert a_linked_fleet(links=PAIRS_OF_A_CPU).can_ever_hold(kind) == says


def test_without_a_known_topology_a_request_for_linked_gpus_says_so() -> None:
    says = "needs 2 GPUs joined by NVLink (link), but it is not known how the GPUs here are joined"
    assert a_fleet(4).can_ever_hold(a_kind("2", link="nvlink")) == says


def test_an_overtaken_job_that_needs_linked_gpus_gets_a_reservation_of_linked_gpus() -> None:
    fleet, kind = a_linked_fleet(0, 2, 3), a_kind("2", link="nvlink")
    fleet.reserve(7, kind)
    assert [ids_of(one.mask) for one in fleet.reserved] == [(0, 1)]
    assert fleet.find(a_kind("1")) is None
    assert fleet.why_not(a_kind("1")).code == "reserved"
    fleet.give_back(ResourceRequest(1, WHOLE), (2,))
    assert fleet.find(a_kind("1")) == (2,)


def test_only_gpus_of_large_enough_groups_are_kept_for_a_job_that_needs_linked_gpus() -> None:
    fleet = a_linked_fleet(links=[Link.NVLINK])  # 0 with 1; 2 and 3 are single
    assert ids_of(fleet.could_use(a_kind("2", link="nvlink"))) == (0, 1)
    fleet.paused_mask = 1
    assert fleet.could_use(a_kind("2", link="nvlink")) == 0


# -- MIG instances --------------------------------------------------------------------------------------------------


def a_divided_fleet(*busy: int, cards: int = 1) -> Fleet:
    """Return a fleet with ``cards`` whole cards of 80 GB and three instances of a further one."""
    whole = [a_gpu(i, memory_mib=80_000) for i in range(cards)]
    instances = [an_instance(200), an_instance(201), an_instance(202, "3g.40gb", memory_mib=40_000)]
    fleet = Fleet([*whole, *instances])
    for gpu in busy:
        fleet.take(ResourceRequest(1, WHOLE), (gpu,))
    return fleet


def by_memory(mib: int, parts: int = WHOLE) -> PlacementClass:
    return PlacementClass(ResourceRequest(1, parts, ANY_DEVICE), None, mib)


@pytest.mark.parametrize(
    ("busy", "kind", "gpus"),
    [
        ((), a_kind("mig-1g.10gb"), (200,)),
        ((200,), a_kind("mig-1g.10gb"), (201,)),
        ((200, 201), a_kind("mig-1g.10gb"), None),
        ((), a_kind("mig-3g.40gb"), (202,)),
        ((), a_kind("mig-1g.10gb", (201, 202)), (201,)),
        ((), a_kind("0.5"), (0,)),  # a plain request never goes to an instance
        ((0,), a_kind("0.5"), None),
        ((0,), a_kind("1"), None),
        ((), by_memory(8_000, 812), (200,)),  # the smallest that has the memory
        ((200, 201), by_memory(8_000, 812), (202,)),
        ((200, 201, 202), by_memory(8_000, 812), (0,)),
        ((), by_memory(30_000, 750), (202,)),
        ((), by_memory(60_000, 750), (0,)),
        ((), a_kind("0.5", vram_mib=8_000), (0,)),  # with a share, memory does not make an instance eligible
        ((0,), a_kind("0.5", vram_mib=8_000), None),
        ((200,), a_kind("mig-1g.10gb", vram_mib=8_000), (201,)),
    ],
)
def test_instances_go_to_jobs_that_ask_for_one_or_only_for_memory(
    busy: tuple[int, ...], kind: PlacementClass, gpus: tuple[int, ...] | None
) -> None:
    assert a_divided_fleet(*busy).find(kind) == gpus


@pytest.mark.parametrize(
    ("cards", "kind", "says"),
    [
        (1, a_kind("mig-2g.20gb"), "needs one MIG instance 2g.20gb; those here are 1g.10gb, 3g.40gb"),
        (1, a_kind("mig-1g.10gb", (0,)), "needs one MIG instance 1g.10gb; there is none here"),
        (0, a_kind("0.5"), "needs 0.5 of one GPU, but all GPUs here are MIG instances, which are given only to jobs that "
            "ask for one (gpus=mig-1g.10gb) or only for memory (vram= without gpus=)"),
        (1, a_kind("1", (202,)), "needs one whole GPU, but the allowed GPUs are MIG instances, which are given only to jobs "
            "that ask for one (gpus=mig-3g.40gb) or only for memory (vram= without gpus=)"),
        (1, a_kind("1", (1,)), "GPU 1 is not managed here (managed: 0,200-202); GPU 1 is divided into MIG instances: 200-202"),
        (1, by_name(200, 201), "names several GPUs, but a process can use only one MIG instance, and no GPU beside it"),
        (1, by_name(200), ""),
        (1, a_kind("2"), "needs 2 whole GPUs of one server, but only 1 GPU is managed"),
        (1, a_kind("mig-3g.40gb"), ""),
        (1, by_memory(90_000), "needs 90000M on a GPU; the largest GPU has 78.1 GiB (80000 MiB)"),
        (1, a_kind("mig-1g.10gb", vram_mib=20_000), "needs 20000M on a GPU; the largest MIG instance 1g.10gb has 9.6 GiB (9856 MiB)"),
        (1, a_kind("0.5", vram_mib=20_000), ""),
    ],
)  # fmt: skip
def test_impossible_requests_on_a_machine_with_instances(cards: int, kind: PlacementClass, says: str) -> None:
    assert a_divided_fleet(cards=cards).can_ever_hold(kind) == says


def test_the_reason_of_a_job_that_waits_for_an_instance() -> None:
    fleet = a_divided_fleet(200, 201)
    told = "needs one MIG instance 1g.10gb; the largest free share of an allowed GPU is 0 (GPU 200)"
    assert fleet.why_not(a_kind("mig-1g.10gb")) == Reason("no-room", told)
    fleet.paused_mask = mask_of([200, 201])
    assert fleet.why_not(a_kind("mig-1g.10gb")) == Reason("paused", "its GPUs 200,201 are paused")


def test_the_reason_of_a_job_for_a_card_names_no_instance() -> None:
    fleet = a_divided_fleet(0)
    told = "needs 0.5 of one GPU; the largest free share of an allowed GPU is 0 (GPU 0)"
    assert fleet.why_not(a_kind("0.5", vram_mib=8_000)).sentence == told
    fleet.reserve(7, a_kind("mig-1g.10gb"))
    assert [ids_of(one.mask) for one in fleet.reserved] == [(200,)]
    assert fleet.find(a_kind("mig-1g.10gb")) == (201,) and fleet.find(by_memory(8_000)) == (201,)
