"""Runs a command line in this process: chooses the user interface, and prints errors on stderr, one line each."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from scheduler.system.forked_command import ForkedCommand
from scheduler.warm import client

# Modules that verbs import when they run. The last ones are no modules of ours, but take milliseconds to import.
VERB_MODULES = (
    "scheduler.cli.add", "scheduler.cli.config", "scheduler.cli.control", "scheduler.cli.logs", "scheduler.cli.report",
    "scheduler.cli.sessions", "scheduler.cli.shell_completion", "scheduler.cli.show", "scheduler.client.admission_checks", "scheduler.client.offline",
    "scheduler.track.cli", "scheduler.ts.actions", "scheduler.ts.job_list", "scheduler.ts.main", "scheduler.ts.submission",
    "encodings.ascii", "encodings.utf_8_sig", "filelock", "secrets",
)  # fmt: skip
OPTIONAL_MODULES = ("typer._click.decorators",)  # as above, but older versions of the library lack them
WARM_PROCESS = "warm-process"  # the verb that is the warm process; users do not call it
# Variables of jobs. A job must not start the warm process, which would count as a process that outlived the job.
IN_A_JOB = frozenset({"GPUJOB_ID", "GPUJOB_TRACK_ID", "SLURM_JOB_ID"})
COMPLETION = "_GPUJOB_COMPLETE"  # set by a shell that asks for completions


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
    from scheduler.cli.app import run

    return run(words, INTERFACES)


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
        return _after_broken_pipe()
    except SystemExit as error:
        if not isinstance(error.__context__, BrokenPipeError):  # Typer turns a broken pipe into exit code 1
            raise
        return _after_broken_pipe()
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        do = "; free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        return _fail([_removed_folder(error) or f"{error.strerror or error}{where}{do}"], 1)
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


def _removed_folder(error: OSError) -> str:
    """Return an error message if the current folder was removed. The kernel's error does not say this.

    For any other error, return an empty text.
    """
    if error.errno != errno.ENOENT or os.path.isabs(error.filename or ""):
        return ""
    try:
        os.getcwd()
    except FileNotFoundError:
        folder = os.readlink("/proc/self/cwd").removesuffix(" (deleted)")
        do = "cd into the new folder of this name" if os.path.isdir(folder) else "cd to another folder"
        return f"the current folder was removed: {folder}; {do}"
    return ""


def _after_broken_pipe() -> int:
    """Return exit code 0 after a broken pipe. Redirect stdout, so that the interpreter does not fail when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 0


def _fill_standard_streams() -> None:
    """Open /dev/null on each of the descriptors 0, 1 and 2 that is closed.

    Otherwise a file that is opened later, such as the store, could get one of these numbers, and our output would be
    written into this file.
    """
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


def import_all() -> None:
    """Import the modules of all verbs that the warm process runs, and build the Click command with all verbs."""
    import scheduler.cli.app

    for name in VERB_MODULES:
        importlib.import_module(name)
    for name in OPTIONAL_MODULES:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    scheduler.cli.app.all_verbs()


def run_process() -> int:
    """Run the command line in sys.argv and return its exit code.

    The name of the program selects the interface: `gpu-tracker` means `gpujob track`; `ts` and `tsp` mean `gpujob ts`.
    If the command ran outside the warm process, this process starts the warm process afterwards, for later commands.
    Exceptions: the command forbids this (`ForkedCommand.stays`), no warm process can be used here (`client.usable`), or
    this process runs in a job.
    """
    verb = {"ts": "ts", "tsp": "ts", "gpu-tracker": "track"}.get(os.path.basename(sys.argv[0]))
    words = sys.argv[1:] if verb is None else [verb, *sys.argv[1:]]
    if words == [WARM_PROCESS]:
        from scheduler.warm.server import serve

        return serve(run_process, import_all)
    code = main(words)
    done = not (ForkedCommand.here or ForkedCommand.stays)
    if done and client.usable(sys.argv) and IN_A_JOB.isdisjoint(os.environ):
        from scheduler.system.own_process import own_command
        from scheduler.warm.server import start

        start(own_command(WARM_PROCESS))
    return code
