"""Read positions of watched files, and the lines read from these files."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FileMark:
    """The read position in a watched file. ``offset``, ``lines``: bytes and lines read; ``crc``: CRC-32 of these bytes.

    ``replaying``: the file was replaced and is read again from its start (a replay). During a replay, a line is new
    only if the new file contains it more often than the old file did. ``open_line``: the last line was read without its
    newline. ``skipping``: the position is inside a line that is too long.
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
    """One whole line: its number, its text, and the problem that makes it unreadable (empty: none)."""

    number: int
    text: str
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Batch:
    """Lines of a watched file, and the read position after these lines; one transaction records both.

    ``restart``: the file was replaced, and these are the first lines of the new file; the counts of equal lines start
    at 0 again. ``settled``: the replay is complete after these lines. ``more``: more lines can be read immediately.
    ``again``: empty if the lines are new. If the lines were refused before and are checked again because the GPUs have
    changed, ``again`` is a text that describes the current GPUs. ``left_out``: why unread lines of the previous file
    are ignored; empty if there are no such lines.
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
    """A refused line: file, line number, text, reason, and the time of the refusal (seconds since 1970)."""

    path: str
    number: int
    text: str
    reason: str
    at: float = 0.0
