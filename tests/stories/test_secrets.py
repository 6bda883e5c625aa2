"""Secrets in commands and environments: the job gets them, and no output or non-private file contains them."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.stories.harness import wait_for
from tests.stories.secret_shapes import SECRET, SHAPES


def test_s15_no_output_or_readable_file_contains_a_secret(scheduler):
    """S15: No output and no file that others can read contains a secret.

    The secrets are in lines, submissions, commands files, labels and environments, in all forms of `secret_shapes.py`.
    The test does not check the output and the logs of jobs, because these are not masked. The jobs get their arguments
    unchanged.
    """
    s = scheduler(gpus=1, cpu_slots=8, commands_file="commands.txt")
    script = s.folder / "keep.sh"
    script.write_text('#!/bin/sh\nprintf "%s\\0" "$@" "$WANDB_KEY" > "got-$GPUJOB_ID"; exit 3\n')
    script.chmod(0o755)
    (s.folder / "commands.txt").write_text(f"echo CUDA out of memory --token={SECRET}; exit 9\n")
    plain = {name: words for name, words in SHAPES.items() if not {"\n", "'", '"', " "} & set("".join(words))}
    s.append(*(f'0,keep.sh,,"{" ".join(words)}";gpus=0' for words in plain.values()))
    s.append(f"0,gone.py,,--token={SECRET},0", f"x,a.py,,--token={SECRET}", f'0,a.py,,"--token={SECRET}')
    s.append(f"0,$HOME.py,,--password={SECRET} $X,0")
    s.append(f"0,token={SECRET}.sh,,x,0", f"0,keep.sh,PASSWORD={SECRET},x,0")  # script, environment do not exist
    s.environ["WANDB_KEY"] = f"{SECRET}env"
    s.start()
    wait_for(lambda: 1 in s.states(), "job 1 is the first line: no submission comes before it")
    others = [words for name, words in SHAPES.items() if name not in plain]
    for words in others:
        s.cli(
            "submit", "--cpu", "--env", f"API_TOKEN={SECRET}", "--label", f"t={words[0][:4]}", "--", str(script), *words
        )
    s.cli("submit", "--cpu", "--label", f"token={SECRET}", "--", "/no/such/program", f"--key={SECRET}")
    s.cli("edit", "@", "--label", f"secret={SECRET}", code=None)
    total = len(SHAPES) + 1
    wait_for(lambda: list(s.states().values()).count("failed") == total + 1, f"{total + 1} ended, {s.states()}")
    wait_for(lambda: len(s.status()["refused"]) == 2, "refused lines")
    waits = next(number for number, state in s.states().items() if state == "pending")
    for label in (f"token={SECRET}", f"password={SECRET}"):
        s.cli("edit", str(waits), "--label", label)
    everything = f"1-{max(s.states())}"
    shown = ""
    for words in (
        ["status"], ["status", "--json"], ["jobs"], ["jobs", "--json"], ["show", everything], ["show", everything, "--json"],
        ["why", everything], ["wait", everything, "--timeout", "0"], ["cancel", everything], ["hold", everything], ["release", everything],
        ["retry", "1"], ["swap", "1", "2"], ["screens"], ["config", "show", "--origin"],
    ):  # fmt: skip
        done = s.cli(*words, code=None)
        assert words[0] != "why" or "last lines of" in done.stdout or "its log is empty" in done.stdout
        shown += done.stdout + done.stderr
    assert shown.count("***") > 50 and SECRET not in shown, shown[max(0, shown.find(SECRET) - 300) :][:400]
    for words in (["cancel", f"token={SECRET[:-1]}"], ["logs", everything], ["doctor"], ["recover", "--dry-run"]):
        done = s.cli(*words, code=None)
        text = "".join(line for line in done.stdout.splitlines(True) if words[0] != "logs" or line.startswith("==>"))
        assert SECRET not in text + done.stderr, (words, text, done.stderr)  # without job output
    words = json.loads(s.cli("show", "1", "--json").stdout)["arguments"]
    assert words == ["--token=***"]
    said = "".join(line for line in s.said().splitlines(True) if not line.startswith("["))  # without job output
    assert SECRET not in said, said[max(0, said.find(SECRET) - 300) :][:400]
    again = "SELECT 1 FROM jobs WHERE id=1 AND attempt=2 AND state='failed'"
    wait_for(lambda: s.rows(again), "the end of the second attempt, which writes got-1 again")
    s.stop()
    may = {"store.db", "store.db-wal", "jobs.txt", "commands.txt"}  # they must contain the commands
    for path in filter(Path.is_file, s.folder.rglob("*")):
        own = path.name.startswith(("got-", "job_")) or path.name == "daemon.out"
        if path.name not in may and path.parent.name not in ("env", "attempts") and not own:
            assert SECRET.encode() not in path.read_bytes(), path
        if path.is_relative_to(s.folder / ".gpujob") or path.name.startswith("gpu_scheduler"):
            assert os.stat(path).st_mode & 0o777 == 0o600, path
    got = {tuple(path.read_bytes().decode().split("\0")[:-2]) for path in s.folder.glob("got-*")}
    assert got == set(SHAPES.values())  # every argument is unchanged
    assert (s.folder / "got-1").read_bytes().endswith(f"\0{SECRET}env\0".encode())
