"""The ledger of a cluster: gpujob estimates where an engine such as Slurm will place jobs, and releases jobs that fit.

The engine chooses the GPUs. The ledger only decides how many jobs to hand over: `core/decide.py` books a released job
on GPUs where it fits, and corrects the booking when the engine reports the GPUs that it chose.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from scheduler.core.allowed import Allowed, allowed_mask, is_words, named_allowed, nodes_and_types
from scheduler.core.gpu import WHOLE, Gpu, ResourceRequest, ids_of
from scheduler.core.job import Reason
from scheduler.core.placement import Fleet
from scheduler.core.placement_class import PlacementClass


@dataclass(frozen=True, slots=True)
class EngineRules:
    """The rules of an engine for shares of GPUs, and whether GPU ids are ignored.

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
        """Return the number of shards for a share of one GPU; 0 if the job gets whole GPUs or no GPU."""
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
        """Return the mask of the managed GPUs that the list allows."""
        if allowed is None or (self.rules.ignore_ids and not is_words(allowed)):
            return self.all_mask
        known = self._allowed.get(allowed)
        if known is None:
            known = self._allowed[allowed] = allowed_mask(allowed, self.managed) & self.all_mask
        return known

    @property
    def usable_mask(self) -> int:
        """Mask of the usable GPUs, without one free GPU for each job that runs on a paused GPU of the same node."""
        mask = super().usable_mask
        for gpu in ids_of(self.paused_mask & self.all_mask):
            if self.free[gpu] < WHOLE:
                free = mask & self._bucket.get(WHOLE, 0) & self._server_mask[self.gpus[gpu].server]
                mask &= ~(free & -free)
        return mask

    def find(self, kind: PlacementClass) -> tuple[int, ...] | None:
        """Return GPUs on which the engine could place a job of ``kind`` now; None if there are none."""
        return super().find(self._as_granted(kind))

    def take(self, need: ResourceRequest, gpus: tuple[int, ...], vram_mib: int = 0) -> None:
        """Book what the engine grants for ``need`` on ``gpus``. Raises ValueError if it does not fit."""
        super().take(self.rules.booked(need), gpus, vram_mib)

    def give_back(self, need: ResourceRequest, gpus: tuple[int, ...], vram_mib: int = 0) -> None:
        """Undo a call of ``take`` with these arguments."""
        super().give_back(self.rules.booked(need), gpus, vram_mib)

    def reserve(self, job: int, kind: PlacementClass) -> None:
        """Reserve GPUs for ``job``: jobs that come later in the queue are not released for them."""
        super().reserve(job, self._as_granted(kind))

    def why_not(self, kind: PlacementClass) -> Reason:
        """Return why no job of ``kind`` is released at present."""
        return super().why_not(self._as_granted(kind))

    def may_wait_outside(self, kind: PlacementClass) -> bool:
        """Return whether a job of ``kind`` may be released although it does not fit now, to wait in the engine's queue.

        It may not while one of its GPUs is paused, because the engine would not respect the pause, or while the engine
        does not answer.
        """
        if self.admission.trouble or self.paused_mask & self.allowed_mask(kind.allowed):
            return False
        return not self.can_ever_hold(kind)

    def _as_granted(self, kind: PlacementClass) -> PlacementClass:
        booked = self.rules.booked(kind.need)
        return kind if booked == kind.need else replace(kind, need=booked)

    def _can_ever_hold(self, kind: PlacementClass) -> str:
        name, allowed = self.rules.name, kind.allowed
        if kind.need.by_name:
            return f"names its GPUs (on=), but {name} chooses the GPUs"
        if allowed is not None and not is_words(allowed):
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
            unknown = [kind_ for kind_ in types if kind_ not in known_types]
            if unknown:
                return f"allows only GPUs of type {', '.join(unknown)}, but the types are {_some(known_types)}"
        return super()._can_ever_hold(self._as_granted(kind))


def _some(names: Iterable[str]) -> str:
    found = sorted(names)
    return (", ".join(found[:8]) + (f" and {len(found) - 8} more" if len(found) > 8 else "")) or "not known"
