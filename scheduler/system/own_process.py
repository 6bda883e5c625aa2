"""Starts this program again as a separate process, for a scheduler in the background or for the web page."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from scheduler.core.errors import flag
from scheduler.system.forked_command import need_own_process

PROGRAM = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "__main__.py")


def own_command(verb: str, options: Mapping[str, object] | None = None) -> list[str]:
    """Return the command line that runs a verb of this program. A bool option becomes ``--name`` or ``--no-name``.

    The command line names the program's file, because `python -m scheduler` would search the working folder first.
    """
    words = [sys.executable, PROGRAM, verb]
    for name, value in (options or {}).items():
        if isinstance(value, bool):
            words.append(flag(name if value else f"no_{name}"))
        else:
            words += [flag(name), str(value)]
    return words


def start_own(
    words: list[str], environ: Mapping[str, str], *, files: Mapping[int, int] | None = None, folder: str = ""
) -> int:
    """Start a command in a new POSIX session, with /dev/null as its input, and return its pid. Raises OSError.

    ``words``: the command line, for example from `own_command`. ``files``: descriptor in the new process → descriptor
    of this process for the same file; all other descriptors are inherited as usual.
    ``folder``: working folder of the new process; empty: the folder of this process.
    """
    need_own_process(stays=False)
    actions: list[tuple[int, ...] | tuple[int, int, str, int, int]] = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
    ]  # fmt: skip
    actions += [(os.POSIX_SPAWN_DUP2, ours, theirs) for theirs, ours in (files or {}).items()]
    if not folder:
        return os.posix_spawn(sys.executable, words, environ, file_actions=actions, setsid=True)
    before = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    os.chdir(folder)  # posix_spawn cannot set the working folder
    try:
        return os.posix_spawn(sys.executable, words, environ, file_actions=actions, setsid=True)
    finally:
        os.fchdir(before)
        os.close(before)
