"""``python -m tests.soak``: runs one soak."""

import argparse
import sys
import time

from tests.soak import __doc__ as what


def main() -> int:
    """Run a soak with the options of the command line; return the exit code. ``--help`` works without pytest."""
    reader = argparse.ArgumentParser(prog="python -m tests.soak", description=what)
    reader.add_argument("--seed", type=int, default=int(time.time()), help="by the clock, and printed")
    reader.add_argument("--jobs", type=int, default=10_000, help="%(default)s")
    reader.add_argument("--daemon-kills", type=int, default=200, help="%(default)s")
    reader.add_argument("--supervisor-kills", type=int, default=50, help="%(default)s")
    reader.add_argument("--seconds", type=float, default=600, help="over which jobs and kills are spread (%(default)s)")
    reader.add_argument("--keep", action="store_true", help="the folder, also when all went well")
    asked = reader.parse_args()
    from tests.soak.run import soak  # imported here, because it needs pytest

    print(f"seed {asked.seed}", flush=True)
    try:
        result = soak(
            asked.seed, asked.jobs, asked.daemon_kills, asked.supervisor_kills, asked.seconds, asked.keep, talk=True
        )
    except AssertionError as error:
        print(error)
        return 1
    print(result.table())
    return 0


sys.exit(main())
