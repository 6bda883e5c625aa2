"""The checks of `gpujob doctor`, which examine the machine and a scheduler's state folder and change nothing.

A check is a function that takes an `Examination` and returns findings. The checks run in parallel under one time limit,
so that a disk or program that hangs affects only its own check.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from functools import partial

from scheduler.doctor.check_runner import Running, crowded
from scheduler.doctor.clock import check_clock
from scheduler.doctor.cluster import check_cluster
from scheduler.doctor.disks import check_log_folder, check_state_folder
from scheduler.doctor.examination import ANSWER_S, Examination
from scheduler.doctor.finding import Finding
from scheduler.doctor.gpus import check_gpus
from scheduler.doctor.inotify import check_inotify
from scheduler.doctor.inputs import check_config, check_inputs
from scheduler.doctor.leftovers import check_leftovers
from scheduler.doctor.logout import check_logout
from scheduler.doctor.private_files import check_files
from scheduler.doctor.screen import check_screen
from scheduler.doctor.store import check_scheduler, check_store, take_running_settings

Check = Callable[[Examination], list[Finding]]
# Name of the check, what is unknown if it does not answer in time, and its function; in the order of the output.
CHECKS: tuple[tuple[str, str, Check], ...] = (
    ("config", "whether it can be read", check_config),
    ("state folder", "what disk it is on", check_state_folder),
    ("log folder", "what disk it is on", check_log_folder),
    ("files", "whether they are private", check_files),
    ("jobs file", "whether it can be read", check_inputs),
    ("scheduler", "whether one runs", check_scheduler),
    ("leftovers", "whether there are leftover processes or files", check_leftovers),
    ("logout", "whether a logout ends the scheduler", check_logout),
    ("screen", "whether it is installed", check_screen),
    ("inotify", "whether files can be watched", check_inotify),
    ("clock", "whether it is synchronised", check_clock),
    ("NVML", "whether it answers", check_gpus),
    ("cluster", "whether it answers", check_cluster),
)


def findings(exam: Examination) -> list[Finding]:
    """Run all checks; return the findings in the order in which they are shown. Never raises."""
    until = exam.until
    first = Running("store", "whether it is intact", partial(check_store, exam))  # the other checks need its results
    first.wait(min(until, time.monotonic() + ANSWER_S))
    if first.ended:
        take_running_settings(exam)
    running = [Running(name, what, partial(check, exam)) for name, what, check in CHECKS]
    found = {one.check: one.result(until) for one in running}
    exam.close()
    out = []
    if any(one.in_turn for one in (first, *running)):
        out.append(crowded(*map(resource.getrlimit, (resource.RLIMIT_NPROC, resource.RLIMIT_AS))))
    for name, ones in found.items():
        if name == "scheduler":
            out += first.result(until)
        out += ones
    return out
