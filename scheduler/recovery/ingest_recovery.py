"""Restores the reading positions of watched files.

If the reading position of a file is lost, all lines of the file count as read. Lines without a known job are reported
to the user.
"""

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
from scheduler.intake.jobs_file import LineContext
from scheduler.intake.parsers import Parser
from scheduler.intake.tail import OPEN_LINE_S, SETTLE_S, Follower
from scheduler.store import file_offsets as kept
from scheduler.store.paths import Places
from scheduler.system.atomic_files import replace_file
from scheduler.system.safe_open import plain

LONG_AFTER_S = 10 * (OPEN_LINE_S + SETTLE_S)  # longer than each waiting time of a Follower


def note_watched(places: Places, files: dict[str, str]) -> None:
    """Save paths and kinds of the watched files outside the store, for `recover` after damage to the store."""
    if files != watched_before(places):
        replace_file(places.watched, json.dumps(files).encode())


def watched_before(places: Places) -> dict[str, str]:
    """Return path → kind (name of the setting) of the files that the last daemon watched; empty if none is known."""
    try:
        with open(places.watched, encoding="utf-8", opener=plain) as stream:
            found = json.load(stream)
    except (OSError, ValueError):
        return {}  # the settings name the files, too
    return {str(path): str(kind) for path, kind in found.items()} if isinstance(found, dict) else {}


@dataclass(slots=True)
class Looked:
    """The result of `look_through`: the lines of a watched file.

    ``mark``: the position up to which the file was read; None if nothing could be read. ``trouble``: why the file could
    not be read completely; empty if there was no error.
    """

    mark: FileMark | None = None
    lines: list[tuple[LineRead, str, str]] = field(default_factory=list)  # line, identity (empty: no job), problem
    trouble: str = ""
    left_out: str = ""  # why the rest is not read


def look_through(path: str, parse: Parser, managed: tuple[int, ...] | None, home: str, trust_group: bool) -> Looked:
    """Read and parse the whole file, including a last line without a newline.

    ``managed``: the indexes of the managed GPUs; None: any index is valid. ``home``: the folder that `~` stands for.
    """
    out, follower, now = Looked(), Follower(path, None, trust_group), 0.0
    line_context = LineContext(os.path.dirname(path), home, managed)
    try:
        while True:
            batch = follower.look(now)
            if batch is None:
                if follower.look_again_at is None:
                    break
                now += LONG_AFTER_S  # do not wait for more text: the file counts as complete
                continue
            out.left_out = out.left_out or batch.left_out
            for line in batch.lines:
                out.lines.append((line, *_identity(line, parse, line_context, path)))
            follower.accept(batch)
    except (SchedulerError, OSError) as error:
        out.trouble = str(error)
    finally:
        follower.close()
    out.mark = follower.mark if follower.mark.inode else None
    return out


def _identity(line: LineRead, parse: Parser, line_context: LineContext, path: str) -> tuple[str, str]:
    if line.problem:
        return "", line.problem
    try:
        parsed = parse(line.text, line_context, f"{os.path.basename(path)}:{line.number}")
    except SchedulerError as error:
        return "", str(error)
    except Exception as error:  # noqa: BLE001  an error in one line must not stop the others
        return "", f"internal error of gpujob, please report it: {error!r}"
    return (identity_of(parsed.spec) if parsed is not None else ""), ""


def settle_file(
    connection: sqlite3.Connection, path: str, looked: Looked, known: Set[str], trusted: bool, now: float,
    say: Callable[[str], None], *, all_known: bool = False,
) -> int:  # fmt: skip
    """Record which lines of the file count as read. Return the number of lines about which the user has to decide.

    The user has to decide about each line that counts as read but has no known job: its job may have run. Each of these
    lines is stored as a refused line and reported with ``say``.

    ``known``: identities of the known jobs. ``trusted``: whether the stored reading positions are complete and up to
    date. If so, lines after these positions are new lines; if not, all lines count as read. ``all_known``: whether the
    store still has all its jobs. If so, the user need not decide about any line, because a missing job was deleted on
    purpose.
    """
    before = {row[0] for row in connection.execute("SELECT identity FROM line_counts WHERE path=?", (path,))}
    if not trusted:
        connection.execute("DELETE FROM line_counts WHERE path=?", (path,))
        connection.execute("DELETE FROM files WHERE path=?", (path,))
        connection.execute("DELETE FROM refused WHERE path=?", (path,))
        identities = [identity for _, identity, _ in looked.lines if identity]
        mark = looked.mark
        if mark is None or looked.trouble:
            # The file, or the rest of it, cannot be read now. When it can, it counts as replaced, and the lines read now
            # and lines of known jobs count as read. A position in the middle would make all the others new lines.
            but = " and the lines read just now" if identities else ""
            then = f"once the file can be read again, the scheduler runs its lines, except lines of known jobs{but}"
            say(f"{looked.trouble or path}; {then}")
            identities += sorted(known - set(identities))
            mark = FileMark(path, inode=1)
        kept.save_mark(connection, mark)
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
        reason = f"{kept.UNSURE}; to run it: {again}"
        kept.refuse(connection, Refusal(path, line.number, line.text, reason, now))
        say(f"{os.path.basename(path)}:{line.number}: {reason}")
    return unsure
