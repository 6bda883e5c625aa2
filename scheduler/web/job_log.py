"""The route of the HTTP API that returns the log of a job as text.

A request asks for the last lines, for the part after or before a given byte, or for the lines that contain a word. The
text is what a terminal would show at the end of the output (`views/terminal_replay.py`). For example, all updates of a
progress bar become one line. The number of bytes that are read from a log is limited. Only files that the store names
as logs of the job are opened; the page of the scheduler of all users opens none.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from dataclasses import dataclass

from starlette.responses import Response

from scheduler.core.errors import NotFound, UsageError
from scheduler.core.log_names import logs_of
from scheduler.system.log_reader import CHUNK, LONGEST_LINE_SHOWN, LogWindow
from scheduler.system.terminal_text import upright
from scheduler.views.terminal_replay import Folder
from scheduler.web.routes import Ask, NotNow

DEFAULT_LINES, MOST_LINES = 200, 10_000
MOST_BYTES = 1 << 20  # of the log in one answer
LONGEST_LINE = 256 << 10
SEARCHED = 64 << 20  # bytes at the end of a log that are searched; SEARCHED_PACKED in a packed log
SEARCHED_PACKED = 8 << 20
LONGEST_WORD = 200
MOST_PLACES = 200  # positions of found lines (the last ones) in the header, which must stay short
AT_ONCE = 2  # searches that may run at the same time
PATIENCE_S = 5.0
SEARCH_S = 5.0  # time limit of one search; the rest of the log is not searched
_LINE_END = re.compile(rb"\n")
_ESCAPES = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")

SIZE, START, END, UNFINISHED, ATTEMPT, PLACES, RESTARTED, CUT = (
    f"X-Gpujob-Log-{name}" for name in ("Size", "Start", "End", "Unfinished", "Attempt", "Places", "Restarted", "Cut")
)
HEADERS = {
    SIZE: "Size of the log in bytes, not compressed.",
    START: "Byte where the text begins; send it as `before` to get the lines before it.",
    END: "Byte where the next answer begins; send it as `from`.",
    UNFINISHED: "Number of characters at the end of the text that belong to an unfinished line; the next answer repeats them.",
    ATTEMPT: "Number of the attempt whose log this is; each attempt has its own log.",
    PLACES: "With find: the bytes where the last 200 found lines begin, separated by commas.",
    RESTARTED: "1: the log has become shorter since the previous answer; the text is its last lines.",
    CUT: "1: only a part of the log was read or searched.",
}
_searching = threading.BoundedSemaphore(AT_ONCE)


@dataclass(slots=True)
class Part:
    """A part of a log, or the lines found in it.

    ``text``: the part as a terminal would show it. ``size``: size of the log in bytes. ``start``: position of the byte
    where this part begins. ``end``: position of the byte where the next part begins. ``unfinished``: number of
    characters at the end of ``text`` that belong to an unfinished line. ``restarted``: whether the log is shorter than
    the requested start. ``cut``: whether some of the log was not read or searched. ``places``: positions of the bytes
    where the found lines begin.
    """

    text: str = ""
    size: int = 0
    end: int = 0
    unfinished: int = 0
    restarted: bool = False
    cut: bool = False
    start: int = 0
    places: tuple[int, ...] = ()


def log(ask: Ask) -> Response:
    """Answer with a part of a job's log, or with its lines that contain a word. Raises UsageError, NotFound, NotNow."""
    lines = ask.whole("tail", DEFAULT_LINES, 0, MOST_LINES)
    start = ask.whole("from", 0, 0, 1 << 62) if ask.query("from") is not None else None
    before = ask.whole("before", 0, 0, 1 << 62) if ask.query("before") is not None else None
    if before is not None and start is not None:
        raise UsageError("cannot be combined with the parameter 'from'", where="before")
    wanted = ask.whole("attempt", 0, 1, 1 << 31) if ask.query("attempt") is not None else None
    word = ask.query("find")
    if word is not None and (start is not None or before is not None or not 0 < len(word) <= LONGEST_WORD):
        raise UsageError(
            f"must be a text of 1 to {LONGEST_WORD} characters, and cannot be combined with the parameters 'from' and 'before'",
            where="find",
        )
    job, _, events = ask.source.client.job(ask.numbers["id"])
    known = logs_of(job, events)
    attempt = job.attempt if wanted is None else wanted
    if wanted is not None and wanted not in known:
        has = f"it has logs of attempts {', '.join(map(str, sorted(known)))}" if known else f"it is {job.state.value}"
        raise NotFound(f"cannot show the log of attempt {wanted} of job {job.id}: {has}")
    path = known.get(attempt, "")
    part = Part()
    if path and ask.source.client.shared:  # a user could name a file of the service as a log, or put a link there
        raise NotFound("the page does not open the logs of users", do=f"gpujob logs {job.id}")
    if path:
        try:
            with LogWindow(path, keep=MOST_BYTES if word is None else SEARCHED_PACKED) as source:
                part = _found(source, word, lines) if word is not None else _part(source, start, lines, before)
        except FileNotFoundError:
            if job.state.ended:
                raise NotFound("cannot read the log: it was removed, by keep_logs or by a user", where=path) from None
        except OSError as error:
            raise NotFound(f"cannot read the log: {error.strerror}", where=path) from None
    headers = {SIZE: part.size, START: part.start, END: part.end, UNFINISHED: part.unfinished, ATTEMPT: attempt}
    shown = {name: str(value) for name, value in headers.items()}
    shown |= {PLACES: ",".join(map(str, part.places))} if part.places else {}
    shown |= {RESTARTED: "1"} if part.restarted else {}
    shown |= {CUT: "1"} if part.cut else {}
    return Response(
        upright(part.text).encode("utf-8", "replace"), headers=shown, media_type="text/plain; charset=utf-8"
    )


def _part(log: LogWindow, start: int | None, lines: int, before: int | None = None) -> Part:
    """Return the part of the log that begins at byte ``start``, or the last lines of the log.

    The last lines are returned if ``start`` is None or is after the end of the log. ``lines``: number of last lines.
    ``before``: position of the byte where the last lines end; None: the end of the log.
    """
    size = log.size
    if before is not None:
        log.size = min(size, before)
    restarted = start is not None and start > log.size
    entered = False
    if start is None or restarted:
        start, entered = log.last_lines(lines, MOST_BYTES)
    data = log.read(start, MOST_BYTES)
    whole = data.rfind(b"\n") + 1
    rest = data[whole:]
    if len(rest) >= LONGEST_LINE_SHOWN or (len(data) == MOST_BYTES and not whole):
        whole, rest = len(data) - _half_character(data), b""  # a very long line: return it in parts
    folder = Folder(longest=LONGEST_LINE)
    if entered:
        folder.enter()
    text = "".join(f"{line}\n" for line in folder.feed(data[:whole]))
    if not data[:whole].endswith(b"\n"):
        text += folder.unfinished()
    tail = ""
    if rest:
        folder = Folder(longest=LONGEST_LINE)
        folder.feed(rest)
        tail = folder.unfinished()
    shown = upright(tail)
    return Part(text + tail, size, start + whole, len(shown), restarted, log.cut, start)


def _half_character(data: bytes) -> int:
    """Return how many bytes at the end of ``data`` belong to an incomplete UTF-8 character; 0: the end is complete."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        wants = 2 if byte >> 5 == 6 else 3 if byte >> 4 == 14 else 4 if byte >> 3 == 30 else 1
        return back if wants > back else 0
    return 0


def _found(log: LogWindow, word: str, most: int) -> Part:
    """Return the last ``most`` lines that contain a word, with their line numbers. The case of letters is ignored.

    If the beginning of the log was not read, the lines are numbered from the end: ``-1`` is the last line. The search
    reads the log in blocks from the end to the beginning. A block has only whole lines, except for very long lines.
    Only blocks that contain the word are converted with `Folder`, which is slow. Raises NotNow if too many searches
    run.
    """
    if not _searching.acquire(timeout=PATIENCE_S):
        raise NotNow("cannot search the log: too many searches are running", do="try again in a few seconds")
    try:
        return _found_in(log, word.casefold(), most)
    finally:
        _searching.release()


def _without_escapes(data: bytes) -> str:
    """Return these bytes as case-folded text without escape sequences.

    This is much faster than `Folder`, and enough to find out whether a block may contain a word.
    """
    return (_ESCAPES.sub(b"", data) if b"\x1b" in data else data).decode("utf-8", "replace").casefold()


def _found_in(log: LogWindow, word: str, most: int) -> Part:
    hits: deque[tuple[int, str, int]] = deque()  # number of the line from the end, its text, its byte
    first = max(0, log.size - min(SEARCHED, log.at_hand))
    end, behind, room = log.size, 0, MOST_BYTES
    cut = bool(first) or log.cut
    deadline = time.monotonic() + SEARCH_S
    while end > first and len(hits) < most and room > 0:
        start = max(first, end - CHUNK)
        data = log.read(start, end - start)
        begins = data.find(b"\n") + 1 if start > first else 0
        if begins < len(data):
            start, data = start + begins, data[begins:]
        lines = data.count(b"\n")
        if end == log.size:  # bytes after the last line end that show nothing (a colour, a carriage return) are no line
            lines += len(Folder(longest=LONGEST_LINE).feed(data[data.rfind(b"\n") + 1 :], last=True))
        if time.monotonic() > deadline:
            first, cut = end, True
            break
        if word in _without_escapes(data):
            folded = Folder(longest=LONGEST_LINE).feed(data, last=True)
            begun = [0, *(one.end() for one in _LINE_END.finditer(data))]
            for number in range(len(folded) - 1, -1, -1):
                line = folded[number]
                if word in line.casefold() and len(hits) < most:
                    room -= len(line) + 20
                    if room < 0:
                        cut = True
                        break
                    hits.appendleft((behind + len(folded) - number, line, start + begun[number]))
        behind += lines
        end = start
    places = tuple(place for _, _, place in hits)[-MOST_PLACES:]
    if first or log.cut:
        text = "".join(f"-{number}:{line}\n" for number, line, _ in hits)
    else:
        while end > 0:  # count the lines before this block, to number the lines from the beginning
            start = max(0, end - CHUNK)
            behind += log.read(start, end - start).count(b"\n")
            end = start
        text = "".join(f"{behind - number + 1}:{line}\n" for number, line, _ in hits)
    return Part(text, log.size, log.size, 0, False, cut, 0, places)
