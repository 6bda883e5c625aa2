"""Two real users of this machine: commands and schedulers can run as one of them, and files can belong to them."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scheduler import command_line
from scheduler.runners import supervisor as supervisor_file
from scheduler.web import server  # noqa: F401  loaded now: a child with another user may be unable to load it
from tests.environ import NO_CONFIG
from tests.stories.harness import alive, wait_for

ROOT_ONLY = pytest.mark.skipif(
    os.getuid() != 0 and not os.environ.get("CI"), reason="users are made by root (in CI: always)"
)
TAKEN = "cannot open the main log"  # error of START after `start` has accepted all other files
START = ("start", "--gpus", "1", "--log-file", "/no such folder/log")
FILES = {
    "config.yaml": "cuda_ids: local\n",
    "llm_config.json": '{"models": {"a": 0.5}}\n',
    "jobs.txt": "# none yet\n",
}


@dataclass
class User:
    name: str
    uid: int
    gid: int
    groups: tuple[int, ...] = ()

    def do(self, act: Callable[[], Any]) -> int:
        """Run ``act`` as this user in a child process. Return the exit code of the child.

        The exit code is the result of ``act`` (None counts as 0), or 99 if ``act`` raised an exception.
        """
        sys.stdout.flush()
        child = os.fork()
        if child:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        code = 99
        try:
            os.setgroups([self.gid, *self.groups])
            os.setresgid(self.gid, self.gid, self.gid)
            os.setresuid(self.uid, self.uid, self.uid)
            code = int(act() or 0)
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
            raise
        finally:
            os._exit(code)

    def can(self, act: Callable[[], Any]) -> bool:
        """Return whether ``act`` raises no OSError when this user runs it."""

        def tried() -> int:
            try:
                act()
            except OSError:
                return 1
            return 0

        code = self.do(tried)
        assert code in (0, 1), code
        return code == 0

    def gpujob(self, folder: Path, *words: str, **environ: str) -> tuple[int, str]:
        """Run a gpujob command as this user in this folder; return its exit code and its output (stdout and stderr)."""
        return self.limited(folder, (), *words, **environ)

    def limited(
        self, folder: Path, limits: Sequence[tuple[int, tuple[int, int]]], *words: str, **environ: str
    ) -> tuple[int, str]:
        """Run a gpujob command as the method `gpujob` does, but under resource limits.

        Each limit: (RLIMIT number, (soft limit, hard limit)).
        """
        with tempfile.TemporaryFile() as out:

            def run() -> int:
                os.chdir(folder)
                os.environ.clear()
                os.environ.update({"PATH": os.defpath, "HOME": str(folder), "XDG_RUNTIME_DIR": str(folder)})
                os.environ.update({"GPUJOB_MACHINE_CONFIG": NO_CONFIG, **environ})
                os.dup2(out.fileno(), 1)
                os.dup2(out.fileno(), 2)
                sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
                for which, limit in limits:
                    resource.setrlimit(which, limit)
                code = command_line.main(list(words))
                sys.stdout.flush()
                sys.stderr.flush()
                return code

            code = self.do(run)
            out.seek(0)
            return code, out.read().decode()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Load all modules before a child process changes its user.

    After the change, the child may be unable to load modules: Python and the checkout may be readable only by root.
    """
    folder = tmp_path_factory.mktemp("loaded")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for words in (START, ("start", "--gpus=x"), ("config", "check"), ("status",)):
            command_line.main(list(words))


@pytest.fixture(scope="module")
def users(loaded: None) -> Iterator[tuple[User, User]]:
    """Return two new users that share an additional group; delete the users and the group afterwards."""
    names = [f"gj{os.getpid() % 100_000}{letter}" for letter in "abg"]
    made = []
    try:
        subprocess.run(["groupadd", names[2]], check=True)
        group = int(subprocess.check_output(["getent", "group", names[2]]).split(b":")[2])
        for name in names[:2]:
            subprocess.run(["useradd", "-M", "-U", "-G", names[2], name], check=True)
            uid, gid = (int(subprocess.check_output(["id", which, name])) for which in ("-u", "-g"))
            made.append(User(name, uid, gid, (group,)))
        yield made[0], made[1]
    finally:
        for user in made:
            subprocess.run(["userdel", user.name], check=True)
        subprocess.run(["groupdel", names[2]], check=False)


@pytest.fixture
def place(users: tuple[User, User]) -> Iterator[Path]:
    """Return a folder that belongs to the first user. Everybody may read the folder."""
    me, _ = users
    folder = Path(tempfile.mkdtemp(prefix="gj-owners-", dir="/tmp"))
    os.chown(folder, me.uid, me.gid)
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def belongs(path: Path, user: User, mode: int = 0o644, group: int = -1) -> Path:
    os.chown(path, user.uid, user.gid if group < 0 else group, follow_symlinks=False)
    if not path.is_symlink():
        path.chmod(mode)
    return path


def write(path: Path, user: User, mode: int = 0o644, group: int = -1) -> Path:
    path.write_text(FILES[path.name])
    return belongs(path, user, mode, group)


class Daemon:
    """A scheduler that runs as a user, in a forked process.

    It is forked because a new interpreter may fail: the user may have no right to read Python and the checkout.
    """

    def __init__(self, user: User, folder: Path, *words: str, **environ: str) -> None:
        self.user, self.folder = user, folder
        self.output = Path(tempfile.mkdtemp(prefix="gj-said-")) / "said"
        python = (
            sys.executable if user.can(lambda: os.close(os.open(sys.executable, os.O_RDONLY))) else "/usr/bin/python3"
        )
        public = Path(tempfile.mkdtemp(prefix="gj-supervisor-"))
        public.chmod(0o755)
        shutil.copy(supervisor_file.__file__, public)
        self.out = self.output.open("wb")
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            code = 99
            try:
                os.setsid()
                for fd in (1, 2):
                    os.dup2(self.out.fileno(), fd)
                os.setgroups([user.gid, *user.groups])
                os.setresgid(user.gid, user.gid, user.gid)
                os.setresuid(user.uid, user.uid, user.uid)
                os.chdir(folder)
                os.environ.clear()
                os.environ.update(
                    PATH=os.defpath,
                    HOME=str(folder),
                    XDG_RUNTIME_DIR=str(folder),
                    GPUJOB_SET_GPU_INTERVAL="0",
                    GPUJOB_MACHINE_CONFIG=NO_CONFIG,
                    **environ,
                )
                sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                sys.executable, supervisor_file.__file__ = python, str(public / "supervisor.py")
                code = command_line.main(["start", "--gpus", "1", *words])
                sys.stdout.flush()
                sys.stderr.flush()
            except BaseException:
                traceback.print_exc(file=sys.__stderr__)
            finally:
                os._exit(code)
        self.public = public

    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def ready(self) -> Daemon:
        """Wait until the scheduler has started."""
        wait_for(lambda: "scheduler started" in self.said() or self.ended(), "start")
        assert not self.ended(), self.said()
        return self

    def ended(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def end(self) -> None:
        """Kill the scheduler and all other processes of its user."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        # Repeated until no process is left: a process may fork meanwhile, and a user with processes cannot be deleted.
        wait_for(lambda: not self._kill_the_rest(), f"the end of all processes of {self.user.name}")
        self.out.close()
        shutil.rmtree(self.public)
        shutil.rmtree(self.output.parent)

    def _kill_the_rest(self) -> list[int]:
        """Kill the live processes of the user; return their pids."""
        found = []
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{pid}").st_uid == self.user.uid and alive(pid):
                    os.kill(pid, signal.SIGKILL)
                    found.append(pid)
        return found


@pytest.fixture
def daemon_of() -> Iterator[Callable[..., Daemon]]:
    """Return a function that starts a scheduler as a user; end all of them afterwards."""
    made: list[Daemon] = []

    def make(user: User, folder: Path, *words: str, **environ: str) -> Daemon:
        made.append(Daemon(user, folder, *words, **environ))
        return made[-1]

    yield make
    for one in made:
        one.end()
