"""Stories with a real Slurm: the jobs file, kills of gpujob and of slurmctld, cancels, pauses, drained nodes."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.runners import attempt_record
from tests.slurm.conftest import ClusterScheduler
from tests.slurm_cluster import SlurmCluster
from tests.stories.harness import wait_for


def gpus_of(scheduler: ClusterScheduler, key: str) -> str:
    """Return the ids of the GPUs that the job of this key saw in GPUJOB_GPUS."""
    return next(entry[3] for entry in scheduler.ledger() if entry[:2] == ["start", key])


def test_a_jobs_file_runs_on_slurm(on_slurm: ClusterScheduler) -> None:
    """Shares, whole and several GPUs, failures, dependencies, and the GPUs that Slurm gave, in every view."""
    (on_slurm.folder / "llm_config.json").write_text('{"models": {"small": 0.5, "large": 1}}')
    on_slurm.start()
    on_slurm.says("7 GPUs on 3 nodes; a GPU has 4 shards")
    on_slurm.append(
        on_slurm.line("half", more="--llm small"),
        on_slurm.line("whole", more="--llm large", seconds=1.0),
        on_slurm.line("wide") + ";gpus=4",
        on_slurm.line("fails", 7),
        on_slurm.line("killed", "s9"),
        on_slurm.line("none") + ";gpus=0",
        on_slurm.line("second", gpus="g2"),
        on_slurm.line("child") + ";after=1",
        on_slurm.line("orphan") + ";after_ok=4",
        on_slurm.line("typed", gpus="type=fake") + ";gpus=0.25",
    )
    states = on_slurm.wait_ended(10)
    assert Counter(states.values()) == Counter(done=7, failed=2, skipped=1)
    assert all(on_slurm.starts(key) == (key != "orphan") for key in
               ("half", "whole", "wide", "fails", "killed", "none", "second", "child", "orphan", "typed"))  # fmt: skip
    wide, second, half = on_slurm.job(3), on_slurm.job(7), on_slurm.job(1)
    assert (wide["node"], wide["gpus"], wide["partition"]) == ("g1", [0, 1, 2, 3], "main")
    assert (second["node"], len(second["gpus"])) == ("g2", 1) and second["gpus"][0] in (4, 5)
    assert gpus_of(on_slurm, "wide") == "0,1,2,3" and gpus_of(on_slurm, "none") == "-"
    assert [word for word in half["command"] if word == "--cuda"] and half["engine_job"].isdigit()
    assert on_slurm.job(4)["exit_code"] == 7 and on_slurm.job(5)["signal"] == 9
    assert on_slurm.queue() == []


def test_bare_gpu_ids_are_refused_and_unknown_nodes_too(on_slurm: ClusterScheduler) -> None:
    on_slurm.start()
    on_slurm.append(on_slurm.line("a", gpus="0-1"), on_slurm.line("b", gpus="g9"), on_slurm.line("c", gpus="type=h100"))
    wait_for(lambda: len(on_slurm.status()["refused"]) == 3, "three refused lines")
    why = [line["reason"] for line in on_slurm.status()["refused"]]
    assert "Slurm chooses the GPUs" in why[0] and "engine_ignore_gpu_ids" in why[0]
    assert "g9" in why[1] and "g1, g2, g3" in why[1] and "h100" in why[2] and "fake" in why[2]
    assert "too many" not in on_slurm.cli("submit", "--gpus", "8", "true", code=3).stderr


def test_jobs_that_name_ids_run_anywhere_if_told_so(cluster: SlurmCluster, tmp_path: Path) -> None:
    scheduler = ClusterScheduler(tmp_path, cluster, engine_ignore_gpu_ids="true")
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(scheduler.end_all)
        scheduler.start()
        scheduler.append(scheduler.line("a", gpus="0-1"))
        assert scheduler.wait_ended(1) == {1: "done"}


def test_p1_p6_a_killed_scheduler_finds_its_jobs_again(on_slurm: ClusterScheduler) -> None:
    """P1, P6: After `kill -9`, running jobs are adopted, ends are found, and no job runs twice."""
    on_slurm.start()
    for key in ("runs", "ends", "fails"):
        on_slurm.hold(key)
    on_slurm.append(
        on_slurm.line("runs", 3) + ";gpus=4", on_slurm.line("ends") + ";gpus=2", on_slurm.line("fails", 7),
        *(on_slurm.line(f"waits{n}") + ";gpus=4" for n in range(3)),
    )  # fmt: skip
    for number in (1, 2, 3):
        on_slurm.wait_state(number, "running")
    wait_for(lambda: len(on_slurm.queue()) == 6, "waiting jobs in the queue of Slurm")
    on_slurm.kill()
    on_slurm.release("ends")
    on_slurm.release("fails")
    attempts = on_slurm.folder / ".gpujob" / "attempts"
    wait_for(lambda: attempt_record.read(str(attempts / "3.1")).how == "exit", "the end of a job without a scheduler")
    on_slurm.start()
    on_slurm.wait_state(2, "done")
    on_slurm.wait_state(3, "failed")
    assert on_slurm.states()[1] == "running" and on_slurm.job(3)["exit_code"] == 7
    on_slurm.release("runs")
    states = on_slurm.wait_ended(6)
    assert states == {1: "failed", 2: "done", 3: "failed", 4: "done", 5: "done", 6: "done"}
    assert on_slurm.job(1)["exit_code"] == 3
    assert all(on_slurm.starts(key) == 1 for key in ("runs", "ends", "fails", "waits0", "waits1", "waits2"))


def test_p1_kills_in_a_row_lose_and_double_nothing(on_slurm: ClusterScheduler) -> None:
    """P1: Ten kills of the scheduler while 24 short jobs run: each job runs once."""
    on_slurm.append(*(on_slurm.line(f"k{n}", n % 3, 0.2) + ";gpus=0.5" for n in range(24)))
    for _ in range(10):
        on_slurm.start()
        time.sleep(0.3)
        on_slurm.kill()
    on_slurm.start()
    states = on_slurm.wait_ended(24)
    assert all(on_slurm.starts(f"k{n}") == 1 for n in range(24)), on_slurm.ledger()
    assert Counter(states.values()) == Counter(done=8, failed=16)
    assert [on_slurm.job(n + 1)["exit_code"] for n in range(6)] == [0, 1, 2, 0, 1, 2]


def test_a_rebuilt_store_finds_the_jobs_on_the_cluster_again(on_slurm: ClusterScheduler) -> None:
    """P6: After the loss of the store, `recover` leaves the attempts of a cluster undecided, and the start finds them."""
    on_slurm.start()
    on_slurm.hold("runs")
    on_slurm.append(on_slurm.line("runs", 3), on_slurm.line("done", 7))
    on_slurm.wait_state(1, "running")
    on_slurm.wait_state(2, "failed")
    on_slurm.kill()
    for path in (on_slurm.folder / ".gpujob").glob("store.db*"):
        path.unlink()
    on_slurm.cli("recover", code=1)  # the reading position of the jobs file is lost
    on_slurm.start()
    wait_for(lambda: on_slurm.job(1)["node"], "the node of the running job")
    wait_for(lambda: on_slurm.states() == {1: "running", 2: "failed"}, "the end of the other job")
    assert on_slurm.job(2)["exit_code"] == 7
    on_slurm.release("runs")
    on_slurm.wait_state(1, "failed")
    assert on_slurm.job(1)["exit_code"] == 3 and on_slurm.starts("runs") == on_slurm.starts("done") == 1


def test_cancel_ends_waiting_and_running_jobs(on_slurm: ClusterScheduler) -> None:
    on_slurm.start()
    on_slurm.hold("a")
    on_slurm.append(on_slurm.line("a") + ";gpus=4", on_slurm.line("b") + ";gpus=4")
    on_slurm.wait_state(1, "running")
    wait_for(lambda: len(on_slurm.queue()) == 2, "a job that waits in Slurm")
    assert on_slurm.cli("why", "2").stdout == "job 2 waits in the queue of slurm, which chooses its GPUs\n"
    assert on_slurm.cli("why", "1").stdout.splitlines()[0] == "job 1 is running on GPU 0-3, node g1"
    first, second = on_slurm.cli("cancel", "1", "2").stdout.splitlines()
    assert first.startswith("job 1: SIGTERM") and second.startswith("job 2 is taken back from slurm")
    assert on_slurm.wait_ended(2) == {1: "cancelled", 2: "cancelled"}
    assert on_slurm.starts("b") == 0
    wait_for(lambda: on_slurm.queue() == [], "no job left in Slurm")


def test_a_job_that_ignores_sigterm_is_killed(cluster: SlurmCluster, tmp_path: Path) -> None:
    scheduler = ClusterScheduler(tmp_path, cluster, kill_grace=1)
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(scheduler.end_all)
        scheduler.start()
        scheduler.cli("submit", "--", "sh", "-c", "trap '' TERM; while :; do sleep 1; done")
        scheduler.wait_state(1, "running")
        scheduler.cli("cancel", "1")
        scheduler.wait_state(1, "cancelled")


def test_the_queue_stays_in_gpujob(cluster: SlurmCluster, tmp_path: Path) -> None:
    """Only `release_ahead` jobs wait in Slurm, so that `first`, `hold` and `edit` continue to work for the others."""
    scheduler = ClusterScheduler(tmp_path, cluster, release_ahead=2)
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(scheduler.end_all)
        scheduler.start()
        scheduler.hold("long")
        scheduler.append(scheduler.line("long") + ";gpus=4", *(scheduler.line(f"w{n}") + ";gpus=4" for n in range(6)))
        scheduler.wait_state(1, "running")
        wait_for(lambda: len(scheduler.queue()) == 3, "two jobs that wait in Slurm")
        assert Counter(scheduler.states().values()) == Counter(running=1, starting=2, pending=4)
        scheduler.cli("first", "7")
        scheduler.cli("hold", "6")
        scheduler.cli("edit", "5", "--gpus", "1")
        scheduler.wait_state(5, "done")  # it fits beside the running job now
        scheduler.release("long")
        scheduler.wait_state(4, "done")
        order = [entry[1] for entry in scheduler.ledger() if entry[0] == "start" and entry[1] != "w3"]
        assert order == ["long", "w0", "w1", "w5", "w2"]
        assert scheduler.states()[6] == "pending"


def test_pause_means_fewer_releases_and_a_paused_node_gets_no_job(on_slurm: ClusterScheduler) -> None:
    on_slurm.start()
    on_slurm.cli("pause", "0,1,2,3,4")
    wait_for(lambda: len([g for g in on_slurm.status()["gpus"] if g["state"] == "PAUSED"]) == 5, "the pause")
    for key in ("a", "b", "c"):
        on_slurm.hold(key)
    on_slurm.append(*(on_slurm.line(key) for key in ("a", "b", "c")))
    for number in (1, 2):
        on_slurm.wait_state(number, "running")
    assert Counter(on_slurm.job(n)["node"] for n in (1, 2)) == Counter(g2=1, g3=1)
    assert on_slurm.states()[3] == "pending" and len(on_slurm.queue()) == 2
    on_slurm.cli("resume", "0,1,2,3,4")
    on_slurm.wait_state(3, "running")
    for key in ("a", "b", "c"):
        on_slurm.release(key)
    on_slurm.wait_ended(3)


def test_a_drained_node_is_shown(on_slurm: ClusterScheduler) -> None:
    cluster = on_slurm.cluster
    on_slurm.settings["gpu_interval"] = 0.5
    on_slurm.start()
    cluster.run("scontrol", "update", "nodename=g2", "state=drain", "reason=broken fan")
    try:
        wait_for(
            lambda: {g["state"] for g in on_slurm.status()["gpus"] if g["node"] == "g2"} == {"DRAINING"}, "the drain"
        )
        (why,) = {g["reason"] for g in on_slurm.status()["gpus"] if g["node"] == "g2"}
        assert why == "node g2 is drained: broken fan"
    finally:
        cluster.run("scontrol", "update", "nodename=g2", "state=resume")
    wait_for(lambda: {g["state"] for g in on_slurm.status()["gpus"]} == {"AVAILABLE"}, "the end of the drain")


def test_gpus_of_other_users_jobs_are_shown_as_foreign(on_slurm: ClusterScheduler) -> None:
    on_slurm.settings["gpu_interval"] = 0.5
    on_slurm.start()
    on_slurm.cluster.run("sbatch", "--gres=gpu:4", "-o", "/dev/null", "--wrap", "sleep 60")
    wait_for(lambda: [g["state"] for g in on_slurm.status()["gpus"]].count("FOREIGN") == 4, "foreign GPUs")
    on_slurm.append(on_slurm.line("a"))
    assert on_slurm.wait_ended(1) == {1: "done"} and on_slurm.job(1)["node"] in ("g2", "g3")


def test_an_unfinished_job_of_another_engine_is_not_abandoned(on_slurm: ClusterScheduler) -> None:
    on_slurm.start()
    on_slurm.hold("a")
    on_slurm.append(on_slurm.line("a"))
    on_slurm.wait_state(1, "running")
    on_slurm.stop()
    done = on_slurm.cli("start", "--gpus", "1", code=3)
    assert "job 1 still runs with engine slurm" in done.stderr and "--engine slurm" in done.stderr
    on_slurm.start()
    on_slurm.release("a")
    assert on_slurm.wait_ended(1) == {1: "done"}


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[SlurmCluster]:
    """Yield a cluster that the test may break."""
    from tests.slurm.conftest import need_slurm

    need_slurm()
    made = SlurmCluster(tmp_path / "slurm")
    made.folder.mkdir()
    try:
        made.start()
        yield made
    finally:
        made.stop()
        shutil.rmtree(made.folder)


@pytest.mark.waits
@pytest.mark.parametrize("settled", [True, False], ids=["settled", "fresh"])
def test_p1_a_killed_slurmctld_loses_and_doubles_nothing(
    own_cluster: SlurmCluster, tmp_path: Path, settled: bool
) -> None:
    """P1: slurmctld is killed after submits, saved or not: no job is lost, none runs twice, and all ends are known."""
    scheduler = ClusterScheduler(tmp_path, own_cluster)
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(scheduler.end_all)
        scheduler.start()
        scheduler.hold("runs")
        scheduler.append(
            scheduler.line("runs", 5) + ";gpus=4", *(scheduler.line(f"w{n}", n) + ";gpus=4" for n in range(3))
        )
        scheduler.wait_state(1, "running")
        wait_for(lambda: len(scheduler.queue()) == 4, "jobs that wait in Slurm")
        if settled:
            time.sleep(6.0)  # slurmctld saves its state every 5 s
        own_cluster.kill("slurmctld")
        wait_for(lambda: any("Slurm does not answer" in text for text in scheduler.status()["trouble"]), "the trouble")
        assert scheduler.states()[1] == "running"
        scheduler.release("runs")
        own_cluster.start_controller()

        def ended() -> bool:
            # A slurmctld that forgot a running job gives its number to another job, and then drains the node for
            # "Duplicate jobid": an administrator has to resume it.
            if "drain" in own_cluster.run("sinfo", "-h", "-n", "g1", "-o", "%T"):
                own_cluster.run("scontrol", "update", "nodename=g1", "state=resume", check=False)
            return all(state in ("done", "failed") for state in scheduler.states().values())

        wait_for(ended, "the end of all jobs", 120)
        states = scheduler.states()
        assert all(scheduler.starts(key) == 1 for key in ("runs", "w0", "w1", "w2")), (scheduler.ledger(), states)
        assert [scheduler.job(n)["exit_code"] for n in (1, 2, 3, 4)] == [5, 0, 1, 2], states


def test_doctor_asks_the_cluster_and_not_the_driver_of_this_machine(
    on_slurm: ClusterScheduler, cluster: SlurmCluster
) -> None:
    """`doctor` names the nodes that get no jobs, and a Slurm that does not answer."""

    def findings() -> dict[str, dict[str, str]]:
        out = on_slurm.cli("doctor", "--json", code=None).stdout
        return {finding["check"]: finding for finding in json.loads(out)["findings"]}

    on_slurm.start()
    cluster.run("scontrol", "update", "nodename=g3", "state=drain", "reason=fan")
    try:
        found = findings()
        assert found["cluster"]["seen"] == "Slurm answers: 7 GPUs on 3 nodes, 4 shards for each GPU"
        assert found["node"]["wrong"].startswith("node g3 is dr") and found["node"]["mark"] == "warn"
        assert "NVML" not in found
    finally:
        cluster.run("scontrol", "update", "nodename=g3", "state=resume")
    on_slurm.environ["SLURM_CONF"] = str(on_slurm.folder / "missing.conf")
    found = findings()
    assert found["cluster"]["mark"] == "bad" and "Slurm does not answer" in found["cluster"]["wrong"]
