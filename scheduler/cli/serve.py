"""`start`: the daemon, in the foreground or detached."""

from __future__ import annotations

import os
import sys
from typing import Any

from scheduler.client.locate import settings_for
from scheduler.core.config import Config
from scheduler.core.errors import SchedulerError, word
from scheduler.daemon.process import DaemonProcess
from scheduler.intake.settings import find_config
from scheduler.system.own_process import own_command, start_own
from scheduler.system.terminal_text import safe
from scheduler.views.live_output import Stream

READY = "GPUJOB_READY_FD"


def start(
    *,
    state_file: str | None = None,
    config: str | None = None,
    drain: bool = False,
    detach: bool = False,
    **said: str | bool,
) -> int:
    """Run the scheduler until it is told to end, or has nothing left to do (``drain``). ``said``: settings by name."""
    flags: dict[str, Any] = {**said, "state_file": state_file} if state_file else dict(said)
    config = config or None
    settings = settings_for(flags, config)
    if detach:
        return _detached(flags, config or find_config(os.environ, None, os.getcwd()) or None, drain, settings.config)
    environ = {name: value for name, value in os.environ.items() if name != READY}
    ready_fd = int(os.environ.pop(READY, "-1"))
    if ready_fd >= 0:
        os.set_inheritable(ready_fd, False)  # the supervisor must not hold it: the waiting command reads to its end
    try:
        stream = Stream(follow=ready_fd < 0)
    except RuntimeError as error:  # a limit on processes
        raise SchedulerError(str(error), do="allow this user more processes (ulimit -u)") from None
    daemon = DaemonProcess(settings, flags, stream, environ)
    if ready_fd >= 0:
        daemon.ready = lambda: _say_ready(ready_fd, stream)
    try:
        ending = daemon.run(drain=drain)
    finally:
        stream.close()
    for line in ending.left:
        print(safe(f"gpujob: {line}"), file=sys.stderr)
    return ending.code


def _say_ready(fd: int, stream: Stream) -> None:
    """Close the standard streams, then tell the waiting `start --detach` that the daemon runs. In this order: what it prints comes last."""
    stream.close()
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.close(null)
    os.write(fd, b"ready")
    os.close(fd)


def _tell_page(meant: Config) -> None:
    """Where the page will be; that its port is taken only the main log can tell."""
    from scheduler.store.paths import Places
    from scheduler.views.ssh_tunnel import LOOPBACK, tunnel

    log = meant.log_file or "the main log"
    if meant.web_port:
        print(f"the page: http://{LOOPBACK}:{meant.web_port}/ in a moment; {safe(log)} tells when it is there")
    else:
        print(f"the page: {safe(log)} tells its address in a moment")
    print(f"its token: cat {safe(word(Places(meant.state_file).web_token))}")
    if meant.web_port:
        print(f"from your laptop: {tunnel(meant.web_port)}")


def _detached(flags: dict[str, Any], config: str | None, drain: bool, meant: Config) -> int:
    """Start the daemon in a session of its own, and wait until it is ready."""
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
        print(f"it runs in the background; to end it (jobs go on): kill {pid}")
        if meant.web:
            _tell_page(meant)
        return 0
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == 0 and drain:
        return 0
    if code < 0:
        raise SchedulerError(f"the scheduler was ended by signal {-code} while it started")
    return code or 1
