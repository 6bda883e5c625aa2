"""Tests with random names, which are refused as unknown, and with secrets, which are never shown."""

from __future__ import annotations

import http.client
import json
import random
import string
from collections.abc import Iterator
from urllib.parse import quote

import pytest

from tests.stories.harness import LONG, wait_for
from tests.stories.secret_shapes import SECRET, SHAPES
from tests.web.listening import Listening
from tests.web.page import PATIENCE_S, Page

PARTS = (
    "__class__", "__init__", "__globals__", "mro", "..", ".", "%2e", "%00", "%0d%0a", "os.system", "import", "eval", "{}", "{id}", "$(id)", "`id`",
    ";", "'", '"', "\\", "ü", "☃", "\u202e", "%ff", "%c0%ae", "constructor", "prototype", "null", "true", "-1", "0x1", "1e9", "A" * 300, "%25", "+", "&", "=", "#",
)  # fmt: skip
NAMES = 10_000 if LONG else 3_000


def names(number: int) -> Iterator[str]:
    """Yield ``number`` random names. Each run yields the same names."""
    dice = random.Random(6)
    letters = string.ascii_letters + string.digits + "._-:@!*()[]~,"
    for _ in range(number):
        pieces = [dice.choice(PARTS) if dice.random() < 0.6 else "".join(dice.choices(letters, k=dice.randint(1, 12)))]
        while dice.random() < 0.4:
            pieces.append(dice.choice(PARTS))
        yield dice.choice(("", ".", "/", "__")).join(pieces)


class Kept:
    """A connection that is used for many requests, and opened again if the server closes it."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=PATIENCE_S)
        self.headers = page.bearer

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        data = None if body is None else json.dumps(body).encode()
        headers = {**self.headers, **({} if data is None else {"Content-Type": "application/json"})}
        try:
            self.connection.request(method, path, data, headers)
            answer = self.connection.getresponse()
            return answer.status, answer.read()
        except (http.client.HTTPException, ConnectionError):
            self.connection.close()
            self.connection.request(method, path, data, headers)
            answer = self.connection.getresponse()
            return answer.status, answer.read()


@pytest.mark.long
def test_s6_unknown_names_are_400_or_404_and_change_nothing(page: Page) -> None:
    """S6: An unknown name in a path, key, state or parameter is answered with 400 or 404.

    Such requests change nothing, and the page continues to run.
    """
    answer = page.post("/api/jobs", {"command": ["true"]})
    number = answer.json()["id"]
    wait_for(lambda: page.scheduler.states().get(number) == "done", "a job that has ended")
    before = page.scheduler.states(), page.scheduler.rows("SELECT count(*) FROM requests")
    kept, seen = Kept(page), set()
    known = {"status", "jobs", "gpus", "events"}
    for at, name in enumerate(names(NAMES)):
        path = quote(name, safe="/%.:;=@!*'()+,~")  # percent signs are kept: some names are percent-encoded
        way = at % 6
        if way == 0:
            status, body = kept.ask("GET", f"/api/{path}x")
        elif way == 1:
            status, body = kept.ask("POST", f"/api/jobs/{number}/x{path}", {})
        elif way == 2:
            status, body = kept.ask("GET", f"/api/jobs?state={quote(name)}")
        elif way == 3:
            status, body = kept.ask("POST", "/api/jobs", {"command": ["true"], name: 1})
        elif way == 4:
            status, body = kept.ask("GET", f"/api/status?{quote(name)}=1")
        else:
            status, body = kept.ask("POST", "/api/queue/pause", {name: 1})
        assert status in (400, 404), (way, name, status, body)
        text = json.loads(body)["error"]
        assert "Traceback" not in text and "object" not in text.replace("an object", "").replace(
            "an empty object", ""
        ), (way, name, text)
        seen.add((way, status))
        assert name not in known
    kept.connection.close()
    assert {way for way, _ in seen} == set(range(6))
    assert (page.scheduler.states(), page.scheduler.rows("SELECT count(*) FROM requests")) == before
    assert page.process is not None and page.process.poll() is None
    assert "Traceback" not in page.said()


def test_s15_no_secret_is_in_any_answer_stream_or_log(page: Page) -> None:
    """S15: Secrets in commands, labels, variables and refused lines are in no answer, event or output."""
    script = page.folder / "fail.sh"
    script.write_text("#!/bin/sh\nexit 3\n")
    script.chmod(0o755)
    one = Listening(page)
    told = ""
    for words in SHAPES.values():
        body = {"command": [str(script), *words], "cpu": True, "label": f"token={SECRET}", "env": {"API_TOKEN": SECRET},
                "info": f"password={SECRET}"}  # fmt: skip
        told += page.post("/api/preview", body).text
        answer = page.post("/api/jobs", body)
        assert answer.status == 201, answer.text
    told += page.post("/api/jobs", {"command": [f"a | b --token={SECRET}"]}).text
    told += page.post("/api/jobs", {"command": ["x"], f"token={SECRET}": 1}).text
    told += page.post("/api/jobs", {"command": ["x"], "gpus": f"token={SECRET}"}).text
    told += page.post("/api/preview", {"command": ["x"], "cwd": f"/nonexistent/token={SECRET}"}).text
    told += page.get(f"/api/jobs?state=token={SECRET}").text
    page.scheduler.append(f"x,a.py,,--token={SECRET}", f"0,/nonexistent/token={SECRET}.sh,,x,0")
    ended = {"failed", "done", "cancelled"}
    numbers = set(page.scheduler.states())
    wait_for(lambda: sum(state in ended for state in page.scheduler.states().values()) >= len(SHAPES), "their ends")
    wait_for(lambda: page.get("/api/status").json()["refused"], "the refused line")
    for number in numbers:
        for path in (f"/api/jobs/{number}", f"/api/jobs/{number}/story"):
            told += page.get(path).text
        for verb in ("hold", "cancel", "retry"):
            told += page.post(f"/api/jobs/{number}/{verb}").text
    for path in ("/api/status", "/api/jobs", "/api/gpus", "/api/openapi.json"):
        told += page.get(path).text
    wait_for(lambda: sum(kind == "job" for kind, _ in one.events) >= 2 * len(SHAPES), "what the stream told")
    one.close()
    told += "\n".join(one.raw)
    told += page.said()
    assert told.count("***") > 100
    assert SECRET not in told, told[max(0, told.find(SECRET) - 300) :][:400]
