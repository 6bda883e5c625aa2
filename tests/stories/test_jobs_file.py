"""Changes to a watched file by people and editors, with a real scheduler."""

from __future__ import annotations

import os
import signal
import subprocess
import time

from tests.stories.harness import wait_for


def test_each_line_runs_once_however_the_jobs_file_is_changed(scheduler):
    """S3.10, C03, C04, C05, C07: Each line runs once, whatever happens to the file.

    The file is edited in place, replaced, rotated with unread lines, truncated and deleted.
    """
    s = scheduler(gpus=4)
    s.append(s.line("a"), s.line("b"))
    s.start()
    s.wait_ended(2)
    subprocess.run(["sed", "-i", "1i # edited", str(s.jobs_file)], check=True)
    s.append(s.line("c"))
    s.wait_ended(3)
    aside = s.folder / "new"
    aside.write_text(s.jobs_file.read_text() + s.line("d") + "\n")
    os.replace(aside, s.jobs_file)  # as editors save
    s.wait_ended(4)
    s.append(s.line("e"))
    s.jobs_file.rename(s.folder / "jobs.txt.1")
    s.append(s.line("f"))  # creates a new file with the old name
    s.wait_ended(6)
    s.jobs_file.write_text("")
    s.append(s.line("g"))
    s.wait_ended(7)
    s.jobs_file.unlink()
    wait_for(lambda: "it is read when it appears" in s.said(), "the warning")
    s.append(s.line("h"), s.line("a"))
    s.wait_ended(8)
    assert [s.starts(key) for key in "abcdefgh"] == [1] * 8
    assert len(s.states()) == 8


def test_an_unterminated_last_line_becomes_a_job_after_a_while(scheduler):
    """S3.11, C01, C02: A last line without a newline becomes a job when it has not changed for a while.

    Text that is added to this line later is reported and not run.
    """
    s = scheduler(gpus=1)
    s.start()
    written = time.time()
    with s.jobs_file.open("a") as stream:
        stream.write(s.line("open"))
    s.wait_ended(1)
    assert s.rows("SELECT submitted_at FROM jobs")[0][0] - written >= 1.9
    with s.jobs_file.open("a") as stream:
        stream.write(" --more\n" + s.line("next") + "\n")
    s.wait_ended(2)
    assert s.starts("open") == 1 and s.starts("next") == 1
    assert "the line was changed after it was read" in s.cli("status").stdout


def test_lines_added_while_no_daemon_runs_are_read_at_the_next_start(scheduler):
    """C40: Lines that are appended while no daemon runs are read at the next start.

    Lines in a file that was rotated away in the meantime are read, too.
    """
    s = scheduler(gpus=2)
    s.append(s.line("a"))
    s.start()
    s.wait_ended(1)
    s.kill()
    s.append(s.line("b"))
    s.jobs_file.rename(s.folder / "jobs.txt.1")
    s.append(s.line("c"), s.line("a"))
    s.start()
    s.wait_ended(3)
    assert [s.starts(key) for key in "abc"] == [1, 1, 1]


def test_a_changed_line_changes_the_waiting_job(scheduler):
    """Contract 3: A line whose priority or GPU list is changed in place changes the waiting job."""
    s = scheduler(gpus=2)
    s.hold("x")
    s.append(s.line("x", gpus="0"), s.line("y", gpus="0"))
    s.start()
    s.wait_state(1, "running")
    text = s.jobs_file.read_text()
    s.jobs_file.write_text(text.replace(s.line("y", gpus="0"), s.line("y", gpus="1", priority=4)))
    s.wait_state(2, "done")
    job = s.job(2)
    assert job["gpus"] == [1] and job["priority"] == 4
    s.says("changed")


def test_a_jobs_file_that_others_may_write_is_not_read(scheduler):
    """C37: If others may write to the jobs file while the scheduler runs, this is reported once.

    The file is not read until its mode is corrected.
    """
    s = scheduler(gpus=1, monitor_interval=1)
    s.append(s.line("a"))
    s.start()
    s.wait_ended(1)
    s.jobs_file.chmod(0o666)
    s.append(s.line("b"))
    wait_for(lambda: "all users may write to it: chmod o-w" in s.said(), "the report")
    assert s.starts("b") == 0
    s.jobs_file.chmod(0o600)
    s.wait_ended(2)
    s.says("all users may write to it", times=1)


def test_polling_finds_new_lines(scheduler):
    """C38: With `watch: poll` new lines are found without kernel events."""
    s = scheduler(gpus=1, watch="poll")
    s.start()
    s.append(s.line("a"))
    s.wait_ended(1)
    s.says("polled")


def test_an_empty_jobs_file_setting_watches_no_file(scheduler):
    """S3.44: With `--jobs-file ""` no file is watched, and `submit` works."""
    s = scheduler(gpus=1, jobs_file="")
    s.append(s.line("a"))
    s.start()
    s.cli("submit", "--wait", "--", "true")
    assert s.starts("a") == 0


def test_f12_s16_files_are_private_whatever_the_umask(scheduler):
    """F12, S16: With a umask of 000 the scheduler's files and folders give no rights to others."""
    s = scheduler(gpus=1)
    s.append(s.line("a"))
    s.jobs_file.chmod(0o600)
    s.folder.chmod(0o700)
    s.command = ["sh", "-c", 'umask 000; exec "$@"', "sh", *s.command]
    s.start()
    submit = [*s.command, "submit", "--wait", "--", "true"]
    subprocess.run(submit, cwd=s.folder, env=s.environ, check=True, timeout=90)
    s.wait_ended(2)

    def all_private() -> None:
        for top in (s.folder / ".gpujob", s.folder / "gpu_scheduler_logs"):
            for folder, _, files in os.walk(top):
                assert os.stat(folder).st_mode & 0o077 == 0, folder
                for name in files:
                    assert os.stat(os.path.join(folder, name)).st_mode & 0o077 == 0, name

    s.freeze()  # otherwise its history thread may remove a file that was just listed
    all_private()
    os.kill(s.pid, signal.SIGCONT)
    assert s.stop() == 0
    all_private()
    for name in ("gpu_scheduler.log", "gpu_scheduler_state.json"):
        assert (s.folder / name).stat().st_mode & 0o777 == 0o600
