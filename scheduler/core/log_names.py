"""What the logs of a job are called, and what their names tell."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.core.errors import UsageError
from scheduler.core.job import Event, Job

LONGEST_NAME = 200  # bytes, to which letters and endings are added


def check_log_name(name: str) -> None:
    """Raises UsageError where no log can have this name."""
    length = len(name.encode("utf-8", "surrogateescape"))
    if (
        "/" in name
        or name in (".", "..")
        or any(char < " " or char == "\x7f" for char in name)
        or not 0 < length <= LONGEST_NAME
    ):
        raise UsageError(
            f"a log's name is 1 to {LONGEST_NAME} bytes without / or control characters", do="write a plain file name"
        )


def log_name(job: Job, stamp: str, number: int = 1, letters: str = "") -> str:
    """``job_<id>_<stamp>.log``; attempts after the first add ``_a2``. ``stamp`` is YYYYmmdd_HHMMSS, local time.

    ``number``: the first, second, … choice, where a file of the name is there already: of another job, or of another scheduler.
    A job that names its log itself gets that very name, ``run.log``; later attempts and choices add to it: ``run_a2.log``. Those of
    `ts` get ``<name>.<letters>``. What is packed ends in ``.gz``: in screen mode nothing is.
    """
    packed = ".gz" if job.spec.gzip and job.runner != "screen" else ""
    if job.spec.log_name and job.spec.source == "ts":
        return f"{job.spec.log_name}.{letters}{packed}"
    again = f"_a{job.attempt}" if job.attempt > 1 else ""
    again += f"_{number}" if number > 1 else ""
    if job.spec.log_name:
        stem, dot, ending = job.spec.log_name.rpartition(".")
        name = f"{stem}{again}{dot}{ending}" if stem else f"{job.spec.log_name}{again}"
        return f"{name}{packed}"
    return f"job_{job.id}_{stamp}{again}.log{packed}"


def is_packed(log: str) -> bool:
    """Whether what stands in this log is packed, as its name tells: also of a job that now runs in a terminal."""
    return log.endswith(".gz")


def errors_of(log: str) -> str:
    """Where what goes to stderr is kept, of a job that keeps it apart."""
    return f"{log}.e"


def stderr_log(job: Job) -> str:
    """The file of the job's stderr, of one that keeps it apart and has begun; else empty."""
    return errors_of(job.log) if job.spec.stderr_apart and job.log and job.runner != "screen" else ""


def logs_of(job: Job, events: Iterable[Event]) -> dict[int, str]:
    """Attempt → its log, as far as job and story tell: each attempt has one of its own."""
    found = {
        int(event.detail["attempt"]): str(event.detail["log"])
        for event in events
        if event.detail.get("log") and event.detail.get("attempt")
    }
    if job.log:
        found[job.attempt] = job.log
    return found
