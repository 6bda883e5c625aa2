"""The script that a job runs: which runs are runs of the same script, and their arguments."""

from __future__ import annotations

import hashlib
import re
import shlex
from dataclasses import dataclass

from scheduler.core.job import JobSpec

_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh"})
_TEXT_OPTION = re.compile(r"-[a-z]*c")  # of a shell: -c, -lc
_ASSIGNED = re.compile(r"[A-Za-z_]\w*=")
_SCRIPT = re.compile(r"[^-=][^=]*\.(?:pyz?|sh|bash|zsh|pl|r|jl|lua|js|rb)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Target:
    """``path``: absolute, or relative to the working folder; empty if the job runs no file that its command names.

    ``name``: what runs, as a text that is equal for equal scripts; ``words``: the other words of the command.
    """

    name: str
    path: str
    words: tuple[str, ...]


def target_of(spec: JobSpec) -> Target:
    """Return the script of a job, or the program of its command with the first word that is no option."""
    if spec.is_script:
        return Target(spec.script, spec.script, spec.arguments)
    words = _words_of(spec)
    first = next((at for at, word in enumerate(words) if not _ASSIGNED.match(word)), None)
    if first is None:
        return Target("", "", words)
    script = next((at for at in range(first, len(words)) if _SCRIPT.fullmatch(words[at])), None)
    if script is None and "/" in words[first]:
        script = first
    if script is not None:
        path = _joined(spec.cwd, words[script])
        left_out = {first, script}
        return Target(path, path, tuple(word for at, word in enumerate(words) if at not in left_out))
    named = next((word for word in words[first + 1 :] if not word.startswith("-")), "")
    return Target(f"{words[first]} {named}".rstrip(), "", (*words[:first], *words[first + 1 :]))


def script_name(name: str) -> str:
    """Return the name of a script without its folder. ``name``: of its Target."""
    return name.rpartition("/")[2]


def group_of(spec: JobSpec) -> str:
    """Return a key that is equal for runs of the same script by the same user."""
    text = "\0".join((spec.user, target_of(spec).name))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _words_of(spec: JobSpec) -> tuple[str, ...]:
    """Return the words of a command; of a command that a shell runs, the words of its text."""
    words = spec.arguments
    shell = len(words) == 3 and words[0].rpartition("/")[2] in _SHELLS and _TEXT_OPTION.fullmatch(words[1])
    if not shell:
        return words
    try:
        return tuple(shlex.split(words[2]))
    except ValueError:  # a quote is open
        return tuple(words[2].split())


def _joined(folder: str, path: str) -> str:
    path = path.removeprefix("./")
    return path if path.startswith("/") or not folder else f"{folder.rstrip('/')}/{path}"
