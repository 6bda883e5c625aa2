"""Decides what to do with an attempt that is found after a crash: a table with a verdict for each possible case."""

from __future__ import annotations

import enum
from itertools import product

from scheduler.core.job import JobState


class Record(enum.Enum):
    """The content of an attempt record."""

    NONE = "none"  # there is none: nobody claimed the attempt
    CLAIMED = "claimed"  # claimed, no pid yet: the command may have been started
    RUNNING = "running"  # pid and start time
    ENDED = "ended"  # exit code or signal, complete
    NEVER_RAN = "never_ran"  # its starter recorded that the command could not be started
    BROKEN = "broken"  # unreadable


class Found(enum.Enum):
    """The live processes of an attempt."""

    NOTHING = "nothing"
    STARTER = "starter"  # only its starter (supervisor or shim), which may just be starting it
    LEADER = "leader"  # its main process: the recorded boot, pid and start time
    OTHERS = "others"  # only processes other than the main process


class Verdict(enum.Enum):
    """The action to take on an attempt."""

    REQUEUE = "requeue"  # it never ran, which is proven: the job waits again
    WAIT = "wait"  # it may just be starting: keep the GPUs, look again
    ADOPT = "adopt"  # its main process lives: watch it
    FINISH = "finish"  # its end is recorded
    FINISH_HOLDING = "finish_holding"  # its end is recorded, but leftover processes hold the GPUs
    WATCH_LOST = "watch_lost"  # lost, but processes other than the main process hold the GPUs until they end
    LOST = "lost"  # it ran, or may have run; its outcome cannot be known
    NOT_STARTED = "not_started"  # its starter could not start it


V = Verdict
# Columns: NOTHING, STARTER, LEADER, OTHERS found alive in the same boot; then the verdict after a reboot.
# No process survives a reboot, and a missing record then proves nothing: it may not have reached the disk.
_ROWS: dict[Record, tuple[Verdict, Verdict, Verdict, Verdict, Verdict]] = {
    # Before a requeue `runners/adoption.py` claims the record itself, so a late starter cannot start the attempt.
    Record.NONE: (V.REQUEUE, V.REQUEUE, V.ADOPT, V.WATCH_LOST, V.LOST),
    Record.CLAIMED: (V.LOST, V.WAIT, V.ADOPT, V.WATCH_LOST, V.LOST),
    Record.RUNNING: (V.LOST, V.LOST, V.ADOPT, V.WATCH_LOST, V.LOST),
    Record.ENDED: (V.FINISH, V.FINISH, V.FINISH_HOLDING, V.FINISH_HOLDING, V.FINISH),
    Record.NEVER_RAN: (V.NOT_STARTED, V.NOT_STARTED, V.ADOPT, V.WATCH_LOST, V.NOT_STARTED),
    Record.BROKEN: (V.LOST, V.WAIT, V.ADOPT, V.WATCH_LOST, V.LOST),
}
del V


def _verdict(state: JobState, record: Record, same_boot: bool, found: Found) -> Verdict:
    verdict = _ROWS[record][list(Found).index(found) if same_boot else -1]
    # A RUNNING job had a record. If it is missing, somebody removed it, and nothing proves that the attempt never ran.
    return Verdict.LOST if verdict is Verdict.REQUEUE and state is JobState.RUNNING else verdict


HOLDING_STATES = tuple(state for state in JobState if state.holds_gpus)
TABLE: dict[tuple[JobState, Record, bool, Found], Verdict] = {
    row: _verdict(*row) for row in product(HOLDING_STATES, Record, (True, False), Found)
}
