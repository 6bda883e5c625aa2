"""`gpujob ts …`: the actions of GPU Task Spooler, carried out by a gpujob scheduler (docs/ts.md)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from scheduler.core.errors import SchedulerError
from scheduler.system.terminal_text import safe
from scheduler.ts.spooler import ERROR, NoSuchJob, RequestError, Spooler, give_up_stdout
from scheduler.ts.words import Mistake, Typed, read

ONLY_TELLING = "iaF"  # actions that report an unknown job on stdout with exit code 0, as in the original


def run(words: Sequence[str]) -> int:
    """Run a `ts` command line and return the exit code: 255 after an error, which is printed on stderr."""
    environ = dict(os.environ)
    try:
        code = _do(Spooler(environ), read(words))
        sys.stdout.flush()
        return code
    except Mistake as error:
        print(f"{safe(str(error))}\nTry ts -h", file=sys.stderr)
    except RequestError as error:
        print(f"Error in the request: {safe(str(error))}", file=sys.stderr)
    except SchedulerError as error:
        print(f"Error in the request: {safe(' '.join(error.lines))}", file=sys.stderr)
    except BrokenPipeError:
        raise
    except OSError as error:
        about = f"{error.filename}: " if error.filename else ""
        print(f"Error in the request: {safe(f'{about}{error.strerror}')}", file=sys.stderr)
        give_up_stdout()
    return ERROR


def _do(spooler: Spooler, typed: Typed) -> int:
    """Carry out a parsed command line and return the exit code. Raises Mistake, RequestError, SchedulerError."""
    action = typed.action
    if action == "h":
        from scheduler.ts.manual import USAGE

        print(USAGE, end="")
        return 0
    if action == "V":
        from scheduler import __version__

        print(f"Task Spooler, implemented by gpujob {__version__}")
        return 0
    if action == "K":
        spooler.server.retire()
        return 0
    spooler.server.begin()
    if action == "add":
        from scheduler.ts.submission import queue

        return queue(spooler, typed)
    try:
        return _action(spooler, action)(typed.value)
    except NoSuchJob as error:
        if action not in ONLY_TELLING:
            raise
        print(safe(str(error)))
        return 0


def _action(spooler: Spooler, action: str) -> Callable[[str | None], int]:
    from scheduler.ts import actions

    found: Callable[[str | None], int] = getattr(actions.Actions(spooler), actions.NAMES[action])
    return found
