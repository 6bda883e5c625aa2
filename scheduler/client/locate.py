"""Finds the scheduler that a command means.

A flag, a variable, the config or the current folder can name the scheduler. Otherwise the only running scheduler is
meant.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping
from typing import Any

from scheduler.client.client import SchedulerClient
from scheduler.core.errors import NoDaemon, Refused, SchedulerError, UsageError
from scheduler.intake.settings import Settings, check_no_folder, load, named_state_file, without_config
from scheduler.store.daemon_lock import daemon_alive, registered
from scheduler.store.paths import SYSTEM_SOCKET, Places
from scheduler.system.terminal_text import safe

SYSTEM_UNIT = "/etc/systemd/system/gpujobd.service"  # exists if it is installed
SYSTEM_VARIABLE = "GPUJOB_SYSTEM_SOCKET"  # names another socket

_said: set[str] = set()


def settings_for(flags: Mapping[str, Any], config_file: str | None = None, *, dispatcher: bool = False) -> Settings:
    """Return the settings for a command. Raises UsageError, FileTrouble.

    ``flags``: the settings that were given on the command line. ``dispatcher``: apply the defaults of `gpujob run`.
    """
    return load(flags, os.environ, config_file, dispatcher=dispatcher)


def settings_if_readable(flags: Mapping[str, Any], config_file: str | None = None) -> Settings:
    """Return the settings. If they cannot be read, print the error on stderr and use only flags and defaults.

    In one process, the same error is printed only once.
    """
    try:
        return settings_for(flags, config_file)
    except SchedulerError as error:
        _say(error)
        return without_config(flags)


def _say(trouble: SchedulerError, then: str = "") -> None:
    text = str(trouble)
    if text not in _said:
        _said.add(text)
        print(f"gpujob: {safe(text)}; continuing with default settings{safe(then)}", file=sys.stderr)


def client_of(path: str) -> SchedulerClient:
    """Return the client of a scheduler. ``path``: its state file, or the socket of the scheduler of all users.

    Raises SchedulerError if the scheduler belongs to another user, or if the socket cannot be trusted.
    """
    if not is_socket(path):
        return SchedulerClient(path)
    from scheduler.client.system_client import SystemClient  # msgspec takes 20 ms to load

    return SystemClient(path)


def own_state_file_for(state_file: str | None, config_file: str | None, do: str) -> str:
    """Return the state file of a scheduler of one user, as `state_file_for` does. Raises Refused for that of all users.

    ``do``: what to do instead.
    """
    found = state_file_for(state_file, config_file)
    if is_socket(found):
        raise Refused("this verb is for a scheduler of your own, and there is none", where=found, do=do)
    return found


def check_no_socket(state_file: str) -> None:
    """Raise UsageError if the state file of a scheduler that is to run is the socket of the scheduler of all users."""
    if is_socket(state_file):
        raise UsageError(
            f"state_file: {state_file} is the socket of the scheduler of all users",
            do="leave out --system; the service gpujobd runs that scheduler (see gpujob system status)",
        )


def is_socket(path: str) -> bool:
    """Return whether there is a socket at this path."""
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return False


def system_socket() -> str:
    """Return the path of the socket of the scheduler of all users. Raises NoDaemon if there is no such socket."""
    path = os.environ.get(SYSTEM_VARIABLE) or SYSTEM_SOCKET
    if not is_socket(path):
        raise NoDaemon(
            "there is no scheduler of all users on this machine", where=path,
            do="an administrator can set it up: sudo gpujob system install",
        )  # fmt: skip
    return path


def state_file_for(state_file: str | None, config_file: str | None = None) -> str:
    """Return the state file of the scheduler that the command means, or the socket of the scheduler of all users.

    If a flag, a variable or the config names a state file, it is returned. Raises UsageError if the path is a
    folder, or if the config that may name the path cannot be read.

    If nothing names a state file, the result is that of `_unnamed`. Raises UsageError if `_unnamed` cannot choose
    between several running schedulers of the user.
    """
    for said, where in ((state_file, "--state-file"), (os.environ.get("GPUJOB_STATE_FILE"), "GPUJOB_STATE_FILE")):
        if said:
            path = os.path.abspath(os.path.expanduser(said))
            check_no_folder(path, where)
            return path
    here = os.getcwd()
    named, trouble = named_state_file(os.environ, config_file, here)
    found = named or _unnamed(here)
    if trouble is not None:
        _say(trouble, "" if named else f" and the scheduler {found}")
    return found


def _unnamed(here: str) -> str:
    """Return the state file if no flag, variable or config names a scheduler.

    This is the state file in the folder ``here``, if this folder has a state file or a state folder. Else it is the
    state file of the only running scheduler, or the socket of the scheduler of all users; its path is also printed on
    stderr. If no scheduler runs, it is the default path in ``here``. On a machine with a scheduler of all users, a state
    folder in which no scheduler runs does not count, and neither do the schedulers of `gpujob ts`.

    Raises UsageError if several schedulers of the user run and ``here`` has neither a state file nor a state folder.
    Raises NoDaemon if the scheduler of all users is installed, but does not run.
    """
    default = os.path.join(here, "gpu_scheduler_state.json")
    everybodys = bool(os.environ.get(SYSTEM_VARIABLE)) or is_socket(SYSTEM_SOCKET)
    # `start` creates the state folder before the state file. Another user could have put a socket into the folder.
    if (os.path.exists(default) and not is_socket(default)) or (
        os.path.isdir(Places(default).state_dir) and (not everybodys or daemon_alive(Places(default)))
    ):
        return default
    alive = [path for path in registered(dict(os.environ)) if not (everybodys and _is_of_ts(path))]
    if len(alive) == 1:
        print(safe(f"gpujob: using the only running scheduler: {alive[0]}"), file=sys.stderr)
        return alive[0]
    if alive:
        raise UsageError(
            f"cannot tell which scheduler is meant: {len(alive)} of your schedulers are running ({', '.join(alive)})",
            do="name one with --state-file",
        )
    if everybodys:
        found = system_socket()
        print(safe(f"gpujob: using the scheduler of all users of this machine: {found}"), file=sys.stderr)
        return found
    if os.path.exists(SYSTEM_UNIT):
        raise NoDaemon(
            "the scheduler of all users of this machine does not run", where=SYSTEM_SOCKET,
            do="ask an administrator: systemctl status gpujobd; or name a scheduler of your own with --state-file",
        )  # fmt: skip
    return default


def _is_of_ts(state_file: str) -> bool:
    """Return whether this is the state file of a `gpujob ts` server (`ts/server.py`): FOLDER/NUMBER/NAME."""
    above, number = os.path.split(os.path.dirname(state_file))
    return number.isdigit() and os.path.exists(os.path.join(above, "current"))
