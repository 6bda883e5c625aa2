"""Tests of S3.35, S3.36 and P1–P8 without I/O: random histories of faults on the simulated machine (machine.py)."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from scheduler.core.job import JobState
from scheduler.core.requests import Cancel, Hold, Pause, PauseQueue, Release, Requeue, Resume
from tests.builders import a_policy
from tests.core.machine import Machine

NEEDS = ("0.25", "0.3334", "0.5", "0.5", "1", "1", "1.5", "2", "0")
CRASHES = st.sampled_from(["before_commit", "committed", "sent"])
PICK = st.integers(0, 99)
CODES = st.sampled_from([0, 0, 0, 1, 137, 255])


class Faults(RuleBasedStateMachine):
    """Rules for everything that can happen to the machine. Hypothesis applies the rules in random order."""

    @initialize(gpus=st.integers(1, 3), tries=st.integers(1, 3))
    def begin(self, gpus: int, tries: int) -> None:
        self.m = Machine(gpus, a_policy(max_assign_attempts=tries, kill_grace_s=5.0))
        self.m.start()

    def some(self, *, leader: bool) -> list[int]:
        return sorted(pid for pid, proc in self.m.procs.items() if proc.leader is leader)

    def chosen(self, pick: int, *, leader: bool) -> int:
        pids = self.some(leader=leader)
        return pids[pick % len(pids)]

    # -- users ------------------------------------------------------------------------------------------------

    @rule(
        need=st.sampled_from(NEEDS),
        priority=st.integers(-1, 2),
        retries=st.sampled_from([0, 0, 0, 1, 2]),
        again=st.integers(1, 3),
    )
    def append_lines(self, need: str, priority: int, retries: int, again: int) -> None:
        fits = float(need) <= len(self.m.gpus)
        self.m.lines += [(need, priority, retries) if fits else None] * again

    @rule()
    def append_broken_line(self) -> None:
        self.m.lines.append(None)

    @rule(what=st.sampled_from([Cancel, Cancel, Requeue, Hold, Release, Pause, Resume, PauseQueue]), pick=PICK)
    def asks(self, what: type, pick: int) -> None:
        m = self.m
        rows = sorted(m.disk.rows)
        row = max(m.disk.requests, default=0) + 1
        if what in (Pause, Resume):
            m.disk.requests[row] = what((pick % len(m.gpus),))
        elif what is PauseQueue:
            m.disk.requests[row] = PauseQueue(pick % 3 == 0)
        elif rows:
            job = rows[pick % len(rows)]
            m.disk.requests[row] = what((job,))
            m.requeued[job] += what is Requeue
        else:
            return
        m.acknowledged.add(row)

    # -- time, GPUs, disk -------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.01, 0.5, 3.0, 6.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.m.wall += seconds
        self.m.mono += seconds
        self.m.turn()

    @rule(seconds=st.sampled_from([-3600.0, -5.0, 7200.0, 3.2e8]))
    def the_wall_clock_jumps(self, seconds: float) -> None:
        self.m.wall += seconds

    @rule(gpu=PICK, card=st.sampled_from(["free", "free", "foreign", "unknown", "gone"]))
    def a_gpu_says(self, gpu: int, card: str) -> None:
        self.m.cards[gpu % len(self.m.gpus)] = card

    @rule(full=st.booleans())
    def the_disk(self, full: bool) -> None:
        self.m.full = full

    # -- the daemon -------------------------------------------------------------------------------------------

    @rule(works=st.sampled_from([0, 1, 2, 6, 6, 6]))
    def a_turn(self, works: int) -> None:
        """Run one pass of the daemon. Then the supervisor makes ``works`` steps."""
        m = self.m
        m.mend()
        m.mono += 0.1
        m.wall += 0.1
        m.turn()
        for _ in range(works if m.up else 0):
            m.supervisor_works(m.supervisor)

    @precondition(lambda self: self.m.up)
    @rule(need=st.sampled_from(NEEDS), retries=st.sampled_from([0, 0, 1]), code=CODES)
    def a_job_comes_and_runs(self, need: str, retries: int, code: int) -> None:
        self.append_lines(need, 0, retries, 1)
        self.a_turn(6)
        self.a_turn(6)
        self.a_turn(0)

    @precondition(lambda self: self.m.up)
    @rule(at=CRASHES)
    def killed_in_a_turn(self, at: str) -> None:
        self.m.turn(at)

    @precondition(lambda self: self.m.up)
    @rule()
    def killed(self) -> None:
        self.m.kill_daemon()

    @precondition(lambda self: not self.m.up)
    @rule(crash=st.sampled_from(["", "", "", "before_commit", "committed", "sent"]))
    def started(self, crash: str) -> None:
        m = self.m
        before = {job.id: job.state for job in m.disk.rows.values() if job.state.ended}
        m.start(crash)
        wished = {job for wish in m.disk.requests.values() if isinstance(wish, Requeue) for job in wish.jobs}
        assert all(m.disk.rows[job].state is state or job in wished for job, state in before.items())

    @rule(forget=st.booleans())
    def reboot(self, forget: bool) -> None:
        self.m.reboot(forget)

    # -- supervisors and jobs -------------------------------------------------------------------------------------

    @precondition(lambda self: self.m.supervisors)
    @rule(pick=PICK, steps=st.integers(1, 4))
    def a_supervisor_works(self, pick: int, steps: int) -> None:
        for _ in range(steps):
            self.m.supervisor_works(self.m.supervisors[pick % len(self.m.supervisors)])

    @precondition(lambda self: self.m.supervisors)
    @rule(pick=PICK)
    def a_supervisor_is_killed(self, pick: int) -> None:
        self.m.supervisor_killed(self.m.supervisors[pick % len(self.m.supervisors)])

    @precondition(lambda self: self.some(leader=True))
    @rule(pick=PICK, code=CODES)
    def a_job_ends(self, pick: int, code: int) -> None:
        self.m.ends(self.chosen(pick, leader=True), code)

    @precondition(lambda self: self.some(leader=True))
    @rule(pick=PICK)
    def a_job_is_killed(self, pick: int) -> None:
        self.m.ends(self.chosen(pick, leader=True), None, 9)

    @precondition(lambda self: self.some(leader=True))
    @rule(pick=PICK)
    def a_job_leaves_an_orphan(self, pick: int) -> None:
        self.m.orphan(self.chosen(pick, leader=True))

    @precondition(lambda self: self.some(leader=True))
    @rule(pick=PICK, code=CODES)
    def a_job_ends_before_its_orphan(self, pick: int, code: int) -> None:
        """End a job that leaves an orphan process behind, and start a new job before the orphan ends."""
        pid = self.chosen(pick, leader=True)
        self.m.orphan(pid)
        self.m.ends(pid, code)
        if self.m.up:
            self.a_job_comes_and_runs("1", 0, 0)

    @precondition(lambda self: self.some(leader=False))
    @rule(pick=PICK)
    def an_orphan_ends(self, pick: int) -> None:
        self.m.ends(self.chosen(pick, leader=False), 0)

    # -- guarantees -------------------------------------------------------------------------------------------

    @invariant()
    def promises(self) -> None:
        if hasattr(self, "m"):
            self.m.check()

    def teardown(self) -> None:
        if hasattr(self, "m"):
            self.m.quiet()


def test_the_guarantees_hold_in_random_histories_of_faults() -> None:
    """The guarantees hold in 200 random histories of up to 50 events.

    GPUJOB_EXAMPLES sets another number of histories.
    """
    examples = int(os.environ.get("GPUJOB_EXAMPLES", "200"))
    run_state_machine_as_test(
        Faults,
        settings=settings(
            max_examples=examples, stateful_step_count=50, deadline=None, derandomize=examples == 200, database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip


def test_jobs_run_and_end_on_the_simulated_machine() -> None:
    """Jobs run and end on the simulated machine. If they did not, the random histories would prove nothing."""
    m = Machine(1, a_policy())
    m.lines += [("1", 0, 0)] * 2
    m.start()
    m.turn()
    for _ in range(4):
        m.supervisor_works(m.supervisor)
    m.turn()
    assert m.disk.rows[1].state is JobState.RUNNING and m.disk.rows[2].state is JobState.PENDING
    m.quiet()
    assert {row.state for row in m.disk.rows.values()} == {JobState.DONE} and sum(m.starts.values()) == 2
