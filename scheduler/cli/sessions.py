"""The verbs `screens` and `attach`: the screen sessions of running jobs."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from typing import Any

from scheduler.client.locate import client_of, state_file_for
from scheduler.core.errors import SchedulerError, UsageError
from scheduler.core.gpu import gpu_ids_text
from scheduler.core.job import Job
from scheduler.system.forked_command import need_own_process
from scheduler.system.proc import command_words
from scheduler.views import render


def _command(job: Job, folder: str) -> list[str]:
    """Return the command that attaches to a job's screen session.

    ``folder``: folder with the sockets of the program `screen`; empty: the default folder of `screen`. The command
    names the session with its pid, because the name alone may also be the beginning of another session's name.
    """
    prefix = ["env", f"SCREENDIR={folder}"] if folder and folder != os.environ.get("SCREENDIR", "") else []
    return [*prefix, "screen", "-r", job.session or ""]


def _lives(job: Job) -> bool:
    """Return whether the screen process of the job's session lives. A job that ignores SIGHUP may outlive screen."""
    number, _, name = (job.session or "").partition(".")
    if not number.isdigit():
        return True  # the session's pid is not known yet
    try:
        return os.fsencode(name) in command_words(int(number))
    except OSError:
        return False


def screens(*, json: bool = False, state_file: str | None = None, config: str | None = None) -> int:
    """Print the live screen sessions of this scheduler's jobs, and return the exit code 0.

    The list comes from the store, not from `screen -ls`, which also lists dead sessions.
    """
    client = client_of(state_file_for(state_file, config))
    jobs, folder = [job for job in client.sessions() if _lives(job)], client.remembered("screen_folder")
    if json:
        found: list[dict[str, Any]] = [
            {
                "id": job.id,
                "session": job.session_name,
                "gpus": list(job.gpus),
                "attach": shlex.join(_command(job, folder)),
            }
            for job in jobs
        ]
        render.print_json({"schema": 1, "sessions": found})
        return 0
    if not jobs:
        print("no job runs in a screen session" + ("" if client.alive() else " (no scheduler is running)"))
        return 0
    rows = [
        (
            job.id,
            gpu_ids_text(job.gpus) or "-",
            job.spec.shown_words(),
            job.session_name,
            shlex.join(_command(job, folder)),
        )
        for job in jobs
    ]
    print("\n".join(render.table(("JOB", "GPU", "NAME", "SESSION", "ATTACH WITH"), rows)))
    return 0


def attach(job: str, *, state_file: str | None = None, config: str | None = None) -> int:
    """Replace this process by `screen`, attached to the job's session.

    ``job`` may name several jobs, such as a label, if one of them runs in a session. Raises UsageError, SchedulerError.
    """
    need_own_process()
    client = client_of(state_file_for(state_file, config))
    numbers = client.select([job])
    mine = [found for found in client.sessions() if found.id in numbers and _lives(found)]
    if len(numbers) > 1 and len(mine) != 1:
        how_many = f"{len(numbers)} jobs, of which {len(mine) or 'none'} run in a screen session"
        raise UsageError(f"cannot attach to {job}: it names {how_many}", do="name one job; see gpujob screens")
    if not mine:
        number = numbers[0]
        state = client.states([number])[0].state
        if state.holds_gpus:
            raise SchedulerError(
                f"cannot attach to job {number}: it runs without a screen session", do=f"see gpujob logs -f {number}"
            )
        raise SchedulerError(f"cannot attach to job {number}: it is {state.value}", do=f"see gpujob show {number}")
    folder = client.remembered("screen_folder")
    words = _command(mine[0], folder)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise SchedulerError(
            "cannot attach: stdin or stdout is not a terminal", do=f"run in a terminal: {shlex.join(words)}"
        )
    program = shutil.which("screen")
    if program is None:
        raise SchedulerError("GNU Screen command not found", do="install it: sudo apt-get install screen")
    if folder:
        os.environ["SCREENDIR"] = folder
    sys.stdout.flush()
    # -x attaches even if another terminal is attached.
    os.execv(program, ["screen", "-x", mine[0].session or ""])
