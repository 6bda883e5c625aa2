"""-K: what waits in the queue of a server that has ended is cancelled."""

from __future__ import annotations

from scheduler.core.requests import Cancel
from scheduler.desk import Desk
from scheduler.engine.offline import carry_out
from scheduler.intake.settings import without_config


def cancel_waiting(state_file: str) -> None:
    """No scheduler runs on it. Raises SchedulerError."""
    desk = Desk(state_file)
    waiting, _ = desk.jobs(("pending",))
    if waiting:
        config = without_config({"state_file": state_file}).config
        carry_out(desk.places, config, Cancel(tuple(job.id for job in waiting)))
