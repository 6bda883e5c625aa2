"""A message of the scheduler: one sentence, for the main log and for whoever listens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LogMessage:
    """One sentence, and the job that it is about. ``level``: of the standard library's logging."""

    text: str
    level: int = 20  # logging.INFO
    kind: str = ""
    job: int = -1  # none
    name: str = ""
    log: str = ""


Listener = Callable[[LogMessage], None]
