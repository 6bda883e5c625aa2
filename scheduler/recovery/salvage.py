"""Reads the readable rows of a damaged store from a copy, table by table and row by row.

Rows below a damaged inner page of the database cannot be read. If such a row is a job that has started, the job is
reconstructed from the attempt record. If the job only waited, `recover` reports the job's id.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from scheduler.store.database import PAGE
from scheduler.store.migrations import VERSION, migrate

Row = dict[str, Any]
COMPANIONS = ("", "-wal", "-shm")
HEADER = 100
MOST_LOOKED_UP = 5_000_000


@dataclass(slots=True)
class Salvaged:
    """Readable rows by table. ``trouble``: the error for each table that could not be read completely."""

    rows: dict[str, list[Row]] = field(default_factory=dict)
    trouble: dict[str, str] = field(default_factory=dict)


def new_schema(connection: sqlite3.Connection) -> None:
    """Create the tables of the current version in an empty store."""
    migrate(connection, 0)


def copy_store(store: str, copy: str) -> None:
    """Copy a store and its write-ahead log, but not its -shm file, which SQLite creates again. Raises OSError."""
    with open(copy, "wb"):
        os.chmod(copy, 0o600)
    for ending in ("", "-wal"):
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(store + ending, copy + ending)


def read_what_is_left(copy: str, top: int) -> Salvaged:
    """Return all readable rows of a copy of the store. Changes the copy. ``top``: the highest possible job id."""
    fresh = f"{copy}.fresh"
    model = sqlite3.connect(fresh, isolation_level=None)
    try:
        new_schema(model)
        tables = [row[0] for row in model.execute("SELECT name FROM sqlite_master WHERE type='table' AND rootpage")]
        keys = {name: _key_of(model, name) for name in tables if not name.startswith("sqlite_")}
    finally:
        model.close()
    left = Salvaged()
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
        connection.close()  # also copies the intact part of the write-ahead log into the copy
    return left


def _key_of(model: sqlite3.Connection, name: str) -> tuple[tuple[str, ...], bool]:
    """Return the columns of the table's primary key, and whether the table has row ids (not WITHOUT ROWID)."""
    columns = model.execute(f"PRAGMA table_info({name})").fetchall()
    key = tuple(c[1] for c in sorted(columns, key=lambda c: c[5]) if c[5])
    return key, "WITHOUT ROWID" not in model.execute("SELECT sql FROM sqlite_master WHERE name=?", (name,)).fetchone()[
        0
    ]


def _open(copy: str, fresh: str, wanted: set[str]) -> tuple[sqlite3.Connection, str]:
    """Open the copy. Return the connection and a description of the damage (empty: no damage).

    If the first page of the copy is damaged, three replacements are tried in turn, until SQLite finds the tables.
    First, the header of the page is replaced by the header of a new store. Second, the whole page is replaced by the
    first page of a new store. Third, it is replaced by the first page of a store of an older version, for each older
    version. With such a page, SQLite finds at least the tables of the first migration, because these tables start at
    the same pages in every store. If nothing helps, an empty database is opened instead.
    """
    first = sqlite3.connect(":memory:")
    migrate(first, 0, 1)
    certain = _tables(first)
    first.close()
    damage = ""
    newest = _head(fresh)
    older = (_head(f"{copy}.{version}", version) for version in range(VERSION - 1, 0, -1))
    for head in chain((b"", newest[:HEADER], newest), older):
        if head:
            with open(copy, "r+b") as stream:
                stream.write(head)
        elif not os.path.getsize(copy):
            damage = "the file is empty"
            continue  # SQLite would delete the write-ahead log of an empty file
        connection = sqlite3.connect(copy, isolation_level=None)
        try:
            connection.row_factory = sqlite3.Row
            connection.execute("PRAGMA writable_schema=ON")  # use the readable part of a damaged schema
            found = _tables(connection)
            if wanted <= found or certain <= found:
                return connection, damage
            damage = damage or f"tables are missing: {', '.join(sorted(certain - found))}"
        except sqlite3.Error as error:
            damage = damage or str(error)
        connection.close()
    return sqlite3.connect(":memory:"), damage


def _head(path: str, version: int = 0) -> bytes:
    """Return the first page of the store at ``path``. With ``version``, first create a store of that version."""
    if version:
        connection = sqlite3.connect(path, isolation_level=None)
        migrate(connection, 0, version)
        connection.close()
    with open(path, "rb") as stream:
        head = bytearray(stream.read(PAGE))
    if version:
        os.unlink(path)
    head[18:20] = b"\2\2"  # journal mode: write-ahead log
    head[28:40] = bytes(12)  # size 0: SQLite asks the file system; no free pages
    head[92:96] = bytes(4)  # the size counts only if this field equals the change counter
    return bytes(head)


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
    connection: sqlite3.Connection, name: str, key: tuple[str, ...], by_row: bool, top: int, left: Salvaged
) -> None:
    """Add the readable rows of a table to ``left``.

    A damaged table is read from both ends up to the damage. If the table has row ids (``by_row``), each row between the
    two readable parts is then looked up by its id. ``top``: the highest possible row id; 0: not known.
    """
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


def _fill_events(connection: sqlite3.Connection, left: Salvaged) -> None:
    """Add events that lie between two damaged places. They are read job by job."""
    if "events" in left.trouble:
        known = {(row["job"], row["n"]) for row in left.rows["events"]}
        for job in left.rows["jobs"]:
            found, _ = _until_error(connection, "SELECT * FROM events WHERE job=?", job["id"])
            left.rows["events"] += [row for row in found if (row["job"], row["n"]) not in known]
