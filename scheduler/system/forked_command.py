"""Lets a command that runs in a fork of the warm process continue in the process that the user started.

The warm process holds the imported program in memory, so a command that runs in a fork of this process starts fast.
"""

from __future__ import annotations

from typing import ClassVar


class NeedsOwnProcess(BaseException):
    """Raised in a fork if the command must run again, from its beginning, in the process that the user started."""


class ForkedCommand:
    """Facts about the command that this process runs.

    ``here``: whether this process is a fork of the warm process. ``stays``: True after the command called
    `need_own_process` with ``stays=True``.
    """

    here: ClassVar[bool] = False
    stays: ClassVar[bool] = False


def need_own_process(*, stays: bool = True) -> None:
    """Raise NeedsOwnProcess in a fork of the warm process; return in the process that the user started.

    A fork has no terminal of its own, and ends together with the warm process. So a command calls this function
    before it asks a question, waits for a long time, replaces itself with another program, or starts a process that
    outlives the command.

    Before this call, the command must not print anything and must not run a user's command. So it calls this function
    before `state_file_for`, which may print a note. The command must have the same effect when it runs again.
    ``stays`` True: the process that the user started does not start the warm process after this command. ``stays``
    False: the process that the user started may start the warm process after this command.
    """
    ForkedCommand.stays = ForkedCommand.stays or stays
    if ForkedCommand.here:
        raise NeedsOwnProcess
