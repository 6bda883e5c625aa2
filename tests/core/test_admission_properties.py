"""Property tests of admission control with random readings.

The masks of blocked GPUs agree with the verdicts. No job is placed on a GPU whose verdict forbids this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.admission import STALE_AFTER, Admission
from scheduler.core.gpu import WHOLE, ResourceRequest, ids_of
from scheduler.core.gpu_admission import Thresholds
from scheduler.core.gpu_faults import GpuFault
from scheduler.core.gpu_snapshot import GpuProcess, GpuSnapshot
from scheduler.core.job import JobState
from scheduler.core.observations import Arrived, Asked, Now, Observation, Readings
from scheduler.core.placement import Fleet
from scheduler.core.placement_class import PlacementClass, class_of
from scheduler.core.requests import PauseQueue, Resume
from scheduler.core.tenants import Tenant
from tests.builders import M0, T0, Play, a_gpu, a_job, a_kind, some_gpus
from tests.core.test_decide_twin import HISTORY, SLOTS, Both, Step

TOTAL = 80_000
GPUS = 3
CODES = {"", "stale", "gone", "unhealthy", "foreign", "over-share", "releasing"}

MIB = st.one_of(st.none(), st.integers(0, TOTAL))
SHARE = st.one_of(st.none(), st.floats(0, 1))
PROCESS = st.builds(
    GpuProcess,
    st.integers(1, 6),
    MIB,
    st.booleans(),
    SHARE,
    st.booleans(),
    st.just("x"),
    st.booleans(),
    st.sampled_from(["", "", "1.1", "2.1", "9.9"]),
    st.sampled_from([0.0, T0, T0 + 60]),
)
READING = st.builds(
    GpuSnapshot,
    st.sampled_from(["declared:0", "declared:1", "declared:2", "another", ""]),
    st.integers(0, 3),
    st.just("a card"),
    st.sampled_from([TOTAL, TOTAL, TOTAL, 0, None]),
    MIB,
    SHARE,
    st.none(),
    st.one_of(st.none(), st.lists(PROCESS, max_size=4).map(tuple)),
    st.sampled_from([False, False, False, True]),
    st.sampled_from(["", "", "", "MIG mode is on"]),
    st.sampled_from(["", "", "XID 79"]),
)


@dataclass(frozen=True)
class Told:
    """An event on the GPUs. ``what``: its kind; ``seconds``: the time since the previous event."""

    what: str
    seconds: float = 1.0
    readings: tuple[GpuSnapshot, ...] = ()
    gpu: int = 0
    tenants: tuple[Tenant, ...] = ()


TENANT = st.builds(
    lambda job, parts, vram, at: Tenant(f"{job}.1", job, parts, vram, at),
    st.integers(1, 2),
    st.integers(1, 500),
    st.sampled_from([0, 0, 20_000]),
    st.sampled_from([None, 0.0, T0, T0 + 60]),
)
EVENT = st.builds(
    Told,
    st.sampled_from(["read", "read", "read", "read", "trouble", "wait", "left", "accept", "tenants"]),
    st.sampled_from([0.0, 0.01, 1.0, 5.0, 16.0, 40.0]),
    st.lists(READING, max_size=4).map(tuple),
    st.integers(0, 3),
    st.lists(TENANT, max_size=2, unique_by=lambda tenant: tenant.job).map(tuple),
)


class Watched:
    """Three GPUs to which random events happen. After each event, `check` verifies the properties that must hold."""

    def __init__(self, errors: bool = False) -> None:
        self.thresholds = Thresholds(interval_s=5.0, hold_on_errors=errors)
        self.fleet = Fleet([a_gpu(i, memory_mib=TOTAL) for i in range(GPUS)])
        self.now = Now(T0, M0)
        self.admission = self.fleet.admission = Admission.of(self.fleet.gpus.values(), self.thresholds, self.now)
        self.on: tuple[Tenant, ...] = ()
        self.admission.tenants = lambda gpu: self.on if gpu == 0 else ()
        self.faults: dict[str, GpuFault] = {}
        self.admission.faults = self.faults
        self.last: Readings | None = None
        self.trouble = False

    def tell(self, told: Told) -> None:
        self.now = Now(self.now.wall + told.seconds, self.now.mono + told.seconds)
        if told.what == "read":
            self.last, self.trouble = Readings(self.now.mono, told.readings), False
            for reading in told.readings:
                if reading.errors:
                    self.faults[reading.uuid] = GpuFault(reading.uuid, reading.errors, self.now.wall, self.now.wall)
            self.admission.take(self.last, self.now)
        elif told.what == "trouble":
            self.trouble = True
            self.admission.take(Readings(self.now.mono, problem="no answer"), self.now)
        elif told.what == "left":
            self.admission.left([told.gpu], self.now)
        elif told.what == "accept":
            self.admission.accept([told.gpu], self.now)
        elif told.what == "tenants":
            self.on = told.tenants
        self.admission.judge(self.now)

    def known(self, gpu: int) -> bool:
        """Return whether the last reading contains enough values of this GPU to allocate the GPU."""
        if self.last is None or self.trouble:
            return False
        if self.now.mono - self.last.at > STALE_AFTER * self.thresholds.interval_s:
            return False
        told = {reading.uuid: reading for reading in self.last.gpus}.get(f"declared:{gpu}")
        held = f"declared:{gpu}" in self.faults and self.thresholds.hold_on_errors
        if told is None or told.lost or told.problem or held:
            return False
        return told.memory_used_mib is not None and bool(told.memory_total_mib)

    def check(self) -> None:
        admission = self.admission
        for gpu, card in admission.cards.items():
            bit = 1 << gpu
            if not self.known(gpu):
                assert admission.blocked_mask & bit, f"GPU {gpu} is unknown and may be used"
                assert not self.fleet.usable_mask() & bit
            assert card.overcommit >= 0 and card.overcommit_mib >= 0 and card.foreign_mib >= 0 and card.own_mib >= 0
            assert card.baseline_mib is None or card.baseline_mib >= 0
            assert bool(admission.blocked_mask & bit) == bool(card.verdict.code)
            assert bool(admission.whole_blocked_mask & bit) == card.whole_blocked
            assert bool(admission.tight_mask & bit) == bool(card.overcommit or card.overcommit_mib)
            assert card.verdict.code in CODES and bool(card.verdict.code) == bool(card.verdict.sentence)
            assert not card.overcommit or card.why_overcommit.code in ("foreign", "over-share")
            assert not card.whole_blocked or card.whole.code == "foreign"
        assert not admission.blocked_mask >> GPUS
        assert admission.next_look is None or admission.next_look > self.now.mono, "the loop would spin"


HAPPENINGS = st.lists(EVENT, max_size=25)


@given(HAPPENINGS, st.booleans())
def test_a_gpu_without_a_valid_reading_is_unusable_and_masks_agree_with_verdicts(
    events: list[Told], errors: bool
) -> None:
    watched = Watched(errors)
    watched.check()
    for told in events:
        watched.tell(told)
        watched.check()


KINDS = st.sampled_from(
    [
        *(a_kind(need) for need in ("0.1", "0.5", "0.75", "1", "2", "3", "2x0.5")),
        a_kind("0.5", (1,)),
        a_kind("1", (0, 2)),
        a_kind("0.5", vram_mib=20_000),
        a_kind("0.1", vram_mib=79_000),
        a_kind("2x0.1", vram_mib=30_000),
    ]
)


@given(HAPPENINGS, st.lists(KINDS, min_size=1, max_size=6), st.lists(st.booleans(), min_size=GPUS, max_size=GPUS))
def test_find_respects_the_verdicts_and_why_not_names_a_failing_rule(
    events: list[Told], kinds: list[PlacementClass], paused: Sequence[bool]
) -> None:
    watched = Watched()
    fleet = watched.fleet
    fleet.paused_mask = sum(1 << gpu for gpu, on in enumerate(paused) if on and sum(paused) < 3)
    fleet.take(ResourceRequest(1, 300), (1,), 10_000)
    for told in [*events, Told("wait", 0.0)]:
        watched.tell(told)
        for kind in kinds:
            gpus = fleet.find(kind)
            forbidden = {
                gpu: verdict
                for gpu in fleet.gpus
                if (verdict := watched.admission.forbids(gpu, kind.need.parts, fleet.free[gpu], kind.vram_mib)).code
            }
            if gpus is not None:
                assert len(gpus) == kind.need.count and not set(gpus) & set(forbidden)
                assert not fleet.paused_mask & sum(1 << gpu for gpu in gpus)
                assert all(fleet.free[gpu] >= kind.need.parts for gpu in gpus)
                continue
            reason = fleet.why_not(kind)
            assert reason.code and reason.sentence and "in a moment" not in reason.sentence
            allowed = set(kind.allowed if kind.allowed is not None else fleet.gpus)
            open_ = {gpu for gpu in allowed if not fleet.paused_mask >> gpu & 1}
            if reason.code in CODES:
                named = [gpu for gpu in open_ if gpu in forbidden and forbidden[gpu].code == reason.code]
                assert any(reason.sentence.startswith(forbidden[gpu].sentence) for gpu in named)
            elif any(reason.sentence.startswith(forbidden[gpu].sentence) for gpu in open_ if gpu in forbidden):
                assert reason.code == "no-room"  # memory that this scheduler's own jobs have booked or use
            elif not open_:
                assert reason.code == "paused"
            else:
                roomy = {gpu for gpu in open_ if fleet.free[gpu] >= kind.need.parts}
                assert kind.vram_mib or len(roomy) < kind.need.count or len(roomy - set(forbidden)) < kind.need.count
                if kind.need.count == 1 and roomy and roomy <= set(forbidden):
                    raise AssertionError(f"{roomy} have room and are forbidden, but the reason is {reason}")


# -- comparison with the slow scheduler, with readings ----------------------------------------------------


class BothRead(Both):
    """The real scheduler and the slow scheduler. Both get the same readings of the GPUs."""

    def __init__(self, servers: list[int], memory_mib: int | None, links: list[int]) -> None:
        super().__init__(servers, memory_mib, links)
        state = self.play.scheduler
        state.fleet.admission = Admission.of(self.gpus, state.policy.thresholds, self.play.now)
        state.fleet.admission.tenants = state.tenants
        self.twin.fleet.admission = state.fleet.admission
        choose = self.twin.start_all

        def start_all(*more: Any) -> list[tuple[int, tuple[int, ...]]]:
            """Let the slow scheduler start jobs. Admission control then uses the slow scheduler's list of running jobs.

            The list of the real scheduler cannot be used, because it already contains the jobs that this pass starts.
            """
            admission = state.fleet.admission
            admission.tenants, real = self.tenants, admission.tenants
            try:
                return choose(*more)
            finally:
                admission.tenants = real

        self.twin.start_all = start_all  # type: ignore[method-assign]

    def tenants(self, gpu: int) -> list[Tenant]:
        """Return the attempts on a GPU, according to the slow scheduler."""
        return [
            Tenant(f"{job}.1", job, kind.need.parts, kind.vram_mib)
            for job, (kind, gpus) in self.twin.running.items()
            if gpu in gpus
        ]

    def turn(self, observations: list[Observation]) -> None:
        self.twin.fleet.now = Now(self.play.wall + 1.0, self.play.mono + 1.0)
        super().turn(observations)

    def say(self, pick: int = 0) -> Readings:
        """Return a reading of all GPUs. ``pick`` chooses the problem of each GPU; with 0 no GPU has a problem."""
        told = []
        for gpu in self.gpus:
            reading = GpuSnapshot(gpu.uuid, gpu.index, "", TOTAL, 0, 0.0, processes=())
            state = (pick + gpu.index) % 11 if pick else 0
            thing = GpuProcess(4711, {7: 70_000, 8: 30_000, 9: 3_000}.get(state))
            changes = {
                5: {"lost": True},
                6: {"memory_used_mib": None},
                7: {"memory_used_mib": 70_000, "processes": (thing,)},
                8: {"memory_used_mib": 30_000, "processes": (thing,)},
                9: {"memory_used_mib": 3_000, "processes": (thing,)},
                10: {"memory_used_mib": 50_000, "processes": None, "load": 0.9},
            }.get(state, {})
            told.append(replace(reading, **changes))
        return Readings(self.play.mono + 1.0, tuple(told))

    def _read(self, step: Step) -> list[Observation]:
        if step.pick % 13 == 12:
            return [Readings(self.play.mono + 1.0, problem="no answer")]
        return [self.say(step.pick)]

    def _fail(self, step: Step) -> list[Observation]:
        """End a job with an error. A job on a GPU that is gone is tried once more."""
        job_id, cards = self._chosen(step), self.play.scheduler.fleet.admission.cards
        told = self._end(step)
        job = self.play.job(job_id) if job_id is not None else None
        if job is not None and not job.gpu_retries and any(cards[gpu].verdict.code == "gone" for gpu in job.gpus):
            self.twin.waiting[job.id] = (job.priority, job.order), class_of(job)
        return told

    def empty_the_machine(self) -> None:
        self.twin.paused = False
        self.twin.fleet.paused.clear()
        observations: list[Observation] = [
            Asked(1, PauseQueue(False)),
            Asked(2, Resume(tuple(gpu.index for gpu in self.gpus))),
        ]
        for _ in range(self.last_id + 6):
            for job in sorted(self.twin.running):
                self.twin.end(job)
                observations.append(self.play.ended(job))
            self.turn(observations)
            self.turn([self.say()])
            observations = []
        assert not self.twin.running and not self.twin.waiting


READ = st.builds(Step, st.just("read"), pick=st.integers(0, 99))
READS = st.lists(st.one_of(st.none(), READ), min_size=20, max_size=20)


@given(*HISTORY, READS)
def test_the_scheduler_starts_the_same_jobs_as_the_slow_one_when_readings_block_gpus(
    servers: list[int], memory_mib: int | None, links: list[int], turns: list[list[Step]], reads: list[Step | None]
) -> None:
    """S3.16: While readings block GPUs, the scheduler starts the same jobs on the same GPUs as a simple, slow one.

    The slow scheduler is written for this comparison (`tests/core/slow_twin.py`).
    """
    both = BothRead(servers, memory_mib, links)
    for turn, read in zip(turns, reads, strict=False):
        both.turn(both.facts_of([*turn, *([read] if read else [])]))
    both.empty_the_machine()


@given(st.lists(st.sampled_from([("read", 74), ("read", 79), ("read", 81), ("end", 0), ("wait", 0)]), max_size=60))
def test_readings_around_the_threshold_start_no_job_twice_and_lose_none(events: list[tuple[str, int]]) -> None:
    """I13: Readings around the threshold neither start a job twice nor lose one."""
    play = Play(Fleet([a_gpu(0)], SLOTS))
    state = play.scheduler
    state.fleet.admission = Admission.of([a_gpu(0)], state.policy.thresholds, play.now)
    state.fleet.admission.tenants = state.tenants
    play.arrive(*(a_job(number, "0.1") for number in range(1, 6)))
    assert not play.started, "nothing starts on a GPU that was never read"

    def read(percent: int) -> None:
        mib = percent * TOTAL // 100
        told = GpuSnapshot("declared:0", 0, "", TOTAL, mib, 0.0, processes=(GpuProcess(4711, mib),))
        play.tell(Readings(play.mono + 5.0, (told,)), after=5.0)

    for what, percent in events:
        if what == "read":
            read(percent)
        elif what == "end" and play.scheduler.live:
            job = min(play.scheduler.live)
            play.tell(play.began(job), after=0.1)
            play.tell(play.ended(job), after=0.1)
        else:
            play.tell(after=2.0)
        assert len(play.started) == len(set(play.started))
    for _ in range(12):
        for _ in range(3):
            read(0)
        for job in list(play.scheduler.live):
            play.tell(play.began(job), after=0.1)
            play.tell(play.ended(job), after=0.1)
    assert sorted(play.started) == [1, 2, 3, 4, 5]
    assert all(play.state(job) is JobState.DONE for job in range(1, 6))


# -- messages about GPUs ----------------------------------------------------------------------------------


def test_a_disappeared_gpu_adds_a_note_to_its_job_and_one_message() -> None:
    """I06: If a GPU disappears, the job on this GPU gets a note, and one message is logged."""
    play = Play(Fleet(some_gpus(2), SLOTS))
    state = play.scheduler
    state.fleet.admission = Admission.of(state.fleet.gpus.values(), state.policy.thresholds, play.now)
    state.fleet.admission.tenants = state.tenants

    def read(*there: int) -> list[str]:
        told = tuple(GpuSnapshot(f"declared:{i}", n, "", TOTAL, 0, 0.0, processes=()) for n, i in enumerate(there))
        return [text for text, _ in play.tell(Readings(play.mono + 5.0, told), after=5.0).notices]

    assert read(0, 1) == []
    play.arrive(a_job(1, "1", allowed=(0,)))
    play.tell(play.began(1))
    assert read(1) == ["GPU 0 (declared:0) is gone; no new job starts there"]
    assert play.job(1).state is JobState.RUNNING
    assert play.job(1).notes == ("during its run: GPU 0 (declared:0) is gone",)
    assert read(1) == []
    play.arrive(a_job(2, "1", allowed=(0,)))
    play.tell(play.ended(1))
    assert play.reason(2) == "gone" and read(1) == []
    assert read(0, 1) == ["GPU 0 can get jobs again"] and play.state(2) is JobState.STARTING
    # If no GPU can be read, users get one message for all GPUs.
    trouble = play.tell(Readings(play.mono, problem="no answer within 5 s"), after=5.0)
    assert [text for text, _ in trouble.notices] == [
        "GPUs 0,1 cannot be read: no answer within 5 s; no new job starts there, running jobs continue"
    ]
    assert read(0, 1) == ["GPUs 0,1 can get jobs again"]


def test_a_gpu_becomes_stale_without_an_event() -> None:
    play = Play(Fleet(some_gpus(1), SLOTS))
    state = play.scheduler
    state.fleet.admission = Admission.of(state.fleet.gpus.values(), state.policy.thresholds, play.now)
    told = GpuSnapshot("declared:0", 0, "", TOTAL, 0, 0.0, processes=())
    play.tell(Readings(play.mono, (told,)))
    due = state.next_timer()
    assert due is not None and math.isclose(due, play.mono + 15, abs_tol=0.1)
    plan = play.tell(Arrived(a_job(1)), after=16)
    assert [text for text, _ in plan.notices] == ["GPU 0 has not been read for 16 s; no new job starts there"]
    assert not play.started and play.reason(1) == "stale"
    assert class_of(play.job(1)).need.parts == WHOLE and not ids_of(state.fleet.usable_mask())
