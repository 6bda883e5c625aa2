"""Runs the stories with a copy of the program that has random delays, to find tests and code that depend on timing.

``make delays`` (``python -m tests.delays [PYTEST ARGUMENT…]``) takes about 12 minutes. The copy has random delays,
mostly of 10 to 100 ms: at each crash point, before each pass of the daemon, and before the daemon writes its log or the
state file. The tests check their conditions more often. If a story fails here, there are two possible causes. Either
the story waits for one event, and then checks something that the program does only later. Or the program does not
handle this order of events.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.planted import Bug, copy_to, plant

DELAY = '''\
def delay(mean_s: float) -> None:
    """Sleep for a random time, in two of five calls."""
    import random
    import time

    dice = random.Random(os.urandom(8))
    if dice.random() < 0.4:
        time.sleep(min(0.5, dice.expovariate(1 / mean_s)))


'''
CHANGES = Bug(
    "delays",
    "random delays",
    (
        ("scheduler/system/crash_points.py", "def crash_point(name: str)", DELAY + "def crash_point(name: str)"),
        ("scheduler/system/crash_points.py", "    global _left\n", "    global _left\n    delay(0.03)\n"),
        ("scheduler/daemon/loop.py", "import crash_point\n", "import crash_point, delay\n"),
        ("scheduler/daemon/loop.py", "        self._exclude_helpers()\n        self._heard", "        delay(0.05)\n        self._exclude_helpers()\n        self._heard"),
        ("scheduler/daemon/loop.py", "        with contextlib.suppress(OSError):  # on a full disk", "        delay(0.04)\n        with contextlib.suppress(OSError):  # on a full disk"),
        ("scheduler/daemon/state_writer.py", "        self.dirty, self.painted_at = False, now.mono\n",
         "        from scheduler.system.crash_points import delay\n\n        delay(0.1)\n        self.dirty, self.painted_at = False, now.mono\n"),
        *(
            (f"scheduler/runners/{name}.py", "    def crash_point(self, name):\n",
             '    def crash_point(self, name):\n        __import__("time").sleep(max(0, os.urandom(1)[0] - 150) / 1500)\n')
            for name in ("supervisor", "shim")
        ),
        ("tests/stories/harness.py", "time.sleep(min(0.05, max(0.01, 0.1 * waited)))", "time.sleep(min(0.05, max(0.002, 0.03 * waited)))"),
    ),
    (),
)  # fmt: skip


def main(words: list[str]) -> int:
    """Run the stories, or the given pytest arguments, in the copy with delays; return pytest's exit code."""
    with tempfile.TemporaryDirectory(prefix="delays-") as made:
        folder = Path(made) / "copy"
        copy_to(folder)
        plant(CHANGES, folder)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-n",
            "6",
            "--dist",
            "worksteal",
            "-q",
            "-p",
            "no:cacheprovider",
            "--timeout",
            "240",
        ]
        chosen = words or ["-m", "not long and story", "tests"]
        return subprocess.run([*command, *chosen], cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)}).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
