"""Format of the jobs file: parses lines into JobSpecs and writes lines. Error messages say how to correct a line."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

from scheduler.core.allowed import Allowed, named_allowed, names_nodes, parse_allowed
from scheduler.core.command_limits import check_nodes
from scheduler.core.errors import BACKWARDS, Refused, UsageError
from scheduler.core.gpu import ResourceRequest, gpu_ids_text, is_are, named_gpus
from scheduler.core.job import JobSpec
from scheduler.core.job_options import LINE_KEYS, PATH_FIELDS, allowed_gpus, check_launch, priority_of, read_line_keys

LONGEST_LINE = 1 << 20
LONGEST_SHOWN = 1000  # characters of a corrected spelling; a longer one is not shown
FORMAT = "priority,script_path,conda_env,arguments,allowed_gpus"

_OPTION_AHEAD = re.compile(r";\s*([A-Za-z_][A-Za-z0-9_]*)\s*=")
_BARE_LIST = re.compile(r"\s*\d+\s*(,\s*\d+\s*)+")
_QUOTING = re.compile(r"""['"\\]""")
_LITERAL = re.compile(r"[$`*]")
_SPECIAL = re.compile(r"""["\\;]""")
_BLANKS = re.compile(r"[ \t\r\n]+")


@dataclass(frozen=True, slots=True)
class Parsed:
    """A job that was read from a line, and notes about the job for the user."""

    spec: JobSpec
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LineContext:
    """The folders and GPUs of the scheduler. The parser needs them to read a line.

    ``folder``: folder where relative paths start; ``home``: home folder for ``~/``; ``managed``: ids of the managed
    GPUs.
    """

    folder: str
    home: str = ""
    managed: Collection[int] | None = None  # None: unknown, every id is accepted
    cluster: bool = False  # jobs run on a cluster: the fifth field may name nodes and types


def parse(line: str, line_context: LineContext, origin: str = "") -> Parsed | None:
    """Parse one line (without its newline); return None for an empty line or a comment.

    ``origin``: file and line number (`jobs.txt:7`), stored in the job. Raises UsageError if the line cannot be read,
    and Refused if the job can never run here. The attribute ``do`` of the error says how to correct the line.
    """
    text = line.strip(" \t\r\n")
    if not text or text.startswith("#"):
        return None
    if len(text) > LONGEST_LINE:
        raise UsageError(
            f"the line is too long: {len(text)} characters", do=f"a line may have at most {LONGEST_LINE} characters"
        )
    if "\0" in text:
        raise UsageError("the line contains a NUL byte", do="remove it")
    fields, rest, options = _split(text)
    if len(fields) < 2:
        raise UsageError("a job needs at least a priority and a script", do=f"write {FORMAT}")
    for at, early in enumerate(fields[:3] if ";" in text else ()):
        ahead = _OPTION_AHEAD.search(early.text)
        if ahead and ahead.group(1).lower() in LINE_KEYS and not early.quoted:
            head, tail = [field.text for field in fields], early.text[ahead.start() :]
            head[at] = early.text[: ahead.start()].strip()
            right = ",".join([*head, "", "", ""][:4]) + tail
            raise UsageError(f"options such as {tail} belong after the fourth field", do=f"write {right}")
    priority = _priority(fields[0].text)
    script = _script(fields[1].text, line_context)
    env = fields[2].text if len(fields) > 2 else ""
    arguments_field = fields[3] if len(fields) > 3 else _Field("")
    notes: list[str] = []
    try:
        allowed = parse_allowed(rest.text, cluster=line_context.cluster) if rest is not None else None
    except Refused:
        raise
    except UsageError as error:
        if error.code == BACKWARDS:
            raise  # a GPU list with a mistake such as 3-1, not arguments with a comma
        quoted = _quoted_spelling(fields, rest)
        right = f"write a GPU list such as 0,2 or 0-3; or, if this belongs to the arguments, quote them: {quoted}"
        if len(quoted) > LONGEST_SHOWN:  # a shortened spelling would be wrong
            right = (
                "write a GPU list such as 0,2 or 0-3; or, if this belongs to the arguments, put double quotes around "
                "all arguments"
            )
        raise UsageError(f"the fifth field is wrong: {error.what}", do=right) from None
    if rest is not None and _BARE_LIST.fullmatch(rest.text) and re.search(r"(^|\s)\d+$", arguments_field.text):
        if not arguments_field.quoted:
            notes.append(
                f"{rest.text} is read as the list of allowed GPUs, and the arguments end with "
                f"{arguments_field.text.split()[-1]}; if {rest.text} is part of the arguments, put the arguments in "
                "quotes"
            )
    try:
        _check_managed(allowed, line_context.managed)
    except Refused as error:
        if notes and rest is not None:  # more likely an argument with commas than a list of missing GPUs
            raise Refused(
                error.what,
                do=f"{error.do}; or, if this is part of the arguments, write: {_quoted_spelling(fields, rest)}",
            ) from None
        raise
    words = _words(arguments_field.text)
    notes += _literals(words)
    values = {"priority": priority, "allowed": allowed, **read_line_keys(options)}
    values["allowed"] = allowed_gpus(values)
    for name in PATH_FIELDS.intersection(values):
        if values[name]:
            values[name] = _path(values[name], line_context)
    _check_managed(values.get("on"), line_context.managed)
    if env:
        env = _environment_name(env, line_context)
    spec = JobSpec(script=script, arguments=words, conda_env=env, origin=origin, **values)
    _check_width(spec)
    check_launch(spec)
    return Parsed(spec, tuple(notes))


@dataclass(slots=True)
class _Field:
    text: str
    quoted: bool = False


def _split(text: str) -> tuple[list[_Field], _Field | None, list[tuple[str, str]]]:
    """Return the first four fields, the fifth field (the GPU list; None if it is missing), and ``;key=value`` pairs."""
    fields: list[_Field] = []
    options: list[tuple[str, str]] = []
    if not _SPECIAL.search(text):  # most lines: no quotes and no options, only commas
        pieces = [piece.strip() for piece in text.split(",", 4)]
        rest = _Field(pieces[4]) if len(pieces) == 5 else None
        return [_Field(piece) for piece in pieces[:4]], rest, options
    position = 0
    while len(fields) < 4:
        with_options = len(fields) == 3
        found, position = _take_field(text, position, with_options)
        fields.append(found)
        if with_options:
            position = _take_options(text, position, options, stop_at_comma=True)
        if position >= len(text):
            return fields, None, options
        position += 1  # the comma
    if options and re.search(r"\d$", options[-1][1]) and options[-1][0] in ("after", "after_ok", "on", "env"):
        tail = text[position:].split(";", 1)[0]
        if re.fullmatch(r"\s*\d[\d,\s-]*", tail) and text[position - 2] != '"':
            key, value = options[-1]
            raise UsageError(
                f"it is not clear whether {tail.strip()!r} belongs to ;{key}={value} or is the GPU list",
                do=f'write ;{key}="{value},{tail.strip()}" if it belongs to ;{key}=, else put the GPU list before ;{key}=',
            )
    if position < len(text) and text[position:].lstrip().startswith('"'):
        found, end = _take_field(text, position, True)
        if end < len(text) and text[end] == ",":
            return fields, _Field(text[position:]), options
        _take_options(text, end, options, stop_at_comma=False)
        return fields, found, options
    ahead = _OPTION_AHEAD.search(text, position)
    end = ahead.start() if ahead else len(text)
    if ahead:
        _take_options(text, end, options, stop_at_comma=False)
    return fields, _Field(text[position:end].strip()), options


def _take_field(text: str, position: int, options_follow: bool) -> tuple[_Field, int]:
    """Return the field at ``position``, and the position of its end.

    A field ends before a comma, before an option (if ``options_follow``), or at the end of the line.
    """
    start = position
    while position < len(text) and text[position] in " \t":
        position += 1
    if position < len(text) and text[position] == '"':
        taken = _take_csv_quoted(text, position, options_follow)
        if taken is not None:
            return taken
    in_quotes = False
    while position < len(text):
        char = text[position]
        if char == "\\" and position + 1 < len(text):
            position += 2
            continue
        if char == '"':
            in_quotes = not in_quotes
        elif not in_quotes:
            if char == ",":
                break
            if char == ";" and options_follow and _OPTION_AHEAD.match(text, position):
                break
        position += 1
    if in_quotes:
        raise UsageError("a double quote is not closed", do='close it, or write \\" for a literal quote')
    return _Field(text[start : min(position, len(text))].strip()), min(position, len(text))


def _take_csv_quoted(text: str, position: int, options_follow: bool) -> tuple[_Field, int] | None:
    """Return a field quoted as in CSV, and the position of its end; None if only part of the field is quoted.

    Within the quotes, ``""`` stands for one quote.
    """
    out: list[str] = []
    position += 1
    while True:
        end = text.find('"', position)
        if end < 0:
            return None
        out.append(text[position:end])
        if text[end + 1 : end + 2] == '"':
            out.append('"')
            position = end + 2
            continue
        position = end + 1
        break
    while position < len(text) and text[position] in " \t":
        position += 1
    if position < len(text) and text[position] != ",":
        if not (options_follow and _OPTION_AHEAD.match(text, position)):
            return None
    return _Field("".join(out), quoted=True), position


def _take_options(text: str, position: int, options: list[tuple[str, str]], *, stop_at_comma: bool) -> int:
    """Append the ``;key=value`` pairs from ``position`` on to ``options``; return the position after the last pair."""
    while position < len(text):
        ahead = _OPTION_AHEAD.match(text, position)
        if not ahead:
            if text[position : position + 1] == "," and stop_at_comma:
                return position
            raise UsageError(f"cannot read {text[position:].strip()!r}", do="write ;key=value")
        position = ahead.end()
        if text[position : position + 1] == '"':
            end = text.find('"', position + 1)
            if end < 0:
                raise UsageError("a double quote is not closed", do="close it")
            value, position = text[position + 1 : end], end + 1
            while position < len(text) and text[position] in " \t":
                position += 1
        else:
            stops = [m.start() for m in (_OPTION_AHEAD.search(text, position),) if m]
            if stop_at_comma and "," in text[position:]:
                stops.append(text.index(",", position))
            end = min(stops, default=len(text))
            value, position = text[position:end].strip(), end
        options.append((ahead.group(1).lower(), value))
    return position


def _priority(text: str) -> int:
    try:
        return priority_of(text)
    except UsageError as error:
        raise UsageError(error.what, do=error.do or f"write {FORMAT}") from None


def _script(text: str, line_context: LineContext) -> str:
    if not text:
        raise UsageError("the script is missing", do=f"write {FORMAT}")
    if text.startswith("-"):
        raise UsageError(
            f"the script {text!r} looks like an option", do=f"if a script really is named {text}, write ./{text}"
        )
    return _path(text, line_context)


def _path(text: str, line_context: LineContext) -> str:
    if text == "~" or text.startswith("~/"):
        text = os.path.join(line_context.home or os.path.expanduser("~"), text[2:])
    return _normal(line_context.folder, text)


@lru_cache(256)  # many lines name the same script
def _normal(folder: str, text: str) -> str:
    return os.path.normpath(os.path.join(folder, text))


def _environment_name(text: str, line_context: LineContext) -> str:
    if text.startswith("-") or any(char in text for char in "\n\r"):
        raise UsageError(
            f"{text!r} cannot be the name of an environment", do="write the name or the folder of an environment"
        )
    return _path(text, line_context) if "/" in text else text


def _words(text: str) -> tuple[str, ...]:
    if not _QUOTING.search(text):  # same result as shlex, twenty times faster
        words = tuple(word for word in _BLANKS.split(text) if word)
        check_nodes(words)
        return words
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        reason = "a quote is not closed" if "quotation" in str(error) else str(error).lower()
        raise UsageError(
            f"cannot split the arguments: {reason}", do="quote as in a shell, or write \\' for a literal '"
        ) from None
    check_nodes(words)
    return words


def _literals(words: Collection[str]) -> list[str]:
    """Return a list with a note about the first word that a shell would expand; empty if there is no such word.

    The note tells the user that the word is not expanded, because no shell runs.
    """
    if not _LITERAL.search(" ".join(words)):
        return []
    for word in words:
        if re.search(r"\$[A-Za-z_{(]|`", word):
            return [f"{word} is passed unchanged: no shell expands it"]
        if "*" in word:
            return [f"{word} is passed unchanged: no shell expands the *"]
    return []


def _quoted_spelling(fields: list[_Field], rest: _Field | None) -> str:
    head = [field.text for field in fields]
    whole = f"{head[3]},{rest.text if rest else ''}"
    return ",".join([*head[:3], quoted(whole)])


def quoted(text: str) -> str:
    """Return ``text`` as a field of a line. It is quoted if `parse` would otherwise read a different text."""
    if text and not re.search(r'[",;\\]', text) and text == text.strip():
        return text
    return '"' + text.replace('"', '""') + '"' if text else ""


def _check_managed(allowed: Allowed, managed: Collection[int] | None) -> None:
    if allowed is None or managed is None:
        return
    unknown = [gpu for gpu in allowed if isinstance(gpu, int) and gpu not in managed]
    if unknown:
        known = gpu_ids_text(managed) or "none"
        raise Refused(f"{named_gpus(unknown)} {is_are(unknown)} not managed here", do=f"managed: {known}")


def _check_width(spec: JobSpec) -> None:
    if spec.gpus and spec.allowed is not None and not names_nodes(spec.allowed):
        need = ResourceRequest.parse(spec.gpus)
        if need.count > len(spec.allowed):
            raise Refused(
                f"needs {need.in_words()}, but only {named_allowed(spec.allowed)} {is_are(spec.allowed)} allowed",
                do="allow more GPUs, or request less",
            )


def write_line(
    script: str, *, priority: int = 0, conda: str = "", arguments: str = "", gpus: str = "", options: str = ""
) -> str:
    """Return a line (without newline) that `parse` reads as these values.

    Raises UsageError if there is no script, or if a value holds a line break or a NUL byte.
    """
    for name, text in (("script", script), ("environment", conda), ("arguments", arguments), ("GPU list", gpus)):
        if "\n" in text or "\r" in text or "\0" in text:
            raise UsageError(f"the {name} contains a line break or NUL byte", do="write each job as one line")
    if not script.strip():
        raise UsageError("the script is missing", do=f"write {FORMAT}")
    fields = [str(priority), quoted(script), quoted(conda), quoted(arguments), gpus.strip()]
    return ",".join(fields) + options
