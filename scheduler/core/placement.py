"""The ledger: best-fit placement of resource requests on GPUs, or the reason why a request does not fit.

Best fit for a job on one GPU: among the usable GPUs with enough free share, take the GPU with the least free share. If
several GPUs are equal, prefer the server with the fewest entirely free GPUs, then the lowest id. A job that requests GPU
memory goes to the smallest GPUs that have this memory, if there is room on one of them. A job for several GPUs goes to
the server on which it fits; if it fits on several servers, to the server with the fewest entirely free GPUs. Among the
GPUs of that server that fit, it gets those that are joined best (`core/topology.py`).
Sets of GPUs are bit masks: the cost of a search grows with the number of distinct free shares, not with the number of
GPUs.

Besides bookings there are claims and reservations. A *claim* keeps the GPUs that a running job named: only other jobs
that name these GPUs are placed there. A *reservation* keeps GPUs for a waiting job: jobs that come later in the queue are
not placed there, unless they are expected to end before the waiting job starts (`core/backfill.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import TypeVar

from scheduler.core.admission import Admission
from scheduler.core.allowed import Allowed, allowed_text, named_allowed, names_nodes
from scheduler.core.gpu import (
    BY_MEMORY,
    WHOLE,
    Gpu,
    ResourceRequest,
    decimal_text,
    gpu_ids_text,
    ids_of,
    is_are,
    mask_of,
    named_gpus,
)
from scheduler.core.job import Reason
from scheduler.core.mig import Devices, divided, why_no_device
from scheduler.core.placement_class import PlacementClass
from scheduler.core.topology import Link, Topology
from scheduler.core.units import mib_text, size_text, span_text

AnyFleet = TypeVar("AnyFleet", bound="Fleet")
MOST_TOLD = 3  # GPUs of other schedulers that a reason names


@dataclass(frozen=True, slots=True)
class Reservation:
    """GPUs that are kept for a waiting job. ``mask``: the GPUs; ``kind``: the class of the job.

    ``lends_for_s``: seconds until the start that is promised to the job: other jobs that are expected to end within this
    time may use the GPUs. None: the GPUs are kept because the job was overtaken too often; no other job may use them.
    """

    job: int
    mask: int
    kind: PlacementClass
    lends_for_s: float | None = None

    @property
    def why(self) -> str:
        """For whom and until when the GPUs are reserved, as the end of a sentence."""
        if self.lends_for_s is None:
            return f"reserved for job {self.job}, which was overtaken too often"
        return f"reserved for job {self.job}, whose start is promised within {span_text(self.lends_for_s)}"


class Fleet:
    """The ledger: all managed GPUs with their free shares, memory not yet booked, pauses, claims and reservations.

    ``free[i]``: free thousandths of GPU ``i``, 0 to 1000; what other schedulers have booked is not free. A call of
    ``take`` or ``give_back`` by which own jobs would have less than 0 or more than 1000 thousandths raises ValueError and
    changes nothing. GPU ids may have gaps.
    """

    has_nodes = False  # True: the GPUs are those of a cluster, and jobs may name nodes and types

    def __init__(self, gpus: Iterable[Gpu], cpu_slots: int = 1 << 30, retired: Iterable[int] = ()) -> None:
        """Create a ledger without bookings.

        ``cpu_slots``: number of slots for jobs without GPUs. ``retired``: GPUs that are no longer managed but on which
        jobs still run. These jobs can be booked there, but no new job is placed there.
        """
        self.gpus: dict[int, Gpu] = {gpu.index: gpu for gpu in gpus}
        self.all_mask = mask_of(self.gpus)
        self._devices = Devices(self.gpus.values())
        for index in retired:
            self.gpus.setdefault(index, Gpu(index, f"retired:{index}", "retired", server=-1 - index))
        self.paused_mask = (
            0  # may include GPUs that are not managed: a pause outlives the removal of a GPU from the settings
        )
        self.admission = Admission()
        self.cpu_slots = self.cpu_free = cpu_slots
        self.claims: dict[int, int] = {}  # GPU → number of running jobs that named it
        self.reserved: list[Reservation] = []
        self.slots_reserved = 0  # id + 1 of the job that the next free slots are kept for; 0: none
        self.free: dict[int, int] = dict.fromkeys(self.gpus, WHOLE)
        self._unbooked: dict[int, int] = dict.fromkeys(self.gpus, WHOLE)  # thousandths that no own job has
        self.memory_free: dict[int, int] = {i: g.memory_mib for i, g in self.gpus.items() if g.memory_mib is not None}
        sizes = {gpu.memory_mib or math.inf for gpu in self.gpus.values()}
        self._sizes = [  # masks of the GPUs with the same memory, the smallest memory first
            mask_of(i for i, gpu in self.gpus.items() if (gpu.memory_mib or math.inf) == size) for size in sorted(sizes)
        ]
        self._bucket: dict[int, int] = {WHOLE: mask_of(self.gpus)}
        self._levels = 1 << WHOLE if self.gpus else 0
        self._server_mask: dict[int, int] = {}
        for gpu in self.gpus.values():
            self._server_mask[gpu.server] = self._server_mask.get(gpu.server, 0) | 1 << gpu.index
        self._whole: dict[int, int] = {server: mask.bit_count() for server, mask in self._server_mask.items()}
        self._by_whole: dict[int, int] = {}
        for server, count in self._whole.items():
            self._by_whole[count] = self._by_whole.get(count, 0) | self._server_mask[server]
        self.topology = Topology(self.managed)
        self._ever: dict[PlacementClass, str] = {}
        # GPU → thousandths and MiB that other schedulers have booked, and a sentence about them
        self.outside: dict[int, tuple[int, int, str]] = {}
        self.closed = ""  # why no GPU can be booked now (`core/neighbours.py: Neighbours.closed`)
        self.keep_free = 0  # GPUs that jobs leave to people without a scheduler
        self.others_mask = 0  # GPUs with jobs of other schedulers

    def copy(self: AnyFleet) -> AnyFleet:
        """Return a copy with the same bookings, which change apart from those of the original. The readings are shared."""
        made = type(self).__new__(type(self))
        for name, value in vars(self).items():
            changes = isinstance(value, (dict, list))
            setattr(made, name, value.copy() if changes else value)
        return made

    def manages(self, gpu: int) -> bool:
        """Return whether ``gpu`` is the id of a managed GPU. Jobs are placed only on managed GPUs."""
        return gpu >= 0 and bool(self.all_mask >> gpu & 1)

    @property
    def managed(self) -> list[Gpu]:
        """The managed GPUs, without the retired ones."""
        return [gpu for index, gpu in self.gpus.items() if self.manages(index)]

    def usable_mask(self, run_s: float | None = None) -> int:
        """Return the mask of the usable GPUs: not paused, not blocked by their readings, not claimed and not reserved.

        ``run_s``: the GPUs are for a job that is expected to end within this time, so GPUs that are lent for this long are
        usable; None: this is not known.
        """
        return self.all_mask & ~self.paused_mask & ~self.admission.blocked_mask & ~self._kept_from(None, run_s)

    @property
    def kept_mask(self) -> int:
        """Mask of the GPUs that are claimed or reserved."""
        return self._kept_from(None)

    def _kept_from(self, kind: PlacementClass | None, run_s: float | None = None) -> int:
        """Return the mask of the claimed and reserved GPUs on which jobs of ``kind`` must not be placed.

        All claims count. If a job of ``kind`` has a reservation, only the reservations made before it count. If no job
        of ``kind`` has a reservation, or if ``kind`` is None, all reservations count. ``run_s``: see `usable_mask`.
        """
        kept = mask_of(self.claims)
        for one in self._reserved_before(kind):
            if run_s is None or one.lends_for_s is None or run_s > one.lends_for_s:
                kept |= one.mask
        return kept

    def _reserved_before(self, kind: PlacementClass | None) -> Iterator[Reservation]:
        for one in self.reserved:
            if one.kind == kind:
                return
            yield one

    def resize(self, cpu_slots: int) -> None:
        """Set the number of slots for jobs without GPUs. Running jobs keep their slots."""
        self.cpu_free += cpu_slots - self.cpu_slots
        self.cpu_slots = cpu_slots
        self._ever.clear()

    def allowed_mask(self, allowed: Allowed) -> int:
        """Return the mask of the GPUs in ``allowed`` that are managed; if ``allowed`` is None, of all managed GPUs.

        A list of nodes or types allows no GPU here: only a cluster has nodes (`core/engine_placement.py`).
        """
        return self.all_mask if allowed is None else mask_of(i for i in allowed if isinstance(i, int)) & self.all_mask

    def devices(self, kind: PlacementClass) -> int:
        """Return the mask of the managed GPUs and MIG instances that jobs of ``kind`` may use (`core/mig.py`)."""
        return self._devices.usable(kind.need, self.allowed_mask(kind.allowed))

    def able(self, kind: PlacementClass) -> int:
        """Return the mask of `devices` that have the memory that a job of ``kind`` asks for."""
        return self.devices(kind) & (self._large_mask(kind.vram_mib) if kind.vram_mib else self.all_mask)

    def find(self, kind: PlacementClass, run_s: float | None = None) -> tuple[int, ...] | None:
        """Return the best GPUs for a job of ``kind``, ascending; None if the job does not fit.

        For a job without GPUs the result is () if there are enough free slots, else None. ``run_s``: see `usable_mask`.
        """
        need = kind.need
        if need.count == 0:
            return () if self.cpu_free >= need.slots and not self.slots_reserved else None
        if need.by_name:
            named = mask_of(i for i in kind.allowed or () if isinstance(i, int))
            usable = self.all_mask & ~self.paused_mask & ~self.admission.sick_mask
            return ids_of(named) if named & usable == named else None
        if self.closed:
            return None
        usable = self.usable_mask(run_s) & self.devices(kind)
        if self.keep_free:
            usable = self._without_kept_free(usable, need.count, need.parts)
        if need.parts == WHOLE:
            usable &= ~self.admission.whole_blocked_mask
        if usable & self.admission.tight_mask:
            usable = self._with_slack(usable, need.parts)
        if kind.vram_mib and not self.admission.thresholds.by_memory:
            usable = self._with_memory(usable, kind.vram_mib)
        if self.admission.cards:
            room = self.admission.has_room
            usable = mask_of(i for i in ids_of(usable) if room(i, need.parts, kind.vram_mib))
        if not usable:
            return None
        books_memory = self.admission.thresholds.by_memory and need.parts == BY_MEMORY and bool(kind.vram_mib)
        if books_memory and need.count == 1 and self.admission.cards:
            return self._find_most_memory(usable)
        if need.count > 1:
            return self._find_wide(kind, usable)
        if not kind.vram_mib or len(self._sizes) == 1:
            return self._find_share(need.parts, usable)
        smallest_first = (self._find_share(need.parts, usable & mask) for mask in self._sizes)
        return next((found for found in smallest_first if found is not None), None)

    def _without_kept_free(self, usable: int, count: int, parts: int = 0) -> int:
        """Return ``usable`` without the GPUs whose use would leave fewer than `keep_free` GPUs without jobs.

        ``count``: GPUs that are needed; ``parts``: of each. A GPU with nothing but a lease is a GPU without jobs.
        """
        without_jobs = mask_of(i for i in ids_of(self.all_mask & ~self.others_mask) if self._unbooked[i] == WHOLE)
        left = max(0, without_jobs.bit_count() - self.keep_free)
        if left >= count:
            return usable
        best = sorted(ids_of(usable & without_jobs), key=lambda i: (self.free[i] < parts, i))
        return usable & ~without_jobs | mask_of(best[:left])

    def granted(self, kind: PlacementClass) -> PlacementClass:
        """Return the class with the request that is booked for jobs of ``kind``."""
        return kind

    def could_use(self, kind: PlacementClass) -> int:
        """Return the mask of the GPUs that a job of ``kind`` could use if others had booked nothing; 0 if they are too few."""
        usable = self.devices(kind) & ~self.paused_mask & ~self.admission.lasting_mask
        if self.keep_free:
            usable = self._without_kept_free(usable, kind.need.count)
        if kind.link is not Link.SYSTEM:
            groups = [group & usable for group in self.groups(kind)]
            usable = reduce(or_, (group for group in groups if group.bit_count() >= kind.need.count), 0)
        return usable if self.most_together(kind, usable) >= kind.need.count else 0

    def groups(self, kind: PlacementClass) -> Iterator[int]:
        """Yield masks of GPUs: a job of ``kind`` for several GPUs must get all of them within one of these masks.

        These are the servers; if the GPUs of the job must be linked, the linked groups of each server.
        """
        for mask in self._server_mask.values():
            yield from self.topology.groups(kind.link, mask)

    def most_together(self, kind: PlacementClass, mask: int) -> int:
        """Return the largest number of GPUs in ``mask`` that a job of ``kind`` could get together."""
        return max(((group & mask).bit_count() for group in self.groups(kind)), default=0)

    def _find_most_memory(self, usable: int) -> tuple[int, ...] | None:
        """Return the GPU in ``usable`` with the most free memory (ties: the lowest id).

        Return None if no GPU in ``usable`` has a free thousandth in the ledger.
        """
        fitting = [i for i in ids_of(usable) if self.free[i] >= BY_MEMORY]
        return (max(fitting, key=lambda i: (self.admission.free_mib(i), -i)),) if fitting else None

    def _find_share(self, parts: int, usable: int) -> tuple[int, ...] | None:
        levels = self._levels >> parts
        while levels:
            lowest = levels & -levels
            candidates = self._bucket[parts + lowest.bit_length() - 1] & usable
            if candidates:
                if candidates & (candidates - 1):
                    for count in sorted(self._by_whole):
                        tied = candidates & self._by_whole[count]
                        if tied:
                            candidates = tied
                            break
                return ((candidates & -candidates).bit_length() - 1,)
            levels ^= lowest
        return None

    def _find_wide(self, kind: PlacementClass, usable: int) -> tuple[int, ...] | None:
        need = kind.need
        if need.parts == WHOLE:
            fitting = self._bucket.get(WHOLE, 0) & usable
        else:
            fitting = mask_of(i for i in ids_of(usable) if self.free[i] >= need.parts)
        for count in sorted(self._by_whole):
            if need.parts == WHOLE and count < need.count:
                continue
            candidates = fitting & self._by_whole[count]
            while candidates:
                first = (candidates & -candidates).bit_length() - 1
                server = self._server_mask[self.gpus[first].server]
                here = candidates & server
                candidates &= ~here
                if any((here & group).bit_count() >= need.count for group in self.topology.groups(kind.link, server)):
                    return self.topology.choose(need.count, here, server, self.free)
        return None

    def _with_memory(self, mask: int, mib: int) -> int:
        cards = self.admission.cards
        return mask_of(
            i
            for i in ids_of(mask)
            if self.memory_free.get(i, mib) - (cards[i].overcommit_mib if i in cards else 0) >= mib
        )

    def _with_slack(self, mask: int, parts: int) -> int:
        """Return ``mask`` without the GPUs on which less than ``parts`` is free.

        Memory that is in use beyond the booked shares does not count as free.
        """
        cards = self.admission.cards
        tight = (i for i in ids_of(mask & self.admission.tight_mask) if parts + cards[i].overcommit > self.free[i])
        return mask & ~mask_of(tight)

    def take(self, need: ResourceRequest, gpus: tuple[int, ...], vram_mib: int = 0) -> None:
        """Book ``need`` on ``gpus``, and ``vram_mib`` MiB on each GPU.

        Raises ValueError, and books nothing, if the shares do not fit. There is no such check for slots. If the job
        named its GPUs, they are claimed, and no share is booked.
        """
        if need.count == 0:
            self.cpu_free -= need.slots
            return
        if need.by_name:
            for i in gpus:
                self.claims[i] = self.claims.get(i, 0) + 1
            return
        if len(set(gpus)) != need.count or any(self._unbooked.get(i, -1) < need.parts for i in gpus):
            raise ValueError(f"{need} does not fit on GPUs {gpus}: free {[self._unbooked.get(i) for i in gpus]}")
        for i in gpus:
            self._book(i, -need.parts)
            if vram_mib and i in self.memory_free:
                self.memory_free[i] -= vram_mib

    def give_back(self, need: ResourceRequest, gpus: tuple[int, ...], vram_mib: int = 0) -> None:
        """Undo a call of ``take`` with these arguments.

        Raises ValueError, and frees nothing, if a GPU would then have more than 1000 free thousandths.
        """
        if need.count == 0:
            self.cpu_free += need.slots
            return
        if need.by_name:
            for i in gpus:
                self.claims[i] -= 1
                if not self.claims[i]:
                    del self.claims[i]
            return
        if any(self._unbooked[i] + need.parts > WHOLE for i in gpus):
            raise ValueError(f"GPUs {gpus} would be freed twice by {need}")
        for i in gpus:
            self._book(i, need.parts)
            if vram_mib and i in self.memory_free:
                self.memory_free[i] += vram_mib

    def set_outside(self, booked: Mapping[int, tuple[int, int, str]]) -> None:
        """Replace what other schedulers have booked. ``booked``: GPU → (thousandths, at most 1000; MiB; sentence)."""
        before, self.outside = self.outside, {i: each for i, each in booked.items() if i in self.free}
        for i in {*before, *self.outside}:
            if i in self.memory_free:
                self.memory_free[i] += before.get(i, (0, 0, ""))[1] - self.outside.get(i, (0, 0, ""))[1]
            self._book(i, 0)

    def booked(self, i: int) -> int:
        """Return the thousandths of a GPU that own jobs have."""
        return WHOLE - self._unbooked[i]

    def _book(self, i: int, change: int) -> None:
        """Change the thousandths of a GPU that no own job has, and what is free."""
        self._unbooked[i] += change
        self._set_free(i, max(0, self._unbooked[i] - self.outside[i][0]) if i in self.outside else self._unbooked[i])

    def _set_free(self, i: int, parts: int) -> None:
        before, bit = self.free[i], 1 << i
        self.free[i] = parts
        left = self._bucket[before] & ~bit
        self._bucket[before] = left
        if not left:
            self._levels &= ~(1 << before)
        self._bucket[parts] = self._bucket.get(parts, 0) | bit
        self._levels |= 1 << parts
        change = (parts == WHOLE) - (before == WHOLE)
        if change:
            server = self.gpus[i].server
            count, mask = self._whole[server], self._server_mask[server]
            self._by_whole[count] &= ~mask
            self._whole[server] = count + change
            self._by_whole[count + change] = self._by_whole.get(count + change, 0) | mask

    # -- reservations -------------------------------------------------------------------------------------

    def reserve(self, job: int, kind: PlacementClass) -> None:
        """Reserve GPUs of one server for ``job``, or the next free slots if the job needs no GPU.

        Among the possible GPUs, those with the least missing share are chosen. If the job needs linked GPUs, they are
        of one group. Paused GPUs, and GPUs with a lasting problem, are not possible. If no server has enough possible
        GPUs, nothing is reserved. Jobs that come later in the queue are not placed on the reserved GPUs until
        `open_to_all` is called.
        """
        need = kind.need
        if need.count == 0:
            if need.slots <= self.cpu_slots:
                self.slots_reserved = self.slots_reserved or job + 1
            return
        allowed = self.could_use(kind)
        if any(one.job == job for one in self.reserved):
            return
        usable = self.usable_mask() & allowed
        best: list[tuple[bool, int, int]] = []
        for mask in self.groups(kind):
            here = sorted((not usable >> i & 1, -self.free[i], i) for i in ids_of(allowed & mask))[: need.count]
            if len(here) == need.count and (not best or _lacks(here, need) < _lacks(best, need)):
                best = here
        if best:
            self.reserved.append(Reservation(job, mask_of(i for _, _, i in best), kind))

    def reserve_until_start(self, job: int, kind: PlacementClass, mask: int, lends_for_s: float) -> None:
        """Reserve the GPUs of ``mask`` for ``job``, and lend them to jobs that end within ``lends_for_s`` seconds.

        Nothing is done if GPUs are already reserved for the job.
        """
        if not any(one.job == job for one in self.reserved):
            self.reserved.append(Reservation(job, mask, kind, lends_for_s))

    def open_to_all(self) -> None:
        """Drop all reservations."""
        self.reserved.clear()
        self.slots_reserved = 0

    def competes(self, kind: PlacementClass, need: ResourceRequest, gpus: tuple[int, ...]) -> bool:
        """Return whether a job of ``kind`` could have used the GPUs or slots that another job got.

        ``need``: the request of the other job; ``gpus``: the GPUs that the other job got.
        """
        if kind.need.count == 0:
            return need.count == 0
        return bool(self.devices(kind) & mask_of(gpus))

    def can_ever_hold(self, kind: PlacementClass) -> str:
        """Return why this machine can never hold a job of ``kind``, even with all GPUs free; empty if it can."""
        known = self._ever.get(kind)
        if known is None:
            if len(self._ever) > 10_000:
                self._ever.clear()
            known = self._ever[kind] = self._can_ever_hold(kind)
        return known

    def _can_ever_hold(self, kind: PlacementClass) -> str:
        need = kind.need
        if need.slots > self.cpu_slots:
            return f"needs {need.slots} slots, but there are only {self.cpu_slots}"
        if need.count == 0:
            return ""
        if names_nodes(kind.allowed) and not self.has_nodes:
            return f"allows only {named_allowed(kind.allowed)}, but only a cluster has nodes and types (--engine slurm or ray)"
        unknown = [i for i in kind.allowed or () if isinstance(i, int) and not self.manages(i)]
        known = gpu_ids_text(ids_of(self.all_mask)) or "none"
        if unknown:
            cards = divided(unknown, self.managed)
            return f"{named_gpus(unknown)} {is_are(unknown)} not managed here (managed: {known}){cards}"
        allowed = self.devices(kind)
        if not allowed or need.by_name:
            choice = [self.gpus[i] for i in ids_of(self.allowed_mask(kind.allowed))]
            wrong = why_no_device(need, choice, kind.allowed is None)
            if wrong:
                return wrong
        fitting = max(((allowed & mask).bit_count() for mask in self._server_mask.values()), default=0)
        if need.count > fitting and not need.by_name:
            asked = need.in_words()
            if kind.allowed is not None and allowed.bit_count() >= need.count:  # enough, but not on one server
                here = f"no server has more than {fitting} of the allowed GPUs {allowed_text(kind.allowed)}"
                return f"needs {asked}, but {here}"
            if kind.allowed is not None:
                return f"needs {asked}, but only {named_allowed(kind.allowed)} {is_are(kind.allowed)} allowed"
            if not fitting:
                return f"needs {asked}, but no GPU is managed"
            number = f"{fitting} GPU{'s' * (fitting > 1)}"
            if len(self._server_mask) > 1:
                return f"needs {asked}, but at most {number} of one server {'are' if fitting > 1 else 'is'} managed"
            return f"needs {asked}, but only {number} {'are' if fitting > 1 else 'is'} managed"
        if kind.vram_mib:
            large = self._large_mask(kind.vram_mib)
            fitting = max(((allowed & large & mask).bit_count() for mask in self._server_mask.values()), default=0)
            if need.count > fitting:
                device = f"MIG instance {need.profile}" if need.instance else "GPU"
                which = device if kind.allowed is None else f"allowed {device}"
                if need.count > 1:
                    asked = f"needs {size_text(kind.vram_mib)} on each of {need.count} GPUs of one server"
                    return f"{asked}, but at most {fitting} {which}{'s' * (fitting != 1)} of one server {'has' if fitting == 1 else 'have'} it"
                most = max(self.gpus[i].memory_mib or 0 for i in ids_of(allowed))
                return (
                    f"needs {size_text(kind.vram_mib)} on a GPU; the largest {which} has {mib_text(most)} ({most} MiB)"
                )
            allowed &= large
        if kind.link is not Link.SYSTEM and self.most_together(kind, allowed) < need.count:
            if not self.topology.known:
                return f"{self._needs_linked(kind)}, but it is not known how the GPUs here are joined"
            return f"{self._needs_linked(kind)}; {self._largest_group(kind, allowed, 'allowed ' * (kind.allowed is not None))}"
        return ""

    def _large_mask(self, mib: int) -> int:
        """Return the mask of the GPUs that have at least this memory, or whose memory is not known."""
        return mask_of(i for i, gpu in self.gpus.items() if gpu.memory_mib is None or gpu.memory_mib >= mib)

    @staticmethod
    def _needs_linked(kind: PlacementClass) -> str:
        better = "" if kind.link is Link.NVLINK else " or better"
        return f"needs {kind.need.count} GPUs joined by {kind.link.in_words}{better} (link)"

    def _largest_group(self, kind: PlacementClass, mask: int, adjective: str) -> str:
        """Return a clause about the largest group of linked GPUs in ``mask``. ``adjective``: what these GPUs are."""
        group = max((group & mask for group in self.groups(kind)), key=int.bit_count, default=0)
        number = group.bit_count()
        ids = f" ({named_gpus(ids_of(group))})" if group else ""
        return f"the largest {adjective}group has {number}{ids}"

    def why_not(self, kind: PlacementClass) -> Reason:
        """Return why no job of ``kind`` fits at present: the first rule that fails, with its figures."""
        need = kind.need
        never = self.can_ever_hold(kind)
        if never:
            return Reason("never", never)
        if need.count == 0:
            return self._no_slot(need)
        allowed = self.devices(kind)
        if kind.vram_mib and not need.by_name:
            allowed &= self._large_mask(kind.vram_mib)
        usable = allowed & ~self.paused_mask
        if not usable:
            ids = ids_of(allowed)
            return Reason("paused", f"its {named_gpus(ids)} {is_are(ids)} paused")
        if need.by_name:
            ids = ids_of(allowed & self.paused_mask)
            if ids:
                return Reason("paused", f"{named_gpus(ids)}, which the job named, {is_are(ids)} paused")
            for index in ids_of(allowed & self.admission.sick_mask):
                verdict = self.admission.cards[index].verdict
                return Reason(verdict.code, verdict.sentence)
            return Reason("no-room", "it starts shortly")
        if self.closed:
            return Reason("no-bookings", self.closed)
        if not usable & ~self.admission.lasting_mask:  # also if jobs are still on them
            verdict = self.admission.cards[ids_of(usable)[0]].verdict
            return Reason(verdict.code, verdict.sentence)
        forbidden = self._forbidden(kind, usable) or self._kept(kind, usable) or self._left(kind, usable)
        if forbidden is not None:
            return forbidden
        usable = usable & ~self.admission.blocked_mask & ~self._kept_from(kind) or usable
        if kind.allowed is not None:
            elsewhere = self.find(replace(kind, allowed=None))
            if elsewhere is not None:
                return Reason(
                    "allowed-busy",
                    f"would fit on {named_gpus(elsewhere)}, but only {named_allowed(kind.allowed)} "
                    f"{is_are(kind.allowed)} allowed",
                )
        paused = allowed & self.paused_mask
        tail = f"; paused: {named_gpus(ids_of(paused))}" if paused else ""
        tail += self._told_outside(i for i in ids_of(usable) if self.free[i] < need.parts)
        if need.count == 1:
            most = max(ids_of(usable), key=lambda i: (self.free[i], -i))
            text = (
                f"needs {need.in_words()}; the largest free share of an allowed GPU is "
                f"{decimal_text(self.free[most])} (GPU {most})"
            )
            if self.free[most] >= need.parts and not kind.vram_mib:
                return Reason("no-room", f"fits on GPU {most}; it starts shortly")
            if self.free[most] >= need.parts:
                text = f"needs {kind.vram_mib} MiB of GPU memory; no usable GPU has that much unbooked memory"
            return Reason("no-room", text + tail)
        fitting = mask_of(i for i in ids_of(usable) if self.free[i] >= need.parts)
        best = max((fitting & mask).bit_count() for mask in self._server_mask.values())
        if best >= need.count > self.most_together(kind, fitting):
            return Reason("no-link", f"{self._needs_linked(kind)}; {self._largest_group(kind, fitting, 'free ')}{tail}")
        if best >= need.count:
            text = (
                f"needs {kind.vram_mib} MiB on each of {need.count} GPUs of one server; too few GPUs have that much "
                "unbooked memory"
            )
            return Reason("no-wide-room", text + tail)
        return Reason("no-wide-room", f"needs {need.in_words()}; {best} {'is' if best == 1 else 'are'} free{tail}")

    def _no_slot(self, need: ResourceRequest) -> Reason:
        if self.slots_reserved and self.cpu_free >= need.slots:
            return Reason(
                "reserved",
                f"the next free slots are reserved for job {self.slots_reserved - 1}, which was overtaken too often",
            )
        if need.slots == 1:
            text = (
                "the slot for jobs without a GPU is"
                if self.cpu_slots == 1
                else f"all {self.cpu_slots} slots for jobs without a GPU are"
            )
            return Reason("no-room", f"{text} in use")
        free = max(0, self.cpu_free)
        are = "is" if free == 1 else "are"
        return Reason("no-room", f"needs {need.slots} slots; {free} of {self.cpu_slots} {are} free")

    def _kept(self, kind: PlacementClass, usable: int) -> Reason | None:
        """Return the reason if a job waits only because suitable GPUs are claimed or reserved; else None.

        Suitable GPUs are usable and have enough free share.
        """
        need, kept = kind.need, self._kept_from(kind)
        fitting = mask_of(i for i in ids_of(usable) if self.free[i] >= need.parts)
        most, left = self.most_together(kind, fitting), self.most_together(kind, fitting & ~kept)
        if most < need.count or left >= need.count:
            return None
        for one in self._reserved_before(kind):
            if one.mask & fitting:
                ids = ids_of(one.mask & fitting)
                return Reason("reserved", f"{named_gpus(ids)} {is_are(ids)} {one.why}")
        ids = ids_of(fitting & mask_of(self.claims))
        them = "it" if len(ids) == 1 else "each of them"
        return Reason("claimed", f"no other job starts on {named_gpus(ids)}: a running job named {them} (on=)")

    def _left(self, kind: PlacementClass, usable: int) -> Reason | None:
        """Return the reason if a job waits only because of bookings of others, or of GPUs that are kept free; else None."""
        need = kind.need
        usable &= ~self.admission.blocked_mask
        fitting = mask_of(i for i in ids_of(usable) if self.free[i] >= need.parts)
        fits = self.most_together(kind, fitting) >= need.count
        if self.keep_free and (fits or need.count > self.all_mask.bit_count() - self.keep_free):
            one = self.keep_free == 1
            text = f"{self.keep_free} GPU{'' if one else 's'} {'is' if one else 'are'} kept free for people without a scheduler"
            return Reason("keep-free", f"{text} (keep_free)") if self.find(kind) is None else None
        without = mask_of(i for i in ids_of(usable) if self._unbooked[i] >= need.parts)
        taken = ids_of(without & ~fitting)
        if not taken or self.most_together(kind, without) < need.count:
            return None
        return Reason("booked-outside", f"needs {need.in_words()}{self._told_outside(taken)}")

    def _told_outside(self, gpus: Iterable[int]) -> str:
        """Return a clause that says who else has booked these GPUs; empty if nobody has."""
        taken = [i for i in gpus if i in self.outside]
        told = "".join(f"; {self.outside[i][2]}" for i in taken[:MOST_TOLD])
        return told + (f"; and {len(taken) - MOST_TOLD} more GPUs" if len(taken) > MOST_TOLD else "")

    def _forbidden(self, kind: PlacementClass, usable: int) -> Reason | None:
        """Return the reason if a job waits only because readings block GPUs with enough free share; else None."""
        need, verdicts, room = kind.need, {}, 0
        for i in ids_of(usable):
            if self.free[i] < need.parts:
                continue
            verdict = self.admission.forbids(i, need.parts, self.free[i], kind.vram_mib)
            if verdict.code:
                verdicts[i] = verdict
            else:
                room |= 1 << i
        if not verdicts or self.most_together(kind, room) >= need.count:
            return None
        if self.most_together(kind, room | mask_of(verdicts)) < need.count:
            return None  # it would not fit even if the readings allowed these GPUs
        first, *others = verdicts
        if self.admission.thresholds.by_memory:
            first = max(verdicts, key=lambda i: (self.admission.free_mib(i), -i))
        elif kind.vram_mib:
            first = max(verdicts, key=lambda i: (self.admission.room_mib(i), -i))
        others = [i for i in verdicts if i != first]
        like = f"; {named_gpus(others)} cannot be used either" if others else ""
        return Reason(verdicts[first].code, verdicts[first].sentence + like)


def _lacks(gpus: list[tuple[bool, int, int]], need: ResourceRequest) -> tuple[int, int]:
    """Return what is missing on these GPUs for ``need``.

    The result is (number of GPUs that cannot take their part of the need now, sum of the missing thousandths).
    ``gpus``: for each GPU (True if it is unusable, its free thousandths as a negative number, its id).
    """
    missing = sum(unusable or -free < need.parts for unusable, free, _ in gpus)
    return missing, sum(max(0, need.parts + free) for _, free, _ in gpus)
