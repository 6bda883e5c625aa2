"""The unfinished jobs as a shell script that queues them again (setting `save_list`, variable TS_SAVELIST)."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Sequence

from scheduler.core.job import Job
from scheduler.core.secrets import without_secrets


def script_of(jobs: Iterable[Job], ended: Iterable[Job], now: float) -> str:
    """Return a shell script that queues the unfinished jobs again.

    ``jobs``: the waiting and running jobs in queue order. ``ended``: jobs that appear only in comments of the script.
    ``now``: seconds since 1970. Each line queues one job with `ts`, in the job's folder and with the job's options. The
    line saves the new job id in a shell variable. The lines of dependent jobs use this variable.
    """
    lines = [
        "#!/bin/sh",
        f"# Unfinished jobs when the scheduler ended at {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now))}.",
        "# The scheduler keeps its queue and continues it at the next start: this script is for another server. The jobs get the",
        "# environment of the user who runs the script. Set TS=PROGRAM to use another ts.",
        'TS="${TS:-ts}"',
    ]
    lines += [
        f"# {job.id} {job.state.value} {without_secrets(shlex.join(_command(job)))}".replace("\n", " ") for job in ended
    ]
    known: set[int] = set()
    for job in _dependencies_first(list(jobs)):
        lines.append(f"cd {shlex.quote(job.spec.cwd or '/')} && {_words(job, known)}")
        known.add(job.id)
    return "\n".join(lines) + "\n"


def _dependencies_first(jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs in the same order, except that each job comes after the jobs that it depends on.

    In the script, the line of a job uses the new ids of the jobs that it depends on.
    """
    by_id = {job.id: job for job in jobs}
    placed: dict[int, Job] = {}
    for first in jobs:
        ahead = [first]
        while ahead:  # not recursive: a chain of dependencies may be longer than Python's stack
            job = ahead[-1]
            open_ = [by_id[one] for one in (*job.spec.after, *job.spec.after_ok) if one in by_id and one not in placed]
            if open_:
                ahead.append(open_[0])
            else:
                placed.setdefault(job.id, ahead.pop())
    return list(placed.values())


def _words(job: Job, known: set[int]) -> str:
    spec = job.spec
    words = ['"$TS"']
    flags = "".join(
        letter
        for letter, wanted in (
            ("n", spec.output == "none"),
            ("E", spec.stderr_apart),
            ("z", spec.gzip),
            ("m", bool(spec.mail_to)),
        )
        if wanted
    )
    words += [f"-{flags}"] if flags else []
    words += ["-L", shlex.quote(spec.label)] if spec.label else []
    words += ["-O", shlex.quote(spec.log_name)] if spec.log_name not in ("", "ts-out") else []
    words += ["-N", str(job.need.slots)] if job.need.slots > 1 else []
    if job.need.by_name:
        words += ["-g", ",".join(map(str, spec.on))]
    elif job.need.count:
        words += ["-G", str(job.need.count)]
    for option, parents in (("-D", spec.after), ("-W", spec.after_ok)):
        waits_for = [parent for parent in parents if parent in known]  # the other dependencies are not in the script
        if waits_for:
            words += [option, ",".join(f'"$job{parent}"' for parent in waits_for)]
    command = _command(job)
    words += ["--"] if command[0].startswith("-") else []
    words.append(shlex.join(command))
    line = " ".join(words)
    return (
        f'{line} && job{job.id}=$("$TS" -q)'
        if spec.output == "none"
        else f'job{job.id}=$({line}) && echo "$job{job.id}"'
    )


def _command(job: Job) -> tuple[str, ...]:
    return (job.spec.script, *job.spec.arguments) if job.spec.script else job.spec.arguments
