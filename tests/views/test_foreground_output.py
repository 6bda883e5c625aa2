"""Tests of the output of jobs, as the scheduler prints it on its terminal."""

from __future__ import annotations

from pathlib import Path

from scheduler.core.log_message import LogMessage
from scheduler.views.foreground_output import MOST_KEPT, ForegroundOutput
from tests.stories.harness import wait_for


def test_an_unfinished_line_is_not_joined_with_output_after_a_truncation(tmp_path: Path) -> None:
    """If a log is truncated while its last line is unfinished, this line is printed as a line of its own.

    Output after the truncation begins on a new line.
    """
    log = tmp_path / "1.log"
    log.write_text("first\nhalf a li")
    shown: list[str] = []
    stream = ForegroundOutput(shown.append)
    stream(LogMessage("job 1 runs", kind="started", job=1, log=str(log)))
    wait_for(lambda: "[1] first\n" in "".join(shown), "the first line")
    log.write_text("new\n")
    wait_for(lambda: "new" in "".join(shown), "the line after the truncation")
    stream.close()
    assert "".join(shown).endswith("[1] first\n[1] half a li\n[1] new\n")


def test_much_output_is_printed_in_several_pieces(tmp_path: Path) -> None:
    """A text that is printed at once has little more than ``MOST_KEPT`` characters, so that it needs little memory."""
    shown: list[str] = []
    stream = ForegroundOutput(shown.append)
    for number in range(40):
        log = tmp_path / f"{number}.log"
        log.write_text("x" * 99 + "\n" * 1 + ("y" * 99 + "\n") * 300)
        stream(LogMessage(f"job {number} done", kind="done", job=number, log=str(log)))
    stream.close(30.0)
    text = "".join(shown)
    assert text.count("y" * 99) == 40 * 300 and text.count(" done\n") == 40
    assert max(map(len, shown)) < 3 * MOST_KEPT and len(shown) < 40
