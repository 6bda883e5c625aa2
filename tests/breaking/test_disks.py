"""Replays of a sample of the disk states that a power cut may leave; `make disks` replays more."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.breaking import disk, order
from tests.breaking.cycle import STATE_FILE
from tests.breaking.disks import SEED, Disks, place_for_states
from tests.breaking.forge import Forge, until
from tests.breaking.tracing import recorded
from tests.stories.harness import LONG

STATES = 200 if LONG else 10


@pytest.fixture(scope="module")
def disks(tracing: None, other_boots: None) -> Iterator[Disks]:
    place = place_for_states()
    made = Disks(place / "house")
    try:
        made.record()
        yield made
    finally:
        made.close()
        shutil.rmtree(place)


@pytest.mark.long_form
def test_e15_a_scheduler_recovers_from_every_possible_disk_state(disks: Disks) -> None:
    """E15, H01: The program's promises hold after a reboot with a disk on which unsynced writes are missing or torn."""
    chosen = disk.states(disks.recording, STATES, SEED)
    found = {disks.recording.describe(state): broken for state in chosen if (broken := disks.replay(state)[0])}
    assert len(chosen) == STATES and not found, (SEED, found)


def test_e15_recorded_operations_reproduce_the_files_of_the_folder(disks: Disks) -> None:
    """E15: The recorded operations reproduce exactly the files of the folder.

    Exception: SQLite writes the index of its log (store.db-shm) through a memory mapping, which strace does not show.
    The recording may lack this file, because its contents are invalid after a crash anyway.
    """
    assert disks.recording.shared <= {"store.db-shm"}
    files = {name: data for name, data in disks.recording.tree(disks.recording.ops).items() if data is not None}
    for seen in {"ledger", *(name for name in files if name.endswith(".out"))} & set(files):
        del files[seen]  # output that users see, which is not part of the recorded disk
    assert files == disks.found


def test_e15_a_missing_fsync_is_detected(disks: Disks) -> None:
    """E15: The judge notices missing syncs.

    In this test the store's log counts as not synced. After the power cut a job is then forgotten or started again, and
    the judge reports this.
    """
    recording = disks.recording
    kept = list(recording.synced)
    moment = next(m for m in recording.moments if m.words[:2] == ("start", "d"))
    wal = {op.inode for op in recording.ops if not op.name and len(op.data) == 4096}
    # The range begins at the start of b, because on a busy machine the end of b may be recorded after the start of d.
    first = next(m.done for m in recording.moments if m.words[:2] == ("start", "b"))
    try:
        for n in range(first, moment.done):
            if recording.ops[n].inode in wal:
                recording.synced[n] = None
        broken, _ = disks.replay(disk.State(moment, frozenset(recording.unsure(moment)), kind="no syncs"))
    finally:
        recording.synced = kept
    assert any("d was acknowledged" in text or "d was started again" in text for text in broken), broken


def test_e15_an_emptied_state_file_is_rewritten(disks: Disks) -> None:
    """E15: The daemon rewrites a state file that a power cut has emptied, and does not treat it as a user's edit."""
    moment = disks.recording.moments[-1]
    disks.replay(disk.State(moment, frozenset(), kind="all"))
    path = disks.folder / STATE_FILE
    path.write_bytes(b"")
    daemon = disks._fork("daemon", "start", "--gpus=1", "--gpu-interval=0")
    until(lambda: path.read_bytes(), "another picture")
    assert json.loads(path.read_bytes())["gpu_status"] == [0.0]
    daemon.signal(15)
    until(daemon.ended, "its end")


def test_e15_lines_and_environments_are_synced_before_they_are_acknowledged(tracing: None, tmp_path: Path) -> None:
    """P4, E15: When `add` and `submit` report success, the line, the environment file and the store are synced."""
    log = tmp_path / "strace"
    forge = Forge(recorded(log, disk.CALLS))
    folder = tmp_path / "house"
    folder.mkdir()
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    try:
        forge.run(["add", "x.py"], folder, environ, folder / "out")
        forge.run(["submit", "--", "true"], folder, environ, folder / "out")
    finally:
        forge.close()
    wrong, told = order.unsynced_words(log, [*order.STORE, "jobs.txt"])
    assert (wrong, told) == ([], 1)
    recording = disk.Recording(folder).read(log, ["out.code"], {"out": "told"})
    told_moments = [moment for moment in recording.moments if moment.told == "told"]
    unsure = {recording.ops[n].name for moment in told_moments for n in recording.unsure(moment)}
    names = {op.name for op in recording.ops if op.child is not None}
    environments = {name for name in names if len(name) == 32}
    assert len(told_moments) > 1 and len(environments) == 1
    assert not unsure & {"jobs.txt", ".gpujob", "env", "store.db", *environments}
