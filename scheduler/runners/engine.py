"""Runner for a cluster: hands attempts to an engine such as Slurm or Ray, and learns from attempt records how they end.

The shim on the node (`node_shim.py`) writes the attempt record into a folder that this machine and the nodes share. The
record is the truth; the state in the engine is the second source. A thread talks to the engine, because each question
may take seconds: `EngineRunner` never blocks.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import queue
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial

from scheduler.core.allowed import nodes_and_types
from scheduler.core.engine import (
    Engine,
    EngineBusy,
    EngineDown,
    EngineJob,
    EngineNode,
    EngineRefused,
    JobPhase,
    Report,
    Submission,
)
from scheduler.core.gpu_snapshot import GpuSnapshot
from scheduler.core.job import Job, Process
from scheduler.core.launch import GPU_PLACEHOLDER, Launch
from scheduler.core.observations import Ended, EnginePlace, Lost, NeverRan, Observation, Readings, Started, Unclaimed
from scheduler.core.recovery import Record
from scheduler.runners import attempt_record, supervisor
from scheduler.runners.adoption import ending, not_started
from scheduler.system.private_files import new_private

SOON_S = 0.5  # after a submit or a cancel, the engine is asked again after this time
BOOT_OF_NODE = "node"  # in the records of a cluster, in place of the boot id: the processes are not of this machine
PATIENCE_S = 30.0  # longest wait for an ending in the record after the engine says that the job has ended
MOST_LATE = 2  # listings without a job before it counts as unknown to the engine
NODE_FILES = ("run_on_node.sh", "node_shim.py", "shim.py", "supervisor.py")


@dataclass(slots=True)
class _Attempt:
    """An attempt that the worker handles.

    ``data``: the first bytes of its record; ``submission``: None for an adopted attempt, which cannot be submitted again;
    ``launch``: path of the file from which the shim starts it; ``asked``: a submit may have reached the engine;
    ``sure``: the engine has listed or acknowledged the job; ``unlisted``: number of listings in a row without the job;
    ``since``: when the engine said that it ended, or when it was first not listed (monotonic seconds).
    """

    job: int
    attempt: int
    name: str
    path: str
    data: bytes
    submission: Submission | None = None
    launch: str = ""
    asked: bool = False
    sure: bool = False
    started: bool = False
    unlisted: int = 0
    since: float | None = None
    engine_job: str = ""
    stopping: bool = False

    @property
    def key(self) -> str:
        return f"{self.job}.{self.attempt}"


@dataclass(slots=True)
class _Shared:
    """Results of the worker for the daemon's thread; protected by ``lock``."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    facts: list[Observation] = field(default_factory=list)
    trouble: str = ""
    readings: Readings | None = None


class EngineRunner:
    """Runs jobs on a cluster. See `core/protocols.py: Runner`.

    ``folder``: the shared folder; ``prefix``: begins the names of all jobs of this scheduler in the engine;
    ``interval``: returns the seconds between two questions about the jobs; ``crash``: crash point of the shims, for
    tests. Raises OSError if the shared folder cannot be used.
    """

    def __init__(
        self,
        engine: Engine,
        attempts: str,
        folder: str,
        prefix: str,
        environ: Mapping[str, str],
        interval: Callable[[], float] = lambda: 2.0,
        crash: str = "",
    ) -> None:
        self.name, self._engine, self._attempts, self._prefix = engine.name, engine, attempts, prefix
        self._interval, self._crash = interval, crash
        self._environ = {name: value for name, value in environ.items() if not name.startswith("GPUJOB_CRASH")}
        self.reported = False  # whether the engine has told its nodes; then:
        self.shards: int | None = None  # shards of a GPU (`core/engine_placement.py: EngineRules`)
        self.cpus = 0  # of all nodes
        self.notes: Sequence[str] = ()  # warnings about the configuration of the engine
        self._tools = copy_tools(folder)
        self._launches = _private(os.path.join(folder, "launches"))
        self._outputs = _private(os.path.join(folder, "outputs"))
        self._shared = _Shared()
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # for the worker
        self._mine: dict[str, _Attempt] = {}  # by name; used by the worker only
        self._known: set[str] = set()  # keys of the attempts in hand; used by the daemon's thread only
        self._due = 0.0
        self._down_since: float | None = None  # monotonic seconds
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"{self.name}-engine", daemon=True)
        self._thread.start()

    # -- the daemon's thread ------------------------------------------------------------------------------

    def start(self, job: Job, launch: Launch) -> None:
        """Request the submit of an attempt."""
        made = self._attempt(job)
        made.launch = os.path.join(self._launches, made.name)
        nodes, types = nodes_and_types(job.allowed)
        made.submission = Submission(
            name=made.name,
            comment=f"gpujob:{job.attempt_key}",
            command=(os.path.join(self._tools, "run_on_node.sh"), sys.executable, self._tools, made.launch),
            output=os.path.join(self._outputs, made.name),
            need=job.need,
            priority=job.priority,
            time_limit_s=job.spec.time_limit_s,
            nodes=(launch.node,) if launch.node else tuple(nodes),
            type=types[0] if types else "",
        )
        self._known.add(made.key)
        self._work.put(partial(self._begin, made, launch))

    def flush(self) -> None:
        """Do nothing: the worker begins with each start at once."""

    def look(self) -> list[Observation]:
        """Return the observations since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)
        with self._shared.lock:
            found, self._shared.facts = self._shared.facts, []
        for one in found:
            if isinstance(one, (Ended, Lost, NeverRan, Unclaimed)):
                self._known.discard(f"{one.job}.{one.attempt}")
        return found

    def adopt(self, job: Job) -> list[Observation]:
        """Have the worker find out what became of an attempt in the store. `look` returns the observations later."""
        if job.attempt_key not in self._known:
            made = self._attempt(job)
            made.asked, made.started, made.engine_job = True, job.started_at is not None, job.engine_job
            self._known.add(made.key)
            self._work.put(partial(self._take_over, made))
        return []

    def stop(self, jobs: Iterable[tuple[Job, bool]]) -> None:
        """Have the engine end these attempts. Each pair: a job, and whether by SIGKILL."""
        for job, hard in jobs:
            self._work.put(partial(self._stop, self._name_of(job), hard))

    def watch_leftovers(self, key: str, job: int, attempt: int, processes: Sequence[Process]) -> None:
        """Do nothing: the engine ends all processes of a job before it gives its GPUs to another job."""

    def leave_alone(self, sessions: Set[int]) -> None:
        """Do nothing: no job is a process of this machine."""

    def descriptors(self) -> list[int]:
        """Return the descriptor of the pipe that the worker writes to."""
        return [self._read]

    def next_look(self) -> float | None:
        """Return None: the pipe tells about everything."""
        return None

    def supervisors(self) -> list[Process]:
        """Return an empty list: no job is a process of this machine."""
        return []

    def trouble(self) -> str:
        """Return why the engine takes no jobs; empty if it does."""
        with self._shared.lock:
            return self._shared.trouble

    def close(self) -> None:
        """End the worker; the jobs continue. A question to the engine that is under way is not waited for long."""
        if self._closed:
            return
        self._closed = True
        self._work.put(lambda: None)
        self._thread.join(timeout=5.0)
        if not self._thread.is_alive():  # else it may still write
            os.close(self._read)
            os.close(self._write)

    def ask_report(self) -> None:
        """Request a report of the nodes. `take_report` returns it later."""
        self._work.put(self._report)

    def take_report(self) -> Readings | None:
        """Return the report that was requested, as readings of the GPUs; None if there is none."""
        with self._shared.lock:
            found, self._shared.readings = self._shared.readings, None
        return found

    def _name_of(self, job: Job) -> str:
        """Return the name of an attempt in the engine.

        It contains a hash of what was submitted and when, which a rebuilt store has, too. So after a state folder was
        removed, a job with the number of an older job is not mistaken for the older job, which the engine may still list.
        """
        content = json.dumps([job.submitted_at, job.spec.as_dict()], sort_keys=True).encode()
        return f"{self._prefix}{job.id}-{hashlib.blake2b(content, digest_size=4).hexdigest()}-{job.attempt}"

    def _attempt(self, job: Job) -> _Attempt:
        data = attempt_record.blank(job, job.boot)
        path = os.path.join(self._attempts, job.attempt_key)
        return _Attempt(job.id, job.attempt, self._name_of(job), path, data)

    def _launch_text(self, made: _Attempt, launch: Launch) -> bytes:
        """Return the contents of the file from which the shim on the node starts the attempt. Raises OSError."""
        base = supervisor.environment(self._environ, launch.env_file, {})  # type: ignore[no-untyped-call]
        values = {
            "record": made.path, "data": base64.b64encode(made.data).decode(), "boot": BOOT_OF_NODE,
            "argv": list(launch.argv), "cwd": launch.cwd, "umask": launch.umask, "base": base, "changes": dict(launch.environment),
            "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0], "crash": self._crash, "tied": self._engine.tied,
            "log": launch.log, "errors": launch.streams.errors, "placeholder": GPU_PLACEHOLDER,
        }  # fmt: skip
        return json.dumps(values).encode()

    # -- the worker ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed:
            wait = None if not self._mine else max(0.0, self._due - time.monotonic())
            try:
                self._work.get(timeout=wait)()
            except queue.Empty:
                pass
            except Exception as error:  # noqa: BLE001  the jobs need this thread
                self._fail(error)
            if self._mine and not self._closed and time.monotonic() >= self._due:
                try:
                    self._poll()
                except Exception as error:  # noqa: BLE001
                    self._fail(error)
                    self._due = time.monotonic() + self._interval()

    def _fail(self, error: Exception) -> None:
        what = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) else f"internal error {error!r}"
        self._say(f"the cluster cannot be used at present: {what}")

    def _begin(self, attempt: _Attempt, launch: Launch) -> None:
        self._mine[attempt.name] = attempt
        try:
            self._write_launch(attempt.launch, self._launch_text(attempt, launch))
        except OSError as error:
            why = f"its command and environment cannot be passed to a node: {error.strerror} ({error.filename})"
            self._settled(attempt, NeverRan(attempt.job, attempt.attempt, why, False, time.time()))
            return
        self._submit(attempt)

    def _take_over(self, attempt: _Attempt) -> None:
        self._mine.setdefault(attempt.name, attempt)
        self._due = 0.0

    def _tell(self, *facts: Observation) -> None:
        with self._shared.lock:
            self._shared.facts += facts
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: the daemon will look anyway
            os.write(self._write, b"x")

    def _say(self, trouble: str) -> None:
        with self._shared.lock:
            news, self._shared.trouble = trouble != self._shared.trouble, trouble
        if news:
            self._wake()

    def _settled(self, attempt: _Attempt, *facts: Observation) -> None:
        self._mine.pop(attempt.name, None)
        for path in (attempt.launch, os.path.join(self._outputs, attempt.name)):
            if path:
                with contextlib.suppress(OSError):
                    os.unlink(path)
        self._tell(*facts)

    @staticmethod
    def _write_launch(path: str, text: bytes) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        with os.fdopen(new_private(path), "wb") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())

    def _submit(self, attempt: _Attempt) -> None:
        assert attempt.submission is not None
        attempt.asked, attempt.since, attempt.unlisted = True, None, 0
        try:
            attempt.engine_job = self._engine.submit(attempt.submission)
        except EngineRefused as error:
            self._settled(attempt, NeverRan(attempt.job, attempt.attempt, str(error), True, time.time()))
            return
        except EngineBusy as error:
            attempt.asked = False
            self._say(str(error))
        except EngineDown as error:  # the engine may have the job: it is looked for before it is submitted again
            self._say(str(error))
        else:
            attempt.sure = True
            self._say("")
        self._due = min(self._due or time.monotonic() + SOON_S, time.monotonic() + min(SOON_S, self._interval()))

    def _stop(self, name: str, hard: bool) -> None:
        attempt = self._mine.get(name)
        if attempt is not None:
            attempt.stopping = True
            if attempt_record.claim_unstarted(attempt.path, attempt.data, time.time_ns()):
                # No copy of it can start any more, even if the engine does not answer, or starts a job that was stopped.
                self._settled(attempt, Unclaimed(attempt.job, attempt.attempt))
                if not attempt.asked:
                    return
        try:
            self._engine.cancel(name, hard)
        except EngineDown as error:
            self._say(str(error))  # the daemon sends the next signal after some time
        self._due = time.monotonic() + min(SOON_S, self._interval())

    def _poll(self) -> None:
        begun = time.monotonic()
        try:
            listed = self._engine.jobs(self._prefix)
        except EngineDown as error:
            self._say(str(error))
            self._down_since = begun if self._down_since is None else self._down_since
            if begun - self._down_since > self._engine.gone_after_s:
                self._lose_all(f"{error}, for {begun - self._down_since:.0f} s: a head that is gone has ended its jobs")
            self._due = time.monotonic() + self._interval()
            return
        self._say("")
        self._down_since = None
        unknown = []
        for attempt in list(self._mine.values()):
            if not attempt.asked:
                continue  # a refused submit may be listed as a failed job of this name
            found = listed.get(attempt.name)
            if found is not None:
                attempt.sure, attempt.unlisted = True, 0
                attempt.engine_job = found.engine_job
                self._look_at(attempt, found, begun)
            else:
                attempt.unlisted += 1
                unknown.append(attempt)
        if unknown:
            self._look_at_unknown(unknown, begun)
        again = [one for one in self._mine.values() if not one.asked and one.submission is not None]
        for attempt in again:
            if self._closed or not self._work.empty():
                break  # requests of the daemon come first; the rest follows at the next poll
            self._submit(attempt)
            if not attempt.sure:
                break  # the engine still takes no jobs
        self._due = time.monotonic() + self._interval()

    def _lose_all(self, why: str) -> None:
        """Settle the attempts that started, because the engine is gone. Attempts with an ending in the record have ended."""
        for attempt in list(self._mine.values()):
            record = attempt_record.read(attempt.path)
            if record.kind is Record.ENDED:
                facts = self._start_of(attempt, record, None)
                self._settled(attempt, *facts, self._end_of(attempt, record, ""))
            elif record.kind in (Record.CLAIMED, Record.RUNNING, Record.BROKEN):
                self._settled(attempt, Lost(attempt.job, attempt.attempt, why, time.time()))

    def _look_at(self, attempt: _Attempt, found: EngineJob, now: float) -> None:
        if found.phase is JobPhase.QUEUED:
            return
        record = attempt_record.read(attempt.path)
        facts = self._start_of(attempt, record, found)
        if record.kind is Record.ENDED:
            note = ""
            if found.ended_badly and not attempt.stopping:
                note = f"{self._engine.title} reports {found.word}; the attempt record, which says how the job ended, counts"
            self._settled(attempt, *facts, self._end_of(attempt, record, note))
            return
        if record.kind is Record.NEVER_RAN:
            self._settled(attempt, *facts, not_started(attempt.job, attempt.attempt, record, time.time()))
            return
        if facts:
            self._tell(*facts)
        if found.phase is not JobPhase.ENDED:
            return
        attempt.since = now if attempt.since is None else attempt.since
        # A job that was cancelled is `cancelled`, whatever its record will say. One that has no record did not start.
        soon = attempt.stopping or record.kind is Record.NONE
        patience = min(PATIENCE_S, 5 * self._interval()) if soon else PATIENCE_S
        if not found.lost and now - attempt.since < patience:
            return  # a network file system may show the record late
        if record.kind is Record.NONE:
            self._never_began(attempt, found)
        else:
            self._end_without_record(attempt, found)

    def _start_of(
        self, attempt: _Attempt, record: attempt_record.AttemptRecord, found: EngineJob | None
    ) -> list[Observation]:
        """Return the observation that the attempt has started, unless it was reported."""
        if attempt.started or record.started_at is None:
            return []
        attempt.started = True
        place = attempt_record.place_of(attempt.path)
        node = place.get("node") or (found.node if found is not None else "") or place.get("host", "")
        cards = tuple(f"{node}/{card.strip()}" for card in place.get("gpus", "").split(",") if card.strip())
        partition = place.get("partition") or (found.partition if found is not None else "")
        where = EnginePlace(node, cards, place.get("engine_job") or attempt.engine_job, partition)
        return [Started(attempt.job, attempt.attempt, None, record.started_at, place=where)]

    def _end_of(self, attempt: _Attempt, record: attempt_record.AttemptRecord, note: str) -> Observation:
        at = record.ended_at or time.time()
        ended = ending(attempt.job, attempt.attempt, record.how, record.code, at, (), record.oom_kills)
        return replace(ended, note=note) if note else ended

    def _never_began(self, attempt: _Attempt, found: EngineJob) -> None:
        """Settle an attempt that the engine has ended and that has no record."""
        if not attempt_record.claim_unstarted(attempt.path, attempt.data, time.time_ns()):
            return  # its shim has just claimed it: look again at the next poll
        if attempt.stopping:
            self._settled(attempt, Unclaimed(attempt.job, attempt.attempt))
            return
        if found.word.startswith("CANCELLED") or found.word == "STOPPED":
            why = f"it was cancelled in {self._engine.title} before it started (job {found.engine_job} there)"
            self._settled(attempt, NeverRan(attempt.job, attempt.attempt, why, True, time.time()))
            return
        said = self._said_by(attempt)
        why = f"{self._engine.title} ended it before it started: {found.word}{f' ({said})' if said else ''}"
        self._settled(attempt, NeverRan(attempt.job, attempt.attempt, why, False, time.time()))

    def _said_by(self, attempt: _Attempt) -> str:
        """Return the last line of the output before the job had its own log."""
        try:
            text = self._engine.logs(attempt.name)
        except EngineDown:
            return ""
        if not text:
            with contextlib.suppress(OSError), open(os.path.join(self._outputs, attempt.name), "rb") as stream:
                text = stream.read(1 << 16).decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1][:300] if lines else ""

    def _end_without_record(self, attempt: _Attempt, found: EngineJob) -> None:
        """Settle an attempt that started and whose ending only the engine knows."""
        title, where = self._engine.title, f" on node {found.node}" if found.node else ""
        if found.lost or (found.exit_code is None and found.signal is None):
            why = f"{title} reports {found.word}{where}, and the attempt record does not say how the job ended"
            self._settled(attempt, Lost(attempt.job, attempt.attempt, why, time.time()))
            return
        note = f"{title} reports {found.word}; the attempt record has no ending"
        self._settled(
            attempt, Ended(attempt.job, attempt.attempt, found.exit_code, found.signal, time.time(), note=note)
        )

    def _look_at_unknown(self, unknown: Sequence[_Attempt], now: float) -> None:
        """Settle attempts that the engine does not list."""
        asked = []
        for attempt in unknown:
            record = attempt_record.read(attempt.path)
            if record.kind is Record.ENDED:
                facts = self._start_of(attempt, record, None)
                self._settled(attempt, *facts, self._end_of(attempt, record, ""))
            elif record.kind is Record.NEVER_RAN:
                self._settled(attempt, not_started(attempt.job, attempt.attempt, record, time.time()))
            elif record.kind is not Record.NONE:
                attempt.since = now if attempt.since is None else attempt.since
                asked.append(attempt)
            elif attempt.submission is not None and not attempt.sure:
                attempt.asked = False  # the answer to its submit was lost, and the engine does not have it
            elif attempt.unlisted >= MOST_LATE and attempt_record.claim_unstarted(
                attempt.path, attempt.data, time.time_ns()
            ):
                self._settled(attempt, Unclaimed(attempt.job, attempt.attempt))
        late = [one for one in asked if one.since is not None and (one.stopping or now - one.since >= PATIENCE_S)]
        if not late:
            return
        try:
            past = self._engine.history([attempt.name for attempt in late])
        except EngineDown:
            past = {}
        for attempt in late:
            found = past.get(attempt.name)
            if found is not None and found.phase is JobPhase.ENDED:
                self._end_without_record(attempt, found)
                continue
            why = f"{self._engine.title} no longer knows the job, and its attempt record does not say how it ended"
            self._settled(attempt, Lost(attempt.job, attempt.attempt, why, time.time()))

    def _report(self) -> None:
        begun = time.monotonic()
        try:
            report = self._engine.report()
            self.shards, self.cpus, self.reported = report.shards, sum(node.cpus for node in report.nodes), True
            self.notes = report.notes
            found = readings_of(report, begun)
        except EngineDown as error:
            found = Readings(begun, problem=str(error))
        with self._shared.lock:
            self._shared.readings = found
        self._wake()


def readings_of(report: Report, at: float) -> Readings:
    """Return a report of an engine as readings of GPUs. ``at``: monotonic seconds."""
    return Readings(at, tuple(snapshot for node in report.nodes for snapshot in _snapshots(node)))


def _snapshots(node: EngineNode) -> Iterable[GpuSnapshot]:
    for number, kind in enumerate(node.types):
        yield GpuSnapshot(
            f"{node.name}/{number}", number, kind, problem=node.problem, by_engine=True, in_use=number in node.used,
            node=node.name, partition=node.partition,
        )  # fmt: skip


def copy_tools(folder: str) -> str:
    """Copy the files that nodes run into ``folder``, and return the folder of the copies.

    The folder is named after their contents, so an upgrade of gpujob does not change files that running jobs use.
    """
    here = os.path.dirname(os.path.abspath(__file__))
    texts = {}
    for name in NODE_FILES:
        with open(os.path.join(here, name), "rb") as stream:
            texts[name] = stream.read()
    digest = hashlib.blake2b(b"".join(texts[name] for name in NODE_FILES), digest_size=6).hexdigest()
    made = _private(os.path.join(folder, f"node-{digest}"))
    for name, text in texts.items():
        path = os.path.join(made, name)
        if not os.path.exists(path):
            draft = f"{path}.{os.getpid()}"
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft)
            with os.fdopen(new_private(draft), "wb") as stream:
                stream.write(text)
            os.chmod(draft, 0o700 if name.endswith(".sh") else 0o600)
            os.replace(draft, path)
    return made


def _private(path: str) -> str:
    os.makedirs(path, mode=0o700, exist_ok=True)
    return path
