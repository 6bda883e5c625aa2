"""The tests with several users need a clone that other users can read: `make test` says so before it begins."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.stories.people import ROOT_ONLY

SCRIPT = Path(__file__).parent / "bin" / "readable-by-others"


@ROOT_ONLY
@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_a_clone_that_other_users_cannot_read_is_named(mode: int) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        clone = Path(folder) / "gpujob"
        clone.mkdir()
        (clone / "pyproject.toml").touch()
        Path(folder).chmod(mode)
        done = subprocess.run(["bash", str(SCRIPT)], cwd=clone, capture_output=True, text=True, check=False)
        assert (done.returncode == 0) is (mode == 0o755)
        assert bool(done.stderr) is (mode == 0o700) and (not done.stderr or str(clone) in done.stderr)
