"""Runs external programs in parallel, so that all together take only as long as the slowest; parses their output."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from scheduler.doctor.finding import INSTALLERS
from scheduler.gpus import reader_process

MOST_SAID = 4096  # bytes of output that are used


class Asked:
    """A running external program; `answer` waits for its output up to a time limit."""

    def __init__(self, words: Sequence[str], environ: Mapping[str, str]) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        program = shutil.which(words[0], path=environ.get("PATH", os.defpath))
        if program is not None:
            with contextlib.suppress(OSError):  # it cannot be executed: treat it as missing
                self._process = subprocess.Popen(
                    [program, *words[1:]], env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip

    def answer(self, until: float) -> tuple[int, str] | None:
        """Return exit code and output. Return None if the program is missing, or has not ended by ``until``.

        ``until``: monotonic seconds. A program that has not ended by then is killed.
        """
        process = self._process
        if process is None:
            return None
        try:
            said, _ = process.communicate(timeout=max(0.01, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.close()
            return None
        self._process = None
        return process.returncode, said[:MOST_SAID].decode("utf-8", "replace")

    def close(self) -> None:
        """Kill the program if it still runs."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            if process.stdout is not None:
                process.stdout.close()
            with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel; init reaps it later
                process.wait(0.2)


class Programs:
    """The external programs that checks use. The constructor starts all of them."""

    def __init__(self, environ: Mapping[str, str], user: str, limit_s: float) -> None:
        self.environ, self.user = environ, user
        self.until = time.monotonic() + limit_s
        plain = {name: value for name, value in environ.items() if not name.startswith("GPUJOB_")}
        told = ("KillUserProcesses", "KillExcludeUsers", "KillOnlyUsers")
        names = [word for name in told for word in ("-p", name)]
        self.plain = plain
        self.screen = Asked(["screen", "-v"], plain)
        self.manager = Asked(["loginctl", "show-session", *names], plain)
        self.linger = Asked(["loginctl", "show-user", user, "-p", "Linger"], plain)
        self.smi = shutil.which("nvidia-smi", path=plain.get("PATH", os.defpath)) is not None
        self._imports = Asked([sys.executable, reader_process.__file__, "imports"], plain) if self.smi else None

    def close(self) -> None:
        """Kill the programs that still run."""
        for asked in (self.screen, self.manager, self.linger, self._imports):
            if asked is not None:
                asked.close()

    def imports(self) -> tuple[str | None, str | None]:
        """Return the import errors of pynvml and GPUtil. An empty text: no error; None: it is not known.

        The imports are tried only if nvidia-smi is installed: importing GPUtil takes a third of a second and is useless
        without nvidia-smi.
        """
        answer = self._imports.answer(self.until) if self._imports is not None else None
        try:
            told = json.loads(answer[1].splitlines()[-1]) if answer else {}
        except (ValueError, IndexError):
            told = {}
        return told.get("pynvml"), told.get("GPUtil")


def text_of(path: str) -> str:
    """Return the first 65,536 characters of a file; empty if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read(1 << 16)
    except OSError:
        return ""


def number_in(path: str) -> int | None:
    text = text_of(path).strip()
    return int(text) if text.isdigit() else None


def assignments(text: str) -> dict[str, str]:
    pairs = (line.partition("=") for line in text.splitlines() if not line.lstrip().startswith(("#", ";")))
    return {name.strip(): value.strip() for name, equals, value in pairs if equals}


def yes_or_no(word: str) -> bool | None:
    return {
        "yes": True,
        "true": True,
        "1": True,
        "on": True,
        "no": False,
        "false": False,
        "0": False,
        "off": False,
    }.get(word.lower())


def installer() -> str:
    """Return the package manager of this machine, a key of `INSTALLERS`; empty if none is known."""
    return next((name for name in INSTALLERS if shutil.which(name)), "")
