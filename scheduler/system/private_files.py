"""Creates files that only their owner can read, independently of the umask."""

from __future__ import annotations

import os
import time


def new_private(path: str, flags: int = os.O_WRONLY, *, make_folder: bool = False) -> int:
    """Create a file with mode 0600 and return its descriptor. ``make_folder``: create a missing folder, too (0700).

    Raises FileExistsError if there is already a file or link at ``path``, and OSError if no file can be created.
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
        os.fchmod(fd, 0o600)  # a umask of 0777 would remove the permissions of the owner too
    except OSError:
        os.close(fd)
        os.unlink(path)
        raise
    return fd


def new_beside(path: str, kind: str) -> tuple[str, int]:
    """Create a private file ``PATH.KIND-YYYYmmdd-HHMMSS`` and return its name and descriptor. Raises OSError.

    If a file of that name exists, ``-2``, ``-3``, … is added to the name.
    """
    first = f"{path}.{kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 1
    while True:
        name = first if number == 1 else f"{first}-{number}"
        try:
            return name, new_private(name)
        except FileExistsError:
            number += 1
