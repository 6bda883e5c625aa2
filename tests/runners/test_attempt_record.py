"""Tests of `attempt_record.give_up`, with which a daemon claims an attempt that must never run."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from scheduler.core.recovery import Record
from scheduler.runners import attempt_record
from scheduler.system.proc import boot_id
from tests.builders import a_job

JOB = a_job(3, attempt=1)


def give_up(path: Path) -> bool:
    return attempt_record.give_up(str(path), JOB, boot_id(), 1_700_000_000 * 10**9)


def test_p1_a_daemon_that_dies_during_the_claim_leaves_the_attempt_unclaimed(tmp_path: Path) -> None:
    """P1: A record gets its name only when it is complete.

    So a daemon that dies during a claim leaves no empty record.
    """
    path = tmp_path / JOB.attempt_key
    child = os.fork()
    if child == 0:
        os.link = lambda *words, **names: os._exit(9)  # type: ignore[assignment]
        give_up(path)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert attempt_record.read(str(path)).kind is Record.NONE
    assert give_up(path), "the rest of the dead daemon's draft prevents nothing"
    assert attempt_record.read(str(path)).kind is Record.NEVER_RAN
    assert [entry.name for entry in tmp_path.iterdir()] == [JOB.attempt_key]


@pytest.mark.parametrize("refused", [None, errno.EPERM, errno.EOPNOTSUPP])
def test_p1_only_the_first_claim_of_an_attempt_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int | None
) -> None:
    """P1: A second claim of an attempt is refused and changes nothing.

    This also holds on a file system without hard links.
    """
    if refused is not None:

        def link(source: str, name: str) -> None:
            raise OSError(refused, os.strerror(refused), source)

        monkeypatch.setattr(os, "link", link)
    path = tmp_path / "removed" / JOB.attempt_key
    assert give_up(path)
    whole = path.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and attempt_record.read(str(path)).how == "never"
    assert not give_up(path)
    assert path.read_bytes() == whole and [entry.name for entry in path.parent.iterdir()] == [path.name]
