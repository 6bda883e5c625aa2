"""A simulated machine for tests of the real `decide`: its clock, GPUs, disk, supervisors and jobs, and their faults.

`decide`, the recovery table and the scheduler state are those of the program. The loop of the daemon and the runners
are imitated here in a few lines. The machine keeps its own counts of starts, ends and bookings, so that `check` can
verify the ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from scheduler.core.admission import Admission
from scheduler.core.decide import decide
from scheduler.core.decision_pass import Plan
from scheduler.core.gpu import WHOLE, ids_of, mask_of
from scheduler.core.gpu_admission import Thresholds
from scheduler.core.gpu_snapshot import GpuSnapshot
from scheduler.core.job import HOLDING, Holding, Job, JobState, Outcome, Process
from scheduler.core.observations import (
    Arrived,
    Asked,
    Ended,
    Gone,
    Lost,
    Now,
    Observation,
    Readings,
    Started,
    Unclaimed,
)
from scheduler.core.pauses import Pauses
from scheduler.core.placement import Fleet
from scheduler.core.policy import Policy
from scheduler.core.recovery import TABLE, Found, Record, Verdict
from scheduler.core.requests import PauseQueue, Request, Requeue, Resume
from scheduler.core.scheduler_state import SchedulerState
from tests.builders import M0, T0, a_gpu, a_job, check_ledger

TOTAL = 80_000


@dataclass
class Rec:
    """The contents of one attempt record."""

    kind: Record
    boot: int
    process: Process | None = None
    code: int | None = None
    signal: int | None = None


@dataclass
class Disk:
    """The data that survives every crash: the committed rows of the store, and the attempt records."""

    rows: dict[int, Job] = field(default_factory=dict)
    taken: int = 0  # number of lines of the jobs file that have been read
    from_lines: int = 0
    refused: int = 0
    requests: dict[int, Request] = field(default_factory=dict)  # row id → request that was acknowledged to the user
    answered: set[int] = field(default_factory=set)
    paused: tuple[int, ...] = ()
    queue_paused: bool = False
    changes: list[Any] = field(default_factory=list)  # changes of pauses that commands made
    holdings: dict[str, tuple[Holding, int]] = field(default_factory=dict)
    records: dict[str, Rec] = field(default_factory=dict)


@dataclass
class Supervisor:
    """A simulated supervisor process.

    ``inbox``: the attempts that it must start, in order; ``claimed``: the attempt that it has claimed but not started;
    ``alone``: whether the daemon that started this supervisor is dead.
    """

    inbox: list[str] = field(default_factory=list)
    claimed: str = ""
    alone: bool = False

    @property
    def busy(self) -> bool:
        return bool(self.inbox or self.claimed)


@dataclass
class Proc:
    """A live process of an attempt.

    ``supervisor``: the supervisor that will see the end of the process, or None. ``child_of_daemon``: the daemon is the
    parent of the process. ``deaf``: the process ignores SIGTERM.
    """

    process: Process
    key: str
    leader: bool
    supervisor: Supervisor | None = None
    child_of_daemon: bool = False
    deaf: bool = False


class Crash(Exception):
    """Raised at the point where the daemon is killed."""


class Machine:
    """The simulated machine. Its methods make events happen; `check` verifies the guarantees after each event."""

    def __init__(self, gpus: int, policy: Policy) -> None:
        self.gpus = [a_gpu(index, memory_mib=TOTAL) for index in range(gpus)]
        self.policy = policy
        self.wall, self.mono, self.boot = T0, M0, 1
        self.disk, self.full = Disk(), False
        self.lines: list[tuple[str, int, int] | None] = []  # need, priority, retries; None: a line that is refused
        self.cards = ["free"] * gpus
        self.supervisors: list[Supervisor] = []
        self.procs: dict[int, Proc] = {}
        self.last_pid = 100
        self.state: SchedulerState | None = None
        self.supervisor = Supervisor()
        self.observations: list[Observation] = []
        self.claims: list[int] = []  # ids of jobs that another supervisor may be starting now
        self.fresh: dict[int, Job] = {}
        # The machine counts these itself, independently of the scheduler's ledger.
        self.starts: Counter[str] = Counter()
        self.ended: dict[str, tuple[int | None, int | None]] = {}
        self.booked: dict[str, tuple[tuple[int, ...], int]] = {}
        self.unseen: set[str] = set()  # attempts whose end possibly no process saw
        self.requeued: Counter[int] = Counter()
        self.acknowledged: set[int] = set()

    @property
    def now(self) -> Now:
        return Now(self.wall, self.mono)

    # -- the daemon ---------------------------------------------------------------------------------------

    def _fetch(self, job_id: int) -> Job | None:
        if job_id in self.fresh:
            return self.fresh[job_id]
        row = self.disk.rows.get(job_id)
        return None if row is None else replace(row)

    def start(self, crash: str = "") -> None:
        """Start a daemon with a new supervisor, unless a daemon runs.

        ``crash``: the point at which the daemon is killed.
        """
        if self.state is None:
            self.supervisor = Supervisor()
            self.supervisors.append(self.supervisor)
            self.observations = []
            self._guard(self._load, crash)

    def turn(self, crash: str = "") -> None:
        """Run one pass of the daemon; ``crash``: the point at which the daemon is killed, or empty."""
        if self.state is not None:
            observations, self.observations = self.observations, []
            for job_id in list(self.claims):
                self.claims.remove(job_id)
                observations += self._settle(self.disk.rows[job_id])
            self._guard(lambda at: self._turn(observations, at), crash)

    def _guard(self, step: Callable[[str], None], crash: str) -> None:
        try:
            step(crash)
        except Crash:
            self.kill_daemon()

    def _load(self, crash: str) -> None:
        """Rebuild the state from the disk, settle unfinished attempts, and run the first pass (see `Daemon._load`)."""
        fleet = Fleet(self.gpus)
        state = SchedulerState(fleet, self._fetch, self.policy)
        fleet.admission = Admission.of(self.gpus, Thresholds(), self.now)
        fleet.admission.tenants = state.tenants
        fleet.paused_mask = mask_of(self.disk.paused) & fleet.all_mask
        state.queue_paused = self.disk.queue_paused
        state.pauses = Pauses(0, list(self.disk.changes))
        state.front = min((row.order for row in self.disk.rows.values()), default=0)
        self.state, self.claims = state, []
        for key, (holding, boot) in list(self.disk.holdings.items()):
            if boot == self.boot:
                state.hold(holding)
            else:
                del self.disk.holdings[key]
        in_hand = [replace(row) for row in self.disk.rows.values() if row.state in HOLDING]
        observations: list[Observation] = []
        for job in in_hand:
            state.adopt(job, self.now)
        for job in in_hand:
            if job.attempt_key not in (
                *self.supervisor.inbox,
                self.supervisor.claimed,
            ):  # otherwise the supervisor reports the attempt later
                observations += self._settle(job)
        observations += [Gone(key) for key in state.holdings if not self._alive(key)]
        pending = [replace(row) for row in self.disk.rows.values() if row.state is JobState.PENDING]
        self._turn([*observations, *(Arrived(job) for job in pending)], crash)

    def _settle(self, job: Job) -> list[Observation]:
        """Return the observations about an unfinished attempt after a restart (see `runners/adoption.py: settle`)."""
        key, (job_id, attempt) = job.attempt_key, (job.id, job.attempt)
        record = self.disk.records.get(key) or Rec(Record.NONE, int(job.boot or self.boot))
        same_boot = record.boot == self.boot
        process = record.process or job.process
        living = Found.NOTHING
        others = tuple(proc.process for proc in self._alive(key)) if same_boot else ()
        if process in others:
            living = Found.LEADER
        elif others:
            living = Found.OTHERS
        elif same_boot and any(one.busy for one in self.supervisors if one is not self.supervisor):
            living = Found.STARTER
        verdict = TABLE[job.state, record.kind, same_boot, living]
        if verdict is Verdict.WAIT:
            self.claims.append(job_id)
            return []
        if verdict is Verdict.REQUEUE:
            self.disk.records[key] = Rec(Record.NEVER_RAN, self.boot)
        if verdict in (Verdict.REQUEUE, Verdict.NOT_STARTED):
            return [Unclaimed(job_id, attempt)]
        observations: list[Observation] = [] if process is None else [Started(job_id, attempt, process, self.wall)]
        if verdict in (Verdict.FINISH, Verdict.FINISH_HOLDING):
            observations.append(Ended(job_id, attempt, record.code, record.signal, self.wall, others))
        elif verdict in (Verdict.LOST, Verdict.WATCH_LOST):
            observations.append(Lost(job_id, attempt, "nobody saw its end", self.wall, others))
        return observations

    def _turn(self, observations: list[Observation], crash: str) -> None:
        state = self.state
        assert state is not None
        disk = self.disk
        last = max(disk.rows, default=0)
        jobs, refused = [], 0
        for line in self.lines[disk.taken :]:
            if line is None:
                refused += 1
                continue
            need, priority, retries = line
            last += 1
            jobs.append(a_job(last, need, priority=priority, retries=retries, submitted_at=self.wall))
        self.fresh = {job.id: job for job in jobs}
        wishes = [Asked(row, request) for row, request in disk.requests.items() if row not in disk.answered]
        readings = Readings(self.mono, tuple(self._reading(gpu) for gpu in range(len(self.gpus))))
        plan = decide(state, [readings, *observations, *(Arrived(job) for job in jobs), *wishes], self.now)
        for job in plan.starts:
            job.boot = str(self.boot)
        self._judge_plan(plan)
        if crash == "before_commit":
            raise Crash
        if self.full:  # nothing was recorded, so nothing may be started or stopped; the state is rebuilt later
            self.fresh = {}
            self._die_of_nothing()
            return
        self._commit(plan, jobs, refused)
        if crash == "committed":
            raise Crash
        self.supervisor.inbox += [job.attempt_key for job in plan.starts]
        if crash == "sent":
            raise Crash
        for stop in plan.stops:
            self._signal(stop.job.attempt_key, stop.hard)
        check_ledger(state)

    def _commit(self, plan: Plan, jobs: list[Job], refused: int) -> None:
        disk, state = self.disk, self.state
        assert state is not None
        for job in (*jobs, *plan.changed.values()):
            before = disk.rows.get(job.id)
            if before is not None and before.state.ended and not job.state.ended:
                assert any(isinstance(wish, Requeue) and job.id in wish.jobs for wish in disk.requests.values()), (
                    f"job {job.id} left {before.state} by itself"
                )
            disk.rows[job.id] = replace(job)
        disk.taken, disk.from_lines, disk.refused = len(self.lines), disk.from_lines + len(jobs), disk.refused + refused
        disk.answered |= {answer.row for answer in plan.answers}
        for job in plan.starts:
            self.booked[job.attempt_key] = job.gpus, job.need.parts
        for holding in plan.held:
            disk.holdings[holding.key] = holding, self.boot
        for key in plan.freed:
            disk.holdings.pop(key, None)
        disk.paused, disk.queue_paused = ids_of(state.fleet.paused_mask), state.queue_paused
        disk.changes = list(state.pauses.changes)
        self.fresh = {}
        self.observations += [Gone(holding.key) for holding in plan.held if not self._alive(holding.key)]

    def _judge_plan(self, plan: Plan) -> None:
        """Check that jobs start only on GPUs that this pass read as free, and that no job that fits waits."""
        state = self.state
        assert state is not None
        for job in plan.starts:
            assert all(self.cards[gpu] == "free" for gpu in job.gpus), (job.id, job.gpus, self.cards)
        if not state.queue_paused:
            for job_id, kind in list(state.queue.in_order()):
                gpus = state.fleet.find(kind)
                assert gpus is None or not state.fleet.admission.fresh(gpus, self.now), f"job {job_id} fits and waits"

    def _reading(self, gpu: int) -> GpuSnapshot:
        card = self.cards[gpu]
        if card == "gone":
            return GpuSnapshot(f"declared:{gpu}", gpu, lost=True)
        used = {"free": 0, "foreign": TOTAL, "unknown": None}[card]
        return GpuSnapshot(f"declared:{gpu}", gpu, "a card", TOTAL, used, 0.0, None, ())

    def _die_of_nothing(self) -> None:
        """After a failed transaction, drop the state and the observations of this pass.

        The next call of `_load` finds the dropped observations again.
        """
        self.observations, self.state = [], None

    def mend(self) -> None:
        """Rebuild the state after a failed transaction. The daemon process and its supervisor are still the same."""
        if self.state is None and self.supervisor in self.supervisors and not self.supervisor.alone:
            self._guard(self._load, "")

    def kill_daemon(self) -> None:
        """Kill the daemon with SIGKILL. Its state is lost, and no process will see how the daemon's children end."""
        self.state, self.observations, self.fresh = None, [], {}
        self.supervisor.alone = True
        for proc in self.procs.values():
            if proc.child_of_daemon:
                proc.child_of_daemon = False
                self.unseen.add(proc.key)

    @property
    def up(self) -> bool:
        """Return whether a daemon process exists. It may have no state, because its last transaction failed."""
        return self.supervisor in self.supervisors and not self.supervisor.alone

    # -- supervisors and jobs ---------------------------------------------------------------------------------

    def _alive(self, key: str) -> list[Proc]:
        return [proc for proc in self.procs.values() if proc.key == key]

    def supervisor_works(self, supervisor: Supervisor) -> None:
        """Run one step of a start: claim the attempt, or start the process of the claimed attempt."""
        if supervisor.claimed:
            key, supervisor.claimed = supervisor.claimed, ""
            self.last_pid += 1
            process = Process(self.last_pid, int(self.mono * 100))
            self.procs[process.pid] = Proc(process, key, True, supervisor, deaf=process.pid % 3 == 0)
            self.disk.records[key] = Rec(Record.RUNNING, self.boot, process)
            self.starts[key] += 1
            self._tell(supervisor, Started(*self._ids(key), process, self.wall))
        elif supervisor.inbox:
            key = supervisor.inbox.pop(0)
            if key not in self.disk.records:
                self.disk.records[key] = Rec(Record.CLAIMED, self.boot)
                supervisor.claimed = key

    def supervisor_killed(self, supervisor: Supervisor) -> None:
        """Kill a supervisor with SIGKILL.

        If the supervisor's daemon lives, the daemon becomes the parent of the supervisor's jobs. Otherwise no process
        sees how these jobs end.
        """
        self.supervisors.remove(supervisor)
        mine = supervisor is self.supervisor and not supervisor.alone
        for proc in self.procs.values():
            if proc.supervisor is supervisor:
                proc.supervisor, proc.child_of_daemon = None, mine
                if not mine:
                    self.unseen.add(proc.key)
        if supervisor.claimed and not mine:
            self.unseen.add(supervisor.claimed)
        if not mine:
            return
        for key in (*supervisor.inbox, *filter(None, (supervisor.claimed,))):
            if key == supervisor.claimed or key not in self.disk.records:
                self.disk.records[key] = Rec(Record.NEVER_RAN, self.boot)
                self._tell_daemon(Unclaimed(*self._ids(key)))
        self.supervisor = Supervisor()
        self.supervisors.append(self.supervisor)

    def ends(self, pid: int, code: int | None, number: int | None = None) -> None:
        """End a process.

        If it is the main process of an attempt, its parent records the exit code or signal. If its parent is dead, the
        attempt is lost.
        """
        proc = self.procs.pop(pid)
        if proc.leader:
            self.ended[proc.key] = code, number
            record = self.disk.records[proc.key]
            left = tuple(other.process for other in self._alive(proc.key))
            if proc.supervisor is not None or proc.child_of_daemon:
                record.kind, record.code, record.signal = Record.ENDED, code, number
                self._tell_daemon(Ended(*self._ids(proc.key), code, number, self.wall, left))
            else:
                self._tell_daemon(Lost(*self._ids(proc.key), "nobody saw its end", self.wall, left))
        elif not self._alive(proc.key):
            self._tell_daemon(Gone(proc.key))

    def orphan(self, pid: int) -> None:
        """Let the main process of an attempt start a child process.

        The child continues to run when the main process ends.
        """
        leader = self.procs[pid]
        self.last_pid += 1
        process = Process(self.last_pid, int(self.mono * 100))
        self.procs[process.pid] = Proc(process, leader.key, False, deaf=leader.deaf)

    def _signal(self, key: str, hard: bool) -> None:
        for proc in sorted(self._alive(key), key=lambda proc: not proc.leader):
            if hard or not proc.deaf:
                self.ends(proc.process.pid, None, 9 if hard else 15)

    def _ids(self, key: str) -> tuple[int, int]:
        job, _, attempt = key.partition(".")
        return int(job), int(attempt)

    def _tell(self, supervisor: Supervisor, observation: Observation) -> None:
        if supervisor is self.supervisor:
            self._tell_daemon(observation)

    def _tell_daemon(self, observation: Observation) -> None:
        if self.state is not None:
            self.observations.append(observation)

    def reboot(self, forget: bool) -> None:
        """Reboot the machine: all processes end. ``forget``: the records of unfinished attempts are lost too."""
        if self.up:
            self.kill_daemon()
        self.unseen |= {proc.key for proc in self.procs.values()}
        self.unseen |= {job.attempt_key for job in self.disk.rows.values() if job.state in HOLDING}
        for key, record in list(self.disk.records.items()):
            if forget and record.kind in (Record.CLAIMED, Record.RUNNING) and key not in self.ended:
                del self.disk.records[key]
        self.procs.clear()
        self.supervisors.clear()
        self.boot += 1

    # -- guarantees ---------------------------------------------------------------------------------------

    def check(self) -> None:
        """Verify the guarantees of the scheduler against the machine's own counts.

        This is possible without a daemon.
        """
        disk = self.disk
        assert all(count <= 1 for count in self.starts.values()), f"started twice: {self.starts}"
        load = dict.fromkeys(range(len(self.gpus)), 0)
        leaders: Counter[str] = Counter()
        for key in {proc.key for proc in self.procs.values()}:
            gpus, parts = self.booked[key]
            leaders[key.partition(".")[0]] += any(proc.leader for proc in self._alive(key))
            for gpu in gpus:
                load[gpu] += parts
        assert all(parts <= WHOLE for parts in load.values()), f"a GPU was given twice: {load}"
        assert all(count <= 1 for count in leaders.values()), "two attempts of a job run at once"
        assert disk.from_lines + disk.refused == disk.taken, "a line became neither a job nor a refusal"
        assert self.acknowledged <= disk.answered | set(disk.requests), "an acknowledged wish is gone"
        for job in disk.rows.values():
            self._check_job(job)

    def _check_job(self, job: Job) -> None:
        ended = self.ended.get(job.attempt_key)
        if job.state is JobState.DONE:
            assert ended == (0, None), f"{job.attempt_key} is done, and ended with {ended}"
        elif job.outcome in (Outcome.EXIT, Outcome.SIGNAL):
            assert ended == (job.exit_code, job.signal), (
                f"{job.attempt_key}: {job.exit_code}, {job.signal}; not {ended}"
            )
        elif job.outcome is Outcome.LOST:
            assert job.attempt_key in self.unseen, f"{job.attempt_key} is lost, and its ending was seen: {ended}"
        runs = sum(self.starts[f"{job.id}.{attempt}"] for attempt in range(job.attempt + 1))
        allowed = (1 + job.spec.retries) * (1 + self.requeued[job.id])
        assert runs <= allowed, f"job {job.id} ran {runs} times, {allowed} were asked for"

    def quiet(self) -> None:
        """End all faults and processes. Check that no GPU stays allocated and that only held jobs wait."""
        self.full, self.cards = False, ["free"] * len(self.gpus)
        self.disk.requests[max(self.disk.requests, default=0) + 1] = Resume(tuple(range(len(self.gpus))))
        self.disk.requests[max(self.disk.requests) + 1] = PauseQueue(False)
        for _ in range(60 + 4 * len(self.lines)):
            self.mend()
            self.start()
            for supervisor in list(self.supervisors):
                while supervisor.busy:
                    self.supervisor_works(supervisor)
            for pid in list(self.procs):
                if pid in self.procs:
                    self.ends(pid, 0)
            self.wall += 200.0
            self.mono += 200.0
            self.turn()
            self.check()
            rows = self.disk.rows.values()
            if all(row.state.ended or row.held for row in rows) and not self.procs and not self.observations:
                break
        state = self.state
        assert state is not None
        waiting = [(row.id, row.state, row.reason, row.held) for row in self.disk.rows.values() if not row.state.ended]
        assert all(held for *_, held in waiting), waiting
        assert not state.live and not state.holdings and not self.disk.holdings
        assert set(state.fleet.free.values()) <= {WHOLE}
        assert self.acknowledged <= self.disk.answered, "a wish was never answered"
