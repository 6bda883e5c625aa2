"""Activates a conda environment, then executes the job's command in the same process, so that the pid stays the same.

Run as ``python -I -S activate.py WORD…``; imports only the standard library, like `supervisor.py`. The environment
variable GPUJOB_ACTIVATION, which is removed before the command runs, holds a JSON object:

    name, prefix   name and folder of the environment
    conda_sh       file with conda's shell function; "": source the scripts in PREFIX/etc/conda/activate.d instead
    settings       {variable: value, or null to unset it}: variables to set if ``conda_sh`` is empty
    limit          seconds that activation may take

Activation runs in a child shell in its own process group; the output of the shell goes to the job's log. The shell
returns its environment through a pipe. If CONDA_PREFIX in that environment is the prefix, the command is executed with
that environment. Otherwise one line in the log gives the reason, and the exit code is 1.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from typing import Any, NoReturn

VARIABLE = b"GPUJOB_ACTIVATION"
OUT = 3  # descriptor of the pipe in the shell
STEP_S = 0.05
RESET = (signal.SIGPIPE, signal.SIGXFSZ)  # signals that Python ignores; the command must not inherit that
# Activation cannot change these variables, nor those of the job (GPUJOB_*).
OURS = (b"CUDA_VISIBLE_DEVICES", b"CUDA_DEVICE_ORDER")
# Variables of the shell, not of the environment. BASH_ENV and ENV would make the shell source other files first.
OF_THE_SHELL = (b"_", b"SHLVL", b"PWD", b"OLDPWD", b"BASH_ENV", b"ENV")
# Constant texts, so nothing has to be quoted: all that varies is passed as $1, $2…
WITH_CONDA = '. "$1" && conda activate "$2" && exec env -0 >&3'
WITH_SCRIPTS = 'for gpujob_script in "$@"; do . "$gpujob_script"; done; exec env -0 >&3'


class NotActivated(Exception):
    """Error: the environment could not be activated. The text is the reason."""


def first_environment() -> dict[bytes, bytes]:
    """Return the environment that this process was started with.

    It is read from /proc, because Python adds a variable to os.environ in a C locale.
    """
    with open("/proc/self/environ", "rb") as stream:
        return parsed(stream.read())


def parsed(data: bytes) -> dict[bytes, bytes]:
    """Return the variables in ``NAME=value`` items separated by NUL bytes."""
    pairs = (item.partition(b"=") for item in data.split(b"\0"))
    return {name: value for name, equals, value in pairs if equals}


def shell_words(told: dict[str, Any]) -> list[str]:
    """Return the command line of the shell that activates the environment. Raises NotActivated if there is no shell."""
    shell = next((path for path in ("/bin/bash", "/usr/bin/bash", "/bin/sh") if os.access(path, os.X_OK)), "")
    if not shell:
        raise NotActivated("neither bash nor sh was found")
    quiet = ["--noprofile", "--norc"] if shell.endswith("bash") else []
    if told["conda_sh"]:
        return [shell, *quiet, "-c", WITH_CONDA, shell, told["conda_sh"], told["prefix"]]
    folder = os.path.join(told["prefix"], "etc", "conda", "activate.d")
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        names = []
    scripts = [os.path.join(folder, name) for name in names if name.endswith(".sh")]
    return [shell, *quiet, "-c", WITH_SCRIPTS, shell, *scripts]


def activated(told: dict[str, Any], before: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """Activate the environment and return the variables for the command.

    ``told``: the contents of GPUJOB_ACTIVATION; ``before``: the variables before the activation. Raises NotActivated if
    the activation fails, and OSError if the shell cannot be started.
    """
    inside = {name: value for name, value in before.items() if name not in OF_THE_SHELL[-2:]}
    if not told["conda_sh"]:
        for name, value in told["settings"].items():
            if value is None:
                inside.pop(os.fsencode(name), None)
            else:
                inside[os.fsencode(name)] = os.fsencode(value)
    after = parsed(output_of(shell_words(told), inside, float(told["limit"])))
    left = os.fsdecode(after.get(b"CONDA_PREFIX", b""))
    if not left or os.path.realpath(left) != os.path.realpath(told["prefix"]):
        raise NotActivated(f"after the activation, CONDA_PREFIX is {left or 'not set'} (expected: {told['prefix']})")
    kept = {name for name in (*before, *after) if name.startswith(b"GPUJOB_") or name in OURS or name in OF_THE_SHELL}
    for name in kept:
        after.pop(name, None)
        if name in before:
            after[name] = before[name]
    return after


def output_of(words: list[str], environment: dict[bytes, bytes], limit: float) -> bytes:
    """Run the shell and return what it writes to descriptor 3. ``words``: command line of the shell.

    Raises NotActivated if the shell fails, writes nothing, or runs longer than ``limit`` seconds.
    """
    read, write = os.pipe()
    os.set_blocking(read, False)
    if write == OUT:
        write = os.dup(write)  # dup2 to the same number would leave it close-on-exec
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, write, OUT),
    ]
    pid = os.posix_spawn(
        words[0], words, environment, file_actions=actions, setpgroup=0, setsigmask=(), setsigdef=RESET
    )
    os.close(write)
    data = bytearray()
    end = time.monotonic() + limit
    is_open, status = True, None
    poll = select.poll()
    poll.register(read, select.POLLIN)
    # Processes that activation left running may keep the pipe open, so the end of the shell counts.
    while status is None:
        left = end - time.monotonic()
        if left <= 0:
            kill(pid)
            raise NotActivated(f"activation took longer than {limit:g} s (activation_limit)")
        if is_open:
            poll.poll(min(left, STEP_S) * 1000)
        else:
            time.sleep(min(left, STEP_S / 5))
        # Look for the end before reading: in the other order the last bytes could be missed.
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        is_open = is_open and taken(read, data)
        if found is not None:
            how = "code" if found.si_code == os.CLD_EXITED else "signal"
            status = f"{how} {found.si_status}"
    if status != "code 0":
        kill(pid)
        raise NotActivated(f"activation ended with {status}")
    os.waitpid(pid, 0)
    os.close(read)
    if not data:
        raise NotActivated("an activation script ended the shell")
    return bytes(data)


def taken(fd: int, data: bytearray) -> bool:
    """Read the available bytes from the pipe and append them to ``data``. Return False at the end of the pipe."""
    while True:
        try:
            piece = os.read(fd, 1 << 16)
        except BlockingIOError:
            return True
        if not piece:
            return False
        data += piece


def kill(pid: int) -> None:
    """Kill the shell and its process group, and reap the shell."""
    with contextlib.suppress(ProcessLookupError):  # no process of the group is left
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def become(words: list[str], environment: dict[bytes, bytes]) -> NoReturn:
    """Execute the command in this process. Raises OSError."""
    for number in RESET:
        signal.signal(number, signal.SIG_DFL)
    program = words[0]
    if "/" not in program:
        for folder in os.fsdecode(environment.get(b"PATH", b"")).split(os.pathsep):
            path = os.path.join(folder, program)
            if folder and os.access(path, os.X_OK) and os.path.isfile(path):
                os.execve(path, words, environment)
        raise FileNotFoundError(2, "not found in PATH")
    os.execve(program, words, environment)


def say(text: str) -> None:
    """Write one line to stderr, which is the job's log."""
    os.write(2, ("gpujob: " + text.replace("\n", " ") + "\n").encode("utf-8", "surrogateescape"))


def main() -> int:
    words, before = sys.argv[1:], first_environment()
    told: dict[str, Any] = json.loads(before.pop(VARIABLE, b"{}"))
    if not words or not told:
        say("activate.py can only be started by gpujob")
        return 2
    try:
        environment = activated(told, before)
    except (NotActivated, OSError) as error:
        why = str(error) if isinstance(error, NotActivated) else f"{error.strerror} ({error.filename})"
        say(f"environment {told['name']} could not be activated: {why}")
        return 1
    try:
        become(words, environment)
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno == 2 and os.path.exists(words[0]):
            why = "its first line names an interpreter that does not exist"
        say(f"cannot start {words[0]}: {why}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
