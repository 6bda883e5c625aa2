"""Tests of job identity: two lines are the same job if their scripts, arguments and environments are equal."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.identity import identity_of
from scheduler.core.job import JobSpec
from tests.builders import a_spec

WORD = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=4)
WISH = st.tuples(WORD, WORD, st.lists(WORD, max_size=4).map(tuple))


def identity(script: str, environment: str, arguments: tuple[str, ...]) -> str:
    return identity_of(JobSpec(script=script, conda_env=environment, arguments=arguments))


@pytest.mark.parametrize(
    "other",
    [
        {"arguments": ("--y", "2", "--x", "1")},
        {"arguments": ("--x", "1", "--y", "2", "")},
        {"arguments": ("--x", "1", "--y")},
        {"arguments": ("--x", "1 --y 2")},
        {"arguments": ("--x", "1", "--y", "2"), "conda_env": "torch"},
        {"arguments": ("--x", "1", "--y", "2"), "script": "/data/other.py"},
    ],
)
def test_order_and_content_of_arguments_environment_and_script_change_the_identity(other: dict[str, Any]) -> None:
    """S3.27: Other arguments, another order of them, another environment or another script make a different job."""
    assert identity_of(a_spec(arguments=("--x", "1", "--y", "2"))) != identity_of(a_spec(**other))


@pytest.mark.parametrize(
    "same",
    [
        {"priority": 7},
        {"allowed": (0, 1)},
        {"label": "base"},
        {"gpus": "0.5"},
        {"origin": "jobs.txt:9"},
        {"retries": 2},
        {"after": (3,)},
        {"time_limit_s": 60.0},
    ],
)
def test_priority_gpu_list_and_other_options_do_not_change_the_identity(same: dict[str, Any]) -> None:
    """S3.27: Priority, allowed GPUs and the other options do not change the identity of a job."""
    assert identity_of(a_spec(arguments=("--x", "1"), **same)) == identity_of(a_spec(arguments=("--x", "1")))


@given(WISH, WISH)
def test_identities_are_equal_exactly_if_script_environment_and_arguments_are_equal(
    one: tuple[Any, ...], other: tuple[Any, ...]
) -> None:
    """S3.27: Two identities are equal if script, environment and arguments are equal, and different otherwise."""
    assert (identity(*one) == identity(*other)) == (one == other)


@given(st.lists(WORD, min_size=2, max_size=6), st.data())
def test_joining_two_fields_changes_the_identity(words: list[str], data: st.DataObject) -> None:
    """S3.27: If two arguments are joined into one text, the identity changes.

    The identity also changes if the script and the environment are joined into one text.
    """
    at = data.draw(st.integers(0, len(words) - 1))
    joined = [*words[:at], "".join(words[at : at + 2]), *words[at + 2 :]]
    assert (identity("/s", "", tuple(words)) == identity("/s", "", tuple(joined))) == (words == joined)
    assert identity(words[0], words[1], ()) != identity(words[0] + words[1], "", ()) or not words[1]


def test_bytes_that_are_not_utf_8_change_the_identity() -> None:
    assert identity("/s", "", ("\udcff",)) != identity("/s", "", ("\udcfe",))


def test_the_identity_of_a_job_is_the_same_in_all_versions() -> None:
    wish = identity("/data/train.py", "torch", ("--lr", "0.1"))
    assert wish == "07ef6ab49c938887ed3f1f857c3daf46"  # stores of released versions contain it
