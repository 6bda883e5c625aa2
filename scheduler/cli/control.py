"""Verbs that change jobs, GPUs or the queue (`cancel`, `edit`, `pause`, …), and `wait`, `reset` and `recover`.

The function of a verb prints the scheduler's answer and returns the exit code. The answer is printed on stdout, or on
stderr if the exit code is not 0. The function raises UsageError for a wrong argument, NotFound for an unknown job, and
other SchedulerErrors, such as NoDaemon.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence

from scheduler.client.client import SchedulerClient
from scheduler.client.locate import client_of, own_state_file_for, settings_for, state_file_for
from scheduler.client.send_request import do, revision_of, until_shown
from scheduler.client.wait import wait_for
from scheduler.core.errors import NoDaemon, UsageError
from scheduler.core.gpu import parse_gpu_ids
from scheduler.core.job import ENDED
from scheduler.core.requests import (
    Answer,
    Cancel,
    Edit,
    First,
    Hold,
    Pause,
    PauseQueue,
    Release,
    Request,
    Requeue,
    Resume,
    Swap,
)
from scheduler.core.secrets import without_secrets
from scheduler.core.units import seconds_of
from scheduler.system.forked_command import need_own_process
from scheduler.system.terminal_text import safe


def _ask(found: str, config: str | None, request: Request) -> int:
    client = client_of(found)
    before = 0 if client.shared else revision_of(found)
    answer, by_daemon = do(client, request, config)
    if not by_daemon:
        print("gpujob: no scheduler is running", file=sys.stderr)
    elif isinstance(request, (Pause, Resume, PauseQueue)) and not answer.code and not client.shared:
        until_shown(found, request, before)
    return _show(answer)


def _show(answer: Answer) -> int:
    for line in answer.lines:
        print(safe(f"gpujob: {line}" if answer.code else line), file=sys.stderr if answer.code else sys.stdout)
    return answer.code


def _chosen(found: str, words: Sequence[str]) -> tuple[int, ...]:
    if not words:
        raise UsageError("no job is named", do="name an id, a range such as 3-9, a label, or @ for the last job")
    return client_of(found).select(words)


def cancel(jobs: Sequence[str], *, state_file: str | None = None, config: str | None = None) -> int:
    """Cancel waiting jobs immediately, and end running jobs with all their processes."""
    found = state_file_for(state_file, config)
    return _ask(found, config, Cancel(_chosen(found, jobs)))


def retry(jobs: Sequence[str], *, state_file: str | None = None, config: str | None = None) -> int:
    """Run ended jobs again, each with the same id, a new attempt and a new log."""
    found = state_file_for(state_file, config)
    ids = _chosen(found, jobs)
    known = client_of(found).known(ids)
    return _ask(found, config, Requeue(ids, after=tuple(known[job].attempt if job in known else 0 for job in ids)))


def hold(jobs: Sequence[str], *, state_file: str | None = None, config: str | None = None) -> int:
    """Keep waiting jobs from starting until they are released."""
    found = state_file_for(state_file, config)
    return _ask(found, config, Hold(_chosen(found, jobs)))


def release(jobs: Sequence[str], *, state_file: str | None = None, config: str | None = None) -> int:
    """Release held jobs, so that the scheduler may start them."""
    found = state_file_for(state_file, config)
    return _ask(found, config, Release(_chosen(found, jobs)))


def first(jobs: Sequence[str], *, state_file: str | None = None, config: str | None = None) -> int:
    """Move waiting jobs to the front of the queue, in the given order."""
    found = state_file_for(state_file, config)
    return _ask(found, config, First(_chosen(found, jobs)))


def swap(jobs: Sequence[str], *, state_file: str | None = None, config: str | None = None) -> int:
    """Exchange the places of two waiting jobs. Raises UsageError unless ``jobs`` name exactly two jobs."""
    found = state_file_for(state_file, config)
    ids = _chosen(found, jobs)
    if len(ids) != 2:
        raise UsageError(f"swap takes two jobs, not {len(ids)} ({' '.join(jobs)})", do="write gpujob swap 12 15")
    return _ask(found, config, Swap(ids))


def edit(
    jobs: Sequence[str], options: Mapping[str, str], *, state_file: str | None = None, config: str | None = None
) -> int:
    """Change waiting jobs. ``options``: option name → text as for `submit`; an empty text restores the default."""
    from scheduler.cli.add import warn
    from scheduler.client.edit_needs import needs_after
    from scheduler.client.submission import model_table_for
    from scheduler.core.job_options import PATH_FIELDS, changed_fields

    found = state_file_for(state_file, config)
    ids = _chosen(found, jobs)
    if not options:
        raise UsageError("no option is given", do="write for example gpujob edit 12 --gpus 0.5; see gpujob edit --help")
    client = client_of(found)
    changes = changed_fields(options)
    for name in PATH_FIELDS.intersection(changes):
        if changes[name]:
            changes[name] = os.path.abspath(os.path.expanduser(changes[name]))
    needs = needs_after(
        client.states(ids), changes, lambda: client.learned_table(model_table_for(client, config, warn)), client.gpus
    )
    return _ask(found, config, Edit(ids, changes, needs))


def _gpus(words: Sequence[str]) -> tuple[int, ...]:
    ids = parse_gpu_ids(",".join(words))
    if ids is None:
        raise UsageError("no GPU is named", do="write 2 or 0-3")
    return ids


def pause(gpus: Sequence[str], *, state_file: str | None = None, config: str | None = None) -> int:
    """Pause GPUs: they get no new jobs, and running jobs continue."""
    return _ask(state_file_for(state_file, config), config, Pause(_gpus(gpus)))


def resume(
    gpus: Sequence[str], *, force: bool = False, state_file: str | None = None, config: str | None = None
) -> int:
    """Resume paused GPUs.

    ``force``: start jobs even beside the foreign processes and memory that are on the GPUs now.
    Raises NoDaemon if ``force`` is given and no scheduler runs.
    """
    found = state_file_for(state_file, config)
    ids = _gpus(gpus)
    if force and not client_of(found).alive():
        raise NoDaemon(
            "cannot resume with --force: no scheduler is running, so the GPUs are not read", do="start it: gpujob start"
        )
    return _ask(found, config, Resume(ids, force))


def queue(what: str, *, state_file: str | None = None, config: str | None = None) -> int:
    """Pause or resume the whole queue; ``what`` is ``pause`` or ``resume``. Raises UsageError for another word."""
    if what not in ("pause", "resume"):
        raise UsageError(f"queue has no action {what!r}", do="write gpujob queue pause or gpujob queue resume")
    return _ask(state_file_for(state_file, config), config, PauseQueue(what == "pause"))


def reset(*, yes: bool = False, state_file: str | None = None, config: str | None = None) -> int:
    """Delete ended jobs and refused lines from the store, and return the exit code 0. The logs stay.

    On a terminal, ask the user first, unless ``yes`` is given.
    """
    asks = not yes and sys.stdin.isatty() and sys.stdout.isatty()
    if asks:
        need_own_process()
    client = client_of(state_file_for(state_file, config))
    if asks:
        counts = client.overview(0).counts
        ended = sum(counts[state.value] for state in ENDED)
        if input(f"forget {ended} ended job{'s' * (ended != 1)}? their logs stay (y/n) ").strip().lower() not in (
            "y",
            "yes",
        ):
            print("nothing was changed")
            return 0
    number = client.reset()
    print(f"forgot {number} ended job{'s' * (number != 1)}")
    return 0


def wait(jobs: Sequence[str], *, timeout: str = "", state_file: str | None = None, config: str | None = None) -> int:
    """Wait until the given jobs (all jobs if ``jobs`` is empty) have ended, and return an exit code.

    For one job, the exit code tells how the job ended (`client/wait.py: code_of`). For several jobs, the exit code is 0
    if all jobs succeeded, else 1. If some jobs have not ended after ``timeout`` (a duration), the exit code is 124.
    Raises NoDaemon if jobs have not ended and no scheduler runs. Raises NotFound if a job does not exist, or was
    deleted before this command saw its end.
    """
    limit = seconds_of(timeout) if timeout else None
    need_own_process()
    client = client_of(state_file_for(state_file, config))
    ids = client.select(jobs) if jobs else own_unfinished(client) if client.shared else None
    return wait_for(client, ids, limit, time.monotonic())


def own_unfinished(client: SchedulerClient) -> tuple[int, ...]:
    """Return the jobs of the caller that have not ended, in a scheduler of several users."""
    found, _ = client.jobs(("pending", "starting", "running", "stopping"))
    return tuple(job.id for job in found if job.spec.uid == os.getuid())


def recover(*, dry_run: bool = False, state_file: str | None = None, config: str | None = None) -> int:
    """Rebuild a damaged store from its readable rows, the attempt records and live processes; return the exit code.

    Also records that the state folder belongs to this machine and path, so that a copied folder can be used.
    ``dry_run``: only print what would be done.
    """
    import os

    from scheduler.recovery.rebuild import recover as rebuild
    from scheduler.store.store_identity import home_of

    do = "an administrator can, while the service is stopped: sudo -u gpujob gpujob recover --state-file STATE_FILE"
    found = own_state_file_for(state_file, config, do)
    client = client_of(found)
    settings = settings_for({"state_file": found}, config)
    client.places.make()
    home = home_of(client.places)
    report = rebuild(client.places, settings.config, home, os.path.expanduser("~"), dry=dry_run)
    for line in report.lines:
        print(safe(without_secrets(line)))  # secrets are masked; the file that the report names has the full lines
    if not dry_run:
        if report.healthy:
            client.settle_at_home(home)
        print(
            f"{safe(client.places.state_dir)} is now registered for this machine and path; "
            "the next gpujob start checks which jobs still run"
        )
    return report.code
