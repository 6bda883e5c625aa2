"""Tests of the journal: a job is one JSON line with times, codes and history.

Lines that were cut off are recognized.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.job import Job, JobState, Outcome, Process
from scheduler.core.journal import (
    KEYS,
    STATUS_AFTER,
    identity_of_record,
    is_beginning,
    line_of,
    read_line,
    record_of,
    status_of,
    torn_id,
)
from tests.builders import T0, a_job
from tests.stories.secret_shapes import SECRET, SHAPES

Moments = list[tuple[float, str]]
RAN: Moments = [(T0 + 5.1, "started"), (T0 + 9.2, "done")]


def at(seconds: float) -> str:
    """Return the text that the journal writes for the time ``seconds`` seconds after T0 (1970-01-12 13:46:40 UTC)."""
    return f"1970-01-12T13:{46 + int(40 + seconds) // 60:02}:{(40 + seconds) % 60:06.3f}Z"


def ran(**changes: object) -> Job:
    """Return a job that ran from second 5 to second 9 and succeeded."""
    given = {"state": JobState.DONE, "attempt": 1, "gpus": (2,), "process": Process(4711, 7), "started_at": T0 + 5,
             "finished_at": T0 + 9, "log": "/logs/job_1.log", "exit_code": 0, "outcome": Outcome.EXIT, **changes}  # fmt: skip
    return a_job(**given)


def test_s1_6_a_journal_record_has_all_fields() -> None:
    """S1.6: A record has command, pid, start time, GPU, status, log path, end time, exit code and history."""
    record = record_of(ran(arguments=("--epochs", "3 4")), RAN)
    assert tuple(record) == KEYS
    assert record == {
        "id": 1, "command": "/data/train.py --epochs '3 4'", "status": "completed", "pid": 4711, "gpu_id": 2,
        "start_time": at(5), "end_time": at(9), "log_file": "/logs/job_1.log", "exit_code": 0, "outcome": "exit",
        "history": [[at(0), "pending"], [at(5), "running"], [at(9), "completed"]],
    }  # fmt: skip
    assert record_of(a_job(7), []) == dict.fromkeys(KEYS) | {
        "id": 7, "command": "/data/train.py", "status": "pending", "history": [[at(0), "pending"]],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("state", "process", "word"),
    [
        (JobState.PENDING, None, "pending"),
        (JobState.STARTING, None, "pending"),
        (JobState.STOPPING, None, "pending"),
        (JobState.RUNNING, Process(1, 1), "running"),
        (JobState.STOPPING, Process(1, 1), "running"),
        (JobState.DONE, Process(1, 1), "completed"),
        (JobState.FAILED, None, "failed"),
        (JobState.CANCELLED, None, "cancelled"),
        (JobState.SKIPPED, None, "skipped"),
    ],
)
def test_s1_6_each_state_has_a_status_word(state: JobState, process: Process | None, word: str) -> None:
    assert status_of(a_job(state=state, process=process)) == word


@pytest.mark.parametrize(("gpus", "shown"), [((), None), ((0,), 0), ((1, 3), [1, 3])])
def test_s1_6_gpu_id_is_a_number_a_list_or_null(gpus: tuple[int, ...], shown: object) -> None:
    assert record_of(ran(gpus=gpus), RAN)["gpu_id"] == shown


def test_s1_6_the_record_of_a_job_without_a_process_has_no_gpu_and_no_log_path() -> None:
    """Until a job has a process, its record has no GPU and no log path."""
    job = a_job(state=JobState.STARTING, attempt=1, gpus=(0,), log="/logs/job_1.log")
    assert record_of(job, []) == record_of(a_job(), [])


def test_s1_6_history_contains_retries_and_requeues() -> None:
    """The history of a job takes the times of the last attempt from the job's row in the store.

    It takes the times of earlier attempts from the job's events.
    """
    moments: Moments = [
        (T0 + 1, "held"), (T0 + 2, "released"), (T0 + 3, "started"), (T0 + 4, "retry_scheduled"), (T0 + 5, "unclaimed"),
        (T0 + 6, "started"), (T0 + 7, "stopping"), (T0 + 7, "leftovers"), (T0 + 8, "cancelled"), (T0 + 9, "requeued"),
        (T0 + 10.2, "started"), (T0 + 12.3, "failed"),
    ]  # fmt: skip
    job = ran(state=JobState.FAILED, attempt=3, started_at=T0 + 10, finished_at=T0 + 12, exit_code=1)
    words = "pending running pending running cancelled pending running failed".split()
    assert record_of(job, moments)["history"] == [
        [at(second), word] for second, word in zip((0, 3, 4, 6, 8, 9, 10, 12), words, strict=True)
    ]


def test_s1_6_history_with_missing_events_ends_with_the_current_state() -> None:
    """The history of a job ends with the current state, even if the events of the job are missing.

    This happens if `recover` keeps a job whose events it cannot read.
    """
    assert record_of(ran(), [])["history"] == [[at(0), "pending"], [at(9), "completed"]]
    running = ran(state=JobState.RUNNING, finished_at=None, exit_code=None)
    assert record_of(running, [])["history"] == [[at(0), "pending"], [at(5), "running"]]


def test_s1_6_history_of_a_failed_job_that_is_skipped_keeps_the_time_of_its_failure() -> None:
    moments: Moments = [(T0 + 5, "started"), (T0 + 9.5, "failed"), (T0 + 20, "skipped")]
    history = record_of(ran(state=JobState.SKIPPED, exit_code=3), moments)["history"]
    assert history[2:] == [[at(9), "failed"], [at(20), "skipped"]]


def test_s1_6_a_record_has_an_exit_code_only_if_the_job_ended_with_one() -> None:
    """S1.7: The exit code of a record is null unless the job has ended with an exit code."""
    for outcome in (Outcome.SIGNAL, Outcome.LOST, Outcome.COULD_NOT_START):
        record = record_of(ran(state=JobState.FAILED, exit_code=None, outcome=outcome), RAN)
        assert (record["status"], record["exit_code"], record["outcome"]) == ("failed", None, outcome.value)
    stopping = ran(state=JobState.STOPPING, exit_code=0)
    assert (record_of(stopping, RAN[:1])["exit_code"], record_of(stopping, RAN[:1])["end_time"]) == (None, None)


def test_s1_6_a_job_of_a_commands_file_is_recorded_with_its_unchanged_line() -> None:
    text = "cd /x && python train.py --lr 1e-3 > 'a b'  # é"
    assert record_of(a_job(source="commands", script="", arguments=("sh", "-c", text)), [])["command"] == text
    submitted = a_job(source="submit", script="", arguments=("sh", "-c", "a b"))
    assert record_of(submitted, [])["command"] == "sh -c 'a b'"


@pytest.mark.parametrize("name", SHAPES)
def test_s15_the_journal_shows_no_secret(name: str) -> None:
    """S15: The journal hides the secrets in a job's arguments and in its shell text, and omits the environment."""
    words = SHAPES[name]
    asked = a_job(source="submit", script="", arguments=words, variables=(f"HF_TOKEN={SECRET}",))
    assert SECRET not in line_of(record_of(asked, [])).decode()
    text = " ".join(f'"{w}"' if " " in w and '"' not in w else w for w in words)
    line = a_job(source="commands", script="", arguments=("sh", "-c", text))
    assert SECRET not in line_of(record_of(line, [])).decode()


texts = st.text(st.characters(), max_size=40)
moments_of = st.floats(0, 4e11, allow_nan=False)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    state = draw(st.sampled_from(JobState))
    source = draw(st.sampled_from(["line", "commands", "submit"]))
    script = draw(texts) if source == "line" else ""
    words = tuple(draw(st.lists(texts, max_size=4)))
    return a_job(
        draw(st.integers(0, 10**12)), source=source, script=script, arguments=words, state=state,
        gpus=tuple(draw(st.sets(st.integers(0, 200), max_size=3))), log=draw(texts),
        process=draw(st.none() | st.builds(Process, st.integers(1, 4 << 20), st.integers(0, 10**9))),
        submitted_at=draw(moments_of), started_at=draw(st.none() | moments_of),
        finished_at=draw(moments_of if state.ended else st.none()), exit_code=draw(st.none() | st.integers(0, 255)),
        attempt=draw(st.integers(0, 9)),
    )  # fmt: skip


@given(jobs(), st.lists(st.tuples(moments_of, st.sampled_from([*STATUS_AFTER, "held", "undying"])), max_size=6))
def test_s1_6_any_job_becomes_one_line_of_json_that_can_be_read_back(job: Job, moments: Moments) -> None:
    """S1.6: Any job becomes one line of JSON in ASCII.

    The line can be read back, and is recognized as a record of this program.
    """
    record = record_of(job, moments)
    line = line_of(record)
    assert line.isascii() and line.count(b"\n") == 1 and line.endswith(b"\n")
    assert read_line(line) == record and identity_of_record(read_line(line)) == (job.id, record["history"][0][0])
    json.dumps(record, ensure_ascii=False).encode()  # raises an error if the record has a lone surrogate
    assert record["history"][-1][1] == record["status"]
    assert all(before[1] != after[1] for before, after in zip(record["history"], record["history"][1:], strict=False))


@given(jobs(), st.data())
def test_s1_12_any_cut_off_line_is_recognized_as_the_record_of_its_job(job: Job, data: st.DataObject) -> None:
    """S1.12: A line that was cut off is not valid JSON, but is recognized as the beginning of a record.

    If the line contains the whole id of the job, it is recognized as the record of this job.
    """
    line = line_of(record_of(job, []))
    torn = line[: data.draw(st.integers(1, len(line) - 2))]
    with pytest.raises(ValueError):
        read_line(torn)
    number = torn_id(torn)
    assert number in (None, job.id)
    if number is None:
        assert is_beginning(torn, None)
    elif b"{" not in torn[len(b'{"id": ') :]:  # otherwise another program may have written after the torn part
        assert is_beginning(torn, job)


def test_s1_12_text_of_other_programs_is_not_recognized_as_a_cut_off_line() -> None:
    """S1.12: Text of another program is never mistaken for a cut-off line of gpujob. So gpujob does not delete it."""
    job = a_job(3)
    line = line_of(record_of(job, []))
    for torn in (b"note to self", b"", b'{"id": "x', b'{"job": 3, "c', b"\0" * 50, b'{"id": 3, "commander": 1'):
        number = torn_id(torn)
        assert torn == b"" or not is_beginning(torn, job if number == 3 else None), torn
    assert is_beginning(line[:60], job)
    assert not is_beginning(line[:60], a_job(3, arguments=("--other",)))
    assert not is_beginning(line[:60] + b'{"note": 1}', job)


@pytest.mark.parametrize(
    "value", [1, None, "x", [], {}, {"id": 1}, dict.fromkeys(reversed(KEYS), 1), dict.fromkeys(KEYS),
              dict.fromkeys(KEYS, True), dict.fromkeys(KEYS[:5], 1), {**dict.fromkeys(KEYS, -1), "history": [["x", "y"]]},
              *({**dict.fromkeys(KEYS, 1), "history": history} for history in ([], [[]], [1], [[1, "pending"]], "x"))]
)  # fmt: skip
def test_s1_6_other_json_values_are_not_recognized_as_records(value: object) -> None:
    assert identity_of_record(value) is None


def test_s1_6_records_of_other_versions_are_recognized() -> None:
    """Records that another version of gpujob wrote are recognized, so an upgrade writes no second record of a job."""
    for keys in ((*KEYS, "more"), (*KEYS[:3], "history"), KEYS):
        assert identity_of_record({**dict.fromkeys(keys, 7), "history": [["2026", "pending"]]}) == (7, "2026")


@pytest.mark.parametrize("line", [b"", b"{", b"NaN", b"\xff", b"[" * 100_000, b'{"a": Infinity}', b"\0\0"])
def test_s1_12_a_line_that_is_not_json_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError):
        read_line(line)
