"""Becomes another program, in a folder and within limits: ``python -I -S exec_in.py FOLDER LIMITS PROGRAM WORDS…``.

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
        highest = resource.getrlimit(which)[1]
        if highest != resource.RLIM_INFINITY and os.geteuid():  # only root may go beyond
            hard = highest if hard == resource.RLIM_INFINITY else min(hard, highest)
        if hard != resource.RLIM_INFINITY:
            soft = hard if soft == resource.RLIM_INFINITY else min(soft, hard)
        try:
            resource.setrlimit(which, (soft, hard))
        except (OSError, ValueError) as error:
            print(f"gpujob: limit {which} cannot be set to {soft}: {error}", file=sys.stderr)
    os.execv(program, words)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except OSError as error:
        print(f"gpujob: cannot start {sys.argv[3]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)
