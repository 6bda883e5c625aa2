"""`cancel`, `retry`, `hold`, `edit`, `pause`, `wait` and their like: what changes or waits."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from scheduler.core.errors import NoDaemon, NotFound, UsageError
from scheduler.core.gpu import parse_gpu_ids
from scheduler.core.job import ENDED, Job, Outcome
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
from scheduler.desk import Desk
from scheduler.faces.asking import do, revision_of, until_shown
from scheduler.faces.finding import settings_for, state_file_for
from scheduler.faces.render import state_text
from scheduler.faces.terminal import safe

TIMED_OUT = 124
SAY_WHY_S = 2.0
MOST_NAMED = 10  # jobs that failed
STUCK = ("missing", "paused", "never", "hold-user")


def _say_why(desk: Desk, waiting: Sequence[int]) -> None:
    """Name the jobs that will not start by themselves."""
    for number in waiting[:20]:
        _, reason, _ = desk.job(number)
        if reason is not None and reason.code in STUCK:
            print(safe(f"gpujob: job {number} waits ({reason.code}): {reason.sentence}"), file=sys.stderr)


def _say_failed(ended: Sequence[Job]) -> None:
    """Name the jobs that have not ended well: an exit code alone does not tell which, nor why."""
    failed = [job for job in ended if not job.succeeded]
    for job in failed[:MOST_NAMED]:
        note = f" ({without_secrets(job.notes[-1])})" if job.notes and job.outcome is not Outcome.EXIT else ""
        look = f"gpujob logs {job.id}" if job.log else f"gpujob why {job.id}"
        text = f"gpujob: job {job.id} ({job.spec.shown_name}) {state_text(job)}{note}; {look}"
        print(safe(text), file=sys.stderr)
    if len(failed) > MOST_NAMED:
        print(f"gpujob: and {len(failed) - MOST_NAMED} more", file=sys.stderr)


def _ask(found: str, config: str | None, request: Request) -> int:
    before = revision_of(found)
    answer, by_daemon = do(Desk(found), request, config)
    if not by_daemon:
        print("gpujob: no scheduler is running", file=sys.stderr)
    elif isinstance(request, (Pause, Resume, PauseQueue)) and not answer.code:
        until_shown(found, request, before)
    return _show(answer)


def _show(answer: Answer) -> int:
    for line in answer.lines:
        print(safe(f"gpujob: {line}" if answer.code else line), file=sys.stderr if answer.code else sys.stdout)
    return answer.code


def _chosen(found: str, words: Sequence[str]) -> tuple[int, ...]:
    if not words:
        raise UsageError("which job?", do="name an id, a range such as 3-9, a label, or @ for the last")
    return Desk(found).select(words)


def cancel(jobs: Sequence[str], *, state_file: str | None = None, config: str | None = None) -> int:
    """End jobs: waiting ones at once, running ones with all their processes."""
    found = state_file_for(state_file, config)
    return _ask(found, config, Cancel(_chosen(found, jobs)))


def retry(jobs: Sequence[str], *, state_file: str | None = None, config: str | None = None) -> int:
    """Run ended jobs again: same id, new attempt, new log."""
    found = state_file_for(state_file, config)
    ids = _chosen(found, jobs)
    known = Desk(found).known(ids)
    return _ask(found, config, Requeue(ids, after=tuple(known[job].attempt if job in known else 0 for job in ids)))


def hold(jobs: Sequence[str], *, state_file: str | None = None, config: str | None = None) -> int:
    """Do not start these waiting jobs until they are released."""
    found = state_file_for(state_file, config)
    return _ask(found, config, Hold(_chosen(found, jobs)))


def release(jobs: Sequence[str], *, state_file: str | None = None, config: str | None = None) -> int:
    """Let held jobs wait for room again."""
    found = state_file_for(state_file, config)
    return _ask(found, config, Release(_chosen(found, jobs)))


def first(jobs: Sequence[str], *, state_file: str | None = None, config: str | None = None) -> int:
    """Start these waiting jobs before all others."""
    found = state_file_for(state_file, config)
    return _ask(found, config, First(_chosen(found, jobs)))


def swap(jobs: Sequence[str], *, state_file: str | None = None, config: str | None = None) -> int:
    """Let two waiting jobs change places."""
    found = state_file_for(state_file, config)
    ids = _chosen(found, jobs)
    if len(ids) != 2:
        raise UsageError(f"two jobs change places, and {' '.join(jobs)} names {len(ids)}", do="gpujob swap 12 15")
    return _ask(found, config, Swap(ids))


def edit(
    jobs: Sequence[str], wishes: Mapping[str, str], *, state_file: str | None = None, config: str | None = None
) -> int:
    """Change waiting jobs. ``wishes``: option → text as `submit` takes it, an empty text takes the wish back."""
    from scheduler.core.llm import ModelTable, need_of
    from scheduler.faces.cli.add import changes_of, warn
    from scheduler.faces.submitting import model_table_for
    from scheduler.intake.jobs_csv import check_launch

    found = state_file_for(state_file, config)
    ids = _chosen(found, jobs)
    if not wishes:
        raise UsageError("what is to be changed?", do="say it, as in gpujob edit 12 --gpus 0.5; see gpujob edit --help")
    desk = Desk(found)
    changes = changes_of(wishes)
    chosen = desk.states(ids)
    specs = [replace(job.spec, **changes) for job in chosen]
    needs: tuple[tuple[int, int], ...] = ()
    if "launch" in changes:
        for spec in specs:
            check_launch(spec)
    if {"gpus", "vram_mib", "allowed"} & set(changes):
        # Of a job that says only how much memory it needs, that decides its share of the GPUs it may have.
        by_memory = ("vram_mib" in changes or bool(spec.vram_mib) for spec in specs)
        anew = [
            "gpus" in changes or (books and not spec.gpus and not spec.on)
            for spec, books in zip(specs, by_memory, strict=True)
        ]
        table = model_table_for(desk, config, warn) if any(anew) and not changes.get("gpus") else ModelTable()
        gpus = desk.gpus()
        found_needs = [
            need_of(spec, table, gpus)[0] if wanted else job.need
            for spec, wanted, job in zip(specs, anew, chosen, strict=True)
        ]
        needs = tuple((need.count, need.parts) for need in found_needs)
    return _ask(found, config, Edit(ids, changes, needs))


def _gpus(words: Sequence[str]) -> tuple[int, ...]:
    ids = parse_gpu_ids(",".join(words))
    if ids is None:
        raise UsageError("which GPU?", do="write 2 or 0-3")
    return ids


def pause(gpus: Sequence[str], *, state_file: str | None = None, config: str | None = None) -> int:
    """Give these GPUs no new job; those that run go on."""
    return _ask(state_file_for(state_file, config), config, Pause(_gpus(gpus)))


def resume(
    gpus: Sequence[str], *, force: bool = False, state_file: str | None = None, config: str | None = None
) -> int:
    """Give these GPUs jobs again; ``force``: also beside what others have on them now."""
    found = state_file_for(state_file, config)
    ids = _gpus(gpus)
    if force and not Desk(found).alive():
        raise NoDaemon("no scheduler is running: nobody sees what --force would accept", do="start it: gpujob start")
    return _ask(found, config, Resume(ids, force))


def queue(what: str, *, state_file: str | None = None, config: str | None = None) -> int:
    """Pause or resume the whole queue."""
    if what not in ("pause", "resume"):
        raise UsageError(f"queue {what}?", do="write gpujob queue pause or gpujob queue resume")
    return _ask(state_file_for(state_file, config), config, PauseQueue(what == "pause"))


def reset(*, yes: bool = False, state_file: str | None = None, config: str | None = None) -> int:
    """Forget ended jobs and refused lines; logs stay."""
    desk = Desk(state_file_for(state_file, config))
    if not yes and sys.stdin.isatty() and sys.stdout.isatty():
        counts = desk.overview(0).counts
        ended = sum(counts[state.value] for state in ENDED)
        if input(f"forget {ended} ended job{'s' * (ended != 1)}? their logs stay (y/n) ").strip().lower() not in (
            "y",
            "yes",
        ):
            print("nothing was changed")
            return 0
    number = desk.reset()
    print(f"forgot {number} ended job{'s' * (number != 1)}")
    return 0


def code_of(job: Job) -> int:
    """The exit code that tells how a job ended: its own, 128 + signal, else 1."""
    if job.outcome is Outcome.EXIT and job.exit_code is not None:
        return job.exit_code
    if job.outcome is Outcome.SIGNAL and job.signal:
        return 128 + job.signal
    return 0 if job.succeeded else 1


def wait(jobs: Sequence[str], *, timeout: str = "", state_file: str | None = None, config: str | None = None) -> int:
    """Wait until jobs have ended (all of them without JOB); one job's own exit code, else 1 if any failed."""
    found = state_file_for(state_file, config)
    desk = Desk(found)
    limit = seconds_of(timeout) if timeout else None
    ids = desk.select(jobs) if jobs else None
    return wait_for(desk, ids, limit, time.monotonic())


def wait_for(desk: Desk, ids: tuple[int, ...] | None, limit: float | None, since: float) -> int:
    """The work of `wait`: looks at the store until all have ended; a forgotten job counts by what was seen of it.

    Raises NoDaemon when nobody could end them, NotFound when one was forgotten before its end was seen.
    """
    pause_s = 0.01
    said = False
    seen: dict[int, Job | None] = dict.fromkeys(ids or ())
    while True:
        found = {job.id: job for job in desk.overview().jobs} if ids is None else desk.known(ids)
        live = [job for job in found.values() if not job.state.ended]
        seen.update({job.id: job for job in live} if ids is None else found)
        if not live:
            break
        if not desk.alive():
            raise NoDaemon(
                f"no scheduler is running, and {len(live)} job(s) have not ended", do="start it: gpujob start"
            )
        if limit is not None and time.monotonic() - since >= limit:
            print(f"gpujob: {len(live)} job(s) have not ended within {limit:g} s", file=sys.stderr)
            return TIMED_OUT
        if time.monotonic() - since > SAY_WHY_S and not said:
            said = True
            _say_why(desk, [job.id for job in live])
        time.sleep(pause_s)
        pause_s = min(0.1, pause_s * 1.3)
    seen.update(desk.known(seen))
    ended = [job for _, job in sorted(seen.items()) if job is not None and job.state.ended]
    _say_failed(ended)
    if len(ended) < len(seen):
        raise _forgotten(desk, [(number, job) for number, job in sorted(seen.items()) if job not in ended])
    if len(ended) == 1:
        return code_of(ended[0])
    return 1 if any(not job.succeeded for job in ended) else 0


def _forgotten(desk: Desk, jobs: Sequence[tuple[int, Job | None]]) -> NotFound:
    """What is to be said of jobs that were there, and then no more. ``jobs``: id, and the job as it was last seen."""
    logs = [job.log for _, job in jobs if job is not None and job.log]
    several = len(jobs) > 1
    names = ", ".join(str(number) for number, _ in jobs[:MOST_NAMED])
    return NotFound(
        f"job{'s' * several} {names} {'were' if several else 'was'} forgotten (gpujob reset) before "
        f"{'their ends were' if several else 'its end was'} seen",
        where=desk.places.state_file,
        do=f"what {'they' if several else 'it'} printed stays in {', '.join(logs[:MOST_NAMED])}" if logs else "",
    )


def recover(*, dry_run: bool = False, state_file: str | None = None, config: str | None = None) -> int:
    """Rebuild a damaged store from what is left; also says that a copied folder is the one to use from now on."""
    import os

    from scheduler.engine.home import home_of
    from scheduler.engine.rebuilding import recover as rebuild

    found = state_file_for(state_file, config)
    desk = Desk(found)
    settings = settings_for({"state_file": found}, config)
    desk.places.make()
    home = home_of(desk.places)
    report = rebuild(desk.places, settings.config, home, os.path.expanduser("~"), dry=dry_run)
    for line in report.lines:
        print(safe(without_secrets(line)))  # as it stands: in the list that they name
    if not dry_run:
        if report.healthy:
            desk.settle_here(home)
        print(f"{safe(desk.places.house)} belongs here from now on; its jobs are settled at the next start")
    return report.code
