"""Finds interpreters, programs and conda environments on disk, without running conda."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass

from scheduler.core.job import Job
from scheduler.core.launch import Found

_ROOTS = ("miniconda3", "anaconda3", "miniforge3", "mambaforge", "micromamba", ".conda", "conda", "mamba")


@dataclass(frozen=True, slots=True)
class Missing:
    """What a job lacks, as a sentence."""

    sentence: str


class Environments:
    """Answers what a job would run with. ``environ`` is the daemon's at its start; ``python`` the config's."""

    def __init__(self, environ: Mapping[str, str], python: str = "") -> None:
        self.environ = environ
        self.python = python
        self.home = environ.get("HOME") or os.path.expanduser("~")

    def find(self, job: Job) -> Found | Missing:
        """The program of a job, or what is missing. Looks at the disk each time: things come and go."""
        prefix = ""
        if job.spec.conda_env:
            found = self._prefix(job.spec.conda_env)
            if isinstance(found, Missing):
                return found
            prefix = found
        settings = _activated(prefix, self.environ) if prefix else {}
        if not job.spec.is_script:
            return self._command(job, prefix, settings)
        script = job.spec.script
        if not os.path.isfile(script):
            what = "is a folder, not a script" if os.path.isdir(script) else "no such file"
            return Missing(
                f"no such file {script}; looked again when it appears" if what == "no such file" else f"{script} {what}"
            )
        if not script.endswith(".py"):
            return Found(script, runs_by_itself=True, prefix=prefix, environment=settings)
        program = os.path.join(prefix, "bin", "python") if prefix else self._python()
        if not program or not os.access(program, os.X_OK):
            where = f"in {prefix}" if prefix else f"({self.python})" if self.python else "in PATH"
            return Missing(f"no python {where}; looked again when it appears")
        return Found(program, prefix=prefix, environment=settings)

    def _command(self, job: Job, prefix: str, settings: Mapping[str, str]) -> Found | Missing:
        """A command's program, by the PATH that it will have; a missing one fails when started, as in a shell."""
        word = job.spec.arguments[0]
        if "/" in word:
            program = word if os.path.isabs(word) else os.path.join(job.spec.cwd or os.getcwd(), word)
        else:
            path = settings.get("PATH") or _variable(job.spec.env_file, "PATH") or self.environ.get("PATH", os.defpath)
            program = shutil.which(word, path=path) or word
        return Found(program, prefix=prefix, environment=settings)

    def _python(self) -> str:
        if self.python:
            path = os.path.expanduser(self.python)
            return path if "/" in path else shutil.which(path, path=self.environ.get("PATH", os.defpath)) or ""
        return _python_of(self.environ.get("PATH", os.defpath))

    def _prefix(self, name: str) -> str | Missing:
        if "/" in name:
            return _checked(name, name)
        for folder in self._folders():
            candidate = os.path.join(folder, name)
            if os.path.isdir(candidate):
                return _checked(candidate, name)
        for root in self._roots():
            if name == "base" and os.path.isdir(os.path.join(root, "conda-meta")):
                return _checked(root, name)
        return Missing(f"no environment {name} is known here; looked again when it appears")

    def _roots(self) -> list[str]:
        roots = [self.environ.get("MAMBA_ROOT_PREFIX", ""), self.environ.get("CONDA_ROOT", "")]
        exe = self.environ.get("CONDA_EXE", "")
        if exe:
            roots.append(os.path.dirname(os.path.dirname(exe)))
        roots += [os.path.join(self.home, name) for name in _ROOTS]
        roots += [os.path.join("/opt", name) for name in _ROOTS]
        return [root for root in dict.fromkeys(roots) if root and os.path.isdir(root)]

    def _folders(self) -> list[str]:
        folders = [part for part in self.environ.get("CONDA_ENVS_PATH", "").split(os.pathsep) if part]
        folders += [os.path.join(root, "envs") for root in self._roots()]
        try:
            with open(os.path.join(self.home, ".conda", "environments.txt"), "rb") as stream:
                known = os.fsdecode(stream.read()).splitlines()
                folders += [os.path.dirname(line.strip()) for line in known if line.strip()]
        except OSError:
            return list(dict.fromkeys(folders))  # the list is optional: conda makes it with its first environment
        return list(dict.fromkeys(folders))


def _checked(prefix: str, name: str) -> str | Missing:
    """The prefix if it is a whole environment (conda's or a venv), else what is wrong with it."""
    if not os.path.isdir(prefix):
        return Missing(f"no environment {name}: {prefix} is not there; looked again when it appears")
    made = os.path.isdir(os.path.join(prefix, "conda-meta")) or os.path.isfile(os.path.join(prefix, "pyvenv.cfg"))
    if not made:
        return Missing(f"{prefix} is not an environment (no conda-meta, no pyvenv.cfg); looked again when it is")
    return prefix


def _activated(prefix: str, environ: Mapping[str, str]) -> dict[str, str]:
    path = os.path.join(prefix, "bin") + os.pathsep + environ.get("PATH", os.defpath)
    if os.path.isfile(os.path.join(prefix, "pyvenv.cfg")):
        return {"PATH": path, "VIRTUAL_ENV": prefix}
    return {"PATH": path, "CONDA_PREFIX": prefix, "CONDA_DEFAULT_ENV": os.path.basename(prefix), "CONDA_SHLVL": "1"}


@functools.lru_cache(maxsize=8)
def _python_of(path: str) -> str:
    return shutil.which("python", path=path) or shutil.which("python3", path=path) or ""


def names_devices(script: str) -> bool:
    """Whether the script's text holds CUDA_VISIBLE_DEVICES (what ``cuda_ids: auto`` goes by)."""
    try:
        with open(script, "rb") as text:
            return b"CUDA_VISIBLE_DEVICES" in text.read(1 << 20)
    except OSError:
        return False  # only the mode "auto" asks; an unreadable script fails by itself when it runs


def _variable(env_file: str, name: str) -> str:
    if not env_file:
        return ""
    try:
        with open(env_file, "rb") as stored:
            for item in stored.read().split(b"\0"):
                if item.startswith(name.encode() + b"="):
                    return os.fsdecode(item.split(b"=", 1)[1])
    except OSError:
        return ""  # the keeper reports a lost environment file when it starts the job
    return ""
