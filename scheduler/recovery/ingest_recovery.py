"""A watched file whose marks were lost: every line in it counts as seen, and what is not known of them is told."""

from __future__ import annotations

import json
import os
import shlex
import sqlite3
from collections.abc import Callable, Set
from dataclasses import dataclass, field

from scheduler.core.errors import SchedulerError
from scheduler.core.file_offsets import FileMark, LineRead, Refusal
from scheduler.core.identity import identity_of
from scheduler.intake.jobs_file import Door
from scheduler.intake.parsers import Parser
from scheduler.intake.tail import OPEN_LINE_S, SETTLE_S, Follower
from scheduler.store import file_offsets as kept
from scheduler.store.paths import Places
from scheduler.system.atomic_files import replace_file
from scheduler.system.safe_open import plain

LONG_AFTER_S = 10 * (OPEN_LINE_S + SETTLE_S)


def note_watched(places: Places, files: dict[str, str]) -> None:
    """Remember which files jobs come from, and of which kind, where a damaged store cannot take it along."""
    if files != watched_before(places):
        replace_file(places.watched, json.dumps(files).encode())


def watched_before(places: Places) -> dict[str, str]:
    """Path → kind (the name of its setting) of what the last daemon read; empty if that is not known."""
    try:
        with open(places.watched, encoding="utf-8", opener=plain) as stream:
            found = json.load(stream)
    except (OSError, ValueError):
        return {}  # the settings tell as well
    return {str(path): str(kind) for path, kind in found.items()} if isinstance(found, dict) else {}


@dataclass(slots=True)
class Looked:
    """A file as it stands: its end, each line with its identity ("" if it is no job), what is wrong with it."""

    mark: FileMark | None = None
    lines: list[tuple[LineRead, str, str]] = field(default_factory=list)  # line, identity, problem
    trouble: str = ""
    left_out: str = ""  # why nothing more is read from it


def look_through(path: str, parse: Parser, managed: tuple[int, ...] | None, home: str, trust_group: bool) -> Looked:
    """Read the whole file, the last line included however it ends."""
    out, follower, now = Looked(), Follower(path, None, trust_group), 0.0
    door = Door(os.path.dirname(path), home, managed)
    try:
        while True:
            batch = follower.look(now)
            if batch is None:
                if follower.look_again_at is None:
                    break
                now += LONG_AFTER_S  # nobody writes to it for us: what stands there counts
                continue
            out.left_out = out.left_out or batch.left_out
            for line in batch.lines:
                out.lines.append((line, *_identity(line, parse, door, path)))
            follower.accept(batch)
    except (SchedulerError, OSError) as error:
        out.trouble = str(error)
    finally:
        follower.close()
    out.mark = follower.mark if follower.mark.inode else None
    return out


def _identity(line: LineRead, parse: Parser, door: Door, path: str) -> tuple[str, str]:
    if line.problem:
        return "", line.problem
    try:
        parsed = parse(line.text, door, f"{os.path.basename(path)}:{line.number}")
    except SchedulerError as error:
        return "", str(error)
    except Exception as error:  # noqa: BLE001  whatever is wrong with a line costs only that line
        return "", f"cannot be read ({error!r})"
    return (identity_of(parsed.spec) if parsed is not None else ""), ""


def settle_file(
    connection: sqlite3.Connection, path: str, looked: Looked, known: Set[str], trusted: bool, now: float,
    say: Callable[[str], None], *, all_known: bool = False,
) -> int:  # fmt: skip
    """Write down how far the file counts as read; returns how many lines somebody has to decide about.

    ``trusted``: the marks were read whole and are no older than what happened: lines behind them are new. ``all_known``: no job
    was lost; one that is missing has been forgotten on purpose.
    """
    before = {row[0] for row in connection.execute("SELECT identity FROM line_counts WHERE path=?", (path,))}
    if not trusted:
        connection.execute("DELETE FROM line_counts WHERE path=?", (path,))
        connection.execute("DELETE FROM files WHERE path=?", (path,))
        connection.execute("DELETE FROM refused WHERE path=?", (path,))
        identities = [identity for _, identity, _ in looked.lines if identity]
        if looked.mark is None:
            # It cannot be read: when it can, it is taken for a replaced one, and no known job's line for a new one.
            say(f"{looked.trouble or path}; should it come back, lines of which no job is known are run")
            identities = sorted(known)
        kept.save_mark(connection, looked.mark or FileMark(path, inode=1))
        kept.count_lines(connection, path, identities)
    unsure = 0
    told: set[str] = set()
    for line, identity, problem in looked.lines:
        if not identity:
            if problem and not trusted:
                kept.refuse(connection, Refusal(path, line.number, line.text, problem, now))
            continue
        if all_known or identity in known or identity in told or (trusted and identity not in before):
            continue
        told.add(identity)
        unsure += 1
        again = f"printf '%s\\n' {shlex.quote(line.text.strip())} >> {shlex.quote(path)}"
        reason = f"not known any more whether it ran; to run it: {again}"
        kept.refuse(connection, Refusal(path, line.number, line.text, reason, now))
        say(f"{os.path.basename(path)}:{line.number}: {reason}")
    return unsure
