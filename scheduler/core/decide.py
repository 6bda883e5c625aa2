"""The only place that chooses: facts and a world in, a plan out. The same input gives the same plan."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from scheduler.core.answering import UNDYING, answer
from scheduler.core.endings import CANCELLED, Meaning, Rules, after_loss, after_no_start, after_run, ran
from scheduler.core.estimate import Estimates
from scheduler.core.facts import (
    Arrived,
    Asked,
    Ended,
    Fact,
    Gone,
    Lost,
    Missing,
    NeverRan,
    Now,
    Readings,
    Started,
    Unclaimed,
)
from scheduler.core.gpu import WHOLE, Need, gpu_ids_text, ids_of
from scheduler.core.job import TICKS_A_SECOND, Event, Failure, Holding, Job, JobState, Outcome, Process, Reason
from scheduler.core.job_class import JobClass, class_of
from scheduler.core.noticing import judge_gpus
from scheduler.core.pauses import Pauses
from scheduler.core.placement import Fleet
from scheduler.core.queue import Order, Queue
from scheduler.core.requests import Answer
from scheduler.core.retry import LONGEST_WAIT_S, backoff_s
from scheduler.core.states import Move, move
from scheduler.core.tallies import RETRY_COULD_NOT_START, RETRY_FAILED
from scheduler.core.telemetry import FRESH_S, Limits, Tenant

MOST_STARTS_A_TURN = 256  # so that one paste of 10,000 lines does not hold up everything else
KILL_AGAIN_S = 1.0
UNDYING_S = 5.0  # after the first SIGKILL: a large process may need a moment to give its memory back
LEAST_GRACE_S = 3.0  # after a restart, when the SIGTERM may never have been sent


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings that decisions depend on; durations in seconds."""

    order: Order = field(default_factory=Order)
    max_assign_attempts: int = 5
    assign_retry_wait_s: float = 5.0
    oom_retries: int = 2
    kill_grace_s: float = 15.0
    max_overtakes: int = 0  # 0: a job may be overtaken without end
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class Stop:
    """End all processes of a job: ``hard`` is SIGKILL, else SIGTERM."""

    job: Job
    hard: bool


@dataclass(slots=True)
class Plan:
    """What to record (jobs, events, holdings, answers) and then what to do (starts, stops)."""

    changed: dict[int, Job] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    starts: list[Job] = field(default_factory=list)
    stops: list[Stop] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    respecs: dict[int, Job] = field(default_factory=dict)  # those of ``changed`` whose wish itself has changed
    held: list[Holding] = field(default_factory=list)
    freed: list[str] = field(default_factory=list)
    pauses_changed: bool = False
    must_sync: bool = False
    notices: list[tuple[str, bool]] = field(default_factory=list)  # about no job: a sentence, and whether it warns
    read_since: float | None = None  # a GPU is waited for that must be read: asked at this ``mono`` time or later

    def read_gpus(self, since: float) -> None:
        """Have the GPUs read, unless they are being read since ``since``."""
        self.read_since = since if self.read_since is None else max(self.read_since, since)

    @property
    def empty(self) -> bool:
        """True when there is nothing to write down."""
        return not (self.changed or self.events or self.answers or self.held or self.freed or self.pauses_changed)


def never_missing(job: Job) -> str:
    """Every script is there (for worlds without a disk)."""
    return ""


def no_blocker(identity: str) -> Job | None:
    """No job is the same wish as another (for worlds without a store)."""
    return None


@dataclass(slots=True)
class World:
    """All that decisions are made from. Only ``decide`` changes it.

    ``fetch`` gives the whole Job for an id (the store's row), or None; ``missing`` says what a job about to
    start lacks on disk, or an empty text. Both only read.
    """

    fleet: Fleet
    fetch: Callable[[int], Job | None]
    policy: Policy = Policy()
    missing: Callable[[Job], str] = never_missing
    blocker: Callable[[str], Job | None] = no_blocker
    queue: Queue = field(default_factory=Queue)
    live: dict[int, Job] = field(default_factory=dict)
    holdings: dict[str, Holding] = field(default_factory=dict)
    parked: dict[int, str] = field(default_factory=dict)  # waiting, but not for room: id → reason code
    children: dict[int, list[int]] = field(default_factory=dict)
    queue_paused: bool = False
    pauses: Pauses = field(default_factory=Pauses)  # who changed what since which picture of the state file
    front: int = 0  # the lowest place given out: whoever comes first is put before it
    may_start: bool = True  # False where requests are carried out without a daemon
    estimates: Estimates = field(default_factory=Estimates)
    timers: list[tuple[float, str, int, int]] = field(default_factory=list)
    killed: dict[int, float] = field(default_factory=dict)  # STOPPING jobs that were sent SIGKILL: since when (mono)
    leader_ended: set[int] = field(default_factory=set)  # STOPPING jobs whose leader is gone, others not
    unbooked: set[str] = field(default_factory=set)  # attempts found in the store with GPUs that others have booked
    told: dict[int, str] = field(default_factory=dict)  # what was last said of each GPU: a verdict's code, or `trouble`

    def __post_init__(self) -> None:
        self.fleet.telemetry.tenants = self.tenants

    def tenants(self, gpu: int) -> list[Tenant]:
        """The attempts of ours that have parts of a GPU, also those whose leader has ended."""
        found = [
            Tenant(job.attempt_key, job.id, job.need.parts, job.spec.vram_mib or 0, job.started_at)
            for job in self.live.values()
            if gpu in job.gpus
        ]
        found += [
            Tenant(held.key, held.job, held.need.parts, held.vram_mib, 0.0)
            for held in self.holdings.values()
            if gpu in held.gpus
        ]
        return found

    def next_timer(self) -> float | None:
        """The ``mono`` time at which something falls due by itself."""
        due = [self.timers[0][0]] if self.timers else []
        look = self.fleet.telemetry.next_look
        return min([*due, look], default=None) if look is not None else (due[0] if due else None)

    def waiting(self) -> int:
        """How many jobs wait, for whatever reason."""
        return len(self.queue) + len(self.parked)

    def class_reasons(self) -> dict[str, Reason]:
        """Why each class of waiting jobs is not served, as placement sees it now."""
        if self.queue_paused:
            paused = Reason("paused", "the whole queue is paused; `gpujob queue resume` lets it go on")
            return {kind.key: paused for kind in self.queue.classes()}
        return {kind.key: self.fleet.why_not(kind) for kind in self.queue.classes()}

    def blocked(self, reasons: Mapping[str, Reason]) -> dict[str, int]:
        """How many jobs wait for each reason, by its code; ``reasons``: those of the classes. Costs a look at each parked job."""
        found = Counter(self.parked.values())
        for kind, number in self.queue.sizes().items():
            found[reasons[kind.key].code] += number
        return dict(found)

    def adopt(self, job: Job, now: Now) -> None:
        """Count a STARTING, RUNNING or STOPPING job read from the store, with its GPUs."""
        try:
            self.fleet.take(job.need, job.gpus, job.spec.vram_mib or 0)
        except ValueError:  # a booking that cannot be: the job runs all the same, and must not keep us from all others
            self.unbooked.add(job.attempt_key)
            job.notes = (*job.notes, f"its GPUs ({gpu_ids_text(job.gpus)}) are booked by others as well")
        self.live[job.id] = job
        self._watch_limit(job, now)
        if job.state is JobState.STOPPING:
            asked = job.stop_at if job.stop_at is not None else now.wall
            left = min(self.policy.kill_grace_s, max(LEAST_GRACE_S, asked + self.policy.kill_grace_s - now.wall))
            self.at(now.mono, "term", job)  # whoever was killed before it may not have sent the SIGTERM
            self.at(now.mono + left, "kill", job)

    def hold(self, holding: Holding) -> None:
        """Count GPUs held by processes that outlived their job."""
        try:
            self.fleet.take(holding.need, holding.gpus, holding.vram_mib)
        except ValueError:
            self.unbooked.add(holding.key)
        self.holdings[holding.key] = holding

    def at(self, mono: float, kind: str, job: Job) -> None:
        """Remember that something falls due."""
        heapq.heappush(self.timers, (mono, kind, job.id, job.attempt))

    def _watch_limit(self, job: Job, now: Now) -> None:
        if job.spec.time_limit_s is not None and job.started_at is not None:
            ran = now.wall - job.started_at
            if job.process is not None and now.since_boot is not None:  # the clock may have been set meanwhile
                ran = now.since_boot - job.process.ticks / TICKS_A_SECOND
            self.at(now.mono + max(0.0, job.spec.time_limit_s - max(0.0, ran)), "limit", job)


def decide(world: World, facts: Iterable[Fact], now: Now, jitter: float = 0.5) -> Plan:
    """Take in what happened, then choose what starts and what is ended.

    ``jitter`` in [0, 1) spreads back-offs. The world is changed as the plan says; a caller that cannot record
    the plan must build its world anew from the store.
    """
    turn = Turn(world, now, jitter)
    for fact in facts:
        turn.take_in(fact)
    turn.fall_due()
    turn.place()
    return turn.plan


class Turn:
    """One call of ``decide``."""

    def __init__(self, world: World, now: Now, jitter: float) -> None:
        self.world, self.now, self.jitter = world, now, jitter
        self.plan = Plan()

    def take_in(self, fact: Fact) -> None:
        if isinstance(fact, Ended):
            self._ended(fact)
        elif isinstance(fact, Started):
            self._started(fact)
        elif isinstance(fact, Arrived):
            self.enqueue(fact.job)
        elif isinstance(fact, NeverRan):
            self._never_ran(fact)
        elif isinstance(fact, Unclaimed):
            self._unclaimed(fact)
        elif isinstance(fact, Lost):
            self._lost(fact)
        elif isinstance(fact, Gone):
            self._gone(fact.key)
        elif isinstance(fact, Missing):
            job = self.find(fact.job)
            if job is not None and job.state is JobState.PENDING:
                self._park_missing(job, fact.sentence)
        elif isinstance(fact, Asked):
            answer(self, fact)
        elif isinstance(fact, Readings):
            self.world.fleet.telemetry.take(fact, self.now)

    def find(self, job_id: int) -> Job | None:
        """A job as it is in this turn: what the turn changed, what is in hand, else the store's row."""
        return self.plan.changed.get(job_id) or self.world.live.get(job_id) or self.world.fetch(job_id)

    # -- writing down -------------------------------------------------------------------------------------

    def changed(self, job: Job, kind: str, **detail: object) -> None:
        self.plan.changed[job.id] = job
        self.plan.events.append(Event(job.id, self.now.wall, kind, dict(detail)))

    # -- waiting ------------------------------------------------------------------------------------------

    def enqueue(self, job: Job) -> None:
        """Queue a PENDING job, or park it with the reason why it is not ready."""
        world = self.world
        world.queue.drop(job.id)
        world.parked.pop(job.id, None)
        world.front = min(world.front, job.order)
        if job.held:
            self._park(job, "hold-user", f"held by its owner; gpujob release {job.id}")
            return
        if job.not_before is not None and job.not_before > self.now.wall:
            left = min(job.not_before - self.now.wall, LONGEST_WAIT_S)
            if job.reason_code != "backoff":  # it was held meanwhile
                self._park(job, "backoff", f"tried again in {left:.0f} s")
            world.parked[job.id] = "backoff"
            world.at(self.now.mono + left, "retry", job)
            return
        if job.spec.after or job.spec.after_ok:
            waits_for = self._depends(job)
            if waits_for is None or waits_for:
                return
        missing = world.missing(job)
        if missing:
            self._park_missing(job, missing)
            return
        if job.reason_code:
            job.reason_code = job.reason = ""
            self.plan.changed[job.id] = job
        estimate = world.estimates.of(job.spec, job.need) if world.policy.order.rule == "short" else None
        key = world.policy.order.key(job.priority, job.order, job.submitted_at, estimate)
        world.queue.push(job.id, class_of(job), key)

    def _park(self, job: Job, code: str, sentence: str) -> None:
        self.world.queue.drop(job.id)
        self.world.parked[job.id] = code
        if (job.reason_code, job.reason) != (code, sentence):
            job.reason_code, job.reason = code, sentence
            self.plan.changed[job.id] = job

    def _park_missing(self, job: Job, sentence: str) -> None:
        if job.reason_code != "missing":
            self.plan.events.append(Event(job.id, self.now.wall, "missing", {"why": sentence}))
        self._park(job, "missing", sentence)

    def _depends(self, job: Job) -> list[int] | None:
        """Ids that still have to end; None when the job was skipped because one of them failed."""
        waits_for = []
        for parent_id in dict.fromkeys((*job.spec.after_ok, *job.spec.after)):
            parent = self.find(parent_id)
            ended = parent is None or parent.state.ended
            if parent_id in job.spec.after_ok and ended and (parent is None or not parent.succeeded):
                what = "is not known" if parent is None else f"ended {parent.state.value}"
                self._skip(job, f"job {parent_id} had to end well and {what}")
                return None
            if not ended:
                waits_for.append(parent_id)
                self.world.children.setdefault(parent_id, []).append(job.id)
        if waits_for:
            first = waits_for[0]
            more = f" (and {len(waits_for) - 1} more)" if len(waits_for) > 1 else ""
            how = "end well" if first in job.spec.after_ok else "end"
            self._park(job, "depends", f"job {first} has to {how} first{more}")
        return waits_for

    def _skip(self, job: Job, why: str) -> None:
        self.world.queue.drop(job.id)
        self.world.parked.pop(job.id, None)
        job.finished_at = self.now.wall
        move(job, Move.PASSED_OVER, self.now.wall)
        job.outcome = Outcome.DEPENDENCY
        self.changed(job, "skipped", why=why)
        self.after_end(job)

    def after_end(self, job: Job) -> None:
        """Look again at the jobs that waited for this one."""
        for child_id in self.world.children.pop(job.id, ()):
            if self.world.parked.get(child_id) == "depends":
                child = self.find(child_id)
                if child is not None and child.state is JobState.PENDING:
                    self.enqueue(child)

    # -- running ------------------------------------------------------------------------------------------

    def _of(self, job_id: int, attempt: int) -> Job | None:
        job = self.world.live.get(job_id)
        return job if job is not None and job.attempt == attempt else None

    def _started(self, fact: Started) -> None:
        job = self._of(fact.job, fact.attempt)
        if job is None or job.process is not None:
            return
        job.process, job.started_at = fact.process, fact.at
        job.session = fact.session or job.session
        if job.state is JobState.STARTING:
            move(job, Move.STARTED, self.now.wall)
            job.start_failures = 0
        share = {"share": job.need.parts / WHOLE} if job.gpus else {}  # it may have another in its next attempt
        self.changed(job, "started", pid=fact.process.pid, gpus=list(job.gpus), attempt=job.attempt, **share)
        if job.state is JobState.STOPPING:
            self.plan.stops.append(Stop(job, hard=False))
        else:
            self.world._watch_limit(job, self.now)

    def _ended(self, fact: Ended) -> None:
        job = self._of(fact.job, fact.attempt)
        if job is None:
            return
        if job.state is JobState.STARTING:  # its start was never reported: the record tells both at once
            move(job, Move.STARTED, self.now.wall)
        if job.started_at is None:
            job.started_at = fact.at
        job.exit_code, job.signal = fact.exit_code, fact.signal
        job.finished_at, job.log_finding = fact.at, self._with_memory(job, fact.failure)
        if fact.note:
            job.notes = (*job.notes, fact.note)
        self.plan.must_sync = True
        if job.state is JobState.STOPPING and set(fact.leftovers) - set(fact.unsure):
            self.world.leader_ended.add(job.id)  # its GPUs are given back when all of it is gone
            self.changed(job, "leader_ended", processes=[p.pid for p in fact.leftovers])
            return
        self._finish(job, fact.leftovers)

    def _with_memory(self, job: Job, found: Failure | None) -> Failure | None:
        """``found`` completed with two sizes in MiB: the GPU memory that the job asked for, and the most that it used."""
        if found is None:
            return None
        fleet = self.world.fleet
        sizes = [fleet.gpus[gpu].memory_mib for gpu in job.gpus if gpu in fleet.gpus]
        known = [size for size in sizes if size is not None]
        vram, share = job.spec.vram_mib or 0, min(known) * job.need.parts // WHOLE if known else 0
        asked = max(vram, share) if job.oom_retries else vram or share  # a second run may have a larger share
        return replace(found, peak_mib=fleet.telemetry.peaks.get(job.attempt_key), asked_mib=asked or None)

    def _finish(self, job: Job, leftovers: tuple[Process, ...]) -> None:
        ending = after_run(job, self._rules())
        if ending.how is Move.FELL:
            self._run_again(job, ending, leftovers)
            return
        if ending.how is Move.SUCCEEDED:
            self.world.estimates.learn(job.spec, job.need, (job.finished_at or 0.0) - (job.started_at or 0.0))
        self._end(job, ending, leftovers)

    def _rules(self) -> Rules:
        policy, fleet = self.world.policy, self.world.fleet

        def most_mib(job: Job) -> int:
            return max(map(fleet.telemetry.most_mib, ids_of(fleet.allowed_mask(job.allowed))), default=0)

        return Rules(policy.max_assign_attempts, True, policy.oom_retries, policy.limits.by_memory, most_mib)

    def _run_again(self, job: Job, ending: Meaning, leftovers: tuple[Process, ...]) -> None:
        tries = 0
        if ending.cause == RETRY_FAILED:
            tries = job.runs_failed = job.runs_failed + 1
        elif ending.cause == RETRY_COULD_NOT_START:
            tries = job.start_failures = job.start_failures + 1
        else:
            job.oom_retries += 1
            job.notes = (*job.notes, ending.why)
        wait = backoff_s(tries, self.world.policy.assign_retry_wait_s, self.jitter) if tries else 0.0
        self._fall_back(job, leftovers, ending.cause, ending.why, wait, ending.need, ending.vram_mib)

    def _fall_back(
        self,
        job: Job,
        leftovers: tuple[Process, ...],
        cause: str,
        why: str,
        wait: float,
        need: Need | None = None,
        vram_mib: int = 0,
    ) -> None:
        gone: dict[str, object] = {"exit_code": job.exit_code, "signal": job.signal, "log": job.log}
        gone |= {"attempt": job.attempt, **ran(job)}
        self._release(job, leftovers)
        move(job, Move.FELL, self.now.wall)
        if need is not None:
            job.need = need
        if vram_mib:
            job.spec = replace(job.spec, vram_mib=vram_mib)
            self.plan.respecs[job.id] = job
        job.not_before = self.now.wall + wait
        job.reason_code = "backoff"
        job.reason = f"{why}; tried again {'at once' if not wait else f'in {wait:.0f} s'}"
        self.changed(job, "fell", why=why, wait=wait, cause=cause, **gone)
        self.plan.must_sync = True
        self.enqueue(job)

    def _end(self, job: Job, ending: Meaning, leftovers: tuple[Process, ...]) -> None:
        self._release(job, leftovers)
        move(job, ending.how, self.now.wall)
        job.outcome = ending.outcome
        job.not_before = None
        self.plan.must_sync = True
        detail = {
            "outcome": ending.outcome.value,
            "exit_code": job.exit_code,
            "signal": job.signal,
            "attempt": job.attempt,
        }
        self.changed(job, job.state.value, **detail, **ran(job))
        self.after_end(job)

    def _release(self, job: Job, leftovers: tuple[Process, ...]) -> None:
        """Give the job's GPUs back, or keep them for the processes it left behind."""
        world = self.world
        world.live.pop(job.id, None)
        world.leader_ended.discard(job.id)
        world.killed.pop(job.id, None)
        world.fleet.telemetry.peaks.pop(job.attempt_key, None)
        vram = job.spec.vram_mib or 0
        if job.attempt_key in world.unbooked:
            world.unbooked.discard(job.attempt_key)
        else:
            world.fleet.give_back(job.need, job.gpus, vram)
        if world.fleet.telemetry.left(job.gpus, self.now):
            self.plan.read_gpus(self.now.mono)
        if leftovers and job.gpus:
            holding = Holding(job.attempt_key, job.id, job.need, job.gpus, vram, leftovers)
            world.hold(holding)
            self.plan.held.append(holding)
            pids = [p.pid for p in leftovers]
            self.plan.events.append(Event(job.id, self.now.wall, "leftovers", {"pids": pids, "gpus": list(job.gpus)}))

    def _gone(self, key: str) -> None:
        self.world.fleet.telemetry.peaks.pop(key, None)  # its leftovers were measured, too
        holding = self.world.holdings.pop(key, None)
        if holding is not None:
            if key in self.world.unbooked:
                self.world.unbooked.discard(key)
            else:
                self.world.fleet.give_back(holding.need, holding.gpus, holding.vram_mib)
            if self.world.fleet.telemetry.left(holding.gpus, self.now):
                self.plan.read_gpus(self.now.mono)
            self.plan.freed.append(key)
            return
        job_id, _, attempt = key.partition(".")
        job = self._of(int(job_id), int(attempt))
        if job is not None and job.id in self.world.leader_ended:
            self._finish(job, ())

    def _never_ran(self, fact: NeverRan) -> None:
        job = self._of(fact.job, fact.attempt)
        if job is None:
            return
        ending = after_no_start(job, fact.why, fact.lasting, self._rules())
        if ending.how is Move.FELL:
            self._run_again(job, ending, ())
            return
        job.start_failures += 1
        if ending.how is Move.GAVE_UP:
            times = "" if fact.lasting else f" ({job.start_failures} tries)"
            job.notes = (*job.notes, f"could not start: {fact.why}{times}")
        self._end(job, ending, ())

    def _unclaimed(self, fact: Unclaimed) -> None:
        job = self._of(fact.job, fact.attempt)
        if job is None:
            return
        if job.state is JobState.STOPPING:
            self._end(job, CANCELLED, ())
            return
        self._release(job, ())
        move(job, Move.FELL, self.now.wall)
        self.changed(job, "unclaimed", attempt=job.attempt)
        self.enqueue(job)

    def _lost(self, fact: Lost) -> None:
        job = self._of(fact.job, fact.attempt)
        if job is None:
            return
        job.finished_at = fact.at
        job.notes = (*job.notes, f"lost: {fact.why}")
        self._end(job, after_loss(job), fact.leftovers)

    def stop(self, job: Job) -> None:
        move(job, Move.STOP_ASKED, self.now.wall)
        job.stop_at = self.now.wall
        self.changed(job, "stopping", why=job.stop_why)
        if job.process is not None:
            self.plan.stops.append(Stop(job, hard=False))
        self.world.at(self.now.mono + self.world.policy.kill_grace_s, "kill", job)

    # -- time and room ------------------------------------------------------------------------------------

    def fall_due(self) -> None:
        """Timers: back-off over, time limit reached, grace over; and what the GPUs' readings have come to say."""
        judge_gpus(self)
        timers = self.world.timers
        while timers and timers[0][0] <= self.now.mono:
            _, kind, job_id, attempt = heapq.heappop(timers)
            if kind == "retry":
                if self.world.parked.get(job_id) == "backoff":
                    job = self.find(job_id)
                    if job is not None and job.state is JobState.PENDING and job.attempt == attempt:
                        job.not_before = None
                        self.enqueue(job)
                continue
            job = self._of(job_id, attempt)
            if job is None:
                continue
            if kind == "limit" and job.state is JobState.RUNNING:
                job.stop_why = "time_limit"
                self.stop(job)
            elif kind == "term" and job.state is JobState.STOPPING:
                self.plan.stops.append(Stop(job, hard=False))
            elif kind == "kill" and job.state is JobState.STOPPING:
                if job.process is not None or job.id in self.world.leader_ended:
                    self.plan.stops.append(Stop(job, hard=True))
                    self._say_undying(job)
                self.world.at(self.now.mono + KILL_AGAIN_S, "kill", job)

    def _say_undying(self, job: Job) -> None:
        since = self.world.killed.setdefault(job.id, self.now.mono)
        if self.now.mono - since >= UNDYING_S and UNDYING not in job.notes:
            job.notes = (*job.notes, UNDYING)
            self.changed(job, "undying")

    def place(self) -> None:
        """Start each waiting job that fits, in order; skip those that do not."""
        world = self.world
        if world.queue_paused or not world.may_start or not len(world.queue):
            return
        world.fleet.open_to_all()
        passed_over: list[tuple[int, JobClass]] = []
        turns = world.queue.in_order()
        offer = next(turns, None)
        while offer is not None and len(self.plan.starts) < MOST_STARTS_A_TURN:
            job_id, kind = offer
            gpus = world.fleet.find(kind)
            if gpus and not kind.need.by_name and not world.fleet.telemetry.fresh(gpus, self.now):
                self.plan.read_gpus(self.now.mono - FRESH_S)  # it is placed when they have been looked at
                gpus = None
            taken = gpus is not None
            if gpus is not None:
                job, place = self.find(job_id), world.queue.key_of(job_id)
                world.queue.drop(job_id)
                if job is not None and job.state is JobState.PENDING:
                    self._start(job, gpus)
                    for other, waits_as in passed_over:
                        if world.fleet.competes(waits_as, kind.need, gpus):
                            world.queue.overtake(other, place)
                            if world.queue.overtaken(other) == world.policy.max_overtakes:  # from this very start on
                                world.fleet.reserve(other, waits_as)
            elif world.policy.max_overtakes:
                passed_over.append((job_id, kind))
                if world.queue.overtaken(job_id) >= world.policy.max_overtakes:
                    world.fleet.reserve(job_id, kind)
            try:
                offer = turns.send(taken)
            except StopIteration:
                offer = None

    def _start(self, job: Job, gpus: tuple[int, ...]) -> None:
        missing = self.world.missing(job)
        if missing:
            self._park_missing(job, missing)
            return
        self.world.fleet.take(job.need, gpus, job.spec.vram_mib or 0)
        job.attempt += 1
        move(job, Move.PLACED, self.now.wall)
        job.gpus = gpus
        job.process = job.started_at = job.not_before = job.log_finding = None
        job.reason_code = job.reason = ""
        self.world.live[job.id] = job
        self.plan.starts.append(job)
        self.plan.changed[job.id] = job
        self.plan.must_sync = True
