"""Tests of the HTTP API over a real scheduler: its routes, and the statements S2.x of docs/acceptance.md."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from tests.stories.harness import ROOT, alive, none_more_open, open_files, wait_for
from tests.stories.test_schemas import wrong
from tests.web.page import Page


@pytest.fixture(autouse=True)
def quiet(page: Page) -> Iterator[None]:
    """After each test, resume the queue and the GPUs, end all jobs, and wait until every job has ended."""
    yield
    for held in page.folder.glob("hold-*"):
        held.unlink()
    page.post("/api/queue/resume")
    for gpu in (0, 1):
        page.post(f"/api/gpus/{gpu}/resume")
    ended = {"done", "failed", "cancelled", "skipped"}
    for number, state in page.scheduler.states().items():
        if state not in ended:
            page.post(f"/api/jobs/{number}/cancel")
    wait_for(lambda: set(page.scheduler.states().values()) <= ended, "a quiet scheduler")


def ledger(page: Page, key: str, *, code: object = 0, held: bool = False) -> list[str]:
    """Return a command that writes its start and its end into the ledger.

    ``held``: the command runs until `Scheduler.release`.
    """
    if held:
        page.scheduler.hold(key)
    return ["python3", str(page.scheduler.script), str(page.folder), key, str(code), "0"]


def made(page: Page, command: list[str], **options: Any) -> int:
    """Submit a job; return its id."""
    answer = page.post("/api/jobs", {"command": command, **options})
    assert answer.status == 201, answer.text
    number = answer.json()["id"]
    assert answer.json() == {"id": number} and answer.headers["location"] == f"/api/jobs/{number}"
    return int(number)


def acted(page: Page, number: int, verb: str, status: int = 200, body: Any = None) -> Any:
    """Request a change of a job. Return the state of the job from the answer.

    If ``status`` is not 200, return the error from the answer instead.
    """
    answer = page.post(f"/api/jobs/{number}/{verb}", body)
    assert answer.status == status, answer.text
    found = answer.json()
    if status == 200:
        assert set(found) == {"id", "state"} and found["id"] == number
        assert str(number) in unquote(answer.headers["x-gpujob-said"])
        return found["state"]
    assert list(found) == ["error"]
    return found["error"]


def said(page: Page, path: str, body: Any = None) -> str:
    """Request a change; return the sentence about its result in the answer's header."""
    answer = page.post(path, body)
    assert answer.status == 200, answer.text
    return unquote(answer.headers["x-gpujob-said"])


@pytest.mark.smoke
def test_status_jobs_and_gpus_are_the_json_that_the_verbs_print(page: Page) -> None:
    """S3.38: Status, jobs and GPUs are the JSON that the verbs print, and match the published schemas."""
    number = made(page, ["true"], label="one")
    page.scheduler.wait_state(number, "done")
    status = page.get("/api/status")
    assert status.status == 200 and status.headers["content-type"] == "application/json"
    told, printed = status.json(), page.scheduler.status()
    assert wrong("status", told) == [] and told == printed
    jobs = page.get("/api/jobs").json()
    assert wrong("jobs", jobs) == []
    assert jobs == json.loads(page.scheduler.cli("jobs", "--json").stdout)
    job = page.get(f"/api/jobs/{number}").json()
    assert wrong("job", job) == [] and (job["state"], job["label"], job["arguments"]) == ("done", "one", ["true"])
    gpus = page.get("/api/gpus").json()
    assert list(gpus) == ["schema", "gpus"] and gpus["gpus"] == told["gpus"] and len(gpus["gpus"]) == 2


def test_the_list_of_jobs_can_be_limited_to_states(page: Page) -> None:
    """The list of jobs can be limited to one or several states; an unknown or empty state is an error."""
    good, bad = made(page, ["true"]), made(page, ["false"])
    page.scheduler.wait_state(good, "done")
    page.scheduler.wait_state(bad, "failed")
    ids = {
        state: {job["id"] for job in page.get(f"/api/jobs?state={state}").json()["jobs"]}
        for state in ("done", "failed")
    }
    assert good in ids["done"] and bad in ids["failed"] and not ids["done"] & ids["failed"]
    both = {job["id"] for job in page.get("/api/jobs?state=done,failed").json()["jobs"]}
    assert both == ids["done"] | ids["failed"]
    for text in ("doen", "", "done,", "__class__"):
        answer = page.get(f"/api/jobs?state={text}")
        assert answer.status == 400 and "known: pending" in answer.json()["error"], text
    assert "did you mean done?" in page.get("/api/jobs?state=doen").json()["error"]
    assert page.get("/api/jobs?stat=done").status == 400 and page.get("/api/jobs?state=done&state=done").status == 400


def test_k16_a_job_id_that_is_not_in_plain_digits_is_404(page: Page) -> None:
    """K16, S20: If a job id is not written in plain decimal digits, the answer is 404, as for an unknown id.

    Examples are signs, digits of other scripts, percent-encoded characters and parts of a path.
    """
    number = made(page, ["true"])
    odd = (
        "999999",
        "-1",
        "+1",
        "01",
        "1.0",
        "1e0",
        "%D9%A3",
        "0x1",
        "1%00",
        "9" * 16,
        "@",
        "1;2",
        "a",
        "%20",
        "1%0a",
        "..",
        "%2e%2e",
        "1%2f..",
        "",
    )
    for text in odd:
        for path in (f"/api/jobs/{text}", f"/api/jobs/{text}/log", f"/api/jobs/{text}/story"):
            answer = page.get(path)
            assert answer.status == 404 and list(answer.json()) == ["error"], path
        assert page.post(f"/api/jobs/{text}/cancel").status == 404, text
    for path in (
        f"/api/jobs/{number}/../../etc/passwd",
        f"/api/jobs/{number}/log/etc/passwd",
        f"/api/jobs/{number}/log//etc/passwd",
        "/api//etc/passwd",
    ):
        assert page.get(path).status == 404, path
    assert page.get(f"/api/jobs/{number}/log?file=/etc/passwd").status == 400
    for text in ("9", "-1", "01", "x", "%D9%A0"):
        assert page.post(f"/api/gpus/{text}/pause").status == 404, text


def test_s2_4_cancel_removes_a_waiting_job_and_ends_all_processes_of_a_running_one(page: Page) -> None:
    """S2.4: A cancel ends a waiting job, or a running job with all its processes.

    A cancel of a job that has ended or does not exist is answered with an error.
    """
    script = "sleep 600 & echo $! > child; wait"
    running = made(page, ["sh", "-c", script], cpu=True, cwd=str(page.folder))
    page.scheduler.wait_state(running, "running")
    child = int(
        wait_for(lambda: (page.folder / "child").exists() and (page.folder / "child").read_text().strip(), "a child")
    )
    held = [made(page, ledger(page, f"c{n}", held=True)) for n in range(2)]
    waiting = made(page, ledger(page, "never"))
    for number in held:
        page.scheduler.wait_state(number, "running")
    assert acted(page, waiting, "cancel") == "cancelled"
    assert page.scheduler.starts("never") == 0
    assert acted(page, running, "cancel") in ("stopping", "cancelled")
    page.scheduler.wait_state(running, "cancelled")
    wait_for(lambda: not alive(child), "the whole process group has ended")
    assert f"cannot cancel job {waiting}: it is cancelled" in acted(page, waiting, "cancel", 409)
    assert acted(page, 987654, "cancel", 404).startswith("there is no job 987654")


def test_s2_5_no_job_starts_while_the_queue_is_paused(page: Page) -> None:
    """S2.5: While the queue is paused, no job starts, and running jobs continue."""
    running = made(page, ledger(page, "goes-on", held=True))
    page.scheduler.wait_state(running, "running")
    assert page.post("/api/queue/pause").json() == {"paused": True}
    waiting = made(page, ledger(page, "waits"))
    job = wait_for(lambda: (j := page.get(f"/api/jobs/{waiting}").json())["reason_code"] == "paused" and j, "a reason")
    assert "paused" in job["reason"] and page.get("/api/status").json()["paused"] is True
    page.scheduler.release("goes-on")
    page.scheduler.wait_state(running, "done")
    assert page.scheduler.starts("waits") == 0
    assert page.post("/api/queue/resume").json() == {"paused": False}
    page.scheduler.wait_state(waiting, "done")


def test_s2_6_gpus_are_paused_and_resumed(page: Page) -> None:
    """S2.6: GPUs can be paused and resumed. Jobs on a paused GPU continue, and the state file shows the pause."""

    def shown() -> Any:
        return json.loads((page.folder / "gpu_scheduler_state.json").read_text())["paused_gpus"]

    running = made(page, ledger(page, "there", held=True), allowed=[1])
    page.scheduler.wait_state(running, "running")
    assert page.post("/api/gpus/1/pause").json() == {"paused_gpus": [1]}
    # The answer waits 0.5 s at most for the state file: a busy machine may write it later.
    wait_for(lambda: shown() == [1], "the state file shows the pause")
    waiting = made(page, ["true"], allowed="1")
    wait_for(lambda: page.get(f"/api/jobs/{waiting}").json()["reason_code"] == "paused", "its reason")
    assert page.scheduler.states()[running] == "running"
    assert page.post("/api/gpus/0/pause").json() == {"paused_gpus": [0, 1]}
    assert page.post("/api/gpus/1/resume", {"force": True}).json() == {"paused_gpus": [0]}
    page.scheduler.release("there")
    page.scheduler.wait_state(waiting, "done")
    assert page.post("/api/gpus/7/pause").status == 404 and page.post("/api/gpus/7/resume").status == 404


def test_s2_7_jobs_with_lower_priority_numbers_start_first(page: Page) -> None:
    """S2.7, S2.14: Jobs start in the order of their current priorities; a job put first starts before all others."""
    blockers = [made(page, ledger(page, f"b{n}", held=True)) for n in range(2)]
    for number in blockers:
        page.scheduler.wait_state(number, "running")
    page.post("/api/gpus/1/pause")
    late, soon = made(page, ledger(page, "late"), priority=5), made(page, ledger(page, "soon"), priority="-3")
    raised, ahead = made(page, ledger(page, "raised"), priority=9), made(page, ledger(page, "ahead"), priority=9)
    assert acted(page, raised, "priority", body={"priority": -5}) == "pending"
    assert acted(page, ahead, "first") == "pending"
    assert page.get(f"/api/jobs/{raised}").json()["priority"] == -5
    for key in ("b0", "b1"):
        page.scheduler.release(key)
    for number in (late, soon, raised, ahead):
        page.scheduler.wait_state(number, "done")
    keys = [
        entry[1]
        for entry in page.scheduler.ledger()
        if entry[0] == "start" and entry[1] in ("late", "soon", "raised", "ahead")
    ]
    assert keys == ["ahead", "raised", "soon", "late"]
    assert "only a waiting job" in acted(page, late, "priority", 409, {"priority": 1})
    for body in (
        {},
        {"priority": "x"},
        {"priority": 10**12},
        {"priority": True},
        {"priority": None},
        {"priority": 1, "x": 2},
    ):
        assert "priority" in acted(page, late, "priority", 400, body) or "'x'" in acted(
            page, late, "priority", 400, body
        )


def test_s2_8_a_retry_is_a_new_attempt_and_keeps_the_previous_log(page: Page) -> None:
    """S2.8, S2.15: A retry starts a new attempt of the same job. The job keeps its id.

    The new attempt has a new log. The previous log is unchanged.
    """
    number = made(page, ["sh", "-c", "echo run $GPUJOB_ATTEMPT; exit 3"])
    page.scheduler.wait_state(number, "failed")
    before = page.get(f"/api/jobs/{number}").json()
    assert (before["exit_code"], before["attempt"]) == (3, 1)
    assert acted(page, number, "retry") in ("pending", "starting", "running", "failed")
    wait_for(
        lambda: (j := page.get(f"/api/jobs/{number}").json())["attempt"] == 2 and j["state"] == "failed", "run again"
    )
    after = page.get(f"/api/jobs/{number}").json()
    assert after["log"] != before["log"] and Path(before["log"]).read_text() == "run 1\n"
    assert page.get(f"/api/jobs/{number}/log").text == "run 2\n"
    old = page.get(f"/api/jobs/{number}/log?attempt=1")
    assert old.text == "run 1\n" and old.headers["x-gpujob-log-attempt"] == "1"
    story = page.get(f"/api/jobs/{number}/story").json()
    assert [run["attempt"] for run in story["attempts"]] == [1, 2]
    assert [run["log"] for run in story["attempts"]] == [before["log"], after["log"]]
    assert {"started", "failed", "requeued"} <= {event["kind"] for event in story["events"]}


def test_s2_9_a_job_killed_from_outside_is_failed_and_its_pid_is_still_shown(page: Page) -> None:
    """S2.9: A job killed with SIGKILL is failed with signal 9; its pid is still shown, and its GPU is free."""
    number = made(page, ["sleep", "600"])
    page.scheduler.wait_state(number, "running")
    job = wait_for(lambda: (j := page.get(f"/api/jobs/{number}").json())["pid"] and j, "its pid")
    assert Path(f"/proc/{job['pid']}/cmdline").read_bytes().split(b"\0")[1:] == [b"600", b""]
    os.kill(job["pid"], signal.SIGKILL)
    page.scheduler.wait_state(number, "failed")
    ended = page.get(f"/api/jobs/{number}").json()
    assert (ended["outcome"], ended["signal"], ended["pid"]) == ("signal", 9, job["pid"]), "its record keeps the pid"
    wait_for(lambda: [gpu["allocated"] for gpu in page.get("/api/gpus").json()["gpus"]] == [0, 0], "free GPUs")


def test_s2_12_a_log_has_the_output_or_the_reason_of_a_failed_start(page: Page) -> None:
    """S2.12, S2.1: A log has stdout and stderr in the order in which they were written.

    If the command could not be started, the log has the reason.
    """
    number = made(page, ["/no/such/program", "x"])
    page.scheduler.wait_state(number, "failed")
    assert page.get(f"/api/jobs/{number}").json()["outcome"] == "could_not_start"
    assert "/no/such/program" in page.get(f"/api/jobs/{number}/log").text
    number = made(page, ["sh", "-c", "echo a; echo b >&2; echo c"])
    page.scheduler.wait_state(number, "done")
    assert page.get(f"/api/jobs/{number}/log").text == "a\nb\nc\n"


def test_s2_13_half_gpu_jobs_share_a_gpu_and_a_two_gpu_job_gets_both(page: Page) -> None:
    """S2.13, S2.2: Two half-GPU jobs share a GPU; a job with two GPUs gets both in CUDA_VISIBLE_DEVICES."""
    halves = [made(page, ledger(page, f"h{n}", held=True), gpus=0.5) for n in range(2)]
    for number in halves:
        page.scheduler.wait_state(number, "running")
    assert {tuple(page.get(f"/api/jobs/{n}").json()["gpus"]) for n in halves} == {(0,)}
    assert page.get("/api/gpus").json()["gpus"][0]["allocated"] == 1.0
    pair = made(page, ["sh", "-c", "echo $CUDA_VISIBLE_DEVICES $*", "sh", "--cuda", "7"], gpus=2)
    wait_for(lambda: page.get(f"/api/jobs/{pair}").json()["reason_code"] == "no-wide-room", "it waits")
    for n in range(2):
        page.scheduler.release(f"h{n}")
    page.scheduler.wait_state(pair, "done")
    assert page.get(f"/api/jobs/{pair}/log").text == "0,1 --cuda 7\n"  # no word of the command is changed or added


def test_s2_14_short_jobs_run_while_a_long_one_runs(page: Page) -> None:
    """S2.14: While a long job uses one GPU, short jobs run one after the other on the other GPU."""
    long = made(page, ledger(page, "long", held=True))
    page.scheduler.wait_state(long, "running")
    short = [made(page, ledger(page, f"short{n}")) for n in range(6)]
    for number in short:
        page.scheduler.wait_state(number, "done")
    assert page.scheduler.states()[long] == "running"
    used = {tuple(page.get(f"/api/jobs/{number}").json()["gpus"]) for number in short}
    assert len(used) == 1 and not used & {tuple(page.get(f"/api/jobs/{long}").json()["gpus"])}


def test_s2_3_waiting_jobs_hold_no_open_file(page: Page) -> None:
    """S2.3: 100 more waiting jobs add no open file to the scheduler, its supervisor or the page."""
    page.post("/api/queue/pause")
    first = made(page, ["true"])
    pids = (page.scheduler.pid, page.scheduler.supervisor_pid(), page.pid)
    wait_for(lambda: page.get(f"/api/jobs/{first}").json()["reason_code"] == "paused", "the first is seen")
    before = {pid: open_files(pid) for pid in pids}
    numbers = [made(page, ["true"]) for _ in range(100)]
    wait_for(
        lambda: page.get(f"/api/jobs/{numbers[-1]}").json()["reason_code"] in ("paused", "behind"), "the last is seen"
    )
    none_more_open(before)
    page.scheduler.cli("cancel", f"{numbers[0]}-{numbers[-1]}")


def test_a_held_job_starts_only_after_its_release(page: Page) -> None:
    """A held job starts only after its release. Hold and release may be requested repeatedly.

    If the job has ended, a hold or release is answered with 409.
    """
    page.post("/api/queue/pause")
    number = made(page, ["true"])
    for verb in ("hold", "hold", "release", "release", "hold"):
        assert acted(page, number, verb) == "pending"
    page.post("/api/queue/resume")
    wait_for(lambda: page.get(f"/api/jobs/{number}").json()["reason_code"] == "hold-user", "held")
    acted(page, number, "release")
    page.scheduler.wait_state(number, "done")
    for verb in ("hold", "release", "first"):
        assert "done" in acted(page, number, verb, 409)


def test_a_running_job_cannot_be_retried_held_released_or_put_first(page: Page) -> None:
    """While a job runs, a request to retry, hold, release or put it first is answered with 409 and a reason.

    The request changes nothing.
    """
    number = made(page, ledger(page, "busy", held=True))
    page.scheduler.wait_state(number, "running")
    for verb in ("retry", "hold", "release", "first"):
        assert "running" in acted(page, number, verb, 409)
    assert acted(page, number, "first", 409).endswith(f"cannot put job {number} first: it is running")
    assert page.scheduler.states()[number] == "running"


def test_every_option_of_a_submission_has_its_effect(page: Page) -> None:
    """Every option of a submission has its effect, whether its value is a number or a text."""
    folder = page.folder / "work"
    folder.mkdir(exist_ok=True)
    first = made(page, ["true"], label="first")
    number = made(
        page, ["sh", "-c", 'pwd; echo "$A-$B"; echo oops >&2'], gpus="0.25", priority="7", label="all", allowed="0-1", after=[first],
        after_ok=f"{first}", vram="1M", time="1h", retries=1, cwd=str(folder), env={"A": "x y", "B": 5}, slots=1,
        stderr_apart=True, gzip=False, log_dir=str(folder), log_name="mine", info="remember",
    )  # fmt: skip
    page.scheduler.wait_state(number, "done")
    job = page.get(f"/api/jobs/{number}").json()
    assert (job["need"], job["priority"], job["label"], job["allowed_gpus"]) == (0.25, 7, "all", [0, 1])
    assert job["log"] == f"{folder}/mine" and Path(job["log"] + ".e").read_text() == "oops\n"
    assert page.get(f"/api/jobs/{number}/log").text == f"{folder}\nx y-5\n"
    packed = made(page, ["sh", "-c", "echo packed"], cpu=True, gzip=True)
    page.scheduler.wait_state(packed, "done")
    assert page.get(f"/api/jobs/{packed}").json()["log"].endswith(".gz")
    assert page.get(f"/api/jobs/{packed}/log").text == "packed\n"
    silent = made(page, ["echo", "nothing"], cpu=True, no_output=True)
    page.scheduler.wait_state(silent, "done")
    assert page.get(f"/api/jobs/{silent}").json()["log"] is None and page.get(f"/api/jobs/{silent}/log").text == ""
    here = made(page, ["pwd"], cpu=True)
    page.scheduler.wait_state(here, "done")
    assert page.get(f"/api/jobs/{here}/log").text == f"{page.folder}\n"  # the folder of the jobs file


def test_jobs_do_not_get_the_variables_of_the_page(page: Page) -> None:
    """A job gets the scheduler's GPUJOB_ variables, and no GPUJOB_ variable of the page's process."""
    number = made(page, ["sh", "-c", "env | grep ^GPUJOB_ | cut -d= -f1 | sort"], cpu=True)
    page.scheduler.wait_state(number, "done")
    names = page.get(f"/api/jobs/{number}/log").text.split()
    assert names == ["GPUJOB_ATTEMPT", "GPUJOB_GPUS", "GPUJOB_ID", "GPUJOB_SHARE", "GPUJOB_STATE_FILE"]


BAD: list[tuple[Any, str]] = [
    ({}, "command"), ({"command": []}, "command"), ({"command": "ls"}, "command"), ({"command": [1]}, "command"),
    ({"command": [""]}, "command"), ({"command": ["a\0b"]}, "command"), ({"command": ["\ud800"]}, "command"),
    ({"command": None}, "command"), ({"comand": ["x"]}, "did you mean command?"), ({"command": ["x"], "foreground": True}, "foreground"),
    ({"command": ["x"], "wait": True}, "wait"), ({"command": ["x"], "info_command": "id"}, "info_command"),
    ({"command": ["x"], "__class__": 1}, "__class__"), ({"command": ["x"], "gpus": "much"}, "gpus"), ({"command": ["x"], "gpus": -1}, "gpus"),
    ({"command": ["x"], "gpus": True}, "gpus"), ({"command": ["x"], "gpus": None}, "gpus"), ({"command": ["x"], "gpus": [1]}, "gpus"),
    ({"command": ["x"], "gpus": 3}, "GPU"), ({"command": ["x"], "priority": "high"}, "priority"), ({"command": ["x"], "priority": 1.5}, "priority"),
    ({"command": ["x"], "priority": 10**10}, "priority"), ({"command": ["x"], "label": "a\nb"}, "label"), ({"command": ["x"], "time": "soon"}, "time"),
    ({"command": ["x"], "vram": "big"}, "vram"), ({"command": ["x"], "retries": 1.5}, "retries"), ({"command": ["x"], "retries": -1}, "retries"),
    ({"command": ["x"], "after": [99999]}, "cannot wait for job 99999: there is no such job"), ({"command": ["x"], "after": "x"}, "after"), ({"command": ["x"], "after_ok": [True]}, "after_ok"),
    ({"command": ["x"], "allowed": [9]}, "GPU 9"), ({"command": ["x"], "allowed": "3-1"}, "is backwards"), ({"command": ["x"], "cpu": 1}, "cpu"),
    ({"command": ["x"], "cpu": True, "gpus": 1}, "cpu and gpus"), ({"command": ["x"], "env": ["A=1"]}, "env"), ({"command": ["x"], "env": {"A=B": "1"}}, "env"),
    ({"command": ["x"], "env": {"": "1"}}, "env"), ({"command": ["x"], "env": {"A": None}}, "env"), ({"command": ["x"], "cuda": "all"}, "cuda"),
    ({"command": ["x"], "launch": "torchrun"}, "torchrun"), ({"command": ["x"], "log_name": "a/b"}, "log_name"), ({"command": ["x"], "cwd": 5}, "cwd"),
    ({"command": ["x | y"]}, '{"command": ["sh", "-c", "x | y"]}'), ({"command": ["x"], "slots": 0}, "slots"), ({"command": ["x"], "on": [], "gpus": 1}, "on"),
    ([], "object"), ("x", "object"), (1, "object"), (None, "object"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "named"), BAD, ids=[str(n) for n in range(len(BAD))])
def test_an_invalid_submission_is_400_and_names_the_json_key(page: Page, body: Any, named: str) -> None:
    """An invalid submission is answered with 400 and queues no job.

    The error names the JSON key, not the command-line option.
    """
    before = page.scheduler.rows("SELECT count(*) FROM jobs")
    data = json.dumps(body).encode()
    answer = page.ask("POST", "/api/jobs", {**page.bearer, "Content-Type": "application/json"}, data)
    assert answer.status == 400 and list(answer.json()) == ["error"], answer.text
    text = answer.json()["error"]
    assert named in text and "--" not in text, text
    assert page.scheduler.rows("SELECT count(*) FROM jobs") == before


@pytest.mark.parametrize(
    "data", [b"", b"{", b"nul", b"\xff\xfe", b'{"command": ["x"], "gpus": NaN}', b"[" * 100_000, b"9" * 5000]
)
def test_a_body_that_is_no_json_object_is_400(page: Page, data: bytes) -> None:
    """If a body is no JSON object, the answer is 400. This holds for every route that accepts a body."""
    for path in ("/api/jobs", "/api/preview", "/api/queue/pause", "/api/jobs/1/cancel", "/api/gpus/0/pause"):
        answer = page.ask("POST", path, {**page.bearer, "Content-Type": "application/json"}, data)
        assert answer.status == 400 and list(answer.json()) == ["error"], (path, answer.text)
    assert page.get("/api/status").json()["paused"] is False


def test_an_unknown_key_in_a_body_is_400_and_named(page: Page) -> None:
    """S6: If a body has an unknown key, the answer is 400, and the error names the key.

    This also holds for routes that accept no keys at all.
    """
    for path in (
        "/api/queue/pause",
        "/api/queue/resume",
        "/api/gpus/0/pause",
        "/api/jobs/1/cancel",
        "/api/jobs/1/hold",
    ):
        answer = page.post(path, {"sudo": 1})
        assert answer.status == 400 and "'sudo'" in answer.json()["error"], path
    assert page.post("/api/gpus/0/resume", {"force": 1}).status == 400
    assert page.get("/api/status").json()["paused"] is False


def test_methods_other_than_get_and_post_change_nothing(page: Page) -> None:
    """A request with a method other than GET and POST is answered with 405 or 404 and changes nothing.

    This also holds for requests with the token.
    """
    number = made(page, ["true"])
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"):
        for path in (
            f"/api/jobs/{number}",
            f"/api/jobs/{number}/cancel",
            "/api/queue/pause",
            "/api/jobs",
            "/api/nothing",
        ):
            headers = {**page.bearer, "Content-Type": "application/json"}
            assert page.ask(method, path, headers, b"{}").status in (404, 405), (method, path)
    assert page.ask("GET", "/api/queue/pause", page.bearer).status == 405
    assert page.get("/api/status").json()["paused"] is False


def test_s12_a_command_with_every_character_reaches_the_job_unchanged(page: Page) -> None:
    """S12: The words of a command reach the job unchanged, whatever characters they contain.

    The scheduler starts no shell that interprets them.
    """
    words = ["a b", "$(touch pwned)", "`touch pwned`", ";touch pwned", "'\"\\", "ünïcode ☃", "-x", "--", "\t", "*"]
    number = made(page, ["printf", "%s\\n", *words], cpu=True, cwd=str(page.folder))
    page.scheduler.wait_state(number, "done")
    log = page.scheduler.rows("SELECT log FROM jobs WHERE id=?", number)[0][0]
    assert Path(log).read_text() == "".join(f"{word}\n" for word in words)
    assert not (page.folder / "pwned").exists()


@pytest.mark.smoke
def test_a_preview_shows_where_a_job_would_start_and_queues_no_job(page: Page) -> None:
    """A preview shows on which GPUs a job would start, or why it would wait or never start. It queues no job."""
    rows = page.scheduler.rows("SELECT count(*), max(id) FROM jobs")
    version = page.scheduler.rows("SELECT count(*) FROM events")
    answer = page.post("/api/preview", {"command": ["echo", "{gpus}", "--token=abc"], "gpus": 2}).json()
    expected = answer.pop("expected")
    assert expected is None or (expected["id"], expected["gpus"]) == (
        (rows[0][1] or 0) + 1,
        [0, 1],
    )  # others may have run
    assert answer == {
        "schema": 1, "would": "start", "gpus": [0, 1], "reason": None, "reason_code": None, "need": 2.0,
        "command": ["echo", "0,1", "--token=***"], "notes": [],
    }  # fmt: skip
    assert page.post("/api/preview", {"command": ["x"], "gpus": 3}).json()["would"] == "never"
    assert page.post("/api/preview", {"command": ["x"], "gpus": "x"}).status == 400
    assert page.post("/api/preview", {"command": ["x"], "gpus": -1}).status == 400
    assert page.post("/api/preview", {"command": ["true", "a" * 200_000]}).status == 400
    for name in ("no-such-program", "./x", "/etc/passwd", "/"):
        assert name in " ".join(page.post("/api/preview", {"command": [name]}).json()["notes"]), name
    assert page.post("/api/preview", {"command": ["true"]}).json()["notes"] == []
    missing = page.post("/api/preview", {"command": ["x"], "cwd": "/no/such/folder"}).json()
    assert (missing["would"], missing["reason_code"]) == ("wait", "missing")
    page.post("/api/gpus/0/pause")
    assert page.post("/api/preview", {"command": ["x"]}).json()["gpus"] == [1]
    assert page.post("/api/preview", {"command": ["x"], "allowed": [0]}).json()["reason_code"] == "paused"
    assert (
        page.scheduler.rows("SELECT count(*), max(id) FROM jobs"),
        page.scheduler.rows("SELECT count(*) FROM events"),
    ) == (rows, version)
    page.post("/api/gpus/0/resume")
    for n in range(2):
        page.scheduler.wait_state(made(page, ledger(page, f"p{n}", held=True)), "running")
    told = page.post("/api/preview", {"command": ["true"], "gpus": 0.5}).json()
    assert told["would"] == "wait" and told["gpus"] == [] and told["reason_code"] == "no-room"
    number = made(page, ["true"], gpus=0.5)
    job = wait_for(lambda: (j := page.get(f"/api/jobs/{number}").json())["reason_code"] != "new" and j, "its reason")
    assert (job["reason_code"], job["reason"]) == (told["reason_code"], told["reason"])
    behind = page.post("/api/preview", {"command": ["true"], "gpus": 0.5}).json()
    assert behind["reason_code"] == "behind" and "1 job with the same request is before it" in behind["reason"]


def test_s2_10_without_a_scheduler_jobs_can_be_read_added_and_changed(pages: Callable[[], Page]) -> None:
    """S2.10, S3.30: While no scheduler runs, the page shows the store, and a job can be added and changed.

    If only a scheduler can carry out a request, the request is stored for the next scheduler.
    """
    page = pages()
    page.start()
    assert page.get("/api/status").json()["daemon"]["alive"] is False and page.get("/api/jobs").json()["jobs"] == []
    told = page.post("/api/preview", {"command": ["true"]}).json()
    assert (told["would"], told["reason_code"]) == ("wait", "no-scheduler")
    first, second = made(page, ["true"]), made(page, ["true"])
    assert acted(page, first, "cancel") == "cancelled" and acted(page, second, "hold") == "pending"
    assert (
        acted(page, second, "first") == "pending" and acted(page, second, "priority", body={"priority": 3}) == "pending"
    )
    assert page.post("/api/queue/pause").json() == {"paused": True}
    assert page.post("/api/gpus/0/resume", {"force": True}).status == 409
    page.scheduler.start()
    assert page.get("/api/status").json()["daemon"]["alive"] is True
    assert page.scheduler.states() == {first: "cancelled", second: "pending"}
    running = made(page, ["sleep", "600"])
    page.post("/api/queue/resume")
    page.scheduler.wait_state(running, "running")
    page.scheduler.kill()
    assert page.post("/api/gpus/1/pause").json() == {"paused_gpus": [1]}
    assert acted(page, running, "cancel") == "running"  # the next scheduler cancels it
    page.scheduler.start()
    page.scheduler.wait_state(running, "cancelled")
    assert page.get("/api/gpus").json()["gpus"][1]["paused"] is True


def test_the_answer_to_each_change_describes_its_result(page: Page) -> None:
    """The answer to a change has a header that describes the result of the change.

    The header also describes effects that a user may not expect.
    """
    page.post("/api/queue/pause")
    number, other = made(page, ["true"], priority=5), made(page, ["false"], priority=1)
    at = f"/api/jobs/{number}"
    assert said(page, f"{at}/hold") == f"job {number} is held; release it: gpujob release {number}"
    assert said(page, f"{at}/hold") == f"job {number} is already held"
    assert said(page, f"{at}/cancel") == f"job {number} was cancelled before it ran"
    assert said(page, f"{at}/retry").endswith("(it was cancelled); it is still held; release it to let it start")
    assert said(page, f"{at}/release") == f"job {number} is released"
    assert said(page, f"{at}/priority", {"priority": -5}) == f"job {number}: priority 5 -> -5"
    assert said(page, f"/api/jobs/{other}/first") == f"job {other} is now first in the queue"
    told = said(page, f"{at}/priority", {"priority": -6})
    assert told == f"job {number}: priority -5 -> -6; job {other}, which was put first, still comes before it"
    told = said(page, f"/api/jobs/{other}/priority", {"priority": 9})
    assert "it was put first and stays first at any priority" in told
    for verb in ("cancel", "retry"):  # this puts the job back at the place of its priority, as the message announces
        acted(page, other, verb)
    assert said(page, f"{at}/priority", {"priority": -7}) == f"job {number}: priority -6 -> -7"
    child = made(page, ["true"], after_ok=[other])
    acted(page, other, "cancel")
    page.scheduler.wait_state(child, "skipped")
    assert said(page, f"/api/jobs/{child}/retry").endswith(f"job {other} is cancelled; retry it first")
    assert said(page, "/api/gpus/1/pause") == "GPU 1 paused (paused now: 1)"
    assert said(page, "/api/gpus/1/resume") == "GPU 1 resumed (paused now: none)"
    assert said(page, "/api/queue/resume") == "the queue is resumed"


def test_the_answer_to_a_stored_request_says_when_it_is_carried_out(pages: Callable[[], Page]) -> None:
    """While no scheduler runs, a cancel of a running job is answered with 200 and the state that the job still has.

    The message says that the job is cancelled at the next start of the scheduler.
    """
    page = pages()
    page.scheduler.start()
    page.start()
    number = made(page, ["sleep", "600"])
    page.scheduler.wait_state(number, "running")
    page.scheduler.kill()
    answer = page.post(f"/api/jobs/{number}/cancel")
    assert answer.json() == {"id": number, "state": "running"}
    assert (
        unquote(answer.headers["x-gpujob-said"])
        == f"job {number} was running when the last scheduler ended; it is cancelled at the next start of the scheduler"
    )
    page.scheduler.start()
    page.scheduler.wait_state(number, "cancelled")


def test_every_route_is_503_while_the_state_folder_is_missing(pages: Callable[[], Page]) -> None:
    """While the state folder is missing, every route answers with 503 and a reason.

    When the state folder is back, the page works again.
    """
    page = pages()
    page.start()
    number = made(page, ["true"])
    bearer = page.bearer
    page.folder.joinpath(".gpujob").rename(page.folder / "away")
    for path in (
        "/",
        "/jobs",
        f"/jobs/{number}",
        "/report",
        "/submit",
        "/metrics",
        "/api/status",
        "/api/jobs",
        f"/api/jobs/{number}/log",
    ):
        answer = page.ask("GET", path, bearer)
        assert answer.status == 503 and "cannot read the state folder: it was removed" in answer.text, path
    for path, value in (
        ("/api/jobs", {"command": ["true"]}),
        ("/api/queue/pause", {}),
        ("/api/preview", {"command": ["true"]}),
    ):
        body = json.dumps(value).encode()
        answer = page.ask("POST", path, {**bearer, "Content-Type": "application/json"}, body)
        assert answer.status == 503 and "cannot read the state folder: it was removed" in answer.json()["error"], path
    page.folder.joinpath("away").rename(page.folder / ".gpujob")
    assert page.get("/api/jobs").json()["jobs"][0]["id"] == number


def test_with_a_stopped_scheduler_only_changes_fail(pages: Callable[[], Page]) -> None:
    """While the scheduler is stopped (SIGSTOP), changes are answered with 503 and a reason. Reading works."""
    page = pages()
    page.scheduler.start()
    page.start()
    number = made(page, ["sleep", "600"])
    page.scheduler.wait_state(number, "running")
    page.scheduler.freeze()
    try:
        answer = page.post(f"/api/jobs/{number}/cancel")
        assert answer.status == 503 and "no answer from the scheduler" in answer.json()["error"]
        assert page.get(f"/api/jobs/{number}").json()["state"] == "running"
    finally:
        os.kill(page.scheduler.pid, signal.SIGCONT)
    page.scheduler.wait_state(number, "cancelled")


def test_reading_is_503_while_the_store_is_damaged(pages: Callable[[], Page]) -> None:
    """While the store is damaged, requests to read are answered with 503 and a reason.

    When the store is restored, reading works again.
    """
    page = pages()
    page.start()
    made(page, ["true"])
    store = page.folder / ".gpujob" / "store.db"
    store.rename(page.folder / "away")
    store.write_bytes(b"no store" * 1000)
    answer = page.get("/api/jobs")
    assert answer.status == 503 and "store.db" in answer.json()["error"]
    (page.folder / "away").rename(store)
    wait_for(lambda: page.get("/api/jobs").status == 200, "it is read again")


def test_histories_can_be_read_and_invalid_times_are_400(page: Page) -> None:
    """The histories of GPUs and of a job can be read.

    An unknown job is answered with 404, an invalid time with 400.
    """
    number = made(page, ["true"])
    page.scheduler.wait_state(number, "done")
    found = page.get("/api/history/gpus?step=10")
    assert found.status == 200 and set(found.json()) == {"schema", "gpus", "pauses"}
    assert page.get(f"/api/jobs/{number}/history").json()["attempts"] == []
    assert page.get("/api/jobs/99999/history").status == 404
    for query in ("from=x", "from=9&to=3", "to=0", "step=0", "from=0&to=99999999999", "since=1"):
        assert page.get(f"/api/history/gpus?{query}").status == 400, query


def test_every_command_of_docs_api_md_works(page: Page) -> None:
    """Every call in docs/api.md works in bash exactly as written; no command line contains the token."""
    bash, curl = shutil.which("bash"), shutil.which("curl")
    if not bash or not curl:
        pytest.skip("no bash or no curl here")
    number = made(page, ledger(page, "documented", held=True))
    page.scheduler.wait_state(number, "running")
    last = 0
    text = (ROOT / "docs/api.md").read_text().replace("127.0.0.1:4004", f"127.0.0.1:{page.port}")
    blocks = re.findall(r"```bash\n(.*?)```", text, re.S)
    calls = [
        line for block in blocks[1:] for line in block.splitlines() if line.startswith("gj ") and " -N" not in line
    ]
    assert len(calls) >= 20 and f"{page.port}" in blocks[0] and page.token not in text
    needs = {
        "priority": False,
        "first": False,
        "hold": False,
        "release": False,
        "cancel": False,
        "retry": True,
        "offer": False,
    }
    for call in calls:
        verb = re.match(r"gj /api/jobs/1/(\w+) -d", call)
        if verb and not needs[verb[1]]:
            page.post("/api/queue/pause")
            last = made(page, ["true"]) if verb[1] != "release" else last
        line = re.sub(r"/jobs/1\b", f"/jobs/{last or number}", call)
        done = subprocess.run(
            [bash, "-c", f"{blocks[0]}\n{line.split('  #')[0]} -o answer -w '%{{http_code}}'"],
            cwd=page.folder, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        answer = (page.folder / "answer").read_text()
        assert done.stdout in ("200", "201"), (line, done.stdout, done.stderr, answer[:300])
    page.scheduler.release("documented")


def busy(page: Page) -> tuple[list[int], int]:
    """Submit two jobs that hold both GPUs, and one that waits; return their ids."""
    running = [made(page, ["sleep", "600"], time="1h") for _ in range(2)]
    for number in running:
        page.scheduler.wait_state(number, "running")
    waiting = made(page, ["sleep", "600"], time="30m")
    wait_for(lambda: page.get(f"/api/jobs/{waiting}").json()["reason_code"] == "no-room", "a reason")
    return running, waiting


def test_the_plan_and_the_explanation_of_a_waiting_job_are_the_json_of_the_verbs(page: Page) -> None:
    """The plan, the expected times in the status and the explanation of a waiting job have the form of `plan` and `why`."""
    running, waiting = busy(page)
    plan = page.get("/api/plan").json()
    assert wrong("plan", plan) == []
    found = {one["id"]: one for one in plan["jobs"]}
    assert set(found) == {*running, waiting} and found[waiting]["start"] > plan["at"] and found[running[0]]["end"]
    assert [one["id"] for one in page.get("/api/status").json()["expected"]] == sorted(found)
    why = page.get(f"/api/jobs/{waiting}/why").json()
    assert wrong("why", why) == []
    explanation = why["jobs"][0]["explanation"]
    assert explanation["place"] == 1 and [one["gpu"] for one in explanation["holders"]] == [0, 1]
    printed = json.loads(page.scheduler.cli("why", str(waiting), "--json").stdout)["jobs"][0]
    told = [(one["command"], one["requests"]) for one in printed["explanation"]["offers"]]
    assert [(one["command"], one["requests"]) for one in explanation["offers"]] == told
    job = page.get(f"/api/jobs/{running[0]}/why").json()["jobs"][0]
    assert (job["state"], job["explanation"]) == ("running", None)
    preview = page.post("/api/preview", {"command": ["true"], "time": "10m"}).json()
    assert (preview["would"], preview["expected"]["run_s"]) == ("wait", 600) and preview["expected"]["start"] > plan[
        "at"
    ]
    failed = made(page, ["sh", "-c", "echo the last words; exit 3"], cpu=True)
    page.scheduler.wait_state(failed, "failed")
    assert page.get(f"/api/jobs/{failed}/why").json()["jobs"][0]["last_lines"] == ["the last words"]
    assert page.get("/api/jobs/987654/why").status == 404


def test_an_accepted_offer_starts_the_job(page: Page) -> None:
    """Each offer can be sent back as it was returned; then the job starts. If it has started already, nothing is done."""
    running, waiting = busy(page)
    offers = page.get(f"/api/jobs/{waiting}/why").json()["jobs"][0]["explanation"]["offers"]
    offer = next(one for one in offers if one["command"].startswith("gpujob cancel"))
    cancelled = offer["requests"][0]["jobs"]
    assert len(cancelled) == 1 and cancelled[0] in running
    assert f"job {cancelled[0]}: SIGTERM" in said(page, f"/api/jobs/{waiting}/offer", {"requests": offer["requests"]})
    page.scheduler.wait_state(waiting, "running")
    page.scheduler.wait_state(cancelled[0], "cancelled")
    other = next(number for number in running if number not in cancelled)
    body = {"requests": [{"verb": "cancel", "jobs": [other]}]}
    told = acted(page, waiting, "offer", 409, body)
    assert told == f"job {waiting} does not wait any more, it is running: nothing was done"
    assert page.scheduler.states()[other] == "running"
    held = made(page, ["true"], cpu=True, after=[other])
    acted(page, held, "hold")
    text = said(page, f"/api/jobs/{held}/offer", {"requests": [{"verb": "release", "jobs": [held]}, {"verb": "edit", "options": {"after": ""}}]})  # fmt: skip
    assert f"job {held} is released" in text
    page.scheduler.wait_state(held, "done")


def test_offers_about_gpus_the_queue_and_the_need(page: Page) -> None:
    """Resuming GPUs and the queue, putting a job first and changing its need are requests of offers, too."""
    page.post("/api/queue/pause")
    for gpu in (0, 1):
        page.post(f"/api/gpus/{gpu}/pause")
    number = made(page, ["sleep", "600"], gpus=2)
    wait_for(lambda: page.get(f"/api/jobs/{number}").json()["reason_code"] == "paused", "a reason")
    offers = page.get(f"/api/jobs/{number}/why").json()["jobs"][0]["explanation"]["offers"]
    assert [one["verb"] for one in offers[0]["requests"]] == ["queue resume", "resume"]
    body = {"requests": [*offers[0]["requests"], {"verb": "first"}]}
    assert "queue" in said(page, f"/api/jobs/{number}/offer", body)
    page.scheduler.wait_state(number, "running")
    other = made(page, ["sleep", "600"], gpus=2)
    acted(page, other, "offer", body={"requests": [{"verb": "edit", "options": {"gpus": "0.5", "allowed": "1"}}]})
    job = page.get(f"/api/jobs/{other}").json()
    assert (job["need"], job["allowed_gpus"]) == (0.5, [1])


def test_an_offer_with_a_wrong_request_changes_nothing(page: Page) -> None:
    """All requests of an offer are checked before the first one is carried out."""
    page.post("/api/queue/pause")
    number, other = made(page, ["true"]), made(page, ["true"])
    good = {"verb": "queue resume"}
    for bad in (
        {}, {"verb": "retry"}, {"verb": ["cancel"]}, {"verb": "cancel"}, {"verb": "cancel", "jobs": []}, {"verb": "cancel", "jobs": ["1"]},
        {"verb": "cancel", "jobs": [True]}, {"verb": "cancel", "jobs": [-1]}, {"verb": "cancel", "jobs": [1 << 60]}, {"verb": "cancel", "jobs": [other, other]},
        {"verb": "cancel", "jobs": [number]}, {"verb": "cancel", "jobs": [other], "gpus": [0]}, {"verb": "first", "jobs": [other]},
        {"verb": "release", "jobs": [number, other]}, {"verb": "resume"}, {"verb": "resume", "gpus": [0], "force": True}, {"verb": "edit"},
        {"verb": "edit", "options": {"label": "x"}}, {"verb": "edit", "options": {"gpus": "much"}}, {"verb": "edit", "options": ["gpus"]},
        {"verb": "edit", "options": {"gpus": "9"}, "jobs": [other]}, {"verb": "queue resume", "jobs": [other]}, "cancel", None,
    ):  # fmt: skip
        answer = page.post(f"/api/jobs/{number}/offer", {"requests": [good, bad]})
        assert answer.status == 400 and list(answer.json()) == ["error"], (bad, answer.text)
    for body in (
        {},
        {"requests": []},
        {"requests": good},
        {"requests": [good] * 9},
        {"requests": [good], "force": True},
    ):
        assert page.post(f"/api/jobs/{number}/offer", body).status == 400, body
    assert page.post("/api/jobs/987654/offer", {"requests": [good]}).status == 404
    missing = page.post(f"/api/jobs/{number}/offer", {"requests": [{"verb": "cancel", "jobs": [987654]}]})
    assert missing.status == 404 and "987654" in missing.json()["error"]
    headers = {**page.cookie(), "Content-Type": "application/json", "Origin": "https://evil.example", "X-Gpujob": "1"}
    body = json.dumps({"requests": [good]}).encode()
    assert page.ask("POST", f"/api/jobs/{number}/offer", headers, body).status == 403
    assert page.get("/api/status").json()["paused"] is True
