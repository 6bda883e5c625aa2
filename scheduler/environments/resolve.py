"""Finds the script, interpreter, program, environment and folder of a job, without running any program."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence

from scheduler.core.errors import word
from scheduler.core.job import Job
from scheduler.core.launch import Found
from scheduler.environments.discovery import Missing, Prefix, Prefixes, Remembered, program_in
from scheduler.environments.programs import described, folder_trouble, script_trouble
from scheduler.intake.tail import read_plain

__all__ = ["ACTIVATION", "Environments", "Missing", "names_devices", "stored_environment"]

ACTIVATION = "GPUJOB_ACTIVATION"  # variable with instructions for `environments/activate.py`, unset for the command
CONDA_RUN = ("conda", "run", "--no-capture-output")
_PLAIN: Mapping[str, str | None] = {"PYTHONHOME": None, "VIRTUAL_ENV": None}
LARGEST = 8 << 20  # bytes of a stored environment: the kernel accepts 6 MiB at most, words of the command included


class Environments:
    """Finds the programs and environments with which jobs run.

    ``environ``: the daemon's variables at its start; ``python``: the setting `python`; ``launcher``: the words that
    start `environments/activate.py`. ``mode`` (setting `conda_mode`) and ``limit_s`` (setting `activation_limit`, in
    seconds) may be changed at any time. ``on_nodes``: jobs run on the nodes of a cluster, which share the files of this
    machine. A program without a path is then searched on the node, and an environment that this machine lacks is
    entered by ``conda run`` on the node. ``own_path``: the interpreter of scripts is searched in the PATH of the job.
    """

    def __init__(self, environ: Mapping[str, str], python: str = "", launcher: Sequence[str] = ()) -> None:
        self.environ = environ
        self.python = python
        self.launcher = tuple(launcher)
        self.mode = "auto"
        self.limit_s = 60.0
        self.on_nodes = False
        self.own_path = False
        self.home = environ.get("HOME") or os.path.expanduser("~")
        self._files = Remembered()
        self._prefixes = Prefixes({**environ, "HOME": self.home}, self._files)

    def find(self, job: Job) -> Found | Missing:
        """Return the program, environment and variables with which a job would run now, or what is missing.

        Each call checks the files on the disk again.
        """
        spec = job.spec
        trouble = folder_trouble(spec.cwd) if spec.cwd else ""
        if not trouble and spec.is_script:
            trouble = script_trouble(spec.script)
        if trouble:
            return Missing(trouble)
        if not spec.conda_env:
            return self._found(job, None, (), {}, self.environ if not spec.env_file else self._own(job))
        environ = self._own(job)
        prefix = self._prefixes.find(spec.conda_env, environ)
        if isinstance(prefix, Missing) and self.on_nodes and "/" not in spec.conda_env:
            return self._entered_on_node(job)
        if isinstance(prefix, Missing):
            return prefix
        way = self._way(prefix, environ)
        return way if isinstance(way, Missing) else self._found(job, prefix, *way, environ)

    def _own(self, job: Job) -> Mapping[str, str]:
        """Return the variables that a job starts with.

        These are the stored variables of its submitter, or the daemon's variables if none are stored.
        """
        if not job.spec.env_file:
            return self.environ
        return self._files.of(job.spec.env_file, stored_environment, None) or self.environ

    def _way(
        self, prefix: Prefix, environ: Mapping[str, str]
    ) -> tuple[tuple[str, ...], Mapping[str, str | None]] | Missing:
        """Return how a job enters an environment, or what the job lacks for it.

        The result is (words to put before the command, variables to set). The value None means that the variable is
        unset. For a conda environment, the result depends on ``mode``.
        """
        settings = self._prefixes.settings_of(prefix, environ.get("PATH") or os.defpath)
        activate = self.mode == "activate" or (self.mode == "auto" and self._prefixes.has_scripts(prefix))
        if prefix.virtual or (self.mode != "run" and not activate):
            return (), settings
        plain = _PLAIN
        if activate and not self.on_nodes:  # its scripts are on the node
            told = {
                "name": prefix.name,
                "prefix": prefix.path,
                "conda_sh": self._prefixes.activation_of(prefix, environ),
                "settings": settings,
                "limit": self.limit_s,
            }
            # Not on the command line, which every user can read: the settings may hold a secret.
            return self.launcher, {**plain, ACTIVATION: json.dumps(told)}
        words = self._prefixes.runner_of(prefix, environ)
        if not words and self.on_nodes:
            return (*CONDA_RUN, "-p", prefix.path), plain
        if not words:
            return Missing(
                "conda_mode is run, but neither conda nor mamba nor micromamba was found; install one, name it in "
                "CONDA_EXE, or set conda_mode: direct; the job waits until one of them is found"
            )
        return words, plain

    def _entered_on_node(self, job: Job) -> Found:
        """Return how a job enters an environment that only the nodes have."""
        spec = job.spec
        words = (*CONDA_RUN, "-n", spec.conda_env)
        if not spec.is_script:
            return Found(spec.arguments[0], environment=_PLAIN, wrapper=words)
        if not spec.script.endswith(".py"):
            return Found(spec.script, runs_by_itself=True, environment=_PLAIN, wrapper=words)
        return Found("python", environment=_PLAIN, wrapper=words)

    def _found(
        self,
        job: Job,
        prefix: Prefix | None,
        wrapper: tuple[str, ...],
        settings: Mapping[str, str | None],
        environ: Mapping[str, str],
    ) -> Found | Missing:
        spec, folder = job.spec, prefix.path if prefix else ""
        if not spec.is_script:
            program = self._command(job, wrapper, settings.get("PATH") or environ.get("PATH") or os.defpath)
            is_python = "/" in program and os.path.basename(program).startswith("python")
            interpreter = described(program, self._files) if is_python else ""
            return Found(program, prefix=folder, environment=settings, wrapper=wrapper, interpreter=interpreter)
        if not spec.script.endswith(".py"):
            return Found(spec.script, runs_by_itself=True, prefix=folder, environment=settings, wrapper=wrapper)
        program = prefix.python if prefix else self._python(environ if self.own_path else self.environ)
        if not program or not os.access(program, os.X_OK):
            if prefix:
                how = "" if prefix.virtual else f": conda install -p {word(folder)} python"
                return Missing(
                    f"no python in environment {folder}{how}; the job waits until the environment has a python"
                )
            where = f"at {self.python} (setting python)" if self.python else "in PATH"
            return Missing(f"no python {where}; the job waits until it exists")
        if self.on_nodes and not prefix and not self.python:
            return Found(os.path.basename(program), environment=settings)
        interpreter = described(program, self._files)
        return Found(program, prefix=folder, environment=settings, wrapper=wrapper, interpreter=interpreter)

    def _command(self, job: Job, wrapper: tuple[str, ...], path: str) -> str:
        """Return the path of a command's program. ``path``: the job's PATH, in which the program is searched.

        If ``wrapper`` is not empty, the name of the program is returned, because the wrapper may change PATH. If the
        program is not found, its name is returned, too; the start of the job then fails.
        """
        word = job.spec.arguments[0]
        if "/" in word:
            return word if os.path.isabs(word) else os.path.join(job.spec.cwd or os.getcwd(), word)
        if wrapper or self.on_nodes:
            return word  # not looked for yet: activation may change PATH
        return program_in(path, word) or word

    def _python(self, environ: Mapping[str, str]) -> str:
        """Return the interpreter for jobs without an environment; empty if none is found.

        ``environ``: has the PATH. Each call searches the interpreter again.
        """
        path = environ.get("PATH", os.defpath)
        if self.python:
            named = os.path.expanduser(self.python)
            return named if "/" in named else program_in(path, named)
        return program_in(path, "python", "python3")


def names_devices(script: str) -> bool:
    """Return whether the text of a script contains CUDA_VISIBLE_DEVICES.

    With ``cuda_ids: auto``, such a script runs in the mode ``physical``, and any other job in the mode ``local``.
    """
    try:
        return b"CUDA_VISIBLE_DEVICES" in read_plain(script, 1 << 20)
    except OSError:
        return False  # only for the mode "auto"; an unreadable script fails when it runs


def stored_environment(env_file: str) -> dict[str, str] | None:
    """Return the variables in a stored environment file; None if the file cannot be read."""
    try:
        items = read_plain(env_file, LARGEST).split(b"\0")
    except OSError:
        return None  # the supervisor reports a lost environment file when it starts the job
    pairs = (os.fsdecode(item).partition("=") for item in items)
    return {name: value for name, equals, value in pairs if equals}
