"""The decisions of a pass: `decide` turns state and observations into a plan. Equal input gives an equal plan."""

from __future__ import annotations

import heapq
import math
from collections.abc import Generator, Iterable
from dataclasses import replace

from scheduler.core.admission import FRESH_S
from scheduler.core.backfill import Backfill
from scheduler.core.backoff import backoff_s
from scheduler.core.counters import RETRY_COULD_NOT_START, RETRY_FAILED, RETRY_GPU_ERROR
from scheduler.core.decision_pass import DecisionPass, Plan, Stop
from scheduler.core.endings import CANCELLED, NEVER_AGAIN, Meaning, Rules, after_loss, after_no_start, after_run, ran
from scheduler.core.engine_placement import EngineFleet
from scheduler.core.failure_signs import OUT_OF_MEMORY
from scheduler.core.gpu import WHOLE, ResourceRequest, ids_of
from scheduler.core.gpu_faults import fault_of
from scheduler.core.gpu_notices import judge_gpus, take_memory_errors, take_xids
from scheduler.core.handle_requests import answer
from scheduler.core.job import TICKS_A_SECOND, Event, Holding, Job, JobState, Outcome, Process
from scheduler.core.job_text import UNDYING, during_run, where_it_runs
from scheduler.core.launch import GPU_PLACEHOLDER
from scheduler.core.learned_needs import DONE, OTHERWISE, Run, group_of
from scheduler.core.measured_use import MeasuredUse
from scheduler.core.memory_at_end import with_memory
from scheduler.core.model_table import sizes_for
from scheduler.core.neighbours import Neighbours
from scheduler.core.observations import (
    Arrived,
    Asked,
    Ended,
    EnginePlace,
    Gone,
    GpuErrors,
    Lost,
    Missing,
    NeverRan,
    Now,
    Observation,
    Readings,
    Restored,
    Started,
    Unclaimed,
)
from scheduler.core.out_of_memory import OWN, VICTIM, demand_of
from scheduler.core.placement_class import PlacementClass, class_of
from scheduler.core.scheduler_state import OpenEnd, SchedulerState
from scheduler.core.states import Move, move
from scheduler.core.take_turns import Turns
from scheduler.core.trespass import look_for_trespass

LAST = (math.inf, math.inf)  # a sort key after all others
MOST_STARTS_A_TURN = 256  # most starts in one pass, so that 10,000 lines added together do not delay other work
KILL_AGAIN_S = 1.0  # time between two SIGKILLs to the same job
KILL_REMOTE_AGAIN_S = 30.0  # the same for a job on another machine: each request to an engine takes its time
END_READING_S = 3.0  # how long the end of an attempt waits for a reading that may show why it ended badly
UNDYING_S = 5.0  # from the first SIGKILL to the note UNDYING; a large process needs time to free its memory


def decide(state: SchedulerState, observations: Iterable[Observation], now: Now, jitter: float = 0.5) -> Plan:
    """Apply the observations to the state, decide which jobs start and which are stopped, and return the plan.

    ``jitter``: a random number in [0, 1) that varies the length of back-offs. ``state`` is changed as the plan
    describes. If the caller cannot record the plan, it must build a new state from the store.
    """
    decision = _Decision(state, now, jitter)
    for observation in observations:
        decision.take_in(observation)
    decision.fall_due()
    decision.place()
    return decision.plan


def _answer(turns: Generator[tuple[int, PlacementClass], bool, None], taken: bool) -> tuple[int, PlacementClass] | None:
    """Tell the queue whether its last offer was taken, and return the next one; None: there is none."""
    try:
        return turns.send(taken)
    except StopIteration:
        return None


class _Decision(DecisionPass):
    """One call of `decide`: ``take_in`` applies an observation, ``fall_due`` acts on timers, ``place`` starts jobs."""

    def take_in(self, observation: Observation) -> None:
        if isinstance(observation, Ended):
            self._ended(observation)
        elif isinstance(observation, Started):
            self._started(observation)
        elif isinstance(observation, Arrived):
            self.enqueue(observation.job)
        elif isinstance(observation, Restored):
            self.restore(observation.jobs)
        elif isinstance(observation, NeverRan):
            self._never_ran(observation)
        elif isinstance(observation, Unclaimed):
            self._unclaimed(observation)
        elif isinstance(observation, Lost):
            self._lost(observation)
        elif isinstance(observation, Gone):
            self._processes_gone(observation.key)
        elif isinstance(observation, Missing):
            self._missing(observation)
        elif isinstance(observation, Asked):
            answer(self, observation)
        elif isinstance(observation, Readings):
            self._read(observation)
        elif isinstance(observation, GpuErrors):
            take_xids(self, observation.xids)
        elif isinstance(observation, Neighbours):
            left = self.state.take_neighbours(observation)
            # As after an own job: the memory of a process that is ending is not foreign, and a reading decides.
            if left and self.state.fleet.admission.left(left, self.now):
                self.plan.read_gpus(self.now.mono)

    # -- running ------------------------------------------------------------------------------------------

    def _of(self, job_id: int, attempt: int) -> Job | None:
        job = self.state.live.get(job_id)
        return job if job is not None and job.attempt == attempt else None

    def _started(self, observation: Started) -> None:
        job = self._of(observation.job, observation.attempt)
        if job is None or job.began:
            return
        job.process, job.started_at = observation.process, observation.at
        if observation.place is not None:
            self._placed_by_engine(job, observation.place)
        job.session = observation.session or job.session
        job.argv, job.interpreter = observation.argv or job.argv, observation.interpreter or job.interpreter
        if job.state is JobState.STARTING:
            move(job, Move.STARTED, self.now.wall)
            job.start_failures = 0
        share = {"share": job.need.parts / WHOLE} if job.gpus else {}  # the next attempt may have another share
        self.changed(job, "started", **where_it_runs(job), gpus=list(job.gpus), attempt=job.attempt, **share)
        if job.state is JobState.STOPPING:
            self.plan.stops.append(Stop(job, hard=False))
        else:
            self.state._watch_limit(job, self.now)

    def _placed_by_engine(self, job: Job, place: EnginePlace) -> None:
        """Record where an engine started a job, and book the GPUs that it gave to the job.

        Before, other GPUs may have been booked for the job. Other released jobs, for which the given GPUs were booked,
        lose their bookings; `_book_released` gives them new ones if there is room.
        """
        state, fleet = self.state, self.state.fleet
        job.node, job.partition, job.engine_job = place.node, place.partition, place.engine_job
        self._withdraw_booking(job)
        known = fleet.by_uuid if isinstance(fleet, EngineFleet) else {}
        job.gpus = tuple(sorted(known[uuid] for uuid in place.gpus if uuid in known))
        ids = ",".join(uuid.rpartition("/")[2] for uuid in place.gpus)
        job.argv = tuple(word.replace(GPU_PLACEHOLDER, ids) for word in job.argv)
        for other_id, gpus in state.released.items():
            if gpus and set(gpus) & set(job.gpus):
                other = state.live[other_id]
                fleet.give_back(other.need, gpus, other.spec.vram_mib or 0)
                state.released[other_id] = None
        state.book(job)

    def _withdraw_booking(self, job: Job) -> None:
        """Free the GPUs that are booked for a released job, which an engine has not started yet."""
        gpus = self.state.released.pop(job.id, None)
        if gpus is not None:
            self.state.fleet.give_back(job.need, gpus, job.spec.vram_mib or 0)

    def _book_released(self) -> None:
        """Book GPUs for the released jobs without a booking, in the order of their release, as far as there is room."""
        state = self.state
        for job_id, gpus in state.released.items():
            job = state.live[job_id]
            if gpus is None and job.state is JobState.STARTING:
                found = state.fleet.find(class_of(job))
                if found is not None:
                    state.fleet.take(job.need, found, job.spec.vram_mib or 0)
                    state.released[job_id] = found

    def _read(self, readings: Readings) -> None:
        """Apply a reading of the GPUs, and decide on the ends that waited for it."""
        if not readings.problem:
            take_memory_errors(self, readings)
        self.state.fleet.admission.take(readings, self.now)
        look_for_trespass(self, readings)
        for job_id, open_end in list(self.state.open_ends.items()):
            if open_end.since <= readings.at:
                self._close_end(job_id)

    # -- ends ---------------------------------------------------------------------------------------------

    def _waits_for_reading(self, job: Job, end: Ended | Lost) -> bool:
        """Return whether a reading of the GPUs must come first, because it may show that a GPU made the job fail.

        If so, request the reading. Until it comes, the job stays RUNNING or STARTING and keeps its GPUs, and nothing is
        recorded: after a crash, the end is found again in the attempt record.
        """
        state = self.state
        if job.id in state.open_ends:
            return True  # told once more
        if job.state is JobState.STOPPING or (isinstance(end, Lost) and end.leftovers):
            return False
        if not state.fleet.admission.watches_errors or not any(gpu in state.fleet.admission.cards for gpu in job.gpus):
            return False
        state.open_ends[job.id] = OpenEnd(end, self.now.mono)
        state.at(self.now.mono + END_READING_S, "end", job)
        self.plan.read_gpus(self.now.mono)
        return True

    def _close_end(self, job_id: int) -> None:
        """Decide on the end of an attempt that waited for a reading."""
        end = self.state.open_ends.pop(job_id).end
        job = self._of(end.job, end.attempt)
        if job is None:
            return
        if isinstance(end, Ended):
            self._take_end(job, end)
        else:
            self._take_loss(job, end)

    def _ended(self, observation: Ended) -> None:
        job = self._of(observation.job, observation.attempt)
        if job is None or (observation.exit_code != 0 and self._waits_for_reading(job, observation)):
            return
        self._take_end(job, observation)

    def _take_end(self, job: Job, observation: Ended) -> None:
        if job.state is JobState.STARTING:  # the start was not reported; the attempt record has the end
            move(job, Move.STARTED, self.now.wall)
        if job.started_at is None:
            job.started_at = observation.at
        job.exit_code, job.signal = observation.exit_code, observation.signal
        job.finished_at = observation.at
        fleet = self.state.fleet
        job.log_finding = with_memory(job, observation.failure, fleet.gpus, fleet.admission)
        if observation.note:
            job.notes = (*job.notes, observation.note)
        self.plan.must_sync = True
        if job.state is JobState.STOPPING and set(observation.leftovers) - set(observation.unsure):
            self.state.leader_ended.add(job.id)  # the GPUs are freed when all processes have ended
            self.changed(job, "leader_ended", processes=[p.pid for p in observation.leftovers])
            return
        self._finish(job, observation.leftovers, observation.note)

    def _finish(self, job: Job, leftovers: tuple[Process, ...], note: str = "") -> None:
        sharing, at = self.state.sharing, self.now.since_boot
        if sharing is not None and at is not None and job.finished_at and job.process is not None:
            age = at - job.process.ticks / TICKS_A_SECOND  # limits what a change of the wall clock can do
            sharing.take_back(at, min(self.now.wall - job.finished_at, age), job.need.total / WHOLE)
        self._learn_need(job)
        ending = after_run(job, self._rules())
        if ending.how is Move.RETRY_SCHEDULED:
            self._run_again(job, ending, leftovers)
            return
        if ending.how is Move.SUCCEEDED:
            self.state.estimates.learn(job.spec, job.need, (job.finished_at or 0.0) - (job.started_at or 0.0))
            self.state.queue.forget_unknown_starts()
        if ending.outcome is Outcome.TRESPASS:
            note = job.notes[-1] if job.notes else ""
        elif not note and ending.how is Move.FAILED:  # a GPU that was lost or reported an error may explain the end
            note = next((one for one in reversed(job.notes) if one.startswith(during_run(job))), "")
            note = note or self._gpu_fault(job)
        self._end(job, ending, leftovers, note)

    def _learn_need(self, job: Job) -> None:
        """Record memory, load and run time of the attempt: from them the need of its model is suggested."""
        group = group_of(job, self.state.fleet.gpus)
        if group is None or job.started_at is None or job.finished_at is None:
            return
        used = self.state.fleet.admission.measured.get(job.attempt_key, MeasuredUse())
        ended, peak = DONE if job.exit_code == 0 else OTHERWISE, used.peak_mib
        found = job.log_finding
        if ended != DONE and found is not None and found.peak_mib is not None:
            peak = found.peak_mib  # the log may tell more than the readings
        if ended != DONE and found is not None and found.oom == VICTIM:
            peak = None  # it had no chance to use what it needs
        if ended != DONE and found is not None and found.oom == OWN:
            ended, peak = OUT_OF_MEMORY, demand_of(found, sizes_for(job.need, job.allowed, self.state.fleet.managed))
        wall_s = max(0.0, job.finished_at - job.started_at)
        self.plan.measured.append((group, Run(peak, wall_s, used.load, ended)))

    def _rules(self) -> Rules:
        policy, fleet = self.state.policy, self.state.fleet

        def most_mib(job: Job) -> int:
            return max(map(fleet.admission.most_mib, ids_of(fleet.allowed_mask(job.allowed))), default=0)

        return Rules(policy.max_assign_attempts, True, policy.oom_retries, most_mib, fleet.gpus, self._gpu_fault)

    def _gpu_fault(self, job: Job) -> str:
        """Return the fault of a GPU of the job's attempt that keeps jobs away from this GPU, as text; empty: none."""
        state, admission = self.state, self.state.fleet.admission
        fault = fault_of(job, state.fleet.gpus, state.faults) if admission.thresholds.hold_on_errors else ""
        gone = (admission.cards[gpu].verdict for gpu in job.gpus if gpu in admission.cards)
        return fault or next((verdict.sentence for verdict in gone if verdict.code == "gone"), "")

    def _run_again(self, job: Job, ending: Meaning, leftovers: tuple[Process, ...]) -> None:
        tries = 0
        if ending.cause == RETRY_FAILED:
            tries = job.runs_failed = job.runs_failed + 1
        elif ending.cause == RETRY_COULD_NOT_START:
            tries = job.start_failures = job.start_failures + 1
        else:
            if ending.cause == RETRY_GPU_ERROR:
                job.gpu_retries += 1
            else:
                job.oom_retries += 1
            job.notes = (*job.notes, ending.why)
        wait = backoff_s(tries, self.state.policy.assign_retry_wait_s, self.jitter) if tries else 0.0
        self._fall_back(job, leftovers, ending.cause, ending.why, wait, ending.need, ending.vram_mib)

    def _fall_back(
        self,
        job: Job,
        leftovers: tuple[Process, ...],
        cause: str,
        why: str,
        wait: float,
        need: ResourceRequest | None = None,
        vram_mib: int = 0,
    ) -> None:
        gone: dict[str, object] = {"exit_code": job.exit_code, "signal": job.signal, "log": job.log}
        gone |= {"attempt": job.attempt, **ran(job)}
        self._release(job, leftovers)
        move(job, Move.RETRY_SCHEDULED, self.now.wall)
        if need is not None:
            job.need = need
        if vram_mib:
            job.spec = replace(job.spec, vram_mib=vram_mib)
            self.plan.respecs[job.id] = job
        job.not_before = self.now.wall + wait
        job.reason_code = "backoff"
        job.reason = f"{why}; next attempt {'immediately' if not wait else f'in {wait:.0f} s'}"
        self.changed(job, "retry_scheduled", why=why, wait=wait, cause=cause, **gone)
        self.plan.must_sync = True
        self.enqueue(job)

    def _end(self, job: Job, ending: Meaning, leftovers: tuple[Process, ...], why: str = "") -> None:
        """End a job, and free its GPUs unless leftover processes use them.

        ``why``: details of the cause, stored with the event; empty: no details.
        """
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
            **({"why": why} if why else {}),
        }
        self.changed(job, job.state.value, **detail, **ran(job))
        self.after_end(job)

    def _release(self, job: Job, leftovers: tuple[Process, ...]) -> None:
        """Free the job's allocation, or keep it for the job's leftover processes until they end."""
        state = self.state
        state.live.pop(job.id, None)
        state.open_ends.pop(job.id, None)
        state.leader_ended.discard(job.id)
        state.killed.pop(job.id, None)
        state.fleet.admission.measured.pop(job.attempt_key, None)
        vram = job.spec.vram_mib or 0
        if job.id in state.released:
            self._withdraw_booking(job)
        elif job.attempt_key in state.unbooked:
            state.unbooked.discard(job.attempt_key)
        else:
            state.fleet.give_back(job.need, job.gpus, vram)
        if state.fleet.admission.left(job.gpus, self.now):
            self.plan.read_gpus(self.now.mono)
        if leftovers and job.gpus:
            holding = Holding(job.attempt_key, job.id, job.need, job.gpus, vram, leftovers, job.spec.user)
            state.hold(holding)
            self.plan.held.append(holding)
            pids = [p.pid for p in leftovers]
            self.plan.events.append(Event(job.id, self.now.wall, "leftovers", {"pids": pids, "gpus": list(job.gpus)}))

    def _processes_gone(self, key: str) -> None:
        self.state.fleet.admission.measured.pop(key, None)  # leftover processes were measured as well
        for open_end in self.state.open_ends.values():
            if f"{open_end.end.job}.{open_end.end.attempt}" == key:
                open_end.end = replace(open_end.end, leftovers=())
        holding = self.state.holdings.pop(key, None)
        if holding is not None:
            if key in self.state.unbooked:
                self.state.unbooked.discard(key)
            else:
                self.state.fleet.give_back(holding.need, holding.gpus, holding.vram_mib)
            if self.state.fleet.admission.left(holding.gpus, self.now):
                self.plan.read_gpus(self.now.mono)
            self.plan.freed.append(key)
            return
        job_id, _, attempt = key.partition(".")
        job = self._of(int(job_id), int(attempt))
        if job is not None and job.id in self.state.leader_ended:
            self._finish(job, ())

    def _never_ran(self, observation: NeverRan) -> None:
        job = self._of(observation.job, observation.attempt)
        if job is None:
            return
        ending = after_no_start(job, observation.why, observation.lasting, self._rules())
        if ending.how is Move.RETRY_SCHEDULED:
            self._run_again(job, ending, ())
            return
        job.start_failures += 1
        why = ""
        if ending.how is Move.FAILED:
            why = observation.why + ("" if observation.lasting else f" ({job.start_failures} tries)")
            job.notes = (*job.notes, f"could not start: {why}")
        self._end(job, ending, (), why)

    def _unclaimed(self, observation: Unclaimed) -> None:
        job = self._of(observation.job, observation.attempt)
        if job is None or not self._give_back(job):
            return
        self.changed(job, "unclaimed", attempt=job.attempt)
        self.enqueue(job)

    def _give_back(self, job: Job) -> bool:
        """Free the GPUs of an attempt that never began; a job that is to be stopped is cancelled. Return whether it waits."""
        if job.state is JobState.STOPPING:
            self._end(job, CANCELLED, ())
            return False
        self._release(job, ())
        move(job, Move.RETRY_SCHEDULED, self.now.wall)
        return True

    def _missing(self, observation: Missing) -> None:
        job = self.find(observation.job)
        if job is not None and observation.attempt:
            job = self._of(observation.job, observation.attempt)
            if job is None or job.began or not self._give_back(job):
                return
            job.attempt -= 1  # it never began, so its number is used again
            job.log, job.session = "", None
            self.plan.changed[job.id] = job
        if job is not None and job.state is JobState.PENDING:
            self._park_missing(job, observation.sentence)

    def _lost(self, observation: Lost) -> None:
        job = self._of(observation.job, observation.attempt)
        if job is not None and not self._waits_for_reading(job, observation):
            self._take_loss(job, observation)

    def _take_loss(self, job: Job, observation: Lost) -> None:
        job.finished_at = observation.at
        why = f"lost: {observation.why}"
        job.notes = (*job.notes, why)
        ending = after_loss(job, NEVER_AGAIN if observation.leftovers else self._rules())
        if ending.how is Move.RETRY_SCHEDULED:
            self._run_again(job, ending, ())
            return
        self._end(job, ending, observation.leftovers, why)

    # -- timers and placement -----------------------------------------------------------------------------

    def fall_due(self) -> None:
        """Judge the GPUs again, then act on due timers: end of a back-off, time limit, SIGTERM, SIGKILL, a late reading."""
        judge_gpus(self)
        for job_id in [one for one in self.state.open_ends if self.state.live[one].state is JobState.STOPPING]:
            self._close_end(job_id)  # it was cancelled: its end is known
        timers = self.state.timers
        while timers and timers[0][0] <= self.now.mono:
            _, kind, job_id, attempt = heapq.heappop(timers)
            if kind == "retry":
                if self.state.parked.get(job_id) == "backoff":
                    job = self.find(job_id)
                    if job is not None and job.state is JobState.PENDING and job.attempt == attempt:
                        job.not_before = None
                        self.enqueue(job)
                continue
            job = self._of(job_id, attempt)
            if job is None:
                continue
            if kind == "end" and job_id in self.state.open_ends:
                self._close_end(job_id)
            elif kind == "limit" and job.state is JobState.RUNNING and job_id not in self.state.open_ends:
                job.stop_why = "time_limit"
                self.stop(job)
            elif kind == "term" and job.state is JobState.STOPPING:
                self.plan.stops.append(Stop(job, hard=False))
            elif kind == "kill" and job.state is JobState.STOPPING:
                remote = not job.runner_kind.owns_gpus
                if job.process is not None or remote or job.id in self.state.leader_ended:
                    self.plan.stops.append(Stop(job, hard=True))
                    if not remote:
                        self._say_undying(job)
                self.state.at(self.now.mono + (KILL_REMOTE_AGAIN_S if remote else KILL_AGAIN_S), "kill", job)

    def _say_undying(self, job: Job) -> None:
        since = self.state.killed.setdefault(job.id, self.now.mono)
        if self.now.mono - since >= UNDYING_S and UNDYING not in job.notes:
            job.notes = (*job.notes, UNDYING)
            self.changed(job, "undying")

    def place(self) -> None:
        """Start waiting jobs in queue order, at most ``MOST_STARTS_A_TURN``. Jobs that do not fit continue to wait."""
        state = self.state
        if state.sharing is not None:
            state.sharing.waits_for, state.sharing.due, state.sharing.reserving = "", None, False
        if state.users is not None:
            state.users.account(self.now.mono, state.live.values(), state.holdings.values())
        if state.unbooked:
            state.book_unbooked()
        if state.queue_paused or not state.may_start or not len(state.queue):
            return
        state.fleet.open_to_all()
        self._book_released()
        turns = Turns(state.sharing, state.fleet, self.now.mono) if state.sharing is not None else None
        self._place_in_order(turns)
        if turns is not None:
            turns.end()

    def _place_in_order(self, others: Turns | None) -> None:
        state = self.state
        passed_over: list[tuple[int, PlacementClass]] = []
        backfill = Backfill(self)
        gpus_missed = False  # whether a job that needs GPUs did not fit
        users = state.users
        turns = state.queue.in_order() if users is None else state.queue.in_order(users.rank, across=users.across)
        offer = next(turns, None)
        while offer is not None and len(self.plan.starts) < MOST_STARTS_A_TURN:
            job_id, kind = offer
            if users is not None and users.keeps_back(kind.user, kind.need):
                offer = _answer(turns, False)
                continue
            if others is not None and kind.need.total:
                others.give_way()
            gpus = self._fresh(kind, state.fleet.find(kind))
            taken = gpus is not None or self._may_release_ahead(kind)
            if taken:
                self._start_in_turn(job_id, kind, gpus, passed_over, backfill, others)
            elif state.policy.max_overtakes:
                if others is not None and kind.need.total and not gpus_missed:
                    if others.reserves(job_id, state.policy.max_overtakes):
                        state.fleet.reserve(job_id, kind)
                gpus_missed = gpus_missed or bool(kind.need.total)
                self._start_on_lent(kind, passed_over, backfill, others)
                if job_id in state.queue:  # it was not started on lent GPUs itself
                    passed_over.append((job_id, kind))
                    backfill.reserve(job_id, kind)
            offer = _answer(turns, taken)

    def _start_on_lent(
        self,
        kind: PlacementClass,
        passed_over: list[tuple[int, PlacementClass]],
        backfill: Backfill,
        others: Turns | None,
    ) -> None:
        """Start jobs of a class on reserved GPUs, as far as they end in time, and as the limits of their user allow."""
        users = self.state.users
        while len(self.plan.starts) < MOST_STARTS_A_TURN:
            lent = backfill.lent(kind)
            if lent is None or self._fresh(kind, lent[1]) is None:
                return
            self._start_in_turn(lent[0], kind, lent[1], passed_over, backfill, others)
            if users is not None and users.keeps_back(kind.user, kind.need):
                return

    def _fresh(self, kind: PlacementClass, gpus: tuple[int, ...] | None) -> tuple[int, ...] | None:
        """Return ``gpus``; None if they have to be read before a job of ``kind`` is placed there."""
        if gpus and not kind.need.by_name and not self.state.fleet.admission.fresh(gpus, self.now):
            self.plan.read_gpus(self.now.mono - FRESH_S)  # the job is placed after that reading
            return None
        return gpus

    def _start_in_turn(
        self,
        job_id: int,
        kind: PlacementClass,
        gpus: tuple[int, ...] | None,
        passed_over: list[tuple[int, PlacementClass]],
        backfill: Backfill,
        others: Turns | None,
    ) -> None:
        """Start a job of the queue; the jobs of ``passed_over`` that could have used its GPUs count as overtaken."""
        state = self.state
        job, place = self.find(job_id), state.queue.key_of(job_id)
        state.queue.drop(job_id)
        if job is None or job.state is not JobState.PENDING or not self._start(job, gpus) or gpus is None:
            return
        if others is not None:
            others.placed(kind.need)
        if state.users is not None:
            state.users.charge(kind.user, kind.need)
        for other, waits_as in passed_over:
            if other in state.queue and state.fleet.competes(waits_as, kind.need, gpus):
                state.queue.overtake(other, place if waits_as.user == kind.user else LAST)
                if state.queue.overtaken(other) == state.policy.max_overtakes:  # reached with this start
                    backfill.reserve_if_overtaken(other, waits_as)

    def _may_release_ahead(self, kind: PlacementClass) -> bool:
        """Return whether a job of ``kind`` may be released to an engine although no GPUs are free for it now."""
        state = self.state
        most = state.policy.release_ahead
        if not most or sum(gpus is None for gpus in state.released.values()) >= most:
            return False
        return isinstance(state.fleet, EngineFleet) and state.fleet.may_wait_outside(kind)

    def _start(self, job: Job, gpus: tuple[int, ...] | None) -> bool:
        """Start a job on GPUs. If its script or environment is missing, park it instead and return False.

        ``gpus``: None if the job waits in the queue of an engine, which will choose its GPUs. With an engine, the GPUs
        are booked but not stored with the job, because the engine may choose others.
        """
        missing = self.state.missing(job)
        if missing:
            self._park_missing(job, missing)
            return False
        if gpus is not None:
            self.state.fleet.take(job.need, gpus, job.spec.vram_mib or 0)
        job.attempt += 1
        move(job, Move.PLACED, self.now.wall)
        if isinstance(self.state.fleet, EngineFleet):
            self.state.released[job.id] = gpus
            job.gpus = ()
        else:
            job.gpus = gpus or ()
        job.process = job.started_at = job.not_before = job.log_finding = None
        job.reason_code = job.reason = ""
        self.state.live[job.id] = job
        self.plan.starts.append(job)
        self.plan.changed[job.id] = job
        self.plan.must_sync = True
        return True
