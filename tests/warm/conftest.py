"""Fixtures for tests of the warm process: a caller that has its own folder, environment and warm process."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scheduler.warm import client
from tests.environ import clean
from tests.stories.harness import ROOT, alive, wait_for

# A script that writes the properties of its process (limits, signals, environment, …) to the file that its argument
# names. It runs as the --info-command of `submit`, so it is a child of the command. Signals 32 and 33 are left out:
# posix_spawn of glibc makes its children ignore them.
PROBE = """\
import json, os, resource, sys
def words(pid):
    return open(f"/proc/{pid}/cmdline").read().split("\\0")
mask = os.umask(0)
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines())
world = {
    "umask": mask, "folder": os.getcwd(), "nice": os.getpriority(os.PRIO_PROCESS, 0), "cpus": sorted(os.sched_getaffinity(0)),
    "limits": {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")},
    "environ": {k: v for k, v in os.environ.items() if k != "GPUJOB_WARM"}, "ignored": int(status["SigIgn"], 16) & ~(3 << 31), "blocked": status["SigBlk"],
    "files": sorted(os.listdir("/proc/self/fd"))[:-1], "adjusted": open("/proc/self/oom_score_adj").read(),
}
json.dump({"forked": "warm-process" in words(os.getppid()), "world": world}, open(sys.argv[1], "w"))
"""


# Runs the command, but waits a minute for the warm process. The usual limit is short, and on a busy machine the command
# would sometimes run without the warm process.
PATIENT = """\
from scheduler.entrypoint import entry
from scheduler.warm import client
client.ANSWER_LIMIT_S = 60
entry()
"""


class Caller:
    """A user whose commands run in one folder, and use the warm process of one runtime folder.

    ``command``: a command line that waits until the warm process answers. ``plain``: the command line of ordinary
    users; if the warm process does not answer soon, the command runs without it.
    """

    def __init__(self, folder: Path, runtime: Path) -> None:
        self.folder, self.runtime = folder, runtime
        self.environ = {
            **clean("XDG", "PYTHON"),
            "PYTHONPATH": str(ROOT),
            "HOME": str(folder),
            "XDG_RUNTIME_DIR": str(runtime),
        }
        del self.environ["GPUJOB_WARM"]
        self.plain = [sys.executable, "-m", "scheduler"]
        (folder / "patient").mkdir()
        (folder / "patient" / "gpujob").write_text(PATIENT)
        self.command = [sys.executable, str(folder / "patient" / "gpujob")]
        (folder / "probe.py").write_text(PROBE)
        self.probe = f"exec {sys.executable} {folder}/probe.py {folder}/WORLD"

    def begin(self, *words: str, **more: Any) -> subprocess.Popen[bytes]:
        """Start a command and return its process.

        ``more``: arguments for Popen, which override the defaults of this method.
        """
        usual: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([*self.command, *words], **{**usual, "cwd": self.folder, "env": self.environ, **more})

    def run(self, *words: str, **more: Any) -> subprocess.CompletedProcess[bytes]:
        """Run a command until it ends, and return its result."""
        given = more.pop("input", None)
        process = self.begin(*words, **({"stdin": subprocess.PIPE} if given is not None else {}), **more)
        out, errors = process.communicate(given, timeout=60)
        return subprocess.CompletedProcess(words, process.returncode, out, errors)

    def ordinary(self, *words: str, **more: Any) -> subprocess.CompletedProcess[bytes]:
        """Run a command without the warm process, and return its result."""
        environ = more.pop("env", self.environ)
        return self.run(*words, env={**environ, "GPUJOB_WARM": "0"}, **more)

    def servers(self) -> list[int]:
        """Return the pids of the warm processes that listen in the runtime folder."""
        found = []
        for path in (self.runtime / "gpujob").glob("warm-????????????????"):  # not its draft, `….new`
            with contextlib.suppress(OSError):
                made = client.connect(str(path))
                if made is not None:
                    found.append(client.peer_of(made)[0])
                    made.close()
        return found

    def warm(self) -> int:
        """Run a command that starts a warm process. Wait until the warm process listens, and return its pid."""
        self.run("--version")
        (pid,) = wait_for(self.servers, "a warm process")
        return int(pid)

    def end(self) -> None:
        """End the warm processes. If a command has started the server of `ts`, end this server too."""
        if (self.folder / ".local" / "state" / "gpujob" / "ts").exists():
            assert self.ordinary("ts", "-K").returncode == 0
        for pid in self.servers():
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda pid=pid: not alive(pid), "the end of the warm process")


@contextlib.contextmanager
def _caller_in(folder: Path) -> Iterator[Caller]:
    """Yield a caller in a folder.

    The caller's runtime folder has a short path, because the path of a socket must be short.
    """
    found = Caller(folder, Path(tempfile.mkdtemp(prefix="gjw", dir="/tmp")))
    try:
        yield found
    finally:
        found.end()
        shutil.rmtree(found.runtime)


@pytest.fixture
def caller(tmp_path: Path) -> Iterator[Caller]:
    """Return a caller in ``tmp_path``."""
    with _caller_in(tmp_path) as found:
        yield found


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    """Return a caller with one job and a warm process, for tests that only read or submit."""
    with _caller_in(tmp_path_factory.mktemp("shared")) as found:
        found.run("submit", "--label", "first", "--", "true")
        found.warm()
        yield found
