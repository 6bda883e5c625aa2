"""The scheduler's end of the connection to the launcher: requests for agents and signals (`launcher.py: REQUESTS`)."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from scheduler.core.job import Process
from scheduler.system.typed_json import from_json, to_json

LONGEST = 65_536  # bytes of an answer


class LauncherGone(Exception):
    """The launcher has ended, so this scheduler must end, too: the next launcher starts another one."""


@dataclass(frozen=True, slots=True)
class AgentStarted:
    """An agent was started: its process, and a socket to it."""

    process: Process
    connection: socket.socket


Answered = Callable[[AgentStarted | str], None]  # called with the agent, or with a sentence that says why there is none


class LauncherLink:
    """Requests to the launcher, and its answers. No method blocks. ``connection``: a SOCK_SEQPACKET socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.setblocking(False)
        self._number = 0
        self._waiting: dict[int, Answered | None] = {}
        self._unsent: list[bytes] = []

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._socket.fileno()

    def start_agent(self, uid: int, answered: Answered) -> None:
        """Request an agent for a user. ``answered`` is called by `look`."""
        self._ask({"do": "agent", "uid": uid}, answered)

    def signal(self, uid: int, process: Process, number: int) -> None:
        """Request a signal to a process of a user. Nothing happens if the process is gone or another user's."""
        self._ask({"do": "signal", "uid": uid, "pid": process.pid, "ticks": process.ticks, "number": number}, None)

    def _ask(self, request: dict[str, Any], answered: Answered | None) -> None:
        self._number += 1
        self._waiting[self._number] = answered
        self._unsent.append(to_json({**request, "id": self._number}))
        self.flush()

    def flush(self) -> None:
        """Send the requests that wait. Raises LauncherGone."""
        while self._unsent:
            try:
                self._socket.send(self._unsent[0])
            except BlockingIOError:
                return
            except OSError:
                raise LauncherGone from None
            del self._unsent[0]

    def look(self) -> None:
        """Read the answers, and pass them to those who asked. Raises LauncherGone."""
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._socket, LONGEST, 4, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except OSError:
                raise LauncherGone from None
            if not data:
                raise LauncherGone
            answer = from_json(data)
            answered = self._waiting.pop(answer.get("id") or 0, None)
            if answered is None or len(fds) != 1:
                for fd in fds:
                    os.close(fd)
            if answered is not None:
                if len(fds) == 1:
                    answered(AgentStarted(Process(answer["pid"], answer["ticks"]), socket.socket(fileno=fds[0])))
                else:
                    answered(str(answer.get("error") or "the launcher gave no agent"))

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()
