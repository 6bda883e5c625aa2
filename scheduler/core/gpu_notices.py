"""Messages about changed verdicts on GPUs, and the errors that GPUs report; part of the decisions (`decide.py`)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from scheduler.core.gpu import named_gpus
from scheduler.core.gpu_faults import GpuFault, Xid
from scheduler.core.job_text import during_run

if TYPE_CHECKING:
    from collections.abc import Iterable

    from scheduler.core.decision_pass import DecisionPass
    from scheduler.core.observations import Readings

NO_NEW_JOB = "no new job starts there"


def judge_gpus(decision: DecisionPass) -> None:
    """Judge all GPUs again at the time of the pass, and add a message for each verdict that has changed."""
    state, admission = decision.state, decision.state.fleet.admission
    if not admission.cards or admission.frozen:
        return
    admission.thresholds = state.policy.thresholds
    admission.judge(decision.now)
    silent, free_again = [], []
    for index, card in admission.cards.items():
        before, after = state.told.get(index), card.verdict
        what = "trouble" if after.code == "stale" and admission.trouble else after.code
        passing = what == "releasing" or (what == "foreign" and not card.blocked)
        if passing or (before or "") == what or not card.is_known(admission.trouble):
            continue
        state.told[index] = what
        if what == "trouble":
            silent.append(index)
        elif after.code:
            told = after.sentence if NO_NEW_JOB in after.sentence else f"{after.sentence}; {NO_NEW_JOB}"
            if (told, True) not in decision.plan.notices:  # the GPUs of a node have one reason
                decision.plan.notices.append((told, True))
        elif before is not None:
            free_again.append(index)
        if after.code == "gone":
            for job in state.live.values():
                if index in job.gpus:
                    job.notes = (*job.notes, during_run(job) + after.sentence)
                    decision.changed(job, "gpu_gone", gpu=index)
    if free_again:
        decision.plan.notices.append((f"{named_gpus(free_again)} can get jobs again", False))
    if silent:
        decision.plan.notices.append(
            (
                f"{named_gpus(silent)} cannot be read: {admission.trouble}; {NO_NEW_JOB}, running jobs continue",
                True,
            )
        )


def take_xids(decision: DecisionPass, xids: Iterable[Xid]) -> None:
    """Record errors that the driver reported: a note for each job on the GPU, and a fault of the GPU.

    An error that a faulty program causes is only noted. A GPU that is not managed is ignored.
    """
    indexes = {gpu.uuid: index for index, gpu in decision.state.fleet.gpus.items()}
    for xid in xids:
        index = indexes.get(xid.uuid)
        if index is None:
            continue
        if not xid.of_application:
            _note_fault(decision, xid.uuid, xid.text, xid.at)
        told = False
        for job in decision.state.live.values():
            note = f"{during_run(job)}GPU {index} reported {xid.text}"
            if index in job.gpus and note not in job.notes:
                job.notes = (*job.notes, note)
                decision.changed(job, "gpu_error", gpu=index, why=xid.text)
                told = True
        if xid.of_application and not told:
            decision.plan.notices.append((f"GPU {index} reported {xid.text}", False))


def take_memory_errors(decision: DecisionPass, readings: Readings) -> None:
    """Record a fault of each GPU whose count of memory errors has changed. The driver repeats it in each reading."""
    state = decision.state
    managed = {gpu.uuid for gpu in state.fleet.gpus.values()}
    for reading in readings.gpus:
        known = state.faults.get(reading.uuid)
        before = known.memory_errors if known is not None else ""
        if reading.uuid not in managed or reading.lost or reading.errors == before:
            continue
        if reading.errors:
            _note_fault(decision, reading.uuid, reading.errors, decision.now.wall)
        if reading.errors or (known is not None and not known.active):  # the driver was loaded again: it counts from 0
            state.faults[reading.uuid] = replace(state.faults[reading.uuid], memory_errors=reading.errors)
            decision.plan.faults_changed = True


def _note_fault(decision: DecisionPass, uuid: str, what: str, at: float) -> None:
    """Record a fault of a GPU. If the GPU already has an active fault, only the time of its last error changes."""
    known = decision.state.faults.get(uuid)
    if known is not None and known.active:
        decision.state.faults[uuid] = replace(known, last_at=max(at, known.last_at))
    else:
        errors = known.memory_errors if known is not None else ""
        decision.state.faults[uuid] = GpuFault(uuid, what, at, at, errors)
    decision.plan.faults_changed = decision.plan.must_sync = True
