"""The ssh command with which a user reaches the web page from another machine."""

from __future__ import annotations

import os
import pwd
import socket

LOOPBACK = "127.0.0.1"


def user_and_machine() -> str:
    """Return this user and machine as an argument for `ssh`: ``user@host``."""
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        name = str(os.getuid())
    return f"{name}@{socket.gethostname()}"


def tunnel(port: int, target: str = LOOPBACK) -> str:
    """Return the ssh command that forwards a port of the user's own machine to the same port of ``target``."""
    return f"ssh -L {port}:{target}:{port} {user_and_machine()}"
