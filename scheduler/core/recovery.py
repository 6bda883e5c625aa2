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
    LEADER = "leader"  # the very process recorded (boot, pid, start time)
    OTHERS = "others"  # only others that carry the attempt's mark


class Verdict(enum.Enum):
    """What to do about it."""

    REQUEUE = "requeue"  # proven that it never ran
    ADOPT = "adopt"  # it lives: watch it
    FINISH = "finish"  # its ending is written down
    FINISH_HOLDING = "finish_holding"  # the same, but processes of it still hold the GPU
    WATCH_LOST = "watch_lost"  # only unsupervised processes live: keep the GPU till they end, then lost
    LOST = "lost"  # it ran, or may have run; how it ended cannot be known
    NOT_STARTED = "not_started"  # its starter failed to start it


def _verdict(record: Record, same_boot: bool, found: Found) -> Verdict:
    rows: dict[Record, dict[tuple[bool, Found], Verdict]] = {
        # After a power loss a missing claim proves nothing: it may just not have reached the disk.
        Record.NONE: {
            (True, Found.NOTHING): Verdict.REQUEUE,
            (True, Found.LEADER): Verdict.ADOPT,
            (True, Found.OTHERS): Verdict.WATCH_LOST,
            (False, Found.NOTHING): Verdict.LOST,
            (False, Found.LEADER): Verdict.LOST,
            (False, Found.OTHERS): Verdict.LOST,
        },
        Record.CLAIMED: {
            (True, Found.NOTHING): Verdict.LOST,
            (True, Found.LEADER): Verdict.ADOPT,
            (True, Found.OTHERS): Verdict.WATCH_LOST,
            (False, Found.NOTHING): Verdict.LOST,
            (False, Found.LEADER): Verdict.LOST,
            (False, Found.OTHERS): Verdict.LOST,
        },
        Record.RUNNING: {
            (True, Found.NOTHING): Verdict.LOST,
            (True, Found.LEADER): Verdict.ADOPT,
            (True, Found.OTHERS): Verdict.WATCH_LOST,
            (False, Found.NOTHING): Verdict.LOST,
            (False, Found.LEADER): Verdict.LOST,
            (False, Found.OTHERS): Verdict.LOST,
        },
        Record.ENDED: {
            (True, Found.NOTHING): Verdict.FINISH,
            (True, Found.LEADER): Verdict.FINISH_HOLDING,
            (True, Found.OTHERS): Verdict.FINISH_HOLDING,
            (False, Found.NOTHING): Verdict.FINISH,
            (False, Found.LEADER): Verdict.FINISH,
            (False, Found.OTHERS): Verdict.FINISH,
        },
        Record.NEVER_RAN: {
            (True, Found.NOTHING): Verdict.NOT_STARTED,
            (True, Found.LEADER): Verdict.ADOPT,
            (True, Found.OTHERS): Verdict.WATCH_LOST,
            (False, Found.NOTHING): Verdict.NOT_STARTED,
            (False, Found.LEADER): Verdict.NOT_STARTED,
            (False, Found.OTHERS): Verdict.NOT_STARTED,
        },
        Record.BROKEN: {
            (True, Found.NOTHING): Verdict.LOST,
            (True, Found.LEADER): Verdict.ADOPT,
            (True, Found.OTHERS): Verdict.WATCH_LOST,
            (False, Found.NOTHING): Verdict.LOST,
            (False, Found.LEADER): Verdict.LOST,
            (False, Found.OTHERS): Verdict.LOST,
        },
    }
    return rows[record][same_boot, found]


HOLDING_STATES = tuple(state for state in JobState if state.holds_gpus)
# A job that was RUNNING had a record once: without one (somebody removed it) nothing proves that it never ran.
TABLE: dict[tuple[JobState, Record, bool, Found], Verdict] = {
    (state, record, same_boot, found): (
        Verdict.LOST
        if record is Record.NONE and state is JobState.RUNNING and found is Found.NOTHING
        else _verdict(record, same_boot, found)
    )
    for state, record, same_boot, found in product(HOLDING_STATES, Record, (True, False), Found)
}
