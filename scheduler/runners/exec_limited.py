"""Executes a program in a folder with resource limits: ``python -I -S exec_limited.py FOLDER LIMITS PROGRAM WORDS…``.

FOLDER: a path, or ``-`` for the current folder. LIMITS: a list of ``RESOURCE:SOFT:HARD``, separated by commas, or ``-``
for no limits. RESOURCE, SOFT and HARD are the numbers that `resource.setrlimit` takes. WORDS: all arguments of the
program, beginning with argv[0]. The program replaces this process and keeps its pid, session and descriptors.
"""

import os
import resource
import sys


def main(folder, limits, program, *words):
    if folder != "-":
        os.chdir(folder)
    for which, soft, hard in (map(int, item.split(":")) for item in limits.split(",") if item != "-"):
        try:
            highest = resource.getrlimit(which)[1]
            hard = lower(hard, highest)
            resource.setrlimit(which, (lower(soft, hard), hard))
        except (OSError, ValueError) as error:
            say(f"cannot set resource limit {which} to {soft}: {error}")
    os.execv(program, words)


def lower(one: int, other: int) -> int:
    """Return the lower of two resource limits; -1 means unlimited."""
    return max(one, other) if -1 in (one, other) else min(one, other)


def say(text):
    """Print a message on stderr, which is a log. A failed write is ignored: a full disk must not prevent the start."""
    try:
        os.write(2, f"gpujob: {text}\n".encode(errors="replace"))
    except OSError:
        return


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except OSError as error:
        say(f"cannot start {sys.argv[3]}: {error.strerror}")
        sys.exit(127)
