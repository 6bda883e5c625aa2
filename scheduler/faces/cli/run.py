"""`run`: a file of commands to the end of its last job, with a bar and the question that Ctrl-C asks on a terminal."""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

from scheduler.core.errors import SchedulerError, UsageError
from scheduler.core.job import Job
from scheduler.core.requests import Requeue
from scheduler.desk import Desk
from scheduler.engine.leaving import END, GO_ON, INTERRUPTED, LEAVE
from scheduler.engine.main import Daemon
from scheduler.faces.cli.control import do
from scheduler.faces.finding import settings_for
from scheduler.faces.render import counts_text, state_text
from scheduler.faces.stream import Stream
from scheduler.faces.terminal import safe
from scheduler.intake.settings import Settings, find_config

if TYPE_CHECKING:
    from rich.progress import Progress

LOOK_S = 0.5
MOST_NAMED = 20
STOPPED = 130
ANSWERS = {"l": LEAVE, "leave": LEAVE, "e": END, "end": END, "c": GO_ON, "continue": GO_ON}


def run(file: str = "", *, state_file: str | None = None, config: str | None = None, **said: str | bool) -> int:
    """Run the commands of a file on the GPUs until all have ended: 0 if all ended well, 1 if not, 130 if it was stopped.

    ``said``: settings by name, as `gpujob run` understands them (`intake/settings.py: DISPATCHER`).
    """
    flags: dict[str, Any] = {**said, **({"commands_file": file} if file else {})}
    if state_file:
        flags["state_file"] = state_file
    settings = settings_for(flags, config or None, dispatcher=True)
    path = settings.config.commands_file
    _check_file(path, named=settings.origin["commands_file"])
    desk = Desk(settings.config.state_file)
    _take_up(desk, settings, find_config(os.environ, config, os.getcwd()) or None)
    before = _of_file(desk, path)
    shown = _Shown(desk, len(before)) if sys.stdout.isatty() else None
    try:
        stream = Stream(write=shown.write if shown else None, follow=False)
    except RuntimeError as error:  # a limit on processes
        raise SchedulerError(str(error), do="allow this user more processes (ulimit -u)") from None
    daemon = Daemon(settings, flags, stream, dict(os.environ))
    if shown is not None:
        daemon.ready = shown.start
    if sys.stdin.isatty() and sys.stderr.isatty():
        daemon.question = _Question(shown)
    try:
        ending = daemon.run(drain=True)
    finally:
        stream.close()
        if shown is not None:
            shown.stop()
    for line in ending.left:
        print(safe(f"gpujob: {line}"), file=sys.stderr)
    over = {job.id for job in before if job.state.ended}
    return _last_word(desk, path, over, stopped=bool(daemon.stop_signal))


def _check_file(path: str, named: str) -> None:
    """Raises UsageError: what is to be run to its end must be there now."""
    if not os.path.isfile(path):
        what = "is no file" if os.path.exists(path) else "no such file of commands"
        do = "name it: gpujob run --commands-file FILE (one command alone: gpujob submit -- COMMAND)"
        raise UsageError(
            what, where=path, do=do if named.startswith("default") else "a shell command a line, # comments"
        )


def _of_file(desk: Desk, path: str) -> list[Job]:
    """The jobs that came from this file."""
    name = os.path.basename(path)
    return [
        job for job in desk.jobs()[0] if job.spec.source == "commands" and job.spec.origin.rpartition(":")[0] == name
    ]


def _take_up(desk: Desk, settings: Settings, config: str | None) -> None:
    """What was ended when the last run was interrupted waits again: the same command goes on where it stopped."""
    noted = desk.remembered(INTERRUPTED)
    if not noted or desk.alive():
        return
    ids = tuple(number for number, job in desk.known(json.loads(noted)).items() if job.state.value == "cancelled")
    if ids:
        do(desk, Requeue(ids), config)
    desk.note(INTERRUPTED, "")


def _last_word(desk: Desk, path: str, before: set[int], stopped: bool) -> int:
    """Say what became of the file's commands, and the exit code of it all."""
    jobs = _of_file(desk, path)
    refused = [line for line in desk.overview(0).refused if line.path == path]
    counts: dict[str, int] = {}
    for job in jobs:
        counts[job.state.value] = counts.get(job.state.value, 0) + 1
    name = os.path.basename(path)
    bad = [job for job in jobs if job.state.ended and not job.succeeded]
    for job in bad[:MOST_NAMED]:
        print(safe(f"gpujob: job {job.id} ({job.spec.shown_words()}) {state_text(job)}; log {job.log or 'none'}"))
    if len(bad) > MOST_NAMED:
        print(f"gpujob: … and {len(bad) - MOST_NAMED} more: gpujob jobs --state failed,cancelled,skipped")
    ran_before = f" ({len(before)} of them ended in runs before)" if before else ""
    print(safe(f"gpujob: {name}: {len(jobs)} commands: {counts_text(counts)}{ran_before}"))
    if refused:
        print(safe(f"gpujob: {name}: {len(refused)} lines were refused: gpujob status"))
    open_ones = [job for job in jobs if not job.state.ended]
    if stopped:
        print("gpujob: stopped before all had ended; the same command goes on from here", file=sys.stderr)
        return STOPPED
    if bad:
        do = f"gpujob retry {' '.join(str(job.id) for job in bad[:MOST_NAMED])}, then the same command"
        print(f"gpujob: to run again what did not end well: {do}", file=sys.stderr)
    return 1 if bad or refused or open_ones else 0


class _Shown:
    """A progress bar below what is said; on a terminal only. It looks into the store by itself, from a thread."""

    def __init__(self, desk: Desk, before: int) -> None:
        self.desk, self.before = desk, before
        self._progress: Progress | None = None
        self._task: Any = None
        self._up = False
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Show it; also after `stop`."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        with self._lock:
            if self._up:
                return
            if self._progress is None:
                columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
                self._progress = Progress(*columns, console=Console(), transient=True, refresh_per_second=2)
                self._task = self._progress.add_task("", total=None)
            self._progress.start()
            self._up = True
        self._stop.clear()
        self._thread = threading.Thread(target=self._follow, name="gpujob-progress", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take it away."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(3.0)
            self._thread = None
        with self._lock:
            if self._progress is not None and self._up:
                self._progress.stop()
            self._up = False

    def write(self, text: str) -> None:
        """Print above it."""
        with self._lock:
            if self._progress is not None and self._up:
                self._progress.console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
                return
        sys.stdout.write(text)
        sys.stdout.flush()

    def _follow(self) -> None:
        while not self._stop.is_set():
            try:
                counts = self.desk.overview(0).counts
            except (SchedulerError, OSError):
                counts = {}  # looked at again in a moment
            if counts:
                self._show(counts)
            self._stop.wait(LOOK_S)

    def _show(self, counts: Any) -> None:
        ended = sum(counts[state] for state in ("done", "failed", "cancelled", "skipped"))
        words = [f"{counts[state]} {state}" for state in ("running", "pending", "failed") if counts[state]]
        with self._lock:
            if self._progress is not None and self._up:
                total = sum(counts.values())
                self._progress.update(self._task, completed=ended, total=total or None, description=", ".join(words))


class _Question:
    """What is to become of the jobs that run: asked on stderr, answered on stdin."""

    fd = 0

    def __init__(self, shown: _Shown | None) -> None:
        self.shown = shown

    def ask(self, jobs: int) -> None:
        if self.shown is not None:
            self.shown.stop()
        which = "1 job is" if jobs == 1 else f"{jobs} jobs are"
        self._say(f"\n{which} running: (l)eave running, (e)nd, or (c)ontinue? [Ctrl-C again leaves] ")

    def answer(self) -> str:
        try:
            data = os.read(self.fd, 4096)
        except OSError:
            data = b""
        if not data:  # its end: nobody is there any more
            return LEAVE
        word = data.decode(errors="replace").strip().lower()
        found = ANSWERS.get(word, "")
        if not found:
            self._say("l, e or c: ")
        elif found == END:
            self._say("they are being ended; Ctrl-C again leaves them to it\n")
        return found

    def over(self) -> None:
        if self.shown is not None:
            self.shown.start()

    @staticmethod
    def _say(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
