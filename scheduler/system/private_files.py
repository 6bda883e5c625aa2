"""New files that nobody else may read, whatever the umask is."""

from __future__ import annotations

import os
import time


def new_private(path: str, flags: int = os.O_WRONLY, *, make_folder: bool = False) -> int:
    """A descriptor of a new file with mode 0600; never of a link, or of a file that stands there. ``make_folder``: its folder, too.

    Raises FileExistsError, OSError.
    """
    flags |= os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(path, flags, 0o600)
    except FileNotFoundError:
        if not make_folder:
            raise
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
        fd = os.open(path, flags, 0o600)
    try:
        os.fchmod(fd, 0o600)  # a umask of 0777 would leave it unreadable to ourselves
    except OSError:
        os.close(fd)
        os.unlink(path)
        raise
    return fd


def new_beside(path: str, kind: str) -> tuple[str, int]:
    """Name and descriptor of a new private file ``PATH.KIND-YYYYmmdd-HHMMSS``, with ``-2``, ``-3``… where that is there. Raises OSError."""
    first = f"{path}.{kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 1
    while True:
        name = first if number == 1 else f"{first}-{number}"
        try:
            return name, new_private(name)
        except FileExistsError:
            number += 1
