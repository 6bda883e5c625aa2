"""Disks that are full, read-only or without free inodes; unusual folder names; machines without parts of /dev."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.stories.harness import Scheduler, open_names, wait_for


class Disk:
    """A tmpfs, mounted at ``path``, that is small enough to be filled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def mount(self, options: str) -> bool:
        """Mount the tmpfs; return False if that is not allowed here."""
        self.path.mkdir(exist_ok=True, mode=0o700)
        words = ["mount", "-t", "tmpfs", "-o", f"mode=0700,{options}", "tmpfs", str(self.path)]
        return subprocess.run(words, capture_output=True).returncode == 0

    def remount(self, options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", str(self.path)], check=True)

    def fill(self) -> Path:
        """Fill the disk with one file and return its path."""
        filler = self.path / "filler"
        with filler.open("wb", buffering=0) as stream:
            for size in (1 << 16, 512):
                with pytest.raises(OSError, match="No space left"):
                    while True:
                        stream.write(bytes(size))
        return filler

    def take_inodes(self) -> list[Path]:
        """Create empty files until no inode is free; return their paths."""
        taken: list[Path] = []
        with pytest.raises(OSError, match="No space left"):
            while True:
                taken.append(self.path / f"inode-{len(taken)}")
                taken[-1].touch()
        return taken[:-1]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[..., Disk]]:
    """Return a function that mounts a small tmpfs with the given mount options.

    Where mounting is not allowed, the test is skipped; in CI it fails. All disks are unmounted at the end.
    """
    made: list[Disk] = []

    def make(options: str) -> Disk:
        one = Disk(tmp_path / f"disk{len(made)}")
        if not one.mount(options):
            if os.environ.get("CI"):
                raise AssertionError("CI has to be allowed to mount")
            pytest.skip("needs the right to mount")
        made.append(one)
        return one

    yield make
    for one in made:
        subprocess.run(["umount", "-l", str(one.path)], check=True)


def on_disk(scheduler: Callable[..., Scheduler], place: Path, **settings: object) -> Scheduler:
    """Return a scheduler with its state file and state folder in ``place``.

    Its jobs file, the logs of its jobs and its main log are in the scheduler's folder, as usual.
    """
    s = scheduler(gpus=2, **settings)
    (s.folder / "config.yaml").write_text(
        f"state_file: {place}/state.json\njobs_file: jobs.txt\nlog_dir: logs\nlog_file: main.log\nllm_config: llm.json\n"
    )
    (place / ".gpujob-state").mkdir(mode=0o700)
    (s.folder / ".gpujob").symlink_to(place / ".gpujob-state")  # where the harness looks for the state folder
    return s


def test_e08_f01_no_unrecorded_job_starts_while_the_disk_of_the_store_is_full(scheduler, disk):
    """E08, F01: While the disk of the store is full, no job starts without a record of its start.

    Running jobs keep their true exit codes, even if they end while no scheduler runs. When space is free again, each
    line becomes one job.
    """
    small = disk("size=12m")
    s = on_disk(scheduler, small.path)
    for key in "ab":
        s.hold(key)
    s.append(s.line("a", code=41, gpus="0"), s.line("b", code=42, gpus="1"))
    s.start()
    s.wait_state(1, "running")
    s.wait_state(2, "running")
    wait_for(lambda: s.starts("a") and s.starts("b"), "both are in the ledger")
    filler = small.fill()
    # The write-ahead log of the store has space reserved: these lines need more.
    s.append(*(s.line(f"n{n}", more="x" * 2000) for n in range(1500)))
    wait_for(lambda: "cannot use the store" in s.said(), "it is said")
    s.release("a")
    time.sleep(2.0)  # its GPU is free, but no start can be recorded
    started = {e[1] for e in s.ledger() if e[0] == "start"}
    written = s.rows("SELECT json_extract(spec, '$.arguments[1]') FROM jobs WHERE attempt>0")
    assert {"a", "b"} <= started <= {row[0] for row in written}, "what was not written down was started"
    submitted = s.cli("submit", "--cpu", "--", "true", code=None)
    assert submitted.returncode in (0, 1) and submitted.stderr.count("\n") <= 1
    s.kill()
    s.release("b")
    wait_for(lambda: {e[1] for e in s.ledger() if e[0] == "end"} >= {"a", "b"}, "both end")
    filler.unlink()
    small.remount("size=200m")
    s.start()
    s.wait_state(1, "failed")
    s.wait_state(2, "failed")
    assert [s.job(n)["exit_code"] for n in (1, 2)] == [41, 42]
    s.cli("queue", "pause")
    wait_for(lambda: s.rows("SELECT place FROM files") == [(s.jobs_file.stat().st_size,)], "all lines are taken")
    lines = s.rows("SELECT count(*), count(DISTINCT identity) FROM jobs WHERE identity<>''")
    assert lines == [(1502, 1502)]
    starts = Counter((e[1], e[5]) for e in s.ledger() if e[0] == "start")
    assert set(starts.values()) == {1} and s.starts("a") == s.starts("b") == 1


def test_e08_the_scheduler_recovers_from_a_full_disk_without_a_restart(scheduler, disk):
    """E08: A scheduler recovers without a restart when its disk has space again; each line becomes one job."""
    small = disk("size=12m")
    s = on_disk(scheduler, small.path, monitor_interval=600)  # recovery must not depend on this interval
    s.start()
    s.cli("queue", "pause")
    filler = small.fill()
    s.append(*(s.line(f"n{n}", more="x" * 2000) for n in range(1500)))
    wait_for(lambda: "cannot use the store" in s.said(), "it is said")
    assert "Traceback" not in s.said() and s.said().count("cannot use the store") <= 2
    told = s.cli("submit", "--cpu", "--", "true", code=None)  # a small request may still have enough space
    assert (told.returncode, told.stderr.count("\n")) in ((0, 0), (1, 1)), told
    filler.unlink()
    small.remount("size=200m")
    wait_for(lambda: "the scheduler can use the store again" in s.said(), "it recovers")
    wait_for(lambda: s.rows("SELECT place FROM files") == [(s.jobs_file.stat().st_size,)], "all lines are taken")
    submitted = 1 - told.returncode
    assert s.rows("SELECT count(*), count(DISTINCT identity) FROM jobs WHERE identity<>''") == [(1500, 1500)]
    assert s.rows("SELECT count(*) FROM jobs WHERE identity=''") == [(submitted,)] and s.ledger() == []
    assert s.stop() == 0


def test_e08_start_names_the_attempt_record_that_has_no_space(scheduler, disk):
    """E08, P3: `start` fails and names the attempt record if the disk has no space to write that record.

    Before this `start`, a daemon committed the start of an attempt and was killed before it sent the start to the
    supervisor. Therefore `start` must write the record. When space is free again, the job runs once.
    """
    s = scheduler(gpus=1)
    s.append(s.line("a", 3))
    s.start(GPUJOB_CRASH_AT="start.committed", ready=False)
    assert s.process.wait(60) == -signal.SIGKILL
    records = Disk(s.folder / ".gpujob" / "attempts")
    if not records.mount("size=8k"):
        pytest.skip("no file system can be mounted here")
    try:
        filler = records.fill()
        error = s.cli("start", "--gpus", "1", code=1).stderr.splitlines()
        assert (
            error[-1].startswith("gpujob: ")
            and "1.1: cannot be written: No space left on device; free some space" in error[-1]
        )
        assert "internal error" not in "".join(error) and s.starts("a") == 0
        filler.unlink()
        s.start()
        s.wait_ended(1)
        assert (s.job(1)["exit_code"], s.starts("a")) == (3, 1)
        s.stop()
    finally:
        subprocess.run(["umount", "-l", str(records.path)], check=True)


def test_e08_a_long_command_without_space_for_its_file_is_retried(scheduler, disk):
    """E08: If the disk has no space for the file that passes a long command to the supervisor, the start is retried.

    When space is free again, the job runs once, its GPUs become free, and no such file is left.
    """
    small = disk("size=12m")
    s = on_disk(scheduler, small.path, assign_retry_wait="0.3", max_assign_attempts=20)
    s.start()
    s.cli("queue", "pause")
    long = ["x" * 90_000] * 2
    s.cli("submit", "--gpus", "1", "--", "/bin/sh", "-c", "echo ran >> told; exit 3", *long)
    filler = small.fill()
    s.cli("queue", "resume")
    wait_for(lambda: "cannot be passed to the supervisor: No space left on device" in s.said(), "it is said")
    filler.unlink()
    s.wait_ended(1)
    # Check the events, not the state at the first failure: the next try may have begun since, and the store may have no
    # space to record the end of that try.
    fell = [
        json.loads(detail)["why"]
        for (detail,) in s.rows("SELECT detail FROM events WHERE job=1 AND kind='retry_scheduled'")
    ]
    assert fell and all("cannot be passed to the supervisor: No space left on device" in why for why in fell)
    assert (s.job(1)["exit_code"], (s.folder / "told").read_text()) == (3, "ran\n")
    assert [gpu["allocated"] for gpu in s.status()["gpus"]] == [0, 0]
    assert not list((s.folder / ".gpujob").glob("packet-*"))


def test_e19_no_job_starts_without_free_inodes(scheduler, disk):
    """E19: Without free inodes no attempt can be claimed, so no job starts; the job runs when inodes are free again."""
    small = disk("size=20m,nr_inodes=60")
    s = on_disk(scheduler, small.path, assign_retry_wait="0.3", max_assign_attempts=20, history="false")
    s.start()
    s.append(s.line("before", code=3))
    s.wait_state(1, "failed")

    def holds_no_inode_for_a_while() -> bool:
        s.freeze()
        if not any("state.json.new-" in name for name in [*open_names(s.pid), *map(str, small.path.iterdir())]):
            return True
        os.kill(s.pid, signal.SIGCONT)
        return False

    # Otherwise the inode of a replaced state file could become free and be used for the next attempt record.
    wait_for(holds_no_inode_for_a_while, "the daemon has no old or new version of the state file")
    taken = small.take_inodes()
    os.kill(s.pid, signal.SIGCONT)
    s.append(s.line("after"))
    wait_for(lambda: "its attempt record cannot be written: No space left on device" in s.said(), "it is said")
    assert s.starts("after") == 0 and s.cli("status").returncode == 0
    for path in taken:
        path.unlink()
    s.wait_state(2, "done")
    assert s.starts("after") == 1 and s.job(1)["exit_code"] == 3


def test_f13_start_fails_on_a_read_only_disk(scheduler, disk):
    """F13: On a read-only disk `start` and `submit` fail with a short error, and `jobs` works.

    `start` works when the disk is writable again.
    """
    small = disk("size=20m")
    s = on_disk(scheduler, small.path)
    s.append(s.line("a", code=9))
    s.start()
    s.wait_state(1, "failed")
    s.stop()
    words = ["mount", "-o", "remount,ro", str(small.path)]
    wait_for(lambda: subprocess.run(words, capture_output=True).returncode == 0, "nobody writes there any more")
    error = s.cli("start", "--gpus=2", code=1).stderr
    assert error.count("\n") == 1 and ("Read-only file system" in error or "readonly database" in error), error
    error = s.cli("submit", "--cpu", "--", "true", code=1).stderr
    assert "gpujob: " in error and len(error.splitlines()) <= 2
    assert '"failed"' in s.cli("jobs", "--json").stdout, "looking is possible"
    small.remount("rw")
    s.append(s.line("b"))
    s.start()
    s.wait_ended(2)
    assert s.job(1)["exit_code"] == 9 and s.starts("a") == s.starts("b") == 1


def test_e11_running_jobs_survive_a_disk_that_turns_read_only(scheduler, tmp_path):
    """E11: When an ext4 file system turns read-only, no job starts, and running jobs continue.

    The next start shows the true exit code of each job, or `lost` if the ending of the job could not be recorded.
    """
    image, place = tmp_path / "image", tmp_path / "disk"
    place.mkdir(mode=0o700)
    with image.open("wb") as stream:
        stream.truncate(48 << 20)
    if subprocess.run(["mkfs.ext4", "-q", str(image)], capture_output=True).returncode or (
        subprocess.run(
            ["mount", "-o", "loop,errors=remount-ro", str(image), str(place)], capture_output=True
        ).returncode
    ):
        pytest.skip("needs the right to mount, and mkfs.ext4")
    try:
        place.chmod(0o700)
        s = on_disk(scheduler, place)
        s.hold("a")
        s.append(s.line("a", code=11))
        s.start()
        s.wait_state(1, "running")
        os.sync()  # loss of data that was not synced yet is another fault (H20)
        subprocess.run(["mount", "-o", "remount,abort", str(place)], capture_output=True)
        s.append(s.line("b"))
        wait_for(lambda: "cannot use the store" in s.said(), "it is said")
        assert s.starts("b") == 0 and "Traceback" not in s.said()
        s.release("a")
        wait_for(lambda: [e for e in s.ledger() if e[0] == "end"], "the job goes on to its end")
        s.end_all()
        words = ["umount", str(place)]
        wait_for(lambda: subprocess.run(words, capture_output=True).returncode == 0, "nobody uses it any more")
        # A mount namespace that another test has created in the meantime still has it mounted.
        words = ["losetup", "-j", str(image)]
        wait_for(lambda: not subprocess.run(words, capture_output=True, check=True).stdout, "its device is let go")
        subprocess.run(["e2fsck", "-fy", str(image)], capture_output=True)
        subprocess.run(["mount", "-o", "loop", str(image), str(place)], check=True)
        s.start()
        s.wait_ended(2)
        job = s.job(1)
        # An ending that could not be recorded is `lost`, never guessed; one that reached the disk is the true one.
        assert (job["outcome"], job["exit_code"]) in (("lost", None), ("exit", 11)), job
        assert s.starts("a") == 1 and s.starts("b") == 1
        s.end_all()
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_f06_start_refuses_foreign_and_linked_log_folders(scheduler):
    """F06: `start` refuses a log folder that is a link, a file or another user's, and writes nothing there."""
    s = scheduler(gpus=1)
    there = s.folder / "theirs"
    there.mkdir(mode=0o700)
    (s.folder / "link").symlink_to(there)
    (s.folder / "file").write_text("mine")
    for name, what in (("link", "link"), ("file", "not a"), ("theirs", "belongs to user 4242")):
        if name == "theirs":
            if os.getuid():
                continue  # only root can change the owner of a folder
            os.chown(there, 4242, 4242)
        error = s.cli("start", "--gpus=1", f"--log-dir={name}", code=1).stderr
        assert error.count("\n") == 1 and str(s.folder / name) in error, (what, error)
    assert not list(there.iterdir()) and (s.folder / "file").read_text() == "mine"


NAMES = [
    "with space",
    "-leading",
    "größe-日本",
    "new\nline",
    "quo'te\"s;$(x)",
    "long-" + "x" * 240,
    "deep/" * 40 + "end",
]


def test_f14_f15_jobs_run_in_folders_with_unusual_names(scheduler, tmp_path):
    """F14, F15: A job runs in a folder whose name is very long or has spaces, UTF-8, newlines, quotes or a hyphen."""
    for name in NAMES:
        place = tmp_path / name
        place.mkdir(parents=True)
        s = scheduler(gpus=1, folder=place)
        (place / "where").write_text("#!/bin/sh\npwd -P\n")
        (place / "where").chmod(0o755)
        s.append("0,where,,x")
        s.start("--drain", ready=False)
        assert s.process.wait(60) == 0, (name, s.said())
        assert s.log(1) == f"{place}\n", name
        assert s.cli("status").returncode == 0


LACKS = {"/dev/shm": 0, "/dev": 1, "/proc": 1}


@pytest.mark.parametrize("lacks", LACKS, ids=[name.replace("/", "") for name in LACKS])
def test_f17_start_works_without_dev_shm_and_fails_without_dev_or_proc(scheduler, lacks):
    """F17: A scheduler works without /dev/shm.

    Without /dev or /proc `start` fails with one line that names the missing path.
    """
    s = scheduler(gpus=1)
    s.append("0,/bin/true,,")
    words = " ".join([*s.command, "start", "--gpus=1", "--drain"])
    hide = f"mkdir -p {s.folder}/empty; mount --bind {s.folder}/empty {lacks}"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f"{hide} || exit 99; exec {words}"],
        cwd=s.folder, env=s.environ, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode == 99 or "unshare" in done.stderr:
        pytest.skip("needs the right to mount")
    assert done.returncode == LACKS[lacks] and "Traceback" not in done.stderr + done.stdout, done
    if done.returncode:
        assert done.stderr.count("\n") == 1 and lacks in done.stderr, done


@pytest.mark.parametrize("mode", ["direct", "screen"])
@pytest.mark.parametrize("mask", ["000", "077", "777"])
def test_f12_files_are_private_at_any_umask_and_jobs_inherit_the_umask(scheduler, screens, mask, mode):
    """F12: The scheduler's files have mode 0600 and its folders 0700, whatever the umask of `start` is.

    Jobs run with the umask of `start`.
    """
    s = (scheduler if mode == "direct" else screens)(gpus=1)
    (s.folder / "mask").write_text("#!/bin/sh\numask\n")
    (s.folder / "mask").chmod(0o755)
    s.append("0,mask,,x")
    s.folder.chmod(0o700)
    s.command = ["sh", "-c", f'umask {mask}; exec "$@"', "sh", *s.command]
    s.start()
    s.wait_ended(1)
    assert int(s.log(1), 8) == int(mask, 8)
    assert s.stop() == 0
    for top in (s.folder / ".gpujob", s.folder / "gpu_scheduler_logs"):
        for folder, _, files in os.walk(top):
            assert os.stat(folder).st_mode & 0o777 == 0o700, folder
            for name in files:
                assert os.stat(os.path.join(folder, name)).st_mode & 0o777 == 0o600, name
    for name in ("gpu_scheduler.log", "gpu_scheduler_state.json"):
        assert (s.folder / name).stat().st_mode & 0o777 == 0o600


def test_e08_refused_requests_are_not_carried_out(
    scheduler: Callable[..., Scheduler], disk: Callable[..., Disk]
) -> None:
    """E08, P4: On a full disk, a job runs if and only if its `submit` succeeded.

    A refused `queue pause` pauses nothing.
    """
    house = disk("size=64m")
    s = scheduler(gpus=1)
    link = s.folder / ".gpujob"
    house.path.chmod(0o700)
    subprocess.run(["mkdir", "-m", "700", str(link)], check=True)
    subprocess.run(["mount", "--bind", str(house.path), str(link)], check=True)
    try:
        s.start()
        filler = house.fill()
        done = [
            s.cli("submit", "--", "python3", str(s.script), str(s.folder), f"k{n}", "0", "0", code=None)
            for n in range(3)
        ]
        paused = s.cli("queue", "pause", code=None)
        filler.unlink()
        s.append(s.line("after") + ";gpus=0")
        wait_for(lambda: len(s.states()) > sum(one.returncode == 0 for one in done), "there is room again")
        # Exit code 5: the request is stored, but was not answered in time: it may have been carried out or not.
        assert paused.returncode == 5 or s.status()["paused"] == (paused.returncode == 0), paused.stderr
        s.cli("queue", "resume")
        wait_for(lambda: s.starts("after"), "it goes on")
        s.wait_ended(1 + sum(one.returncode == 0 for one in done))
        assert [s.starts(f"k{n}") for n in range(3)] == [int(one.returncode == 0) for one in done], [
            d.stderr for d in done
        ]
        s.stop()
    finally:
        subprocess.run(["umount", "-l", str(link)], check=True)


TALKS = """#!/bin/sh
echo begin; touch up
while [ ! -e full ]; do sleep 0.05; done
head -c 600000 /dev/zero | tr '\\0' x || touch refused
exit 7
"""


@pytest.mark.parametrize("mode", ["direct", "screen"])
def test_f02_a_full_log_disk_loses_no_exit_code(scheduler, screens, disk, mode):
    """F02: When the disk of the job logs is full, each job still ends with its true exit code, and other jobs run.

    In direct mode the job gets the error ENOSPC. In screen mode the job writes to a terminal and gets no error.
    """
    small = disk("size=256k")
    s = (scheduler if mode == "direct" else screens)(gpus=2, log_dir=small.path)
    (s.folder / "talks.sh").write_text(TALKS)
    (s.folder / "talks.sh").chmod(0o755)
    s.start()
    s.append("0,talks.sh,,,0")
    wait_for(lambda: (s.folder / "up").exists() and "begin" in s.log(1), "its first line in the log")
    filler = small.fill()
    (s.folder / "full").touch()
    s.wait_state(1, "failed")
    s.append(s.line("other", code=4))
    s.wait_state(2, "failed")
    assert [s.job(n)["exit_code"] for n in (1, 2)] == [7, 4]
    assert (s.folder / "refused").exists() == (mode == "direct") and "begin" in s.log(1)
    filler.unlink()
    s.append("0,talks.sh,,again,0")
    s.wait_state(3, "failed")
    assert "begin" in s.log(3) and [s.starts("other"), s.job(3)["exit_code"]] == [1, 7]
    assert "internal error" not in s.said() and "Traceback" not in s.said()
    s.stop()
    s.end_all()  # the disk is unmounted next: no process may have a file open on it
