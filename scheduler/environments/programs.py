"""Finds the version of an interpreter, and the reason why a script, folder or program cannot be used.

No program is run for this.
"""

from __future__ import annotations

import os
import re
import stat

from scheduler.core.errors import said, word
from scheduler.environments.discovery import Remembered
from scheduler.intake.tail import read_plain

_CFG_VERSION = re.compile(r"^version(?:_info)?\s*=\s*(\d+\.\d+(?:\.\d+)?)", re.M)
_META = re.compile(r"python-(3\.\d+\.\d+)-[^-]+\.json")
_FILE = re.compile(r"python(\d+\.\d+)$")
_FOLDER = re.compile(r"[/-](\d+\.\d+\.\d+)(?=[/-])")
AGAIN = "the job waits until"


def described(program: str, files: Remembered) -> str:
    """Return the path of an interpreter with its version: ``/opt/x/bin/python (3.11.7)``.

    The version is left out if no file shows it.
    """
    version = files.of(program, lambda path: version_of(path, files), "")  # the cache notices a new target of a link
    return f"{program} ({version})" if version else program


def version_of(program: str, files: Remembered) -> str:
    """Return the version of a Python interpreter; empty if unknown. For a link, return the version of its target."""
    real = os.path.realpath(program)
    named = _FILE.search(real)
    short = named[1] if named else ""
    for path in dict.fromkeys((program, real)):
        folder, inner = os.path.split(os.path.dirname(path))
        if inner != "bin":
            continue
        for version in (
            files.of(os.path.join(folder, "pyvenv.cfg"), _cfg_version, ""),
            files.of(os.path.join(folder, "conda-meta"), _meta_version, ""),
        ):
            # A venv whose bin/python now links to another interpreter still has the old version in pyvenv.cfg.
            if version and (not short or version == short or version.startswith(f"{short}.")):
                return version
    for version in _FOLDER.findall(real):  # …/versions/3.11.7/bin, …/cpython-3.11.7-linux/bin
        if short and version.startswith(f"{short}."):
            return str(version)
    return short


def _cfg_version(path: str) -> str:
    try:
        found = _CFG_VERSION.search(read_plain(path, 64 * 1024).decode("utf-8", "replace"))
    except OSError:
        return ""  # the version is only displayed
    return found[1] if found else ""


def _meta_version(folder: str) -> str:
    try:
        versions = [found[1] for name in os.listdir(folder) if (found := _META.fullmatch(name))]
    except OSError:
        return ""  # the version is only displayed
    return versions[0] if len(versions) == 1 else ""


def script_trouble(script: str) -> str:
    """Return the reason to wait if a script cannot be run now: it is missing, not accessible, or no regular file.

    Return an empty text if the script is a regular file.
    """
    try:
        mode = os.stat(script).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return f"no such file {script}; {AGAIN} it exists"
    except OSError as error:
        return f"cannot access script {script}: {error.strerror}; {AGAIN} it is accessible"
    if stat.S_ISDIR(mode):
        return f"{script} is a folder, not a script; {AGAIN} it is a file"
    return "" if stat.S_ISREG(mode) else f"script {script} is not a regular file; {AGAIN} it is a regular file"


def folder_trouble(folder: str) -> str:
    """Return the reason to wait if a folder cannot be used as a working folder now; else an empty text."""
    try:
        mode = os.stat(folder).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return f"no such working folder {folder}; {AGAIN} it exists"
    except OSError as error:
        return f"cannot access working folder {folder}: {error.strerror}; {AGAIN} it is accessible"
    if not stat.S_ISDIR(mode):
        return f"working folder {folder} is a file; {AGAIN} it is a folder"
    if not os.access(folder, os.X_OK):
        return f"cannot enter working folder {folder}: no permission; run: chmod u+x {word(folder)}; {AGAIN} it can be entered"
    return ""


def why_not_started(program: str) -> str:
    """Return why the kernel refused to execute a program and how the user can fix that; empty if no cause is found."""
    if "/" not in program:
        return f"program {said(program)} not found in PATH"
    try:
        mode = os.stat(program).st_mode
    except FileNotFoundError:
        return f"no such file {program}"
    except OSError as error:
        return f"cannot access {program}: {error.strerror}"
    if stat.S_ISDIR(mode):
        return f"{program} is a folder, not a program"
    if not os.access(program, os.X_OK):
        return f"{program} is not executable; run: chmod +x {word(program)}"
    try:
        first = read_plain(program, 4096).split(b"\n", 1)[0]
    except OSError:
        return ""  # executable but not readable
    if not first.startswith(b"#!"):
        if b"\0" in first or first.startswith(b"\x7fELF"):
            return ""  # a binary: only the kernel's error message is known
        return f"{program} does not begin with a line such as #!/bin/sh; add one that names its interpreter"
    words = first[2:].decode("utf-8", "replace").strip(" \t").split(None, 1)
    interpreter = words[0] if words else ""
    if first.endswith(b"\r"):
        return (
            f"the first line of {program} ends in a carriage return (a file from Windows), which becomes part of the name {interpreter}; "
            f"remove it: sed -i 's/\\r$//' {word(program)}"
        )
    if not interpreter:
        return f"the first line of {program} names no interpreter"
    if not os.path.isfile(interpreter):
        return f"the first line of {program} names {interpreter}, which does not exist"
    if not os.access(interpreter, os.X_OK):
        return f"the first line of {program} names {interpreter}, which is not executable"
    return ""
