"""What is said when the GPUs' readings come to say something else; part of the one place that chooses (`decide.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler.core.gpu import gpu_ids_text

if TYPE_CHECKING:
    from scheduler.core.decide import Turn
    from scheduler.core.telemetry import Card


def judge_gpus(turn: Turn) -> None:
    """Let time pass over the readings, and say what changed."""
    world, telemetry = turn.world, turn.world.fleet.telemetry
    if not telemetry.cards:
        return
    telemetry.limits = world.policy.limits
    telemetry.judge(turn.now)
    silent, free_again = [], []
    for index, card in telemetry.cards.items():
        _name_strays(turn, index, card)
        before, after = world.told.get(index), card.verdict
        what = "trouble" if after.code == "stale" and telemetry.trouble else after.code
        passing = what == "releasing" or (what == "foreign" and not card.blocked)
        if passing or (before or "") == what or not card.heard_of(telemetry):
            continue
        world.told[index] = what
        if what == "trouble":
            silent.append(index)
        elif after.code:
            turn.plan.notices.append((f"{after.sentence}; no new job goes there", True))
        elif before is not None:
            free_again.append(index)
        if after.code == "gone":
            for job in world.live.values():
                if index in job.gpus:
                    job.notes = (*job.notes, f"{after.sentence} while it ran")
                    turn.changed(job, "gpu_gone", gpu=index)
    if free_again:
        turn.plan.notices.append((f"GPU {gpu_ids_text(free_again)} can be given jobs again", False))
    if silent:
        gpus = gpu_ids_text(silent)
        turn.plan.notices.append(
            (f"no telemetry from GPU {gpus}: {telemetry.trouble}; no new job goes there, running jobs go on", True)
        )


def _name_strays(turn: Turn, index: int, card: Card) -> None:
    """Add a note to each job of this scheduler that has a process on a GPU outside its allocation, once for each GPU."""
    strays = {stranger.owner: stranger for stranger in card.strangers if stranger.owner}
    if not strays:
        return
    note = f"uses GPU {index}, which it was not given"
    for job in turn.world.live.values():
        stranger = strays.get(job.attempt_key)
        if stranger is not None and note not in job.notes:
            job.notes = (*job.notes, note)
            used = None if stranger.memory_mib is None else stranger.memory_mib << 20
            turn.changed(job, "stray", gpu=index, pid=stranger.pid, memory=used)
