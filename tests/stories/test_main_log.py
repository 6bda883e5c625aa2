"""The main log of a real scheduler: its place, a log that is moved or removed, a full disk, and no log at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stories.harness import wait_for


@pytest.mark.smoke
def test_s3_42_the_main_log_is_gpu_scheduler_log(scheduler):
    """S3.42, S18: The main log is a private file beside the state file. Each log record is one line.

    If the file is moved (for example by logrotate) or removed, the scheduler creates a new file.
    """
    s = scheduler(gpus=1)
    s.append(s.line("a") + ";label=odd\u2028name", "0,\x1b[2Jx.py,\u2028,it's,")
    s.start()
    s.wait_ended(1)
    log = s.folder / "gpu_scheduler.log"
    wait_for(lambda: "jobs.txt:2" in log.read_text() and "done" in log.read_text(), "the records")
    assert log.stat().st_mode & 0o777 == 0o600
    lines = log.read_text().splitlines()
    assert all(line[:4].isdigit() and line.split()[2] in ("INFO", "WARNING") for line in lines)
    assert not any(char in log.read_text() for char in "\x1b\u2028")
    moved = log.rename(s.folder / "gpu_scheduler.log.1")
    s.append(s.line("c"))
    s.wait_state(2, "done")
    wait_for(lambda: log.exists() and "job 2 (job.py) done" in log.read_text(), "a new one")
    assert "job 2" not in moved.read_text() and log.stat().st_mode & 0o777 == 0o600
    log.unlink()
    s.append(s.line("d"))
    wait_for(lambda: log.exists() and "job 3 (job.py) done" in log.read_text(), "made again")
    s.stop()
    s.start()
    assert "job 3" in log.read_text(), "the next scheduler goes on in it"


def test_an_empty_log_file_setting_writes_no_main_log(scheduler):
    """With `log_file: ""` the scheduler writes no main log.

    `start` refuses a path at which it cannot open a main log.
    """
    s = scheduler(gpus=1)
    (s.folder / "config.yaml").write_text('log_file: ""\n')
    s.append(s.line("a"))
    s.start()
    s.wait_ended(1)
    s.stop()
    assert not (s.folder / "gpu_scheduler.log").exists() and s.starts("a") == 1
    os.mkfifo(s.folder / "fifo")
    for name, what in (("fifo", "No such device or address"), ("no/such/log", "No such file")):
        error = s.cli("start", "--gpus", "1", "--log-file", name, code=1).stderr
        assert "cannot open the main log" in error and what in error


def test_f02_jobs_run_without_space_for_the_main_log(scheduler):
    """F01, F02 in part: If the disk of the main log is full, jobs still run.

    When there is space again, the scheduler logs how many log records were lost.
    """
    s = scheduler(gpus=1)
    small = Path(s.folder, "small")
    small.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k,mode=0700", "tmpfs", str(small)], capture_output=True
    )
    if done.returncode:
        pytest.skip("needs the right to mount")
    try:
        s.settings["log_file"] = small / "main.log"
        s.start()
        fill = small / "fill"
        with pytest.raises(OSError), fill.open("wb", buffering=0) as stream:
            while True:
                stream.write(bytes(512))
        s.append(*(s.line(f"n{n}") for n in range(60)))
        s.wait_ended(60)
        assert set(s.states().values()) == {"done"}
        fill.unlink()
        s.append(s.line("last"))
        wait_for(lambda: "job 61 (job.py) done" in (small / "main.log").read_text(), "it is written again")
        text = (small / "main.log").read_text()
        assert "lost log records: " in text and " (No space left on device)" in text
        assert all(line[:2] in ("20", "2") for line in text.splitlines())  # "2": only one byte of a record had space
        assert s.stop() == 0
    finally:
        s.end_all()
        subprocess.run(["umount", str(small)], check=True)


def test_f03_following_a_log_of_300_mb_needs_little_memory(scheduler):
    """F03, S3.20: `logs -f` prints a log of 300 MB completely; the scheduler's memory grows by less than 20 MB."""
    s = scheduler(gpus=1)
    s.start()
    line = "x" * 63
    s.cli("submit", "--cpu", "--", "sh", "-c", f"yes {line} | head -c 320000000; echo end")

    def memory() -> int:
        text = Path(f"/proc/{s.pid}/status").read_text()
        return int(text.split("VmRSS:")[1].split()[0])

    s.wait_state(1, "running", "done")
    before = memory()
    done = subprocess.run(
        f"{sys.executable} -m scheduler logs -f 1 | uniq -c", shell=True,
        cwd=s.folder, env=s.environ, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.stdout.split() == ["5000000", line, "1", "end"], done.stderr
    assert memory() < before + 20_000


def test_s18_line_breaks_in_fields_forge_no_record(scheduler):
    """S18: A line break in a field of a job forges no log record: the log has one end record per ended job."""
    forged = "x\n2026-11-21 00:00:00 INFO job 99 done: exit code 0\n"
    s = scheduler(gpus=1, cpu_slots=4)
    there = s.folder / "a\nb"
    there.mkdir()
    script = there / "s\nc.sh"
    script.write_text("#!/bin/sh\nprintf '%s' \"$1\"; exit 3\n")
    script.chmod(0o755)
    s.start()
    for words in (
        ["--", "sh", "-c", "exit 2", forged], ["--cwd", str(there), "--", "./s\nc.sh", forged], ["--env", f"X={forged}", "--", "true"],
        ["--conda", forged, "--", "true"],
    ):  # fmt: skip
        s.cli("submit", "--cpu", *words)
    for words in (["--label", forged, "--", "true"], ["--", f"/no/such{forged}"]):
        s.cli("submit", "--cpu", *words, code=2)
    s.wait_state(3, "done")
    wait_for(lambda: s.job(4)["reason_code"] == "missing" and sorted(s.states().values())[0] != "running", "it waits")
    wait_for(lambda: len(s.rows("SELECT 1 FROM jobs WHERE finished_at IS NOT NULL")) == 3, "three ends")
    assert s.stop() == 0
    lines = (s.folder / "gpu_scheduler.log").read_text().splitlines()
    assert all(
        line.split(" ")[2] in ("INFO", "WARNING") and not line.startswith("2026-11-21 00:00:00") for line in lines
    )
    assert sum(" done: " in line or " failed: " in line for line in lines if " waits: " not in line) == 3, lines
    assert not [line for line in lines if line.split(" ", 3)[3].startswith("job 99")]
    assert not [line for line in s.said().splitlines() if line.startswith("2026")]
