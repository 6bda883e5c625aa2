"""Jobs, GPUs and tables as text for people, and as JSON for programs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

from scheduler.client.overview import GpuView, Overview, words_run
from scheduler.core.allowed import allowed_text, names_nodes
from scheduler.core.failure_card import failure_line
from scheduler.core.gpu import WHOLE, gpu_ids_text
from scheduler.core.job import ENDED, Failure, Job, JobState, Reason
from scheduler.core.job_text import how_it_ended, state_text
from scheduler.core.runner_kinds import kind_of
from scheduler.core.secrets import without_secrets, words_without_secrets
from scheduler.core.units import maybe_utc, mib_text, span_text, utc
from scheduler.system.terminal_text import safe as safe
from scheduler.system.terminal_text import shown
from scheduler.views import terminal
from scheduler.views.nodes import NodeView, nodes_of

if TYPE_CHECKING:
    from scheduler.views.documents import (
        Counts,
        ExpectedDocument,
        FailureDocument,
        GpuDocument,
        JobDocument,
        StatusDocument,
    )

MOST_WAITING = 20  # waiting jobs in `status`
MOST_ENDED = 10  # ended jobs in `status`
SHORTEST_NAME = 24  # columns that a shortened name keeps at least
WIDEST_COMMAND = 60  # columns up to which commands are padded
MOST_NODES = 40  # nodes in `status`
LABEL = 11  # columns of the words that begin the lines of `status`


def job_json(job: Job, reason: Reason | None = None) -> JobDocument:
    """Return a job in the form that `status`, `jobs` and `show` print as JSON (`views/documents.py`)."""
    return {
        "id": job.id,
        "state": job.state.value,
        "outcome": job.outcome.value if job.outcome else None,
        "exit_code": job.exit_code if job.state.ended else None,
        "signal": job.signal if job.state.ended else None,
        "user": job.spec.user or None,
        "priority": job.priority,
        "command": list(words_without_secrets(words_run(job))),
        "script": without_secrets(job.spec.script) or None,
        "arguments": list(words_without_secrets(job.spec.arguments)),
        "conda_env": without_secrets(job.spec.conda_env) or None,
        "allowed_gpus": None if job.allowed is None or names_nodes(job.allowed) else [int(i) for i in job.allowed],
        "allowed_nodes": [str(name) for name in job.allowed or ()] if names_nodes(job.allowed) else None,
        "need": job.need.total / 1000,
        "gpus": list(job.gpus),
        "node": job.node or None,
        "partition": job.partition or None,
        "engine_job": job.engine_job or None,
        "pid": job.process.pid if job.process else None,
        "session": job.session_name,
        "interpreter": job.interpreter or None,
        "attempt": job.attempt,
        "label": without_secrets(job.spec.label) or None,
        "reason": reason.sentence if reason else None,
        "reason_code": reason.code if reason else None,
        "failure": None if job.failure is None else failure_json(job.failure),
        "notes": [without_secrets(note) for note in job.notes],
        "submitted_at": utc(job.submitted_at),
        "started_at": maybe_utc(job.started_at),
        "finished_at": maybe_utc(job.finished_at) if job.state.ended else None,
        "log": job.log or None,
    }  # fmt: skip


def failure_json(failure: Failure) -> FailureDocument:
    """Return the cause of a failure in the form of JSON documents."""
    return {
        "class": failure.kind,
        "line": without_secrets(failure.line),
        "hint": failure.hint,
        "peak_memory": _bytes(failure.peak_mib),
        "asked_memory": _bytes(failure.asked_mib),
        "tried_memory": _bytes(failure.tried_mib),
        "others_memory": _bytes(failure.others_mib),
        "oom": cast("Literal['own', 'victim']", failure.oom) if failure.oom else None,
        "error": without_secrets(failure.error) or None,
        "good_run": failure.good_run,
        "differs": [without_secrets(text) for text in failure.differs],
    }


def _bytes(mib: int | None) -> int | None:
    return None if mib is None else mib << 20


def gpu_json(gpu: GpuView) -> GpuDocument:
    """Return a GPU in the form that `status --json` prints."""
    return {
        "index": gpu.gpu.index,
        "uuid": gpu.gpu.uuid,
        "name": gpu.gpu.name,
        "node": gpu.gpu.node or None,
        "partition": gpu.gpu.partition or None,
        "state": gpu.state,
        "paused": gpu.paused,
        "allocated": gpu.allocated,
        "memory_used": _bytes(gpu.reading.memory_used_mib if gpu.reading else None),
        "memory_total": _bytes(gpu.gpu.memory_mib),
        "memory_own": _bytes(gpu.reading.own_mib if gpu.reading else None),
        "load": gpu.reading.load if gpu.reading else None,
        "temperature": gpu.reading.temperature_c if gpu.reading else None,
        "reason": gpu.reason or None,
        "booked_outside": [{"user": one.user, "share": one.parts / WHOLE, "lease": one.lease} for one in gpu.outside],
        "jobs": list(gpu.jobs),
    }


def status_json(view: Overview, expected: Sequence[ExpectedDocument] = ()) -> StatusDocument:
    """Return the document that `status --json` prints. ``expected``: from `views/predictions.py: outlook_json`."""
    return {
        "schema": 1,
        "daemon": {
            "alive": view.alive,
            "pid": view.pid,
            "started_at": maybe_utc(view.started_at),
            "runner": view.runner or None,
        },
        "paused": view.queue_paused,
        "counts": cast("Counts", dict(view.counts)),
        "gpus": [gpu_json(gpu) for gpu in view.gpus],
        "jobs": [job_json(job, view.reasons.get(job.id)) for job in view.jobs],
        "expected": [*expected],
        "refused": [
            {
                "file": line.path,
                "line": line.number,
                "text": without_secrets(line.text),
                "reason": without_secrets(line.reason),
            }
            for line in view.refused
        ],
        "repeated_lines": view.repeated,
        "trouble": list(view.trouble),
    }


def in_pieces(value: Mapping[str, Any]) -> bytes:
    """Return an object as JSON bytes. Long lists are encoded item by item, so that other threads can run in between."""
    parts = []
    for key, inner in value.items():
        text = f"[{', '.join(map(json.dumps, inner))}]" if isinstance(inner, list) else json.dumps(inner)
        parts.append(f"{json.dumps(key)}: {text}")
    return f"{{{', '.join(parts)}}}".encode()


def print_json(value: Any) -> None:
    """Print a JSON value on stdout."""
    print(json.dumps(value, indent=1))


def run_time(job: Job, now: float) -> str:
    """Return how long the job ran, or has been running, as text; ``-`` before its start."""
    if job.started_at is None:
        return "-"
    end = job.finished_at if job.state.ended and job.finished_at is not None else now
    return span_text(end - job.started_at)


def near(path: str) -> str:
    """Return the path relative to the current folder if that is shorter, else the path unchanged.

    If the relative path would begin with ``../..``, the path also stays unchanged.
    """
    if not path:
        return path
    relative = os.path.relpath(path)
    return relative if len(relative) < len(path) and not relative.startswith("../..") else path


def gpus_text(job: Job) -> str:
    """Return the GPUs that a job has or had, as text; ``-`` for none."""
    return gpu_ids_text(job.gpus) or "-"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a table with aligned columns.

    On a terminal, states are coloured and the lines are made to fit: first the column NAME is shortened, then lines are
    cut at the right.
    """
    body = [[safe(cell) for cell in row] for row in rows]
    widths = [max(map(terminal.cells, column)) for column in zip(head, *body, strict=True)]
    most = terminal.width()
    too_much = sum(widths) + 2 * len(widths) - 2 - (most or 1 << 30)
    if too_much > 0 and "NAME" in head:
        name = head.index("NAME")
        widths[name] = max(min(SHORTEST_NAME, widths[name]), widths[name] - too_much)
        for row in body:
            row[name] = terminal.shortened(row[name], widths[name])
    state = head.index("STATE") if "STATE" in head and terminal.colours() else None
    lines = []
    for row in [list(head), *body]:
        padded = [cell + " " * (width - terminal.cells(cell)) for cell, width in zip(row, widths, strict=True)]
        line = terminal.cut("  ".join(padded).rstrip(), most)
        if state is not None:
            start = sum(map(len, padded[:state])) + 2 * state
            if line.startswith(row[state], start):
                line = line[:start] + terminal.painted(row[state]) + line[start + len(row[state]) :]
        lines.append(line)
    return lines


def counts_text(counts: Mapping[str, int]) -> str:
    """Return a text such as ``3 pending, 2 running, 40 done``. States without jobs are left out."""
    return ", ".join(f"{number} {state}" for state, number in counts.items() if number) or "none"


def command_lines(jobs: Sequence[Job], reasons: Mapping[int, Reason], alive: bool = True) -> list[str]:
    """Return a line for each job of `gpujob run`: ``[→] python train.py → GPU 0 → Running (PID 4711)  job 1``.

    ``reasons``: job id → why the job waits. ``alive``: whether a daemon runs.
    """
    rows = []
    for job in jobs:
        mark, words = "[!]", state_text(job).capitalize()
        if job.state is JobState.PENDING:
            mark, words = "[ ]", f"Pending{_short_reason(reasons.get(job.id), alive)}"
        elif job.state.holds_gpus:
            mark, words = "[→]", f"Running (PID {job.process.pid})" if job.process else "Starting"
        elif job.succeeded:
            mark, words = "[✓]", "Completed"
        gpu = f"GPU {gpu_ids_text(job.gpus) or 'N/A'}"
        rows.append((mark, job.spec.written_text, gpu, words, job.id))
    wide = max((terminal.cells(safe(text)) for _, text, *_ in rows), default=0)
    pad = min(wide, WIDEST_COMMAND)
    return [
        f"{mark} {safe(text)}{' ' * max(0, pad - terminal.cells(safe(text)))} → {gpu} → {safe(words)}  job {number}"
        for mark, text, gpu, words, number in rows
    ]


def _short_reason(reason: Reason | None, alive: bool) -> str:
    """Return in brackets why a job waits. ``alive``: whether a daemon runs.

    For the reason code ``behind``, the text says only how many jobs are before this job.
    """
    if not alive:
        return " (no scheduler is running)"
    if reason is None:
        return ""
    return f" ({reason.sentence.partition(';')[0] if reason.code == 'behind' else reason.sentence})"


def jobs_lines(jobs: Sequence[Job], reasons: Mapping[int, Reason], now: float) -> list[str]:
    """Return the lines of the table of ``gpujob jobs``, at time ``now`` (s since 1970)."""
    rows = [
        (
            job.id, job.state.value, how_it_ended(job), job.priority, job.spec.shown_words(), job.need,
            gpus_text(job), run_time(job, now), _told(reasons.get(job.id), job),
        )
        for job in jobs
    ]  # fmt: skip
    return _jobs_table(("ID", "STATE", "HOW", "PRIORITY", "NAME", "NEED", "GPU", "TIME", "REASON"), rows, jobs)


def _jobs_table(head: Sequence[str], rows: Iterable[Sequence[object]], jobs: Sequence[Job]) -> list[str]:
    """Return the lines of a table with a row for each job; with jobs of several users, the second column names the user."""
    if not any(job.spec.user for job in jobs):
        return table(head, rows)
    owned = [(row[0], job.spec.user or "-", *row[1:]) for row, job in zip(rows, jobs, strict=True)]
    return table((head[0], "USER", *head[1:]), owned)


def reason_text(reason: Reason | None) -> str:
    """Return code and sentence of a reason to wait, "" without a reason."""
    return "" if reason is None else f"{reason.code}: {reason.sentence}"


def _told(reason: Reason | None, job: Job) -> str:
    """Return why a job waits, and why it or its earlier attempt failed."""
    return "; ".join(filter(None, (reason_text(reason), failure_line(job))))


def status_lines(
    view: Overview,
    state_file: str,
    now: float,
    commands: tuple[Sequence[Job], Mapping[int, Reason]] | None = None,
    expected: Mapping[int, str] | None = None,
) -> list[str]:
    """Return the lines that `status` prints.

    ``expected``: id of a running job → its expected end, of a waiting job → its expected start, as texts.

    ``now``: seconds since 1970. ``commands``: for a scheduler that `gpujob run` has started, all its jobs, and job id →
    why the job waits; None for any other scheduler.
    """
    lines = terminal.folded(f"scheduler  {_daemon(view, now)}  ({safe(state_file)})", LABEL)
    lines += terminal.folded(f"jobs       {counts_text(view.counts)}", LABEL)
    if view.set_aside:
        name = safe(os.path.basename(view.set_aside))
        text = f"state file an invalid edit was ignored, pauses unchanged; your edit is kept as {name}; delete that file to clear this line"
        lines += terminal.folded(text, LABEL)
    for text in view.trouble:
        lines += terminal.folded(f"trouble    {safe(text)}", LABEL)
    if view.queue_paused:
        lines.append(f"queue      {terminal.painted('PAUSED')}")
    nodes = nodes_of(view.gpus)
    if nodes:
        lines += ["", *_node_lines(nodes)]
    elif view.gpus:
        rows = []
        for gpu in view.gpus:
            share = f" ({gpu.allocated:.0%})" if gpu.state == "BUSY" else ""
            rows.append(
                (gpu.gpu.index, gpu.state + share, f"{gpu.allocated:g}", _memory(gpu), _load(gpu), _ids(gpu.jobs),
                 gpu.gpu.name, _note(gpu, view.held))
            )  # fmt: skip
        lines += ["", *table(("GPU", "STATE", "ALLOCATED", "MEMORY", "LOAD", "JOBS", "NAME", ""), rows)]
    if commands is not None:
        lines += ["", *command_lines(*commands, alive=view.alive)] if commands[0] else []
        return [*lines, *_refused_lines(view)]
    running = [job for job in view.jobs if job.state.holds_gpus]
    if running:
        on_gpus = [
            (job.id, job.state.value, job.spec.shown_words(), gpus_text(job), _place(job, bool(nodes)),
             run_time(job, now), near(job.log), without_secrets(job.notes[-1]) if job.notes else "") for job in running
        ]  # fmt: skip
        head = ("RUNNING", "STATE", "NAME", "GPU", "NODE" if nodes else "PID", "TIME", "LOG", "")
        lines += ["", *_jobs_table(*_with_times(head, "ENDS", 6, on_gpus, running, expected), running)]
    waiting = [job for job in view.jobs if job.state is JobState.PENDING]
    if waiting:
        waiting.sort(key=lambda job: job.turn)
        waiting_rows = [
            (
                job.id,
                job.priority,
                job.spec.shown_words(),
                job.need,
                _allowed(job),
                _told(view.reasons.get(job.id), job),
            )
            for job in waiting
        ]
        waiting_head = ("WAITING", "PRIORITY", "NAME", "NEED", "ALLOWED", "REASON")
        timed = _with_times(waiting_head, "STARTS", 5, waiting_rows, waiting, expected)
        lines += ["", *_jobs_table(*timed, waiting)]
        if view.counts["pending"] > len(waiting):
            more = f"… and {view.counts['pending'] - len(waiting)} more: gpujob jobs --state pending"
            lines += terminal.folded(shown(more), 2)
    ended = [job for job in view.jobs if job.state.ended][:MOST_ENDED]
    if ended:
        ended_head: tuple[str, ...] = ("ENDED", "STATE", "HOW", "NAME", "GPU", "TIME", "LOG")
        ended_rows: list[Sequence[object]] = [
            (job.id, job.state.value, how_it_ended(job), job.spec.shown_words(), gpus_text(job), run_time(job, now), near(job.log))
            for job in ended
        ]  # fmt: skip
        causes = [failure_line(job) for job in ended]
        if any(causes):
            ended_head = (*ended_head, "")
            ended_rows = [(*row, cause) for row, cause in zip(ended_rows, causes, strict=True)]
        lines += ["", *_jobs_table(ended_head, ended_rows, ended)]
        older = sum(view.counts.get(state.value, 0) for state in ENDED) - len(ended)
        if older > 0:
            lines += terminal.folded(shown(f"… and {older} more: gpujob jobs"), 2)
    return [*lines, *_refused_lines(view)]


def _with_times(
    head: Sequence[str],
    name: str,
    at: int,
    rows: Sequence[Sequence[object]],
    jobs: Sequence[Job],
    expected: Mapping[int, str] | None,
) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
    """Return a table with a column of expected times before column ``at``; without it if no time is known."""
    texts = [(expected or {}).get(job.id, "-") for job in jobs]
    if all(text == "-" for text in texts):
        return head, rows
    return (*head[:at], name, *head[at:]), [(*row[:at], text, *row[at:]) for row, text in zip(rows, texts, strict=True)]


def _place(job: Job, on_nodes: bool) -> object:
    """Return the pid of a job; on a cluster the node and the cluster's id of the job."""
    if not on_nodes:
        return job.process.pid if job.process else "-"
    return f"{job.node} (job {job.engine_job})" if job.node else "-"


def _node_lines(nodes: Sequence[NodeView]) -> list[str]:
    rows = [
        (
            node.name, node.partition, gpu_ids_text(gpu.gpu.index for gpu in node.gpus), node.types,
            f"{node.allocated:g} of {len(node.gpus)}", node.states, _ids(node.jobs), node.reason,
        )
        for node in nodes[:MOST_NODES]
    ]  # fmt: skip
    lines = table(("NODE", "PARTITION", "GPUS", "TYPE", "ALLOCATED", "STATE", "JOBS", ""), rows)
    if len(nodes) > MOST_NODES:
        lines += terminal.folded(shown(f"… and {len(nodes) - MOST_NODES} more nodes: gpujob status --json"), 2)
    return lines


def _refused_lines(view: Overview) -> list[str]:
    lines: list[str] = []
    if view.refused:
        lines += ["", "refused lines:"]
        for line in view.refused:
            lines += terminal.folded(
                f"  {safe(os.path.basename(line.path))}:{line.number}: {safe(without_secrets(line.reason))}", 4
            )
    if view.repeated:
        lines += ["", *terminal.folded(f"{view.repeated} line(s) repeat an earlier line and do not run again", 2)]
    return lines


def _daemon(view: Overview, now: float) -> str:
    """Return as text whether a scheduler runs, for how long, and how it runs jobs."""
    if not view.alive:
        return "not running"
    since = "" if view.started_at is None else f" for {span_text(now - view.started_at)}"
    how = kind_of(view.runner).in_words
    return f"running{since}, pid {view.pid}" + (f", {how}" if how else "")


def _memory(gpu: GpuView) -> str:
    """Return the memory of a GPU as the text ``USED of TOTAL``.

    Without a reading, returns ``? of TOTAL``, or ``-`` if the total is also unknown.
    """
    if gpu.reading is None or gpu.reading.memory_used_mib is None:
        return "-" if gpu.gpu.memory_mib is None else f"? of {mib_text(gpu.gpu.memory_mib)}"
    return f"{mib_text(gpu.reading.memory_used_mib)} of {mib_text(gpu.reading.memory_total_mib or 0)}"


def _load(gpu: GpuView) -> str:
    return "-" if gpu.reading is None or gpu.reading.load is None else f"{gpu.reading.load:.0%}"


def _note(gpu: GpuView, held: Mapping[int, str]) -> str:
    notes = [f"in use by {held[gpu.gpu.index]}"] if gpu.gpu.index in held else []
    if gpu.reason:
        notes.append(gpu.reason)
    return "; ".join(notes)


def _ids(jobs: Sequence[int]) -> str:
    return ",".join(map(str, jobs)) or "-"


def _allowed(job: Job) -> str:
    return "any" if job.allowed is None else allowed_text(job.allowed)
