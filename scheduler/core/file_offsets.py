"""How far a watched file has been read, and the lines that came out of it."""

from __future__ import annotations

# As `typing` has it, which is not imported on the path of calls in loops (`scheduler/client/client.py`).
TYPE_CHECKING = False
if TYPE_CHECKING:
    from dataclasses import dataclass
else:
    from scheduler.core.quick_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class FileMark:
    """How far a file has been read: ``offset`` bytes, ``lines`` lines, ``crc`` over those bytes.

    ``replaying``: the file was replaced and is being read again from its start; its lines are new only where
    their number has risen. ``open_line``: the last line was taken without its newline. ``skipping``: inside a line
    that is too long.
    """

    path: str
    device: int = 0
    inode: int = 0
    offset: int = 0
    lines: int = 0
    crc: int = 0
    replaying: bool = False
    open_line: bool = False
    skipping: bool = False


@dataclass(frozen=True, slots=True)
class LineRead:
    """One whole line: its number, its text, or the problem that makes it unreadable."""

    number: int
    text: str
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Batch:
    """Some lines and the mark that goes with them: both are recorded in one transaction.

    ``restart``: the counts of equal lines start anew before these lines (the file was replaced).
    ``settled``: a replay is over with these lines. ``more``: there is more to read at once.
    ``again``: lines that were refused are read once more, because the GPUs are these now. ``left_out``: why the rest
    of an older file is not taken.
    """

    mark: FileMark
    lines: tuple[LineRead, ...] = ()
    restart: bool = False
    settled: bool = False
    more: bool = False
    again: str = ""
    left_out: str = ""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A line that is no job: where it stands, what it says, why it was refused."""

    path: str
    number: int
    text: str
    reason: str
    at: float = 0.0
