"""The verb `run`: runs a file of commands to the end, with a progress bar and a question after Ctrl-C on a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from scheduler.client.client import SchedulerClient
from scheduler.client.locate import check_no_socket, settings_for
from scheduler.client.send_request import do
from scheduler.core.errors import SchedulerError, UsageError
from scheduler.core.job import HOLDING, Job, JobState
from scheduler.core.job_text import state_text
from scheduler.core.requests import Requeue
from scheduler.daemon.interrupt import END, GO_ON, INTERRUPTED, LEAVE
from scheduler.daemon.process import DaemonProcess
from scheduler.daemon.run_resume import commands_in, read_as_new
from scheduler.intake.settings import Settings, find_config
from scheduler.store.daemon_lock import Taken
from scheduler.system.forked_command import need_own_process
from scheduler.system.terminal_text import safe
from scheduler.views.foreground_output import ForegroundOutput
from scheduler.views.render import counts_text

if TYPE_CHECKING:
    from rich.progress import Progress

LOOK_S = 0.5
MOST_NAMED = 20
STOPPED = 130
ANSWERS = {"l": LEAVE, "leave": LEAVE, "e": END, "end": END, "c": GO_ON, "continue": GO_ON}


def run(
    file: str = "",
    *,
    again: bool = False,
    state_file: str | None = None,
    config: str | None = None,
    **said: str | bool,
) -> int:
    """Run a file of commands on the GPUs until all commands have ended, and return the exit code.

    The exit code is 0 if all commands succeeded, 1 if not, and 130 if a signal ended the run. ``file``: path of the
    file; if it is empty, the settings name the file. ``again``: also run commands that have ended before. ``said``:
    settings given on the command line, by name. Some defaults differ from those of `start` (`intake/settings.py:
    DISPATCHER`). Raises SchedulerError, for example Taken if a scheduler already runs.
    """
    need_own_process()
    flags: dict[str, Any] = {**said, **({"commands_file": file} if file else {})}
    if state_file:
        flags["state_file"] = state_file
    settings = settings_for(flags, config or None, dispatcher=True)
    check_no_socket(settings.config.state_file)
    _check_file(settings.config.commands_file, named=settings.origin["commands_file"])
    client = SchedulerClient(settings.config.state_file)
    _check_no_scheduler(client)
    config = find_config(os.environ, config, os.getcwd()) or None
    if again:
        _requeue_all(client, settings, config)
    _requeue_stopped(client, settings, config)
    before = _look(client, settings)
    shown = _Shown(client) if sys.stdout.isatty() else None
    try:
        output = ForegroundOutput(write=shown.write if shown else None, follow=False)
    except RuntimeError as error:  # no thread could be started: the user's limit on processes
        raise SchedulerError(str(error), do="allow this user more processes (ulimit -u)") from None
    try:
        while True:
            daemon = DaemonProcess(settings, flags, output, dict(os.environ))
            if shown is not None:
                daemon.ready = shown.start
                if sys.stdin.isatty() and sys.stderr.isatty():
                    daemon.question = _Question(shown)
            ending = daemon.run(drain=True)
            # Jobs that were still being ended when the previous run stopped have ended in this one: run them as well.
            if daemon.stop_signal or not _requeue_stopped(client, settings, config):
                break
    except Taken:
        _check_no_scheduler(client)
        raise
    finally:
        output.close()
        if shown is not None:
            shown.stop()
    for line in ending.left:
        _print_line(line, sys.stderr)
    return _report_results(client, settings, before, stopped=bool(daemon.stop_signal))


def _check_file(path: str, named: str) -> None:
    """Raise UsageError if there is no commands file. (`start` would wait for the file; `run` does not.)"""
    if not os.path.isfile(path):
        what = "is not a file" if os.path.exists(path) else "no such commands file"
        do = "name the file: gpujob run --commands-file FILE (to run one command: gpujob submit -- COMMAND)"
        raise UsageError(
            what,
            where=path,
            do=do if named.startswith("default") else "create it: one shell command per line, # for comments",
        )


def _check_no_scheduler(client: SchedulerClient) -> None:
    """Raise Taken, with advice what to do, if a scheduler with this state file runs already."""
    view = client.overview(0)
    if view.alive and view.pid is not None:
        if view.dispatcher:
            do = "see its progress with gpujob status, or wait for its end with gpujob wait"
        else:
            do = "give it commands: gpujob submit -- COMMAND"
        raise Taken(
            f"a scheduler with this state file is already running (pid {view.pid})",
            where=client.places.state_file,
            do=do,
        )


@dataclass(frozen=True, slots=True)
class _Commands:
    """The commands in the file, grouped by what the store knows about them.

    ``jobs``: the newest job of each command. ``forgotten``: identities of commands that were read before; their jobs
    were deleted since. ``unread``: number of commands that were never read.
    """

    jobs: list[Job]
    forgotten: list[str]
    unread: int


def _look(client: SchedulerClient, settings: Settings, *, as_read: bool = False) -> _Commands:
    """Return the commands in the file, compared with the store. Raises SchedulerError if the file cannot be read.

    ``as_read``: do not open the file; use the lines that the scheduler has read from it and that still have jobs.
    """
    path = settings.config.commands_file
    newest = {job.identity: job for job in client.jobs()[0] if job.spec.source == "commands"}
    read = client.lines_read(path)
    if as_read:
        standing = [identity for identity in newest if identity in read]
    else:
        standing = commands_in(path, settings.config.trust_group)
    return _Commands(
        [newest[identity] for identity in standing if identity in newest],
        [identity for identity in standing if identity not in newest and identity in read],
        sum(identity not in newest and identity not in read for identity in standing),
    )


def _requeue_all(client: SchedulerClient, settings: Settings, config: str | None) -> None:
    """Requeue the ended jobs of the file. Commands whose jobs were deleted will be read again as new lines."""
    found = _look(client, settings)
    if found.forgotten or found.unread:
        read_as_new(client.places, settings.config.commands_file, found.forgotten)
    ids = tuple(job.id for job in found.jobs if job.state.ended)
    if ids:
        do(client, Requeue(ids), config)


def _requeue_stopped(client: SchedulerClient, settings: Settings, config: str | None) -> bool:
    """Requeue the jobs that the user ended after Ctrl-C in an earlier run. Return whether jobs were requeued.

    Jobs whose commands are no longer in the file are left out.
    """
    noted = client.remembered(INTERRUPTED)
    if not noted:
        return False
    known = client.known(json.loads(noted))
    standing = set(commands_in(settings.config.commands_file, settings.config.trust_group))
    ended = [job for job in known.values() if job.state is JobState.CANCELLED and job.identity in standing]
    if ended:
        do(client, Requeue(tuple(job.id for job in ended)), config)
    later = [job.id for job in known.values() if job.state in (JobState.CANCELLED, *HOLDING) and job not in ended]
    client.note(INTERRUPTED, json.dumps(later) if later else "")
    return bool(ended)


def _report_results(client: SchedulerClient, settings: Settings, before: _Commands, stopped: bool) -> int:
    """Print how the file's commands ended, and return the exit code of the run.

    ``before``: the commands as they were before the run; ``stopped``: a signal ended the run.
    """
    path = settings.config.commands_file
    name, unreadable = os.path.basename(path), False
    try:
        found = _look(client, settings)
    except SchedulerError as error:  # the file is gone or unreadable: report the commands read so far
        _print_line(f"{error}", sys.stderr)
        unreadable = True
        found = _look(client, settings, as_read=True)
    refused = [line for line in client.overview(0).refused if line.path == path]
    counts: dict[str, int] = {}
    for job in found.jobs:
        counts[job.state.value] = counts.get(job.state.value, 0) + 1
    for state, number in (("forgotten", len(found.forgotten)), ("not read", found.unread)):
        if number:
            counts[state] = number
    bad = [job for job in found.jobs if job.state.ended and not job.succeeded]
    for job in bad[:MOST_NAMED]:
        _print_line(f"job {job.id} ({job.spec.shown_words()}) {state_text(job)}; log {job.log or 'none'}")
    if len(bad) > MOST_NAMED:
        _print_line(f"… and {len(bad) - MOST_NAMED} more: gpujob status")
    over = {job.id for job in before.jobs if job.state.ended}
    over &= {job.id for job in found.jobs if job.state.ended}
    ran_before = f" ({len(over)} of them ended in earlier runs)" if over else ""
    all_told = sum(counts.values())
    _print_line(f"{name}: {all_told} command{'s' * (all_told != 1)}: {counts_text(counts)}{ran_before}")
    if refused:
        _print_line(f"{name}: {len(refused)} line{'s' * (len(refused) > 1)} refused: gpujob status")
    if stopped:
        _print_line("stopped before all commands had ended; to continue, start the same gpujob run again", sys.stderr)
        return STOPPED
    if found.forgotten:
        number = len(found.forgotten)
        which = "1 command was" if number == 1 else f"{number} commands were"
        _print_line(
            f"{which} not run again: forgotten (by gpujob reset or keep_finished) after an earlier run; "
            "to run the whole file again: gpujob run --again",
            sys.stderr,
        )
    if bad:
        ids = " ".join(str(job.id) for job in bad[:MOST_NAMED])
        _print_line(
            f"to run the failed jobs again: gpujob retry {ids}, then start the same gpujob run again", sys.stderr
        )
    left = [job for job in found.jobs if not job.state.ended]
    return 1 if bad or refused or left or found.forgotten or found.unread or unreadable else 0


def _print_line(text: str, stream: TextIO | None = None) -> None:
    """Print a line. A broken stream is redirected to /dev/null, so that the exit code does not change."""
    out = stream or sys.stdout
    try:
        print(safe(f"gpujob: {text}"), file=out, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())


class _Shown:
    """A progress bar on a terminal, below the printed lines. Its own thread reads the counts from the store."""

    def __init__(self, client: SchedulerClient) -> None:
        self.client = client
        self.question = ""  # repeated below everything printed, until it is answered
        self._progress: Progress | None = None
        self._task: Any = None
        self._up = False
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Show the bar. May be called again after `stop`."""
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
        """Remove the bar from the terminal and end its thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(3.0)
            self._thread = None
        with self._lock:
            if self._progress is not None and self._up:
                self._progress.stop()
            self._up = False

    def write(self, text: str) -> None:
        """Print ``text`` above the bar or above the open question."""
        with self._lock, contextlib.suppress(OSError, ValueError):  # stdout has no reader; the main log has the text
            if self._progress is not None and self._up:
                self._progress.console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
                return
            sys.stdout.write(f"\n{text}{self.question}" if self.question else text)
            sys.stdout.flush()

    def ask(self, question: str) -> None:
        """Print ``question``, and print it again below all later output. An empty ``question`` ends the repetition."""
        with self._lock, contextlib.suppress(OSError, ValueError):
            self.question = question
            sys.stdout.write(question)
            sys.stdout.flush()

    def _follow(self) -> None:
        while not self._stop.is_set():
            try:
                counts = self.client.overview(0).counts
            except (SchedulerError, OSError):
                counts = {}  # the store is read again after LOOK_S
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
    """The question after Ctrl-C: leave the running jobs, end them, or continue (`daemon/interrupt.py: Question`).

    If something is printed before the user answers, the question is printed again below.
    """

    fd = 0

    def __init__(self, shown: _Shown) -> None:
        self.shown = shown

    def heard(self) -> bool:
        try:
            return os.tcgetpgrp(self.fd) == os.getpgrp()  # a background process that reads its terminal is stopped
        except OSError:
            return False

    def ask(self, jobs: int) -> None:
        self.shown.stop()
        which = "1 job is" if jobs == 1 else f"{jobs} jobs are"
        print(
            f"\n{which} running. To continue later, start the same gpujob run again: it runs the jobs that "
            "have not ended and the jobs that you end now.",
            flush=True,
        )
        self.shown.ask("(l)eave them running, (e)nd them, (c)ontinue this run? [Ctrl-C again: leave] ")

    def answer(self) -> str:
        if not self.heard():  # put into the background after the question
            return GO_ON
        try:
            data = os.read(self.fd, 4096)
        except OSError:
            data = b""
        if not data:  # end of input: the terminal is gone
            return LEAVE
        found = ANSWERS.get(data.decode(errors="replace").strip().lower(), "")
        if not found:
            self.shown.ask("l, e or c: ")
        return found

    def over(self) -> None:
        self.shown.ask("")
        self.shown.start()
