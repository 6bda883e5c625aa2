"""Changes the stored GPU numbers after the driver renumbered the GPUs, so that they still mean the same GPUs."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import replace

from scheduler.core.allowed import names_nodes
from scheduler.core.gpu import gpu_ids_text
from scheduler.store import jobs as rows


def follow_moved(connection: sqlite3.Connection, moved: Mapping[int, int]) -> list[str]:
    """Replace the GPU numbers in pauses, jobs and holdings. Return messages for the log.

    ``moved``: old number → new number.
    """
    if not moved:
        return []

    def new(ids: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted({moved.get(gpu, gpu) for gpu in ids}))

    changes = [(revision, moved.get(what, what), before) for revision, what, before in rows.pause_changes(connection)]
    queue_paused = bool(rows.meta(connection, "queue_paused"))
    # Drop the pause of a card that is no longer managed if another card has its number now.
    paused = (gpu for gpu in rows.paused_gpus(connection) if gpu in moved or gpu not in moved.values())
    rows.save_pauses(connection, new(paused), queue_paused, changes)
    changed = []
    for job in rows.live(connection):
        allowed = job.allowed if job.allowed is None or names_nodes(job.allowed) else new(map(int, job.allowed))
        if allowed != job.allowed or new(job.gpus) != job.gpus:
            job.allowed, job.gpus = allowed, new(job.gpus)
            changed.append(job)
    rows.save(connection, changed)
    for holding, boot in rows.holdings(connection):
        rows.save_holdings(connection, [replace(holding, gpus=new(holding.gpus))], [], boot)
    which = ", ".join(f"GPU {old} is now GPU {number}" for old, number in sorted(moved.items()))
    jobs = f"; the GPU lists of {len(changed)} jobs were changed accordingly" if changed else ""
    return [f"the driver renumbered the GPUs: {which}; paused GPUs stay paused under their new numbers (paused now: "
            f"{gpu_ids_text(rows.paused_gpus(connection)) or 'none'}){jobs}"]  # fmt: skip
