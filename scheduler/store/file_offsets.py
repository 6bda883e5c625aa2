"""Stores for each watched file: the read position, how often each line occurs in it, and the refused lines."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence

from scheduler.core.file_offsets import FileMark, Refusal

TEXT_KEPT = 500


def mark_of(connection: sqlite3.Connection, path: str) -> FileMark | None:
    """Return the read position in a file; None if the file was never read."""
    row = connection.execute(
        "SELECT device, inode, place, lines, crc, replaying, open_line, skipping FROM files WHERE path=?", (path,)
    ).fetchone()
    if row is None:
        return None
    return FileMark(path, row[0], row[1], row[2], row[3], row[4], bool(row[5]), bool(row[6]), bool(row[7]))


def save_mark(connection: sqlite3.Connection, mark: FileMark) -> None:
    """Store the read position in a file."""
    connection.execute(
        "INSERT INTO files (path, device, inode, place, lines, crc, replaying, open_line, skipping)"
        " VALUES (?,?,?,?,?,?,?,?,?) ON CONFLICT (path) DO UPDATE SET device=excluded.device, inode=excluded.inode,"
        " place=excluded.place, lines=excluded.lines, crc=excluded.crc, replaying=excluded.replaying,"
        " open_line=excluded.open_line, skipping=excluded.skipping",
        (
            mark.path, mark.device, mark.inode, mark.offset, mark.lines, mark.crc, int(mark.replaying),
            int(mark.open_line), int(mark.skipping),
        ),
    )  # fmt: skip


def start_recount(connection: sqlite3.Connection, path: str) -> None:
    """Begin to recount the lines of a file that was replaced.

    The counts of the old file move to the column `before`. The stored refused lines of the file are deleted.
    """
    connection.execute("UPDATE line_counts SET before=max(n, before), n=0 WHERE path=?", (path,))
    connection.execute("DELETE FROM refused WHERE path=?", (path,))


def end_recount(connection: sqlite3.Connection, path: str) -> None:
    """End the recount of a replaced file, after its last line was counted.

    The counts of lines that only the old file had are deleted.
    """
    connection.execute("DELETE FROM line_counts WHERE path=? AND n=0", (path,))
    connection.execute(
        "UPDATE line_counts SET before=0, repeated=min(repeated, n-1) WHERE path=? AND (before<>0 OR repeated>=n)",
        (path,),
    )


def count_line(connection: sqlite3.Connection, path: str, identity: str) -> tuple[int, int]:
    """Count one more line with this identity. Return the new count, and the count in the old file.

    The old file is the version of the file before it was replaced. Its count is 0 if no recount is in progress.
    """
    row = connection.execute(
        "INSERT INTO line_counts (path, identity, n) VALUES (?,?,1)"
        " ON CONFLICT (path, identity) DO UPDATE SET n=n+1 RETURNING n, before",
        (path, identity),
    ).fetchone()
    return row[0], row[1]


def counted(connection: sqlite3.Connection, path: str) -> frozenset[str]:
    """Return the identities of all counted lines of a file."""
    return frozenset(row[0] for row in connection.execute("SELECT identity FROM line_counts WHERE path=?", (path,)))


def uncount(connection: sqlite3.Connection, path: str, identities: Iterable[str]) -> None:
    """Delete the counts of these identities. If the file is read again, the lines with these identities are new."""
    connection.executemany(
        "DELETE FROM line_counts WHERE path=? AND identity=?", [(path, identity) for identity in identities]
    )


def duplicates(connection: sqlite3.Connection, of: str = "") -> int:
    """Return the number of lines that did not become jobs because they repeat an earlier job. ``of``: how the path begins."""
    count = "SELECT coalesce(sum(repeated), 0) FROM line_counts WHERE repeated>0 AND substr(path, 1, ?)=?"
    return int(connection.execute(count, (len(of), of)).fetchone()[0])


def count_lines(connection: sqlite3.Connection, path: str, identities: Sequence[str]) -> None:
    """Count one more line for each of these identities. Must not be called during a recount of the file."""
    connection.executemany(
        "INSERT INTO line_counts (path, identity, n) VALUES (?,?,1) ON CONFLICT (path, identity) DO UPDATE SET n=n+1",
        [(path, identity) for identity in identities],
    )


def count_repeated(connection: sqlite3.Connection, path: str, identities: Sequence[str]) -> None:
    """Record for each of these identities that the file has one more line that only repeats an earlier job."""
    connection.executemany(
        "UPDATE line_counts SET repeated=repeated+1 WHERE path=? AND identity=?",
        [(path, identity) for identity in identities],
    )


def refuse(connection: sqlite3.Connection, refusal: Refusal) -> None:
    """Store a refused line with its reason and the first ``TEXT_KEPT`` characters of the line."""
    connection.execute(
        "INSERT OR REPLACE INTO refused VALUES (?,?,?,?,?)",
        (refusal.path, refusal.number, refusal.text[:TEXT_KEPT], refusal.reason, refusal.at),
    )


def number_refused(connection: sqlite3.Connection, path: str) -> int:
    """Return how many lines of a file were refused."""
    return int(connection.execute("SELECT count(*) FROM refused WHERE path=?", (path,)).fetchone()[0])


# Beginning of the reason of lines that `recover` reports. The user decides about these lines; they are not read again.
UNSURE = "it is not known whether this line ran"


def forget_refused(connection: sqlite3.Connection, path: str, numbers: Iterable[int]) -> None:
    """Delete the refused lines with these numbers, because the lines are read again."""
    connection.executemany("DELETE FROM refused WHERE path=? AND number=?", [(path, number) for number in numbers])


def refused_in(connection: sqlite3.Connection, path: str) -> dict[int, tuple[str, str]]:
    """Return the refused lines of one file: line number → (first ``TEXT_KEPT`` characters of the line, reason)."""
    rows = connection.execute("SELECT number, text, reason FROM refused WHERE path=?", (path,))
    return {row[0]: (row[1], row[2]) for row in rows}


def refused(connection: sqlite3.Connection, most: int = 1000, of: str = "") -> list[Refusal]:
    """Return at most ``most`` refused lines, ordered by file and line number. ``of``: how the path begins."""
    rows = connection.execute(
        "SELECT path, number, text, reason, at FROM refused WHERE substr(path, 1, ?)=? ORDER BY path, number LIMIT ?",
        (len(of), of, most),
    )
    return [Refusal(*row) for row in rows]
