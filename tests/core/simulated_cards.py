"""Simulated GPUs on a virtual clock: jobs allocate their memory slowly, and the scheduler sees it only in readings."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler.core.admission import Admission
from scheduler.core.gpu import WHOLE, Gpu
from scheduler.core.gpu_admission import Thresholds
from scheduler.core.gpu_snapshot import GpuProcess, GpuSnapshot
from scheduler.core.job import Job
from scheduler.core.model_table import ModelTable, booking_memory, need_of
from scheduler.core.observations import Arrived, Observation, Readings
from scheduler.core.placement import Fleet
from tests.builders import Play, a_gpu, a_job, a_policy

TOTAL = 81_920
DRIVER = 420  # MiB in use on an empty card
RESERVED = 300  # MiB that the driver keeps, and does not count as used
CAPACITY = TOTAL - DRIVER - RESERVED
SETTLE = 120.0
TOLERANCE = 0.02
INTERVAL = 5.0


@dataclass(frozen=True)
class Demand:
    """The request of a job, and the memory that it uses over time.

    ``uses``: MiB in the end; ``delay``: seconds from its start to its first allocation; ``ramp``: seconds in which it
    allocates, evenly; ``runs``: seconds until it ends; ``lingers``: seconds for which its memory stays after its end.
    """

    gpus: str = ""
    vram_mib: int | None = None
    uses: int = 0
    delay: float = 0.0
    ramp: float = SETTLE
    runs: float = 1e9
    lingers: float = 0.0

    def mib(self, age: float) -> int:
        """Return the memory in use at this age of the job, in MiB."""
        return round(self.uses * min(1.0, max(0.0, (age - self.delay) / self.ramp)))


@dataclass
class Machine:
    """GPUs and a scheduler. ``default_mib``: jobs without a request book this memory (0: they book shares).

    ``lists``: whether the driver lists processes; ``foreign``: card → MiB that a foreign process uses; ``exact``: jobs use at
    most what they requested, and foreign memory does not grow, so no card ever runs out of memory.
    """

    cards: int = 16
    default_mib: int = 0
    lists: bool = True
    total: int = TOTAL
    foreign: dict[int, int] = field(default_factory=dict)
    exact: bool = True
    demands: dict[int, Demand] = field(default_factory=dict)
    began: dict[int, float] = field(default_factory=dict)  # job → monotonic seconds
    gone: list[tuple[int, int, float]] = field(default_factory=list)  # card, MiB, when it is released

    def __post_init__(self) -> None:
        self.gpus: list[Gpu] = [a_gpu(i, memory_mib=self.total) for i in range(self.cards)]
        thresholds = Thresholds(
            interval_s=INTERVAL,
            settle_s=SETTLE,
            tolerance=TOLERANCE,
            by_memory=bool(self.default_mib),
            default_mib=self.default_mib,
        )
        self.play = Play(Fleet(self.gpus), policy=a_policy(thresholds=thresholds))
        state = self.play.scheduler
        state.fleet.admission = Admission.of(self.gpus, thresholds, self.play.now)
        state.watch_admission()
        self.step()

    @property
    def capacity(self) -> int:
        return self.total - DRIVER - RESERVED

    @property
    def running(self) -> dict[int, Job]:
        return self.play.scheduler.live

    def submit(self, *demands: Demand) -> None:
        """Let jobs with these demands arrive, all at once."""
        jobs = []
        for demand in demands:
            number = len(self.demands) + 1
            self.demands[number] = demand
            job = a_job(number, gpus=demand.gpus, vram_mib=demand.vram_mib)
            job.spec = booking_memory(job.spec, self.default_mib, read=True)
            job.need, _ = need_of(job.spec, ModelTable(), self.gpus)
            jobs.append(job)
        self._pass([Arrived(job) for job in jobs])

    def mib(self, job: int) -> int:
        """Return the MiB that a job uses now."""
        return self.demands[job].mib(self.play.mono - self.began[job]) if job in self.began else 0

    def used(self, card: int) -> int:
        """Return the MiB in use on a card now, without those that the driver keeps."""
        left = sum(mib for at, mib, until in self.gone if at == card and until > self.play.mono)
        left += self.foreign.get(card, 0)
        return DRIVER + left + sum(self.mib(job.id) for job in self.running.values() if card in job.gpus)

    def promised(self, job: Job) -> int:
        """Return the MiB that a job needs on a card in the end: what it requested, its share, or else what it will use."""
        demand = self.demands[job.id]
        if demand.vram_mib:
            return max(demand.vram_mib, demand.uses)
        return max(demand.uses, self.capacity * job.need.parts // WHOLE if demand.gpus else 0)

    def step(self, seconds: float = INTERVAL) -> None:
        """Let time pass: jobs end, and all cards are read."""
        self.play.wall += seconds
        self.play.mono += seconds
        ended: list[Observation] = []
        for job in list(self.running.values()):
            demand = self.demands[job.id]
            if job.id in self.began and self.play.mono - self.began[job.id] >= demand.runs:
                self.gone += [(card, self.mib(job.id), self.play.mono + demand.lingers) for card in job.gpus]
                ended.append(self.play.ended(job.id))
        self._pass(ended)
        for card in range(self.cards) if self.exact else ():
            assert self.used(card) <= self.total - RESERVED, f"GPU {card} ran out of memory"

    def _pass(self, observations: list[Observation]) -> None:
        """Run a pass with these observations, one with a reading, and tell the scheduler that its jobs run."""
        for told in (observations, None):
            plan = self.play.tell(*(observations if told is not None else [self._readings()]))
            for job in plan.starts:
                self._check_start(job)
            for job in plan.starts:
                self.began[job.id] = self.play.mono
            if plan.starts:
                self.play.tell(*(self.play.began(job.id) for job in plan.starts))

    def _check_start(self, started: Job) -> None:
        """Assert that a started job fits: together, the jobs of its card never need more memory than there is."""
        for card in started.gpus:
            jobs = [job for job in self.running.values() if card in job.gpus]
            foreign = self.foreign.get(card, 0)
            requests = {job.id: self.demands[job.id].vram_mib or 0 for job in jobs}
            if any(requests.values()):
                held = sum(max(mib, self.mib(job)) for job, mib in requests.items() if job != started.id)
                room = self.capacity - foreign - held
                assert room >= requests[started.id], f"GPU {card} has only {room} MiB for job {started.id}"
            if not self.exact:
                assert sum(job.need.parts for job in jobs) <= WHOLE
                continue
            need = sum(max(self.promised(job), self.mib(job.id)) for job in jobs)
            assert need <= self.capacity, f"job {started.id} does not fit on GPU {card}: {need} of {self.capacity}"
            left = sum(mib for at, mib, until in self.gone if at == card and until > self.play.mono)
            measured = sum(self.mib(job.id) for job in jobs if job is not started)
            slack = 0 if started.spec.vram_mib else TOLERANCE * self.capacity  # a share is not exact
            assert measured + self.promised(started) + left <= self.capacity + slack, "an ended job is in the way"

    def _readings(self) -> Readings:
        told = []
        for gpu in self.gpus:
            processes = tuple(
                GpuProcess(1000 + job.id, self.mib(job.id), user="u", ours=True, owner=job.attempt_key)
                for job in self.running.values()
                if gpu.index in job.gpus and self.mib(job.id)
            )
            if self.foreign.get(gpu.index):
                processes += (GpuProcess(4711, self.foreign[gpu.index], user="x"),)
            told.append(
                GpuSnapshot(
                    gpu.uuid, gpu.index, "a card", self.total, self.used(gpu.index), 0.5 if processes else 0.0,
                    processes=processes if self.lists else None, reserved_mib=RESERVED,
                )
            )  # fmt: skip
        return Readings(self.play.mono, tuple(told))
