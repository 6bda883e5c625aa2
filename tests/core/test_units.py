"""Tests of durations and sizes: common spellings are read, and all other texts are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.errors import UsageError
from scheduler.core.units import mib_of, seconds_of, span_text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("0", 0),
        ("4s", 4),
        ("30m", 1800),
        ("4h", 14400),
        ("2d", 172800),
        ("1w", 604800),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("0.5", 0.5),
        (" 4H ", 14400),
        ("1-12:00:00", 129600),
        ("1-12:00", 129600),
        ("12:30", 750),
        ("1:00:00", 3600),
        ("100:00:00", 360000),
    ],
)
def test_a_duration_is_read(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(
    "text", ["", " ", "h", "-5", "5x", "1h30", "1h 30m", "4 s", "1:2", "1,5h", "::", "nan", "inf", "1e3", "5m5", ".5"]
)
def test_an_invalid_duration_is_refused_with_the_correct_spelling(text: str) -> None:
    with pytest.raises(UsageError, match=r"is not a duration; write 90"):
        seconds_of(text)


@pytest.mark.parametrize("text", ["11575d", "999999h", "1000000001", "99999-00:00:00"])
def test_a_duration_of_more_than_thirty_years_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="more than 30 years"):
        seconds_of(text)


@pytest.mark.parametrize("text", ["9" * 400 + ":00", "9" * 5000 + ":00:00", "9" * 5000 + "-00:00:00"])
def test_a_huge_clock_time_is_refused_without_a_crash(text: str) -> None:
    with pytest.raises(UsageError):
        seconds_of(text)


def test_an_infinite_duration_is_refused() -> None:
    with pytest.raises(UsageError):
        seconds_of("9" * 400)


@given(st.integers(0, 400), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_both_spellings_of_a_duration_have_the_same_value(days: int, hours: int, minutes: int, seconds: int) -> None:
    assert seconds_of(f"{days}d{hours}h{minutes}m{seconds}s") == seconds_of(f"{days}-{hours}:{minutes:02}:{seconds:02}")


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        ("18G", 18432),
        ("18g", 18432),
        ("18GB", 18432),
        ("18GiB", 18432),
        ("512M", 512),
        ("512", 512),
        (" 512 M ", 512),
        ("0.5G", 512),
        ("1T", 1 << 20),
        ("2048K", 2),
        ("0", 0),
    ],
)
def test_a_size_is_read_as_mib(text: str, mib: int) -> None:
    assert mib_of(text) == mib


@pytest.mark.parametrize("text", ["1K", "1025K", "1.0001M"])
def test_a_size_is_rounded_up(text: str) -> None:
    assert mib_of(text) == (1 if text == "1K" else 2)


@pytest.mark.parametrize("text", ["", "G", "-1G", "1P", "1 2G", "18Gb/s", "many"])
def test_an_invalid_size_is_refused_with_the_correct_spelling(text: str) -> None:
    with pytest.raises(UsageError, match=r"is not a size; write 18G"):
        mib_of(text)


@pytest.mark.parametrize("text", ["9" * 400, "9" * 400 + "G"])
def test_a_huge_size_is_refused_without_a_crash(text: str) -> None:
    with pytest.raises(UsageError):
        mib_of(text)


def test_a_size_too_large_for_the_database_is_refused() -> None:
    with pytest.raises(UsageError):
        mib_of("9" * 20)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0 s"),
        (4.9, "4 s"),
        (59, "59 s"),
        (60, "1 min 00 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 05 min"),
        (86399, "23 h 59 min"),
        (273600, "3 d 4 h"),
    ],
)
def test_a_time_span_is_written_in_two_units(seconds: float, text: str) -> None:
    assert span_text(seconds) == text
