"""Ray as an engine, by the REST API of its dashboard: no Ray is needed here, and no version has to match.

Ray keeps no priorities, so a job is handed over only when it fits. A head that is gone has taken all its jobs with it.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import stat
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlsplit

from scheduler.core.engine import (
    EngineBusy,
    EngineDown,
    EngineJob,
    EngineNode,
    EngineRefused,
    JobPhase,
    Report,
    Submission,
)
from scheduler.core.errors import SchedulerError
from scheduler.core.gpu import WHOLE

LIMIT_S = 20.0  # of one request
MOST_NODES = 10_000
LARGEST = 64 << 20  # bytes of an answer
MOST_LOG = 1 << 16
BY_SIGNAL = 128
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_PHASES = {"PENDING": JobPhase.QUEUED, "RUNNING": JobPhase.RUNNING}


class Ray:
    """An engine, see `core/engine.py: Engine`. ``url``: address of the dashboard; ``token``: empty for none."""

    name = "ray"
    title = "Ray"
    tied = True
    gone_after_s = 180.0  # Ray ends all jobs about 64 s after its head is gone

    def __init__(self, url: str, token: str = "", limit_s: float = LIMIT_S) -> None:
        self._url, self._token, self._limit_s = url.rstrip("/"), token, limit_s
        # No proxy: it would get the token.
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect).open
        self._names: dict[str, str] = {}  # id of a node → its name
        self._ours: dict[str, float] = {}  # id of a node → GPUs of our running jobs there
        self._told_at: object = None  # when Ray counted the GPUs in use, about every 5 s
        self._foreign: dict[str, float] = {}  # id of a node → GPUs of others, by that count

    def submit(self, work: Submission) -> str:
        """Submit a job under its own id, so that a second submit of the same job is refused."""
        gpus = work.need.count if work.need.count > 1 else work.need.parts / WHOLE if work.need.count else 0
        asked: dict[str, Any] = {
            "entrypoint": f"exec {shlex.join(work.command)}", "submission_id": work.name, "entrypoint_num_gpus": gpus,
            "entrypoint_num_cpus": 0 if work.need.count else work.need.slots, "metadata": {"gpus": str(gpus), "gpujob": work.comment},
        }  # fmt: skip
        selector = {}
        if work.nodes:
            ids = [node for node, name in self._names.items() if name in work.nodes]
            selector["ray.io/node-id"] = f"in({','.join(ids)})"
        if work.type:
            selector["ray.io/accelerator-type"] = work.type
        if selector:
            asked["entrypoint_label_selector"] = selector
        try:
            self._ask("POST", "/api/jobs/", asked)
        except _Answer as error:
            if "already exists" in error.text:
                return work.name  # the answer to an earlier submit was lost
            if error.code in (400, 422):
                raise EngineRefused(f"Ray refuses the job: {error.last}") from None
            raise EngineBusy(f"Ray takes no jobs: {error.last} (code {error.code})") from None
        return work.name

    def jobs(self, prefix: str) -> dict[str, EngineJob]:
        """Return our jobs, by submission id."""
        listed = self._get("/api/jobs/")
        if not isinstance(listed, list):
            raise EngineDown("Ray does not answer: its list of jobs is not understood")
        found: dict[str, EngineJob] = {}
        ours: dict[str, float] = {}
        for one in listed:
            name = str(one.get("submission_id") or "")
            if not name.startswith(prefix):
                continue
            job = found[name] = self._job(name, one)
            if job.phase is JobPhase.RUNNING:
                node = str(one.get("driver_node_id") or "")
                ours[node] = ours.get(node, 0.0) + float((one.get("metadata") or {}).get("gpus") or 0)
        self._ours = ours
        return found

    def _job(self, name: str, one: Mapping[str, Any]) -> EngineJob:
        word = str(one.get("status") or "UNKNOWN")
        node = self._names.get(str(one.get("driver_node_id") or ""), "")
        phase = _PHASES.get(word, JobPhase.ENDED if word in ("STOPPED", "SUCCEEDED", "FAILED") else JobPhase.RUNNING)
        code = one.get("driver_exit_code")
        exit_code = signal = None
        if phase is JobPhase.ENDED and isinstance(code, int):
            if code < 0 or code > BY_SIGNAL:  # of the shim, or as the shim tells the signal that ended the job
                signal = -code if code < 0 else code - BY_SIGNAL
            else:
                exit_code = code
        elif word == "STOPPED":
            signal = 15
        lost = word == "FAILED" and exit_code is None and signal is None
        message = str(one.get("message") or "")
        told = f"{word}: {message.splitlines()[-1][:200]}" if lost and message.strip() else word
        return EngineJob(name, name, phase, told, node, "", exit_code, signal, lost or word == "STOPPED", lost, message)

    def history(self, names: Sequence[str]) -> dict[str, EngineJob]:
        """Return nothing: Ray has no second record."""
        return {}

    def cancel(self, name: str, hard: bool) -> None:
        """Stop a job: Ray sends SIGTERM, and SIGKILL 3 s later."""
        try:
            self._ask("POST", f"/api/jobs/{quote(name)}/stop")
        except _Answer as error:
            if error.code != 404:
                raise EngineDown(f"Ray does not answer: {error.last} (code {error.code})") from None

    def report(self) -> Report:
        """Return the nodes that live. GPUs that others use are told as the last GPUs of the node: Ray tells no ids."""
        listed = self._get(f"/api/v0/nodes?detail=1&limit={MOST_NODES}")
        foreign = self._used_by_others()
        try:
            rows = [row for row in listed["data"]["result"]["result"] if row["state"] == "ALIVE"]
            self._names = _unique_names(rows)
            nodes = tuple(self._node(row, foreign.get(row["node_id"], 0.0)) for row in rows)
        except (KeyError, TypeError, ValueError):
            raise EngineDown("Ray does not answer: its list of nodes is not understood") from None
        return Report(nodes, None)

    def _node(self, row: Mapping[str, Any], others: float) -> EngineNode:
        total = row["resources_total"]
        gpus = int(total.get("GPU", 0))
        kind = str((row.get("labels") or {}).get("ray.io/accelerator-type") or "gpu")
        foreign = min(gpus, math.ceil(others - 1e-6))
        return EngineNode(
            self._names[row["node_id"]],
            "",
            (kind,) * gpus,
            frozenset(range(gpus - foreign, gpus)),
            0,
            int(total.get("CPU", 0)),
        )

    def _used_by_others(self) -> dict[str, float]:
        """Return id of a node → GPUs that jobs of others use there; empty if Ray does not tell it.

        Ray counts the GPUs in use about every 5 s, so after the start or the end of one of our jobs a count is wrong. Only
        what two counts in a row have in common is taken.
        """
        try:
            told = self._get("/api/cluster_status")["data"]["clusterStatus"]
            usage = told["loadMetricsReport"]["usageByNode"]
            used = {node: float(use["GPU"][0]) for node, use in usage.items() if "GPU" in use}
        except (EngineDown, KeyError, TypeError, ValueError, AttributeError):
            return {}
        before, self._foreign = (
            self._foreign,
            {node: max(0.0, n - self._ours.get(node, 0.0)) for node, n in used.items()},
        )
        both = {node: min(number, before.get(node, 0.0)) for node, number in self._foreign.items()}
        if told.get("time") == self._told_at:  # the same count once more
            self._foreign = both
        self._told_at = told.get("time")
        return both

    def logs(self, name: str) -> str:
        """Return the last part of the output that Ray has of a job."""
        try:
            text = str(self._get(f"/api/jobs/{quote(name)}/logs").get("logs") or "")
        except AttributeError:
            return ""
        return text[-MOST_LOG:]

    def _get(self, path: str) -> Any:
        try:
            return self._ask("GET", path)
        except _Answer as error:
            raise EngineDown(f"Ray does not answer: {error.last} (code {error.code})") from None

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, headers, method=method)  # noqa: S310  checked by `checked`
        try:
            with self._open(request, timeout=self._limit_s) as answer:
                text = answer.read(LARGEST)
        except urllib.error.HTTPError as error:
            if error.code in (401, 403):
                raise EngineDown(
                    f"Ray refuses the token (code {error.code}); see the setting engine_token_file"
                    if self._token
                    else "Ray wants a token; name its file: engine_token_file"
                ) from None
            raise _Answer(error.code, error.read(MOST_LOG).decode(errors="replace")) from None
        except (OSError, ValueError) as error:
            why = getattr(error, "reason", error)
            raise EngineDown(f"Ray does not answer at {self._url}: {why}") from None
        try:
            return json.loads(text) if text.strip() else None
        except ValueError:
            raise EngineDown(f"Ray does not answer: {self._url} is no dashboard of Ray") from None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: the token would go to another address."""

    def redirect_request(self, *_: Any) -> None:
        return None


class _Answer(Exception):
    """An HTTP error. ``last``: the last line of its text, which names the cause."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text
        lines = [line.strip() for line in text.splitlines() if line.strip(" .")]
        self.last = lines[-1][:300] if lines else "no text"


def _unique_names(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return id → name of each node. A name that several nodes have gets the first characters of the id."""
    names = {row["node_id"]: str(row.get("node_name") or row["node_ip"]) for row in rows}
    often = {name for name, number in Counter(names.values()).items() if number > 1}
    return {node: f"{name}-{node[:6]}" if name in often else name for node, name in names.items()}


def checked(url: str, token: str, insecure: bool) -> str:
    """Return the address. Raises SchedulerError if it is no web address, or if jobs or the token could be read on the way.

    Everyone who reaches the Jobs API can run commands. So an address on another machine needs a token and https; without
    them: an SSH tunnel, or ``insecure``.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
        raise SchedulerError(f"engine_url must be like http://127.0.0.1:8265, not {url[:80]}", where="engine_url")
    if parts.hostname in LOOPBACK or insecure or (token and parts.scheme == "https"):
        return url
    missing = "a token" if not token else "https"
    raise SchedulerError(
        f"{url[:80]} is on another machine, and there is no {missing.removeprefix('a ')}: others on the network could run commands",
        where="engine_url",
        do=f"use an SSH tunnel (ssh -L 8265:127.0.0.1:8265 HEAD), or {missing}, or insecure_engine: true",
    )


def token_of(path: str, environ: Mapping[str, str]) -> str:
    """Return the token: from the file ``path``, else from RAY_AUTH_TOKEN or the file RAY_AUTH_TOKEN_PATH; empty for none.

    Raises SchedulerError if the file cannot be read, or if other users can read it.
    """
    if not path and environ.get("RAY_AUTH_TOKEN"):
        return environ["RAY_AUTH_TOKEN"].strip()
    path = path or environ.get("RAY_AUTH_TOKEN_PATH", "")
    if not path:
        return ""
    try:
        with open(path, encoding="ascii") as stream:
            mode = os.fstat(stream.fileno()).st_mode
            text = stream.read(4096).strip()
    except (OSError, ValueError) as error:
        raise SchedulerError(f"cannot read the token of Ray: {error}", where=path) from None
    if stat.S_IMODE(mode) & 0o077:
        raise SchedulerError("other users can read the token of Ray", where=path, do=f"chmod 600 {path}")
    return text
