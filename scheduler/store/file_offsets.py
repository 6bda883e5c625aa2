"""How far the watched files were read, how often each line stands there, and which were refused."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence

from scheduler.core.file_offsets import FileMark, Refusal

TEXT_KEPT = 500


def mark_of(connection: sqlite3.Connection, path: str) -> FileMark | None:
    """How far this file was read, or None if it never was."""
    row = connection.execute(
        "SELECT device, inode, place, lines, crc, replaying, open_line, skipping FROM files WHERE path=?", (path,)
    ).fetchone()
    if row is None:
        return None
    return FileMark(path, row[0], row[1], row[2], row[3], row[4], bool(row[5]), bool(row[6]), bool(row[7]))


def save_mark(connection: sqlite3.Connection, mark: FileMark) -> None:
    """Remember how far a file was read."""
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
    """The file was replaced: its lines are counted anew, the refusals gathered anew."""
    connection.execute("UPDATE line_counts SET before=max(n, before), n=0 WHERE path=?", (path,))
    connection.execute("DELETE FROM refused WHERE path=?", (path,))


def end_recount(connection: sqlite3.Connection, path: str) -> None:
    """The replaced file is read to its end: forget what no longer stands there."""
    connection.execute("DELETE FROM line_counts WHERE path=? AND n=0", (path,))
    connection.execute(
        "UPDATE line_counts SET before=0, repeated=min(repeated, n-1) WHERE path=? AND (before<>0 OR repeated>=n)",
        (path,),
    )


def count_line(connection: sqlite3.Connection, path: str, identity: str) -> tuple[int, int]:
    """Count one more line of this identity; returns (its number now, the number before the file was replaced)."""
    row = connection.execute(
        "INSERT INTO line_counts (path, identity, n) VALUES (?,?,1)"
        " ON CONFLICT (path, identity) DO UPDATE SET n=n+1 RETURNING n, before",
        (path, identity),
    ).fetchone()
    return row[0], row[1]


def counted(connection: sqlite3.Connection, path: str) -> frozenset[str]:
    """The identities of all lines of a file that were read."""
    return frozenset(row[0] for row in connection.execute("SELECT identity FROM line_counts WHERE path=?", (path,)))


def uncount(connection: sqlite3.Connection, path: str, identities: Iterable[str]) -> None:
    """As if lines of these identities had never been read."""
    connection.executemany(
        "DELETE FROM line_counts WHERE path=? AND identity=?", [(path, identity) for identity in identities]
    )


def duplicates(connection: sqlite3.Connection) -> int:
    """How many lines stand in the files that were not run because a job says the same."""
    return int(connection.execute("SELECT coalesce(sum(repeated), 0) FROM line_counts WHERE repeated>0").fetchone()[0])


def count_lines(connection: sqlite3.Connection, path: str, identities: Sequence[str]) -> None:
    """Count one more line for each of these (in a file that is not being read anew)."""
    connection.executemany(
        "INSERT INTO line_counts (path, identity, n) VALUES (?,?,1) ON CONFLICT (path, identity) DO UPDATE SET n=n+1",
        [(path, identity) for identity in identities],
    )


def count_repeated(connection: sqlite3.Connection, path: str, identities: Sequence[str]) -> None:
    """Lines that say what a waiting, running or succeeded job says."""
    connection.executemany(
        "UPDATE line_counts SET repeated=repeated+1 WHERE path=? AND identity=?",
        [(path, identity) for identity in identities],
    )


def refuse(connection: sqlite3.Connection, refusal: Refusal) -> None:
    """Remember a line that is no job."""
    connection.execute(
        "INSERT OR REPLACE INTO refused VALUES (?,?,?,?,?)",
        (refusal.path, refusal.number, refusal.text[:TEXT_KEPT], refusal.reason, refusal.at),
    )


def forget_refused(connection: sqlite3.Connection, path: str, numbers: Iterable[int]) -> None:
    """These lines are read again: what comes of them is not known yet."""
    connection.executemany("DELETE FROM refused WHERE path=? AND number=?", [(path, number) for number in numbers])


def refused_in(connection: sqlite3.Connection, path: str) -> dict[int, tuple[str, str]]:
    """The refused lines of one file: number → its text (its first ``TEXT_KEPT`` characters), the reason."""
    rows = connection.execute("SELECT number, text, reason FROM refused WHERE path=?", (path,))
    return {row[0]: (row[1], row[2]) for row in rows}


def refused(connection: sqlite3.Connection, most: int = 1000) -> list[Refusal]:
    """Lines that are no jobs, by file and number."""
    rows = connection.execute(
        "SELECT path, number, text, reason, at FROM refused ORDER BY path, number LIMIT ?", (most,)
    )
    return [Refusal(*row) for row in rows]
