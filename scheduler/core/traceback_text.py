"""Finds the exceptions in a log: tracebacks of one or several processes, also behind prefixes and in boxes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

LONGEST_LINE = 600  # characters of a line that are looked at: a limit for the time that an expression takes
LONGEST_SHOWN = 300
MOST_CONTINUED = 12  # lines after the first line of an exception's text that belong to it

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
# Texts that programs put before a line of output: which process wrote it, when, and how important it is.
_RANK = re.compile(
    r"\[(?:rank|default|worker|gpu|r)[ _]?\d+\]:? ?|\[\d+(?:,\d+)?\](?:<std\w+>)?: ?|\d{1,4}: (?!error\b)|rank[ _]?\d+: ?"
    r"|\([^()\s][^()]{0,80}\bpid=\d+[^()]{0,80}\) ?|\[[\w.-]{1,40}\]:? ?(?=Traceback \(most)|[\w.-]{1,40} +\| "
    r"|(?:stderr|stdout): ",
    re.IGNORECASE,
)
_TIME = re.compile(
    r"\[?(?:\d{4}[-/]\d\d[-/]\d\d[T ,]{1,2})?\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?[ ,:|-]{0,3}"
    r"|\[\d\d[-/]\d\d(?:[-/]\d+)?[ T]\d\d:\d\d:\d\d[^\]]{0,40}\]:? ?|\d\d-\d\d \d\d:\d\d:\d\d ?"
    r"|[EWIF]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ \S{1,80}\] ?"
)
_LEVEL = re.compile(
    r"\[?(?:ERROR|CRITICAL|FATAL|EXCEPTION|WARNING|WARN|INFO|DEBUG)\]?(?![\w:(]|: [a-z])[ :|-]{0,4}"
    r"|(?:ERROR|CRITICAL|FATAL):(?:[\w.]{1,60}:| (?=[A-Z][\w.]*(?:Error|Exception)\b))|\[[\w./-]{1,80}\.py:\d+(?::\w+)?\] ?"
)
_BOX = re.compile(r"[│┃║] ?|[+|] (?=\s*\S)|\+-\+-+ \d+ -+$")
_MILD = re.compile(
    r"^.{0,80}\b(?:WARN|WARNING|INFO|DEBUG)\b|\bwarning: |\w{3}Warning: |^[WI]\d{4} |^[\d:. -]{8,40}: [WI] |\[W ?\d*|^wandb: "
)
_HEADER = "Traceback (most recent call last)"
_HEADERS = (_HEADER, "Traceback of TorchScript", "Stack Trace (most recent call last)")
_FRAME = re.compile(
    r"(?:> ?)?\s*File \"[^\"]+\", line \d+|\s*File .+\.py:\d+, in |\s*\[Previous line repeated|\s*\.\.\.<\d+ lines>"
)
_CARETS = re.compile(r"\s*[~^]+\s*$|\s*\^[~^ ]*$")
_CELL = re.compile(r"-+> ?\d+ |Cell In ?\[|Input In |<ipython-input|-{20,}$|[^\s:]+\.py in ")  # frames of notebooks
_NAMED = r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*"
# An exception at the end of a traceback may have any name; elsewhere its name must look like one.
_ANY_EXCEPTION = re.compile(rf"(?:{_NAMED}|[\w.]+\.<locals>\.\w+)(?:\([\w., ]{{0,80}}\))?(?::(?: |$)|$)")
_EXCEPTION = re.compile(
    r"(?:[A-Za-z_]\w*\.)*(?:[A-Za-z_]\w*(?:Error|Exception|Interrupt|Failure|Timeout|Expired|NotFound|Refused|Exit)"
    r"|Exception|IncompleteRead|StopIteration|ExceptionGroup)(?:\([\w., ]{0,80}\))?(?::|$)"
)
_DURING = "During handling of the above exception, another exception occurred"
_CAUSE = "The above exception was the direct cause of the following exception"


@dataclass(slots=True)
class LogLine:
    """A line of a log. ``text``: without colours, overwritten text and prefixes; ``rank``: the prefix of its process.

    ``mild``: marked as a warning or information. ``frame``: a part of a traceback that shows code. ``dated``: with a time
    before it, as the first line of a message has.
    """

    text: str
    rank: str = ""
    mild: bool = False
    dated: bool = False
    frame: bool = False
    shown: str = ""  # with prefixes


@dataclass(slots=True)
class FoundException:
    """The last line of a traceback, or a line like it. ``first``, ``last``: numbers of the lines of its text.

    ``link``: how it follows the exception before it: "", "during" or "cause". ``traced``: it ends a traceback.
    """

    first: int
    last: int
    text: str
    rank: str
    link: str = ""
    traced: bool = False
    begun: int = 0  # line with the beginning of its traceback

    @property
    def name(self) -> str:
        """The name of its type, without the module."""
        return self.text.split(":", 1)[0].split("(", 1)[0].rsplit(".", 1)[-1].strip()


@dataclass(slots=True)
class _State:
    """The state of the search in the output of one process. ``open``: within a traceback."""

    open: bool = False
    code: bool = False  # the next line may be the code of a frame
    boxed: bool = False
    ignored: bool = False
    link: str = ""
    begun: int = 0
    current: FoundException | None = None


@dataclass(slots=True)
class LogText:
    """The lines of a log, and the exceptions in it, in the order of their last lines."""

    lines: list[LogLine] = field(default_factory=list)
    exceptions: list[FoundException] = field(default_factory=list)


def visible_lines(tail: str) -> Iterator[str]:
    """Yield the lines of a log as a terminal shows them: without colours, and without overwritten text."""
    for line in _ANSI.sub("", tail).split("\n"):
        yield line.rstrip("\r").rpartition("\r")[2].rstrip()


def line_of(shown: str) -> LogLine:
    """Return a visible line without the texts that programs put before their output."""
    if len(shown) > LONGEST_LINE:
        shown = shown[:LONGEST_LINE]
    mild = _MILD.search(shown[:250]) is not None and not _EXCEPTION.match(shown)
    text, rank, dated = shown, "", False
    for _ in range(8):
        found = _RANK.match(text)
        if found and not rank:
            rank = found.group().strip()
        time = None if found else _TIME.match(text)
        dated = dated or time is not None
        found = found or time or _LEVEL.match(text)
        if not found:
            bare = text.lstrip()
            found = _BOX.match(bare)
            if not found:
                break
            text = bare
        text = text[found.end() :]
    return LogLine(text.rstrip(" │┃║"), rank, mild, dated, shown=shown.strip()[:LONGEST_SHOWN])


def read_log(tail: str) -> LogText:
    """Return the lines and the exceptions of the end of a log."""
    log, states = LogText(), dict[str, _State]()
    for number, shown in enumerate(visible_lines(tail)):
        line = line_of(shown)
        log.lines.append(line)
        _take(log, states.setdefault(line.rank, _State()), number, line)
    return log


def _take(log: LogText, state: _State, number: int, line: LogLine) -> None:
    text = line.text
    if any(header in text for header in _HEADERS):
        _begin(state, number, line)
    elif _DURING in text or _CAUSE in text:
        state.link, state.current, state.open = "during" if _DURING in text else "cause", None, False
    elif text.startswith("Exception ignored in"):
        state.ignored, state.current = True, None
    elif state.boxed:
        line.frame = True
        if "╰" in text or text.startswith("+--"):
            state.boxed, state.code = False, False
    elif _FRAME.match(text):
        if not state.open:
            state.begun = number
        state.open, state.code, line.frame, state.current = True, True, True, None
    elif state.open:
        _take_open(log, state, number, line)
    elif _EXCEPTION.match(text) and not line.mild:
        _add(log, state, number, line, traced=False)
    elif state.current is not None:
        _continue(state, number, line)


def _begin(state: _State, number: int, line: LogLine) -> None:
    line.frame = True
    state.open, state.current, state.begun, state.code = True, None, number, False
    state.boxed = "╭" in line.shown or "─ Traceback" in line.shown


def _take_open(log: LogText, state: _State, number: int, line: LogLine) -> None:
    """Take a line of a traceback: code, or the exception that ends it."""
    text, code = line.text, state.code
    state.code = False
    inside = not text or text[0] in " \t" or _CARETS.match(text) or _CELL.match(text) or text.startswith("ray::")
    if inside or (code and line.dated and not _EXCEPTION.match(text)):  # a time before it hides the indentation
        line.frame = True
    elif _ANY_EXCEPTION.match(text) or _EXCEPTION.match(text):
        _add(log, state, number, line, traced=True)
    else:
        state.open = False


def _add(log: LogText, state: _State, number: int, line: LogLine, *, traced: bool) -> None:
    found = FoundException(number, number, line.text, line.rank, state.link, traced, state.begun if traced else number)
    if not state.ignored:
        log.exceptions.append(found)
    else:
        line.frame = True
    state.open, state.code, state.link, state.ignored = False, False, "", False
    state.current = found


def _continue(state: _State, number: int, line: LogLine) -> None:
    """Count a line as a part of the text of the exception before it, if it may be one."""
    current = state.current
    assert current is not None
    blank = not line.text.strip()
    if number - current.first > MOST_CONTINUED or line.dated or (blank and number - current.last > 1):
        state.current = None
    elif not blank:
        current.last = number
