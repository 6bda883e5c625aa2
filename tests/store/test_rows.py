"""Tests of the rows of the store: jobs, events, requests and line counts are read back as they were written."""

from __future__ import annotations

import sqlite3
import uuid
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.file_offsets import FileMark, Refusal
from scheduler.core.gpu import Gpu, ResourceRequest
from scheduler.core.job import Event, Failure, Holding, Job, JobSpec, JobState, Outcome, Process, Reason
from scheduler.core.observations import Asked
from scheduler.core.placement_class import class_of
from scheduler.core.requests import Answer, Cancel, Pause, PauseQueue, Request, Requeue, Resume
from scheduler.core.run_facts import Code, RunFacts
from scheduler.store import file_offsets as kept
from scheduler.store import jobs as rows
from scheduler.store.database import Database
from scheduler.store.deletion import forget
from scheduler.store.job_columns import COLUMNS
from scheduler.store.migrations import migrate
from scheduler.store.paths import Places

WHOLE = ResourceRequest(1, 1000)


@pytest.fixture
def connection(database: Database) -> sqlite3.Connection:
    return database.connection


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
ANY_TEXT = st.text(max_size=20).map(
    lambda text: text + "\udcff" if len(text) == 7 else text
)  # a file name need not be UTF-8
IDS = st.sets(st.integers(0, 4095), min_size=1, max_size=8).map(lambda ids: tuple(sorted(ids)))
SPECS = st.builds(
    JobSpec,
    source=st.sampled_from(["line", "commands", "submit"]),
    script=ANY_TEXT,
    arguments=st.lists(ANY_TEXT, max_size=5).map(tuple),
    conda_env=ANY_TEXT,
    priority=st.integers(-(10**9), 10**9),
    allowed=st.none() | IDS,
    gpus=st.sampled_from(["", "0", "0.5", "2x0.5"]),
    label=TEXT,
    after=st.lists(st.integers(1, 10**9), max_size=3).map(tuple),
    after_ok=st.lists(st.integers(1, 10**9), max_size=3).map(tuple),
    vram_mib=st.none() | st.integers(0, 10**9),
    time_limit_s=st.none() | st.floats(0, 1e9),
    retries=st.integers(0, 999999),
    cwd=ANY_TEXT,
    cuda=st.sampled_from(["", "local"]),
    env_file=TEXT,
    umask=st.none() | st.integers(0, 0o777),
    origin=TEXT,
    user=TEXT,
    mem_mib=st.none() | st.integers(1, 2**20),
    cpus=st.none() | st.floats(0.1, 4096),
    uid=st.none() | st.integers(0, 2**32 - 2),
    on=st.just(()) | IDS,
    slots=st.integers(1, 999999),
    launch=st.sampled_from(["python", "torchrun"]),
    link=st.sampled_from(["", "nvlink", "pcie", "numa"]),
    limits=st.lists(st.tuples(st.integers(0, 15), st.integers(-1, 2**62), st.integers(-1, 2**62)), max_size=3).map(
        tuple
    ),
    variables=st.lists(ANY_TEXT.map("A={}".format), max_size=3).map(tuple),
    output=st.sampled_from(["log", "none"]),
    log_dir=ANY_TEXT,
    log_name=ANY_TEXT,
    stderr_apart=st.booleans(),
    hold=st.booleans(),
    gzip=st.booleans(),
    caller=st.sampled_from(["", "1 2 /run/a b"]),
    on_finish=ANY_TEXT,
    mail_to=TEXT,
    info=ANY_TEXT,
    edited=st.lists(st.sampled_from(["label", "gpus"]), max_size=2).map(tuple),
)
TIMES = st.floats(0, 4e9)
MIB = st.none() | st.integers(0, 10**7)
CHANGES: dict[str, st.SearchStrategy[Any]] = {
    "state": st.sampled_from(JobState),
    "need": st.builds(ResourceRequest, st.integers(1, 64), st.integers(1, 1000), st.sampled_from(["", "1g.10gb", "*"])),
    "priority": st.integers(-(10**9), 10**9),
    "order": st.integers(1, 10**9),
    "allowed": st.none() | IDS,
    "started_at": st.none() | TIMES,
    "finished_at": st.none() | TIMES,
    "attempt": st.integers(0, 100),
    "start_failures": st.integers(0, 100),
    "runs_failed": st.integers(0, 100),
    "oom_retries": st.integers(0, 100),
    "gpu_retries": st.integers(0, 100),
    "not_before": st.none() | TIMES,
    "gpus": IDS | st.just(()),
    "process": st.none() | st.builds(Process, st.integers(1, 2**22), st.integers(0, 2**62)),
    "boot": TEXT,
    "runner": st.sampled_from(["direct", "screen"]),
    "session": st.none() | TEXT,
    "interpreter": st.text("abc(3.1) /", max_size=20),
    "node": st.text("node12", max_size=5),
    "partition": st.text("main", max_size=5),
    "engine_job": st.text("0123456789", max_size=5),
    "argv": st.lists(TEXT, max_size=3).map(tuple),
    "log": TEXT,
    "outcome": st.none() | st.sampled_from(Outcome),
    "exit_code": st.none() | st.integers(0, 255),
    "signal": st.none() | st.integers(1, 64),
    "reason_code": TEXT,
    "reason": TEXT,
    "stop_why": TEXT,
    "stop_at": st.none() | TIMES,
    "held": st.booleans(),
    "notes": st.lists(ANY_TEXT, max_size=3).map(tuple),
    "log_finding": st.none()
    | st.builds(
        Failure,
        TEXT,
        ANY_TEXT,
        TEXT,
        MIB,
        MIB,
        MIB,
        MIB,
        MIB,
        TEXT,
        ANY_TEXT,
        MIB,
        st.none() | TIMES,
        st.lists(ANY_TEXT, max_size=3).map(tuple),
    ),
    "facts": st.none()
    | st.builds(
        RunFacts,
        TEXT,
        st.lists(st.tuples(TEXT, TEXT), max_size=2).map(tuple),
        TEXT,
        st.none() | st.builds(Code, ANY_TEXT, st.integers(0, 10**9), TEXT, TEXT),
    ),
}


# -- jobs -------------------------------------------------------------------------------------------------


def test_the_generated_job_specs_cover_every_field() -> None:
    """``SPECS`` generates values for every field of JobSpec."""
    assert set(SPECS.wrapped_strategy.kwargs) == {f.name for f in fields(JobSpec)}  # type: ignore[attr-defined]


@given(
    spec=SPECS,
    notes=st.lists(ANY_TEXT, max_size=2).map(tuple),
    need=st.builds(ResourceRequest, st.integers(0, 9), st.integers(0, 1000)),
)
def test_a_new_job_is_read_back_as_it_was_inserted(
    database: Database, spec: JobSpec, notes: tuple[str, ...], need: ResourceRequest
) -> None:
    """P4: A new job is read back as it was inserted."""
    with database.writing(sync=False) as connection:
        made = rows.insert(connection, spec, need, "", notes, 12.5)
    assert rows.get(database.connection, made.id) == made
    assert made.spec == spec and made.notes == notes and made.need == need
    assert made.order == made.id == rows.last_id(database.connection)


@given(changes=st.fixed_dictionaries({}, optional=CHANGES))
def test_every_change_of_a_job_is_read_back(database: Database, changes: dict[str, Any]) -> None:
    """P4, P5: All changed fields of a job are read back."""
    with database.writing(sync=False) as connection:
        job = rows.insert(connection, JobSpec(arguments=("x",)), WHOLE, "", (), 1.0)
        for name, value in changes.items():
            setattr(job, name, value)
        rows.save(connection, [job])
    assert rows.get(database.connection, job.id) == job


@given(changes=st.lists(st.fixed_dictionaries({}, optional=CHANGES), min_size=2, max_size=4), read=st.booleans())
def test_changes_that_are_written_one_after_the_other_are_all_read_back(
    database: Database, changes: list[dict[str, Any]], read: bool
) -> None:
    """P4, P5: A save writes all fields that changed since the job was read or last saved."""
    with database.writing(sync=False) as connection:
        job = rows.insert(connection, JobSpec(arguments=("x",)), WHOLE, "", (), 1.0)
        if read:
            found = rows.get(connection, job.id)
            assert found is not None
            job = found
        for some in changes:
            for name, value in some.items():
                setattr(job, name, value)
            rows.save(connection, [job])
            assert rows.get(connection, job.id) == job


def test_a_save_names_only_the_columns_that_have_changed(database: Database) -> None:
    """SQLite rewrites the index of each column that a statement names. A copy of a job is written whole."""
    said: list[str] = []

    def save(job: Job) -> list[str]:
        said.clear()
        rows.save(connection, [job])
        return list(dict.fromkeys(said))  # SQLite reports a statement with a trigger twice

    with database.writing(sync=False) as connection:
        job = rows.insert(connection, JobSpec(arguments=("x",)), WHOLE, "", (), 1.0)
        connection.set_trace_callback(said.append)
        assert save(job) == []
        job.process = Process(3, 4)
        assert save(job) == [f"UPDATE jobs SET pid=3, ticks=4 WHERE id={job.id}"]
        assert save(job) == []
        (whole,) = save(replace(job))
        connection.set_trace_callback(None)
    assert "finished_at=" in whole and "reason=" in whole and "pid=3" in whole


def test_the_generated_changes_cover_every_field_of_a_job_that_can_change() -> None:
    """``CHANGES`` generates values for every field of Job that can change."""
    fixed = {"id", "spec", "identity", "submitted_at", "stored"}
    assert set(CHANGES) == set(Job.__slots__) - fixed  # type: ignore[attr-defined]


@given(SPECS)
def test_a_job_spec_survives_conversion_to_plain_values(spec: JobSpec) -> None:
    """P4: A JobSpec that is converted to plain values and back is unchanged.

    Keys that a newer version added are ignored.
    """
    assert JobSpec.from_dict(spec.as_dict()) == spec
    assert JobSpec.from_dict({**spec.as_dict(), "of a newer version": 1}) == spec


@pytest.mark.parametrize(
    "state", [JobState.PENDING, JobState.STARTING, JobState.RUNNING, JobState.STOPPING, JobState.DONE]
)
def test_a_job_that_waits_runs_or_has_succeeded_blocks_an_equal_line(database: Database, state: JobState) -> None:
    """S3.27, S3.28: While a job waits, runs or has succeeded, no job with the same identity can be added."""
    with database.writing() as connection:
        job = rows.insert(connection, JobSpec(script="/a.py"), WHOLE, "same", (), 1.0)
        job.state = state
        rows.save(connection, [job])
    found = rows.blocker_of(database.connection, "same")
    assert found is not None and found.id == job.id
    with pytest.raises(Exception, match=r"UNIQUE|cannot be used"):
        with database.writing() as connection:
            rows.insert(connection, JobSpec(script="/a.py"), WHOLE, "same", (), 2.0)
    assert rows.last_id(database.connection) == 1


@pytest.mark.parametrize("state", [JobState.FAILED, JobState.CANCELLED, JobState.SKIPPED])
def test_a_failed_cancelled_or_skipped_job_does_not_block_an_equal_line(database: Database, state: JobState) -> None:
    """S3.29, C18: If a job has failed or was cancelled or skipped, a job with the same identity can be added."""
    with database.writing() as connection:
        job = rows.insert(connection, JobSpec(script="/a.py"), WHOLE, "same", (), 1.0)
        job.state = state
        rows.save(connection, [job])
        assert rows.blocker_of(connection, "same") is None
        again = rows.insert(connection, JobSpec(script="/a.py"), WHOLE, "same", (), 2.0)
    assert again.id == 2


def test_jobs_without_an_identity_never_block_each_other(database: Database) -> None:
    """Contract 3: Jobs of `submit` have no identity. So two equal jobs of `submit` are both added."""
    with database.writing() as connection:
        for number in range(3):
            rows.insert(connection, JobSpec(arguments=("x",)), WHOLE, "", (), float(number))
    assert rows.counts(database.connection)["pending"] == 3


def test_no_job_id_is_used_twice_after_a_row_was_deleted(database: Database) -> None:
    """P1: A job id is used only once, because the names of attempt records and logs contain it."""
    with database.writing() as connection:
        for _ in range(3):
            rows.insert(connection, JobSpec(arguments=("x",)), WHOLE, "", (), 1.0)
        connection.execute("DELETE FROM jobs WHERE id<3")  # the newest row stays; the tests of `forget` delete it
        again = rows.insert(connection, JobSpec(arguments=("x",)), WHOLE, "", (), 1.0)
    assert again.id == 4 == rows.last_id(database.connection)


def test_jobs_are_found_by_state_and_label(database: Database) -> None:
    """Contract 6: Jobs are found by state and by label, in the order in which they wait or in which they ended."""
    labels = ["a", "A", "%", "_", 'q"q', "b\\", "é", "a b", ""]
    with database.writing() as connection:
        jobs = [rows.insert(connection, JobSpec(arguments=("a",), label=label), WHOLE, "", (), 1.0) for label in labels]
        for job, state in zip(jobs, JobState, strict=False):
            job.state = state
            job.finished_at = 10.0 + job.id if state.ended else None
        rows.save(connection, jobs)
    connection = database.connection
    for job, label in zip(jobs, labels, strict=True):
        if label:
            assert [found.id for found in rows.labelled(connection, label)] == [job.id], label
    assert rows.labelled(connection, "nosuch") == []
    for state in JobState:
        assert {job.id for job in rows.select(connection, [state.value])} == {
            job.id for job in jobs if job.state is state
        }
    assert [job.id for job in rows.select(connection)] == list(range(1, 10))
    assert [job.id for job in rows.in_hand(connection)] == [job.id for job in jobs if job.state.holds_gpus]
    assert [job.id for job in rows.live(connection)] == [job.id for job in jobs if not job.state.ended]
    assert [job.id for job in rows.pending(connection, 1)] == [9] == [job.id for job in rows.new_pending(connection, 1)]
    assert [job.id for job in rows.last_ended(connection, 2)] == [8, 7]
    assert sum(rows.counts(connection).values()) == 9
    assert set(rows.counts(connection)) == {state.value for state in JobState}
    assert rows.get(connection, 99) is None


def test_an_edited_spec_is_read_back(database: Database) -> None:
    """Contract 3: The changed options of a waiting job are read back."""
    with database.writing() as connection:
        job = rows.insert(connection, JobSpec(script="/a.py"), WHOLE, "i", (), 1.0)
        job.spec = JobSpec(script="/a.py", priority=5, allowed=(1,), vram_mib=7, after=(1,))
        job.priority, job.allowed = 5, (1,)
        rows.respec(connection, job)
        rows.save(connection, [job])
    assert rows.get(database.connection, 1) == job


# -- the rest ---------------------------------------------------------------------------------------------


def test_events_are_read_back_in_order(database: Database) -> None:
    """Contract 6: Events of a job are read in the order in which they were written, even if their times are equal."""
    events = [
        Event(1, 1.0, "accepted", {"from": "jobs.txt:1"}),
        Event(1, 1.0, "started", {"gpus": [0, 1]}),
        Event(1, 3.0, "x"),
    ]
    with database.writing() as connection:
        rows.write_events(connection, [events[0], Event(2, 1.0, "accepted"), *events[1:]])
    assert rows.events_of(database.connection, 1) == events
    assert rows.events_of(database.connection, 3) == []


@pytest.mark.parametrize("later", [1e9, 1e9 + 1e-6], ids=["same instant", "a microsecond later"])
def test_events_with_equal_times_do_not_replace_each_other(database: Database, later: float) -> None:
    """P4: If two calls write events with the same or almost the same time, all events are kept."""
    first = [Event(1, 1e9, "accepted"), Event(1, 1e9, "changed")]
    second = [Event(1, later, "started"), Event(1, later, "ended")]
    with database.writing() as connection:
        rows.write_events(connection, first)
        rows.write_events(connection, second)
    assert rows.events_of(database.connection, 1) == [*first, *second]


@pytest.mark.parametrize(
    "request_", [Cancel((1, 2)), Requeue((3,)), Pause((0,)), Resume((0, 1)), PauseQueue(True), PauseQueue(False)]
)
def test_requests_and_their_answers_are_read_back(database: Database, request_: Request) -> None:
    """S3.30, P4: Requests and their answers are read back. A request that was answered is not returned again."""
    with database.writing() as connection:
        row = rows.ask(connection, request_, 1.0)
    assert rows.asked(database.connection) == [(1.0, Asked(row, request_))]
    assert rows.answer_of(database.connection, row) is None
    answer = Answer(row, 5, ("one", "zwei é"))
    with database.writing() as connection:
        rows.answer(connection, [answer])
    assert rows.asked(database.connection) == []
    assert rows.answer_of(database.connection, row) == answer


def test_requests_are_returned_in_order(database: Database) -> None:
    """S3.31: Requests are returned in the order in which they were made."""
    wanted: list[Request] = [Pause((0,)), Resume((0,)), Pause((0,))]
    with database.writing() as connection:
        numbers = [rows.ask(connection, one, 1.0) for one in wanted]
    assert rows.asked(database.connection) == [(1.0, Asked(row, one)) for row, one in zip(numbers, wanted, strict=True)]


@pytest.mark.parametrize(("kind", "arguments"), [("dance", "{}"), ("pause", "{}"), ("pause", "[]"), ("pause", "{")])
def test_k07_an_unknown_request_is_refused_once(database: Database, kind: str, arguments: str) -> None:
    """K07, P3: A request of an unknown kind or form is refused once. The answer suggests a restart of the scheduler."""
    with database.writing() as connection:
        connection.execute("INSERT INTO requests (kind, arguments, made_at) VALUES (?, ?, 1)", (kind, arguments))
        rows.ask(connection, Pause((0,)), 2.0)
        assert [one.request for _, one in rows.asked(connection)] == [Pause((0,))]
        assert [one.row for _, one in rows.asked(connection)] == [2]
    answer = rows.answer_of(database.connection, 1)
    assert answer is not None and answer.code == 1 and "restart it" in answer.lines[0]


def test_pauses_gpus_reasons_and_holdings_are_read_back(database: Database) -> None:
    """S3.30, P7: Pauses, GPUs, reasons and holdings are read back as they were saved.

    If an empty list is saved, the old entries are removed.
    """
    gpus = [
        Gpu(0, "u0", "A", 0, 1000, links=((1, 0), (3, 2))),
        Gpu(2, "u2", "B", 1, None),
        Gpu(100, "MIG-x", "C", 0, 9856, profile="1g.10gb"),
    ]
    held = Holding("3.1", 3, ResourceRequest(2, 500), (0, 2), 7, (Process(10, 20), Process(11, 2**60)))
    with database.writing() as connection:
        rows.save_pauses(connection, (2, 0), True, [(4, 2, False), (5, -1, True)])
        rows.save_gpus(connection, gpus)
        rows.save_class_reasons(connection, {"1x1000/*/0": Reason("no-room", "full")})
        rows.save_holdings(connection, [held], [], "boot")
    connection = database.connection
    assert rows.paused_gpus(connection) == (0, 2) and rows.meta(connection, "queue_paused")
    assert rows.pause_changes(connection) == [(4, 2, False), (5, -1, True)]
    assert rows.gpus(connection) == gpus
    assert rows.class_reasons(connection) == {"1x1000/*/0": Reason("no-room", "full")}
    assert rows.holdings(connection) == [(held, "boot")]
    with database.writing() as connection:
        rows.save_pauses(connection, (), False, [])
        rows.save_gpus(connection, [])
        rows.save_class_reasons(connection, {})
        rows.save_holdings(connection, [], ["3.1"], "boot")
    assert (rows.paused_gpus(connection), rows.gpus(connection), rows.holdings(connection)) == ((), [], [])
    assert rows.class_reasons(connection) == {} and not rows.meta(connection, "queue_paused")


def test_jobs_of_other_classes_are_not_before_a_job(database: Database) -> None:
    """A link counts only for jobs with several GPUs; a MIG profile always counts."""
    two, instance = ResourceRequest.parse("2"), ResourceRequest.parse("mig-1g.10gb")
    whole, plain, linked = ResourceRequest.parse("1"), JobSpec(script="/a"), JobSpec(script="/a", link="nvlink")
    made = [
        (two, plain),
        (two, linked),
        (two, linked),
        (whole, linked),
        (whole, plain),
        (instance, plain),
        (instance, linked),
    ]
    with database.writing() as connection:
        jobs = [rows.insert(connection, spec, need, "", (), 1.0) for need, spec in made]
    assert [rows.waiting_before(database.connection, job) for job in jobs] == [0, 0, 1, 0, 1, 0, 1]
    classes = [class_of(job) for job in jobs]
    assert [sum(one == kind for one in classes[:i]) for i, kind in enumerate(classes)] == [0, 0, 1, 0, 1, 0, 1]


# -- lines ------------------------------------------------------------------------------------------------


@given(
    st.builds(
        FileMark, path=TEXT, device=st.integers(0, 2**62), inode=st.integers(0, 2**62), offset=st.integers(0, 2**62),
        lines=st.integers(0, 2**40), crc=st.integers(0, 2**32 - 1), replaying=st.booleans(), open_line=st.booleans(),
        skipping=st.booleans(),
    )
)  # fmt: skip
def test_the_reading_position_of_a_file_is_read_back(database: Database, mark: FileMark) -> None:
    """C40, P2: The reading position of a watched file is read back."""
    with database.writing(sync=False) as connection:
        kept.save_mark(connection, FileMark(mark.path, 1, 2, 3))
        kept.save_mark(connection, mark)
    assert kept.mark_of(database.connection, mark.path) == mark
    assert kept.mark_of(database.connection, f"{mark.path}: {uuid.uuid4()}") is None  # examples share the database


def test_equal_lines_are_counted_from_one_again_after_the_file_was_replaced(database: Database) -> None:
    """C07, C17, contract 3: `count_line` counts equal lines of a file. If the file is replaced, it counts from 1 again.

    Until the new file is read to its end, `count_line` also returns how many such lines the old file had. A line of the
    new file is a new job only if its number is larger than this old count.
    """
    with database.writing() as connection:
        assert [kept.count_line(connection, "f", "a") for _ in range(3)] == [(1, 0), (2, 0), (3, 0)]
        assert kept.count_line(connection, "f", "b") == (1, 0)
        assert kept.count_line(connection, "g", "a") == (1, 0)
        assert kept.duplicates(connection) == 0, "a line that ran again after a failure is no repetition"
        kept.count_repeated(connection, "f", ["a", "a"])
        assert kept.duplicates(connection) == 2
        kept.start_recount(connection, "f")
        assert [kept.count_line(connection, "f", "a") for _ in range(2)] == [(1, 3), (2, 3)]
        kept.start_recount(connection, "f")  # replaced again before the end of the recount
        assert [kept.count_line(connection, "f", "a") for _ in range(4)] == [(1, 3), (2, 3), (3, 3), (4, 3)]
        assert kept.count_line(connection, "f", "c") == (1, 0)
        kept.end_recount(connection, "f")
        assert kept.count_line(connection, "f", "a") == (5, 0)
        assert kept.count_line(connection, "f", "b") == (1, 0), "it no longer stood there"
        assert kept.count_line(connection, "g", "a") == (2, 0), "another file is another matter"


def test_refused_lines_are_read_back_and_removed_when_the_file_is_read_again(database: Database) -> None:
    """S3.9, P2: Refused lines are read back. If a file is read from its start again, its refused lines are removed."""
    one, two, other = (
        Refusal("f", 2, "t", "r", 1.0),
        Refusal("f", 1, "x" * 900, "s", 2.0),
        Refusal("g", 1, "t", "r", 3.0),
    )
    with database.writing() as connection:
        for refusal in (one, two, other, one):
            kept.refuse(connection, refusal)
    assert kept.refused(database.connection) == [Refusal("f", 1, "x" * 500, "s", 2.0), one, other]
    assert len(kept.refused(database.connection, 2)) == 2
    with database.writing() as connection:
        kept.start_recount(connection, "f")
    assert kept.refused(database.connection) == [other]


# -- ids of jobs ------------------------------------------------------------------------------------------


def a_new_job(connection: sqlite3.Connection) -> int:
    return rows.insert(connection, JobSpec(arguments=("x",)), WHOLE, "", (), 1.0).id


def ended(connection: sqlite3.Connection, *jobs: int) -> None:
    connection.executemany("UPDATE jobs SET state='done', finished_at=id+1 WHERE id=?", [(job,) for job in jobs])


def test_job_ids_begin_with_one_or_on_request_with_zero(tmp_path: Path) -> None:
    """S4.3: Job ids begin with 1. If this was requested before the first job, they begin with 0."""
    for number, (zero, first) in enumerate(((False, 1), (True, 0))):
        database = Database(Places(str(tmp_path / f"{number}.json")))
        with database.writing() as connection:
            assert rows.last_id(connection) == 0
            if zero:
                rows.number_from_zero(connection)
                assert rows.last_id(connection) == -1
                rows.number_from_zero(connection)
            assert [a_new_job(connection) for _ in range(3)] == [first, first + 1, first + 2]
            rows.number_from_zero(connection)
            assert a_new_job(connection) == first + 3, "too late"
            assert rows.get(connection, first).order == first  # type: ignore[union-attr]
        database.close()


@pytest.mark.parametrize("zero", [False, True])
def test_the_id_of_a_deleted_job_is_not_used_again(database: Database, zero: bool) -> None:
    """S4.3 P4: The id of a deleted job is never used again, even if this job was the newest one or the only one."""
    with database.writing() as connection:
        if zero:
            rows.number_from_zero(connection)
        first = a_new_job(connection)
        assert first == (0 if zero else 1)
        ended(connection, first)
        forget(connection, [first])
        assert rows.get(connection, first) is None and rows.last_id(connection) == first
        assert [a_new_job(connection) for _ in range(3)] == [first + 1, first + 2, first + 3]
        ended(connection, first + 1, first + 3)
        forget(connection, [first + 1, first + 3])
        assert rows.last_id(connection) == first + 3
        forget(connection, [77])  # an id that was never used
        assert a_new_job(connection) == first + 4
        rows.number_from_zero(connection)
        assert a_new_job(connection) == first + 5


@given(st.booleans(), st.lists(st.integers(-1, 5), max_size=30))
def test_no_job_id_is_used_twice_after_any_deletions(database: Database, zero: bool, steps: list[int]) -> None:
    """S4.3 P4: No job id is used twice. A step of -1 adds a job; any other step deletes one of the remaining jobs."""
    with database.writing(sync=False) as connection:
        connection.execute("DELETE FROM jobs")
        connection.execute("DELETE FROM meta WHERE key='last_id'")
        if zero:
            rows.number_from_zero(connection)
        given_out: list[int] = []
        left: list[int] = []
        for step in steps:
            if step < 0 or not left:
                given_out.append(a_new_job(connection))
                left.append(given_out[-1])
            else:
                gone = left.pop(step % len(left))
                ended(connection, gone)
                forget(connection, [gone])
            assert rows.last_id(connection) == given_out[-1]
        assert given_out == list(range(0 if zero else 1, (0 if zero else 1) + len(given_out)))


# -- completion hooks, counts, event histories ------------------------------------------------------------


def test_completion_hooks_are_stored_started_and_removed(database: Database) -> None:
    """S4.26: When a job ends, a call of its completion hook is stored. It is marked when it is started.

    When the hook has ended, the call is removed. If the job is retried and ends again, the call must be started again.
    """
    with database.writing() as connection:
        rows.note_calls(connection, [7, 3])
        assert rows.calls(connection) == [(3, None), (7, None)]
        rows.begin_call(connection, 3, 12.5)
        rows.note_calls(connection, [5])
        assert rows.calls(connection) == [(3, 12.5), (5, None), (7, None)]
        rows.note_calls(connection, [3])  # the job was retried and has ended again: the call is due again
        assert rows.calls(connection) == [(3, None), (5, None), (7, None)]
        rows.strike_calls(connection, [3, 99])
        rows.begin_call(connection, 99, 1.0)
        assert rows.calls(connection) == [(5, None), (7, None)]


def test_jobs_that_have_not_ended_are_counted(database: Database) -> None:
    """S4.18: `unfinished`, which `ts -B` uses, returns the number of jobs that have not ended."""
    with database.writing() as connection:
        assert rows.unfinished(connection) == 0
        made = [a_new_job(connection) for _ in range(4)]
        assert rows.unfinished(connection) == 4
        ended(connection, *made[:3])
        assert rows.unfinished(connection) == 1


@pytest.mark.parametrize("at_once", [1, 2, 7, 500])
def test_event_histories_read_together_equal_those_read_one_by_one(
    database: Database, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one call reads the event histories of many jobs, they equal the histories that are read job by job.

    They are in the order of the jobs. A job without events has an empty history.
    """
    monkeypatch.setattr(rows, "AT_ONCE", at_once)
    with database.writing() as connection:
        made = [rows.insert(connection, JobSpec(arguments=("x",)), WHOLE, "", (), 1.0) for _ in range(7)]
        for n in range(3):
            rows.write_events(connection, [Event(job.id, 9.0 - n, f"k{n}", {"n": n}) for job in made if job.id % 3])
    backwards = made[::-1]
    found = list(rows.with_events(database.connection, backwards))
    assert found == [(job, rows.events_of(database.connection, job.id)) for job in backwards]
    assert [len(events) for _, events in found] == [3, 0, 3, 3, 0, 3, 3]


def test_the_first_migration_creates_the_columns_of_the_table() -> None:
    """The first migration creates each column of ``COLUMNS`` whose ``since`` is 1, with its name, type and default."""
    store = sqlite3.connect(":memory:", isolation_level=None)
    migrate(store, 0, 1)
    made = [
        (name, kind, bool(needed), default)
        for _, name, kind, needed, default, _ in store.execute("PRAGMA table_info(jobs)")
    ]
    wanted = []
    for column in COLUMNS:
        words, _, default = column.sql.partition(" DEFAULT ")
        wanted.append((column.name, words.split()[0], "NOT NULL" in words, default or None))
    assert made == [one for one, column in zip(wanted, COLUMNS, strict=True) if column.since == 1]
    migrate(store, 1)
    assert [row[1] for row in store.execute("PRAGMA table_info(jobs)")] == [column.name for column in COLUMNS]
    store.close()
