"""The two C programs: the job and the floor.

The floor is a minimal job starter, with which the scheduler is compared.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass

TRUE = shutil.which("true") or "/bin/true"
HERE = os.path.dirname(os.path.abspath(__file__))


class NoCompiler(Exception):
    """Raised when there is no C compiler to build the job and the floor."""


@dataclass(frozen=True, slots=True)
class Programs:
    """The paths of the compiled programs."""

    job: str
    floor: str

    def lines(self, words: list[str]) -> str:
        """Return lines of a jobs file that call the job program. Each of ``words`` holds the arguments of one line."""
        return "".join(f"0,{self.job},,{text}\n" for text in words)

    def run_floor(self, count: int, slots: int, *words: str) -> float:
        """Run ``count`` jobs with the floor, at most ``slots`` jobs at a time. Return the seconds that all jobs took.

        The floor is a loop of `posix_spawn` and `wait` in C. ``words``: the arguments of the job program.
        """
        done = subprocess.run(
            [self.floor, "run", str(count), str(slots), self.job, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            check=True,
            timeout=120,
        )
        return float(done.stdout)


def build(folder: str) -> Programs:
    """Compile both programs into ``folder``. Raises NoCompiler if there is no C compiler.

    The programs are linked statically if the C library allows this.
    """
    found = {}
    for name in ("job", "floor"):
        found[name] = os.path.join(folder, name)
        words = [_compiler(), "-O2", "-Wall", "-o", found[name], os.path.join(HERE, f"{name}.c")]
        if subprocess.run([*words, "-static"], capture_output=True, timeout=120).returncode:
            subprocess.run(words, check=True, timeout=120)
    return Programs(**found)


def build_library(folder: str, name: str) -> str:
    """Compile NAME.c of this folder as a shared library in ``folder``; return its path. Raises NoCompiler."""
    path = os.path.join(folder, f"{name}.so")
    words = [_compiler(), "-O2", "-Wall", "-shared", "-fPIC", "-o", path, os.path.join(HERE, f"{name}.c"), "-ldl"]
    subprocess.run(words, check=True, timeout=120)
    return path


def _compiler() -> str:
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")
    if not compiler:
        raise NoCompiler("no C compiler (cc, gcc) in PATH; set CC, or measure only: idle verbs queued running decide")
    return compiler
