"""Tests of the fork server (fork_server.py)."""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import fork_server


def test_the_exit_code_of_a_command_that_ends_early_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client gets the exit code of a command even if the command ends before the client begins to wait for it."""
    send_fds = socket.send_fds

    def send_and_wait(connection: socket.socket, data: list[bytes], files: Sequence[int]) -> int:
        sent = send_fds(connection, data, list(files))
        poll = select.poll()
        poll.register(connection, select.POLLRDHUP)
        assert poll.poll(60_000), "the command has not ended"
        return sent

    def code(word: str) -> int:
        return fork_server.run((word,), tmp_path, environ, "", 60).returncode

    environ = {**os.environ, "PYTHONPATH": str(fork_server.ROOT), "PYTHONUNBUFFERED": "1"}
    monkeypatch.setattr(socket, "send_fds", send_and_wait)
    assert (code("--version"), code("no-such-verb")) == (0, 2)


def test_the_fork_server_keeps_no_variable_of_its_first_command(tmp_path: Path) -> None:
    """A fork server keeps no variable of its first command.

    If it kept a crash point, later commands would be killed.
    """
    environ = {
        **os.environ,
        "PYTHONPATH": str(fork_server.ROOT),
        "XDG_RUNTIME_DIR": str(tmp_path),  # `add` looks for running schedulers there
        "PYTHONVERBOSE": "",
    }  # a value that no other test uses, so that a new server is started
    words = ("add", "train.py")
    (tmp_path / "train.py").touch()
    killed = fork_server.run(words, tmp_path, {**environ, "GPUJOB_CRASH_AT": "add.written"}, "", 60)
    assert killed.returncode == -signal.SIGKILL
    assert fork_server.run(words, tmp_path, environ, "", 60).returncode == 0
