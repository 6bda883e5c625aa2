"""A machine with several users and the scheduler of all users, in a mount namespace of its own.

In the namespace, /etc is a copy, and /home, /run and /var/lib are empty. So `useradd` and `gpujob system install` change
nothing outside. Needs root.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import scheduler
from scheduler.client.system_client import SystemClient
from scheduler.core.job import JobSpec, JobState
from scheduler.core.log_names import user_logs
from scheduler.core.model_table import ModelTable
from scheduler.views.render import job_json
from tests.stories.harness import alive, wait_for

CONFIG = "gpus: 4\ngpu_interval: 0\nadmins: [eve]\n"
SOCKET = "/run/gpujob/gpujob.sock"
STATE = "/var/lib/gpujob"
CGROUPS = "/sys/fs/cgroup"
PACKAGE = Path(scheduler.__file__).resolve().parent
_PREPARE = r"""
set -e
stash=$1; shift
cp -a /etc "$stash/etc" 2>/dev/null || true  # another test may be making users: locks and copies come and go
rm -f "$stash"/etc/.pwd.lock "$stash"/etc/*.lock
mount --bind "$stash/etc" /etc
[ -z "$CGROUPS" ] || mount -t cgroup2 none /sys/fs/cgroup
for folder in /home /run /var/lib /var/mail; do mkdir -p $folder; mount -t tmpfs -o mode=755 tmpfs $folder; done
mkdir -m 1777 /run/lock
echo 'CREATE_MAIL_SPOOL=no' >> /etc/default/useradd
# A folder that users cannot enter, such as /root, is replaced by an open one with only the programs in it.
closed=$1; shift
if [ -n "$closed" ]; then
    n=0
    for needed in "$@"; do n=$((n+1)); mkdir -p "$stash/$n"; mount --bind "$needed" "$stash/$n"; done
    mount -t tmpfs -o mode=755 tmpfs "$closed"
    n=0
    for needed in "$@"; do n=$((n+1)); mkdir -p "$needed"; mount --bind "$stash/$n" "$needed"; done
fi
echo ready
exec sleep infinity
"""


def closed_folder() -> tuple[str, list[str]]:
    """Return the highest folder above the program that users cannot enter (empty: none), and the needed folders in it."""
    needed = dict.fromkeys([os.path.realpath(sys.base_prefix), os.path.realpath(sys.prefix), str(PACKAGE.parent)])
    closed = ""
    for path in needed:
        for above in reversed(Path(path).parents):
            if not os.stat(above).st_mode & 0o001:
                closed = str(above)
                break
    return closed, [path for path in needed if closed and path.startswith(f"{closed}/")]


@dataclass(frozen=True)
class Person:
    """A user of the machine."""

    name: str
    uid: int
    gid: int

    @property
    def home(self) -> str:
        return f"/home/{self.name}"


@dataclass(frozen=True)
class Done:
    """How a command ended. ``out``, ``err``: what it printed."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """The output of the command, without the line that says which scheduler it used."""
        return self.out + re.sub(r"gpujob: using the scheduler of all users.*\n", "", self.err)

    def json(self) -> Any:
        return json.loads(self.out)


class Machine:
    """The machine. Use it as a context manager."""

    numbers = iter(range(20))  # of the users of all machines of this process

    def __init__(self, config: str = CONFIG, *, cgroups: bool = False) -> None:
        self.config, self.cgroups = config, cgroups
        self.stash = Path(tempfile.mkdtemp(prefix="gj-machine-", dir="/tmp"))
        self.stash.chmod(0o755)
        self.people: dict[str, Person] = {}
        self.launcher: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Machine:
        closed, needed = closed_folder()
        words = [
            "unshare",
            "-m",
            "--propagation",
            "private",
            "sh",
            "-c",
            _PREPARE,
            "sh",
            str(self.stash),
            closed,
            *needed,
        ]
        environ = {**os.environ, "CGROUPS": "yes" if self.cgroups else ""}
        self.holder = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ)
        assert self.holder.stdout is not None and self.holder.stderr is not None
        line = self.holder.stdout.readline()
        assert line == b"ready\n", self.holder.stderr.read().decode()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_launcher()
        wait_for(lambda: not self._kill_people(), "the end of all processes of the users")
        if self.cgroups:
            # Until no process is left in them, cgroups cannot be removed.
            wait_for(
                lambda: not self.root("find", self.cgroup, "-depth", "-type", "d", "-delete", check=False).code,
                "empty cgroups",
            )
        self.holder.kill()
        self.holder.communicate()
        shutil.rmtree(self.stash, ignore_errors=True)

    def _kill_people(self) -> list[int]:
        uids = {person.uid for person in self.people.values()}
        found = []
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{pid}").st_uid in uids and alive(pid):
                    os.kill(pid, signal.SIGKILL)
                    found.append(pid)
        return found

    @property
    def cgroup(self) -> str:
        """The cgroup of the service."""
        return f"{CGROUPS}/gj-{self.stash.name}"

    # -- commands -----------------------------------------------------------------------------------------

    def _words(self, words: Sequence[str]) -> list[str]:
        return ["nsenter", "-m", "-t", str(self.holder.pid), "--", *words]

    def root(self, *words: str, check: bool = True, limit_s: float = 120) -> Done:
        """Run a command as root in the machine."""
        done = subprocess.run(self._words(words), capture_output=True, timeout=limit_s)
        found = Done(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))
        assert not check or not found.code, found
        return found

    def add_user(self, name: str, *groups: str) -> Person:
        """Create a user with a home folder. The user ids are high: no other user of the real machine has them."""
        uid = 300_000 + os.getpid() % 50_000 * 20 + next(Machine.numbers)
        for group in groups:
            self.root("groupadd", "-f", group)
        also = ["-G", ",".join(groups)] if groups else []
        self.root("useradd", "-m", "-s", "/bin/sh", "-u", str(uid), "-U", *also, name)
        self.root("chmod", "755", f"/home/{name}")
        gid = int(self.root("id", "-g", name).out)
        self.people[name] = Person(name, uid, gid)
        return self.people[name]

    def sh(self, name: str, text: str, limit_s: float = 120, **environ: str) -> Done:
        """Run a shell command as a user, in the home folder of the user. ``gpujob`` is the command line."""
        person = self.people[name]
        kept = {"HOME": person.home, "USER": name, "PATH": os.defpath, "LANG": "C.UTF-8", "GPUJOB_WARM": "0", **environ}
        also = "gpujob() { " + f'"{sys.executable}" -I -m scheduler "$@"' + "; }; cd\n"
        words = ["setpriv", "--reuid", str(person.uid), "--regid", str(person.gid), "--init-groups", "env", "-i",
                 *(f"{key}={value}" for key, value in kept.items()), "sh", "-c", also + text]  # fmt: skip
        return self.root(*words, check=False, limit_s=limit_s)

    def gpujob(self, name: str, *words: str, **environ: str) -> Done:
        """Run a gpujob command as a user."""
        quoted = " ".join("'" + word.replace("'", "'\\''") + "'" for word in words)
        return self.sh(name, f"gpujob {quoted}", **environ)

    def submit(self, name: str, *words: str) -> int:
        """Submit a command as a user; return the id of the job. ``words``: options and ``--`` may come first."""
        done = self.gpujob(name, "submit", *words)
        assert not done.code, done
        return int(done.out)

    def job_of(self, name: str, *words: str, **spec: Any) -> int:
        """Submit a command as a user without another process; return the id of the job."""
        home = self.people[name].home
        made = JobSpec(source="submit", arguments=words, cwd=home, log_dir=user_logs(home), **spec)
        with contextlib.closing(self.client(name)) as client:
            return client.submit(made, {"PATH": os.defpath}, ModelTable()).id

    def job(self, number: int) -> dict[str, Any]:
        """Return a job as `show --json` prints it for an administrator (without its events). No other process: tests ask often."""
        with contextlib.closing(self.client()) as client:
            job, reason, _ = client.job(number)
        return {**job_json(job, reason)}

    def ended(self, number: int, limit_s: float = 60) -> dict[str, Any]:
        """Wait until a job has ended, and return it."""
        wait_for(lambda: self.state(number).ended, f"end of job {number}", limit_s)
        return self.job(number)

    def in_state(self, number: int, *states: str) -> dict[str, Any]:
        """Wait until a job is in one of the states, and return it."""
        wait_for(lambda: self.state(number).value in states, f"job {number} in {states}", 60)
        return self.job(number)

    def state(self, number: int) -> JobState:
        """Return the state of a job."""
        with contextlib.closing(self.client()) as client:
            return client.job(number)[0].state

    def client(self, by: str = "") -> SystemClient:
        """Return a client with the rights of a user, or of root."""
        made = SystemClient(f"/proc/{self.holder.pid}/root{SOCKET}")
        if by:  # the kernel notes the user at the time of `connect`; the path is open to root only
            place = os.open(made.path, os.O_PATH)
            os.seteuid(self.people[by].uid)
            try:
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                connection.settimeout(60)
                connection.connect(f"/proc/self/fd/{place}")
            finally:
                os.seteuid(0)
                os.close(place)
            made._connection = connection
        return made

    def clear(self) -> None:
        """End and forget all jobs, and resume the queue, also those of users."""
        for name in self.people:
            self.ask("pausequeue", by=name, on=False)
        self.ask("pausequeue", on=False)
        if live := self._live():
            self.ask("cancel", jobs=live)
        wait_for(lambda: not self._live(), "the end of all jobs", 60)
        with contextlib.closing(self.client()) as client:
            client.reset()

    def ask(self, kind: str, *, by: str = "", **arguments: Any) -> None:
        """Send a request as an administrator or as a user, and check that it is carried out. No other process."""
        with contextlib.closing(self.client(by)) as client:
            code, lines = client.ask_for(kind, arguments)
        assert code == 0, lines

    def _live(self) -> list[int]:
        with contextlib.closing(self.client()) as client:
            return [job.id for job in client.overview().jobs if not job.state.ended]

    # -- the service --------------------------------------------------------------------------------------

    def install(self) -> Done:
        """Install the service and write its configuration."""
        done = self.root(sys.executable, "-I", "-m", "scheduler", "system", "install")
        self.configure(self.config)
        return done

    def configure(self, text: str) -> None:
        """Write the configuration."""
        path = self.stash / "config"
        path.write_text(text)
        self.root("install", "-m", "644", str(path), "/etc/gpujob/config.yaml")

    def start(self, *, answers: bool = True) -> None:
        """Run the service as its unit does, and wait until it answers (``answers``)."""
        run = [sys.executable, "-I", "-m", "scheduler", "system", "run"]
        if self.cgroups:  # as systemd does with Delegate=yes
            mark = "import os, sys; os.setxattr(sys.argv[1], 'user.delegate', b'1')"
            text = f"mkdir -p {self.cgroup} && '{sys.executable}' -c \"{mark}\" {self.cgroup} && echo $$ > {self.cgroup}/cgroup.procs"
            run = ["sh", "-c", f'{text} && exec "$@"', "sh", *run]
        words = self._words(run)
        with (self.stash / "log").open("ab") as log:
            self.launcher = subprocess.Popen(words, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        if answers:
            self.answers()

    def answers(self) -> None:
        """Wait until the service answers."""
        wait_for(
            lambda: self.root(sys.executable, "-I", "-m", "scheduler", "system", "status", check=False).code == 0,
            f"an answer of the service; it said: {self.log()}", 30,
        )  # fmt: skip

    def log(self) -> str:
        """Return the output of the service."""
        path = self.stash / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def children(self, module: str) -> list[int]:
        """Return the pids of the children of the launcher that run a module, such as ``service``."""
        assert self.launcher is not None
        found = []
        for child in psutil.Process(self.launcher.pid).children(recursive=True):  # an agent may be below a PAM session
            with contextlib.suppress(psutil.Error):
                if f"scheduler.gpujobd.{module}" in child.cmdline():
                    found.append(child.pid)
        return found

    def kill_scheduler(self) -> None:
        """Kill the scheduler, and wait for the next one."""
        (pid,) = self.children("service")
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: (found := self.children("service")) and found != [pid], "another scheduler", 60)
        self.answers()

    def kill_launcher(self) -> None:
        """Kill the launcher, and wait for the end of the scheduler."""
        if self.launcher is None:
            return
        schedulers = self.children("service")
        self.launcher.kill()
        self.launcher.wait()
        self.launcher = None
        wait_for(lambda: not any(map(alive, schedulers)), "the end of the scheduler", 60)

    def power_off(self) -> None:
        """Kill the service and all processes of the users."""
        self.kill_launcher()
        wait_for(lambda: not self._kill_people(), "the end of all processes of the users")

    def kill_agents(self) -> None:
        """Kill all agents."""
        for pid in self.children("agent"):
            os.kill(pid, signal.SIGKILL)
