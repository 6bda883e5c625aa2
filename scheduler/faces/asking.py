"""Something asked of the scheduler, by the daemon or without one: for the verbs and for the page."""

from __future__ import annotations

import contextlib
import json
import time

from scheduler.core.errors import NotAsked
from scheduler.core.requests import Answer, Pause, PauseQueue, Request, Resume
from scheduler.desk import Desk
from scheduler.faces.finding import settings_if_readable
from scheduler.opening import plain

SHOWN_S = 0.5  # so long it is waited until the state file shows what was done


def do(
    desk: Desk,
    request: Request,
    config: str | None = None,
    one_by_one: contextlib.AbstractContextManager[object] | None = None,
) -> tuple[Answer, bool]:
    """What was asked, by the daemon or without one: the answer, and whether one runs. Raises SchedulerError.

    ``one_by_one``: a lock, for several threads of one process: who acts without a daemon looks like one to the others.
    """
    from scheduler.engine.offline import carry_out
    from scheduler.store.office import Taken

    while True:
        with one_by_one or contextlib.nullcontext():
            if not desk.alive():
                settings = settings_if_readable({"state_file": desk.places.state_file}, config)
                with contextlib.suppress(Taken):  # a daemon has started meanwhile: then it is to be asked
                    return carry_out(desk.places, settings.config, request), False
        with contextlib.suppress(NotAsked):  # it has ended meanwhile: then it is to be done without
            return desk.ask(request), True


def revision_of(state_file: str) -> int:
    """The number of the picture in the state file, 0 if there is none."""
    try:
        with open(state_file, encoding="utf-8", opener=plain) as stream:
            return int(json.load(stream)["revision"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def until_shown(state_file: str, request: Pause | Resume | PauseQueue, before: int) -> None:
    """Wait a moment for the state file: who edits it next must find there what was just done.

    ``before``: the number of the picture that stood there when it was asked for. The next one is waited for, also where the old
    one says the same: an edit of the old one would be taken for an earlier wish than the verb.
    """
    end = time.monotonic() + SHOWN_S
    while time.monotonic() < end:
        try:
            with open(state_file, encoding="utf-8", opener=plain) as stream:
                document = json.load(stream)
            if document["revision"] <= before:
                shown = False
            elif isinstance(request, PauseQueue):
                shown = document["paused"] is request.on
            else:
                shown = all((gpu in document["paused_gpus"]) is isinstance(request, Pause) for gpu in request.gpus)
        except (OSError, ValueError, KeyError, TypeError):
            shown = False  # somebody is saving it
        if shown:
            return
        time.sleep(0.003)
