"""Settings that an administrator makes for all users of a machine: /etc/gpujob/config.yaml, which belongs to root."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from scheduler.core.config import OPTIONS, read_option
from scheduler.core.errors import UsageError, did_you_mean
from scheduler.core.user_limits import Limit

PATH = "/etc/gpujob/config.yaml"
VARIABLE = "GPUJOB_MACHINE_CONFIG"  # another path, for tests and containers
LARGEST = 64 * 1024
KEYS = ("weights", "fair_half_life", "keep_free", "keep_free_hours")
SYSTEM_KEYS = (
    "admins",
    "hide_commands",
    "limits",
    "priorities_across_users",
)  # of the scheduler of all users, whose other settings are in the same file
OTHERS = ("weights", *SYSTEM_KEYS)  # keys that are no settings of a scheduler


@dataclass(frozen=True, slots=True)
class MachineSettings:
    """``weights``: user → share of the machine relative to other users (1 if not named); the others as in `Config`.

    For the scheduler of all users: ``admins``: names of users, or of groups after ``@``; ``hide_commands``: users do not
    see the commands of other users; ``limits``, ``priorities_across_users``: see `core/user_limits.py`, `core/users.py`.
    ``problem``: why the file is not used, as a sentence; empty if it is used or does not exist.
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    fair_half_life: float = 0.0
    keep_free: int = 0
    keep_free_hours: str = ""
    admins: frozenset[str] = frozenset()
    hide_commands: bool = False
    limits: Mapping[str, Limit] = field(default_factory=dict)
    priorities_across_users: bool = False
    problem: str = ""


class MachineFile:
    """The settings of this machine, read again when their file has changed."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._read_at: tuple[int, ...] | None = None
        self._settings = MachineSettings()

    def settings(self) -> MachineSettings:
        """Return the settings as the file has them now."""
        try:
            found = os.stat(machine_file(self._environ))
            state: tuple[int, ...] = (found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size)
        except OSError as error:
            state = (error.errno or 0,)
        if state != self._read_at:
            self._settings, self._read_at = machine_settings(self._environ), state
        return self._settings


def machine_file(environ: Mapping[str, str]) -> str:
    """Return the path of the settings of this machine, which may be missing."""
    return environ.get(VARIABLE) or PATH


def machine_settings(environ: Mapping[str, str]) -> MachineSettings:
    """Return the settings of this machine. A file that root does not own, or others may write, is not used."""
    path = machine_file(environ)
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC)) as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != 0 or status.st_mode & 0o022:
                return MachineSettings(
                    problem=f"{path} is not used: it must be a file of root that only root may write"
                )
            data = stream.read(LARGEST + 1)
            if len(data) > LARGEST:
                return MachineSettings(problem=f"{path} is not used: it is larger than {LARGEST} bytes")
    except FileNotFoundError:
        return MachineSettings()
    except OSError as error:
        return MachineSettings(problem=f"{path} is not used: {error.strerror}")
    import yaml

    try:
        return _settings(yaml.safe_load(data) or {})
    except (yaml.YAMLError, RecursionError):
        return MachineSettings(problem=f"{path} is not used: it is not YAML")
    except (UsageError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
        return MachineSettings(problem=f"{path} is not used: {error}")


def _settings(values: Any) -> MachineSettings:
    if not isinstance(values, dict):
        raise ValueError("it must have lines such as keep_free: 1")
    weights = {}
    for user, weight in (values.get("weights") or {}).items():
        number = float(weight)
        if not 0 < number < 1e6:
            raise ValueError(f"weights: {user}: must be above 0, not {weight}")
        weights[str(user)] = number
    known = (*KEYS, *SYSTEM_KEYS, *OPTIONS)
    unknown = [key for key in values if key not in known]
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}{did_you_mean(str(unknown[0]), known)}")
    admins = values.get("admins") or []
    if not isinstance(admins, list) or not all(isinstance(name, str) for name in admins):
        raise ValueError("admins: must be a list of users and of groups, such as [ada, '@gpu-admins']")
    flags = {key: values.get(key, False) for key in ("hide_commands", "priorities_across_users")}
    for key, flag in flags.items():
        if not isinstance(flag, bool):
            raise ValueError(f"{key}: must be true or false")
    found = {key: read_option(key, values[key], key, named=True) for key in KEYS[1:] if values.get(key) is not None}
    return MachineSettings(weights, **found, **flags, admins=frozenset(admins), limits=_limits(values.get("limits")))


def _limits(values: Any) -> dict[str, Limit]:
    """Return user, ``@group`` or ``*`` → limit. Raises ValueError."""
    found = {}
    for who, given in (values or {}).items():
        if not isinstance(given, dict) or not given or not set(given) <= {"gpus", "waiting"}:
            raise ValueError(f"limits: {who}: must be such as {{gpus: 4, waiting: 100}}")
        for key, number in given.items():
            kinds = (int, float) if key == "gpus" else (int,)
            if isinstance(number, bool) or not isinstance(number, kinds) or not 0 <= number < 1e9:
                raise ValueError(f"limits: {who}: {key}: must be a number of 0 or more, not {number!r}")
        found[str(who)] = Limit(**given)
    return found
