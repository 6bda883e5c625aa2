"""Tests of requests: a request of each kind can be stored in the database and read back unchanged."""

from __future__ import annotations

import json

import pytest

from scheduler.core.errors import UsageError
from scheduler.core.requests import (
    KINDS,
    Cancel,
    Edit,
    First,
    Hold,
    Pause,
    PauseQueue,
    Release,
    Request,
    Requeue,
    Resume,
    Swap,
    from_row,
    to_row,
)

EVERY: list[Request] = [
    Cancel((1, 2)), Requeue((3,)), Pause((0, 7)), Resume(()), PauseQueue(True), PauseQueue(False), Hold((4,)),
    Release((4, 5)), First((9,)), Swap((1, 2)), Edit((1, 2), {"priority": 3, "label": "x"}, ((1, 500), (2, 1000))),
]  # fmt: skip


@pytest.mark.parametrize("request_", EVERY, ids=str)
def test_a_request_can_be_read_back_from_its_row(request_: Request) -> None:
    kind, arguments = to_row(request_)
    assert from_row(kind, json.loads(json.dumps(arguments))) == request_


def test_the_examples_cover_every_kind_of_request() -> None:
    assert {type(each).__name__.lower() for each in EVERY} == set(KINDS)


def test_the_error_for_an_unknown_request_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="unknown request 'preempt'; known: cancel, edit, first"):
        from_row("preempt", {})


def test_what_a_newer_version_added_is_left_out() -> None:
    assert from_row("cancel", {"jobs": [1], "gently": True}) == Cancel((1,))
