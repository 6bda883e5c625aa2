"""How the page is reached: the words for whoever has started it."""

from __future__ import annotations

import os
import pwd
import socket

LOOPBACK = "127.0.0.1"


def user_and_machine() -> str:
    """This user and machine, as `ssh` would be told."""
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        name = str(os.getuid())
    return f"{name}@{socket.gethostname()}"


def tunnel(port: int, target: str = LOOPBACK) -> str:
    """The command that leads here from a laptop; the port is the same at both ends."""
    return f"ssh -L {port}:{target}:{port} {user_and_machine()}"
