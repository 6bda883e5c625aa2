"""Messages about changed verdicts on GPUs; part of the decisions (`decide.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler.core.gpu import named_gpus
from scheduler.core.job_text import DURING_ITS_RUN

if TYPE_CHECKING:
    from scheduler.core.admission import GpuAdmission
    from scheduler.core.decision_pass import DecisionPass


def judge_gpus(decision: DecisionPass) -> None:
    """Judge all GPUs again at the time of the pass, and add a message for each verdict that has changed."""
    state, admission = decision.state, decision.state.fleet.admission
    if not admission.cards:
        return
    admission.thresholds = state.policy.thresholds
    admission.judge(decision.now)
    silent, free_again = [], []
    for index, card in admission.cards.items():
        _name_strays(decision, index, card)
        before, after = state.told.get(index), card.verdict
        what = "trouble" if after.code == "stale" and admission.trouble else after.code
        passing = what == "releasing" or (what == "foreign" and not card.blocked)
        if passing or (before or "") == what or not card.is_known(admission):
            continue
        state.told[index] = what
        if what == "trouble":
            silent.append(index)
        elif after.code:
            notice = (f"{after.sentence}; no new job starts there", True)
            if notice not in decision.plan.notices:  # the GPUs of a node have one reason
                decision.plan.notices.append(notice)
        elif before is not None:
            free_again.append(index)
        if after.code == "gone":
            for job in state.live.values():
                if index in job.gpus:
                    job.notes = (*job.notes, DURING_ITS_RUN + after.sentence)
                    decision.changed(job, "gpu_gone", gpu=index)
    if free_again:
        decision.plan.notices.append((f"{named_gpus(free_again)} can get jobs again", False))
    if silent:
        decision.plan.notices.append(
            (
                f"{named_gpus(silent)} cannot be read: {admission.trouble}; no new job starts there, running jobs continue",
                True,
            )
        )


def _name_strays(decision: DecisionPass, index: int, card: GpuAdmission) -> None:
    """Add a note to each job that has a process on GPU ``index`` but no allocation there.

    Each job gets the note for this GPU only once.
    """
    strays = {
        foreign_process.owner: foreign_process for foreign_process in card.foreign_processes if foreign_process.owner
    }
    if not strays:
        return
    note = f"uses GPU {index} without an allocation on it"
    for job in decision.state.live.values():
        foreign_process = strays.get(job.attempt_key)
        if foreign_process is not None and note not in job.notes:
            job.notes = (*job.notes, note)
            used = None if foreign_process.memory_mib is None else foreign_process.memory_mib << 20
            decision.changed(job, "stray", gpu=index, pid=foreign_process.pid, memory=used)
