"""Tests of file locks."""

from __future__ import annotations

import threading
from pathlib import Path

from scheduler.system.locks import lock_within, try_lock, unlock


def test_a_lock_is_held_by_one_open_file_until_it_is_released(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    with path.open() as one, path.open() as other:
        assert try_lock(one.fileno()) and try_lock(one.fileno())
        assert not try_lock(other.fileno()) and not lock_within(other.fileno(), 0.01)
        unlock(one.fileno())
        assert try_lock(other.fileno())


def test_a_lock_whose_file_is_closed_while_waiting_is_acquired(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    held = path.open()
    assert try_lock(held.fileno())
    threading.Timer(0.05, held.close).start()
    with path.open() as other:
        assert lock_within(other.fileno(), 30)
