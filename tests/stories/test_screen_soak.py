"""The soak of test_crashes.py with terminal sessions: daemons and shims are killed, the same judge."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from scheduler.runners.processes import seen
from tests.stories.harness import LONG, wait_for
from tests.stories.test_crashes import _no_gpu_above_1000


def kill_some_shim(s, dice: random.Random) -> int:
    """Kill the shim of one running job, if there is one: the job's id, or 0."""
    running = s.rows("SELECT id, pid, ticks FROM jobs WHERE state='running' AND pid IS NOT NULL")
    if not running:
        return 0
    job_id, pid, ticks = dice.choice(running)
    found = seen(pid)
    above = seen(found.parent) if found is not None and found.ticks == ticks else None
    if above is None:
        return 0
    try:
        with open(f"/proc/{above.pid}/cmdline", "rb") as stream:
            if b"shim.py" not in stream.read():
                return 0
        os.kill(above.pid, signal.SIGKILL)
    except OSError:
        return 0  # it has just ended by itself
    return int(job_id)


class Closed:
    """The ledger without the starts of jobs that were ended before they could write their last line."""

    def __init__(self, s) -> None:
        self.s = s

    def ledger(self) -> list[list[str]]:
        ended = {entry[7] for entry in self.s.ledger() if entry[0] == "end"}
        return [entry for entry in self.s.ledger() if entry[7] in ended]


@pytest.mark.soak
def test_screen_jobs_under_daemon_kills_and_shim_kills(screens):
    """100 jobs (long form: 200) on 4 declared GPUs: none lost of those left alone, none twice, no ending invented for the others."""
    jobs, daemons, shims = (200, 40, 30) if LONG else (100, 20, 15)
    seed = int(os.environ.get("GPUJOB_SEED", "20261121"))
    dice = random.Random(seed)
    print(f"seed {seed}")
    s = screens(gpus=4)
    codes = {}
    lines = []
    for n in range(jobs):
        codes[f"j{n}"] = dice.choice([0, 0, 0, 1, 3, 77, 137, 255, "s9", "s15", "s11"])
        share = dice.choice(["0.25", "0.5", "0.5", "1", "2"])
        lines.append(s.line(f"j{n}", code=codes[f"j{n}"], seconds=round(dice.uniform(0.1, 2), 2)) + f";gpus={share}")
    s.start()
    daemon_kills = given = tries = 0
    hit: set[int] = set()
    while daemon_kills < daemons or given < jobs or (len(hit) < shims and tries < jobs):
        batch = lines[given : given + dice.randint(1, 8)]
        if batch:
            s.append(*batch)
            given += len(batch)
        time.sleep(dice.uniform(0.05, 0.5))
        tries += 1
        if len(hit) < shims and dice.random() < 0.5:
            hit |= {kill_some_shim(s, dice)} - {0}
        elif daemon_kills < daemons:
            s.kill()
            daemon_kills += 1
            s.start()
    states = s.wait_ended(jobs, 170)
    assert len(states) == jobs and daemon_kills == daemons and hit
    ended = {entry[1] for entry in s.ledger() if entry[0] == "end"}
    wrong = []
    for job_id, spec, state, outcome, exit_code, number, notes in s.rows(
        "SELECT id, spec, state, outcome, exit_code, signal, notes FROM jobs"
    ):
        key = next(k for k in codes if f'"{k}"' in spec)
        code = codes[key]
        expected = ("signal", None, int(code[1:])) if isinstance(code, str) else ("exit", code, None)
        told = (outcome, exit_code, number)
        starts = s.starts(key)
        if job_id in hit:  # its end was brought about, perhaps before its first line, or it had just ended by itself
            fine = told == expected or (state == "failed" and (outcome == "lost" or told == ("signal", None, 1)))
            fine = fine and starts <= 1 and (state != "done" or key in ended)
        else:
            fine = told == expected and starts == 1
        if not fine:
            wrong.append((job_id, key, job_id in hit, expected, told, starts, notes))
    assert not wrong, (seed, wrong, s.said()[-4000:])
    _no_gpu_above_1000(Closed(s))
    wait_for(lambda: all(g["allocated"] == 0 for g in s.status()["gpus"]), "GPUs free")
    s.wait_no_session()
