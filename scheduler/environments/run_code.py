"""The code that a job runs: its script, the git commit of its folder, and the Python packages of its interpreter.

No program is run, and only plain files are read. What cannot be read is not known.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time

from scheduler.core.run_facts import Code
from scheduler.environments.discovery import Remembered
from scheduler.intake.tail import read_plain

MOST_READ = 1 << 20  # bytes of a script that are hashed
MOST_REFS = 4 << 20
MOST_PACKAGES = 5000
AGAIN_S = 1.0  # repositories and packages are looked for again after this time: many jobs start together
MOST_KEPT = 1000
_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_PACKAGE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,80})-([A-Za-z0-9][A-Za-z0-9.+!_]{0,60})\.(?:dist|egg)-info")


class RunCode:
    """Reads facts about code. Values are cached until their file or folder changes."""

    def __init__(self) -> None:
        self._files = Remembered()
        self._git: dict[str, tuple[float, str]] = {}  # folder → when it was looked for (monotonic), its git folder
        self._packages: dict[str, tuple[float, dict[str, str]]] = {}  # program → the same with its packages

    def code_of(self, path: str) -> Code | None:
        """Return the facts about a script; None if there is no such plain file."""
        read: tuple[int, str] | None = self._files.of(path, _digest, None)
        return None if read is None else Code(path, *read, self._commit(os.path.dirname(path)))

    def _commit(self, folder: str) -> str:
        now, kept = time.monotonic(), self._git.get(folder)
        if kept is None or now >= kept[0] + AGAIN_S:
            if len(self._git) >= MOST_KEPT:
                self._git.clear()
            kept = self._git[folder] = (now, git_folder(folder))
        return commit_of(kept[1], self._files) if kept[1] else ""

    def packages_of(self, program: str, is_python: bool) -> dict[str, str]:
        """Return package → version of the environment of a program; empty if none are known.

        ``is_python``: it is an interpreter. Of other programs, such as torchrun, only those of their environment count.
        """
        now, kept = time.monotonic(), self._packages.get(program)
        if kept is not None and now < kept[0] + AGAIN_S:
            return kept[1]
        if len(self._packages) >= MOST_KEPT:
            self._packages.clear()
        found: dict[str, str] = {}
        for folder in _site_folders(program, is_python):
            found = {**self._files.of(folder, _packages_in, {}), **found}
        self._packages[program] = (now, found)
        return found


def git_folder(folder: str) -> str:
    """Return the git folder of the repository that has this folder; empty if there is none."""
    while True:
        git = os.path.join(folder, ".git")
        if os.path.lexists(git):
            break
        folder, inner = os.path.split(folder)
        if not inner:
            return ""
    if not os.path.isfile(git):
        return git
    told = _text(git)  # of a worktree or submodule
    return os.path.join(folder, told.removeprefix("gitdir: ")) if told.startswith("gitdir: ") else ""


def commit_of(git: str, files: Remembered) -> str:
    """Return the commit that is checked out, by the files of a git folder; empty if they do not tell."""
    head = files.of(os.path.join(git, "HEAD"), _text, "")
    if not head.startswith("ref: "):
        return head if _COMMIT.fullmatch(head) else ""
    name = head.removeprefix("ref: ")
    common = os.path.join(git, files.of(os.path.join(git, "commondir"), _text, ""))  # of a worktree; else the same
    commit = files.of(os.path.join(common, name), _text, "")
    if _COMMIT.fullmatch(commit):
        return commit
    refs: dict[str, str] = files.of(os.path.join(common, "packed-refs"), _packed_refs, {})
    return refs.get(name, "")


def _text(path: str, most: int = 4096) -> str:
    try:
        return read_plain(path, most).decode("utf-8", "replace").strip()
    except (OSError, ValueError):
        return ""  # the commit is not known


def _packed_refs(path: str) -> dict[str, str]:
    pairs = (line.split(" ", 1) for line in _text(path, MOST_REFS).splitlines() if " " in line)
    return {name: commit for commit, name in pairs if _COMMIT.fullmatch(commit)}


def _digest(path: str) -> tuple[int, str] | None:
    try:
        data = read_plain(path, MOST_READ)
        return os.stat(path).st_size, hashlib.sha256(data).hexdigest()[:32]
    except OSError:
        return None  # it is not compared


def _site_folders(program: str, is_python: bool) -> list[str]:
    """Return the folders with the packages of a program, those that it searches first in front."""
    if not program.startswith("/"):
        return []
    prefix = os.path.dirname(os.path.dirname(program))
    own = any(os.path.lexists(os.path.join(prefix, name)) for name in ("pyvenv.cfg", "conda-meta"))
    if not own and not is_python:
        return []
    prefixes = (
        [prefix] if own else [*dict.fromkeys((prefix, os.path.dirname(os.path.dirname(os.path.realpath(program)))))]
    )
    if not own and "/usr" in prefixes:  # Debian has packages in these folders, too
        prefixes.insert(0, "/usr/local")
    folders = []
    for place in prefixes:
        libraries = os.path.join(place, "lib")
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(libraries)):
                if name.startswith("python3"):
                    folders += [os.path.join(libraries, name, inner) for inner in ("site-packages", "dist-packages")]
    return folders


def _packages_in(folder: str) -> dict[str, str]:
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return {}  # they are not compared
    found = (_PACKAGE.fullmatch(name) for name in names)
    pairs = [(one[1].lower().replace("_", "-"), one[2]) for one in found if one is not None]
    return dict(pairs[:MOST_PACKAGES])
