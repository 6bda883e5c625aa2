"""Text forms of `ts` jobs: the list, JSON, tab-separated lines and details.

The columns are those of GPU Task Spooler, the program that `gpujob ts` replaces.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from scheduler.core.job import Job, JobState
from scheduler.core.secrets import without_secrets, words_without_secrets
from scheduler.system.terminal_text import safe

SHORTEST = 20
MOST_LABEL = 20


def state_of(job: Job) -> str:
    """Return the job's state in the words of GPU Task Spooler: queued, allocating, running, finished or skipped."""
    if job.state is JobState.PENDING:
        return "allocating" if job.need.count and not job.reason_code else "queued"
    if job.state is JobState.SKIPPED:
        return "skipped"
    return "finished" if job.state.ended else "running"


def output_of(job: Job) -> str:
    """Return the path of the job's output file as the list shows it, or a placeholder such as ``(file)``."""
    if job.spec.output == "none":
        return "stdout"
    if job.state is JobState.PENDING:
        return "(file)"
    if job.log:
        return job.log
    return "(no output)" if job.state.ended else "(...)"


def file_of(job: Job) -> str:
    """Return the path of the job's output file for the JSON form; empty if there is none."""
    return "" if job.spec.output == "none" or job.state is JobState.PENDING else job.log


def level_of(job: Job) -> str:
    """Return the error level of a finished job; empty for all other jobs."""
    return "" if not job.state.ended or job.state is JobState.SKIPPED else str(job.error_level)


def seconds_of(job: Job) -> float | None:
    """Return how many seconds a finished job ran, 0 if it never started; None for all other jobs."""
    if not job.state.ended or job.state is JobState.SKIPPED:
        return None
    if job.started_at is None or job.finished_at is None:
        return 0.0
    return max(0.0, job.finished_at - job.started_at)


def time_text(seconds: float | None) -> str:
    """Return a duration as ``%5.2f`` with the unit s, m, h or d; empty for None."""
    if seconds is None:
        return ""
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("m", 60.0)):
        if seconds >= length:
            return f"{seconds / length:5.2f}{unit}"
    return f"{seconds:5.2f}s"


def command_of(job: Job) -> str:
    """Return the words of the job's command, joined by blanks as in GPU Task Spooler, with secrets masked."""
    return " ".join(
        words_without_secrets((job.spec.script, *job.spec.arguments) if job.spec.script else job.spec.arguments)
    )


def parents_of(job: Job) -> str:
    """Return the job's dependencies in the form ``[0,1]&& ``; empty if there are none."""
    parents = dict.fromkeys((*job.spec.after, *job.spec.after_ok))
    return f"[{','.join(map(str, parents))}]&& " if parents else ""


def shortened(text: str, most: int) -> str:
    """Return ``text``. A text longer than ``most`` is cut to its first ``most`` - 5 characters and ``...``."""
    return text if len(text) <= most else f"{text[: most - 5]}..."


def header(busy: int, slots: int, gpus: bool) -> str:
    """Return the header of the list. ``busy``: number of slots in use.

    The header contains no state such as ``running``, so a text search for a state finds only jobs.
    """
    between = "GPUs  " if gpus else ""
    return f"{'ID':<4} {'State':<10} {'Output':<20} {'E-Level':<8} {'Time':<6} {between}Command [run={busy}/{slots}]"


def row(job: Job, gpus: bool, width: int) -> str:
    """Return the line of a job in the list. ``width``: columns of the terminal, 0 if stdout is no terminal."""
    count = f"{job.need.count:<5} " if gpus else ""
    line = f"{job.id:<4} {state_of(job):<10} {shortened(safe(output_of(job)), 20):<20} {level_of(job):<8} {time_text(seconds_of(job)):<6} {count}"
    label = f"[{safe(shortened(without_secrets(job.spec.label), MOST_LABEL))}]" if job.spec.label else ""
    before = f"{parents_of(job)}{label}"
    room = max(SHORTEST, width - len(line) - len(before) - 1)
    return f"{line}{before}{safe(shortened(command_of(job), room))}"


def terminal_width() -> int:
    """Return the columns of the terminal on stdout, 0 if stdout is no terminal."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout.isatty() else 0
    except (OSError, ValueError):
        return 0


def as_json(jobs: Sequence[Job], gpus: bool) -> str:
    """Return a JSON array on one line, with an object for each job. Time_ms is in milliseconds.

    E-Level and Time_ms are null unless the job has finished.
    """
    import json

    objects = []
    in_utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"  # else: non-ASCII is escaped
    for job in jobs:
        ended = job.state.ended and job.state is not JobState.SKIPPED
        seconds = seconds_of(job)
        one = {
            "ID": job.id,
            "State": state_of(job),
            "Output": file_of(job),
            "E-Level": job.error_level if ended else None,
            "Time_ms": None if seconds is None else round(seconds * 1000, 3),
            **({"GPUs": job.need.count} if gpus else {}),
            "Command": command_of(job),
        }
        objects.append(json.dumps(one, ensure_ascii=not in_utf8))
    return f"[{','.join(objects)}]"


_ESCAPES = {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"}


def as_tabs(jobs: Sequence[Job], gpus: bool) -> list[str]:
    """Return a tab-separated line for each job, with the fields that GPU Task Spooler prints for a finished job.

    The fields are id, state, output, error level, time, its unit, number of GPUs (only with ``gpus``), dependencies,
    label and command. Nothing is shortened; a field without a value is empty.
    """
    lines = []
    for job in jobs:
        taken = time_text(seconds_of(job)).strip()
        cells = [str(job.id), state_of(job), output_of(job), level_of(job), taken[:-1], taken[-1:]]
        cells += [str(job.need.count)] if gpus else []
        cells += [parents_of(job).strip(), without_secrets(job.spec.label), command_of(job)]
        lines.append("\t".join(safe("".join(_ESCAPES.get(char, char) for char in cell)) for cell in cells))
    return lines


def details(job: Job, gpus: bool, now: float) -> list[str]:
    """Return the lines that `ts -i` prints about a job. ``now``: seconds since 1970 (UTC)."""
    lines = ["Environment:", *job.spec.info.rstrip("\n").split("\n")] if job.spec.info else []
    if job.state is JobState.SKIPPED:
        lines.append("Exit status: skipped")
        lines += [f"Why: {note}" for note in job.notes]
    elif job.state.ended:
        if job.exit_code is not None:
            lines.append(f"Exit status: died with exit code {job.exit_code}")
        elif job.signal is not None:
            lines.append(f"Exit status: killed by signal {job.signal}")
        else:
            lines.append(f"Exit status: died with exit code -1 ({'; '.join(job.notes) or job.state.value})")
    lines.append(f"Command: {parents_of(job)}{command_of(job)}")
    lines.append(f"Slots required: {job.need.slots or 1}")
    if gpus:
        lines.append(f"GPUs required: {job.need.count}")
        lines.append(f"GPU IDs: {','.join(map(str, job.gpus)) or '-1'}")
    if job.spec.stderr_apart and job.log:
        lines.append(f"Errors: {job.log}.e")
    lines.append(f"Enqueue time: {time.ctime(job.submitted_at)}")
    if job.started_at is not None:
        lines.append(f"Start time: {time.ctime(job.started_at)}")
        if job.state.ended and job.finished_at is not None:
            lines.append(f"End time: {time.ctime(job.finished_at)}")
            lines.append(f"Time run: {job.finished_at - job.started_at:f}s")
        else:
            lines.append(f"Time running: {max(0.0, now - job.started_at):f}s")
    return [safe(without_secrets(line)) for line in lines]
