"""What /proc tells of a process, as it stands there; for those, too, who must be quick and import nothing.

`system/processes.py` says what it means; `supervisor.py`, which imports nothing of ours, has its own.
"""

from __future__ import annotations

_boot: list[str] = []  # once read


def boot_id() -> str:
    """The kernel's id of this boot: no other machine has it. Raises OSError."""
    if not _boot:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
            _boot.append(stream.read().strip())
    return _boot[0]


def stat_fields(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat from the state on (so the start time is number 19). Raises OSError."""
    with open(f"/proc/{pid}/stat", "rb") as stream:
        # The name stands in parentheses before them, and may hold anything, also a parenthesis.
        return stream.read().rpartition(b")")[2].split()


def command_words(pid: int, most: int = -1) -> list[bytes]:
    """The words of its command, each as it was given; ``most``: of so many bytes. None of a zombie. Raises OSError."""
    with open(f"/proc/{pid}/cmdline", "rb") as stream:
        return stream.read(most).removesuffix(b"\0").split(b"\0")


def environment_entries(pid: int) -> list[bytes]:
    """Its variables as it was started with them, NAME=VALUE. Raises OSError."""
    with open(f"/proc/{pid}/environ", "rb") as stream:
        return [entry for entry in stream.read().split(b"\0") if entry]


def ticks_of(pid: int) -> int:
    """The start time in clock ticks since boot of a process that lives; 0 if there is none, or only its zombie.

    A number alone may be another process's by now; together with this it is not.
    """
    try:
        fields = stat_fields(pid)
    except OSError:
        return 0
    return 0 if not fields or fields[0] in (b"Z", b"X") else int(fields[19])
