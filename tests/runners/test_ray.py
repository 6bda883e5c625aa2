"""The engine Ray: what it asks of the Jobs API, and what it makes of the answers, with a stub server on loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from scheduler.core.engine import EngineBusy, EngineDown, EngineRefused, JobPhase, Submission
from scheduler.core.errors import SchedulerError
from scheduler.core.gpu import ResourceRequest
from scheduler.runners.ray import Ray, checked, token_of

EXISTS = "Traceback\nValueError: Job with submission_id gj-1-1 already exists.\n.\n"


class Dashboard:
    """A stub of Ray's dashboard. ``answers``: path without its query → (HTTP code, text); ``asked``: the requests."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, str]] = {}
        self.asked: list[tuple[str, str, Any, str]] = []  # method, path, body, header Authorization
        dashboard = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                dashboard.asked.append((self.command, self.path, body, self.headers.get("Authorization") or ""))
                code, text = dashboard.answers.get(self.path.partition("?")[0], (404, "not found"))
                self.send_response(code)
                if code == 302:
                    self.send_header("Location", "http://127.0.0.1:1/")
                self.end_headers()
                self.wfile.write(text.encode())

            do_POST = do_GET

            def log_message(self, *_: Any) -> None:
                """Print nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def say(self, path: str, value: Any, code: int = 200) -> None:
        self.answers[path] = (code, value if isinstance(value, str) else json.dumps(value))

    def nodes(self, *rows: dict[str, Any]) -> None:
        self.say("/api/v0/nodes", {"data": {"result": {"result": list(rows)}}})

    def usage(self, time: float, **gpus: float) -> None:
        use = {node: {"GPU": [number, 4.0]} for node, number in gpus.items()}
        self.say(
            "/api/cluster_status",
            {"data": {"clusterStatus": {"time": time, "loadMetricsReport": {"usageByNode": use}}}},
        )


@pytest.fixture
def dashboard() -> Iterator[Dashboard]:
    made = Dashboard()
    yield made
    made.server.shutdown()
    made.thread.join()
    made.server.server_close()


def node(id: str, name: str, gpus: int, **more: Any) -> dict[str, Any]:
    return {
        "node_id": id, "node_name": name, "node_ip": "10.0.0.1", "state": "ALIVE", "labels": {},
        "resources_total": {"GPU": float(gpus), "CPU": 8.0}, **more,
    }  # fmt: skip


def work(need: str, **more: Any) -> Submission:
    values = {"name": "gj-1-1", "comment": "gpujob:1.1", "command": ("/s/run on node.sh", "p"), "output": "/o", **more}
    return Submission(need=ResourceRequest.parse(need), **values)


@pytest.mark.parametrize(("need", "gpus", "cpus"), [("0.5", 0.5, 0), ("2", 2, 0), ("2x0.5", 2, 0), ("0", 0, 1)])
def test_a_submit_has_an_id_of_its_own_and_the_need(dashboard: Dashboard, need: str, gpus: float, cpus: int) -> None:
    dashboard.say("/api/jobs/", {"submission_id": "gj-1-1"})
    assert Ray(dashboard.url, "secret").submit(work(need)) == "gj-1-1"
    ((method, path, body, token),) = dashboard.asked
    assert (method, path, token) == ("POST", "/api/jobs/", "Bearer secret")
    assert (body["submission_id"], body["entrypoint_num_gpus"], body["entrypoint_num_cpus"]) == ("gj-1-1", gpus, cpus)
    assert body["entrypoint"] == "exec '/s/run on node.sh' p" and "entrypoint_label_selector" not in body


def test_nodes_are_named_by_their_ids_and_types_by_a_label(dashboard: Dashboard) -> None:
    dashboard.nodes(node("aa", "n1", 2), node("bb", "n2", 2), node("cc", "n3", 2))
    dashboard.say("/api/jobs/", {})
    ray = Ray(dashboard.url)
    ray.report()
    ray.submit(work("1", nodes=("n1", "n3"), type="A100"))
    assert dashboard.asked[-1][2]["entrypoint_label_selector"] == {
        "ray.io/node-id": "in(aa,cc)",
        "ray.io/accelerator-type": "A100",
    }


def test_k19_a_job_that_exists_already_was_submitted_before(dashboard: Dashboard) -> None:
    """K19: The answer to the first submit was lost; the second is refused by Ray, and is no error."""
    dashboard.say("/api/jobs/", EXISTS, 500)
    assert Ray(dashboard.url).submit(work("1")) == "gj-1-1"


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        (400, "bad entrypoint", EngineRefused),
        (500, "no agent", EngineBusy),
        (401, "", EngineDown),
        (302, "", EngineBusy),
    ],
)
def test_k22_refusals_of_a_submit(dashboard: Dashboard, code: int, text: str, kind: type[Exception]) -> None:
    """K22: A refusal of this job fails the job; all other refusals are waited for. No redirect gets the token."""
    dashboard.say("/api/jobs/", text, code)
    with pytest.raises(kind):
        Ray(dashboard.url, "secret").submit(work("1"))
    assert len(dashboard.asked) == 1


def test_k21_answers_that_are_not_understood_are_no_answers(dashboard: Dashboard) -> None:
    """K21: A page of a proxy, or a list in an unknown form, must not look as if no job were left."""
    for text in ("<html>please log in</html>", '{"jobs": []}', "", "null"):
        dashboard.say("/api/jobs/", text)
        with pytest.raises(EngineDown):
            Ray(dashboard.url).jobs("gj-")
    dashboard.say("/api/v0/nodes", {"data": {}})
    with pytest.raises(EngineDown):
        Ray(dashboard.url).report()
    dashboard.server.shutdown()
    dashboard.server.server_close()
    with pytest.raises(EngineDown, match="does not answer at http://127"):
        Ray(dashboard.url).jobs("gj-")


@pytest.mark.parametrize(
    ("status", "code", "phase", "ended"),
    [
        ("PENDING", None, JobPhase.QUEUED, (None, None, False)), ("RUNNING", None, JobPhase.RUNNING, (None, None, False)),
        ("SOMETHING_NEW", None, JobPhase.RUNNING, (None, None, False)), ("SUCCEEDED", 0, JobPhase.ENDED, (0, None, False)),
        ("FAILED", 7, JobPhase.ENDED, (7, None, False)), ("FAILED", 137, JobPhase.ENDED, (None, 9, False)),
        ("FAILED", -15, JobPhase.ENDED, (None, 15, False)), ("FAILED", 128, JobPhase.ENDED, (128, None, False)),
        ("FAILED", None, JobPhase.ENDED, (None, None, True)), ("STOPPED", None, JobPhase.ENDED, (None, 15, False)),
    ],
)  # fmt: skip
def test_states_of_jobs(
    dashboard: Dashboard, status: str, code: int | None, phase: JobPhase, ended: tuple[int | None, int | None, bool]
) -> None:
    dashboard.say("/api/jobs/", [
        {"submission_id": "gj-1-1", "status": status, "driver_exit_code": code, "message": "x\nactor died"}, {"submission_id": "other"},
    ])  # fmt: skip
    found = Ray(dashboard.url).jobs("gj-")
    assert list(found) == ["gj-1-1"]
    job = found["gj-1-1"]
    assert (job.phase, job.exit_code, job.signal, job.lost) == (phase, *ended)
    assert ("actor died" in job.word) == job.lost


def test_gpus_of_others_are_what_two_counts_in_a_row_have_in_common(dashboard: Dashboard) -> None:
    """Ray counts the GPUs in use only now and then, so a count may still have, or not yet have, one of our jobs."""
    dashboard.nodes(node("aa", "n1", 4), node("bb", "n2", 4, state="DEAD"))
    ours = {"submission_id": "gj-1-1", "status": "RUNNING", "driver_node_id": "aa", "metadata": {"gpus": "2"}}
    ray = Ray(dashboard.url)

    def used() -> set[int]:
        (one,) = ray.report().nodes
        return set(one.used)

    dashboard.usage(1.0, aa=2.0)
    dashboard.say("/api/jobs/", [ours])
    ray.jobs("gj-")
    assert used() == set()
    dashboard.say("/api/jobs/", [])
    ray.jobs("gj-")
    assert used() == set(), "our job has ended, and the count still has it"
    dashboard.usage(2.0, aa=0.5)
    assert used() == set()
    dashboard.usage(3.0, aa=0.5)
    assert used() == {3}, "half a GPU of somebody else, in two counts"
    dashboard.say("/api/cluster_status", "{}")
    assert used() == set()


def test_nodes_of_one_name_are_told_apart(dashboard: Dashboard) -> None:
    dashboard.nodes(
        node("aabbccddee", "n", 1),
        node("112233445566", "n", 1),
        node("ff", "m", 1, labels={"ray.io/accelerator-type": "T4"}),
    )
    found = Ray(dashboard.url).report()
    assert [one.name for one in found.nodes] == ["n-aabbcc", "n-112233", "m"] and found.nodes[2].types == ("T4",)
    assert found.shards is None and found.nodes[0].cpus == 8


def test_a_stop_of_an_unknown_job_is_no_error(dashboard: Dashboard) -> None:
    Ray(dashboard.url).cancel("gj-1-1", False)
    assert dashboard.asked[-1][:2] == ("POST", "/api/jobs/gj-1-1/stop")
    dashboard.say("/api/jobs/gj-1-1/stop", "no", 500)
    with pytest.raises(EngineDown):
        Ray(dashboard.url).cancel("gj-1-1", True)


def test_the_output_that_ray_has_is_told(dashboard: Dashboard) -> None:
    dashboard.say("/api/jobs/gj-1-1/logs", {"logs": "two lines of Ray\nno such file\n"})
    assert Ray(dashboard.url).logs("gj-1-1").endswith("no such file\n")


@pytest.mark.parametrize(
    ("url", "token", "insecure", "why"),
    [
        ("http://127.0.0.1:8265", "", False, ""), ("http://localhost:8265", "", False, ""), ("https://ray.lab", "t", False, ""),
        ("http://ray.lab:8265", "", True, ""), ("http://ray.lab:8265", "", False, "no token"), ("http://ray.lab", "t", False, "no https"),
        ("https://ray.lab", "", False, "no token"), ("ray.lab:8265", "", True, "must be like"), ("file:///etc/passwd", "", True, "must be like"),
        ("http://u:p@127.0.0.1", "", False, "must be like"),
    ],
)  # fmt: skip
def test_s_an_address_on_another_machine_needs_a_token_and_https(
    url: str, token: str, insecure: bool, why: str
) -> None:
    if why:
        with pytest.raises(SchedulerError, match=why):
            checked(url, token, insecure)
    else:
        assert checked(url, token, insecure) == url


def test_the_token_comes_from_a_private_file_or_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("from-file\n")
    path.chmod(0o644)
    with pytest.raises(SchedulerError, match="other users can read the token"):
        token_of(str(path), {})
    path.chmod(0o600)
    assert token_of(str(path), {"RAY_AUTH_TOKEN": "x"}) == "from-file"
    assert (
        token_of("", {"RAY_AUTH_TOKEN": "x\n"}) == "x"
        and token_of("", {"RAY_AUTH_TOKEN_PATH": str(path)}) == "from-file"
    )
    assert token_of("", {}) == ""
    with pytest.raises(SchedulerError, match="cannot read the token"):
        token_of(str(tmp_path / "none"), {})
