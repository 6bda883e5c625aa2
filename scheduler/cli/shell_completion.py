"""Answers a shell's request for completions after TAB."""

from __future__ import annotations

import contextlib
import os
import signal

from scheduler.cli.app import run

PATIENCE_S = 3.0  # a disk that hangs must not block the user's shell for longer


def answer(words: list[str]) -> int:
    """Print the completions and return the exit code.

    An error prints nothing, since the shell would show it in the typed line.
    """
    signal.signal(signal.SIGALRM, lambda *_: os._exit(1))
    signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)
    _join_equals(os.environ)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        try:
            return run(words)
        except Exception:  # noqa: BLE001  the shell would print it into the line that is being typed
            return 1


def _join_equals(environ: os._Environ[str]) -> None:
    """Remove the words ``=`` from COMP_WORDS: bash splits ``--state=fa`` into three words, but Click expects two."""
    if not environ.get("COMP_CWORD", "").isdigit():
        return
    words, current = environ.get("COMP_WORDS", "").split("\n"), int(environ["COMP_CWORD"])
    for at in range(min(current, len(words) - 1), 1, -1):
        if words[at] == "=" and words[at - 1].startswith("--"):
            if at == current:
                words[at] = ""
            else:
                del words[at]
                current -= 1
    environ["COMP_WORDS"], environ["COMP_CWORD"] = "\n".join(words), str(current)
