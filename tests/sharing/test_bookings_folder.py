"""The folder of shared bookings: whole documents, hostile files, the lock, and what counts after a process has ended."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.errors import SchedulerError
from scheduler.core.job import Process
from scheduler.core.shared_bookings import LONGEST, Booking, Document, Want, document_from, text_of
from scheduler.sharing import bookings_folder
from scheduler.sharing.bookings_file import SLOT, own_space
from scheduler.sharing.bookings_folder import (
    BookingsFolder,
    Found,
    alive,
    folder_problem,
    shared_folder,
    user_name,
)
from scheduler.system.proc import boot_id
from scheduler.system.processes import seen

NAMES = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40)
TIMES = st.floats(0, 1e9, allow_nan=False)
PROCESSES = st.builds(Process, st.integers(1, 1 << 22), st.integers(0, 1 << 40))
BOOKINGS = st.builds(
    Booking, NAMES, st.integers(1, 1000), st.integers(0, 1 << 20), TIMES, st.none() | TIMES,
    st.lists(PROCESSES, max_size=3).map(tuple),
)  # fmt: skip
WANTS = st.builds(
    Want, st.integers(0, 16), st.integers(0, 1000), st.integers(0, 1 << 20), st.lists(NAMES, max_size=3).map(tuple),
    st.integers(0, 1 << 30),
)  # fmt: skip
DOCUMENTS = st.builds(
    Document, NAMES, NAMES, st.sampled_from(["scheduler", "lease"]), st.none() | PROCESSES,
    st.lists(PROCESSES, max_size=2).map(tuple), st.integers(0, 1 << 40), st.lists(NAMES, max_size=4).map(tuple),
    st.integers(0, 1 << 30), st.lists(WANTS, max_size=4).map(tuple), TIMES, TIMES,
    st.lists(BOOKINGS, max_size=5).map(tuple), st.lists(BOOKINGS, max_size=2).map(tuple),
)  # fmt: skip


def this_process() -> Process:
    found = seen(os.getpid())
    assert found is not None
    return Process(found.pid, found.ticks)


def document(**changes: object) -> Document:
    values = Document("a", boot_id(), process=this_process(), space=own_space(), bookings=(Booking("GPU-1", 500),))
    return replace(values, **changes)


class Folder:
    """A folder of shared bookings, and users of it."""

    def __init__(self, path: Path) -> None:
        self.path, self.opened = path, list[BookingsFolder]()

    def user(self, key: str, *ignored: str) -> BookingsFolder:
        made = BookingsFolder(str(self.path), key, boot_id(), lambda: ignored)
        self.opened.append(made)
        return made

    def publish(self, key: str, what: Document) -> BookingsFolder:
        made = self.user(key)
        made.prepare()
        made.publish(what)
        return made


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    made = Folder(tmp_path)
    yield made
    for one in made.opened:
        one.close()


@given(DOCUMENTS, st.integers(0, 1 << 62))
def test_a_document_becomes_bytes_and_the_same_document_again(what: Document, sequence: int) -> None:
    assert document_from(text_of(what, sequence) + b"rest") == what


@given(DOCUMENTS, st.data())
def test_a_document_that_is_cut_or_changed_is_refused_or_unchanged(what: Document, data: st.DataObject) -> None:
    text = bytearray(text_of(what, 1))
    at = data.draw(st.integers(0, len(text) - 1))
    with pytest.raises(ValueError, match=r"incomplete|not a document"):
        document_from(bytes(text[:at]))
    text[at] ^= data.draw(st.integers(1, 255))
    try:
        found = document_from(bytes(text))
    except ValueError:
        return
    assert found == what  # only the sequence number has changed


@given(st.binary(max_size=300))
def test_other_bytes_are_refused_with_a_reason(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        document_from(data)


def test_others_read_a_document_and_its_successors(folder: Folder) -> None:
    writer, reader = folder.publish("a", document(waiting=1)), folder.user("b")
    for waiting in range(2, 8):
        writer.publish(document(waiting=waiting))
        (found,) = reader.read().living
        assert (found.document.waiting, found.uid) == (waiting, os.getuid())
    assert writer.read().living == [], "the own document does not count"


def test_a_write_that_is_cut_off_leaves_the_document_before(folder: Folder) -> None:
    writer, reader = folder.publish("a", document(waiting=1)), folder.user("b")
    writer.publish(document(waiting=2))
    with open(folder.path / writer.name, "r+b") as stream:
        newest = max((0, SLOT), key=lambda at: int(_line(stream, at).split()[3]))
        stream.seek(newest + 60)
        stream.write(b"#" * 20)
    found = reader.read()
    assert [one.document.waiting for one in found.living] == [1] and not found.problems


def _line(stream: object, at: int) -> bytes:
    stream.seek(at)  # type: ignore[attr-defined]
    return bytes(stream.read(80))  # type: ignore[attr-defined]


def test_a_scheduler_that_starts_again_continues_its_file(folder: Folder) -> None:
    folder.publish("a", document(used=5.0))
    second = folder.user("a")
    last = second.mine()
    assert last is not None and last.used == 5.0
    second.prepare()
    second.publish(document(used=6.0))
    assert [one.document.used for one in folder.user("b").read().living] == [6.0]


def test_a_file_that_somebody_removed_is_created_again(folder: Folder) -> None:
    writer = folder.publish("a", document())
    os.unlink(folder.path / writer.name)
    assert writer.prepare()
    writer.publish(document())
    assert len(folder.user("b").read().living) == 1


@pytest.mark.parametrize("kind", ["large", "fifo", "link", "folder", "garbage", "empty", "wrong owner", "newer"])
def test_a_hostile_file_is_named_and_does_not_count(folder: Folder, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bookings_folder, "NEW_S", 0.0)
    path = folder.path / f"gpujob-{os.getuid()}-bad"
    if kind == "large":
        with open(path, "wb") as stream:
            stream.truncate(2 << 30)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/etc/passwd")
    elif kind == "folder":
        path.mkdir()
    elif kind == "wrong owner":
        path = folder.path / f"gpujob-{os.getuid() + 1}-bad"
        path.write_bytes(text_of(document(), 1))
    elif kind == "newer":
        path.write_bytes(text_of(document(), 1).replace(b"bookings 1", b"bookings 2"))
    else:
        path.write_bytes(b"x" * 100 if kind == "garbage" else b"")
    folder.publish("good", document())
    found = folder.user("b").read()
    assert [Path(one.path).name for one in found.living] == [f"gpujob-{os.getuid()}-good"]
    (problem,) = found.problems
    assert str(path) in problem and user_name(int(path.name.split("-")[1])) in problem


@pytest.mark.parametrize("empty", [True, False], ids=["empty", "without rights"])
def test_a_file_that_is_just_being_created_is_not_named(folder: Folder, empty: bool) -> None:
    (folder.path / f"gpujob-{os.getuid()}-bad").write_bytes(b"")
    if not empty:
        (folder.path / f"gpujob-{os.getuid()}-bad").chmod(0)
    assert folder.user("b").read() == Found()


def test_a_file_with_two_names_counts_once(folder: Folder) -> None:
    """If the kernel allows it, another user can give a file a second name."""
    writer = folder.publish("a", document())
    os.link(folder.path / writer.name, folder.path / f"gpujob-{os.getuid()}-second")
    assert len(folder.user("b").read().living) == 1


def test_many_files_with_the_names_of_another_user_hide_nothing(folder: Folder) -> None:
    for number in range(200):
        path = folder.path / f"gpujob-{os.getuid()}-{number:05}"
        path.write_bytes(b"x" * 100)
        os.chown(path, 65534, 65534)
        (folder.path / f"a{number}").touch()
    folder.publish("zz", document())
    found = folder.user("b").read()
    assert len(found.living) == 1 and not found.closed and len(found.problems) == 5


def test_documents_of_schedulers_that_have_ended_do_not_count_and_are_few(folder: Folder, ended: Process) -> None:
    for number in range(70):
        folder.publish(f"old{number}", document(key=f"old{number}", process=ended, bookings=(), used_at=float(number)))
    reader = folder.user("b")
    found = reader.read()
    assert not found.closed and len(found.ended) == 70
    reader.tidy(keep=3)
    assert [one.document.key for one in reader.read().ended] == ["old67", "old68", "old69"]


def test_more_schedulers_of_a_user_than_are_read_close_the_folder(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bookings_folder, "MOST_LIVING", 2)
    for number in range(3):
        folder.publish(f"x{number}", document(key=f"x{number}"))
    assert "more than 2 schedulers" in folder.user("b").read().closed


def test_nothing_may_be_booked_if_bookings_may_be_missing(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = folder.user("b")
    monkeypatch.setattr(bookings_folder, "MOST_NAMES", 10)
    for number in range(11):
        (folder.path / f"a{number}").touch()
    assert "more than 10 files" in reader.read().closed
    monkeypatch.undo()
    folder.publish("a", document())
    monkeypatch.setattr(
        os, "open", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.EMFILE, "Too many open files"))
    )
    assert "Too many open files" in reader.read().closed


def test_very_many_processes_take_little_time_and_memory(folder: Folder) -> None:
    """A user names thousands of processes that do not live, in files with changing names."""
    dead = [
        tuple(Process(pid, 1) for pid in range(first, first + 64)) for first in range(1 << 21, (1 << 21) + 5000, 64)
    ]
    bookings = tuple(Booking("GPU-1", 1, processes=each) for each in dead)
    reader = folder.user("b")
    for number in range(3):
        writer = folder.publish(f"many{number}", document(process=Process(1 << 21, 1), bookings=bookings))
        assert len(reader.read().living) == 1, "those beyond the limit count as alive"
        assert len(reader._known) == 1 and sum(reader._checks.values()) > bookings_folder.MOST_CHECKS
        os.unlink(folder.path / writer.name)


@pytest.mark.parametrize(("parts", "until"), [(0, 5.0), (500, 1e308), (500, 10**400), (500, float("nan"))])
def test_numbers_that_are_too_large_or_wrong_are_refused(parts: int, until: float) -> None:
    with pytest.raises(ValueError, match="a value is wrong"):
        document_from(text_of(document(process=Process(1 << 31, 1)), 1))
    with pytest.raises(ValueError, match=r"a value is wrong|not JSON"):
        document_from(text_of(document(bookings=(Booking("GPU-1", parts, until=until),)), 1))


@pytest.mark.parametrize(
    "line", [b"gpujob bookings 1 1 99999999999 1\n", b"gpujob bookings 1 1 5 1\n[[[[[", b"gpujob bookings 1 9 9\n"]
)
def test_lying_lengths_and_checksums_are_refused(folder: Folder, line: bytes) -> None:
    (folder.path / f"gpujob-{os.getuid()}-bad").write_bytes(line + b"x" * 1000)
    found = folder.user("b").read()
    assert not found.living and len(found.problems) == 1


def test_too_many_files_of_one_user_are_named_once(folder: Folder) -> None:
    for number in range(bookings_folder.MOST_FILES + 5):
        (folder.path / f"gpujob-{os.getuid()}-{number}").write_bytes(text_of(document(), 1))
    found = folder.user("b").read()
    assert len(found.living) == bookings_folder.MOST_FILES
    assert "more than 1024 files" in found.closed and found.problems == []


def test_a_document_may_be_as_large_as_its_limit(folder: Folder) -> None:
    many = tuple(Booking(f"GPU-{n:036}", 1, processes=(this_process(),)) for n in range(1024))
    folder.publish("a", document(bookings=many))
    (found,) = folder.user("b").read().living
    assert len(found.document.bookings) == 1024 and len(text_of(found.document, 1)) < LONGEST


# -- what counts ----------------------------------------------------------------------------------------------


@pytest.fixture
def ended() -> Process:
    """A process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    found = seen(child.pid)
    assert found is not None
    child.wait()
    return Process(found.pid, found.ticks)


def counted(folder: Folder) -> list[str]:
    return [one.gpu for found in folder.user("reader").read().living for one in found.document.bookings]


def test_bookings_count_while_the_scheduler_or_the_job_lives(folder: Folder, ended: Process) -> None:
    mine = this_process()
    bookings = (
        Booking("of-living", 1, processes=(ended, mine)),
        Booking("of-ended", 1, processes=(ended,)),
        Booking("starting", 1),
    )
    writer = folder.publish("a", document(bookings=bookings))
    assert counted(folder) == ["of-living", "of-ended", "starting"]
    writer.publish(document(bookings=bookings, process=ended, supervisors=(mine,), wants=(Want(1, 1000),), waiting=3))
    assert counted(folder) == ["of-living", "starting"]
    (found,) = folder.user("reader").read().living
    assert (found.document.wants, found.document.waiting) == ((), 0), "a scheduler that has ended waits for nothing"
    writer.publish(document(bookings=bookings, process=ended, supervisors=(ended,)))
    assert counted(folder) == ["of-living"]
    writer.publish(document(bookings=bookings[1:], process=ended))
    (found,) = folder.user("reader").read().ended
    assert counted(folder) == [] and found.document.bookings == (), "nobody uses the GPUs of these jobs any more"
    writer.publish(document(bookings=bookings, boot="before"))
    assert counted(folder) == []


def test_a_pid_that_another_process_has_now_does_not_count(folder: Folder) -> None:
    mine = this_process()
    assert alive(mine) and not alive(replace(mine, ticks=mine.ticks + 1))
    folder.publish("a", document(process=replace(mine, ticks=mine.ticks + 1)))
    assert counted(folder) == []


def test_documents_of_another_container_count_while_their_writer_has_them_locked(folder: Folder) -> None:
    writer = folder.publish("a", document(space=own_space() + 1))
    assert counted(folder) == ["GPU-1"]
    writer.close()
    folder.opened.remove(writer)
    assert counted(folder) == []


def test_a_scheduler_in_another_container_with_the_same_name_keeps_its_file(folder: Folder) -> None:
    """Two containers may have the same folder of bookings, the same user and the same path of the state file."""
    folder.publish("a", document(space=own_space() + 1))
    mine = folder.publish("a", document(bookings=(Booking("GPU-2", 500),)))
    assert counted(folder) == ["GPU-1", "GPU-2"] and [one.document.bookings[0].gpu for one in mine.read().living] == [
        "GPU-1"
    ]


@pytest.mark.skipif(os.getuid() != 0, reason="mounts another /proc")
@pytest.mark.parametrize("hidden", [0, 1, 2])
def test_processes_that_proc_hides_count_as_alive(hidden: int) -> None:
    mine = this_process()
    child = os.fork()
    if not child:
        code = 99
        try:
            assert ctypes.CDLL(None).unshare(0x00020000) == 0  # CLONE_NEWNS
            subprocess.run(["mount", "--make-rprivate", "/"], check=True)
            subprocess.run(["mount", "-t", "proc", "-o", f"hidepid={hidden}", "proc", "/proc"], check=True)
            os.setresuid(65534, 65534, 65534)
            code = 1 if not alive(mine) else 2 if alive(replace(mine, pid=1 << 22)) else 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(("supervisors", "age_s", "counts"), [(0, 1.0, True), (0, 700.0, False), (1, 1.0, False)])
def test_a_booking_of_a_dead_scheduler_without_a_known_process_counts_for_a_while(
    folder: Folder, ended: Process, supervisors: int, age_s: float, counts: bool
) -> None:
    """A scheduler that starts jobs in screen sessions has no supervisor, and may die before it knows the process."""
    at = time.clock_gettime(time.CLOCK_BOOTTIME) - age_s
    folder.publish("a", document(process=ended, supervisors=(ended,) * supervisors, used_at=max(0.0, at)))
    assert counted(folder) == (["GPU-1"] if counts else [])


# -- the lock -------------------------------------------------------------------------------------------------


def test_the_lock_is_exclusive_and_names_who_has_it(folder: Folder) -> None:
    one, two = folder.user("a"), folder.user("b")
    assert one.lock() == ""
    text = two.lock(0.01)
    assert text.startswith(f"the bookings in {folder.path} cannot be changed: process {os.getpid()} of user ")
    one.unlock()
    assert two.lock(0.01) == ""


def test_the_lock_of_a_user_who_is_ignored_does_not_count(folder: Folder) -> None:
    me = bookings_folder.user_name(os.getuid())
    one, two = folder.user("a"), folder.user("b", me)
    assert one.lock() == "" and two.lock(0.01) == ""
    folder.publish("c", document())
    assert two.read().living == []


def test_schedulers_that_ignore_the_holder_of_the_lock_take_turns(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert folder.user("holder").lock() == ""
    monkeypatch.setattr(BookingsFolder, "_holder", lambda _: (1, "nobody"))
    users = [folder.user(key, "nobody") for key in "abc"]
    for key, one in zip("abc", users, strict=True):
        one.prepare()
        one.publish(document(key=key))
    slept: list[float] = []
    monkeypatch.setattr(time, "clock_gettime", lambda _: 1000.01)
    monkeypatch.setattr(time, "sleep", slept.append)
    assert all(one.lock(0.0) == "" for one in users)
    slot = bookings_folder.SLOT_S
    assert [(1000.01 + each) % (3 * slot) for each in slept] == pytest.approx([0.0, slot, 2 * slot], abs=1e-6)


def test_the_lock_ends_with_its_process(folder: Folder) -> None:
    code = f"import fcntl, os, time; fd = os.open({str(folder.path)!r}, 0); fcntl.flock(fd, {fcntl.LOCK_EX}); print(1, flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline()
    user = folder.user("a")
    assert f"process {child.pid} " in user.lock(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert user.lock() == ""


# -- the folder -----------------------------------------------------------------------------------------------


def test_a_folder_that_others_could_change_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert "is not sticky" in folder_problem(str(tmp_path))
    tmp_path.chmod(0o1777)
    assert folder_problem(str(tmp_path)) == ""
    assert "no folder" in folder_problem(__file__) and "No such file" in folder_problem(str(tmp_path / "none"))
    if os.getuid() == 0:
        os.chown(tmp_path, 1000, 1000)
        assert "belongs to" in folder_problem(str(tmp_path))
    with pytest.raises(SchedulerError, match="bookings cannot be shared"):
        shared_folder({"GPUJOB_BOOKINGS_FOLDER": str(tmp_path / "none")})
    assert shared_folder({}) in bookings_folder.FOLDERS


def test_a_folder_in_which_users_cannot_create_files_is_not_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On some systems only root may write to /run/lock."""
    for name, mode in (("lock", 0o755), ("shm", 0o1777)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    monkeypatch.setattr(bookings_folder, "FOLDERS", (str(tmp_path / "lock"), str(tmp_path / "shm")))
    assert shared_folder({}) == str(tmp_path / "shm")


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user")
def test_a_name_that_another_user_has_taken_is_replaced(folder: Folder) -> None:
    taken = folder.path / f"gpujob-{os.getuid()}-a"
    taken.write_bytes(b"")
    os.chown(taken, 54321, 54321)
    folder.publish("a", document())
    found = folder.user("b").read()
    assert len(found.living) == 1 and found.living[0].path != str(taken)
    assert len(found.problems) == 1 and "belongs to user 54321" in found.problems[0]
