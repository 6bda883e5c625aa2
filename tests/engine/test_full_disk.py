"""A turn that cannot be written is no defect of ours, and is said as what it is."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from scheduler.engine.loop import House
from scheduler.store.places import Places


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/x/attempts/7.1"), "/x/attempts/7.1: cannot be written: No space left on device; free some space;"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "/.gpujob: cannot be written: Disk quota exceeded; free some space;"),
        (OSError(errno.EBADF, "Bad file descriptor"), "a defect of gpujob, please report it: OSError("),
        (KeyError("x"), "a defect of gpujob, please report it: KeyError("),
    ],
)  # fmt: skip
def test_a_full_disk_is_no_defect(tmp_path: Path, error: Exception, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """P3: found by the soak: an attempt could not be taken back after a restart, and that was called a defect."""
    house = House.__new__(House)
    house.places = Places(str(tmp_path / "gpu_scheduler_state.json"))
    house.broken_until = house.broken_times = 0
    house.broken = None
    house.flush_log = lambda: None
    house.history = None
    told: list[str] = []

    def fail(_house: House, _now: object) -> None:
        raise error

    monkeypatch.setattr(House, "_tick", fail)
    monkeypatch.setattr(House, "say", lambda _house, text, *_, **__: told.append(text))
    house.tick()
    assert len(told) == 1 and said in told[0] and house.broken_until > 0
