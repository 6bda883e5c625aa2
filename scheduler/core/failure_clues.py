"""Collects the clues to the cause of a failure in a log: exceptions, and lines with a sign of a class.

Each clue has a weight. A traceback counts more than a single line, a specific class more than "any other exception",
and what may follow from a failure in another process (a broken connection, SIGTERM) less than all others. Errors that
the program handled have little weight or none.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from scheduler.core.failure_signs import (
    ARGUMENTS,
    BAD_ORDINAL,
    CLASSES,
    CRASH,
    ENVIRONMENT,
    GPU_ERROR,
    HOST_MEMORY,
    ILLEGAL_ACCESS,
    IMPORT,
    INTERRUPTED,
    KILLED,
    MISSING_FILE,
    NCCL,
    NETWORK,
    OUT_OF_MEMORY,
    PERMISSION,
    SHARED_MEMORY,
    SYNTAX,
    TRACEBACK,
    Sign,
)
from scheduler.core.own_classes import holds, pieces_of
from scheduler.core.traceback_text import LONGEST_SHOWN, FoundException, LogLine, LogText, read_log

NEAR_LINES = 6  # so many lines before a traceback, a line may tell its cause
STILL_RUNNING = 4  # lines of progress after an error that show that the program handled it
SIGKILL = 9
CRASHES = frozenset((4, 5, 6, 7, 8, 11))  # SIGILL, SIGTRAP, SIGABRT, SIGBUS, SIGFPE, SIGSEGV
STOPS = frozenset((1, 2, 15))  # SIGHUP, SIGINT, SIGTERM
# Weights of clues.
CERTAIN, EXCEPTION, LINE, GENERIC, EARLIER, WRAPPER, USAGE, MILD, HANDLED = 90, 70, 60, 50, 40, 10, 6, 5, 0
CONSEQUENCES = {KILLED: 34, CRASH: 33, NCCL: 32, INTERRUPTED: 26}  # a cause in another process counts more
ABORTED = 30  # SIGABRT ends a process after an NCCL error
MAY_CAUSE_NCCL = frozenset((OUT_OF_MEMORY, HOST_MEMORY, ILLEGAL_ACCESS, GPU_ERROR, SHARED_MEMORY, "disk_full"))

_CERTAIN = re.compile(
    r"^gpujob: (environment|cannot start) |\bslurmstepd[\w.-]*: .*(oom.?kill|time limit)|^srun: .*out of memory"
    r"|(memory cgroup )?out of memory: killed process|\bNVRM: Xid",
    re.IGNORECASE,
)
# Exceptions that only report a failure elsewhere: another process, or an exception that is in the log, too.
_WRAPPER = re.compile(
    r"ChildFailedError|ProcessRaisedException|RemoteTraceback|RayTaskError|CalledProcessError|RemoteError|InstantiationException"
    r"|Caught \w+ in (DataLoader worker|replica|pin memory)|DataLoader worker \(pid\(?s?\)? [\d, ]+\) exited unexpectedly"
    r"|Engine core initialization failed|EngineDeadError|Engine process failed to start|EngineCore encountered an issue"
    r"|process \d+ terminated with exit code|BrokenProcessPool|TerminatedWorkerError|ActorDiedError|RayActorError|WorkerCrashedError"
    r"|(exit(ed)? (with )?|status )code:? [1-9]\d*\W*$|returned non-zero exit status|SystemExit: \d+$|InductorError|BackendCompilerFailed"
)  # fmt: skip
_CONSEQUENCE = re.compile(
    r"(BrokenPipeError|ConnectionResetError|ConnectionAbortedError|EOFError|queue\.Empty|CancelledError)\b"
    r"|Connection (closed|reset) by (remote )?peer$"
)
# In a handler: an error of the handler itself, which does not report the exception that it handles.
_OWN_FAULT = frozenset(
    "KeyError IndexError NameError AttributeError TypeError UnboundLocalError ZeroDivisionError RecursionError".split()
)
# Exceptions whose name tells the class, whatever file or address their text names.
_BY_NAME = {
    "FileNotFoundError": MISSING_FILE,
    "NotADirectoryError": MISSING_FILE,
    "PermissionError": PERMISSION,
    "ModuleNotFoundError": IMPORT,
    "KeyboardInterrupt": INTERRUPTED,
    "SyntaxError": SYNTAX,
    "IndentationError": SYNTAX,
    "TabError": SYNTAX,
}
# Classes of exceptions in whose text a line of another class may tell more; empty: of any other class.
_REFINED: dict[str, frozenset[str]] = {
    "": frozenset(),
    IMPORT: frozenset(),
    NCCL: MAY_CAUSE_NCCL,
    BAD_ORDINAL: frozenset(("no_gpu",)),
    ILLEGAL_ACCESS: frozenset((GPU_ERROR,)),
}
_HANDLED = re.compile(
    r"\b(retry(ing)?|trying again|falling back|fall back|fallback|skipping|skipped|ignor(ing|ed)|continuing"
    r"|recovered|resum(ing|ed)|will use|using .{1,60} instead|using (the )?defaults?|will be (created|built|ignored|skipped)|reduc(ing|ed) (the )?batch|disabling|disabled|attempt \d+)\b",
    re.IGNORECASE,
)
_PROGRESS = re.compile(
    r"\b(epoch|step|iter|iteration|batch|update|loss|acc|accuracy|val_loss|eval|round|episode)s?\b[ \[(:=#]{1,3}\d",
    re.IGNORECASE,
)
# What programs often look for and can do without.
_DISPENSABLE = frozenset((MISSING_FILE, PERMISSION, IMPORT, "library"))
_TQDM = re.compile(r"\d+%\|")
_NOISE = re.compile(
    r"^wandb: |closing signal SIG|Killing subprocess|forcefully exit|Sending SIG|for more (details|information) see"
    r"|^\s*(traceback|error_file|time|host|rank|exitcode) +:|Signal 15 \(SIGTERM\) received|frame #\d+|exits with return code = -?15"
    r"|In order to (get|see) the stack|NCCL INFO|Received \d+ death signal|Root Cause|root cause",
)
_TORCHRUN_SIGNAL = re.compile(r"Signal (\d+) \(SIG\w+\) received by PID")


class Clue(NamedTuple):
    """A clue to the class ``kind``. ``weight`` decides, then ``number``, the number of its line."""

    weight: int
    number: int
    kind: str
    line: str
    exception: bool = False
    begun: int = -1  # of an exception with a traceback: the line where this begins


@dataclass(frozen=True, slots=True)
class _ActiveSign:
    """A sign whose first piece is somewhere in the log."""

    kind: str
    pieces: tuple[str, ...]
    pattern: re.Pattern[str] | None

    def shows(self, text: str, lower: str) -> bool:
        return holds(lower, self.pieces) and (self.pattern is None or self.pattern.search(text) is not None)


@cache
def _signs() -> tuple[_ActiveSign, ...]:
    return tuple(_compiled(row.name, sign) for row in CLASSES.values() for sign in row.signs)


def _compiled(kind: str, sign: Sign) -> _ActiveSign:
    if isinstance(sign, str):
        return _ActiveSign(kind, pieces_of(sign), None)
    return _ActiveSign(kind, (sign[0],), re.compile(sign[1]))


def active_signs(lower: str) -> list[_ActiveSign]:
    """Return the signs that the log may have, in the order of the search. ``lower``: the log in lower case."""
    return [sign for sign in _signs() if sign.pieces[0] in lower]


def clues_in(tail: str) -> list[Clue]:
    """Return the clues in a log that may tell why the program ended, without errors that it handled."""
    log = read_log(tail)
    return _without_handled(log, _all_clues(log, tail))


def all_clues_in(tail: str) -> list[Clue]:
    """Return all clues in a log, also those of errors that the program handled."""
    return _all_clues(read_log(tail), tail)


def last_error(tail: str) -> str:
    """Return the last line of the last traceback in a log, such as ``ValueError: bad size``; empty if there is none.

    Exceptions that only report another one are left out.
    """
    if "Traceback" not in tail and 'File "' not in tail:
        return ""
    found = [one.text for one in read_log(tail).exceptions if one.traced and not _WRAPPER.search(one.text)]
    return found[-1][:LONGEST_SHOWN] if found else ""


def _all_clues(log: LogText, tail: str) -> list[Clue]:
    active = active_signs(tail.lower())

    def kind_of(text: str) -> str:
        lower = text.lower()
        return next((sign.kind for sign in active if sign.shows(text, lower)), "")

    inside = {number for found in log.exceptions for number in range(found.first, found.last + 1)}
    clues = _of_exceptions(log, kind_of)
    for number, line in enumerate(log.lines):
        if number not in inside and not line.frame and line.text:
            clues += _of_line(number, line, kind_of)
    return clues


def _of_line(number: int, line: LogLine, kind_of: Callable[[str], str]) -> list[Clue]:
    """Return the clue in a line that belongs to no exception."""
    told = _TORCHRUN_SIGNAL.search(line.text)
    if told:
        kind = class_of_signal(int(told.group(1)))
        return [Clue(_weight_of(kind, line.text), number, kind, line.text.strip())] if kind in (KILLED, CRASH) else []
    if _NOISE.search(line.text):
        return []
    kind = kind_of(line.text.strip())
    if not kind:
        return []
    if _CERTAIN.search(line.text):
        return [Clue(CERTAIN, number, kind, line.text.strip())]
    weight = MILD if line.mild else _weight_of(kind, line.text)
    return [Clue(weight, number, kind, line.text.strip())]


def _weight_of(kind: str, text: str) -> int:
    # Programs print their usage after many errors: alone it is a weak sign.
    if kind == ARGUMENTS and text.lstrip()[:6].lower() == "usage:":
        return USAGE
    if kind == CRASH and re.search(r"abort|sigabrt|-6\b|core dumped|terminate called", text, re.IGNORECASE):
        return ABORTED
    return CONSEQUENCES.get(kind, GENERIC if kind == TRACEBACK else LINE + (kind == GPU_ERROR))


def _of_exceptions(log: LogText, kind_of: Callable[[str], str]) -> list[Clue]:
    """Return a clue for each chain of exceptions: an exception, and those that followed while it was handled."""
    clues: list[Clue] = []
    chains: dict[str, tuple[FoundException, Clue]] = {}  # by process: the last exception, and the clue of its chain
    for found in log.exceptions:
        clue = _of_exception(log, found, kind_of)
        before = chains.get(found.rank)
        if found.link and before is not None and before[1] in clues:
            clues.remove(before[1])
            clue = _better(before[1], clue, found)
        clues.append(clue)
        chains[found.rank] = (found, clue)
    return clues


def _of_exception(log: LogText, found: FoundException, kind_of: Callable[[str], str]) -> Clue:
    text = found.text
    if _WRAPPER.search(text) and not re.search(r"signal|Signals\.", text):
        return Clue(WRAPPER, found.first, _named_in_wrapper(text, kind_of), text, True)
    number, kind = found.first, _BY_NAME.get(found.name) or kind_of(text)
    if kind in _REFINED:
        number, kind, text = _refined(log, found, kind, kind_of)
    if not kind or kind == TRACEBACK:
        weight = CONSEQUENCES[INTERRUPTED] if _CONSEQUENCE.match(text) else GENERIC
        begun = found.begun if found.traced else -1
        return Clue(weight if found.traced else weight - 2, number, TRACEBACK, text, True, begun)
    weight = CONSEQUENCES.get(kind, EXCEPTION + (kind == GPU_ERROR))
    if kind == NETWORK and _CONSEQUENCE.match(text):
        weight = EARLIER
    return Clue(weight, number, kind, text, True)


def _refined(log: LogText, found: FoundException, kind: str, kind_of: Callable[[str], str]) -> tuple[int, str, str]:
    """Return line number, class and line of the reason that follows in the text of an exception, if one does.

    For example, a line after "Failed to import x because of the following error" has the reason.
    """
    for number in range(found.first + 1, found.last + 1):
        line = log.lines[number]
        told = "" if line.frame or _NOISE.search(line.text) else kind_of(line.text.strip())
        if told and told != kind and (told in _REFINED[kind] or not _REFINED[kind]):
            if told not in (TRACEBACK, KILLED, CRASH, INTERRUPTED):
                return number, told, line.text.strip()
    return found.first, kind, found.text


def _named_in_wrapper(text: str, kind_of: Callable[[str], str]) -> str:
    """Return the class of an exception that reports another one, which may be cut off from the log."""
    kind = kind_of(text)
    return kind if kind not in ("", KILLED, INTERRUPTED) else TRACEBACK


def _better(first: Clue, last: Clue, found: FoundException) -> Clue:
    """Return the clue of a chain: its last exception, unless this one only reports the first.

    A specific class counts more than "any other exception", unless the handler of the first exception has a fault.
    """
    if last.weight == WRAPPER or (last.kind == TRACEBACK and first.kind != TRACEBACK):
        own_fault = found.link == "during" and found.name in _OWN_FAULT
        if not own_fault:
            return first._replace(number=last.number)
    return last


def _without_handled(log: LogText, clues: list[Clue]) -> list[Clue]:
    """Return the clues with less weight where the program went on after the error."""
    progress = [number for number, line in enumerate(log.lines) if _goes_on(line)]
    final = max((clue for clue in clues if clue.begun >= 0), default=None, key=lambda clue: clue.number)
    last = max((clue.number for clue in clues if clue.weight >= EARLIER), default=-1)
    broken = max((clue.number for clue in clues if clue.kind == NCCL), default=-1)
    result = []
    for clue in clues:
        weight = _weight_if_handled(log, clue, progress, broken)
        earlier = _is_earlier(clue, progress, last) or (final is not None and _is_apart(clue, final))
        if clue.weight != CERTAIN:
            clue = clue._replace(weight=min(weight, EARLIER) if earlier else weight)
        result.append(clue)
    return result


def _weight_if_handled(log: LogText, clue: Clue, progress: list[int], broken: int) -> int:
    """Return the weight of a clue: little if the program said so, or worked on for some time.

    ``broken``: line of the last broken connection. Until it, the other processes may have worked on.
    """
    after = sum(1 for number in progress if number > clue.number)
    handled = _is_handled(log, clue)
    others = clue.exception and broken > clue.number
    if handled and not clue.exception and clue.kind in _DISPENSABLE:
        return HANDLED
    if after and (handled or (after >= STILL_RUNNING and not others)):
        return HANDLED
    return min(clue.weight, WRAPPER) if handled else clue.weight


def _is_earlier(clue: Clue, progress: list[int], last: int) -> bool:
    """Return whether the program worked on after a clue: a line, or an exception before the last clue."""
    end = last if clue.exception else progress[-1] + 1 if progress else -1
    return any(clue.number < number < end for number in progress)


def _is_apart(clue: Clue, final: Clue) -> bool:
    """Return whether a single line tells nothing about the exception that ended the program after it.

    Lines shortly before a traceback may name the cause that the exception only reports.
    """
    name = final.line.split(":", 1)[0].rpartition(".")[2]
    near = 0 if name in _OWN_FAULT else NEAR_LINES
    return not clue.exception and clue.kind not in (TRACEBACK, ENVIRONMENT) and clue.number < final.begun - near


def _goes_on(line: LogLine) -> bool:
    """Return whether a line shows that the program works on. Bars are often drawn once more at the very end."""
    text = line.text
    return (
        bool(text)
        and not line.frame
        and not _TQDM.search(text)
        and bool(_PROGRESS.search(text))
        and not line.shown.startswith("wandb:")
    )


def _is_handled(log: LogText, clue: Clue) -> bool:
    near = [line for line in log.lines[clue.number : clue.number + 3] if not line.frame]
    if clue.exception:
        near = near[1:]
    return any(_HANDLED.search(line.text) for line in near)


def class_of_signal(number: int) -> str:
    """Return the class of an attempt that a signal ended, if its log tells nothing better."""
    if number == SIGKILL:
        return KILLED
    return CRASH if number in CRASHES else INTERRUPTED if number in STOPS else ""
