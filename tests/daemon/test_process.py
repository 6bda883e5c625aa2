"""Tests of errors that end a daemon."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from scheduler.daemon.process import DaemonProcess
from scheduler.store.paths import Places


def test_e08_an_error_without_a_path_names_the_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E08: If an error names no path, the daemon's message names the state folder.

    A write on a full disk causes such an error.
    """

    def full(daemon: DaemonProcess, drain: bool) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(DaemonProcess, "_run", full)
    daemon = object.__new__(DaemonProcess)
    daemon.places = Places(str(tmp_path / "state.json"))
    with pytest.raises(OSError, match="No space left") as found:
        daemon.run()
    assert found.value.filename == daemon.places.state_dir and found.value.errno == errno.ENOSPC
