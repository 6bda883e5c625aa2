"""The writers, which submit jobs, and the killer, which kills daemons, supervisors and shims."""

from __future__ import annotations

import contextlib
import os
import random
import re
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from scheduler.core.job import Process
from tests.soak.history import Wish, wish
from tests.soak.world import World

WRITERS = 6
LEAST_LIFE_S = 2.0
NOBODY_S = 5.0
MARGIN = 0.15
LOOKS = 400  # the most looks at the ledger in one wait, 2 ms apart


@dataclass
class Given:
    """The data that the writers share: the requested jobs, the results of the requests, and their durations.

    ``jobs``: number of jobs that must be acknowledged in the whole soak; ``open``: number of requests without a result;
    ``seconds``: the durations of the verbs.
    """

    jobs: int
    share: float = 0.0  # share of the jobs that may be requested so far; it grows with the kills
    closed: bool = False
    wishes: list[Wish] = field(default_factory=list)
    acknowledged: int = 0
    open: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next(self, dice: random.Random) -> Wish | None:
        """Return the next job to request; return None if no job is to be requested at this time.

        None is returned if the soak is being ended early (``closed``). None is also returned if the acknowledged
        requests and the requests without a result together are as many as are allowed so far (``jobs`` times
        ``share``).
        """
        with self.lock:
            if self.closed or self.acknowledged + self.open >= self.jobs * min(1.0, self.share):
                return None
            self.open += 1
            made = wish(len(self.wishes), dice)
            self.wishes.append(made)
            return made

    def note(self, one: Wish, said: str, took: float = 0.0) -> None:
        """Record the result of a request: ``ok`` or an error.

        ``took``: the duration of the verb in seconds, or 0 if no verb was run.
        """
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
        """Return whether all requests of the soak are complete.

        Normally they are complete when ``jobs`` requests are acknowledged. If the soak is being ended early
        (``closed``), they are also complete as soon as each request has a result.
        """
        return self.acknowledged >= self.jobs or (self.closed and not self.open)


class Pens:
    """Locks on the jobs file, one for each writer.

    The meddler takes all locks before it replaces the file, so that no writer appends to the replaced file.
    """

    def __init__(self) -> None:
        self.free = threading.Semaphore(WRITERS)
        self.turn = threading.Lock()

    @contextlib.contextmanager
    def all(self):
        """Hold all locks, so that no writer appends a line."""
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
        """Hold one lock, to append a line."""
        with self.turn:
            self.free.acquire()
        try:
            yield
        finally:
            self.free.release()


class Writer:
    """Requests jobs at its own pace until enough are acknowledged."""

    def __init__(self, world: World, given: Given, pens: Pens, seed: str, pause: float) -> None:
        self.world, self.given, self.pens, self.pause = world, given, pens, pause
        self.dice = random.Random(seed)

    def run(self) -> None:
        """Request jobs until enough are acknowledged."""
        due = time.monotonic()
        while not self.given.done:
            due += self.dice.uniform(0, 2 * self.pause)
            time.sleep(max(0.0, due - time.monotonic()))
            one = self.given.next(self.dice)
            if one is None:
                time.sleep(0.05)  # not due yet, or enough if the open requests succeed
            else:
                getattr(self, one.way)(one)

    def words(self, one: Wish) -> list[str]:
        """Return the arguments of the job's script."""
        end = str(one.code) if one.signal is None else f"-{one.signal}"
        return [one.key, str(one.seconds), end, one.kind, str(self.world.ledger), f"{one.key}.ok"]

    def echo(self, one: Wish) -> None:
        """Append a line to the jobs file with one write, as `echo >>` does. A full disk may cut off the line."""
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
        """Append a line with `gpujob add`."""
        words = ["add", str(self.world.job), "--args", " ".join(self.words(one)), f"--priority={one.priority}"]
        with self.pens.one():
            self.told(one, *words, "--set", f"gpus={one.share}")

    def submit(self, one: Wish) -> None:
        """Add a job with `gpujob submit`."""
        wishes = (f"--gpus={one.share}", f"--priority={one.priority}")
        one.id = int(self.told(one, "submit", *wishes, "--", str(self.world.job), *self.words(one)) or 0)

    def told(self, one: Wish, *words: str) -> str:
        """Run a verb. Return its output, or an empty text if the verb failed.

        Exit code 0 of the verb acknowledges the request.
        """
        began = time.monotonic()
        done = self.world.cli(*words)
        took = time.monotonic() - began
        said = "ok" if done.returncode == 0 else f"{done.returncode}, {done.stderr.strip()}"
        self.given.note(one, said, took)
        return done.stdout.strip() if done.returncode == 0 else ""


class Killer:
    """Kills daemons, supervisors and shims at random times drawn in advance, and starts the next daemon."""

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
        """Make all kills; then start a daemon in direct mode if the current one runs in screen mode."""
        began = time.monotonic()
        for n, (at, blow) in enumerate(self.blows):
            self.given.share = n / len(self.blows) + MARGIN
            wait = began + at - time.monotonic()  # on a busy machine starts take longer than planned
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
        """Return the mode of the next daemon: direct or screen."""
        return self.dice.choice(("direct", "direct", "direct", "screen", "screen")) if self.world.screens else "direct"

    def await_a_line(self) -> None:
        """Wait until a job writes a line to the ledger, but about a second at most. Then wait for up to 5 ms more."""
        before = self.world.ledger.stat().st_size
        for _ in range(LOOKS):
            if self.world.ledger.stat().st_size != before:
                break
            time.sleep(0.002)
        time.sleep(self.dice.uniform(0, 0.005))

    def next(self) -> None:
        """Start the next daemon, immediately or up to 0.5 s later."""
        time.sleep(self.dice.choice((0, 0, self.dice.uniform(0, 0.5))))
        self.world.start(self.mode())

    def daemon(self) -> None:
        """Kill the daemon."""
        self.world.kill_daemon()
        self.next()

    def again(self) -> None:
        """Kill the daemon, start the next one, kill the new one while it recovers, and start another one."""
        self.world.kill_daemon()
        self.world.start(self.mode(), ready=False)
        time.sleep(self.dice.uniform(0.05, 0.9))
        self.world.kill_daemon()
        self.next()

    def servant(self) -> None:
        """Kill a supervisor or a shim. It belongs to the current daemon or to an earlier one."""
        while not self.world.kill_servant(*self.target()):
            continue

    def both(self) -> None:
        """Kill the daemon and a supervisor or shim one right after the other, in either order."""
        target = self.target()
        if self.dice.random() < 0.5:
            if not self.world.kill_servant(*target):
                return self.both()  # the process has already ended
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
        """Return a living supervisor or shim, with its kind."""
        end = time.monotonic() + NOBODY_S
        while not (found := self.world.servants()):
            time.sleep(0.005)
            if time.monotonic() > end:  # no process to kill; in direct mode there is always a supervisor
                self.world.stop()
                self.world.start("direct")
        return self.dice.choice(found)
