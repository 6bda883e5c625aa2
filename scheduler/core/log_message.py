"""Messages of the daemon, for the main log and other listeners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LogMessage:
    """One sentence, and the job that the sentence is about.

    ``level``: level of the standard library's logging; ``kind``: kind of message, often the kind of the job's event;
    ``log``: the path of the job's log.
    """

    text: str
    level: int = 20  # logging.INFO
    kind: str = ""
    job: int = -1  # job id; -1: about no job
    log: str = ""


Listener = Callable[[LogMessage], None]
