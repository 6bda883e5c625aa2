"""The replay of traces: bounds, figures, and what the policies never do."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks import replay as tool
from benchmarks.replay import POLICIES, run
from benchmarks.trace import TraceJob, makespan_bound, mean_jct_bound, slice_of
from scheduler.core.gpu import ResourceRequest

FIGURES = [
    "makespan", "makespan_bound", "mean_jct", "mean_jct_bound", "p95_jct", "slowdown", "passed_over", "passed_over_fit",
    "max_wait", "max_wait_wide", "decision_ms_mean", "decision_ms_p99",
]  # fmt: skip
HEAD = "job_id,submit_s,duration_s,gpus,num_gpus,gpu_milli,priority,qos,group,gpu_spec\n"


def some_jobs(number: int, seed: int = 1) -> list[TraceJob]:
    """Return jobs that together need about 80 % of 8 GPUs."""
    dice, at, found = random.Random(seed), 0.0, []
    for n in range(1, number + 1):
        need = dice.choice([(1, 250), (1, 500), (1, 1000), (1, 1000), (2, 1000), (4, 1000), (8, 1000)])
        at += dice.expovariate(1 / 600.0)
        found.append(TraceJob(n, at, dice.uniform(10.0, 4000.0), ResourceRequest(*need), dice.randrange(3)))
    return found


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_beats_the_bounds_and_each_job_runs(policy: str) -> None:
    figures = run(some_jobs(300), 8, policy)
    assert list(figures) == FIGURES
    assert figures["makespan"] >= figures["makespan_bound"] and figures["mean_jct"] >= figures["mean_jct_bound"]
    assert figures["slowdown"] >= 1.0 and figures["max_wait"] >= figures["max_wait_wide"]


@pytest.mark.parametrize("policy", ["greedy", "strict"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_without_reservations_no_start_passes_over_a_more_urgent_job_that_would_have_fitted(
    policy: str, seed: int
) -> None:
    assert run(some_jobs(300, seed), 8, policy)["passed_over_fit"] == 0.0


def test_strict_order_starts_no_job_before_a_more_urgent_one() -> None:
    assert run(some_jobs(300), 8, "strict")["passed_over"] == 0.0


def test_a_replay_can_be_repeated() -> None:
    first, second = (tool.replay(some_jobs(200), 8, "short").started for _ in range(2))
    assert first == second


def test_bounds_of_small_cases() -> None:
    one = ResourceRequest(1, 1000)
    jobs = [TraceJob(1, 0.0, 10.0, one, 0), TraceJob(2, 0.0, 20.0, one, 0), TraceJob(3, 5.0, 5.0, one, 0)]
    assert makespan_bound(jobs, 1) == 35.0
    # Mean busy times on one GPU, least work first: job 3 in 5 to 10, job 1 in 0 to 5 and 10 to 15, job 2 in 15 to 35.
    assert mean_jct_bound(jobs, 1) == pytest.approx((7.5 + 7.5 + 25.0 + 17.5 - 5.0) / 3)
    shared = [TraceJob(n, 0.0, 10.0, ResourceRequest(1, 600), 0) for n in range(1, 4)]
    assert makespan_bound(shared, 1) == 30.0, "two jobs of more than a half never share a GPU"
    assert makespan_bound([TraceJob(1, 0.0, 10.0, ResourceRequest(1, 1), 0)], 8) == 10.0


def test_a_slice_has_the_load_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rows = [f"j{n},{n * 100},{50 + n},{1},{1},{1000},{n % 3},,," for n in range(20)]
    rows.insert(3, "wide,250,10,16,16,1000,0,,,")
    rows.insert(5, f"long,350,{10**9},1,1,1000,0,,,")
    path.write_text(HEAD + "\n".join(rows) + "\n")
    jobs = slice_of(str(path), 8, 15, 0.5, 2)
    assert [job.number for job in jobs] == list(range(1, 16)) and jobs[0].submitted == 0.0
    assert max(job.duration for job in jobs) == 48 * 3600.0
    work = sum(job.gpu_seconds for job in jobs)
    assert work / (8 * jobs[-1].submitted) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="21 jobs that fit, not 30"):
        slice_of(str(path), 8, 20, 0.5, 10)


def test_the_tool_prints_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(HEAD + "".join(f"j{n},{n * 10},100,1,1,1000,0,,,\n" for n in range(30)))
    words = ["replay", str(path), "--gpus", "8", "--jobs", "30", "--load", "0.7", "--first", "0", "--policy", "fifo"]
    monkeypatch.setattr("sys.argv", [*words, "--json"])
    assert tool.main() == 0
    assert list(json.loads(capsys.readouterr().out)) == FIGURES
    monkeypatch.setattr("sys.argv", words)
    assert tool.main() == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == FIGURES
    monkeypatch.setattr("sys.argv", [*words[:1], str(tmp_path / "none.csv")])
    assert tool.main() == 2 and "cannot replay" in capsys.readouterr().err
