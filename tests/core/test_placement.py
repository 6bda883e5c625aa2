"""The ledger: where a need fits best, why it fits nowhere, and that no GPU is ever booked beyond 1000 parts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.gpu import WHOLE, Need, mask_of
from scheduler.core.job_class import JobClass
from scheduler.core.placement import Fleet
from tests.builders import a_gpu, a_kind, quick, some_gpus
from tests.core.slow_twin import SlowFleet


def a_fleet(*servers: int, free: dict[int, int] | None = None, paused: tuple[int, ...] = (), slots: int = 8) -> Fleet:
    """GPUs of these servers; ``free``: parts still free on some of them."""
    fleet = Fleet(some_gpus(*servers), slots)
    for gpu, parts in (free or {}).items():
        if parts < WHOLE:
            fleet.take(Need(1, WHOLE - parts), (gpu,))
    fleet.paused_mask = mask_of(paused)
    return fleet


@pytest.mark.parametrize(
    ("servers", "free", "kind", "gpus"),
    [
        # a share goes where the least is free that still holds it
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
        # a wide job: one server, the one with the fewest whole free GPUs that has enough
        ((4, 4), {}, a_kind("2"), (0, 1)),
        ((4, 4), {4: 0, 5: 0}, a_kind("2"), (6, 7)),
        ((4, 4), {4: 0, 5: 0, 6: 0}, a_kind("2"), (0, 1)),
        ((4, 4), {0: 999, 4: 999}, a_kind("4"), None),
        ((2, 2), {}, a_kind("4"), None),
        ((8,), {}, a_kind("8"), (0, 1, 2, 3, 4, 5, 6, 7)),
        ((4,), {1: 0}, a_kind("3"), (0, 2, 3)),
        # parts of several GPUs: within the server those with the least free
        ((4,), {2: 500, 3: 600}, a_kind("2x0.5"), (2, 3)),
        ((4,), {3: 500}, a_kind("2x0.5"), (0, 3)),
        ((2, 2), {0: 400, 2: 400}, a_kind("2x0.5"), None),
        ((2, 2), {0: 400}, a_kind("2x0.5"), (2, 3)),
        # only allowed ones
        ((4,), {}, a_kind("0.5", (2, 3)), (2,)),
        ((4,), {0: 500}, a_kind("0.5", (3,)), (3,)),
        ((4,), {3: 0}, a_kind("0.5", (3,)), None),
        ((4,), {}, a_kind("2", (1, 3)), (1, 3)),
        ((4, 4), {}, a_kind("2", (3, 4)), None),
        ((4,), {}, a_kind("0.5", (9,)), None),
        # no GPU at all
        ((), {}, a_kind("1"), None),
        ((), {}, a_kind("0"), ()),
        ((2,), {0: 0, 1: 0}, a_kind("0"), ()),
    ],
)
def test_best_fit(servers: tuple[int, ...], free: dict[int, int], kind: JobClass, gpus: tuple[int, ...] | None) -> None:
    """S3.15"""
    assert a_fleet(*servers, free=free).find(kind) == gpus


def test_two_halves_share_a_gpu_and_a_third_does_not_fit() -> None:
    """S3.14"""
    fleet, half = a_fleet(1), a_kind("0.5")
    fleet.take(half.need, (0,))
    assert fleet.find(half) == (0,)
    fleet.take(half.need, (0,))
    assert fleet.find(half) is None and fleet.free[0] == 0
    fleet.give_back(half.need, (0,))
    fleet.give_back(half.need, (0,))
    assert fleet.free[0] == WHOLE


def test_a_paused_gpu_is_never_found() -> None:
    """S3.30"""
    fleet = a_fleet(4, paused=(0, 2))
    assert fleet.find(a_kind("0.5")) == (1,)
    assert fleet.find(a_kind("2")) == (1, 3)
    assert fleet.find(a_kind("3")) is None
    assert fleet.find(a_kind("0.5", (0, 2))) is None


def test_jobs_without_a_gpu_have_slots_of_their_own() -> None:
    fleet, nothing = a_fleet(1, slots=2), a_kind("0")
    for _ in range(2):
        assert fleet.find(nothing) == ()
        fleet.take(nothing.need, ())
    assert fleet.find(nothing) is None
    assert fleet.free[0] == WHOLE
    assert fleet.why_not(nothing).code == "no-room"
    fleet.give_back(nothing.need, ())
    assert fleet.find(nothing) == ()


def test_a_retired_gpu_is_booked_but_never_given_out() -> None:
    fleet = Fleet(some_gpus(2), retired=(5,))
    assert not fleet.manages(5)
    fleet.take(Need(1, 500), (5,))
    assert fleet.find(a_kind("1", (5,))) is None
    assert fleet.find(a_kind("3")) is None
    fleet.give_back(Need(1, 500), (5,))
    assert fleet.find(a_kind("0.5")) == (0,)
    assert fleet.can_ever_hold(a_kind("1", (5,)))


@pytest.mark.parametrize(
    ("need", "gpus"),
    [(Need(1, 501), (0,)), (Need(2, 500), (0, 1)), (Need(1, 500), (7,)), (Need(2, 100), (2,)), (Need(2, 100), (2, 2))],
)
def test_what_does_not_fit_is_not_booked_and_changes_nothing(need: Need, gpus: tuple[int, ...]) -> None:
    fleet = a_fleet(3, free={0: 500, 1: 400})
    before = dict(fleet.free)
    with pytest.raises(ValueError, match="does not fit"):
        fleet.take(need, gpus)
    assert fleet.free == before
    assert fleet.find(a_kind("0.5")) == (0,)


def test_what_was_not_booked_is_not_given_back_and_changes_nothing() -> None:
    fleet = a_fleet(2, free={0: 500})
    before = dict(fleet.free)
    with pytest.raises(ValueError, match="freed twice"):
        fleet.give_back(Need(2, 500), (0, 1))
    assert fleet.free == before


def test_declared_memory_of_own_jobs_stays_within_the_card() -> None:
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


def test_a_card_of_unknown_size_takes_any_declared_memory() -> None:
    assert a_fleet(1).find(a_kind("0.5", vram_mib=10**6)) == (0,)


# -- why not -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("servers", "free", "paused", "kind", "code", "sentence"),
    [
        (
            (3,),
            {0: 100, 1: 200, 2: 300},
            (),
            a_kind("0.5"),
            "no-room",
            "needs 0.5 of one GPU; the most free on an allowed GPU is 0.3 (GPU 2)",
        ),
        (
            (2,),
            {0: 900, 1: 0},
            (),
            a_kind("1"),
            "no-room",
            "needs one whole GPU; the most free on an allowed GPU is 0.9 (GPU 0)",
        ),
        (
            (2,),
            {0: 0},
            (1,),
            a_kind("1"),
            "no-room",
            "needs one whole GPU; the most free on an allowed GPU is 0 (GPU 0); GPU 1 paused",
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
            "would fit on GPU 4, but only 0-3 are allowed",
        ),
        ((2,), {0: 0}, (), a_kind("1", (0,)), "allowed-busy", "would fit on GPU 1, but only 0 is allowed"),
        ((4,), {}, (0, 1), a_kind("1", (0, 1)), "paused", "its GPUs 0,1 are paused"),
        ((4,), {}, (2,), a_kind("1", (2,)), "paused", "its GPU 2 is paused"),
        ((2,), {}, (0, 1), a_kind("1"), "paused", "its GPUs 0,1 are paused"),
        ((2,), {}, (), a_kind("3"), "never", "needs 3 whole GPUs of one server, but a server here has only 2"),
        ((2,), {}, (), a_kind("1", (7,)), "never", "GPU 7 is not managed here (managed: 0,1)"),
    ],
)
def test_the_reason_is_the_first_rule_that_fails_with_its_figures(
    servers: tuple[int, ...],
    free: dict[int, int],
    paused: tuple[int, ...],
    kind: JobClass,
    code: str,
    sentence: str,
) -> None:
    reason = a_fleet(*servers, free=free, paused=paused).why_not(kind)
    assert (reason.code, reason.sentence) == (code, sentence)


def test_the_reason_of_a_wide_job_that_lacks_memory_speaks_of_memory() -> None:
    fleet = Fleet(some_gpus(2, memory_mib=24_000))
    for gpu in (0, 1):
        fleet.take(Need(1, 100), (gpu,), 20_000)
    wide = a_kind("2x0.5", vram_mib=10_000)
    assert fleet.find(wide) is None
    assert "10000 MiB" in fleet.why_not(wide).sentence


# -- never -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("servers", "kind", "says"),
    [
        ((2,), a_kind("1"), ""),
        ((2,), a_kind("2"), ""),
        ((2,), a_kind("2x0.5", (0, 1)), ""),
        ((), a_kind("0"), ""),
        ((), a_kind("0", (7,)), ""),
        ((2,), a_kind("3"), "a server here has only 2"),
        ((2, 2), a_kind("3"), "a server here has only 2"),
        ((), a_kind("1"), "a server here has only 0"),
        ((4,), a_kind("2", (1,)), "only 1 are allowed"),
        ((2, 2), a_kind("2", (1, 2)), "only 1,2 are allowed"),
        ((2,), a_kind("1", (2,)), "GPU 2 is not managed here (managed: 0,1)"),
        ((2,), a_kind("1", (1, 2)), "GPU 2 is not managed here"),
        ((), a_kind("1", (0,)), "GPU 0 is not managed here (managed: none)"),
    ],
)
def test_what_can_never_run_is_known_at_once(servers: tuple[int, ...], kind: JobClass, says: str) -> None:
    said = a_fleet(*servers).can_ever_hold(kind)
    assert says in said and bool(said) == bool(says)


def test_more_memory_than_any_allowed_card_has_is_known_at_once() -> None:
    gpus = [replace(gpu, memory_mib=size) for gpu, size in zip(some_gpus(2), (24_000, 80_000), strict=True)]
    fleet = Fleet(gpus)
    assert fleet.can_ever_hold(a_kind("1", vram_mib=80_000)) == ""
    assert "80001 MiB" in fleet.can_ever_hold(a_kind("1", vram_mib=80_001))
    assert "30000 MiB" in fleet.can_ever_hold(a_kind("1", (0,), vram_mib=30_000))


def test_a_wide_job_for_which_too_few_cards_are_large_enough_is_known_at_once() -> None:
    gpus = [replace(gpu, memory_mib=size) for gpu, size in zip(some_gpus(2), (24_000, 80_000), strict=True)]
    fleet = Fleet(gpus)
    wide = a_kind("2", vram_mib=40_000)
    assert fleet.find(wide) is None
    assert fleet.can_ever_hold(wide)


@quick
@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from([16_000, 24_000, None])), max_size=10),
    st.sampled_from(["0", "0.3", "1", "2", "2x0.5", "4", "8"]),
    st.one_of(st.none(), st.sets(st.integers(0, 9), min_size=1)),
    st.sampled_from([0, 0, 16_000, 20_000, 30_000]),
)
def test_what_the_empty_machine_holds_can_be_held_and_nothing_else(
    machine: list[tuple[int, int | None]], need: str, allowed: set[int] | None, vram_mib: int
) -> None:
    fleet = Fleet([a_gpu(i, server=server, memory_mib=memory) for i, (server, memory) in enumerate(machine)])
    kind = a_kind(need, None if allowed is None else sorted(allowed), vram_mib)
    never = fleet.can_ever_hold(kind)
    unmanaged = kind.need.count and any(not fleet.manages(gpu) for gpu in allowed or ())
    assert bool(never) == (fleet.find(kind) is None or bool(unmanaged))


# -- against the slow twin ---------------------------------------------------------------------------------

NEEDS = ("0", "0.001", "0.1", "0.25", "0.3334", "0.5", "0.75", "1", "2", "4", "8", "2x0.5", "3x0.25", "2x0.9")


@st.composite
def machines(draw: st.DrawFn) -> list[tuple[int, int | None]]:
    """(server, memory) of each GPU; ids of a server need not lie together."""
    servers = draw(st.lists(st.integers(0, 3), min_size=1, max_size=12))
    known = draw(st.booleans())
    return [(server, draw(st.sampled_from([16_000, 24_000])) if known else None) for server in servers]


@st.composite
def kinds(draw: st.DrawFn) -> JobClass:
    allowed = draw(st.one_of(st.none(), st.sets(st.integers(0, 11), min_size=1, max_size=6)))
    return a_kind(
        draw(st.sampled_from(NEEDS)),
        None if allowed is None else sorted(allowed),
        draw(st.sampled_from([0, 0, 6_000, 20_000])),
    )


@quick
@given(machines(), st.lists(st.tuples(kinds(), st.integers(0, 99)), max_size=40))
def test_find_is_what_scanning_all_gpus_finds(
    machine: list[tuple[int, int | None]], steps: list[tuple[JobClass, int]]
) -> None:
    gpus = [a_gpu(i, server=server, memory_mib=memory) for i, (server, memory) in enumerate(machine)]
    fleet, twin = Fleet(gpus, 2), SlowFleet(gpus, 2)
    booked: list[tuple[JobClass, tuple[int, ...]]] = []
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
            fleet.take(kind.need, found, kind.vram_mib)
            twin.change(kind.need, found, kind.vram_mib, -1)
            booked.append((kind, found))
            assert not twin.paused & set(found)
        else:
            assert fleet.why_not(kind).sentence
        assert fleet.free == twin.free and fleet.memory_free == twin.memory
    for old, where in booked:
        fleet.give_back(old.need, where, old.vram_mib)
    fleet.paused_mask = 0
    fresh = Fleet(gpus, 2)
    assert (fleet.free, fleet.memory_free, fleet.cpu_free) == (fresh.free, fresh.memory_free, fresh.cpu_free)
    for kind, _ in steps:
        assert fleet.find(kind) == fresh.find(kind)
