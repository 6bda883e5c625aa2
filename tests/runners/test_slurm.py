"""The commands of Slurm: what gpujob passes to them, and what it makes of their output, with stand-ins on PATH."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from scheduler.core.engine import EngineBusy, EngineDown, EngineRefused, JobPhase, Submission
from scheduler.core.errors import SchedulerError
from scheduler.core.gpu import ResourceRequest
from scheduler.runners.slurm import Slurm, gpu_types, node_problem, used_gpus

SINFO = "g1|idle|main*|gpu:a100:4,shard:16|gpu:a100:1(IDX:2),shard:0|64|none|"

Make = Callable[..., Slurm]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Return a function that puts scripts on a PATH of their own and returns a Slurm that uses them."""

    def made(limit_s: float = 20.0, arguments: tuple[str, ...] = (), **scripts: str) -> Slurm:
        for name in ("sbatch", "squeue", "scancel", "sinfo", "sacct"):
            path = tmp_path / name
            path.write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/calls\n{scripts.get(name, "exit 0")}\n')
            path.chmod(0o755)
        environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path), "SECRET": "x"}
        return Slurm(environ, lambda: arguments, lambda: 100, limit_s)

    return made


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


def work(need: str = "1", **more: object) -> Submission:
    values = {"name": "gj-1-1", "comment": "gpujob:1.1", "command": ("/s/run.sh", "p"), "output": "/o/1", **more}
    return Submission(need=ResourceRequest.parse(need), **values)  # type: ignore[arg-type]


def test_a_submit_names_the_job_and_is_never_requeued(make: Make, tmp_path: Path) -> None:
    slurm = make(sbatch=f"echo 17; env > {tmp_path}/env", arguments=("--partition=gpu", "--account=lab"))
    assert slurm.submit(work(priority=3, time_limit_s=3600.0)) == "17"
    (line,) = calls(tmp_path)
    for word in ("--parsable", "--no-requeue", "--job-name=gj-1-1", "--comment=gpujob:1.1", "--gres=gpu:1", "--nice=300",
                 "--time=65", "--partition=gpu", "--account=lab"):  # fmt: skip
        assert f" {word} " in f"{line} ", (word, line)
    assert line.endswith(" /s/run.sh p")
    assert "SECRET" not in (tmp_path / "env").read_text()


@pytest.mark.parametrize(
    ("need", "words"),
    [
        ("0.5", "--gres=shard:2"),
        ("0.3", "--gres=shard:2"),
        ("0.1", "--gres=shard:1"),
        ("2", "--gres=gpu:2"),
        ("2x0.5", "--gres=gpu:2"),
    ],
)
def test_shares_are_rounded_up_to_shards(make: Make, tmp_path: Path, need: str, words: str) -> None:
    slurm = make(sbatch="echo 17", sinfo=f"echo '{SINFO}'")
    assert slurm.report().shards == 4
    slurm.submit(work(need))
    assert f" {words} " in calls(tmp_path)[-1]


def test_shards_of_gpus_without_a_type_are_warned_of(make: Make) -> None:
    """Slurm 22.05 gives a whole GPU that has shards in use, if gres.conf names no Type."""
    assert make(sinfo=f"echo '{SINFO}'").report().notes == ()
    (note,) = make(sinfo="echo 'g1|idle|main|gpu:4,shard:16|gpu:0|8|none|'").report().notes
    assert "g1" in note and "no Type in gres.conf" in note


def test_without_shards_a_share_is_a_whole_gpu(make: Make, tmp_path: Path) -> None:
    slurm = make(sbatch="echo 17", sinfo="echo 'g1|idle|main|gpu:4|gpu:0|8|none|'")
    assert slurm.report().shards == 0
    slurm.submit(work("0.5"))
    slurm.submit(work("0"))
    assert " --gres=gpu:1 " in calls(tmp_path)[-2] and "--gres" not in calls(tmp_path)[-1]


def test_one_node_is_named_and_of_several_the_others_are_excluded(make: Make, tmp_path: Path) -> None:
    rows = "\n".join(f"g{n}|idle|main|gpu:4|gpu:0|8|none|" for n in (1, 2, 3))
    slurm = make(sbatch="echo 17", sinfo=f"echo '{rows}'")
    slurm.report()
    for nodes in (("g2",), ("g2", "g3"), (), ("g1", "g2", "g3")):
        slurm.submit(work(nodes=nodes, type="a100"))
    told = [
        [word for word in line.split() if word.startswith(("--nodelist", "--exclude"))] for line in calls(tmp_path)[-4:]
    ]
    assert told == [["--nodelist=g2"], ["--exclude=g1"], [], []]
    assert " --gres=gpu:a100:1 " in calls(tmp_path)[-1]


def test_a_share_of_a_type_is_asked_for_by_its_type(make: Make, tmp_path: Path) -> None:
    slurm = make(sbatch="echo 17", sinfo=f"echo '{SINFO}'")
    slurm.report()
    slurm.submit(work("0.5", type="a100"))
    assert " --gres=shard:a100:2 " in calls(tmp_path)[-1]


def test_k21_a_command_that_hangs_is_given_up(make: Make) -> None:
    """K21: Each command has a time limit."""
    slurm = make(
        limit_s=0.3, squeue="exec sleep 600", sbatch="exec sleep 600", scancel="exec sleep 600", sinfo="exec sleep 600"
    )
    for call in (
        lambda: slurm.jobs("gj-"),
        lambda: slurm.submit(work()),
        lambda: slurm.cancel("gj-1-1", False),
        slurm.report,
    ):
        with pytest.raises(EngineDown, match=r"took more than 0\.3 s"):
            call()


def test_k21_exit_code_0_with_an_error_text_is_no_list_of_jobs(make: Make) -> None:
    """K21: An output that is not understood is no answer: it must not look as if no job were left."""
    slurm = make(squeue="echo 'slurm_load_jobs error: Unexpected message received'")
    with pytest.raises(EngineDown, match="Unexpected message"):
        slurm.jobs("gj-")
    slurm = make(sbatch="echo 'sbatch: error: Socket timed out on send/recv operation' >&2; exit 0")
    with pytest.raises(EngineDown, match="Socket timed out"):
        slurm.submit(work())


def test_k21_warnings_do_not_disturb(make: Make) -> None:
    """K21: Warnings on stderr, and lines of the site before the job number, are no errors."""
    row = "7|RUNNING|0|g1|main|None|gj-1-1|"
    slurm = make(
        squeue=f"echo 'squeue: warning: old' >&2; echo '{row}'", sbatch="echo 'Welcome to the site'; echo '17;fake'"
    )
    assert slurm.jobs("gj-")["gj-1-1"].phase is JobPhase.RUNNING
    assert slurm.submit(work()) == "17"


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("sbatch: error: Batch job submission failed: Requested node configuration is not available", EngineRefused),
        (
            "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
            EngineBusy,
        ),
        (
            "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit)",
            EngineBusy,
        ),
        (
            "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)",
            EngineDown,
        ),
        ("sbatch: error: Batch job submission failed: Zero Bytes were transmitted or received", EngineDown),
        ("sbatch: error: Batch job submission failed: Protocol authentication error", EngineBusy),
    ],
)
def test_k22_refusals_of_sbatch(make: Make, said: str, kind: type[Exception]) -> None:
    """K22: Only a refusal that concerns the job itself fails the job; an expired login or a limit is waited for."""
    with pytest.raises(kind, match=said.rpartition(": ")[2].partition(" (")[0].replace("/", ".")):
        make(sbatch=f"echo '{said}' >&2; exit 1").submit(work())


@pytest.mark.parametrize(
    ("state", "code", "phase", "ended"),
    [
        ("PENDING", "0", JobPhase.QUEUED, (None, None, False, False)),
        ("COMPLETING", "0", JobPhase.RUNNING, (None, None, False, False)),
        ("A_NEW_STATE", "0", JobPhase.RUNNING, (None, None, False, False)),
        ("COMPLETED", "0", JobPhase.ENDED, (0, None, False, False)),
        ("FAILED", "1792", JobPhase.ENDED, (7, None, False, False)),
        ("FAILED", "9", JobPhase.ENDED, (None, 9, False, False)),
        ("CANCELLED", "0", JobPhase.ENDED, (None, 15, True, False)),
        ("TIMEOUT", "0", JobPhase.ENDED, (None, 15, True, False)),
        ("NODE_FAIL", "0", JobPhase.ENDED, (None, None, True, True)),
    ],
)
def test_states_of_squeue(
    make: Make, state: str, code: str, phase: JobPhase, ended: tuple[int | None, int | None, bool, bool]
) -> None:
    job = make(squeue=f"echo '7|{state}|{code}|g1|main|Resources|gj-1-1|'").jobs("gj-")["gj-1-1"]
    assert (job.phase, job.exit_code, job.signal, job.ended_badly, job.lost) == (phase, *ended)


def test_of_two_jobs_of_one_name_the_living_one_counts(make: Make) -> None:
    rows = "7|FAILED|256|g1|main|None|gj-1-1|\n8|RUNNING|0|g2|main|None|gj-1-1|\n9|RUNNING|0|g2|main|None|other|"
    found = make(squeue=f"echo '{rows}'").jobs("gj-")
    assert list(found) == ["gj-1-1"] and found["gj-1-1"].engine_job == "8"


def test_a_job_is_cancelled_by_its_name(make: Make, tmp_path: Path) -> None:
    """A number may belong to another job after a crash of slurmctld."""
    make().cancel("gj-1-1", False)
    assert "--name=gj-1-1" in calls(tmp_path)[-1] and "--signal" not in calls(tmp_path)[-1]
    make().cancel("gj-1-1", True)
    assert "--signal=KILL --full" in calls(tmp_path)[-2] and "--state=PENDING" in calls(tmp_path)[-1]


def test_sacct_is_used_only_where_it_answers(make: Make) -> None:
    row = "7|CANCELLED by 1000|0:15|g1|main|gj-1-1"
    assert make(sacct=f"echo '{row}'").history(["gj-1-1"])["gj-1-1"].signal == 15
    assert make(sacct="echo 'Slurm accounting storage is disabled' >&2; exit 1").history(["gj-1-1"]) == {}


@pytest.mark.parametrize(
    ("text", "types"),
    [
        ("gpu:a100:2,shard:8", ("a100", "a100")),
        ("gpu:4(S:0-1)", ("gpu",) * 4),
        ("(null)", ()),
        ("gpu:a:1(S:0,1),gpu:b:1", ("a", "b")),
    ],
)
def test_types_of_gpus(text: str, types: tuple[str, ...]) -> None:
    assert gpu_types(text) == types


@pytest.mark.parametrize(
    ("text", "used"),
    [
        ("gpu:a100:2(IDX:0-1),shard:a100:1(IDX:3)", {0, 1, 3}),
        ("gpu:a100:0(IDX:N/A),shard:0", set()),
        ("gpu:2(IDX:1,3)", {1, 3}),
        ("gpu:fake:0(IDX:N/A),shard:fake:3(0/4,3/4)", {1}),
    ],
)
def test_gpus_in_use(text: str, used: set[int]) -> None:
    assert used_gpus(text) == used


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ("idle", ""), ("mixed", ""), ("allocated", ""), ("idle~", ""), ("completing", ""),
        ("drained", "node g1 is drained: fan"), ("mixed+drain", "node g1 is mixed+drain: fan"),
        ("down*", "node g1 is down and does not respond: fan"), ("allocated*", "node g1 is allocated and does not respond: fan"),
    ],
)  # fmt: skip
def test_states_of_nodes(state: str, problem: str) -> None:
    assert node_problem("g1", state, "fan") == problem


def test_missing_commands_are_named(tmp_path: Path) -> None:
    with pytest.raises(SchedulerError, match="not found: sbatch, squeue, scancel, sinfo"):
        Slurm({"PATH": str(tmp_path)}).check()
