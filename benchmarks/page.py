"""The web page of a benchmark's scheduler."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from benchmarks.house import House, wait_until


class Page:
    """A `gpujob web` process for the scheduler of a ``House``."""

    def __init__(self, house: House) -> None:
        with open(house.path("web.out"), "wb") as out:
            words = [sys.executable, "-m", "scheduler", "web", "--port", "0"]
            self.process = subprocess.Popen(
                words, cwd=house.folder, env=house.environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        self._out = house.path("web.out")
        wait_until(lambda: self._port() > 0, "the page")
        self.port = self._port()
        with open(house.path(".gpujob/web-token"), encoding="ascii") as stream:
            self.token = stream.read().strip()

    def _port(self) -> int:
        with open(self._out, encoding="utf-8") as stream:
            found = re.search(r"http://127.0.0.1:(\d+)/\n", stream.read())
        return int(found[1]) if found else 0

    @property
    def rss_mib(self) -> float:
        """Return the resident memory of the page's process in MiB."""
        with open(f"/proc/{self.process.pid}/statm", encoding="ascii") as stream:
            return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
