"""Finds the class of a failed attempt in the end of its log, its exit code and its signal.

The classes and their signs: `failure_signs.py`; the clues in a log: `failure_clues.py`. The clue with the most weight
decides, and among equal ones the last; where there is none, the exit code or signal decides.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from scheduler.core.failure_clues import (
    CERTAIN,
    EARLIER,
    LINE,
    MAY_CAUSE_NCCL,
    MILD,
    Clue,
    active_signs,
    all_clues_in,
    class_of_signal,
    clues_in,
)
from scheduler.core.failure_signs import (
    ASSERTION,
    CRASH,
    ENVIRONMENT,
    GPU_ERROR,
    HOST_MEMORY,
    IMPORT,
    KILLED,
    MISSING_FILE,
    NCCL,
    OUT_OF_MEMORY,
    PERMISSION,
    START,
    TIME_LIMIT,
    TRACEBACK,
    usual_hint,
)
from scheduler.core.gpu import BY_MEMORY, WHOLE, ResourceRequest
from scheduler.core.job import Failure
from scheduler.core.oom_details import oom_details
from scheduler.core.own_classes import OwnClass, holds, pieces_of
from scheduler.core.traceback_text import LONGEST_SHOWN, visible_lines

LAST_LINES = 3  # a line that tells why a program crashes is among so many last lines
OWN_LINES = 200  # the last lines of a log in which the user's classes are looked for
_SHELL_SCRIPT = re.compile(r"^(/\S+/)?(ba|da|z|k|c)?sh: (\d+: )?([^:]+): No such file or directory$")


def classify(
    tail: str,
    need: ResourceRequest,
    exit_code: int | None,
    signal: int | None,
    *,
    timed_out: bool = False,
    own: Sequence[OwnClass] = (),
) -> Failure | None:
    """Return the class of a failed attempt, with a line of the log and a hint; None if nothing shows a cause.

    A message about a lack of GPU memory may also tell sizes (`core/oom_details.py`). ``tail``: the end of the log. ``need``: the job's request, on which a hint depends. ``timed_out``: the attempt was
    ended at its time limit. ``own``: the user's classes, which are looked for first.
    """
    found = _own_class(tail, exit_code, own)
    if found is not None:
        return _failure(*found, need, own)
    kind, line = _decided(clues_in(tail), exit_code, signal, timed_out, tail.rstrip().count("\n"))
    if not kind:
        return None
    failure = _failure(kind, line, need, own)
    told = oom_details(tail) if kind == OUT_OF_MEMORY else None
    if told is None:
        return failure
    return replace(failure, peak_mib=told.used, tried_mib=told.tried, free_mib=told.free, others_mib=told.others)


def time_limit_failure() -> Failure:
    """Return the cause of an attempt that was ended at its time limit."""
    return Failure(TIME_LIMIT, "", usual_hint(TIME_LIMIT))


def warning_in(tail: str, need: ResourceRequest) -> Failure | None:
    """Return a warning for a job that ended with exit code 0, if the last error in its log is a lack of GPU memory; else None.

    The script may have handled this error, so it is no failure.
    """
    if not any(sign.kind == OUT_OF_MEMORY for sign in active_signs(tail.lower())):
        return None
    clues = [clue for clue in all_clues_in(tail) if clue.kind != TRACEBACK and clue.weight > MILD]
    last = max(clues, key=lambda clue: clue.number, default=None)
    return _failure(last.kind, last.line, need, ()) if last is not None and last.kind == OUT_OF_MEMORY else None


def more_memory(need: ResourceRequest) -> str:
    """Return what helps against a lack of GPU memory, for a job with this request."""
    if not need.count:
        return "it had no GPU; request one (;gpus=)"
    if need.parts == WHOLE:
        return "it had a whole GPU; use a smaller batch size, or a GPU with more memory"
    if need.by_name:
        return "use a smaller batch size, or a GPU on which nothing else runs"
    if need.parts == BY_MEMORY:
        return "request more (;vram= or ;gpus=), or use a smaller batch size"
    return "request a larger share (;gpus=1), or use a smaller batch size"


def _failure(kind: str, line: str, need: ResourceRequest, own: Sequence[OwnClass]) -> Failure:
    told = next((one.hint for one in own if one.name == kind and one.hint), "")
    return Failure(
        kind, line[:LONGEST_SHOWN], told or usual_hint(kind) + (more_memory(need) if kind == OUT_OF_MEMORY else "")
    )


# -- the user's classes ---------------------------------------------------------------------------------------


def _own_class(tail: str, exit_code: int | None, own: Sequence[OwnClass]) -> tuple[str, str] | None:
    """Return the class of the user that the last matching line has, and this line."""
    wanted = [
        (one.name, pieces_of(text)) for one in own if not one.after or exit_code in one.after for text in one.texts
    ]
    if not wanted:
        return None
    for line in reversed(list(visible_lines(tail))[-OWN_LINES:]):
        lower = line.lower()
        for name, pieces in wanted:
            if holds(lower, pieces):
                return name, line.strip()
    return None


# -- the decision ---------------------------------------------------------------------------------------------


def _decided(
    clues: list[Clue], exit_code: int | None, signal: int | None, timed_out: bool, end: int
) -> tuple[str, str]:
    """Return the class and its line; two empty texts if nothing shows a cause. ``end``: the number of the last line."""
    best = _best(clues)
    code = exit_code if exit_code is not None else 0
    number = signal or (code - 128 if 128 < code < 160 else 0)
    if timed_out:
        return TIME_LIMIT, best.line if best is not None and best.kind == TIME_LIMIT else ""
    ended_by = class_of_signal(number)
    if ended_by and (best is None or not _explains(best, ended_by, end)):
        line = max((clue for clue in clues if clue.kind == ended_by), default=None, key=lambda clue: clue.number)
        return ended_by, line.line if line is not None else ""
    if exit_code in (126, 127):
        return _not_started(best)
    if best is None or best.weight <= MILD:
        return _of_mild(best)
    return best.kind, best.line


def _best(clues: list[Clue]) -> Clue | None:
    best = max(clues, default=None, key=lambda clue: (clue.weight, clue.number))
    if best is None:
        return None
    if any(clue.kind == NCCL and clue.weight > MILD for clue in clues) and not best.exception and best.weight < CERTAIN:
        # Where the communication failed, single lines of other classes rarely tell the cause.
        clues = [clue for clue in clues if clue.exception or clue.kind in (*MAY_CAUSE_NCCL, NCCL, KILLED, CRASH)]
        best = max(clues, key=lambda clue: (clue.weight, clue.number))
    if best.kind in (IMPORT, START, "library", TRACEBACK):
        best = next((clue for clue in clues if clue.kind == ENVIRONMENT and clue.weight > MILD), best)
    return best


def _of_mild(best: Clue | None) -> tuple[str, str]:
    """Return the class of a log that has only warnings: only those that programs write right before they end."""
    if (
        best is not None
        and best.weight == MILD
        and best.kind in (OUT_OF_MEMORY, HOST_MEMORY, NCCL, GPU_ERROR, TIME_LIMIT)
    ):
        return best.kind, best.line
    return "", ""


def _explains(best: Clue, ended_by: str, end: int) -> bool:
    """Return whether a clue tells more than the signal that ended the command. ``end``: the number of the last line."""
    if best.weight <= MILD or best.kind == ended_by:
        return False
    if best.kind in (*MAY_CAUSE_NCCL, TIME_LIMIT) and best.weight > EARLIER:
        return True
    if best.exception and best.weight >= LINE:
        return True
    if ended_by != CRASH:
        return False
    # A program often crashes right after it has printed why.
    return (best.weight > EARLIER and end - best.number < LAST_LINES) or best.kind in (NCCL, ASSERTION, TRACEBACK)


def _not_started(best: Clue | None) -> tuple[str, str]:
    """Return the class for the exit codes by which a shell says that it could not execute a command."""
    if best is None or best.weight <= MILD:
        return START, ""
    if best.kind == MISSING_FILE and _SHELL_SCRIPT.match(best.line) and "line " not in best.line:
        return MISSING_FILE, best.line
    if best.kind in (MISSING_FILE, PERMISSION) and not best.exception:
        return START, best.line
    return best.kind, best.line
