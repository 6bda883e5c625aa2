"""Backfill: GPUs are reserved until the expected start of a job that waits long; shorter jobs use them meanwhile.

This is EASY backfill (Lifka, "The ANL/IBM SP scheduling system", 1995; Feitelson and Weil, 1998): one waiting job has a
reservation in time, and other jobs pass it only on other GPUs, or if they end before its start. Four rules are our own:

- A job gets a reservation only when its start is expected soon: within `MOST_OF_WAIT` of the time that it has waited; or
  when it has waited for `LONGEST_WAIT_S`. So the GPU time that the reservation may waste stays small beside the wait. In replays of traces
  (`benchmarks/placement.md`), reservations from the first moment cost 10 % of the mean completion time, these cost nothing.
- Expected ends include the errors of earlier estimates: all jobs that a start depends on end in time with the
  probability `LIKELY`.
- The start is promised with some slack, and jobs that end before the promise is due may use the GPUs. If a promise is missed,
  the next one is longer. After `LENIENT` missed promises, other jobs must end before the expected start instead.
- After `max_overtakes` missed promises, no other job may use the GPUs. So no job waits for ever, however wrong the
  estimates are.

Where run times are not known, and with `backfill: false`, the setting `max_overtakes` alone counts (`core/decide.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scheduler.core.gpu import WHOLE, ids_of, mask_of
from scheduler.core.job import Job, JobState
from scheduler.core.placement_class import PlacementClass
from scheduler.core.queue import Promise
from scheduler.core.runtime_estimate import Expected, RunKind, sure_part

if TYPE_CHECKING:
    from scheduler.core.decision_pass import DecisionPass
    from scheduler.core.observations import Now
    from scheduler.core.scheduler_state import SchedulerState

LIKELY = 0.5
MOST_OF_WAIT = 0.1
LONGEST_WAIT_S = 7 * 86_400.0
SLACK = 2.0  # length of a promise, as a multiple of the expected time until the start
LENIENT = 2
SHORTEST_PROMISE_S = 600.0
MOST_LOOKED_AT = 100  # waiting jobs that one pass tries on lent GPUs
MOST_KINDS = 4096  # waiting jobs whose run kinds are remembered


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
        self._foreign_mask = mask_of(gpu for gpu, card in cards.items() if card.verdict.code == "foreign")
        self.unknown_mask = mask_of(gpu for held in state.holdings.values() for gpu in held.gpus)
        for job in state.live.values():
            if not job.gpus or job.need.by_name:
                continue
            use = self._use(job, now)
            if use is None:
                self.unknown_mask |= mask_of(job.gpus)
            else:
                for gpu in job.gpus:
                    self._on.setdefault(gpu, []).append(use)
        for uses in self._on.values():
            uses.sort(key=lambda use: (use.in_s, use.job))

    def _use(self, job: Job, now: Now) -> Use | None:
        state, mib = self._state, job.spec.vram_mib or 0
        ran = max(0.0, now.wall - job.started_at) if job.started_at is not None else 0.0
        if job.state is JobState.STOPPING:
            return Use(job.id, job.need.parts, mib, state.policy.kill_grace_s, None, ran)
        expected = state.estimates.expected(job.spec, job.need)
        if expected is None:
            return None
        return Use(job.id, job.need.parts, mib, state.estimates.run_s(expected, 0.5, ran) - ran, expected, ran)

    def known(self, kind: PlacementClass) -> bool:
        """Return whether a start of a job of ``kind`` can be expected from what is known of the running jobs."""
        fleet = self._state.fleet  # reservations do not count: they end
        usable = fleet.could_use(kind) & ~mask_of(fleet.claims) & ~self._foreign_mask & ~self.unknown_mask
        return fleet.most_together(kind, usable) >= kind.need.count

    def possible(self, kind: PlacementClass) -> int:
        """Return the mask of the GPUs on which a job of ``kind`` may start once they are free."""
        fleet = self._state.fleet
        return fleet.could_use(kind) & ~fleet.kept_mask & ~self._foreign_mask

    def opening(self, kind: PlacementClass) -> Opening | None:
        """Return where a job of ``kind`` can start first; None if too little is known."""
        need, fleet = kind.need, self._state.fleet
        usable = self.possible(kind) & ~self.unknown_mask
        best: Opening | None = None
        for mask in fleet.groups(kind):
            here = sorted(self._free(gpu, need.parts, kind.vram_mib) for gpu in ids_of(usable & mask))[: need.count]
            if len(here) < need.count or here[-1][0] == float("inf"):
                continue
            if best is None or here[-1][0] < best.in_s:
                uses = {use.job: use for in_s, gpu in here for use in self._until(gpu, in_s)}
                best = Opening(mask_of(gpu for _, gpu in here), here[-1][0], tuple(uses.values()))
        return best

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
        return (float("inf"), gpu)

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
    """The reservation in time of one pass. `reserves` makes it, `lent` finds jobs that use it meanwhile."""

    def __init__(self, decision: DecisionPass) -> None:
        self._decision, self._state, self._now = decision, decision.state, decision.now
        self._ends: ExpectedEnds | None = None
        self._looks = MOST_LOOKED_AT
        self._made = False

    @property
    def ends(self) -> ExpectedEnds:
        """The expected ends of the running jobs, as they were when this pass first needed them."""
        if self._ends is None:
            self._ends = ExpectedEnds(self._state, self._now)
        return self._ends

    def known(self, kind: PlacementClass) -> bool:
        """Return whether reservations in time are made for jobs of ``kind``, so that `max_overtakes` does not count."""
        return self._state.policy.backfill and bool(kind.need.total) and self.ends.known(kind)

    def reserves(self, job_id: int, kind: PlacementClass) -> bool:
        """Reserve GPUs until the expected start of a job that does not fit. Return whether GPUs were reserved.

        Only one job has such a reservation: the first in the order of the queue that has waited long enough, and at least
        as long as it is expected to run.
        """
        if self._made or not kind.need.total or not self._state.policy.backfill:
            return False
        run_kind, submitted_at = self._facts(job_id)
        expected = self._state.estimates.expected_of(run_kind)
        waited = self._now.wall - submitted_at
        if expected is None or waited < expected.seconds:
            return False
        opening = self.ends.opening(kind)
        if opening is None:
            return False
        in_s = self.ends.likely_s(opening)
        soon = in_s <= MOST_OF_WAIT * waited or waited > LONGEST_WAIT_S
        if not soon and job_id not in self._state.queue.promises:
            return False
        self._made = True
        promise = self._promise(job_id, in_s)
        if promise.missed >= self._state.policy.max_overtakes:
            self._state.fleet.reserve(job_id, kind)
        else:
            left = promise.until - self._now.mono
            lends_for = left if promise.missed < LENIENT else min(left, in_s)
            self._state.fleet.reserve_until_start(job_id, kind, opening.mask, max(0.0, lends_for))
        return True

    def _promise(self, job_id: int, in_s: float) -> Promise:
        promises, now = self._state.queue.promises, self._now.mono
        before = promises.get(job_id)
        if before is not None and now < before.until:
            return before
        length = max(SHORTEST_PROMISE_S, SLACK * in_s)
        if before is not None:
            length = max(length, 2.0 * before.length_s)
        promises[job_id] = Promise(now + length, length, 0 if before is None else before.missed + 1)
        return promises[job_id]

    def lent(self, kind: PlacementClass) -> tuple[int, tuple[int, ...]] | None:
        """Return the first job of a class that may use reserved GPUs, because it ends in time, and its GPUs; None: none."""
        fleet = self._state.fleet
        if not self._made or self._looks <= 0 or fleet.find(kind, 0.0) is None:
            return None
        for job_id in self._state.queue.first_of(kind, self._looks):
            self._looks -= 1
            run_kind, _ = self._facts(job_id)
            expected = self._state.estimates.expected_of(run_kind)
            if expected is not None:
                gpus = fleet.find(kind, self._state.estimates.run_s(expected, LIKELY))
                if gpus is not None:
                    return job_id, gpus
        return None

    def _facts(self, job_id: int) -> tuple[RunKind, float]:
        """Return the run kind of a waiting job, and when it was submitted. They are remembered while it waits."""
        known = self._state.run_kinds
        found = known.get(job_id)
        if found is None:
            job = self._decision.find(job_id)
            found = (RunKind(()), self._now.wall)  # it was removed from the store
            if job is not None:
                found = (self._state.estimates.kind_of(job.spec, job.need), job.submitted_at)
            if len(known) >= MOST_KINDS:
                known.clear()
            known[job_id] = found
        return found
