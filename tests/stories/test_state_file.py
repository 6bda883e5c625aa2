"""The state file of a running scheduler is always complete, no edit is lost, and invalid contents are set aside."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from scheduler.client import send_request
from scheduler.client.client import SchedulerClient
from scheduler.client.send_request import revision_of, until_shown
from scheduler.core.errors import NoDaemon, NotAsked
from scheduler.core.requests import Pause, Resume
from scheduler.store.database import Database
from scheduler.store.jobs import ask
from scheduler.store.paths import Places
from scheduler.system.atomic_files import leftover_temporaries
from tests.stories.harness import PATIENCE_S, ROOT, Scheduler, wait_for

HOW = ("in place", "rename", "truncate", "jq")


def path(s: Scheduler) -> Path:
    return s.folder / "gpu_scheduler_state.json"


def read(s: Scheduler) -> dict[str, Any]:
    """Return the contents of the state file. The file must be complete at any moment."""
    found: dict[str, Any] = json.loads(path(s).read_text())
    return found


def edit(s: Scheduler, how: str = "in place", **changes: Any) -> None:
    """Read the state file, change it and save it.

    ``how``: "in place" overwrites the file. "truncate" overwrites the file in two writes with a flush between them.
    "jq" lets another program write a new file and moves the new file to the path of the state file. With any other
    word, the new file is renamed to this path.
    """
    document = {**read(s), **changes}
    other = s.folder / f"edit-{threading.get_ident()}"
    if how == "in place":
        path(s).write_text(json.dumps(document))
    elif how == "truncate":
        text = json.dumps(document)
        with path(s).open("w") as stream:
            stream.write(text[:30])
            stream.flush()
            stream.write(text[30:])
    elif how == "jq":
        code = (
            "import json,sys; d=json.load(open(sys.argv[1])); d.update(json.loads(sys.argv[2])); print(json.dumps(d))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, path(s), json.dumps(changes)], capture_output=True, check=True
        )
        other.write_bytes(done.stdout)
        shutil.move(other, path(s))
    else:
        other.write_text(json.dumps(document))
        other.rename(path(s))


def paused(s: Scheduler) -> list[int]:
    """Return the paused GPUs in the store."""
    return [row[0] for row in s.rows("SELECT gpu FROM pauses ORDER BY gpu")]


def shows(s: Scheduler, *gpus: int) -> None:
    """Wait until store and state file have exactly these GPUs paused, and check that `status` shows the same."""
    wait_for(lambda: paused(s) == list(gpus), f"paused {gpus}, is {paused(s)}\n{s.said()[-2000:]}")
    wait_for(lambda: path(s).exists() and read(s)["paused_gpus"] == list(gpus), f"shown {gpus}")
    found = s.status()
    assert [gpu["index"] for gpu in found["gpus"] if gpu["paused"]] == list(gpus)


@pytest.mark.parametrize("how", HOW)
def test_d09_s3_32_edits_by_any_program_are_obeyed(scheduler, how):
    """S3.30, S3.32, D09: However an edit is saved, it pauses and resumes GPUs and the queue.

    An unknown GPU is reported; the other GPUs in the edit still count.
    """
    s = scheduler(gpus=3)
    s.start()
    wait_for(path(s).exists, "state file")
    edit(s, how, paused_gpus=[0])
    shows(s, 0)
    edit(s, how, paused_gpus=[1, 2])
    shows(s, 1, 2)
    edit(s, how, paused_gpus=[1, 99])
    shows(s, 1)
    s.says("pauses GPU 99, which is not managed here (managed: 0-2)", times=1)
    edit(s, how, paused=True)
    wait_for(lambda: s.status()["paused"], "queue paused")
    s.append(s.line("late", gpus="0"))
    wait_for(lambda: s.states() == {1: "pending"}, "the job waits")
    assert s.cli("why", "1").stdout.startswith("job 1 waits (paused): the queue is paused")
    edit(s, how, paused=False)
    s.wait_ended(1)
    s.kill()
    s.start()
    shows(s, 1)


def test_s3_31_the_last_of_many_concurrent_pauses_and_resumes_counts(scheduler):
    """S3.31, D05, D11: If verbs and edits pause and resume GPUs at the same time, the last change of each GPU counts.

    Two threads use verbs, one thread saves edits, and jobs run all the time.
    """
    s = scheduler(gpus=4, cpu_slots=4)
    s.start()
    wait_for(path(s).exists, "state file")
    rng = random.Random(20261121)
    stop = threading.Event()
    trouble: list[BaseException] = []
    last: dict[int, bool] = {}

    def churn() -> None:
        for number in range(1000):
            if stop.is_set():
                return
            s.append(f"0,/bin/true,,{number};gpus=0")
            time.sleep(0.02)

    def verbs(gpu: int, steps: list[bool]) -> None:
        client = SchedulerClient(str(path(s)))
        for on in steps:
            request = Pause((gpu,)) if on else Resume((gpu,))
            assert client.ask(request, 30).code == 0
            last[gpu] = on

    def edits(steps: list[tuple[str, bool, bool]]) -> None:
        for how, two, three in steps:
            document = read(s)
            wanted = set(document["paused_gpus"]) - {2, 3} | {gpu for gpu, on in ((2, two), (3, three)) if on}
            edit(s, how, **{**document, "paused_gpus": sorted(wanted)})  # revision and GPUs: from one read
            last[2], last[3] = two, three

    def guarded(what: Any, *arguments: Any) -> threading.Thread:
        def run() -> None:
            try:
                what(*arguments)
            except BaseException as error:
                trouble.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    coin = lambda: rng.random() < 0.5  # noqa: E731
    workers = [
        guarded(verbs, 0, [coin() for _ in range(300)]),
        guarded(verbs, 1, [coin() for _ in range(300)]),
        guarded(edits, [(rng.choice(HOW[:3]), coin(), coin()) for _ in range(400)]),
    ]
    busy = guarded(churn)
    for worker in workers:
        worker.join()
    stop.set()
    busy.join()
    assert not trouble, trouble
    shows(s, *sorted(gpu for gpu, on in last.items() if on))
    s.kill()
    s.start()
    shows(s, *sorted(gpu for gpu, on in last.items() if on))
    assert not [name for name in os.listdir(s.folder) if "bad" in name]
    wait_for(lambda: not [name for name in os.listdir(s.folder) if ".new-" in name], "no file half written is left")


@pytest.mark.parametrize("seed", [0, 7])
def test_s3_31_the_last_change_counts_if_verbs_and_edits_alternate(scheduler, monkeypatch, seed):
    """If verbs and edits change a pause one after the other, the last change counts.

    This also holds if an edit changes the pause, a verb requests the same change, and a later edit undoes the change.
    """
    monkeypatch.setattr(send_request, "SHOWN_S", PATIENCE_S)
    s = scheduler(gpus=1)
    s.start()
    wait_for(path(s).exists, "state file")
    client, rng = SchedulerClient(str(path(s))), random.Random(seed)
    for number in range(120):
        on = rng.random() < 0.5
        if rng.random() < 0.5:
            request = Pause((0,)) if on else Resume((0,))
            before = revision_of(str(path(s)))
            assert client.ask(request, 30).code == 0
            until_shown(str(path(s)), request, before)  # as `gpujob pause` waits
        else:
            edit(s, rng.choice(HOW[:3]), paused_gpus=[0] if on else [])
        if number % 10 == 9:
            shows(s, *([0] if on else []))


def test_s3_33_the_state_file_is_always_complete_and_written_at_most_10_times_a_second(scheduler):
    """S3.33: The state file is complete at every read and written at most ten times a second, while 300 jobs run."""
    s = scheduler(gpus=2, cpu_slots=8)
    s.start()
    wait_for(path(s).exists, "state file")
    first, began = read(s)["revision"], time.monotonic()
    s.append(*(f"0,/bin/true,,{number};gpus=0" for number in range(300)))
    reads = 0
    while True:
        document = read(s)
        reads += 1
        assert document["gpu_status"] == [0.0, 0.0] and document["paused_gpus"] == []
        if document["jobs"]["done"] == 300:
            break
        assert time.monotonic() - began < 150  # pytest ends a test after 180 s
        time.sleep(0.001)  # leaves the processor to the scheduler; each version stays for 100 ms
    pictures = document["revision"] - first
    assert 2 <= pictures <= (time.monotonic() - began) * 10 + 2, (pictures, reads)
    assert document["running"] == [] and document["jobs"]["pending"] == 0
    assert path(s).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("damage", ["", '{"paused_gpus": [1', '{"paused_gpus": [1],}', "\0" * 64, '{"paused_gpus": 1}'])
def test_d01_d02_d03_s3_34_an_invalid_state_file_is_saved_as_a_copy_and_pauses_stay(scheduler, damage):
    """S3.34: If the state file is invalid, its contents are saved unchanged in another file. This is reported once.

    The pauses stay in force.
    """
    s = scheduler(gpus=2)
    s.start()
    wait_for(path(s).exists, "state file")
    s.cli("pause", "1")
    path(s).write_text(damage)
    wait_for(lambda: "copy saved as" in s.said(), "the copy")  # logged after the copy is complete
    (aside,) = s.folder.glob("gpu_scheduler_state.json.bad-*")
    assert aside.read_text() == damage and aside.stat().st_mode & 0o777 == 0o600
    shows(s, 1)
    s.says("not a valid state file", times=1)
    s.says("pauses unchanged", times=1)


def test_d04_an_unknown_key_is_reported(scheduler):
    """An unknown key in the state file is reported together with the most similar valid key.

    If a user changes a key that cannot be edited, the scheduler overwrites the change.
    """
    s = scheduler(gpus=2)
    s.start()
    wait_for(path(s).exists, "state file")
    edit(s, pause_gpus=[1], gpu_status=[1.0, 1.0])
    wait_for(lambda: "did you mean paused_gpus?" in s.said(), "named")
    wait_for(lambda: read(s)["gpu_status"] == [0.0, 0.0] and "pause_gpus" not in read(s), "painted over")


@pytest.mark.smoke
def test_d06_s3_42_deleting_the_state_file_resets_only_the_pauses(scheduler):
    """S3.42: If the state file is deleted, the pauses are reset, the file is written again, and jobs stay unchanged.

    The main log, here with its default name, reports the reset.
    """
    s = scheduler(gpus=2)
    s.start()
    s.hold("a")
    s.append(s.line("a", gpus="0"))
    s.wait_state(1, "running")
    s.cli("pause", "0-1")
    s.cli("queue", "pause")
    path(s).unlink()
    shows(s)
    assert not s.status()["paused"] and s.states() == {1: "running"} and read(s)["gpu_status"] == [1.0, 0.0]
    log = s.folder / "gpu_scheduler.log"
    wait_for(lambda: "the state file was deleted: all pauses are removed" in log.read_text(), "the log")
    s.cli("pause", "1")
    s.stop()
    path(s).unlink()
    s.start()
    shows(s)
    s.release("a")
    s.wait_ended(1)


@pytest.mark.smoke
def test_an_edit_made_without_daemon_takes_effect_before_a_job_starts(scheduler):
    s = scheduler(gpus=1)
    s.start()
    s.stop()
    s.append(s.line("a"))
    edit(s, paused_gpus=[0])
    s.start()
    wait_for(lambda: s.states() == {1: "pending"}, "accepted")
    shows(s, 0)
    assert s.starts("a") == 0
    edit(s, paused_gpus=[])
    s.wait_ended(1)


def test_pauses_by_verb_without_a_daemon_and_by_edit_do_not_undo_each_other(scheduler):
    s = scheduler(gpus=3)
    s.start()
    s.stop()
    edit(s, paused_gpus=[0])
    assert "no scheduler is running" in s.cli("pause", "2").stderr
    assert read(s)["paused_gpus"] == [0, 2], "the file is painted, the edit taken in"
    edit(s, paused_gpus=[0, 1, 2])
    s.cli("resume", "0")
    assert read(s)["paused_gpus"] == [1, 2]
    s.start()
    shows(s, 1, 2)


def test_a_state_file_older_than_the_last_pause_is_no_edit(scheduler):
    """If the daemon is killed after it committed a change of the pauses, the state file may not show this change yet.

    The next daemon does not treat this old state file as an edit.
    """
    s = scheduler(gpus=2)
    s.start(GPUJOB_CRASH_AT="state.tmp_written:6")
    wait_for(path(s).exists, "state file")
    before = path(s).read_bytes()
    client = SchedulerClient(str(path(s)))
    wanted: list[int] = []
    for number in range(20):
        request = Resume((1,)) if number % 2 else Pause((0, 1))
        shown = revision_of(str(path(s)))
        try:
            client.ask(request, 30)
        except NotAsked:
            break
        except NoDaemon:  # the daemon was killed before its answer; the next one carries out the request
            wanted = [0] if isinstance(request, Resume) else [0, 1]
            break
        until_shown(str(path(s)), request, shown)
    assert wait_for(lambda: s.process.poll(), "killed at the point") == -signal.SIGKILL
    wanted = wanted or paused(s)
    assert wanted
    path(s).write_bytes(before)  # an older version of the state file
    s.start()
    shows(s, *wanted)


def test_a_leftover_temporary_state_file_undoes_no_request(scheduler):
    """If a daemon is killed before it renames a new state file into place, the new file stays as a temporary file.

    The temporary file shows the GPU as paused. The next daemon does not take it for an edit, and obeys a stored
    `resume`.
    """
    s = scheduler(gpus=2)
    s.start()
    s.cli("pause", "0,1")
    shows(s, 0, 1)
    s.stop()
    document = read(s)
    document["revision"] += 1
    database = Database(Places(str(path(s))))
    with database.writing() as connection:
        ask(connection, Resume((1,)), time.time())  # as if asked while the daemon wrote the pause
    database.close()
    code = "import sys; from scheduler.system.atomic_files import _write_temporary as write; write(*sys.argv[1:2], sys.argv[2].encode(), False)"
    subprocess.run([sys.executable, "-c", code, str(path(s)), json.dumps(document)], check=True, cwd=ROOT)
    assert leftover_temporaries(str(path(s)))
    s.start()
    wait_for(lambda: "GPU 1 resumed" in s.said(), "the stored request")
    s.append(s.line("a"))
    s.wait_ended(1)
    wait_for(lambda: not leftover_temporaries(str(path(s))), "the file aside was read and deleted")
    shows(s, 0)


@pytest.mark.parametrize("how", ["full", "read-only"])
def test_d07_jobs_continue_while_the_state_file_cannot_be_written(scheduler, tmp_path, how):
    """If the state file cannot be written, jobs continue, and the file is updated when it can be written again.

    Root may write everywhere, so the test fills a file system or mounts it read-only.
    """
    if os.getuid() != 0:
        pytest.skip("mounting needs root")
    s = scheduler(gpus=2)
    inner = tmp_path / "small"
    inner.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k,nr_inodes=64", "tmpfs", str(inner)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"no mount here: {done.stderr}")
    try:
        house = tmp_path / ".gpujob-state"
        house.mkdir(mode=0o700)
        (inner / ".gpujob-state").mkdir()  # only the state file is on the small file system
        subprocess.run(["mount", "--bind", str(house), str(inner / ".gpujob-state")], check=True)
        s.settings.update(
            state_file=str(inner / "state.json"), log_dir=str(tmp_path / "logs"), jobs_file=str(s.jobs_file)
        )
        s.settings["log_file"] = str(tmp_path / "main.log")
        s.start()
        file = inner / "state.json"
        wait_for(file.exists, "state file")
        if how == "read-only":
            words = ["mount", "-o", "remount,ro", str(inner)]  # the remount fails while the file is being written
            wait_for(lambda: subprocess.run(words, capture_output=True).returncode == 0, "it is read-only")
        else:
            fill = os.open(inner / "fill", os.O_WRONLY | os.O_CREAT)
            with pytest.raises(OSError, match="No space"):
                while os.write(fill, b"x" * 512):
                    continue
            os.close(fill)
        said = {"full": "No space left on device", "read-only": "Read-only file system"}[how]
        s.append(f"0,{s.script},,{s.folder} full 0 0,")
        wait_for(lambda: f"cannot write {file}: {said}; jobs are not affected" in s.said(), "said")
        wait_for(lambda: s.starts("full") == 1, "jobs go on")
        if how == "read-only":
            subprocess.run(["mount", "-o", "remount,rw", str(inner)], check=True)
        else:
            (inner / "fill").unlink()
        wait_for(lambda: json.loads(file.read_text())["jobs"]["done"] == 1, "caught up")
        wait_for(lambda: "the scheduler can write " in s.said(), "said")
    finally:
        s.end_all()
        for place in (inner / ".gpujob-state", inner):
            subprocess.run(["umount", "-l", str(place)], check=False)


def test_d08_a_link_in_place_of_the_state_file_is_not_followed(scheduler):
    s = scheduler(gpus=1)
    other = s.folder / "bashrc"
    other.write_text("mine\n")
    path(s).symlink_to(other)
    s.start()
    s.append(s.line("a"))
    s.wait_ended(1)
    assert other.read_text() == "mine\n" and path(s).is_symlink()
    s.says("it is a symbolic link, which is not followed; put a regular file there", times=1)
    path(s).unlink()
    wait_for(lambda: path(s).exists() and not path(s).is_symlink(), "painted when it is gone")


def test_d10_swap_and_backup_files_are_ignored(scheduler):
    s = scheduler(gpus=1)
    s.start()
    wait_for(path(s).exists, "state file")
    for name in (".gpu_scheduler_state.json.swp", "gpu_scheduler_state.json~", "4913"):
        (s.folder / name).write_text('{"paused_gpus": [0]}')
    s.append(s.line("a"))
    s.wait_ended(1)
    assert paused(s) == [] and s.status()["daemon"]["alive"]


def test_d11_each_of_forty_saves_of_the_state_file_takes_effect(scheduler):
    s = scheduler(gpus=2)
    s.start()
    wait_for(path(s).exists, "state file")
    document = read(s)
    for number in range(40):
        path(s).write_text(json.dumps({**document, "paused_gpus": [number % 2]}))
        wait_for(lambda wanted=number % 2: paused(s) == [wanted], f"save {number}")
    shows(s, 1)

    def told(gpu: int) -> int:
        return (s.folder / "gpu_scheduler.log").read_text().count(f"GPU {gpu} paused by an edit")

    wait_for(lambda: told(0) == told(1) == 20, "forty edits in the log")


def test_a_second_daemon_on_the_same_state_file_is_refused(scheduler):
    """S3.37: A second daemon on the same state file is refused, names the pid of the first, and changes nothing."""
    s = scheduler(gpus=1)
    s.start()
    wait_for(path(s).exists, "state file")
    s.cli("pause", "0")
    shows(s, 0)
    before = read(s)
    done = s.cli("start", "--gpus", "4", code=1)
    assert f"pid {s.pid}" in done.stderr
    assert {**read(s), "updated_at": 0, "revision": 0} == {**before, "updated_at": 0, "revision": 0}


def test_edits_are_noticed_by_polling(scheduler):
    """Without inotify, edits are noticed by polling, about a second later."""
    s = scheduler(gpus=2, watch="poll")
    s.start()
    wait_for(path(s).exists, "state file")
    edit(s, paused_gpus=[1])
    shows(s, 1)


def test_edits_of_the_state_file_survive_the_end_of_the_daemon(scheduler):
    s = scheduler(gpus=2)
    for number in range(4):
        s.start()
        wait_for(path(s).exists, "state file")
        edit(s, "in place", paused_gpus=[number % 2])
        shows(s, number % 2)
        s.stop(signal.SIGTERM)
        assert read(s)["paused_gpus"] == [number % 2]
