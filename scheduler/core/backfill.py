"""Backfill: GPUs are reserved until the expected start of a job that waits long; shorter jobs use them meanwhile.

This is EASY backfill (Lifka, "The ANL/IBM SP scheduling system", 1995; Feitelson and Weil, 1998): one waiting job has a
reservation in time, and other jobs pass it only on other GPUs, or if they end before its start. Four rules are our own:

- A job gets a reservation only when its start is expected soon: within `MOST_OF_WAIT` of the time that it has waited; or
  when it has waited for `LONGEST_WAIT_S`. So the GPU time that the reservation may waste stays small beside the wait. In
  replays of traces (`benchmarks/placement.md`), reservations from the first moment cost 10 % of the mean completion time,
  these cost nothing.
- Expected ends include the errors of earlier estimates: all jobs that a start depends on end in time with the
  probability `LIKELY`.
- The start is promised with some slack, and jobs that end before the promise is due may use the GPUs. If a promise is missed,
  the next one has more slack. After `LENIENT` missed promises, other jobs must end before the expected start instead, then
  in half of the time until it, and so on.
- After `MOST_MISSED` missed promises (or `max_overtakes`, if that is less), no other job may use the GPUs. So no job waits
  for ever, however wrong the estimates are.

A start can be expected if the run times of the running jobs on enough GPUs are known. Otherwise, and with
`backfill: false`, the setting `max_overtakes` counts instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scheduler.core.gpu import WHOLE, ids_of, mask_of
from scheduler.core.job import Job, JobState
from scheduler.core.placement_class import PlacementClass, class_of
from scheduler.core.queue import ExpectedStart, Promise
from scheduler.core.runtime_estimate import Expected, RunKind, sure_part

if TYPE_CHECKING:
    from scheduler.core.decision_pass import DecisionPass
    from scheduler.core.observations import Now
    from scheduler.core.scheduler_state import SchedulerState

LIKELY = 0.5
MOST_OF_WAIT = 0.05
LONGEST_WAIT_S = 7 * 86_400.0
SHORTEST_PROMISE_S = 60.0
LONGEST_SLACK_S = 86_400.0
LENIENT = 2
MOST_MISSED = 10
MOST_LOOKED_AT = 100  # waiting jobs that one pass tries on lent GPUs
# The expected start of a class is computed again after `MOST_OF_WAIT` of the time until it, within these limits.
SHORTEST_USE_S, LONGEST_USE_S = 1.0, 60.0


@dataclass(frozen=True, slots=True)
class Use:
    """The part of a GPU that a running job uses, in thousandths and MiB. ``in_s``: seconds until its end, by its median.

    ``expected``: its expected run time; None: it is being stopped. ``ran_s``: how long it has run.
    """

    job: int
    parts: int
    mib: int
    in_s: float
    expected: Expected | None
    ran_s: float


@dataclass(frozen=True, slots=True)
class Opening:
    """GPUs on which a job can start together, and what it waits for there. ``in_s``: seconds until then."""

    mask: int
    in_s: float
    waits_for: tuple[Use, ...]


class ExpectedEnds:
    """When the running jobs are expected to end, for each GPU."""

    def __init__(self, state: SchedulerState, now: Now) -> None:
        self._state = state
        self._on: dict[int, list[Use]] = {}
        cards = state.fleet.admission.cards
        self._closed_mask = mask_of(gpu for gpu, card in cards.items() if card.verdict.code == "foreign")
        self._closed_mask |= mask_of(gpu for held in state.holdings.values() for gpu in held.gpus)
        for job in state.live.values():
            gpus = job.gpus or state.released.get(job.id) or ()
            if not gpus or job.need.by_name:
                continue
            use = self._use(job, now)
            if use is None:
                self._closed_mask |= mask_of(gpus)
            else:
                for gpu in gpus:
                    self._on.setdefault(gpu, []).append(use)
        for uses in self._on.values():
            uses.sort(key=lambda use: (use.in_s, use.job))

    def _use(self, job: Job, now: Now) -> Use | None:
        """Return what a running job uses, and until when; None if nothing is known of its end."""
        state, kind = self._state, self._state.fleet.granted(class_of(job))
        ran = max(0.0, now.wall - job.started_at) if job.started_at is not None else 0.0
        if job.state is JobState.STOPPING:
            return Use(job.id, kind.need.parts, kind.vram_mib, state.policy.kill_grace_s, None, ran)
        expected = state.estimates.expected(job.spec, job.need)
        if expected is None:
            return None
        in_s = state.estimates.run_s(expected, 0.5, ran) - ran
        return Use(job.id, kind.need.parts, kind.vram_mib, in_s, expected, ran)

    def opening(self, kind: PlacementClass, reserved: int = 0) -> Opening | None:
        """Return where a job of ``kind`` can start first; None if too little is known, or if it waits for no job's end.

        ``reserved``: mask of GPUs that are reserved for other jobs.
        """
        fleet = self._state.fleet
        kind = fleet.granted(kind)
        usable = fleet.could_use(kind) & ~mask_of(fleet.claims) & ~self._closed_mask & ~reserved
        if kind.need.parts == WHOLE:
            usable &= ~fleet.admission.whole_blocked_mask
        best: Opening | None = None
        for mask in fleet.groups(kind):
            if (usable & mask).bit_count() < kind.need.count:
                continue
            here = sorted(self._free(gpu, kind.need.parts, kind.vram_mib) for gpu in ids_of(usable & mask))
            here = here[: kind.need.count]
            if here[-1][0] == math.inf:
                continue
            if best is None or here[-1][0] < best.in_s:
                uses = {use.job: use for in_s, gpu in here for use in self._until(gpu, in_s)}
                best = Opening(mask_of(gpu for _, gpu in here), here[-1][0], tuple(uses.values()))
        return best if best is not None and best.waits_for else None

    def _free(self, gpu: int, parts: int, mib: int) -> tuple[float, int]:
        """Return in how many seconds a GPU has this much free, by the medians, and the GPU; infinite if never."""
        fleet = self._state.fleet
        free, memory = fleet.free[gpu], fleet.memory_free.get(gpu, mib)
        if free >= parts and memory >= mib:
            return (0.0, gpu)
        outside = fleet.outside.get(gpu, (0, 0, ""))[0]
        free = WHOLE - fleet.booked(gpu) - outside  # may be below 0: others have booked the same parts
        for use in self._on.get(gpu, ()):
            free, memory = free + use.parts, memory + use.mib
            if free >= parts and memory >= mib:
                return (use.in_s, gpu)
        return (math.inf, gpu)

    def _until(self, gpu: int, in_s: float) -> Iterator[Use]:
        return (use for use in self._on.get(gpu, ()) if use.in_s <= in_s)

    def likely_s(self, opening: Opening) -> float:
        """Return the seconds until all jobs have ended that an opening waits for, with the probability `LIKELY`."""
        estimates, part = self._state.estimates, sure_part(len(opening.waits_for), LIKELY)
        latest = 0.0
        for use in opening.waits_for:
            in_s = use.in_s if use.expected is None else estimates.run_s(use.expected, part, use.ran_s) - use.ran_s
            latest = max(latest, in_s)
        return latest


class Backfill:
    """The reservations of one pass: for jobs that wait long, and for jobs that were overtaken too often."""

    def __init__(self, decision: DecisionPass) -> None:
        self._decision, self._state, self._now = decision, decision.state, decision.now
        self._ends: tuple[int, ExpectedEnds] | None = None
        self._looks = MOST_LOOKED_AT
        self._made = False  # a reservation in time: there is one at most

    @property
    def ends(self) -> ExpectedEnds:
        """The expected ends of the running jobs. They are computed again after a start."""
        starts = len(self._decision.plan.starts)
        if self._ends is None or self._ends[0] != starts:
            self._ends = starts, ExpectedEnds(self._state, self._now)
        return self._ends[1]

    def reserve(self, job_id: int, kind: PlacementClass) -> None:
        """Reserve GPUs for a job that does not fit, if it is due: until its expected start, or because it was overtaken."""
        if not self._reserve_until_start(job_id, kind):
            self.reserve_if_overtaken(job_id, kind)

    def reserve_if_overtaken(self, job_id: int, kind: PlacementClass) -> None:
        """Reserve GPUs, or slots, for a job that was overtaken too often, unless its start can be expected."""
        state = self._state
        if state.queue.overtaken(job_id) >= state.policy.max_overtakes and not self._can_expect(kind):
            state.fleet.reserve(job_id, kind)

    def _can_expect(self, kind: PlacementClass) -> bool:
        """Return whether a start of a job of ``kind`` can be expected. Then it gets a reservation in time sooner or later."""
        return self._state.policy.backfill and bool(kind.need.total) and self._expected_start(kind) < math.inf

    def _expected_start(self, kind: PlacementClass) -> float:
        """Return when a job of ``kind`` can start without reservations of others (monotonic seconds); infinite if unknown.

        It is remembered for a while, because there may be a thousand classes, and a pass looks at each.
        """
        known, now = self._state.queue.expected_starts, self._now.mono
        start = known.get(kind)
        if start is None or start.again <= now:
            opening = self.ends.opening(kind)
            in_s = math.inf if opening is None else self.ends.likely_s(opening)
            use_s = min(LONGEST_USE_S, max(SHORTEST_USE_S, MOST_OF_WAIT * in_s))
            start = known[kind] = ExpectedStart(now + in_s, now + use_s)
        return start.at

    def _reserve_until_start(self, job_id: int, kind: PlacementClass) -> bool:
        """Reserve GPUs until the expected start of a job. Return whether the job has a reservation.

        Only one job has such a reservation: the first in the order of the queue that has waited long enough, and at least
        as long as it is expected to run.
        """
        state = self._state
        if self._made or not kind.need.total or not state.policy.backfill:
            return False
        now, promised = self._now.mono, job_id in state.queue.promises
        waited = now - state.queue.since(job_id)
        if not promised and waited <= LONGEST_WAIT_S and self._expected_start(kind) > now + MOST_OF_WAIT * waited:
            return False
        expected = state.estimates.expected_of(self._run_kind(job_id))
        if expected is not None and waited < min(expected.seconds, LONGEST_WAIT_S):
            return False
        opening = self.ends.opening(kind, mask_of(gpu for one in state.fleet.reserved for gpu in ids_of(one.mask)))
        if opening is None:
            return False
        in_s = self.ends.likely_s(opening)
        if not promised and waited <= LONGEST_WAIT_S and in_s > MOST_OF_WAIT * waited:
            return False
        self._made = True
        promise = self._promise(job_id, in_s)
        if promise.missed >= min(MOST_MISSED, state.policy.max_overtakes):
            state.fleet.reserve(job_id, kind)
        else:
            left = promise.until - now
            if promise.missed >= LENIENT:  # jobs end later than expected: the estimates of the others are doubted, too
                left = min(left, in_s) / 2 ** (promise.missed - LENIENT)
            state.fleet.reserve_until_start(job_id, kind, opening.mask, max(0.0, left))
        return True

    def _promise(self, job_id: int, in_s: float) -> Promise:
        """Return the promise to a job, which is a new one if it has none, or if the last one was missed."""
        promises, now = self._state.queue.promises, self._now.mono
        before = promises.get(job_id)
        if before is not None and now < before.until:
            return before
        length = max(SHORTEST_PROMISE_S, in_s + min(in_s, LONGEST_SLACK_S))
        if before is not None:
            length = max(length, min(2.0 * before.length_s, in_s + LONGEST_SLACK_S))
        promises[job_id] = Promise(now + length, length, 0 if before is None else before.missed + 1)
        return promises[job_id]

    def lent(self, kind: PlacementClass) -> tuple[int, tuple[int, ...]] | None:
        """Return the first job of a class that may use reserved GPUs, because it ends in time, and its GPUs; None: none."""
        fleet, estimates = self._state.fleet, self._state.estimates
        if not self._made or self._looks <= 0 or fleet.find(kind, 0.0) is None:
            return None
        for job_id in self._state.queue.first_of(kind, self._looks):
            self._looks -= 1
            expected = estimates.expected_of(self._run_kind(job_id))
            if expected is not None:
                gpus = fleet.find(kind, estimates.run_s(expected, LIKELY))
                if gpus is not None:
                    return job_id, gpus
        return None

    def _run_kind(self, job_id: int) -> RunKind:
        """Return the run kind of a waiting job. It is remembered while the job waits: to read jobs takes time."""
        known = self._state.queue.run_kinds
        if job_id not in known:
            job = self._decision.find(job_id)
            # A job that was just removed from the store has no kind.
            known[job_id] = RunKind(()) if job is None else self._state.estimates.kind_of(job.spec, job.need)
        return known[job_id]
