"""Three real users with a folder each, and a folder in which their schedulers share bookings."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.stories.conftest import scheduler  # noqa: F401  a fixture
from tests.stories.machine import machine  # noqa: F401  a fixture
from tests.stories.people import Daemon, User, loaded  # noqa: F401  a fixture

JOB = """#!/bin/sh
# job.sh KEY SECONDS: notes its GPUs, its share and its time, all in one line.
read -r start rest < /proc/uptime
sleep "$2"
read -r end rest < /proc/uptime
echo "$1 $GPUJOB_GPUS $GPUJOB_SHARE $start $end" >> ledger
"""


@dataclass
class Person:
    """A user with a folder, and the schedulers that the user has started in it."""

    user: User
    folder: Path
    bookings: Path
    daemons: list[Daemon] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)

    def start(self, *words: str, ready: bool = True) -> Daemon:
        """Start a scheduler in the user's folder."""
        daemon = Daemon(self.user, self.folder, *(words or ("--gpus", "4")), GPUJOB_BOOKINGS_FOLDER=str(self.bookings))
        self.daemons.append(daemon)
        return daemon.ready() if ready else daemon

    def kill(self) -> None:
        """Kill the newest scheduler by SIGKILL; its jobs continue."""
        daemon = self.daemons[-1]
        os.kill(daemon.pid, signal.SIGKILL)
        os.waitid(os.P_PID, daemon.pid, os.WEXITED | os.WNOWAIT)

    def gpujob(self, *words: str) -> tuple[int, str]:
        return self.user.gpujob(self.folder, *words, GPUJOB_BOOKINGS_FOLDER=str(self.bookings), GPUJOB_WARM="0")

    def append(self, *lines: str) -> None:
        """Append lines to the user's jobs file."""
        with (self.folder / "jobs.txt").open("a") as stream:
            stream.write("".join(f"{line}\n" for line in lines))

    def line(self, key: str, seconds: float, need: str) -> str:
        """Return the line of a job that notes itself in the ledger."""
        self.keys.append(key)
        return f"0,job.sh,,{key} {seconds:.3f};gpus={need}"

    def ledger(self) -> list[tuple[str, tuple[int, ...], float, float, float]]:
        """Return key, GPUs, share of each GPU, start and end of the jobs that have ended."""
        path = self.folder / "ledger"
        found = []
        for line in path.read_text().splitlines() if path.exists() else ():
            key, gpus, share, start, end = line.split()
            found.append((key, tuple(map(int, gpus.split(","))), float(share), float(start), float(end)))
        return found


def most_of_a_gpu(people: list[Person]) -> float:
    """Return the largest share of one GPU that jobs of all users had at the same time."""
    moments: list[tuple[float, int, float, int]] = []
    for person in people:
        for _, gpus, share, start, end in person.ledger():
            for gpu in gpus:
                if end > start:
                    moments += [(start, 1, share, gpu), (end, 0, -share, gpu)]
    booked, most = dict[int, float](), 0.0
    for _, _, share, gpu in sorted(moments):  # at equal times ends come first: the clock has steps of 10 ms
        booked[gpu] = booked.get(gpu, 0.0) + share
        most = max(most, booked[gpu])
    return round(most, 6)


@pytest.fixture
def people(loaded: None) -> Iterator[list[Person]]:  # noqa: F811
    """Yield three users without schedulers."""
    if os.getuid() != 0:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("users are made by root")
    bookings = Path(tempfile.mkdtemp(prefix="gj-bookings-", dir="/tmp"))
    bookings.chmod(0o1777)
    made: list[Person] = []
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, bookings)
        for letter, place in (("x", "plain"), ("y", "with spaces"), ("z", "ümläut")):
            name = f"gj{os.getpid() % 100_000}{letter}"
            subprocess.run(["useradd", "-M", "-U", name], check=True)
            stack.callback(subprocess.run, ["userdel", name], check=True)
            uid, gid = (int(subprocess.check_output(["id", which, name])) for which in ("-u", "-g"))
            folder = Path(tempfile.mkdtemp(prefix=f"gj-{place}-", dir="/tmp"))
            stack.callback(shutil.rmtree, folder)
            job = folder / "job.sh"
            job.write_text(JOB)
            job.chmod(0o755)
            (folder / "jobs.txt").touch(0o600)
            for path in (folder, job, folder / "jobs.txt"):
                os.chown(path, uid, gid)
            person = Person(User(name, uid, gid), folder, bookings)
            made.append(person)
            stack.callback(end_all, person)
        yield made


def end_all(person: Person) -> None:
    """Kill all schedulers and processes of a user."""
    for daemon in person.daemons:
        daemon.end()
