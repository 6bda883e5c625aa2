"""128 jobs at once on 16 simulated cards, on which memory is allocated slowly: none is placed where it does not fit."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.gpu import WHOLE, decimal_text
from tests.core.simulated_cards import CAPACITY, INTERVAL, SETTLE, Demand, Machine

SIZES = {2: 8, 4: 8, 8: 48, 16: 64}  # jobs that need a half, a quarter, … of a card: 128 jobs fill 16 cards
STEPS = int(3 * SETTLE / INTERVAL)  # readings in three settle times


def a_demand(chance: random.Random, part: int) -> Demand:
    """Return the demand of a job that needs this part of a card (2: half): as a share, as memory, or as both."""
    share = decimal_text(WHOLE // part)
    gpus, vram_mib = chance.choice(
        [(share, None), ("", CAPACITY // part), ("0.01", CAPACITY // part), (share, CAPACITY // part)]
    )
    mib = vram_mib or CAPACITY * (WHOLE // part) // WHOLE
    late = chance.random() < 0.2  # it starts to allocate when others have finished
    return Demand(
        gpus,
        vram_mib,
        uses=chance.choice([mib, mib, mib * 3 // 4]),
        delay=chance.uniform(SETTLE, 1.4 * SETTLE) if late else chance.uniform(0, 20),
        ramp=chance.uniform(0.5, 1.2) * SETTLE,
        lingers=chance.choice([0.0, 0.0, 8.0]),
    )


def a_full_load(chance: random.Random) -> list[Demand]:
    """Return the demands of 128 jobs in random order; together they need 16 whole cards."""
    found = [a_demand(chance, part) for part, number in SIZES.items() for _ in range(number)]
    chance.shuffle(found)
    return found


def assert_packed(machine: Machine) -> None:
    """Assert that no job waits, and that the running jobs need all memory of all cards, except for their roundings."""
    assert not machine.play.scheduler.waiting(), machine.play.scheduler.class_reasons()
    needed = sum(machine.promised(job) for job in machine.running.values())
    assert needed >= 16 * CAPACITY * 0.99


@pytest.mark.parametrize("lists", [True, False], ids=["processes", "no-processes"])
@pytest.mark.parametrize("seed", range(4))
def test_128_jobs_at_once_fill_16_cards_within_three_settle_times_and_none_runs_out_of_memory(
    seed: int, lists: bool
) -> None:
    machine = Machine(lists=lists)
    machine.submit(*a_full_load(random.Random(seed)))
    for _ in range(STEPS):
        machine.step()
    assert_packed(machine)
    extra = Demand(vram_mib=CAPACITY // 16, uses=CAPACITY // 16)
    machine.submit(*[extra] * 8)
    for _ in range(STEPS):
        machine.step()
    assert machine.play.scheduler.waiting() == 8, "the cards are full"


@pytest.mark.parametrize("seed", range(4))
def test_jobs_that_end_are_replaced_and_the_cards_are_full_again_within_three_settle_times(seed: int) -> None:
    """All jobs need an eighth of a card. Of different sizes, running jobs may be spread so that a larger one has to wait."""
    chance = random.Random(seed)
    machine = Machine(lists=bool(seed % 2))
    load = [replace(a_demand(chance, 8), runs=chance.uniform(0.2, 4) * SETTLE) for _ in range(128)]
    machine.submit(*load)
    replaced: set[int] = set()
    while len(replaced) < len(load):
        ended = [job for job in range(1, 129) if job not in machine.running and job in machine.began]
        new = [job for job in ended if job not in replaced]
        replaced.update(new)
        machine.submit(*(replace(machine.demands[job], runs=1e9) for job in new))
        machine.step()
    for _ in range(STEPS):
        machine.step()
    assert_packed(machine)


@pytest.mark.parametrize("lists", [True, False], ids=["processes", "no-processes"])
@pytest.mark.parametrize("seed", range(4))
def test_jobs_that_book_a_default_memory_and_allocate_late_are_not_given_away_memory(seed: int, lists: bool) -> None:
    """With `min_free_mem_mb`, a job keeps its booking until its memory shows and has stopped growing."""
    chance = random.Random(seed)
    mib = CAPACITY // 8
    machine = Machine(default_mib=mib, lists=lists)
    some = [replace(a_demand(chance, 8), gpus="", vram_mib=None, uses=mib) for _ in range(128 + 40)]
    machine.submit(*some)
    for _ in range(2 * STEPS):
        machine.step()
    assert len(machine.running) == 128 and machine.play.scheduler.waiting() == 40


def test_jobs_that_book_a_default_memory_and_use_less_give_the_rest_to_others_within_three_settle_times() -> None:
    machine = Machine(default_mib=CAPACITY // 4)
    machine.submit(*[Demand(uses=CAPACITY // 8) for _ in range(128)])
    assert len(machine.running) == 64
    for _ in range(STEPS):
        machine.step()
    assert len(machine.running) == 96, "beside four jobs that use half of what they booked, two more fit"


def test_memory_that_a_job_requested_is_kept_for_it_even_if_it_uses_less() -> None:
    machine = Machine(cards=1, default_mib=CAPACITY // 4)
    machine.submit(*[Demand(vram_mib=CAPACITY // 2, uses=CAPACITY // 8)] * 3)
    for _ in range(2 * STEPS):
        machine.step()
    assert len(machine.running) == 2


DEMAND = st.builds(
    Demand,
    gpus=st.sampled_from(["", "0.1", "0.25", "0.5", "2x0.3"]),
    vram_mib=st.sampled_from([None, 5_000, 20_000, 27_000, 40_960, 60_000]),
    uses=st.integers(0, 45_000),
    delay=st.floats(0, 200),
    ramp=st.floats(1, 200),
    runs=st.sampled_from([60.0, 300.0, 1e9]),
    lingers=st.sampled_from([0.0, 8.0, 60.0]),
)
MOMENT = st.tuples(
    st.lists(DEMAND, max_size=4),
    st.sampled_from([None, 0, 1_000, 9_000, 30_000]),
    st.integers(0, 1),
    st.integers(1, 12),
)


@given(st.lists(MOMENT, max_size=8))
def test_the_requested_or_used_memory_of_all_jobs_of_a_card_stays_within_it_when_a_job_starts(
    moments: list[tuple[list[Demand], int | None, int, int]],
) -> None:
    """Jobs grow beyond their requests, foreign processes come and go: `Machine` checks each start."""
    machine = Machine(cards=2, exact=False)
    for demands, foreign, card, steps in moments:
        if foreign is not None:
            machine.foreign[card] = foreign
            machine.step()
        machine.submit(*demands)
        for _ in range(steps):
            machine.step()


def test_memory_alone_books_its_part_of_the_card_rounded_up_to_a_thousandth() -> None:
    machine = Machine(cards=1)
    machine.submit(*[Demand(vram_mib=18 * 1024, uses=18 * 1024)] * 5)
    assert len(machine.running) == 4 and machine.play.scheduler.fleet.free[0] == WHOLE - 4 * 225
