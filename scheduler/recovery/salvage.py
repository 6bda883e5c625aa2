"""What can still be read of a damaged store: always from a copy, table by table, row by row, at last page by page."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from scheduler.store.database import PAGE
from scheduler.store.migrations import migrate

Row = dict[str, Any]
COMPANIONS = ("", "-wal", "-shm")
HEADER = 100
MOST_LOOKED_UP = 5_000_000
_LEAF = 13


@dataclass(slots=True)
class Left:
    """Rows by table, and what was wrong with each table that could not be read whole."""

    rows: dict[str, list[Row]] = field(default_factory=dict)
    trouble: dict[str, str] = field(default_factory=dict)


def new_schema(connection: sqlite3.Connection) -> None:
    """Make the tables of today in an empty store."""
    migrate(connection, 0)


def copy_store(store: str, copy: str) -> None:
    """A copy with its log; the index beside it is made anew. Raises OSError."""
    with open(copy, "wb"):
        os.chmod(copy, 0o600)
    for ending in ("", "-wal"):
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(store + ending, copy + ending)


def read_what_is_left(copy: str, top: int) -> Left:
    """All that can be read of this copy, which is changed. ``top``: the highest job id that may be in it."""
    fresh = f"{copy}.fresh"
    model = sqlite3.connect(fresh, isolation_level=None)
    try:
        new_schema(model)
        tables = [row[0] for row in model.execute("SELECT name FROM sqlite_master WHERE type='table' AND rootpage")]
        keys = {name: _key_of(model, name) for name in tables if not name.startswith("sqlite_")}
    finally:
        model.close()
    left = Left()
    connection, damage = _open(copy, fresh, set(keys))
    try:
        if damage:
            left.trouble["sqlite_master"] = damage
        there = _tables(connection)
        for name, (key, by_row) in keys.items():
            if not damage and name not in there:
                continue  # a store of an older gpujob
            _read_table(connection, name, key, by_row, top if name == "jobs" else 0, left)
        _fill_events(connection, left)
    finally:
        connection.close()  # and so copies its log back, as far as that is whole
    if "jobs" in left.trouble:
        _fill_jobs(copy, left)
    return left


def _key_of(model: sqlite3.Connection, name: str) -> tuple[tuple[str, ...], bool]:
    """Columns of the primary key, and whether it is the number of the row."""
    columns = model.execute(f"PRAGMA table_info({name})").fetchall()
    key = tuple(c[1] for c in sorted(columns, key=lambda c: c[5]) if c[5])
    return key, "WITHOUT ROWID" not in model.execute("SELECT sql FROM sqlite_master WHERE name=?", (name,)).fetchone()[
        0
    ]


def _open(copy: str, fresh: str, wanted: set[str]) -> tuple[sqlite3.Connection, str]:
    """Open the copy; where its head is damaged, with the head of a new store: pages of the first step of our
    migrations always stand at the same place, because each store began with it.
    """
    with open(fresh, "rb") as stream:
        head = bytearray(stream.read(PAGE))
    head[18:20] = b"\2\2"  # write-ahead log
    head[28:40] = bytes(12)  # size of the file: look; no free pages
    head[92:96] = bytes(4)  # the size above counts only when this equals the change counter
    first = sqlite3.connect(":memory:")
    migrate(first, 0, 1)
    certain = _tables(first)
    first.close()
    damage = ""
    for size in (0, HEADER, PAGE):
        if size:
            with open(copy, "r+b") as stream:
                stream.write(head[:size])
        elif not os.path.getsize(copy):
            damage = "the file is empty"
            continue  # SQLite would remove its log
        connection = sqlite3.connect(copy, isolation_level=None)
        try:
            connection.row_factory = sqlite3.Row
            connection.execute("PRAGMA writable_schema=ON")  # what is left of a damaged schema is used
            found = _tables(connection)
            if wanted <= found or certain <= found:
                return connection, damage
            damage = damage or f"tables are missing: {', '.join(sorted(certain - found))}"
        except sqlite3.Error as error:
            damage = damage or str(error)
        connection.close()
    return sqlite3.connect(":memory:"), damage


def _tables(connection: sqlite3.Connection) -> set[str]:
    return {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type='table'")}


def _until_error(connection: sqlite3.Connection, query: str, *values: Any) -> tuple[list[Row], str]:
    rows: list[Row] = []
    try:
        for row in connection.execute(query, values):
            rows.append(dict(row))
    except (sqlite3.Error, OverflowError) as error:
        return rows, " ".join(str(error).split())
    return rows, ""


def _read_table(
    connection: sqlite3.Connection, name: str, key: tuple[str, ...], by_row: bool, top: int, left: Left
) -> None:
    """From both ends up to what is damaged; between them each row by its number."""
    rows, problem = _until_error(connection, f"SELECT * FROM {name} NOT INDEXED ORDER BY {', '.join(key)}")
    if problem:
        left.trouble[name] = problem
        backwards = ", ".join(f"{column} DESC" for column in key)
        tail, _ = _until_error(connection, f"SELECT * FROM {name} NOT INDEXED ORDER BY {backwards}")
        known = {tuple(row[column] for column in key) for row in rows}
        tail = [row for row in reversed(tail) if tuple(row[column] for column in key) not in known]
        if by_row:
            low = rows[-1][key[0]] if rows else 0
            high = tail[0][key[0]] if tail else top + 1
            for number in range(low + 1, min(high, low + MOST_LOOKED_UP)):
                rows += _until_error(connection, f"SELECT * FROM {name} WHERE {key[0]}=?", number)[0]
        rows += tail
    left.rows[name] = rows


def _fill_events(connection: sqlite3.Connection, left: Left) -> None:
    """The stories of jobs between two damaged ends."""
    if "events" in left.trouble:
        known = {(row["job"], row["n"]) for row in left.rows["events"]}
        for job in left.rows["jobs"]:
            found, _ = _until_error(connection, "SELECT * FROM events WHERE job=?", job["id"])
            left.rows["events"] += [row for row in found if (row["job"], row["n"]) not in known]


# -- page by page -----------------------------------------------------------------------------------------


def _fill_jobs(copy: str, left: Left) -> None:
    """Rows of jobs that no path leads to any more, from the leaf pages themselves."""
    model = sqlite3.connect(":memory:")
    new_schema(model)
    columns = [(row[1], row[4]) for row in model.execute("PRAGMA table_info(jobs)")]
    defaults = {name: _plain(text) for name, text in columns}
    model.close()
    names = [name for name, _ in columns]
    known = {row["id"] for row in left.rows.get("jobs", [])}
    found: dict[int, Row] = {}
    for number, values in leaf_rows(copy):
        # A row that was written before a column was added lacks it.
        if number in known or not 30 <= len(values) <= len(names) or values[0] is not None:
            continue
        row = {**defaults, **dict(zip(names, values, strict=False)), "id": number}
        if number not in found or _later(row, found[number]):
            found[number] = row
    left.rows["jobs"] = sorted([*left.rows.get("jobs", []), *found.values()], key=lambda row: int(row["id"]))


def _plain(text: str | None) -> Any:
    return None if text is None else text.strip("'") if text.startswith("'") else int(text)


def _later(one: Row, other: Row) -> bool:
    """Of two versions of a row the one that knows more; an ended job is never taken for a waiting one."""

    def age(row: Row) -> tuple[bool, Any, Any]:
        return row["finished_at"] is not None, row["attempt"] or 0, row["started_at"] or 0.0

    try:
        return age(one) > age(other)
    except TypeError:  # one of them is not a row of ours
        return False


def leaf_rows(path: str) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """(number, values) of every row in every page that looks like a leaf of a table."""
    with open(path, "rb") as stream:
        data = stream.read()
    for start in range(0, len(data) - PAGE + 1, PAGE):
        page = data[start : start + PAGE]
        at = HEADER if start == 0 else 0
        if page[at] != _LEAF:
            continue
        cells = struct.unpack_from(">H", page, at + 3)[0]
        if at + 8 + 2 * cells > PAGE:
            continue
        for place in struct.unpack_from(f">{cells}H", page, at + 8):
            with contextlib.suppress(IndexError, struct.error, UnicodeDecodeError, ValueError):  # damaged: no row
                yield _cell(data, page, place)


def _cell(data: bytes, page: bytes, place: int) -> tuple[int, tuple[Any, ...]]:
    size, place = _varint(page, place)
    number, place = _varint(page, place)
    most = PAGE - 35
    local = size
    if size > most:
        least = (PAGE - 12) * 32 // 255 - 23
        local = least + (size - least) % (PAGE - 4)
        local = local if local <= most else least
    payload = bytearray(page[place : place + local])
    if size > local:
        following = struct.unpack_from(">I", page, place + local)[0]
        while len(payload) < size:
            if not 0 < following * PAGE <= len(data):
                raise ValueError("the chain of pages is broken")
            rest = data[(following - 1) * PAGE : following * PAGE]
            following = struct.unpack_from(">I", rest)[0]
            payload += rest[4 : 4 + size - len(payload)]
    if len(payload) != size:
        raise ValueError("cut short")
    return number, tuple(_values(bytes(payload)))


def _values(payload: bytes) -> Iterable[Any]:
    length, place = _varint(payload, 0)
    kinds = []
    while place < length:
        kind, place = _varint(payload, place)
        kinds.append(kind)
    values: list[Any] = []
    for kind in kinds:
        size = (0, 1, 2, 3, 4, 6, 8, 8, 0, 0)[kind] if kind < 10 else (kind - 12) // 2
        piece = payload[place : place + size]
        if size < 0 or len(piece) != size:
            raise ValueError("cut short")
        place += size
        if kind == 0:
            values.append(None)
        elif kind < 7:
            values.append(int.from_bytes(piece, "big", signed=True))
        elif kind == 7:
            values.append(struct.unpack(">d", piece)[0])
        elif kind < 10:
            values.append(kind - 8)
        else:
            values.append(piece.decode() if kind % 2 else piece)
    return values


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = 0
    for n in range(8):
        byte = data[place + n]
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, place + n + 1
    return value << 8 | data[place + 8], place + 9
