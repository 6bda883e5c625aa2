"""GPU reader for NVIDIA GPUs: asks NVML, and nvidia-smi if NVML does not answer.

A separate process asks, so the daemon never has to wait for the driver.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from scheduler.core.errors import NoGpuData
from scheduler.core.gpu_faults import Xid
from scheduler.core.gpu_snapshot import GpuProcess, GpuSnapshot
from scheduler.core.observations import Readings
from scheduler.gpus import reader_process
from scheduler.system.proc import environment_entries

DEADLINE_S = 5.0  # limit for one answer; then the reader process is killed (age limit of readings: core/admission.py)
FIRST_DEADLINE_S = 15.0  # limit for the first answer: a driver that no process uses takes seconds to wake up
PATIENCE_S = (
    3.0  # time after which a killed process that still exists counts as stuck in the driver; a busy machine may be slow
)
LOOK_AGAIN_S = 0.05  # first wait between two looks at a killed process; doubles, as a look may search all processes
MEANWHILE_S = 0.2  # time between two calls of ``meanwhile`` in `NvidiaProbe.first`
CLOSE_S = 0.2  # `NvidiaProbe.close` waits this long for the reader process to die
SLOW_S = 2.0  # `NvidiaProbe.first` calls ``slow`` after this time
READER = "GPUJOB_READER"  # variable in the environment of a reader process and of what it starts
LONGEST_WITHOUT_NVML_S = 3600.0  # upper limit of the wait that begins with NVML_AGAIN_S and doubles
NVML_AGAIN_S = 60.0  # wait until NVML is tried again while nvidia-smi answers
LONGEST_ANSWER = 4 << 20
WAYS = {"nvml": "NVML", "smi": "nvidia-smi"}


@dataclass(slots=True)
class _Reader:
    """A reader process. ``way``: nvml or smi; ``into``: pipe to its stdin; ``out``: pipe from its stdout."""

    way: str
    pid: int
    pidfd: int
    into: int
    out: int
    token: str  # value of READER in its environment
    answered: bool = False
    text: bytes = b""
    links: Mapping[str, Mapping[str, int]] | None = None  # UUID → UUID → link; None: not told


class NvidiaProbe:
    """GPU reader for all GPUs that the driver shows; implements `core/protocols.py: Probe`.

    A reader process that does not answer in time is killed. If the process hangs in the driver and does not die, no
    other reader process is started until it is dead. So at most one reader process hangs at any time.
    """

    def __init__(self, environ: Mapping[str, str], deadline_s: float = DEADLINE_S) -> None:
        self.environ = {name: value for name, value in environ.items() if not name.startswith("GPUJOB_")}
        self.deadline_s = deadline_s
        self.absent = False  # the last reading failed because there is no driver at all
        self.unasked = False  # for the last reading, no reader process for NVML could be started
        self.package = ""  # name of the Python package for NVML if it could not be imported
        self.way = ""  # source of the last reading: nvml or smi; empty: it failed
        self._epoll = select.epoll()
        self._again_s = LOOK_AGAIN_S
        self._stuck_at = 0.0  # when the killed processes count as stuck (monotonic seconds)
        self._reader: _Reader | None = None
        self._stuck: list[_Reader] = []
        self._asked_at: float | None = None
        self._due = 0.0
        self._ways: list[str] = []
        self._failed: list[tuple[str, str, bool]] = []
        self._no_nvml = False  # at the last try NVML was absent, or did not answer in time
        self._nvml_wait = NVML_AGAIN_S
        self._nvml_at = 0.0
        self._spawned = 0
        self._answered = False  # a reader process has answered once: the driver is awake
        self._xids: list[Xid] = []  # told since the last result of `look`
        self._hidden: set[int] = set()  # pids of reader processes that may still live

    # -- asking -------------------------------------------------------------------------------------------

    def ask(self) -> None:
        """Begin a reading of the GPUs, unless a reading is under way."""
        if self._asked_at is not None:
            return
        now = time.monotonic()
        self._asked_at = now
        self._failed = []
        self.unasked, self.package = False, ""
        if self._no_nvml and now - self._nvml_at < self._nvml_wait:
            self._ways = ["smi", "nvml"]
        else:
            self._ways = ["nvml", "smi"]
        self._next_way(now)

    def _next_way(self, now: float) -> None:
        """Ask NVML or nvidia-smi. ``_ways`` lists which of the two were not tried yet; the first entry is asked.

        If a killed reader process has not died yet, ask nothing now. The next `look` tries again.
        """
        while True:
            current = self._reader
            if current is not None and (current.way not in self._ways[:1] or _ended(current.pidfd)):
                self._end(current)
            self._bury()
            if self._dying(now):
                self._due = min(now + self._again_s, self._stuck_at)
                self._again_s *= 2
                return
            if not self._ways:
                return
            way = self._ways.pop(0)
            if self._stuck:
                self._failed.append(
                    (
                        way,
                        f"the reader process, pid {self._stuck[0].pid}, hangs in the driver and cannot be killed",
                        False,
                    )
                )
                continue
            if way == "nvml":
                self._nvml_at = now
            elif shutil.which("nvidia-smi", path=self.environ.get("PATH", os.defpath)) is None:
                self._failed.append((way, reader_process.NO_SMI, True))  # start no process: GPUtil loads slowly
                continue
            try:
                if self._reader is None:
                    self._reader = self._spawn(way)
                os.write(self._reader.into, b"read\n")
            except OSError as error:
                if self._reader is not None:
                    self._end(self._reader)
                self.unasked = self.unasked or way == "nvml"
                self._failed.append((way, f"the reader process cannot be started: {error.strerror or error}", False))
                continue
            self._due = now + self._limit(self._reader)
            return

    def _dying(self, now: float) -> bool:
        """Return whether a killed reader process still exists, and was killed so recently that it may still die."""
        return bool(self._stuck) and now < self._stuck_at

    def _spawn(self, way: str) -> _Reader:
        self._spawned += 1
        token = f"{os.getpid()}-{self._spawned}"
        theirs_in, into = os.pipe2(os.O_CLOEXEC)
        out, theirs_out = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            pid = os.posix_spawn(
                sys.executable,
                [sys.executable, reader_process.__file__, way],
                {**self.environ, READER: token},
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, theirs_in, 0),
                    (os.POSIX_SPAWN_DUP2, theirs_out, 1),
                    (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
                ],
                setsid=True,
                setsigmask=(),
                setsigdef=[n for n in range(1, 32) if n not in (signal.SIGKILL, signal.SIGSTOP)],
            )
        except OSError:
            os.close(into)
            os.close(out)
            raise
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        self._hidden.add(pid)
        made = _Reader(way, pid, os.pidfd_open(pid), into, out, token)
        self._epoll.register(out, select.EPOLLIN)
        return made

    def _end(self, gone: _Reader) -> None:
        """Kill a reader process and its process group, and close its pipes. `_bury` later reaps the process."""
        self._epoll.unregister(gone.out)
        os.close(gone.into)
        os.close(gone.out)
        if not _ended(gone.pidfd):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(gone.pid, signal.SIGKILL)  # it leads its group; unreaped, so no other group has this id
        self._stuck.append(gone)
        self._stuck_at, self._again_s = time.monotonic() + PATIENCE_S, LOOK_AGAIN_S
        if self._reader is gone:
            self._reader = None

    def _bury(self) -> None:
        for gone in list(self._stuck):
            if _ended(gone.pidfd) and not (gone.way == "smi" and _started_by(gone.token)):
                os.close(gone.pidfd)
                self._stuck.remove(gone)
                self._hidden.discard(gone.pid)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(gone.pid, os.WNOHANG)

    # -- hearing ------------------------------------------------------------------------------------------

    def descriptors(self) -> list[int]:
        """Return the epoll descriptor that watches the reader process."""
        return [self._epoll.fileno()]

    def next_look(self) -> float | None:
        """Return when to call `look` even if no descriptor is readable (monotonic seconds); None if no reading runs."""
        return self._due if self._asked_at is not None else None

    def sessions(self) -> set[int]:
        """Return the POSIX sessions of the reader processes. Processes in these sessions belong to no job."""
        return self._hidden

    def look(self) -> Readings | None:
        """Return the result of the requested reading; None while the reading runs or if none was requested.

        The result is a failure if neither NVML nor nvidia-smi answered.
        """
        if self._asked_at is None:
            if self._reader is not None and _ended(self._reader.pidfd):
                self._end(self._reader)  # otherwise its closed pipe would wake up the daemon again and again
                self._bury()
            return None
        now = time.monotonic()
        current = self._reader
        if current is None and now < self._due:
            return None  # the killed process is not dead yet
        if current is not None:
            answer = self._receive(current)
            if answer is None and now < self._due:
                return None
            if answer is not None and "gpus" in answer:
                return self._received(current, answer)
            if answer is None:
                waited = now - self._due + self._limit(current)
                self._failed.append((current.way, f"no answer within {waited:.0f} s", False))
                if current.way == "nvml":  # try less often: each try takes the whole deadline
                    self._nvml_wait = min(
                        LONGEST_WITHOUT_NVML_S, self._nvml_wait * 2 if self._no_nvml else NVML_AGAIN_S
                    )
                    self._no_nvml = True
            else:
                absent = bool(answer.get("absent"))
                self._failed.append((current.way, str(answer.get("trouble", "unreadable answer")), absent))
                if current.way == "nvml":
                    self._no_nvml, self.package = absent, str(answer.get("package", ""))
            self._end(current)
        self._next_way(now)
        if self._reader is not None or self._ways or self._dying(now):
            return None
        asked, self._asked_at = self._asked_at, None
        self.way = ""
        self.absent = all(absent for _, _, absent in self._failed)
        # If only NVML or only nvidia-smi is absent, only the failure of the other one is reported.
        told = [f for f in self._failed if not f[2]] or self._failed
        why = "; ".join(f"{WAYS[way]}: {text}" for way, text, _ in told)
        return Readings(asked, problem=why, xids=self._take_xids())

    def _limit(self, current: _Reader) -> float:
        return self.deadline_s if current.answered or self._answered else max(self.deadline_s, FIRST_DEADLINE_S)

    def _receive(self, current: _Reader) -> dict[str, Any] | None:
        """Return the answer of a reader process; None while the answer is incomplete.

        If the process ended without an answer or the answer is unreadable, ``trouble`` in the result gives the reason.
        """
        while True:
            try:
                data = os.read(current.out, 1 << 16)
            except BlockingIOError:
                return None
            current.text += data
            while b"\n" in current.text:
                line, _, current.text = current.text.partition(b"\n")
                try:
                    answer = json.loads(line)
                except ValueError:
                    return {"trouble": "unreadable answer"}
                if not isinstance(answer, dict):
                    return {"trouble": "unexpected form of answer"}
                if "xids" not in answer:
                    return answer
                self._xids += [Xid(str(uuid), int(number), float(at)) for uuid, number, at in answer["xids"]]
            if not data:
                return {"trouble": "the reader process ended without an answer"}
            if len(current.text) > LONGEST_ANSWER:
                return {"trouble": "answer too long"}

    def _received(self, current: _Reader, answer: dict[str, Any]) -> Readings:
        asked, self._asked_at = self._asked_at or 0.0, None
        current.answered, self.way = True, current.way
        self.absent, self._answered = False, True
        if current.way == "nvml":
            self._no_nvml, self._nvml_wait = False, NVML_AGAIN_S
        if "links" in answer:
            current.links = answer["links"]
        gpus = tuple(_reading(gpu, current.links) for gpu in answer["gpus"])
        return Readings(asked, gpus, xids=self._take_xids(), watches_errors=current.way == "nvml")

    def _take_xids(self) -> tuple[Xid, ...]:
        found, self._xids = tuple(self._xids), []
        return found

    # -- at the start -------------------------------------------------------------------------------------

    def first(self, slow: Callable[[], None] | None = None, meanwhile: Callable[[], None] | None = None) -> Readings:
        """Wait for the first reading and return it. If it fails, raise NoGpuData with the reasons.

        ``slow``: called once if the driver is slow; ``meanwhile``: called several times a second during the wait.
        """
        self.ask()
        tell_at = time.monotonic() + SLOW_S
        told = False
        while True:
            found = self.look()
            if meanwhile is not None:
                meanwhile()
            if found is not None:
                break
            now = time.monotonic()
            if slow is not None and not told and now >= tell_at:
                told = True
                slow()
            due = self.next_look() or 0.0
            until = min(due, tell_at) if slow is not None and not told else due
            self._epoll.poll(max(0.001, min(until - now, MEANWHILE_S)))
        if found.problem:
            raise NoGpuData(
                f"no GPU can be seen ({found.problem})", do="declare GPUs with --gpus N, or repair the driver"
            )
        return found

    def close(self) -> None:
        """End the reader process."""
        if self._reader is not None:
            self._end(self._reader)
        limit = time.monotonic() + CLOSE_S
        while self._stuck and time.monotonic() < limit:
            select.select([self._stuck[0].pidfd], [], [], CLOSE_S)
            self._bury()
        for gone in self._stuck:
            os.close(gone.pidfd)
        self._epoll.close()


def _started_by(token: str) -> bool:
    """Return whether a process with this ``token`` in its environment still exists.

    The reader process gives the token to the nvidia-smi process that it starts. The nvidia-smi process may hang in the
    driver, where it cannot be killed, and so outlive the reader process.
    """
    mark = f"{READER}={token}".encode()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if mark in environment_entries(int(name)):
                    return True
            except OSError:
                continue  # it has ended, or belongs to another user
    return False


def _ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 0)[0])


def _reading(gpu: dict[str, Any], links: Mapping[str, Mapping[str, int]] | None) -> GpuSnapshot:
    processes = gpu["processes"]
    return GpuSnapshot(
        uuid=gpu["uuid"],
        ordinal=gpu["ordinal"],
        name=gpu["name"],
        memory_total_mib=_whole(gpu["total"]),
        memory_used_mib=_whole(gpu["used"]),
        load=None if gpu["load"] is None else min(1.0, max(0.0, gpu["load"] / 100)),
        temperature_c=_whole(gpu["temperature"]),
        reserved_mib=_whole(gpu["reserved"]),
        power_w=gpu["power"],
        energy_j=gpu["energy"],
        processes=None
        if processes is None
        else tuple(
            GpuProcess(pid, memory, computes, None if load is None else load / 100)
            for pid, memory, computes, load in processes
        ),
        lost=gpu["lost"],
        problem=gpu["problem"],
        errors=gpu["errors"],
        links=None if links is None else links.get(gpu["uuid"]),
        mig=gpu["mig"],
        profile=gpu["profile"],
        parent=gpu["parent"],
    )


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
