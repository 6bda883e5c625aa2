"""Finds out why an attempt failed: from its log or, if the command could not be started, from the program file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from scheduler.core.job import Job
from scheduler.core.observations import Ended, NeverRan, Observation
from scheduler.environments.programs import why_not_started
from scheduler.runners.log_end import log_finding_of


def with_causes(live: Mapping[int, Job], observations: list[Observation]) -> list[Observation]:
    """Return the observations, after adding the cause of the failure to some of them. ``live``: id → job.

    For an ending, the cause is searched in the job's log. For a failed start, the cause is searched in the job's
    program file, but only if another start would fail too (``lasting``). An observation stays as it is if no cause is
    found.
    """
    out: list[Observation] = []
    for observation in observations:
        if isinstance(observation, Ended):
            job = live.get(observation.job)
            found = log_finding_of(job, observation.exit_code) if job is not None else None
            if found is not None:
                observation = replace(observation, failure=found)
        elif isinstance(observation, NeverRan) and observation.lasting:
            job = live.get(observation.job)
            cause = why_not_started(job.argv[0]) if job is not None and job.argv else ""
            observation = replace(observation, why=f"{observation.why}: {cause}" if cause else observation.why)
        out.append(observation)
    return out
