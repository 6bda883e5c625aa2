"""For all tests: the state of this process that what it starts would inherit."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest

# Thousands of interpreters are started: without this each would compile the whole program anew where that is set.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# `python` in a job means the one that is tested, and none that is found by a shim of pyenv's: ten shells for each job.
os.environ["PATH"] = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH") or os.defpath))

# A shell that starts the tests in the background has Ctrl-C ignored for them, and so for every child.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _umask_stays() -> Iterator[None]:
    """A test that leaves another umask behind would change what the next ones make."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    after = os.umask(before)
    assert after == before, f"the umask is {after:o}, was {before:o}"
