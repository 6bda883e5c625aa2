"""A helper that appends lines to the jobs file of a real scheduler and shows which lines ran or were refused."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tests.stories.harness import Scheduler, wait_for

NOTE = '#!/bin/sh\necho "$1" >> noted\n'
WORDS = "#!/bin/sh\nfor word; do printf '%s\\0' \"$word\"; done > words.$GPUJOB_ID\n"


class Pouring:
    """A scheduler with scripts that record their runs (`note KEY`) or their arguments (`words …`)."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.s = scheduler
        for name, text in (("note", NOTE), ("words", WORDS)):
            self.script(name, text)

    def script(self, name: str, text: str) -> Path:
        """Write an executable file into the scheduler's folder; return its path."""
        path = self.s.folder / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    @staticmethod
    def good(key: object) -> str:
        """Return a line whose job needs no GPU and records ``key``."""
        return f"0,note,,{key};gpus=0"

    def pour(self, *lines: str | bytes) -> None:
        """Append complete lines to the jobs file in one write."""
        data = b"".join(os.fsencode(line) + b"\n" for line in lines)
        fd = os.open(self.s.jobs_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            while data:
                data = data[os.write(fd, data) :]
        finally:
            os.close(fd)

    def read(self) -> None:
        """Wait until the scheduler has read the jobs file to its end."""

        def over() -> bool:
            status = os.stat(self.s.jobs_file)
            found = self.s.rows("SELECT place, inode, replaying FROM files WHERE path=?", str(self.s.jobs_file))
            return found == [(status.st_size, status.st_ino, 0)]

        wait_for(over, f"all of the jobs file is read\n{self.s.said()[-2000:]}")

    def rest(self) -> dict[int, str]:
        """Wait until the jobs file is read and every job has ended; return id → state."""
        self.read()
        return self.s.wait_ended(0)

    def noted(self) -> list[str]:
        """Return the keys that jobs have recorded, in the order in which they wrote them."""
        path = self.s.folder / "noted"
        return path.read_text().splitlines() if path.exists() else []

    def words(self, job: int) -> list[str]:
        """Return the arguments that this job's command got."""
        return os.fsdecode((self.s.folder / f"words.{job}").read_bytes()).split("\0")[:-1]

    def refused(self) -> dict[int, str]:
        """Return line number → reason of the refused lines, as `status --json` shows them."""
        return {line["line"]: line["reason"] for line in self.s.status()["refused"]}

    def judge(self, bad: Sequence[tuple[str | bytes, str]]) -> None:
        """Append each bad line between two good lines. Check that each bad line is refused once.

        Also check that each good line runs once. ``bad``: pairs of a bad line and a text that the reason for its
        refusal must contain.
        """
        first = len(self.s.jobs_file.read_bytes().splitlines()) if self.s.jobs_file.exists() else 0
        before = self.noted()
        lines: list[str | bytes] = [self.good(f"good-{first}")]
        for number, (line, _) in enumerate(bad):
            lines += [line, self.good(f"good-{first + 2 * (number + 1)}")]
        self.pour(*lines)
        self.rest()
        found = {number: why for number, why in self.refused().items() if number > first}
        wanted = {first + 2 * (number + 1): why for number, (_, why) in enumerate(bad)}
        wrong = {
            n: (found.get(n), wanted.get(n))
            for n in {*found, *wanted}
            if n not in found or wanted.get(n, "\0") not in found[n]
        }
        assert not wrong, wrong
        ran = self.noted()[len(before) :]
        assert sorted(ran) == sorted(f"good-{first + 2 * number}" for number in range(len(bad) + 1)), ran
        for number in wanted:
            self.s.says(f"jobs.txt:{number}: ", times=1)
