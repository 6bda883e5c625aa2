"""Names of the terminal sessions of jobs."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence

LONGEST_MODE = 20
LONGEST_GPUS = 30  # keeps the whole name below the 80 characters that screen accepts


def session_name(job: int, gpus: Sequence[int], arguments: Sequence[str]) -> str:
    """Return the session name ``gpujob_<gpus>_<mode>_<id>``.

    ``<gpus>``: the GPUs joined by ``-``; ``<mode>``: the value of ``--mode`` in ``arguments``; ``<id>``: the job's id.
    """
    which = "-".join(map(str, gpus)) or "cpu"
    if len(which) > LONGEST_GPUS:
        which = f"{len(gpus)}gpus"
    return f"gpujob_{which}_{mode_of(arguments)}_{job}"


def mode_of(arguments: Sequence[str]) -> str:
    """Return the value of ``--mode``, at most `LONGEST_MODE` characters; ``unknown`` if there is none.

    Characters other than letters, digits, ``_`` and ``-`` are replaced by ``_``.
    """
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
    """Return ``name`` cut to at most ``most`` characters. The job id at its end stays whole."""
    if len(name) <= most:
        return name
    head, _, job = name.rpartition("_")
    return f"{head[: most - len(job) - 1]}_{job}"


def free_name(name: str, short_id: str, attempt: int, taken: Container[str]) -> str:
    """Return ``name`` if it is not in ``taken``, else a longer name that is not in ``taken``.

    The longer name ends in the scheduler's short id. If this name is taken, too, the number of the attempt or another
    number follows the short id.
    """
    for candidate in (name, f"{name}_{short_id}", f"{name}_{short_id}_a{attempt}"):
        if candidate not in taken:
            return candidate
    number = 2
    while f"{name}_{short_id}_{number}" in taken:
        number += 1
    return f"{name}_{short_id}_{number}"
