"""Fixtures of the fault tests: a fork server, and skips where tracing or namespaces are not allowed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from tests.breaking.forge import Forge
from tests.breaking.tracing import STRACE


def _works(*words: str) -> bool:
    return (
        shutil.which(words[0]) is not None and subprocess.run(words, capture_output=True, check=False).returncode == 0
    )


@pytest.fixture(scope="session")
def tracing() -> None:
    """Skip the test if processes cannot be traced with strace."""
    if STRACE is None or not _works(STRACE, "-o", os.devnull, "true"):
        pytest.skip("needs strace, and leave to trace")


@pytest.fixture(scope="session")
def other_boots() -> None:
    """Skip the test if namespaces for another boot id cannot be created (needs root)."""
    if not _works("unshare", "--pid", "--fork", "--mount", "--mount-proc", "true"):
        pytest.skip("needs root: namespaces for processes and mounts")


@pytest.fixture(scope="session")
def forge() -> Iterator[Forge]:
    made = Forge()
    yield made
    made.close()
