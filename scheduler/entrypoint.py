"""Entry point of the command line. Verbs that scripts call in loops are parsed here, without importing Typer."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Sequence

# Type checkers take this name for true. Importing it from `typing` would slow down verbs that scripts call in loops.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

FLAG = "flag"  # kinds of options: FLAG and OFF take no value and mean True and False
OFF = "off"
ONE = "one"  # takes a value
MANY = "many"  # takes a value, and may be given several times

COMPLETION = "_GPUJOB_COMPLETE"  # set by a shell that asks for completions
COMMON = {"--state-file": ("state_file", ONE), "--config": ("config", ONE)}


def _of_submit() -> dict[str, tuple[str, str]]:
    """Return the options of `submit`, most of them options of a job: flag → (parameter name, kind)."""
    from scheduler.core.job_options import BOOLEAN, SUBMIT_OPTIONS, VARIABLES

    kinds = {BOOLEAN: FLAG, VARIABLES: MANY}
    return {
        **{option.flag: (option.name, kinds.get(option.kind, ONE)) for option in SUBMIT_OPTIONS},
        "--info-command": ("info_command", ONE), "-f": ("foreground", FLAG), "--foreground": ("foreground", FLAG), "--wait": ("wait", FLAG),
    }  # fmt: skip


def _of_start() -> dict[str, tuple[str, str]]:
    """Return the options of `start`, most of them settings: flag → (parameter name, kind)."""
    from scheduler.core.config import OPTIONS
    from scheduler.core.errors import flag

    found = {"--drain": ("drain", FLAG), "--detach": ("detach", FLAG)}
    for name, row in OPTIONS.items():
        if row.metadata["metavar"]:
            found[flag(name)] = (name, ONE)
        else:
            found |= {flag(name): (name, FLAG), flag(f"no_{name}"): (name, OFF)}
    return found


# Verb → (its options, how many words it takes beside them): "none", "one", "some" (at least one), "any" (also none), or
# "rest" (at least one; options end at the first word). `cli/app.py` declares the same options (a test in tests/cli
# compares the two) and handles every command line that is not covered here.
HOT: dict[str, tuple[dict[str, tuple[str, str]] | Callable[[], dict[str, tuple[str, str]]], str]] = {
    "add": (
        {
            "--conda": ("conda", ONE), "--args": ("args", ONE), "--priority": ("priority", ONE), "--gpus": ("gpus", ONE), "--allowed": ("gpus", ONE),
            "--set": ("pairs", MANY), "--output-file": ("output_file", ONE),
        },
        "one",
    ),
    "submit": (_of_submit, "rest"),
    "start": (_of_start, "none"),
    "status": ({"--json": ("json", FLAG)}, "none"),
    "jobs": (
        {"--state": ("state", ONE), "-n": ("last", ONE), "--last": ("last", ONE), "--json": ("json", FLAG)},
        "none",
    ),
    "why": ({"--json": ("json", FLAG)}, "one"),
    "cancel": ({}, "some"),
    "retry": ({}, "some"),
    "hold": ({}, "some"),
    "release": ({}, "some"),
    "first": ({}, "some"),
    "swap": ({}, "some"),
    "pause": ({}, "some"),
    "resume": ({"--force": ("force", FLAG)}, "some"),
    "wait": ({"--timeout": ("timeout", ONE)}, "any"),
}  # fmt: skip


def options_of(verb: str) -> dict[str, tuple[str, str]]:
    """Return all options of a verb in HOT, the common ones included: flag → (parameter name, kind)."""
    declared = HOT[verb][0]
    return {**COMMON, **(declared() if callable(declared) else declared)}


def bare(words: list[str]) -> tuple[str, list[str], dict[str, Any]] | None:
    """Parse a command line without a verb, which means `status`. Return None for every other command line."""
    values: dict[str, Any] = {}
    end = _options(words, 0, {**COMMON, "--json": ("json", FLAG)}, values, stop_at_word=True)
    return ("status", [], values) if end == len(words) else None


def parse(words: list[str]) -> tuple[str, list[str], dict[str, Any]] | None:
    """Return verb, words and options; None if `cli/app.py` must handle the line (help, a mistake, another verb)."""
    values: dict[str, Any] = {}
    position = _options(words, 0, COMMON, values, stop_at_word=True)
    if position is None or position >= len(words) or words[position] not in HOT:
        return None
    verb = words[position]
    takes, table = HOT[verb][1], options_of(verb)
    rest: list[str] = []
    position += 1
    while position < len(words):
        word = words[position]
        if word == "--":
            rest += words[position + 1 :]
            break
        if word.startswith("-") and len(word) > 1:
            after = _options(words, position, table, values, stop_at_word=True)
            if after is None or after == position:
                return None
            position = after
            continue
        if takes == "rest":
            rest += words[position:]
            break
        rest.append(word)
        position += 1
    enough = {"none": not rest, "one": len(rest) == 1, "some": bool(rest), "rest": bool(rest), "any": True}[takes]
    return (verb, rest, values) if enough else None


def _options(
    words: list[str], position: int, table: dict[str, tuple[str, str]], values: dict[str, Any], stop_at_word: bool
) -> int | None:
    """Read options from ``position`` on into ``values``. Return the position behind them, or None.

    None means an unknown option, a missing value, or a value for an option that takes none.
    """
    while position < len(words) and words[position].startswith("-") and words[position] not in ("-", "--"):
        name, equals, value = words[position].partition("=")
        if name not in table:
            return None
        target, kind = table[name]
        if kind in (FLAG, OFF):
            if equals:
                return None
            values[target] = kind == FLAG
            position += 1
            continue
        if not equals:
            if position + 1 >= len(words):
                return None
            value = words[position + 1]
            position += 1
        position += 1
        if kind == MANY:
            values[target] = (*values.get(target, ()), value)
        else:
            values[target] = value
    return position


def _hot(verb: str) -> Callable[..., int]:
    if verb in ("add", "submit"):
        from scheduler.cli import add as module
    elif verb in ("status", "jobs", "why"):
        from scheduler.cli import show as module  # type: ignore[no-redef]
    elif verb == "start":
        from scheduler.cli import serve as module  # type: ignore[no-redef]
    else:
        from scheduler.cli import control as module  # type: ignore[no-redef]
    found: Callable[..., int] = getattr(module, verb)
    return found


def _ts(words: list[str]) -> int:
    from scheduler.ts.main import run

    return run(words)


def _track(words: list[str]) -> int:
    from scheduler.track.cli import run

    return run(words)


def _web(**options: Any) -> int:
    from scheduler.web.command import web

    return web(**options)


# User interfaces that are independent of each other. Each is imported only when it is called.
INTERFACES: dict[str, Callable[..., int]] = {"ts": _ts, "track": _track, "web": _web}


def _run(words: list[str]) -> int:
    if COMPLETION in os.environ:
        from scheduler.cli.shell_completion import answer

        return answer(words)
    if words[:1] in (["ts"], ["track"]):
        return INTERFACES[words[0]](words[1:])
    hot = bare(words) or parse(words)
    if hot is None:
        from scheduler.cli.app import run

        return run(words, INTERFACES)
    verb, rest, values = hot
    takes = HOT[verb][1]
    if takes == "none":
        return _hot(verb)(**values)
    return _hot(verb)(rest[0] if takes == "one" else rest, **values)


def main(words: list[str] | None = None) -> int:
    """Run a command line and return its exit code. Print each error on stderr as one line."""
    _fill_standard_streams()
    words = sys.argv[1:] if words is None else words
    try:
        from scheduler.core.errors import SchedulerError
        from scheduler.system.terminal_text import prepare
    except ImportError as error:
        print(f"gpujob: {_not_loaded(error)}", file=sys.stderr)
        return 1
    for stream in (sys.stdout, sys.stderr):
        prepare(stream)
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except SchedulerError as error:
        return _fail(error.lines, error.exit_code)
    except BrokenPipeError:
        return _enough()
    except SystemExit as error:
        if not isinstance(error.__context__, BrokenPipeError):  # Typer turns a broken pipe into exit code 1
            raise
        return _enough()
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        do = "; free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        return _fail([_nowhere(error) or f"{error.strerror or error}{where}{do}"], 1)
    except ImportError as error:
        return _fail([_not_loaded(error)], 1)
    except Exception as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # Ctrl-C while Python before 3.12 created a class
            return 130
        from scheduler.cli.app import usage_text

        mistake = usage_text(error)
        if mistake is not None:
            return _fail([mistake], 2)
        if type(error).__name__ == "Abort":
            return 130
        raise


def _not_loaded(error: ImportError) -> str:
    """Return the error message for a module that is missing or could not be opened."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as trouble:
        return f"cannot load a part of gpujob: {error}: {trouble.strerror}; raise the limit on open files (ulimit -n)"
    return f"cannot load a part of gpujob: {error}; install gpujob again"


def _nowhere(error: OSError) -> str:
    """Return the message for a removed current folder, which the kernel's error does not name; else an empty text."""
    if error.errno != errno.ENOENT or os.path.isabs(error.filename or ""):
        return ""
    try:
        os.getcwd()
    except FileNotFoundError:
        folder = os.readlink("/proc/self/cwd").removesuffix(" (deleted)")
        do = "cd into the new folder of this name" if os.path.isdir(folder) else "cd to another folder"
        return f"the current folder was removed: {folder}; {do}"
    return ""


def _enough() -> int:
    """Return exit code 0 after a broken pipe. Redirect stdout, so that the interpreter does not fail at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 0


def _fill_standard_streams() -> None:
    """Open /dev/null on closed descriptors 0, 1 and 2; else an opened file, such as the store, would get our output."""
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, which is ``fd``
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, mode, encoding="utf-8", closefd=False))  # noqa: SIM115  for good


def _fail(lines: Sequence[str], code: int) -> int:
    from scheduler.system.terminal_text import safe

    with contextlib.suppress(OSError):  # stderr is closed or full: the exit code still reports the error
        for line in lines:
            print(f"gpujob: {safe(line)}", file=sys.stderr)
    return code


def entry() -> None:
    """Run the installed command. Named `ts` or `tsp` it is `gpujob ts`; named `gpu-tracker` it is `gpujob track`."""
    verb = {"ts": "ts", "tsp": "ts", "gpu-tracker": "track"}.get(os.path.basename(sys.argv[0]))
    if verb is not None:
        sys.argv[1:1] = [verb]
    sys.exit(main())
