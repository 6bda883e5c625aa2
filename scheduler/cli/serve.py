"""The verb `start`: runs the daemon in the foreground or detached."""

from __future__ import annotations

import os
import stat
import sys
from typing import Any

from scheduler.client.locate import check_no_socket, settings_for
from scheduler.core.config import Config
from scheduler.core.errors import SchedulerError, word
from scheduler.daemon.process import DaemonProcess
from scheduler.intake.settings import find_config
from scheduler.system.forked_command import need_own_process
from scheduler.system.own_process import own_command, start_own
from scheduler.system.terminal_text import safe
from scheduler.views.foreground_output import ForegroundOutput

READY = "GPUJOB_READY_FD"


def start(
    *,
    state_file: str | None = None,
    config: str | None = None,
    drain: bool = False,
    detach: bool = False,
    **said: str | bool,
) -> int:
    """Run the daemon and return its exit code.

    The daemon runs until a signal ends it, or with ``drain`` until nothing is left to do. ``detach``: run the daemon in
    the background and return when it is ready. ``said``: settings given on the command line, by name. Raises
    SchedulerError.
    """
    need_own_process(stays=not detach)
    flags: dict[str, Any] = {**said, "state_file": state_file} if state_file else dict(said)
    config = config or None
    settings = settings_for(flags, config)
    check_no_socket(settings.config.state_file)
    if detach:
        return _detached(flags, config or find_config(os.environ, None, os.getcwd()) or None, drain, settings.config)
    environ = {name: value for name, value in os.environ.items() if name != READY}
    ready_fd = int(os.environ.pop(READY, "-1"))
    if ready_fd >= 0:
        os.set_inheritable(ready_fd, False)  # a copy in the supervisor would keep `start --detach` waiting
    try:
        output = ForegroundOutput(follow=ready_fd < 0)
    except RuntimeError as error:  # no thread could be started: the user's limit on processes
        raise SchedulerError(str(error), do="allow this user more processes (ulimit -u)") from None
    if _is_null(1):
        output.close()  # nobody sees the messages: no thread has to print them
    daemon = DaemonProcess(settings, flags, output, environ)
    if ready_fd >= 0:
        daemon.ready = lambda: _say_ready(ready_fd, output)
    try:
        ending = daemon.run(drain=drain)
    finally:
        output.close()
    for line in ending.left:
        print(safe(f"gpujob: {line}"), file=sys.stderr)
    return ending.code


def _is_null(fd: int) -> bool:
    """Return whether the descriptor is /dev/null. If it is, nobody sees the text that is printed there."""
    found = os.fstat(fd)
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == os.stat(os.devnull).st_rdev


def _say_ready(fd: int, output: ForegroundOutput) -> None:
    """Redirect the standard streams to /dev/null, then report to the waiting `start --detach` that the daemon is ready.

    Because the streams are redirected first, the message of `start --detach` is the last line on the terminal.
    """
    output.close()
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.close(null)
    os.write(fd, b"ready")
    os.close(fd)


def _print_page_address(meant: Config) -> None:
    """Print the address of the web page, and the command that shows its token.

    If the port is already in use, this function does not notice it; only the main log reports it.
    """
    from scheduler.store.paths import Places
    from scheduler.views.ssh_tunnel import LOOPBACK, tunnel

    log = meant.log_file or "the main log"
    if meant.web_port:
        print(f"web page: http://{LOOPBACK}:{meant.web_port}/ in a moment; {safe(log)} reports when it is ready")
    else:
        print(f"web page: {safe(log)} reports its address in a moment")
    print(f"token: cat {safe(word(Places(meant.state_file).web_token))}")
    if meant.web_port:
        print(f"from your laptop: {tunnel(meant.web_port)}")


def _detached(flags: dict[str, Any], config: str | None, drain: bool, meant: Config) -> int:
    """Start the daemon in the background, wait until it is ready, and return the exit code. Raises SchedulerError."""
    options = {**flags, **({"config": os.path.abspath(config)} if config else {}), **({"drain": True} if drain else {})}
    read, write = os.pipe()
    os.set_inheritable(write, True)
    environ = dict(os.environ, **{READY: str(write)})
    pid = start_own(own_command("start", options), environ)
    os.close(write)
    told = b""
    while piece := os.read(read, 64):
        told += piece
    os.close(read)
    if told == b"ready":
        print(f"the scheduler runs in the background; to end it (jobs continue): kill {pid}")
        if meant.web:
            _print_page_address(meant)
        return 0
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == 0 and drain:
        return 0
    if code < 0:
        raise SchedulerError(f"cannot start the scheduler: signal {-code} ended it")
    return code or 1
