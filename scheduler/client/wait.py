"""Waits until jobs have ended, and derives an exit code from their outcomes."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence

from scheduler.client.client import SchedulerClient
from scheduler.core.errors import NoDaemon, NotFound
from scheduler.core.job import Job, Outcome
from scheduler.core.job_text import state_text
from scheduler.core.secrets import without_secrets
from scheduler.system.terminal_text import safe

TIMED_OUT = 124
PATIENT_S = 120.0  # a command that waits also waits for a service that is just starting again
SAY_WHY_S = 2.0  # seconds until the reasons of stuck jobs are printed
MOST_NAMED = 10  # jobs that a message names
STUCK = ("missing", "paused", "never", "hold-user")  # reason codes that only a user's action ends


def code_of(job: Job) -> int:
    """Return the exit code for an ended job.

    If the job exited by itself, this is the job's own exit code. If a signal ended the job, it is 128 + the number of
    the signal. For all other jobs it is 0 if the job succeeded, else 1.
    """
    if job.outcome is Outcome.EXIT and job.exit_code is not None:
        return job.exit_code
    if job.outcome is Outcome.SIGNAL and job.signal:
        return 128 + job.signal
    return 0 if job.succeeded else 1


def wait_for(client: SchedulerClient, ids: tuple[int, ...] | None, limit: float | None, since: float) -> int:
    """Wait until the jobs have ended, and return an exit code.

    For a single job, this is the result of `code_of`. For several jobs, it is 0 if all jobs succeeded, else 1. ``ids``:
    the ids of the jobs; None: all jobs that have not ended. ``limit``: the wait ends this many seconds after ``since``
    (monotonic) and returns `TIMED_OUT`; None: no limit.
    If a job is deleted during the wait, the last state that this function saw counts. If that state is not a final
    state, or if this function never saw the job, NotFound is raised. Raises NoDaemon if jobs have not ended and no
    scheduler runs.
    """
    pause_s = 0.01
    said = False
    seen: dict[int, Job | None] = dict.fromkeys(ids or ())
    while True:
        if client.shared:
            client.restart_s = (
                PATIENT_S if limit is None else min(PATIENT_S, max(0.0, since + limit - time.monotonic()))
            )
        found = {job.id: job for job in client.overview().jobs} if ids is None else client.known(ids)
        live = [job for job in found.values() if not job.state.ended]
        seen.update({job.id: job for job in live} if ids is None else found)
        if not live:
            break
        if not client.alive():
            raise NoDaemon(f"no scheduler is running, and {len(live)} job(s) have not ended", do=client.to_start)
        if limit is not None and time.monotonic() - since >= limit:
            print(f"gpujob: {len(live)} job(s) have not ended within {limit:g} s", file=sys.stderr)
            return TIMED_OUT
        if time.monotonic() - since > SAY_WHY_S and not said:
            said = True
            _say_why(client, [job.id for job in live])
        time.sleep(pause_s)
        pause_s = min(0.1, pause_s * 1.3)
    seen.update(client.known(list(seen)))
    ended = [job for _, job in sorted(seen.items()) if job is not None and job.state.ended]
    _say_failed(client, ended)
    if len(ended) < len(seen):
        raise _forgotten(client, [(number, job) for number, job in sorted(seen.items()) if job not in ended])
    if len(ended) == 1:
        return code_of(ended[0])
    return 1 if any(not job.succeeded for job in ended) else 0


def _forgotten(client: SchedulerClient, jobs: Sequence[tuple[int, Job | None]]) -> NotFound:
    """Return the error for deleted jobs. ``jobs``: pairs of an id and the job as last seen (None if never seen)."""
    logs = [job.log for _, job in jobs if job is not None and job.log]
    several = len(jobs) > 1
    names = ", ".join(str(number) for number, _ in jobs[:MOST_NAMED])
    return NotFound(
        f"cannot wait for job{'s' * several} {names}: {'they were' if several else 'it was'} forgotten (gpujob reset) "
        f"before this command noticed {'their ends' if several else 'its end'}",
        where=client.places.state_file,
        do=f"the output is in {', '.join(logs[:MOST_NAMED])}" if logs else "",
    )


def _say_why(client: SchedulerClient, waiting: Sequence[int]) -> None:
    """Print which jobs cannot start until a user acts, and why."""
    for number in waiting[:20]:
        _, reason, _ = client.job(number)
        if reason is not None and reason.code in STUCK:
            print(safe(f"gpujob: job {number} waits ({reason.code}): {reason.sentence}"), file=sys.stderr)


def _why_failed(client: SchedulerClient, job: Job) -> str:
    """Return why a job failed, if its outcome alone does not say it: for example, why the job could not be started.

    Return an empty text if nothing more is known.
    """
    with contextlib.suppress(NotFound):  # deleted in the meantime
        for event in reversed(client.job(job.id)[2]):
            if event.detail.get("attempt") == job.attempt and "outcome" in event.detail:
                return str(event.detail.get("why", ""))
    return job.notes[-1].removeprefix("could not start: ") if job.notes else ""  # it ended without a scheduler


def _say_failed(client: SchedulerClient, ended: Sequence[Job]) -> None:
    """Print which jobs did not succeed, and how each of them ended. The exit code alone does not show this."""
    failed = [job for job in ended if not job.succeeded]
    for job in failed[:MOST_NAMED]:
        why = _why_failed(client, job) if job.outcome is not Outcome.EXIT else ""
        note = f" ({without_secrets(why)})" if why else ""
        look = f"gpujob logs {job.id}" if job.log else f"gpujob why {job.id}"
        text = f"gpujob: job {job.id} ({job.spec.shown_name}) {state_text(job)}{note}; {look}"
        print(safe(text), file=sys.stderr)
    if len(failed) > MOST_NAMED:
        print(f"gpujob: and {len(failed) - MOST_NAMED} more", file=sys.stderr)
