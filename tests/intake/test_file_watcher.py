"""Tests of the file watchers: the inotify and the polling watcher report the same changes."""

from __future__ import annotations

import errno
import os
import select
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.intake.file_watcher import InotifyWatcher, PollingWatcher, is_network_folder, watcher

LIMIT = 15.0
Watcher = InotifyWatcher | PollingWatcher


def wait_for(watch: Watcher, *paths: Path) -> None:
    """Wait until each of these paths was reported. Fail if any other path is reported."""
    wanted = {str(path) for path in paths}
    seen: set[str] = set()
    limit = time.monotonic() + LIMIT
    while seen != wanted:
        left = limit - time.monotonic()
        assert left > 0, f"never reported: {wanted - seen}"
        select.select([watch.fd], [], [], left)
        found = watch.changed()
        assert found <= wanted, f"reported without a cause: {found - wanted}"
        seen |= found


def drain(watch: Watcher, quiet_s: float) -> set[str]:
    """Wait until no path is reported for ``quiet_s`` seconds. Return all paths that were reported."""
    found: set[str] = set()
    while select.select([watch.fd], [], [], quiet_s)[0]:
        found |= watch.changed()
    return found


@pytest.fixture(params=[InotifyWatcher, PollingWatcher], ids=["inotify", "polling"])
def watch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watcher]:
    monkeypatch.setattr("scheduler.intake.file_watcher.POLL_S", 0.2)
    made = request.param()
    yield made
    made.close()


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    path = tmp_path / "jobs.txt"
    path.write_text("a\n")
    return path


def quiet_of(watch: Watcher) -> float:
    return 0.05 if isinstance(watch, InotifyWatcher) else 0.5


def append(path: Path, text: str) -> None:
    with open(path, "a") as stream:
        stream.write(text)


# -- both watchers ----------------------------------------------------------------------------------------


def test_an_unchanged_file_is_not_reported(watch: Watcher, jobs: Path) -> None:
    """An unchanged file is not reported."""
    watch.watch([str(jobs)])
    assert drain(watch, quiet_of(watch)) == set()
    assert watch.changed() == set()


def test_an_append_a_replacement_a_deletion_and_a_creation_are_reported(watch: Watcher, jobs: Path) -> None:
    """S3.10, C03, C04, C07, C38: The watcher reports an append to a file, its replacement, deletion and creation."""
    watch.watch([str(jobs)])
    append(jobs, "b\n")
    wait_for(watch, jobs)
    drain(watch, quiet_of(watch))
    aside = jobs.with_suffix(".tmp")
    aside.write_text("c\nc\nc\n")
    aside.rename(jobs)
    wait_for(watch, jobs)
    drain(watch, quiet_of(watch))
    append(jobs, "written to the new file\n")
    wait_for(watch, jobs)
    drain(watch, quiet_of(watch))
    jobs.unlink()
    wait_for(watch, jobs)
    drain(watch, quiet_of(watch))
    jobs.write_text("made again\n")
    wait_for(watch, jobs)
    drain(watch, quiet_of(watch))
    append(jobs, "and written to\n")
    wait_for(watch, jobs)


def test_rearm_watches_a_file_whose_folder_was_created_later(watch: Watcher, tmp_path: Path) -> None:
    """If the folder of a file is created after the call of `watch`, `rearm` begins to watch the file.

    This also works if the folder is deleted and created a second time.
    """
    jobs = tmp_path / "later" / "jobs.txt"
    watch.watch([str(jobs)])
    for _ in range(2):
        jobs.parent.mkdir()
        jobs.write_text("a\n")
        watch.rearm()
        append(jobs, "b\n")
        wait_for(watch, jobs)
        shutil.rmtree(jobs.parent)
        drain(watch, 2 * quiet_of(watch))  # polling has noticed it


def test_a_truncated_and_rewritten_file_is_reported(watch: Watcher, jobs: Path) -> None:
    """C05, C07: A file that is truncated and rewritten is reported."""
    watch.watch([str(jobs)])
    jobs.write_text("another\ntext\n")
    wait_for(watch, jobs)


def test_a_missing_watched_file_is_reported_when_it_is_created(watch: Watcher, tmp_path: Path) -> None:
    """P8: If a watched file does not exist yet, it is reported when it is created."""
    jobs = tmp_path / "later.txt"
    watch.watch([str(jobs)])
    jobs.write_text("a\n")
    wait_for(watch, jobs)


def test_a_change_to_the_target_of_a_link_is_reported_with_the_link_name(watch: Watcher, tmp_path: Path) -> None:
    """C35: If the watched path is a symbolic link, a change of its target is reported as a change of the link."""
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    real, link = tmp_path / "there" / "real.txt", tmp_path / "here" / "jobs.txt"
    real.write_text("a\n")
    link.symlink_to(real)
    watch.watch([str(link)])
    append(real, "b\n")
    wait_for(watch, link)
    drain(watch, quiet_of(watch))
    aside = real.with_suffix(".tmp")
    aside.write_text("new\nnew\n")
    aside.rename(real)
    wait_for(watch, link)
    drain(watch, quiet_of(watch))
    append(real, "more\n")
    wait_for(watch, link)


def test_changes_to_other_files_of_the_folder_are_not_reported(watch: Watcher, jobs: Path) -> None:
    """Changes of other files in the folder of a watched file are not reported."""
    watch.watch([str(jobs)])
    for name in ("other.txt", "jobs.txt.swp", "xjobs.txt", "4913"):
        neighbour = jobs.parent / name
        neighbour.write_text("x\n")
        append(neighbour, "y\n")
        neighbour.rename(f"{neighbour}.moved")
        Path(f"{neighbour}.moved").unlink()
    assert drain(watch, quiet_of(watch)) == set()


def test_each_call_of_watch_replaces_the_watched_paths(watch: Watcher, jobs: Path) -> None:
    """A call of `watch` replaces the paths that were watched before."""
    other = jobs.parent / "other.txt"
    other.write_text("a\n")
    watch.watch([str(jobs), str(other)])
    append(other, "b\n")
    wait_for(watch, other)
    drain(watch, quiet_of(watch))
    watch.watch([str(jobs)])
    append(other, "c\n")
    assert drain(watch, quiet_of(watch)) == set()
    append(jobs, "d\n")
    wait_for(watch, jobs)


def test_close_closes_all_descriptors_of_a_watcher(jobs: Path) -> None:
    """`close` closes every file descriptor that the watcher opened."""
    before = len(os.listdir("/proc/self/fd"))
    for kind in (InotifyWatcher, PollingWatcher):
        made = kind()
        made.watch([str(jobs)])
        made.close()
    assert len(os.listdir("/proc/self/fd")) == before


# -- inotify alone ----------------------------------------------------------------------------------------


@pytest.fixture
def kernel() -> Iterator[InotifyWatcher]:
    made = InotifyWatcher()
    yield made
    made.close()


def watches_of(kernel: InotifyWatcher) -> int:
    return Path(f"/proc/self/fdinfo/{kernel.fd}").read_text().count("inotify wd:")


def test_many_replacements_of_a_file_leave_no_extra_watches(kernel: InotifyWatcher, jobs: Path) -> None:
    """C07: An editor replaces the file 200 times. Then there is still one watch on the file and one on its folder."""
    kernel.watch([str(jobs)])
    for number in range(200):
        aside = jobs.with_suffix(".tmp")
        aside.write_text(f"{number}\n")
        aside.rename(jobs)
        wait_for(kernel, jobs)
        drain(kernel, 0)
        append(jobs, "x\n")
        wait_for(kernel, jobs)
        drain(kernel, 0)
    assert watches_of(kernel) == 2


def test_many_rotations_of_a_file_leave_no_extra_watches(kernel: InotifyWatcher, jobs: Path) -> None:
    """C04: After a file was rotated, the old file is no longer watched."""
    kernel.watch([str(jobs)])
    for number in range(20):
        jobs.rename(f"{jobs}.{number}")
        jobs.write_text(f"{number}\n")
        wait_for(kernel, jobs)
        drain(kernel, 0.01)
    append(jobs, "x\n")
    wait_for(kernel, jobs)
    assert watches_of(kernel) <= 3


def test_writes_to_other_files_of_the_folder_do_not_wake_the_watcher(kernel: InotifyWatcher, jobs: Path) -> None:
    """Writes to the scheduler's log, in the folder of a watched file, do not make the watcher's descriptor readable."""
    neighbour = jobs.parent / "gpu_scheduler.log"
    neighbour.write_text("x\n")
    kernel.watch([str(jobs)])
    drain(kernel, 0.05)
    for _ in range(1000):
        append(neighbour, "y\n")
    assert select.select([kernel.fd], [], [], 0.05)[0] == []


def test_a_link_with_a_changed_target_is_followed(kernel: InotifyWatcher, tmp_path: Path) -> None:
    """C35: If a link gets another target, writes to the new target are reported."""
    one, two, link = tmp_path / "one.txt", tmp_path / "two.txt", tmp_path / "jobs.txt"
    one.write_text("a\n")
    two.write_text("b\n")
    link.symlink_to(one)
    kernel.watch([str(link)])
    aside = tmp_path / "aside"
    aside.symlink_to(two)
    aside.rename(link)
    wait_for(kernel, link)
    drain(kernel, 0.05)
    append(two, "c\n")
    wait_for(kernel, link)


def test_all_files_are_reported_after_an_overflow_of_the_event_queue(kernel: InotifyWatcher, jobs: Path) -> None:
    """After an overflow of the kernel's event queue, each watched file is reported."""
    other = jobs.parent / "other.txt"
    other.write_text("a\n")
    kernel.watch([str(jobs), str(other)])
    most = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    if most > 100_000:
        pytest.skip("the queue here is too long to be filled")
    with open(jobs, "ab", buffering=0) as stream, open(other, "ab", buffering=0) as second:
        for _ in range(most // 2 + 100):  # both files in turn, because the kernel merges equal events in a row
            stream.write(b"x")
            second.write(b"x")
    assert drain(kernel, 0.05) == {str(jobs), str(other)}
    append(jobs, "y\n")
    wait_for(kernel, jobs)


# -- choice of the watcher --------------------------------------------------------------------------------


def test_the_inotify_watcher_comes_without_a_note_and_the_polling_watcher_with_one(tmp_path: Path) -> None:
    """C38: `watcher` returns the inotify watcher with an empty note, and the polling watcher with a note for users."""
    made, note = watcher("auto", [str(tmp_path)])
    assert isinstance(made, InotifyWatcher) and note == ""
    made.close()
    made, note = watcher("poll", [str(tmp_path)])
    assert isinstance(made, PollingWatcher) and "poll" in note
    made.close()
    assert not is_network_folder(str(tmp_path))
    assert not is_network_folder(str(tmp_path / "missing"))


def test_watch_inotify_raises_an_error_if_inotify_cannot_be_set_up(tmp_path: Path) -> None:
    """F: If inotify cannot be set up, `watch: inotify` raises an error.

    The polling watcher is not used in its place.
    """
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
    try:
        with pytest.raises(OSError) as caught:
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        assert caught.value.errno == errno.EMFILE
        with pytest.raises(OSError):
            watcher("inotify", [str(tmp_path)])
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
