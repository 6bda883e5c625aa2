"""Read positions of watched files, and the lines read from these files."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FileMark:
    """The read position in a watched file. ``offset``, ``lines``: bytes and lines read; ``crc``: CRC-32 of these bytes.

    ``replaying``: the file was replaced and is read again from its start; then a line is new only if the new file has
    more lines equal to it than the old file had. ``open_line``: the last line was read without its newline.
    ``skipping``: the position is inside a line that is too long.
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

    ``restart``: the file was replaced, so the counts of equal lines start at 0 before these lines. ``settled``: these
    lines end a replay. ``more``: more lines can be read immediately. ``again``: the current GPUs as text if refused
    lines are read again because the GPUs have changed; else empty. ``left_out``: the reason if the rest of the previous
    file is not read; else empty.
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
