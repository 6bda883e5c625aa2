"""The main log: one record a line, rotated, and never somebody else's descriptor."""

from __future__ import annotations

import os
from pathlib import Path

from scheduler.engine.telling import MainLog, Said


def test_one_record_a_line_and_one_write_a_flush(tmp_path: Path) -> None:
    """S17, S18: a line break in a name makes no second record."""
    log = MainLog(str(tmp_path / "log"))
    log(Said("one\ntwo \x1b[2J"))
    log(Said("three", 30))
    assert (tmp_path / "log").read_text() == ""
    log.flush()
    first, second = (tmp_path / "log").read_text().splitlines()
    assert first.endswith(r"INFO one\x0atwo \x1b[2J") and second.endswith("WARNING three")
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600
    log.close()


def test_rotation_keeps_five(tmp_path: Path) -> None:
    log = MainLog(str(tmp_path / "log"), most_bytes=100)
    for n in range(20):
        log(Said(f"record {n} {'x' * 60}"))
        log.flush()
    log.close()
    assert sorted(os.listdir(tmp_path)) == ["log", "log.1", "log.2", "log.3", "log.4", "log.5"]
    assert "record 19" in (tmp_path / "log").read_text() and "record 18" in (tmp_path / "log.1").read_text()


def test_a_removed_log_is_made_again_and_no_descriptor_is_lost(tmp_path: Path) -> None:
    log = MainLog(str(tmp_path / "log"), most_bytes=200)
    before = len(os.listdir("/proc/self/fd"))
    for n in range(10):
        (tmp_path / "log").unlink()
        log(Said(f"record {n} {'x' * 150}"))
        log.flush()
        assert f"record {n}" in (tmp_path / "log").read_text()
    assert len(os.listdir("/proc/self/fd")) == before
    log.close()
