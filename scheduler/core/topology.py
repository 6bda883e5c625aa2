"""Topology: how well the GPUs of a server are joined, and which of them a job for several GPUs gets.

A *link* says how data goes from one GPU to another. A *group* is a set of GPUs of one server that are all joined
pairwise at least as well as a given link. Sets of GPUs are bit masks, as in `core/placement.py`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from math import comb

from scheduler.core.gpu import Gpu, gpu_ids_text, ids_of, mask_of
from scheduler.core.gpu_snapshot import GpuSnapshot

MOST_SETS = 70  # sets of GPUs that are all compared, such as 4 of 8; if there are more, sets are grown GPU by GPU


class Link(enum.IntEnum):
    """How two GPUs are joined; a lower value is better."""

    NVLINK = 0
    PCIE = 1  # by the same PCIe switch
    NUMA = 2  # by the same CPU (NUMA node)
    SYSTEM = 3  # between CPUs, or not known

    @property
    def word(self) -> str:
        """The value of the option ``link``; empty for `SYSTEM`, which each pair of GPUs fulfills."""
        return "" if self is Link.SYSTEM else self.name.lower()

    @property
    def in_words(self) -> str:
        """The way that joins the GPUs, after "joined by"."""
        return ("NVLink", "one PCIe switch", "one CPU (NUMA node)", "any way")[self]


LINK_WORDS = tuple(link.word for link in Link if link.word)
_NEAR = tuple(link for link in Link if link.word)


def link_of(word: str) -> Link:
    """Return the link with this word; `SYSTEM` for an empty word. Raises ValueError for another word."""
    if not word:
        return Link.SYSTEM
    return _NEAR[LINK_WORDS.index(word)]


def with_links(gpus: Iterable[Gpu], readings: Iterable[GpuSnapshot], index: Mapping[str, int]) -> list[Gpu]:
    """Return the GPUs with the links that the readings report. ``index``: UUID → index of each GPU that can be named.

    Links to GPUs that the readings do not report are kept. Links of the kind `SYSTEM` are left out.
    """
    found = {one.uuid: one.links for one in readings if one.links is not None}
    present = {index[uuid] for uuid in found if uuid in index}
    out = []
    for gpu in gpus:
        links = {to: link for to, link in gpu.links if gpu.uuid not in found or to not in present}
        links |= {index[to]: link for to, link in found.get(gpu.uuid, {}).items() if to in index and link < Link.SYSTEM}
        out.append(replace(gpu, links=tuple(sorted(links.items()))))
    return out


class Topology:
    """The links between the GPUs of a ledger. If no link is known, `known` is False, and all GPUs are equally near."""

    def __init__(self, gpus: Iterable[Gpu]) -> None:
        self._near: tuple[dict[int, int], ...] = tuple({} for _ in _NEAR)  # link → GPU → GPUs joined at least that well
        listed = list(gpus)
        servers = {gpu.index: gpu.server for gpu in listed}
        for gpu in listed:
            for other, link in gpu.links:
                if servers.get(other) == gpu.server and other != gpu.index:
                    for near in self._near[link:]:
                        near[gpu.index] = near.get(gpu.index, 0) | 1 << other
                        near[other] = near.get(other, 0) | 1 << gpu.index
        self.known = any(self._near)
        self._groups: dict[tuple[Link, int], tuple[int, ...]] = {}

    def link(self, one: int, other: int) -> Link:
        """Return the link between two GPUs."""
        return next((link for link in _NEAR if self._near[link].get(one, 0) >> other & 1), Link.SYSTEM)

    def groups(self, link: Link, mask: int) -> tuple[int, ...]:
        """Return the largest groups of GPUs in ``mask``: no other GPU of ``mask`` can be added to any of them.

        A GPU without such a link is a group of its own. ``mask``: all GPUs of a server; the result is kept.
        """
        if link is Link.SYSTEM:
            return (mask,)
        found = self._groups.get((link, mask))
        if found is None:
            found = self._groups[link, mask] = tuple(sorted(_cliques(self._near[link], mask), key=ids_of))
        return found

    def choose(self, count: int, candidates: int, server: int, free: Mapping[int, int]) -> tuple[int, ...]:
        """Return the best ``count`` GPUs of ``candidates``, ascending. There are at least ``count`` candidates.

        The first of these rules that tells two sets apart decides:

        1. the worst link within the set is better;
        2. more pairs of the set are joined by NVLink, else by a PCIe switch, else by a CPU;
        3. the GPUs have less free share, so that whole GPUs stay free (``free``: GPU → thousandths);
        4. the candidates that are left over are joined better (as in rule 2);
        5. the ids are lower.

        Rule 1 always holds. If there are too many sets to compare, a set is grown GPU by GPU from each candidate, and
        the other rules compare only these sets. ``server``: the mask of all GPUs of the server.
        """
        ids = ids_of(candidates)
        if not self.known or self._uniform(candidates, ids):
            return tuple(sorted(sorted(ids, key=lambda i: (free[i], i))[:count]))
        for worst in Link:
            groups = [group & candidates for group in self.groups(worst, server)]
            groups = [group for group in groups if group.bit_count() >= count]
            if groups:
                break
        number = min(comb(len(ids), count), sum(comb(group.bit_count(), count) for group in groups))
        if number <= MOST_SETS:
            sets: Iterable[int] = (mask_of(chosen) for group in groups for chosen in combinations(ids_of(group), count))
        else:
            sets = (self._grown(seed, count, group, free) for group in groups for seed in ids_of(group))

        def order(chosen: int) -> tuple[object, ...]:
            shares = sorted(free[i] for i in ids_of(chosen))
            return (*self._pairs(chosen), shares, *self._pairs(candidates & ~chosen), ids_of(chosen))

        return ids_of(min(sets, key=order))

    def _uniform(self, candidates: int, ids: Iterable[int]) -> bool:
        """Return whether all pairs of candidates are joined by the same kind of link."""
        return all(
            all(near.get(i, 0) & candidates == candidates & ~(1 << i) for i in ids)
            or not any(near.get(i, 0) & candidates for i in ids)
            for near in self._near
        )

    def _grown(self, seed: int, count: int, group: int, free: Mapping[int, int]) -> int:
        """Return a set of ``count`` GPUs of ``group`` around ``seed``: each step adds the GPU that is joined best to it."""
        chosen = 1 << seed
        while chosen.bit_count() < count:
            added = min(
                ids_of(group & ~chosen),
                key=lambda i: (*(-(near.get(i, 0) & chosen).bit_count() for near in self._near), free[i], i),
            )
            chosen |= 1 << added
        return chosen

    def _pairs(self, mask: int) -> tuple[int, ...]:
        """Return how many pairs within ``mask`` are joined at least as well as each link, as numbers below 0."""
        ids = ids_of(mask)
        return tuple(-sum((near.get(i, 0) & mask).bit_count() for i in ids) for near in self._near)


def _cliques(near: Mapping[int, int], mask: int) -> Iterator[int]:
    """Yield the maximal cliques within ``mask`` (Bron and Kerbosch, with a pivot). ``near``: GPU → its neighbours."""

    def extended(clique: int, possible: int, done: int) -> Iterator[int]:
        if not possible and not done:
            yield clique
            return
        pivot = max(ids_of(possible | done), key=lambda i: (near.get(i, 0) & possible).bit_count())
        for i in ids_of(possible & ~near.get(pivot, 0)):
            around = near.get(i, 0)
            yield from extended(clique | 1 << i, possible & around, done & around)
            possible &= ~(1 << i)
            done |= 1 << i

    if mask:
        yield from extended(0, mask, 0)


def groups_text(gpus: Iterable[Gpu]) -> str:
    """Return the groups of GPUs in words: ``NVLink: 0-3 and 4-7; same CPU: 0-7``; empty if no link is known."""
    listed, servers = list(gpus), dict[int, int]()
    for gpu in listed:
        servers[gpu.server] = servers.get(gpu.server, 0) | 1 << gpu.index
    topology, told, said = Topology(listed), [], set[int]()
    for link in _NEAR:
        groups = [group for mask in servers.values() for group in topology.groups(link, mask) if group.bit_count() > 1]
        new = [group for group in groups if group not in said]
        said.update(new)
        if new:
            name = ("NVLink", "same PCIe switch", "same CPU")[link]
            told.append(f"{name}: {' and '.join(gpu_ids_text(ids_of(group)) for group in new)}")
    return "; ".join(told)
