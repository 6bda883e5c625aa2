"""The verb `plan`: the predicted timeline of the queue; and what `submit --dry-run` prints."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import replace

from scheduler.client.client import SchedulerClient
from scheduler.client.locate import client_of, state_file_for
from scheduler.client.outlook import Explanation
from scheduler.core.errors import Refused, UsageError
from scheduler.core.gpu import gpu_ids_text
from scheduler.core.job import JobSpec, JobState
from scheduler.core.model_table import ModelTable
from scheduler.system.terminal_text import safe
from scheduler.views import render, terminal
from scheduler.views.plan_timeline import plan_lines, plan_svg
from scheduler.views.predictions import explanation_lines, plan_json


def plan(*, json: bool = False, svg: bool = False, state_file: str | None = None, config: str | None = None) -> int:
    """Print when jobs are expected to start and end, as a timeline, JSON or SVG, and return the exit code 0.

    Raises UsageError if both ``json`` and ``svg`` are given.
    """
    if json and svg:
        raise UsageError("--json and --svg exclude each other", do="leave one of them out")
    client = client_of(state_file_for(state_file, config))
    if not client.alive():
        print("gpujob: no scheduler is running, so nothing can be predicted", file=sys.stderr)
        if not json and not svg:
            return 0
    outlook = client.outlook()
    if json:
        render.print_json(plan_json(outlook))
        return 0
    jobs = client.known(outlook.jobs)
    if svg:
        print(plan_svg(outlook, jobs, client.gpus()), end="")
        return 0
    view = client.overview(0)
    waiting = view.counts[JobState.PENDING.value]
    more = waiting - sum(one.start is not None for one in outlook.jobs.values())
    print("\n".join(plan_lines(outlook, jobs, max(0, more))))
    return 0


def dry_run(client: SchedulerClient, spec: JobSpec, environment: Mapping[str, str], table: ModelTable) -> int:
    """Print what would happen to a job if it were submitted now, and return the exit code 0.

    Raises Refused if the job could never start.
    """
    found = client.preview(spec, environment, table)
    now = time.time()
    if found.would == "never" and found.reason_code == "depends":
        lines = [f"the job would be skipped: {found.reason}"]
    elif found.would == "never":
        raise Refused(found.reason, do=found.remedy)
    elif found.would == "start":
        where = f" on GPU {gpu_ids_text(found.gpus)}" if found.gpus else ""
        lines = [f"the job would start now{where}{', and fail immediately: ' if found.doubt else ''}{found.doubt}"]
    else:
        lines = [f"the job would wait ({found.reason_code}): {found.reason}"]
        lines += [f"when it starts, it fails immediately: {found.doubt}"] if found.doubt else []
    print("\n".join(piece for line in lines for piece in terminal.folded(safe(line), 2)))
    explained = found.explanation
    if explained is not None and found.would == "start":  # nothing keeps it
        explained = Explanation(expected=explained.expected and replace(explained.expected, start=None))
    more = [] if explained is None else explanation_lines(explained, now)
    more += [piece for note in found.notes for piece in terminal.folded(f"  {safe(note)}", 4)]
    if more:
        print("\n".join(more))
    return 0
