"""Why an attempt failed, or could not be started, as far as its log and its program tell."""

from __future__ import annotations

from dataclasses import replace

from scheduler.core.decide import World
from scheduler.core.facts import Ended, Fact, NeverRan
from scheduler.intake.programs import why_not_started
from scheduler.runners.log_end import log_finding_of


def with_causes(world: World, facts: list[Fact]) -> list[Fact]:
    """The same facts; to each ending what the log's end says about it, to a program that was refused what is wrong with it."""
    out: list[Fact] = []
    for fact in facts:
        if isinstance(fact, Ended):
            job = world.live.get(fact.job)
            if job is not None:
                fact = replace(fact, failure=log_finding_of(job, fact.exit_code))
        elif isinstance(fact, NeverRan) and fact.lasting:
            job = world.live.get(fact.job)
            cause = why_not_started(job.argv[0]) if job is not None and job.argv else ""
            fact = replace(fact, why=f"{fact.why}: {cause}" if cause else fact.why)
        out.append(fact)
    return out
