"""The two C programs: the job, and the floor that the scheduler is measured against."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass

HERE = os.path.dirname(os.path.abspath(__file__))


class NoCompiler(Exception):
    """The job and the floor are C programs, and there is no C compiler."""


@dataclass(frozen=True, slots=True)
class Programs:
    """Where the compiled programs stand."""

    job: str
    floor: str

    def lines(self, words: list[str]) -> str:
        """Lines of a jobs file that call the job program, one for each text of words."""
        return "".join(f"0,{self.job},,{text}\n" for text in words)

    def run_floor(self, count: int, slots: int, *words: str) -> float:
        """Seconds for ``count`` jobs by a C loop of posix_spawn and wait."""
        done = subprocess.run(
            [self.floor, "run", str(count), str(slots), self.job, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            check=True,
            timeout=120,
        )
        return float(done.stdout)


def build(folder: str) -> Programs:
    """Compile both into ``folder``, static where the C library allows it. Raises NoCompiler."""
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")
    if not compiler:
        raise NoCompiler("no C compiler (cc, gcc) in PATH; set CC, or measure only: idle cli decide")
    found = {}
    for name in ("job", "floor"):
        found[name] = os.path.join(folder, name)
        words = [compiler, "-O2", "-Wall", "-o", found[name], os.path.join(HERE, f"{name}.c")]
        if subprocess.run([*words, "-static"], capture_output=True, timeout=120).returncode:
            subprocess.run(words, check=True, timeout=120)
    return Programs(**found)
