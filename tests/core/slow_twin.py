"""Reference implementation of placement and start order: it sorts all waiting jobs and scans all GPUs.

It is slow and simple on purpose, so that a reader can check it. Property tests compare the real code with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import combinations

from scheduler.core.admission import Admission
from scheduler.core.gpu import ANY_DEVICE, WHOLE, Gpu, ResourceRequest
from scheduler.core.observations import Now
from scheduler.core.placement_class import PlacementClass
from scheduler.core.topology import Link


@dataclass
class SlowFleet:
    """The GPUs as a list, and the free thousandths of each GPU as a dict."""

    gpus: list[Gpu]
    cpu_free: int = 1 << 30
    paused: set[int] = field(default_factory=set)
    free: dict[int, int] = field(default_factory=dict)
    claims: list[int] = field(default_factory=list)  # the index of a GPU, once for each job that claims it by name
    memory: dict[int, int] = field(default_factory=dict)
    admission: Admission = field(default_factory=Admission)
    now: Now = field(default_factory=lambda: Now(0.0, 0.0))

    def __post_init__(self) -> None:
        self.free = {gpu.index: WHOLE for gpu in self.gpus}
        self.memory = {gpu.index: gpu.memory_mib for gpu in self.gpus if gpu.memory_mib is not None}

    def whole_free_on(self, server: int) -> int:
        return sum(self.free[gpu.index] == WHOLE for gpu in self.gpus if gpu.server == server)

    def fits(self, gpu: Gpu, kind: PlacementClass) -> bool:
        allowed = kind.allowed is None or gpu.index in kind.allowed
        card = self.admission.cards.get(gpu.index)
        overcommit = card.overcommit_mib if card is not None and kind.vram_mib else 0
        memory = self.memory.get(gpu.index, kind.vram_mib) - overcommit >= kind.vram_mib
        free = self.free[gpu.index]
        may = (
            gpu.index not in self.paused
            and gpu.index not in self.claims
            and not self.admission.forbids(gpu.index, kind.need.parts, free, kind.vram_mib).code
        )
        profile = kind.need.profile
        may = may and (profile == ANY_DEVICE or gpu.profile == profile)
        may = may and self.admission.fresh([gpu.index], self.now)  # all GPUs are read at the same time
        return allowed and memory and may and free >= kind.need.parts

    def is_sick(self, gpu: Gpu) -> bool:
        """Return whether not even a job that names the GPU may start there: it is gone, or has a fault."""
        card = self.admission.cards.get(gpu.index)
        return card is not None and (card.verdict.code == "gone" or self.admission.fault(card) is not None)

    def find(self, kind: PlacementClass) -> tuple[int, ...] | None:
        count = kind.need.count
        if count == 0:
            return () if self.cpu_free >= kind.need.slots else None
        if kind.need.by_name:
            named = kind.allowed or ()
            usable = {gpu.index for gpu in self.gpus if gpu.index not in self.paused and not self.is_sick(gpu)}
            there = [gpu.index for gpu in self.gpus if gpu.index in named and gpu.index in usable]
            return tuple(sorted(there)) if len(there) == len(named) else None
        fitting = [gpu for gpu in self.gpus if self.fits(gpu, kind)]
        if count == 1:
            best = min(
                fitting,
                key=lambda gpu: (
                    (gpu.memory_mib or math.inf) if kind.vram_mib else 0,
                    self.free[gpu.index], self.whole_free_on(gpu.server), gpu.index,
                ),
                default=None,
            )  # fmt: skip
            return None if best is None else (best.index,)
        groups: list[tuple[int, int, list[int]]] = []
        for server in {gpu.server for gpu in fitting}:
            here = [gpu.index for gpu in fitting if gpu.server == server]
            if any(self.worst(chosen) <= kind.link for chosen in combinations(here, count)):
                groups.append((self.whole_free_on(server), min(here), here))
        if not groups:
            return None
        _, _, here = min(groups)
        return min(combinations(here, count), key=lambda chosen: self.rank(chosen, here))

    def link(self, one: int, other: int) -> Link:
        """Return how two GPUs are joined, as either of them tells it."""
        told = [Link(link) for gpu in self.gpus for to, link in gpu.links if {gpu.index, to} == {one, other}]
        return min(told, default=Link.SYSTEM)

    def worst(self, gpus: Iterable[int]) -> Link:
        return max((self.link(a, b) for a, b in combinations(gpus, 2)), default=Link.NVLINK)

    def rank(self, chosen: tuple[int, ...], here: list[int]) -> tuple[object, ...]:
        """Return a sort key of a set of GPUs; ``here``: all GPUs of the server that fit."""
        left = [i for i in here if i not in chosen]
        shares = sorted(self.free[i] for i in chosen)
        return self.worst(chosen), *self.better_pairs(chosen), shares, *self.better_pairs(left), chosen

    def better_pairs(self, gpus: Iterable[int]) -> list[int]:
        """Return how many pairs are joined at least as well as each link, as numbers below 0: more is better."""
        links = [self.link(a, b) for a, b in combinations(gpus, 2)]
        return [-sum(link <= limit for link in links) for limit in (Link.NVLINK, Link.PCIE, Link.NUMA)]

    def change(self, need: ResourceRequest, gpus: Iterable[int], vram_mib: int, sign: int) -> None:
        """Book a request on these GPUs (``sign`` is -1), or undo the booking of this request (``sign`` is +1)."""
        self.cpu_free += sign * need.slots
        for i in gpus if need.by_name else ():
            self.claims.append(i) if sign < 0 else self.claims.remove(i)
        for i in () if need.by_name else gpus:
            self.free[i] += sign * need.parts
            assert 0 <= self.free[i] <= WHOLE
            if i in self.memory:
                self.memory[i] += sign * vram_mib


@dataclass
class SlowScheduler:
    """The waiting jobs with their sort keys, and the running jobs. A pass tries to start each waiting job, in order."""

    fleet: SlowFleet
    waiting: dict[int, tuple[tuple[float, float], PlacementClass]] = field(default_factory=dict)
    running: dict[int, tuple[PlacementClass, tuple[int, ...]]] = field(default_factory=dict)
    paused: bool = False

    def start_all(self, before_each: Callable[[int], None] = lambda job: None) -> list[tuple[int, tuple[int, ...]]]:
        """Start all jobs that fit. Return (job id, GPUs) of each started job, in the order of the starts."""
        started = []
        if not self.paused:
            for job, (_, kind) in sorted(self.waiting.items(), key=lambda item: (item[1][0], item[0])):
                gpus = self.fleet.find(kind)
                if gpus is not None:
                    before_each(job)
                    self.fleet.change(kind.need, gpus, kind.vram_mib, -1)
                    self.running[job] = kind, gpus
                    del self.waiting[job]
                    started.append((job, gpus))
        return started

    def end(self, job: int) -> None:
        kind, gpus = self.running.pop(job)
        self.fleet.change(kind.need, gpus, kind.vram_mib, +1)
