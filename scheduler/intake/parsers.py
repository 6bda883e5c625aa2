"""The parsers of the watched files. The key of a parser is the setting that names the watched file."""

from __future__ import annotations

from collections.abc import Callable

from scheduler.intake import commands_file, jobs_file
from scheduler.intake.jobs_file import LineContext, Parsed

Parser = Callable[[str, LineContext, str], Parsed | None]
PARSERS: dict[str, Parser] = {"jobs_file": jobs_file.parse, "commands_file": commands_file.parse}
