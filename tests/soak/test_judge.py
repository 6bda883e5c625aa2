"""Tests of the judge of the soak: it finds the error in each falsified history."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.soak.history import Cancel, History, Kill, Life, Row, Wish
from tests.soak.judge import judge

SUPERVISOR, DAEMON = 50, 40


def good() -> History:
    """Return a history without errors: three jobs that end with 7, by signal 15 and with 0, and a kill of a daemon."""
    wishes = [
        Wish("k0", "echo", 0.1, 7, None, "plain", "0.5", 0, acknowledged=True),
        Wish("k1", "submit", 0.1, None, 15, "plain", "0.5", 0, acknowledged=True, id=2),
        Wish("k2", "add", 0.1, 0, None, "orphan", "1", 0, acknowledged=True),
    ]
    ledger = [
        line.split()
        for line in (
            f"start k0 1 1 100 {SUPERVISOR} 0 0.5 10.0",
            f"start k1 2 1 101 {SUPERVISOR} 0 0.5 10.05",
            f"end k0 1 1 100 {SUPERVISOR} 0 0.5 10.1",
            f"end k1 2 1 101 {SUPERVISOR} 0 0.5 10.15",
            f"start k2 3 1 102 {SUPERVISOR} 0 1 10.2",
            f"end k2 3 1 102 {SUPERVISOR} 0 1 10.3",
            f"gone k2 3 1 102 {SUPERVISOR} 0 1 10.7",
        )
    ]
    rows = [
        Row(1, ["k0", "0.1", "7", "plain", "/l", "k0.ok"], "failed", "exit", 7, None, 9.9),
        Row(2, ["k1", "0.1", "-15", "plain", "/l", "k1.ok"], "failed", "signal", None, 15, 9.9),
        Row(3, ["k2", "0.1", "0", "orphan", "/l", "k2.ok"], "done", "exit", 0, None, 10.1),
    ]
    lives = [Life(1, DAEMON, "direct", 5.0, 20.0), Life(2, 60, "direct", 20.5)]
    return History(7, wishes, ledger, lives, [Kill("daemon", DAEMON, 20.0, 1)], [], rows, [])


def lose(history: History, number: int = 0) -> Row:
    """Give the outcome LOST to the job at index ``number`` of the history; return its row."""
    row = history.rows[number]
    row.state, row.outcome, row.exit_code, row.signal = "failed", "lost", None, None
    return row


def a_double_start(history: History) -> None:
    history.ledger.append(["start", "k0", "1", "2", "103", str(SUPERVISOR), "0", "0.5", "11.0"])


def a_wrong_code(history: History) -> None:
    history.rows[0].exit_code = 8


def a_wrong_signal(history: History) -> None:
    history.rows[1].signal = 9


def done_by_guess(history: History) -> None:
    history.ledger = [entry for entry in history.ledger if entry[:2] != ["end", "k2"]]


def done_that_never_began(history: History) -> None:
    history.ledger = [entry for entry in history.ledger if entry[1] != "k2"]


def a_gpu_above_1000_parts(history: History) -> None:
    history.ledger.insert(1, history.ledger.pop(4))


def a_gpu_given_while_an_orphan_lives(history: History) -> None:
    history.ledger.insert(6, ["start", "k3", "4", "1", "104", str(SUPERVISOR), "0", "0.25", "10.4"])
    history.ledger.append(["end", "k3", "4", "1", "104", str(SUPERVISOR), "0", "0.25", "10.8"])
    history.wishes.append(Wish("k3", "echo", 0.1, 0, None, "plain", "0.25", 0, acknowledged=True))
    history.rows.append(Row(4, ["k3", "0.1", "0", "plain", "/l", "k3.ok"], "done", "exit", 0, None, 10.3))


def a_lost_line(history: History) -> None:
    history.wishes.append(Wish("k3", "echo", 0.1, 0, None, "plain", "1", 0, acknowledged=True))


def a_line_that_became_two_jobs(history: History) -> None:
    first = history.rows[0]
    history.rows.append(Row(9, first.words, "cancelled", "cancelled", None, None, 0.0))
    history.cancels.append(Cancel(9, 11.0, 0))


def another_id_than_submit_said(history: History) -> None:
    history.rows[1].id = 5
    for entry in history.ledger:
        entry[2] = "5" if entry[1] == "k1" else entry[2]


def a_job_of_half_a_line(history: History) -> None:
    history.rows.append(Row(9, ["k1"], "failed", "exit", 97, None, 10.0))


def a_job_that_never_ends(history: History) -> None:
    history.rows[0].state, history.rows[0].outcome, history.rows[0].exit_code = "running", None, None


def lost_with_nobody_killed(history: History) -> None:
    lose(history)


def lost_with_the_supervisor_killed_and_the_daemon_alive(history: History) -> None:
    lose(history)
    history.kills.append(Kill("supervisor", SUPERVISOR, 10.05, 1))


def lost_with_the_supervisor_killed_long_after(history: History) -> None:
    lose(history)
    history.lives[0].ended = 10.05
    history.kills.append(Kill("supervisor", SUPERVISOR, 15.0, 0))


def cancelled_by_nobody(history: History) -> None:
    history.rows[0].state, history.rows[0].outcome, history.rows[0].exit_code = "cancelled", "cancelled", None


def a_hangup_with_no_shim_killed(history: History) -> None:
    row = history.rows[0]
    row.outcome, row.exit_code, row.signal = "signal", None, 1


DOCTORED: list[tuple[Callable[[History], None], str]] = [
    (a_double_start, "k0: started 2 times"),
    (a_wrong_code, "k0, job 1: a wrong ending"),
    (a_wrong_signal, "k1, job 2: a wrong ending"),
    (done_by_guess, "k2, job 3: an ending that the job did not write down"),
    (done_that_never_began, "k2, job 3: an ending, and it never began"),
    (a_gpu_above_1000_parts, "GPU 0 at 10.2: {'k0': 500, 'k2': 1000}"),
    (a_gpu_given_while_an_orphan_lives, "GPU 0 at 10.4: {'k2': 1000, 'k3': 250}"),
    (a_lost_line, "k3: acknowledged (echo), and neither a job nor a refused line"),
    (a_line_that_became_two_jobs, "k0: 2 jobs"),
    (another_id_than_submit_said, "k1: submit said job 2"),
    (a_job_of_half_a_line, "jobs that nobody wished"),
    (a_job_that_never_ends, "k0, job 1: has not ended"),
    (lost_with_nobody_killed, "k0, job 1: lost, though its end could be known"),
    (lost_with_the_supervisor_killed_and_the_daemon_alive, "k0, job 1: lost, though its end could be known"),
    (lost_with_the_supervisor_killed_long_after, "k0, job 1: lost, though its end could be known"),
    (cancelled_by_nobody, "k0, job 1: cancelled, and nobody said so"),
    (a_hangup_with_no_shim_killed, "k0, job 1: a wrong ending"),
]


@pytest.mark.parametrize(("doctor", "said"), DOCTORED, ids=[doctor.__name__ for doctor, _ in DOCTORED])
def test_each_falsified_history_is_detected(doctor: Callable[[History], None], said: str) -> None:
    """Invariants 1 to 6 of the soak: The judge finds no error in a correct history, and finds each falsification."""
    history = good()
    assert judge(history) == []
    doctor(history)
    assert any(one.startswith(said) for one in judge(history)), judge(history)


def test_the_judge_accepts_jobs_that_may_be_lost() -> None:
    """P5: The judge accepts a lost job if its supervisor and the daemon were killed at about the same time.

    The judge also accepts a job from a line that a full disk cut off, and an acknowledged line that the scheduler
    refused.
    """
    for at, ended in ((10.05, 10.06), (10.05, 10.04), (10.12, 10.9)):
        history = good()
        lose(history)
        lose(history, 1)
        history.lives[0].ended = ended
        history.kills.append(Kill("supervisor", SUPERVISOR, at, 1))
        assert judge(history) == []
    history.rows.append(Row(9, ["k7"], "failed", "exit", 97, None, 10.0))
    history.wishes.append(Wish("k7", "echo", 0.1, 0, None, "plain", "1", 0, torn=True))
    history.refused.append("0,/job.sh,,k8 0.1")
    history.wishes.append(Wish("k8", "echo", 0.1, 0, None, "plain", "1", 0, acknowledged=True))
    assert judge(history) == []


def test_the_judge_accepts_a_lost_job_if_its_shim_was_killed_at_the_start() -> None:
    """J10: If a shim was killed before it recorded the start of its job, the judge accepts that this job is lost.

    The judge does not accept that another job is lost, or that this job is lost for another reason.
    """
    history = good()
    history.ledger = [entry for entry in history.ledger if entry[1] != "k0"]
    row = lose(history)
    history.kills.append(Kill("shim", 77, 10.05, 1, job=1))
    row.notes = '["lost: its supervisor was killed before it recorded the start"]'
    assert judge(history) == []
    history.kills[-1].job = 2
    assert judge(history)
    history.kills[-1].job, row.notes = (
        1,
        '["lost: its supervisor was killed before it recorded the exit code"]',
    )
    assert judge(history)


def test_the_judge_accepts_an_end_by_sighup_if_the_shim_was_killed() -> None:
    """B02: The judge accepts that a job ends by SIGHUP if its shim was killed."""
    history = good()
    a_hangup_with_no_shim_killed(history)
    history.kills.append(Kill("shim", 77, 10.05, 1, job=1))
    assert judge(history) == []


def test_a_saved_history_is_read_back_unchanged(tmp_path: Path) -> None:
    """A history that was saved is read unchanged, and can be judged again."""
    history = good()
    history.save(tmp_path / "history.json")
    kept = History.load(tmp_path / "history.json")
    assert (kept.ledger, kept.rows, kept.kills) == (history.ledger, history.rows, history.kills) and judge(kept) == []
    a_wrong_code(kept)
    assert judge(kept)
