"""Admission control: decides from the readings which GPUs may take a job now, and how much of their memory is free.

The ledger (`core/placement.py: Fleet`) counts what this scheduler's own jobs have booked. Readings add the facts that
the ledger lacks: foreign processes, jobs that use more than their share, GPUs that are gone or give no readings.
The thresholds apply only to the memory and load that do not come from this scheduler's jobs; otherwise a job that fully
uses its half of a GPU would lock out a job for the other half. A placed job is counted as if it used at least its
share, even while it uses less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from scheduler.core.gpu import WHOLE, Gpu
from scheduler.core.gpu_admission import NOTHING_FORBIDDEN, GpuAdmission, Thresholds, Verdict
from scheduler.core.gpu_faults import GpuFault
from scheduler.core.gpu_snapshot import GpuProcess, GpuSnapshot, in_use_text, largest_process_text
from scheduler.core.measured_use import MeasuredUse, loads_of
from scheduler.core.mig import driver_name, mig_change
from scheduler.core.observations import Now, Readings
from scheduler.core.tenants import (
    Tenant,
    growth_after,
    is_settled,
    outgrown,
    overcommit,
    promised,
    room_beside_requests,
    room_of_shares,
    use_beyond,
    user_key,
)
from scheduler.core.units import mib_text

# Codes of temporary conditions: a draining scheduler (`daemon/drain.py`) waits for their end.
PASSING = frozenset({"stale", "foreign", "over-share", "releasing"})
BLOCK_AFTER = 2  # consecutive samples at or above a threshold that block a GPU; after one it gets no job until the next
UNBLOCK_AFTER = 3  # consecutive samples below the threshold minus HYSTERESIS that unblock a GPU
HYSTERESIS = 0.05  # share of memory or load; at most half of the threshold
STALE_AFTER = 3  # intervals without a reading after which a GPU is stale
LEAST_STALE_S = 3.0  # a reading is never stale before this age, however short the interval: a busy machine reads late
FRESH_S = 1.0  # a job is placed only on a GPU that was read within this time
COUNT_EVERY_S = 0.5  # of several samples within this time only one counts for blocking
LOAD_WINDOW_S = 2.0  # the load is ignored this long after a job left: the counter averages over about a second
# The baseline is the memory in use on an empty GPU that no process owns (driver, display). It is at most this share of
# the GPU's memory, or this many MiB if that is more (but never over a quarter); more memory counts as foreign.
MOST_BASELINE = 0.05
LEAST_BASELINE_MIB = 1024


def _nobody(gpu: int) -> Sequence[Tenant]:
    return ()


def _is_booked(gpu: int) -> bool:
    return False


@dataclass(slots=True)
class Admission:
    """The readings of all GPUs, and the verdicts on them.

    Declared GPUs are never read: their Admission has no GPUs and keeps no job away.

    ``cards``: state of each GPU, by index; ``tenants``: returns the attempts with an allocation on a GPU; ``booked``:
    returns whether a part of a GPU is booked; ``faults``: UUID → errors that the GPU reported. In a mask, bit ``i`` stands for GPU ``i``.
    """

    cards: dict[int, GpuAdmission] = field(default_factory=dict)
    thresholds: Thresholds = field(default_factory=Thresholds)
    tenants: Callable[[int], Sequence[Tenant]] = _nobody
    booked: Callable[[int], bool] = _is_booked
    faults: Mapping[str, GpuFault] = field(default_factory=dict)
    trouble: str = ""  # why the last reading failed
    took_s: float = 0.0  # seconds that the last reading took
    measured: dict[str, MeasuredUse] = field(default_factory=dict)  # attempt → what it was seen to use
    blocked_mask: int = 0
    sick_mask: int = 0  # GPUs that are gone or have a fault: not even jobs that name them start there
    watches_errors: bool = False  # the last reading would have told new errors of the driver
    lasting_mask: int = 0  # the blocked GPUs whose code is not in PASSING
    whole_blocked_mask: int = 0  # blocked for jobs that need a whole GPU
    tight_mask: int = 0  # GPUs with memory in use beyond the shares
    next_look: float | None = None  # monotonic seconds at which the next GPU becomes stale

    @classmethod
    def of(cls, gpus: Iterable[Gpu], thresholds: Thresholds, now: Now) -> Admission:
        """Return the Admission for these GPUs, none of which has been read yet."""
        made = cls({gpu.index: GpuAdmission(gpu) for gpu in gpus}, thresholds)
        made.judge(now)
        return made

    @property
    def frozen(self) -> bool:
        """True if the verdicts are final (`core/frozen_admission.py`)."""
        return False

    def ordinals(self) -> dict[int, int | str]:
        """Return index → the driver's name for the GPU (`driver_name`), only for GPUs whose index is not this name."""
        names = {i: driver_name(card.gpu, card.reading) for i, card in self.cards.items()}
        return {i: name for i, name in names.items() if name != i}

    # -- applying readings --------------------------------------------------------------------------------

    def take(self, readings: Readings, now: Now) -> None:
        """Apply the result of a reading, which may be a failure; then judge all GPUs again."""
        self.trouble = readings.problem
        self.took_s = max(0.0, now.mono - readings.at)
        if not readings.problem:
            self.watches_errors = readings.watches_errors
            found = {reading.uuid: reading for reading in readings.gpus}
            for card in self.cards.values():
                reading = found.get(card.gpu.uuid)
                card.read_at = readings.at
                card.reading = reading
                if reading is None or reading.lost or reading.mig:
                    card.measured_at = -math.inf
                    card.above = card.below = card.clean = 0
                elif card.freed_at is None or readings.at > card.freed_at:  # older readings may show the job that left
                    first = readings.at - card.measured_at > self._stale_s()
                    self._measure(card, reading, now, first)
        self.judge(now)

    def fresh(self, gpus: Iterable[int], now: Now) -> bool:
        """Return whether each of these GPUs was read recently enough to place a job on it.

        A reading may be ``FRESH_S`` seconds old, plus the duration of the last reading. Declared GPUs are never read,
        and need no reading. An engine places jobs itself, so its last report is always recent enough.
        """
        since = now.mono - FRESH_S - self.took_s
        known = (self.cards[gpu] for gpu in gpus if gpu in self.cards)
        return all(card.read_at >= since or card.by_engine for card in known)

    @property
    def uncertain(self) -> bool:
        """True if at least one unblocked GPU has a last sample that reached a threshold.

        The next sample then decides whether this GPU is blocked.
        """
        return any(card.above and not card.blocked for card in self.cards.values())

    def left(self, gpus: Iterable[int], now: Now) -> bool:
        """Record that a job left these GPUs. Each of them is then read again before a job starts there.

        Return True if at least one of these GPUs can be read. Declared GPUs are never read.
        """
        mine = [self.cards[gpu] for gpu in gpus if gpu in self.cards]
        for card in mine:
            waited_for = card.freed_at is not None and now.mono - card.freed_at < self.thresholds.release_s
            card.before_mib = min(card.before_mib, card.foreign_mib) if waited_for else card.foreign_mib
            card.freed_at = now.mono
        if mine:
            self.judge(now)
        return bool(mine)

    def accept(self, gpus: Iterable[int], now: Now) -> None:
        """Accept the present foreign processes and their memory on these GPUs: they no longer keep jobs away.

        A user requests this with `gpujob resume --force`.
        """
        for gpu in gpus:
            card = self.cards.get(gpu)
            if card is not None:
                named = sum(process.memory_mib or 0 for process in card.foreign_processes)
                card.accepted |= {_key(process): process.memory_mib or 0 for process in card.foreign_processes}
                card.accepted_mib += named
                card.baseline_mib = (card.baseline_mib or 0) + max(0, card.foreign_mib - named)
                card.foreign_mib = card.overcommit = card.overcommit_mib = card.above = 0
                card.blocked = card.whole_blocked = False
                card.foreign_processes = []
                card.why_overcommit = NOTHING_FORBIDDEN
                card.freed_at = None
        self.judge(now)

    # -- measuring ----------------------------------------------------------------------------------------

    def _measure(self, card: GpuAdmission, reading: GpuSnapshot, now: Now, first: bool) -> None:
        total, used = reading.memory_total_mib or 0, reading.memory_used_mib
        tenants = self.tenants(card.gpu.index)
        if used is None or not total:
            card.own = {}
            card.own_mib = card.foreign_mib = 0
            card.measured_at = -math.inf
            return
        card.measured_at = card.read_at
        card.accepted_mib = _accepted_mib(card, reading)
        used -= card.accepted_mib
        own, foreign_processes = self._split(card, reading, tenants, used, total, now)
        card.foreign_processes = foreign_processes
        rest = max(0.0, used - sum(own.values()))
        if not tenants:
            self._learn_baseline(card, rest, foreign_processes, total)
        foreign = int(max(0.0, rest - (card.baseline_mib or 0)))
        capacity = card.capacity_mib
        settle_s = self.thresholds.settle_s
        card.growth = {
            t.key: growth_after(card.growth.get(t.key), t, own.get(t.key, 0.0), settle_s, now) for t in tenants
        }
        card.settled = frozenset(t.key for t in tenants if is_settled(t, card.growth[t.key], settle_s, now))
        shares = () if self.thresholds.by_memory else tenants  # jobs that book memory have no share to exceed
        over = {t: own[t.key] for t in shares if outgrown(t, own.get(t.key, 0.0), capacity)}
        beyond = use_beyond(shares, own, capacity)
        card.own = own
        card.own_mib, card.foreign_mib = int(sum(own.values())), foreign
        more = 0.0 if self.thresholds.by_memory else foreign + beyond
        card.overcommit_mib, card.overcommit = int(more), overcommit(more, capacity, self.thresholds.tolerance)
        card.why_overcommit = NOTHING_FORBIDDEN
        if over and beyond >= foreign:
            worst = max(over, key=lambda t: over[t])
            card.why_overcommit = Verdict(
                "over-share",
                f"{worst.name} uses {mib_text(over[worst])} on GPU {card.gpu.index}, more than its share of "
                f"{mib_text(int(promised(worst, capacity)))}",
            )
        elif card.overcommit:
            card.why_overcommit = Verdict("foreign", in_use_text(card.gpu.index, foreign, foreign_processes))
        self._hysteresis(card, reading, tenants, foreign_processes, foreign / total, first, now)
        if not self._releasing(card, reading):
            self._whole(card, foreign_processes, total, first)

    def _split(
        self, card: GpuAdmission, reading: GpuSnapshot, tenants: Sequence[Tenant], used: int, total: int, now: Now
    ) -> tuple[dict[str, float], list[GpuProcess]]:
        """Return the memory in use by each attempt (attempt key → MiB), and the foreign processes.

        For some attempts the driver does not show the memory in use: it gives no list of processes, no memory figures,
        or pids of another container. The memory of such an attempt is estimated: it is the attempt's share, or the
        memory in use without a known owner, whichever is less.
        """
        own: dict[str, float] = {}
        foreign: list[GpuProcess] = []
        hidden: list[GpuProcess] = []
        silent: set[str] = set()
        known = {tenant.key for tenant in tenants}
        for process in reading.processes or ():
            key = process.owner or self._settling(process, tenants, now) or user_key(process.user)
            if key in known:
                own[key] = own.get(key, 0.0) + (process.memory_mib or 0)
                if process.memory_mib is None:
                    silent.add(key)
            elif _key(process) in card.accepted:
                continue
            elif not process.visible and process.compute:
                hidden.append(process)
            else:
                foreign.append(process)
        loads = loads_of(reading.processes or ())
        for key, mib in own.items():
            self.measured.setdefault(key, MeasuredUse()).add(int(mib), loads.get(key))
        rest = max(0.0, used - sum(own.values()))
        # In a container the list of processes may be empty although memory is in use: treat it as no list.
        blind = reading.processes is None or (not reading.processes and rest > _most_baseline(total))
        pool = max(0.0, rest - (card.baseline_mib or 0))  # the driver's memory belongs to no job
        if not (blind or silent or any(process.memory_mib is None for process in hidden)):
            pool = min(pool, sum(process.memory_mib or 0 for process in hidden))
        unseen = [t for t in tenants if t.key in silent or (t.key not in own and (blind or hidden))]
        for tenant in unseen:
            share = min(pool, promised(tenant, card.capacity_mib))
            own[tenant.key] = own.get(tenant.key, 0.0) + share
            pool -= share
        if hidden and (not unseen or pool > self.thresholds.tolerance * total):
            foreign += hidden
        return own, foreign

    def _settling(self, process: GpuProcess, tenants: Sequence[Tenant], now: Now) -> str:
        """Return the key of the attempt that probably started ``process``; empty if no attempt fits.

        Only processes of the scheduler's own user are assigned to an attempt. The result is the attempt that started
        last before the process. An attempt that started more than ``settle_s`` seconds ago does not fit.

        In a scheduler of several users, a process belongs to the last attempt of its user on this GPU.
        """
        of_user = [tenant for tenant in tenants if tenant.user and tenant.user == process.user]
        if of_user:
            return max(of_user, key=lambda tenant: tenant.started_at or now.wall).key
        if not process.ours or not process.visible:
            return ""
        for tenant in sorted(tenants, key=lambda t: -(t.started_at or now.wall)):
            since = tenant.started_at if tenant.started_at is not None else now.wall
            if now.wall - since <= self.thresholds.settle_s and process.started_at >= since - 1.0:
                return tenant.key
        return ""

    def _learn_baseline(self, card: GpuAdmission, rest: float, foreign: Sequence[GpuProcess], total: int) -> None:
        """Learn the baseline of a GPU without jobs: the memory that the driver and a display use."""
        working = [process for process in foreign if process.compute]
        if any(process.memory_mib is None for process in working):
            return
        nobodys = max(0, int(rest) - sum(process.memory_mib or 0 for process in working))
        if nobodys <= _most_baseline(total):  # a larger rest belongs to processes that the driver does not show
            card.baseline_mib = nobodys if card.baseline_mib is None else min(card.baseline_mib, nobodys)

    def _hysteresis(
        self,
        card: GpuAdmission,
        reading: GpuSnapshot,
        tenants: Sequence[Tenant],
        foreign: Sequence[GpuProcess],
        memory: float,
        first: bool,
        now: Now,
    ) -> None:
        thresholds = self.thresholds
        if thresholds.by_memory:
            return
        load = self._foreign_load(card, reading, tenants, foreign, now)
        if not first and now.mono - card.counted_at < min(COUNT_EVERY_S, thresholds.interval_s / 2):
            return
        card.counted_at = now.mono
        if memory >= thresholds.memory or load >= thresholds.load:
            card.above, card.below = card.above + 1, 0
            if (first or card.above >= BLOCK_AFTER) and not self._releasing(card, reading):
                card.blocked = True
        elif memory < _below(thresholds.memory) and load < _below(thresholds.load):
            card.above, card.below = 0, card.below + 1
            if card.below >= UNBLOCK_AFTER:
                card.blocked = False
        else:
            card.above = card.below = 0

    def _foreign_load(
        self,
        card: GpuAdmission,
        reading: GpuSnapshot,
        tenants: Sequence[Tenant],
        foreign: Sequence[GpuProcess],
        now: Now,
    ) -> float:
        if reading.load is None:
            return 0.0
        if card.freed_at is not None and now.mono - card.freed_at < LOAD_WINDOW_S:
            return 0.0
        if not tenants and not card.accepted:
            return reading.load
        working = [process for process in foreign if process.compute]
        known = [process.load for process in working if process.load is not None]
        if len(known) == len(working):
            return min(reading.load, sum(known))
        # The driver gives the load of busy processes only: subtract the loads of the processes that are not foreign.
        others = (process for process in reading.processes or () if process not in working)
        return max(0.0, reading.load - sum(process.load or 0.0 for process in others))

    def _releasing(self, card: GpuAdmission, reading: GpuSnapshot) -> bool:
        """Return whether memory of a job that has ended may still be in use.

        After the end of a job, the memory that is still in use counts as foreign. So the foreign memory after the end
        is compared with the foreign memory before the end. The result is True if the increase is greater than the
        tolerance.

        The result is always False if ``release_s`` seconds have passed since the end. It is also always False if jobs
        book MiB instead of shares (`Thresholds.by_memory`).
        """
        if (
            self.thresholds.by_memory
            or card.freed_at is None
            or card.measured_at - card.freed_at >= self.thresholds.release_s
        ):
            return False
        return card.foreign_mib - card.before_mib > self.thresholds.tolerance * (reading.memory_total_mib or 0)

    def _whole(self, card: GpuAdmission, foreign: Sequence[GpuProcess], total: int, first: bool) -> None:
        """Block or unblock a GPU for jobs that need a whole GPU.

        The GPU is blocked if a reading shows that foreign compute processes use more memory than the tolerance, or an
        unknown amount. All other readings are clean. The GPU is unblocked after ``UNBLOCK_AFTER`` consecutive clean
        readings. ``first``: there was no recent reading before; one clean reading then unblocks the GPU.
        """
        working = [process for process in foreign if process.compute]
        memory = sum(process.memory_mib or 0 for process in working)
        unknown = [process for process in working if process.memory_mib is None]
        if unknown or memory > self.thresholds.tolerance * total:
            card.whole_blocked, card.clean = True, 0
            silent = (
                f"GPU {card.gpu.index} is used by foreign processes whose memory the driver does not report"
                f"{largest_process_text(unknown)}"
            )
            card.whole = Verdict("foreign", silent if unknown else in_use_text(card.gpu.index, memory, working))
            card.whole_until = (
                "until they end" if unknown
                else f"while they use more than {100 * self.thresholds.tolerance:g} % of the GPU's memory"
            )  # fmt: skip
            return
        card.clean += 1
        if first or card.clean >= UNBLOCK_AFTER:
            card.whole_blocked = False

    # -- judging ------------------------------------------------------------------------------------------

    def judge(self, now: Now) -> None:
        """Judge all GPUs at the time ``now``: set their verdicts, the masks, and ``next_look``."""
        self.blocked_mask = self.lasting_mask = self.whole_blocked_mask = self.tight_mask = self.sick_mask = 0
        due = []
        for index, card in self.cards.items():
            card.verdict = self._verdict(card, now)
            if card.verdict.code:
                self.blocked_mask |= 1 << index
                if card.verdict.code not in PASSING:
                    self.lasting_mask |= 1 << index
            if card.verdict.code == "gone" or self.fault(card) is not None:
                self.sick_mask |= 1 << index
            if card.whole_blocked:
                self.whole_blocked_mask |= 1 << index
            if card.overcommit or card.overcommit_mib:
                self.tight_mask |= 1 << index
            if card.verdict.code != "stale" and card.read_at > -math.inf and not card.by_engine:
                due.append(card.read_at + self._stale_s() + 0.001)
        self.next_look = min((moment for moment in due if moment > now.mono), default=None)

    def fault(self, card: GpuAdmission) -> GpuFault | None:
        """Return the fault that keeps jobs away from a GPU; None if it has none, or if faults do not count."""
        fault = self.faults.get(card.gpu.uuid) if self.thresholds.hold_on_errors else None
        return fault if fault is not None and fault.active else None

    def _stale_s(self) -> float:
        return max(LEAST_STALE_S, STALE_AFTER * self.thresholds.interval_s)

    def _verdict(self, card: GpuAdmission, now: Now) -> Verdict:
        index, reading = card.gpu.index, card.reading
        if self.trouble:
            return Verdict("stale", f"GPU {index} cannot be read: {self.trouble}")
        if card.read_at == -math.inf:
            return Verdict("stale", f"GPU {index} has not been read yet")
        if reading is not None and reading.by_engine:
            if reading.problem:
                return Verdict("drained", reading.problem)  # it names the node
            if reading.in_use and not self.booked(index):
                return Verdict(
                    "foreign", f"GPU {index} ({card.gpu.uuid}) is allocated to jobs of other users or programs"
                )
            return NOTHING_FORBIDDEN
        age = now.mono - card.read_at
        if age > self._stale_s():
            return Verdict("stale", f"GPU {index} has not been read for {age:.0f} s")
        fault, changed = self.fault(card), mig_change(card.gpu, reading)
        if changed or reading is None or reading.lost:
            why = f": {reading.problem}" if reading is not None and reading.problem else ""
            why = changed or f"GPU {index} ({card.gpu.uuid}) is gone{why}"
            return Verdict("gone", why + (f"; before, it reported {fault.what}" if fault is not None else ""))
        if reading.problem:
            return Verdict("unhealthy", f"GPU {index}: {reading.problem}")
        if fault is not None:
            return Verdict("unhealthy", fault.sentence(index, now.wall))
        if reading.memory_used_mib is None or not reading.memory_total_mib:
            return Verdict("unhealthy", f"GPU {index}: the driver does not report the memory in use")
        if card.freed_at is not None:
            if card.read_at <= card.freed_at:
                return Verdict(
                    "releasing", f"GPU {index} was just freed by a job; no job starts on it before its next reading"
                )
            grown = card.foreign_mib - card.before_mib
            if self._releasing(card, reading):
                who = largest_process_text(card.foreign_processes)
                return Verdict(
                    "releasing", f"GPU {index}: {mib_text(grown)} are still in use{who} after the end of a job"
                )
            if (
                grown <= self.thresholds.tolerance * reading.memory_total_mib
                and now.mono - card.freed_at >= LOAD_WINDOW_S
            ):
                card.freed_at = None
        if card.blocked and card.below:
            return Verdict(
                "foreign",
                f"GPU {index} was just in use by foreign processes; it gets jobs again when further readings show "
                "that it is free",
            )
        if card.blocked or card.above:
            again = "" if card.blocked else "; the next reading follows shortly"
            if card.foreign_mib >= _below(self.thresholds.memory) * reading.memory_total_mib:
                return Verdict("foreign", in_use_text(index, card.foreign_mib, card.foreign_processes) + again)
            busy = f"{100 * (reading.load or 0):.0f} % busy"
            limit = f"limit {100 * self.thresholds.load:g} %{again}"
            return Verdict(
                "foreign",
                f"GPU {index} is {busy} with foreign processes{largest_process_text(card.foreign_processes)}; {limit}",
            )
        return NOTHING_FORBIDDEN

    def free_mib(self, index: int) -> int:
        """Return the MiB of a GPU that are neither in use nor set aside for a job; 0 if unknown.

        For a job, memory is set aside: the part of its requested memory, or of its share, that it does not use yet. If
        it requested no memory (`Thresholds.default_mib`), this ends when its memory has settled
        (`core/tenants.py: is_settled`): what it uses then is what it needs.
        """
        card = self.cards[index]
        reading = card.reading
        if reading is None or reading.memory_used_mib is None or not reading.memory_total_mib:
            return 0
        free = float(reading.memory_total_mib - (reading.reserved_mib or 0) - reading.memory_used_mib)
        for tenant in self.tenants(index):
            requested = tenant.vram_mib if tenant.vram_mib != self.thresholds.default_mib else 0
            aside = requested if tenant.key in card.settled else promised(tenant, reading.memory_total_mib)
            free -= max(0.0, aside - card.own.get(tenant.key, 0.0))
        return max(0, int(free))

    def most_mib(self, index: int) -> int:
        """Return the MiB that one job can use on an otherwise empty GPU; 0 if unknown.

        This is the total memory minus the tolerance and the baseline.
        """
        card = self.cards.get(index)
        if card is None or card.reading is None or not card.reading.memory_total_mib:
            return 0
        return card.capacity_mib - int(self.thresholds.tolerance * card.reading.memory_total_mib)

    def peak_mib(self, key: str) -> int | None:
        """Return the most MiB that an attempt was seen to use on one GPU; None if it was never measured."""
        used = self.measured.get(key)
        return None if used is None else used.peak_mib

    def others_mib(self, index: int, key: str) -> int | None:
        """Return the MiB of a GPU in use by all but one attempt at its last reading, with the driver's; None: unknown."""
        card = self.cards.get(index)
        if card is None or card.reading is None or card.reading.memory_used_mib is None or key not in card.own:
            return None
        return max(0, int(card.reading.memory_used_mib - card.own[key]))

    def capacity_mib(self, index: int) -> int | None:
        """Return the MiB of a GPU without those that the driver and a display use; None if it was not read."""
        card = self.cards.get(index)
        return None if card is None or card.reading is None or not card.reading.memory_total_mib else card.capacity_mib

    def has_room(self, index: int, parts: int, vram_mib: int) -> bool:
        """Return whether the GPU has enough memory left for the job; True if its memory is not known.

        If jobs book MiB instead of shares (`Thresholds.by_memory`), the job must fit into `free_mib`.

        Otherwise two rules hold. The memory that jobs requested (``vram``) or, if that is more, use must fit into the
        GPU together, beside all other memory. And the shares must fit beside the foreign memory, with some tolerance:
        a share is rarely used to the last MiB, and a job may use a little more than its share. A job that requests more
        than the driver leaves gets a GPU without other jobs.
        """
        card = self.cards.get(index)
        if card is None or card.reading is None or not card.reading.memory_total_mib:
            return True
        capacity = card.capacity_mib
        if vram_mib > card.reading.memory_total_mib:
            return False
        vram_mib = min(vram_mib, capacity)
        if self.thresholds.by_memory:
            return self.free_mib(index) >= max(vram_mib, capacity * (parts / WHOLE - self.thresholds.tolerance))
        tenants = self.tenants(index)
        if (vram_mib or any(tenant.vram_mib for tenant in tenants)) and vram_mib > self.room_mib(index):
            return False
        room = room_of_shares(tenants, card.own, capacity) - card.foreign_mib
        return max(vram_mib, capacity * parts / WHOLE) <= room + self.thresholds.tolerance * capacity

    def room_mib(self, index: int) -> int:
        """Return the MiB of a GPU that are neither in use nor requested by its jobs; below 0 if it has too little."""
        card = self.cards.get(index)
        if card is None:
            return 0
        room = room_beside_requests(self.tenants(index), card.own, card.capacity_mib)
        return math.floor(room) - card.foreign_mib - card.accepted_mib

    def forbids(self, index: int, parts: int, free: int, vram_mib: int = 0) -> Verdict:
        """Return why the readings keep a job away from GPU ``index``; `NOTHING_FORBIDDEN` if the job may start there.

        ``parts``: thousandths of the GPU that the job needs; ``free``: thousandths that are free in the ledger;
        ``vram_mib``: MiB that the job requested (0: none requested).
        """
        card = self.cards.get(index)
        if card is None:
            return NOTHING_FORBIDDEN
        if card.verdict.code:
            return card.verdict
        if parts == WHOLE and card.whole_blocked:
            waits = f"a job that needs a whole GPU waits {card.whole_until}"
            return Verdict(card.whole.code, f"{card.whole.sentence}; {waits}")
        if parts + card.overcommit > free:
            return Verdict(
                card.why_overcommit.code,
                f"{card.why_overcommit.sentence}; the rest of the GPU is smaller than the share that the waiting job needs",
            )
        if not self.has_room(index, parts, vram_mib):
            if self.thresholds.by_memory:
                code = "no-room" if self.tenants(index) else "foreign"  # without jobs, foreign processes use the memory
                left = f"GPU {index} has {mib_text(self.free_mib(index))} that are neither in use nor booked"
                return Verdict(code, f"{left}, but the job needs {mib_text(vram_mib)}" if vram_mib else left)
            unused = max(0, self.room_mib(index))
            if min(vram_mib, card.capacity_mib) > unused:
                has, needs = mib_text(unused), mib_text(vram_mib)
                if has == needs:
                    has, needs = f"{unused} MiB", f"{vram_mib} MiB"
                what = f"{has} that are neither in use nor requested by its jobs"
                return Verdict("no-room", f"GPU {index} has {what}, but the job needs {needs}")
            return Verdict(
                "no-room", f"GPU {index} has too little memory that is neither in use nor booked by its jobs"
            )
        return NOTHING_FORBIDDEN


def _below(limit: float) -> float:
    """Return the threshold ``limit`` minus the hysteresis. Consecutive samples below this value unblock a GPU."""
    return limit - min(HYSTERESIS, limit / 2)


def _most_baseline(total: int) -> int:
    return min(total // 4, max(LEAST_BASELINE_MIB, int(MOST_BASELINE * total)))


def _key(process: GpuProcess) -> tuple[int, float]:
    return process.pid, process.started_at


def _accepted_mib(card: GpuAdmission, reading: GpuSnapshot) -> int:
    """Return how many MiB the accepted processes use together.

    A process counts with at most the memory that it used when the user accepted it. Ended processes are removed from
    ``card.accepted``.
    """
    if card.accepted and reading.processes is not None:
        there = {_key(process): process.memory_mib or 0 for process in reading.processes}
        card.accepted = {key: mib for key, mib in card.accepted.items() if key in there}
        return sum(min(mib, there[key]) for key, mib in card.accepted.items())
    return 0
