"""Replays 500 jobs with real model sizes: ``python -m benchmarks.learned_needs [--seeds 4] [--write]``.

Compares a model table that people wrote by hand with needs that are learned (setting `learn`, and an empty table). The decisions,
the readings, the retries after a lack of GPU memory and the learned needs are those of the scheduler (`scheduler/core`); only the
clock, the GPUs and the jobs are simulated:

- 8 GPUs of 80 GiB. Jobs arrive within 12 hours. A job loads its model, and its memory then grows to its peak in steps. An allocation
  for which the GPU has no room ends the job, as with torch. Jobs whose loads exceed 1 together slow each other down.
- A model's weights have the size that its name tells (parameters x bytes of the format); evaluation, generation, LoRA and full
  training add what they use in practice: caches, activations, gradients, optimizer states.
- Hand-written tables. ``tight``: the weights of the model, rounded up to a quarter of a GPU; ``tight or whole``: a part of the
  entries is tight, the others were written by people who want to be sure; ``half or whole``: the weights, rounded up to a half.
- A job that has failed is submitted again after 30 minutes with a whole GPU (or the GPUs that it needs), as people do.

The same jobs are run with each table. Out-of-memory endings count attempts. ``apply``: the hand-written table, into which
the suggestions of `gpujob needs` are written every hour.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.figures import progress
from scheduler.core.admission import Admission
from scheduler.core.config import Config
from scheduler.core.decide import decide
from scheduler.core.failure_signs import OUT_OF_MEMORY
from scheduler.core.gpu import Gpu
from scheduler.core.gpu_admission import Thresholds
from scheduler.core.gpu_snapshot import GpuProcess, GpuSnapshot
from scheduler.core.job import Failure, Job, JobSpec, Process
from scheduler.core.learned_needs import Group, Seen, advice
from scheduler.core.model_table import ModelTable, need_of
from scheduler.core.observations import Arrived, Ended, Now, Observation, Readings, Started
from scheduler.core.placement import Fleet
from scheduler.core.policy import policy_of
from scheduler.core.run_target import script_name
from scheduler.core.scheduler_state import SchedulerState
from scheduler.core.suggested_need import Learned
from scheduler.daemon.rebooking import changed_needs

GIB = 1024
GPUS, TOTAL_MIB, DRIVER_MIB = 8, 80 * GIB, 500
CONTEXT_MIB = 500  # CUDA context
JOBS, ARRIVAL_S, AGAIN_S, APPLY_S = 500, 12 * 3600.0, 1800.0, 3600.0
T0, M0 = 1e9, 1e6
BOTH, TIGHT, HALVES = "tight or whole", "tight", "half or whole"
TABLES = (BOTH, TIGHT, HALVES)

# Name → (billions of parameters, bytes for each). Sizes as published with the models.
MODELS = {
    "qwen2.5-0.5b-inst": (0.49, 2.0), "qwen2.5-1.5b-inst": (1.54, 2.0), "qwen2.5-3b-inst": (3.09, 2.0), "qwen2.5-7b-inst": (7.62, 2.0),
    "qwen2.5-14b-inst": (14.8, 2.0), "qwen2.5-32b-inst": (32.8, 2.0), "qwen2.5-32b-inst-awq": (32.8, 0.6), "qwen2.5-72b-inst-awq": (72.7, 0.6),
    "llama-3.2-1b-inst": (1.24, 2.0), "llama-3.2-3b-inst": (3.21, 2.0), "llama-3.1-8b-inst": (8.03, 2.0), "llama-3.1-70b-inst-4bit": (70.6, 0.6),
    "mistral-7b-v0.3": (7.25, 2.0), "mixtral-8x7b-4bit": (46.7, 0.6), "gemma-2-2b-it": (2.61, 2.0), "gemma-2-9b-it": (9.24, 2.0),
    "gemma-2-27b-it": (27.2, 2.0), "phi-3.5-mini": (3.82, 2.0), "phi-4": (14.7, 2.0), "gpt2-xl": (1.56, 4.0),
}  # fmt: skip
SCRIPTS = {"eval.py": 0.5, "generate.py": 0.25, "lora.py": 0.2, "train.py": 0.05}


@dataclass(frozen=True, slots=True)
class Work:
    """A job of the workload. ``peak_mib``: the most memory that it uses; ``load``: of a GPU; ``run_s``: alone on a GPU."""

    number: int
    model: str
    script: str
    arrives: float
    first_mib: int
    peak_mib: int
    load: float
    run_s: float
    steps: tuple[float, ...]  # parts of its run at which its memory grows


def workload(seed: int) -> list[Work]:
    """Return the jobs, by arrival."""
    dice = random.Random(seed)
    found = []
    for number, arrives in enumerate(sorted(dice.uniform(0, ARRIVAL_S) for _ in range(JOBS)), start=1):
        script = dice.choices([*SCRIPTS], [*SCRIPTS.values()])[0]
        small = [name for name, (size, _) in MODELS.items() if size < 3.3]
        trainable = [name for name, (size, width) in MODELS.items() if width == 2.0 and size < 20]
        names = small if script == "train.py" else trainable if script == "lora.py" else [*MODELS]
        model = dice.choices(names, [1 / math.sqrt(MODELS[name][0]) for name in names])[0]  # small models are used more
        size, width = MODELS[model]
        weights = size * 1e9 * width / (1 << 20)
        if script == "eval.py":  # a short context: a small cache
            more, load, run_s = (
                weights * dice.uniform(0.05, 0.2) + dice.uniform(1, 3) * GIB,
                dice.uniform(0.15, 0.4),
                40,
            )
        elif script == "generate.py":  # a long context: a large cache
            more, load, run_s = weights * dice.uniform(0.1, 0.3) + dice.uniform(2, 6) * GIB, dice.uniform(0.15, 0.4), 60
        elif script == "lora.py":  # activations; gradients of few parameters
            more, load, run_s = weights * dice.uniform(0.3, 0.5) + dice.uniform(3, 8) * GIB, dice.uniform(0.3, 0.6), 120
        else:  # AdamW: 16 bytes for each parameter, and activations
            more, load, run_s = weights * 7 + dice.uniform(3, 6) * GIB, dice.uniform(0.5, 0.9), 180
        peak = min(TOTAL_MIB - DRIVER_MIB - GIB, round(weights + more + CONTEXT_MIB))
        steps = tuple(sorted(dice.uniform(0.02, 0.3) for _ in range(4)))
        run_s = 60.0 * run_s * dice.lognormvariate(0, 0.6)
        found.append(
            Work(number, model, script, arrives, min(peak, round(weights + CONTEXT_MIB)), peak, load, run_s, steps)
        )
    return found


def hand_written(seed: int, kind: str) -> ModelTable:
    """Return a table that people wrote. ``kind``: one of `TABLES`."""
    dice = random.Random(seed + 1000)
    needs = {}
    for model, (size, width) in MODELS.items():
        part = size * 1e9 * width / (1 << 20) / TOTAL_MIB
        tight = min(1.0, math.ceil(4 * part) / 4)
        needs[model] = {TIGHT: tight, HALVES: min(1.0, math.ceil(2 * part) / 2), BOTH: dice.choice((tight, 1.0))}[kind]
    return ModelTable("1", {model: f"{need:g}" for model, need in needs.items()})


@dataclass(slots=True)
class Attempt:
    """A running attempt. ``done``: the part of its run that is over; ``rate``: parts in each second."""

    job: Job
    work: Work
    gpu: int
    mib: int = 0
    done: float = 0.0
    since: float = 0.0
    rate: float = 0.0
    version: int = 0
    grown: int = 0  # steps of its memory so far

    def next_at(self) -> float:
        """Return the time of its next allocation, or of its end."""
        part = self.work.steps[self.grown] if self.grown < len(self.work.steps) else 1.0
        return self.since + max(0.0, part - self.done) / self.rate

    def wanted(self) -> int:
        """Return its memory after the next step."""
        return self.work.first_mib + round(
            (self.work.peak_mib - self.work.first_mib) * (self.grown + 1) / len(self.work.steps)
        )


@dataclass(slots=True)
class Figures:
    """Results of one run. ``lost_s``: seconds of attempts that ran out of memory."""

    out_of_memory: int = 0
    failed: int = 0
    makespan_s: float = 0.0
    mean_jct_s: float = 0.0
    lost_s: float = 0.0


@dataclass(slots=True)
class Replay:
    """One run of the workload. ``table``: the model table; ``learn``: the setting; ``apply``: write suggestions into the table."""

    works: Sequence[Work]
    table: ModelTable
    learn: bool
    apply: bool
    figures: Figures = field(default_factory=Figures)
    at: float = 0.0
    jobs: dict[int, Job] = field(default_factory=dict)
    of: dict[int, Work] = field(default_factory=dict)
    running: dict[int, Attempt] = field(default_factory=dict)
    learned: dict[tuple[str, str], Learned] = field(default_factory=dict)
    seen: dict[Group, Seen] = field(default_factory=dict)
    events: list[tuple[float, int, str, int, int]] = field(default_factory=list)
    ended: dict[int, float] = field(default_factory=dict)
    state: SchedulerState = field(init=False)
    _order: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        gpus = [Gpu(i, f"GPU-{i}", name="A100-80GB", memory_mib=TOTAL_MIB) for i in range(GPUS)]
        self.state = SchedulerState(Fleet(gpus), self.jobs.get)
        self.state.policy = policy_of(Config())
        self.state.fleet.admission = Admission.of(gpus, Thresholds(), self._now())
        self.state.watch_admission()

    def _now(self) -> Now:
        return Now(T0 + self.at, M0 + self.at)

    def _add(self, at: float, what: str, number: int, version: int = 0) -> None:
        heapq.heappush(self.events, (at, next(self._order), what, number, version))

    def run(self) -> Figures:
        """Run all jobs to their end; return the figures."""
        for work in self.works:
            self._add(work.arrives, "arrives", work.number)
        if self.apply:
            self._add(APPLY_S, "apply", 0)
        told: list[Observation] = []
        while self.events or told or len(self.ended) < len(self.works):
            again = self._pass(told)
            told = again
            if again:
                continue
            timer = self.state.next_timer()
            following = min(self.events[0][0] if self.events else math.inf, math.inf if timer is None else timer - M0)
            if following == math.inf:
                break
            self.at = max(self.at, following)
            told = self._happened()
        assert len(self.ended) == len(self.works), f"{len(self.works) - len(self.ended)} jobs never ended"
        self.figures.makespan_s = max(self.ended.values())
        waits = [self.ended[work.number] - work.arrives for work in self.works]
        self.figures.mean_jct_s = sum(waits) / len(waits)
        return self.figures

    # -- the scheduler ----------------------------------------------------------------------------------------

    def _needs(self) -> ModelTable:
        return replace(self.table, learned=self.learned) if self.learn else self.table

    def _pass(self, told: list[Observation]) -> list[Observation]:
        """Read the GPUs and decide; return what the next pass must be told at the same time."""
        plan = decide(self.state, [self._reading(), *told], self._now())
        again: list[Observation] = []
        for job in plan.starts:
            again.append(Started(job.id, job.attempt, Process(job.id, 1), T0 + self.at))
            self._start(job)
        for group, run in plan.measured:
            key = (group.model, script_name(group.script))
            self.learned[key] = self.learned.get(key, Learned(0, {})).with_run(group.count, run.peak_mib)
            self.seen[group] = self.seen.get(group, Seen()).with_run(run)
        if plan.measured and self.learn:
            again += self._recompute()
        for job in plan.changed.values():
            if job.state.ended and job.id in self.of:
                self._ended(job)
        if plan.read_since is not None and not again:
            self.at += 1e-3  # the reading that was asked for
            again.append(self._reading())
        return again

    def _recompute(self) -> list[Observation]:
        waiting = [job for job in self.jobs.values() if job.state.value == "pending" and not job.oom_retries]
        return [Arrived(job) for job in changed_needs(self.state.fleet.managed, self._needs(), waiting)]

    def _reading(self) -> Readings:
        found = []
        for index, gpu in self.state.fleet.gpus.items():
            on = [one for one in self.running.values() if one.gpu == index]
            processes = tuple(
                GpuProcess(one.job.id, one.mib, owner=one.job.attempt_key, ours=True, load=one.work.load) for one in on
            )
            used = DRIVER_MIB + sum(one.mib for one in on)
            load = min(1.0, sum(one.work.load for one in on))
            found.append(GpuSnapshot(gpu.uuid, index, gpu.name, TOTAL_MIB, used, load, processes=processes))
        return Readings(M0 + self.at, tuple(found))

    # -- the jobs ---------------------------------------------------------------------------------------------

    def _happened(self) -> list[Observation]:
        """Return what happens now: arrivals, allocations that fail, ends."""
        told: list[Observation] = []
        while self.events and self.events[0][0] <= self.at:
            _, _, what, number, version = heapq.heappop(self.events)
            if what == "arrives":
                told.append(Arrived(self._submitted(self.works[number - 1], "")))
            elif what == "again":
                told.append(Arrived(self._submitted(self.works[number - 1], "1")))
            elif what == "apply":
                told += self._apply()
                if len(self.ended) < len(self.works):
                    self._add(self.at + APPLY_S, "apply", 0)
            elif number in self.running and self.running[number].version == version:
                told += self._step(self.running[number])
        return told

    def _submitted(self, work: Work, gpus: str) -> Job:
        number = len(self.jobs) + 1
        spec = JobSpec(script=f"/work/{work.script}", arguments=("--llm", work.model), gpus=gpus)
        need, notes = need_of(spec, self._needs(), self.state.fleet.managed)
        job = Job(number, spec, need, order=number, submitted_at=T0 + self.at, notes=notes)
        self.jobs[number], self.of[number] = job, work
        return job

    def _apply(self) -> list[Observation]:
        rows = advice(self.table, self.seen, self.state.fleet.managed)
        changed = {row.model: str(row.suggestion.need) for row in rows if row.differs and row.suggestion is not None}
        self.table = replace(self.table, models={**self.table.models, **changed})
        return self._recompute() if changed else []

    def _start(self, job: Job) -> None:
        attempt = Attempt(job, self.of[job.id], job.gpus[0], since=self.at)
        self.running[job.id] = attempt
        self._speeds(attempt.gpu)

    def _speeds(self, gpu: int) -> None:
        """Compute the speed of the jobs of a GPU, and plan their next events."""
        on = [one for one in self.running.values() if one.gpu == gpu]
        slower = max(1.0, sum(one.work.load for one in on))
        for one in on:
            one.done += (self.at - one.since) * one.rate
            one.since, one.rate = self.at, 1.0 / (one.work.run_s * slower)
            one.version += 1
            self._add(one.next_at(), "step", one.job.id, one.version)

    def _step(self, one: Attempt) -> list[Observation]:
        """Let an attempt allocate, or end it."""
        one.done += (self.at - one.since) * one.rate
        one.since = self.at
        if one.grown == len(one.work.steps):
            self._leave(one)
            return [Ended(one.job.id, one.job.attempt, 0, None, T0 + self.at)]
        wanted = one.wanted()
        others = DRIVER_MIB + sum(
            other.mib for other in self.running.values() if other.gpu == one.gpu and other is not one
        )
        if others + wanted > TOTAL_MIB:
            self._leave(one)
            self.figures.out_of_memory += 1
            self.figures.lost_s += self.at + T0 - (one.job.started_at or 0.0)
            return [
                Ended(
                    one.job.id, one.job.attempt, 1, None, T0 + self.at,
                    failure=Failure(
                        OUT_OF_MEMORY, peak_mib=one.mib or None, tried_mib=wanted - one.mib,
                        free_mib=TOTAL_MIB - others - one.mib, others_mib=others,
                    ),
                )
            ]  # fmt: skip
        one.mib, one.grown = wanted, one.grown + 1
        one.version += 1
        self._add(one.next_at(), "step", one.job.id, one.version)
        return []

    def _leave(self, one: Attempt) -> None:
        del self.running[one.job.id]
        self._speeds(one.gpu)

    def _ended(self, job: Job) -> None:
        work = self.of.pop(job.id)
        if job.succeeded:
            self.ended[work.number] = self.at
        else:
            self.figures.failed += 1
            self._add(self.at + AGAIN_S, "again", work.number)


def figures_of(seed: int) -> dict[str, Figures]:
    """Return the figures with each table."""
    works = workload(seed)
    found = {}
    for kind in TABLES:
        found[f"by hand: {kind}"] = Replay(works, hand_written(seed, kind), learn=False, apply=False).run()
    found["by hand: tight or whole; `needs --apply` each hour"] = Replay(
        works, hand_written(seed, BOTH), learn=False, apply=True
    ).run()
    found["**learn: true**"] = Replay(works, ModelTable(), learn=True, apply=False).run()
    return found


def main() -> int:
    """Print the table of figures: sums of endings, and means of times, over the seeds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/learned_needs.md")
    given = parser.parse_args()
    found: dict[str, list[Figures]] = {}
    with ProcessPoolExecutor() as pool:
        for done, figures in enumerate(pool.map(figures_of, range(1, given.seeds + 1)), start=1):
            progress(f"{done} of {given.seeds} workloads")
            for name, one in figures.items():
                found.setdefault(name, []).append(one)
    progress("")
    base = found[f"by hand: {BOTH}"]
    lines = [
        f"{given.seeds} workloads of {JOBS} jobs of {len(MODELS)} models on {GPUS} GPUs of 80 GiB; means of the workloads",
        "",
        "| needs | attempts that ran out of memory | jobs that failed | makespan | mean time to completion | lost in such attempts |",
        "|---|---|---|---|---|---|",
        *(_row(name, rows, base) for name, rows in found.items()),
    ]
    print("\n".join(lines))
    if given.write:
        about = "Written by `python -m benchmarks.learned_needs --write`, which also tells how the jobs and tables are made. In brackets: against the first row."
        text = "\n".join(["# Learned needs against tables that people wrote", "", about, "", *lines, ""])
        Path(__file__).with_suffix(".md").write_text(text, encoding="utf-8")
    return 0


def _row(name: str, rows: Sequence[Figures], base: Sequence[Figures]) -> str:
    def cell(value: Callable[[Figures], float], unit: str = "", divisor: float = 1.0) -> str:
        found, before = (sum(map(value, each)) for each in (rows, base))
        return f"{found / len(rows) / divisor:.1f}{unit} ({100 * (found / before - 1):+.0f} %)"

    cells = [
        cell(lambda row: row.out_of_memory), f"{sum(row.failed for row in rows) / len(rows):.1f}",
        cell(lambda row: row.makespan_s, " h", 3600), cell(lambda row: row.mean_jct_s, " h", 3600),
        f"{sum(row.lost_s for row in rows) / len(rows) / 3600:.1f} h",
    ]  # fmt: skip
    return f"| {' | '.join([name, *cells])} |"


if __name__ == "__main__":
    sys.exit(main())
