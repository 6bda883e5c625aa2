"""Tests of the client of the scheduler of all users against a socket that behaves as the scheduler may."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scheduler.client import remote_calls
from scheduler.client.remote_calls import BUSY, error_as_json
from scheduler.client.system_client import SystemClient
from scheduler.core.errors import NoDaemon, Refused
from scheduler.system.typed_json import to_json

Answering = Callable[[socket.socket], None]


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[Callable[[Answering], SystemClient]]:
    """Yield a function that returns a client, whose connections are answered by a function."""
    tmp_path.chmod(0o700)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(tmp_path / "s"))
    listener.listen(8)

    def serve(answering: Answering) -> SystemClient:
        def run() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    answering(connection)

        threading.Thread(target=run, daemon=True).start()
        made = SystemClient(str(tmp_path / "s"))
        made.restart_s = 0.2
        return made

    yield serve
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def test_the_reason_is_told_if_the_scheduler_has_closed_the_connection_before_the_call(
    listening: Callable[[Answering], SystemClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler with too many connections answers and closes at once. A slow client must read this answer all the same."""
    send = remote_calls.send
    busy = to_json({"error": error_as_json(Refused("too many connections", code=BUSY))})
    client = listening(lambda connection: send(connection, busy))

    def late(connection: socket.socket, data: bytes) -> None:
        poll = select.poll()
        poll.register(connection, select.POLLRDHUP)
        assert poll.poll(60_000), "the other end is still open"
        send(connection, data)

    monkeypatch.setattr(remote_calls, "send", late)
    for call in ("alive", "reset"):
        with pytest.raises(Refused, match="too many connections"):
            client.call(call, {})


def test_a_connection_that_is_closed_without_an_answer_says_so(listening: Callable[[Answering], SystemClient]) -> None:
    client = listening(lambda connection: None)
    with pytest.raises(NoDaemon, match="has closed the connection; look at"):
        client.call("alive", {})
    with pytest.raises(NoDaemon, match="not known whether it has carried out the request"):
        client.call("reset", {})
