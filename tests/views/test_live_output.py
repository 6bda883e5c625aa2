"""Tests of the output of jobs, as the scheduler prints it on its terminal."""

from __future__ import annotations

from pathlib import Path

from scheduler.core.log_message import LogMessage
from scheduler.views.live_output import Stream
from tests.stories.harness import wait_for


def test_an_unfinished_line_is_not_joined_with_output_after_a_truncation(tmp_path: Path) -> None:
    """If a log is truncated while its last line is unfinished, this line is printed as a line of its own.

    Output after the truncation begins on a new line.
    """
    log = tmp_path / "1.log"
    log.write_text("first\nhalf a li")
    shown: list[str] = []
    stream = Stream(shown.append)
    stream(LogMessage("job 1 runs", kind="started", job=1, log=str(log)))
    wait_for(lambda: "[1] first\n" in "".join(shown), "the first line")
    log.write_text("new\n")
    wait_for(lambda: "new" in "".join(shown), "the line after the truncation")
    stream.close()
    assert "".join(shown).endswith("[1] first\n[1] half a li\n[1] new\n")
