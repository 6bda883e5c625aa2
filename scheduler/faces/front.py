"""The door of every command: the verbs people call in loops are found first and import little."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

FLAG = "flag"
OFF = "off"
ONE = "one"
MANY = "many"

COMPLETION = "_GPUJOB_COMPLETE"  # set by a shell that wants to know what may come next
COMMON = {"--state-file": ("state_file", ONE), "--config": ("config", ONE)}
SETTINGS = (
    "gpus", "gpu_ids", "jobs_file", "commands_file", "llm_config", "log_dir", "log_file", "cpu_slots", "mem_threshold", "load_threshold",
    "whole_gpu_tolerance", "gpu_interval", "settle", "release", "hold_on_errors", "monitor_interval", "state_interval",
    "max_assign_attempts", "assign_retry_wait", "oom_retries", "kill_grace", "cuda_ids", "python", "conda_mode", "activation_limit",
    "order", "aging", "keep_logs", "keep_finished", "trust_group", "watch",
)  # fmt: skip
# verb → its options, and how many words it takes beside them: none, one, some, or the rest of the line as it stands.
# The same as `faces/cli/app.py` declares (tests/faces compares the two); whatever is not found here goes there.
HOT: dict[str, tuple[dict[str, tuple[str, str]], str]] = {
    "add": (
        {
            "--conda": ("conda", ONE), "--args": ("args", ONE), "--priority": ("priority", ONE), "--gpus": ("gpus", ONE), "--allowed": ("gpus", ONE),
            "--set": ("wishes", MANY), "--output-file": ("output_file", ONE),
        },
        "one",
    ),
    "submit": (
        {
            "--gpus": ("gpus", ONE), "--allowed": ("allowed", ONE), "--priority": ("priority", ONE),
            "--label": ("label", ONE), "--after": ("after", ONE), "--after-ok": ("after_ok", ONE), "--vram": ("vram", ONE),
            "--time": ("time_limit", ONE), "--retries": ("retries", ONE), "--cwd": ("cwd", ONE), "--env": ("env", MANY),
            "--conda": ("conda", ONE), "--cuda": ("cuda", ONE), "--launch": ("launch", ONE),
            "--cpu": ("cpu", FLAG), "--wait": ("wait", FLAG),
        },
        "rest",
    ),
    "status": ({"--json": ("json", FLAG)}, "none"),
    "jobs": (
        {"--state": ("state", ONE), "-n": ("last", ONE), "--last": ("last", ONE), "--json": ("json", FLAG)},
        "none",
    ),
    "why": ({}, "one"),
    "cancel": ({}, "some"),
    "retry": ({}, "some"),
    "hold": ({}, "some"),
    "release": ({}, "some"),
    "first": ({}, "some"),
    "swap": ({}, "some"),
    "pause": ({}, "some"),
    "resume": ({"--force": ("force", FLAG)}, "some"),
    "wait": ({"--timeout": ("timeout", ONE)}, "any"),
    "start": (
        {
            **{f"--{name.replace('_', '-')}": (name, ONE) for name in SETTINGS},
            "--screen": ("screen", FLAG), "--no-screen": ("screen", OFF), "--drain": ("drain", FLAG), "--detach": ("detach", FLAG),
        },
        "none",
    ),
}  # fmt: skip


def bare(words: list[str]) -> tuple[str, list[str], dict[str, Any]] | None:
    """`gpujob` alone, with no more than the options that stand before a verb: the status."""
    values: dict[str, Any] = {}
    end = _options(words, 0, {**COMMON, "--json": ("json", FLAG)}, values, stop_at_word=True)
    return ("status", [], values) if end == len(words) else None


def parse(words: list[str]) -> tuple[str, list[str], dict[str, Any]] | None:
    """Verb, its words and its options; None when this is for the whole command line (help, a mistake, another verb)."""
    values: dict[str, Any] = {}
    position = _options(words, 0, COMMON, values, stop_at_word=True)
    if position is None or position >= len(words) or words[position] not in HOT:
        return None
    verb = words[position]
    options, takes = HOT[verb]
    table = {**COMMON, **options}
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
    """Read options from ``position`` on; where they end, or None for one that is not in the table."""
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
        from scheduler.faces.cli import add as module
    elif verb in ("status", "jobs", "why"):
        from scheduler.faces.cli import show as module  # type: ignore[no-redef]
    elif verb == "start":
        from scheduler.faces.cli import serve as module  # type: ignore[no-redef]
    else:
        from scheduler.faces.cli import control as module  # type: ignore[no-redef]
    found: Callable[..., int] = getattr(module, verb)
    return found


def _run(words: list[str]) -> int:
    if COMPLETION in os.environ:
        from scheduler.faces.cli.completing import answer

        return answer(words)
    hot = bare(words) or parse(words)
    if hot is None:
        from scheduler.faces.cli.app import run

        return run(words)
    verb, rest, values = hot
    takes = HOT[verb][1]
    if takes == "none":
        return _hot(verb)(**values)
    return _hot(verb)(rest[0] if takes == "one" else rest, **values)


def main(words: list[str] | None = None) -> int:
    """Run a command line and return its exit code; every error is one line on stderr."""
    from scheduler.core.errors import SchedulerError
    from scheduler.faces import terminal

    _fill_standard_streams()
    words = sys.argv[1:] if words is None else words
    for stream in (sys.stdout, sys.stderr):
        terminal.prepare(stream)
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except SchedulerError as error:
        return _fail(error.lines, error.exit_code)
    except BrokenPipeError:
        return _enough()
    except SystemExit as error:
        if not isinstance(error.__context__, BrokenPipeError):  # which the declared door makes an exit code 1 of
            raise
        return _enough()
    except KeyboardInterrupt:
        return 130
    except ImportError as error:  # too many open files, or half of an upgrade
        return _fail([f"a part of the program cannot be loaded: {error}"], 1)
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        do = "; free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        return _fail([f"{error.strerror or error}{where}{do}"], 1)
    except Exception as error:
        from scheduler.faces.cli.app import usage_text

        text = usage_text(error)
        if text is not None:
            return _fail([text], 2)
        if type(error).__name__ == "Abort":
            return 130
        raise


def _enough() -> int:
    """Whoever read our output has enough; keep the interpreter from complaining about it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 0


def _fill_standard_streams() -> None:
    """Give a closed 0, 1 or 2 a place to go: else the next file we open, the store perhaps, would become our output."""
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, so this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, mode, encoding="utf-8", closefd=False))  # noqa: SIM115  for good


def _fail(lines: Sequence[str], code: int) -> int:
    from scheduler.faces.terminal import safe

    with contextlib.suppress(OSError):  # nobody can be told; the code still says it
        for line in lines:
            print(f"gpujob: {safe(line)}", file=sys.stderr)
    return code


def entry() -> None:
    """What the installed command calls."""
    sys.exit(main())
