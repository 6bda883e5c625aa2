"""Tests of failed passes: a full disk is not reported as a defect of the program, and the daemon continues."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.core.config import Config
from scheduler.daemon.context import Context
from scheduler.daemon.loop import Daemon
from scheduler.daemon.managed_gpus import ManagedGpus
from scheduler.daemon.program_lookup import ProgramLookup
from scheduler.runners.direct import DirectRunner
from scheduler.store.database import Database
from scheduler.store.paths import Places


class Watcher:
    """A file watcher without events."""

    def changed(self) -> set[str]:
        return set()

    def rearm(self) -> None:
        pass


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def daemon(tmp_path: Path, told: list[str]) -> Iterator[Daemon]:
    """Yield a daemon that has no GPUs, no watched files and no jobs."""
    places = Places(str(tmp_path / "gpu_scheduler_state.json"))
    places.make()
    db = Database(places)
    config = Config(state_file=places.state_file)
    context = Context(places, config, db, {}, str(tmp_path), lambda message: told.append(message.text))
    runner = DirectRunner(places.attempts, places.state_file, {}, str(tmp_path / "errors"), 1024)
    made = Daemon(context, runner, Watcher(), ManagedGpus(context, [], [], None, None), {}, ProgramLookup(context))  # type: ignore[arg-type]
    yield made
    made.close()
    runner.close()
    db.close()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/x/attempts/7.1"), "/x/attempts/7.1: cannot be written: No space left on device; free some space;"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "/.gpujob: cannot be written: Disk quota exceeded; free some space;"),
        (OSError(errno.EBADF, "Bad file descriptor"), "internal error of gpujob, please report it: OSError("),
        (KeyError("x"), "internal error of gpujob, please report it: KeyError("),
    ],
)  # fmt: skip
def test_a_full_disk_is_not_reported_as_a_defect(
    daemon: Daemon, told: list[str], error: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P3: If a pass fails because the disk is full, the report names the path and a remedy.

    Another error is reported as a defect of the program.
    """

    def fail(_daemon: Daemon, _now: object) -> None:
        raise error

    monkeypatch.setattr(Daemon, "_observe", fail)
    daemon.tick()
    assert len(told) == 1 and said in told[0] and daemon.outage.lasts


def test_the_daemon_recovers_after_a_thousand_failed_passes(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a long outage with more than a thousand failed passes, the next pass without an error ends the outage."""

    def fail(_daemon: Daemon, _now: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("scheduler.daemon.store_outage.LONGEST_BREAK_S", 0.0)
    with monkeypatch.context() as full:
        full.setattr(Daemon, "_observe", fail)
        for _ in range(1100):
            daemon.tick()
    daemon.tick()
    assert not daemon.outage.lasts


def test_an_error_of_a_daemon_part_after_each_pass_is_logged_once(
    daemon: Daemon, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a part of the daemon fails after each pass, the error is logged once, and requests are still accepted."""

    class Failing:
        fails = True

        def step(self, _now: object) -> None:
            if self.fails:
                raise OSError(errno.ENOSPC, "No space left on device", "/x/list")

        def due(self) -> float:
            return 0.0

        def close(self) -> None:
            pass

    monkeypatch.setattr(Daemon, "_observe", lambda _daemon, _now: None)
    part = Failing()
    daemon.parts.append(part)
    for _ in range(5):
        daemon.tick()
        assert daemon.outage.lasts and not daemon.outage.refuses
        daemon.outage._until = 1e-9  # the next try is due
    assert len(told) == 1 and "/x/list: cannot be written" in told[0]
    part.fails = False
    daemon.tick()
    assert told[1:] == ["the scheduler can use the store again"]
