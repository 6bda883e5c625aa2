"""Activates a conda environment, then becomes the command: its pid, exit code and signals are those of the job.

Run as ``python -I -S activate.py WORD…``; imports nothing of ours, like `supervisor.py`. What to do stands in the environment
variable GPUJOB_ACTIVATION, which the command does not get to see, as JSON:

    name, prefix   the environment
    conda_sh       the file with conda's shell function; "": the scripts in PREFIX/etc/conda/activate.d are sourced
    settings       {variable: value, or null to take it away}: what being in the environment sets, for that second case
    limit          seconds that activation may take

Activation runs in a child shell of a process group of its own. What it prints stands in the job's log. What it leaves in its
environment comes back over a pipe; only then, and only if CONDA_PREFIX is the prefix, the command is executed. Else one line
says why not, and the exit code is 1.
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
OUT = 3  # the pipe's number in the shell
STEP_S = 0.05
RESET = (signal.SIGPIPE, signal.SIGXFSZ)  # Python ignores them; a command must not inherit that
# Whatever activation says: which GPUs and which job this is, is not for it to change.
OURS = (b"CUDA_VISIBLE_DEVICES", b"CUDA_DEVICE_ORDER")
# Of the shell itself, not of the environment. BASH_ENV and ENV would have it read other files first.
OF_THE_SHELL = (b"_", b"SHLVL", b"PWD", b"OLDPWD", b"BASH_ENV", b"ENV")
# Never a word of the command in here: all that varies comes in $1, $2…
WITH_CONDA = '. "$1" && conda activate "$2" && exec env -0 >&3'
WITH_SCRIPTS = 'for gpujob_script in "$@"; do . "$gpujob_script"; done; exec env -0 >&3'


class NotActivated(Exception):
    """Why the environment could not be activated."""


def first_environment() -> dict[bytes, bytes]:
    """The environment as we got it: Python adds to its own copy where the locale is C."""
    with open("/proc/self/environ", "rb") as stream:
        return parsed(stream.read())


def parsed(data: bytes) -> dict[bytes, bytes]:
    """``NAME=value`` items that end in NUL bytes."""
    pairs = (item.partition(b"=") for item in data.split(b"\0"))
    return {name: value for name, equals, value in pairs if equals}


def shell_words(told: dict[str, Any]) -> list[str]:
    """The words of the shell that activates. Raises NotActivated when there is no shell."""
    shell = next((path for path in ("/bin/bash", "/usr/bin/bash", "/bin/sh") if os.access(path, os.X_OK)), "")
    if not shell:
        raise NotActivated("there is neither bash nor sh")
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
    """The environment of the command. Raises NotActivated, OSError."""
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
        raise NotActivated(f"it left CONDA_PREFIX={left}, not {told['prefix']}")
    kept = {name for name in (*before, *after) if name.startswith(b"GPUJOB_") or name in OURS or name in OF_THE_SHELL}
    for name in kept:
        after.pop(name, None)
        if name in before:
            after[name] = before[name]
    return after


def output_of(words: list[str], environment: dict[bytes, bytes], limit: float) -> bytes:
    """What the shell wrote into its descriptor 3. Raises NotActivated when it fails or takes longer than ``limit``."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    if write == OUT:
        write = os.dup(write)  # so that the shell's own copy is one made on purpose, which exec leaves open
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
    # Something that activation left running may hold the pipe: the shell's end is enough.
    while status is None:
        left = end - time.monotonic()
        if left <= 0:
            kill(pid)
            raise NotActivated(f"it did not end within {limit:g} s")
        if is_open:
            poll.poll(min(left, STEP_S) * 1000)
        else:
            time.sleep(min(left, STEP_S / 5))
        # First whether it has ended, then what it wrote: the other way round the last bytes could be missed.
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        is_open = is_open and taken(read, data)
        if found is not None:
            how = "code" if found.si_code == os.CLD_EXITED else "signal"
            status = f"{how} {found.si_status}"
    if status != "code 0":
        kill(pid)
        raise NotActivated(f"it ended with {status}")
    os.waitpid(pid, 0)
    os.close(read)
    if not data:
        raise NotActivated("a script of it ended the shell")
    return bytes(data)


def taken(fd: int, data: bytearray) -> bool:
    """Take in what is there; False at the end."""
    while True:
        try:
            piece = os.read(fd, 1 << 16)
        except BlockingIOError:
            return True
        if not piece:
            return False
        data += piece


def kill(pid: int) -> None:
    """End the shell with its whole group, and take it from the kernel."""
    with contextlib.suppress(ProcessLookupError):  # none of it runs any more
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def become(words: list[str], environment: dict[bytes, bytes]) -> NoReturn:
    """Execute the command in our place. Raises OSError."""
    for number in RESET:
        signal.signal(number, signal.SIG_DFL)
    program = words[0]
    if "/" not in program:
        for folder in os.fsdecode(environment.get(b"PATH", b"")).split(os.pathsep):
            path = os.path.join(folder, program)
            if folder and os.access(path, os.X_OK) and os.path.isfile(path):
                os.execve(path, words, environment)
        raise FileNotFoundError(2, "no such program in PATH")
    os.execve(program, words, environment)


def say(text: str) -> None:
    """One line into the job's log, whatever the text holds."""
    os.write(2, ("gpujob: " + text.replace("\n", " ") + "\n").encode("utf-8", "surrogateescape"))


def main() -> int:
    words, before = sys.argv[1:], first_environment()
    told: dict[str, Any] = json.loads(before.pop(VARIABLE, b"{}"))
    if not words or not told:
        say("activate.py is started by gpujob alone")
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
            why = "its first line names an interpreter that is not there"
        say(f"cannot start {words[0]}: {why}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
