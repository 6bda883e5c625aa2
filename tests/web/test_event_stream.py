"""Tests of the event stream: it reports all changes promptly, at a cost that does not grow with the store."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Callable, Iterator

import pytest

from scheduler.client.client import SchedulerClient
from scheduler.core.gpu import ResourceRequest
from scheduler.core.job import JobSpec
from scheduler.store import jobs as rows
from scheduler.store.database import Database
from scheduler.web import event_stream as events
from tests.stories.harness import wait_for
from tests.stories.test_schemas import wrong
from tests.web.listening import Listening
from tests.web.page import Page


@pytest.fixture
def listen(page: Page) -> Iterator[Callable[..., Listening]]:
    """Return a function that opens event streams; close them after the test."""
    made: list[Listening] = []

    def make(at: Page = page, **headers: str) -> Listening:
        made.append(Listening(at, **headers))
        return made[-1]

    yield make
    for one in made:
        one.close()


def submit(page: Page, *words: str, **options: object) -> int:
    answer = page.post("/api/jobs", {"command": list(words), **options})
    assert answer.status == 201, answer.text
    return int(answer.json()["id"])


@pytest.mark.smoke
def test_each_change_of_a_job_is_an_event(page: Page, listen: Callable[..., Listening]) -> None:
    """Each change of a job is sent as `event: job` with the job's JSON on one line.

    The test prints the delay.
    """
    one = listen()
    assert one.headers["content-type"].startswith("text/event-stream") and one.headers["cache-control"] == "no-store"
    begun = time.monotonic()
    number = submit(page, "sh", "-c", "echo x; exit 4", label="told")
    job = one.until("job", lambda job: job["id"] == number and job["state"] == "failed", "its end")
    print(f"told after {time.monotonic() - begun:.2f} s")
    assert wrong("job", job) == [] and (job["exit_code"], job["label"]) == (4, "told")
    assert job == page.get(f"/api/jobs/{number}").json()
    at = one.raw.index("event: job")
    wait_for(lambda: len(one.raw) > at + 2, "the end of the event")
    assert one.raw[at + 1].startswith('data: {"id":') and one.raw[at + 2] == ""
    assert any(line.startswith("id: ") for line in one.raw) and "retry: 2000" in one.raw


def test_a_stream_reports_a_job_that_lived_between_two_reads(page: Page, listen: Callable[..., Listening]) -> None:
    """If a job starts and ends between two reads of the store, every stream still reports the end of the job."""
    both = [listen(), listen()]
    numbers = [submit(page, "true", cpu=True) for _ in range(20)]
    for one in both:
        for number in numbers:
            one.until(
                "job", lambda job, number=number: job["id"] == number and job["state"] == "done", f"the end of {number}"
            )


def test_a_stream_begins_with_the_current_state(page: Page, listen: Callable[..., Listening]) -> None:
    """A stream begins with the current state, also for a client that reconnects with a Last-Event-ID."""
    one = listen()
    assert one.until("scheduler", lambda value: True, "the scheduler") == {"alive": True}
    assert [gpu["index"] for gpu in one.until("gpus", lambda value: True, "GPUs")["gpus"]] == [0, 1]
    assert one.until("queue", lambda value: True, "the queue")["paused"] is False
    again = listen(**{"Last-Event-ID": "77"})
    assert again.until("queue", lambda value: True, "the queue")["counts"] == page.get("/api/status").json()["counts"]


def test_a_stream_reports_changes_of_jobs_and_pauses(page: Page, listen: Callable[..., Listening]) -> None:
    """A stream reports each change of a reason, pause, priority, hold or attempt, and each cancel."""
    one = listen()
    assert page.post("/api/gpus/1/pause").status == 200
    one.until("gpus", lambda value: value["gpus"][1]["paused"], "the pause")
    page.post("/api/queue/pause")
    one.until("queue", lambda value: value["paused"], "the queue's pause")
    number = submit(page, "sh", "-c", "exit 1", allowed=[1])
    one.until("job", lambda job: job["id"] == number and job["reason_code"] == "paused", "its reason")
    page.post(f"/api/jobs/{number}/priority", {"priority": -4})
    one.until("job", lambda job: job["id"] == number and job["priority"] == -4, "its priority")
    page.post(f"/api/jobs/{number}/hold")
    one.until("job", lambda job: job["id"] == number and job["reason_code"] == "hold-user", "that it is held")
    page.post(f"/api/jobs/{number}/release")
    page.post("/api/queue/resume")
    page.post("/api/gpus/1/resume")
    one.until("queue", lambda value: not value["paused"] and value["counts"]["failed"], "that the queue is resumed")
    one.until("job", lambda job: job["id"] == number and job["state"] == "failed", "its end")
    page.post(f"/api/jobs/{number}/retry")
    one.until("job", lambda job: job["id"] == number and job["attempt"] == 2 and job["state"] == "failed", "the second")
    sleeper = submit(page, "sleep", "600", gpus=0.5)
    one.until("job", lambda job: job["id"] == sleeper and job["state"] == "running" and job["pid"], "that it runs")
    one.until(
        "gpus", lambda value: value["gpus"][0]["jobs"] == [sleeper] and value["gpus"][0]["allocated"] == 0.5, "its GPU"
    )
    page.post(f"/api/jobs/{sleeper}/cancel")
    one.until("job", lambda job: job["id"] == sleeper and job["state"] == "cancelled", "that it was cancelled")
    states = one.states(sleeper)
    assert states[-1] == "cancelled" and states.index("running") < len(states) - 1


def test_a_stream_reports_the_end_and_the_start_of_the_scheduler(
    pages: Callable[[], Page], listen: Callable[..., Listening]
) -> None:
    """A stream reports the end and the start of the scheduler, and the jobs that end while no scheduler runs.

    If the store is missing for a time, the stream does not end.
    """
    page = pages()
    page.start()
    one = listen(page)
    page.scheduler.start()
    one.until("scheduler", lambda value: value["alive"], "that it runs")
    page.scheduler.hold("x")
    number = submit(page, "sh", "-c", f"while [ -e {page.folder}/hold-x ]; do sleep 0.01; done")
    one.until("job", lambda job: job["id"] == number and job["state"] == "running", "that the job runs")
    at = len(one.events)
    page.scheduler.kill()
    wait_for(lambda: ("scheduler", {"alive": False}) in one.events[at:], "that it is gone")
    page.scheduler.release("x")
    one.until("job", lambda job: job["id"] == number and job["state"] == "done", "the end that nobody noted")
    page.scheduler.start()
    wait_for(lambda: ("scheduler", {"alive": True}) in one.events[at:], "that it is back")
    page.scheduler.stop()
    house = page.folder / ".gpujob"
    (house / "store.db").rename(page.folder / "away")
    wait_for(
        lambda: any("trouble" in value for kind, value in one.events if kind == "scheduler"), "that the store is gone"
    )
    (page.folder / "away").rename(house / "store.db")
    page.scheduler.start()
    after = submit(page, "true")
    one.until("job", lambda job: job["id"] == after and job["state"] == "done", "that all is well again")


def test_a_stream_reports_the_scheduler_again_when_the_store_is_readable_again(
    pages: Callable[[], Page], listen: Callable[..., Listening]
) -> None:
    """If the store cannot be read, a stream reports `trouble`.

    When the store can be read again, the stream reports again that the scheduler runs.
    """
    page = pages()
    page.start()
    page.scheduler.start()
    one = listen(page)
    one.until("scheduler", lambda value: value["alive"], "that it runs")
    at = len(one.events)
    store, aside = page.folder / ".gpujob" / "store.db", page.folder / "aside"
    store.rename(aside)
    wait_for(lambda: any("trouble" in value for kind, value in one.events[at:] if kind == "scheduler"), "the trouble")
    aside.rename(store)
    wait_for(lambda: ("scheduler", {"alive": True}) in one.events[at:], "that it still runs")


def test_a_stream_reports_changes_made_while_no_scheduler_runs(
    pages: Callable[[], Page], listen: Callable[..., Listening]
) -> None:
    """A stream reports the changes that commands make while no scheduler runs.

    Without a scheduler, each command is the last user of the store, and deletes the write-ahead log of the store.
    """
    page = pages()
    page.start()
    submit(page, "true")
    one = listen(page)
    for _ in range(3):
        number = int(page.scheduler.cli("submit", "--", "true").stdout)
        one.until("job", lambda job, number=number: job["id"] == number and job["state"] == "pending", "the job")
        page.scheduler.cli("cancel", str(number))
        one.until("job", lambda job, number=number: job["id"] == number and job["state"] == "cancelled", "its end")


def test_open_streams_do_not_delay_the_end_and_a_disconnect_frees_a_place(
    pages: Callable[[], Page], listen: Callable[..., Listening]
) -> None:
    """Open streams do not delay the end of the server.

    The number of open streams is limited. At the limit, a new stream is answered with 503 until another client
    disconnects.
    """
    page = pages()
    page.start()
    many = [listen(page) for _ in range(events.MOST_STREAMS)]
    assert all(one.status == 200 for one in many)
    answer = page.get("/api/events")
    assert answer.status == 503 and list(answer.json()) == ["error"]
    for one in many[:5]:
        one.close()

    def another() -> bool:
        found = listen(page)
        return found.status == 200

    wait_for(another, "room again")
    assert page.ask("HEAD", "/api/events", page.bearer).status in (200, 503)
    begun = time.monotonic()
    assert page.stop() == 0
    print(f"ended after {time.monotonic() - begun:.2f} s with {events.MOST_STREAMS} streams")
    assert all(one.over.wait(30) for one in many[5:])
    assert "Traceback" not in page.said() and "ERROR" not in page.said(), page.said()


def test_a_stream_with_too_many_unsent_events_ends_with_the_event_again() -> None:
    """If too many events of a stream wait to be sent, these events are dropped.

    The stream then sends the event `again` and ends.
    """
    import asyncio

    async def run() -> list[tuple[str, str] | None]:
        listener = events._Listener()
        for number in range(events.MOST_QUEUED + 1):
            listener.tell([("job", str(number))])
        listener.tell([("job", "later")])
        return [await listener.next(), await listener.next()]

    assert asyncio.run(run()) == [("again", "{}"), None]


def test_a_stream_reads_only_changed_rows_of_the_store(pages: Callable[[], Page]) -> None:
    """Each read of the store covers only the rows that have changed.

    The test counts the steps of SQLite, not the seconds.
    """
    page = pages()
    client = SchedulerClient(str(page.folder / "gpu_scheduler_state.json"))
    database = Database(client.places)
    spec = JobSpec(source="submit", arguments=("true",))
    with database.writing(sync=False) as connection:
        for _ in range(20_000):
            rows.insert(connection, spec, ResourceRequest.parse("1"), "", (), 1.0)
    watch = client.changes()
    with contextlib.closing(watch):
        assert watch.look().jobs == []
        steps = _steps(watch)
        with database.writing(sync=False) as connection:
            job = rows.insert(connection, spec, ResourceRequest.parse("1"), "", (), time.time())
            other = rows.get(connection, 19_000)
            assert other is not None
            other.state, other.finished_at = type(other.state)("cancelled"), time.time()
            rows.save(connection, [other])
        watch._changes._first_due = float("inf")  # the next look does not read the first waiting jobs again
        before = steps()
        told = {found.id: found.state.value for found, _ in watch.look().jobs}
        assert told == {job.id: "pending", 19_000: "cancelled"}
        assert steps() - before < 200_000, "a look costs what has changed"
    database.close()


def _steps(watch: object) -> Callable[[], int]:
    """Return a function that counts the steps of SQLite on the connection of ``watch``.

    The function returns the number of steps that SQLite has executed so far.
    """
    counted = [0]
    connection = watch._changes._connection  # type: ignore[attr-defined]
    assert isinstance(connection, sqlite3.Connection)

    def step() -> int:
        counted[0] += 1000
        return 0

    connection.set_progress_handler(step, 1000)
    return lambda: counted[0]


def test_s15_events_contain_no_secrets(page: Page, listen: Callable[..., Listening]) -> None:
    """S15: Secrets in a command and in a label are masked in events."""
    one = listen()
    number = submit(page, "echo", "--token=s3cr3tValue9xQ", label="key=s3cr3tValue9xQ")
    one.until("job", lambda job: job["id"] == number and job["state"] == "done", "its end")
    assert "s3cr3tValue9xQ" not in json.dumps(one.events) and "***" in json.dumps(one.events)


def test_a_stopped_client_does_not_delay_others(page: Page, listen: Callable[..., Listening]) -> None:
    """S21: A client that reads nothing does not delay other streams."""
    with page.connect() as silent:
        silent.sendall(
            f"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1:{page.port}\r\nAuthorization: Bearer {page.token}\r\n\r\n".encode()
        )
        one = listen()
        numbers = [submit(page, "true", cpu=True, label="x" * 200) for _ in range(10)]
        for number in numbers:
            one.until("job", lambda job, number=number: job["id"] == number and job["state"] == "done", "its end")
