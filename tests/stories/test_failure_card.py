"""The failure card: why a job failed, and what differs from the last good run of the same script."""

import json
import subprocess

from tests.stories.harness import wait_for

TRAIN = """\
import os
{change}
if os.environ.get("MODE") == "bad":
    raise ValueError("no batch of this size")
if os.environ.get("MODE") == "silent":
    os._exit(3)
"""
SECRETS = ("s3cr3t-one", "s3cr3t-two", "v4lue-one", "v4lue-two")


def commit(folder):
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *who, "commit", "-q", "--allow-empty", "-m", "x"], cwd=folder, check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, check=True, capture_output=True, text=True)
    return head.stdout[:7]


def submit(s, mode, *words, gpus="0.5", env=()):
    options = [part for item in (f"MODE={mode}", *env) for part in ("--env", item)]
    job = int(s.cli("submit", "--gpus", gpus, *options, "--", "python", "train.py", *words).stdout)
    s.wait_state(job, "done", "failed")
    return job


def test_a_failed_job_tells_what_differs_from_the_last_good_run(scheduler):
    """`show`, `why`, `jobs`, `status` and JSON tell the class and the differences, and never the value of a secret."""
    s = scheduler(gpus=2)
    script = s.folder / "train.py"
    script.write_text(TRAIN.format(change="old = 1"))
    subprocess.run(["git", "init", "-q"], cwd=s.folder, check=True)
    first = commit(s.folder)
    s.start()
    assert submit(s, "bad") == 1
    assert s.job(1)["failure"]["differs"] == ["no earlier run of this script is known to have ended well"]
    submit(s, "good", "--lr", "0.01", "--token", SECRETS[0], env=(f"API_KEY={SECRETS[2]}", "OLD=1"))
    script.write_text(TRAIN.format(change="new = 2"))
    second = commit(s.folder)
    env = (f"API_KEY={SECRETS[3]}", "NEW=1")
    submit(s, "bad", "--lr", "0.1", "--token", SECRETS[1], "--fast", gpus="1", env=env)
    failure = s.job(3)["failure"]
    differs = [
        "arguments: --lr 0.1 instead of --lr 0.01, another value of --token, added --fast",
        "need: one whole GPU instead of 0.5 of one GPU",
        "environment: API_KEY changed, MODE changed, NEW added, OLD removed",
        f"code: train.py has changed since (commit {first} → {second})",
    ]
    assert (failure["good_run"], failure["differs"]) == (2, differs)
    assert "ValueError: no batch of this size" in (failure["line"], failure["error"])
    shown, why = s.cli("show", "3").stdout, s.cli("why", "3").stdout
    for text in differs:
        assert text in shown and text in why
    assert "job 2, the last good run" in shown and "job 2, the last good run" in why
    line = f"{failure['class']}: ValueError: no batch of this size"
    assert line in s.cli("jobs").stdout and line in s.cli("status").stdout

    submit(s, "silent")
    failure = s.job(4)["failure"]
    assert (failure["class"], failure["good_run"], failure["line"]) == ("unknown", 2, "")
    submit(s, "good")
    assert s.job(5)["failure"] is None
    s.kill()  # the last good run is in the store
    s.start()
    submit(s, "silent")
    assert s.job(6)["failure"]["differs"] == ["environment: MODE changed"] and s.job(6)["failure"]["good_run"] == 5

    told = [s.cli(*words).stdout for words in (("show", "3", "--json"), ("why", "3", "--json"), ("status", "--json"))]
    told += [shown, why, s.cli("jobs").stdout, s.cli("status").stdout, s.said()]
    told.append(json.dumps(s.rows("SELECT id, items FROM fact_sets")))
    assert not [secret for secret in SECRETS for text in told if secret in text]
    s.cli("reset")
    wait_for(lambda: not s.rows("SELECT * FROM good_runs"), "the good runs are deleted with their jobs")


def test_a_job_that_runs_again_compares_with_its_own_earlier_attempt(scheduler):
    """A good run may be an earlier attempt of the same job; facts about a running attempt survive a kill."""
    s = scheduler(gpus=1)
    flag, program = s.folder / "flag", s.folder / "p.sh"
    program.write_text(f"#!/bin/sh\nwhile [ -e {s.folder}/wait ]; do sleep 0.02; done\n[ ! -e {flag} ]\n")
    program.chmod(0o755)
    s.start()
    s.cli("submit", "--", str(program))
    s.wait_state(1, "done")
    flag.write_text("")
    (s.folder / "wait").write_text("")
    program.write_text(program.read_text() + "exit 1\n")
    s.cli("retry", "1")
    s.wait_state(1, "running")
    s.kill()
    s.start()
    (s.folder / "wait").unlink()
    s.wait_state(1, "failed")
    assert s.job(1)["failure"]["differs"] == ["code: p.sh has changed since"]
    assert "an earlier attempt, the last good run" in s.cli("why", "1").stdout
