"""The scheduler of all users: the daemon of a scheduler of one user, with agents in place of its own runner.

The launcher starts it as ``python -I -m scheduler.gpujobd.service SETTINGS``, as the service user, with a socket to the
launcher as descriptor 3. SETTINGS is a JSON object (`ServiceSettings`).
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass

from scheduler.core.config import Config
from scheduler.core.errors import NoGpuData, SchedulerError, UsageError
from scheduler.core.protocols import Runner
from scheduler.daemon.context import Context
from scheduler.daemon.helper_child import HelperChild
from scheduler.daemon.loop import Daemon
from scheduler.daemon.parts import Part
from scheduler.daemon.process import DaemonProcess, UsersParts
from scheduler.daemon.program_lookup import UserProgramLookup
from scheduler.gpujobd import front
from scheduler.gpujobd.cgroups import JobCgroups
from scheduler.gpujobd.launcher_link import LauncherLink
from scheduler.gpujobd.user_files import UserFiles
from scheduler.gpujobd.users_runner import UsersRunner
from scheduler.intake.machine_settings import OTHERS, VARIABLE, machine_settings
from scheduler.intake.settings import load
from scheduler.store import jobs as rows
from scheduler.system.atomic_files import replace_file
from scheduler.system.processes import seen
from scheduler.system.typed_json import from_json, to_json, typed
from scheduler.views.foreground_output import ForegroundOutput

FD = 3  # descriptor of the socket to the launcher
PR_SET_PDEATHSIG = 1
FRONT_BREAK_S = 2.0  # the longest wait before the front is started again


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """Paths of the service. ``state_file``: in the private folder of the scheduler; ``config``: may be missing.

    ``problem``: file that tells why the scheduler cannot begin; ``cgroups``: folder for the cgroups of the jobs; empty: jobs have none.
    """

    socket: str
    state_file: str
    config: str
    problem: str
    cgroups: str = ""


def run(settings: ServiceSettings, connection: socket.socket) -> int:
    """Run the scheduler and return its exit code. Raises SchedulerError."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GPUJOB")}
    environ[VARIABLE] = os.environ[VARIABLE] = settings.config
    if seen(1) is None:
        raise SchedulerError(
            "/proc hides the processes of other users (hidepid), so the scheduler cannot see whether jobs live",
            do="mount /proc with gid=GROUP, and add the user of the scheduler to this group",
        )
    told = machine_settings(environ)
    if told.problem:
        raise UsageError(told.problem, do="correct it: the scheduler of all users needs this file")
    beside = os.path.dirname(settings.config)
    flags: dict[str, object] = {
        "state_file": settings.state_file,
        "jobs_file": "",
        "commands_file": "",
        "engine": "local",
    }
    config = settings.config if os.path.exists(settings.config) else None
    found = load(flags, {}, config, os.path.dirname(settings.state_file), others=OTHERS)
    if found.origin["llm_config"] == "default":
        flags["llm_config"] = os.path.join(beside, "llm_config.json")
        found = load(flags, {}, config, os.path.dirname(settings.state_file), others=OTHERS)
    output = ForegroundOutput(follow=False)
    daemon = DaemonProcess(found, flags, output, environ)
    lookup = UserProgramLookup()

    def runner(context: Context) -> Runner:
        def owner(job: int) -> int | None:
            found = rows.get(context.db.connection, job)
            return found.spec.uid if found is not None else None

        link = LauncherLink(connection)
        cgroups = JobCgroups(settings.cgroups) if settings.cgroups else None
        context.limits_jobs = cgroups is not None
        made = UsersRunner(
            link, lambda: context.config, settings.socket, lookup.found_again, _end, context.changed.add, owner, cgroups
        )
        lookup.parked = made.forget_others
        context.actions = made
        return made

    def files(context: Context, daemon: Daemon) -> Part:
        agents = context.actions
        assert isinstance(agents, UsersRunner)
        return UserFiles(context, daemon.files, agents, daemon.is_full)

    def make_front(epoll: select.epoll, tell: Callable[[str, int], None]) -> HelperChild:
        _note_problem(settings.problem, "")
        told = to_json(front.Settings(settings.socket, settings.state_file)).decode()
        words = [sys.executable, "-I", "-m", front.__name__, told]
        return HelperChild("the front of gpujobd", words, environ, epoll, tell, FRONT_BREAK_S)

    def make_page(config: Config, epoll: select.epoll, tell: Callable[[str, int], None]) -> HelperChild:
        told = json.dumps({"state_file": settings.state_file, "port": config.web_port})
        words = [sys.executable, "-I", "-m", "scheduler.gpujobd.page", told]
        return HelperChild("the web page", words, environ, epoll, tell)

    daemon.users = UsersParts(runner, lookup, files, make_front, make_page)
    try:
        return daemon.run().code
    finally:
        output.close()


def _end() -> None:
    """End this scheduler, because its launcher is gone: the next launcher starts another one."""
    os.kill(os.getpid(), signal.SIGTERM)


def _note_problem(path: str, text: str) -> None:
    """Tell `gpujob system status` why the scheduler cannot begin; an empty text: it has begun."""
    try:
        if text:
            replace_file(path, text.encode(), sync=False)
            os.chmod(path, 0o644)
        else:
            os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        print(f"gpujobd: {path}: {error.strerror}", file=sys.stderr)


def main() -> int:
    """Run the scheduler with the settings of the command line. Return the exit code."""
    os.umask(0o077)
    connection = socket.socket(fileno=FD)
    os.set_inheritable(FD, False)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)  # also while the store cannot be used
    settings = typed(from_json(sys.argv[1]), ServiceSettings)
    os.chdir(os.path.dirname(settings.state_file))
    try:
        return run(settings, connection)
    except SchedulerError as error:
        lines = error.lines
        if isinstance(error, NoGpuData):
            lines = (f"{error.what}; declare GPUs in {settings.config}, such as gpus: 4, or repair the driver",)
        for line in lines:
            print(f"gpujobd: {line}", file=sys.stderr)
        _note_problem(settings.problem, "; ".join(lines))
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
