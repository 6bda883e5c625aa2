"""Turns of users within a pass: which GPUs are left to a user who has used less, and for how long."""

from __future__ import annotations

import pytest

from scheduler.core.gpu import Gpu, ResourceRequest
from scheduler.core.job import Process
from scheduler.core.neighbours import Neighbour, Neighbours, Sharing
from scheduler.core.placement import Fleet
from scheduler.core.placement_class import PlacementClass
from scheduler.core.shared_bookings import Booking, Document, Want
from scheduler.core.take_turns import PATIENCE_S, STAGGER_S, Turns, why_others_first


class Pair:
    """The own scheduler on GPUs a and b, and lab3, who has used less and waits for GPU a."""

    def __init__(self, half_life_s: float = 86_400.0) -> None:
        self.sharing = Sharing("me", half_life_s, used=1000.0, used_at=1.0)
        self.fleet = Fleet([Gpu(0, "GPU-a"), Gpu(1, "GPU-b")])

    def free(self, mono: float, *bookings: Booking, want: str = "GPU-a") -> tuple[int, ...] | None:
        """Return where the own job of one GPU fits in a pass. ``bookings``: of lab3; ``want``: what lab3 waits for."""
        wants = (Want(1, 1000, gpus=(want,)),) if want else ()
        document = Document("a", "boot", gpus=("GPU-a", "GPU-b"), wants=wants, waiting=1, bookings=bookings)
        self.sharing.take(Neighbours(1.0, (Neighbour("lab3", False, document),)), self.fleet.managed)
        turns = Turns(self.sharing, self.fleet, mono)
        turns.give_way()
        found = self.fleet.find(PlacementClass(ResourceRequest.parse("1"), (0,)))
        turns.end()
        return found


def test_an_instance_is_left_to_a_user_who_waits_for_one_and_no_card_to_a_user_who_cannot_use_it() -> None:
    fleet = Fleet([Gpu(0, "GPU-a"), Gpu(200, "MIG-x", profile="1g.10gb")])
    sharing = Sharing("me", used=1000.0, used_at=1.0)
    found = []
    for want in ("MIG-x", "GPU-a"):
        document = Document("a", "boot", gpus=("GPU-a", "MIG-x"), wants=(Want(1, 1000, gpus=(want,)),), waiting=1)
        sharing.take(Neighbours(1.0, (Neighbour("lab3", False, document),)), fleet.managed)
        turns = Turns(sharing, fleet, 100.0)
        turns.give_way()
        found.append([fleet.find(PlacementClass(ResourceRequest.parse(need))) for need in ("1", "mig-1g.10gb")])
        turns.end()
    assert found == [[(0,), None], [None, (200,)]]


def booking(gpu: str, number: int) -> Booking:
    return Booking(gpu, 500, since=float(number), processes=(Process(number, 1),))


def test_a_gpu_is_left_to_a_user_who_does_not_take_it_for_a_limited_time() -> None:
    pair = Pair()
    assert pair.free(100.0) is None and pair.sharing.due == 100.0 + PATIENCE_S
    assert pair.free(100.0 + 0.9 * PATIENCE_S) is None
    assert pair.free(100.0 + PATIENCE_S) == (0,) and pair.sharing.due is None
    assert pair.free(101.0 + PATIENCE_S) == (0,)


@pytest.mark.parametrize(("gpu", "renewed"), [("GPU-a", True), ("GPU-b", False)])
def test_only_a_booking_on_the_gpu_that_is_left_renews_the_patience(gpu: str, renewed: bool) -> None:
    """A user whose jobs start on other GPUs all the time does not keep the GPU that is left free."""
    pair = Pair()
    for number in range(10):
        found = pair.free(100.0 + number, booking(gpu, number))
        assert (found is None) is (renewed or number < PATIENCE_S), number


def test_the_patience_begins_anew_after_a_pass_in_which_nothing_was_wanted() -> None:
    pair = Pair()
    assert pair.free(100.0) is None and pair.free(200.0) == (0,)
    assert pair.free(201.0, want="") == (0,)
    assert pair.free(202.0) is None


def test_the_time_is_hardly_longer_if_gpus_are_left_to_several_users() -> None:
    """Two users wait for the same GPU, and neither takes it."""
    pair = Pair()
    wants = (Want(1, 1000, gpus=("GPU-a",)),)
    documents = [Document(key, "boot", gpus=("GPU-a", "GPU-b"), wants=wants, waiting=1) for key in "ab"]

    def free(mono: float) -> tuple[int, ...] | None:
        neighbours = (Neighbour("lab3", False, documents[0]), Neighbour("lab4", False, documents[1]))
        pair.sharing.take(Neighbours(1.0, neighbours), pair.fleet.managed)
        turns = Turns(pair.sharing, pair.fleet, mono)
        turns.give_way()
        found = pair.fleet.find(PlacementClass(ResourceRequest.parse("1"), (0,)))
        turns.end()
        return found

    assert free(100.0) is None
    assert free(100.0 + PATIENCE_S) is None, "lab4 loses patience with lab3 first"
    assert free(100.0 + PATIENCE_S + STAGGER_S) == (0,)


@pytest.mark.parametrize("used", [10_000.0, 0.0], ids=["own user has used more", "own user has used less"])
def test_gpus_are_reserved_for_the_user_who_has_used_least(used: float) -> None:
    """A job of two GPUs waits, and the jobs of lab3 take each GPU that becomes free."""
    sharing, fleet = Sharing("me", used=used, used_at=1.0), Fleet([Gpu(0, "GPU-a"), Gpu(1, "GPU-b")])
    wants = (Want(1, 1000, number=5),)
    reserved = []
    for number in range(8):
        bookings = (Booking("GPU-a", 1000, since=float(number), processes=(Process(number + 1, 1),)),)
        document = Document("a", "boot", gpus=("GPU-a", "GPU-b"), wants=wants, used=5.0, used_at=1.0, bookings=bookings)
        sharing.take(Neighbours(1.0, (Neighbour("lab3", False, document),)), fleet.managed)
        turns = Turns(sharing, fleet, 100.0 + number)
        turns.give_way()
        reserved.append(turns.reserves(7, 5))
        turns.end()
    assert reserved == [used == 0.0 and number >= 5 for number in range(8)]


def test_only_one_of_two_schedulers_of_a_user_reserves() -> None:
    """Two schedulers of one user wait for both GPUs; the jobs of lab3 end, and no other job starts."""
    wants = (Want(2, 1000),)
    states = {key: (Sharing("me", key=key), Fleet([Gpu(0, "GPU-a"), Gpu(1, "GPU-b")])) for key in "12"}
    reserved = []
    for number in range(8):
        booked = (Booking("GPU-a", 1000, since=float(number), processes=(Process(number + 1, 1),)),)
        lab3 = Neighbour("lab3", False, Document("a", "boot", gpus=("GPU-a",), used=5e6, used_at=1.0, bookings=booked))
        for key, (sharing, fleet) in states.items():
            other = Document("21"[int(key) - 1], "boot", gpus=("GPU-a", "GPU-b"), wants=wants)
            sharing.take(Neighbours(1.0, (lab3, Neighbour("me", True, other))), fleet.managed)
            turns = Turns(sharing, fleet, 100.0 + number)
            turns.give_way()
            if turns.reserves(7, 5):
                reserved.append((number, key))
            turns.end()
    assert reserved == [(5, "1"), (6, "1"), (7, "1")]


@pytest.mark.parametrize(
    ("half_life_s", "span"), [(86_400.0, "since yesterday"), (7 * 86_400.0, "in the last 7 d 0 h")]
)
def test_the_sentence_names_the_time_that_counts(half_life_s: float, span: str) -> None:
    pair = Pair(half_life_s)
    pair.free(100.0)
    assert why_others_first(pair.sharing).sentence == f"you have used 2.0 of your 1.0 shares {span}; user lab3 waits"
