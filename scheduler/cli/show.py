"""The verbs `status`, `jobs`, `show` and `why`, which only read."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from scheduler.client.client import SCHEMA, SchedulerClient
from scheduler.client.locate import client_of, state_file_for
from scheduler.core.errors import UsageError, did_you_mean
from scheduler.core.gpu import gpu_ids_text
from scheduler.core.job import Job, JobState, Reason
from scheduler.core.job_text import how_it_ended, state_text
from scheduler.core.secrets import masked, without_secrets
from scheduler.core.units import maybe_utc, seconds_of, utc
from scheduler.system.forked_command import need_own_process
from scheduler.views import render, terminal

if TYPE_CHECKING:
    from scheduler.views.documents import ExplanationDocument

LOOK_S = 0.5
STATUS_S = 0.1  # for the predictions in `status`
ALSO_CALLED = {"waiting": JobState.PENDING.value}  # a word of `status` for a state → the state


def _client(state_file: str | None, config: str | None) -> SchedulerClient:
    client = client_of(state_file_for(state_file, config))
    if not client.alive():
        print("gpujob: no scheduler is running", file=sys.stderr)
    return client


def status(
    *, json: bool = False, watch: str | None = None, state_file: str | None = None, config: str | None = None
) -> int:
    """Print GPUs, running jobs, waiting jobs with their reasons, the jobs that ended last, and refused lines.

    ``watch``: repeat the output after this duration (empty: 2 seconds) until Ctrl-C; None: print once. Returns the exit
    code: 0, or 130 after Ctrl-C. Raises UsageError for a wrong duration, and for ``json`` with ``watch``.
    """
    every = seconds_of(watch) if watch else 2.0
    if json and watch is not None:
        raise UsageError("--watch prints text, not JSON", do="repeat gpujob status --json, or leave out --json")
    if watch is not None:
        need_own_process()
    client = _client(state_file, config)
    if watch is not None:
        return _watch(client, every)
    if json:
        from scheduler.views.predictions import outlook_json

        render.print_json(render.status_json(client.overview(), outlook_json(client.outlook())))
    else:
        print("\n".join(_status_lines(client)))
    return 0


def _status_lines(client: SchedulerClient) -> list[str]:
    view = client.overview(render.MOST_WAITING)
    commands = client.jobs() if view.dispatcher else None
    expected: dict[int, str] = {}
    if view.alive and commands is None and any(not job.state.ended for job in view.jobs):
        from scheduler.views.predictions import expected_texts

        expected = expected_texts(client.outlook(STATUS_S), view.jobs)
    return render.status_lines(view, client.places.state_file, time.time(), commands, expected)


def _watch(client: SchedulerClient, every: float) -> int:
    """Show the status every ``every`` seconds until Ctrl-C.

    On a terminal, each status replaces the previous status. Elsewhere, each status is printed below the previous
    status.
    """
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()

    def text() -> Text:
        return Text.from_ansi("\n".join(_status_lines(client)), no_wrap=True, overflow="crop")

    try:
        if not sys.stdout.isatty():
            while True:
                print(text().plain, flush=True)
                time.sleep(max(0.1, every))
        with Live(text(), console=console, refresh_per_second=4, screen=True, auto_refresh=False) as live:
            while True:
                live.update(text(), refresh=True)
                time.sleep(max(0.1, every))
    except KeyboardInterrupt:
        return 130


def jobs(
    *,
    state: str = "",
    last: str = "",
    json: bool = False,
    state_file: str | None = None,
    config: str | None = None,
) -> int:
    """Print all jobs as a table or JSON, and return the exit code 0. Raises UsageError.

    ``state``: print only jobs in these states (comma-separated). ``last``: print only this number of the newest jobs.
    """
    known = [s.value for s in JobState]
    states = [ALSO_CALLED.get(word, word) for word in state.split(",") if word]
    unknown = [word for word in states if word not in known]
    if unknown:
        raise UsageError(
            f"no state {unknown[0]!r}{did_you_mean(unknown[0], known)}",
            where="--state",
            do=f"known: {', '.join(known)}",
        )
    if last and not (last.isascii() and last.isdigit() and len(last) < 16):
        raise UsageError(f"{last[:40]!r} is not a whole number", where="-n", do="write -n 20")
    found, reasons = _client(state_file, config).jobs(states, int(last) if last else None)
    if json:
        render.print_json({"schema": SCHEMA, "jobs": [render.job_json(job, reasons.get(job.id)) for job in found]})
        return 0
    print("\n".join(render.jobs_lines(found, reasons, time.time())))
    return 0


def show(jobs: Sequence[str], *, json: bool = False, state_file: str | None = None, config: str | None = None) -> int:
    """Print all facts about jobs and their event histories, and return the exit code 0.

    As JSON: one object for a single job, else one object with a list of jobs. Raises NotFound.
    """
    client = _client(state_file, config)
    found = [client.job(number) for number in client.select(jobs)]
    if json:
        values = [
            {
                **render.job_json(job, reason),
                "events": [{"at": utc(e.at), "kind": e.kind, **masked(e.detail)} for e in events],
            }
            for job, reason, events in found
        ]
        render.print_json({"schema": SCHEMA, **values[0]} if len(values) == 1 else {"schema": SCHEMA, "jobs": values})
        return 0
    for at, (job, reason, events) in enumerate(found):
        lines = [""] if at else []
        lines += _facts(job, reason)
        for event in events:
            detail = ", ".join(f"{k} {_plain(v)}" for k, v in event.detail.items() if v not in (None, []))
            told = f"  {utc(event.at)}  {event.kind}  {render.safe(without_secrets(detail))}".rstrip()
            lines += terminal.folded(told, 4)
        print("\n".join(lines))
    return 0


def _facts(job: Job, reason: Reason | None) -> list[str]:
    from scheduler.views.job_facts import Fact, job_facts  # takes 1 ms, which `status` in a loop does not need to spend

    known = job_facts(job)
    at = next((place for place, fact in enumerate(known) if fact.name == "log"), len(known))
    facts = [
        Fact("job", f"{job.id} {without_secrets(job.spec.label)}".strip()),
        Fact("state", job.state.value),
        Fact("ended", how_it_ended(job)),
        Fact("waits", render.reason_text(reason)),
        *(fact for fact in known[:at] if fact.name != "label"),
        Fact("submitted", utc(job.submitted_at)),
        Fact("started", maybe_utc(job.started_at) or ""),
        Fact("finished", (maybe_utc(job.finished_at) or "") if job.state.ended else ""),
        Fact("ran", render.run_time(job, time.time()) if job.started_at else ""),
        *known[at:],
    ]
    lines = []
    for fact in facts:
        if fact.text:
            state = fact.text if fact.name == "state" else ""
            for text in fact.text.splitlines() if fact.name == "info" else [fact.text]:
                lines += terminal.folded(f"{fact.name:<13} {render.safe(text)}", 14, state)
    return lines


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".")
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def why(job: str, *, json: bool = False, state_file: str | None = None, config: str | None = None) -> int:
    """Print why jobs wait or how they ended, and return the exit code 0. Raises NotFound.

    For jobs that did not succeed, also prints the last lines of the log.
    """
    client = _client(state_file, config)
    until = time.monotonic() + LOOK_S
    all_found = [_looked_at(client, number, until) for number in client.select([job])]
    if json:
        from scheduler.views.log_glance import lines_of_a_failure
        from scheduler.views.predictions import why_json

        values = [why_json(one, reason, lines_of_a_failure(one), _explained(client, one)) for one, reason in all_found]
        render.print_json({"schema": SCHEMA, "jobs": values})
        return 0
    for found, reason in all_found:
        number = found.id
        state = found.state.value
        if reason is not None:
            lines = terminal.folded(f"job {number} waits ({reason.code}): {render.safe(reason.sentence)}", 2)
            if client.alive():
                from scheduler.views.predictions import explanation_lines

                lines += explanation_lines(client.explain(number), time.time())
        elif found.state.ended:
            hint = f"; {found.failure.hint}" if found.failure and found.failure.hint else ""
            lines = terminal.folded(f"job {number} {render.safe(state_text(found) + hint)}", 2, state)
        elif found.waits_in_engine:
            lines = terminal.folded(
                f"job {number} waits in the queue of {found.runner}, which chooses its GPUs", 2, state
            )
        else:
            node = f", node {render.safe(found.node)}" if found.node else ""
            gpus = gpu_ids_text(found.gpus) or "none"
            lines = terminal.folded(f"job {number} is {state} on GPU {gpus}{node}", 2, state)
        for note in found.notes:
            lines += terminal.folded(f"  {render.safe(without_secrets(note))}", 4)
        if found.failure is not None:
            lines += _card(found)
        if found.state.ended and not found.succeeded and found.log:
            lines += _tail(found)
        print("\n".join(lines))
    return 0


def _card(job: Job) -> list[str]:
    """Return what is known of a failure besides its hint: class, cause, memory, and what differs from a good run."""
    from scheduler.core.failure_card import failure_line
    from scheduler.core.run_differences import difference_lines
    from scheduler.views.job_facts import memory_text

    found = job.failure
    assert found is not None
    first = failure_line(job)
    line, memory = without_secrets(found.line), memory_text(found)
    told = (
        first,
        line if line not in first else "",
        found.error,
        memory if "peaked" not in first else "",
        *difference_lines(job),
    )
    lines: list[str] = []
    for text in filter(None, told):
        lines += terminal.folded(f"  {render.safe(without_secrets(text))}", 4)
    return lines


def _explained(client: SchedulerClient, job: Job) -> ExplanationDocument | None:
    """Return the explanation of a waiting job for JSON; None for other jobs, and without a scheduler."""
    if job.state is not JobState.PENDING or not client.alive():
        return None
    from scheduler.views.predictions import explanation_json

    return explanation_json(client.explain(job.id))


def _looked_at(client: SchedulerClient, number: int, until: float) -> tuple[Job, Reason | None]:
    """Return a job and the reason why it waits; the reason is None if the job does not wait.

    If the scheduler has not yet considered the job, first wait until it has, at most until ``until`` (monotonic
    seconds).
    """
    while True:
        found, reason, _ = client.job(number)
        if reason is None or reason.code != "new" or time.monotonic() >= until or not client.alive():
            return found, reason
        time.sleep(0.02)


def _tail(job: Job) -> list[str]:
    """Return the last lines of the log of a job that did not succeed, below a line that names the file."""
    from scheduler.views.log_glance import MOST_OF_A_FAILURE, failed_log, last_lines  # takes 3 ms

    path = failed_log(job)
    near = render.safe(render.near(path))
    try:
        last = last_lines(path, MOST_OF_A_FAILURE)
    except OSError as error:
        return terminal.folded(f"  cannot read its log {near}: {error.strerror}", 4)
    lines = terminal.folded(f"  last lines of {near}:" if last else f"  its log is empty: {near}", 4)
    for line in last:
        lines += terminal.folded(f"    {render.safe(without_secrets(line))}", 6)
    return lines
