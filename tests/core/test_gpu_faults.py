"""Tests of GPUs that report errors: they get no new job, and the jobs that died of the errors are tried again once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scheduler.core.admission import Admission
from scheduler.core.counters import RETRY_GPU_ERROR
from scheduler.core.decide import END_READING_S
from scheduler.core.endings import NEVER_AGAIN, Rules, after_loss, after_run
from scheduler.core.gpu_admission import Thresholds
from scheduler.core.gpu_faults import MEANINGS, OF_APPLICATIONS, GpuFault, Xid, fault_of
from scheduler.core.gpu_snapshot import GpuProcess, GpuSnapshot
from scheduler.core.job import JobState, Outcome, Process
from scheduler.core.job_text import sentence
from scheduler.core.observations import Gone, GpuErrors, Readings
from scheduler.core.requests import Cancel, Requeue, Resume
from scheduler.core.states import Move
from scheduler.core.trespass import BEGIN_S
from tests.builders import T0, Play, a_gpu, a_job, a_policy, a_world

S, M = JobState, Move
FELL_OFF = "XID 79 (GPU has fallen off the bus)"


class Read(Play):
    """A scheduler with GPUs that NVML reads. ``processes``: GPU → its processes; ``away``: GPUs that are lost."""

    def __init__(self, gpus: int = 2, **policy: Any) -> None:
        made = a_world(gpus)
        policy.setdefault("thresholds", Thresholds())
        super().__init__(made.scheduler.fleet, policy=a_policy(**policy))
        state = self.scheduler
        state.fleet.admission = Admission.of(state.fleet.gpus.values(), state.policy.thresholds, self.now)
        state.watch_admission()
        self.processes: dict[int, tuple[GpuProcess, ...]] = {}
        self.away: set[int] = set()
        self.errors: dict[int, str] = {}
        self.tell(self.reading())

    def reading(self, **changes: Any) -> Readings:
        """Return a reading of all GPUs that begins at the present time of the test."""
        gpus = tuple(
            GpuSnapshot(
                gpu.uuid, index, "", 80_000, 500, 0.0, processes=self.processes.get(index, ()),
                lost=index in self.away, errors=self.errors.get(index, ""),
            )
            for index, gpu in self.scheduler.fleet.gpus.items()
        )  # fmt: skip
        return replace(Readings(self.mono, gpus, watches_errors=True), **changes)

    def read(self, *more: Any, after: float = 1.0) -> None:
        """Let time pass, then apply these observations and a reading in one pass."""
        self.wall += after
        self.mono += after
        self.tell(*more, self.reading())

    def xid(self, gpu: int, number: int) -> GpuErrors:
        return GpuErrors((Xid(a_gpu(gpu).uuid, number, self.wall),))

    def told(self) -> list[str]:
        """Return the sentences of the events and messages of the last pass."""
        events = [sentence(event, self.rows[event.job])[0] for event in self.plan.events]
        return [*events, *(text for text, _ in self.plan.notices)]


# -- the GPU ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [48, 63, 64, 74, 79, 92, 94, 95, 119, 9999, *sorted(OF_APPLICATIONS)])
def test_every_xid_but_those_of_applications_stops_placing_on_the_gpu(number: int) -> None:
    play = Read()
    play.read(play.xid(0, number))
    play.arrive(a_job(1, allowed=(0,)), a_job(2, allowed=(1,)))
    play.read()
    assert play.state(2) is S.STARTING
    assert play.state(1) is (S.STARTING if number in OF_APPLICATIONS else S.PENDING)
    if number not in OF_APPLICATIONS:
        assert play.reason(1) == "unhealthy"


def test_the_reason_names_error_time_and_remedy_and_is_told_once() -> None:
    play = Read()
    play.read(play.xid(0, 79))
    (text,) = play.told()
    assert text.startswith(f"GPU 0 reported {FELL_OFF} at ")
    assert text.endswith("; no new job starts there; after a repair: gpujob resume 0")
    play.read(play.xid(0, 48))
    assert not play.told() and FELL_OFF in play.scheduler.fleet.admission.cards[0].reason, "the first error stays"


@pytest.mark.parametrize("kind", ["xid", "memory"])
def test_a_resume_ends_a_fault_until_there_is_a_new_error(kind: str) -> None:
    play = Read()
    if kind == "memory":
        play.errors[0] = "2 uncorrected memory errors"
    play.read(*([play.xid(0, 79)] if kind == "xid" else []))
    assert play.scheduler.fleet.admission.cards[0].state == "UNHEALTHY" and play.plan.faults_changed
    play.ask(Resume((0,)))
    what = FELL_OFF if kind == "xid" else "2 uncorrected memory errors"
    assert f"GPU 0 resumed (paused now: none); its errors no longer count ({what})" in play.plan.answers[0].lines
    play.read()
    assert not play.scheduler.fleet.admission.cards[0].state
    play.errors[0] = "3 uncorrected memory errors" if kind == "memory" else ""
    play.read(*([play.xid(0, 48)] if kind == "xid" else []))
    assert play.scheduler.fleet.admission.cards[0].state == "UNHEALTHY"


def test_a_job_that_names_its_gpus_does_not_start_on_a_gpu_with_a_fault_or_a_lost_one() -> None:
    play = Read(3)
    play.away = {1}
    play.read(play.xid(0, 79))
    play.arrive(a_job(1, on=(0,)), a_job(2, on=(1,)), a_job(3, on=(2,)))
    assert [play.state(job) for job in (1, 2, 3)] == [S.PENDING, S.PENDING, S.STARTING]
    assert (play.reason(1), play.reason(2)) == ("unhealthy", "gone")


def test_without_hold_on_errors_faults_hold_and_retry_nothing() -> None:
    play = Read(thresholds=Thresholds(hold_on_errors=False))
    play.run(a_job(1, allowed=(0,)))
    play.read(play.xid(0, 79))
    play.read(play.ended(1, 1))
    assert play.state(1) is S.FAILED
    play.arrive(a_job(2, allowed=(0,)))
    play.read()
    assert play.state(2) is S.STARTING


def test_every_meaning_is_a_short_text() -> None:
    assert {13, 31, 43, 45} == OF_APPLICATIONS and set(MEANINGS) > OF_APPLICATIONS
    assert Xid("GPU-a", 79, T0).text == FELL_OFF and Xid("GPU-a", 9999, T0).text == "XID 9999"


# -- jobs that died of it ---------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "with", "after"])
@pytest.mark.parametrize("how", ["code", "signal", "lost"])
def test_a_job_that_died_of_its_gpu_is_tried_again_on_another_gpu_once(when: str, how: str) -> None:
    play = Read()
    play.run(a_job(1, retries=2))
    first = play.job(1).gpus
    if when == "before":
        play.read(play.xid(first[0], 79))
    end = {"code": play.ended(1, 1), "signal": play.ended(1, None, signal=9), "lost": play.lost(1)}[how]
    play.tell(*([play.xid(first[0], 79)] if when == "with" else []), end)
    assert play.state(1) is S.RUNNING and play.plan.read_since == play.mono, "a reading decides"
    play.read(*([play.xid(first[0], 79)] if when == "after" else []))
    job = play.job(1)
    assert (job.gpu_retries, job.runs_failed, job.attempt) == (1, 0, 2 if job.state is S.STARTING else 1)
    (event,) = (one for one in play.plan.events if one.kind == "retry_scheduled")
    assert event.detail["cause"] == RETRY_GPU_ERROR and FELL_OFF in event.detail["why"]
    play.read()
    assert play.state(1) is S.STARTING and play.job(1).gpus and play.job(1).gpus != first
    second = play.job(1).gpus[0]
    play.tell(play.began(1))
    play.tell(play.ended(1, 1))
    play.read(play.xid(second, 79))
    assert (play.state(1), play.job(1).gpu_retries, play.job(1).runs_failed) == (S.PENDING, 1, 1), "now its `retries`"


def test_a_second_death_fails_the_job_with_the_cause() -> None:
    play = Read(3)
    play.run(a_job(1))
    for number in (1, 2):
        (gpu,) = play.job(1).gpus
        play.tell(play.ended(1, 1))
        play.read(play.xid(gpu, 79))
        if number == 1:
            play.read()
            play.tell(play.began(1))
    assert (play.state(1), play.job(1).outcome, play.job(1).attempt) == (S.FAILED, Outcome.EXIT, 2)
    assert any(
        f"exit code 1 (during its run (attempt 2): GPU {gpu} reported {FELL_OFF})" in text for text in play.told()
    )
    play.ask(Requeue((1,)))
    assert play.job(1).gpu_retries == 0


def test_a_job_on_a_lost_gpu_is_tried_again_elsewhere_and_waits_if_there_is_no_other() -> None:
    play = Read(1)
    play.run(a_job(1))
    play.away = {0}
    play.tell(play.ended(1, None, signal=6))
    play.read()
    assert (play.state(1), play.job(1).gpu_retries, play.reason(1)) == (S.PENDING, 1, "gone")
    play.away = set()
    play.read()
    play.read()
    assert play.state(1) is S.STARTING


@pytest.mark.parametrize("number", sorted(OF_APPLICATIONS))
def test_an_xid_of_an_application_is_a_note_and_nothing_else(number: int) -> None:
    play = Read()
    play.run(a_job(1))
    (gpu,) = play.job(1).gpus
    play.read(play.xid(gpu, number))
    play.read(play.xid(gpu, number))
    note = f"during its run: GPU {gpu} reported XID {number} ({MEANINGS[number]})"
    assert play.job(1).notes == (note,)
    play.tell(play.ended(1, 1))
    play.read()
    assert (play.state(1), play.job(1).gpu_retries) == (S.FAILED, 0)
    assert any(note in text for text in play.told())


def test_the_note_of_an_earlier_attempt_does_not_explain_a_later_end() -> None:
    play = Read()
    play.run(a_job(1, retries=1))
    play.read(play.xid(play.job(1).gpus[0], 31))
    play.tell(play.ended(1, 1))
    play.read()
    play.read(after=20.0)
    play.read()
    play.tell(play.began(1))
    play.tell(play.ended(1, None, signal=9))
    play.read()
    assert play.state(1) is S.FAILED and not any("XID" in text for text in play.told())


def test_an_old_fault_of_another_time_or_gpu_retries_nothing() -> None:
    gpus = {0: a_gpu(0), 1: a_gpu(1)}
    fault = GpuFault(a_gpu(0).uuid, FELL_OFF, T0, T0 + 50)
    job = a_job(1, gpus=(0,), started_at=T0 + 20)
    assert fault_of(job, gpus, {fault.uuid: fault}) == f"GPU 0 reported {FELL_OFF}"
    for other in (
        replace(job, gpus=(1,)), replace(job, started_at=T0 + 60), replace(job, gpus=()), replace(job, gpus=(7,)),
    ):  # fmt: skip
        assert fault_of(other, gpus, {fault.uuid: fault}) == ""
    assert fault_of(job, gpus, {fault.uuid: replace(fault, active=False)}) == ""


@pytest.mark.parametrize(
    ("state", "stop_why", "code", "used", "how"),
    [
        (S.RUNNING, "", 1, 0, M.RETRY_SCHEDULED),
        (S.RUNNING, "", 1, 1, M.FAILED),
        (S.RUNNING, "", 0, 0, M.SUCCEEDED),
        (S.STOPPING, "cancelled", 1, 0, M.STOPPED),
        (S.STOPPING, "time_limit", 1, 0, M.FAILED),
        (S.STOPPING, "trespass", 1, 0, M.FAILED),
    ],
)
def test_only_a_bad_end_of_its_own_is_repeated(state: JobState, stop_why: str, code: int, used: int, how: Move) -> None:
    rules = Rules(gpu_fault=lambda job: "GPU 0 reported XID 79")
    job = a_job(1, state=state, stop_why=stop_why, exit_code=code, gpu_retries=used)
    assert after_run(job, rules).how is how
    if code:
        assert after_loss(job, rules).how is (how if stop_why != "trespass" else M.FAILED)
        assert after_loss(job, NEVER_AGAIN).how is not M.RETRY_SCHEDULED


# -- the end waits for a reading --------------------------------------------------------------------------


def test_successful_ends_and_ends_on_gpus_that_are_not_read_are_decided_at_once() -> None:
    play = Read()
    play.run(a_job(1), a_job(2, "0"))
    play.tell(play.ended(1), play.ended(2, 1))
    assert (play.state(1), play.state(2)) == (S.DONE, S.FAILED)
    declared = a_world(1)
    declared.run(a_job(1))
    declared.tell(declared.ended(1, 1))
    assert declared.state(1) is S.FAILED
    smi = Read()
    smi.tell(smi.reading(watches_errors=False))
    smi.run(a_job(1))
    smi.tell(smi.ended(1, 1))
    assert smi.state(1) is S.FAILED


@pytest.mark.parametrize("what", ["older", "failed", "late"])
def test_an_end_waits_for_a_reading_that_began_later_and_not_for_long(what: str) -> None:
    play = Read()
    play.run(a_job(1))
    play.arrive(a_job(2, after_ok=(1,)))
    old = play.reading()
    play.tell(play.ended(1, 1), after=1.0)
    play.tell(old)
    assert (play.state(1), play.state(2), play.job(1).exit_code) == (S.RUNNING, S.PENDING, None)
    assert 1 not in play.plan.changed and not play.plan.events
    if what == "failed":
        play.tell(play.reading(problem="no answer within 5 s", gpus=()))
    elif what == "late":
        assert play.scheduler.next_timer() is not None
        play.tell(after=END_READING_S - 0.1)
        assert play.state(1) is S.RUNNING
        play.tell(after=0.2)
    else:
        play.tell(play.reading())
    assert (play.state(1), play.state(2)) == (S.FAILED, S.SKIPPED)
    assert not play.scheduler.open_ends


def test_a_cancel_ends_the_wait() -> None:
    play = Read()
    play.run(a_job(1))
    play.tell(play.ended(1, 1))
    play.ask(Cancel((1,)))
    assert (play.state(1), play.job(1).exit_code, play.scheduler.open_ends) == (S.CANCELLED, 1, {})


def test_a_time_limit_that_passes_during_the_wait_changes_nothing() -> None:
    play = Read()
    play.run(a_job(1, time_limit_s=10.0))
    play.tell(play.ended(1, 1), after=9.5)
    play.tell(after=1.0)
    assert play.state(1) is S.RUNNING
    play.tell(play.reading())
    assert (play.state(1), play.job(1).outcome) == (S.FAILED, Outcome.EXIT)


@pytest.mark.parametrize("gone", [True, False])
def test_leftover_processes_that_end_during_the_wait_hold_no_gpu(gone: bool) -> None:
    play = Read()
    play.run(a_job(1))
    key = play.job(1).attempt_key
    play.tell(play.ended(1, 1, leftovers=(Process(99, 1),)))
    if gone:
        play.tell(Gone(key))
    play.read()
    assert play.state(1) is S.FAILED and (key in play.scheduler.holdings) is not gone


# -- jobs on GPUs that they were not given ----------------------------------------------------------------


def stray(play: Read, gpu: int, job: int = 1, **changes: Any) -> None:
    """Let a process of the job use a GPU from now on."""
    owner = play.job(job).attempt_key if job else ""
    play.processes[gpu] = (replace(GpuProcess(4711, 300, owner=owner, ours=True, started_at=T0), **changes),)


@pytest.mark.parametrize("need", ["1", "0"])
def test_a_job_with_a_process_on_another_gpu_in_two_readings_is_reported_once(need: str) -> None:
    play = Read()
    play.run(a_job(1, need, allowed=(0,) if need == "1" else None))
    stray(play, 1)
    play.read(after=BEGIN_S - 1.0)
    play.read(after=0.5)
    assert not play.job(1).notes, "it has just started"
    play.read(after=1.0)
    assert not play.job(1).notes, "one reading proves nothing"
    play.read()
    assert play.job(1).notes == ("uses GPU 1 without an allocation on it",)
    given = "GPU 0" if need == "1" else "no GPU"
    assert (
        f"its process 4711 uses GPU 1 (300 MiB), which is not allocated to the job; it was given {given}"
        in play.told()[0]
    )
    play.read()
    assert len(play.job(1).notes) == 1 and play.state(1) is S.RUNNING and not play.plan.events


def test_a_process_that_leaves_between_two_readings_is_not_reported() -> None:
    play = Read()
    play.run(a_job(1, allowed=(0,)))
    for _ in range(3):
        stray(play, 1)
        play.read(after=BEGIN_S)
        play.processes.clear()
        play.read()
    assert not play.job(1).notes


def test_its_own_gpus_named_gpus_and_accepted_processes_are_no_trespass() -> None:
    play = Read(3)
    play.run(a_job(1, on=(0, 1)))
    for gpu in (0, 1):
        stray(play, gpu)
    play.read(after=BEGIN_S)
    play.read()
    assert not play.job(1).notes
    stray(play, 2)
    play.read()
    play.ask(Resume((2,), force=True))
    play.read()
    play.read()
    assert not play.job(1).notes, "a user has accepted the process"


def test_with_kill_the_job_is_ended_fails_and_is_not_tried_again() -> None:
    play = Read(kill_trespassers=True)
    play.run(a_job(1, retries=5, allowed=(0,)))
    stray(play, 1)
    play.read(after=BEGIN_S)
    play.read()
    assert (play.state(1), play.job(1).stop_why) == (S.STOPPING, "trespass")
    assert [(stop.job.id, stop.hard) for stop in play.plan.stops] == [(1, False)]
    assert any("is being ended: it uses a GPU that it was not given" in text for text in play.told())
    play.tell(after=play.scheduler.policy.kill_grace_s + 0.1)
    assert [(stop.job.id, stop.hard) for stop in play.plan.stops] == [(1, True)]
    play.tell(play.ended(1, None, signal=9))
    assert (play.state(1), play.job(1).outcome) == (S.FAILED, Outcome.TRESPASS)
    why = "ended, because its process 4711 used GPU 1, and it was given GPU 0 (on_trespass: kill)"
    assert play.job(1).notes[-1] == why
    assert f"failed: it used a GPU that it was not given (signal 9) ({why})" in play.told()[0]


def test_a_cancel_of_a_job_that_is_being_ended_for_trespass_cancels_it() -> None:
    play = Read(kill_trespassers=True)
    play.run(a_job(1, allowed=(0,)))
    stray(play, 1)
    play.read(after=BEGIN_S)
    play.read()
    play.ask(Cancel((1,)))
    play.tell(play.ended(1, None, signal=15))
    assert play.state(1) is S.CANCELLED
