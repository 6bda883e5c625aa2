"""Sends a request to the daemon, or carries it out without a daemon. Waits until the state file shows the result."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from scheduler.client.client import SchedulerClient
from scheduler.client.locate import settings_if_readable
from scheduler.core.errors import NotAsked
from scheduler.core.requests import Answer, Pause, PauseQueue, Request, Resume
from scheduler.system.safe_open import plain
from scheduler.system.waiting import wait_until

SHOWN_S = 0.5  # seconds that a verb waits for the state file


def do(
    client: SchedulerClient,
    request: Request,
    config: str | None = None,
    one_by_one: contextlib.AbstractContextManager[object] | None = None,
) -> tuple[Answer, bool]:
    """Send the request to the daemon, or carry it out if none runs; return the answer and whether a daemon answered.

    ``one_by_one``: a lock for a process with several threads; all threads pass the same lock. The reason: while one
    thread carries out a request, it holds the daemon's lock, and another thread would believe that a daemon runs.
    Raises SchedulerError.
    """
    from scheduler.client.offline import carry_out
    from scheduler.store.daemon_lock import Taken

    while True:
        with one_by_one or contextlib.nullcontext():
            if not client.alive() and not client.shared:
                settings = settings_if_readable({"state_file": client.places.state_file}, config)
                with contextlib.suppress(Taken):  # a daemon has just started: ask it
                    return carry_out(client.places, settings.config, request), False
        with contextlib.suppress(NotAsked):  # it has just ended: try again without it
            return client.ask(request), True


def revision_of(state_file: str) -> int:
    """Return the revision of the state file; 0 if the file is absent or cannot be read."""
    revision = _read(state_file).get("revision")
    return revision if isinstance(revision, int) else 0


def until_shown(state_file: str, request: Pause | Resume | PauseQueue, before: int) -> None:
    """Wait, at most ``SHOWN_S`` seconds, until the state file shows the result of a request.

    ``before``: the revision of the state file when the request was made. The function always waits for a later
    revision, even if revision ``before`` already shows the wanted pauses. Otherwise, after the return of
    this function, a user could edit revision ``before``. The scheduler would ignore this edit, because revision
    ``before`` is older than the request.
    """
    wait_until(lambda: revision_of(state_file) > before and _shows(_read(state_file), request), SHOWN_S, every_s=0.003)


def _shows(document: dict[str, Any], request: Pause | Resume | PauseQueue) -> bool:
    if isinstance(request, PauseQueue):
        return document.get("paused") is request.on
    paused = document.get("paused_gpus")
    return isinstance(paused, list) and all((gpu in paused) is isinstance(request, Pause) for gpu in request.gpus)


def _read(state_file: str) -> dict[str, Any]:
    """Return the contents of the state file; {} if it is absent or not valid, for example while a user saves it."""
    try:
        with open(state_file, encoding="utf-8", opener=plain) as stream:
            document = json.load(stream)
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
