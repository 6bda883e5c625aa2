"""The ledger of a cluster. With it, `core/decide.py` decides which jobs to release to an engine such as Slurm.

The engine chooses the GPUs. A job is released if the ledger has GPUs where it fits. These GPUs are booked for the job
until the engine reports the GPUs that it chose; then those are booked instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from scheduler.core.allowed import Allowed, allowed_mask, named_allowed, names_nodes, nodes_and_types
from scheduler.core.gpu import WHOLE, Gpu, ResourceRequest, ids_of
from scheduler.core.job import Reason
from scheduler.core.observations import Readings
from scheduler.core.placement import Fleet
from scheduler.core.placement_class import PlacementClass
from scheduler.core.topology import Link


@dataclass(frozen=True, slots=True)
class EngineRules:
    """The resources that an engine can be asked for.

    ``name``: the engine's name for people; ``shards``: parts into which the engine divides a GPU (0: it gives only
    whole GPUs; None: any share); ``ignore_ids``: jobs that name GPU ids may run on any GPU; otherwise they are refused,
    because an id has a meaning only on one server.
    """

    name: str
    shards: int | None = None
    ignore_ids: bool = False

    def booked(self, need: ResourceRequest) -> ResourceRequest:
        """Return the request that the engine can grant: a share is rounded up to whole shards or to a whole GPU."""
        if not need.count or need.parts == WHOLE or need.by_name:
            return need
        if self.shards == 0 or need.count > 1:  # no engine gives parts of several GPUs
            return ResourceRequest(need.count, WHOLE)
        if self.shards is None:
            return need
        return ResourceRequest(1, self.shards_of(need) * WHOLE // self.shards)

    def shards_of(self, need: ResourceRequest) -> int:
        """Return the number of shards to ask for; 0 if the job gets whole GPUs, or no GPU."""
        if not self.shards or need.count != 1 or need.parts == WHOLE:
            return 0
        return max(1, -(-need.parts * self.shards // WHOLE))


class EngineFleet(Fleet):
    """A ledger of the GPUs of a cluster.

    Pauses count GPUs: the engine may choose any GPU of a node, so if a job runs on a paused GPU, another GPU of the same
    node stays free in its place. While a GPU is paused, each released job is bound to the node on which it fits.
    """

    has_nodes = True

    def __init__(
        self, gpus: Iterable[Gpu], rules: EngineRules, cpu_slots: int = 1 << 30, retired: Iterable[int] = ()
    ) -> None:
        super().__init__(gpus, cpu_slots, retired)
        self.rules = rules
        self.by_uuid = {gpu.uuid: gpu.index for gpu in self.gpus.values()}
        self._allowed: dict[Allowed, int] = {}

    def allowed_mask(self, allowed: Allowed) -> int:
        """Return the mask of the managed GPUs that the list of a job allows."""
        if allowed is None or (self.rules.ignore_ids and not names_nodes(allowed)):
            return self.all_mask
        known = self._allowed.get(allowed)
        if known is None:
            known = self._allowed[allowed] = allowed_mask(allowed, self.managed) & self.all_mask
        return known

    def usable_mask(self, run_s: float | None = None) -> int:
        """Return the mask of the usable GPUs. For each paused GPU on which a job runs, one free GPU of its node is left out."""
        mask = super().usable_mask(run_s)
        for gpu in ids_of(self.paused_mask & self.all_mask):
            if self.free[gpu] < WHOLE:
                free = mask & self._bucket.get(WHOLE, 0) & self._server_mask[self.gpus[gpu].server]
                mask &= ~(free & -free)
        return mask

    def find(self, kind: PlacementClass, run_s: float | None = None) -> tuple[int, ...] | None:
        """Return GPUs on which the engine could place a job of ``kind`` now; None if there are none."""
        if self.can_ever_hold(kind):  # such as GPU ids of the time before the cluster
            return None
        return super().find(self.granted(kind), run_s)

    def take(self, need: ResourceRequest, gpus: tuple[int, ...], vram_mib: int = 0) -> None:
        """Book what the engine grants for ``need`` on ``gpus``. Raises ValueError if it does not fit."""
        super().take(self.rules.booked(need), gpus, vram_mib)

    def give_back(self, need: ResourceRequest, gpus: tuple[int, ...], vram_mib: int = 0) -> None:
        """Undo a call of ``take`` with these arguments."""
        super().give_back(self.rules.booked(need), gpus, vram_mib)

    def reserve(self, job: int, kind: PlacementClass) -> None:
        """Reserve GPUs for ``job``: jobs that come later in the queue are not released for them."""
        super().reserve(job, self.granted(kind))

    def reserve_until_start(self, job: int, kind: PlacementClass, mask: int, lends_for_s: float) -> None:
        """Reserve GPUs for ``job`` until its start, as the engine would grant them."""
        super().reserve_until_start(job, self.granted(kind), mask, lends_for_s)

    def why_not(self, kind: PlacementClass) -> Reason:
        """Return why no job of ``kind`` is released at present."""
        return super().why_not(self.granted(kind))

    def may_wait_outside(self, kind: PlacementClass) -> bool:
        """Return whether a job of ``kind`` may be released although it does not fit now, to wait in the engine's queue.

        It may not while one of its GPUs is paused, because the engine would not respect the pause. It may not while the
        engine does not answer, or has not reported its nodes since the start of the daemon.
        """
        admission = self.admission
        if admission.trouble or not all(card.is_known(admission.trouble) for card in admission.cards.values()):
            return False
        if self.paused_mask & self.allowed_mask(kind.allowed):
            return False
        return not self.can_ever_hold(kind)

    def granted(self, kind: PlacementClass) -> PlacementClass:
        """Return the class with the request that the engine grants to jobs of ``kind``."""
        booked = self.rules.booked(kind.need)
        return kind if booked == kind.need else replace(kind, need=booked)

    def _can_ever_hold(self, kind: PlacementClass) -> str:
        name, allowed = self.rules.name, kind.allowed
        if kind.need.by_name:
            return f"names its GPUs (on=), but {name} chooses the GPUs"
        if kind.need.instance:
            return f"needs {kind.need.in_words()}, but {name} chooses the GPUs, and gpujob asks it only for GPUs"
        if kind.link is not Link.SYSTEM:
            return f"needs GPUs that are joined by {kind.link.in_words} (link), but {name} chooses the GPUs"
        if allowed is not None and not names_nodes(allowed):
            if not self.rules.ignore_ids:
                return (
                    f"allows only {named_allowed(allowed)}, but {name} chooses the GPUs, and an id has a meaning only on "
                    "one server (name nodes or types, such as node2 or type=a100, or set engine_ignore_gpu_ids: true)"
                )
            kind = replace(kind, allowed=None)
        elif allowed is not None:
            nodes, types = nodes_and_types(allowed)
            known_nodes = {gpu.node for gpu in self.managed}
            known_types = {gpu.name for gpu in self.managed}
            unknown = [node for node in nodes if node not in known_nodes]
            if unknown:
                return f"allows only {', '.join(unknown)}, but the nodes with GPUs are {_some(known_nodes)}"
            unknown = [one for one in types if one not in known_types]
            if unknown:
                return f"allows only GPUs of type {', '.join(unknown)}, but the types are {_some(known_types)}"
            if len(types) > 1:
                return f"allows GPUs of the types {', '.join(types)}, but {name} can be asked for only one type (name nodes)"
        return super()._can_ever_hold(self.granted(kind))


def _some(names: Iterable[str]) -> str:
    found = sorted(names)
    return (", ".join(found[:8]) + (f" and {len(found) - 8} more" if len(found) > 8 else "")) or "not known"


def numbered(readings: Readings, before: Sequence[Gpu]) -> list[Gpu]:
    """Return the GPUs of a report. A GPU keeps its index of ``before``; a new GPU gets the next free index."""
    known = {gpu.uuid: gpu.index for gpu in before}
    free = max(known.values(), default=-1) + 1
    servers = {gpu.node: gpu.server for gpu in before}
    next_server = max(servers.values(), default=-1) + 1
    found = []
    for reading in sorted(readings.gpus, key=lambda one: (_by_number(one.node), one.ordinal)):
        index = known.get(reading.uuid)
        if index is None:
            index, free = free, free + 1
        if reading.node not in servers:
            servers[reading.node], next_server = next_server, next_server + 1
        server = servers[reading.node]
        found.append(
            Gpu(index, reading.uuid, reading.name, server, reading.memory_total_mib, reading.node, reading.partition)
        )
    return sorted(found, key=lambda gpu: gpu.index)


def _by_number(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts ``g2`` before ``g10``."""
    return [(int(piece), "") if piece.isdigit() else (0, piece) for piece in re.split(r"(\d+)", name)]
