"""Errors for users: what happened, where, what to do next, and the exit code of the command."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LONGEST_GUESSED = 200  # characters of a wrong word that are compared with the known words
REPORT_IT = "internal error of gpujob, please report it"
LONGEST_SHOWN = 40  # characters or digits of a wrong value that a message shows
_PLAIN = r"[\w.+%-]+"  # words shown without quotes; compiled on first use, because most commands print no error


class SchedulerError(Exception):
    """An error that is shown to the user: a one-line message and the exit code of the command.

    ``what``: a whole sentence without a final full stop; ``where``: the file, line or job; ``do``: what the user can
    do. ``exit_code``: see docs/json.md (1: error). ``code``: distinguishes errors of the same class; empty if no caller
    has to distinguish them.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", do: str = "", code: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.do = do
        self.code = code

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return text if not self.do else f"{text} {self.do}" if text.endswith("?") else f"{text}; {self.do}"

    @property
    def lines(self) -> tuple[str, ...]:
        """The message as lines: one for each mistake."""
        return (str(self),)


class UsageError(SchedulerError):
    """Error: an option, a value, a config file or a line cannot be read (exit code 2)."""

    exit_code = 2


DENIED, NO_PLAIN_FILE, UNSEEN = "denied", "no plain file", "unseen"  # codes of errors about a file that cannot be read
BACKWARDS = "backwards"  # code of a range of GPUs such as 3-1
NEWER = "newer"  # code of a store that a newer gpujob has written
OLDER = "older"  # code of a store that lacks later jobs: an old copy was restored
OUTDATED = "outdated"  # code of a store that an older gpujob has written; the next start migrates it
STATE_FILE = "state file"  # code of a mistake in the config's key state_file
DEFECT = "defect"  # code of an unexpected error: a defect of gpujob
DECIDE_ANEW = "decide again"  # code of a pass that must be repeated because a file or job has changed; no defect


class Mistakes(UsageError):
    """Several mistakes, reported in one error. Its message has the first mistake and the number of further mistakes."""

    def __init__(self, errors: Sequence[SchedulerError]) -> None:
        first = errors[0]
        more = f"and {len(errors) - 1} more mistake{'s' if len(errors) > 2 else ''}"
        super().__init__(first.what, where=first.where, do=f"{first.do}; {more}" if first.do else more)
        self.errors = tuple(errors)

    @property
    def lines(self) -> tuple[str, ...]:
        """One line for each mistake."""
        return tuple(line for error in self.errors for line in error.lines)


def raise_all(errors: Sequence[SchedulerError]) -> None:
    """Raise one error that stands for all ``errors``. Do nothing if ``errors`` is empty.

    If all errors are UsageErrors, a single error is raised unchanged, and several errors are raised as one `Mistakes`
    (exit code 2). If some errors are of other classes, such as FileTrouble (exit code 1), only the first of the errors
    of other classes is raised.
    """
    for error in errors:
        if not isinstance(error, UsageError):
            raise error
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise Mistakes(errors)


@dataclass(frozen=True, slots=True)
class Exposure:
    """The reason why other users could write a file or folder: ``code`` is OWNER, WRITERS or LINK.

    ``said``: the reason as text; ``place``: path of the file, folder or link that is not safe; ``owner``: user id of
    the owner of ``place``; ``mend``: what to do; ``also``: an alternative, printed after ``mend``.
    """

    code: str
    said: str
    place: str
    owner: int = -1
    mend: str = ""
    also: str = ""

    def __str__(self) -> str:
        return f"{self.said}: {self.mend}{self.also}" if self.mend else self.said


# Codes of an Exposure: another user owns the file, other users may write it, another user owns a link to it.
OWNER, WRITERS, LINK = "owner", "writers", "link"


class FileTrouble(SchedulerError):
    """Error: a file that users edit (jobs file, config, model table) cannot be read now, or is not safe to read.

    The daemon tries again later.
    """

    def __init__(self, what: str, *, where: str = "", exposure: Exposure | None = None) -> None:
        super().__init__(what, where=where)
        self.exposure = exposure


class Refused(SchedulerError):
    """Error: a valid request cannot be fulfilled. Example: this machine can never run the job (exit code 3)."""

    exit_code = 3


class NoGpuData(SchedulerError):
    """Error: no GPU can be seen, and no GPU is declared (exit code 4)."""

    exit_code = 4


class NoDaemon(SchedulerError):
    """Error: the command needs a running scheduler, and no scheduler answers (exit code 5)."""

    exit_code = 5


class NotAsked(NoDaemon):
    """Error: no scheduler runs. The request was not stored, so it will not be carried out."""


class NotFound(SchedulerError):
    """Error: there is no such job, GPU or model (exit code 6)."""

    exit_code = 6


class InvalidMove(SchedulerError):
    """Error: a job in this state cannot make this move (`core/states.py`). Nothing was changed."""


class StoreTrouble(SchedulerError):
    """Error: the store could not be read or written. The daemon starts no job until the store can be used again."""


class Damaged(StoreTrouble):
    """Error: the contents of the store cannot be trusted. The store was left unchanged."""

    def __init__(self, what: str, *, where: str = "", code: str = "") -> None:
        super().__init__(
            what,
            where=where,
            code=code,
            do="rebuild it from the data that can be read (nothing is deleted): gpujob recover",
        )


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the known word that the user probably meant by ``word``; empty if no known word is near."""
    import difflib  # imported here: only mistyped words need it

    found = difflib.get_close_matches(word[:LONGEST_GUESSED], list(known), 1)
    return found[0] if found else ""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``; did you mean status?``, with the known word nearest to ``word``; empty if no known word is near."""
    near = nearest(word, known)
    return f"; did you mean {near}?" if near else ""


def flag(name: str) -> str:
    """Return the command-line flag of an option: ``log_dir`` → ``--log-dir``."""
    return f"--{name.replace('_', '-')}"


def word(text: str) -> str:
    """Return ``text`` quoted as one word for a shell, always on one line (bash, zsh and ksh understand `$'…'`)."""
    import shlex  # imported here: only messages that propose a command need it

    if text.isprintable():
        return shlex.quote(text)
    data = text.encode("utf-8", "surrogateescape")
    inner = "".join(chr(b) if 32 <= b < 127 and chr(b) not in "'\\" else f"\\x{b:02x}" for b in data)
    return f"$'{inner}'"


def said(value: Any) -> str:
    """Return a wrong value of any type as shortened text for an error message."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**LONGEST_SHOWN:
        return f"a number of more than {LONGEST_SHOWN} digits"
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, Mapping):
        return "a mapping"
    text = value if isinstance(value, str) else repr(value)
    text = text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + "…"
    return repr(text) if isinstance(value, str) and not re.fullmatch(_PLAIN, text, re.ASCII) else text
