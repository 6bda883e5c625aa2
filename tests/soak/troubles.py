"""Who makes the soak: six writers, a killer, a meddler."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import subprocess
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from scheduler.core.job import Process
from tests.soak.history import Cancel, Wish, now, wish
from tests.soak.world import GPUS, World

WRITERS = 6
LEAST_LIFE_S = 2.0
NOBODY_S = 5.0
MARGIN = 0.15
LOOKS = 400  # at the ledger for a change, a few ms each
MEDDLING = (
    "state",
    "state",
    "gpu",
    "queue",
    "cancel",
    "cancel",
    "cancel",
    "editor",
    "editor",
    "disk",
    "broken",
    "logs",
)
LARGE = 1 << 20


@dataclass
class Given:
    """What the writers share: the next number, what came of each, and how long an answer took."""

    jobs: int
    share: float = 0.0  # of the jobs that may be given in by now, so that they last as long as the kills
    closed: bool = False
    wishes: list[Wish] = field(default_factory=list)
    acknowledged: int = 0
    open: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next(self, dice: random.Random) -> Wish | None:
        """Another wish; None when enough have been acknowledged, or may yet be."""
        with self.lock:
            if self.closed or self.acknowledged + self.open >= self.jobs * min(1.0, self.share):
                return None
            self.open += 1
            made = wish(len(self.wishes), dice)
            self.wishes.append(made)
            return made

    def note(self, one: Wish, said: str, took: float = 0.0) -> None:
        """What came of it: ``ok``, or what was said instead."""
        with self.lock:
            self.open -= 1
            one.said = said
            one.acknowledged = said == "ok"
            self.acknowledged += one.acknowledged
            if took:
                self.seconds.append(took)
            if said != "ok":
                self.errors[f"{one.way}: {re.sub('[0-9]+', 'N', said)}"] += 1

    @property
    def done(self) -> bool:
        """Whether all were acknowledged that will be given in."""
        return self.acknowledged >= self.jobs or (self.closed and not self.open)


class Pens:
    """One for each writer; who replaces the jobs file takes all, so that no echo goes into a file that is no more."""

    def __init__(self) -> None:
        self.free = threading.Semaphore(WRITERS)
        self.turn = threading.Lock()

    @contextlib.contextmanager
    def all(self):
        """No writer writes meanwhile."""
        with self.turn:
            for _ in range(WRITERS):
                self.free.acquire()
            try:
                yield
            finally:
                for _ in range(WRITERS):
                    self.free.release()

    @contextlib.contextmanager
    def one(self):
        """A writer writes."""
        with self.turn:
            self.free.acquire()
        try:
            yield
        finally:
            self.free.release()


class Writer:
    """Gives jobs in at its pace until enough are acknowledged."""

    def __init__(self, world: World, given: Given, pens: Pens, seed: str, pause: float) -> None:
        self.world, self.given, self.pens, self.pause = world, given, pens, pause
        self.dice = random.Random(seed)

    def run(self) -> None:
        """All of its jobs."""
        due = time.monotonic()
        while not self.given.done:
            due += self.dice.uniform(0, 2 * self.pause)
            time.sleep(max(0.0, due - time.monotonic()))
            one = self.given.next(self.dice)
            if one is None:
                time.sleep(0.05)  # not yet; or another writer's answer may be a no
            else:
                getattr(self, one.way)(one)

    def words(self, one: Wish) -> list[str]:
        """The words of the job."""
        end = str(one.code) if one.signal is None else f"-{one.signal}"
        return [one.key, str(one.seconds), end, one.kind, str(self.world.ledger), f"{one.key}.ok"]

    def echo(self, one: Wish) -> None:
        """As a shell's `echo >>`: one write, and what does not fit is not written."""
        line = f"{one.priority},{self.world.job},,{' '.join(self.words(one))};gpus={one.share},\n".encode()
        with self.pens.one():
            fd = os.open(self.world.jobs_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                count = os.write(fd, line)
            except OSError as error:
                count, said = 0, error.strerror
            finally:
                os.close(fd)
        one.torn = 0 < count < len(line)
        self.given.note(one, "ok" if count == len(line) else "cut off" if count else said)

    def add(self, one: Wish) -> None:
        """`gpujob add`."""
        words = ["add", str(self.world.job), "--args", " ".join(self.words(one)), f"--priority={one.priority}"]
        with self.pens.one():
            self.told(one, *words, "--set", f"gpus={one.share}")

    def submit(self, one: Wish) -> None:
        """`gpujob submit`."""
        wishes = (f"--gpus={one.share}", f"--priority={one.priority}")
        one.id = int(self.told(one, "submit", *wishes, "--", str(self.world.job), *self.words(one)) or 0)

    def told(self, one: Wish, *words: str) -> str:
        """What the verb printed; its exit code 0 is the acknowledgement."""
        began = time.monotonic()
        done = self.world.cli(*words)
        took = time.monotonic() - began
        said = "ok" if done.returncode == 0 else f"{done.returncode}, {done.stderr.strip()}"
        self.given.note(one, said, took)
        return done.stdout.strip() if done.returncode == 0 else ""


class Killer:
    """Kills daemons, keepers and shims at moments drawn beforehand, and starts the next daemon in a mode of the dice."""

    def __init__(self, world: World, given: Given, seed: str, daemons: int, servants: int, seconds: float) -> None:
        self.world, self.given, self.dice = world, given, random.Random(seed)
        self.over = threading.Event()
        again, both = daemons // 10, min(daemons, servants) // 3
        counts = {"daemon": daemons - 2 * again - both, "again": again, "both": both, "servant": servants - both}
        blows = [blow for blow, count in counts.items() for _ in range(count)]
        self.dice.shuffle(blows)
        times = sorted(self.dice.uniform(0.04, 0.85) * seconds for _ in blows)
        self.blows = list(zip(times, blows, strict=True))

    def run(self) -> None:
        """All blows; the last life is one in direct mode."""
        began = time.monotonic()
        for n, (at, blow) in enumerate(self.blows):
            self.given.share = n / len(self.blows) + MARGIN
            wait = began + at - time.monotonic()  # on a busy machine each start takes longer than the plan has room for
            if self.over.wait(max(self.dice.uniform(0, LEAST_LIFE_S), wait)):
                break
            if self.dice.random() < 0.5:
                self.await_a_line()
            getattr(self, blow)()
        self.given.share = 1.0
        if self.world.life.mode != "direct":
            self.world.stop()
            self.world.start("direct")

    def mode(self) -> str:
        """Of the next life."""
        return self.dice.choice(("direct", "direct", "direct", "screen", "screen")) if self.world.screens else "direct"

    def await_a_line(self) -> None:
        """Half of the blows fall as they come, the others up to 5 ms after a job wrote a line."""
        before = self.world.ledger.stat().st_size
        for _ in range(LOOKS):
            if self.world.ledger.stat().st_size != before:
                break
            time.sleep(0.002)
        time.sleep(self.dice.uniform(0, 0.005))

    def next(self) -> None:
        """Another daemon, at once or a little later."""
        time.sleep(self.dice.choice((0, 0, self.dice.uniform(0, 0.5))))
        self.world.start(self.mode())

    def daemon(self) -> None:
        """The daemon."""
        self.world.kill_daemon()
        self.next()

    def again(self) -> None:
        """The daemon, and the next one while it recovers."""
        self.world.kill_daemon()
        self.world.start(self.mode(), ready=False)
        time.sleep(self.dice.uniform(0.05, 0.9))
        self.world.kill_daemon()
        self.next()

    def servant(self) -> None:
        """A keeper or a shim, of this daemon or of one before."""
        while not self.world.kill_servant(*self.target()):
            continue

    def both(self) -> None:
        """The daemon and a keeper or shim in the same moment."""
        target = self.target()
        if self.dice.random() < 0.5:
            if not self.world.kill_servant(*target):
                return self.both()  # it has ended by itself
            self.world.kill_daemon()
            self.next()
        else:
            self.world.kill_daemon()
            hit = self.world.kill_servant(*target)
            self.next()
            if not hit:
                self.servant()
        return None

    def target(self) -> tuple[Process, str]:
        """A keeper or a shim that lives."""
        end = time.monotonic() + NOBODY_S
        while not (found := self.world.servants()):
            time.sleep(0.005)
            if time.monotonic() > end:  # no job runs in a terminal just now; a keeper is always there
                self.world.stop()
                self.world.start("direct")
        return self.dice.choice(found)


class Meddler:
    """All that people and machines do to a scheduler beside killing it. What it breaks, it mends."""

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
        """One thing after the other until it is told to stop; then all is as it should be."""
        began = time.monotonic()
        while not self.over.is_set():
            if self.hangs and time.monotonic() - began > self.hangs[0]:
                self.hangs.pop(0)
                self.hang()
            what = self.dice.choice(MEDDLING)
            if what != "disk" or self.world.mounted:
                getattr(self, what)()
                self.did[what] += 1
            self.over.wait(self.dice.uniform(0, 2 * self.pause))

    def moment(self, most: float) -> None:
        """A little while."""
        self.over.wait(self.dice.uniform(0.1, most))

    def verb(self, *words: str) -> int:
        """A verb, which may find no scheduler, or a full disk, but ends as documented."""
        done = self.world.cli(*words)
        if "Traceback" in done.stderr or done.returncode not in (0, 1, 5, 6):
            self.complaints.append(f"gpujob {' '.join(words)}: {done.returncode} {done.stderr}")
        return done.returncode

    # -- the state file -------------------------------------------------------------------------------

    def state(self) -> None:
        """Pauses are edited, in place or by rename."""
        try:
            data = json.loads(self.world.state_file.read_text())
        except (OSError, ValueError):
            return  # not there yet, or as we left it
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
        """Half of it is written, and no more."""
        text = self.world.state_file.read_text() if self.world.state_file.exists() else "{}"
        self.world.state_file.write_text(text[: len(text) // 2])

    def gpu(self) -> None:
        """`pause` and `resume` of a GPU."""
        gpu = str(self.dice.randrange(GPUS))
        self.verb("pause", gpu)
        self.moment(0.6)
        self.verb("resume", gpu)

    def queue(self) -> None:
        """`queue pause` and `queue resume`."""
        self.verb("queue", "pause")
        self.moment(0.6)
        self.verb("queue", "resume")

    # -- jobs -----------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """One that runs by the ledger, or one that was queued a moment ago."""
        ids = [int(entry[2]) for entry in self.world.running()]
        if not ids or self.dice.random() < 0.3:
            ids = [one.id for one in self.given.wishes[-30:] if one.id]
        if ids:
            job, at = self.dice.choice(ids), now()
            self.cancels.append(Cancel(job, at, -1))  # before it is answered: the meddler may be the one to be late
            self.cancels[-1].code = self.verb("cancel", str(job))

    def editor(self) -> None:
        """The jobs file is touched, or saved by an editor of one kind or another."""
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
        """As editors do."""
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
        """Full but for a few pages, for a while."""
        size, page = 0, os.sysconf("SC_PAGESIZE")
        with self.filler.open("wb") as stream:
            for piece in (2048, 256, 16, 1):
                with contextlib.suppress(OSError):  # no such piece is free any more
                    while True:
                        os.posix_fallocate(stream.fileno(), size, piece * page)
                        size += piece * page
            stream.truncate(size - self.dice.randrange(4) * page)
        self.moment(1.5)
        self.filler.unlink()

    def logs(self) -> None:
        """Large logs are removed by hand: ten thousand jobs would fill any disk."""
        for path in (self.world.disk / "gpu_scheduler_logs").iterdir():
            with contextlib.suppress(FileNotFoundError):  # the scheduler was faster
                if path.stat().st_size > LARGE:
                    path.unlink()

    def hang(self) -> None:
        """The driver does not answer; the calls that wait then never return."""
        self.world.driver.hang("*")
        self.over.wait(self.dice.uniform(0.5, 2))
        self.world.driver.clear_errors()
        self.did["hang"] += 1

    def calm(self) -> bool:
        """Whether nothing is paused any more; else it is said once more."""
        self.verb("queue", "resume")
        self.verb("resume", f"0-{GPUS - 1}")
        done = self.world.cli("status", "--json")
        if done.returncode:
            return False
        status = json.loads(done.stdout)
        return not status["paused"] and not any(gpu["paused"] for gpu in status["gpus"])
