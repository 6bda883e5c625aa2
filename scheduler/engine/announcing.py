"""What a turn brought, told: new jobs, what became of them, refused and repeated lines."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from scheduler.core.decide import Plan
from scheduler.engine.reading import Gathered
from scheduler.engine.telling import accepted, harmless, sentence

if TYPE_CHECKING:
    from scheduler.engine.loop import House

MOST_NAMED = 20


def announce(house: House, plan: Plan, gathered: Gathered) -> None:
    """Say what a turn brought, in the order in which it happened."""
    if len(gathered.jobs) > MOST_NAMED:
        first, last = gathered.jobs[0], gathered.jobs[-1]
        house.say(f"{len(gathered.jobs)} jobs accepted: {first.id} to {last.id}", kind="accepted")
    for job in gathered.jobs if len(gathered.jobs) <= MOST_NAMED else ():
        house.say(accepted(job), kind="accepted", job=job)
    told = {job.id: job for job in gathered.jobs}
    told.update((job.id, job) for job in gathered.changed)
    told.update(plan.changed)
    for event in (*gathered.events, *plan.events):
        about = told.get(event.job) or house.world.live.get(event.job) or house.fetch(event.job)
        if about is None:
            continue
        if event.kind == "failed":
            house.ended_badly += 1
        if event.kind == "started":
            if about.id in house.told_running:
                continue  # taken over, which is said in other words
            house.told_running.add(about.id)
        elif event.kind in ("done", "failed", "cancelled", "fell", "unclaimed"):
            house.told_running.discard(about.id)
        text, level = sentence(event, about)
        house.say(text, level, kind=event.kind, job=about)
    for answer in plan.answers:
        for line in answer.lines if answer.row in gathered.left_for_start else ():
            # Whoever asked does not wait for the answer.
            house.say(f"asked for before the start: {harmless(line)}", 30 if answer.code else 20, kind="asked")
    for text, warns in plan.notices:
        house.say(text, 30 if warns else 20, kind="gpu")
    for text in gathered.left_out:
        house.say(harmless(text), 30, kind="file")
    for refusal in gathered.refusals:
        name = os.path.basename(refusal.path)
        house.say(f"{name}:{refusal.number}: {harmless(refusal.reason)}", 30, kind="refused")
    _say_repeated(house, gathered)


def _say_repeated(house: House, gathered: Gathered) -> None:
    if gathered.repeated:
        path, number, blocker = gathered.repeated[0]
        lines = len(gathered.repeated)
        state = blocker.state.value
        which = f"line {number} says what job {blocker.id} ({state}) says"
        if state == "done":
            which += f" (to run it again: gpujob retry {blocker.id})"
        if lines > 1:
            which = (
                f"{lines} lines repeat jobs that wait, run or have succeeded (line {number}: job {blocker.id}, {state})"
            )
        house.say(f"{os.path.basename(path)}: {which}; not run again", 20, kind="repeated")
