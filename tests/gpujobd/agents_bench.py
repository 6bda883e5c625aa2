"""A runner of all users in which the test plays the launcher and the agents; the processes of the jobs are real."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from scheduler.core.config import Config
from scheduler.core.job import Job, JobState, Process
from scheduler.core.launch import Launch
from scheduler.core.observations import Ended, Observation
from scheduler.gpujobd import in_hand
from scheduler.gpujobd.agent_channel import Channel, Closed
from scheduler.gpujobd.launcher_link import LauncherLink
from scheduler.gpujobd.users_runner import UsersRunner
from scheduler.system.processes import seen
from tests.builders import a_job
from tests.stories.harness import wait_for

UID, OTHER = 54_321, 54_322  # user ids without names


class Bench:
    """A runner of all users, with the test as the launcher and as the agents."""

    def __init__(self) -> None:
        ours, self.launcher = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.launcher.setblocking(False)
        self.ended = False
        self.again: list[int] = []  # jobs that do not lack a file any more
        self.warnings: list[tuple[int, str]] = []
        config = Config(state_file="/nowhere/state.json", activation_limit=0.0)
        self.runner = UsersRunner(
            LauncherLink(ours), lambda: config, "mark", self.again.append, self._end, print, lambda job: UID
        )
        self.runner.warn = lambda job, text: self.warnings.append((job.id, text))
        self.facts: list[Observation] = []
        self.unread: dict[Channel, list[dict[str, Any]]] = {}
        self.children: list[subprocess.Popen[bytes]] = []

    def _end(self) -> None:
        self.ended = True

    def process(self, uid: int = UID) -> Process:
        """Start a process of a user."""
        child = subprocess.Popen(["sleep", "600"], user=uid)
        self.children.append(child)
        found = seen(child.pid)
        assert found is not None
        return Process(found.pid, found.ticks)

    def kill(self) -> None:
        """Kill the process of the job."""
        self.children[0].kill()
        self.children[0].wait()

    def look(self) -> bool:
        """Take in what the runner has observed; return whether there is anything."""
        self.facts += self.runner.look()
        return bool(self.facts)

    def asked(self) -> dict[str, Any]:
        """Return the next request to the launcher."""
        request: list[dict[str, Any]] = []

        def arrived() -> bool:
            self.look()
            with contextlib.suppress(BlockingIOError):
                request.append(json.loads(self.launcher.recv(4096)))
            return bool(request)

        wait_for(arrived, "a request to the launcher")
        return request[0]

    def agent(self, *, ready: bool = True) -> Channel:
        """Answer the request for an agent, and return the agent's end. ``ready``: it says that it begins its work."""
        return self.answered(self.asked(), ready=ready)

    def agents_end(self, facts: int, *, ready: bool = True) -> None:
        """Let each agent end, after it has got the attempts (``ready``) or at once, until there are so many observations."""

        def ended() -> bool:
            self.look()
            with contextlib.suppress(BlockingIOError):
                channel = self.answered(json.loads(self.launcher.recv(4096)), ready=ready)
                if ready:
                    self.hears(channel, "adopt")
                channel.close()
            return len(self.facts) >= facts

        wait_for(ended, "the observations")

    def answered(self, request: dict[str, Any], *, ready: bool) -> Channel:
        """Answer a request for an agent, and return the agent's end."""
        assert request["do"] == "agent", request
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            answer = {"id": request["id"], "pid": os.getpid(), "ticks": 1}
            socket.send_fds(self.launcher, [json.dumps(answer).encode()], [ours.fileno()])
        channel = Channel(theirs)
        self.unread[channel] = []
        assert self.hears(channel, "settings")
        if ready:
            channel.send({"say": "ready"})
        return channel

    def hears(self, channel: Channel, kind: str) -> dict[str, Any]:
        """Wait until an agent gets a message of this kind; return it."""
        unread = self.unread[channel]

        def arrived() -> bool:
            self.look()
            unread.extend(channel.receive())
            return any(one["do"] == kind for one in unread)

        wait_for(arrived, f"a message: {kind}")
        found = next(one for one in unread if one["do"] == kind)
        unread.remove(found)
        return found

    def running(self, **spec: Any) -> tuple[Job, Process, Channel]:
        """Return a job whose agent says that it runs, its process, and the agent."""
        job = a_job(7, state=JobState.STARTING, attempt=1, uid=UID, user="x", **spec)
        self.runner.start(job, Launch("7.1", ("/bin/sleep",), {}, "/", ""))
        channel = self.agent()
        self.hears(channel, "start")
        process = self.process()
        at = time.time() - 5
        self.say(channel, "started", job=7, attempt=1, process={"pid": process.pid, "ticks": process.ticks}, at=at)
        wait_for(self.look, "the start")
        self.facts.clear()
        return job, process, channel

    def leftovers(self) -> tuple[Job, Process]:
        """Return a job that the agent says has ended, and its live process, which the scheduler then watches."""
        job, process, channel = self.running()
        self.say(channel, "ended", job=7, attempt=1, exit_code=0, signal=None, at=time.time())
        wait_for(self.look, "the end")
        (end,) = self.facts
        assert isinstance(end, Ended) and end.leftovers == (process,)
        self.facts.clear()
        self.runner.watch_leftovers("7.1", 7, 1, end.leftovers)
        return job, process

    @staticmethod
    def say(channel: Channel, kind: str, **value: Any) -> None:
        channel.send({"say": kind, "value": value})

    def is_replaced(self, channel: Channel) -> Channel:
        """Check that an agent loses its connection and that another one adopts the job; return the other one."""

        def closed() -> bool:
            self.look()
            try:
                channel.receive()
            except Closed:
                return True
            return False

        wait_for(closed, "the end of the connection")
        return self.agent()

    def close(self) -> None:
        self.runner.close()
        self.launcher.close()
        for channel in self.unread:
            channel.close()
        for child in self.children:
            child.kill()
            child.wait()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """Yield a `Bench`, and end its processes."""
    monkeypatch.setattr(in_hand, "FIRST_WAIT_S", 0.02)
    made = Bench()
    yield made
    made.close()
