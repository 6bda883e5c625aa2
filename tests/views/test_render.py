"""Tests of the texts, tables and JSON that the program prints, and of the durations and sizes that it reads."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scheduler.client.overview import GpuView, Overview
from scheduler.core.errors import UsageError
from scheduler.core.file_offsets import Refusal
from scheduler.core.gpu import Gpu, ResourceRequest
from scheduler.core.job import Failure, Job, JobSpec, JobState, Outcome, Process, Reason
from scheduler.core.job_text import how_it_ended
from scheduler.core.units import mib_of, seconds_of, span_text
from scheduler.views import render

TEXT = st.text(max_size=12) | st.sampled_from(
    ["\x1b[2J", "\x1b]0;x\x07", "a\nb", "a\rb", "\u202eabc", "\u2066", "\x9b31m", "\t", "\x00"]
)
KEYS = (
    "id state outcome exit_code signal priority command script arguments conda_env allowed_gpus need gpus pid session attempt "
    "label reason reason_code failure submitted_at started_at finished_at log"
).split()


@pytest.fixture(autouse=True, scope="module")
def in_utf8() -> Iterator[None]:
    """Set a UTF-8 locale, because the output depends on the locale."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LC_ALL", "C.UTF-8")
        yield


def plays_the_terminal(text: str) -> bool:
    return any(
        unicodedata.category(char) in ("Cc", "Zl", "Zp")
        or "\u202a" <= char <= "\u202e"
        or "\u2066" <= char <= "\u2069"
        or char in "\u061c\u200e\u200f"
        for char in text
    )


def a_job(**values: object) -> Job:
    spec = values.pop("spec", JobSpec(script="/a.py", arguments=("--x", "1")))
    return Job(id=1, spec=spec, need=ResourceRequest(1, 500), submitted_at=1.5, **values)  # type: ignore[arg-type]


# -- text -------------------------------------------------------------------------------------------------


@given(rows=st.lists(st.lists(TEXT, min_size=3, max_size=3), max_size=5))
@example(rows=[["\x1b[31m", "\x85", "\x7f"]])
def test_a_table_contains_no_control_characters(rows: list[list[str]]) -> None:
    """C14: A table contains no control characters and no bidirectional marks, whatever its cells contain."""
    lines = render.table(("A", "B", "C"), rows)
    assert len(lines) == len(rows) + 1
    assert not any(plays_the_terminal(line) for line in lines)


def test_table_columns_are_aligned_and_piped_cells_are_not_cut() -> None:
    """Contract 6: The columns of a table are aligned, and no cell is cut."""
    lines = render.table(("ID", "NAME"), [(1, "x" * 500), (100, "y")])
    assert lines == ["ID   NAME", f"1    {'x' * 500}", "100  y"]
    assert render.table(("ID", "NAME"), []) == ["ID  NAME"]


@given(st.text())
def test_safe_escapes_control_characters_and_keeps_other_text(text: str) -> None:
    """C14: `safe` escapes control characters and leaves all other characters unchanged."""
    shown = render.safe(text)
    assert not plays_the_terminal(shown)
    if not plays_the_terminal(text):
        assert shown == text


def test_safe_text_can_be_encoded_as_utf8() -> None:
    """P3: The result of `safe` can be encoded as UTF-8, also for a file name whose bytes are not UTF-8."""
    render.safe("/tmp/jos\udce9").encode("utf-8")


@given(label=TEXT, word=TEXT, reason=TEXT, log=TEXT, refused=TEXT, name=TEXT)
def test_status_prints_no_control_characters(
    label: str, word: str, reason: str, log: str, refused: str, name: str
) -> None:
    """C14: Labels, words, reasons, log paths and names in `status` cannot control the terminal or start a new line."""
    waiting = a_job(spec=JobSpec(arguments=(word,), label=label))
    running = a_job(spec=JobSpec(script="/" + word), state=JobState.RUNNING, gpus=(0,), log=log, started_at=1.0)
    ended = a_job(spec=JobSpec(arguments=(word,)), state=JobState.FAILED, outcome=Outcome.EXIT, exit_code=1, log=log)
    view = Overview(
        True, 7, {"pending": 1}, [GpuView(Gpu(0, "u", name), "BUSY", 0.5, (1,), False)], [waiting, running, ended],
        {1: Reason("x", reason)}, [Refusal("/jobs.txt", 3, refused, refused)], 2, True, {0: "processes 1 of job 2"},
    )  # fmt: skip
    lines = render.status_lines(view, "/s" + word, 10.0)
    assert not any(plays_the_terminal(line) for line in lines)
    assert any("PAUSED" in line for line in lines) and any("BUSY (50%)" in line for line in lines)
    assert any(line.startswith("  jobs.txt:3:") for line in lines)


def test_control_characters_in_the_name_of_a_watched_file_are_escaped() -> None:
    """C14: Control characters in the name of a watched file are escaped."""
    view = Overview(True, 7, {}, [], [], {}, [Refusal("/x/\x1b[2Jjobs.txt", 3, "t", "r")], 0, False, {})
    assert not any(plays_the_terminal(line) for line in render.status_lines(view, "/s", 10.0))


def test_status_counts_the_waiting_jobs_that_it_does_not_show() -> None:
    """Contract 6: `status` prints how many waiting jobs it leaves out."""
    jobs = [Job(id=n, spec=JobSpec(arguments=("x",)), need=ResourceRequest(1, 1000), order=n) for n in range(1, 21)]
    view = Overview(False, None, {"pending": 30}, [], jobs, {}, [], 0, False, {})
    text = "\n".join(render.status_lines(view, "/s", 10.0))
    assert "… and 10 more" in text and "not running" in text


# -- JSON -------------------------------------------------------------------------------------------------


def test_a_job_in_json_has_all_keys_of_the_contract() -> None:
    """Contract 6: A job in JSON has all keys of the contract."""
    assert set(KEYS) <= set(render.job_json(a_job()))


def test_a_job_in_json_has_only_documented_keys() -> None:
    """Contract 6: A job in JSON has the keys of the contract, `notes`, `interpreter` and the keys of clusters and of several users, and no other keys."""
    assert sorted(render.job_json(a_job())) == sorted(
        [*KEYS, "notes", "interpreter", "allowed_nodes", "node", "partition", "engine_job", "user"]
    )


def test_unknown_values_of_a_waiting_job_are_null_in_json() -> None:
    """Contract 6: In the JSON of a waiting job, values that are not known yet are null."""
    value = render.job_json(a_job(), Reason("no-room", "full"))
    for key in (
        "outcome",
        "exit_code",
        "signal",
        "pid",
        "session",
        "started_at",
        "finished_at",
        "failure",
        "label",
        "log",
    ):
        assert value[key] is None, key
    assert (value["state"], value["reason"], value["reason_code"]) == ("pending", "full", "no-room")
    assert (value["need"], value["gpus"], value["allowed_gpus"]) == (0.5, [], None)
    assert value["submitted_at"] == "1970-01-01T00:00:01.500Z"
    assert value["command"] == ["python", "-u", "/a.py", "--x", "1"] and value["arguments"] == ["--x", "1"]


def test_a_running_job_in_json_shows_the_command_with_added_options() -> None:
    """Contract 6: In the JSON of a running job, `command` includes the options that the scheduler added.

    The exit code, signal and end time of an earlier attempt are not included.
    """
    value = render.job_json(
        a_job(
            state=JobState.RUNNING,
            gpus=(1, 3),
            process=Process(77, 1),
            started_at=2.0,
            exit_code=1,
            signal=9,
            allowed=(1, 3),
        )
    )
    assert value["command"][-2:] == ["--cuda", "1,3"]
    assert (value["pid"], value["gpus"], value["allowed_gpus"]) == (77, [1, 3], [1, 3])
    assert value["exit_code"] is value["signal"] is value["finished_at"] is None, "of an earlier attempt"


def test_an_ended_job_in_json_has_outcome_exit_code_times_and_failure() -> None:
    """Contract 6: The JSON of an ended job has its outcome, its exit code, its times and the cause of its failure."""
    value = render.job_json(
        a_job(
            state=JobState.FAILED, outcome=Outcome.EXIT, exit_code=3, started_at=2.0, finished_at=3.0, process=Process(7, 1),
            log_finding=Failure("oom", "CUDA out of memory", "ask for more", 3, 4, others_mib=5, oom="victim"),
        )
    )  # fmt: skip
    assert (value["state"], value["outcome"], value["exit_code"], value["pid"]) == ("failed", "exit", 3, 7)
    assert value["failure"] == {
        "class": "oom", "line": "CUDA out of memory", "hint": "ask for more", "peak_memory": 3 << 20, "asked_memory": 4 << 20,
        "tried_memory": None, "others_memory": 5 << 20, "oom": "victim",
        "error": None, "good_run": None, "differs": [],
    }  # fmt: skip
    assert value["finished_at"] == "1970-01-01T00:00:03.000Z"


def test_a_successful_job_with_an_out_of_memory_log_is_marked() -> None:
    """B22: A job that exits with 0 has no failure.

    If its log shows an out-of-memory error, `(oom?)` is added to its exit code.
    """
    job = a_job(
        state=JobState.DONE, outcome=Outcome.EXIT, exit_code=0, log_finding=Failure("oom", "CUDA out of memory")
    )
    assert render.job_json(job)["failure"] is None and how_it_ended(job) == "exit 0 (oom?)"


def test_a_command_in_json_is_its_list_of_words() -> None:
    """Contract 6: `command` is a list of words. For a line of a commands file it is ["sh", "-c", TEXT]."""
    value = render.job_json(a_job(spec=JobSpec(source="commands", arguments=("sh", "-c", "echo hi"))))
    assert value["command"] == value["arguments"] == ["sh", "-c", "echo hi"]
    assert value["script"] is None


def test_the_name_of_a_job_in_tables_has_label_and_command() -> None:
    shown = [
        JobSpec(script="/a/train.py", arguments=("--lr", "0.1")).shown_words(),
        JobSpec(script="/a/train.py", arguments=("--name", "a b"), label="base").shown_words(),
        JobSpec(arguments=("/usr/bin/sh", "-c", "echo hi > x")).shown_words(),
        JobSpec(arguments=("echo", "hi", ">", "")).shown_words(),
    ]
    assert shown == ["train.py --lr 0.1", "base: train.py --name 'a b'", "sh -c 'echo hi > x'", "echo hi '>' ''"]


def test_status_counts_the_ended_jobs_that_it_does_not_show() -> None:
    jobs = [a_job(state=JobState.DONE) for _ in range(20)]
    lines = render.status_lines(Overview(False, None, {"done": 20}, [], jobs, {}, [], 0, False, {}), "/x", 0.0)
    assert lines[-1].strip().endswith("and 10 more: gpujob jobs")


@given(word=st.text(max_size=10) | st.just("\udcff"), state=st.sampled_from(JobState))
def test_any_job_is_one_ascii_json_value(word: str, state: JobState) -> None:
    """Contract 6, C14: Any job, whatever its words are, is printed as one JSON value in ASCII."""
    text = json.dumps(render.job_json(a_job(spec=JobSpec(arguments=(word,), label=word), state=state)))
    assert json.loads(text)["arguments"] == [word]
    assert text.isascii() and not plays_the_terminal(text)


def test_status_json_has_the_keys_of_the_contract() -> None:
    """Contract 6: `status --json` has the keys of the contract, and sizes in bytes."""
    view = Overview(
        True, 7, {"pending": 1}, [GpuView(Gpu(0, "u", "A", 0, 24000), "BUSY", 0.5, (1,), False)], [a_job()],
        {1: Reason("x", "y")}, [Refusal("/j", 3, "t", "r")], 2, False, {},
    )  # fmt: skip
    value = render.status_json(view)
    assert value["schema"] == 1 and value["daemon"] == {
        "alive": True, "pid": 7, "started_at": None, "runner": None,
    }  # fmt: skip
    assert set(value["gpus"][0]) == set(
        "index uuid name node partition state paused allocated memory_used memory_total memory_own load temperature reason jobs booked_outside".split()
    )
    assert value["gpus"][0]["memory_total"] == 24000 << 20, "bytes as integers"
    assert len(value["jobs"]) == 1


# -- units ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90), ("4s", 4), ("30m", 1800), ("4h", 14400), ("2d", 172800), ("1-12:00:00", 129600), ("1h30m", 5400), ("1.5h", 5400),
        ("90:00", 5400), ("1:00:00", 3600), ("0", 0), (" 4H ", 14400), ("1w", 604800),
    ],
)  # fmt: skip
def test_durations_are_read_in_all_documented_forms(text: str, seconds: float) -> None:
    """Contract 6: Durations are read in all documented forms."""
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "x", "-1", "1x", "1h30", "h", "1 h", "1e3", "1:2:3:4", "inf"])
def test_the_error_for_an_invalid_duration_shows_a_valid_one(text: str) -> None:
    """Contract 6, P3: An invalid duration is refused, and the error shows a valid one."""
    with pytest.raises(UsageError) as caught:
        seconds_of(text)
    assert "4h" in caught.value.do


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        ("18G", 18432),
        ("512M", 512),
        ("512", 512),
        ("1.5G", 1536),
        ("18GiB", 18432),
        ("1T", 1 << 20),
        ("1024K", 1),
        ("0", 0),
    ],
)
def test_sizes_with_and_without_a_unit_are_converted_to_mib(text: str, mib: int) -> None:
    """Contract 6: A size is read with or without a unit, and converted to MiB. Without a unit, it is in MiB."""
    assert mib_of(text) == mib


@pytest.mark.parametrize(("text", "mib"), [("1K", 1), ("1025K", 2)])
def test_sizes_are_rounded_up_to_whole_mib(text: str, mib: int) -> None:
    """Contract 6: Sizes are rounded up to whole MiB."""
    assert mib_of(text) == mib


@pytest.mark.parametrize("text", ["", "x", "-1", "1X", "G", "1e3", "1 2"])
def test_the_error_for_an_invalid_size_shows_a_valid_one(text: str) -> None:
    """Contract 6, P3: An invalid size is refused, and the error shows a valid one."""
    with pytest.raises(UsageError) as caught:
        mib_of(text)
    assert "18G" in caught.value.do


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(4, "4 s"), (200, "3 min 20 s"), (7500, "2 h 05 min"), (273600, "3 d 4 h"), (-5, "0 s"), (59.9, "59 s")],
)
def test_durations_are_printed_with_at_most_two_units(seconds: float, text: str) -> None:
    """Contract 6: A duration is printed with at most two units. A negative duration is printed as 0 s."""
    assert span_text(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, None), (0.0, "1970-01-01T00:00:00.000Z"), (1e9 + 0.9999, "2001-09-09T01:46:40.999Z")]
)
def test_times_are_printed_in_utc_with_milliseconds(seconds: float | None, text: str | None) -> None:
    """Contract 6: Times are printed in UTC with milliseconds. Smaller parts are cut off, not rounded.

    None stays None.
    """
    assert render.maybe_utc(seconds) == text
