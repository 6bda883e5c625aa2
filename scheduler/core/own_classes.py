"""Failure classes that users define (setting `failure_classes`), and the search for a text with `*` in a line."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from scheduler.core.errors import UsageError, nearest, said

MOST_CLASSES, MOST_TEXTS, LONGEST_TEXT = 100, 100, 500
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,39}", re.ASCII)
_KEYS = ("text", "hint", "after")


class OwnClass(NamedTuple):
    """A failure class of the user. ``texts``: parts of lines, with `*` for any characters; ``hint``: what to do.

    ``after``: the exit codes after which the class is looked for; empty: after all, and after signals.
    """

    name: str
    texts: tuple[str, ...]
    hint: str = ""
    after: tuple[int, ...] = ()


def pieces_of(text: str) -> tuple[str, ...]:
    """Return the pieces between the stars of a text, in lower case, for `holds`."""
    return tuple(piece for piece in text.lower().split("*") if piece)


def holds(line: str, pieces: Sequence[str]) -> bool:
    """Return whether a line in lower case has all pieces, one after another."""
    at = 0
    for piece in pieces:
        at = line.find(piece, at)
        if at < 0:
            return False
        at += len(piece)
    return True


def read_own_classes(value: Any) -> tuple[OwnClass, ...] | None:
    """Return the classes of the setting, a mapping: name → text, hint, after; None: there are none. Raises UsageError.

    As an option or variable, the mapping is JSON.
    """
    if isinstance(value, str) and value.strip():
        value = _parsed(value)
    if not value and not isinstance(value, (bool, int, float)):
        return None
    if isinstance(value, (list, tuple)):  # as the store and agents have it
        value = _mapping_of(value)
    if not isinstance(value, Mapping):
        raise UsageError(
            f"must be a mapping, not {said(value)}", do="write NAME: {text: part of a line, hint: what to do}"
        )
    if len(value) > MOST_CLASSES:
        raise UsageError(f"has {len(value)} classes, and at most {MOST_CLASSES} are allowed", do="remove some")
    return tuple(_class(name, row) for name, row in value.items())


def written_own_classes(classes: Sequence[Sequence[Any]]) -> str:
    """Return the setting as one line of YAML, which is also JSON."""
    rows = {}
    for name, texts, hint, after in classes:
        given = {"text": list(texts), "hint": hint, "after": list(after)}
        rows[name] = {key: part for key, part in given.items() if part}
    return json.dumps(rows, ensure_ascii=False)


def _parsed(text: str) -> Any:
    do = 'write {"NAME": {"text": "part of a line", "hint": "what to do"}}'
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise UsageError(f"must be a mapping, not {said(text)}", do=do) from None
    if not isinstance(value, dict):
        raise UsageError(f"must be a mapping, not {said(text)}", do=do)
    return value


def _mapping_of(rows: Sequence[Any]) -> dict[Any, Any]:
    try:
        return {name: {"text": texts, "hint": hint, "after": after} for name, texts, hint, after in rows}
    except (TypeError, ValueError):
        raise UsageError("must be a mapping, not a list", do="write NAME: {text: part of a line}") from None


def _class(name: Any, row: Any) -> OwnClass:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        do = "use a-z, 0-9, _ and -, at most 40, a letter first"
        raise UsageError(f"{said(name)} is not a name of a class", do=do)
    if not isinstance(row, Mapping):
        raise UsageError(
            f"{name} must be a mapping, not {said(row)}", do="write {text: part of a line, hint: what to do}"
        )
    for key in row:
        if key not in _KEYS:
            near = nearest(str(key), _KEYS)
            raise UsageError(
                f"{name}: unknown key {said(key)}", do=f"did you mean {near}?" if near else f"known: {', '.join(_KEYS)}"
            )
    hint = _plain(f"{name}: hint", row.get("hint", ""))
    return OwnClass(name, _texts(name, row.get("text"), hint), hint, _codes(name, row.get("after")))


def _texts(name: str, value: Any, hint: str) -> tuple[str, ...]:
    found = tuple(_plain(f"{name}: text", one) for one in (value if isinstance(value, (list, tuple)) else [value]))
    if len(found) > MOST_TEXTS:
        raise UsageError(f"{name} has {len(found)} texts, and at most {MOST_TEXTS} are allowed", do="remove some")
    if not any(found) and hint:
        return ()  # the class has a name of ours, and gets another hint
    for text in found:
        if not pieces_of(text) or not text.strip(" *"):
            raise UsageError(f"{name} has an empty text", do="write a part of the line that shows the failure")
    return found


def _plain(what: str, value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, (str, int, float)) or isinstance(value, bool):
        raise UsageError(f"{what} must be a text, not {said(value)}")
    text = str(value)
    if len(text) > LONGEST_TEXT:
        raise UsageError(f"{what} is longer than {LONGEST_TEXT} characters", do="write a shorter one")
    if not text.isprintable():
        raise UsageError(f"{what} has a character that cannot be printed", do="remove it; a text is a part of one line")
    return text


def _codes(name: str, value: Any) -> tuple[int, ...]:
    given = value if isinstance(value, (list, tuple)) else [] if value in (None, "") else [value]
    found = []
    for one in given:
        text = str(one)
        if isinstance(one, bool) or not (text.isascii() and text.isdigit() and len(text) <= 3 and 0 < int(text) <= 255):
            raise UsageError(f"{name}: after must be a list of exit codes from 1 to 255, not {said(one)}")
        found.append(int(text))
    return tuple(found)
