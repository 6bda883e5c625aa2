"""The verb `web`: serves the page and the HTTP API of a scheduler in a separate process."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from scheduler.client.locate import own_state_file_for
from scheduler.core.errors import SchedulerError, UsageError
from scheduler.daemon.helper_child import LIFE, PORT_TAKEN
from scheduler.system.forked_command import need_own_process


def web(
    *,
    port: str = "4004",
    host: str = "127.0.0.1",
    tls_cert: str = "",
    tls_key: str = "",
    behind_proxy: bool = False,
    names: Sequence[str] = (),
    state_file: str | None = None,
    config: str | None = None,
) -> int:
    """Serve until Ctrl-C (returns 130) or SIGTERM (returns 0).

    Raises UsageError for a wrong option, SchedulerError if a library is missing or the port is in use. If the daemon
    has started this process and the port is in use, no error is raised: the process prints a line that the daemon
    reads, and returns 1.
    """
    need_own_process()
    if not port.isascii() or not port.isdigit() or len(port) > 5:
        raise UsageError(
            f"must be a port, not {port[:40]!r}",
            where="--port",
            do="write a number such as 4004, or 0 for any free port",
        )
    path = own_state_file_for(
        state_file,
        config,
        "the scheduler of all users has a page of its own, if an administrator sets web: true; gpujob token",
    )
    try:
        from scheduler.web.server import PortTaken, Way, serve
    except ImportError as error:
        name = (error.name or "").partition(".")[0]
        if not name or name == "scheduler":
            raise
        raise SchedulerError(
            f"cannot start the web page: the library {name} is not installed",
            where="web",
            do="pip install 'gpujob[web]'",
        ) from None
    until = os.environ.pop(LIFE, "")
    way = Way(host, int(port), tls_cert, tls_key, behind_proxy, tuple(names), int(until) if until.isdigit() else -1)
    try:
        return serve(path, way, config=config)
    except PortTaken as error:
        if way.until < 0:
            raise
        print(f"{PORT_TAKEN}{error}", file=sys.stderr, flush=True)  # read by the daemon that started this process
        return error.exit_code
