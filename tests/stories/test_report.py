"""`gpujob report` with a real scheduler: times, sums, formats and filters, and lost and deleted jobs."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from scheduler.runners import attempt_record
from tests.stories.harness import Scheduler, wait_for


def of(s: Scheduler, *words: str) -> Any:
    return json.loads(s.cli("report", "--json", *words).stdout)


def rows_of(s: Scheduler, *words: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(s.cli("report", "--csv", *words).stdout, newline=""), strict=True))


def test_report_sums_over_jobs_labels_and_gpus_are_equal(scheduler: Callable[..., Scheduler]) -> None:
    """`report` takes times from the store; the GPU time of a job is its run time multiplied by its allocated GPUs.

    The sums over jobs, over labels and over GPUs are equal. `report` needs no running scheduler and leaves the store
    unchanged.
    """
    s = scheduler(gpus=2, assign_retry_wait=0.1).start()
    s.cli("submit", "--gpus", "0.5", "--allowed", "0", "--label", "a", "--wait", "--", "sleep", "0.2")
    s.cli("submit", "--gpus", "2", "--label", "a", "--retries", "1", "--wait", "--", "sh", "-c", "exit 3", code=3)
    s.cli("submit", "--cpu", "--wait", "--", "true")
    s.hold("run")
    s.append(s.line("run", gpus="1"))
    s.wait_state(4, "running")
    s.append(s.line("later", gpus="1"))
    wait_for(lambda: 5 in s.states(), "the one that waits")

    found = of(s)
    one, two, three, four, five = found["jobs"]
    start, end, submitted = s.rows("SELECT started_at, finished_at, submitted_at FROM jobs WHERE id=1")[0]
    assert one["run"] == pytest.approx(end - start, abs=0.002) and one["run"] > 0.1
    assert one["wait"] == pytest.approx(start - submitted, abs=0.002)
    assert one["gpu_seconds"] == pytest.approx(one["run"] / 2, abs=0.001)
    assert (two["exit_code"], two["attempts"], two["gpus"], two["state"]) == (3, 2, [0, 1], "failed")
    assert two["gpu_seconds"] == pytest.approx(two["run"] * 2, abs=0.001)
    assert (three["gpus"], three["gpu_seconds"]) == ([], 0)
    assert four["state"] == "running" and four["finished_at"] is None and four["gpu_seconds"] == four["run"] > 0
    assert (five["wait"], five["run"], five["started_at"], five["attempts"]) == (None, 0, None, 0)
    total = found["total"]
    assert (total["jobs"], total["states"]["failed"], total["attempts"], total["lost"]) == (5, 1, 5, 0)
    for key in ("run", "gpu_seconds"):
        for parts in ("jobs", "labels"):
            assert sum(part[key] for part in found[parts]) == pytest.approx(total[key])
    assert sum(gpu["gpu_seconds"] for gpu in found["gpus"]) == pytest.approx(total["gpu_seconds"])
    assert [gpu["jobs"] for gpu in found["gpus"]] == [2, 2] and 0 < found["gpus"][1]["busy"] <= 1
    assert [label["label"] for label in found["labels"]] == [None, "a"]
    wait_for(lambda: of(s)["jobs"][3]["run"] > four["run"], "a run that counts up to now")
    text = s.cli("report").stdout
    assert "a: sleep 0.2" in text and "total      5 jobs: 1 pending, 1 running, 2 done, 1 failed" in text

    s.release("run")
    s.wait_ended(5)
    whole = of(s)
    s.stop()
    before = os.stat(s.folder / ".gpujob" / "store.db")
    again = of(s)
    assert again["jobs"] == whole["jobs"] and again["labels"] == whole["labels"] and again["total"] == whole["total"]
    after = os.stat(s.folder / ".gpujob" / "store.db")
    assert (before.st_mtime_ns, before.st_size) == (after.st_mtime_ns, after.st_size)
    done = s.cli("report")
    assert done.stderr == "gpujob: no scheduler is running\n"


def test_report_filters_select_jobs_and_invalid_filters_are_refused(scheduler: Callable[..., Scheduler]) -> None:
    s = scheduler(gpus=1)
    assert s.cli("report", "--label", "a", code=6).stderr.count("\n") == 2
    s.start()
    s.cli("submit", "--label", "base", "--wait", "--", "true")
    s.cli("submit", "--label", "other", "--wait", "--", "false", code=1)
    assert [job["id"] for job in of(s, "--label", "base")["jobs"]] == [1]
    assert "did you mean base?" in s.cli("report", "--label", "bsae", code=6).stderr
    ended = s.rows("SELECT finished_at FROM jobs WHERE id=2")[0][0]
    found = of(s, "--since", "2020-01-01")
    assert len(found["jobs"]) == 2 and found["from"].startswith(("2019-12-31", "2020-01-01"))
    assert len(of(s, "--since", "7d")["jobs"]) == 2 and len(of(s, "--since", "2020-01-01T00:00:00Z")["jobs"]) == 2
    wait_for(lambda: of(s, "--since", "1s")["jobs"] == [], f"a second after {ended}")
    assert of(s, "--since", "1s", "--label", "base")["jobs"] == []
    for words in (["--since", "last week"], ["--since", "2999-01-01"], ["--since", "2026-13-01"], ["--json", "--csv"]):
        said = s.cli("report", *words, code=2).stderr
        assert said.startswith("gpujob: ") and said.count("\n") == 1


def test_report_csv_has_equal_rows_and_no_formula_and_no_secret(scheduler: Callable[..., Scheduler]) -> None:
    s = scheduler(gpus=1).start()
    s.cli(
        "submit", "--label", "=1+1", "--wait", "--", "true", 'a "quoted", one', "two\nlines", "--token=hunter2hunter2"
    )
    for label in ("+x", "-x", "@x", "x=1"):
        s.cli("submit", f"--label={label}", "--cpu", "--wait", "--", "true")
    out = s.cli("report", "--csv").stdout
    assert "hunter2" not in out + s.cli("report").stdout + s.cli("report", "--json").stdout
    head, first, *rest = rows_of(s)
    assert head[:4] == ["id", "label", "command", "state"] and {len(row) for row in (first, *rest)} == {len(head)}
    assert first[1] == "'=1+1" and [row[1] for row in rest] == ["'+x", "'-x", "'@x", "x=1"]
    assert first[2] == "true 'a \"quoted\", one' 'two\\x0alines' '--token=***'"
    assert len(out.splitlines()) == 6
    assert rows_of(s, "--since", "2020-01-01")[0] == head
    (s.folder / "=cmd").write_text("#!/bin/sh\n")
    (s.folder / "=cmd").chmod(0o755)
    s.cli("submit", "--cpu", "--env", f"PATH={s.folder}:{os.environ['PATH']}", "--wait", "--", "=cmd")
    assert rows_of(s)[-1][2] == "'=cmd"


def test_report_counts_a_job_that_ended_without_scheduler_to_its_real_end(scheduler: Callable[..., Scheduler]) -> None:
    """If a job ended while no scheduler ran, its run time is counted up to its real end.

    The report is the same before the next start, after the next start, and after `retry`.
    """
    s = scheduler(gpus=1)
    s.hold("run")
    s.append(s.line("run", code=1) + ";label=x")
    s.start()
    s.wait_state(1, "running")
    s.kill()
    s.release("run")
    wait_for(lambda: of(s)["jobs"][0]["state"] == "failed", "its ending, in its record")
    told = of(s)["jobs"][0]
    assert told["finished_at"] is not None and of(s)["jobs"][0] == told
    s.start()
    s.wait_ended(1)
    assert of(s)["jobs"][0]["run"] == pytest.approx(told["run"], abs=0.002)
    s.cli("queue", "pause")
    s.cli("retry", "1")
    again = of(s)["jobs"][0]
    assert again["state"] == "pending" and again["run"] == pytest.approx(told["run"], abs=0.002)
    assert (again["attempts"], again["wait"]) == (1, pytest.approx(told["wait"], abs=1.0))


def test_report_counts_a_failed_attempt_only_to_its_end_without_a_scheduler(
    scheduler: Callable[..., Scheduler],
) -> None:
    s = scheduler(gpus=1)
    s.hold("run")
    s.append(s.line("run", code=1) + ";retries=1")
    s.start()
    s.wait_state(1, "running")
    s.kill()
    s.release("run")
    wait_for(lambda: of(s)["jobs"][0]["state"] == "pending", "its end")
    told = of(s)["jobs"][0]
    assert told == of(s)["jobs"][0] and told["run"] > 0 and told["attempts"] == 1, "a run that does not grow any more"


def test_report_marks_a_lost_attempt(scheduler: Callable[..., Scheduler]) -> None:
    """An attempt that was running at a reboot is marked as lost, because the time of its end is unknown."""
    s = scheduler(gpus=1)
    s.hold("run")
    s.append(s.line("run"))
    s.start()
    s.wait_state(1, "running")
    supervisor = s.supervisor_pid()
    s.kill()
    os.kill(supervisor, signal.SIGKILL)
    path = s.folder / ".gpujob" / "attempts" / "1.1"
    boot = attempt_record.read(str(path)).boot
    path.write_bytes(path.read_bytes().replace(boot.encode(), str(uuid.uuid4()).encode()))
    s.start()
    s.wait_state(1, "failed")
    found = of(s)
    assert found["jobs"][0]["outcome"] == "lost" and found["jobs"][0]["lost"] == 1 == found["total"]["lost"]
    assert found["gpus"][0]["lost"] == 1 and found["jobs"][0]["run"] > 0
    said = s.cli("report").stdout
    assert said.count("upper limit (1 lost attempt)") == 3 and "run time is an upper limit (1 lost attempt)" in said


def test_report_omits_deleted_jobs_and_shows_since_when_jobs_are_known(
    scheduler: Callable[..., Scheduler],
) -> None:
    s = scheduler(gpus=1).start()
    s.cli("submit", "--wait", "--", "true")
    assert of(s)["known_since"] is None and "complete " not in s.cli("report").stdout
    ended = of(s)["jobs"][0]["finished_at"]
    s.cli("reset", "--yes")
    s.cli("submit", "--wait", "--", "true")
    found = of(s)
    assert [job["id"] for job in found["jobs"]] == [2] and found["known_since"] == ended
    assert f"complete   since {ended}" in s.cli("report").stdout
