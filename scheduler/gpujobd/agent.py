"""The agent of a user: runs the user's jobs with the user's rights, for the scheduler of all users.

The launcher starts it as ``python -I -m scheduler.gpujobd.agent``, with a socket to the scheduler as descriptor 3. To the
jobs the agent is what the scheduler is for a scheduler of one user: it starts supervisors or screen sessions, reads
attempt records, and searches processes. It reads scripts, environments and logs, and opens all files with the rights of
its user. It decides nothing. When the scheduler is gone, the agent ends; the supervisors and the jobs continue, and the
next agent adopts them.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import resource
import select
import signal
import socket
import sys
import time
from dataclasses import replace
from typing import Any, NoReturn

from scheduler.core.config import Config
from scheduler.core.errors import SchedulerError
from scheduler.core.job import Job, Process
from scheduler.core.observations import Ended, Lost, Missing, NeverRan, Observation, Started, Unclaimed
from scheduler.core.screen_names import session_name
from scheduler.daemon.completion_hooks import JobActions, no_warning
from scheduler.daemon.failure_diagnosis import with_causes
from scheduler.daemon.prepare_launch import complete_launch
from scheduler.environments import activate
from scheduler.environments.resolve import Environments
from scheduler.environments.resolve import Missing as Lacking
from scheduler.gpujobd import in_cgroup
from scheduler.gpujobd.agent_channel import Channel, Closed
from scheduler.gpujobd.agent_files import ReadFiles
from scheduler.gpujobd.agent_messages import said
from scheduler.runners.adoption import start_trouble
from scheduler.runners.direct import DirectRunner
from scheduler.runners.screen import ScreenRunner, tidy
from scheduler.store.paths import digest, make_private_folder
from scheduler.system.private_files import new_private
from scheduler.system.processes import own_limits
from scheduler.system.typed_json import typed

LOGIN_SETTINGS = "/etc/login.defs"
UMASK, UNSET = 0o022, 0o067  # of a login without settings; in GPUJOB_UMASK if PAM has set none (launcher.py)
FD = 3  # descriptor of the socket to the scheduler
MISSING_AGAIN_S = 2.0  # between two looks for files that waiting jobs lack
TROUBLE_S = 1.0  # between two looks whether jobs can start
GROUPS_S = 5.0  # between two looks whether the groups of the user have changed
MOST_MISSING = 200  # jobs in one look
LAST_S = 0.5  # an agent that ends waits so long for a further message
OPEN_FILES = 65_536


class Agent:
    """An agent. ``folder``: the private folder for its records. Raises SchedulerError, OSError."""

    def __init__(self, channel: Channel, folder: str, environ: dict[str, str]) -> None:
        self.channel, self.folder, self.environ = channel, folder, environ
        told = int(environ.pop("GPUJOB_UMASK", f"{UNSET:o}"), 8)
        self.umask = login_umask() if told == UNSET else told  # of jobs that bring none: lines of jobs files, the page
        self.config: Config | None = None
        self.runner: DirectRunner | ScreenRunner
        self.environments: Environments
        self.files = ReadFiles(channel)
        self.limits = own_limits()
        self.actions = JobActions(environ, "/", os.path.join(folder, "on_finish.log"), no_warning)
        self.jobs: dict[int, Job] = {}  # attempts in hand, by job
        self.missing: dict[int, tuple[Job, dict[str, str] | None]] = {}  # waiting jobs that lack a file
        self.missing_due = self.trouble_due = 0.0
        self.groups_due = time.monotonic() + GROUPS_S
        self.trouble = ""
        self.cgroups = False  # the scheduler moves each job into a cgroup
        self.wakeup, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)  # readable when a child has ended
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for name in ("attempts", "sessions", "env"):
            make_private_folder(os.path.join(folder, name))

    # -- settings -----------------------------------------------------------------------------------------

    def use_settings(self, config: Config) -> None:
        """Apply settings; the first ones create the runner."""
        first, self.config = self.config is None, config
        if first:
            self._start_runner(config)
        self.environments.mode, self.environments.limit_s = config.conda_mode, config.activation_limit
        self.files.trust_group = config.trust_group

    def _start_runner(self, config: Config) -> None:
        limit = self.limits[resource.RLIMIT_NOFILE]
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit[0], min(limit[1], OPEN_FILES)), limit[1]))
        launcher = (sys.executable, "-I", "-S", activate.__file__)
        self.environments = Environments(self.environ, config.python, launcher)
        self.environments.own_path = True  # the agent's PATH is nobody's choice
        attempts, sessions = (os.path.join(self.folder, name) for name in ("attempts", "sessions"))
        if config.screen:
            short_id = digest(os.fsencode(config.state_file), 2)
            self.runner = ScreenRunner(attempts, config.state_file, self.environ, sessions, short_id, limit[0])
        else:
            tidy(sessions, attempts)
            errors = os.path.join(self.folder, "supervisor.err")
            self.runner = DirectRunner(attempts, config.state_file, self.environ, errors, limit[0])

    # -- requests of the scheduler ------------------------------------------------------------------------

    def carry_out(self, message: dict[str, Any]) -> None:
        """Carry out a message of the scheduler. Raises ValueError if it is not valid."""
        kind = message["do"]
        if kind == "settings":
            first, self.cgroups = self.config is None, bool(message["cgroups"])
            self.use_settings(typed(message["config"], Config))
            if first:
                self.channel.send({"say": "ready"})
        elif kind == "start":
            ordinals = typed(message["ordinals"], dict[int, int | str])
            self._start(typed(message["job"], Job), typed(message["environment"], dict[str, str] | None), ordinals)
        elif kind == "adopt":
            job = typed(message["job"], Job)
            self.jobs[job.id] = job
            self._say(self.runner.adopt(job))
        elif kind == "stop":
            pairs = [(typed(job, Job), bool(hard)) for job, hard in message["jobs"]]
            self.runner.stop((self.jobs.get(job.id, job), hard) for job, hard in pairs)
        elif kind == "leftovers":
            processes = typed(message["processes"], list[Process])
            self.runner.watch_leftovers(str(message["key"]), int(message["job"]), int(message["attempt"]), processes)
        elif kind == "act":
            job = typed(message["job"], Job)
            self._act(job, str(message["what"]), typed(message["environment"], dict[str, str] | None))
        elif kind == "ping":
            self.channel.send({"say": "pong"})
        elif kind in ("follow", "accept", "check", "old", "unfollow"):
            self.files.carry_out(message)
        elif kind == "forget":  # the job waits no more, or is gone
            self.missing.pop(int(message["job"]), None)
        else:
            raise ValueError(f"unknown message {kind!r}")

    def _check_groups(self) -> None:
        """Raise Closed if the groups of the user have changed: the next agent has the new ones."""
        now = time.monotonic()
        if now < self.groups_due:
            return
        self.groups_due = now + GROUPS_S
        with contextlib.suppress(KeyError):  # the user was deleted
            user = pwd.getpwuid(os.getuid())
            if {*os.getgrouplist(user.pw_name, user.pw_gid)} != {*os.getgroups(), os.getgid()}:
                self._carry_out_actions()
                raise Closed("the groups of the user have changed")

    def _carry_out_actions(self) -> None:
        """Run the actions at the end of jobs that the scheduler has sent, before the agent ends. Raises Closed."""
        while select.select([self.channel], [], [], LAST_S)[0]:
            for message in self.channel.receive():
                if message["do"] == "act":
                    self.carry_out(message)

    def _start(self, job: Job, environment: dict[str, str] | None, ordinals: dict[int, int | str]) -> None:
        self._check_groups()
        self.jobs[job.id] = job
        self.missing.pop(job.id, None)
        try:
            self._store_environment(job, environment)
            launch = self._launch(job, ordinals)
        except OSError as error:
            self._say([start_trouble(job.id, job.attempt, error.errno or 0, time.time(), "environment")])
            return
        except ValueError as error:  # text that cannot be an argument of a program
            self._say([NeverRan(job.id, job.attempt, f"it cannot be started: {error}", True, time.time())])
            return
        if launch is None:
            self.missing[job.id] = (job, environment)
            return
        self.runner.start(job, launch)

    def _store_environment(self, job: Job, environment: dict[str, str] | None) -> None:
        """Store the variables of an attempt in a private file until it has started. Raises OSError."""
        path = ""
        if environment is not None:
            path = self._env_file(job)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            data = b"\0".join(os.fsencode(f"{name}={value}") for name, value in environment.items())
            with os.fdopen(new_private(path), "wb") as stream:
                stream.write(data)
        job.spec = replace(job.spec, env_file=path)

    def _env_file(self, job: Job) -> str:
        return os.path.join(self.folder, "env", job.attempt_key)

    def _launch(self, job: Job, ordinals: dict[int, int | str]) -> Any:
        """Return the launch of a job; None if it lacks a file, which is reported."""
        assert self.config is not None
        found = self.environments.find(job)
        if isinstance(found, Lacking):
            self._say([Missing(job.id, found.sentence, job.attempt)])
            return None
        launch = complete_launch(job, found, self.config, self.environments.home, ordinals, self.limits)
        launch = replace(launch, umask=self.umask) if launch.umask is None else launch
        if self.cgroups and "/" in launch.argv[0]:
            wait = (sys.executable, "-I", "-S", in_cgroup.__file__, job.attempt_key)
            launch = replace(launch, argv=(*wait, *launch.argv))
        job.argv, job.interpreter = launch.words, found.interpreter
        job.session = session_name(job.id, job.gpus, job.argv) if job.runner_kind.terminal else None
        return launch

    def _act(self, job: Job, what: str, environment: dict[str, str] | None) -> None:
        """Run an action at the end of a job."""

        def warn(job: Job, text: str) -> None:
            self.channel.send({"say": "warning", "job": job.id, "what": what, "text": text})

        base = self.environ if environment is None else environment
        self.actions.environ, self.actions.warn = base, warn
        try:
            self.actions.run(job, what)
        except (OSError, ValueError) as error:
            warn(job, f"{what} was not run: {error}")
        self.channel.send({"say": "acted", "job": job.id, "what": what})
        self.runner.leave_alone(self.actions.sessions())

    # -- reports ------------------------------------------------------------------------------------------

    def _say(self, observations: list[Observation]) -> None:
        own = self.config.failure_classes if self.config is not None else None
        for one in with_causes(self.jobs, observations, own or ()):
            number = getattr(one, "job", 0)
            job = self.jobs.get(number)
            if isinstance(one, Started) and job is not None:
                job.process, job.session = one.process, one.session or job.session
                one = replace(one, argv=job.argv, interpreter=job.interpreter)
            if isinstance(one, (Ended, NeverRan, Unclaimed, Lost, Missing)):
                self.jobs.pop(number, None)
            if isinstance(one, (Started, Ended, NeverRan, Unclaimed, Lost, Missing)) and job is not None:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._env_file(job))
            self.channel.send(said(one))

    def _look_for_missing(self, now: float) -> None:
        self.missing_due = now + MISSING_AGAIN_S
        for number, (job, environment) in list(self.missing.items())[:MOST_MISSING]:
            try:
                self._store_environment(job, environment)
                found = self.environments.find(job)
                os.unlink(self._env_file(job)) if environment is not None else None
            except OSError:
                continue  # a full disk: the next look tries again
            self.missing[number] = self.missing.pop(number)  # to the end: each of them gets its turn
            if not isinstance(found, Lacking):
                del self.missing[number]
                self.channel.send({"say": "found", "job": number})

    def _say_trouble(self, now: float) -> None:
        self.trouble_due = now + TROUBLE_S
        told = self.runner.trouble()
        if told != self.trouble:
            self.trouble = told
            self.channel.send({"say": "trouble", "text": told})

    # -- the loop -----------------------------------------------------------------------------------------

    def run(self) -> NoReturn:
        """Run until the scheduler closes the connection. Raises Closed then."""
        while self.config is None:
            select.select([self.channel], [], [])
            for message in self.channel.receive():
                self.carry_out(message)
        while True:
            for message in self.channel.receive():
                self.carry_out(message)
            self.runner.flush()
            self._say(self.runner.look())
            now = time.monotonic()
            if self.missing and now >= self.missing_due:
                self._look_for_missing(now)
            if now >= self.trouble_due:
                self._say_trouble(now)
            self.files.look(now)
            self.channel.flush()
            self._wait()

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self.channel, select.POLLIN | (select.POLLOUT if self.channel.waits else 0))
        for fd in (self.wakeup, self.files.watcher.fd, *self.runner.descriptors()):
            poll.register(fd, select.POLLIN)
        due = [self.trouble_due if self.jobs else float("inf"), self.missing_due if self.missing else float("inf")]
        due += [moment for moment in (self.runner.next_look(), self.files.due()) if moment is not None]
        wait = min(due) - time.monotonic()
        poll.poll(None if wait == float("inf") else max(0, int(wait * 1000) + 1))
        with contextlib.suppress(BlockingIOError):
            os.read(self.wakeup, 4096)


def login_umask(settings: str = LOGIN_SETTINGS) -> int:
    """Return the umask of a login: UMASK in /etc/login.defs, as pam_umask reads it; 022 if there is none."""
    with contextlib.suppress(OSError, ValueError), open(settings, encoding="utf-8", errors="replace") as stream:
        for words in map(str.split, stream):
            if words[:1] == ["UMASK"] and len(words) > 1:
                return int(words[1], 8) & 0o777
    return UMASK


def main() -> int:
    """Run the agent. Return the exit code."""
    folder = os.environ.pop("GPUJOB_AGENT_FOLDER")
    channel = Channel(socket.socket(fileno=FD))
    os.set_inheritable(FD, False)
    os.chdir(folder)
    with contextlib.suppress(OSError), open("agent.err", "ab", opener=_private) as errors:  # launcher.py: no output
        os.dup2(errors.fileno(), 2)
    try:
        agent = Agent(channel, folder, dict(os.environ))
        agent.run()
    except Closed:
        return 0
    except (SchedulerError, OSError, ValueError) as error:
        with contextlib.suppress(Closed):
            channel.send({"say": "cannot", "text": str(error)})
        print(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} the agent ends: {error}", file=sys.stderr)
        return 1


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


if __name__ == "__main__":
    sys.exit(main())
