"""File names of the logs of jobs.

Two modules recognize these names: `daemon/retention.py` (old logs) and `recovery/job_reconstruction.py` (lost jobs).
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.core.errors import UsageError
from scheduler.core.job import Event, Job

LONGEST_NAME = 200  # bytes of a name chosen by the user; letters, numbers and endings are added to it


def check_log_name(name: str) -> None:
    """Raise UsageError if ``name`` cannot be the file name of a log."""
    length = len(name.encode("utf-8", "surrogateescape"))
    if (
        "/" in name
        or name in (".", "..")
        or any(char < " " or char == "\x7f" for char in name)
        or not 0 < length <= LONGEST_NAME
    ):
        raise UsageError(
            f"cannot use this log name: it must have 1 to {LONGEST_NAME} bytes, and neither / nor control characters",
            do="write a plain file name",
        )


def log_name(job: Job, stamp: str, number: int = 1, letters: str = "") -> str:
    """Return the file name of a job's log: ``job_<id>_<stamp>.log``. From the second attempt on, ``_a2`` is added.

    ``stamp``: local time as YYYYmmdd_HHMMSS. ``number``: 1, or 2, 3, … (added as ``_2``, …) if the names with lower
    numbers are in use. If the job names its log ``run.log``, the second attempt gets ``run_a2.log``. The log of a `ts`
    job is ``<name>.<letters>``. The name of a packed log ends in ``.gz``; the log of a terminal is not packed.
    """
    packed = ".gz" if job.spec.gzip and job.runner_kind.packs_logs else ""
    if job.spec.log_name and job.spec.source == "ts":
        return f"{job.spec.log_name}.{letters}{packed}"
    again = f"_a{job.attempt}" if job.attempt > 1 else ""
    again += f"_{number}" if number > 1 else ""
    if job.spec.log_name:
        stem, dot, ending = job.spec.log_name.rpartition(".")
        name = f"{stem}{again}{dot}{ending}" if stem else f"{job.spec.log_name}{again}"
        return f"{name}{packed}"
    return f"job_{job.id}_{stamp}{again}.log{packed}"


def user_logs(home: str) -> str:
    """Return the folder for the logs of a user's jobs in a scheduler of several users. ``home``: home folder of the user."""
    return f"{home}/gpujob/logs"


def is_packed(log: str) -> bool:
    """Return whether a log is packed (gzip). The name of the log decides.

    The job's present options do not tell whether the log of an earlier attempt is packed, because that attempt may have
    used another runner.
    """
    return log.endswith(".gz")


def errors_of(log: str) -> str:
    """Return the path of the separate stderr file that belongs to ``log``."""
    return f"{log}.e"


def stderr_log(job: Job) -> str:
    """Return the path of the job's separate stderr file; empty if the job has no such file or has not started."""
    return errors_of(job.log) if job.spec.stderr_apart and job.log and not job.runner_kind.terminal else ""


def logs_of(job: Job, events: Iterable[Event]) -> dict[int, str]:
    """Return attempt → path of its log.

    The paths come from ``job`` (last attempt) and ``events``. An attempt is left out if no path is found there.
    """
    found = {
        int(event.detail["attempt"]): str(event.detail["log"])
        for event in events
        if event.detail.get("log") and event.detail.get("attempt")
    }
    if job.log:
        found[job.attempt] = job.log
    return found
