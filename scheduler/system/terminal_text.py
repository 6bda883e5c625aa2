"""Converts text for a terminal, so that the text fits the terminal's character set and cannot control the terminal."""

from __future__ import annotations

import codecs
import functools
import io
import os
import re
import sys

_PLAINLY = {"…": "...", "·": "-", "–": "-", "—": "-", "×": "x", "→": "->", "’": "'", "‘": "'", "“": '"', "”": '"', "≥": ">=", "≤": "<=", "○": "o", "►": ">", "✓": "+", "✗": "x", "⊘": "-"}  # fmt: skip
_UNSAFE = r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
_TURNING = "[\u202a-\u202e\u2066-\u2069]"  # change the direction of text


def _plainly(error: UnicodeError) -> tuple[str, int]:
    """Handle characters that a codec cannot encode: replace typographic characters by ASCII, escape all others."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    found = error.object[error.start : error.end]
    return "".join(_PLAINLY.get(char) or _number(ord(char)) for char in found), error.end


def _number(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


codecs.register_error("gpujob", _plainly)


def charset() -> str:
    """Return the encoding of the output: ASCII if the user's locale is C or POSIX, else the encoding of stdout."""
    said = os.environ.get("LC_ALL") or _ctype() or os.environ.get("LANG")
    return "ascii" if said in ("C", "POSIX") else getattr(sys.stdout, "encoding", None) or "utf-8"


@functools.cache
def _ctype() -> str:
    """Return LC_CTYPE as the user set it. In a C locale Python itself changes this variable to a UTF-8 locale."""
    found = os.environ.get("LC_CTYPE", "")
    if found not in ("C.UTF-8", "C.utf8", "UTF-8"):
        return found
    try:
        with open("/proc/self/environ", "rb") as stream:
            said = [entry for entry in stream.read().split(b"\0") if entry.startswith(b"LC_CTYPE=")]
    except OSError:
        return found
    return os.fsdecode(said[0]).partition("=")[2] if said else ""


def prepare(stream: object) -> None:
    """Make an output stream accept any text: characters that it cannot encode are replaced and cause no error."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(encoding="ascii" if charset() == "ascii" else None, errors="gpujob")


def shown(text: str) -> str:
    """Return ``text`` with replacements for the characters that the encoding of the output lacks."""
    if text.isascii():
        return text
    code = charset()
    return text if codecs.lookup(code).name == "utf-8" else text.encode(code, "gpujob").decode(code)


def safe(text: object) -> str:
    """Return ``text`` in a form that can be printed on a terminal without side effects.

    Control characters, line breaks and characters that change the text direction are escaped. Characters that the
    encoding of the output lacks are replaced.
    """
    plain = str(text)
    if plain.isascii() and plain.isprintable():
        return plain
    return shown(re.sub(_UNSAFE, lambda found: f"\\x{ord(found.group()):02x}", plain))


def upright(text: str) -> str:
    """Return ``text`` with all characters that change the text direction escaped."""
    return text if text.isascii() else re.sub(_TURNING, lambda found: f"\\u{ord(found.group()):04x}", text)
