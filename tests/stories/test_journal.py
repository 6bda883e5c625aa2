"""The journal of a real scheduler: kill -9, restarts, damage, a full disk, and a folder, FIFO or link in its place."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.stories.harness import Scheduler, wait_for
from tests.stories.test_schemas import check, undocumented


def lines(s: Scheduler) -> list[dict[str, Any]]:
    """Return the complete lines of the journal; asserts that each matches its published schema."""
    text, _, _ = (s.folder / "queue.jsonl").read_text().rpartition("\n")
    found = [json.loads(line) for line in text.splitlines()]
    for one in found:
        check("journal", one)
    return found


def last(s: Scheduler) -> dict[int, dict[str, Any]]:
    """Return the last line of each job, by job id. Only the last line of a job is valid."""
    return {line["id"]: line for line in lines(s)}


def words(line: dict[str, Any]) -> list[str]:
    """Return the statuses in the history of a line of the journal.

    Assert that the times of the history are in order, and that the last entry has the status and the end time of the
    line.
    """
    times = [at for at, _ in line["history"]]
    assert times == sorted(times) and line["history"][-1][1] == line["status"]
    if line["end_time"] is not None:
        assert times[-1] == line["end_time"]
    return [word for _, word in line["history"]]


def same_as_shown(s: Scheduler, line: dict[str, Any]) -> None:
    """Assert that a line of the journal has the same facts as `show --json`."""
    job = s.job(line["id"])
    assert (line["start_time"], line["end_time"], line["log_file"], line["exit_code"]) == (
        job["started_at"], job["finished_at"], job["log"], job["exit_code"],
    )  # fmt: skip
    gpus = line["gpu_id"]
    assert job["gpus"] == ([] if gpus is None else gpus if isinstance(gpus, list) else [gpus])


@pytest.mark.smoke
def test_s1_6_the_journal_holds_every_job_with_its_history(scheduler: Callable[..., Scheduler]) -> None:
    """S1.6, S1.5: The journal has command, pid, GPUs, times, exit code, log and history of each job.

    After the scheduler's end it has one line for each job.
    """
    s = scheduler(gpus=2, journal="queue.jsonl", commands_file="commands.txt", assign_retry_wait=0.05)
    (s.folder / "commands.txt").write_text("# two\necho 'a  b' | cat && exit 3\n")
    s.hold("held")
    s.start()
    s.wait_ended(1)
    again = s.line("twice", code=2) + ";retries=1"
    s.append(s.line("held"), again, s.line("wide") + ";gpus=2", s.line("child") + ";after_ok=3")
    s.wait_state(2, "running")
    s.wait_state(3, "failed")
    s.wait_state(5, "skipped")
    running = wait_for(lambda: (line := last(s).get(2)) and line["status"] == "running" and line, "it runs")
    assert running["pid"] == s.job(2)["pid"] and words(running) == ["pending", "running"]
    assert stat.S_IMODE((s.folder / "queue.jsonl").stat().st_mode) == 0o600
    wait_for(lambda: last(s).get(4), "it waits")
    assert (last(s)[4]["status"], last(s)[4]["gpu_id"]) == ("pending", None)
    s.release("held")
    s.wait_state(4, "done")
    s.cli("submit", "--gpus", "0", "--", "sleep", "600")
    s.wait_state(6, "running")
    s.cli("cancel", "6", code=None)
    s.wait_state(6, "cancelled")
    assert s.stop() == 0
    found = lines(s)
    assert [line["id"] for line in found] == [1, 2, 3, 4, 5, 6]
    one, held, twice, wide, child, asleep = found
    assert one["command"] == "echo 'a  b' | cat && exit 3"
    assert Path(one["log_file"]).read_text() == "a  b\n"
    assert (one["status"], one["exit_code"], held["exit_code"], wide["gpu_id"]) == ("failed", 3, 0, [0, 1])
    assert words(one) == ["pending", "running", "failed"] and words(wide) == ["pending", "running", "completed"]
    assert words(twice) == ["pending", "running", "pending", "running", "failed"] and twice["exit_code"] == 2
    assert words(child) == ["pending", "skipped"] and child["pid"] is None
    assert words(asleep) == ["pending", "running", "cancelled"]
    assert asleep["command"] == "sleep 600" and asleep["gpu_id"] is None and asleep["exit_code"] is None
    for line in found:
        same_as_shown(s, line)
    assert undocumented(found) == set()


def test_s1_6_s1_7_s1_8_the_journal_is_complete_after_kill_9(scheduler: Callable[..., Scheduler]) -> None:
    """S1.6 to S1.8: After kill -9 the journal has the true exit codes of jobs that ended in the meantime.

    Running jobs are adopted, and no job runs twice. A complete line that another program wrote into the journal stays.
    """
    s = scheduler(gpus=2, journal="queue.jsonl")
    s.hold("stays")
    s.hold("ends")
    s.append(s.line("stays"), s.line("ends", code=7), s.line("waits") + ";gpus=2", s.line("done"))
    s.start()
    for job in (1, 2):
        s.wait_state(job, "running")
    pids = {job: s.job(job)["pid"] for job in (1, 2)}
    wait_for(lambda: [last(s).get(job, {}).get("pid") for job in (1, 2)] == list(pids.values()), "pids")
    s.kill()
    s.release("ends")
    wait_for(lambda: not Path(f"/proc/{pids[2]}").exists(), "it ends while nobody looks")
    with (s.folder / "queue.jsonl").open("a") as stream:
        stream.write('{"mine": 1}\n{"id": 2, "command": "')
    s.start()
    s.wait_state(2, "failed")
    s.wait_state(4, "done")
    found = wait_for(lambda: (all_ := last_of_ours(s)) and all_[4]["status"] == "completed" and all_, "the journal")
    assert (found[1]["status"], found[1]["pid"]) == ("running", pids[1])
    assert (found[2]["status"], found[2]["exit_code"], found[2]["pid"]) == ("failed", 7, pids[2])
    assert words(found[2]) == ["pending", "running", "failed"] and found[3]["status"] == "pending"
    s.release("stays")
    s.wait_ended(4)
    s.kill()
    s.start()
    assert s.stop() == 0
    text = (s.folder / "queue.jsonl").read_text().splitlines()
    assert text[0] == '{"mine": 1}' and [json.loads(line)["id"] for line in text[1:]] == [1, 2, 3, 4]
    for line in text[1:]:
        same_as_shown(s, json.loads(line))
    assert all(s.starts(key) == 1 for key in ("stays", "ends", "waits", "done"))


def last_of_ours(s: Scheduler) -> dict[int, dict[str, Any]]:
    """Return job id → the last line of that job, from a journal that also has lines of other programs."""
    text, _, _ = (s.folder / "queue.jsonl").read_text().rpartition("\n")
    found = map(json.loads, text.splitlines())
    return {line["id"]: line for line in found if "id" in line}


def test_s1_12_a_torn_last_line_is_repaired_or_set_aside(scheduler: Callable[..., Scheduler]) -> None:
    """S1.12: If the scheduler wrote the last line of the journal and the line is incomplete, the scheduler repairs it.

    If another program wrote an incomplete last line, the line is moved to another file. The repair or the move is
    reported once. No job runs again.
    """
    s = scheduler(gpus=1, journal="queue.jsonl")
    s.append(s.line("a"), s.line("b", code=4))
    s.start()
    s.wait_ended(2)
    assert s.stop() == 0
    journal = s.folder / "queue.jsonl"
    whole = journal.read_bytes()
    for cut in (len(whole) - 1, len(whole) - 20, whole.index(b"\n") + 2, whole.index(b"\n"), 3):
        journal.write_bytes(whole[:cut])
        s.start()
        # Lines that are not repaired within BEGIN_S before the start message are repaired in later passes.
        wait_for(lambda: journal.read_bytes() == whole, "the journal is whole")
        assert s.stop() == 0
    assert not list(s.folder.glob("*.torn-*"))
    s.says("an incomplete line was completed", times=3)  # a line that lacks only its newline is not repaired
    journal.write_bytes(whole + b'{"mine": [1, ')
    s.start()
    assert s.stop() == 0
    assert journal.read_bytes() == whole
    (bad,) = s.folder.glob("queue.jsonl.torn-*")
    assert bad.read_bytes() == b'{"mine": [1, \n'
    s.says(f"1 line is not JSON and was moved to {bad}", times=1)
    assert s.starts("a") == s.starts("b") == 1


@pytest.mark.parametrize("what", ["folder", "fifo", "link"])
def test_a_folder_fifo_or_link_instead_of_a_journal_is_reported(scheduler: Callable[..., Scheduler], what: str) -> None:
    """A folder, FIFO or link in place of the journal is reported once. `status` shows this as long as it is there.

    Jobs run. Soon after the obstacle is gone, the journal is complete.
    """
    s = scheduler(gpus=1, journal="queue.jsonl", monitor_interval=0.1)
    journal, victim = s.folder / "queue.jsonl", s.folder / "victim"
    victim.write_text("precious")
    {"folder": journal.mkdir, "fifo": lambda: os.mkfifo(journal), "link": lambda: journal.symlink_to(victim)}[what]()
    s.append(s.line("a"), s.line("b"))
    s.start()
    s.wait_ended(2)
    wait_for(lambda: s.status()["trouble"], "shown")
    why = "it is a symbolic link, which is not followed" if what == "link" else "not a regular file"
    text = f"cannot write the journal {journal}: {why}"
    assert s.status()["trouble"][0].startswith(f"{text}")
    assert text in s.cli("status").stdout.replace("\n           ", " ")
    (journal.rmdir if what == "folder" else journal.unlink)()
    wait_for(lambda: journal.exists() and not s.status()["trouble"], "made good")
    assert [line["status"] for line in lines(s)] == ["completed", "completed"]
    s.says(text, times=1)
    s.says("the scheduler can write the journal ", times=1)
    assert victim.read_text() == "precious" and s.stop() == 0


def test_a_deleted_journal_is_written_again(scheduler: Callable[..., Scheduler]) -> None:
    s = scheduler(gpus=1, journal="queue.jsonl")
    s.append(s.line("a"))
    s.start()
    s.wait_ended(1)
    (s.folder / "queue.jsonl").unlink()
    s.append(s.line("b"))
    s.wait_ended(2)
    wait_for(lambda: (s.folder / "queue.jsonl").exists() and last(s).get(2, {}).get("status") == "completed", "again")
    assert last(s)[1]["status"] == "completed" and s.stop() == 0


def test_f02_the_journal_is_complete_after_a_full_disk(scheduler: Callable[..., Scheduler]) -> None:
    """F02: Jobs run while the disk of the journal is full. When there is space again, the journal becomes complete."""
    s = scheduler(gpus=1)
    small = s.folder / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=0700", "tmpfs", str(small)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    try:
        s.settings["journal"] = small / "queue.jsonl"
        s.start()
        filler = small / "filler"
        with pytest.raises(OSError, match="No space left"), filler.open("wb", buffering=0) as stream:
            while True:
                stream.write(bytes(512))
        s.append(*(s.line(f"n{number}") for number in range(30)))
        s.wait_ended(30)
        assert set(s.states().values()) == {"done"}
        wait_for(lambda: s.status()["trouble"], "shown")
        assert (
            "cannot write the journal " in s.status()["trouble"][0]
            and ": No space left on device; jobs are not affected" in s.status()["trouble"][0]
        )
        filler.unlink()
        wait_for(lambda: not s.status()["trouble"], "made good")
        found = {line["id"]: line for line in map(json.loads, (small / "queue.jsonl").read_text().splitlines())}
        assert sorted(found) == list(range(1, 31)) and {line["status"] for line in found.values()} == {"completed"}
        assert s.stop() == 0
    finally:
        s.end_all()
        subprocess.run(["umount", str(small)], check=True)


def test_a_journal_in_the_place_of_another_file_is_refused(scheduler: Callable[..., Scheduler]) -> None:
    """`start` refuses a journal whose path is also the path of another file of the scheduler.

    It exits with code 2 and prints one line. Nothing is written to the other file.
    """
    s = scheduler()
    s.append("0,a.py,,")
    before = s.jobs_file.read_bytes()
    error = s.cli("start", "--gpus", "1", "--journal", "jobs.txt", code=2).stderr
    assert error == f"gpujob: journal: {s.jobs_file} is also the jobs file; name another file\n"
    (s.folder / "config.yaml").write_text("journal: gpu_scheduler_state.json\n")
    assert "is also the state file" in s.cli("start", "--gpus", "1", code=2).stderr
    assert s.jobs_file.read_bytes() == before


def test_s1_12_repeated_kills_leave_only_readable_or_repairable_lines(
    scheduler: Callable[..., Scheduler],
) -> None:
    """S1.12, S1.6: At whatever moment the daemon is killed, its journal keeps only lines that can be read or repaired.

    No line has to be moved to another file. At the end the journal has one line for each job, with its exit code.
    """
    s = scheduler(gpus=2, journal="queue.jsonl")
    for round_ in range(6):
        s.append(*(s.line(f"r{round_}n{number}", code=number) for number in range(6)))
        s.start()
        wait_for(lambda first=6 * round_ + 1: s.states().get(first) not in (None, "pending"), "begun")
        s.kill()
    s.start()
    s.wait_ended(36)
    assert s.stop(signal.SIGTERM) == 0
    found = lines(s)
    assert [line["id"] for line in found] == list(range(1, 37)) and not list(s.folder.glob("*.torn-*"))
    assert not [name for name in os.listdir(s.folder) if ".new-" in name]
    for line in found:
        same_as_shown(s, line)
        lost = s.job(line["id"])["outcome"] == "lost"
        assert lost or line["exit_code"] == (line["id"] - 1) % 6
        assert words(line)[-1] == ("completed" if line["exit_code"] == 0 else "failed")
