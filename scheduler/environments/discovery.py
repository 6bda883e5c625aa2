"""Finds environments of conda, mamba and venv by their files, without running conda, mamba or Python."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from scheduler.core.errors import word
from scheduler.intake.tail import CLOCK_TICK_NS, read_plain

Value = TypeVar("Value")

UNSET = "***unset***"  # conda's value for a variable that an environment unsets
LARGEST = 1 << 20
MOST_KEPT = 512
TOOLS = ("conda", "mamba", "micromamba")
_ROOTS = ("miniconda3", "anaconda3", "miniforge3", "mambaforge", "micromamba", ".conda", "conda", "mamba", "miniconda",
          "anaconda", ".micromamba")  # fmt: skip
_NAME = re.compile(r"[^=\0]+")
_NOTHING: tuple[str, ...] = ()
_NO_VARIABLES: Mapping[str, str | None] = {}


@dataclass(frozen=True, slots=True)
class Missing:
    """A thing that a job needs and that does not exist. ``sentence``: a message about it for the job's owner."""

    sentence: str


@dataclass(frozen=True, slots=True)
class Prefix:
    """A complete environment: its folder, its name as conda shows it, and whether it is a venv (``virtual``)."""

    path: str
    name: str
    virtual: bool = False

    @property
    def python(self) -> str:
        """Path of the environment's Python interpreter. The file need not exist."""
        return os.path.join(self.path, "bin", "python")


class Remembered:
    """Cache of values read from files and folders. A value is valid until its file or folder changes."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[tuple[int, ...], Any]] = {}

    def of(self, path: str, read: Callable[[str], Value], absent: Value) -> Value:
        """Return the value of ``read(path)``; ``absent`` if the file does not exist.

        If the file is unchanged, the value comes from the cache.
        """
        try:
            status = os.stat(path)
        except OSError:
            self._kept.pop(path, None)
            return absent
        stamp = (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino, status.st_dev)
        kept = self._kept.get(path)
        if kept is not None and kept[0] == stamp:
            found: Value = kept[1]
            return found
        value = read(path)
        # Two writes within a tick of the kernel's clock leave the same times, so a file just changed is not cached.
        if time.time_ns() - status.st_ctime_ns > CLOCK_TICK_NS:
            if len(self._kept) >= MOST_KEPT:
                self._kept.clear()
            self._kept[path] = (stamp, value)
        return value


class Prefixes:
    """Finds environments by name or folder.

    ``environ``: variables of the daemon. The methods also get the variables of a job, which take precedence.
    """

    def __init__(self, environ: Mapping[str, str], files: Remembered) -> None:
        self.environ = environ
        self.files = files

    def find(self, name: str, environ: Mapping[str, str]) -> Prefix | Missing:
        """Return the environment that a job names, or what is missing.

        ``name``: name or folder of the environment; ``environ``: variables of the job.
        """
        if "/" in name:
            if not os.path.isdir(name):
                return Missing(
                    f"no environment {name}: there is no such folder; create it or name another environment; the job waits until it exists"
                )
            return _checked(name, self._name_of(name))
        if name not in (".", ".."):
            for candidate in self._named(name, environ):
                return _checked(candidate, name)
        return Missing(
            f"no environment {name} was found; create it (conda create -n {word(name)}) or name its folder (./{name} beside the jobs file, or the full path); "
            "the job waits until it exists"
        )

    def _named(self, name: str, environ: Mapping[str, str]) -> Iterator[str]:
        """Yield the folders of environments with this name, in the order in which conda searches.

        The caller uses only the first folder, even if the environment there is incomplete, because conda does so, too.
        """
        if name == "base":
            for root in self.roots(environ):
                if os.path.isdir(os.path.join(root, "conda-meta")):
                    yield root
        for folder in self._folders(environ):
            candidate = os.path.join(folder, name)
            if os.path.isdir(candidate):
                yield candidate
        for home in self._values("HOME", environ):
            for known in self.files.of(os.path.join(home, ".conda", "environments.txt"), _lines, _NOTHING):
                if os.path.basename(known) == name and os.path.isdir(known):
                    yield known

    def names(self, environ: Mapping[str, str]) -> list[str]:
        """Return the names with which `find` finds a complete environment."""
        found = ["base"]
        for folder in self._folders(environ):
            found += self.files.of(folder, _names, _NOTHING)
        for home in self._values("HOME", environ):
            found += map(
                os.path.basename, self.files.of(os.path.join(home, ".conda", "environments.txt"), _lines, _NOTHING)
            )
        return [name for name in dict.fromkeys(found) if isinstance(self.find(name, environ), Prefix)]

    @staticmethod
    def _name_of(prefix: str) -> str:
        """Return the name that conda shows for the environment in a folder."""
        if os.path.isfile(os.path.join(prefix, "bin", "conda")):
            return "base"
        folder, name = os.path.split(prefix)
        return name if os.path.basename(folder) == "envs" else prefix

    def _values(self, variable: str, environ: Mapping[str, str]) -> list[str]:
        """Return the values of a variable: first the job's value, then the daemon's value if it differs.

        Empty values are left out.
        """
        both = (environ.get(variable, ""), self.environ.get(variable, ""))
        return [value for value in dict.fromkeys(both) if value]

    def roots(self, environ: Mapping[str, str]) -> Iterator[str]:
        """Yield the existing folders in which conda or mamba may be installed, the most likely folder first."""
        seen = set()
        for root in self._places(environ):
            if root not in seen:
                seen.add(root)
                if os.path.isdir(root):
                    yield root

    def _places(self, environ: Mapping[str, str]) -> Iterator[str]:
        for exe in self._values("CONDA_EXE", environ):
            yield os.path.dirname(os.path.dirname(exe))
        for variable in ("MAMBA_ROOT_PREFIX", "CONDA_ROOT"):
            yield from self._values(variable, environ)
        for exe in self._values("MAMBA_EXE", environ):
            root = os.path.dirname(os.path.dirname(exe))
            if os.path.isdir(os.path.join(root, "conda-meta")):  # false for a lone micromamba in ~/.local/bin
                yield root
        for home in self._values("HOME", environ):
            yield from self.files.of(home, _roots_in, _NOTHING)
            yield os.path.join(home, ".local", "share", "mamba")
        yield from self.files.of("/opt", _roots_in, _NOTHING)
        yield "/usr/share/miniconda"
        for program in self._in_path("conda", environ):
            yield os.path.dirname(os.path.dirname(os.path.realpath(program)))

    def _in_path(self, name: str, environ: Mapping[str, str]) -> Iterator[str]:
        for path in self._values("PATH", environ):
            program = program_in(path, name)
            if program:
                yield program

    def _folders(self, environ: Mapping[str, str]) -> Iterator[str]:
        for value in self._values("CONDA_ENVS_PATH", environ):
            yield from (part for part in value.split(os.pathsep) if part)
        homes = self._values("HOME", environ)
        files = [*self._values("CONDARC", environ), *self._values("MAMBARC", environ)]
        for home in homes:
            within = (".condarc", ".conda/.condarc", ".config/conda/.condarc", ".mambarc")
            files += [os.path.join(home, name) for name in within]
        roots = list(self.roots(environ))
        files += [os.path.join(root, name) for root in roots for name in (".condarc", ".mambarc")]
        for path in files:
            for folder in self.files.of(path, _envs_dirs, _NOTHING):
                whole = _expanded(folder, environ, homes[0] if homes else "")
                if os.path.isabs(whole):
                    yield whole
        for root in roots:
            yield os.path.join(root, "envs")

    def activation_of(self, prefix: Prefix, environ: Mapping[str, str]) -> str:
        """Return the path of `conda.sh` for this environment; empty if there is no such file. Micromamba has none."""
        own = os.path.dirname(os.path.dirname(prefix.path))
        for root in (prefix.path, own, *self.roots(environ)):
            path = os.path.join(root, "etc", "profile.d", "conda.sh")
            if os.path.isfile(path):
                return path
        return ""

    def runner_of(self, prefix: Prefix, environ: Mapping[str, str]) -> tuple[str, ...]:
        """Return the words to put before a command so that conda, mamba or micromamba runs it in this environment.

        The result is empty if none of the three programs is found.
        """
        for tool in TOOLS:
            for path in self._tools(tool, environ):
                if os.path.isfile(path) and os.access(path, os.X_OK):
                    live = ("--no-capture-output",) if tool == "conda" else ()  # mamba captures no output
                    return (path, "run", *live, "-p", prefix.path)
        return ()

    def _tools(self, tool: str, environ: Mapping[str, str]) -> Iterator[str]:
        for variable in ("CONDA_EXE", "MAMBA_EXE"):
            yield from (exe for exe in self._values(variable, environ) if os.path.basename(exe) == tool)
        for root in self.roots(environ):
            yield os.path.join(root, "bin", tool)
            yield os.path.join(root, "condabin", tool)
        yield from self._in_path(tool, environ)

    def variables_of(self, prefix: Prefix) -> dict[str, str | None]:
        """Return the variables that conda stores for an environment. The value None stands for an unset variable."""
        found: dict[str, str | None] = {}
        folder = os.path.join(prefix.path, "etc", "conda", "env_vars.d")  # of packages, in the order of file names
        for name in self.files.of(folder, _names, _NOTHING):
            if name.endswith(".json"):
                found.update(self.files.of(os.path.join(folder, name), _package_variables, _NO_VARIABLES))
        found.update(self.files.of(os.path.join(prefix.path, "conda-meta", "state"), _state_variables, _NO_VARIABLES))
        return found

    def settings_of(self, prefix: Prefix, path: str) -> dict[str, str | None]:
        """Return the variables that an environment sets. Variables that its activation scripts set are not included.

        The value None means that the variable is unset. ``path``: the value of PATH outside the environment.
        """
        inside = os.path.join(prefix.path, "bin") + os.pathsep + path
        if prefix.virtual:
            return {"PATH": inside, "VIRTUAL_ENV": prefix.path, "PYTHONHOME": None}
        return {
            **self.variables_of(prefix),
            "PATH": inside,
            "CONDA_PREFIX": prefix.path,
            "CONDA_DEFAULT_ENV": prefix.name,
            "CONDA_SHLVL": "1",
            "PYTHONHOME": None,
            "VIRTUAL_ENV": None,
        }

    def has_scripts(self, prefix: Prefix) -> bool:
        """Return whether the environment has shell scripts that its activation must source."""
        folder = os.path.join(prefix.path, "etc", "conda", "activate.d")
        return any(name.endswith(".sh") for name in self.files.of(folder, _names, _NOTHING))


def program_in(path: str, *names: str) -> str:
    """Return the path of an executable file with one of these names; empty if there is none.

    ``path``: the folders to search, as in the variable PATH. The first name is searched in all folders, then the second
    name, and so on.
    """
    for name in names:
        for folder in path.split(os.pathsep):
            program = os.path.join(folder, name)
            if folder and os.access(program, os.X_OK) and os.path.isfile(program):
                return program
    return ""


def _checked(prefix: str, name: str) -> Prefix | Missing:
    """Return the environment in the folder ``prefix`` if it is complete, else what is missing."""
    virtual = os.path.isfile(os.path.join(prefix, "pyvenv.cfg"))
    if not virtual and not os.path.isfile(os.path.join(prefix, "conda-meta", "history")):
        return Missing(
            f"environment {prefix} is incomplete (it has neither conda-meta/history nor pyvenv.cfg); if it is not being created "
            "just now, remove it and create it again; the job waits until it is complete"
        )
    found = Prefix(prefix, name, virtual)
    if os.path.islink(found.python) and not os.path.exists(found.python):
        # Other jobs than Python scripts wait, too: otherwise they would run the `python` of a later folder of PATH.
        return Missing(
            f"environment {prefix} has no python: its bin/python is a link to {os.path.realpath(found.python)}, which does not exist; "
            "restore that file or create the environment again; the job waits until the environment has a python"
        )
    return found


def _expanded(folder: str, environ: Mapping[str, str], home: str) -> str:
    """Return ``folder`` with ``~`` and ``$NAME`` replaced by their values, as conda does.

    ``environ``: the variables of the job; ``home``: the value of ``~``.
    """
    if folder == "~" or folder.startswith("~/"):
        folder = home + folder[1:]
    return re.sub(
        r"\$(?:(\w+)|\{(\w+)\})",
        lambda found: environ.get(found[1] or found[2], found[0]),
        folder,
    )


def _roots_in(folder: str) -> tuple[str, ...]:
    """Return the usual installation folders of conda and mamba that exist in ``folder``.

    ``folder`` is listed once, which is cheaper than checking each name.
    """
    there = set(_names(folder))
    return tuple(os.path.join(folder, name) for name in _ROOTS if name in there)


def _names(folder: str) -> tuple[str, ...]:
    try:
        return tuple(sorted(os.listdir(folder)))
    except OSError:
        return ()


def _lines(path: str) -> tuple[str, ...]:
    try:
        known = os.fsdecode(read_plain(path, LARGEST)).splitlines()
    except OSError:
        return ()  # optional: conda creates the list with its first environment
    return tuple(line.strip() for line in known if line.strip())


def _envs_dirs(path: str) -> tuple[str, ...]:
    """Return the value of ``envs_dirs`` in a .condarc file; empty for an invalid file, which conda itself reports."""
    import yaml

    try:
        data = yaml.safe_load(read_plain(path, LARGEST).decode("utf-8"))
    except (OSError, ValueError, OverflowError, RecursionError, yaml.YAMLError):
        return ()
    if not isinstance(data, dict):
        return ()
    found = data.get("envs_dirs") or data.get("envs_path") or ()
    listed = found if isinstance(found, list) else [found]
    return tuple(item for item in listed if isinstance(item, str) and item)


def _state_variables(path: str) -> Mapping[str, str | None]:
    return _variables(_json(path).get("env_vars"))


def _package_variables(path: str) -> Mapping[str, str | None]:
    return _variables(_json(path))


def _json(path: str) -> dict[str, Any]:
    try:
        data = json.loads(read_plain(path, LARGEST))
    except (OSError, ValueError, RecursionError):
        return {}  # conda ignores such a file, too
    return data if isinstance(data, dict) else {}


def _variables(values: Any) -> Mapping[str, str | None]:
    if not isinstance(values, dict):
        return {}
    usable = {name: str(value) for name, value in values.items() if _NAME.fullmatch(name) and "\0" not in str(value)}
    return {name: None if value == UNSET else value for name, value in usable.items()}
