"""Width and colours of the terminal on stdout, and text that is cut or folded to fit it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from scheduler.system.terminal_text import shown

ELLIPSIS = "…"
_ZERO_WIDTH = frozenset("\u200b\u200c\u200d\u2060\ufeff")
GREEN, RED, YELLOW, CYAN = "32", "31", "33", "36"
_COLOURS = {
    "AVAILABLE": GREEN, "done": GREEN,
    "failed": RED, "interrupted": RED, "skipped": YELLOW, "UNHEALTHY": RED, "GONE": RED,
    "PAUSED": YELLOW, "STALE": YELLOW, "FOREIGN": YELLOW, "DRAINING": YELLOW, "pending": YELLOW, "stopping": YELLOW,
    "ok": GREEN, "warn": YELLOW, "bad": RED, "unknown": CYAN,
    "BUSY": CYAN, "running": CYAN, "starting": CYAN,
}  # fmt: skip


def width() -> int | None:
    """Return the number of columns of the terminal on stdout; None if stdout is no terminal."""
    if not sys.stdout.isatty():
        return None
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except OSError:
        return None


def colours() -> bool:
    """Return whether to print colours: stdout is a terminal with colours (TERM), and NO_COLOR is not set."""
    able = os.environ.get("TERM", "dumb") not in ("dumb", "") and not os.environ.get("NO_COLOR")
    return able and sys.stdout.isatty()


def painted(word: str) -> str:
    """Return a state word in its colour; unchanged if stdout shows no colours or the word has no colour."""
    colour = _COLOURS.get(word.partition(" ")[0])
    return f"\x1b[{colour}m{word}\x1b[0m" if colour and colours() else word


def cells(text: str) -> int:
    """Return the number of terminal columns of a text. For emoji sequences it may be too high, but never too low."""
    return len(text) if text.isascii() else sum(map(_cells, text))


def _cells(char: str) -> int:
    from unicodedata import category, east_asian_width

    if char in _ZERO_WIDTH or (category(char) in ("Mn", "Me") and char != "\ufe0f"):
        return 0
    return 2 if east_asian_width(char) in "WF" else 1


def cut(text: str, most: int | None) -> str:
    """Return the text, cut to at most ``most`` columns (None: no limit). A text that was cut ends with ``…``."""
    if most is None or cells(text) <= most:
        return text
    dots = shown(ELLIPSIS)
    return _beginning(text, most) if most <= len(dots) else _beginning(text, most - len(dots)) + dots


def shortened(text: str, most: int) -> str:
    """Return the text with at most ``most`` columns. A longer text has … in its middle.

    The middle is left out because names often differ at the end.
    """
    dots = shown(ELLIPSIS)
    room = most - len(dots)
    if cells(text) <= most or room < 2:
        return cut(text, most)
    return _beginning(text, room - room // 2) + dots + _beginning(text[::-1], room // 2)[::-1]


def _beginning(text: str, most: int) -> str:
    first = next(_pieces(text, most), "")
    return first if cells(first) <= most else ""  # a wide character does not fit into one column


def _pieces(text: str, most: int) -> Iterator[str]:
    """Yield the text in pieces of at most ``most`` columns.

    If a single character is wider than ``most`` columns, it becomes a piece of its own.
    """
    start = used = 0
    for at, char in enumerate(text):
        size = _cells(char) if not char.isascii() else 1
        if used + size > most and at > start:
            yield text[start:at]
            start, used = at, 0
        used += size
    if start < len(text):
        yield text[start:]


def folded(text: str, indent: int = 0, state: str = "") -> list[str]:
    """Return the text as lines that fit the terminal. If stdout is no terminal, return one line.

    Lines break at spaces. All lines except the first are indented by ``indent`` columns. ``state``: the state word in
    the first line, which is coloured.
    """
    most = width()
    lines = [text] if most is None or cells(text) <= most else _folded(text, indent, most)
    if state:
        lines[0] = lines[0].replace(state, painted(state), 1)
    return lines


def _folded(text: str, indent: int, most: int) -> list[str]:
    indent = 0 if most <= 8 else 2 if indent * 2 > most else indent
    bare = text.lstrip(" ")
    lines, line, fresh = [], text[: len(text) - len(bare)][: most // 2 if indent else 0], True
    used = len(line)
    for word in bare.split(" "):
        size = cells(word)
        if not fresh and used + 1 + size > most:
            lines.append(line.rstrip())
            line, used, fresh = " " * indent, indent, True
        if used + size > most:  # a word longer than a line is divided
            *whole, word = _pieces(word, max(1, most - max(used, indent)))
            for piece in whole:
                lines.append(line + piece)
                line = " " * indent
            size, used = cells(word), len(line)
        line += word if fresh else " " + word
        used += size + (not fresh)
        fresh = False
    return [*lines, line.rstrip()]
