"""What the GPUs' own readings forbid and leave: foreign use, shares outgrown, GPUs gone or not heard of; memory that is free.

The ledger decides for our own jobs; readings only guard against what it cannot know. So thresholds are held
against the part of memory and load that is not ours (else a job that works its half hard would lock out the other half), and
each of our jobs counts with at least its promised share from the moment it is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from scheduler.core.gpu import WHOLE, Gpu
from scheduler.core.gpu_snapshot import GpuProcess, GpuSnapshot
from scheduler.core.observations import Now, Readings
from scheduler.core.units import mib_text

PASSING = frozenset({"stale", "foreign", "over-share", "releasing"})  # codes of what ends by itself: a drain waits
BLOCK_AFTER = 2  # samples above the limit, after which it stays blocked (one already holds jobs back for a moment)
UNBLOCK_AFTER = 3  # samples below it, by
HYSTERESIS = 0.05
STALE_AFTER = 3  # intervals without a reading
LEAST_STALE_S = 3.0  # a machine under load may be late with a short interval
OUTGROWN = 1.1  # a job above its share by a tenth is counted as it is
FRESH_S = 1.0  # nobody is put on a GPU that was not looked at a moment ago
COUNT_EVERY_S = 0.5  # of several samples within a moment only one counts for blocking
LOAD_WINDOW_S = 2.0  # the load counter looks back about a second: right after an end it still shows the job
MOST_BASELINE = 0.05  # of the card: what nobody owns while it is empty (driver, display); more is somebody's
LEAST_BASELINE_MIB = 1024


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The settings that readings are judged by; shares 0 to 1, durations in seconds."""

    memory: float = 0.8
    load: float = 0.8
    tolerance: float = 0.02
    interval_s: float = 5.0
    settle_s: float = 120.0
    release_s: float = 30.0
    hold_on_errors: bool = False
    by_memory: bool = False  # jobs book memory, not shares: what counts is how much is free, whoever uses the rest


@dataclass(frozen=True, slots=True)
class Tenant:
    """An attempt of ours that has parts of a GPU: ``parts`` of 1000, started at ``started_at`` (seconds since 1970)."""

    key: str
    job: int
    parts: int
    vram_mib: int = 0
    started_at: float | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the readings say of a GPU: ``code`` is empty when they forbid nothing."""

    code: str = ""  # stale, gone, unhealthy, foreign, over-share, releasing
    sentence: str = ""


NOTHING_FORBIDDEN = Verdict()


@dataclass(slots=True)
class GpuAdmission:
    """One GPU that is read. Memory in MiB."""

    gpu: Gpu
    reading: GpuSnapshot | None = None
    read_at: float = -math.inf
    measured_at: float = -math.inf  # when it last told its memory
    verdict: Verdict = NOTHING_FORBIDDEN  # for every job
    whole: Verdict = NOTHING_FORBIDDEN  # for jobs that need the whole of it
    overcommit: int = 0  # parts that memory beyond the promised shares takes from the ledger's free ones
    overcommit_mib: int = 0
    why_overcommit: Verdict = NOTHING_FORBIDDEN
    own: dict[str, float] = field(default_factory=dict)  # measured, by attempt
    settled: frozenset[str] = frozenset()  # attempts that began so long ago that what they use is what they need
    own_mib: int = 0
    foreign_mib: int = 0
    baseline_mib: int | None = None
    blocked: bool = False
    whole_blocked: bool = False
    above: int = 0
    below: int = 0
    clean: int = 0
    counted_at: float = -math.inf
    freed_at: float | None = None  # a job of ours left it; until it is read again nobody knows what it left
    before_mib: int = 0  # foreign memory at that time
    foreign_processes: list[GpuProcess] = field(default_factory=list)  # processes that are not ours, nor accepted
    accepted: dict[tuple[int, float], int] = field(default_factory=dict)  # pid and start → MiB that somebody accepted

    @property
    def reserved_mib(self) -> int | None:
        """Memory in use that is neither of our jobs nor of others: the driver's own, a display's, what was accepted."""
        told = self.reading
        if told is None or told.memory_used_mib is None:
            return None
        return (told.reserved_mib or 0) + max(0, told.memory_used_mib - self.own_mib - self.foreign_mib)

    @property
    def reason(self) -> str:
        """Why it is not given every job that its free parts would hold."""
        if self.verdict.code:
            return self.verdict.sentence
        return self.whole.sentence if self.whole_blocked else self.why_overcommit.sentence

    def heard_of(self, admission: Admission) -> bool:
        """Whether it was ever read, or reading it failed."""
        return self.read_at > -math.inf or bool(admission.trouble)

    @property
    def state(self) -> str:
        """A word for tables, or an empty text when there is nothing to say."""
        words = {
            "stale": "STALE",
            "gone": "GONE",
            "unhealthy": "UNHEALTHY",
            "releasing": "DRAINING",
            "foreign": "FOREIGN",
        }
        return words.get(self.verdict.code, "")


def _nobody(gpu: int) -> Sequence[Tenant]:
    return ()


@dataclass(slots=True)
class Admission:
    """All GPUs that are read, by index; empty without telemetry (declared GPUs), when nothing is forbidden."""

    cards: dict[int, GpuAdmission] = field(default_factory=dict)
    thresholds: Thresholds = Thresholds()
    tenants: Callable[[int], Sequence[Tenant]] = _nobody
    trouble: str = ""
    took_s: float = 0.0  # from asking to hearing, last time
    peaks: dict[str, int] = field(default_factory=dict)  # attempt → the most MiB that it was seen to use of one GPU
    blocked_mask: int = 0
    lasting_mask: int = 0  # of the blocked ones those that no waiting mends
    whole_blocked_mask: int = 0
    tight_mask: int = 0
    next_look: float | None = None  # the ``mono`` time at which a GPU becomes stale, or the patience for memory ends

    @classmethod
    def of(cls, gpus: Iterable[Gpu], thresholds: Thresholds, now: Now) -> Admission:
        """Admission for these GPUs, none of which was read yet."""
        made = cls({gpu.index: GpuAdmission(gpu) for gpu in gpus}, thresholds)
        made.judge(now)
        return made

    def ordinals(self) -> dict[int, int]:
        """Index → the driver's number now, of GPUs that it numbers otherwise than when the daemon started."""
        return {
            index: card.reading.ordinal
            for index, card in self.cards.items()
            if card.reading is not None and card.reading.ordinal != index
        }

    # -- taking in ----------------------------------------------------------------------------------------

    def take(self, readings: Readings, now: Now) -> None:
        """Take in what was read, and judge."""
        self.trouble = readings.problem
        self.took_s = max(0.0, now.mono - readings.at)
        if not readings.problem:
            found = {reading.uuid: reading for reading in readings.gpus}
            for card in self.cards.values():
                reading = found.get(card.gpu.uuid)
                card.read_at = readings.at
                card.reading = reading
                if reading is None or reading.lost:
                    card.measured_at = -math.inf
                    card.above = card.below = card.clean = 0
                elif card.freed_at is None or readings.at > card.freed_at:  # else it may still show the job that left
                    first = readings.at - card.measured_at > self._stale_s()
                    self._measure(card, reading, now, first)
        self.judge(now)

    def fresh(self, gpus: Iterable[int], now: Now) -> bool:
        """Whether these GPUs were looked at a moment ago, so that somebody may be put on them."""
        since = now.mono - FRESH_S - self.took_s
        return all(self.cards[gpu].read_at >= since for gpu in gpus if gpu in self.cards)

    @property
    def uncertain(self) -> bool:
        """Whether one sample says that a GPU is taken, and another has to say so too."""
        return any(card.above and not card.blocked for card in self.cards.values())

    def left(self, gpus: Iterable[int], now: Now) -> bool:
        """A job left these GPUs: they are read again before anybody gets them. True if any of them is read at all."""
        mine = [self.cards[gpu] for gpu in gpus if gpu in self.cards]
        for card in mine:
            waited_for = card.freed_at is not None and now.mono - card.freed_at < self.thresholds.release_s
            card.before_mib = min(card.before_mib, card.foreign_mib) if waited_for else card.foreign_mib
            card.freed_at = now.mono
        if mine:
            self.judge(now)
        return bool(mine)

    def accept(self, gpus: Iterable[int], now: Now) -> None:
        """Somebody says that what is on these GPUs now may stay: it blocks nobody any more."""
        for gpu in gpus:
            card = self.cards.get(gpu)
            if card is not None:
                named = sum(process.memory_mib or 0 for process in card.foreign_processes)
                card.accepted |= {_key(process): process.memory_mib or 0 for process in card.foreign_processes}
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
        used -= _accepted_mib(card, reading)
        own, foreign_processes = self._split(card, reading, tenants, used, total, now)
        card.foreign_processes = foreign_processes
        rest = max(0.0, used - sum(own.values()))
        if not tenants:
            self._learn_baseline(card, rest, foreign_processes, total)
        foreign = int(max(0.0, rest - (card.baseline_mib or 0)))
        capacity = max(1, total - (card.baseline_mib or 0))
        card.settled = frozenset(t.key for t in tenants if self._settled(t, now))
        shares = () if self.thresholds.by_memory else tenants  # who books memory may use more, as long as there is some
        outgrown = {t: own[t.key] for t in shares if t.key in own and own[t.key] > OUTGROWN * _promised(t, capacity)}
        beyond = sum(used_by - _promised(t, capacity) for t, used_by in outgrown.items())
        card.own = own
        card.own_mib, card.foreign_mib = int(sum(own.values())), foreign
        overcommit = 0.0 if self.thresholds.by_memory else foreign + beyond
        card.overcommit_mib = int(overcommit)
        slack = self.thresholds.tolerance * capacity
        card.overcommit = math.ceil(WHOLE * max(0.0, overcommit - slack) / capacity)
        card.why_overcommit = NOTHING_FORBIDDEN
        if outgrown and beyond >= foreign:
            worst = max(outgrown, key=lambda t: outgrown[t])
            card.why_overcommit = Verdict(
                "over-share",
                f"job {worst.job} uses {mib_text(outgrown[worst])} of its {mib_text(int(_promised(worst, capacity)))} share on "
                f"GPU {card.gpu.index}",
            )
        elif card.overcommit:
            card.why_overcommit = Verdict("foreign", _in_use(card.gpu.index, foreign, foreign_processes))
        self._hysteresis(card, reading, tenants, foreign_processes, foreign / total, first, now)
        if not self._releasing(card, reading):
            self._whole(card, foreign_processes, total, first)

    def _settled(self, tenant: Tenant, now: Now) -> bool:
        return tenant.started_at is not None and now.wall - tenant.started_at > self.thresholds.settle_s

    def _split(
        self, card: GpuAdmission, reading: GpuSnapshot, tenants: Sequence[Tenant], used: int, total: int, now: Now
    ) -> tuple[dict[str, float], list[GpuProcess]]:
        """Memory of each attempt of ours, and the processes that are not ours.

        Where the driver does not tell (no list, numbers of another container, no figures), our jobs count with what
        they were promised, as far as that much is used at all.
        """
        own: dict[str, float] = {}
        foreign: list[GpuProcess] = []
        hidden: list[GpuProcess] = []
        silent: set[str] = set()
        known = {tenant.key for tenant in tenants}
        for process in reading.processes or ():
            key = process.owner or self._settling(process, tenants, now)
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
        for key, mib in own.items():
            if mib > self.peaks.get(key, 0):
                self.peaks[key] = int(mib)
        rest = max(0.0, used - sum(own.values()))
        # An empty list beside memory in use is what a container shows: as good as no list.
        blind = reading.processes is None or (not reading.processes and rest > _most_baseline(total))
        pool = rest
        if not (blind or silent or any(process.memory_mib is None for process in hidden)):
            pool = min(rest, sum(process.memory_mib or 0 for process in hidden))
        unseen = [t for t in tenants if t.key in silent or (t.key not in own and (blind or hidden))]
        for tenant in unseen:
            share = min(pool, _promised(tenant, total))
            own[tenant.key] = own.get(tenant.key, 0.0) + share
            pool -= share
        if hidden and (not unseen or pool > self.thresholds.tolerance * total):
            foreign += hidden
        return own, foreign

    def _settling(self, process: GpuProcess, tenants: Sequence[Tenant], now: Now) -> str:
        """The attempt that an unknown process of our own user may belong to: one that started shortly before it."""
        if not process.ours or not process.visible:
            return ""
        for tenant in sorted(tenants, key=lambda t: -(t.started_at or now.wall)):
            since = tenant.started_at if tenant.started_at is not None else now.wall
            if now.wall - since <= self.thresholds.settle_s and process.started_at >= since - 1.0:
                return tenant.key
        return ""

    def _learn_baseline(self, card: GpuAdmission, rest: float, foreign: Sequence[GpuProcess], total: int) -> None:
        """What is in use on a card that nobody computes on: the driver's own, a display's; never more than a little."""
        working = [process for process in foreign if process.compute]
        if any(process.memory_mib is None for process in working):
            return
        nobodys = max(0, int(rest) - sum(process.memory_mib or 0 for process in working))
        if nobodys <= _most_baseline(total):  # a card that is full when first seen teaches nothing
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
        # The driver counts only who is busy: what those make that we know is not theirs.
        others = (process for process in reading.processes or () if process not in working)
        return max(0.0, reading.load - sum(process.load or 0.0 for process in others))

    def _releasing(self, card: GpuAdmission, reading: GpuSnapshot) -> bool:
        """Whether more memory is in use than before a job left, and it may still be that job's."""
        if (
            self.thresholds.by_memory
            or card.freed_at is None
            or card.measured_at - card.freed_at >= self.thresholds.release_s
        ):
            return False
        return card.foreign_mib - card.before_mib > self.thresholds.tolerance * (reading.memory_total_mib or 0)

    def _whole(self, card: GpuAdmission, foreign: Sequence[GpuProcess], total: int, first: bool) -> None:
        """A job that was promised the whole card is kept from one on which somebody computes."""
        working = [process for process in foreign if process.compute]
        memory = sum(process.memory_mib or 0 for process in working)
        if any(process.memory_mib is None for process in working) or memory > self.thresholds.tolerance * total:
            card.whole_blocked, card.clean = True, 0
            card.whole = Verdict("foreign", _in_use(card.gpu.index, memory, working))
            return
        card.clean += 1
        if first or card.clean >= UNBLOCK_AFTER:
            card.whole_blocked = False

    # -- judging ------------------------------------------------------------------------------------------

    def judge(self, now: Now) -> None:
        """Say anew what each GPU may be given, as of now."""
        self.blocked_mask = self.lasting_mask = self.whole_blocked_mask = self.tight_mask = 0
        due = []
        for index, card in self.cards.items():
            card.verdict = self._verdict(card, now)
            if card.verdict.code:
                self.blocked_mask |= 1 << index
                if card.verdict.code not in PASSING:
                    self.lasting_mask |= 1 << index
            if card.whole_blocked:
                self.whole_blocked_mask |= 1 << index
            if card.overcommit or card.overcommit_mib:
                self.tight_mask |= 1 << index
            if card.verdict.code != "stale" and card.read_at > -math.inf:
                due.append(card.read_at + self._stale_s() + 0.001)
        self.next_look = min((moment for moment in due if moment > now.mono), default=None)

    def _stale_s(self) -> float:
        return max(LEAST_STALE_S, STALE_AFTER * self.thresholds.interval_s)

    def _verdict(self, card: GpuAdmission, now: Now) -> Verdict:
        index, reading = card.gpu.index, card.reading
        if self.trouble:
            return Verdict("stale", f"no telemetry from GPU {index}: {self.trouble}")
        if card.read_at == -math.inf:
            return Verdict("stale", f"GPU {index} has not been read yet")
        age = now.mono - card.read_at
        if age > self._stale_s():
            return Verdict("stale", f"no telemetry from GPU {index} for {age:.0f} s")
        if reading is None or reading.lost:
            why = f": {reading.problem}" if reading is not None and reading.problem else ""
            return Verdict("gone", f"GPU {index} ({card.gpu.uuid}) is gone{why}")
        if reading.problem:
            return Verdict("unhealthy", f"GPU {index}: {reading.problem}")
        if reading.errors and self.thresholds.hold_on_errors:
            return Verdict("unhealthy", f"GPU {index} reported {reading.errors}")
        if reading.memory_used_mib is None or not reading.memory_total_mib:
            return Verdict("unhealthy", f"the driver does not tell how much memory of GPU {index} is in use")
        if card.freed_at is not None:
            if card.read_at <= card.freed_at:
                return Verdict("releasing", f"GPU {index} was just left by a job; it is read again first")
            grown = card.foreign_mib - card.before_mib
            if self._releasing(card, reading):
                who = _who(card.foreign_processes)
                return Verdict("releasing", f"GPU {index}: {mib_text(grown)} not yet released after a job's end{who}")
            if (
                grown <= self.thresholds.tolerance * reading.memory_total_mib
                and now.mono - card.freed_at >= LOAD_WINDOW_S
            ):
                card.freed_at = None
        if card.blocked and card.below:
            return Verdict("foreign", f"GPU {index} was in use by others a moment ago; it is watched a little longer")
        if card.blocked or card.above:
            again = "" if card.blocked else "; looked at again in a moment"
            if card.foreign_mib >= _below(self.thresholds.memory) * reading.memory_total_mib:
                return Verdict("foreign", _in_use(index, card.foreign_mib, card.foreign_processes) + again)
            busy = f"{100 * (reading.load or 0):.0f} % busy"
            limit = f"limit {100 * self.thresholds.load:g} %{again}"
            return Verdict(
                "foreign", f"GPU {index} is {busy} with work that is not ours{_who(card.foreign_processes)}; {limit}"
            )
        return NOTHING_FORBIDDEN

    def free_mib(self, index: int) -> int:
        """Memory of a GPU that is neither in use nor promised to a job of ours that may still grow into it; 0 if unknown.

        What a job was promised counts until `settle` seconds after its start, what it uses from then on.
        """
        card = self.cards[index]
        reading = card.reading
        if reading is None or reading.memory_used_mib is None or not reading.memory_total_mib:
            return 0
        free = float(reading.memory_total_mib - reading.memory_used_mib)
        for tenant in self.tenants(index):
            if tenant.key not in card.settled:
                free -= max(0.0, _promised(tenant, reading.memory_total_mib) - card.own.get(tenant.key, 0.0))
        return max(0, int(free))

    def most_mib(self, index: int) -> int:
        """What a job on a GPU of its own can count on: its memory without what the driver itself takes; 0 if unknown."""
        card = self.cards.get(index)
        if card is None or card.reading is None or not card.reading.memory_total_mib:
            return 0
        total = card.reading.memory_total_mib
        return int(total * (1 - self.thresholds.tolerance)) - (card.baseline_mib or 0)

    def has_room(self, index: int, parts: int, vram_mib: int) -> bool:
        """Whether the memory that is left holds the job: each of ours counts with what it was promised, or has outgrown."""
        card = self.cards.get(index)
        if card is None or card.reading is None or not card.reading.memory_total_mib:
            return True
        capacity = card.reading.memory_total_mib - (card.baseline_mib or 0)
        if self.thresholds.by_memory:
            return self.free_mib(index) >= max(vram_mib, capacity * (parts / WHOLE - self.thresholds.tolerance))
        room = float(capacity - card.foreign_mib)
        for tenant in self.tenants(index):
            promised, own = _promised(tenant, capacity), card.own.get(tenant.key, 0.0)
            room -= own if own > OUTGROWN * promised else promised
        return max(vram_mib, capacity * parts / WHOLE) <= room + self.thresholds.tolerance * capacity

    def forbids(self, index: int, parts: int, free: int, vram_mib: int = 0) -> Verdict:
        """Why a job that needs ``parts`` of GPU ``index``, of which the ledger has ``free``, must not go there."""
        card = self.cards.get(index)
        if card is None:
            return NOTHING_FORBIDDEN
        if card.verdict.code:
            return card.verdict
        if parts == WHOLE and card.whole_blocked:
            limit = f"{100 * self.thresholds.tolerance:g} %"
            return Verdict(
                card.whole.code,
                f"{card.whole.sentence}; a job that needs the whole GPU waits while that is above {limit}",
            )
        if parts + card.overcommit > free:
            return Verdict(
                card.why_overcommit.code, f"{card.why_overcommit.sentence}; too little is left for this job's share"
            )
        if not self.has_room(index, parts, vram_mib):
            if self.thresholds.by_memory:
                code = "no-room" if self.tenants(index) else "foreign"  # who else it is may go by itself
                left = f"GPU {index} has {mib_text(self.free_mib(index))} that are neither in use nor promised"
                return Verdict(code, f"{left}, and it needs {mib_text(vram_mib)}" if vram_mib else left)
            return Verdict(
                "no-room", f"GPU {index} has too little memory left beside what its jobs were promised or use"
            )
        return NOTHING_FORBIDDEN


def _below(limit: float) -> float:
    """From where a sample counts as well below a limit."""
    return limit - min(HYSTERESIS, limit / 2)


def _most_baseline(total: int) -> int:
    return min(total // 4, max(LEAST_BASELINE_MIB, int(MOST_BASELINE * total)))


def _key(process: GpuProcess) -> tuple[int, float]:
    return process.pid, process.started_at


def _accepted_mib(card: GpuAdmission, reading: GpuSnapshot) -> int:
    """Memory that somebody accepted, of the processes that are still there; the others are forgotten."""
    if card.accepted and reading.processes is not None:
        there = {_key(process): process.memory_mib or 0 for process in reading.processes}
        card.accepted = {key: mib for key, mib in card.accepted.items() if key in there}
        return sum(min(mib, there[key]) for key, mib in card.accepted.items())
    return 0


def _promised(tenant: Tenant, capacity: float) -> float:
    return max(tenant.vram_mib, capacity * tenant.parts / WHOLE)


def _in_use(index: int, mib: float, processes: Sequence[GpuProcess]) -> str:
    return f"GPU {index} has {mib_text(int(mib))} in use by processes that are not ours{_who(processes)}"


def _who(processes: Sequence[GpuProcess]) -> str:
    """The largest of them, by number and user."""
    if not processes:
        return ""
    largest = max(processes, key=lambda process: (process.memory_mib or 0, -process.pid))
    if largest.owner:
        return f" (pid {largest.pid} of job {largest.owner.partition('.')[0]}, which was not given this GPU)"
    user = f", user {largest.user}" if largest.user else ""
    more = f" and {len(processes) - 1} more" if len(processes) > 1 else ""
    return f" (pid {largest.pid}{user}{more})"
