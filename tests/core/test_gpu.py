"""Tests of resource requests and GPU lists. An invalid one is refused, and the error shows the correct spelling."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.errors import Refused, SchedulerError, UsageError
from scheduler.core.gpu import (
    HIGHEST_GPU_ID,
    WHOLE,
    ResourceRequest,
    decimal_text,
    gpu_ids_text,
    ids_of,
    mask_of,
    parse_gpu_ids,
    parts_of,
    rounding_note,
)
from scheduler.core.placement import Fleet
from tests.builders import some_gpus


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("0.5", 500),
        ("1", 1000),
        ("1.0", 1000),
        (" 0.25 ", 250),
        (".5", 500),
        ("0.3334", 334),
        ("0.3333333333", 334),
        ("0.333", 333),
        ("0.0001", 1),
        ("1e-9", 1),
        ("1e-999999", 1),
        ("0", 0),
        ("-0", 0),
        ("0.1", 100),
        ("0.7", 700),
        ("1.0001", 1001),
        ("5e-1", 500),
    ],
)
def test_a_share_is_read_exactly_and_rounded_up_to_a_thousandth(text: str, parts: int) -> None:
    assert parts_of(text) == parts


@given(st.integers(0, 8_000_000), st.integers(0, 6))
def test_any_decimal_share_is_rounded_up_to_a_thousandth(digits: int, places: int) -> None:
    number = Fraction(digits, 10**places)
    text = f"{digits // 10**places}.{digits % 10**places:0{places}d}" if places else str(digits)
    if number > HIGHEST_GPU_ID:
        with pytest.raises(Refused):
            parts_of(text)
    else:
        assert parts_of(text) == ceil(number * WHOLE)


@pytest.mark.parametrize("text", ["0.5" + "0" * 30 + "1", "1." + "0" * 30 + "1"])
def test_a_share_with_many_digits_is_rounded_up(text: str) -> None:
    assert parts_of(text) == ceil(Fraction(text) * WHOLE)


def test_ten_tenths_are_exactly_one_gpu() -> None:
    fleet = Fleet(some_gpus(1))
    tenth = ResourceRequest.parse("0.1")
    for _ in range(10):
        fleet.take(tenth, (0,))
    assert fleet.free[0] == 0
    with pytest.raises(ValueError, match="does not fit"):
        fleet.take(ResourceRequest(1, 1), (0,))
    for _ in range(10):
        fleet.give_back(tenth, (0,))
    assert fleet.free[0] == WHOLE


@pytest.mark.parametrize(
    ("text", "need"),
    [
        ("0.5", (1, 500)),
        ("0.3334", (1, 334)),
        ("1", (1, 1000)),
        ("1.0", (1, 1000)),
        ("1.5", (2, 1000)),
        ("1.001", (2, 1000)),
        ("2", (2, 1000)),
        ("2.0", (2, 1000)),
        ("3.2", (4, 1000)),
        ("8", (8, 1000)),
        ("2x0.5", (2, 500)),
        ("2X0.5", (2, 500)),
        ("2*0.5", (2, 500)),
        (" 4 x 0.25 ", (4, 250)),
        ("2x1", (2, 1000)),
        ("1x0.5", (1, 500)),
        ("3x0.3334", (3, 334)),
        ("0", (0, 0)),
        ("0.0", (0, 0)),
        ("2x0", (0, 0)),
    ],
)
def test_a_request_is_read_as_a_number_of_gpus_and_a_share_of_each(text: str, need: tuple[int, int]) -> None:
    """S3.15: A request is read as a number of GPUs and the share of each of these GPUs.

    A need above 1 is rounded up to whole GPUs.
    """
    assert ResourceRequest.parse(text) == ResourceRequest(*need)


@pytest.mark.parametrize(
    "text", ["", " ", "half", "nan", "inf", "-inf", "0,5", "1/2", "x0.5", "2x", "2xhalf", "2x0.5x2"]
)
def test_a_request_that_is_no_number_is_refused_with_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match=r"must be a number.*write 0\.5, 1, 2 or 2x0\.5"):
        ResourceRequest.parse(text)


def test_a_request_for_a_share_of_0_gpus_is_refused() -> None:
    with pytest.raises(UsageError, match=": it asks for 0 GPUs"):
        ResourceRequest.parse("0x0.5")


@pytest.mark.parametrize("text", ["-1", "-0.001", "2x-0.5", "2x1.5", "4096", "1e9", "1e999999999"])
def test_a_request_that_no_server_can_meet_is_refused(text: str) -> None:
    with pytest.raises(Refused):
        ResourceRequest.parse(text)


@given(st.integers(0, 64), st.integers(1, WHOLE))
def test_a_request_can_be_read_from_its_own_text(count: int, parts: int) -> None:
    need = ResourceRequest(count, parts) if count else ResourceRequest(0, 0)
    assert ResourceRequest.parse(str(need)) == need


@given(st.text(max_size=12))
def test_any_text_is_read_as_a_request_or_refused(text: str) -> None:
    try:
        need = ResourceRequest.parse(text)
    except SchedulerError as error:
        assert error.exit_code in (2, 3) and error.do
    else:
        assert need == ResourceRequest(0, 0) or (need.count >= 1 and 1 <= need.parts <= WHOLE)


@given(st.integers(-5, 20_000))
def test_a_request_made_of_thousandths_is_never_smaller(total: int) -> None:
    need = ResourceRequest.from_parts(total)
    assert need.total >= max(0, total)
    assert need.total - max(0, total) < WHOLE
    assert need.count <= 1 or need.parts == WHOLE


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("1.5", "the request for 1.5 GPUs is rounded up to 2 whole GPUs"),
        (" 3.2 ", "the request for 3.2 GPUs is rounded up to 4 whole GPUs"),
        ("2", ""),
        ("2.0", ""),
        ("0.3334", ""),
        ("2x0.5", ""),
        ("half", ""),
        ("-1", ""),
    ],
)
def test_rounding_up_to_whole_gpus_is_reported(text: str, note: str) -> None:
    assert rounding_note(text) == note


@pytest.mark.parametrize(
    ("need", "words"),
    [
        ("0", "no GPU"),
        ("1", "one whole GPU"),
        ("0.5", "0.5 of one GPU"),
        ("4", "4 whole GPUs of one server"),
        ("2x0.5", "0.5 of each of 2 GPUs of one server"),
    ],
)
def test_a_request_is_described_in_words(need: str, words: str) -> None:
    assert ResourceRequest.parse(need).in_words() == words


@pytest.mark.parametrize(
    ("need", "slots", "by_name", "total", "text", "words"),
    [
        (ResourceRequest(1, 500), 0, False, 500, "0.5", "0.5 of one GPU"),
        (ResourceRequest(2, 1000), 0, False, 2000, "2", "2 whole GPUs of one server"),
        (ResourceRequest(3, 250), 0, False, 750, "3x0.25", "0.25 of each of 3 GPUs of one server"),
        (ResourceRequest(0, 0), 1, False, 0, "0", "no GPU"),
        (ResourceRequest.of_slots(0), 1, False, 0, "0", "no GPU"),
        (ResourceRequest.of_slots(1), 1, False, 0, "0", "no GPU"),
        (ResourceRequest.of_slots(3), 3, False, 0, "3 slots", "no GPU and 3 slots"),
        (ResourceRequest(1, 0), 0, True, 0, "1 by name", "1 GPU that it names"),
        (ResourceRequest(3, 0), 0, True, 0, "3 by name", "3 GPUs that it names"),
    ],
)
def test_a_request_is_for_shares_for_slots_or_for_named_gpus(
    need: ResourceRequest, slots: int, by_name: bool, total: int, text: str, words: str
) -> None:
    """S4.19 S4.31: A request asks for shares of GPUs, for slots without GPUs, or for GPUs by name."""
    assert (need.slots, need.by_name, need.total) == (slots, by_name, total)
    assert (str(need), need.in_words()) == (text, words)


@given(st.integers(0, 64), st.integers(0, WHOLE))
def test_each_request_has_exactly_one_form(count: int, parts: int) -> None:
    need = ResourceRequest(count, parts)
    assert [need.total > 0, need.slots > 0, need.by_name].count(True) == 1
    assert need.slots == 0 or ResourceRequest.of_slots(need.slots) == need or (count, parts) == (0, 1)
    assert str(need) and need.in_words()


@pytest.mark.parametrize(
    ("parts", "text"), [(0, "0"), (1, "0.001"), (100, "0.1"), (334, "0.334"), (1000, "1"), (1500, "1.5"), (10000, "10")]
)
def test_a_share_is_written_as_the_shortest_decimal_number(parts: int, text: str) -> None:
    assert decimal_text(parts) == text


@given(st.integers(0, 100_000))
def test_the_decimal_text_of_a_share_can_be_read_back(parts: int) -> None:
    assert parts_of(decimal_text(parts)) == parts


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("2", (2,)),
        ("0,2", (0, 2)),
        ("2,0", (0, 2)),
        ("0-3", (0, 1, 2, 3)),
        ("0-1,5", (0, 1, 5)),
        (" 0 - 1 , 5 ", (0, 1, 5)),
        ("1,1,0-1", (0, 1)),
        ("3-3", (3,)),
        ("4095", (4095,)),
        ("", None),
        ("  ", None),
    ],
)
def test_a_gpu_list_is_read_as_ascending_ids_without_duplicates(text: str, ids: tuple[int, ...] | None) -> None:
    """S3.8: A GPU list is read as ascending ids without duplicates. An empty list allows any GPU."""
    assert parse_gpu_ids(text) == ids


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("3-1", UsageError, "is backwards; write 1-3"),
        ("a", UsageError, "is not a GPU list; write 2 or 0,2"),
        ("1,,2", UsageError, "is not a GPU list"),
        (",", UsageError, "is not a GPU list"),
        ("-1", UsageError, "is not a GPU list"),
        ("0-", UsageError, "is not a GPU list"),
        ("1.5", UsageError, "is not a GPU list"),
        ("0 1", UsageError, "is not a GPU list"),
        ("0-999999999", Refused, "there is no GPU 999999999"),
        ("4096", Refused, "there is no GPU 4096"),
        ("9" * 30, UsageError, "is not a GPU list"),
    ],
)
def test_an_invalid_gpu_list_is_refused(text: str, error: type[SchedulerError], says: str) -> None:
    """S3.8: An invalid GPU list is refused. The error shows the correct spelling or names the unknown id."""
    with pytest.raises(error, match=says):
        parse_gpu_ids(text)


@pytest.mark.parametrize(
    ("ids", "text"),
    [((), ""), ((0,), "0"), ((0, 1), "0,1"), ((0, 1, 2), "0-2"), ((5, 0, 1, 2), "0-2,5"), ((0, 2), "0,2")],
)
def test_gpu_ids_are_written_as_the_shortest_list(ids: tuple[int, ...], text: str) -> None:
    assert gpu_ids_text(ids) == text


@given(st.sets(st.integers(0, 70), min_size=1))
def test_a_gpu_list_can_be_read_from_its_own_text(ids: set[int]) -> None:
    assert parse_gpu_ids(gpu_ids_text(ids)) == tuple(sorted(ids))
    assert ids_of(mask_of(ids)) == tuple(sorted(ids))


# -- MIG ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["mig-1g.10gb", " MIG-1g.10gb ", "mig-1G.10GB"])
def test_a_request_for_a_mig_instance(text: str) -> None:
    need = ResourceRequest.parse(text)
    assert need == ResourceRequest(1, WHOLE, "1g.10gb") and need.instance == "1g.10gb"
    assert (str(need), need.in_words()) == ("mig-1g.10gb", "one MIG instance 1g.10gb")
    assert ResourceRequest.parse(str(need)) == need and rounding_note(text) == ""


def test_a_request_for_several_instances_is_refused() -> None:
    with pytest.raises(Refused) as caught:
        ResourceRequest.parse("2xmig-1g.10gb")
    assert "cannot have several MIG instances" in str(caught.value) and "only one instance" in caught.value.do


@pytest.mark.parametrize("text", ["mig-", "mig", "mig-x", "0.5xmig-1g.10gb"])
def test_a_wrong_profile_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        ResourceRequest.parse(text)
