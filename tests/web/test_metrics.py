"""Tests of the metrics: names and types of the contract, bounded labels, and no data about the users' jobs."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from scheduler import __version__
from scheduler.client.client import SchedulerClient
from scheduler.core.admission import Admission
from scheduler.core.counters import TICK_BUCKETS
from scheduler.core.errors import SchedulerError
from scheduler.core.gpu import Gpu, ResourceRequest
from scheduler.core.gpu_admission import Thresholds
from scheduler.core.gpu_snapshot import GpuSnapshot
from scheduler.core.history import Batch
from scheduler.core.job import Event, Job, JobSpec, JobState, Outcome, Reason
from scheduler.core.observations import Now, Readings
from scheduler.core.placement import Fleet
from scheduler.store import counters
from scheduler.store import jobs as rows
from scheduler.store.daemon_lock import DaemonLock
from scheduler.store.database import Database
from scheduler.store.history_db import HistoryFile
from scheduler.store.readings import save_readings
from scheduler.web.metrics import CONTENT_TYPE, metrics
from tests.builders import Play, a_gpu, a_job

ROOT = Path(__file__).parents[2]
GPU = {"gpu", "uuid"}
# Name → (type, labels), from section 9 of the contract and from docs/metrics.md.
NAMES: dict[str, tuple[str, set[str]]] = {
    "gpujob_jobs": ("gauge", {"state"}),
    "gpujob_jobs_finished": ("counter", {"outcome"}),
    "gpujob_job_wait_seconds": ("histogram", {"le"}),
    "gpujob_job_run_seconds": ("histogram", {"le"}),
    "gpujob_gpu_memory_bytes": ("gauge", GPU | {"part"}),
    "gpujob_gpu_utilization_ratio": ("gauge", GPU),
    "gpujob_gpu_allocated_ratio": ("gauge", GPU),
    "gpujob_gpu_paused": ("gauge", GPU),
    "gpujob_gpu_healthy": ("gauge", GPU),
    "gpujob_gpu_power_watts": ("gauge", GPU),
    "gpujob_gpu_energy_joules": ("counter", GPU),
    "gpujob_gpu_temperature_celsius": ("gauge", GPU),
    "gpujob_tick_seconds": ("histogram", {"le"}),
    "gpujob_queue_blocked": ("gauge", {"reason"}),
    "gpujob_retries": ("counter", {"reason"}),
    "gpujob_build_info": ("gauge", {"version"}),
    "gpujob_up": ("gauge", set()),
    "gpujob_queue_paused": ("gauge", set()),
    "gpujob_jobs_ended": ("counter", {"state"}),
    "gpujob_gpu_stale": ("gauge", GPU),
    "gpujob_gpu_reading_age_seconds": ("gauge", GPU),
}
SECRET = 'a"label\nwith\\ all ☃ of it'


@pytest.fixture
def client(tmp_path: Path) -> Iterator[SchedulerClient]:
    """A client of a scheduler with readings of two GPUs, one finished job and one waiting job."""
    client = SchedulerClient(str(tmp_path / "gpu_scheduler_state.json"))
    gpus = [Gpu(0, "GPU-5fd4f087", "NVIDIA H200", 0, 80_000), Gpu(3, "GPU-b", "NVIDIA H200", 0, 80_000)]
    admission = Admission.of(gpus, Thresholds(), Now(1000.0, 100.0))
    told = [GpuSnapshot(g.uuid, g.index, "", 80_000, 30_000, 0.75, 61, (), power_w=412.5, energy_j=9e6) for g in gpus]
    admission.take(Readings(100.0, tuple(told)), Now(1000.0, 100.0))
    database = Database(client.places)
    daemon_lock = DaemonLock(client.places)
    daemon_lock.take({"pid": os.getpid()})
    with database.writing() as connection:
        rows.save_gpus(connection, gpus)
        save_readings(connection, admission.cards.values(), Now(1000.0, 100.0))
        rows.save_pauses(connection, [3], False, [])
        done = add(connection, "done", "/home/alice/secret_train.py", 0)
        done.state, done.outcome, done.started_at, done.finished_at = JobState.DONE, Outcome.EXIT, 1005.0, 1065.0
        add(connection, SECRET, "x", 0)
        rows.save(connection, [done])
        counters.count(connection, [Event(1, 1065.0, "done", {"outcome": "exit", "ran": 60.0})], {1: done})
        rows.save_class_reasons(connection, {"1x1000/*/0": Reason("no-room", f"no room for {SECRET}")})
        rows.set_meta(connection, rows.BLOCKED, json.dumps({"no-room": 1}))
    file = HistoryFile(client.places.history)
    file.write(Batch(1000.0, ticks=(*range(len(TICK_BUCKETS)), 2), tick_sum=40.0))
    file.close()
    yield client
    database.close()
    daemon_lock.leave()


def add(connection: object, label: str, script: str, at: float) -> Job:
    spec = JobSpec(script=script, arguments=("--lr", "0.1", "/data/x"), label=label, gpus="1")
    return rows.insert(connection, spec, ResourceRequest(1, 1000), "", (), 1000.0 + at)  # type: ignore[arg-type]


def families(client: SchedulerClient) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(metrics(client).decode())}


def value(client: SchedulerClient, name: str, **labels: str) -> float:
    (found,) = (
        sample.value for family in families(client).values() for sample in family.samples
        if sample.name == name and sample.labels == labels
    )  # fmt: skip
    return found


def test_each_metric_has_its_type_help_text_and_labels(client: SchedulerClient) -> None:
    """Every metric of the contract has its type, its help text and its labels, even if it has no value yet."""
    found = families(client)
    assert found.keys() == NAMES.keys() and CONTENT_TYPE.startswith("text/plain; version=0.0.4")
    for name, (kind, labels) in NAMES.items():
        assert found[name].type == kind and found[name].documentation, name
        told = {label for sample in found[name].samples for label in sample.labels}
        assert told <= labels and (not found[name].samples or told == labels), name
    text = metrics(client).decode()
    for name in ("gpujob_jobs_finished_total", "gpujob_retries_total", "gpujob_gpu_energy_joules_total"):
        assert f"# TYPE {name} counter\n" in text
    assert not re.search(r"^(python|process)_", text, re.M) and "_created" not in text


def test_metrics_are_in_base_units_and_gpu_metrics_have_the_uuid(client: SchedulerClient) -> None:
    who = {"gpu": "0", "uuid": "GPU-5fd4f087"}
    parts = {
        part: value(client, "gpujob_gpu_memory_bytes", **who, part=part)
        for part in ("ours", "foreign", "reserved", "free")
    }
    assert sum(parts.values()) == 80_000 << 20 and parts["free"] == 50_000 << 20
    assert value(client, "gpujob_gpu_utilization_ratio", **who) == 0.75
    assert value(client, "gpujob_gpu_power_watts", **who) == 412.5
    assert value(client, "gpujob_gpu_energy_joules_total", **who) == 9e6
    assert value(client, "gpujob_gpu_temperature_celsius", **who) == 61
    assert (
        value(client, "gpujob_gpu_paused", **who) == 0
        and value(client, "gpujob_gpu_paused", gpu="3", uuid="GPU-b") == 1
    )
    assert value(client, "gpujob_gpu_reading_age_seconds", **who) > 1e8  # the reading is from 1970
    assert value(client, "gpujob_gpu_stale", **who) == 1 and value(client, "gpujob_gpu_healthy", **who) == 0
    assert value(client, "gpujob_jobs", state="pending") == 1 and value(client, "gpujob_jobs", state="done") == 1
    assert value(client, "gpujob_jobs_finished_total", outcome="exit") == 1
    assert (
        value(client, "gpujob_jobs_finished_total", outcome="lost") == 0
    )  # exists before the first event, so that a rate includes that event
    assert (
        value(client, "gpujob_job_wait_seconds_bucket", le="10") == value(client, "gpujob_job_wait_seconds_count") == 1
    )
    assert (
        value(client, "gpujob_job_wait_seconds_sum") == 5
        and value(client, "gpujob_job_wait_seconds_bucket", le="1") == 0
    )
    assert value(client, "gpujob_job_run_seconds_sum") == 60
    assert value(client, "gpujob_tick_seconds_count") == sum(range(len(TICK_BUCKETS))) + 2
    assert value(client, "gpujob_queue_blocked", reason="no-room") == 1
    assert value(client, "gpujob_build_info", version=__version__) == 1


def test_s22_metrics_contain_no_name_argument_path_or_user_of_a_job(client: SchedulerClient) -> None:
    """S22: No name, argument, path or user of a job is in the metrics."""
    text = metrics(client).decode()
    for word in ("alice", "secret", "train", "--lr", "/data", "/home", "label", str(client.places.state_dir), "☃"):
        assert word not in text, word


def test_k18_ten_thousand_jobs_with_odd_names_add_no_time_series(client: SchedulerClient) -> None:
    """K18: The number of time series does not grow with the number of jobs.

    The metrics stay valid, whatever the names of the jobs are.
    """
    before = sum(len(family.samples) for family in families(client).values())
    database = Database(client.places)
    with database.writing() as connection:
        for n in range(10_000):
            add(connection, f"{SECRET}{n}", f"/x/{n}\n.py", n)
    database.close()
    found = families(client)
    assert sum(len(family.samples) for family in found.values()) == before < 400
    assert value(client, "gpujob_jobs", state="pending") == 10_001


def test_gpu_metrics_have_no_values_before_the_first_scheduler_start(tmp_path: Path) -> None:
    """If no scheduler has run in a folder, `gpujob_up` is 0, and the metrics of GPUs have no values."""
    found = families(SchedulerClient(str(tmp_path / "gpu_scheduler_state.json")))
    assert found.keys() == NAMES.keys() and found["gpujob_up"].samples[0].value == 0
    assert not [name for name in found if name.startswith("gpujob_gpu_") and found[name].samples]


def test_metrics_without_prometheus_client_name_the_install_command(
    client: SchedulerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(SchedulerError) as caught:
        metrics(client)
    assert caught.value.do == "pip install 'gpujob[web]'"


def test_waiting_jobs_are_counted_by_reason() -> None:
    """The scheduler counts waiting jobs by reason code, such as held jobs and jobs without room on a GPU."""
    play = Play(Fleet([a_gpu()]))
    play.arrive(a_job(1), *(a_job(n, need="0.5" if n % 2 else "1") for n in range(2, 9)), a_job(9, held=True))
    assert play.started == [1]
    assert play.scheduler.blocked(play.scheduler.class_reasons()) == {"no-room": 7, "hold-user": 1}


# -- the dashboard ----------------------------------------------------------------------------------------

DASHBOARD = ROOT / "docs" / "grafana-dashboard.json"


def test_the_dashboard_uses_only_existing_metrics(client: SchedulerClient) -> None:
    """The queries of docs/grafana-dashboard.json use only existing metrics and labels."""
    board = json.loads(DASHBOARD.read_text("utf-8"))
    samples: dict[str, set[str]] = {}
    for family in families(client).values():
        names = {sample.name for sample in family.samples} or {family.name}
        for name in names:
            samples.setdefault(name, set()).update(NAMES[family.name][1])
    asked = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    names = {name for text in asked for name in re.findall(r"gpujob_\w+", text)}
    assert names <= samples.keys(), names - samples.keys()
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in names} >= {
        "gpujob_jobs", "gpujob_queue_blocked", "gpujob_gpu_memory_bytes", "gpujob_gpu_utilization_ratio",
        "gpujob_gpu_allocated_ratio", "gpujob_gpu_power_watts", "gpujob_gpu_temperature_celsius", "gpujob_job_wait_seconds",
        "gpujob_job_run_seconds", "gpujob_jobs_ended_total", "gpujob_retries_total", "gpujob_tick_seconds", "gpujob_gpu_healthy",
    }  # fmt: skip
    for text in asked:
        grouped = {label.strip() for labels in re.findall(r"by\s*\(([^)]*)\)", text) for label in labels.split(",")}
        grouped |= {
            label for labels in re.findall(r"\{([^}]*)\}", text) for label in re.findall(r"(\w+)\s*[=!]", labels)
        }
        known = set().union(*(samples.get(name, set()) for name in re.findall(r"gpujob_\w+", text)))
        assert grouped <= known | {"le", "instance", "job"}, (text, grouped - known)
    assert board["schemaVersion"] >= 39 and len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert next(one["type"] for one in board["templating"]["list"]) == "datasource"
    for panel in board["panels"]:
        assert panel["type"] in ("row", "text") or panel["datasource"]["uid"] == "${datasource}", panel["title"]
