"""Lets a command that runs as a fork of the warm process ask for a process of its own."""

from __future__ import annotations

from typing import ClassVar


class NeedsOwnProcess(BaseException):
    """Raised if the command must run again, from its beginning, in the process that the user started."""


class ForkedCommand:
    """Facts about the command that this process runs.

    ``here``: whether this process is a fork of the warm process. ``stays``: whether the command has announced, by
    `need_own_process`, that it needs the process that the user started.
    """

    here: ClassVar[bool] = False
    stays: ClassVar[bool] = False


def need_own_process(*, stays: bool = True) -> None:
    """Raise NeedsOwnProcess in a fork of the warm process; return in the process that the user started.

    A fork has no terminal of its own, and ends together with the warm process. So a command calls this function
    before it asks a question, waits for a long time, replaces itself with another program, or starts a process that
    outlives it. The command must not have printed anything nor run a user's command before (so it calls this function before
    `state_file_for`, which may print a note), and must give the same result when it runs again.
    ``stays``: False leaves `ForkedCommand.stays` unchanged.
    """
    ForkedCommand.stays = ForkedCommand.stays or stays
    if ForkedCommand.here:
        raise NeedsOwnProcess
