"""Errors that say what happened, where, and what to do next."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

# As `typing` has it, which is not imported on the path of calls in loops (`scheduler/client/client.py`).
TYPE_CHECKING = False
if TYPE_CHECKING:
    from dataclasses import dataclass
    from typing import Any
else:
    from scheduler.core.quick_dataclass import dataclass

LONGEST_GUESSED = 200
LONGEST_SHOWN = 40
_PLAIN = r"[\w.+%-]+"  # compiled when it is needed: most calls say nothing


class SchedulerError(Exception):
    """Something the user has to know: one line, and the exit code that goes with it.

    ``what`` is a whole sentence without a final full stop; ``where`` names the file, line or job;
    ``do`` says what would help. ``exit_code`` follows docs/formats.md (1 error). ``code`` tells our own code what kind of
    error it is, where one class stands for several.
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
        """What is to be shown: a line for each mistake."""
        return (str(self),)


class UsageError(SchedulerError):
    """An option, a value, a config file or a line that cannot be read (exit code 2)."""

    exit_code = 2


DENIED, NO_PLAIN_FILE, UNSEEN = "denied", "no plain file", "unseen"  # codes of files that cannot be read
BACKWARDS = "backwards"  # code of a range of GPUs such as 3-1
NEWER = "newer"  # code of a store that a newer gpujob has written
OLDER = "older"  # code of a store that is older than what happened since
OUTDATED = "outdated"  # code of a store that an older gpujob has written, and that a start brings up to date
STATE_FILE = "state file"  # code of a mistake in what a config says of the state file
DEFECT = "defect"  # code of an error that nobody foresaw
DECIDE_ANEW = "decide anew"  # code of a turn that was overtaken by what happened meanwhile: nothing is wrong


class Mistakes(UsageError):
    """Several mistakes found in one go; as one line it says the first, and how many more there are."""

    def __init__(self, errors: Sequence[SchedulerError]) -> None:
        first = errors[0]
        more = f"and {len(errors) - 1} more mistake{'s' if len(errors) > 2 else ''}"
        super().__init__(first.what, where=first.where, do=f"{first.do}; {more}" if first.do else more)
        self.errors = tuple(errors)

    @property
    def lines(self) -> tuple[str, ...]:
        """A line for each."""
        return tuple(line for error in self.errors for line in error.lines)


def raise_all(errors: Sequence[SchedulerError]) -> None:
    """Raise what was found: nothing, the one, or all in one; what others could write (exit 1) comes before all else."""
    for error in errors:
        if not isinstance(error, UsageError):
            raise error
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise Mistakes(errors)


@dataclass(frozen=True, slots=True)
class Exposure:
    """Who besides us could write a file or folder: ``code`` is OWNER, WRITERS or LINK.

    ``place`` is that file, folder or link, ``owner`` its user id. ``mend``: what to do about it; ``also``: what else would do.
    """

    code: str
    said: str
    place: str
    owner: int = -1
    mend: str = ""
    also: str = ""

    def __str__(self) -> str:
        return f"{self.said}: {self.mend}{self.also}" if self.mend else self.said


# Codes of an Exposure: the file is another user's, others may write it, a link to it is another user's.
OWNER, WRITERS, LINK = "owner", "writers", "link"


class FileTrouble(SchedulerError):
    """A file that people write (jobs file, config, model table) cannot be read now; it is looked at again."""

    def __init__(self, what: str, *, where: str = "", exposure: Exposure | None = None) -> None:
        super().__init__(what, where=where)
        self.exposure = exposure


class Refused(SchedulerError):
    """It can be read but can never run (exit code 3)."""

    exit_code = 3


class NoGpuData(SchedulerError):
    """No GPU is seen and none is declared (exit code 4)."""

    exit_code = 4


class NoDaemon(SchedulerError):
    """A daemon is needed for this and none answers (exit code 5)."""

    exit_code = 5


class NotAsked(NoDaemon):
    """None runs, and nothing was written: nobody will ever carry it out."""


class NotFound(SchedulerError):
    """No such job or GPU (exit code 6)."""

    exit_code = 6


class InvalidMove(SchedulerError):
    """A job was told to go where its state does not lead; nothing was changed."""


class StoreTrouble(SchedulerError):
    """The store could not be read or written: nothing new is started until it can."""


class Damaged(StoreTrouble):
    """The store cannot be trusted as it stands; it was left as it is."""

    def __init__(self, what: str, *, where: str = "", code: str = "") -> None:
        super().__init__(
            what, where=where, code=code, do="rebuild it from what is left (nothing is deleted): gpujob recover"
        )


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word that was probably meant, or an empty text."""
    import difflib  # only for those who mistype

    found = difflib.get_close_matches(word[:LONGEST_GUESSED], list(known), 1)
    return found[0] if found else ""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``; did you mean status?`` for the known word nearest to a wrong one, or nothing."""
    near = nearest(word, known)
    return f"; did you mean {near}?" if near else ""


def flag(name: str) -> str:
    """What an option is called on the command line."""
    return f"--{name.replace('_', '-')}"


def word(text: str) -> str:
    """A word for a shell, in one line whatever it holds (`$'…'` is known to bash, zsh and ksh)."""
    import shlex  # only for those to whom a command is proposed

    if text.isprintable():
        return shlex.quote(text)
    data = text.encode("utf-8", "surrogateescape")
    inner = "".join(chr(b) if 32 <= b < 127 and chr(b) not in "'\\" else f"\\x{b:02x}" for b in data)
    return f"$'{inner}'"


def said(value: Any) -> str:
    """A wrong value as an error shows it: short, whatever it is."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**LONGEST_SHOWN:
        return f"a number of over {LONGEST_SHOWN} digits"
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, Mapping):
        return "a mapping"
    text = value if isinstance(value, str) else repr(value)
    text = text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + "…"
    return repr(text) if isinstance(value, str) and not re.fullmatch(_PLAIN, text, re.ASCII) else text
