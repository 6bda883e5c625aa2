"""The disturbances of a soak: edits of files, a full disk, a hanging driver, pauses and cancels."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path

from tests.soak.history import Cancel, now
from tests.soak.world import GPUS, World
from tests.soak.writers_killers import Given, Pens

MEDDLING = (
    "state", "state", "gpu", "queue", "cancel", "cancel", "cancel", "editor", "editor", "disk", "broken", "logs",
)  # fmt: skip
LARGE = 1 << 16
LEAST_FREE = 0.5  # free share of the disk; below it, large job logs are removed


class Meddler:
    """Makes the disturbances of a soak that users and machines cause, and undoes them. It kills no process.

    ``did``: number of disturbances by name; ``complaints``: verbs that ended in a way that is not documented.
    """

    def __init__(
        self, world: World, given: Given, pens: Pens, seed: str, pause: float, hangs: int, seconds: float
    ) -> None:
        self.world, self.given, self.pens, self.pause = world, given, pens, pause
        self.dice = random.Random(seed)
        self.cancels: list[Cancel] = []
        self.did: Counter[str] = Counter()
        self.complaints: list[str] = []
        self.over = threading.Event()
        self.filler = world.disk / "filler"
        self.hangs = sorted(self.dice.uniform(0.1, 0.7) * seconds for _ in range(hangs))

    def run(self) -> None:
        """Make random disturbances, one after the other, until ``over`` is set."""
        began = time.monotonic()
        while not self.over.is_set():
            if self.hangs and time.monotonic() - began > self.hangs[0]:
                self.hangs.pop(0)
                self.hang()
            disk = os.statvfs(self.world.disk)
            if disk.f_bavail < LEAST_FREE * disk.f_blocks:
                self.logs()
            what = self.dice.choice(MEDDLING)
            if what != "disk" or self.world.mounted:
                getattr(self, what)()
                self.did[what] += 1
            self.over.wait(self.dice.uniform(0, 2 * self.pause))

    def moment(self, most: float) -> None:
        """Wait for 0.1 to ``most`` seconds, or until ``over`` is set."""
        self.over.wait(self.dice.uniform(0.1, most))

    def verb(self, *words: str) -> int:
        """Run a verb; return its exit code. An undocumented code or a traceback is a complaint."""
        done = self.world.cli(*words)
        if "Traceback" in done.stderr or done.returncode not in (0, 1, 5, 6):
            self.complaints.append(f"gpujob {' '.join(words)}: {done.returncode} {done.stderr}")
        return done.returncode

    # -- the state file -------------------------------------------------------------------------------

    def state(self) -> None:
        """Edit the pauses in the state file, in place or by a rename."""
        try:
            data = json.loads(self.world.state_file.read_text())
        except (OSError, ValueError):
            return  # not written yet, or written in part by `broken`
        paused = self.dice.sample(range(GPUS), self.dice.choice((0, 0, 0, 1, 2)))
        data["paused_gpus"] = sorted(paused)
        data["paused"] = self.dice.random() < 0.1
        text = json.dumps(data, indent=1)
        if self.dice.random() < 0.5:
            self.world.state_file.write_text(text)
        else:
            aside = self.world.disk / "state.aside"
            aside.write_text(text)
            aside.chmod(0o600)
            aside.rename(self.world.state_file)
        if data["paused"]:
            self.moment(0.8)
            self.verb("queue", "resume")

    def broken(self) -> None:
        """Write the first half of the state file's contents, as an interrupted save does."""
        text = self.world.state_file.read_text() if self.world.state_file.exists() else "{}"
        self.world.state_file.write_text(text[: len(text) // 2])

    def gpu(self) -> None:
        """Pause a GPU, and resume it."""
        gpu = str(self.dice.randrange(GPUS))
        self.verb("pause", gpu)
        self.moment(0.6)
        self.verb("resume", gpu)

    def queue(self) -> None:
        """Pause the queue, and resume it."""
        self.verb("queue", "pause")
        self.moment(0.6)
        self.verb("queue", "resume")

    # -- jobs -----------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Cancel a job that runs according to the ledger, or a recently submitted job."""
        ids = [int(entry[2]) for entry in self.world.running()]
        if not ids or self.dice.random() < 0.3:
            ids = [one.id for one in self.given.wishes[-30:] if one.id]
        if ids:
            job, at = self.dice.choice(ids), now()
            self.cancels.append(Cancel(job, at, -1))  # recorded before the verb, which returns late
            self.cancels[-1].code = self.verb("cancel", str(job))

    def cancel_cut_lines(self) -> None:
        """Cancel each job that waits for a script that does not exist.

        A full disk has cut off the line of such a job in the middle of the script's name. The job would wait forever.
        """
        for (job,) in self.world.rows("SELECT id FROM jobs WHERE finished_at IS NULL AND reason_code='missing'"):
            self.cancels.append(Cancel(job, now(), self.verb("cancel", str(job))))

    def editor(self) -> None:
        """Touch the jobs file, or save it in one of the ways that editors use."""
        path = self.world.jobs_file
        how = self.dice.choice(("touch", "sed", "rename", "in place", "backup"))
        with self.pens.all():
            if not path.exists():
                return
            if how == "touch":
                os.utime(path)
            elif how == "sed":
                subprocess.run(["sed", "-i", f"1i # by sed at {now()}", str(path)], check=True)
            else:
                lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
                lines.insert(self.dice.randrange(len(lines) + 1), f"# saved at {now()}, {how}")
                self.save(path, "".join(f"{line}\n" for line in lines), how)

    def save(self, path: Path, text: str, how: str) -> None:
        """Save the jobs file: overwrite it, or rename a new file to its path.

        ``how``: ``in place`` overwrites the file. ``backup`` first renames the old file, and then renames the new file
        to the path. Any other word only renames the new file.
        """
        aside = path.with_name("jobs.txt.aside")
        if how == "in place":
            path.write_text(text)
            return
        if how == "backup":
            path.rename(path.with_name("jobs.txt~"))
            self.over.wait(self.dice.uniform(0, 0.1))
        aside.write_text(text)
        aside.chmod(0o600)
        aside.rename(path)

    # -- the machine ----------------------------------------------------------------------------------

    def disk(self) -> None:
        """Fill the disk except for a few pages, for up to 1.5 s."""
        size, page = 0, os.sysconf("SC_PAGESIZE")
        with self.filler.open("wb") as stream:
            for piece in (2048, 256, 16, 1):
                with contextlib.suppress(OSError):  # there is no room for a piece of this size
                    while True:
                        os.posix_fallocate(stream.fileno(), size, piece * page)
                        size += piece * page
            stream.truncate(size - self.dice.randrange(4) * page)
        self.moment(1.5)
        self.filler.unlink()

    def logs(self) -> None:
        """Remove large job logs, as a user may: the logs of thousands of jobs would fill any disk."""
        for path in (self.world.disk / "gpu_scheduler_logs").iterdir():
            with contextlib.suppress(FileNotFoundError):  # the scheduler has removed it
                if path.stat().st_size > LARGE:
                    path.unlink()

    def hang(self) -> None:
        """Make the GPU driver hang for a while; driver calls made during this time never return."""
        self.world.driver.hang("*")
        self.over.wait(self.dice.uniform(0.5, 2))
        self.world.driver.clear_errors()
        self.did["hang"] += 1

    def calm(self) -> bool:
        """Resume the queue and all GPUs; return whether `status` shows that nothing is paused any more."""
        self.verb("queue", "resume")
        self.verb("resume", f"0-{GPUS - 1}")
        done = self.world.cli("status", "--json")
        if done.returncode:
            return False
        status = json.loads(done.stdout)
        return not status["paused"] and not any(gpu["paused"] for gpu in status["gpus"])
