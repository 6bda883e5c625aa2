"""Finds out why an attempt failed: from its log, its end and the kernel's word.

If it could not be started: from the program file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from scheduler.core.endings import reached_time_limit
from scheduler.core.failure_classes import time_limit_failure
from scheduler.core.host_oom import was_killed, with_host_oom
from scheduler.core.job import Job, JobState
from scheduler.core.observations import Ended, NeverRan, Observation
from scheduler.core.own_classes import OwnClass
from scheduler.daemon.kernel_kills import KernelKills
from scheduler.environments.programs import why_not_started
from scheduler.runners.log_end import log_finding_of


def with_causes(
    live: Mapping[int, Job],
    observations: list[Observation],
    own: Sequence[OwnClass] = (),
    kernel: KernelKills | None = None,
) -> list[Observation]:
    """Return the observations, after adding the cause of the failure to some of them. ``live``: id → job.

    For an ending, the cause is searched in the job's log (``own``: the user's classes). For a failed start, the cause is searched in the job's
    program file, but only if another start would fail too (``lasting``). An observation stays as it is if no cause is
    found. ``kernel``: what the kernel's log says; None: it is not read, and only the kernel's counter counts, and only
    after SIGKILL, because other users may have processes in the same cgroup.
    """
    out: list[Observation] = []
    for observation in observations:
        if isinstance(observation, Ended):
            job = live.get(observation.job)
            found = log_finding_of(job, observation.exit_code, observation.signal, own) if job is not None else None
            if job is not None and job.state is not JobState.STOPPING:  # else the scheduler itself has ended it
                if kernel is not None:
                    found = kernel.cause(job, observation, found, own)
                elif was_killed(observation.exit_code, observation.signal):
                    found = with_host_oom(found, observation.exit_code, observation.oom_kills, own=own)
            if found is not None:
                observation = replace(observation, failure=found)
        elif isinstance(observation, NeverRan) and observation.lasting:
            job = live.get(observation.job)
            cause = why_not_started(job.argv[0]) if job is not None and job.argv else ""
            observation = replace(observation, why=f"{observation.why}: {cause}" if cause else observation.why)
        if kernel is not None:
            kernel.note(observation)
        out.append(observation)
    return out


def with_time_limits(
    live: Mapping[int, Job], observations: list[Observation], own: Sequence[OwnClass]
) -> list[Observation]:
    """Return the observations of agents, which do not know that an attempt was ended at its time limit.

    The cause of such an ending becomes the time limit, unless the agent has found one of the user's classes ``own``.
    """
    names = {one.name for one in own}
    out: list[Observation] = []
    for observation in observations:
        if isinstance(observation, Ended) and not (observation.failure and observation.failure.kind in names):
            job = live.get(observation.job)
            if job is not None and reached_time_limit(job):
                observation = replace(observation, failure=time_limit_failure())
        out.append(observation)
    return out
