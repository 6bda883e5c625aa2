"""What to make of an attempt found after a crash: a table over everything that can be found, with no else."""

from __future__ import annotations

import enum
from itertools import product

from scheduler.core.job import JobState


class Record(enum.Enum):
    """What an attempt's record holds."""

    NONE = "none"  # nobody claimed the attempt
    CLAIMED = "claimed"  # claimed; no pid yet: it may have been started
    RUNNING = "running"  # pid and start time
    ENDED = "ended"  # exit code or signal, whole
    NEVER_RAN = "never_ran"  # its starter says that it could not be started
    BROKEN = "broken"  # unreadable


class Found(enum.Enum):
    """Which processes of the attempt live."""

    NOTHING = "nothing"
    STARTER = "starter"  # nothing of it, but who was told to start it, and may be in the midst of that
    LEADER = "leader"  # the very process recorded (boot, pid, start time)
    OTHERS = "others"  # only others that carry the attempt's mark


class Verdict(enum.Enum):
    """What to do about it."""

    REQUEUE = "requeue"  # proven that it never ran
    WAIT = "wait"  # it may begin this very moment: keep the GPU, look again
    ADOPT = "adopt"  # it lives: watch it
    FINISH = "finish"  # its ending is written down
    FINISH_HOLDING = "finish_holding"  # the same, but processes of it still hold the GPU
    WATCH_LOST = "watch_lost"  # only unsupervised processes live: keep the GPU till they end, then lost
    LOST = "lost"  # it ran, or may have run; how it ended cannot be known
    NOT_STARTED = "not_started"  # its starter failed to start it


V = Verdict
# For each record: with nothing · its starter · its leader · others found alive in this boot, and the verdict after another boot.
# What another boot left is dead; and a claim that is missing then proves nothing: it may just not have reached the disk.
_ROWS: dict[Record, tuple[Verdict, Verdict, Verdict, Verdict, Verdict]] = {
    # A record is claimed exclusively, so a starter that is late cannot start what was taken back.
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
    # A job that was RUNNING had a record once: without one (somebody removed it) nothing proves that it never ran.
    return Verdict.LOST if verdict is Verdict.REQUEUE and state is JobState.RUNNING else verdict


HOLDING_STATES = tuple(state for state in JobState if state.holds_gpus)
TABLE: dict[tuple[JobState, Record, bool, Found], Verdict] = {
    row: _verdict(*row) for row in product(HOLDING_STATES, Record, (True, False), Found)
}
