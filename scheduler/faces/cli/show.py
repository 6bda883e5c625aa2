"""`status`, `jobs`, `show`, `why`: what only looks."""

from __future__ import annotations

import shlex
import sys
import time

from scheduler.core.errors import UsageError
from scheduler.core.gpu import gpu_ids_text
from scheduler.core.job import Job, JobState
from scheduler.core.placement import Reason
from scheduler.core.units import seconds_of
from scheduler.desk import Desk, words_run
from scheduler.faces import render
from scheduler.faces.finding import state_file_for
from scheduler.faces.folding import last_lines


def _desk(state_file: str | None, config: str | None) -> Desk:
    desk = Desk(state_file_for(state_file, config))
    if not desk.alive():
        print("gpujob: no scheduler is running", file=sys.stderr)
    return desk


def status(
    *, json: bool = False, watch: str | None = None, state_file: str | None = None, config: str | None = None
) -> int:
    """GPUs, running and waiting jobs with their reasons, the last ended, refused lines."""
    desk = _desk(state_file, config)
    if watch is not None:
        return _watch(desk, seconds_of(watch) if watch else 2.0)
    if json:
        render.print_json(render.status_json(desk.overview()))
    else:
        view = desk.overview(render.MOST_WAITING)
        print("\n".join(render.status_lines(view, desk.places.state_file, time.time())))
    return 0


def _watch(desk: Desk, every: float) -> int:
    """The same again and again: in place on a terminal, one block after the other elsewhere."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()

    def text() -> Text:
        lines = render.status_lines(desk.overview(render.MOST_WAITING), desk.places.state_file, time.time())
        return Text("\n".join(lines), no_wrap=True, overflow="ellipsis")

    try:
        if not console.is_terminal:
            while True:
                print(text().plain, flush=True)
                time.sleep(max(0.1, every))
        with Live(text(), console=console, refresh_per_second=4, screen=True, auto_refresh=False) as live:
            while True:
                live.update(text(), refresh=True)
                time.sleep(max(0.1, every))
    except KeyboardInterrupt:
        return 130


def jobs(*, state: str = "", json: bool = False, state_file: str | None = None, config: str | None = None) -> int:
    """All jobs, or those in some states (comma-joined)."""
    known = [s.value for s in JobState]
    states = [word for word in state.split(",") if word]
    unknown = [word for word in states if word not in known]
    if unknown:
        raise UsageError(f"no state {unknown[0]!r}", where="--state", do=f"known: {', '.join(known)}")
    found, reasons = _desk(state_file, config).jobs(states)
    if json:
        render.print_json({"schema": 1, "jobs": [render.job_json(job, reasons.get(job.id)) for job in found]})
        return 0
    now = time.time()
    rows = [
        (
            job.id, job.state.value, render.how_it_ended(job), job.priority, job.spec.shown_words(), job.need,
            render.gpus_text(job), render.run_time(job, now), _reason_text(reasons.get(job.id)),
        )
        for job in found
    ]  # fmt: skip
    head = ("ID", "STATE", "HOW", "PRIORITY", "NAME", "NEED", "GPU", "TIME", "REASON")
    print("\n".join(render.table(head, rows)))
    return 0


def _reason_text(reason: Reason | None) -> str:
    return "" if reason is None else f"{reason.code}: {reason.sentence}"


def show(job: str, *, json: bool = False, state_file: str | None = None, config: str | None = None) -> int:
    """All facts about one job and its story."""
    desk = _desk(state_file, config)
    for number in desk.select([job]):
        found, reason, events = desk.job(number)
        if json:
            value = render.job_json(found, reason)
            value["events"] = [{"at": render.utc(e.at), "kind": e.kind, **e.detail} for e in events]
            render.print_json(value)
            continue
        print("\n".join(_facts(found, reason)))
        for event in events:
            detail = ", ".join(f"{k} {_plain(v)}" for k, v in event.detail.items() if v not in (None, []))
            print(f"  {render.utc(event.at)}  {event.kind}  {render.safe(detail)}".rstrip())
    return 0


def _facts(job: Job, reason: Reason | None) -> list[str]:
    facts: list[tuple[str, object]] = [
        ("job", f"{job.id} {job.spec.label}".strip()),
        ("state", job.state.value),
        ("ended", render.how_it_ended(job)),
        ("waits", _reason_text(reason)),
        ("command", shlex.join(words_run(job))),
        ("environment", job.spec.conda_env),
        ("interpreter", job.interpreter),
        ("from", job.spec.origin or job.spec.source),
        ("priority", job.priority),
        ("need", job.need.in_words()),
        ("allowed GPUs", "any" if job.allowed is None else gpu_ids_text(job.allowed)),
        ("GPUs", gpu_ids_text(job.gpus)),
        ("pid", job.process.pid if job.process and job.state.holds_gpus else ""),
        ("session", f"{job.session_name} (gpujob attach {job.id})" if job.session and job.state.holds_gpus else ""),
        ("attempt", job.attempt),
        ("submitted", render.utc(job.submitted_at)),
        ("started", render.utc(job.started_at) or ""),
        ("finished", (render.utc(job.finished_at) or "") if job.state.ended else ""),
        ("ran", render.run_time(job, time.time()) if job.started_at else ""),
        ("log", job.log),
        ("failure", f"{job.failure.line}" if job.failure else ""),
        ("hint", job.failure.hint if job.failure else ""),
        *(("note", note) for note in job.notes),
    ]
    return [f"{name:<13} {render.safe(value)}" for name, value in facts if value not in ("", None)]


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1f}"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def why(job: str, *, state_file: str | None = None, config: str | None = None) -> int:
    """Why a job waits, or how it ended."""
    desk = _desk(state_file, config)
    for number in desk.select([job]):
        found, reason, _ = desk.job(number)
        if reason is not None:
            print(f"job {number} waits ({reason.code}): {render.safe(reason.sentence)}")
        elif found.state.ended:
            hint = f"; {found.failure.hint}" if found.failure else ""
            print(f"job {number} is {found.state.value}: {render.how_it_ended(found)}{hint}")
        else:
            print(f"job {number} is {found.state.value} on GPU {gpu_ids_text(found.gpus) or 'none'}")
        for note in found.notes:
            print(f"  {render.safe(note)}")
        if found.state.ended and not found.succeeded and found.log:
            _print_tail(found.log)
    return 0


def _print_tail(path: str, most: int = 5) -> None:
    """The last lines of a failed job's log, and where the rest stands."""
    try:
        lines = last_lines(path, most)
    except OSError as error:
        print(f"  its log cannot be read: {error.strerror}: {path}")
        return
    print(f"  last lines of {render.near(path)}:" if lines else f"  its log is empty: {render.near(path)}")
    for line in lines:
        print(f"    {render.safe(line)}")
