"""Parser of the `gpujob track` command line: the verb, its options, and the command to run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.core.errors import UsageError, did_you_mean

HELP = """\
Usage: gpujob track VERB

Runs commands one after another and records their states in .gpu-tracker/ of this folder. After a crash, a lost
connection or a reboot you see how far they got, and continue from there.

  init NAME                 create a session in this folder
  add COMMAND               add a command: one text in quotes, or its words
  run COMMAND               add a command and run it now
  run-all                   run all pending commands in order, up to the first that fails
  next                      show the next pending command; with --run: run it
  status                    show all commands and their states (--json)
  log [NUMBER]              show the log of a command (without NUMBER: of the one started last)
  remaining                 show running, interrupted and pending commands
  retry                     run the first interrupted command again
  skip                      skip all interrupted commands
  list                      list the sessions of this folder
  delete ID                 delete a session and its logs

  --skip-errors             run-all: skip commands that fail, and continue
  --run                     next: run the command
  --keep                    run, run-all, retry, next --run: continue after a lost connection or closed terminal
  --session ID              use this session, not the newest
  --json                    status: print JSON, for programs
  -h, --help                this text

○ pending  ► running  ✓ done  ✗ interrupted  ⊘ skipped

Exit codes: 0 done, 1 a command failed, or an error, 2 usage error, 6 no such session, 130 Ctrl-C, 128+n another signal.
"""

_FLAGS = {"--skip-errors": "skip_errors", "--run": "run", "--keep": "keep", "--json": "json"}
# verb → its options, and its argument: "": none, text: a command, name or id: of a session, number: of a command
VERBS: dict[str, tuple[tuple[str, ...], str]] = {
    "init": ((), "name"),
    "add": (("--session",), "text"),
    "run": (("--session", "--keep"), "text"),
    "run-all": (("--session", "--keep", "--skip-errors"), ""),
    "next": (("--session", "--keep", "--run"), ""),
    "status": (("--session", "--json"), ""),
    "log": (("--session",), "number"),
    "remaining": (("--session",), ""),
    "retry": (("--session", "--keep"), ""),
    "skip": (("--session",), ""),
    "list": ((), ""),
    "delete": ((), "id"),
}
HELP_WORDS = ("-h", "--help")


@dataclass(slots=True)
class Typed:
    """A parsed command line.

    ``text``: the command to run; for `init`, the name of the session. ``session``: id of a session; empty: the newest
    session.
    """

    verb: str
    text: str = ""
    session: str = ""
    id: str = ""  # id of a session (delete), or number of a command (log)
    skip_errors: bool = False
    run: bool = False
    keep: bool = False
    json: bool = False


def read(words: Sequence[str]) -> Typed:
    """Parse the words of a command line. Raises UsageError."""
    if not words or words[0] in (*HELP_WORDS, "help"):
        return Typed("help")
    verb = words[0]
    if verb not in VERBS:
        what = "option" if verb.startswith("-") else "command"
        near = did_you_mean(verb, VERBS)
        raise UsageError(f"track has no {what} {verb[:40]!r}{near}", do="see gpujob track --help")
    options, takes = VERBS[verb]
    typed = Typed(verb)
    rest = list(words[1:])
    found: list[str] = []
    while rest:
        if _options(typed, rest, options):
            return Typed("help")
        if takes == "text":
            break
        if rest[:1] == ["--"]:
            found += rest[1:]
            break
        found += rest[:1]
        del rest[:1]
    if takes == "text":
        _command(typed, rest, options)
    else:
        _words(typed, found, takes)
    return typed


def _options(typed: Typed, rest: list[str], options: Sequence[str]) -> bool:
    """Move the options at the start of ``rest`` to ``typed``; return whether one asks for help. Raises UsageError."""
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        name, equals, value = rest.pop(0).partition("=")
        if name in HELP_WORDS:
            return True
        if name not in options:
            near = did_you_mean(name, options)
            raise UsageError(f"track {typed.verb} has no option {name[:40]!r}{near}", do="see gpujob track --help")
        if name in _FLAGS:
            if equals:
                raise UsageError(f"{name} takes no value")
            setattr(typed, _FLAGS[name], True)
            continue
        if not equals:
            if not rest:
                raise UsageError(f"{name} needs a value", do="see gpujob track list")
            value = rest.pop(0)
        typed.session = value
    return False


def _command(typed: Typed, rest: list[str], options: Sequence[str]) -> None:
    """Store the command in ``typed``. Raises UsageError.

    A single word is stored unchanged; several words are quoted and joined. If the first word contains blanks and no
    ``--`` precedes it, this word is the whole command, and only options of `track` may follow it.
    """
    plainly = rest[:1] == ["--"]
    if plainly:
        del rest[0]
    elif len(rest) > 1 and len(rest[0].split()) > 1:
        later = rest[1:]
        _options(typed, later, options)
        if later:
            do = f"put the whole command into one pair of quotes, or write -- first: gpujob track {typed.verb} -- …"
            raise UsageError(f"it is not clear whether {later[0][:40]!r} belongs to the command", do=do)
        del rest[1:]
    if not rest:
        raise UsageError(
            f"track {typed.verb}: the command is missing", do=f'gpujob track {typed.verb} "python train.py"'
        )
    typed.text = rest[0] if len(rest) == 1 else shlex.join(rest)
    if not typed.text.strip():
        raise UsageError("the command is empty", do=f'gpujob track {typed.verb} "python train.py"')


def _words(typed: Typed, rest: list[str], takes: str) -> None:
    if takes == "name":
        typed.text = " ".join(rest)
        if not typed.text.strip():
            raise UsageError("the session needs a name", do="gpujob track init NAME")
    elif takes == "id":
        if len(rest) != 1 or not rest[0]:
            raise UsageError("delete takes the id of one session", do="see gpujob track list")
        typed.id = rest[0]
    elif takes == "number":
        if len(rest) > 1:
            raise UsageError("log takes the number of one command", do="see gpujob track status")
        typed.id = rest[0] if rest else ""
    elif rest:
        raise UsageError(f"track {typed.verb}: unexpected word {rest[0][:40]!r}", do="see gpujob track --help")
