"""Entry point of the command line. The command runs in the warm process if it can, else in this process."""

import os
import sys

from scheduler.warm import client


def entry() -> None:
    """Run the installed command and end this process with its exit code."""
    code = client.run(sys.argv)
    if code is not None:
        os._exit(code)  # an ordinary end would take milliseconds, and there is nothing to flush

    from scheduler.command_line import run_process

    sys.exit(run_process())
