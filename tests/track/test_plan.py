"""Tests of tracked commands: the words for their states, the effects of observations, and a session as JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scheduler.core.errors import InvalidMove, UsageError
from scheduler.core.job import JobState, Process
from scheduler.core.observations import Ended, Gone, Lost, NeverRan, Observation, Started, Unclaimed
from scheduler.track.plan import (
    SYMBOLS,
    WORDS,
    Command,
    Session,
    Tally,
    TrackerProcess,
    added,
    age,
    claim,
    is_session_id,
    next_id,
    passed_over,
    report,
    session_of,
    stop_asked,
    stored,
    take,
    utc,
)

T0 = 1_700_000_000.0
ME = TrackerProcess(Process(11, 12), "b")
PROCESS = Process(4711, 99)


def a_session(*texts: str) -> Session:
    session = Session("20261122-091500", "a name", T0)
    for text in texts or ("true",):
        added(session, text, ".", T0)
    return session


def claimed(text: str = "true") -> Command:
    command = a_session(text).commands[0]
    claim(command, ME, 1, T0 + 1)
    return command


def running() -> Command:
    command = claimed()
    take(command, Started(1, 1, PROCESS, T0 + 2))
    return command


def again(session: Session) -> Session:
    """Return a copy of the session that was written to JSON and read again."""
    return session_of(json.loads(json.dumps(stored(session, "/r", T0 + 9))), session.id)


def test_s0_4_each_state_has_one_of_five_words_and_a_symbol() -> None:
    """S0.4: Each state of a job has one of five words, and each word has its symbol."""
    assert set(WORDS) == set(JobState)
    assert SYMBOLS == {"pending": "○", "running": "►", "done": "✓", "interrupted": "✗", "skipped": "⊘"}
    assert set(WORDS.values()) == set(SYMBOLS)


ENDINGS: list[tuple[Observation, str, int | None, int | None, str]] = [
    (Ended(1, 1, 0, None, T0 + 5), "done", 0, None, ""),
    (Ended(1, 1, 3, None, T0 + 5), "interrupted", 3, None, ""),
    (Ended(1, 1, None, 9, T0 + 5), "interrupted", None, 9, ""),
    (NeverRan(1, 1, "no folder", True, T0 + 5), "interrupted", None, None, "it could not be started: no folder"),
    (Lost(1, 1, "killed", T0 + 5), "interrupted", None, None, "killed"),
    (Unclaimed(1, 1), "pending", None, None, ""),
    (Started(1, 1, PROCESS, T0 + 3), "running", None, None, ""),
    (Ended(1, 2, 0, None, T0 + 5), "running", None, None, ""),  # the end of another attempt
    (Gone("1.1"), "running", None, None, ""),
]


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("observation, word, code, number, why", ENDINGS)
def test_each_observation_sets_status_exit_code_signal_and_reason(
    observation: Observation, word: str, code: int | None, number: int | None, why: str, begun: bool
) -> None:
    """Each observation sets the status, exit code, signal and reason of a command.

    This holds for a command that is only claimed and for a command that runs.
    """
    command = running() if begun else claimed()
    take(command, observation)
    job = command.job
    assert (command.status, job.exit_code, job.signal, job.reason) == (word, code, number, why)
    assert command.in_hand == (word == "running") == (command.tracker is not None)


def test_s0_5_skip_errors_skips_failed_commands_but_not_interrupted_ones() -> None:
    """S0.5: With `skip_errors`, a command that fails gets the status skipped.

    A command that a user stops gets the status interrupted.
    """
    for observation in (Ended(1, 1, 3, None, T0 + 5), NeverRan(1, 1, "no", True, T0 + 5), Lost(1, 1, "no", T0 + 5)):
        command = running()
        take(command, observation, skip_errors=True)
        assert command.status == "skipped" and command.job.exit_code == (3 if isinstance(observation, Ended) else None)
    command = running()
    stop_asked(command, "interrupted by SIGINT", T0 + 4)
    assert command.status == "running"
    take(command, Ended(1, 1, 0, None, T0 + 5), skip_errors=True)
    assert (command.told, command.job.reason) == ("interrupted (exit=0)", "interrupted by SIGINT")
    assert command.job.state is JobState.CANCELLED


def test_s0_8_a_command_stopped_before_its_start_is_interrupted_without_a_duration() -> None:
    """S0.8: If a command is stopped before it has started, its status is interrupted, and it has no duration."""
    command = claimed()
    stop_asked(command, "interrupted by SIGTERM", T0 + 2)
    take(command, Unclaimed(1, 1))
    assert (command.told, command.job.reason) == ("interrupted", "interrupted by SIGTERM")
    assert command.duration(T0 + 9) is None
    stop_asked(command, "again", T0 + 3)
    assert command.job.state is JobState.CANCELLED, "what has ended is not ended again"


def test_s0_10_a_late_result_replaces_the_status_lost() -> None:
    """S0.10: If the result of an attempt arrives after the attempt was counted as lost, the result counts.

    If the command has a later attempt, the result of an earlier attempt is ignored.
    """
    command = running()
    take(command, Lost(1, 1, "not to be seen from there", T0 + 3))
    take(command, Ended(1, 1, 0, None, T0 + 5))
    assert (command.told, command.job.started_at, command.job.finished_at) == ("done (exit=0)", T0 + 2, T0 + 5)
    claim(command, ME, 2, T0 + 6)
    take(command, Ended(1, 1, 4, None, T0 + 7))
    assert command.status == "running"


def test_s0_10_a_claimed_or_running_command_cannot_be_claimed_again() -> None:
    """S0.10: A command that is already claimed, or that runs, cannot be claimed."""
    with pytest.raises(InvalidMove):
        claim(running(), ME, 2, T0 + 3)
    with pytest.raises(InvalidMove):
        claim(claimed(), ME, 2, T0 + 3)


def test_s0_12_first_returns_the_first_command_of_a_status() -> None:
    """S0.12: `first` returns the first command with this status. A new claim clears the results of the last attempt."""
    session = a_session("a", "b", "c")
    claim(session.commands[0], ME, 1, T0)
    take(session.commands[0], Ended(1, 1, 3, None, T0 + 5))
    session.commands[0].last_output = "old"
    assert [getattr(session.first(word), "id", None) for word in ("pending", "interrupted", "done")] == [2, 1, None]
    command = session.first("interrupted")
    assert command is not None
    claim(command, ME, 2, T0 + 6)
    job = command.job
    assert (job.exit_code, job.finished_at, job.reason, command.last_output) == (None, None, "", "")
    assert (job.attempt_key, job.log) == ("1.2", "1.2.log")


def test_a_skipped_command_keeps_the_results_of_its_end() -> None:
    """If an interrupted command is skipped, it keeps the exit code, signal, times and reason of its end."""
    session = a_session("a", "b", "c")
    for command, observation in zip(
        session.commands, (Ended(1, 1, 3, None, T0 + 5), Lost(2, 1, "why", T0 + 5)), strict=False
    ):
        claim(command, ME, 1, T0)
        take(command, observation)
    assert [command.told for command in passed_over(session)] == ["skipped (exit=3)", "skipped"]
    assert session.commands[1].job.reason == "why" and session.commands[1].job.finished_at == T0 + 5
    assert passed_over(session) == []


def test_s0_5_the_last_line_of_run_all_counts_every_command() -> None:
    """S0.5: The last line of `run-all` counts each command that was run."""
    tally = Tally()
    for code, skip in ((0, False), (1, True), (0, False), (1, False)):
        command = running()
        take(command, Ended(1, 1, code, None, T0 + 5), skip_errors=skip)
        tally.count(command)
    assert tally.told == "Finished: 4 ran, 1 skipped, 1 failed"


def test_s0_3_a_report_has_the_documented_fields_and_a_session_is_read_back_unchanged() -> None:
    """S0.3: A report has the documented fields. A session that is written and read again is unchanged."""
    session = a_session("a", "b")
    session.commands[0] = running()
    stop_asked(session.commands[0], "interrupted by SIGINT", T0 + 3)
    shown = report(session, "/r", T0 + 4)
    assert list(shown) == ["id", "name", "created_at", "cwd", "commands"]
    assert shown["commands"][0]["duration_seconds"] == 2.0 and shown["commands"][0]["finished_at"] is None
    twice = again(again(session))
    assert twice == again(session) and stored(twice, "/r", T0) == stored(session, "/r", T0)
    assert twice.commands[0].job.stop_why == "interrupted by SIGINT"


@pytest.mark.parametrize("at", [0.0, T0, T0 + 0.001, T0 + 0.9994, T0 + 0.9996, 1.1])
def test_times_of_a_session_keep_their_milliseconds(at: float) -> None:
    """The times of a session keep their milliseconds, however often the session is written and read."""
    session = Session("20261122-091500", "n", at)
    text = utc(again(session).created_at)
    assert text == utc(at) and utc(again(again(session)).created_at) == text


def test_a_session_file_of_the_original_program_is_read() -> None:
    """A session file that the original program or a user wrote can be read.

    Such a file has only the status words pending, running, done, interrupted and skipped.
    """
    words = ["pending", "running", "done", "interrupted", "skipped"]
    commands = [{"id": n, "cmd": "x", "status": word} for n, word in enumerate(words, 1)]
    session = session_of({"name": "n", "created_at": "2026-11-22T09:15:00", "commands": commands}, "20261122-091500")
    assert [command.status for command in session.commands] == words
    assert utc(session.created_at) == "2026-11-22T09:15:00.000Z"


def wrong(**changes: Any) -> dict[str, Any]:
    """Return the contents of a session file with one command. The given changes make the file invalid."""
    values = stored(a_session("a"), "/r", T0)
    for key, value in changes.items():
        part = values["commands"][0] if key in values["commands"][0] and key not in ("id", "cwd") else values
        part[key] = value
    return values


@pytest.mark.parametrize(
    "values, said",
    [
        ([], "the session is not a JSON object"),
        ({}, "the session has no 'name'"),
        ({"name": "a"}, "'commands' is not a list"),
        (wrong(name=3), "'name' of the session is 3, not a text"),
        (wrong(schema=2), "a newer gpujob wrote it (schema 2; this gpujob supports 1)"),
        (wrong(id="20200101-000000"), "its id is 20200101-000000, and the file has another name"),
        (wrong(commands={}), "'commands' is not a list"),
        (wrong(commands=[1]), "command 1 is not a JSON object"),
        (wrong(commands=[{"id": 1}]), "command 1 has no 'cmd'"),
        (wrong(commands=[{"id": 1, "cmd": "a", "status": "pending"}] * 2), "two commands have the number 1"),
        (wrong(commands=[{"id": 0, "cmd": "a", "status": "pending"}]), "a command has a number below 1"),
        (wrong(commands=[{"id": True, "cmd": "a", "status": "pending"}]), "'id' of command 1 is True, not a number"),
        (wrong(state="odd"), "'status' of command 1 is odd, not a status"),
        (wrong(started_at="soon"), "'started_at' of command 1 is soon, not a time"),
        (wrong(log="../../x"), "the log of command 1 is not a plain file name: '../../x'"),
        (wrong(process=5), "'process' of command 1 is not a JSON object"),
        (wrong(process={"pid": 0, "ticks": 1}), "'process' of command 1 has no valid pid and start time"),
        (wrong(attempt="1"), "'attempt' of command 1 is 1, not a number"),
    ],
)  # fmt: skip
def test_s0_14_the_error_for_an_invalid_session_file_names_the_fault(values: object, said: str) -> None:
    """S0.14: An invalid session file is refused, and the error names the fault."""
    with pytest.raises(UsageError) as caught:
        session_of(values, "20261122-091500")
    assert str(caught.value) == said


def test_the_id_of_a_new_session_sorts_last() -> None:
    """The id of a new session sorts after all earlier ids.

    This also holds if several sessions are created in one second, or if the clock was set back.
    """
    assert next_id("20261122-091500", []) == "20261122-091500"
    assert next_id("20261122-091500", ["20261122-091500"]) == "20261122-091500-2"
    assert (
        next_id("20261122-091500", ["20261122-091500", "20261122-091500-10", "20261122-091500-9"])
        == "20261122-091500-11"
    )
    assert next_id("20261122-081500", ["20261122-091500"]) == "20261122-091500-2"
    names = ["20261122-091500", "20261122-091500-2", "20261122-091500-10", "20261122-091501"]
    mixed = [names[at] for at in (2, 0, 3, 1)]
    assert sorted(mixed, key=age) == names and all(map(is_session_id, names))
    for text in ("", "x", "../20261122-091500", "20261122-091500-1x", "20261122-091500/..", "20261122-091500-0"):
        assert not is_session_id(text)


def test_an_empty_tracked_command_is_refused() -> None:
    """A command that is empty or has only white space is refused."""
    for text in ("", "  \n"):
        with pytest.raises(UsageError):
            added(a_session(), text, ".", T0)
