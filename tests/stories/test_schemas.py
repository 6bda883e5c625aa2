"""JSON output and the state file match scheduler/views/schemas exactly; docs/ names every key that they contain."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from tests.screens import need_screen
from tests.stories.harness import ROOT, Scheduler, wait_for
from tests.stories.machine import Machine, machine

__all__ = ["machine"]
SCHEMAS = {
    path.name: json.loads(path.read_text()) for path in sorted((ROOT / "scheduler/views/schemas").glob("*.schema.json"))
}
REASONS = {"no-room", "no-wide-room", "missing", "depends", "hold-user", "backoff", "behind"}


@functools.cache
def registry() -> Registry[Any]:
    return Registry().with_resources((name, Resource.from_contents(schema)) for name, schema in SCHEMAS.items())


def wrong(name: str, value: object) -> list[str]:
    """Return each violation of the schema ``name`` in ``value``, as "path: message"."""
    found = Draft202012Validator({"$ref": f"{name}.schema.json"}, registry=registry()).iter_errors(value)
    return [f"{'/'.join(map(str, error.absolute_path))}: {error.message[:300]}" for error in found]


def keys_of(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from keys_of(inner)


def undocumented(value: object) -> set[str]:
    text = "".join((ROOT / "docs" / name).read_text() for name in ("json.md", "state-file.md"))
    return {key for key in keys_of(value) if not re.search(rf"(?<![\w-]){re.escape(key)}(?![\w-])", text)}


def check(name: str, value: object) -> None:
    assert wrong(name, value) == []
    assert undocumented(value) == set()


def of(s: Scheduler, *words: str) -> Any:
    return json.loads(s.cli(*words, "--json").stdout)


def test_s3_38_json_of_jobs_in_every_state_matches_the_schemas(scheduler: Callable[..., Scheduler]) -> None:
    """S3.38, S3.33: With jobs in all states, the state file and the JSON output of the verbs match their schemas.

    The verbs are status, jobs, show, why, report and screens. The jobs wait for many different reasons.
    """
    s = scheduler(gpus=3, kill_grace=600, assign_retry_wait=500)
    oom, stubborn = s.folder / "oom.sh", s.folder / "stubborn.sh"
    oom.write_text("#!/bin/sh\necho torch.OutOfMemoryError: CUDA out of memory; exit 1\n")
    stubborn.write_text(f"#!/bin/sh\ntrap '' TERM\ntouch {s.folder}/deaf\nwhile :; do sleep 0.1; done\n")
    for script in (oom, stubborn):
        script.chmod(0o755)
    s.hold("run")
    s.append(s.line("one", gpus="2") + ";label=base", f"0,{oom},,,2", s.line("kill", code="s9", gpus="2"), "broken",
             s.line("one", gpus="2"))  # fmt: skip
    s.start()
    s.wait_ended(3)
    s.cli("retry", "2")
    wait_for(lambda: s.rows("SELECT 1 FROM jobs WHERE id=2 AND attempt=2 AND state='failed'"), "the second try")
    s.append(s.line("run", gpus="0") + ";time=4h;vram=1G", f"0,{stubborn},,,1")
    for job in (4, 5):
        s.wait_state(job, "running")
    wait_for((s.folder / "deaf").exists, "it is deaf")
    s.append(s.line("again", code=1, gpus="2") + ";retries=1", s.line("skip") + ";after_ok=2")
    wait_for(lambda: s.states().get(7) == "skipped", "skipped")
    wait_for(lambda: s.rows("SELECT 1 FROM jobs WHERE id=6 AND reason_code='backoff'"), "backoff")
    s.append(s.line("busy", gpus="0"), s.line("busy2", gpus="0"), s.line("wide") + ";gpus=3", f"0,{s.folder}/gone.py,,,",
             s.line("later") + ";after=4,5", s.line("held", gpus="1"), s.line("unwanted", gpus="1"))  # fmt: skip
    wait_for(lambda: len(s.states()) == 14, "all")
    s.cli("hold", "13")
    s.cli("cancel", "14")
    s.cli("cancel", "5", code=None)
    s.wait_state(5, "stopping")
    s.cli("submit", "--allowed", "2", "--", "/no/such/program")
    s.wait_state(15, "failed")
    s.cli("submit", "--allowed", "2", "--time", "1s", "--", "sleep", "600")
    wait_for(lambda: s.rows("SELECT 1 FROM jobs WHERE id=16 AND outcome='time_limit'"), "time limit")
    s.cli("edit", "8", "--label", "best")
    s.cli("swap", "8", "9")
    s.cli("pause", "2")

    def reasons() -> set[str]:
        return {job["reason_code"] for job in of(s, "jobs")["jobs"]} - {None}

    wait_for(lambda: reasons() >= REASONS, f"reasons {REASONS}, are {reasons()}")
    status = of(s, "status")
    check("status", status)
    assert {job["state"] for job in status["jobs"]} == {
        "pending", "running", "stopping", "done", "failed", "cancelled", "skipped",
    }  # fmt: skip
    assert status["refused"] and status["repeated_lines"] and status["daemon"]["runner"] == "direct"
    outcomes = {job["outcome"] for job in status["jobs"]}
    assert outcomes >= {"exit", "signal", "time_limit", "could_not_start", "dependency", "cancelled"}
    check("jobs", of(s, "jobs"))
    check("jobs", of(s, "jobs", "--state", "failed,pending"))
    story = of(s, "show", "1-16")
    check("show", story)
    assert [job["id"] for job in story["jobs"]] == list(range(1, 17)) and "schema" not in story["jobs"][0]
    kinds = {event["kind"] for job in story["jobs"] for event in job["events"]}
    assert kinds >= {
        "started",
        "done",
        "failed",
        "requeued",
        "retry_scheduled",
        "missing",
        "held",
        "swapped",
        "edited",
        "stopping",
    }
    for words in (["2"], ["@"], ["base"], ["3", "1"], ["1-2", "1"]):
        check("show", of(s, "show", *words))
    for number in range(1, 17):
        check("why", of(s, "why", str(number)))
    (waits,), (failed,) = (of(s, "why", number)["jobs"] for number in ("10", "2"))
    assert waits["reason_code"] == "no-wide-room" and waits["last_lines"] == []
    assert failed["failure"]["class"] == "oom" and failed["last_lines"] == [
        "torch.OutOfMemoryError: CUDA out of memory"
    ]
    assert of(s, "show", "2")["failure"]["class"] == "oom" and of(s, "show", "2")["schema"] == 1
    assert [job["id"] for job in of(s, "show", "3", "1")["jobs"]] == [3, 1]
    report = of(s, "report")
    check("report", report)
    assert [job["id"] for job in report["jobs"]] == list(range(1, 17)) and report["jobs"][1]["attempts"] == 2
    check("report", of(s, "report", "--since", "1s", "--label", "best"))
    check("screens", of(s, "screens"))
    state_file = s.folder / "gpu_scheduler_state.json"
    check(
        "state-file", wait_for(lambda: (d := json.loads(state_file.read_text()))["paused_gpus"] == [2] and d, "paint")
    )
    s.kill()
    check("status", of(s, "status"))


def test_s3_38_json_with_gpu_readings_matches_the_schemas(machine: Callable[..., Machine]) -> None:
    """S3.38: With GPU readings, the state file and the JSON of `status` match their schemas.

    The used memory of a GPU is a number.
    """
    m = machine()
    m.cards("GPU-a", "GPU-b")
    m.use("GPU-b", m.foreign_process(), 70_000, load=90)
    m.s.start()
    m.state(1, "FOREIGN")
    status = of(m.s, "status")
    check("status", status)
    assert status["gpus"][1]["reason"] and isinstance(status["gpus"][0]["memory_used"], int)
    path = m.s.folder / "gpu_scheduler_state.json"
    wait_for(path.exists, "the state file")
    check("state-file", json.loads(path.read_text()))


def test_s3_39_json_with_a_screen_session_matches_the_schemas(screens: Callable[..., Any]) -> None:
    """S3.39: With a running session, JSON of screens, status and show match their schemas."""
    need_screen()
    s = screens(gpus=1)
    s.hold("a")
    s.append(s.line("a"))
    s.start()
    s.wait_state(1, "running")
    value = wait_for(lambda: (v := of(s, "screens"))["sessions"] and v, "the session")
    check("screens", value)
    status = of(s, "status")
    check("status", status)
    assert status["daemon"]["runner"] == "screen" and "jobs in screen sessions" in s.cli("status").stdout
    check("show", of(s, "show", "1"))


def test_s3_38_json_before_the_first_start_matches_the_schemas(scheduler: Callable[..., Scheduler]) -> None:
    """S3.38: Before the first start of a scheduler, JSON of the verbs matches its schema."""
    s = scheduler()
    for verb in ("status", "jobs", "screens", "report"):
        check(verb, of(s, verb))
    s.cli("submit", "--", "true")
    for words in (["status"], ["jobs"], ["show", "1"], ["report"]):
        check(words[0], of(s, *words))


@pytest.mark.parametrize("name", SCHEMAS)
def test_s3_38_schemas_allow_no_unknown_key_and_describe_each_key(name: str) -> None:
    """S3.38: No schema allows unknown keys, and each key has a description.

    The schema of `show` has all keys of the job schema.
    """
    schema = SCHEMAS[name]
    Draft202012Validator.check_schema(schema)

    def walk(part: Any) -> Iterator[dict[str, Any]]:
        if isinstance(part, dict):
            yield part
        for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
            yield from walk(inner)

    for part in walk(schema):
        if part.get("type") == "object":
            assert part["additionalProperties"] is False, part
            for key, said in part["properties"].items():
                assert said.get("description") or "$ref" in said, key
    if name == "show.schema.json":
        job = list(SCHEMAS["job.schema.json"]["properties"])
        assert list(schema["oneOf"][0]["properties"]) == [*job, "events", "schema"]


def test_s3_38_the_schemas_reject_wrong_values() -> None:
    """S3.38: A schema rejects an additional key, a missing key, and a value of another type."""
    good = {"schema": 1, "sessions": [{"id": 1, "session": "x", "gpus": [0], "attach": "screen -r 1.x"}]}
    assert wrong("screens", good) == []
    for bad in ({**good, "more": 1}, {"schema": 1}, {**good, "schema": 2}, {**good, "sessions": [{"id": "1"}]}):
        assert wrong("screens", bad)
