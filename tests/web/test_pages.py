"""Tests of the HTML pages with jobs in every state and with hostile texts: well-formed, complete, escaped."""

from __future__ import annotations

import asyncio
import functools
import re
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.client.client import SchedulerClient
from scheduler.client.outlook import Expectation, Explanation, Holder, Moment, OfferedCommand
from scheduler.client.overview import Overview
from scheduler.core.file_offsets import Refusal
from scheduler.core.gpu import Gpu
from scheduler.core.job import Event, Failure, Job, JobState, Outcome, Process, Reason
from scheduler.core.offered_requests import OfferedRequest
from scheduler.store import file_offsets
from scheduler.store import jobs as rows
from scheduler.store.database import Database
from scheduler.web import pages, rendering
from scheduler.web.app import make_app
from scheduler.web.source import Source
from tests.builders import a_job
from tests.stories.secret_shapes import SECRET, SHAPES

NOW = time.time()
PAGES = (
    "/",
    "/timeline?hours=24",
    "/heatmap?measure=booked",
    "/heatmap?hours=168",
    "/submit",
    "/jobs",
    "/jobs?state=failed,running&label=x",
    "/report?since=all",
    "/report",
    "/users",
    "/needs",
)
STATES = {
    JobState.PENDING: {},
    JobState.STARTING: {"gpus": (0,), "attempt": 1, "started_at": NOW - 5},
    JobState.RUNNING: {"gpus": (0, 1), "attempt": 2, "started_at": NOW - 3600, "process": Process(4711, 1), "log": "/nowhere/a.log"},
    JobState.STOPPING: {"gpus": (1,), "attempt": 1, "started_at": NOW - 60, "process": Process(4712, 1), "stop_why": "cancelled"},
    JobState.DONE: {"gpus": (1,), "attempt": 1, "started_at": NOW - 900, "finished_at": NOW - 600, "outcome": Outcome.EXIT, "exit_code": 0},
    JobState.FAILED: {"gpus": (0,), "attempt": 1, "started_at": NOW - 700, "finished_at": NOW - 650, "outcome": Outcome.EXIT, "exit_code": 3,
                      "log_finding": Failure("oom", "CUDA out of memory", "a smaller batch")},
    JobState.CANCELLED: {"finished_at": NOW - 40, "outcome": Outcome.CANCELLED},
    JobState.SKIPPED: {"finished_at": NOW - 30, "outcome": Outcome.DEPENDENCY},
}  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """The application's answer to a request."""

    status_code: int
    headers: dict[str, str]
    text: str


class Client:
    """A client that calls the application directly, without access checks and without a socket."""

    def __init__(self, client: SchedulerClient) -> None:
        self.source = Source(client)
        self.app = make_app(self.source)

    def get(self, path: str) -> Answer:
        """Send one GET request and return the answer.

        The client reads the store again instead of using a cached overview.
        """
        self.source.changed()
        bare, _, query = path.partition("?")
        scope = {
            "type": "http", "method": "GET", "path": bare, "raw_path": quote(bare).encode(), "query_string": query.encode(), "headers": [],
            "http_version": "1.1", "scheme": "http", "server": ("127.0.0.1", 4004), "client": ("127.0.0.1", 1), "root_path": "",
        }  # fmt: skip
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        asyncio.run(self.app(scope, receive, send))
        headers = {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}
        return Answer(sent[0]["status"], headers, b"".join(part.get("body", b"") for part in sent[1:]).decode())


class Shop:
    """A store that a test fills, and the pages over it without access checks."""

    def __init__(self, folder: Path) -> None:
        self.client = SchedulerClient(str(folder / "gpu_scheduler_state.json"))
        self.database = Database(self.client.places)
        with self.database.writing() as connection:
            rows.save_gpus(
                connection, [Gpu(0, "GPU-a", "NVIDIA H100", 0, 80_000), Gpu(1, "GPU-b", "NVIDIA H100", 0, 80_000)]
            )
        self.client = Client(self.client)

    def put(self, *jobs: Job, reasons: dict[str, Reason] | None = None) -> None:
        """Replace all jobs and events in the store by these jobs; each started job gets a started event."""
        with self.database.writing() as connection:
            connection.execute("DELETE FROM jobs")
            connection.execute("DELETE FROM events")
            rows.restore(connection, jobs)
            rows.write_events(connection, [
                Event(job.id, job.started_at, "started", {"attempt": job.attempt, "gpus": list(job.gpus), "pid": 1, "share": 0.5})
                for job in jobs if job.started_at
            ])  # fmt: skip
            rows.save_class_reasons(connection, reasons or {})

    def get(self, path: str, code: int = 200) -> str:
        """Return the HTML of a page; assert that the status code is ``code``.

        The page reads the store again each time.
        """
        answer = self.client.get(path)
        assert answer.status_code == code, answer.text[:2000]
        return answer.text


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    made = Shop(tmp_path_factory.mktemp("shop"))
    yield made
    made.database.close()


class Read(HTMLParser):
    """Parser that collects a page's texts and elements, and asserts that elements are closed in the right order."""

    VOID = frozenset("meta link input br img hr option rect path circle line".split())

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == [], self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open and self.open[-1] == tag, f"</{tag}> while {self.open[-3:]} is open"
            self.open.pop()

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts)


def jobs_in_every_state(**changes: Any) -> list[Job]:
    return [a_job(n, "0.5", state=state, **{**more, **changes}) for n, (state, more) in enumerate(STATES.items(), 1)]


@pytest.mark.parametrize("path", PAGES)
def test_every_page_renders_with_jobs_in_every_state(shop: Shop, path: str) -> None:
    shop.put(*jobs_in_every_state(submitted_at=NOW - 4000))
    read = Read(shop.get(path))
    assert [tag for tag, _ in read.tags].count("h1") == 1
    for tag, attrs in read.tags:
        assert "style" not in attrs and not any(name.startswith("on") for name in attrs), (tag, attrs)
        assert tag not in ("style", "iframe", "base")
        assert tag != "script" or (attrs.get("src") or "").startswith("/static/")


@pytest.mark.parametrize("path", PAGES)
def test_every_page_renders_before_the_first_scheduler_start(tmp_path: Path, path: str) -> None:
    """If no scheduler has run in a folder, every page renders.

    The first page shows the commands for the first steps.
    """
    client = Client(SchedulerClient(str(tmp_path / "gpu_scheduler_state.json")))
    answer = client.get(path)
    assert answer.status_code == 200
    assert "gpujob" in Read(answer.text).text
    if path == "/":
        assert 'echo "0,train.py" >> jobs.txt' in Read(answer.text).text
        assert "gpujob start --detach" in Read(answer.text).text


@pytest.mark.parametrize(("number", "state"), list(enumerate(STATES, 1)))
def test_only_actions_allowed_by_the_state_are_offered(shop: Shop, number: int, state: JobState) -> None:
    shop.put(*jobs_in_every_state(submitted_at=NOW - 4000))
    html = shop.get(f"/jobs/{number}")
    offered = set(re.findall(rf'data-post="/api/jobs/{number}/(\w+)"', html))
    expected = {"cancel", "hold", "first"} if state is JobState.PENDING else {"retry"} if state.ended else {"cancel"}
    assert offered == (set() if state is JobState.STOPPING else expected)
    assert (f"/api/jobs/{number}/priority" in html) is (state is JobState.PENDING)
    assert state.value in Read(html).text


def test_a_cancel_asks_and_names_the_jobs_that_it_would_skip(shop: Shop) -> None:
    """Before a job is cancelled, the page asks for confirmation and names all jobs that would be skipped.

    A job that depends on the cancelled job by `after` is not skipped.
    """
    waits = [a_job(n, after_ok=(2,)) for n in range(10, 17)]
    shop.put(a_job(1), a_job(2, state=JobState.RUNNING, **STATES[JobState.RUNNING]), a_job(3, after_ok=(1,)),
             a_job(4, after_ok=(3,)), a_job(5, after=(4,)), *waits)  # fmt: skip
    for path in ("/", "/jobs", "/jobs/{}"):
        asked = {n: _asked(shop.get(path.format(n)), n) for n in (1, 2, 3, 4, 5)}
        assert asked[1].endswith("retry puts it back. Jobs 3, 4 depend on its success and will be skipped."), path
        assert asked[2].endswith("Jobs 10, 11, 12, 13, 14 and 2 more depend on its success and will be skipped."), path
        assert "SIGTERM" in asked[2]
        assert asked[3].endswith(" Job 4 depends on its success and will be skipped."), path
        assert asked[4].endswith("retry puts it back.") and asked[5].endswith("retry puts it back."), path


def _asked(html: str, number: int) -> str:
    found = [attrs for _, attrs in Read(html).tags if attrs.get("data-post") == f"/api/jobs/{number}/cancel"]
    return found[0].get("data-ask") or ""


def test_a_job_that_was_put_first_is_marked(shop: Shop) -> None:
    """A job that was put first has a mark, because its priority alone does not explain its place in the queue."""
    shop.put(a_job(1, priority=5, order=-1), a_job(2, priority=-5, order=2))
    html = shop.get("/").partition('id="waiting"')[2]
    assert re.search(r'wait-1".*?data-th="priority">5 <i class="tag"[^>]*>first</i>.*?wait-2".*?>-5</td>', html, re.S)


def test_the_list_of_jobs_can_be_filtered_by_state_and_label(shop: Shop) -> None:
    """The list of jobs can be filtered by state and label. The newest job is the first one.

    An unknown state is an error.
    """
    shop.put(
        *jobs_in_every_state(submitted_at=NOW - 4000),
        a_job(20, label="x"),
        a_job(21, label="x", state=JobState.FAILED, **STATES[JobState.FAILED]),
    )
    assert 'href="/jobs?state=failed"' in shop.get("/")

    def listed(path: str) -> list[int]:
        return [int(number) for number in re.findall(r'data-key="row-(\d+)"', shop.get(path))]

    assert listed("/jobs") == [21, 20, *range(8, 0, -1)]
    assert listed("/jobs?state=failed") == [21, 6] and listed("/jobs?state=failed,done") == [21, 6, 5]
    assert listed("/jobs?label=x") == [21, 20] and listed("/jobs?label=x&state=failed") == [21]
    assert listed("/jobs?label=X") == [] and listed("/jobs?label=%25") == []
    assert listed("/jobs?label=nobody") == [] and "No matching jobs." in shop.get("/jobs?label=nobody")
    assert "did you mean failed?" in Read(shop.get("/jobs?state=faild", 400)).text
    shop.put(*(a_job(n, label="x") for n in range(1, pages.MOST_LISTED + 6)))
    for path in ("/jobs", "/jobs?state=pending", "/jobs?label=x"):
        assert listed(path) == list(range(pages.MOST_LISTED + 5, 5, -1)), path
        assert "and 5 older jobs" in shop.get(path)
    assert listed("/jobs?state=done") == []


def test_a_held_job_can_be_released(shop: Shop) -> None:
    shop.put(a_job(1, held=True, reason_code="held", reason="it is held"))
    assert 'data-post="/api/jobs/1/release"' in shop.get("/jobs/1")
    assert 'data-post="/api/jobs/1/hold"' not in shop.get("/jobs/1")


def test_both_sides_of_a_dependency_are_linked(shop: Shop) -> None:
    shop.put(a_job(1), a_job(2, after_ok=(1,)), a_job(3, after=(2, 99)))
    assert 'href="/jobs/2"' in shop.get("/jobs/1")
    middle = shop.get("/jobs/2")
    assert 'href="/jobs/1"' in middle and 'href="/jobs/3"' in middle and "(must succeed)" in middle
    assert "(removed from the store)" in shop.get("/jobs/3")


def test_the_waiting_time_ends_at_the_first_start(shop: Shop) -> None:
    """If a job was retried, its waiting time still ends at its first start."""
    job = a_job(1, "0.5", state=JobState.DONE, gpus=(0,), attempt=2, submitted_at=NOW - 4000, started_at=NOW - 100, finished_at=NOW - 50,
                outcome=Outcome.EXIT, exit_code=0)  # fmt: skip
    shop.put(job)
    with shop.database.writing() as connection:
        connection.execute("DELETE FROM events")
        rows.write_events(connection, [
            Event(1, NOW - 3815.5, "started", {"attempt": 1, "gpus": [0], "pid": 1, "share": 0.5}), Event(1, NOW - 3808, "failed", {"attempt": 1, "ran": 7.0}),
            Event(1, NOW - 100, "started", {"attempt": 2, "gpus": [0], "pid": 1, "share": 0.5}),
        ])  # fmt: skip
    text = Read(shop.get("/jobs/1")).text
    assert "waited 3 min 04 s for its first start" in text


def test_the_running_time_is_updated_in_both_places_of_a_job_page(shop: Shop) -> None:
    shop.put(*jobs_in_every_state(submitted_at=NOW - 4000))
    assert shop.get("/jobs/3").count(f'data-since="{NOW - 3600:.0f}"') == 2
    assert "data-since" not in shop.get("/jobs/5")


def test_commands_on_pages_are_quoted_for_a_shell(shop: Shop) -> None:
    """Commands on pages are quoted: if a user pastes one into a shell, the shell reads the words of the job."""
    words = ("sh", "-c", "echo 'a  b'; ls | wc")
    shop.put(a_job(1, arguments=words, script="", label="mine"))
    shown = "sh -c \"echo 'a  b'; ls | wc\""
    for path in ("/", "/jobs/1", "/report?since=all"):
        assert shown in Read(shop.get(path)).text, path
    read = Read(shop.get("/jobs/1"))
    assert shlex.split(shown) == list(words)
    assert "Job 1 mine pending" in read.text  # the title of the page
    assert f"titled {shown}" in [f"titled {attrs.get('title')}" for _, attrs in Read(shop.get("/")).tags]


@pytest.mark.parametrize(("state", "gpus", "sentence"), [
    (JobState.PENDING, "0.5", "No readings yet: the job is waiting."), (JobState.RUNNING, "0.5", "No readings yet."),
    (JobState.RUNNING, "0", "No readings: it uses no GPU."), (JobState.CANCELLED, "0.5", "No readings: it never ran."),
    (JobState.DONE, "0.5", "No readings were kept."),
])  # fmt: skip
def test_a_job_page_gives_the_reason_for_a_missing_curve(shop: Shop, state: JobState, gpus: str, sentence: str) -> None:
    more = {**STATES[state], **({"gpus": ()} if gpus == "0" else {})}
    shop.put(a_job(1, gpus, state=state, submitted_at=NOW - 4000, **more))
    assert sentence in Read(shop.get("/jobs/1")).text


def test_a_job_that_could_not_start_is_not_shown_as_pending(shop: Shop) -> None:
    shop.put(a_job(1, "0.5", state=JobState.FAILED, submitted_at=NOW - 9, finished_at=NOW - 8, outcome=Outcome.EXIT))
    text = Read(shop.get("/jobs/1")).text
    assert "It could not start." in text and "No readings: it could not start." in text and "yet" not in text


def test_without_scripts_a_job_page_lists_the_allowed_commands(shop: Shop) -> None:
    shop.put(*jobs_in_every_state(submitted_at=NOW - 4000))
    for number, expected in ((1, ["first 1", "hold 1", "cancel 1"]), (3, ["cancel 3"]), (5, ["retry 5"]), (4, [])):
        html = shop.get(f"/jobs/{number}")
        assert re.findall(r"<li><code>gpujob (.*?)</code></li>", html) == expected


def test_the_timeline_shows_one_hour_if_all_jobs_are_recent_and_else_six(shop: Shop) -> None:
    """Without a query, the Timeline shows one hour if all jobs are from the last hour, else six hours."""
    for ago, zoom in ((600, "1 h"), (7200, "6 h")):
        shop.put(a_job(1, submitted_at=time.time() - ago))
        assert re.search(r'aria-current="true">([^<]*)<', shop.get("/timeline"))[1] == zoom  # type: ignore[index]


def test_the_report_page_says_that_no_job_has_the_label(shop: Shop) -> None:
    shop.put(a_job(1))
    text = Read(shop.get("/report?label=none", 404)).text
    assert "There is no job with this label." in text and "Report" in text and "state.json" not in text


def test_the_first_200_waiting_jobs_are_shown_and_the_rest_is_counted(shop: Shop) -> None:
    shop.put(*(a_job(n) for n in range(1, 10_001)))
    html = shop.get("/")
    assert html.count('data-key="wait-') == 200
    assert "and 9800 more" in html
    shop.put()


def test_missing_pages_are_404_and_invalid_queries_are_400(shop: Shop) -> None:
    shop.put(a_job(1))
    for path, code in (
        ("/jobs/77", 404), ("/timeline?hours=nan", 400), ("/timeline?hours=0", 400), ("/timeline?end=x", 400), ("/heatmap?measure=x", 400),
        ("/heatmap?hours=1e9", 400), ("/report?since=x", 400), ("/report?label=none", 404), ("/static/../pages.py", 404), ("/static/nothing", 404),
    ):  # fmt: skip
        answer = shop.client.get(path)
        assert answer.status_code == code, path
        if not path.startswith("/static"):
            assert "Traceback" not in answer.text and "<h1>" in answer.text


def test_static_files_are_served_by_name(shop: Shop) -> None:
    for name, media in rendering.STATIC.items():
        answer = shop.client.get(f"/static/{name}")
        assert answer.status_code == 200 and answer.headers["content-type"] == media
        text = answer.text
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", "") and "https://" not in text
        assert len(text.splitlines()) < 350


# -- texts that users write -------------------------------------------------------------------------------

TEXTS = st.text(
    st.characters(codec=None, exclude_categories=()) | st.sampled_from("<>\"'&{}%/\\`\x00\x1b\u202e\udcff\ufeff\n"), min_size=1, max_size=40
)  # fmt: skip


@given(text=TEXTS, state=st.sampled_from(list(STATES)))
def test_s19_a_text_in_a_job_adds_no_html_element_or_attribute(text: str, state: JobState) -> None:
    """S19: Any text in a job gives the same elements and attributes as a harmless text."""
    harmless = _harmless(state)
    found = _rendered(f"<b>{text}", state)
    ours, theirs = Read(harmless), Read(found)
    assert [(tag, sorted(attrs)) for tag, attrs in ours.tags] == [(tag, sorted(attrs)) for tag, attrs in theirs.tags]
    found.encode()
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", found)


@functools.cache
def _harmless(state: JobState) -> str:
    return _rendered("x", state)


def _rendered(text: str, state: JobState) -> str:
    """Return the HTML of the page of a job that holds this text in every text field."""
    from scheduler.web import view_models

    job = a_job(
        1, "0.5", state=state, arguments=(text, "end"), script="/data/a.py", label=text, conda_env=text, info=text, origin=text,
        notes=(text,), interpreter=text, cwd=text,
        **{**STATES[state], "log_finding": Failure("oom", text, text, 3, 2, error=text, good_run=2, good_at=1.0, differs=(text,)) if state is JobState.FAILED else None},
    )  # fmt: skip
    reason = Reason(text, text) if state is JobState.PENDING else None
    moment = Moment(NOW + 90, NOW + 60, None)
    expected = Expectation(1, moment, moment, (0,), 60.0, text)
    offered = OfferedCommand(f"gpujob cancel 3 # {text}", text, (OfferedRequest("cancel", (3,)),))
    view = Overview(True, 1, {}, (), (job,), {}, (), 0, False, {})
    explanation = Explanation(1, 2, (Holder(0, (3,), 1.0, NOW + 90),), expected, (offered,))
    return rendering.render(
        "job.html", now=NOW, nonce="", folder="/data", machine="m", here="", job=job, row=view_models.row(job, reason), reason=reason,
        card=view_models.failure_card(job), facts=view_models.facts(job), parents=[(2, job, True)], children=[job], attempts=(),
        story=view_models.story(job, [Event(1, NOW, "missing", {"why": text})]), lines=["a line", text], log_trouble=text, charts=[], alive=True,
        waited_s=1.0, never_ran=view_models.never_ran(job), no_readings=view_models.why_no_readings(job, 0, frozenset()), commands=view_models.without_scripts(job),
        waits=state is JobState.PENDING, explanation=explanation, offers=view_models.offer_rows(job, explanation.offers, view), expected=expected,
    )  # fmt: skip


def test_s15_no_page_shows_a_secret_of_a_command(shop: Shop) -> None:
    """S15: No page shows a secret, of any shape, in arguments, labels, reasons, notes or refused lines."""
    jobs = []
    for n, words in enumerate(SHAPES.values(), 1):
        text = _as_text(words)
        jobs.append(
            a_job(
                n,
                "0.5",
                arguments=words,
                script="",
                label=text,
                info=text,
                reason_code="missing",
                reason=text,
                notes=(text,),
            )
        )
    shop.put(*jobs)
    with shop.database.writing() as connection:
        for n, words in enumerate(SHAPES.values(), 1):
            file_offsets.refuse(connection, Refusal("/data/jobs.txt", n, _as_text(words), _as_text(words), NOW))
    for path in (*PAGES, *(f"/jobs/{job.id}" for job in jobs)):
        html = shop.get(path)
        assert SECRET not in html, (path, re.findall(f".{{80}}{SECRET}", html))


def _as_text(words: tuple[str, ...]) -> str:
    """Return the words of a command as one text, such as a label. Pages must hide the secret in this text.

    In such a text, the end of a word that contains blanks cannot be found. Therefore, if any word contains blanks, only
    the last word is returned. The command ``SHAPES["with blanks"]`` has only one word, in which a blank precedes the
    secret. For this command, the text "none" is returned, which contains no secret.
    """
    if words == SHAPES["with blanks"]:
        return "none"
    return words[-1] if any(" " in word for word in words) else " ".join(words)


# -- colours and symbols ----------------------------------------------------------------------------------

PAIRS = [
    *((ink, ground, 4.5) for ink in ("text", "soft", "accent", "ok", "warn", "bad", "run") for ground in ("bg", "surface")),
    *((ink, "sunk", 4.5) for ink in ("text", "soft")),
    *(("text", ground, 4.5) for ground in ("ok-bg", "warn-bg", "bad-bg", "run-bg")),
    ("soft", "bad-bg", 4.5), ("soft", "warn-bg", 4.5), ("on-accent", "accent", 4.5), ("on-running", "bar-running", 3.0),
    ("on-bar", "bar-done", 4.5), ("on-bar", "bar-failed", 4.5), ("on-bar", "bar-cancelled", 4.5),
    ("strong-line", "surface", 3.0), ("strong-line", "bg", 3.0), ("ours", "surface", 3.0), ("foreign", "surface", 3.0), ("two", "surface", 3.0),
]  # fmt: skip


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_color_has_enough_contrast(scheme: str) -> None:
    """WCAG AA: the contrast to the background is at least 4.5 for text, and 3 for controls and drawings."""
    css = rendering.static_file("style.css").decode()
    light, dark = css.split("@media (prefers-color-scheme: dark)", 1)
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", light))
    if scheme == "dark":
        colours |= dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", dark.split("\n}", 1)[0]))
    poor = [(ink, ground, round(_contrast(colours[ink], colours[ground]), 2)) for ink, ground, least in PAIRS
            if _contrast(colours[ink], colours[ground]) < least]  # fmt: skip
    assert not poor
    scale = [_light(colours[f"h{step}"]) for step in range(11)]
    assert scale == sorted(scale, reverse=scheme == "light"), "each step of the scale is darker (lighter) than the last"


def _light(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(one: str, other: str) -> float:
    high, low = sorted((_light(one), _light(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_every_state_has_its_own_symbol() -> None:
    assert {state.value for state in JobState} <= set(rendering.GLYPHS)
    glyphs = [rendering.GLYPHS[state.value] for state in JobState]
    assert len(set(glyphs)) == len(glyphs)
    assert pages.MOST_ENDED <= 100
