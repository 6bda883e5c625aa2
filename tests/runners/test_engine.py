"""The runner of engines under faults of the engine: lost answers, unknown jobs, outages, lost nodes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.core.gpu import ResourceRequest
from scheduler.core.job import JobState
from scheduler.core.observations import Ended, Lost, NeverRan, Started, Unclaimed
from scheduler.runners import attempt_record
from scheduler.runners.engine import readings_of
from tests.bench import EngineBench, engine_bench

GO_ON = "until [ -e go ]; do sleep 0.02; done; exit 4"


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[EngineBench]:
    with engine_bench(tmp_path) as made:
        yield made


def test_the_node_tells_its_gpus_and_fills_them_into_the_command(bench: EngineBench) -> None:
    job, launch = bench.job(
        1,
        "/bin/sh",
        "-c",
        "echo $0 $CUDA_VISIBLE_DEVICES $IDS $SLURMD_NODENAME",
        "\0gpus\0",
        environment={"IDS": "\0gpus\0"},
    )
    job.need = ResourceRequest(2, 1000)
    bench.runner.start(job, launch)
    started = bench.until(Started)
    assert (started.place.node, started.place.gpus) == ("g1", ("g1/2", "g1/3"))
    assert (started.place.engine_job, started.place.partition) == ("1", "main")
    assert bench.until(Ended).exit_code == 0
    assert bench.text(1) == "2,3 2,3 2,3 g1\n"
    assert os.listdir(bench.folder / "launches") == [] and os.listdir(bench.folder / "outputs") == []


def test_k19_a_submit_without_an_answer_is_not_repeated_blindly(bench: EngineBench) -> None:
    """K19: If the answer to a submit is lost, the runner first asks whether the engine has the job."""
    bench.engine.lost_answers = 1
    bench.start(1, "/bin/sh", "-c", "echo x >> ran; exit 4")
    assert bench.until(Ended).exit_code == 4
    assert bench.engine.calls.count("submit") == 1 and (bench.folder / "ran").read_text() == "x\n"


def test_k19_a_submit_that_did_not_arrive_is_repeated(bench: EngineBench) -> None:
    """K19: If the engine does not have a job whose submit was not answered, the job is submitted again."""
    bench.engine.down = True
    bench.start(1, "/bin/sh", "-c", "echo x >> ran; exit 4")
    bench.wait(lambda: "it is down" in bench.runner.trouble(), "the outage")
    assert bench.observations == []
    bench.engine.down = False
    assert bench.until(Ended).exit_code == 4
    assert (bench.folder / "ran").read_text() == "x\n" and bench.runner.trouble() == ""


def test_a_refused_submit_that_the_engine_lists_as_failed_is_not_the_job(bench: EngineBench) -> None:
    """Slurm keeps some refused submits as failed jobs of the same name."""
    bench.engine.busy = "Slurm takes no jobs: job limit"
    bench.start(1, "/bin/sh", "-c", "exit 4")
    bench.wait(lambda: bench.engine.calls.count("submit") > 2, "tries")
    assert bench.observations == []
    bench.engine.busy = ""
    assert bench.until(Ended).exit_code == 4


def test_a_job_of_a_removed_state_folder_is_not_mistaken_for_a_new_one(bench: EngineBench) -> None:
    """Jobs of equal number and attempt have different names if they were submitted at different times."""
    job, _ = bench.job(1, "/bin/sh", "-c", "exit 4")
    older, _ = bench.job(1, "/bin/sh", "-c", "exit 4")
    older.submitted_at = job.submitted_at - 60.0
    assert bench.name_of(job) != bench.name_of(older) and bench.name_of(job).endswith("-1")


def test_an_environment_that_cannot_be_read_fails_the_start(bench: EngineBench) -> None:
    bench.start(1, "/bin/true", env_file=str(bench.folder / "none"))
    observation = bench.until(NeverRan)
    assert not observation.lasting and "cannot be passed to a node: No such file" in observation.why
    bench.start(2, "/bin/sh", "-c", "exit 4")
    assert bench.until(Ended, 2).exit_code == 4


def test_two_copies_of_one_attempt_run_its_command_once(bench: EngineBench) -> None:
    """P1: The first shim claims the attempt record; a second copy of the job ends without running the command."""
    job = bench.start(1, "/bin/sh", "-c", "echo x >> ran; " + GO_ON)
    bench.until(Started)
    engine = bench.engine
    first = engine.mine[bench.name_of(job)]
    engine.mine["copy"] = type(first)(first.work, 99)
    bench.wait(lambda: engine.mine["copy"].word == "COMPLETED", "the end of the copy")
    (bench.folder / "go").touch()
    assert bench.until(Ended).exit_code == 4
    assert (bench.folder / "ran").read_text() == "x\n"


def test_k20_a_running_job_that_the_engine_forgot_is_lost(bench: EngineBench) -> None:
    """K20: A job that the engine no longer knows is lost, never done, if its attempt record has no ending."""
    job = bench.start(1, "/bin/sh", "-c", GO_ON)
    bench.until(Started)
    bench.engine.forgotten.add(bench.name_of(job))
    assert "Slurm no longer knows the job" in bench.until(Lost).why
    assert not any(isinstance(one, Ended) for one in bench.observations)


def test_k20_the_record_of_a_forgotten_job_counts(bench: EngineBench) -> None:
    """K20: If the attempt record has the ending of a job that the engine no longer knows, the ending is reported."""
    job = bench.start(1, "/bin/sh", "-c", GO_ON)
    bench.until(Started)
    bench.engine.forgotten.add(bench.name_of(job))
    (bench.folder / "go").touch()
    assert bench.until(Ended).exit_code == 4


def test_k20_a_job_that_the_engine_forgot_before_its_start_waits_again(bench: EngineBench) -> None:
    """K20, P1: An attempt that the engine lost before it started is given up, so that no later copy can start it."""
    bench.engine.nodes.clear()  # nothing can start
    job = bench.start(1, "/bin/true")
    bench.wait(lambda: bench.engine.calls.count("jobs") > 1, "two listings")
    assert bench.observations == []
    bench.engine.forgotten.add(bench.name_of(job))
    bench.until(Unclaimed)
    found = attempt_record.read(bench.record(1))
    assert (found.how, found.code) == ("never", 0)


def test_k22_a_refusal_of_all_jobs_is_shown_and_the_jobs_are_kept(bench: EngineBench) -> None:
    """K22, P3: If the engine refuses all jobs (an expired login, a wrong partition), jobs wait until this is over."""
    bench.engine.busy = "Slurm takes no jobs: invalid account"
    bench.start(1, "/bin/sh", "-c", "exit 4")
    bench.wait(lambda: "invalid account" in bench.runner.trouble(), "the trouble")
    time.sleep(0.3)
    assert bench.observations == []
    bench.engine.busy = ""
    assert bench.until(Ended).exit_code == 4


def test_a_job_that_the_engine_refuses_fails_with_the_words_of_the_engine(bench: EngineBench) -> None:
    bench.engine.refused = "Slurm refuses the job: Requested node configuration is not available"
    bench.start(1, "/bin/true")
    observation = bench.until(NeverRan)
    assert observation.lasting and "node configuration" in observation.why


def test_a_job_on_a_failed_node_is_lost_with_the_word_of_the_engine(bench: EngineBench) -> None:
    job = bench.start(1, "/bin/sh", "-c", GO_ON)
    bench.until(Started)
    bench.engine.said[bench.name_of(job)] = "NODE_FAIL"
    why = bench.until(Lost).why
    assert "NODE_FAIL" in why and "g1" in why


def test_a_disagreement_of_record_and_engine_is_noted(bench: EngineBench) -> None:
    """The record is the truth. If the engine says something else, the job gets a note."""
    job = bench.start(1, "/bin/sh", "-c", GO_ON)
    bench.until(Started)
    bench.engine.down = True
    (bench.folder / "go").touch()
    bench.wait(lambda: attempt_record.read(bench.record(1)).how == "exit", "the record")
    bench.engine.said[bench.name_of(job)] = "NODE_FAIL"
    bench.engine.down = False
    ended = bench.until(Ended)
    assert ended.exit_code == 4 and "NODE_FAIL" in ended.note and "record" in ended.note


def test_the_engine_is_the_second_source_of_an_exit_code(bench: EngineBench) -> None:
    """If the record has no ending, the exit code of the engine counts, with a note."""
    job = bench.start(1, "/bin/sh", "-c", GO_ON)
    bench.until(Started)
    shim = bench.engine.mine[bench.name_of(job)].process
    shim.kill()
    ended = bench.until(Ended)
    assert ended.exit_code == -9 and "no ending" in ended.note


def test_a_job_cancelled_in_the_engine_before_its_start_fails(bench: EngineBench) -> None:
    bench.engine.nodes.clear()
    job = bench.start(1, "/bin/true")
    bench.wait(lambda: bench.name_of(job) in bench.engine.mine, "the submit")
    bench.engine.cancel(bench.name_of(job), False)
    observation = bench.until(NeverRan)
    assert observation.lasting and "cancelled in Slurm" in observation.why


@pytest.mark.parametrize("down", [False, True], ids=["queued", "not submitted"])
def test_a_job_stopped_before_its_start_never_runs(bench: EngineBench, down: bool) -> None:
    bench.engine.nodes.clear()
    bench.engine.busy = "no jobs" if down else ""
    job = bench.start(1, "/bin/sh", "-c", "touch ran")
    bench.wait(lambda: bench.engine.calls, "the submit")
    job.state = JobState.STOPPING
    bench.runner.stop([(job, False)])
    bench.until(Unclaimed)
    bench.engine.nodes["g1"] = 4
    bench.engine.busy = ""
    bench.start(2, "/bin/true")
    bench.until(Ended, 2)
    assert not (bench.folder / "ran").exists()


@pytest.mark.parametrize("down", [False, True], ids=["kept", "no answer"])
def test_a_waiting_job_that_the_engine_does_not_cancel_never_runs_its_command(bench: EngineBench, down: bool) -> None:
    """P1: A cancelled job that has not started is given up at once, whatever the engine does with it."""
    bench.engine.nodes.clear()
    bench.engine.keeps_waiting_jobs = True
    job = bench.start(1, "/bin/sh", "-c", "touch ran")
    bench.wait(lambda: bench.name_of(job) in bench.engine.mine, "the submit")
    bench.engine.down = down
    bench.runner.stop([(job, False)])
    bench.until(Unclaimed)
    bench.engine.down = False
    bench.engine.nodes["g1"] = 4
    copy = bench.engine.mine[bench.name_of(job)]
    bench.start(2, "/bin/true")
    bench.until(Ended, 2)
    bench.wait(lambda: bench.engine.jobs("") and copy.code is not None, "the end of the job that the engine kept")
    assert copy.code == 0 and not (bench.folder / "ran").exists()


def test_the_first_words_of_a_job_that_did_not_get_to_its_log_are_told(bench: EngineBench) -> None:
    """If the node cannot run the shim, the job is tried again with what the node printed as the reason."""
    os.chmod(bench.folder / "attempts", 0o500)
    tools = next(bench.folder.glob("node-*"))
    (tools / "node_shim.py").write_text("raise SystemExit('no such module')")
    bench.start(1, "/bin/true")
    os.chmod(bench.folder / "attempts", 0o700)
    observation = bench.until(NeverRan)
    assert not observation.lasting and "FAILED (no such module)" in observation.why


def test_a_report_becomes_a_reading_of_each_gpu(bench: EngineBench) -> None:
    bench.engine.drained["g2"] = "broken fan"
    found = readings_of(bench.engine.report(), 5.0)
    assert [(gpu.uuid, gpu.node, gpu.in_use) for gpu in found.gpus[:2]] == [
        ("g1/0", "g1", False),
        ("g1/1", "g1", False),
    ]
    assert len(found.gpus) == 6 and found.gpus[5].problem == "node g2 is drained: broken fan" and found.at == 5.0
