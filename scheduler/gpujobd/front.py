"""The front: accepts the connections of users and answers their calls (`calls.py`).

A child of the scheduler: ``python -I -m scheduler.gpujobd.front SETTINGS``, with a pipe that ends with the scheduler. The
kernel tells who asks (SO_PEERCRED). Each connection has a thread, and each user a limited number of connections, so nobody
can keep others out.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from scheduler.client.remote_calls import BUSY, LONGEST_CALL, Gone, error_as_json, receive, send
from scheduler.core.errors import Refused
from scheduler.daemon.helper_child import LIFE
from scheduler.gpujobd.calls import Calls
from scheduler.system.typed_json import from_json, to_json, typed
from scheduler.warm.client import peer_of

MOST_CONNECTIONS = 512
MOST_OF_A_USER = 32
MOST_CALLS = 8  # calls of a user at the same time; further ones wait
IDLE_CONNECTION_S = 120.0  # a connection without calls is closed
CALL_S = 10.0  # for a whole call to arrive, and for an answer to be read
ACCEPT_AGAIN_S = 0.05
MOST_MEMORY = 4 << 30  # bytes: more cannot be needed for honest calls, and the machine must not run out of memory
STACK = 1 << 20  # bytes of a thread


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of the front. ``socket``: its path; ``state_file``: of the scheduler."""

    socket: str
    state_file: str


class Connections:
    """The connections of the users, and the answers to their calls."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self._lock = threading.Lock()
        self._open: Counter[int] = Counter()  # user id → connections
        self._busy: dict[int, threading.Semaphore] = {}  # user id → a place for each call at the same time
        self._nameless = threading.Semaphore(MOST_OF_A_USER)  # connections of user ids without a name

    def serve(self, listener: socket.socket, life: int) -> None:
        """Accept connections until the descriptor ``life`` is readable or at its end."""
        poll = select.poll()  # unlike `select`, it can wait for any descriptor
        poll.register(listener, select.POLLIN)
        poll.register(life, select.POLLIN)
        while not any(fd == life for fd, _ in poll.poll()):
            try:
                connection, _ = listener.accept()
                uid = peer_of(connection)[1]
            except OSError:  # the caller has given up, or there is no free descriptor
                time.sleep(ACCEPT_AGAIN_S)
                continue
            if not self._take(uid):
                _turn_away(connection, own=self._open[uid] >= MOST_OF_A_USER)
                continue
            try:
                threading.Thread(target=self._serve_one, args=(connection, uid), daemon=True).start()
            except (RuntimeError, MemoryError):  # no memory for another thread
                connection.close()
                self._leave(uid)

    def _take(self, uid: int) -> bool:
        """Count a connection of a user; return whether the user may have it."""
        with self._lock:
            if self._open.total() >= MOST_CONNECTIONS or self._open[uid] >= MOST_OF_A_USER:
                return False
            self._open[uid] += 1
            self._busy.setdefault(uid, threading.Semaphore(MOST_CALLS))
            return True

    def _serve_one(self, connection: socket.socket, uid: int) -> None:
        try:
            with connection, self._place_of_nameless(uid) as has_place:
                if has_place:
                    self._talk(connection, uid)
        finally:
            self._leave(uid)

    def _leave(self, uid: int) -> None:
        with self._lock:
            self._open[uid] -= 1
            if not self._open[uid]:
                del self._open[uid], self._busy[uid]

    @contextlib.contextmanager
    def _place_of_nameless(self, uid: int) -> Iterator[bool]:
        """Yield whether the caller may talk: all ids without a name together have as many connections as one user.

        A user may have thousands of such ids (/etc/subuid).
        """
        if self.calls.has_name(self.calls.caller_of(uid)):
            yield True
            return
        has_place = self._nameless.acquire(blocking=False)
        try:
            yield has_place
        finally:
            if has_place:
                self._nameless.release()

    def _talk(self, connection: socket.socket, uid: int) -> None:
        """Answer the calls of a connection until it ends."""
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        while poll.poll(IDLE_CONNECTION_S * 1000):
            try:
                with self._busy[uid]:
                    call = receive(connection, LONGEST_CALL, time.monotonic() + CALL_S)
                    answer = self.calls.answer(uid, call)
                    connection.settimeout(CALL_S)
                    send(connection, answer)
            except Gone:
                return


def _turn_away(connection: socket.socket, *, own: bool) -> None:
    """Answer that there are too many connections, and close this one. ``own``: the user has too many."""
    text = "there are too many connections to the scheduler of this machine"
    text += f": a user may have {MOST_OF_A_USER} at the same time" if own else ""
    error = Refused(text, do="run fewer commands at once" if own else "try again later", code=BUSY)
    with connection, contextlib.suppress(Gone, OSError):
        connection.setblocking(False)
        send(connection, to_json({"error": error_as_json(error)}))


def listen(path: str) -> socket.socket:
    """Return a socket that listens at ``path``, which every user may use. Raises OSError."""
    fresh = f"{path}.new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(fresh)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    made.bind(fresh)
    os.chmod(fresh, 0o666)  # noqa: S103  every user may ask; the kernel tells who asks
    made.listen(128)
    os.rename(fresh, path)  # no moment without a socket
    return made


def limit_memory() -> None:
    """Limit the memory of this process. A call that needs more fails."""
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY, MOST_MEMORY))
    threading.stack_size(STACK)


def main() -> int:
    """Run the front. Return the exit code."""
    settings = typed(from_json(sys.argv[1]), Settings)
    life = int(os.environ.pop(LIFE))
    os.umask(0o077)
    limit_memory()
    try:
        listener = listen(settings.socket)
    except OSError as error:
        print(f"! cannot listen at {settings.socket}: {error.strerror}", flush=True)
        return 1
    Connections(Calls(settings.state_file, os.environ)).serve(listener, life)
    return 0


if __name__ == "__main__":
    sys.exit(main())
