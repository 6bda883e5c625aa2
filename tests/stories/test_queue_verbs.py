"""The verbs hold, release, first, swap, edit and reset, and the names of jobs, with and without a scheduler."""

from __future__ import annotations

import json

import pytest

from tests.stories.harness import wait_for


def waiting(scheduler, count=4, **settings):
    """Return a running scheduler with one paused GPU and ``count`` waiting jobs.

    The jobs have the keys j1, j2, …, which they write to the ledger file when they run.
    """
    s = scheduler(gpus=1, **settings)
    s.start()
    s.cli("pause", "0")
    s.append(*(s.line(f"j{number}") for number in range(1, count + 1)))
    wait_for(lambda: len(s.states()) == count, "accepted")
    return s


def order(s) -> list[str]:
    """Resume the GPU, wait until all jobs have ended, and return their keys in the order of their starts."""
    s.cli("resume", "0")
    s.wait_ended(1)
    return [entry[1] for entry in s.ledger() if entry[0] == "start"]


@pytest.mark.smoke
def test_a_held_job_waits_over_a_restart_until_it_is_released(scheduler):
    s = waiting(scheduler)
    assert (
        s.cli("hold", "2-3").stdout
        == "job 2 is held; release it: gpujob release 2\njob 3 is held; release it: gpujob release 3\n"
    )
    told = s.cli("why", "2").stdout
    assert told.startswith("job 2 waits (hold-user): held by its owner; release it: gpujob release 2\n")
    assert "    gpujob first 2 && gpujob release 2 && gpujob resume 0   # " in told, "nothing less would start it now"
    s.kill()
    s.start()
    s.cli("resume", "0")
    wait_for(lambda: list(s.states().values()).count("done") == 2, "the others ran")
    assert s.states()[2] == s.states()[3] == "pending" and s.job(2)["reason_code"] == "hold-user"
    s.cli("release", "3")
    s.wait_state(3, "done")
    s.stop()
    assert s.cli("release", "2").stdout == "job 2 is released\n", "also without a daemon"
    assert "no scheduler is running" in s.cli("hold", "2").stderr
    s.cli("release", "2")
    assert s.cli("hold", "3", code=1).stderr.endswith(
        "gpujob: job 3 cannot be held: it is done, and only a waiting job can be held\n"
    )
    s.start()
    s.wait_ended(4)
    assert s.ledger()[-1][1] == "j2"


@pytest.mark.parametrize("running", [True, False])
def test_a_job_can_be_held_from_the_start(scheduler, running):
    """The contract's `submit --hold`: the job waits until it is released, with and without a scheduler at its submission."""
    s = scheduler(gpus=1)
    if running:
        s.start()
        assert "hold-user" in s.cli("submit", "--hold", "--dry-run", "--", "true").stdout
    assert s.cli("submit", "--hold", "--", "true").stdout == "1\n"
    assert s.cli("submit", "--", "true").stdout == "2\n"
    if not running:
        s.start()
    s.wait_state(2, "done")
    assert s.job(1)["state"] == "pending" and s.job(1)["reason_code"] == "hold-user"
    s.cli("release", "1")
    s.wait_state(1, "done")


@pytest.mark.smoke
def test_first_and_swap_change_the_order_of_starts(scheduler):
    s = waiting(scheduler, 5)
    assert s.cli("first", "5", "3").stdout == "job 5 is now first in the queue\njob 3 is now first in the queue\n"
    assert s.cli("swap", "1", "4").stdout == "jobs 1 and 4 have changed places\n"
    shown = [line.split()[0] for line in s.cli("status").stdout.split("WAITING")[1].splitlines()[1:6]]
    assert shown == ["5", "3", "4", "2", "1"], "status shows them as they will start"
    s.kill()
    s.start()
    assert order(s) == ["j5", "j3", "j4", "j2", "j1"]
    assert "swap takes two jobs, not 1 (1)" in s.cli("swap", "1", code=2).stderr
    assert (
        s.cli("first", "1", code=1).stderr
        == "gpujob: job 1 cannot be put first: it is done, and only a waiting job can be put first\n"
    )
    s.cli("swap", "1", "99", code=6)


def test_edit_changes_the_fields_of_a_waiting_job(scheduler):
    s = waiting(scheduler, 3)
    done = s.cli(
        "edit", "3", "--priority", "-5", "--label", "urgent", "--time", "4h", "--gpus", "0.5", "--allowed", "0"
    )
    assert done.stdout.startswith("job 3: ") and "priority 0 -> -5" in done.stdout and "time none -> 4 h" in done.stdout
    job = s.job(3)
    assert (job["priority"], job["label"], job["need"], job["allowed_gpus"]) == (-5, "urgent", 0.5, [0])
    assert s.cli("edit", "urgent", "--time", "", "--allowed", "any").returncode == 0
    assert s.job(3)["allowed_gpus"] is None
    assert s.cli("edit", "3", "--gpus", "2", code=3).stderr.startswith("gpujob: cannot edit job 3: needs 2")
    assert "--gpus: " in s.cli("edit", "3", "--gpus", "much", code=2).stderr
    assert s.cli("edit", "3", code=2).stderr.startswith("gpujob: no option is given")
    s.cli("edit", "9", "--priority", "1", code=6)
    s.cli("edit", "2", "--after", "2", code=3)
    s.cli("edit", "2", "--after-ok", "3")
    s.stop()
    assert s.cli("edit", "1", "--priority", "7").stdout == "job 1: priority 0 -> 7\n", "also without a daemon"
    s.start()
    assert order(s) == ["j3", "j2", "j1"]
    assert [event["kind"] for event in json.loads(s.cli("show", "1", "--json").stdout)["events"]].count("edited") == 1
    assert s.cli("edit", "1", "--priority", "1", code=1).stderr.startswith(
        "gpujob: cannot edit job 1: it is done, and only a waiting job"
    )


def test_edited_fields_survive_a_save_of_the_jobs_file(scheduler):
    """Fields changed by `edit` keep their values when an editor saves the jobs file with other values.

    The save makes the scheduler read all lines again.
    """
    s = waiting(scheduler, 2)
    s.cli("edit", "1", "--priority", "3")
    text = s.jobs_file.read_text()
    other = s.folder / "new"
    other.write_text("# saved again\n" + text.replace("0,", "1,", 2))
    other.rename(s.jobs_file)
    wait_for(lambda: s.job(2)["priority"] == 1, "job 2 follows its line")
    assert s.job(1)["priority"] == 3 and len(s.states()) == 2


def test_jobs_can_be_named_by_id_range_label_or_at_sign(scheduler):
    """Jobs can be named by id (`12`), range (`3-9`), label, or at sign.

    `@` names the newest job, and `@~1` names the job before the newest job.
    """
    s = waiting(scheduler, 4)
    s.cli("edit", "2", "--label", "base")
    shown = lambda word: json.loads(s.cli("show", word, "--json").stdout)["id"]  # noqa: E731
    assert [shown("@"), shown("@~1"), shown("@~3"), shown("base"), shown("2")] == [4, 3, 1, 2, 2]
    assert s.cli("cancel", "3-9").stdout == "job 3 was cancelled before it ran\njob 4 was cancelled before it ran\n"
    for word in ("@~4", "nobody", "7", "7-9", "@x", "@~", "0"):
        assert s.cli("cancel", word, code=6).stderr.count("\n") == 1
    s.cli("cancel", "9-7", code=2)


def test_reset_deletes_ended_jobs_and_runs_no_line_twice(scheduler):
    s = waiting(scheduler, 3)
    s.append("not a line")
    s.cli("resume", "0")
    s.wait_ended(3)
    s.cli("pause", "0")
    s.append(s.line("late"))
    wait_for(lambda: s.states().get(4) == "pending", "accepted")
    assert s.cli("reset").stdout == "forgot 3 ended jobs\n"
    assert s.states() == {4: "pending"} and s.status()["refused"] == [] and s.status()["counts"]["done"] == 0
    assert len(list((s.folder / "gpu_scheduler_logs").iterdir())) == 3, "logs stay"
    wait_for(lambda: json.loads((s.folder / "gpu_scheduler_state.json").read_text())["jobs"]["done"] == 0, "shown")
    other = s.folder / "new"
    other.write_text(s.jobs_file.read_text())
    other.rename(s.jobs_file)
    s.cli("resume", "0")
    s.wait_ended(1)
    assert s.cli("reset", "--yes").stdout == "forgot 1 ended job\n" and s.states() == {}
    s.stop()
    s.start()
    s.append(s.line("j1"))
    s.wait_ended(1)
    assert s.states() == {5: "done"} and s.starts("j1") == 2 and s.starts("j2") == s.starts("j3") == 1
    s.stop()
    assert s.cli("reset").stdout == "forgot 1 ended job\n"
    assert s.cli("reset").stdout == "forgot 0 ended jobs\n", "nothing is left"
    assert int(s.cli("submit", "--", "true").stdout) == 6, "no id is given out twice, with or without a scheduler"
    s.start()
    s.wait_state(6, "done")
    s.kill()
    assert s.cli("reset").stdout == "forgot 1 ended job\n"
    s.start()
    s.append(s.line("last"))
    s.wait_state(7, "done")


def test_swap_is_refused_under_order_short_without_a_scheduler(scheduler):
    """With `order: short`, `swap` is refused; the message is the same with and without a scheduler."""
    s = scheduler(gpus=1, order="short")
    s.start()
    s.cli("queue", "pause")
    s.append(s.line("a"), s.line("b"))
    wait_for(lambda: len(s.states()) == 2, "both")
    with_one = s.cli("swap", "1", "2", code=1)
    s.stop()
    (s.folder / "config.yaml").write_text("order: short\n")
    without = s.cli("swap", "1", "2", code=1)
    assert "order: short" in with_one.stdout + with_one.stderr
    assert not without.stdout and without.stderr.endswith(with_one.stderr)
