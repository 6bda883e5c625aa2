"""Format of a commands file: one shell command per line; lines that start with `#` are comments."""

from __future__ import annotations

import os

from scheduler.core.command_limits import LONGEST_WORD
from scheduler.core.errors import UsageError
from scheduler.core.job import JobSpec
from scheduler.intake.jobs_file import LineContext, Parsed


def parse(line: str, line_context: LineContext, origin: str = "") -> Parsed | None:
    """Return a job that runs ``line`` with `sh -c`; None for an empty line or a comment.

    Raises UsageError if the line is too long or holds a NUL byte.
    """
    text = line.strip()
    if not text or text.startswith("#"):
        return None
    if len(os.fsencode(text)) > LONGEST_WORD:
        raise UsageError(
            f"the command is too long: {len(text)} characters", do=f"a command may have at most {LONGEST_WORD} bytes"
        )
    if "\0" in text:
        raise UsageError("the command contains a NUL byte", do="remove it")
    return Parsed(JobSpec(source="commands", arguments=("sh", "-c", text), origin=origin))
