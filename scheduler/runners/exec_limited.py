"""Becomes another program, in a folder and within limits: ``python -I -S exec_limited.py FOLDER LIMITS PROGRAM WORDS…``.

LIMITS: ``which:soft:hard`` joined by commas, as `resource.setrlimit` takes them, or ``-``. FOLDER: a path, or ``-``. WORDS
begin with the program's own name. pid, session and descriptors stay what they are.
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
            say(f"limit {which} cannot be set to {soft}: {error}")
    os.execv(program, words)


def lower(one: int, other: int) -> int:
    """The lower of two limits, of which -1 is none."""
    return max(one, other) if -1 in (one, other) else min(one, other)


def say(text):
    """Into the log; a full disk keeps nobody from being started."""
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
