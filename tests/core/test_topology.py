"""Tests of `core/topology.py`: links, groups, and the choice of GPUs for a job that needs several of them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.gpu import WHOLE, Gpu, ids_of, mask_of
from scheduler.core.gpu_snapshot import GpuSnapshot
from scheduler.core.topology import LINK_WORDS, Link, Topology, groups_text, link_of, with_links
from tests.builders import a_gpu

Pairs = dict[tuple[int, int], Link]


def linked(count: int, pairs: Pairs, server: int = 0) -> list[Gpu]:
    """Return ``count`` GPUs of a server with these links, which are recorded at only one of the two GPUs."""
    return [
        a_gpu(i, server=server, links=tuple((b, int(link)) for (a, b), link in pairs.items() if a == i))
        for i in range(count)
    ]


def islands(count: int, size: int, inside: Link = Link.NVLINK, outside: Link = Link.SYSTEM) -> Pairs:
    return {(a, b): inside if a // size == b // size else outside for a, b in combinations(range(count), 2)}


def chosen(gpus: list[Gpu], count: int, among: Iterable[int], free: dict[int, int] | None = None) -> tuple[int, ...]:
    whole = {gpu.index: WHOLE for gpu in gpus}
    return Topology(gpus).choose(count, mask_of(among), mask_of(whole), whole | (free or {}))


ISLANDS = linked(8, islands(8, 4))
DGX = linked(8, islands(8, 8))


@pytest.mark.parametrize(
    ("count", "among", "expected"),
    [
        (2, range(8), (0, 1)),
        (4, range(8), (0, 1, 2, 3)),
        (4, [3, 4, 5, 6, 7], (4, 5, 6, 7)),  # an island, although lower ids are free
        (2, [0, 4, 5], (4, 5)),
        (2, [1, 2, 3, 4, 5, 6, 7], (1, 2)),  # the whole island stays for others
        (2, [0, 1, 2, 5, 6], (5, 6)),  # what is left over is still joined: 0-2
        (3, [0, 1, 4, 5, 6], (4, 5, 6)),
        (5, range(8), (0, 1, 2, 3, 4)),
        (2, [0, 4], (0, 4)),  # never a reason to wait
        (8, range(8), tuple(range(8))),
    ],
)
def test_islands_are_used_whole_and_kept_whole(count: int, among: Iterable[int], expected: tuple[int, ...]) -> None:
    assert chosen(ISLANDS, count, among) == expected


def test_a_pcie_switch_is_better_than_a_cpu_and_a_cpu_better_than_none() -> None:
    pairs = {(0, 1): Link.SYSTEM, (0, 2): Link.NUMA, (1, 3): Link.PCIE, (2, 3): Link.NVLINK}
    gpus = linked(4, pairs)
    assert chosen(gpus, 2, range(4)) == (2, 3)
    assert chosen(gpus, 2, (0, 1, 3)) == (1, 3)
    assert chosen(gpus, 2, (0, 1, 2)) == (0, 2)


def test_if_all_gpus_are_joined_alike_the_choice_is_that_without_links() -> None:
    free = {3: 600, 5: 700}
    for gpus in (DGX, linked(8, {})):
        assert chosen(gpus, 2, range(8)) == (0, 1)
        assert chosen(gpus, 2, range(8), free) == (3, 5), "the least free share first"
    assert chosen(ISLANDS, 2, range(8), free) == (0, 3), "links come before free shares"


def test_links_of_other_servers_and_of_unmanaged_gpus_do_not_count() -> None:
    gpus = [a_gpu(0, links=((1, 0), (9, 0))), a_gpu(1, server=1)]
    assert not Topology(gpus).known


@pytest.mark.parametrize("link", LINK_WORDS)
def test_words_of_links(link: str) -> None:
    assert link_of(link).word == link
    assert link_of("") is Link.SYSTEM


def test_groups_in_words() -> None:
    assert groups_text(ISLANDS) == "NVLink: 0-3 and 4-7"
    assert groups_text(linked(4, islands(4, 2, outside=Link.NUMA))) == "NVLink: 0,1 and 2,3; same CPU: 0-3"
    assert groups_text(linked(4, islands(4, 2, Link.PCIE))) == "same PCIe switch: 0,1 and 2,3"
    assert groups_text(linked(2, {})) == ""


def test_readings_give_links_by_index_and_a_lost_gpu_keeps_its_links() -> None:
    gpus = [a_gpu(i, uuid=f"GPU-{i}") for i in range(3)]
    index = {gpu.uuid: gpu.index for gpu in gpus}
    found = with_links(
        gpus,
        [
            GpuSnapshot("GPU-0", 0, links={"GPU-1": 0, "GPU-2": 3, "GPU-unknown": 0}),
            GpuSnapshot("GPU-1", 1, links={"GPU-0": 0, "GPU-2": 1}),
            GpuSnapshot("GPU-2", 2),
        ],
        index,
    )
    assert [gpu.links for gpu in found] == [((1, 0),), ((0, 0), (2, 1)), ()]
    without_1 = with_links(
        found, [GpuSnapshot("GPU-0", 0, links={"GPU-2": 3}), GpuSnapshot("GPU-1", 1, lost=True)], index
    )
    assert [gpu.links for gpu in without_1] == [((1, 0),), ((0, 0), (2, 1)), ()]


# -- properties -----------------------------------------------------------------------------------------------------

LINKS = st.sampled_from(Link)


@st.composite
def machines(draw: st.DrawFn, most: int = 10) -> tuple[list[Gpu], list[int], int]:
    """Return GPUs with any links, the candidates, and how many of them are needed."""
    count = draw(st.integers(2, most))
    pairs = {pair: draw(LINKS) for pair in combinations(range(count), 2)}
    among = sorted(draw(st.sets(st.integers(0, count - 1), min_size=2)))
    return linked(count, pairs), among, draw(st.integers(2, len(among)))


def worst(topology: Topology, gpus: Iterable[int]) -> Link:
    return max(topology.link(a, b) for a, b in combinations(gpus, 2))


@given(machines())
def test_the_chosen_gpus_have_the_best_worst_link_of_all_sets(case: tuple[list[Gpu], list[int], int]) -> None:
    gpus, among, count = case
    topology = Topology(gpus)
    found = chosen(gpus, count, among)
    assert len(set(found)) == count and set(found) <= set(among) and list(found) == sorted(found)
    assert worst(topology, found) == min(worst(topology, each) for each in combinations(among, count))


@given(machines(8))
def test_groups_contain_each_linked_set_and_nothing_else(case: tuple[list[Gpu], list[int], int]) -> None:
    gpus, _, count = case
    topology, everything = Topology(gpus), range(len(gpus))
    for link in Link:
        groups = [set(ids_of(group)) for group in topology.groups(link, mask_of(everything))]
        for each in combinations(everything, count):
            assert any(set(each) <= group for group in groups) == (worst(topology, each) <= link)


def test_sixteen_gpus_are_chosen_without_comparing_all_sets() -> None:
    gpus = linked(
        16, islands(16, 8, Link.NUMA) | {pair: link for pair, link in islands(16, 4).items() if link is Link.NVLINK}
    )
    assert chosen(gpus, 8, range(16)) == tuple(range(8))
    assert chosen(gpus, 4, range(1, 16)) == (4, 5, 6, 7)
    assert chosen(gpus, 6, [0, *range(2, 16)]) == (0, 2, 4, 5, 6, 7), "8-15 stay whole"
