"""Tests of lists of allowed GPUs: ids, or nodes and types of a cluster."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.allowed import (
    Allowed,
    allowed_mask,
    allowed_text,
    check_nodes,
    named_allowed,
    names_nodes,
    parse_allowed,
)
from scheduler.core.errors import Refused, UsageError
from tests.builders import a_gpu

GPUS = [
    a_gpu(number, name=kind, node=node)
    for number, (node, kind) in enumerate([("g1", "a100"), ("g1", "h100"), ("g2", "a100"), ("g3", "t4")])
]


@pytest.mark.parametrize(
    ("text", "allowed", "mask", "name"),
    [
        ("", None, 0b1111, ""),
        ("0-1,3", (0, 1, 3), 0b1011, "GPUs 0,1,3"),
        ("g1", ("g1",), 0b0011, "g1"),
        ("g1, g3,g1", ("g1", "g3"), 0b1011, "g1 or g3"),
        ("type=a100", ("type=a100",), 0b0101, "GPUs of type a100"),
        ("g1,type=a100", ("g1", "type=a100"), 0b0001, "GPUs of type a100 on g1"),
        ("g2,g3,type=t4", ("g2", "g3", "type=t4"), 0b1000, "GPUs of type t4 on g2 or g3"),
        ("10.88.0.2", ("10.88.0.2",), 0, "10.88.0.2"),
    ],
)
def test_a_list_names_ids_or_nodes_and_types(text: str, allowed: Allowed, mask: int, name: str) -> None:
    found = parse_allowed(text)
    assert found == allowed and allowed_mask(found, GPUS) == mask
    assert allowed is None or named_allowed(found) == name
    assert parse_allowed(allowed_text(found)) == found


@pytest.mark.parametrize("text", ["g1,0", "0,g1", "type=", "a b", "g1;x", "3-1", "g1,,g2", "0.5", "-w"])
def test_what_is_neither_a_list_of_ids_nor_of_nodes_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_allowed(text)


def test_nodes_are_refused_where_there_is_no_cluster() -> None:
    with pytest.raises(UsageError, match="'g1' is not a GPU list"):
        parse_allowed("g1", cluster=False)
    with pytest.raises(Refused, match="g1 is no list of GPU ids"):
        check_nodes(("g1",), has_nodes=False)
    for allowed, has_nodes in ((("g1",), True), ((0, 1), False), (None, False)):
        check_nodes(allowed, has_nodes)


@given(st.text(st.sampled_from("g1a-.,=type0 "), max_size=12))
def test_every_list_that_is_read_is_written_in_a_form_that_is_read_again(text: str) -> None:
    try:
        allowed = parse_allowed(text)
    except UsageError:
        return
    assert parse_allowed(allowed_text(allowed)) == allowed
    assert names_nodes(allowed) == (allowed is not None and isinstance(allowed[0], str))
