"""Names, arguments, labels, and job logs cannot send control sequences to the user's terminal."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
from collections.abc import Callable

from scheduler.client.client import SchedulerClient
from scheduler.core.job import JobSpec
from scheduler.core.model_table import ModelTable
from tests.stories.harness import Scheduler, wait_for

CSI = [f"\x1b[{text}" for text in (
    "2J", "H", "31m", "1;31;5m", "0m", "?25l", "?1049h", "6n", "c", "5i", "10;10H", "2K", "1A", "999D", "K", "?1000h", "20t",
    "3J", "s", "u", "4h", "!p", "?2004h", "38;5;196m", "8m",
)]  # fmt: skip
OSC = [f"\x1b]{text}" for text in (
    "0;title\x07", "2;title\x1b\\", "8;;http://x\x1b\\link", "52;c;cm0gLXJm\x07", "4;1;red\x07", "1337;File=x\x07", "9;note\x07",
    "777;notify;a;b\x07", "10;?\x07", "50;x\x07",
)]  # fmt: skip
OTHER = [
    "\x1bc", "\x1b7", "\x1b8", "\x1bP+q\x1b\\", "\x1b_x\x1b\\", "\x1b^x\x1b\\", "\x1b(0", "\x1b#8", "\x1bM", "\x1bZ", "\x1b=",
    "\x9b31m", "\x9d0;x\x9c", "\x90x\x9c", "\x85", "\r", "\b\b\b", "\t", "\x0b", "\x0c", "\x0e", "\x07", "\x7f", "a\nb",
    "\u202egnp.exe",
]  # fmt: skip
CORPUS = [*CSI, *OSC, *OTHER]
PLAYS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def test_s17_no_escape_sequence_reaches_the_terminal(scheduler: Callable[..., Scheduler]) -> None:
    """S17, C14: No verb sends one of 60 control sequences to the terminal.

    The sequences are in script names, arguments, labels, folders, GPU names and job logs.
    """
    assert len(CORPUS) == 60
    s = scheduler(gpus=1, cpu_slots=4, log_dir="logs \x1b[31m")
    s.start()
    client = SchedulerClient(str(s.folder / "gpu_scheduler_state.json"))
    for number, text in enumerate(CORPUS):
        script = s.folder / f"{number} {text.replace('/', '_')}.sh"
        script.write_text("#!/bin/sh\nprintf 'says %s here\\n' \"$1\"\nexit 1\n")
        script.chmod(0o755)
        client.submit(JobSpec(source="submit", script=str(script), arguments=(text, "x"), label=text if number % 2 else "",
                            gpus="0", cwd=str(s.folder)), dict(os.environ), ModelTable())  # fmt: skip
    s.wait_ended(60)
    s.append("0,gone\x1b[31m.py,,--x \x1b[2J,0", "0,\x1b[31m\x9b,b\x1b[0m,c,9", "x\x1b[2J,a.py")
    wait_for(lambda: len(s.states()) == 61, "a job that waits for its script")
    wait_for(lambda: s.status()["refused"], "a refused line")
    with contextlib.closing(sqlite3.connect(s.folder / ".gpujob" / "store.db", timeout=30)) as store:
        store.execute("UPDATE gpus SET name=?", ("".join(CORPUS),))
        store.commit()
    shown = {
        " ".join(words): s.cli(*words, code=None)
        for words in (
            ["status"], ["jobs"], ["show", "1-61"], ["why", "1-61"], ["screens"], ["cancel", "1-61"], ["retry", "1", "2"],
            ["hold", "61"], ["edit", "1", "--label", "\x1b[2J"], ["logs", "\x1b[2J"], ["cancel", "a\x1b[2J"],
            ["jobs", "--state", "\x1b[2J"], ["\x1b[2J"], ["status", "--\x1b[2J"], ["pause", "\x1b[2J"], ["queue", "\x1b"],
            ["--state-file", "/x\x1b[2J/y", "jobs"], ["add", "x.py", "--priority", "\x1b"], ["start", "--watch", "\x1b"],
            ["submit", "--env", "\x1b", "x"], ["submit", "--cwd", "/\x1b", "--", "a\x1b b"], ["wait", "\x1b"],
        )
    }  # fmt: skip
    for words, done in shown.items():
        found = PLAYS.search(done.stdout + done.stderr)
        assert found is None, f"{words}: {(done.stdout + done.stderr)[max(0, found.start() - 60) : found.end() + 20]!r}"
    assert "\\x1b[2J" in shown["status"].stdout and "\\x1b[31m" in shown["why 1-61"].stdout
    for job in (1, 2):
        s.wait_state(job, "failed")  # `retry` has started them again, and their new logs may not exist yet
    logs = s.cli("logs", "1-61").stdout
    heads = [line for line in logs.split("\n") if line.startswith("==>")]
    assert len(heads) >= 60 and PLAYS.search("".join(heads)) is None, heads
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", logs)
    for more in (["doctor"], ["recover", "--dry-run"], ["config", "show", "--origin"]):
        done = s.cli(*more, code=None)
        assert PLAYS.search(done.stdout + done.stderr) is None, (more, done.stdout, done.stderr)
    for verb in (["status", "--json"], ["jobs", "--json"], ["show", "1-61", "--json"]):
        assert not re.search(r"[\x00-\x09\x0b-\x1f]", s.cli(*verb).stdout)
    said = s.said().replace("\t", "")  # `start` prints the tabs of a job log unchanged
    assert PLAYS.search(said) is None, said[max(0, PLAYS.search(said).start() - 80) :][:200]  # type: ignore[union-attr]
