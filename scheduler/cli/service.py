"""The verb `service`: the scheduler of a folder as a systemd service of the user, without root."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from scheduler.core.errors import Refused, UsageError, word
from scheduler.intake.machine_settings import VARIABLE as MACHINE_CONFIG
from scheduler.sharing.bookings_folder import VARIABLE as BOOKINGS_FOLDER
from scheduler.views.render import safe

MARK = "# Written by gpujob service install."
LINGER = "/var/lib/systemd/linger"
LIMIT_S = 20.0
_UNIT = """\
{mark}
[Unit]
Description=gpujob, a scheduler of GPU jobs ({folder})

[Service]
Type=exec
WorkingDirectory={folder}
{environment}ExecStart={command}
# Only the scheduler is ended, never its jobs: they continue, and the next start finds them again.
KillMode=process
KillSignal=SIGTERM
TimeoutStopSec=15
# Start again after a crash; not after 1 (another one runs, a file that others may write), 2 (a mistake in the config),
# 4 (no GPU).
Restart=on-failure
RestartSec=5
RestartPreventExitStatus=1 2 4
# The kernel ends a job that uses up the memory, not the whole service.
OOMPolicy=continue

[Install]
WantedBy=default.target
"""


def install(name: str = "gpujob", options: Sequence[str] = (), *, force: bool = False) -> int:
    """Write the unit for the current folder, check it, and print how to start it. Return the exit code.

    ``options``: of `gpujob start`. PATH and the variables GPUJOB_… of the caller are written into the unit. Raises UsageError for a wrong name, Refused if there is another file with this name.
    """
    path = _path(name)
    folder = os.getcwd()
    if folder[-1:] in (" ", "\\"):
        raise UsageError(
            f"a systemd unit cannot name {word(folder)}", do="use a folder without a blank or backslash at its end"
        )
    made = _UNIT.format(mark=MARK, folder=_escaped(folder), command=_command(options), environment=_environment())
    if path.exists() and MARK not in path.read_text(errors="replace") and not force:
        raise Refused(f"{path} was not written by gpujob", do="choose another --name, or replace it with --force")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.write_text(made)
    print(f"written: {safe(str(path))} (folder {safe(folder)})")
    kept = ", ".join(sorted(_kept_variables()))
    print(f"the scheduler gets these variables, as they are now: {kept}; its other settings: config.yaml in the folder")
    for problem in _verified(path):
        print(f"systemd-analyze verify: {safe(problem)}")
    print(f"start it now and at each boot: systemctl --user daemon-reload && systemctl --user enable --now {name}")
    _tell_linger()
    return 0


def status(name: str = "gpujob") -> int:
    """Print whether the unit is installed and runs. Return the exit code: 1 if it is not installed."""
    path = _path(name)
    if not path.exists():
        print(f"not installed: {safe(str(path))}")
        return 1
    print(f"installed: {safe(str(path))}")
    told = run_systemd(["systemctl", "--user", "is-active", name])
    print(
        f"systemd: {safe(told[1].strip() or 'not known')}"
        if told is not None
        else "systemd: there is no systemctl here"
    )
    _tell_linger()
    return 0


def uninstall(name: str = "gpujob") -> int:
    """Stop the service and remove its unit; its jobs continue. Return the exit code: 1 if it was not installed."""
    path = _path(name)
    if not path.exists():
        print(f"not installed: {safe(str(path))}")
        return 1
    if MARK not in path.read_text(errors="replace"):
        raise Refused(f"{path} was not written by gpujob", do="remove it yourself")
    run_systemd(["systemctl", "--user", "disable", "--now", name])
    path.unlink()
    run_systemd(["systemctl", "--user", "daemon-reload"])
    print(f"removed: {safe(str(path))}; running jobs continue")
    return 0


def _path(name: str) -> Path:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,60}", name):
        raise UsageError(f"--name must have letters, digits, - and _, not {name!r}")
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return Path(base) / "systemd" / "user" / f"{name}.service"


def _kept_variables() -> dict[str, str]:
    kept = ("PATH", "GPUJOB_CONFIG", BOOKINGS_FOLDER, MACHINE_CONFIG)
    return {k: v for k, v in os.environ.items() if k in kept or k.startswith("GPUJOB_SET_")}


def _environment() -> str:
    return "".join(f"Environment={_quoted(f'{key}={value}')}\n" for key, value in sorted(_kept_variables().items()))


def _command(options: Sequence[str] = ()) -> str:
    """Return the command of the unit: the installed program, else this interpreter with the module."""
    beside = os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "gpujob")
    found = beside if os.access(beside, os.X_OK) else shutil.which("gpujob")
    words = [os.path.abspath(found)] if found else [sys.executable, "-m", "scheduler"]
    return " ".join(_quoted(each, command=True) for each in [*words, "start", *options])


def _escaped(text: str) -> str:
    """Return a path for a unit file. Raises UsageError if the path has a line break."""
    if any(ord(char) < 32 or 0xDC80 <= ord(char) <= 0xDCFF for char in text):
        raise UsageError(
            f"a systemd unit cannot name {word(text)}",
            do="use names in UTF-8 without control characters",
        )
    return text.replace("%", "%%")


def _quoted(text: str, command: bool = False) -> str:
    """Return a value in the syntax of a unit. ``command``: in a command line, a dollar sign is doubled."""
    plain = _escaped(text).replace("$", "$$") if command else _escaped(text)
    return (
        plain if re.fullmatch(r"[\w/.+@%$=-]+", plain) else '"' + plain.replace("\\", "\\\\").replace('"', '\\"') + '"'
    )


def _verified(path: Path) -> list[str]:
    """Return what `systemd-analyze verify` says about the unit; nothing if it is fine or cannot be checked here."""
    with tempfile.TemporaryDirectory() as empty:  # without a login there is no runtime folder, but one must be named
        told = run_systemd(
            ["systemd-analyze", "--user", "verify", str(path)], os.environ.get("XDG_RUNTIME_DIR") or empty
        )
    # It checks all units that the user has; only what it says about this one is of interest.
    return [line for line in told[1].splitlines() if path.name in line] if told is not None else []


def _tell_linger() -> None:
    user = getpass.getuser()
    if not os.path.isdir(os.path.dirname(LINGER)):
        print("lingering cannot be checked: there is no systemd here")
    elif os.path.exists(os.path.join(LINGER, user)):
        print("lingering is on: the scheduler and its jobs outlive your logins")
    else:
        print(
            "lingering is off: the scheduler and its jobs end with your last login; to turn it on: loginctl enable-linger"
        )


def run_systemd(words: list[str], runtime: str = "") -> tuple[int, str] | None:
    """Run a program of systemd. ``runtime``: its XDG_RUNTIME_DIR; empty: as here. Return its exit code and output; None if it is not installed or does not end."""
    environ = {**os.environ, "XDG_RUNTIME_DIR": runtime} if runtime else None
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, errors="replace", timeout=LIMIT_S, check=False, env=environ
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.returncode, done.stdout + done.stderr
