"""The page of the scheduler of all users: each user signs in with a token of their own, and may do what the user may do."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.gpujobd.machine import CONFIG, Machine
from tests.gpujobd.test_needs import seen
from tests.stories.harness import wait_for
from tests.stories.people import ROOT_ONLY

__all__ = ["seen"]
pytestmark = ROOT_ONLY


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with Machine(f"{CONFIG}web: true\nweb_port: 0\nhide_commands: true\n") as made:
        for name in ("ada", "bob", "eve"):
            made.add_user(name)
        made.install()
        made.start()
        yield made


class Page:
    """The page as one user sees it."""

    def __init__(self, machine: Machine, who: str) -> None:
        found: list[str] = wait_for(lambda: re.findall(r"http://127\.0\.0\.1:(\d+)/", machine.log()), "the page", 60)
        self.base = f"http://127.0.0.1:{found[-1]}"
        done = machine.gpujob(who, "token")
        assert done.code == 0 and "at a free port (web_port: 0)" in done.err, done
        self.token = done.out.strip()
        wait_for(lambda: self.ask("/api/status")[0] == 200, "the token", 60)

    def ask(self, path: str, body: Any = None) -> tuple[int, str]:
        """Make a request; return the status and the body of the answer."""
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(self.base + path, data, headers), timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()


def test_each_user_has_a_token_and_the_rights_of_the_user(machine: Machine) -> None:
    """Issue 25, 2: the page knows the user by the token; it shows and changes what this user may see and change."""
    pages = {who: Page(machine, who) for who in ("ada", "bob", "eve")}
    assert len({page.token for page in pages.values()}) == 3
    code, text = pages["ada"].ask("/api/jobs", {"command": ["sh", "-c", "id -un; sleep 300"], "label": "hushhush"})
    assert code == 201, text
    number = json.loads(text)["id"]
    machine.in_state(number, "running")
    assert machine.job(number)["user"] == "ada"
    for who, shown in (("ada", True), ("bob", False), ("eve", True)):
        for path in (
            "/",
            "/jobs",
            f"/jobs/{number}",
            "/report",
            "/timeline",
            "/api/jobs",
            f"/api/jobs/{number}",
            f"/api/jobs/{number}/story",
        ):
            code, text = pages[who].ask(path)
            assert code == 200, (who, path, text)
            assert shown or "hushhush" not in text, (who, path)
    assert "hushhush" in pages["ada"].ask("/")[1]
    for path in (f"/api/jobs/{number}/cancel", "/api/gpus/0/pause"):
        code, text = pages["bob"].ask(path, {})
        assert code == 409 and ("belongs to user ada" in text or "only an administrator" in text), text
    assert pages["eve"].ask("/api/gpus/3/pause", {})[0] == 200
    assert pages["eve"].ask("/api/gpus/3/resume", {})[0] == 200
    for who in ("ada", "eve"):
        code, text = pages[who].ask(f"/api/jobs/{number}/log")
        assert code == 404 and f"gpujob logs {number}" in text, text
    assert pages["eve"].ask(f"/api/jobs/{number}/cancel", {})[0] == 200
    machine.ended(number)
    assert "ada" in pages["bob"].ask("/users")[1]


def test_needs_are_those_of_the_user_and_only_an_administrator_may_apply_them(seen: Machine) -> None:
    """Issue 27, 1: the runs of other users are not shown; the table of the machine is written by root alone."""
    pages = {who: Page(seen, who) for who in ("ada", "eve")}
    for path in ("/needs", "/api/needs"):
        assert "of-bob" not in pages["ada"].ask(path)[1] and "shared" in pages["ada"].ask(path)[1]
        assert "of-bob" in pages["eve"].ask(path)[1]
    assert "/api/needs/apply" in pages["eve"].ask("/needs")[1]
    assert "/api/needs/apply" not in pages["ada"].ask("/needs")[1]
    code, text = pages["ada"].ask("/api/needs/apply", {})
    assert code == 409 and "only an administrator may change the model table" in text, text
    code, text = pages["eve"].ask("/api/needs/apply", {})
    assert code == 409 and "cannot be written" in text, text


def test_predictions_are_for_all_users_and_offers_only_for_what_the_user_may_do(machine: Machine) -> None:
    """A user is not offered the end of another user's job, and cannot accept such an offer."""
    pages = {who: Page(machine, who) for who in ("ada", "bob", "eve")}
    body = {"command": ["sleep", "300"], "gpus": 4, "time": "1h", "label": "hushhush"}
    running = json.loads(pages["ada"].ask("/api/jobs", body)[1])["id"]
    machine.in_state(running, "running")
    waiting = json.loads(pages["bob"].ask("/api/jobs", {**body, "label": "bobs"})[1])["id"]
    wait_for(lambda: machine.job(waiting)["reason_code"] == "no-wide-room", "a reason", 60)

    def commands(who: str) -> list[str]:
        code, text = pages[who].ask(f"/api/jobs/{waiting}/why")
        assert code == 200 and "hushhush" not in text, text
        return [one["command"] for one in json.loads(text)["jobs"][0]["explanation"]["offers"]]

    for page in pages.values():
        found = {one["id"]: one for one in json.loads(page.ask("/api/plan")[1])["jobs"]}
        assert found[running]["end"] and found[waiting]["start"]
    cancel = f"gpujob cancel {running}"
    assert cancel not in commands("bob") and cancel in commands("eve") and commands("ada") == [cancel]
    code, text = pages["ada"].ask("/api/preview", body)
    assert code == 200 and json.loads(text)["expected"]["start"], text
    offer = {"requests": [{"verb": "cancel", "jobs": [running]}]}
    code, text = pages["bob"].ask(f"/api/jobs/{waiting}/offer", offer)
    assert code == 409 and "belongs to user ada" in text, text
    assert machine.job(running)["state"] == "running"
    for who, mine in (("bob", False), ("eve", True)):
        code, text = pages[who].ask(f"/jobs/{waiting}")
        assert code == 200 and ("Do it" in text and cancel in text) is mine, (who, text)
        code, text = pages[who].ask("/timeline")
        assert code == 200 and "expected to end" in text, text
    code, text = pages["eve"].ask(f"/api/jobs/{waiting}/offer", offer)
    assert code == 200, text
    machine.in_state(waiting, "running")
    machine.gpujob("bob", "cancel", str(waiting))
    machine.ended(waiting)


def test_the_page_opens_no_file_that_a_user_names(machine: Machine) -> None:
    """It has the rights of the service: a log path, or a link in its place, could name the file with the tokens."""
    page = Page(machine, "bob")
    body = {"command": ["true"], "log_dir": "/var/lib/gpujob/scheduler/.gpujob", "log_name": "web-tokens.json"}
    code, text = page.ask("/api/jobs", body)
    assert code == 201, text
    number = json.loads(text)["id"]
    wait_for(lambda: machine.job(number)["reason_code"] == "backoff", "a failed start", 60)
    for path in (f"/api/jobs/{number}/log", f"/api/jobs/{number}/log?attempt=1", f"/jobs/{number}"):
        code, text = page.ask(path)
        assert f"gpujob logs {number}" in text and not re.search("[0-9a-f]{64}", text), (path, text)
    code, text = page.ask("/api/preview", {"command": ["/var/lib/gpujob/scheduler/.gpujob/web-tokens.json"]})
    assert code == 200 and "would fail" not in text, text
    machine.gpujob("bob", "cancel", str(number))


def test_a_new_token_replaces_the_old_one(machine: Machine) -> None:
    """`gpujob token` makes a new token; the old one, and a wrong one, are refused; no token is stored or logged."""
    page = Page(machine, "bob")
    old = page.token
    page.token = machine.gpujob("bob", "token").out.strip()
    wait_for(lambda: page.ask("/api/status")[0] == 200, "the new token", 60)
    for wrong in (old, "x" * 43):
        page.token = wrong
        assert page.ask("/api/status")[0] == 401
    everything = machine.root(
        "sh", "-c", "cat /var/lib/gpujob/scheduler/.gpujob/web-tokens.json /var/lib/gpujob/scheduler/*.log"
    ).out
    assert old not in everything + machine.log()
    assert "gpujob token" in page.ask("/")[1]
