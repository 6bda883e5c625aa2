"""Prepares the starts of placed jobs: command, environment, log, resource limits."""

from __future__ import annotations

import os
import random
import resource
import string
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from scheduler.core.config import Config
from scheduler.core.decision_pass import Plan
from scheduler.core.errors import DECIDE_ANEW, StoreTrouble
from scheduler.core.job import Job
from scheduler.core.launch import GPU_PLACEHOLDER, Found, Launch, launch_of
from scheduler.core.log_names import errors_of, log_name
from scheduler.core.observations import Now
from scheduler.core.screen_names import session_name
from scheduler.daemon.context import Context
from scheduler.daemon.program_lookup import ProgramLookup, UserProgramLookup
from scheduler.environments.resolve import Missing, names_devices
from scheduler.runners import exec_limited
from scheduler.system.proc import boot_id

_LETTERS = string.ascii_letters + string.digits
ON_A_NODE = "on a cluster the output of a job goes to its log, written by its node: {} has no effect"
NO_LIMIT = "mem= and cpus= do not limit this job: only the scheduler of all users can set such limits (gpujob system)"
NO_CGROUPS = (
    "mem= and cpus= do not limit this job: the service has no cgroups here; it gets them from systemd (Delegate=yes)"
)
ITS_TERMINAL = "in a screen session the output of a job goes to its terminal and log: {} has no effect"


class LaunchPreparer:
    """Prepares launches.

    ``limits``: the resource limits that jobs inherit from this process, as resource → (soft, hard).
    """

    def __init__(
        self,
        context: Context,
        lookup: ProgramLookup | UserProgramLookup,
        runner: str,
        limits: dict[int, tuple[int, int]],
    ) -> None:
        self._context, self._lookup, self._runner, self._limits = context, lookup, runner, limits

    def prepare(
        self, plan: Plan, ordinals: Mapping[int, int | str], now: Now, bound_to: Callable[[Job], str]
    ) -> list[tuple[Job, Launch]]:
        """Return (job, launch) for each job that the plan starts, and set the job's log, command and session name.

        ``ordinals``: GPU index → the driver's number of this GPU, for each GPU whose two numbers differ. ``bound_to``: returns the node of a
        cluster that must run a job; empty for any. Raises
        StoreTrouble with the code DECIDE_ANEW if a file that a job needs has disappeared.
        """
        launches = []
        config = self._context.config
        stamp = time.strftime("%Y%m%d_%H%M%S", time.localtime(now.wall))
        boot = boot_id()
        taken: set[str] = set()  # log paths of this pass; the files do not exist yet
        for job in plan.starts:
            found = self._lookup.found_for(job)
            if isinstance(found, Missing):  # it disappeared after `decide` had checked
                raise StoreTrouble(f"job {job.id}: {found.sentence}", code=DECIDE_ANEW)
            job.runner = self._runner
            kind = job.runner_kind
            if not kind.packs_logs:
                _say_streams(job)
            unlimited = NO_CGROUPS if self._context.shared else NO_LIMIT
            if (job.spec.mem_mib or job.spec.cpus) and not self._context.limits_jobs and unlimited not in job.notes:
                job.notes = (*job.notes, unlimited)
            job.log = _free_log(job, config.log_dir, stamp, taken, look=not self._context.shared)
            taken.add(job.log)
            job.boot = boot
            if self._context.shared:  # the agent of the user completes the launch: it may read the user's files
                launch = launch_of(job, found, mode="physical", state_file="", cwd="", ordinals=ordinals)
                launch = replace(launch, ordinals=ordinals)
            else:
                launch = complete_launch(job, found, config, self._context.folder, ordinals, self._limits)
            if not kind.owns_gpus:
                launch = replace(launch, node=bound_to(job))
            job.argv = launch.words
            job.interpreter = found.interpreter
            job.session = session_name(job.id, job.gpus, job.argv) if kind.terminal else None
            launches.append((job, launch))
        return launches


def complete_launch(
    job: Job,
    found: Found,
    config: Config,
    folder: str,
    ordinals: Mapping[int, int | str],
    limits: dict[int, tuple[int, int]],
) -> Launch:
    """Return the launch of a placed job. ``folder``: working folder of jobs that name none; ``limits``: see `LaunchPreparer`.

    Reads the script if the setting `cuda_ids` is auto.
    """
    mode = job.spec.cuda or config.cuda_ids
    if mode == "auto":
        mode = "physical" if names_devices(job.spec.script) else "local"
    owns_gpus = job.runner_kind.owns_gpus
    launch = launch_of(
        job, found, mode=mode, state_file=config.state_file, cwd=folder, ordinals=ordinals,
        placeholder="" if owns_gpus else GPU_PLACEHOLDER,
    )  # fmt: skip
    return _within_limits(job, launch, limits) if owns_gpus else launch


def _say_streams(job: Job) -> None:
    """Add a note to the job if some of its output options have no effect in a screen session or on a cluster."""
    spec = job.spec
    terminal = job.runner_kind.terminal
    wishes = {"output=none": terminal and spec.output == "none", "stderr=apart": terminal and spec.stderr_apart,
              "gzip=yes": spec.gzip, "--foreground": bool(spec.caller)}  # fmt: skip
    wanted = [wish for wish, asked in wishes.items() if asked]
    note = (ITS_TERMINAL if terminal else ON_A_NODE).format(", ".join(wanted))
    if wanted and note not in job.notes:
        job.notes = (*job.notes, note)


def _within_limits(job: Job, launch: Launch, limits: dict[int, tuple[int, int]]) -> Launch:
    """Return the launch, with a wrapper command before the program if the submitter's resource limits must be set.

    ``limits``: the limits that a job has without the wrapper command. The wrapper command sets the submitter's limits,
    but none above the hard limit in ``limits``. No wrapper command is added if the submitter's limits are unknown, if
    the job would have the same limits without it, or if the program is a name without ``/``.
    """
    if not job.spec.limits or "/" not in launch.argv[0]:
        return launch
    theirs = {which: (soft, hard) for which, soft, hard in job.spec.limits}
    differing = {}
    for which, (our_soft, our_hard) in limits.items():
        soft, hard = theirs.get(which, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        hard = exec_limited.lower(hard, our_hard)  # a hard limit cannot be raised above ours
        soft = exec_limited.lower(soft, hard)
        if (soft, hard) != (our_soft, our_hard):
            differing[which] = (soft, hard)
    if not differing:
        return launch
    text = ",".join(f"{which}:{soft}:{hard}" for which, (soft, hard) in differing.items())
    into = (sys.executable, "-I", "-S", exec_limited.__file__, "-", text, launch.argv[0])
    return replace(launch, argv=(*into, *launch.argv))


def _free_log(job: Job, log_dir: str, stamp: str, taken: Collection[str], *, look: bool = True) -> str:
    """Return a path for the job's log. No file exists at this path (if ``look``), and it is not in ``taken``.

    Return an empty text if the job's output is not kept. ``stamp``: date and time for the file name.

    Other schedulers may use the same names. The file is created with O_EXCL: if two schedulers choose the same path,
    one start fails and is tried again with another path.
    """
    if job.spec.output == "none" and not job.runner_kind.terminal:
        return ""
    folder = job.spec.log_dir or log_dir
    number = 1
    while True:
        letters = "".join(random.choices(_LETTERS, k=6)) if job.spec.log_name else ""
        path = os.path.join(folder, log_name(job, stamp, number, letters))
        paths = (path, errors_of(path)) if job.spec.stderr_apart else (path,)
        if path not in taken and not (look and any(map(os.path.lexists, paths))):
            return path
        number += 1
