"""What people and editors do to a watched file, on a real scheduler."""

from __future__ import annotations

import os
import subprocess

from tests.stories.harness import wait_for


def test_editors_renames_rotation_and_truncation(scheduler):
    """S3.10, C03, C04, C05, C07: sed -i, mv over, rotation with unread lines, truncation, deletion: each line once."""
    s = scheduler(gpus=4)
    s.append(s.line("a"), s.line("b"))
    s.start()
    s.wait_ended(2)
    subprocess.run(["sed", "-i", "1i # edited", str(s.jobs_file)], check=True)
    s.append(s.line("c"))
    s.wait_ended(3)
    aside = s.folder / "new"
    aside.write_text(s.jobs_file.read_text() + s.line("d") + "\n")
    os.replace(aside, s.jobs_file)  # an editor's write-and-rename
    s.wait_ended(4)
    s.append(s.line("e"))
    s.jobs_file.rename(s.folder / "jobs.txt.1")
    s.append(s.line("f"))  # a new file of the old name
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


def test_a_last_line_without_newline_is_taken_when_it_has_stood(scheduler):
    """S3.11, C01, C02."""
    s = scheduler(gpus=1)
    s.start()
    with s.jobs_file.open("a") as stream:
        stream.write(s.line("open"))
    assert s.states() == {}
    s.wait_ended(1)
    with s.jobs_file.open("a") as stream:
        stream.write(" --more\n" + s.line("next") + "\n")
    s.wait_ended(2)
    assert s.starts("open") == 1 and s.starts("next") == 1
    assert "the line was changed after it was read" in s.cli("status").stdout


def test_lines_added_while_no_daemon_runs(scheduler):
    """C40: what was appended, edited or rotated meanwhile is read at the next start."""
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
    """Contract 3: the same line with another priority or GPU list, in place of the old one."""
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


def test_file_of_others_is_not_read_until_mended(scheduler):
    """C37: while running, a jobs file that others may write is left alone, said once, read again when mended."""
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


def test_polling_finds_lines_too(scheduler):
    """C38: for folders without change events."""
    s = scheduler(gpus=1, watch="poll")
    s.start()
    s.append(s.line("a"))
    s.wait_ended(1)
    s.says("polled")


def test_no_jobs_file_at_all(scheduler):
    """S3.44: `--jobs-file ""` watches no file; submit works."""
    s = scheduler(gpus=1, jobs_file="")
    s.append(s.line("a"))
    s.start()
    s.cli("submit", "--wait", "--", "true")
    assert s.starts("a") == 0


def test_f12_s16_files_are_private_whatever_the_umask(scheduler):
    """F12, S16: 0600 and 0700 with a umask of 000."""
    s = scheduler(gpus=1)
    old = os.umask(0)
    try:
        s.append(s.line("a"))
        s.jobs_file.chmod(0o600)
        s.folder.chmod(0o700)
        s.start()
        s.cli("submit", "--wait", "--", "true")
        s.wait_ended(2)
    finally:
        os.umask(old)
    ours = [s.folder / ".gpujob", s.folder / "gpu_scheduler_logs"]
    for top in ours:
        for folder, _, files in os.walk(top):
            assert os.stat(folder).st_mode & 0o077 == 0, folder
            for name in files:
                assert os.stat(os.path.join(folder, name)).st_mode & 0o077 == 0, name
    for name in ("gpu_scheduler.log", "gpu_scheduler_state.json"):
        assert (s.folder / name).stat().st_mode & 0o777 == 0o600
