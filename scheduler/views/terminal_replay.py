"""Turns a job's output into the lines that a terminal would finally show, without control sequences."""

from __future__ import annotations

import codecs
import re
import unicodedata
from functools import lru_cache

LONGEST = 1 << 20  # characters of a line that are kept
RESET = "\x1b[0m"
MOST_COLOURS = 16  # kept in force; without a limit, lines of a job that never resets colours would grow

_SILENT = bytes([*range(7), 8, 11, 12, *range(14, 27), *range(28, 32), 127])  # controls except BEL, tab, line ends, ESC
_SGR = re.compile(r"\x1b\[[0-9;:]*m")
_HALF_SGR = re.compile(r"\x1b[^m]*\Z")
_CSI = r"(?:\x1b\[|\x9b)[0-?]{0,64}[ -/]{0,8}"
_STRING = r"(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\n\r]{0,4096}"
# A complete escape sequence. If a sequence never ends, only its first character matches, so that no text is lost.
_ESCAPE = re.compile(rf"{_CSI}[@-~]|{_STRING}(?:\x07|\x1b\\|\x9c)|\x1b[ -/]{{0,4}}[0-OQ-WYZ\\`-~]|[\x07\x1b\x80-\x9f]")
_UNFINISHED = re.compile(rf"(?:{_CSI}|{_STRING}\x1b?|\x1b[ -/]{{0,4}})\Z")
_LONGEST_ESCAPE = 4200
_C1 = re.compile("[\x80-\x9f]")
_ERASE_REST, _ERASE_LINE, _ERASE_BEFORE = "\x1c", "\x1d", "\x1e"  # unused in cleaned text: marks for erasing
_ERASERS = {"": _ERASE_REST, "0": _ERASE_REST, "1": _ERASE_BEFORE, "2": _ERASE_LINE}
_ERASING = re.compile("([\x1c-\x1e])")
# A character that may not take exactly one column. All characters in the excluded ranges take one column.
_ODD = re.compile("[^\x00-\x7e\xa0-\xac\xae-\u02ff\u2010-\u2027\u2030-\u205e\u2190-\u2319\u2500-\u25fc\ufffd]")


@lru_cache(4096)
def _width(char: str) -> int:
    if unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def columns(text: str) -> int:
    """Return the number of columns of a text; colour sequences take none."""
    if "\x1b" in text:
        text = _SGR.sub("", text)
    return sum(map(_width, text)) if _ODD.search(text) else len(text)


def without_colours(text: str) -> str:
    """Return the text without colour sequences."""
    return _SGR.sub("", text) if "\x1b" in text else text


def clipped(text: str, most: int) -> str:
    """Return the beginning of a text, at most ``most`` columns. All colour sequences of the whole text are kept."""
    if columns(text) <= most:
        return text
    out, left = [], most
    for piece in re.split(rf"({_SGR.pattern})", text):
        if piece.startswith("\x1b"):
            out.append(piece)
            continue
        for char in piece:
            left -= _width(char)
            if left < 0:
                break
            out.append(char)
    return "".join(out)


def _in_force(text: str) -> str:
    """Return the colour sequences that are in effect at the end of a text; at most the last `MOST_COLOURS` of them."""
    found: list[str] = _SGR.findall(text)
    for number in range(len(found) - 1, -1, -1):
        if found[number] in ("\x1b[m", RESET):
            found = found[number + 1 :]
            break
        if found[number].startswith("\x1b[0;"):
            found = found[number:]
            break
    return "".join(found[-MOST_COLOURS:])


def _from_column(text: str, column: int) -> str:
    """Return the part of a text that begins at a column, in the colours that it has in the text.

    If the column is the right half of a wide character, the part begins with a blank in place of that half.
    """
    if "\x1b" not in text and not _ODD.search(text):
        return text[column:]
    at, colours, position = 0, "", 0
    while position < len(text) and at < column:
        found = _SGR.match(text, position)
        if found:
            colours += found.group()
            position = found.end()
            continue
        at += _width(text[position])
        position += 1
    while position < len(text) and text[position] != "\x1b" and _width(text[position]) == 0:
        position += 1  # combines with the previous character, which is overwritten
    return _in_force(colours) + " " * (at - column) + text[position:]


class Folder:
    """Turns output into lines. The result does not depend on how the output is divided into calls of `feed`.

    The text after a carriage return overwrites the line from its start, and sequences that erase a part of the line
    take effect. All other control characters except tabs are removed. Bytes that are not UTF-8 become U+FFFD.

    ``colours``: whether to keep colour sequences. A line then begins with the colours that are in effect at its start,
    and a line with colours ends with a reset. ``longest``: the most characters that are kept of a line; this limits the
    memory. A longer line is cut and gets a mark at its end.
    """

    def __init__(self, colours: bool = False, longest: int = LONGEST) -> None:
        self.colours, self.longest = colours, longest
        self.cut_any = False
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._held = ""  # the beginning of an incomplete escape sequence
        self._erases = False
        self._over = ""  # text since the start of the line or its last carriage return
        self._under = ""  # earlier text of the line; its part to the right of ``_over`` is visible
        self._over_lost = self._under_lost = 0
        # ``_entered``: the line began before the first byte; ``_entered_over``: a carriage return led to its start.
        self._entered = self._entered_over = False

    def enter(self) -> None:
        """Note that the next bytes for `feed` begin in the middle of a line. This line gets a mark at its start."""
        self._entered = True

    def feed(self, data: bytes, last: bool = False) -> list[str]:
        """Return the lines that these bytes complete.

        ``last``: whether the output ends here. The text after the last line end is then a line too, unless it is empty.
        """
        text = self._held + self._decode(data.translate(None, _SILENT), last)
        self._held, self._erases = "", False
        if "\x1b" in text or "\x07" in text or (not text.isascii() and _C1.search(text)):
            unfinished = None if last else _UNFINISHED.search(text, max(0, len(text) - _LONGEST_ESCAPE))
            if unfinished:
                self._held, text = unfinished.group(), text[: unfinished.start()]
            text = _ESCAPE.sub(self._kept, text)
            self._erases = bool(_ERASING.search(text))
        *whole, rest = text.split("\n")
        lines = []
        for part in whole:
            begun = self._over or self._under or self._entered or self._erases
            if not begun and len(part) <= self.longest and "\r" not in part and "\x1b" not in part:
                lines.append(part)  # most lines need no processing
                continue
            self._write(part)
            lines.append(self._line())
        self._write(rest)
        if last and without_colours(self._over + self._under):
            lines.append(self._line())
        return lines

    def unfinished(self) -> str:
        """Return the present text of the line that is not complete yet; empty if there is none."""
        shown = self._shown()
        return shown if without_colours(shown) else ""

    def _kept(self, found: re.Match[str]) -> str:
        escape = found.group().replace("\x9b", "\x1b[", 1)
        if escape.startswith("\x1b["):
            if escape.endswith("m"):
                return escape if self.colours and _SGR.fullmatch(escape) else ""
            if escape.endswith("K"):
                return _ERASERS.get(escape[2:-1], "")
            if escape in ("\x1b[G", "\x1b[0G", "\x1b[1G"):
                return "\r"  # go to the first column, as a carriage return does
        return ""

    def _write(self, part: str) -> None:
        first, *rest = part.split("\r")
        self._put(first)
        if not rest:
            return
        self._return()
        if len(rest) > 2 and self._plain(part):
            if any(rest):
                self._forget_entered()
            pieces = [self._under, *rest[:-1]]
            under, whole = "", max(map(len, pieces))
            while len(under) < whole:  # later pieces hide earlier ones up to their own length
                under += pieces.pop()[len(under) :]
            self._under = under[: self.longest]
            self._under_lost = max(self._under_lost, len(under) - self.longest)
            rest = rest[-1:]
        for piece in rest[:-1]:
            self._put(piece)
            self._return()
        self._put(rest[-1])

    def _plain(self, part: str) -> bool:
        """Return whether each character of the line and of ``part`` takes exactly one column.

        If so, `_write` can apply many updates of a line in one step.
        """
        text = self._over + self._under
        if self._erases or "\x1b" in part or "\x1b" in text:
            return False
        return (part.isascii() and text.isascii()) or not (_ODD.search(part) or _ODD.search(text))

    def _put(self, text: str) -> None:
        if not text:
            return
        if not (self._erases and _ERASING.search(text)):
            self._add(text)
            return
        for piece in _ERASING.split(text):
            if piece not in (_ERASE_REST, _ERASE_LINE, _ERASE_BEFORE):
                self._add(piece)
                continue
            if piece != _ERASE_BEFORE:
                self._under, self._under_lost = "", 0
            if piece != _ERASE_REST:
                self._over = " " * columns(self._over) + _in_force(self._over)
                self._over_lost = 0

    def _add(self, text: str) -> None:
        room = self.longest - len(self._over)
        if len(text) > room:
            self._over_lost += len(text) - room
            text = text[:room]
        if text:
            self._forget_entered()
            self._over += text

    def _forget_entered(self) -> None:
        """Drop the earlier text of a line whose beginning was not seen. Called when new text overwrites this line.

        The column of the earlier text is unknown, so it is not known which part of the earlier text stays visible.
        """
        if self._entered_over:
            self._under, self._under_lost = "", 0
            self._entered = self._entered_over = False

    def _return(self) -> None:
        self._entered_over = self._entered
        if not self._over:
            return
        under = self._shown()
        self._under_lost = max(self._under_lost, self._over_lost)
        if len(under) > self.longest:
            self._under_lost = max(self._under_lost, len(under) - self.longest)
            under = _HALF_SGR.sub("", under[: self.longest])
        self._under = under
        self._over, self._over_lost = _in_force(self._over), 0

    def _shown(self) -> str:
        over, under = self._over, self._under
        if self._over_lost and "\x1b" in over:
            over = _HALF_SGR.sub("", over)
        if not under:
            return over
        width = columns(over)
        if columns(under) <= width:
            return over
        return over + (RESET if "\x1b" in over else "") + _from_column(under, width)

    def _line(self) -> str:
        line = self._shown()
        lost = max(self._over_lost, self._under_lost)
        if lost:
            self.cut_any = True
            line += f" … (cut here: {lost} more characters)"
        if self._entered:
            line = f"… {line}"
            self.cut_any = True
            self._entered = self._entered_over = False
        if "\x1b" in line:
            line = line + RESET if without_colours(line) else ""
        self._over, self._under = _in_force(self._over) if self.colours else "", ""
        self._over_lost = self._under_lost = 0
        return line
