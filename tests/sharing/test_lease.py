"""Leases, `who`, `report --by user` and `service`, with a real scheduler and declared GPUs."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from scheduler.core.job import Process
from scheduler.core.shared_bookings import Booking, Document
from scheduler.sharing.bookings_file import own_space
from scheduler.sharing.bookings_folder import BookingsFolder
from scheduler.system.proc import boot_id
from scheduler.system.processes import seen
from tests.stories.harness import Scheduler, wait_for
from tests.stories.machine import Machine
from tests.stories.test_clock import Clock

AHEAD_DAYS = 5 * 365

Make = Callable[..., Scheduler]
SHOW = 'echo "ids=$CUDA_VISIBLE_DEVICES"'


def lease(s: Scheduler, *words: str) -> subprocess.Popen[str]:
    """Start `gpujob lease` in a process of its own."""
    command = [sys.executable, "-m", "scheduler", "lease", *words]
    return subprocess.Popen(
        command, cwd=s.folder, env=s.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    )  # fmt: skip


def with_a_running_job(s: Scheduler) -> Scheduler:
    """Start the scheduler with job ``a``, which has GPU 0 until ``s.release("a")``."""
    s.start()
    s.hold("a")
    s.append(s.line("a") + ";gpus=1")
    s.wait_state(1, "running")
    return s


def holders(s: Scheduler) -> list[dict[str, Any]]:
    found = json.loads(s.cli("who", "--json").stdout)["holders"]
    assert isinstance(found, list)
    return found


def why(s: Scheduler) -> str:
    """Return what `why 1` prints; empty while the scheduler has not read the line of job 1."""
    return s.cli("why", "1", code=None).stdout


def files(s: Scheduler) -> list[str]:
    """Return the names of the published leases."""
    return [name for name in os.listdir(s.environ["GPUJOB_BOOKINGS_FOLDER"]) if "-lease-" in name]


def test_a_lease_books_a_gpu_runs_the_command_and_returns_its_exit_code(scheduler: Make) -> None:
    s = with_a_running_job(scheduler(gpus=2))
    done = lease(
        s, "-g", "0.5", "--", "sh", "-c", f"{SHOW}; {sys.executable} -m scheduler who --json > who.json; exit 7"
    )
    out, err = done.communicate(timeout=60)
    assert (done.returncode, out) == (7, "ids=1\n") and "GPU 1 is booked" in err, err
    seen = json.loads((s.folder / "who.json").read_text())["holders"]
    assert [(one["gpu"], one["kind"], one["share"], one["own"]) for one in seen] == [
        (0, "jobs", 1.0, True),
        (1, "lease", 0.5, True),
    ]
    assert files(s) == [] and [one["kind"] for one in holders(s)] == ["jobs"]
    (use,) = json.loads(s.cli("report", "--by", "user", "--json").stdout)["users"]
    assert use["own"] and use["booked"] == 1.0 and use["share"] == 1.0
    s.cli("report", "--by", "label", code=2)
    s.release("a")


def test_a_job_waits_for_a_lease_and_a_lease_waits_for_a_job(scheduler: Make) -> None:
    s = scheduler(gpus=1)
    s.start()
    (s.folder / "go").touch()
    first = lease(s, "--for", "10m", "--", "sh", "-c", "while [ -e go ]; do sleep 0.05; done")
    wait_for(lambda: holders(s), "the lease")
    s.append(s.line("a"))
    wait_for(lambda: "booked-outside" in why(s), "the reason")
    assert "another scheduler or lease of yours until about" in s.cli("why", "1").stdout
    holder = os.open(s.environ["GPUJOB_BOOKINGS_FOLDER"], os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    s.append(s.line("b"))
    wait_for(lambda: "no-bookings" in why(s), "the reason while the folder is locked")
    os.close(holder)
    wait_for(lambda: "booked-outside" in why(s), "the reason afterwards")
    refused = lease(s, "--no-wait", "--", "true")
    assert "no GPU for a lease now" in refused.communicate(timeout=60)[1] and refused.returncode == 3
    s.hold("a")
    (s.folder / "go").unlink()
    s.wait_state(1, "running")
    assert first.wait(60) == 0
    first.communicate()
    second = lease(s, "--", "true")
    assert second.stderr is not None and "waiting for one whole GPU" in second.stderr.readline()
    s.release("a")
    second.communicate(timeout=60)
    assert second.returncode == 0


def test_a_lease_ends_its_command_after_its_time_and_says_so_before(scheduler: Make) -> None:
    s = scheduler(gpus=1)
    s.start()
    begun = lease(s, "--for", "1.5s", "--", "sh", "-c", "trap '' HUP; sleep 100 & echo $!; wait")
    out, err = begun.communicate(timeout=60)
    assert begun.returncode == 128 + signal.SIGTERM and "the lease ends in" in err and "is over" in err, err
    wait_for(lambda: not Path(f"/proc/{out.strip()}").exists(), "the end of the descendant")


def test_a_killed_lease_keeps_its_gpu_while_its_command_lives(scheduler: Make) -> None:
    s = scheduler(gpus=1)
    s.start()
    begun = lease(s, "--", "sh", "-c", "echo $$; exec sleep 100")
    assert begun.stdout is not None
    command = int(begun.stdout.readline())
    wait_for(lambda: [one for one in holders(s) if one["kind"] == "lease"], "the lease")
    wait_for(lambda: b"sleep" in Path(f"/proc/{command}/cmdline").read_bytes(), "the command")
    begun.kill()
    begun.wait()
    assert [one["kind"] for one in holders(s)] == ["lease"]
    os.kill(command, signal.SIGKILL)
    begun.communicate()
    wait_for(lambda: not holders(s), "the end of the booking")
    lease(s, "--", "true").communicate(timeout=60)
    assert files(s) == [], "files of leases that have ended are removed"


def test_processes_that_a_lease_leaves_behind_keep_its_gpu(scheduler: Make) -> None:
    s = scheduler(gpus=1)
    s.start()
    done = lease(s, "--", "sh", "-c", "setsid sleep 100 > /dev/null 2>&1 & echo $!")
    out, err = done.communicate(timeout=60)
    left = int(out)
    assert done.returncode == 0 and f"processes {left} still run; GPU 0 is booked until they end" in err, err
    assert [one["kind"] for one in holders(s)] == ["lease"]
    os.kill(left, signal.SIGKILL)
    wait_for(lambda: not holders(s), "the end of the booking")


def test_all_descendants_of_a_lease_count_and_ended_ones_are_reaped(scheduler: Make) -> None:
    """The parent of a process may end before the process, and there may be more processes than a booking names."""
    s = scheduler(gpus=1)
    s.start()
    nested = 'sh -c "sleep 100 > /dev/null 2>&1 & echo \\$!; sleep 0.3" & for n in $(seq 70); do sleep 100 > /dev/null 2>&1 & echo $!; done'
    done = lease(s, "--", "sh", "-c", nested)
    out, err = done.communicate(timeout=60)
    pids = [int(word) for word in out.split()]
    assert len(pids) == 71 and done.returncode == 0 and "still run" in err, err
    assert [one["kind"] for one in holders(s)] == ["lease"]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not holders(s), "the end of the booking")
    begun = lease(s, "--", "sh", "-c", "(sleep 0.1 & echo $!) & wait; exec sleep 100")
    assert begun.stdout is not None
    orphan = int(begun.stdout.readline())
    wait_for(lambda: not Path(f"/proc/{orphan}").exists(), "the orphan is reaped")
    begun.terminate()
    begun.communicate(timeout=60)


def test_the_command_of_a_lease_has_the_signals_of_the_caller(scheduler: Make) -> None:
    """Signals that Python ignores are not ignored in the command; those that nohup ignores stay ignored in the lease."""
    s = scheduler(gpus=1)
    s.start()
    out, err = lease(s, "--", "sh", "-c", "yes | head -1; grep SigIgn /proc/self/status").communicate(timeout=60)
    line, ignored = out.splitlines()
    assert line == "y" and "Broken pipe" not in err, (out, err)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        assert not int(ignored.split()[1], 16) >> (number - 1) & 1, ignored
    command = ["nohup", sys.executable, "-m", "scheduler", "lease", "--", "sh", "-c", "echo up; sleep 0.5; exit 5"]
    with subprocess.Popen(
        command, cwd=s.folder, env=s.environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL
    ) as ignoring:  # fmt: skip
        assert ignoring.stdout is not None and ignoring.stdout.readline() == b"up\n"
        ignoring.send_signal(signal.SIGHUP)
        assert ignoring.wait(60) == 5


def test_a_booking_that_somebody_removed_is_published_again(scheduler: Make) -> None:
    s = with_a_running_job(scheduler(gpus=2))
    begun = lease(s, "--", "sleep", "100")
    wait_for(lambda: len(holders(s)) == 2, "both bookings")
    folder = Path(s.environ["GPUJOB_BOOKINGS_FOLDER"])
    for path in folder.glob("gpujob-*"):
        path.unlink()
    wait_for(lambda: len(list(folder.glob("gpujob-*"))) == 2, "both files again")
    wait_for(lambda: [one["kind"] for one in holders(s)] == ["jobs", "lease"], "both bookings again")
    begun.terminate()
    begun.communicate(timeout=60)
    s.release("a")


def test_a_scheduler_that_no_longer_shares_leaves_no_booking(scheduler: Make) -> None:
    s = scheduler(gpus=1)
    config = s.folder / "config.yaml"
    config.write_text("share_bookings: true\n")
    with_a_running_job(s)
    assert len(holders(s)) == 1
    config.write_text("share_bookings: false\n...\n")
    wait_for(lambda: "share_bookings true -> false" in s.said(), "the new setting")
    wait_for(lambda: not list(Path(s.environ["GPUJOB_BOOKINGS_FOLDER"]).glob("gpujob-*")), "no file")
    config.write_text("share_bookings: true\n...\n")
    wait_for(lambda: list(Path(s.environ["GPUJOB_BOOKINGS_FOLDER"]).glob("gpujob-*")), "the file")
    wait_for(lambda: len(holders(s)) == 1, "the booking")
    s.release("a")


@contextlib.contextmanager
def hostile(folder: str) -> Iterator[None]:
    """Another user books GPU 0 and holds the lock of the folder of shared bookings."""
    boot, space, ready, wait = boot_id(), own_space(), os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        code = 99
        try:
            os.close(wait[1])
            os.setresuid(65534, 65534, 65534)
            me = seen(os.getpid())
            assert me is not None
            process = Process(me.pid, me.ticks)
            made = BookingsFolder(folder, "x", boot)
            assert made.lock() == ""
            made.prepare()
            bookings = (Booking("declared:0", 1000, processes=(process,)),)
            made.publish(Document("x", boot, process=process, space=space, bookings=bookings))
            os.write(ready[1], b"x")
            os.read(wait[0], 1)
            code = 0
        finally:
            os._exit(code)
    try:
        os.close(ready[1])
        assert os.read(ready[0], 1)
        yield
    finally:
        os.close(wait[1])
        os.waitpid(child, 0)
        os.close(ready[0])
        os.close(wait[0])


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user")
def test_bookings_and_locks_of_ignored_users_do_not_count(scheduler: Make) -> None:
    folder = tempfile.mkdtemp(prefix="gj-bookings-", dir="/tmp")
    os.chmod(folder, 0o1777)
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        s = scheduler(gpus=1)
        s.environ["GPUJOB_BOOKINGS_FOLDER"] = folder
        (s.folder / "config.yaml").write_text("ignore_users: ''\n")
        s.start()
        stack.enter_context(hostile(folder))
        s.append(s.line("a") + ";gpus=1")
        wait_for(lambda: "no-bookings" in why(s), "the reason")
        wait_for(lambda: "of user nobody has locked it" in s.cli("status").stdout, "the problem")
        refused = lease(s, "--no-wait", "--", "true")
        assert "of user nobody has locked it" in refused.communicate(timeout=60)[1] and refused.returncode == 3
        (s.folder / "config.yaml").write_text("ignore_users: nobody\n...\n")
        s.wait_state(1, "done")
        (gpu,) = json.loads(s.cli("status", "--json").stdout)["gpus"]
        assert gpu["state"] == "AVAILABLE" and gpu["booked_outside"] == []
        granted = lease(s, "--no-wait", "--", "true")
        assert "GPU 0 is booked" in granted.communicate(timeout=60)[1] and granted.returncode == 0
        s.stop()


def test_bad_words_of_a_lease_are_refused(scheduler: Make) -> None:
    s = scheduler(gpus=1)
    s.start()
    for words, code in (
        (("-g", "0"), 3), (("-g", "x"), 2), (("--allowed", "7"), 3), (("-g", "2"), 3), (("--for", "x"), 2), (("--for", "0"), 2), (("--pid", "x"), 2), (("--", ""), 3),
        (("--pid", str(os.getpid()), "--", "true"), 2), (("--", "/no/such/program"), 3), (("--idle", "1h", "--", "true"), 3),
    ):  # fmt: skip
        done = lease(s, *words)
        _, err = done.communicate(timeout=60)
        assert done.returncode == code and "Traceback" not in err, (words, done.returncode, err)
    assert files(s) == []


def test_an_idle_lease_ends_and_says_so_before(machine: Callable[..., Machine]) -> None:
    """The lease has half of the GPU; load by others on the GPU does not keep it."""
    m = machine().cards("GPU-a")
    m.s.start()
    begun = lease(m.s, "-g", "0.5", "--idle", "1.2s", "--", "sh", "-c", "echo $$; exec sleep 100")
    assert begun.stdout is not None and begun.stderr is not None
    command = int(begun.stdout.readline())
    m.use("GPU-a", command, 1000, load=50, total_load=90)
    assert "booked" in begun.stderr.readline()
    wait_for(lambda: [one for one in holders(m.s) if one["kind"] == "lease" and one["load"]], "the load")
    m.use("GPU-a", command, 1000, load=0, total_load=90)
    _, err = begun.communicate(timeout=60)
    assert begun.returncode == 128 + signal.SIGHUP and "unless it is used" in err and "the lease ends\n" in err, err
    assert not holders(m.s) or all(one["kind"] == "foreign" for one in holders(m.s))


def test_what_somebody_took_by_hand_is_booked_by_its_pid(machine: Callable[..., Machine]) -> None:
    m = machine().cards("GPU-a", "GPU-b")
    m.s.start()
    by_hand = m.foreign_process()
    refused = lease(m.s, "--pid", str(by_hand))
    assert "uses no GPU" in refused.communicate(timeout=60)[1] and refused.returncode == 3
    m.use("GPU-b", by_hand, 20_000, load=70)
    wait_for(lambda: [one["kind"] for one in holders(m.s)] == ["foreign"], "the process")
    out, _ = lease(m.s, "--pid", str(by_hand), "--for", "2h").communicate(timeout=60)
    assert f"GPU 1 is booked until process {by_hand} ends, at the latest at" in out
    (one,) = holders(m.s)
    assert (one["gpu"], one["kind"], one["share"], one["memory_used"], one["idle"]) == (
        1,
        "lease",
        1.0,
        20_000 << 20,
        False,
    )
    m.s.append(m.s.line("a", gpus="1", more=";gpus=1"))
    wait_for(lambda: "booked-outside" in why(m.s), "the reason")
    m.others[-1].kill()
    m.others[-1].wait()
    m.unuse("GPU-b", by_hand)
    m.s.wait_state(1, "done")
    assert holders(m.s) == []


def test_a_lease_of_a_mig_instance_gets_its_uuid_and_a_plain_one_a_card(machine: Callable[..., Machine]) -> None:
    m = machine().cards("GPU-a", "GPU-b")
    with m.driver.together():
        m.driver.gpu("GPU-b", mig=1)
        m.driver.instance("GPU-b", "MIG-x", "1g.10gb", used=12)
    m.s.start()
    for share, seen_as in (("mig-1g.10gb", "ids=MIG-x\n"), ("1", "ids=0\n")):
        assert lease(m.s, "-g", share, "--", "sh", "-c", SHOW).communicate(timeout=60)[0] == seen_as
    m.s.hold("a")
    m.s.append(m.s.line("a") + ";gpus=mig-1g.10gb")
    m.running("a")
    waiting = lease(m.s, "-g", "mig-1g.10gb", "--", "sh", "-c", SHOW)
    assert waiting.stderr is not None and "needs one MIG instance 1g.10gb" in waiting.stderr.readline()
    m.s.release("a")
    assert waiting.communicate(timeout=60)[0] == "ids=MIG-x\n"


def test_keep_free_leaves_gpus_to_leases(scheduler: Make) -> None:
    s = scheduler(gpus=2, keep_free=1)
    s.start()
    s.hold("a")
    s.append(s.line("a") + ";gpus=1", s.line("b") + ";gpus=1", s.line("c") + ";gpus=0.5")
    s.wait_state(1, "running")
    wait_for(lambda: "keep-free" in s.cli("why", "2", code=None).stdout, "the reason")
    assert "1 GPU is kept free for people without a scheduler" in s.cli("why", "2").stdout
    done = lease(s, "--", "sh", "-c", SHOW)
    assert done.communicate(timeout=60)[0] == "ids=1\n"
    s.release("a")
    s.wait_ended(3)


def test_weights_of_the_machine_are_used_and_a_wrong_file_is_named(scheduler: Make, tmp_path: Path) -> None:
    s = scheduler(gpus=1)
    path = tmp_path / "machine.yaml"
    s.environ["GPUJOB_MACHINE_CONFIG"] = str(path)
    path.write_text("weights: {root: 3, other: 1}\nfair_half_life: 2h\n")
    path.chmod(0o644)
    s.start()
    told = json.loads(s.cli("report", "--by", "user", "--json").stdout)
    if os.getuid() == 0:
        assert told["half_life_s"] == 7200.0 and told["users"][0]["fair"] == 1.0
    path.write_text("weights: {root: -3}\n")
    s.stop()
    s.start()
    wait_for(lambda: "is not used" in s.cli("status").stdout, "the problem")


@pytest.mark.parametrize(
    "text",
    ["keep_fre: 1", "weights: {a: 1" + "0" * 400 + "}", "[" * 5000, "keep_free_hours: 8-8", "keep_free: 1\n#" + "x" * 70_000],
)  # fmt: skip
def test_a_mistake_in_the_settings_of_the_machine_is_named(scheduler: Make, tmp_path: Path, text: str) -> None:
    s = scheduler(gpus=1)
    path = tmp_path / "machine.yaml"
    s.environ["GPUJOB_MACHINE_CONFIG"] = str(path)
    s.start()
    path.write_text(text)
    if os.getuid() == 0:
        path.chmod(0o644)
    assert f"{path} is not used" in s.cli("config", "check", code=2).stderr
    assert f"{path} is not used" in s.cli("doctor", code=None).stdout
    s.append(s.line("a"))
    s.wait_state(1, "done")
    assert f"{path} is not used" in s.cli("status").stdout


def test_the_service_is_written_for_this_folder_checked_and_removed(scheduler: Make, tmp_path: Path) -> None:
    folder = tmp_path / "a b %n"
    folder.mkdir()
    s = scheduler(gpus=1, folder=folder)
    s.environ["HOME"] = str(tmp_path / "home")
    s.environ.pop("XDG_CONFIG_HOME", None)
    unit = tmp_path / "home" / ".config" / "systemd" / "user" / "gpujob.service"
    told = s.cli("service", "install").stdout
    text = unit.read_text()
    assert "KillMode=process" in text and f"WorkingDirectory={tmp_path}/a b %%n\n" in text and "verify" not in told, (
        told
    )
    assert "lingering" in told and "systemctl --user enable --now gpujob" in told
    assert "installed" in s.cli("service", "status").stdout
    s.cli("service", "uninstall")
    assert not unit.exists()
    s.cli("service", "status", code=1)
    unit.write_text("[Service]\n")
    s.cli("service", "install", code=3)
    s.cli("service", "uninstall", code=3)
    s.cli("service", "install", "--name", "../x", code=2)
    s.cli("service", "start", code=2)


@pytest.mark.parametrize("trouble", ["full", "read-only", "gone", "locked"])
def test_jobs_wait_while_bookings_cannot_be_shared_and_continue_afterwards(
    scheduler: Make, tmp_path: Path, trouble: str
) -> None:
    """A neighbour can at worst make jobs wait: the folder is full, read-only or gone, or its lock is held for ever."""
    if os.getuid() != 0:
        pytest.skip("mounts a file system")
    folder = tmp_path / "shared"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k,mode=1777", "tmpfs", str(folder)], check=True)
    holder: subprocess.Popen[bytes] | None = None
    try:
        s = scheduler(gpus=1)
        s.environ["GPUJOB_BOOKINGS_FOLDER"] = str(folder)
        if trouble == "full":
            (folder / "ballast").write_bytes(b"x" * (250 << 10))
        elif trouble == "read-only":
            subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        elif trouble == "gone":
            s.environ["GPUJOB_BOOKINGS_FOLDER"] = str(folder / "later")
        else:
            code = "import fcntl, os, sys, time; fcntl.flock(os.open(sys.argv[1], 0), 2); print(1, flush=True); time.sleep(600)"
            holder = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE)
            assert holder.stdout is not None and holder.stdout.readline()
        s.start()
        s.append(s.line("a"), s.line("cpu") + ";gpus=0")
        s.wait_state(2, "done")  # jobs without a GPU are not affected
        wait_for(lambda: "no-bookings" in why(s), "the reason")
        if trouble == "locked":
            assert holder is not None
            wait_for(lambda: f"process {holder.pid} of user" in s.cli("status").stdout, "the problem")
        if trouble == "full":
            (folder / "ballast").unlink()
        elif trouble == "read-only":
            subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
        elif trouble == "gone":
            (folder / "later").mkdir()
        elif holder is not None:
            holder.kill()
        s.wait_state(1, "done")
        assert s.starts("a") == 1
        s.stop()
    finally:
        if holder is not None:
            holder.kill()
            holder.communicate()
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_use_is_computed_from_the_store_after_a_reboot(scheduler: Make) -> None:
    """The folder of shared bookings is empty after a boot; the use of the last days is not forgotten."""
    s = scheduler(gpus=1)
    s.start()
    s.append(s.line("a") + ";gpus=1")
    s.wait_ended(1)
    s.stop()
    with sqlite3.connect(s.folder / ".gpujob" / "store.db") as store:
        store.execute("UPDATE jobs SET started_at = finished_at - 7200")
    store.close()
    for path in Path(s.environ["GPUJOB_BOOKINGS_FOLDER"]).glob("gpujob-*"):
        path.unlink()
    s.start()
    (use,) = json.loads(s.cli("report", "--by", "user", "--json").stdout)["users"]
    assert 6900 < use["gpu_s"] < 7200


def test_clocks_that_differ_do_not_matter(scheduler: Make, tmp_path: Path) -> None:
    """Times of bookings are since boot: a scheduler whose wall clock is years ahead shares as any other."""
    one, two = scheduler(gpus=1, folder=tmp_path / "one"), scheduler(gpus=1, folder=tmp_path / "two")
    two.environ["GPUJOB_BOOKINGS_FOLDER"] = one.environ["GPUJOB_BOOKINGS_FOLDER"]
    Clock(two).set(AHEAD_DAYS * 86_400)
    one.start()
    two.start()
    one.hold("a")
    one.append(one.line("a") + ";time=10m")
    one.wait_state(1, "running")
    two.append(two.line("b"))
    wait_for(lambda: "booked-outside" in why(two), "the reason")
    until = two.cli("why", "1").stdout.rpartition("about ")[2].split()[0]
    # By the clock of the reader: the time alone if it is today, else its date.
    tomorrow = (datetime.now() + timedelta(days=AHEAD_DAYS, minutes=10)).date().isoformat()
    assert re.fullmatch(rf"\d\d:\d\d|{tomorrow}", until)
    one.release("a")
    two.wait_state(1, "done")
    assert json.loads(two.cli("report", "--by", "user", "--json").stdout)["users"][0]["gpu_s"] < 600


def test_a_gpu_that_a_neighbour_leaves_is_free_after_the_next_reading(
    machine: Callable[..., Machine], tmp_path: Path
) -> None:
    """The memory of a neighbour's process that is ending is not foreign: no three clean readings are awaited."""
    one, two = machine(folder=tmp_path / "one", gpu_interval=60), machine(folder=tmp_path / "two", gpu_interval=60)
    two.s.environ["GPUJOB_BOOKINGS_FOLDER"] = one.s.environ["GPUJOB_BOOKINGS_FOLDER"]
    for each in (one, two):
        each.cards("GPU-a").s.start()
    one.s.hold("a")
    one.s.append(one.s.line("a") + ";gpus=1")
    one.s.wait_state(1, "running")
    (job,) = one.s.rows("SELECT pid FROM jobs")[0]
    two.use("GPU-a", job, 40_000)
    two.s.append(two.s.line("b") + ";gpus=1")
    wait_for(lambda: "booked-outside" in why(two.s), "the reason")
    one.s.release("a")
    one.s.wait_state(1, "done")
    two.unuse("GPU-a", job)
    two.s.wait_state(1, "done")  # three readings, 60 s apart, would be too late
