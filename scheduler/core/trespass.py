"""Finds jobs with a process on a GPU that they were not given; part of the decisions (`decide.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler.core.endings import TRESPASS
from scheduler.core.gpu import named_gpus
from scheduler.core.gpu_snapshot import GpuProcess
from scheduler.core.job import Job, JobState

if TYPE_CHECKING:
    from scheduler.core.decision_pass import DecisionPass
    from scheduler.core.observations import Readings

BEGIN_S = 5.0  # a job that has run for less time is not looked at


def look_for_trespass(decision: DecisionPass, readings: Readings) -> None:
    """Report each job that has a process on a GPU outside its allocation in this and in the last reading.

    With the setting ``on_trespass: kill`` the job is also ended. A job that named its GPUs (`on=`) was given these GPUs.
    Processes that a user accepted (`resume --force`) do not count. GPUs of a cluster, and GPUs that are read by
    nvidia-smi, have no list of processes.
    """
    if readings.problem:
        return
    state = decision.state
    live = {job.attempt_key: job for job in state.live.values()}
    before, now = state.strays, set()
    for index, card in state.fleet.admission.cards.items():
        reading = card.reading
        for process in (reading.processes or ()) if reading is not None else ():
            job = live.get(process.owner)
            if job is None or index in job.gpus or (process.pid, process.started_at) in card.accepted:
                continue
            if job.started_at is None or decision.now.wall - job.started_at < BEGIN_S:
                continue
            now.add((job.attempt_key, index))
            if (job.attempt_key, index) in before:
                _report(decision, job, index, process)
    state.strays = now


def _report(decision: DecisionPass, job: Job, index: int, process: GpuProcess) -> None:
    """Add a note to the job, once for each attempt and GPU, and end the job if the setting says so."""
    of_attempt = f" (attempt {job.attempt})" if job.attempt > 1 else ""
    note = f"uses GPU {index} without an allocation on it{of_attempt}"
    if note not in job.notes:
        job.notes = (*job.notes, note)
        used = None if process.memory_mib is None else process.memory_mib << 20
        decision.changed(job, "stray", gpu=index, pid=process.pid, memory=used, gpus=list(job.gpus))
    if decision.state.policy.kill_trespassers and job.state is JobState.RUNNING:
        given = named_gpus(job.gpus) if job.gpus else "no GPU"
        job.notes = (
            *job.notes,
            f"ended, because its process {process.pid} used GPU {index}, and it was given {given} (on_trespass: kill)",
        )
        job.stop_why = TRESPASS
        decision.stop(job)
