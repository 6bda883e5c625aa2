"""The name of a job's terminal session."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence

LONGEST_MODE = 20
LONGEST_GPUS = 30  # keeps the whole below the 80 characters that screen takes


def session_name(job: int, gpus: Sequence[int], arguments: Sequence[str]) -> str:
    """``gpujob_<gpus>_<mode>_<id>``: GPUs joined by ``-``, the mode from ``--mode``; letters, digits, ``_``, ``-``."""
    which = "-".join(map(str, gpus)) or "cpu"
    if len(which) > LONGEST_GPUS:
        which = f"{len(gpus)}gpus"
    return f"gpujob_{which}_{mode_of(arguments)}_{job}"


def mode_of(arguments: Sequence[str]) -> str:
    """The value of ``--mode``, made safe for a session's name; ``unknown`` without one."""
    for position, word in enumerate(arguments):
        value = ""
        if word == "--mode" and position + 1 < len(arguments):
            value = arguments[position + 1]
        elif word.startswith("--mode="):
            value = word[len("--mode=") :]
        safe = re.sub(r"[^A-Za-z0-9_-]+", "_", value)[:LONGEST_MODE].strip("_")
        if safe:
            return safe
    return "unknown"


def shortened(name: str, most: int) -> str:
    """``name`` cut to ``most`` characters, before the id at its end."""
    if len(name) <= most:
        return name
    head, _, job = name.rpartition("_")
    return f"{head[: most - len(job) - 1]}_{job}"


def free_name(name: str, short_id: str, attempt: int, taken: Container[str]) -> str:
    """``name``, or with this scheduler's short id, and then the attempt, where another session has it already."""
    for candidate in (name, f"{name}_{short_id}", f"{name}_{short_id}_a{attempt}"):
        if candidate not in taken:
            return candidate
    number = 2
    while f"{name}_{short_id}_{number}" in taken:
        number += 1
    return f"{name}_{short_id}_{number}"
