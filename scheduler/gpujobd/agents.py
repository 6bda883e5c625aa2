"""The agents of all users: asks the launcher for them, exchanges messages with them, and replaces those that hang.

What the messages say is not their concern: `Listener` (the runner, `users_runner.py`) handles them.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Callable
from typing import Any, Protocol

from scheduler.core.job import Process
from scheduler.gpujobd.agent_channel import Channel, Closed
from scheduler.gpujobd.agent_messages import INVALID, is_known, without_surrogates
from scheduler.gpujobd.in_hand import UserState
from scheduler.gpujobd.launcher_link import AgentStarted, LauncherGone, LauncherLink

BEGIN_S = 60.0  # an agent that has not begun its work by then is replaced
MOST_PACKETS = 16  # of an agent in one look: an agent must not keep the scheduler from others
SILENT_S = 30.0  # an agent that says nothing for this time is asked whether it lives, and then has as long to answer
LONGEST_MESSAGE, MOST_PARTS = 16 << 20, 1_000_000  # bytes, arrays and objects of a message of an agent


class Listener(Protocol):
    """Handles what agents say, and what becomes of them."""

    def settings(self) -> dict[str, Any]:
        """Return the message with which each agent begins."""

    def activation_limit_s(self) -> float:
        """Return how long an agent may be silent while it activates an environment."""

    def hear(self, user: UserState, message: Any) -> None:
        """Handle a message; None: one of an unknown form. Raises one of `INVALID` if it is not valid."""

    def refused(self, user: UserState, why: str) -> None:
        """Handle that a user has no agent."""

    def dropped(self, user: UserState, began: bool) -> None:
        """Handle that an agent has ended or was ended. ``began``: whether it had begun its work."""

    def launcher_ended(self) -> None:
        """Handle that the launcher has ended, without which no agent starts."""


class Agents:
    """The connections to the agents and to the launcher."""

    def __init__(self, link: LauncherLink, listener: Listener) -> None:
        self.launcher_gone = False
        self._link, self._listener = link, listener
        self._channels: dict[int, UserState] = {}  # by descriptor
        self._epoll = select.epoll()
        self._epoll.register(link, select.EPOLLIN)

    def descriptor(self) -> int:
        """Return the epoll descriptor of all connections."""
        return self._epoll.fileno()

    def close(self) -> None:
        """Close all connections. The agents end, and the attempts continue."""
        for user in self._channels.values():
            if user.channel is not None:
                user.channel.close()
        self._link.close()
        self._epoll.close()

    # -- the launcher -------------------------------------------------------------------------------------

    def ask(self, user: UserState) -> None:
        """Ask the launcher for an agent of a user, unless it is too early to ask again."""
        if user.asked or self.launcher_gone or time.monotonic() < user.due:
            return
        user.asked = True
        self._with_launcher(lambda: self._link.start_agent(user.uid, lambda answer: self._answered(user, answer)))

    def signal(self, user: UserState, process: Process, number: int) -> None:
        """Have the launcher send a signal to a process of a user."""
        self._with_launcher(lambda: self._link.signal(user.uid, process, number))

    def _with_launcher(self, act: Callable[[], None]) -> None:
        if self.launcher_gone:
            return
        try:
            act()
        except LauncherGone:
            self.launcher_gone = True
            self._epoll.unregister(self._link)
            self._listener.launcher_ended()

    def _look_at_launcher(self) -> None:
        self._link.look()
        self._link.flush()

    def _answered(self, user: UserState, answer: AgentStarted | str) -> None:
        user.asked = False
        user.due = time.monotonic() + user.wait.next()
        if isinstance(answer, str):
            self._listener.refused(user, answer)
            return
        user.channel, user.ready, user.idle_since = Channel(answer.connection, LONGEST_MESSAGE, MOST_PARTS), False, None
        user.heard, user.pinged = time.monotonic(), 0.0
        user.ready_due = user.heard + BEGIN_S
        self._epoll.register(user.channel, select.EPOLLIN)
        self._channels[user.channel.fileno()] = user
        self.send(user, self._listener.settings())

    # -- messages -----------------------------------------------------------------------------------------

    def send(self, user: UserState, message: dict[str, Any]) -> None:
        """Send a message to the agent of a user, if there is one."""
        if user.channel is not None:
            try:
                user.channel.send(message)
            except Closed:
                self.drop(user)
                return
            self._watch(user)

    def send_settings(self) -> None:
        """Send the settings to all agents."""
        for user in list(self._channels.values()):
            self.send(user, self._listener.settings())

    def _watch(self, user: UserState) -> None:
        if user.channel is not None:
            wanted = select.EPOLLIN | (select.EPOLLOUT if user.channel.waits else 0)
            self._epoll.modify(user.channel.fileno(), wanted)

    def look(self) -> None:
        """Handle all that the agents and the launcher have said."""
        for fd, _ in self._epoll.poll(0):
            if fd in self._channels:
                self._receive(self._channels[fd])
        self._with_launcher(self._look_at_launcher)

    def _receive(self, user: UserState) -> None:
        if user.channel is None:
            return
        try:
            user.channel.flush()
            messages = user.channel.receive(MOST_PACKETS)
            self._watch(user)
            if messages:
                user.heard, user.pinged = time.monotonic(), 0.0
            channel = user.channel
            for message in messages:
                if user.channel is not channel:
                    return  # it was dropped
                self._listener.hear(user, without_surrogates(message) if is_known(message) else None)
        except (Closed, *INVALID):  # it has ended, or says what an agent never says: the next agent adopts its jobs
            self.drop(user)

    def drop(self, user: UserState) -> None:
        """End the connection to an agent. Before it starts another one of the user, the launcher kills this one."""
        if user.channel is None:
            return
        for _ in range(2):  # the first read reports that the agent has ended without reading all (ECONNRESET)
            with contextlib.suppress(Closed, *INVALID):
                for message in user.channel.receive():
                    if isinstance(message, dict) and message.get("say") == "cannot":
                        self._listener.hear(user, without_surrogates(message))
        del self._channels[user.channel.fileno()]
        self._epoll.unregister(user.channel)
        user.channel.close()
        user.channel, user.trouble = None, ""
        began, user.ready = user.ready, False
        self._listener.dropped(user, began)

    # -- silent agents ------------------------------------------------------------------------------------

    def alive_due(self, user: UserState) -> float:
        """Return when to ask an agent whether it lives, or when to end it because it has not answered (monotonic seconds).

        An agent that activates an environment answers afterwards.
        """
        if not user.pinged:
            return user.heard + SILENT_S
        return user.pinged + SILENT_S + self._listener.activation_limit_s()

    def check_alive(self, user: UserState, now: float) -> None:
        """Ask an agent whether it lives if it says nothing; end it if it does not answer: the next one adopts its jobs."""
        if not user.ready and now >= user.ready_due:
            self.drop(user)
            return
        if now < self.alive_due(user):
            return
        if not user.pinged:
            user.pinged = now
            self.send(user, {"do": "ping"})
            return
        self.drop(user)
