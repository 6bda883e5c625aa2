"""Changes to the whole jobs file of a real scheduler: each complete line becomes one job or one refused line."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.core.gpu import ResourceRequest
from scheduler.core.job import JobSpec
from scheduler.intake.tail import OPEN_LINE_S
from scheduler.store import jobs as rows
from scheduler.store.database import Database
from scheduler.store.paths import Places
from tests.stories.harness import LONG, ROOT, wait_for
from tests.stories.pouring import Pouring

as_root = pytest.mark.skipif(os.getuid() != 0, reason="another user needs root")


@pytest.fixture
def pouring(scheduler) -> Pouring:
    """Return a running scheduler that checks all files every second, with scripts for its lines."""
    found = Pouring(scheduler(gpus=2, monitor_interval=1))
    found.s.start()
    return found


@pytest.fixture
def of_nobody(scheduler) -> Iterator[Pouring]:
    """Return a scheduler that runs as user `nobody` in a folder of that user. It is not started yet.

    Its jobs file has one line.
    """
    with tempfile.TemporaryDirectory(prefix="gpujob-nobody-") as name:
        shutil.copytree(ROOT / "scheduler", f"{name}/code/scheduler")
        p = Pouring(scheduler(gpus=1, folder=Path(name), monitor_interval=1))
        p.s.environ.update(PYTHONPATH=f"{name}/code", HOME=name)
        p.s.environ["PYTHONPATH"] += ":" + sysconfig.get_path("purelib")
        p.pour(p.good("a"))
        for place in (name, *Path(name).rglob("*")):
            shutil.chown(place, "nobody")
        again = "import os, sys; os.execv(sys.executable, [sys.executable, '-m', 'scheduler', '--version'])"
        for python in (sys.executable, "/usr/bin/python3"):  # the first may be in a private home folder
            drop = ["setpriv", "--reuid=nobody", "--clear-groups", python]
            able = subprocess.run([*drop, "-c", again], cwd=name, env=p.s.environ, capture_output=True, text=True)
            if able.returncode == 0:
                break
        else:
            pytest.skip(f"no Python here is open to other users: {able.stderr[-200:]}")
        p.s.command = [*drop, "-m", "scheduler"]
        yield p
        p.s.end_all()


def append(path: Path, data: str | bytes) -> None:
    """Append to a file, as `printf >>` does."""
    with path.open("ab") as stream:
        stream.write(os.fsencode(data))


def cpu_ticks(pid: int) -> int:
    """Return the CPU time of this process, in clock ticks (10 ms)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


@pytest.mark.smoke
def test_c01_half_a_line_becomes_no_job(pouring):
    """C01: Half a line never becomes a job, even if the scheduler is killed between the halves."""
    s = pouring.s
    began = time.monotonic()
    append(s.jobs_file, pouring.good("a") + "\n0,note,,half")
    s.wait_ended(1)
    s.kill()
    waited = time.monotonic() - began
    began = time.monotonic()
    s.start()
    append(s.jobs_file, "-and-half;gpus=0\n" + pouring.good("b") + "\n")
    waited = max(waited, time.monotonic() - began)
    pouring.rest()
    assert {"a", "b"} <= set(pouring.noted()) and len(pouring.noted()) == 3
    if waited < OPEN_LINE_S:  # after this time a line without newline counts as complete
        assert "half-and-half" in pouring.noted() and pouring.refused() == {}


def test_c02_text_added_to_a_read_line_is_refused(pouring):
    """C02: Text added to a line that was already read is reported, also after a restart; later lines are read."""
    s = pouring.s
    append(s.jobs_file, pouring.good("a") + "\n0,note,,open")
    s.wait_ended(2)
    s.stop()
    append(s.jobs_file, " grown;gpus=0\n" + pouring.good("b") + "\n")
    s.start()
    s.wait_ended(3)
    pouring.rest()
    assert sorted(pouring.noted()) == ["a", "b", "open"]
    assert pouring.refused() == {2: "the line was changed after it was read; write a new line for a new job"}
    assert "jobs.txt:2: the line was changed after it was read" in s.cli("status").stdout
    s.says("jobs.txt:2: the line was changed after it was read", times=1)


def test_c02_a_line_appended_after_a_last_line_of_blanks_becomes_a_job(pouring):
    """C02, P2: A line appended with `echo` after a last line of blanks becomes a job."""
    append(pouring.s.jobs_file, pouring.good("a") + "\n   ")
    pouring.s.wait_ended(1)
    time.sleep(2.5)  # longer than the time after which a line without a newline is read
    pouring.pour(pouring.good("b"))
    pouring.s.wait_ended(2)
    assert sorted(pouring.noted()) == ["a", "b"] and pouring.refused() == {}


def test_c03_a_deleted_file_is_logged_once_and_a_new_one_read(pouring):
    """C03: If the jobs file is deleted, this is logged once. A line that was appended just before still runs.

    A new jobs file is read. If a line of the new file equals a line of the deleted file, it does not run again.
    """
    s = pouring.s
    missing = "no such file; it is read when it appears"
    wait_for(lambda: s.said().count(missing) == 1, "none was there at the start")
    pouring.pour(pouring.good("a"))
    pouring.rest()
    pouring.pour(pouring.good("b"))
    s.jobs_file.unlink()
    wait_for(lambda: s.said().count(missing) == 2, "the warning")
    s.wait_ended(2)
    pouring.pour(pouring.good("c"), pouring.good("a"))
    s.wait_ended(3)
    pouring.rest()
    assert sorted(pouring.noted()) == ["a", "b", "c"]
    s.says(missing, times=2)


@pytest.mark.smoke
def test_c04_the_rest_of_a_rotated_file_is_read_before_the_new_one(pouring):
    """C04: If a writer still appends lines to a rotated file, these lines are read before the lines of the new file."""
    s = pouring.s
    pouring.pour(pouring.good("a"))
    pouring.rest()
    old = s.jobs_file.open("a")
    subprocess.run(["mv", str(s.jobs_file), str(s.folder / "jobs.1")], check=True)
    old.write(pouring.good("b") + "\n")
    old.close()
    pouring.pour(pouring.good("c"))
    s.wait_ended(3)
    pouring.rest()
    # The two shells may write in either order: their jobs start milliseconds apart.
    assert sorted(pouring.noted()) == ["a", "b", "c"]
    assert s.rows("SELECT json_extract(spec, '$.arguments[0]') FROM jobs ORDER BY id") == [("a",), ("b",), ("c",)]


def test_c05_a_truncated_and_refilled_file_keeps_waiting_jobs(pouring):
    """C05: A waiting job stays when its line is removed; lines of the refilled file are read."""
    s = pouring.s
    s.cli("queue", "pause")
    pouring.pour(pouring.good("waits"))
    pouring.read()
    subprocess.run(f": > jobs.txt; echo '{pouring.good('b')}' >> jobs.txt", shell=True, check=True, cwd=s.folder)
    wait_for(lambda: len(s.states()) == 2, "the new line")
    s.cli("queue", "resume")
    s.wait_ended(2)
    assert sorted(pouring.noted()) == ["b", "waits"]


def test_c06_a_file_refilled_beyond_its_old_size_is_read_again(pouring):
    """C06: A file that was emptied and refilled beyond its old size is read from its start.

    The file changes while the scheduler is stopped (SIGSTOP) or has ended, so no scheduler sees it empty.
    """
    s = pouring.s
    pouring.pour(pouring.good("a"))
    pouring.rest()
    s.freeze()
    s.jobs_file.write_text("")
    pouring.pour(*(pouring.good(f"b{n}") for n in range(5)), pouring.good("a"))
    os.kill(s.pid, signal.SIGCONT)
    s.wait_ended(6)
    s.kill()
    s.jobs_file.write_text("".join(pouring.good(f"c{n}") + "\n" for n in range(9)))
    s.start()
    s.wait_ended(15)
    pouring.rest()
    assert sorted(pouring.noted()) == sorted(["a", *(f"b{n}" for n in range(5)), *(f"c{n}" for n in range(9))])


# "in place" writes with a shell builtin: while a shell starts a program, the file would be empty, and after 1 s an
# empty file counts as the new contents.
SAVES = {
    "sed": "sed -i '$a 0,note,,new;gpus=0' jobs.txt",
    "mv": "cp jobs.txt x; echo '0,note,,new;gpus=0' >> x; mv x jobs.txt",
    "backup": "mv jobs.txt jobs.txt~; cp jobs.txt~ jobs.txt; echo '0,note,,new;gpus=0' >> jobs.txt",
    "in place": "cp jobs.txt x; echo '0,note,,new;gpus=0' >> x; text=$(cat x); printf '%s\\n' \"$text\" > jobs.txt",
    "python": "python3 -c \"import os; t = open('jobs.txt').read(); open('x', 'w').write('0,note,,new;gpus=0\\n' + t); os.replace('x', 'jobs.txt')\"",
    "reordered": "tac jobs.txt > x; echo '0,note,,new;gpus=0' >> x; mv x jobs.txt",
}


@pytest.mark.parametrize("how", SAVES)
def test_c07_a_save_by_an_editor_runs_only_new_lines(pouring, how):
    """C07: When an editor saves the jobs file, only the new line becomes a job.

    Unchanged lines, refused lines and lines of failed jobs make no second job. Refused lines get their new line
    numbers.
    """
    s = pouring.s
    pouring.script("fails", "#!/bin/sh\necho fails >> noted\nexit 2\n")
    pouring.pour(pouring.good("a"), "bad line", "0,fails,,;gpus=0", pouring.good("b"))
    pouring.rest()
    subprocess.run(["sh", "-c", SAVES[how]], check=True, cwd=s.folder)
    s.wait_ended(4)
    pouring.rest()
    assert sorted(pouring.noted()) == ["a", "b", "fails", "new"]
    at = s.jobs_file.read_text().splitlines().index("bad line") + 1
    assert list(pouring.refused()) == [at]
    s.says("a job needs at least a priority and a script", times=1)


def test_c08_jobs_of_edited_and_removed_lines_stay(pouring):
    """C08: A job remains in the queue and in `status` after its line is edited or removed.

    The edited line becomes a new job.
    """
    s = pouring.s
    s.cli("queue", "pause")
    pouring.pour("0,note,,one;gpus=0", "0,note,,two;gpus=0", "0,note,,three;gpus=0")
    pouring.read()
    subprocess.run(["sed", "-i", "-e", "s/two/TWO/", "-e", "/one/d", str(s.jobs_file)], check=True)
    wait_for(lambda: len(s.states()) == 4, "the changed line")
    pouring.read()
    shown = s.cli("status").stdout
    assert all(f"note {word}" in shown for word in ("one", "two", "three", "TWO"))
    s.cli("queue", "resume")
    s.wait_ended(4)
    assert sorted(pouring.noted()) == ["TWO", "one", "three", "two"]


def test_c09_c10_windows_line_ends_and_byte_order_mark_get_into_no_job(pouring):
    """C09, C10: Windows line ends and a byte order mark do not become part of a job."""
    append(pouring.s.jobs_file, b"\xef\xbb\xbf0,note,,a;gpus=0\r\n\r\n# x\r\n0,note,,b;gpus=0\r\n0,words,,last\r\n")
    states = pouring.rest()
    assert sorted(pouring.noted()) == ["a", "b"] and pouring.refused() == {}
    assert pouring.words(max(states))[0] == "last"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_c11_a_utf16_file_is_refused_until_it_is_saved_as_utf8(pouring, encoding):
    """C11: A UTF-16 file is reported once and not read; once it is saved as UTF-8, it is read."""
    s = pouring.s
    pouring.pour(pouring.good("before"))
    pouring.rest()
    mark = "" if encoding == "utf-16" else "\ufeff"
    s.jobs_file.write_bytes((mark + "".join(pouring.good(n) + "\n" for n in "ab")).encode(encoding))
    wait_for(lambda: "not read: UTF-16 instead of UTF-8; save it as UTF-8" in s.said(), "the report")
    pouring.pour(pouring.good("x"))
    time.sleep(1.2)  # the check at the safety interval reports nothing more
    assert pouring.noted() == ["before"]
    s.says("not read: UTF-16 instead of UTF-8", times=1)
    s.jobs_file.write_text("".join(pouring.good(n) + "\n" for n in "ab"))
    s.wait_ended(3)
    pouring.rest()
    assert sorted(pouring.noted()) == ["a", "b", "before"] and pouring.refused() == {}


def test_c16_a_submitted_job_without_wakeup_runs(scheduler):
    """C16, P4: A submitted job still runs if its wakeup reaches the daemon only after jobs with higher ids have run."""
    s = scheduler(gpus=1, monitor_interval=600)
    s.start()
    database = Database(Places(str(s.folder / "gpu_scheduler_state.json")))
    with database.writing() as connection:
        spec = JobSpec(arguments=("true",))
        rows.insert(connection, spec, ResourceRequest(0, 0), "", (), time.time())
    s.append(s.line("a"), s.line("b"))
    s.wait_state(3, "done")
    database.wake_daemon()
    database.close()
    s.wait_ended(3)


@pytest.mark.long
def test_c16_commands_answer_and_jobs_run_while_many_lines_are_read(pouring):
    """C16: While the scheduler makes a job of each of 10,000 lines, other jobs run and commands are answered.

    The long form of the test appends a million lines.
    """
    s, number = pouring.s, 1_000_000 if LONG else 10_000
    s.cli("pause", "0")
    began = time.monotonic()
    pouring.pour(*(f"0,note,,{n},0" for n in range(number)), "bad")
    waits = []
    while s.rows("SELECT place FROM files") != [(s.jobs_file.stat().st_size,)]:
        for words in (("status",), ("submit", "--cpu", "--wait", "--", "true")):
            asked = time.monotonic()
            s.cli(*words)
            waits.append(time.monotonic() - asked)
        assert len(waits) < (10_000 if LONG else 600)
    memory = Path(f"/proc/{s.pid}/status").read_text().split("VmRSS:")[1].split()[0]
    print(f"{number} lines in {time.monotonic() - began:.0f} s; {len(waits)} commands meanwhile, the slowest"
          f" {max(waits):.2f} s; {int(memory) // 1024} MiB")  # fmt: skip
    lines = s.rows("SELECT count(*), count(DISTINCT identity) FROM jobs WHERE identity<>''")
    assert lines == [(number, number)] and waits
    assert s.rows("SELECT count(*) FROM jobs WHERE identity='' AND state<>'done'") == [(0,)]
    assert s.rows("SELECT number FROM refused") == [(number + 1,)] and pouring.noted() == []


def test_c17_equal_lines_become_one_job(pouring):
    """C17: Equal lines that are appended together become one job.

    One log message gives the number of repeated lines.
    """
    s = pouring.s
    s.cli("queue", "pause")
    pouring.pour(*[pouring.good("same")] * 3)
    pouring.read()
    assert len(s.states()) == 1 and s.status()["repeated_lines"] == 2
    s.says("not run again", times=1)
    s.says("jobs.txt: 2 lines repeat waiting, running or done jobs")
    assert "2 line(s) repeat an earlier line and do not run again" in s.cli("status").stdout
    pouring.pour(*[pouring.good("same")] * 2)
    pouring.read()
    assert len(s.states()) == 1 and s.status()["repeated_lines"] == 4
    s.cli("queue", "resume")
    pouring.rest()
    assert pouring.noted() == ["same"]


def test_c18_a_repeated_line_is_skipped_after_success_and_runs_after_failure(pouring):
    """C18: A line that repeats the line of a done job does not run. A line that repeats a failed job runs it again."""
    s = pouring.s
    pouring.script("fails", "#!/bin/sh\necho fails >> noted\nexit 2\n")
    failing = "0,fails,,;gpus=0"
    pouring.pour(pouring.good("a"), failing)
    s.wait_ended(2)
    pouring.pour(pouring.good("a"), failing)
    s.wait_ended(3)
    pouring.rest()
    assert sorted(pouring.noted()) == ["a", "fails", "fails"]
    s.says("repeats job 1 (done)")
    s.stop()
    s.start()
    s.jobs_file.write_text(s.jobs_file.read_text() + failing + "\n")
    s.wait_ended(4)
    pouring.rest()
    assert sorted(pouring.noted()) == ["a", "fails", "fails", "fails"]


def test_c19_lines_of_twenty_concurrent_writers_are_all_read(pouring):
    """C19: Each of 4,000 lines that twenty writers append with `echo >>` becomes a job."""
    s = pouring.s
    s.cli("queue", "pause")
    writers = [
        subprocess.Popen(
            ["sh", "-c", f"for n in $(seq 200); do echo '0,note,,w{w}-'$n';gpus=0' >> jobs.txt; done"], cwd=s.folder
        )
        for w in range(20)
    ]
    assert [writer.wait(60) for writer in writers] == [0] * 20
    pouring.read()
    assert s.rows("SELECT count(*), count(DISTINCT identity) FROM jobs") == [(4000, 4000)] and pouring.refused() == {}


def test_c20_long_lines_of_concurrent_add_commands_are_not_mixed(pouring):
    """C20: Lines of 20 KB that concurrent `gpujob add` commands append are never mixed with other lines.

    Lines that shells append at the same time may be mixed with each other. Each line of the resulting file becomes a
    job or is refused.
    """
    s = pouring.s
    s.cli("queue", "pause")
    shell = "for n in 1 2 3 4 5 6 7 8 9 10; do printf '0,note,,%s-%s-%020000d;gpus=0\\n' $0 $n 0 >> jobs.txt; done"
    adding = [sys.executable, "-m", "scheduler", "add", "note", "--args"]
    writers = [subprocess.Popen(["sh", "-c", shell, name], cwd=s.folder) for name in ("p", "q")]
    for number in range(5):
        both = [
            subprocess.Popen(
                [*adding, f"{name}-{number}-" + name * 20_000], cwd=s.folder, env=s.environ, stdout=subprocess.DEVNULL
            )
            for name in ("a", "b")
        ]
        assert [one.wait(60) for one in both] == [0, 0]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    pouring.read()
    lines = s.jobs_file.read_bytes().split()  # without the empty lines that a write in several pieces may leave
    arguments = {row[0] for row in s.rows("SELECT json_extract(spec, '$.arguments[0]') FROM jobs")}
    assert {f"{name}-{n}-{name * 20_000}" for name in "ab" for n in range(5)} <= arguments
    assert len(s.states()) + len(pouring.refused()) == len(lines)  # the shells' lines may be mixed


ODD = {
    "folder": lambda path: path.mkdir(),
    "fifo": lambda path: os.mkfifo(path),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "dangling": lambda path: path.symlink_to("nowhere"),
    "loop": lambda path: path.symlink_to(path.name),
}


@pytest.mark.parametrize("what", ODD)
def test_c35_a_jobs_file_that_is_no_plain_file_is_reported(scheduler, what):
    """C35: A jobs file that is not a regular file is reported and blocks nothing.

    When a regular file takes its place, the file is read.
    """
    p = Pouring(scheduler(gpus=1, monitor_interval=1))
    s = p.s
    ODD[what](s.jobs_file)
    s.start()
    wait_for(lambda: "jobs.txt: " in s.said(), "the report")
    s.cli("submit", "--cpu", "--wait", "--", "true")
    remove(s.jobs_file)
    p.pour(p.good("a"))
    s.wait_ended(2)
    spare = s.folder / "spare"
    ODD[what](spare) if what != "loop" else spare.symlink_to("jobs.txt")
    remove(s.jobs_file)
    os.rename(spare, s.jobs_file)
    s.cli("submit", "--cpu", "--wait", "--", "true")
    reports = [line for line in s.said().splitlines() if "jobs.txt: " in line and "! " in line]
    before = cpu_ticks(s.pid)
    time.sleep(1.0)
    assert cpu_ticks(s.pid) - before < 20
    remove(s.jobs_file)
    p.pour(p.good("a"), p.good("b"))
    s.wait_ended(4)
    p.rest()
    assert sorted(p.noted()) == ["a", "b"]
    assert all(
        "not a regular file" in line or "no such file" in line or "symbolic links" in line for line in reports
    ), reports
    s.jobs_file.unlink()
    ODD[what](s.jobs_file)
    done = s.cli("add", "note", code=0 if what == "dangling" else 1)  # `add` creates the file that the link names
    assert done.stderr.count("\n") == (0 if what == "dangling" else 1) and s.cli("status").stderr == ""


def remove(path: Path) -> None:
    """Remove a file, link, device or empty folder."""
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink()


@as_root
def test_c36_a_file_that_becomes_unreadable_is_reported_once(of_nobody):
    """C36: If the user can no longer read the jobs file, this is reported once.

    When the file is readable again, it is read.
    """
    p, s = of_nobody, of_nobody.s
    s.start()
    s.wait_ended(1)
    spare = s.folder / "spare"
    spare.write_text(p.good("a") + "\n" + p.good("b") + "\n")
    shutil.chown(spare, "nobody")
    spare.chmod(0)
    os.rename(spare, s.jobs_file)
    wait_for(lambda: "cannot be read: Permission denied" in s.said(), "the report")
    before = cpu_ticks(s.pid)
    time.sleep(2.2)  # two checks at the safety interval
    assert cpu_ticks(s.pid) - before < 30 and s.said().count("Permission denied") == 1
    s.jobs_file.chmod(0o600)
    s.wait_ended(2)
    p.rest()
    assert sorted(p.noted()) == ["a", "b"]
    s.says("the scheduler can read ")


@as_root
def test_c36_the_scheduler_starts_with_an_unreadable_jobs_file(of_nobody):
    """C36: The scheduler starts with an unreadable file, reports it, and reads it when it becomes readable."""
    p, s = of_nobody, of_nobody.s
    s.jobs_file.chmod(0)
    s.start()
    wait_for(lambda: "cannot be read: Permission denied" in s.said(), "the report")
    s.jobs_file.chmod(0o600)
    s.wait_ended(1)
    assert p.noted() == ["a"]


@as_root
def test_c37_files_that_others_could_write_are_refused_with_the_remedy(scheduler):
    """C37: `start`, a running scheduler and `add` refuse a jobs file that others could write.

    Each error says how to correct this.
    """
    p = Pouring(scheduler(gpus=1, monitor_interval=1))
    s = p.s
    p.pour(p.good("a"))
    for change, mend, text in (
        (lambda: s.jobs_file.chmod(0o666), lambda: s.jobs_file.chmod(0o600), "all users may write to it: chmod o-w"),
        (lambda: os.chown(s.jobs_file, 65534, -1), lambda: os.chown(s.jobs_file, 0, -1), "it belongs to user 65534: make yourself its owner (chown)"),
        (lambda: s.folder.chmod(0o777), lambda: s.folder.chmod(0o700), "its folder is not safe: all users may write to it: chmod o-w"),
    ):  # fmt: skip
        change()
        done = s.cli("start", "--gpus", "1", code=1)
        assert text in done.stderr and done.stderr.count("\n") == 1
        mend()
        s.start()
        p.rest()
        lines = len(s.jobs_file.read_text().splitlines())
        change()
        p.pour(p.good(f"more-{lines}"))
        wait_for(lambda text=text: text in s.said(), "the report")
        wait_for(lambda text=text: text in " ".join(s.status()["trouble"]), "it is in the status")
        assert [one.count("not read: ") for one in s.status()["trouble"]] == [1], "it is said once"
        assert "trouble    not read: " in s.cli("status").stdout
        assert text in s.cli("add", "note", "--args", "x", code=1).stderr
        assert f"more-{lines}" not in p.noted()
        mend()
        wait_for(lambda: not s.status()["trouble"], "it is read again")
        s.wait_ended(lines + 1)
        p.rest()
        s.stop()
    assert p.noted() == ["a", "more-1", "more-2", "more-3"]


def test_c38_polling_notices_all_changes(scheduler):
    """C38: With polling, the scheduler notices appended lines, and a replaced, deleted or new jobs file."""
    p = Pouring(scheduler(gpus=1, watch="poll", monitor_interval=3600))
    s = p.s
    p.pour(p.good("a"))
    s.start()
    p.rest()
    p.pour(p.good("b"))
    s.wait_ended(2)
    subprocess.run(["sed", "-i", "1i 0,note,,c;gpus=0", str(s.jobs_file)], check=True)
    s.wait_ended(3)
    s.jobs_file.unlink()
    wait_for(lambda: "no such file" in s.said(), "the report")
    p.pour(p.good("a"), p.good("d"))
    s.wait_ended(4)
    p.rest()
    assert sorted(p.noted()) == ["a", "b", "c", "d"]


def test_c39_a_rewrite_with_equal_size_and_time_is_noticed(pouring):
    """C39: A file that is rewritten with the same size and time is read again, whether a scheduler runs or not."""
    s = pouring.s
    pouring.pour(pouring.good("aaaa"))
    pouring.rest()
    for number, running in enumerate((True, False)):
        if not running:
            s.stop()
        before = os.stat(s.jobs_file)
        with s.jobs_file.open("r+") as stream:
            stream.write(pouring.good(f"bbb{number}"))
        os.utime(s.jobs_file, ns=(before.st_atime_ns, before.st_mtime_ns))
        after = os.stat(s.jobs_file)
        assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
        if not running:
            s.start()
        s.wait_ended(2 + number)
    assert pouring.noted() == ["aaaa", "bbb0", "bbb1"]


def test_c40_lines_appended_without_daemon_are_read_once(pouring):
    """C40: Lines appended while no scheduler runs are read once by the next scheduler.

    It makes no difference whether the last scheduler was killed or ended normally.
    """
    s = pouring.s
    for number, end in enumerate((s.kill, s.stop)):
        end()
        pouring.pour(*(pouring.good(f"{number}-{n}") for n in range(3)), "bad")
        s.start()
        pouring.rest()
        assert len(pouring.noted()) == 3 * (number + 1)
    assert sorted(pouring.noted()) == sorted(f"{a}-{b}" for a in range(2) for b in range(3))
    assert list(pouring.refused()) == [4, 8]


@as_root
def test_b14_a_job_waits_until_the_user_may_enter_its_working_folder(of_nobody):
    """B14: A job waits until the user may enter its working folder and all folders above it.

    Other jobs run meanwhile.
    """
    p, s = of_nobody, of_nobody.s
    (s.folder / "note").write_text('#!/bin/sh\necho "$1" >> "${0%/*}/noted"\n')
    closed = s.folder / "closed"
    (closed / "inner").mkdir(parents=True)
    for folder in (closed, closed / "inner"):
        shutil.chown(folder, "nobody")
    closed.chmod(0o600)
    s.start()
    p.pour("0,note,,x;gpus=0;cwd=closed", "0,note,,y;gpus=0;cwd=closed/inner", p.good("b"))
    wait_for(lambda: "b" in p.noted(), "the others")
    wait_for(lambda: [s.job(n)["reason_code"] for n in (2, 3)] == ["missing"] * 2, "they wait")
    assert f"cannot enter working folder {closed}: no permission; run: chmod u+x {closed}" in s.cli("why", "2").stdout
    assert f"cannot access working folder {closed}/inner: Permission denied" in s.cli("why", "3").stdout
    closed.chmod(0o700)
    s.wait_ended(4)
    assert sorted(p.noted()) == ["a", "b", "x", "y"]


def test_a_drain_fails_if_its_jobs_file_is_unreadable(scheduler):
    """`start --drain` fails if it cannot read its jobs file; a missing file is no failure."""
    s = scheduler(gpus=1)
    s.jobs_file.write_bytes((s.line("a") + "\n").encode("utf-16"))
    drained = s.cli("start", "--gpus", "1", "--drain", code=1)
    assert "UTF-16 instead of UTF-8; save it as UTF-8" in drained.stderr and "no job is left" not in drained.stdout
    s.jobs_file.write_text(s.line("a") + "\n")
    assert "no job is left to run" in s.cli("start", "--gpus", "1", "--drain").stdout and s.starts("a") == 1
    s.jobs_file.unlink()
    assert "no job is left to run" in s.cli("start", "--gpus", "1", "--drain").stdout
